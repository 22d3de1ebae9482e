//! Peak memory of a training step, known before anything is allocated.
//!
//! With `N` parameters, `L` blocks and a step of `B T` tokens, everything in bytes and nothing sharing memory:
//!
//! ```text
//! M = 16 N + L A_kept + X + max over half-blocks h (A_h + E_h) + logits + workspace
//! ```
//!
//! - `16 N`: fp32 master weight, AdamW's `m` and `v` (12), bf16 weight (2) and gradient (2).
//! - `A_kept`: what the forward of one block leaves to its backward, the sum over [`block_activations`]. Those of them that
//!   follow from another one element by element (norms, SiLU, convolution, gates) need not stay, see [`Keep`].
//! - `X`: residual stream, its gradient and the last norm's output, 2 D each per token, and the tokens with their targets,
//!   8.
//! - the backward of a half-block (mixer or SwiGLU) holds at the most a gradient of each of its activations, `A_h`, and
//!   those that it recomputes, `E_h`, which is 0 where they were kept.
//! - logits: bf16, overwritten by their gradients, `2 vocabulary` per token, or of as many tokens as are held at once.
//! - workspace: 64 MiB, of the library of products and for sums over blocks.

use super::model::Batch;
use crate::model::config::{Mixer, ModelConfig};
use crate::{Error, Result};
use std::fmt;

/// fp32 master weight, `m`, `v`; bf16 weight; bf16 gradient.
const BYTES_PER_PARAMETER: u128 = 12 + 2 + 2;
/// Bytes of an activation, a bf16 number; also of what GDN's kernels leave to each other.
const BF16: u128 = 2;
const FP32: u128 = 4;
/// Tokens of a chunk of GDN, whose inverse and whose first state the forward leaves to the backward.
const CHUNK: usize = 64;
const WORKSPACE_BYTES: u128 = 64 << 20;

/// What a step keeps between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// Whether activations stay that follow from others element by element. Where they do not, the backward computes them
    /// again.
    pub elementwise: bool,
    /// Tokens whose logits are held at once; `None`: those of the whole step.
    pub logit_tokens: Option<usize>,
}

impl Keep {
    /// Everything, as a framework does that runs one operator after the other. The published peaks of PyTorch lie within
    /// 5 % of the estimate with this.
    pub const ALL: Self = Self { elementwise: true, logit_tokens: None };
    /// Nothing that follows element by element.
    pub const LEAN: Self = Self { elementwise: false, logit_tokens: None };
}

/// Half a block, with its norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalfBlock {
    /// Attention or GDN.
    Mixer,
    /// SwiGLU.
    Mlp,
}

/// One thing that the forward of a block computes and its backward needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activation {
    /// What it is.
    pub name: &'static str,
    /// Where it belongs.
    pub half: HalfBlock,
    /// Bytes for all tokens of the step.
    pub bytes: u128,
    /// Whether it follows from another activation element by element, or from a few neighbours.
    pub elementwise: bool,
}

/// What the forward of one block computes and its backward needs.
///
/// | half | activation | elements per token | |
/// |---|---|---|---|
/// | both | residual stream before the norm | `D` | |
/// | both | `1 / RMS` | 1, fp32 | |
/// | both | output of the norm | `D` | elementwise |
/// | attention | q, k, v after the rotation; o | `4 D` | |
/// | attention | logarithm of each row's sum | `H`, fp32 | |
/// | GDN | q, k, v before the convolution | `H (2 K + V)` | |
/// | GDN | after convolution and SiLU | `H (2 K + V)` | elementwise |
/// | GDN | q, k of norm 1 | `2 H K` | elementwise |
/// | GDN | `1 / norm` of q and k | `2 H`, fp32 | elementwise |
/// | GDN | a, b | `2 H` | |
/// | GDN | g, beta | `2 H`, fp32 | |
/// | GDN | inverse of a chunk, `T` | `64 H` | |
/// | GDN | state at the start of a chunk | `H K V / 64` | |
/// | GDN | o; output gate | `2 H V` | |
/// | GDN | `1 / RMS` of o | `H`, fp32 | elementwise |
/// | GDN | gated norm of o | `H V` | elementwise |
/// | SwiGLU | gate, up | `2 F` | |
/// | SwiGLU | their product | `F` | elementwise |
///
/// bf16 where nothing else is said.
pub fn block_activations(config: &ModelConfig, batch: &Batch) -> Vec<Activation> {
    let tokens = batch.total_tokens();
    let bf16 = |width: usize| tokens.saturating_mul(BF16 * width as u128);
    let fp32 = |width: usize| tokens.saturating_mul(FP32 * width as u128);
    let of = |half, name, bytes, elementwise| Activation { name, half, bytes, elementwise };
    let (d, heads, keys, values) = (config.d_model, config.heads, config.key_width(), config.value_width());
    let norm = |half| {
        [
            of(half, "residual stream", bf16(d), false),
            of(half, "1 / RMS", fp32(1), false),
            of(half, "norm", bf16(d), true),
        ]
    };
    let mut activations: Vec<Activation> = norm(HalfBlock::Mixer).into();
    let mixer = |name, bytes| of(HalfBlock::Mixer, name, bytes, false);
    let follows = |name, bytes| of(HalfBlock::Mixer, name, bytes, true);
    match config.mixer {
        Mixer::Attention => activations.extend([
            mixer("q, k, v", bf16(2 * keys + values)),
            mixer("o", bf16(values)),
            mixer("logarithm of each row's sum", fp32(heads)),
        ]),
        Mixer::Gdn => {
            let chunks = (batch.sequences as u128).saturating_mul(batch.tokens.div_ceil(CHUNK) as u128);
            activations.extend([
                mixer("q, k, v before the convolution", bf16(2 * keys + values)),
                follows("q, k, v after the convolution", bf16(2 * keys + values)),
                follows("q, k of norm 1", bf16(2 * keys)),
                follows("1 / norm of q, k", fp32(2 * heads)),
                mixer("a, b", bf16(2 * heads)),
                mixer("g, beta", fp32(2 * heads)),
                mixer("inverse of each chunk", chunks.saturating_mul(BF16 * (heads * CHUNK * CHUNK) as u128)),
                mixer("state of each chunk", chunks.saturating_mul(BF16 * (keys * config.value_dim) as u128)),
                mixer("o", bf16(values)),
                mixer("output gate", bf16(values)),
                follows("1 / RMS of o", fp32(heads)),
                follows("gated norm of o", bf16(values)),
            ]);
        }
    }
    activations.extend(norm(HalfBlock::Mlp));
    activations.extend([
        of(HalfBlock::Mlp, "gate, up", bf16(2 * config.hidden), false),
        of(HalfBlock::Mlp, "silu(gate) * up", bf16(config.hidden), true),
    ]);
    activations
}

