//! Problems, and what the kernels make of them.

use gdnlab::compare::Report;
use gdnlab::cuda::chunk::Mode;
use gdnlab::cuda::chunk::config::{Variant, Work};
use gdnlab::cuda::chunk::gdn2::{Gdn2, Options, Plan, Setup};
use gdnlab::inputs::{Regime, generate};
use gdnlab::kernel::Kernel;
use gdnlab::precision::Format;
use gdnlab::problem::{Gates, Inputs, Op, Results, Shape, Tensor};
use gdnlab::reference::Reference;
use std::fmt;

/// Lengths that are awkward for chunks of 32 and 64, and sequences without a token.
pub const AWKWARD: &[usize] = &[0, 1, 15, 63, 0, 65, 500];
/// The same without the long one.
pub const SHORT: &[usize] = &[0, 1, 15, 63, 65, 130];
/// The second one is cut into segments where heads are few, however many tokens a chunk has.
pub const LONG: &[usize] = &[65, 6500, 0, 100];

/// `HK` and `HV` of a model with few heads, whose sweeps divide K between two warps.
pub const FEW_HEADS: (usize, usize) = (2, 2);
/// The same with so many heads that one warp takes all of K.
pub const MANY_HEADS: (usize, usize) = (24, 24);

/// A mode with the format of inputs and of b and w, and the tolerance that its results are held to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Precision {
    pub mode: Mode,
    pub input: Format,
    pub gates: Format,
    pub tolerance: &'static str,
}

impl Precision {
    /// Those that are kernels with a name.
    pub fn presets() -> Vec<Self> {
        let precision = |kernel: Gdn2| Self {
            mode: kernel.operands(),
            input: kernel.input_format(),
            gates: Format::F32,
            tolerance: Kernel::mode(&kernel),
        };
        Gdn2::presets().into_iter().map(precision).collect()
    }

    /// Some that are not presets.
    pub fn mixed() -> [Self; 4] {
        [
            Self { mode: Mode::F16Internals, input: Format::Bf16, gates: Format::Bf16, tolerance: "f16-internals" },
            Self { mode: Mode::F16Internals, input: Format::F32, gates: Format::F32, tolerance: "fp16" },
            Self { mode: Mode::Bf16, input: Format::Bf16, gates: Format::Bf16, tolerance: "bf16" },
            Self { mode: Mode::Fp32, input: Format::Bf16, gates: Format::F32, tolerance: "f16-internals" },
        ]
    }
}

/// One problem in one precision.
#[derive(Clone, Debug)]
pub struct Case {
    pub precision: Precision,
    /// `K`, `V`.
    pub dims: (usize, usize),
    /// `HK`, `HV`.
    pub heads: (usize, usize),
    pub lengths: Vec<usize>,
    pub regime: Regime,
}

impl Case {
    pub fn new(precision: Precision, dims: (usize, usize), lengths: &[usize], regime: Regime) -> Self {
        Self { precision, dims, heads: FEW_HEADS, lengths: lengths.to_vec(), regime }
    }

    pub fn shape(&self) -> Shape {
        let ((key_dim, value_dim), (qk_heads, value_heads)) = (self.dims, self.heads);
        Shape { batch: 1, tokens: self.lengths.iter().sum(), qk_heads, value_heads, key_dim, value_dim }
    }

    /// Where sequences begin, and the end.
    pub fn cu_seqlens(&self) -> Vec<usize> {
        let ends = self.lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    }

    /// Inputs with an initial state, and gradients of outputs and final states, rounded to the formats.
    pub fn inputs(&self) -> Inputs {
        let inputs = generate(Op::Gdn2, &self.shape(), self.regime, 1).unwrap().with_initial_state(2);
        let mut inputs = inputs.packed(&self.cu_seqlens(), 3).unwrap().rounded_to(self.precision.input);
        let (_, b, w) = gates(&mut inputs);
        b.round_to(self.precision.gates);
        w.round_to(self.precision.gates);
        inputs
    }

    /// What is compiled in, and what there is to do side by side.
    pub fn variant(&self) -> (Variant, Work) {
        let Self { precision: Precision { mode, input, .. }, dims: (key_dim, value_dim), heads, .. } = self;
        let value_heads = heads.1;
        let variant = Variant { mode: *mode, input: *input, key_dim: *key_dim, value_dim: *value_dim, value_heads };
        let boundaries = self.cu_seqlens();
        let sequences: Vec<_> = boundaries.windows(2).map(|ends| ends[0]..ends[1]).collect();
        (variant, variant.work(&sequences))
    }

    pub fn setup(&self, inputs: &Inputs) -> Setup {
        let Precision { mode, input, gates, .. } = self.precision;
        let setup = Setup::of_inputs(inputs, mode, input, true).unwrap();
        Setup { options: Options { gates, ..setup.options }, ..setup }
    }

    /// What the kernels give for `inputs`.
    pub fn run(&self, inputs: &Inputs) -> Results {
        run(self.setup(inputs), inputs)
    }

    /// Runs `inputs`, prints a line, and says what is wrong with the results.
    pub fn check_inputs(&self, inputs: &Inputs, name: &str) -> Option<String> {
        self.judge(inputs, &self.run(inputs), &Reference.backward(inputs).unwrap(), name)
    }

    /// Runs the inputs of the regime.
    pub fn check(&self) -> Option<String> {
        self.check_inputs(&self.inputs(), self.regime.name())
    }

    /// Prints a line about `got`, and says what is wrong with it.
    pub fn judge(&self, inputs: &Inputs, got: &Results, truth: &Results, name: &str) -> Option<String> {
        let report = Report::of_call(inputs, &got.named(), truth, self.precision.tolerance).unwrap();
        let error = |tensor: &gdnlab::compare::Comparison| format!("{} {:.1e}", tensor.tensor, tensor.rel_rms);
        let errors: Vec<String> = report.verdicts.iter().map(|verdict| error(&verdict.comparison)).collect();
        let hard = report.verdicts.iter().any(|verdict| verdict.hard_inputs);
        let word = if report.pass { "" } else { "  FAIL" };
        println!("{self} {name:<16} {}{}{word}", errors.join("  "), if hard { "  (hard)" } else { "" });
        (!report.pass).then(|| format!("{self} {name}\n{report}"))
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { precision: Precision { mode, input, .. }, dims: (k, v), heads: (qk, value), lengths, .. } = self;
        let tokens: usize = lengths.iter().sum();
        write!(f, "{mode:<13} {input:<4} {k:>3}x{v:<3} {qk}/{value} T={tokens} N={}", lengths.len())
    }
}

/// Forward and backward of `inputs` by a plan for `setup`.
pub fn run(setup: Setup, inputs: &Inputs) -> Results {
    let mut plan = Plan::new(crate::gpu(), setup).unwrap();
    plan.upload_inputs(inputs).unwrap();
    run_plan(&mut plan)
}

/// Forward and backward by a plan whose inputs are there.
pub fn run_plan(plan: &mut Plan) -> Results {
    plan.fill_outputs_with_nan().unwrap();
    plan.forward().unwrap();
    plan.backward().unwrap();
    plan.results(true).unwrap()
}

/// The gates of GDN-2: g, b and w.
pub fn gates(inputs: &mut Inputs) -> (&mut Tensor, &mut Tensor, &mut Tensor) {
    match &mut inputs.gates {
        Gates::Gdn2 { g, b, w } => (g, b, w),
        Gates::Gdn { .. } => unreachable!("cases are of GDN-2"),
    }
}
