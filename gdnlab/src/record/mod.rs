//! Measured rows: one record is one number (or one small set of them) with all that is needed to judge it, namely the
//! workload, the code and the machine.
//!
//! Records live in `data/` as JSON Lines: one row per line, self-contained, never edited afterwards.

mod backends;
mod bias;
mod cp;
mod determinism;
mod environment;
mod jsonl;
mod merge;
mod source;
mod tokens;

pub use backends::Backends;
pub use bias::Bias;
pub use cp::{Cp, CpExactness, CpFound, CpScaling};
pub use determinism::Determinism;
pub use environment::{Environment, Machine};
pub use jsonl::{
    Held, append, experiment_name, files, keep, parse, read, read_dir, read_what_can_be, to_json_lines, write,
    write_lines,
};
pub use merge::{Dropped, Machines, Merged, Why, merge};
pub use source::{Place, Source};
pub use tokens::{Experiment, TokenFlips};

use crate::compare::Comparison;
use crate::problem::{Op, Shape};
use serde::{Deserialize, Serialize};

/// Version of the record's fields. A reader refuses any other.
pub const SCHEMA: u32 = 1;

/// One measured row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Version of the fields, [`SCHEMA`].
    pub schema: u32,
    /// What was measured; `kind` in the file.
    #[serde(flatten)]
    pub measurement: Measurement,
    /// What it was measured on.
    #[serde(flatten)]
    pub workload: Workload,
    /// Code and machine that it was measured with.
    #[serde(flatten)]
    pub environment: Environment,
}

impl Record {
    /// A record of the current schema.
    pub fn new(environment: &Environment, workload: &Workload, measurement: Measurement) -> Self {
        Self { schema: SCHEMA, measurement, workload: workload.clone(), environment: environment.clone() }
    }

    /// Whether the code and the machine of `now` would only repeat this: the same commit, without changes to it then or now,
    /// the same GPU and the same CPU.
    pub fn is_of(&self, now: &Environment) -> bool {
        let Environment { commit, dirty, machine, .. } = &self.environment;
        commit.is_some()
            && *commit == now.commit
            && [*dirty, now.dirty] == [Some(false); 2]
            && (&machine.gpu, &machine.cpu) == (&now.machine.gpu, &now.machine.cpu)
    }

    /// The error metrics, where this record holds some.
    pub fn errors(&self) -> Option<&Errors> {
        match &self.measurement {
            Measurement::Numerics(errors) => Some(errors),
            Measurement::Determinism(determinism) => Some(&determinism.errors),
            Measurement::Precision(precision) => Some(&precision.errors),
            Measurement::Backends(pair) => Some(&pair.errors),
            _ => None,
        }
    }

    /// The change of one step, where this record is about one.
    pub fn precision(&self) -> Option<&Precision> {
        match &self.measurement {
            Measurement::Precision(precision) => Some(precision),
            _ => None,
        }
    }
}

/// The kinds of measurement and the fields of each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Measurement {
    /// One tensor of one kernel against the float64 truth.
    Numerics(Errors),
    /// The same after the format of one step was changed.
    Precision(Precision),
    /// One tensor of one kernel against another kernel's, and both against the float64 truth.
    Backends(Backends),
    /// Tokens of a language model under a kernel.
    Tokens(TokenFlips),
    /// One tensor of a kernel over many runs, against its own first one.
    Determinism(Determinism),
    /// Direction of the errors of one tensor.
    Bias(Bias),
    /// A call that is cut over ranks: how exact, or how fast.
    Cp(Cp),
    /// Time of an operator.
    Bench(Timing),
    /// Time of an attention backend.
    Attention(Timing),
    /// What the hardware reaches.
    Roofline(Roofline),
    /// Training throughput of one model size.
    Ladder(Ladder),
    /// Time of one kernel in a training step.
    Kernels(StepKernel),
    /// One step of a training.
    Training(TrainingStep),
}

/// What a measurement ran on; each field is absent where it makes no sense.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// Operator: gdn, gdn2 or attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub op: Option<String>,
    /// Implementation, as `cargo lab kernels` lists it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// Precision mode, such as bf16 or tf32.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Input regime.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub regime: Option<String>,
    /// Seed of the inputs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Part of the computation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pass: Option<Pass>,
    /// `B`.
    #[serde(rename = "B", skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
    /// `T`.
    #[serde(rename = "T", skip_serializing_if = "Option::is_none")]
    pub tokens: Option<usize>,
    /// `HK`.
    #[serde(rename = "HK", skip_serializing_if = "Option::is_none")]
    pub qk_heads: Option<usize>,
    /// `HV`.
    #[serde(rename = "HV", skip_serializing_if = "Option::is_none")]
    pub value_heads: Option<usize>,
    /// `K` = d_k.
    #[serde(rename = "K", skip_serializing_if = "Option::is_none")]
    pub key_dim: Option<usize>,
    /// `V` = d_v.
    #[serde(rename = "V", skip_serializing_if = "Option::is_none")]
    pub value_dim: Option<usize>,
    /// Lengths of packed sequences, such as `8192x4` or `28672+4096`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seqlens: Option<String>,
}

impl Workload {
    /// A workload of this operator and shape.
    pub fn new(op: Op, shape: &Shape) -> Self {
        Self {
            op: Some(op.name().to_owned()),
            batch: Some(shape.batch),
            tokens: Some(shape.tokens),
            qk_heads: Some(shape.qk_heads),
            value_heads: Some(shape.value_heads),
            key_dim: Some(shape.key_dim),
            value_dim: Some(shape.value_dim),
            ..Self::default()
        }
    }

