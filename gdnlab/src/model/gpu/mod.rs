//! Training on a GPU: the whole step in one CUDA graph.
//!
//! The model, the names of its parameters, the text, the optimizer and the checkpoints are those of the training on a CPU
//! ([`super::train`]), and its float64 step is the truth for this one. Weights, moments and gradients of weights are
//! binary32; activations, their gradients, and the copies of the weights that products take are bf16; products are
//! cuBLASLt's ([`crate::cuda::Matmul`]), all else are kernels of this crate.
//!
//! Of each block the forward keeps what the backward cannot compute again element by element: the residual stream before
//! both halves, the projections (of GDN before the convolution), what the mixer's heads give, and the two halves of the
//! SwiGLU. Logits are held for a slice of the tokens at a time, and their gradients take their place.

mod arena;
mod checkpoint;
mod inputs;
mod memory;
mod mixer;
mod products;
mod sizes;
mod step;
mod tensors;
mod training;

pub use training::{GpuOptions, GpuTraining, LastStep, train};
