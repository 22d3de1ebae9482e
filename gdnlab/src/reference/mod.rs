//! float64 ground truth: the token-by-token recurrences and the layers around them, forward and backward.

mod aligned;
pub mod attention;
pub mod conv;
pub mod gate;
pub mod linear;
mod matrix;
pub mod norm;
mod recurrence;
pub mod rope;
mod segment;
mod sweep;
pub mod swiglu;
#[cfg(test)]
pub(crate) mod testing;
pub mod token;

use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Results};
use crate::{Result, heads};

pub use segment::SEGMENT;

/// The float64 recurrence of GDN and GDN-2: what every other kernel is compared with.
///
/// Sequences and heads run in parallel; results do not depend on the number of threads. The backward keeps one state
/// in [`SEGMENT`] tokens.
///
/// ```
/// use gdnlab::{inputs::{self, Regime}, kernel::Kernel, problem::{Op, Shape}, reference::Reference};
/// let inputs = inputs::generate(Op::Gdn, &Shape::new(100, 2, 16, 32), Regime::Gaussian, 1)?;
/// let results = Reference.backward(&inputs)?;
/// assert_eq!(results.outputs.o.dims, [1, 100, 2, 32]);
/// # Ok::<(), gdnlab::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Reference;

impl Kernel for Reference {
    fn name(&self) -> &str {
        "reference"
    }

    fn summary(&self) -> String {
        "token-by-token recurrence in float64: the ground truth".into()
    }

    fn needs(&self) -> &'static str {
        "a CPU"
    }

    fn ops(&self) -> &'static [Op] {
        &Op::ALL
    }

    fn mode(&self) -> &'static str {
        "fp64"
    }

    fn input_format(&self) -> Format {
        Format::F64
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        heads::run(inputs, false, recurrence::run_head)
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        heads::run(inputs, true, recurrence::run_head)
    }
}
