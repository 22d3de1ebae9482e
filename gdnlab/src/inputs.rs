//! Seeded inputs, one regime for each way in which a kernel can go wrong.
//!
//! Every tensor draws from a stream of its own (seed and name), so adding a tensor never changes another.

use crate::activation::{log_sigmoid, sigmoid};
use crate::precision::Format;
use crate::problem::{Gates, Inputs, Op, Shape, Tensor};
use crate::{Error, Result};
use gdnlab_deps::rayon::join;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use serde::{Deserialize, Serialize};
use std::fmt;

/// How inputs are distributed. Everywhere v, do and the gradient of the final state are iid N(0, 1); unless said
/// otherwise q is iid N(0, 1), k is a unit-norm Gaussian, and the write gates are uniform in (0, 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Regime {
    /// `g = logsigmoid(N(0, 1))`: the inputs of Day 1.
    Gaussian,
    /// `g` uniform in (-0.1, 0): a memory of some 20 tokens. The published Day 1 errors fit these decays in all seven
    /// tensors; those of [`Regime::Gaussian`] forget so fast that an error in the triangular solve hardly reaches the
    /// final state.
    MildDecay,
    /// `g = logsigmoid(N(0, 1)) / 16`, and exactly 0 in every fourth head.
    LongMemory,
    /// `g = 0`.
    NoDecay,
    /// `g` uniform in (-5, -1), one token in 16 at -1000 and one in 16 at log(1e-12).
    FastDecay,
    /// `q ~ N(0, 1) + 1`, `k ~ 10 N(0, 1) - 50`, both unit-norm: almost collinear keys, the hardest triangular solve.
    /// `g = -5 sigmoid(A (N(0, 1) + dt_bias))` with `A` uniform in (1, 16) per head and `softplus(dt_bias)` log-uniform
    /// in (0.001, 0.1) per gate channel; write gates `sigmoid(N(0, 1))`. The inputs of the GDN-2 precision RFC.
    Correlated,
    /// `g = -A softplus(a + dt_bias)` from raw `a ~ N(0, 1)`, with `A` and `dt_bias` as in [`Regime::Correlated`];
    /// write gates `sigmoid(N(0, 1))`: what a freshly initialised layer feeds.
    GateInKernel,
    /// Write gates in (0.999, 1].
    BetaOne,
    /// Write gates in (0, 2): negative eigenvalues allowed.
    BetaTwo,
}

impl Regime {
    /// All regimes.
    pub const ALL: [Self; 9] = [
        Self::Gaussian,
        Self::MildDecay,
        Self::LongMemory,
        Self::NoDecay,
        Self::FastDecay,
        Self::Correlated,
        Self::GateInKernel,
        Self::BetaOne,
        Self::BetaTwo,
    ];

    /// Name as used on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gaussian => "gaussian",
            Self::MildDecay => "mild-decay",
            Self::LongMemory => "long-memory",
            Self::NoDecay => "no-decay",
            Self::FastDecay => "fast-decay",
            Self::Correlated => "correlated",
            Self::GateInKernel => "gate-in-kernel",
            Self::BetaOne => "beta-one",
            Self::BetaTwo => "beta-two",
        }
    }
}

impl fmt::Display for Regime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Regime {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|regime| regime.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::input(format!("unknown input regime '{text}': expected one of {names}"))
        })
    }
}

/// Inputs of `op` with gradients for the backward and a zero initial state.
///
/// # Errors
/// [`Error::Input`] where `shape` is not valid.
pub fn generate(op: Op, shape: &Shape, regime: Regime, seed: u64) -> Result<Inputs> {
    shape.validate()?;
    let draw = Draw::new(seed);
    let value_dims = shape.value_dims();
    let gates = || match op {
        Op::Gdn => Gates::Gdn {
            g: log_decay(&draw, &shape.gate_dims(), regime),
            beta: write_gate(&draw, "beta", &shape.gate_dims(), regime),
        },
        Op::Gdn2 => Gates::Gdn2 {
            g: log_decay(&draw, &shape.channel_gate_dims(), regime),
            b: write_gate(&draw, "b", &shape.channel_gate_dims(), regime),
            w: write_gate(&draw, "w", &value_dims, regime),
        },
    };
    // Each tensor has a stream of its own, so threads may draw them side by side.
    let ((q, k), ((v, d_o), gates)) = join(
        || queries_and_keys(&draw, shape, regime),
        || join(|| join(|| draw.normal("v", &value_dims), || draw.normal("do", &value_dims)), gates),
    );
    Ok(Inputs {
        shape: *shape,
        cu_seqlens: None,
        scale: Inputs::default_scale(shape.key_dim),
        dtype: Format::F64,
        q,
        k,
        v,
        gates,
        initial_state: None,
        d_o: Some(d_o),
        d_final_state: Some(draw.normal("dht", &shape.state_dims(shape.batch))),
    })
}

/// q and k of [`generate`] before they are normalised: what a layer has in front of its L2 norm.
///
/// # Errors
/// [`Error::Input`] where `shape` is not valid.
pub fn before_normalisation(shape: &Shape, regime: Regime, seed: u64) -> Result<(Tensor, Tensor)> {
    shape.validate()?;
    Ok(raw_queries_and_keys(&Draw::new(seed), shape, regime))
}

