//! Sizes of a language model, and its parameters tensor by tensor.
//!
//! With `D` the width of the residual stream, `L` blocks and `F` the hidden width of SwiGLU, a model is
//!
//! ```text
//! x = E[token]                                      embedding, vocabulary x D
//! L times:  x = x + mixer(RMSNorm(x))               attention or GDN
//!           x = x + W_down (silu(W_gate y) * W_up y)    y = RMSNorm(x), SwiGLU, 3 D F
//! logits = W_head RMSNorm(x)                        head, vocabulary x D, not tied to the embedding
//! ```
//!
//! without a bias in any projection. The mixers, with `H` heads of key dimension `K` and value dimension `V`:
//!
//! - *attention*: projections q, k, v, o with `4 D^2`, `H K = D`, rotary positions, causal softmax;
//! - *GDN*: q and k `2 D H K`, v, the output gate and o `3 D H V`, a and b `2 D H`; a causal depthwise convolution of
//!   width 4 and SiLU on q, k and v; `A_log` and `dt_bias`, `H` each; a gated RMSNorm over `V`, whose weight all heads
//!   share. In the ladder `H K = 3/4 D` and `V = 2 K`, so `6 D^2` for its projections.

use crate::problem::MAX_HEAD_DIM;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Tokens that a channel of GDN's short convolution sees.
pub const CONV_WIDTH: usize = 4;
/// Head dimensions are multiples of this.
pub const HEAD_DIM_STEP: usize = 32;
/// Widths and the vocabulary are multiples of this, so that rows of 16-bit elements begin at multiples of 16 bytes.
const WIDTH_STEP: usize = 8;
/// SwiGLU's hidden width is a multiple of this in [`swiglu_hidden`].
const HIDDEN_STEP: usize = 256;
/// No width, vocabulary or number of blocks and heads is larger; products of three of them fit `u64` by far.
const LARGEST: usize = 1 << 20;

/// What mixes the tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Mixer {
    /// Causal softmax attention.
    #[serde(rename = "attn")]
    Attention,
    /// Gated DeltaNet.
    #[serde(rename = "gdn")]
    Gdn,
}

impl Mixer {
    /// Both mixers.
    pub const ALL: [Self; 2] = [Self::Attention, Self::Gdn];

    /// Name as used in files and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attention => "attn",
            Self::Gdn => "gdn",
        }
    }
}

impl fmt::Display for Mixer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mixer {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|mixer| mixer.name() == text)
            .ok_or_else(|| Error::input(format!("unknown mixer '{text}': expected attn or gdn")))
    }
}

/// A rung of the ladder, or the model that a CPU trains in seconds. The names count what an attention model has without
/// embedding and head, about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Size {
    /// `D = 64`, 2 blocks, a vocabulary of bytes.
    #[serde(rename = "tiny")]
    Tiny,
    /// `D = 512`, 10 blocks.
    #[serde(rename = "30M")]
    M30,
    /// `D = 768`, 9 blocks.
    #[serde(rename = "60M")]
    M60,
    /// `D = 768`, 18 blocks.
    #[serde(rename = "125M")]
    M125,
    /// `D = 1024`, 20 blocks.
    #[serde(rename = "250M")]
    M250,
}

impl Size {
    /// All sizes.
    pub const ALL: [Self; 5] = [Self::Tiny, Self::M30, Self::M60, Self::M125, Self::M250];
    /// The rungs of the ladder.
    pub const LADDER: [Self; 4] = [Self::M30, Self::M60, Self::M125, Self::M250];

    /// Name as used in files and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::M30 => "30M",
            Self::M60 => "60M",
            Self::M125 => "125M",
            Self::M250 => "250M",
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Size {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|size| size.name() == text)
            .ok_or_else(|| Error::input(format!("unknown size '{text}': expected tiny, 30M, 60M, 125M or 250M")))
    }
}

/// All sizes of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Number of different tokens.
    pub vocabulary: usize,
    /// `D`, the width of the residual stream.
    pub d_model: usize,
    /// `L`, the number of blocks.
    pub layers: usize,
    /// What mixes the tokens.
    pub mixer: Mixer,
    /// `H`, heads of the mixer, for queries, keys and values alike.
    pub heads: usize,
    /// `K` = d_k of a head.
    pub key_dim: usize,
    /// `V` = d_v of a head; attention has `V = K`.
    pub value_dim: usize,
    /// `F`, the hidden width of SwiGLU.
    pub hidden: usize,
}

/// `256 ceil(8 D / 3 / 256)`: SwiGLU's three matrices then have about the `8 D^2` parameters of the classic MLP of width
/// `4 D`.
pub fn swiglu_hidden(d_model: usize) -> usize {
    (8 * d_model).div_ceil(3 * HIDDEN_STEP) * HIDDEN_STEP
}

