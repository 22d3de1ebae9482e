//! What a plan is made for.

use super::StateLayout;
use super::config::{Variant, Work};
use super::fused::Fused;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Shape};
use crate::{Error, Result};
use std::fmt;
use std::ops::Range;

/// Sequences, and value heads, at the most: blocks of a launch along one axis.
const MAX_BLOCKS: usize = 65_535;

/// In which format the operands of every product are held. Sums are binary32 in all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// f16, each tensor scaled by powers of two so that its range suffices.
    F16Internals,
    /// bf16.
    Bf16,
    /// TF32, rounded to nearest.
    Tf32,
    /// IEEE binary32, without tensor cores.
    Fp32,
}

impl Mode {
    /// All modes.
    pub const ALL: [Self; 4] = [Self::F16Internals, Self::Bf16, Self::Tf32, Self::Fp32];

    /// `MODE` in CUDA.
    pub(super) fn number(self) -> u32 {
        self as u32
    }

    /// Bytes of an operand.
    pub fn operand_bytes(self) -> usize {
        match self {
            Self::F16Internals | Self::Bf16 => 2,
            Self::Tf32 | Self::Fp32 => 4,
        }
    }

    /// Name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16Internals => "f16-internals",
            Self::Bf16 => "bf16",
            Self::Tf32 => "tf32",
            Self::Fp32 => "fp32",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where the log decay comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// It is given: the tensor `g`.
    LogDecay,
    /// `g = -e^{A_log} softplus(a + dt_bias)` from the tensors `a`, `A_log` and `dt_bias`.
    Raw,
}

/// Where the write strength comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Beta {
    /// It is given: the tensor `beta`.
    Value,
    /// `beta = scale sigmoid(x)` from the tensor `beta_logit`.
    Logit {
        /// 1, or 2 where negative eigenvalues are allowed.
        scale: f32,
    },
}

/// What a kernel does beside the recurrence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// `s`, the factor on q.
    pub scale: f32,
    /// With a number, q and k are divided by `sqrt(sum of squares + eps)` first.
    pub qk_l2norm: Option<f32>,
    /// Where the log decay comes from.
    pub gate: Gate,
    /// Where the write strength comes from.
    pub beta: Beta,
    /// How states lie in memory.
    pub state_layout: StateLayout,
    /// Whether there is an initial state; zeros otherwise.
    pub initial_state: bool,
    /// Whether there is a gradient of the final state; zeros otherwise.
    pub d_final_state: bool,
    /// Whether the forward is one sweep that keeps nothing, for Hopper alone; its bits are others.
    pub fused: bool,
}

impl Options {
    /// Gates as they are, states `[K, V]` that begin at zero, and `s = K^-1/2`.
    pub fn new(key_dim: usize) -> Self {
        Self {
            scale: Inputs::default_scale(key_dim) as f32,
            qk_l2norm: None,
            gate: Gate::LogDecay,
            beta: Beta::Value,
            state_layout: StateLayout::KeyValue,
            initial_state: false,
            d_final_state: false,
            fused: false,
        }
    }
}

/// What a [`Plan`](super::Plan) is made for.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// Sizes. Tokens are counted on the flattened axis `B * T`.
    pub shape: Shape,
    /// Tokens of each sequence, one after the other without a gap; a sequence may be empty.
    pub sequences: Vec<Range<usize>>,
    /// Format of the operands.
    pub mode: Mode,
    /// Format of q, k, v, do and of o, dq, dk, dv: f32, bf16 or f16.
    pub input: Format,
    /// What a kernel does beside the recurrence.
    pub options: Options,
    /// Whether the backward will be asked for, which needs a larger workspace.
    pub backward: bool,
}

impl Setup {
    /// For `inputs`, with the options that they ask for.
    ///
    /// # Errors
    /// [`Error::Input`] where `inputs` do not validate, are not of GDN, or have no `do` for the backward.
    pub fn of_inputs(inputs: &Inputs, mode: Mode, input: Format, backward: bool) -> Result<Self> {
        inputs.validate()?;
        if inputs.op() != Op::Gdn {
            return Err(Error::input(format!("chunk: the operator {} has no kernel here: expected gdn", inputs.op())));
        }
        if backward && inputs.d_o.is_none() {
            return Err(Error::input("the backward needs 'do', the gradient of the output, shape [B, T, HV, V]"));
        }
        let options = Options {
            scale: inputs.scale as f32,
            initial_state: inputs.initial_state.is_some(),
            d_final_state: backward && inputs.d_final_state.is_some(),
            ..Options::new(inputs.shape.key_dim)
        };
        Ok(Self { shape: inputs.shape, sequences: inputs.sequence_ranges(), mode, input, options, backward })
    }

    /// What is compiled in because results depend on it.
    pub fn variant(&self) -> Variant {
        let Shape { key_dim, value_dim, value_heads, .. } = self.shape;
        Variant { mode: self.mode, input: self.input, key_dim, value_dim, value_heads }
    }

    /// Tokens of all sequences together.
    pub fn tokens(&self) -> usize {
        self.shape.batch * self.shape.tokens
    }

