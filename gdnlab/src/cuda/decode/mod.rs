//! Serving: one or a few tokens of every sequence from its state, which is updated in place.
//!
//! Per sequence and value head, for one token after the other, with `S` `[K, V]`:
//!
//! ```text
//! S' = e^g S     u = beta (v - S'^T k)     o = s (S'^T q + (q . k) u)     S = S' + k u^T
//! ```
//!
//! A call reads and writes each state once, whatever the number of tokens: those bytes are what it costs. All arithmetic
//! is in binary32. `kernels/decode.cu` has the kernel.

mod tile;

mod kernel;

use super::{Buffer, Build, Element, Function, Gpu, Grid, Operator, Stream, source};
use crate::{Error, Result};
use std::marker::PhantomData;
use tile::Tile;

pub use kernel::Decode;

/// Head dimensions that are accepted, K and V alike.
pub const HEAD_DIMS: [usize; 6] = [32, 64, 96, 128, 192, 256];
/// Tokens of a sequence in one call, at the most.
pub const MAX_TOKENS: usize = 8;

/// A number type of q, k, v, o and of gates.
pub trait Number: Element {
    /// Its name in CUDA.
    const CUDA: &'static str;
}

/// A number type that states are stored in: `f32` or `bf16`.
pub trait StateNumber: Number {}

impl Number for f32 {
    const CUDA: &'static str = "float";
}

impl Number for half::bf16 {
    const CUDA: &'static str = "bf16";
}

impl Number for half::f16 {
    const CUDA: &'static str = "f16";
}

impl StateNumber for f32 {}
impl StateNumber for half::bf16 {}

/// How the state of one head lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateLayout {
    /// `[K, V]`.
    KeyValue,
    /// `[V, K]`.
    ValueKey,
}

/// What the gates of a call are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GateForm {
    /// The log decay g and the write strength beta.
    Final,
    /// What the projections give, a and b: `g = -exp(A_log) softplus(a + dt_bias)`, `beta = beta_scale sigmoid(b)`.
    Raw {
        /// 1, or 2 where negative eigenvalues are allowed.
        beta_scale: f32,
    },
}

/// What a [`Decoder`] is made for. All of it but the numbers of heads, the scale and `beta_scale` is compiled in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeConfig {
    /// `HK`: heads of q and k.
    pub qk_heads: usize,
    /// `HV`: heads of v, a multiple of `HK`.
    pub value_heads: usize,
    /// `K` = d_k, one of [`HEAD_DIMS`].
    pub key_dim: usize,
    /// `V` = d_v, one of [`HEAD_DIMS`].
    pub value_dim: usize,
    /// `s`, the factor on q, usually `K^-1/2`.
    pub scale: f32,
    /// How the state of one head lies in memory.
    pub layout: StateLayout,
    /// Elements from the state of one slot to that of the next; `None` for `HV K V`, without a gap.
    pub slot_stride: Option<usize>,
    /// What the gates of a call are.
    pub gates: GateForm,
    /// With a number, q and k are divided by `sqrt(sum of squares + eps)` first; the kernel does not round them.
    pub norm_eps: Option<f32>,
}

/// One call: `T` tokens of each of `B` sequences.
#[derive(Debug)]
pub struct DecodeCall<'a, S: Element, I: Element, G: Element> {
    /// `B`.
    pub sequences: usize,
    /// `T`, from 1 to [`MAX_TOKENS`].
    pub tokens: usize,
    /// Queries, `[B, T, HK, K]`.
    pub q: &'a Buffer<I>,
    /// Keys, `[B, T, HK, K]`.
    pub k: &'a Buffer<I>,
    /// Values, `[B, T, HV, V]`.
    pub v: &'a Buffer<I>,
    /// The log decay g, or a of raw gates, `[B, T, HV]`.
    pub g: &'a Buffer<G>,
    /// The write strength beta, or b of raw gates, `[B, T, HV]`.
    pub beta: &'a Buffer<G>,
    /// With raw gates, and only then.
    pub rates: Option<DecayRates<'a>>,
    /// `[slots, HV, K, V]` or `[slots, HV, V, K]`: read and overwritten.
    pub states: &'a mut Buffer<S>,
    /// Slot of each sequence's state, `[B]`. A number that is no slot, such as -1, skips the sequence: its output is zeros.
    /// Two sequences must not name one slot, or what it holds afterwards is neither's state. `None` for 0, 1, ...
    pub slots: Option<&'a Buffer<i32>>,
    /// Output, `[B, T, HV, V]`: overwritten.
    pub o: &'a mut Buffer<I>,
}

