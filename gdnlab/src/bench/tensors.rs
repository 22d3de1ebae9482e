//! Inputs of a case as arrays that go to the device as they are: a case has up to half a thousand million numbers, too
//! many for [`Inputs`] in binary64.

use super::case::Case;
use super::values::Values;
use crate::activation::{log_sigmoid, sigmoid};
use crate::inputs::Draw;
use crate::precision::Format;
use crate::problem::{Gates, Inputs, Shape, Tensor};
use crate::record::Pass;
use crate::{Error, Result};
use gdnlab_deps::rayon::prelude::*;
use rand::RngExt;
use rand_distr::StandardNormal;
use std::ops::Range;

/// Rows of a tile, a prime: see [`Tensors::generate`].
const TILE_ROWS: usize = 65_537;
/// Numbers that one stream of random numbers gives, so that streams run in parallel.
const PIECE: usize = 1 << 16;
/// One head in so many has no decay.
const NO_DECAY_EVERY: usize = 4;

/// The name of these inputs in records.
pub const REGIME: &str = "long-memory-unit-qk";

/// All that one call takes, row-major, the sequences side by side on the token axis.
#[derive(Clone, Debug)]
pub struct Tensors {
    /// Sizes.
    pub shape: Shape,
    /// Where each sequence lies on the flattened token axis `B * T`.
    pub sequences: Vec<Range<usize>>,
    /// `s`, the factor on q.
    pub scale: f64,
    /// Format of q, k, v and do.
    pub format: Format,
    /// `[B, T, HK, K]`.
    pub q: Values,
    /// `[B, T, HK, K]`.
    pub k: Values,
    /// `[B, T, HV, V]`.
    pub v: Values,
    /// Log decay, `[B, T, HV]`.
    pub g: Vec<f32>,
    /// Write strength, `[B, T, HV]`.
    pub beta: Vec<f32>,
    /// `[N, HV, K, V]`.
    pub initial_state: Vec<f32>,
    /// Gradients of the results, which the backward takes.
    pub gradients: Option<Gradients>,
}

/// Gradients of the results of the forward.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// Gradient of o, `[B, T, HV, V]`.
    pub d_o: Values,
    /// Gradient of the final state, `[N, HV, K, V]`.
    pub d_final_state: Vec<f32>,
}

impl Tensors {
    /// Seeded inputs with the distribution of the published times: q and k unit-norm Gaussians, v and do N(0, 1),
    /// `g = logsigmoid(N(0, 1)) / 16` and exactly 0 in every fourth head, `beta = sigmoid(N(0, 1))`, initial state
    /// N(0, 1), gradient of the final state N(0, 1) / 8.
    ///
    /// The rows of q, k, v and do come from a tile of 65,537 random rows that is repeated over all heads and tokens. As
    /// that is a prime, two tokens of one head have the same row only if they are a multiple of it apart.
    ///
    /// # Errors
    /// [`Error::Input`] for the format binary64.
    pub fn generate(case: &Case, format: Format, seed: u64) -> Result<Self> {
        Self::generate_in(None, case, format, seed)
    }

