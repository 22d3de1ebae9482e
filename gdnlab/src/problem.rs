//! What an operator takes and gives: shapes, inputs, outputs, gradients, and the validation of all that comes from
//! outside.
//!
//! Notation of the whole crate: `B` batch, `T` tokens, `HK` heads of q and k, `HV` heads of v, `K` = d_k, `V` = d_v,
//! `N` sequences. Value head `h` reads q and k of head `h / (HV / HK)`. Every tensor is dense, row-major, and held in
//! `f64`, which represents each value of the narrower formats exactly.

use crate::precision::Format;
use crate::{Error, Result};
use gdnlab_deps::rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// Largest d_k and d_v that are accepted.
pub const MAX_HEAD_DIM: usize = 256;

/// Elements of a large tensor that a thread takes at a time, where each is treated alone; no other thread is asked for fewer.
pub(crate) const PIECE: usize = 1 << 16;

/// Which delta rule is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Gated DeltaNet: one scalar decay `g` and one write strength `beta` per token and head.
    Gdn,
    /// GDN-2: decay `g` and erase gate `b` per key channel, write gate `w` per value channel.
    Gdn2,
}

impl Op {
    /// All operators.
    pub const ALL: [Self; 2] = [Self::Gdn, Self::Gdn2];

    /// Name as used in files and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gdn => "gdn",
            Self::Gdn2 => "gdn2",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Op {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|op| op.name() == text)
            .ok_or_else(|| Error::input(format!("unknown operator '{text}': expected gdn or gdn2")))
    }
}

/// Sizes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape {
    /// `B`: sequences of equal length; 1 when sequences are packed.
    pub batch: usize,
    /// `T`: tokens per sequence, or of all packed sequences together. May be 0.
    pub tokens: usize,
    /// `HK`: heads of q and k.
    pub qk_heads: usize,
    /// `HV`: heads of v, a multiple of `HK`.
    pub value_heads: usize,
    /// `K` = d_k, from 1 to 256.
    pub key_dim: usize,
    /// `V` = d_v, from 1 to 256.
    pub value_dim: usize,
}

impl Shape {
    /// One sequence with `heads` heads for q, k and v alike.
    pub fn new(tokens: usize, heads: usize, key_dim: usize, value_dim: usize) -> Self {
        Self { batch: 1, tokens, qk_heads: heads, value_heads: heads, key_dim, value_dim }
    }

    /// Value heads per q/k head.
    pub fn group(&self) -> usize {
        self.value_heads / self.qk_heads
    }

    /// Dimensions of q and k: `[B, T, HK, K]`.
    pub fn qk_dims(&self) -> [usize; 4] {
        [self.batch, self.tokens, self.qk_heads, self.key_dim]
    }

    /// Dimensions of v, o and w: `[B, T, HV, V]`.
    pub fn value_dims(&self) -> [usize; 4] {
        [self.batch, self.tokens, self.value_heads, self.value_dim]
    }

    /// Dimensions of a scalar gate: `[B, T, HV]`.
    pub fn gate_dims(&self) -> [usize; 3] {
        [self.batch, self.tokens, self.value_heads]
    }

    /// Dimensions of a gate per key channel: `[B, T, HV, K]`.
    pub fn channel_gate_dims(&self) -> [usize; 4] {
        [self.batch, self.tokens, self.value_heads, self.key_dim]
    }

    /// Dimensions of a state for `sequences` sequences: `[N, HV, K, V]`.
    pub fn state_dims(&self, sequences: usize) -> [usize; 4] {
        [sequences, self.value_heads, self.key_dim, self.value_dim]
    }

