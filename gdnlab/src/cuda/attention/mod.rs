//! Causal softmax attention on a GPU, forward and backward, without ever storing the scores.
//!
//! The mathematics is that of [`reference::attention`](crate::reference::attention), with as many heads of k and v as of q;
//! the kernels are in `kernels/attention_*.cu`, whose comments have the equations of each step. q, k, v, o and their
//! gradients are bf16, products accumulate in binary32, and the log-sum-exp of each row of scores is kept in binary32 for
//! the backward.
//!
//! | kernel | computes |
//! |---|---|
//! | `attention_forward` | o and the log-sum-exp |
//! | `attention_delta` | `do . o` of every row, for the backward |
//! | `attention_backward_queries` | dq |
//! | `attention_backward_keys` | dk and dv |
//!
//! All but the second exist twice: compute capability 9.0 has matrix and copy instructions of its own, which the kernels
//! named `*_hopper` use ([`Path`]).
//!
//! Two runs give the same bits: no sum is taken with atomics.
//!
//! Two others are there to compare with: [`MathAttention`], which stores the scores, and [`CudnnAttention`], NVIDIA's library.

mod cudnn;
mod heads;
mod hopper;
pub(in crate::cuda) mod math;
mod plan;
mod setup;

pub use cudnn::CudnnAttention;
pub use heads::{Heads, Rows};
pub use math::MathAttention;
pub use plan::{Attention, Path};
pub use setup::{Backward, Forward, HEAD_DIMS, Setup};

use super::{Build, Operator, source};
use crate::Result;

fn build(file: &str, head_dim: usize) -> Result<Build> {
    Ok(Build { source: source(file)?, defines: vec![("HEAD_DIM", head_dim.to_string())] })
}

/// Every file for every head dimension.
fn builds() -> Result<Vec<Build>> {
    let files = ["attention_forward", "attention_forward_hopper", "attention_backward", "attention_backward_hopper"];
    files.iter().flat_map(|file| HEAD_DIMS.map(|dim| build(file, dim))).collect()
}

/// What the tests have to know.
pub(super) const OPERATOR: Operator = Operator {
    name: "attention",
    builds,
    parameters: &[
        ("attention_forward", size_of::<plan::Params>()),
        ("attention_forward_hopper", size_of::<hopper::ForwardParams>()),
        ("attention_delta", size_of::<plan::Params>()),
        ("attention_backward_queries", size_of::<plan::Params>()),
        ("attention_backward_keys", size_of::<plan::Params>()),
        ("attention_backward_queries_hopper", size_of::<hopper::BackwardParams>()),
        ("attention_backward_keys_hopper", size_of::<hopper::BackwardParams>()),
    ],
};

#[cfg(test)]
mod tests;
