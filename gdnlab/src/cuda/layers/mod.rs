//! The layers of a language model around its products and its mixer, forward and backward, on a GPU.
//!
//! The mathematics is that of [`reference`](mod@crate::reference), the kernels are in `kernels/`, one file for each operator.
//! Activations and their gradients are bf16, all arithmetic is binary32, and so are vectors, the taps of a convolution and
//! the gradients of all parameters. What is bound by memory is fused with its neighbours, and what a backward needs and the
//! forward has not kept is written by the backward itself.
//!
//! | operator | computes |
//! |---|---|
//! | [`RmsNorm`] | the addition to the residual stream, and its norm |
//! | [`Rope`] | the rotation of q and k, in place |
//! | [`ShortConv`] | GDN's convolution and SiLU, from a fused projection to q, k and v |
//! | [`Widen`] | GDN's raw gates, from the fused projection to binary32 and back |
//! | [`GatedNorm`] | the norm and the gate behind GDN |
//! | [`SwiGlu`] | the product in the middle of the MLP |
//! | [`Embedding`] | look-up, and a sum over equal tokens |
//! | [`CrossEntropy`] | loss and gradient in the place of the logits |
//! | [`AdamW`] | the norm of the gradient, clipping, and the step of all parameters |
//!
//! Memory is named by [`View`]s. A call checks their lengths; that they name memory that lives is the caller's promise, so
//! every call is unsafe. Two runs give the same bits: no sum is taken with atomics.

pub(super) mod adamw;
pub(super) mod cross_entropy;
pub(super) mod embedding;
pub(super) mod gated_norm;
pub(super) mod part_sums;
pub(super) mod rms_norm;
pub(super) mod rope;
pub(super) mod short_conv;
pub(super) mod swiglu;
mod view;
pub(super) mod widen;

pub use adamw::{AdamW, AdamWStep, GradientNorm, OptimizerStep};
pub use cross_entropy::{CrossEntropy, CrossEntropyCall};
pub use embedding::{ByToken, Embedding, EmbeddingBackward, EmbeddingForward};
pub use gated_norm::{GatedNorm, GatedNormBackward, GatedNormForward};
pub use rms_norm::{Addition, RmsNorm, RmsNormBackward, RmsNormForward};
pub use rope::Rope;
pub use short_conv::{Qkv, ShortConv, ShortConvBackward, ShortConvForward, ShortConvSizes};
pub use swiglu::{SwiGlu, SwiGluBackward};
pub use view::{Columns, View};
pub use widen::{RawGates, Widen};

use super::Grid;
use crate::{Error, Result};

/// Elements of a 16-byte access to bf16, of which every width is a multiple.
pub const ACCESS: usize = 8;

/// A launch of as many blocks as `count` pieces of work need, `per_block` of them each.
fn grid(operator: &str, count: usize, per_block: usize, threads: u32) -> Result<Grid> {
    let blocks = i32::try_from(count.div_ceil(per_block)).map_err(|_| too_large(operator, count))?;
    Ok(Grid { blocks: [blocks as u32, 1, 1], threads, ..Grid::default() })
}

/// A number as the kernels take it.
fn counted(operator: &str, number: usize) -> Result<i32> {
    i32::try_from(number).map_err(|_| too_large(operator, number))
}

fn too_large(operator: &str, number: usize) -> Error {
    Error::input(format!("{operator}: a size of {number}: expected less than 2^31; use a smaller batch"))
}

/// Refuses a width that is no whole number of accesses.
fn whole_accesses(operator: &str, name: &str, width: usize) -> Result<()> {
    if width > 0 && width.is_multiple_of(ACCESS) {
        return Ok(());
    }
    Err(Error::input(format!("{operator}: {name} = {width}: expected a multiple of {ACCESS} above 0")))
}

#[cfg(test)]
mod tests;