    /// Bytes of one call in f64, as it is at most: inputs with initial state and outputs, and for `backward` a
    /// gradient of each. The working memory of a kernel is not in it.
    pub fn bytes(&self, op: Op, sequences: usize, backward: bool) -> u128 {
        let count = |dims: &[usize]| dims.iter().fold(1u128, |product, &dim| product.saturating_mul(dim as u128));
        let (qk, value, state) =
            (count(&self.qk_dims()), count(&self.value_dims()), count(&self.state_dims(sequences)));
        let (decay, write) = match op {
            Op::Gdn => (count(&self.gate_dims()), 0),
            Op::Gdn2 => (count(&self.channel_gate_dims()), value),
        };
        // q, k, g and beta or b; v, w and o; the initial and the final state.
        let elements =
            [qk, qk, decay, decay, value, write, value, state, state].into_iter().fold(0, u128::saturating_add);
        let passes = if backward { 2 } else { 1 };
        elements.saturating_mul(passes * size_of::<f64>() as u128)
    }

    /// Refuses sizes that no operator takes.
    pub fn validate(&self) -> Result<()> {
        let Self { batch, qk_heads, value_heads, key_dim, value_dim, .. } = *self;
        if batch == 0 || qk_heads == 0 || value_heads == 0 {
            return Err(Error::input(format!(
                "B = {batch}, HK = {qk_heads}, HV = {value_heads}: expected at least 1 of each"
            )));
        }
        if value_heads % qk_heads != 0 {
            return Err(Error::input(format!(
                "HV = {value_heads} is not a multiple of HK = {qk_heads}: each q/k head serves a whole group of value heads"
            )));
        }
        for (name, dim) in [("K", key_dim), ("V", value_dim)] {
            if dim == 0 || dim > MAX_HEAD_DIM {
                return Err(Error::input(format!("{name} = {dim}: expected 1 to {MAX_HEAD_DIM}")));
            }
        }
        let elements = [batch, self.tokens, value_heads, key_dim.max(value_dim)]
            .into_iter()
            .try_fold(1usize, usize::checked_mul)
            .and_then(|n| n.checked_mul(size_of::<f64>()));
        match elements {
            Some(bytes) if bytes <= isize::MAX as usize => Ok(()),
            _ => Err(Error::input(format!("{self}: too large to address"))),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, tokens, qk_heads, value_heads, key_dim, value_dim } = self;
        write!(f, "B={batch} T={tokens} HK={qk_heads} HV={value_heads} K={key_dim} V={value_dim}")
    }
}

/// A dense row-major tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Extent of each axis, outermost first.
    pub dims: Vec<usize>,
    /// Elements, the last axis contiguous.
    pub data: Vec<f64>,
}

impl Tensor {
    /// A tensor of `dims` filled with `value`.
    pub fn filled(dims: &[usize], value: f64) -> Self {
        Self { dims: dims.to_vec(), data: vec![value; dims.iter().product()] }
    }

    /// A tensor of zeros.
    pub fn zeros(dims: &[usize]) -> Self {
        Self::filled(dims, 0.0)
    }

    /// Wraps `data`, whose length must be the product of `dims`.
    pub fn new(dims: &[usize], data: Vec<f64>) -> Result<Self> {
        let expected: usize = dims.iter().product();
        if data.len() != expected {
            return Err(Error::input(format!(
                "a tensor of shape {dims:?} has {expected} elements, but {} came",
                data.len()
            )));
        }
        Ok(Self { dims: dims.to_vec(), data })
    }

    /// Refuses any shape but `dims`, and non-finite values. `name` is the word for this tensor in the message.
    pub(crate) fn expect(&self, name: &str, dims: &[usize]) -> Result<()> {
        if self.dims != dims {
            return Err(Error::input(format!("tensor '{name}': expected shape {dims:?}, got {:?}", self.dims)));
        }
        let elements: usize = dims.iter().product();
        if self.data.len() != elements {
            let held = self.data.len();
            return Err(Error::input(format!("tensor '{name}': shape {dims:?} needs {elements} elements, got {held}")));
        }
        check_finite(name, self)
    }

    /// Rounds every element to `format`, in place.
    pub fn round_to(&mut self, format: Format) {
        self.data.par_chunks_mut(PIECE).for_each(|piece| format.round_slice(piece));
    }

    /// Every element rounded to `format`.
    #[must_use]
    pub fn rounded_to(&self, format: Format) -> Self {
        // Memory that no thread has touched: each page is taken by the thread that fills it.
        let mut rounded = Self::zeros(&self.dims);
        rounded.data.par_chunks_mut(PIECE).zip(self.data.par_chunks(PIECE)).for_each(|(to, from)| {
            to.copy_from_slice(from);
            format.round_slice(to);
        });
        rounded
    }

