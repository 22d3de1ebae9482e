//! Log decays that are made in the kernels, plain and bounded, and the gradients of what they are made of.

use crate::case::{Case, Precision, SHORT, gates, run_plan};
use crate::expect_none;
use gdnlab::compare::compare;
use gdnlab::cuda::chunk::gdn2::{Decay, Options, Plan, Setup};
use gdnlab::inputs::Regime;
use gdnlab::kernel::Kernel;
use gdnlab::problem::{Inputs, Tensor};
use gdnlab::reference::Reference;
use gdnlab::reference::gate::{DecayForm, LogDecay};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const DECAYS: [Decay; 2] = [Decay::Softplus, Decay::Bounded { lower_bound: -5.0 }];

pub fn cases() -> Vec<Case> {
    Precision::presets()
        .into_iter()
        .map(|precision| Case::new(precision, (128, 64), SHORT, Regime::GateInKernel))
        .collect()
}

/// Raw gates, in binary32.
struct Raw {
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    form: DecayForm,
}

impl Raw {
    fn new(case: &Case, decay: Decay) -> Self {
        let shape = case.shape();
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let mut uniform = |dims: &[usize], low: f64, high: f64| {
            let count = dims.iter().product();
            let draw = |_| f64::from(rng.random_range(low..high) as f32);
            Tensor::new(dims, (0..count).map(draw).collect()).unwrap()
        };
        Self {
            a: uniform(&shape.channel_gate_dims(), -3.0, 3.0),
            a_log: uniform(&[shape.value_heads], -2.0, 1.0),
            dt_bias: uniform(&[shape.value_heads, shape.key_dim], -4.0, 0.0),
            form: match decay {
                Decay::Bounded { lower_bound } => DecayForm::Bounded { lower: f64::from(lower_bound) },
                _ => DecayForm::Softplus,
            },
        }
    }

    fn log_decay(&self) -> LogDecay<'_> {
        LogDecay { a: &self.a, a_log: &self.a_log, dt_bias: &self.dt_bias, form: self.form }
    }

    /// The same problem with the log decay made beforehand.
    fn made(&self, inputs: &Inputs) -> Inputs {
        let mut made = inputs.clone();
        *gates(&mut made).0 = self.log_decay().forward().unwrap();
        made
    }

    /// Gradients that do not follow from the dg that the kernels gave.
    fn wrong_gradients(&self, plan: &Plan) -> Vec<String> {
        let tensor = |name: &str| plan.tensor_of(name).unwrap();
        let dg = tensor("dg");
        let grads = self.log_decay().backward(&dg).unwrap();
        let sizes = Tensor { dims: dg.dims.clone(), data: dg.data.iter().map(|x| x.abs()).collect() };
        // No sum of terms is larger than that of their magnitudes.
        let terms = self.log_decay().backward(&sizes).unwrap();
        let mut wrong = Vec::new();
        let error = compare("dg", &tensor("da"), &grads.da).unwrap();
        if error.nonfinite > 0 || error.rel_rms > 1e-6 || error.max_rel > 2e-6 {
            wrong.push(format!("da: {error:?}"));
        }
        for (name, expected, terms) in
            [("dA_log", &grads.da_log, &terms.da_log), ("ddt_bias", &grads.ddt_bias, &terms.ddt_bias)]
        {
            for (at, ((x, y), terms)) in tensor(name).data.iter().zip(&expected.data).zip(&terms.data).enumerate() {
                if x.is_nan() || (x - y).abs() > 4e-6 * terms.abs() {
                    wrong.push(format!("{name} {at}: {x:e}, expected {y:e}, terms {terms:e}"));
                }
            }
        }
        wrong
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn log_decays_are_made_in_the_kernels() {
    let mut complaints = Vec::new();
    for (case, decay) in cases().into_iter().flat_map(|case| DECAYS.map(|decay| (case.clone(), decay))) {
        let inputs = case.inputs();
        let raw = Raw::new(&case, decay);
        let setup = case.setup(&inputs);
        let setup = Setup { options: Options { decay, ..setup.options }, ..setup };
        let mut plan = Plan::new(crate::gpu(), setup).unwrap();
        plan.upload_inputs(&inputs).unwrap();
        for (name, tensor) in [("a", &raw.a), ("A_log", &raw.a_log), ("dt_bias", &raw.dt_bias)] {
            plan.upload_rounded(name, &tensor.data).unwrap();
        }
        let made = raw.made(&inputs);
        let truth = Reference.backward(&made).unwrap();
        complaints.extend(case.judge(&made, &run_plan(&mut plan), &truth, &format!("{decay:?}")));
        let wrong = raw.wrong_gradients(&plan);
        println!("{case} da, dA_log, ddt_bias: {} wrong", wrong.len());
        complaints.extend(wrong.into_iter().map(|error| format!("{case}: {error}")));
    }
    expect_none(&complaints);
}