/// The parameters of raw gates, one number per value head.
#[derive(Clone, Copy, Debug)]
pub struct DecayRates<'a> {
    /// `A_log`, `[HV]`.
    pub a_log: &'a Buffer<f32>,
    /// `dt_bias`, `[HV]`.
    pub dt_bias: &'a Buffer<f32>,
}

/// `Decode` of the kernel; addresses as numbers.
#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    q: u64,
    k: u64,
    v: u64,
    g: u64,
    beta: u64,
    a_log: u64,
    dt_bias: u64,
    states: u64,
    slots: u64,
    o: u64,
    slot_stride: i64,
    tokens: i32,
    qk_heads: i32,
    value_heads: i32,
    slot_count: i32,
    scale: f32,
    beta_scale: f32,
    norm_eps: f32,
}

/// The kernel for one model, with states of `S`, q, k, v and o of `I`, and gates of `G`.
///
/// ```no_run
/// use gdnlab::cuda::Gpu;
/// use gdnlab::cuda::decode::{DecodeCall, DecodeConfig, Decoder, GateForm, StateLayout};
/// use half::bf16;
///
/// # fn main() -> gdnlab::Result<()> {
/// let gpu = Gpu::shared()?;
/// let (sequences, heads, dim) = (64, 32, 128);
/// let decoder = Decoder::<f32, bf16, f32>::new(gpu, DecodeConfig {
///     qk_heads: heads,
///     value_heads: heads,
///     key_dim: dim,
///     value_dim: dim,
///     scale: (dim as f32).powf(-0.5),
///     layout: StateLayout::KeyValue,
///     slot_stride: None,
///     gates: GateForm::Final,
///     norm_eps: Some(1e-6),
/// })?;
/// let vectors = gpu.upload(&vec![bf16::ONE; sequences * heads * dim])?;
/// let gates = gpu.upload(&vec![0.5f32; sequences * heads])?;
/// let mut states = gpu.upload(&vec![0.0f32; sequences * heads * dim * dim])?;
/// let mut o = gpu.alloc(sequences * heads * dim)?;
/// decoder.run(DecodeCall {
///     sequences,
///     tokens: 1,
///     q: &vectors,
///     k: &vectors,
///     v: &vectors,
///     g: &gates,
///     beta: &gates,
///     rates: None,
///     states: &mut states,
///     slots: None,
///     o: &mut o,
/// })?;
/// let output = gpu.download(&o)?;
/// # Ok(())
/// # }
/// ```
pub struct Decoder<S, I, G> {
    gpu: &'static Gpu,
    config: DecodeConfig,
    tile: Tile,
    kernel: Function,
    numbers: PhantomData<fn(S, I, G)>,
}

impl<S: StateNumber, I: Number, G: Number> Decoder<S, I, G> {
    /// Compiles the kernel, or takes it from the cache.
    ///
    /// # Errors
    /// [`Error::Input`] where `config` has a size that is not accepted, [`Error::Gpu`] where the kernel cannot be had.
    pub fn new(gpu: &'static Gpu, config: DecodeConfig) -> Result<Self> {
        config.validate(size_of::<S>())?;
        let kernel = gpu.module(&build::<S, I, G>(&config)?)?.function("decode")?;
        Ok(Self { gpu, config, tile: config.tile(size_of::<S>()), kernel, numbers: PhantomData })
    }

    /// What it was made for.
    pub fn config(&self) -> &DecodeConfig {
        &self.config
    }

    /// Starts a call on the GPU's stream ([`Gpu::stream`]), and does not wait for it.
    ///
    /// # Errors
    /// [`Error::Input`] where a buffer has not the size that the call needs, [`Error::Gpu`] where the launch is refused.
    pub fn run(&self, call: DecodeCall<'_, S, I, G>) -> Result<()> {
        // SAFETY: buffers are freed in the order of the GPU's stream, on which this runs.
        unsafe { self.run_on(self.gpu.stream(), call) }
    }