/// The peak memory of a training step by what fills it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainingMemory {
    /// Weights in fp32 and bf16, AdamW's two moments, gradients of the weights.
    pub parameter_bytes: u128,
    /// What the forward keeps for the backward, in all blocks and around them.
    pub activation_bytes: u128,
    /// Gradients of activations and recomputed ones, in the half-block with the most.
    pub backward_bytes: u128,
    /// Logits and, in their place, the gradients of those.
    pub logit_bytes: u128,
    /// Workspace of libraries and sums.
    pub workspace_bytes: u128,
}

impl TrainingMemory {
    /// Of a step of `config` on `batch`: the formula of the [module](self).
    pub fn new(config: &ModelConfig, batch: &Batch, keep: Keep) -> Self {
        let tokens = batch.total_tokens();
        let activations = block_activations(config, batch);
        let sum = |of: &dyn Fn(&Activation) -> bool| {
            activations.iter().filter(|a| of(a)).fold(0u128, |sum, a| sum.saturating_add(a.bytes))
        };
        let kept = sum(&|activation| keep.elementwise || !activation.elementwise);
        let backward = [HalfBlock::Mixer, HalfBlock::Mlp].map(|half| {
            let recomputed = sum(&|activation| activation.half == half && activation.elementwise && !keep.elementwise);
            sum(&|activation| activation.half == half).saturating_add(recomputed)
        });
        let around = tokens.saturating_mul(3 * BF16 * config.d_model as u128 + 8);
        let logit_tokens = keep.logit_tokens.map_or(tokens, |held| tokens.min(held as u128));
        Self {
            parameter_bytes: BYTES_PER_PARAMETER * u128::from(config.parameters().total()),
            activation_bytes: kept.saturating_mul(config.layers as u128).saturating_add(around),
            backward_bytes: backward[0].max(backward[1]),
            logit_bytes: logit_tokens.saturating_mul(BF16 * config.vocabulary as u128),
            workspace_bytes: WORKSPACE_BYTES,
        }
    }

    /// All of it.
    pub fn total_bytes(&self) -> u128 {
        let parts =
            [self.parameter_bytes, self.activation_bytes, self.backward_bytes, self.logit_bytes, self.workspace_bytes];
        parts.into_iter().fold(0, u128::saturating_add)
    }
}

/// Such as `30.1 GB: weights, gradients and optimizer 5.2, activations 21.9, backward 0.9, logits 2.1, workspace 0.1`.
impl fmt::Display for TrainingMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: u128| bytes as f64 / 1e9;
        write!(
            f,
            "{:.1} GB: weights, gradients and optimizer {:.1}, activations {:.1}, backward {:.1}, logits {:.1}, workspace {:.1}",
            gb(self.total_bytes()),
            gb(self.parameter_bytes),
            gb(self.activation_bytes),
            gb(self.backward_bytes),
            gb(self.logit_bytes),
            gb(self.workspace_bytes)
        )
    }
}

/// Refuses a step that needs more than `free_bytes`, and tells how many sequences would fit.
///
/// # Errors
/// [`Error::Input`] with what is needed, part by part, what is free, and the remedy; also for a model or a batch that is
/// none.
pub fn require(config: &ModelConfig, batch: &Batch, keep: Keep, free_bytes: usize) -> Result<TrainingMemory> {
    require_counted(config, batch, free_bytes, |batch| TrainingMemory::new(config, batch, keep))
}

/// The same for a step whose memory is `counted` otherwise, for the batch and any with fewer sequences.
///
/// # Errors
/// As [`require`].
pub fn require_counted(
    config: &ModelConfig,
    batch: &Batch,
    free_bytes: usize,
    counted: impl Fn(&Batch) -> TrainingMemory,
) -> Result<TrainingMemory> {
    config.validate()?;
    batch.validate()?;
    let memory = counted(batch);
    let fits = |sequences| counted(&Batch { sequences, ..*batch }).total_bytes() <= free_bytes as u128;
    if memory.total_bytes() <= free_bytes as u128 {
        return Ok(memory);
    }
    let remedy = match largest_batch(batch.sequences, fits) {
        0 => "use shorter sequences, a smaller model or a larger GPU".to_owned(),
        sequences => format!("use B = {sequences} or less"),
    };
    Err(Error::input(format!(
        "a step of {config} on {batch} needs about {memory}; {:.1} GB are free: {remedy}",
        free_bytes as f64 / 1e9
    )))
}

/// The largest number of sequences below `too_many` that fits; what is needed grows with it.
fn largest_batch(too_many: usize, fits: impl Fn(usize) -> bool) -> usize {
    // `low` fits or is 0, `high` does not fit.
    let (mut low, mut high) = (0, too_many);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
