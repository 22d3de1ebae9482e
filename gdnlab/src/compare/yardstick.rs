//! What a right kernel of a mode errs on one problem: the limit for inputs that are hard for everyone.

use super::{Comparison, compare_call};
use crate::chunked::Chunked;
use crate::kernel::Kernel;
use crate::precision::{Format, Intermediate, Policy, Product};
use crate::problem::{Inputs, Results, Tensor};
use crate::{Error, Result};

/// Tokens per chunk of the kernel that is run.
const CHUNK: usize = 64;

/// Right kernels of one mode that differ in chunk size and in the order of operations: their RMS errors were up to 2.4
/// times this one's with chunks of 16 to 64, and 3.3 times with chunks of 128, over all input regimes.
pub(super) const MARGIN: f64 = 3.0;

/// The errors that the emulated chunk form of `mode` makes on `inputs`, whose truth is `truth`.
///
/// # Errors
/// [`Error::Input`] where there is no such mode or `inputs` do not validate.
pub(super) fn yardstick(mode: &str, inputs: &Inputs, truth: &[(&str, &Tensor)]) -> Result<Vec<Comparison>> {
    let kernel = Chunked::new(mode, policy(mode)?, CHUNK)?;
    let has_gradients = truth.iter().any(|(name, _)| *name == "dq");
    let results: Results = if has_gradients { kernel.backward(inputs)? } else { kernel.forward(inputs)? };
    compare_call(inputs, &results.named(), truth)
}

/// The policy of a kernel in `mode`.
fn policy(mode: &str) -> Result<Policy> {
    match mode {
        "fp16" => Ok(fp16()),
        other => Policy::preset(other).map_err(|_| Error::input(format!("mode '{other}' has no policy"))),
    }
}

/// [`Policy::bf16`] with fp16 in place of bf16.
fn fp16() -> Policy {
    let mut policy = Policy::bf16();
    policy.inputs = Format::F16;
    for &kept in Intermediate::ALL.iter().filter(|&&kept| Policy::bf16().format(kept) == Format::Bf16) {
        policy = policy.keep(kept, Format::F16);
    }
    for &product in Product::ALL.iter().filter(|&&product| Policy::bf16().product(product).operands == Format::Bf16) {
        policy = policy.operands(product, Format::F16);
    }
    policy
}