    /// The tokens `range` of each row: `[B, range.len(), ..]` of `[B, T, ..]`.
    ///
    /// # Panics
    /// Where the tensor has no axis of tokens, or `range` leaves it.
    pub(crate) fn tokens(&self, range: Range<usize>) -> Self {
        let (row, width) = (self.dims[1..].iter().product::<usize>(), self.dims[2..].iter().product::<usize>());
        let part = range.start * width..range.end * width;
        let rows = self.data.chunks_exact(row.max(1)).flat_map(|row| &row[part.clone()]);
        let dims = [&[self.dims[0], range.len()], &self.dims[2..]].concat();
        Self { dims, data: rows.copied().collect() }
    }

    /// The same with `count` tokens of zeros in front of each row: `[B, count + T, ..]`.
    ///
    /// # Panics
    /// Where the tensor has no axis of tokens.
    pub(crate) fn behind_zeros(&self, count: usize) -> Self {
        let (row, width) = (self.dims[1..].iter().product::<usize>(), self.dims[2..].iter().product::<usize>());
        let dims = [&[self.dims[0], count + self.dims[1]], &self.dims[2..]].concat();
        let mut all = Self::zeros(&dims);
        for (to, from) in all.data.chunks_exact_mut(count * width + row).zip(self.data.chunks_exact(row)) {
            to[count * width..].copy_from_slice(from);
        }
        all
    }

    /// The indices of the element at `offset`, one per axis.
    pub fn index_of(&self, offset: usize) -> Vec<usize> {
        let mut rest = offset;
        let mut index: Vec<usize> = self
            .dims
            .iter()
            .rev()
            .map(|&extent| {
                let i = rest % extent.max(1);
                rest /= extent.max(1);
                i
            })
            .collect();
        index.reverse();
        index
    }
}

/// The gates of either operator.
#[derive(Clone, Debug, PartialEq)]
pub enum Gates {
    /// Scalar gates, each `[B, T, HV]`.
    Gdn {
        /// Log decay, at most 0.
        g: Tensor,
        /// Write strength, in (0, 1), or (0, 2) with negative eigenvalues allowed.
        beta: Tensor,
    },
    /// Channel-wise gates.
    Gdn2 {
        /// Log decay per key channel, `[B, T, HV, K]`, at most 0.
        g: Tensor,
        /// Erase gate per key channel, `[B, T, HV, K]`.
        b: Tensor,
        /// Write gate per value channel, `[B, T, HV, V]`.
        w: Tensor,
    },
}

impl Gates {
    /// The log decay `g`.
    pub fn log_decay(&self) -> &Tensor {
        match self {
            Self::Gdn { g, .. } | Self::Gdn2 { g, .. } => g,
        }
    }
}

/// All that one call takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Inputs {
    /// Sizes.
    pub shape: Shape,
    /// Boundaries of packed sequences, `[N + 1]` from 0 to `T`; `None` when the `B` rows are the sequences.
    pub cu_seqlens: Option<Vec<usize>>,
    /// `s`, the factor on q; `K^-1/2` unless the caller chose another.
    pub scale: f64,
    /// Format that q, k and v came in.
    pub dtype: Format,
    /// Queries, `[B, T, HK, K]`.
    pub q: Tensor,
    /// Keys, `[B, T, HK, K]`.
    pub k: Tensor,
    /// Values, `[B, T, HV, V]`.
    pub v: Tensor,
    /// Decay and write gates.
    pub gates: Gates,
    /// State before the first token, `[N, HV, K, V]`; zeros when absent.
    pub initial_state: Option<Tensor>,
    /// Gradient of the output, `[B, T, HV, V]`; the backward needs it.
    pub d_o: Option<Tensor>,
    /// Gradient of the final state, `[N, HV, K, V]`; zeros when absent.
    pub d_final_state: Option<Tensor>,
}

