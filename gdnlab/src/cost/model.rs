//! What one token of training costs a language model: FLOPs, bytes, the state it leaves, and where attention and GDN
//! cross.
//!
//! The formulas are those of the post "Research Sprint Day 2", whose tables they reproduce. `D` is the width, `L` the
//! number of blocks, `K` and `V` the head dimensions, `H` the heads, and a step trains on `B` sequences of `T` tokens.

use super::{Cost, Rates};
use crate::model::config::{Mixer, ModelConfig, ParameterCount};
use crate::{Error, Result};
use std::fmt;

/// FLOPs per parameter and token: a multiply-add in the forward and two in the backward, for the gradients of the input
/// and of the weight.
const FLOP_PER_PARAMETER: f64 = 6.0;

/// Bytes per parameter and step: AdamW reads and writes master weight, `m` and `v` and reads a gradient, all in fp32
/// (28), forward and backward read the bf16 weight (4), the backward writes a bf16 gradient (2).
const BYTES_PER_PARAMETER: f64 = 28.0 + 4.0 + 2.0;

/// The sequences of one training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// `B`.
    pub sequences: usize,
    /// `T`, tokens of each.
    pub tokens: usize,
}

impl Batch {
    /// That of the published ladder.
    pub const LADDER: Self = Self { sequences: 32, tokens: 1024 };

    /// `B T`, without overflow.
    pub fn total_tokens(&self) -> u128 {
        self.sequences as u128 * self.tokens as u128
    }

    /// Refuses a step without tokens.
    ///
    /// # Errors
    /// [`Error::Input`] with both sizes.
    pub fn validate(&self) -> Result<()> {
        if self.sequences == 0 || self.tokens == 0 {
            return Err(Error::input(format!("{self}: expected at least 1 of each")));
        }
        Ok(())
    }
}

/// Such as `B = 32, T = 1024`.
impl fmt::Display for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "B = {}, T = {}", self.sequences, self.tokens)
    }
}

/// Arithmetic and traffic of one token in a training step, forward and backward and its share of the optimizer's.
///
/// ```text
/// F = 6 (N_body + vocabulary D) + 6 T D L     attention
///     6 (N_body + vocabulary D) + 18 D V L    GDN
/// B = 34 N / (B T) + 104 D L                  attention
///     34 N / (B T) +  78 D L                  GDN
/// ```
///
/// `N` counts embedding, head and body, `N_body` the body alone, both without vectors: the weight of a norm has no part
/// in a product. The embedding is looked up, so only the head counts in `F`.
///
/// *Attention*, `6 T D L`: a query sees `T/2` keys on the average. Its scores and its output cost `2 D T/2` each, the
/// backward twice as much: `3 * 2 D T = 6 T D` per block.
///
/// *GDN*, `18 D V L`: written as `S = alpha S + (beta v - alpha beta S k) k^T`, a token needs `S k`, one outer product and
/// `S q`, so `3 * 2 K V` per head or `6 D V` where `H K = D`, and three times that with the backward. The ladder has
/// `H K = 3/4 D`, for which `18 H K V` would be a quarter less: 0.6 % of `F` at 250M. The post counts `D`, and so it stays.
///
/// *Bytes*: 34 per parameter and step, shared by the tokens of the step: AdamW in fp32 28 (three tensors read and
/// written, a gradient read), the bf16 weight read twice, the bf16 gradient written. The rest is activations that every
/// token reads and writes in each block, as 104 D or 78 D bytes. The post gives the resulting numbers without a formula:
/// of all whole constants these alone reproduce its table, see the tests. It is a model of the least traffic of a step,
/// not of what an implementation moves.
pub fn training_cost_per_token(config: &ModelConfig, batch: &Batch) -> Cost {
    let count = config.parameters();
    let (width, layers) = (config.d_model as f64, config.layers as f64);
    let (mixing_flop, activation_bytes) = match config.mixer {
        Mixer::Attention => (6.0 * batch.tokens as f64 * width * layers, 104.0),
        Mixer::Gdn => (18.0 * width * config.value_dim as f64 * layers, 78.0),
    };
    Cost {
        flop: FLOP_PER_PARAMETER * (multiplied_in_body(&count) + count.head as f64) + mixing_flop,
        bytes: BYTES_PER_PARAMETER * (multiplied_in_body(&count) + (count.embedding + count.head) as f64)
            / batch.total_tokens() as f64
            + activation_bytes * width * layers,
    }
}

