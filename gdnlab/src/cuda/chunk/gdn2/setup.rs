//! What a plan of GDN-2 is made for.

use super::config;
use crate::cuda::chunk::Mode;
use crate::cuda::chunk::config::Variant;
use crate::cuda::chunk::setup::check_sequences;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Shape};
use crate::reference::gate::MIN_LOWER_BOUND;
use crate::{Error, Result};
use std::ops::Range;

/// Elements of a tensor that the kernels count at the most.
const MOST_ELEMENTS: usize = u32::MAX as usize;

/// Where the log decay comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// It is given: the tensor `g`.
    Log,
    /// `g = -e^{A_log} softplus(a + dt_bias)` from the tensors `a`, `A_log` and `dt_bias`.
    Softplus,
    /// `g = lower_bound sigmoid(e^{A_log} (a + dt_bias))` from the same.
    Bounded {
        /// From -5 to below 0.
        lower_bound: f32,
    },
}

/// Where the backward has the states at the starts of chunks from. The bits of all results are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum States {
    /// It computes them again.
    Recomputed,
    /// The forward before it has kept them.
    Retained,
}

/// What a kernel does beside the recurrence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// `s`, the factor on q.
    pub scale: f32,
    /// Where the log decay comes from.
    pub decay: Decay,
    /// Format of b, w, db and dw: f32, bf16 or f16.
    pub gates: Format,
    /// Whether there is an initial state; zeros otherwise.
    pub initial_state: bool,
    /// Whether there is a gradient of the final state; zeros otherwise.
    pub d_final_state: bool,
    /// Where the backward has states from.
    pub states: States,
}

impl Options {
    /// Gates in f32 as they are, states that begin at zero and are computed again, and `s = K^-1/2`.
    pub fn new(key_dim: usize) -> Self {
        Self {
            scale: Inputs::default_scale(key_dim) as f32,
            decay: Decay::Log,
            gates: Format::F32,
            initial_state: false,
            d_final_state: false,
            states: States::Recomputed,
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
    /// [`Error::Input`] where `inputs` do not validate, are not of GDN-2, or have no `do` for the backward.
    pub fn of_inputs(inputs: &Inputs, mode: Mode, input: Format, backward: bool) -> Result<Self> {
        inputs.validate()?;
        if inputs.op() != Op::Gdn2 {
            return Err(Error::input(format!("gdn2: the operator {} has no kernel here: expected gdn2", inputs.op())));
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

    /// Whether the forward keeps what the backward needs of the states.
    pub(super) fn retains(&self) -> bool {
        self.backward && self.options.states == States::Retained
    }

    /// Whether the log decay is made of a raw gate.
    pub(super) fn raw(&self) -> bool {
        self.options.decay != Decay::Log
    }

    /// Whether value heads share q/k heads.
    pub(super) fn grouped(&self) -> bool {
        self.shape.group() > 1
    }

    /// Name, shape and format of each input.
    pub(super) fn input_tensors(&self) -> Vec<(&'static str, Vec<usize>, Format)> {
        let Self { shape, input, options, .. } = self;
        let (qk, value) = (shape.qk_dims().to_vec(), shape.value_dims().to_vec());
        let (gate, wide) = (shape.channel_gate_dims().to_vec(), Format::F32);
        let mut all = vec![("q", qk.clone(), *input), ("k", qk, *input), ("v", value.clone(), *input)];
        if self.raw() {
            all.extend([
                ("a", gate.clone(), wide),
                ("A_log", vec![shape.value_heads], wide),
                ("dt_bias", vec![shape.value_heads, shape.key_dim], wide),
            ]);
        } else {
            all.push(("g", gate.clone(), wide));
        }
        all.extend([("b", gate, options.gates), ("w", value.clone(), options.gates)]);
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
        let (qk, value) = (shape.qk_dims().to_vec(), shape.value_dims().to_vec());
        let (gate, wide) = (shape.channel_gate_dims().to_vec(), Format::F32);
        let mut all = vec![("o", value.clone(), *input), ("final_state", self.state_dims(), wide)];
        if !self.backward {
            return all;
        }
        all.extend([("dq", qk.clone(), *input), ("dk", qk, *input), ("dv", value.clone(), *input)]);
        all.extend([("dg", gate.clone(), wide), ("db", gate.clone(), options.gates), ("dw", value, options.gates)]);
        all.push(("dh0", self.state_dims(), wide));
        if self.raw() {
            let heads = shape.value_heads;
            all.extend([("da", gate, wide), ("dA_log", vec![heads], wide)]);
            all.push(("ddt_bias", vec![heads, shape.key_dim], wide));
        }
        all
    }

    fn state_dims(&self) -> Vec<usize> {
        self.shape.state_dims(self.sequences.len()).to_vec()
    }

    /// Refuses what no kernel can take.
    ///
    /// # Errors
    /// [`Error::Input`] saying what was expected.
    pub fn validate(&self) -> Result<()> {
        self.shape.validate()?;
        config::validate(&self.variant(), self.options.gates)?;
        check_sequences(&self.shape, &self.sequences)?;
        let Shape { value_heads, key_dim, value_dim, .. } = self.shape;
        let elements = self.tokens().saturating_mul(value_heads * key_dim.max(value_dim));
        if elements > MOST_ELEMENTS {
            return Err(Error::input(format!(
                "gdn2: {}: {elements} elements in a tensor: expected below 2^32",
                self.shape
            )));
        }
        let Options { scale, decay, .. } = self.options;
        if !scale.is_finite() {
            return Err(Error::input(format!("gdn2: scale = {scale}: expected a finite number")));
        }
        match decay {
            Decay::Bounded { lower_bound } if !(MIN_LOWER_BOUND as f32..0.0).contains(&lower_bound) => {
                Err(Error::input(format!(
                    "gdn2: a lower bound of {lower_bound}: expected one from {MIN_LOWER_BOUND} to below 0"
                )))
            }
            _ => Ok(()),
        }
    }
}