impl Inputs {
    /// The operator that the gates belong to.
    pub fn op(&self) -> Op {
        match self.gates {
            Gates::Gdn { .. } => Op::Gdn,
            Gates::Gdn2 { .. } => Op::Gdn2,
        }
    }

    /// The scale that is used where none is given: `K^-1/2`.
    pub fn default_scale(key_dim: usize) -> f64 {
        (key_dim as f64).powf(-0.5)
    }

    /// `N`, the number of sequences.
    pub fn sequences(&self) -> usize {
        self.cu_seqlens.as_ref().map_or(self.shape.batch, |cu| cu.len() - 1)
    }

    /// Where each sequence lies on the flattened token axis `B * T`.
    pub fn sequence_ranges(&self) -> Vec<Range<usize>> {
        ranges(self.cu_seqlens.as_deref(), self.shape.batch, self.shape.tokens)
    }

    /// Every tensor with its name in tensor files, in a fixed order.
    pub fn named(&self) -> Vec<(&'static str, &Tensor)> {
        let mut all = vec![("q", &self.q), ("k", &self.k), ("v", &self.v)];
        match &self.gates {
            Gates::Gdn { g, beta } => all.extend([("g", g), ("beta", beta)]),
            Gates::Gdn2 { g, b, w } => all.extend([("g", g), ("b", b), ("w", w)]),
        }
        let optional = [("initial_state", &self.initial_state), ("do", &self.d_o), ("dht", &self.d_final_state)];
        all.extend(optional.into_iter().filter_map(|(name, tensor)| Some((name, tensor.as_ref()?))));
        all
    }

    /// Every tensor with its name, to change in place.
    pub fn named_mut(&mut self) -> Vec<(&'static str, &mut Tensor)> {
        let mut all = vec![("q", &mut self.q), ("k", &mut self.k), ("v", &mut self.v)];
        match &mut self.gates {
            Gates::Gdn { g, beta } => all.extend([("g", g), ("beta", beta)]),
            Gates::Gdn2 { g, b, w } => all.extend([("g", g), ("b", b), ("w", w)]),
        }
        let optional =
            [("initial_state", &mut self.initial_state), ("do", &mut self.d_o), ("dht", &mut self.d_final_state)];
        all.extend(optional.into_iter().filter_map(|(name, tensor)| Some((name, tensor.as_mut()?))));
        all
    }

    /// The same problem as a kernel of the given input format sees it: q, k, v and do rounded to `format`, gates and
    /// states to no more than fp32, since training keeps those in fp32.
    pub fn rounded_to(&self, format: Format) -> Self {
        let of = |name: &str, tensor: &Tensor| tensor.rounded_to(rounding(name, format));
        let optional = |name: &str, tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| of(name, tensor));
        Self {
            shape: self.shape,
            cu_seqlens: self.cu_seqlens.clone(),
            scale: self.scale,
            dtype: format,
            q: of("q", &self.q),
            k: of("k", &self.k),
            v: of("v", &self.v),
            gates: match &self.gates {
                Gates::Gdn { g, beta } => Gates::Gdn { g: of("g", g), beta: of("beta", beta) },
                Gates::Gdn2 { g, b, w } => Gates::Gdn2 { g: of("g", g), b: of("b", b), w: of("w", w) },
            },
            initial_state: optional("initial_state", &self.initial_state),
            d_o: optional("do", &self.d_o),
            d_final_state: optional("dht", &self.d_final_state),
        }
    }

    /// [`Inputs::rounded_to`] in place; tells whether a value changed.
    pub fn round_to(&mut self, format: Format) -> bool {
        self.dtype = format;
        if format == Format::F64 {
            return false;
        }
        let mut changed = false;
        for (name, tensor) in self.named_mut() {
            let format = rounding(name, format);
            let is_changed = |piece: &[f64]| piece.iter().any(|&x| format.round(x) != x);
            changed = changed || tensor.data.par_chunks(PIECE).any(is_changed);
            tensor.round_to(format);
        }
        changed
    }

    /// Refuses what no kernel can take: sizes, dimensions of every tensor, `cu_seqlens`, non-finite values.
    ///
    /// Returns warnings about inputs that can be computed but are rarely meant, such as a positive `g`.
    pub fn validate(&self) -> Result<Vec<String>> {
        self.shape.validate()?;
        if let Some(cu) = &self.cu_seqlens {
            validate_cu_seqlens(cu, self.shape.batch, self.shape.tokens)?;
        }
        if !self.scale.is_finite() {
            return Err(Error::input(format!("scale = {}: expected a finite number", self.scale)));
        }
        for (name, tensor) in self.named() {
            let expected = self.dims_of(name);
            if tensor.dims != expected {
                return Err(Error::input(format!(
                    "tensor '{name}': expected shape {expected:?} for {}, got {:?}",
                    self.shape, tensor.dims
                )));
            }
            check_finite(name, tensor)?;
        }
        let positive = self.gates.log_decay().data.iter().filter(|&&g| g > 0.0).count();
        Ok(if positive > 0 {
            vec![format!(
                "g has {positive} positive values, so the state grows; expected log decays, at most 0 (was alpha meant, or a sign lost?)"
            )]
        } else {
            Vec::new()
        })
    }

    /// Dimensions that the tensor `name` must have.
    fn dims_of(&self, name: &str) -> Vec<usize> {
        let shape = &self.shape;
        match (name, &self.gates) {
            ("q" | "k", _) => shape.qk_dims().to_vec(),
            ("v" | "do" | "w", _) => shape.value_dims().to_vec(),
            ("initial_state" | "dht", _) => shape.state_dims(self.sequences()).to_vec(),
            (_, Gates::Gdn { .. }) => shape.gate_dims().to_vec(),
            (_, Gates::Gdn2 { .. }) => shape.channel_gate_dims().to_vec(),
        }
    }
}