    /// The same with the implementation and its precision mode.
    #[must_use]
    pub fn kernel(mut self, kernel: &str, mode: &str) -> Self {
        self.kernel = Some(kernel.to_owned());
        self.mode = Some(mode.to_owned());
        self
    }

    /// The same with the input regime and its seed.
    #[must_use]
    pub fn inputs(mut self, regime: &str, seed: u64) -> Self {
        self.regime = Some(regime.to_owned());
        self.seed = Some(seed);
        self
    }

    /// The same with the pass.
    #[must_use]
    pub fn pass(mut self, pass: Pass) -> Self {
        self.pass = Some(pass);
        self
    }
}

/// Part of the computation that a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    /// Forward.
    Fwd,
    /// Backward, or gradients.
    Bwd,
    /// One token from a state.
    Decode,
    /// A whole training step.
    Step,
}

impl Pass {
    /// The pass that computes `tensor`, by its name in tensor files: gradients begin with `d`.
    pub fn of_tensor(tensor: &str) -> Self {
        if tensor.starts_with('d') { Self::Bwd } else { Self::Fwd }
    }
}

/// Errors of one tensor. A metric is absent where it is not a finite number.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Errors {
    /// Name in tensor files, such as `o` or `dq`.
    pub tensor: String,
    /// `max|x - r| / max|r|`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_rel: Option<f64>,
    /// `||x - r|| / ||r||`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rel_rms: Option<f64>,
    /// `max|x - r|`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_abs: Option<f64>,
    /// Mean of `|x - r|`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_abs: Option<f64>,
    /// Cosine of the angle between `x` and `r`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cosine: Option<f64>,
    /// Mean of `x - r` over the RMS of `r`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bias: Option<f64>,
    /// Two-sided p value of the t-test that the bias is zero.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bias_p: Option<f64>,
    /// Elements that are NaN or infinite.
    pub nonfinite: usize,
    /// Unit roundoff of the mode that the error is held against.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit_roundoff: Option<f64>,
}

impl Errors {
    /// The metrics of `comparison`, whose mode has the unit roundoff `unit_roundoff`.
    pub fn new(comparison: &Comparison, unit_roundoff: f64) -> Self {
        let finite = |value: f64| value.is_finite().then_some(value);
        Self {
            tensor: comparison.tensor.clone(),
            max_rel: finite(comparison.max_rel),
            rel_rms: finite(comparison.rel_rms),
            max_abs: finite(comparison.max_abs),
            mean_abs: finite(comparison.mean_abs),
            cosine: finite(comparison.cosine),
            bias: finite(comparison.bias),
            bias_p: finite(comparison.bias_p),
            nonfinite: comparison.nonfinite,
            unit_roundoff: finite(unit_roundoff),
        }
    }
}

/// Errors after the format of one step was changed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Precision {
    /// Policy that the change starts from.
    pub base: String,
    /// Step whose format was changed; `none` for the unchanged policy.
    pub step: String,
    /// Format that the step was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// Errors that resulted.
    #[serde(flatten)]
    pub errors: Errors,
}

/// Time of one workload.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Median, in milliseconds.
    pub latency_ms: f64,
    /// 20th percentile, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p20_ms: Option<f64>,
    /// 80th percentile, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p80_ms: Option<f64>,
    /// Every sample, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples_ms: Option<Vec<f64>>,
    /// Time that the hardware's measured rates allow, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor_ms: Option<f64>,
    /// The rates that the floor is held against, and where each comes from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor_basis: Option<String>,
    /// Useful traffic, in gigabytes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gb_s: Option<f64>,
    /// Useful arithmetic, in TFLOP/s.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tflop_s: Option<f64>,
    /// Memory of the device that the call takes, its tensors and its workspace, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Implementation that is compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Its time, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_ms: Option<f64>,
    /// Where its time comes from: `published` or `same run`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_source: Option<String>,
}

/// A rate that the hardware reaches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Roofline {
    /// What was measured, such as `bf16_matmul`.
    pub quantity: String,
    /// Measured value.
    pub value: f64,
    /// Value by the data sheet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub theoretical: Option<f64>,
    /// Unit of both.
    pub unit: String,
}

/// Training throughput of one model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ladder {
    /// Sequence mixer: attn or gdn.
    pub mixer: String,
    /// Name of the size, such as 125M.
    pub size: String,
    /// Width of the model.
    pub d_model: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Parameters without embedding and head.
    pub body_params: u64,
    /// Tokens per second.
    pub tok_per_s: f64,
    /// Microseconds per token.
    pub us_per_tok: f64,
    /// Peak device memory, in gigabytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_gb: Option<f64>,
    /// Model FLOPs over the measured matmul rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Model bytes over the measured copy bandwidth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth_fraction: Option<f64>,
}

/// The launches of one kernel, or of products of one form, in one training step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepKernel {
    /// Sequence mixer: attn or gdn.
    pub mixer: String,
    /// Name of the size, such as 125M.
    pub size: String,
    /// How often it is launched.
    pub launches: usize,
    /// Time of all its launches, with the gaps before them, in milliseconds.
    pub latency_ms: f64,
}

/// A step of a training on a text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainingStep {
    /// Sequence mixer: attn or gdn.
    pub mixer: String,
    /// Name of the size, such as 30M.
    pub size: String,
    /// Steps taken, this one too.
    pub step: u64,
    /// Steps in all.
    pub steps: u64,
    /// Fingerprint of the text.
    pub text: String,
    /// Loss of the batch before the step, in nats per token.
    pub loss: f64,
    /// Loss of validation after the step, in nats per token, where it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation: Option<f64>,
    /// Learning rate.
    pub rate: f64,
    /// Norm of the gradient before clipping.
    pub gradient_norm: f64,
    /// Time of the step without validation, in milliseconds.
    pub latency_ms: f64,
}