    /// Name, shape and format of each input.
    pub(super) fn input_tensors(&self) -> Vec<(&'static str, Vec<usize>, Format)> {
        let Self { shape, input, options, .. } = self;
        let (qk, value, gate) = (shape.qk_dims().to_vec(), shape.value_dims().to_vec(), shape.gate_dims().to_vec());
        let wide = Format::F32;
        let mut all = vec![("q", qk.clone(), *input), ("k", qk, *input), ("v", value.clone(), *input)];
        match options.gate {
            Gate::LogDecay => all.push(("g", gate.clone(), wide)),
            Gate::Raw => all.extend([
                ("a", gate.clone(), wide),
                ("A_log", vec![shape.value_heads], wide),
                ("dt_bias", vec![shape.value_heads], wide),
            ]),
        }
        all.push((self.write_tensor(), gate, wide));
        if options.initial_state {
            all.push(("initial_state", self.state_dims(), wide));
        }
        if self.backward {
            all.push(("do", value, *input));
        }
        if self.backward && options.d_final_state {
            all.push(("dht", self.state_dims(), wide));
        }
        all
    }

    /// Name, shape and format of each result.
    pub(super) fn output_tensors(&self) -> Vec<(&'static str, Vec<usize>, Format)> {
        let Self { shape, input, options, .. } = self;
        let (qk, value, gate) = (shape.qk_dims().to_vec(), shape.value_dims().to_vec(), shape.gate_dims().to_vec());
        let wide = Format::F32;
        let mut all = vec![("o", value.clone(), *input), ("final_state", self.state_dims(), wide)];
        if !self.backward {
            return all;
        }
        all.extend([("dq", qk.clone(), *input), ("dk", qk, *input), ("dv", value, *input)]);
        all.extend([("dg", gate.clone(), wide), ("dbeta", gate.clone(), wide), ("dh0", self.state_dims(), wide)]);
        if options.gate == Gate::Raw {
            let heads = vec![shape.value_heads];
            all.extend([("da", gate.clone(), wide), ("dA_log", heads.clone(), wide), ("ddt_bias", heads, wide)]);
        }
        if options.beta != Beta::Value {
            all.push(("dbeta_logit", gate, wide));
        }
        all
    }

    /// The tensor that the write strength comes from.
    pub(super) fn write_tensor(&self) -> &'static str {
        match self.options.beta {
            Beta::Value => "beta",
            Beta::Logit { .. } => "beta_logit",
        }
    }

    fn state_dims(&self) -> Vec<usize> {
        let [sequences, heads, key_dim, value_dim] = self.shape.state_dims(self.sequences.len());
        match self.options.state_layout {
            StateLayout::KeyValue => vec![sequences, heads, key_dim, value_dim],
            StateLayout::ValueKey => vec![sequences, heads, value_dim, key_dim],
        }
    }

    /// What there is to do side by side; an empty sequence is nothing.
    pub fn work(&self) -> Work {
        self.variant().work(&self.sequences)
    }

    /// Refuses what no kernel can take.
    ///
    /// # Errors
    /// [`Error::Input`] saying what was expected.
    pub fn validate(&self) -> Result<()> {
        self.shape.validate()?;
        self.variant().validate()?;
        check_sequences(&self.shape, &self.sequences)?;
        if self.options.fused {
            Fused::validate(self)?;
        }
        let Options { scale, qk_l2norm, beta, .. } = self.options;
        if !scale.is_finite() {
            return Err(Error::input(format!("chunk: scale = {scale}: expected a finite number")));
        }
        if let Some(eps) = qk_l2norm.filter(|eps| !(eps.is_finite() && *eps >= 0.0)) {
            return Err(Error::input(format!("chunk: qk_l2norm = {eps}: expected a finite number, at least 0")));
        }
        match beta {
            Beta::Logit { scale } if !(scale.is_finite() && scale > 0.0) => Err(Error::input(format!(
                "chunk: beta = {scale} sigmoid(x): expected a factor above 0, such as 1 or 2"
            ))),
            _ => Ok(()),
        }
    }
}

/// Refuses sequences that are not side by side on the token axis of `shape`, and more of them than blocks of a launch.
pub(super) fn check_sequences(shape: &Shape, sequences: &[Range<usize>]) -> Result<()> {
    let tokens_of_all = shape.batch * shape.tokens;
    let mut end = 0;
    for (n, tokens) in sequences.iter().enumerate() {
        if tokens.start != end || tokens.end < end {
            return Err(Error::input(format!(
                "chunk: sequence {n} has tokens {tokens:?}: expected them to begin at {end}, where the one before ends"
            )));
        }
        end = tokens.end;
    }
    if end != tokens_of_all || i32::try_from(end).is_err() {
        return Err(Error::input(format!(
            "chunk: the sequences end at token {end}: expected B T = {tokens_of_all}, below 2^31"
        )));
    }
    for (name, count) in [("N", sequences.len()), ("HV", shape.value_heads)] {
        if count > MAX_BLOCKS {
            return Err(Error::input(format!("chunk: {name} = {count}: expected {MAX_BLOCKS} at the most")));
        }
    }
    Ok(())
}