/// Parameters of the body that stand in matrices and convolutions.
fn multiplied_in_body(count: &ParameterCount) -> f64 {
    (count.body() - count.vectors) as f64
}

/// What a measured rate of training makes of a machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Utilization {
    /// Microseconds per token.
    pub us_per_tok: f64,
    /// FLOPs of the formula per second, in units of 10^12.
    pub tflop_s: f64,
    /// Bytes of the formula per second, in units of 10^9.
    pub gb_s: f64,
    /// Model FLOP utilization: FLOPs of the formula per second over the machine's measured rate of products, where that
    /// is known.
    pub mfu: Option<f64>,
    /// Bytes of the formula per second over the machine's measured copy bandwidth.
    pub bandwidth_fraction: f64,
}

impl Utilization {
    /// A model whose token costs `per_token`, trained at `tok_per_s`.
    pub fn new(per_token: &Cost, tok_per_s: f64, rates: &Rates) -> Self {
        let (flop_per_s, bytes_per_s) = (per_token.flop * tok_per_s, per_token.bytes * tok_per_s);
        Self {
            us_per_tok: 1e6 / tok_per_s,
            tflop_s: flop_per_s / 1e12,
            gb_s: bytes_per_s / 1e9,
            mfu: rates.matmul_flop_per_s.map(|rate| flop_per_s / rate),
            bandwidth_fraction: bytes_per_s / rates.copy_bytes_per_s,
        }
    }
}

/// Elements that one block keeps of a sequence of `tokens` tokens in order to go on with it: `T H (K + V)` for attention,
/// which keeps all keys and values, `H K V` for GDN at any length.
pub fn state_elements_per_layer(config: &ModelConfig, tokens: usize) -> u128 {
    let [heads, key_dim, value_dim] = [config.heads, config.key_dim, config.value_dim].map(|size| size as u128);
    match config.mixer {
        Mixer::Attention => tokens as u128 * heads * (key_dim + value_dim),
        Mixer::Gdn => heads * key_dim * value_dim,
    }
}

/// The length from which on GDN's state is smaller than what attention keeps, for equal heads:
///
/// ```text
/// T H (K + V) = H K V    =>    T* = K V / (K + V)
/// ```
///
/// At length `T` it is smaller by the factor `T / T*`.
pub fn state_crossover_tokens(key_dim: usize, value_dim: usize) -> f64 {
    let (key_dim, value_dim) = (key_dim as f64, value_dim as f64);
    key_dim * value_dim / (key_dim + value_dim)
}

/// The length from which on a GDN block needs fewer FLOPs than one of attention, in the post's geometry: `H K = D` and
/// `H V = 2 D`, where GDN's projections q and k have `2 D^2` parameters and v, gate and o `6 D^2`, against the `4 D^2` of
/// attention:
///
/// ```text
/// 24 D^2 + 6 T D = 48 D^2 + 18 D V    =>    T* = 4 D + 3 V
/// ```
///
/// For the models of the ladder, whose projections have `6 D^2`, see [`flop_crossover_tokens`].
pub fn flop_crossover_tokens_of_width(d_model: usize, value_dim: usize) -> f64 {
    4.0 * d_model as f64 + 3.0 * value_dim as f64
}

/// The length from which on training `gdn` needs fewer FLOPs per token than training `attention`, with all of both models
/// counted as in [`training_cost_per_token`]. With `F_0` the FLOPs of `attention` at length 0:
///
/// ```text
/// F_0 + 6 T D L = F_gdn    =>    T* = (F_gdn - F_0) / (6 D L)
/// ```
///
/// which is about `2 D + 3 V` in the ladder, and 0 where GDN always needs fewer.
///
/// # Errors
/// [`Error::Input`] where the models do not have these mixers.
pub fn flop_crossover_tokens(attention: &ModelConfig, gdn: &ModelConfig) -> Result<f64> {
    if (attention.mixer, gdn.mixer) != (Mixer::Attention, Mixer::Gdn) {
        return Err(Error::input(format!(
            "crossover of '{attention}' and '{gdn}': expected a model with attention and one with GDN, in this order"
        )));
    }
    // The bytes, which depend on the number of tokens in a step, do not matter here.
    let flop = |config, tokens| training_cost_per_token(config, &Batch { sequences: 1, tokens }).flop;
    let at_zero = flop(attention, 0);
    let per_token_of_length = flop(attention, 1) - at_zero;
    Ok(((flop(gdn, 0) - at_zero) / per_token_of_length).max(0.0))
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