    /// The same in the memory of `before`, inputs from the same seed that are not needed any more: at the dimensions of the
    /// published cases most of the time of making inputs goes into memory that the process did not have.
    ///
    /// # Errors
    /// As [`Tensors::generate`].
    pub fn generate_in(before: Option<Self>, case: &Case, format: Format, seed: u64) -> Result<Self> {
        let draw = Draw::new(seed);
        let shape = case.shape;
        let sequences = case.sequences();
        let tokens = shape.batch * shape.tokens;
        let (qk_rows, value_rows) = (tokens * shape.qk_heads, tokens * shape.value_heads);
        let dims = |shape: &Shape| (shape.key_dim, shape.value_dim);
        let before = before.filter(|before| before.format == format && dims(&before.shape) == dims(&shape));
        let (q, k, v, d_o) = before.map_or((None, None, None, None), |Self { q, k, v, gradients, .. }| {
            (Some(q), Some(k), Some(v), gradients.map(|gradients| gradients.d_o))
        });
        let rows = |name: &str, before: Option<Values>, rows: usize, dim: usize, unit_norm: bool| -> Result<Values> {
            // The rows of a tensor are the same whatever the heads and tokens, up to their number.
            if let Some(values) = before.and_then(|values| values.resized(TILE_ROWS * dim, rows * dim)) {
                return Ok(values);
            }
            let mut tile = normal(&draw, name, rows.min(TILE_ROWS) * dim);
            if unit_norm {
                tile.par_chunks_mut(dim).for_each(normalise);
            }
            Ok(Values::rounded(tile, format)?.repeated(rows * dim))
        };
        let states = sequences.len() * shape.value_heads * shape.key_dim * shape.value_dim;
        let mut g = normal(&draw, "g", value_rows);
        g.par_iter_mut().enumerate().for_each(|(i, x)| *x = log_decay(i % shape.value_heads, *x));
        let mut beta = normal(&draw, "beta", value_rows);
        beta.par_iter_mut().for_each(|x| *x = sigmoid(f64::from(*x)) as f32);
        let gradients = if case.pass == Pass::Bwd {
            let mut d_final_state = normal(&draw, "dht", states);
            d_final_state.par_iter_mut().for_each(|x| *x /= 8.0);
            Some(Gradients { d_o: rows("do", d_o, value_rows, shape.value_dim, false)?, d_final_state })
        } else {
            None
        };
        Ok(Self {
            shape,
            sequences,
            scale: Inputs::default_scale(shape.key_dim),
            format,
            q: rows("q", q, qk_rows, shape.key_dim, true)?,
            k: rows("k", k, qk_rows, shape.key_dim, true)?,
            v: rows("v", v, value_rows, shape.value_dim, false)?,
            g,
            beta,
            initial_state: normal(&draw, "initial_state", states),
            gradients,
        })
    }

    /// The same call as `inputs`, which are of GDN and already rounded.
    ///
    /// # Errors
    /// [`Error::Input`] for GDN-2, or the format binary64.
    pub fn of_inputs(inputs: &Inputs) -> Result<Self> {
        let Gates::Gdn { g, beta } = &inputs.gates else {
            return Err(Error::input("inputs of GDN-2: expected those of GDN"));
        };
        let single = |tensor: &Tensor| -> Vec<f32> { tensor.data.iter().map(|&x| x as f32).collect() };
        let values = |tensor: &Tensor| Values::rounded(single(tensor), inputs.dtype);
        let states = || vec![0.0; inputs.shape.state_dims(inputs.sequences()).iter().product()];
        let state = |tensor: &Option<Tensor>| tensor.as_ref().map_or_else(states, single);
        let gradients = match &inputs.d_o {
            Some(d_o) => Some(Gradients { d_o: values(d_o)?, d_final_state: state(&inputs.d_final_state) }),
            None => None,
        };
        Ok(Self {
            shape: inputs.shape,
            sequences: inputs.sequence_ranges(),
            scale: inputs.scale,
            format: inputs.dtype,
            q: values(&inputs.q)?,
            k: values(&inputs.k)?,
            v: values(&inputs.v)?,
            g: single(g),
            beta: single(beta),
            initial_state: state(&inputs.initial_state),
            gradients,
        })
    }

    /// One sequence of one q/k head and its value heads, as a call of its own.
    ///
    /// # Errors
    /// [`Error::Input`] where there is no such part.
    pub fn part(&self, part: Part) -> Result<Inputs> {
        let range = self.sequences.get(part.sequence).filter(|_| part.qk_head < self.shape.qk_heads);
        let Some(tokens) = range.cloned() else {
            return Err(Error::input(format!("{part:?} of {} in {} sequences", self.shape, self.sequences.len())));
        };
        let shape =
            Shape { batch: 1, tokens: tokens.len(), qk_heads: 1, value_heads: self.shape.group(), ..self.shape };
        let cut = |values: Source<'_>, name: &str| part.cut(values, name, self);
        let of_gradients = |name: &str, source: fn(&Gradients) -> Source<'_>| {
            self.gradients.as_ref().map(|gradients| cut(source(gradients), name)).transpose()
        };
        Ok(Inputs {
            shape,
            cu_seqlens: None,
            scale: self.scale,
            dtype: self.format,
            q: cut(Source::Values(&self.q), "q")?,
            k: cut(Source::Values(&self.k), "k")?,
            v: cut(Source::Values(&self.v), "v")?,
            gates: Gates::Gdn { g: cut(Source::Single(&self.g), "g")?, beta: cut(Source::Single(&self.beta), "beta")? },
            initial_state: Some(cut(Source::Single(&self.initial_state), "initial_state")?),
            d_o: of_gradients("do", |gradients| Source::Values(&gradients.d_o))?,
            d_final_state: of_gradients("dht", |gradients| Source::Single(&gradients.d_final_state))?,
        })
    }

    /// Dimensions of the tensor `name`, an input or a result: of a state `[N, HV, K, V]`, of the others the flattened
    /// token axis, the heads, and `K` or `V` where there is one.
    ///
    /// # Errors
    /// [`Error::Input`] for a name that GDN does not have.
    pub fn dims(&self, name: &str) -> Result<Vec<usize>> {
        let Shape { batch, tokens, qk_heads, value_heads, key_dim, value_dim } = self.shape;
        let rows = batch * tokens;
        match name {
            "q" | "k" | "dq" | "dk" => Ok(vec![rows, qk_heads, key_dim]),
            "v" | "o" | "do" | "dv" => Ok(vec![rows, value_heads, value_dim]),
            "g" | "beta" | "dg" | "dbeta" => Ok(vec![rows, value_heads]),
            "initial_state" | "final_state" | "dht" | "dh0" => Ok(self.shape.state_dims(self.sequences.len()).to_vec()),
            _ => Err(Error::input(format!("'{name}' is no tensor of GDN"))),
        }
    }
}

