//! A suspect: the exponential function of a GPU.

use crate::Result;
use crate::chunked::Chunked;
use crate::kernel::Kernel;
use crate::precision::{Format, Policy};
use crate::problem::{Inputs, Op, Results};

/// Tokens of a chunk in the fp32 kernels of a GPU.
const CHUNK: usize = 32;

/// The chunk form in float64 with every decay `e^x`, `x != 0`, too large by some unit roundoffs of binary32, as it is where `expf`
/// errs in one direction.
///
/// A decay that is too large keeps too much, so that results are pushed outward. A chunk takes one exponential for each
/// pair of its tokens and one for each chunk that a state goes through, so what is `n` chunks old has met `n + 1` of
/// them. All else is float64: what is left is the doing of the exponential.
#[derive(Clone, Debug)]
pub struct LargeDecays {
    name: String,
    chunked: Chunked,
}

impl LargeDecays {
    /// Decays too large by `roundoffs` unit roundoffs of binary32; too small where it is below 0.
    ///
    /// # Errors
    /// None: the chunk size is one of those that there are.
    pub fn new(roundoffs: f64) -> Result<Self> {
        let factor = 1.0 + roundoffs * Format::F32.unit_roundoff();
        let chunked = Chunked::new("cpu-chunk-fp64", Policy::fp64(), CHUNK)?.with_decays_times(factor);
        Ok(Self { name: format!("decays + {roundoffs} u"), chunked })
    }
}

impl Kernel for LargeDecays {
    fn name(&self) -> &str {
        &self.name
    }

    fn summary(&self) -> String {
        "chunked form in float64 whose decays are too large by some unit roundoffs of binary32".to_owned()
    }

    fn needs(&self) -> &'static str {
        self.chunked.needs()
    }

    fn ops(&self) -> &'static [Op] {
        self.chunked.ops()
    }

    fn mode(&self) -> &'static str {
        "fp32"
    }

    fn input_format(&self) -> Format {
        Format::F32
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        self.chunked.forward(inputs)
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        self.chunked.backward(inputs)
    }
}