impl ModelConfig {
    /// The model of this size with this mixer. The ladder has a vocabulary of 32,000, attention heads of 64, and GDN
    /// heads of `K = 64` and `V = 128` with `H K = 3/4 D`.
    pub fn preset(mixer: Mixer, size: Size) -> Self {
        let (vocabulary, d_model, layers) = match size {
            Size::Tiny => (256, 64, 2),
            Size::M30 => (32_000, 512, 10),
            Size::M60 => (32_000, 768, 9),
            Size::M125 => (32_000, 768, 18),
            Size::M250 => (32_000, 1024, 20),
        };
        let (heads, key_dim, value_dim) = match (mixer, size) {
            (Mixer::Attention, Size::Tiny) => (2, 32, 32),
            (Mixer::Gdn, Size::Tiny) => (2, 32, 64),
            (Mixer::Attention, _) => (d_model / 64, 64, 64),
            (Mixer::Gdn, _) => (3 * d_model / 4 / 64, 64, 128),
        };
        Self { vocabulary, d_model, layers, mixer, heads, key_dim, value_dim, hidden: swiglu_hidden(d_model) }
    }

    /// Refuses sizes that no model of the ladder can have: none or too many of something, widths that the kernels do not
    /// take, attention heads that do not share `D` evenly.
    ///
    /// # Errors
    /// [`Error::Input`] with the size, what was expected, and the nearest that would do.
    pub fn validate(&self) -> Result<()> {
        let widths = [("vocabulary", self.vocabulary), ("d_model", self.d_model), ("hidden", self.hidden)];
        for (name, size) in widths.into_iter().chain([("layers", self.layers), ("heads", self.heads)]) {
            if !(1..=LARGEST).contains(&size) {
                return Err(Error::input(format!("{name} = {size}: expected 1 to {LARGEST}")));
            }
        }
        for (name, width) in widths {
            require_multiple(name, width, WIDTH_STEP, "rows of 16-bit elements begin at multiples of 16 bytes")?;
        }
        for (name, dim) in [("key_dim", self.key_dim), ("value_dim", self.value_dim)] {
            if !(1..=MAX_HEAD_DIM).contains(&dim) {
                return Err(Error::input(format!("{name} = {dim}: expected {HEAD_DIM_STEP} to {MAX_HEAD_DIM}")));
            }
            require_multiple(name, dim, HEAD_DIM_STEP, "the kernels take whole tiles of a head")?;
        }
        if self.mixer == Mixer::Attention {
            if self.value_dim != self.key_dim {
                return Err(Error::input(format!(
                    "attention with key_dim = {} and value_dim = {}: expected the same",
                    self.key_dim, self.value_dim
                )));
            }
            if self.key_width() != self.d_model {
                return Err(Error::input(format!(
                    "{} attention heads of {} make {}, and d_model is {}: expected equal, such as d_model = {} or another number of heads",
                    self.heads,
                    self.key_dim,
                    self.key_width(),
                    self.d_model,
                    self.key_width()
                )));
            }
        }
        Ok(())
    }

    /// `H K`, the width of q and of k.
    pub fn key_width(&self) -> usize {
        self.heads * self.key_dim
    }

    /// `H V`, the width of v and o.
    pub fn value_width(&self) -> usize {
        self.heads * self.value_dim
    }

    /// Every parameter, in the order of the forward: the embedding, the blocks, the last norm, the head. Matrices are
    /// `[out, in]`, row-major, convolutions `[channels, width]`.
    pub fn parameter_tensors(&self) -> Vec<ParameterTensor> {
        let tensor = |name: String, group, dims: &[usize]| ParameterTensor { name, group, dims: dims.to_vec() };
        let mut tensors =
            vec![tensor("embedding".to_owned(), ParameterGroup::Embedding, &[self.vocabulary, self.d_model])];
        let block = self.block_tensors();
        for layer in 0..self.layers {
            tensors
                .extend(block.iter().map(|(name, group, dims)| tensor(format!("layers.{layer}.{name}"), *group, dims)));
        }
        tensors.push(tensor("final_norm".to_owned(), ParameterGroup::Norm, &[self.d_model]));
        tensors.push(tensor("head".to_owned(), ParameterGroup::Head, &[self.vocabulary, self.d_model]));
        tensors
    }

