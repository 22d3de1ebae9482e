//! The layers of a language model on a GPU against those in float64: `cargo test --test layers -- --ignored` where there is
//! a GPU.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod device;
mod gdn;
mod optimizer;
mod rows;
mod token;