/// Where each sequence lies on the flattened token axis `B * T`, after checking `cu_seqlens` where there is one.
pub(crate) fn sequence_ranges(cu: Option<&[usize]>, batch: usize, tokens: usize) -> Result<Vec<Range<usize>>> {
    if let Some(cu) = cu {
        validate_cu_seqlens(cu, batch, tokens)?;
    }
    Ok(ranges(cu, batch, tokens))
}

fn ranges(cu: Option<&[usize]>, batch: usize, tokens: usize) -> Vec<Range<usize>> {
    match cu {
        Some(cu) => cu.windows(2).map(|w| w[0]..w[1]).collect(),
        None => (0..batch).map(|b| b * tokens..(b + 1) * tokens).collect(),
    }
}

fn validate_cu_seqlens(cu: &[usize], batch: usize, tokens: usize) -> Result<()> {
    if batch != 1 {
        return Err(Error::input(format!("cu_seqlens packs sequences into one row: expected B = 1, got {batch}")));
    }
    if cu.len() < 2 {
        return Err(Error::input(format!(
            "cu_seqlens has {} entries: expected N + 1, at least 2 (0 and T = {tokens})",
            cu.len()
        )));
    }
    if let Some(at) = cu.windows(2).position(|w| w[0] > w[1]) {
        return Err(Error::input(format!(
            "cu_seqlens is not monotone: entry {at} is {}, entry {} is {}",
            cu[at],
            at + 1,
            cu[at + 1]
        )));
    }
    let (first, last) = (cu[0], cu[cu.len() - 1]);
    if first != 0 || last != tokens {
        return Err(Error::input(format!("cu_seqlens runs from {first} to {last}: expected 0 to T = {tokens}")));
    }
    Ok(())
}

/// What the input `name` is rounded to for a kernel that takes `format`.
fn rounding(name: &str, format: Format) -> Format {
    match (name, format) {
        ("q" | "k" | "v" | "do", _) | (_, Format::F64) => format,
        _ => Format::F32,
    }
}

fn check_finite(name: &str, tensor: &Tensor) -> Result<()> {
    // Whole blocks are tested without a branch per element, so that the common case runs at the speed of memory.
    let finite = |block: &[f64]| block.iter().fold(true, |finite, x| finite & x.is_finite());
    if tensor.data.par_chunks(PIECE).all(|piece| piece.chunks(1024).all(finite)) {
        return Ok(());
    }
    match tensor.data.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(at) => {
            let count = tensor.data.iter().filter(|x| !x.is_finite()).count();
            Err(Error::input(format!(
                "tensor '{name}' has {count} non-finite values, the first at {:?} ({}): expected finite inputs",
                tensor.index_of(at),
                tensor.data[at]
            )))
        }
    }
}

