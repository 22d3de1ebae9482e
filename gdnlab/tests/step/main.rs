//! The training step on a GPU against the float64 one on the CPU: `cargo test --test step -- --ignored` where there is a GPU.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod case;
mod same_bits;
mod speed;
mod training;
mod truth;
