//! The inputs of the experiment, and three ways to normalise q and k.

use crate::inputs::{Regime, before_normalisation, generate};
use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Results, Shape, Tensor};
use crate::record::Workload;
use crate::reference::Reference;
use crate::{Error, Result};

/// One problem of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Sizes; one sequence.
    pub shape: Shape,
    /// Seed of the inputs.
    pub seed: u64,
}

impl Setting {
    /// Heads and head dimensions of the request for comments, 12 and 128, with so many tokens.
    pub fn rfc(tokens: usize, seed: u64) -> Self {
        Self { shape: Shape::new(tokens, 12, 128, 128), seed }
    }

    /// What a record says of it.
    pub(super) fn workload(&self) -> Workload {
        Workload::new(Op::Gdn2, &self.shape).inputs(Regime::Correlated.name(), self.seed)
    }
}

/// How q and k, which come in bf16, are divided by their L2 norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Normalisation {
    /// `bf16(x / |x|)`, the division in fp32: the contract of the chunk operator.
    Fp32ThenCast,
    /// `x / |x|` in fp32, handed on without a cast: what an operator does that normalises inside its kernel.
    Fp32,
    /// `bf16(x / bf16(|x|))`: what a framework does with tensors of bf16.
    Bf16,
}

impl Normalisation {
    /// `x`, `[.., K]`, normalised.
    pub fn apply(self, x: &Tensor) -> Tensor {
        let mut normalised = x.clone();
        let (narrow, wide) = (Format::Bf16, Format::F32);
        for row in normalised.data.chunks_exact_mut(x.dims.last().copied().unwrap_or(1).max(1)) {
            let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
            let divide: &dyn Fn(f64) -> f64 = match self {
                Self::Fp32ThenCast => &|x| narrow.round(wide.round(x / wide.round(norm))),
                Self::Fp32 => &|x| wide.round(x / wide.round(norm)),
                Self::Bf16 => &|x| narrow.round(x / narrow.round(norm)),
            };
            row.iter_mut().for_each(|x| *x = divide(*x));
        }
        normalised
    }
}

/// The inputs of a setting, with q and k normalised in turn in one way or the other, and the truths that were asked for.
pub(super) struct Problem {
    pub setting: Setting,
    /// Gradients are wanted.
    pub gradients: bool,
    inputs: Inputs,
    raw: (Tensor, Tensor),
    /// How q and k of `inputs` are normalised now.
    normalised: Option<Normalisation>,
    truths: Vec<(Normalisation, Results)>,
}

impl Problem {
    pub fn new(setting: Setting, gradients: bool) -> Result<Self> {
        let Setting { shape, seed } = setting;
        let mut inputs = generate(Op::Gdn2, &shape, Regime::Correlated, seed)?.rounded_to(Format::Bf16);
        if !gradients {
            (inputs.d_o, inputs.d_final_state) = (None, None);
        }
        let (mut q, mut k) = before_normalisation(&shape, Regime::Correlated, seed)?;
        [&mut q, &mut k].into_iter().for_each(|x| x.round_to(Format::Bf16));
        Ok(Self { setting, gradients, inputs, raw: (q, k), normalised: None, truths: Vec::new() })
    }

    /// The inputs with q and k normalised so.
    pub fn inputs(&mut self, normalisation: Normalisation) -> &Inputs {
        if self.normalised != Some(normalisation) {
            self.inputs.q = normalisation.apply(&self.raw.0);
            self.inputs.k = normalisation.apply(&self.raw.1);
            self.normalised = Some(normalisation);
        }
        &self.inputs
    }

    /// What the float64 recurrence makes of them.
    pub fn truth(&mut self, normalisation: Normalisation) -> Result<&Results> {
        if !self.truths.iter().any(|(known, _)| *known == normalisation) {
            let gradients = self.gradients;
            let inputs = self.inputs(normalisation);
            let truth = if gradients { Reference.backward(inputs)? } else { Reference.forward(inputs)? };
            self.truths.push((normalisation, truth));
        }
        let known = self.truths.iter().find(|(known, _)| *known == normalisation);
        known.map(|(_, truth)| truth).ok_or_else(|| Error::input("no truth for these inputs"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn norms(x: &Tensor) -> Vec<f64> {
        x.data.chunks_exact(16).map(|row| row.iter().map(|x| x * x).sum::<f64>().sqrt()).collect()
    }

    /// Rounding the norm scales a whole row; rounding its quotients does not.
    #[test]
    fn a_norm_in_bf16_is_off_by_up_to_a_unit_roundoff() {
        let shape = Shape::new(64, 2, 16, 16);
        let (_, mut k) = before_normalisation(&shape, Regime::Correlated, 1).unwrap();
        k.round_to(Format::Bf16);
        let worst =
            |how: Normalisation| norms(&how.apply(&k)).into_iter().map(|norm| (norm - 1.0).abs()).fold(0.0, f64::max);
        let u = Format::Bf16.unit_roundoff();
        assert!(worst(Normalisation::Fp32) < 1e-6);
        assert!(worst(Normalisation::Fp32ThenCast) < 0.5 * u, "{}", worst(Normalisation::Fp32ThenCast));
        assert!((0.5 * u..1.5 * u).contains(&worst(Normalisation::Bf16)), "{}", worst(Normalisation::Bf16));
    }

    #[test]
    fn casts_leave_values_of_bf16_and_nothing_else_does() {
        let shape = Shape::new(8, 1, 16, 16);
        let (q, _) = before_normalisation(&shape, Regime::Correlated, 1).unwrap();
        let is_bf16 = |how: Normalisation| how.apply(&q).data.iter().all(|&x| Format::Bf16.round(x) == x);
        assert!(is_bf16(Normalisation::Fp32ThenCast) && is_bf16(Normalisation::Bf16) && !is_bf16(Normalisation::Fp32));
    }

    #[test]
    fn a_problem_has_the_truth_of_the_inputs_that_were_asked_for() {
        let mut problem = Problem::new(Setting { shape: Shape::new(20, 1, 8, 8), seed: 1 }, false).unwrap();
        let cast = problem.truth(Normalisation::Fp32ThenCast).unwrap().clone();
        assert_ne!(problem.truth(Normalisation::Bf16).unwrap(), &cast);
        assert_eq!(problem.truth(Normalisation::Fp32ThenCast).unwrap(), &cast);
        assert!(cast.grads.is_none());
    }
}