    /// Name, group and dimensions of the parameters of one block.
    fn block_tensors(&self) -> Vec<(&'static str, ParameterGroup, Vec<usize>)> {
        let (d, hidden, heads) = (self.d_model, self.hidden, self.heads);
        let (keys, values) = (self.key_width(), self.value_width());
        let mut mixer = vec![
            ("mixer.q", vec![keys, d]),
            ("mixer.k", vec![keys, d]),
            ("mixer.v", vec![values, d]),
            ("mixer.o", vec![d, values]),
        ];
        if self.mixer == Mixer::Gdn {
            mixer.extend([
                ("mixer.gate", vec![values, d]),
                ("mixer.a", vec![heads, d]),
                ("mixer.b", vec![heads, d]),
                ("mixer.conv_q", vec![keys, CONV_WIDTH]),
                ("mixer.conv_k", vec![keys, CONV_WIDTH]),
                ("mixer.conv_v", vec![values, CONV_WIDTH]),
                ("mixer.A_log", vec![heads]),
                ("mixer.dt_bias", vec![heads]),
                ("mixer.norm", vec![self.value_dim]),
            ]);
        }
        let mut block = vec![("mixer_norm", ParameterGroup::Norm, vec![d])];
        block.extend(mixer.into_iter().map(|(name, dims)| (name, ParameterGroup::Mixer, dims)));
        block.push(("mlp_norm", ParameterGroup::Norm, vec![d]));
        let mlp = [("mlp.gate", vec![hidden, d]), ("mlp.up", vec![hidden, d]), ("mlp.down", vec![d, hidden])];
        block.extend(mlp.into_iter().map(|(name, dims)| (name, ParameterGroup::Mlp, dims)));
        block
    }

    /// The parameters counted, exactly, for a model that [`ModelConfig::validate`] lets pass.
    pub fn parameters(&self) -> ParameterCount {
        let mut count = ParameterCount::default();
        let mut add = |group, dims: &[usize], times: usize| {
            let elements = (dims.iter().product::<usize>() * times) as u64;
            match group {
                ParameterGroup::Embedding => count.embedding += elements,
                ParameterGroup::Norm => count.norms += elements,
                ParameterGroup::Mixer => count.mixer += elements,
                ParameterGroup::Mlp => count.mlp += elements,
                ParameterGroup::Head => count.head += elements,
            }
            if dims.len() == 1 {
                count.vectors += elements;
            }
        };
        for (_, group, dims) in self.block_tensors() {
            add(group, &dims, self.layers);
        }
        add(ParameterGroup::Norm, &[self.d_model], 1);
        add(ParameterGroup::Embedding, &[self.vocabulary, self.d_model], 1);
        add(ParameterGroup::Head, &[self.vocabulary, self.d_model], 1);
        count
    }
}

/// Such as `gdn, 18 blocks of width 768, 9 heads 64/128`.
impl fmt::Display for ModelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { d_model, layers, mixer, heads, key_dim, value_dim, .. } = self;
        write!(f, "{mixer}, {layers} blocks of width {d_model}, {heads} heads {key_dim}/{value_dim}")
    }
}

fn require_multiple(name: &str, size: usize, step: usize, reason: &str) -> Result<()> {
    if size.is_multiple_of(step) {
        return Ok(());
    }
    Err(Error::input(format!(
        "{name} = {size}: expected a multiple of {step}, such as {}, since {reason}",
        size.next_multiple_of(step)
    )))
}

/// The part of the model that a parameter belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParameterGroup {
    /// Rows that tokens are replaced by.
    Embedding,
    /// The RMSNorms of the residual stream.
    Norm,
    /// Attention or GDN.
    Mixer,
    /// SwiGLU.
    Mlp,
    /// The projection to logits.
    Head,
}

/// One parameter of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterTensor {
    /// Name, such as `layers.3.mixer.q`.
    pub name: String,
    /// Part of the model.
    pub group: ParameterGroup,
    /// Dimensions: one for a vector, two for a matrix or a convolution.
    pub dims: Vec<usize>,
}

impl ParameterTensor {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.dims.iter().map(|&dim| dim as u64).product()
    }

    /// Whether it is a vector, which scales or shifts element by element and has no part in a product.
    pub fn is_vector(&self) -> bool {
        self.dims.len() == 1
    }
}

/// Parameters by the part of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParameterCount {
    /// Of the embedding.
    pub embedding: u64,
    /// Of the RMSNorms of the residual stream, the last one too.
    pub norms: u64,
    /// Of the mixers.
    pub mixer: u64,
    /// Of SwiGLU.
    pub mlp: u64,
    /// Of the head.
    pub head: u64,
    /// How many of all these stand in vectors: norms, `A_log`, `dt_bias`.
    pub vectors: u64,
}

impl ParameterCount {
    /// All but embedding and head.
    pub fn body(&self) -> u64 {
        self.norms + self.mixer + self.mlp
    }

    /// All.
    pub fn total(&self) -> u64 {
        self.body() + self.embedding + self.head
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