/// Numbers of a [`Tensors`] or of a result.
#[derive(Clone, Copy)]
pub enum Source<'a> {
    /// In the format of the call.
    Values(&'a Values),
    /// In binary32.
    Single(&'a [f32]),
}

impl Source<'_> {
    fn append(self, range: Range<usize>, to: &mut Vec<f64>) {
        match self {
            Self::Values(values) => values.append(range, to),
            Self::Single(values) => to.extend(values.get(range).unwrap_or_default().iter().map(|&x| f64::from(x))),
        }
    }

    fn len(self) -> usize {
        match self {
            Self::Values(values) => values.len(),
            Self::Single(values) => values.len(),
        }
    }
}

/// A part of a call that can be computed by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Which sequence.
    pub sequence: usize,
    /// Which head of q and k.
    pub qk_head: usize,
}

impl Part {
    /// What belongs to this part of the tensor `name` of the call `of`, with the dimensions that a call of this part alone
    /// has.
    ///
    /// # Errors
    /// [`Error::Input`] where `values` have another length than that tensor.
    pub fn cut(self, values: Source<'_>, name: &str, of: &Tensors) -> Result<Tensor> {
        let dims = of.dims(name)?;
        let expected: usize = dims.iter().product();
        if values.len() != expected {
            return Err(Error::input(format!("'{name}' has {} elements, expected {expected}", values.len())));
        }
        let is_state = dims.len() == 4;
        let group = if matches!(name, "q" | "k" | "dq" | "dk") { 1 } else { of.shape.group() };
        let rows = if is_state { self.sequence..self.sequence + 1 } else { of.sequences[self.sequence].clone() };
        let heads = self.qk_head * group..(self.qk_head + 1) * group;
        let row_size: usize = dims[2..].iter().product();
        let mut data = Vec::with_capacity(rows.len() * group * row_size);
        for row in rows.clone() {
            let at = (row * dims[1] + heads.start) * row_size;
            values.append(at..at + group * row_size, &mut data);
        }
        let mut cut = if is_state { vec![1] } else { vec![1, rows.len()] };
        cut.push(group);
        cut.extend_from_slice(&dims[2..]);
        Tensor::new(&cut, data)
    }
}

/// `logsigmoid(x) / 16`, or no decay in every fourth head.
fn log_decay(head: usize, x: f32) -> f32 {
    if head.is_multiple_of(NO_DECAY_EVERY) { 0.0 } else { (log_sigmoid(f64::from(x)) / 16.0) as f32 }
}

fn normalise(row: &mut [f32]) {
    let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
    row.iter_mut().for_each(|x| *x /= norm);
}

/// `count` numbers of N(0, 1), each piece from a stream of its own.
fn normal(draw: &Draw, name: &str, count: usize) -> Vec<f32> {
    let mut values = vec![0.0; count];
    values.par_chunks_mut(PIECE).enumerate().for_each(|(piece, values)| {
        let mut stream = draw.stream(&format!("{name} {piece}"));
        values.iter_mut().for_each(|x| *x = stream.sample(StandardNormal));
    });
    values
}

#[cfg(test)]
#[path = "tensors_tests.rs"]
mod tests;