/// What the forward gives.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    /// Output, `[B, T, HV, V]`.
    pub o: Tensor,
    /// State after the last token of each sequence, `[N, HV, K, V]`.
    pub final_state: Tensor,
}

/// Gradients of the gates other than `g`.
#[derive(Clone, Debug, PartialEq)]
pub enum GateGrads {
    /// GDN.
    Gdn {
        /// Gradient of beta, `[B, T, HV]`.
        dbeta: Tensor,
    },
    /// GDN-2.
    Gdn2 {
        /// Gradient of the erase gate, `[B, T, HV, K]`.
        db: Tensor,
        /// Gradient of the write gate, `[B, T, HV, V]`.
        dw: Tensor,
    },
}

/// What the backward gives: the gradient of every input.
#[derive(Clone, Debug, PartialEq)]
pub struct Grads {
    /// Gradient of q, `[B, T, HK, K]`, summed over the value heads of a group.
    pub dq: Tensor,
    /// Gradient of k, `[B, T, HK, K]`, summed over the value heads of a group.
    pub dk: Tensor,
    /// Gradient of v, `[B, T, HV, V]`.
    pub dv: Tensor,
    /// Gradient of the log decay, `[B, T, HV]` (GDN) or `[B, T, HV, K]` (GDN-2).
    pub dg: Tensor,
    /// Gradients of the other gates.
    pub gates: GateGrads,
    /// Gradient of the initial state, `[N, HV, K, V]`, also where that was zero by default.
    pub dh0: Tensor,
}

impl Grads {
    /// Gradients of zeros (or any `value`) in the dimensions that `inputs` ask for.
    pub fn filled(inputs: &Inputs, value: f64) -> Self {
        let shape = &inputs.shape;
        let gates = match inputs.op() {
            Op::Gdn => GateGrads::Gdn { dbeta: Tensor::filled(&shape.gate_dims(), value) },
            Op::Gdn2 => GateGrads::Gdn2 {
                db: Tensor::filled(&shape.channel_gate_dims(), value),
                dw: Tensor::filled(&shape.value_dims(), value),
            },
        };
        Self {
            dq: Tensor::filled(&shape.qk_dims(), value),
            dk: Tensor::filled(&shape.qk_dims(), value),
            dv: Tensor::filled(&shape.value_dims(), value),
            dg: Tensor::filled(&inputs.gates.log_decay().dims, value),
            gates,
            dh0: Tensor::filled(&shape.state_dims(inputs.sequences()), value),
        }
    }
}

impl Outputs {
    /// Outputs filled with `value` in the dimensions that `inputs` ask for.
    pub fn filled(inputs: &Inputs, value: f64) -> Self {
        Self {
            o: Tensor::filled(&inputs.shape.value_dims(), value),
            final_state: Tensor::filled(&inputs.shape.state_dims(inputs.sequences()), value),
        }
    }
}

/// Forward results, and the gradients where they were asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    /// What the forward gave.
    pub outputs: Outputs,
    /// What the backward gave.
    pub grads: Option<Grads>,
}

impl Results {
    /// Every tensor with its name in tensor files, in the order of the Day 1 tables.
    pub fn named(&self) -> Vec<(&'static str, &Tensor)> {
        let mut all = vec![("o", &self.outputs.o), ("final_state", &self.outputs.final_state)];
        if let Some(grads) = &self.grads {
            all.extend([("dq", &grads.dq), ("dk", &grads.dk), ("dv", &grads.dv), ("dg", &grads.dg)]);
            match &grads.gates {
                GateGrads::Gdn { dbeta } => all.push(("dbeta", dbeta)),
                GateGrads::Gdn2 { db, dw } => all.extend([("db", db), ("dw", dw)]),
            }
            all.push(("dh0", &grads.dh0));
        }
        all
    }
}