    /// Starts a call on `stream`, such as the one of a graph that is being recorded.
    ///
    /// # Errors
    /// As [`Decoder::run`].
    ///
    /// # Safety
    /// Until the call has ended, or the last replay of a graph that holds it, no buffer of it is dropped, and none is used
    /// on another stream but to read what the call only reads.
    pub unsafe fn run_on(&self, stream: &Stream, call: DecodeCall<'_, S, I, G>) -> Result<()> {
        let slot_count = self.config.check(&call)?;
        let beta_scale = match self.config.gates {
            GateForm::Final => 1.0,
            GateForm::Raw { beta_scale } => beta_scale,
        };
        let params = Params {
            q: call.q.address(),
            k: call.k.address(),
            v: call.v.address(),
            g: call.g.address(),
            beta: call.beta.address(),
            a_log: call.rates.map_or(0, |rates| rates.a_log.address()),
            dt_bias: call.rates.map_or(0, |rates| rates.dt_bias.address()),
            states: call.states.address(),
            slots: call.slots.map_or(0, Buffer::address),
            o: call.o.address(),
            slot_stride: self.config.slot_stride() as i64,
            tokens: call.tokens as i32,
            qk_heads: self.config.qk_heads as i32,
            value_heads: self.config.value_heads as i32,
            slot_count: i32::try_from(slot_count).unwrap_or(i32::MAX),
            scale: self.config.scale,
            beta_scale,
            norm_eps: self.config.norm_eps.unwrap_or_default(),
        };
        let blocks = self.config.value_heads * (self.config.value_dim / self.tile.columns());
        let blocks = u32::try_from(call.sequences.saturating_mul(blocks))
            .map_err(|_| Error::input(format!("{} sequences are more than one launch takes", call.sequences)))?;
        let grid = Grid { blocks: [blocks, 1, 1], threads: self.tile.threads(), ..Grid::default() };
        // SAFETY: every buffer has the size that the kernel takes it to have; the rest is the caller's promise.
        unsafe { self.kernel.launch(stream, grid, &params) }
    }
}

impl DecodeConfig {
    /// Elements of the state of one sequence, all heads.
    fn state_len(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }

    fn slot_stride(&self) -> usize {
        self.slot_stride.unwrap_or_else(|| self.state_len())
    }

    fn tile(&self, state_bytes: usize) -> Tile {
        let (along, across) = match self.layout {
            StateLayout::KeyValue => (self.value_dim, self.key_dim),
            StateLayout::ValueKey => (self.key_dim, self.value_dim),
        };
        Tile::new(self.layout, along, across, state_bytes)
    }

    fn validate(&self, state_bytes: usize) -> Result<()> {
        let Self { qk_heads, value_heads, key_dim, value_dim, .. } = *self;
        // Large enough for any model, and small enough that sizes of one sequence cannot overflow.
        if qk_heads == 0 || value_heads == 0 || value_heads > 65_536 || value_heads % qk_heads != 0 {
            return Err(Error::input(format!(
                "decode: HK = {qk_heads}, HV = {value_heads}: expected HV from 1 to 65536, a multiple of HK"
            )));
        }
        for (name, dim) in [("K", key_dim), ("V", value_dim)] {
            if !HEAD_DIMS.contains(&dim) {
                let dims = HEAD_DIMS.map(|dim| dim.to_string()).join(", ");
                return Err(Error::input(format!("decode: {name} = {dim}: expected one of {dims}")));
            }
        }
        if let Some(stride) = self.slot_stride
            && (stride < self.state_len() || !(stride * state_bytes).is_multiple_of(16))
        {
            return Err(Error::input(format!(
                "decode: slot_stride = {stride}: expected at least HV K V = {} and a multiple of 16 bytes, \
                 {} elements",
                self.state_len(),
                16 / state_bytes
            )));
        }
        let numbers = [Some(self.scale), self.norm_eps, self.beta_scale()];
        if let Some(x) = numbers.into_iter().flatten().find(|x| !x.is_finite()) {
            return Err(Error::input(format!("decode: scale, norm_eps or beta_scale is {x}: expected finite numbers")));
        }
        Ok(())
    }

    fn beta_scale(&self) -> Option<f32> {
        match self.gates {
            GateForm::Final => None,
            GateForm::Raw { beta_scale } => Some(beta_scale),
        }
    }

