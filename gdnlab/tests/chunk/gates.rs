//! Raw gates, logits of the write strength and the norm of q and k inside the kernels, with their gradients.

use crate::case::{Case, FEW_HEADS, MANY_HEADS, Precision, run_plan};
use crate::expect_none;
use gdnlab::compare::{Comparison, Report, compare, compare_call};
use gdnlab::cuda::chunk::{Beta, Gate, Options, Plan, Setup};
use gdnlab::inputs::{Regime, generate};
use gdnlab::kernel::Kernel;
use gdnlab::problem::{Gates, Inputs, Op, Results, Tensor};
use gdnlab::reference::Reference;
use gdnlab::reference::gate::{DecayForm, LogDecay, WriteStrength};
use gdnlab::reference::norm::L2Norm;

const EPS: f32 = 1e-6;

pub fn cases() -> Vec<Case> {
    let of = |precision| {
        [(FEW_HEADS, (128, 128)), (MANY_HEADS, (64, 32)), ((1, 6), (96, 64))]
            .map(|(heads, dims)| Case { heads, ..Case::new(precision, dims, &[700, 0, 65, 1], Regime::Gaussian) })
    };
    Precision::presets().into_iter().flat_map(of).collect()
}

/// What goes into the kernels, which make gates and norms of it.
struct Raw {
    inputs: Inputs,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    logit: Tensor,
    allow_neg_eigval: bool,
}

impl Raw {
    fn new(case: &Case, allow_neg_eigval: bool) -> Self {
        let mut inputs = case.inputs();
        // Rows of all lengths, which the norm takes away. f16 would not hold gradients of much shorter ones.
        let (dim, factor) = (inputs.shape.key_dim, |row: usize| [1.0, 1e-2, 30.0][row % 3]);
        for tensor in [&mut inputs.q, &mut inputs.k] {
            let rows = tensor.data.chunks_exact_mut(dim).enumerate();
            rows.for_each(|(at, row)| row.iter_mut().for_each(|x| *x *= factor(at)));
        }
        let inputs = inputs.rounded_to(case.precision.input);
        // Values of N(0, 1) in the shapes of gates: columns of v.
        let shape = inputs.shape;
        let normal = |seed| {
            let values = generate(Op::Gdn, &case.shape(), Regime::Gaussian, seed).unwrap().v;
            let column = values.data.iter().step_by(shape.value_dim).map(|&x| f64::from(x as f32)).collect();
            Tensor::new(&shape.gate_dims(), column).unwrap()
        };
        let heads = |first: f64, step: f64| {
            let values = (0..shape.value_heads).map(|h| f64::from((first + step * h as f64) as f32)).collect();
            Tensor::new(&[shape.value_heads], values).unwrap()
        };
        Self {
            inputs,
            a: normal(5),
            a_log: heads(-2.0, 0.15),
            dt_bias: heads(-4.0, 0.2),
            logit: normal(6),
            allow_neg_eigval,
        }
    }