impl Inputs {
    /// The same inputs with `cu_seqlens`, and a gradient of the final state for each packed sequence.
    pub fn packed(mut self, cu_seqlens: &[usize], seed: u64) -> Result<Self> {
        self.cu_seqlens = Some(cu_seqlens.to_vec());
        let dims = self.shape.state_dims(cu_seqlens.len().saturating_sub(1));
        self.d_final_state = self.d_final_state.map(|_| Draw::new(seed).normal("dht", &dims));
        self.initial_state = self.initial_state.map(|_| Draw::new(seed).normal("initial_state", &dims));
        self.validate()?;
        Ok(self)
    }

    /// The same inputs with an initial state of iid N(0, 1).
    #[must_use]
    pub fn with_initial_state(mut self, seed: u64) -> Self {
        let dims = self.shape.state_dims(self.sequences());
        self.initial_state = Some(Draw::new(seed).normal("initial_state", &dims));
        self
    }
}

/// Streams of random numbers, one per tensor name.
pub(crate) struct Draw {
    seed: u64,
}

impl Draw {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed }
    }

    pub(crate) fn stream(&self, name: &str) -> ChaCha8Rng {
        // FNV-1a: a stable hash of the name, so that streams never depend on the compiler's hasher.
        let hash =
            name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(hash);
        rng
    }

    pub(crate) fn tensor(&self, name: &str, dims: &[usize], mut sample: impl FnMut(&mut ChaCha8Rng) -> f64) -> Tensor {
        let mut rng = self.stream(name);
        let count = dims.iter().product();
        Tensor { dims: dims.to_vec(), data: (0..count).map(|_| sample(&mut rng)).collect() }
    }

    pub(crate) fn normal(&self, name: &str, dims: &[usize]) -> Tensor {
        self.tensor(name, dims, |rng| rng.sample(StandardNormal))
    }

    fn uniform(&self, name: &str, dims: &[usize]) -> Tensor {
        self.tensor(name, dims, |rng| rng.random())
    }
}

fn queries_and_keys(draw: &Draw, shape: &Shape, regime: Regime) -> (Tensor, Tensor) {
    let (mut q, mut k) = raw_queries_and_keys(draw, shape, regime);
    if regime == Regime::Correlated {
        normalise(&mut q.data, shape.key_dim);
    }
    normalise(&mut k.data, shape.key_dim);
    (q, k)
}

fn raw_queries_and_keys(draw: &Draw, shape: &Shape, regime: Regime) -> (Tensor, Tensor) {
    let (mut q, mut k) = join(|| draw.normal("q", &shape.qk_dims()), || draw.normal("k", &shape.qk_dims()));
    if regime == Regime::Correlated {
        q.data.iter_mut().for_each(|x| *x += 1.0);
        k.data.iter_mut().for_each(|x| *x = 10.0 * *x - 50.0);
    }
    (q, k)
}

fn normalise(data: &mut [f64], dim: usize) {
    for row in data.chunks_exact_mut(dim) {
        let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
        row.iter_mut().for_each(|x| *x /= norm);
    }
}

fn log_decay(draw: &Draw, dims: &[usize], regime: Regime) -> Tensor {
    let heads = dims[2];
    let channels = dims.get(3).copied().unwrap_or(1);
    let mut g = draw.normal("g", dims);
    match regime {
        Regime::Gaussian | Regime::BetaOne | Regime::BetaTwo => g.data.iter_mut().for_each(|x| *x = log_sigmoid(*x)),
        Regime::MildDecay => return draw.tensor("g", dims, |rng| rng.random_range(-0.1..0.0)),
        Regime::NoDecay => g.data.fill(0.0),
        Regime::LongMemory => {
            for (i, x) in g.data.iter_mut().enumerate() {
                let head = (i / channels) % heads;
                *x = if head.is_multiple_of(4) { 0.0 } else { log_sigmoid(*x) / 16.0 };
            }
        }
        Regime::FastDecay => {
            let mut rng = draw.stream("g");
            for x in &mut g.data {
                *x = match rng.random_range(0..16u32) {
                    0 => -1000.0,
                    1 => 1e-12f64.ln(),
                    _ => rng.random_range(-5.0..-1.0),
                };
            }
        }
        Regime::Correlated | Regime::GateInKernel => {
            let a = draw.tensor("A", &[heads], initial_rate);
            let dt_bias = draw.tensor("dt", &[heads * channels], initial_dt_bias);
            for (i, x) in g.data.iter_mut().enumerate() {
                let channel = i % (heads * channels);
                let shifted = *x + dt_bias.data[channel];
                let a = a.data[channel / channels];
                *x = if regime == Regime::Correlated { -5.0 * sigmoid(a * shifted) } else { a * log_sigmoid(-shifted) };
            }
        }
    }
    g
}

/// `A` as layers are initialised: uniform in (1, 16).
pub(crate) fn initial_rate(rng: &mut ChaCha8Rng) -> f64 {
    rng.random_range(1.0..16.0)
}

/// `dt_bias` as layers are initialised: `softplus(dt_bias)` log-uniform in (0.001, 0.1).
pub(crate) fn initial_dt_bias(rng: &mut ChaCha8Rng) -> f64 {
    rng.random_range(0.001f64.ln()..0.1f64.ln()).exp().exp_m1().ln()
}

fn write_gate(draw: &Draw, name: &str, dims: &[usize], regime: Regime) -> Tensor {
    let mut gate = match regime {
        Regime::Correlated | Regime::GateInKernel => draw.normal(name, dims),
        _ => draw.uniform(name, dims),
    };
    for x in &mut gate.data {
        *x = match regime {
            Regime::Correlated | Regime::GateInKernel => sigmoid(*x),
            Regime::BetaOne => 1.0 - *x / 1000.0,
            Regime::BetaTwo => 2.0 * *x,
            _ => *x,
        };
    }
    gate
}
