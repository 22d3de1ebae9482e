//! A suspect: the constant that turns natural logarithms into binary ones.

use crate::Result;
use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Gates, Inputs, Op, Results};
use crate::reference::Reference;

/// The float64 recurrence with `e^g` as `2^(c g)`, where c is `1 / ln 2` rounded to binary32, as kernels on a GPU compute it.
///
/// c is too small by 1.3e-8 of itself, 0.22 unit roundoffs of binary32, and the same in every step: a decay over `G` is too weak
/// by a factor `1 - 1.3e-8 G`, so that what the state keeps is too large. All else is float64, so what is left is the
/// constant's doing.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundedLog2;

impl RoundedLog2 {
    /// `c ln 2`, which would be 1.
    pub fn factor() -> f64 {
        f64::from(std::f32::consts::LOG2_E) * std::f64::consts::LN_2
    }

    fn scaled(inputs: &Inputs) -> Inputs {
        let mut inputs = inputs.clone();
        let (Gates::Gdn { g, .. } | Gates::Gdn2 { g, .. }) = &mut inputs.gates;
        g.data.iter_mut().for_each(|g| *g *= Self::factor());
        inputs
    }
}

impl Kernel for RoundedLog2 {
    fn name(&self) -> &str {
        "rounded-log2"
    }

    fn summary(&self) -> String {
        "float64 recurrence with e^g as 2^(c g), c = 1/ln 2 rounded to binary32".to_owned()
    }

    fn needs(&self) -> &'static str {
        "a CPU"
    }

    fn ops(&self) -> &'static [Op] {
        &Op::ALL
    }

    fn mode(&self) -> &'static str {
        "fp32"
    }

    fn input_format(&self) -> Format {
        Format::F32
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        Reference.forward(&Self::scaled(inputs))
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        let mut results = Reference.backward(&Self::scaled(inputs))?;
        if let Some(grads) = &mut results.grads {
            // By g and not by c g.
            grads.dg.data.iter_mut().for_each(|dg| *dg *= Self::factor());
        }
        Ok(results)
    }
}
