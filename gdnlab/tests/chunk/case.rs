//! Problems, and what the kernels make of them.

use gdnlab::compare::Report;
use gdnlab::cuda::chunk::config::{Variant, Work};
use gdnlab::cuda::chunk::{Chunk, Mode, Plan, Setup, StateLayout};
use gdnlab::inputs::{Regime, generate};
use gdnlab::kernel::Kernel;
use gdnlab::precision::Format;
use gdnlab::problem::{Gates, Inputs, Op, Results, Shape, Tensor};
use gdnlab::reference::Reference;
use std::fmt;

/// Lengths that are awkward for chunks of 32 and 64, and sequences without a token.
pub const AWKWARD: &[usize] = &[0, 1, 15, 63, 0, 65, 1000];
/// The same without the long one.
pub const SHORT: &[usize] = &[0, 1, 15, 63, 65, 130];

/// The second one is cut into segments where heads are few, however many tokens a chunk has.
pub const LONG: &[usize] = &[65, 6500, 0, 100];

/// `HK` and `HV` of a model with few heads, whose sweeps divide K between two warps.
pub const FEW_HEADS: (usize, usize) = (2, 4);
/// The same with so many heads that one warp takes all of K.
pub const MANY_HEADS: (usize, usize) = (8, 24);

/// A mode with an input format, and the tolerance that its results are held to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Precision {
    pub mode: Mode,
    pub input: Format,
    pub tolerance: &'static str,
}

impl Precision {
    /// Those that are kernels with a name.
    pub fn presets() -> Vec<Self> {
        let precision = |chunk: Chunk| Self {
            mode: chunk.operands(),
            input: chunk.input_format(),
            tolerance: Kernel::mode(&chunk),
        };
        Chunk::presets().into_iter().map(precision).collect()
    }

    /// Some that are not.
    pub fn mixed() -> [Self; 5] {
        [
            Self { mode: Mode::F16Internals, input: Format::F32, tolerance: "fp16" },
            Self { mode: Mode::Bf16, input: Format::F32, tolerance: "bf16" },
            Self { mode: Mode::Bf16, input: Format::F16, tolerance: "bf16" },
            Self { mode: Mode::Tf32, input: Format::Bf16, tolerance: "bf16" },
            Self { mode: Mode::Fp32, input: Format::Bf16, tolerance: "f16-internals" },
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

    /// The same with many heads.
    pub fn with_many_heads(&self) -> Self {
        Self { heads: MANY_HEADS, ..self.clone() }
    }

    pub fn shape(&self) -> Shape {
        let ((key_dim, value_dim), (qk_heads, value_heads)) = (self.dims, self.heads);
        Shape { batch: 1, tokens: self.lengths.iter().sum(), qk_heads, value_heads, key_dim, value_dim }
    }

    /// Inputs with an initial state, and gradients of outputs and final states, rounded to the input format.
    pub fn inputs(&self) -> Inputs {
        let ends = self.lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        });
        let cu_seqlens: Vec<usize> = std::iter::once(0).chain(ends).collect();
        let inputs = generate(Op::Gdn, &self.shape(), self.regime, 1).unwrap().with_initial_state(2);
        inputs.packed(&cu_seqlens, 3).unwrap().rounded_to(self.precision.input)
    }

    /// What is compiled in, and what there is to do side by side.
    pub fn variant(&self) -> (Variant, Work) {
        let Self { precision: Precision { mode, input, .. }, dims: (key_dim, value_dim), heads, lengths, .. } = self;
        let value_heads = heads.1;
        let variant = Variant { mode: *mode, input: *input, key_dim: *key_dim, value_dim: *value_dim, value_heads };
        let segments = |length: &usize| variant.segments(length.div_ceil(variant.chunk()));
        let segments: Vec<usize> = lengths.iter().filter(|&&length| length > 0).map(segments).collect();
        let cut = segments.iter().any(|&segments| segments > 1);
        (variant, Work { heads: segments.iter().sum::<usize>() * value_heads, cut })
    }

    pub fn setup(&self, inputs: &Inputs) -> Setup {
        Setup::of_inputs(inputs, self.precision.mode, self.precision.input, true).unwrap()
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
        self.conclude(&report, name)
    }

    /// Prints a line about a report, and says what is wrong in it.
    pub fn conclude(&self, report: &Report, name: &str) -> Option<String> {
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

/// The forward alone.
pub fn run_forward(setup: Setup, inputs: &Inputs) -> Results {
    let mut plan = Plan::new(crate::gpu(), setup).unwrap();
    plan.upload_inputs(inputs).unwrap();
    plan.fill_outputs_with_nan().unwrap();
    plan.forward().unwrap();
    plan.results(false).unwrap()
}

/// Forward and backward by a plan whose inputs are there.
pub fn run_plan(plan: &mut Plan) -> Results {
    plan.fill_outputs_with_nan().unwrap();
    plan.forward().unwrap();
    plan.backward().unwrap();
    plan.results(true).unwrap()
}

/// The gates of GDN.
pub fn gates(inputs: &mut Inputs) -> (&mut Tensor, &mut Tensor) {
    match &mut inputs.gates {
        Gates::Gdn { g, beta } => (g, beta),
        Gates::Gdn2 { .. } => unreachable!("cases are of GDN"),
    }
}

/// Both layouts of states.
pub const LAYOUTS: [StateLayout; 2] = [StateLayout::KeyValue, StateLayout::ValueKey];