    fn decay(&self) -> LogDecay<'_> {
        let Self { a, a_log, dt_bias, .. } = self;
        LogDecay { a, a_log, dt_bias, form: DecayForm::Softplus }
    }

    fn strength(&self) -> WriteStrength<'_> {
        WriteStrength { x: &self.logit, allow_neg_eigval: self.allow_neg_eigval }
    }

    /// What the recurrence sees.
    fn normalised(&self) -> Inputs {
        let norm = |x| L2Norm { x, eps: f64::from(EPS) }.forward().unwrap();
        let gates = Gates::Gdn { g: self.decay().forward().unwrap(), beta: self.strength().forward().unwrap() };
        Inputs { q: norm(&self.inputs.q), k: norm(&self.inputs.k), gates, ..self.inputs.clone() }
    }

    fn setup(&self, case: &Case) -> Setup {
        let setup = case.setup(&self.inputs);
        let options = Options {
            qk_l2norm: Some(EPS),
            gate: Gate::Raw,
            beta: Beta::Logit { scale: if self.allow_neg_eigval { 2.0 } else { 1.0 } },
            ..setup.options
        };
        Setup { options, ..setup }
    }

    fn plan(&self, case: &Case) -> Plan {
        let mut plan = Plan::new(crate::gpu(), self.setup(case)).unwrap();
        plan.upload_inputs(&self.inputs).unwrap();
        let raw = [("a", &self.a), ("A_log", &self.a_log), ("dt_bias", &self.dt_bias), ("beta_logit", &self.logit)];
        raw.into_iter().for_each(|(name, tensor)| plan.upload_rounded(name, &tensor.data).unwrap());
        plan
    }

    /// Distances from the recurrence; those of dq and dk once their truth is carried back through the norm.
    fn compare(&self, got: &Results) -> Vec<Comparison> {
        let normalised = self.normalised();
        let truth = Reference.backward(&normalised).unwrap();
        let named = got.named();
        let (through_norm, others): (Vec<_>, Vec<_>) =
            named.into_iter().partition(|(name, _)| matches!(*name, "dq" | "dk"));
        let mut all = compare_call(&normalised, &others, &truth.named()).unwrap();
        let grads = truth.grads.as_ref().unwrap();
        for ((name, found), (x, dy)) in
            through_norm.into_iter().zip([(&self.inputs.q, &grads.dq), (&self.inputs.k, &grads.dk)])
        {
            let expected = L2Norm { x, eps: f64::from(EPS) }.backward(dy).unwrap();
            all.push(compare(name, found, &expected).unwrap());
        }
        all
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gates_and_norms_are_made_in_the_kernels() {
    let mut complaints = Vec::new();
    for (case, allow_neg_eigval) in cases().into_iter().flat_map(|case| [(case.clone(), false), (case, true)]) {
        let raw = Raw::new(&case, allow_neg_eigval);
        let mut plan = raw.plan(&case);
        let report = Report::new(raw.compare(&run_plan(&mut plan)), case.precision.tolerance).unwrap();
        complaints.extend(case.conclude(&report, if allow_neg_eigval { "raw, beta < 2" } else { "raw, beta < 1" }));
        let wrong = raw.wrong_gradients(&plan);
        println!("{case} da, dA_log, ddt_bias, dbeta_logit: {} wrong", wrong.len());
        complaints.extend(wrong.into_iter().map(|error| format!("{case}: {error}")));
    }
    expect_none(&complaints);
}

impl Raw {
    /// Gradients of the raw gates that do not follow from those of g and beta that the kernels gave.
    fn wrong_gradients(&self, plan: &Plan) -> Vec<String> {
        let tensor = |name: &str| plan.tensor_of(name).unwrap();
        let (dg, dbeta) = (tensor("dg"), tensor("dbeta"));
        let decay = self.decay().backward(&dg).unwrap();
        let d_logit = self.strength().backward(&dbeta).unwrap();
        let mut wrong = Vec::new();
        for (name, expected) in [("da", &decay.da), ("dbeta_logit", &d_logit)] {
            let error = compare(name, &tensor(name), expected).unwrap();
            if error.nonfinite > 0 || error.rel_rms > 3e-7 || error.max_rel > 1e-6 {
                wrong.push(format!("{name}: {error:?}"));
            }
        }
        let g = self.decay().forward().unwrap();
        let terms = |by: &Tensor| -> Vec<f64> {
            let mut sums = vec![0.0; self.inputs.shape.value_heads];
            let products = dg.data.iter().zip(&by.data).map(|(x, y)| (x * y).abs());
            products.enumerate().for_each(|(at, term)| sums[at % self.inputs.shape.value_heads] += term);
            sums
        };
        let ones = Tensor::filled(&dg.dims, 1.0);
        let slopes = self.decay().backward(&ones).unwrap().da;
        for (name, expected, terms) in
            [("dA_log", &decay.da_log, terms(&g)), ("ddt_bias", &decay.ddt_bias, terms(&slopes))]
        {
            let found = tensor(name);
            for (head, ((x, y), terms)) in found.data.iter().zip(&expected.data).zip(terms).enumerate() {
                if x.is_nan() || (x - y).abs() > 1e-6 * terms {
                    wrong.push(format!("{name} of head {head}: {x:e}, expected {y:e}, terms {terms:e}"));
                }
            }
        }
        wrong
    }
}
