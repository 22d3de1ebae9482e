//! The language models of the ladder: their sizes, their parameters, and their training on a CPU in float64.
//!
//! [`Model::loss_and_grads`] is the truth for a training step elsewhere: loss and every gradient from the layers of
//! [`reference`](crate::reference), under the names of [`config::ModelConfig::parameter_tensors`]. [`train`](mod@train)
//! takes such steps on a [`text`] with [`adamw`], and stops and goes on to the same bits. [`gpu`] does the same on a GPU.
//! [`infer`] reads text with a trained model, the recurrence in any kernel; [`capture`] tells what a recurrence is called
//! with.

pub mod adamw;
mod attention;
mod block;
pub mod capture;
mod checkpoint;
pub mod config;
mod exact;
mod gdn;
pub mod gpu;
pub mod infer;
mod layer;
pub mod parameters;
mod step;
pub mod text;
pub mod train;

pub use layer::NORM_EPS;
pub use parameters::{Grads, Parameters};
pub use step::Model;