    /// Checks the sizes of a call's buffers, and returns how many slots its states have.
    fn check<S: Element, I: Element, G: Element>(&self, call: &DecodeCall<'_, S, I, G>) -> Result<usize> {
        if call.tokens == 0 || call.tokens > MAX_TOKENS {
            return Err(Error::input(format!("decode: T = {}: expected 1 to {MAX_TOKENS}", call.tokens)));
        }
        if call.rates.is_some() != self.beta_scale().is_some() {
            return Err(Error::input(
                "decode: A_log and dt_bias are expected with raw gates, and only with them: see GateForm",
            ));
        }
        let rows = call.sequences.saturating_mul(call.tokens);
        let expected = |name, found, shape: &str, per_row: usize| {
            let expected = rows.saturating_mul(per_row);
            if found == expected { Ok(()) } else { Err(wrong_length(name, found, shape, expected)) }
        };
        let (qk, value) = (self.qk_heads * self.key_dim, self.value_heads * self.value_dim);
        expected("q", call.q.len(), "[B, T, HK, K]", qk)?;
        expected("k", call.k.len(), "[B, T, HK, K]", qk)?;
        expected("v", call.v.len(), "[B, T, HV, V]", value)?;
        expected("g", call.g.len(), "[B, T, HV]", self.value_heads)?;
        expected("beta", call.beta.len(), "[B, T, HV]", self.value_heads)?;
        expected("o", call.o.len(), "[B, T, HV, V]", value)?;
        if let Some(DecayRates { a_log, dt_bias }) = call.rates {
            for (name, found) in [("A_log", a_log.len()), ("dt_bias", dt_bias.len())] {
                if found != self.value_heads {
                    return Err(wrong_length(name, found, "[HV]", self.value_heads));
                }
            }
        }
        if let Some(slots) = call.slots
            && slots.len() != call.sequences
        {
            return Err(wrong_length("slots", slots.len(), "[B]", call.sequences));
        }
        self.slot_count(call.states.len(), call.slots.map_or(call.sequences, |_| 0))
    }

    /// How many slots states of `length` elements have, `needed` at least.
    fn slot_count(&self, length: usize, needed: usize) -> Result<usize> {
        let count = length.checked_sub(self.state_len()).map_or(0, |rest| rest / self.slot_stride() + 1);
        if count < needed {
            return Err(Error::input(format!(
                "decode: states have {length} elements, room for {count} slots of HV K V = {} each {} elements: \
                 expected {needed} slots",
                self.state_len(),
                self.slot_stride()
            )));
        }
        Ok(count)
    }
}

fn wrong_length(name: &str, found: usize, shape: &str, expected: usize) -> Error {
    Error::input(format!("decode: {name} has {found} elements: expected {shape}, {expected} elements"))
}

fn build<S: StateNumber, I: Number, G: Number>(config: &DecodeConfig) -> Result<Build> {
    let Tile { warps, lanes, slots, .. } = config.tile(size_of::<S>());
    let flag = |set: bool| u32::from(set).to_string();
    let defines = vec![
        ("STATE", S::CUDA.to_owned()),
        ("INPUT", I::CUDA.to_owned()),
        ("GATE", G::CUDA.to_owned()),
        ("KEY_DIM", config.key_dim.to_string()),
        ("VALUE_DIM", config.value_dim.to_string()),
        ("KEY_MINOR", flag(config.layout == StateLayout::ValueKey)),
        ("RAW_GATES", flag(config.gates != GateForm::Final)),
        ("L2_NORM", flag(config.norm_eps.is_some())),
        ("WARPS", warps.to_string()),
        ("LANES", lanes.to_string()),
        ("SLOTS", slots.to_string()),
    ];
    Ok(Build { source: source("decode")?, defines })
}

/// Each state type, layout and d_k, with the inputs, gates and options in turn; and each V once.
fn builds() -> Result<Vec<Build>> {
    let mut all = Vec::new();
    for layout in [StateLayout::KeyValue, StateLayout::ValueKey] {
        for (key_dim, value_dim) in HEAD_DIMS.into_iter().zip(HEAD_DIMS.into_iter().rev()) {
            let raw = GateForm::Raw { beta_scale: 1.0 };
            let plain = DecodeConfig {
                qk_heads: 1,
                value_heads: 1,
                key_dim,
                value_dim,
                scale: 1.0,
                layout,
                slot_stride: None,
                gates: GateForm::Final,
                norm_eps: None,
            };
            all.push(build::<f32, half::bf16, f32>(&DecodeConfig { gates: raw, norm_eps: Some(1e-6), ..plain })?);
            all.push(build::<f32, f32, f32>(&plain)?);
            all.push(build::<half::bf16, half::bf16, half::bf16>(&DecodeConfig { gates: raw, ..plain })?);
            all.push(build::<half::bf16, half::f16, half::f16>(&DecodeConfig { norm_eps: Some(1e-6), ..plain })?);
        }
    }
    Ok(all)
}

/// What the tests have to know.
pub(super) const OPERATOR: Operator =
    Operator { name: "decode", builds, parameters: &[("decode", size_of::<Params>())] };

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
