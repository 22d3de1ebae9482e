//! The GDN mixer, forward and backward.
//!
//! With `n` the normed residual stream, `[B, T, D]`, and H heads of K key and V value channels:
//!
//! ```text
//! q = L2(silu(conv(n W_q^T)))      k = L2(silu(conv(n W_k^T)))      v = silu(conv(n W_v^T))
//! g = -exp(A_log) softplus(n W_a^T + dt_bias)                       beta = sigmoid(n W_b^T)
//! o = GDN(q, k, v, g, beta, scale K^-1/2)
//! y = (RMSNorm(o) * weight * silu(n W_gate^T)) W_o^T
//! ```
//! The convolutions are causal, depthwise, of width 4, without a bias; both norms are taken per head.

use super::layer::{Layer, NORM_EPS, add, join_heads, split_heads};
use super::parameters::Grads;
use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{GateGrads, Gates, Grads as RecurrenceGrads, Inputs, Outputs, Shape, Tensor};
use crate::reference::conv::ShortConv;
use crate::reference::gate::{DecayForm, LogDecay, LogDecayGrads, WriteStrength};
use crate::reference::norm::{GatedRmsNorm, GatedRmsNormGrads, L2Norm};
use crate::{Error, Result};

/// What the backward needs of the forward.
pub(super) struct GdnCache {
    q: Convolved,
    k: Convolved,
    v: Convolved,
    /// Raw gates, `[B, T, H]`.
    a: Tensor,
    b: Tensor,
    /// Raw output gate, `[B, T, H, V]`.
    z: Tensor,
    /// What the recurrence takes, in the input format of its kernel.
    inputs: Inputs,
    /// What the recurrence gives, `[B, T, H, V]`.
    o: Tensor,
    /// What the output projection takes, `[B, T, H V]`.
    gated: Tensor,
}

/// A projection and what its convolution makes of it.
struct Convolved {
    /// `[B, T, H d]`.
    x: Tensor,
    /// `[B, T, H, d]`.
    y: Tensor,
}

/// Name of a projection and of its convolution.
type Names = (&'static str, &'static str);

const Q: Names = ("mixer.q", "mixer.conv_q");
const K: Names = ("mixer.k", "mixer.conv_k");
const V: Names = ("mixer.v", "mixer.conv_v");

fn conv<'a>(x: &'a Tensor, weight: &'a Tensor) -> ShortConv<'a> {
    ShortConv { x, weight, bias: None, initial_state: None, silu: true, cu_seqlens: None }
}

fn l2(x: &Tensor) -> L2Norm<'_> {
    L2Norm { x, eps: NORM_EPS }
}

impl Convolved {
    fn forward(layer: &Layer, n: &Tensor, (matrix, taps): Names) -> Result<Self> {
        let x = layer.project(matrix, n)?;
        let y = conv(&x, layer.get(taps)?).forward()?.y;
        Ok(Self { x, y: split_heads(y, layer.config.heads)? })
    }

    /// The gradient of `n`, given that of `y`.
    fn backward(
        &self,
        layer: &Layer,
        n: &Tensor,
        (matrix, taps): Names,
        dy: Tensor,
        grads: &mut Grads,
    ) -> Result<Tensor> {
        let conv_grads = conv(&self.x, layer.get(taps)?).backward(&join_heads(dy)?, None)?;
        layer.set(grads, taps, conv_grads.dweight)?;
        layer.project_backward(matrix, n, &conv_grads.dx, grads)
    }
}

fn log_decay<'a>(layer: &Layer<'a>, a: &'a Tensor) -> Result<LogDecay<'a>> {
    let (a_log, dt_bias) = (layer.get("mixer.A_log")?, layer.get("mixer.dt_bias")?);
    Ok(LogDecay { a, a_log, dt_bias, form: DecayForm::Softplus })
}

fn write_strength(x: &Tensor) -> WriteStrength<'_> {
    WriteStrength { x, allow_neg_eigval: false }
}

fn output_norm<'a>(layer: &Layer<'a>, o: &'a Tensor, z: &'a Tensor) -> Result<GatedRmsNorm<'a>> {
    Ok(GatedRmsNorm { o, z, weight: layer.get("mixer.norm")?, eps: NORM_EPS })
}

/// `y`, `[B, T, D]`, with the recurrence by the kernel of `layer`.
pub(super) fn forward(layer: &Layer, n: &Tensor) -> Result<(Tensor, GdnCache)> {
    let convolved = |names| Convolved::forward(layer, n, names);
    let (q, k, v) = (convolved(Q)?, convolved(K)?, convolved(V)?);
    let (a, b) = (layer.project("mixer.a", n)?, layer.project("mixer.b", n)?);
    let z = split_heads(layer.project("mixer.gate", n)?, layer.config.heads)?;
    let mut inputs = Inputs {
        shape: shape(layer, n),
        cu_seqlens: None,
        scale: Inputs::default_scale(layer.config.key_dim),
        dtype: Format::F64,
        q: l2(&q.y).forward()?,
        k: l2(&k.y).forward()?,
        v: v.y.clone(),
        gates: Gates::Gdn { g: log_decay(layer, &a)?.forward()?, beta: write_strength(&b).forward()? },
        initial_state: None,
        d_o: None,
        d_final_state: None,
    };
    inputs.round_to(layer.kernel.input_format());
    let o = layer.kernel.forward(&inputs)?.outputs.o;
    let gated = join_heads(output_norm(layer, &o, &z)?.forward()?)?;
    let y = layer.project("mixer.o", &gated)?;
    Ok((y, GdnCache { q, k, v, a, b, z, inputs, o, gated }))
}

/// What a layer keeps of the tokens that it has read.
#[derive(Clone, Debug)]
pub(super) struct GdnState {
    /// The last inputs of each convolution, `[B, H d, W - 1]`: of q, k and v.
    convolutions: [Tensor; 3],
    /// `[B, H, K, V]`.
    recurrence: Tensor,
}

/// How a layer reads: the kernel of the recurrence, which tokens are padding, and what it kept of the tokens before.
pub(super) struct Mixing<'a> {
    pub kernel: &'a dyn Kernel,
    pub padding: Padding<'a>,
    pub state: &'a mut Option<GdnState>,
}

/// The tokens that leave no trace.
#[derive(Clone, Copy)]
pub(super) enum Padding<'a> {
    /// None.
    None,
    /// Those that are marked, one mark for each token.
    Marked(&'a [bool]),
    /// So many in front of each row, which are not among the tokens that are read. The kernel sees them as the zeros that all
    /// they become is.
    Front(usize),
}

impl Padding<'_> {
    /// Sets the rows of marked padding to zero.
    fn blank(self, x: &mut Tensor) {
        let Self::Marked(marks) = self else { return };
        let width = x.data.len() / marks.len();
        let rows = x.data.chunks_exact_mut(width).zip(marks).filter(|(_, padding)| **padding);
        rows.for_each(|(row, _)| row.fill(0.0));
    }

    /// Tokens in front of those that are read.
    fn front(self) -> usize {
        if let Self::Front(count) = self { count } else { 0 }
    }
}

/// What the recurrence of a layer takes, in float64, and what its convolutions keep.
pub(super) fn recurrence_inputs(
    layer: &Layer,
    n: &Tensor,
    padding: Padding<'_>,
    before: Option<GdnState>,
) -> Result<(Inputs, [Tensor; 3])> {
    let heads = layer.config.heads;
    let convolved = |index: usize, (matrix, taps): Names| {
        let mut x = layer.project(matrix, n)?;
        padding.blank(&mut x);
        let initial_state = before.as_ref().map(|state| &state.convolutions[index]);
        let outputs = ShortConv { initial_state, ..conv(&x, layer.get(taps)?) }.forward()?;
        Ok::<_, Error>((split_heads(outputs.y, heads)?, outputs.final_state))
    };
    let ((q, state_q), (k, state_k), (v, state_v)) = (convolved(0, Q)?, convolved(1, K)?, convolved(2, V)?);
    let mut g = log_decay(layer, &layer.project("mixer.a", n)?)?.forward()?;
    let mut beta = write_strength(&layer.project("mixer.b", n)?).forward()?;
    padding.blank(&mut g);
    padding.blank(&mut beta);
    let mut inputs = Inputs {
        shape: shape(layer, n),
        cu_seqlens: None,
        scale: Inputs::default_scale(layer.config.key_dim),
        dtype: Format::F64,
        q: l2(&q).forward()?,
        k: l2(&k).forward()?,
        v,
        gates: Gates::Gdn { g, beta },
        initial_state: None,
        d_o: None,
        d_final_state: None,
    };
    if padding.front() > 0 {
        inputs.shape.tokens += padding.front();
        inputs.named_mut().into_iter().for_each(|(_, tensor)| *tensor = tensor.behind_zeros(padding.front()));
    }
    inputs.initial_state = before.map(|state| state.recurrence);
    Ok((inputs, [state_q, state_k, state_v]))
}

/// What the recurrence gives at the tokens that are read, `[B, T, H, V]`, by the kernel of `mixing`, whose state moves behind
/// the last of them.
pub(super) fn recur(layer: &Layer, n: &Tensor, mixing: &mut Mixing<'_>) -> Result<Tensor> {
    let (mut inputs, convolutions) = recurrence_inputs(layer, n, mixing.padding, mixing.state.take())?;
    inputs.round_to(mixing.kernel.input_format());
    let Outputs { o, final_state } = mixing.kernel.forward(&inputs)?.outputs;
    *mixing.state = Some(GdnState { convolutions, recurrence: final_state });
    let front = mixing.padding.front();
    Ok(if front == 0 { o } else { o.tokens(front..inputs.shape.tokens) })
}

/// `y`, `[B, T, D]`, of what the recurrence gives and of what the layer takes at the same tokens.
pub(super) fn output(layer: &Layer, o: &Tensor, n: &Tensor) -> Result<Tensor> {
    let z = split_heads(layer.project("mixer.gate", n)?, layer.config.heads)?;
    layer.project("mixer.o", &join_heads(output_norm(layer, o, &z)?.forward()?)?)
}

fn shape(layer: &Layer, n: &Tensor) -> Shape {
    let config = layer.config;
    Shape { batch: n.dims[0], ..Shape::new(n.dims[1], config.heads, config.key_dim, config.value_dim) }
}

/// The gradient of `n`.
pub(super) fn backward(layer: &Layer, n: &Tensor, cache: GdnCache, dy: &Tensor, grads: &mut Grads) -> Result<Tensor> {
    let GdnCache { q, k, v, a, b, z, mut inputs, o, gated } = cache;
    let d_gated = split_heads(layer.project_backward("mixer.o", &gated, dy, grads)?, layer.config.heads)?;
    let GatedRmsNormGrads { d_o, dz, dweight } = output_norm(layer, &o, &z)?.backward(&d_gated)?;
    layer.set(grads, "mixer.norm", dweight)?;

    inputs.d_o = Some(d_o);
    inputs.round_to(layer.kernel.input_format());
    let recurrence = layer.kernel.backward(&inputs)?.grads;
    let Some(RecurrenceGrads { dq, dk, dv, dg, gates: GateGrads::Gdn { dbeta }, .. }) = recurrence else {
        return Err(Error::input("the recurrence gave no gradients of GDN"));
    };
    let LogDecayGrads { da, da_log, ddt_bias } = log_decay(layer, &a)?.backward(&dg)?;
    layer.set(grads, "mixer.A_log", da_log)?;
    layer.set(grads, "mixer.dt_bias", ddt_bias)?;
    let db = write_strength(&b).backward(&dbeta)?;

    let mut dn = q.backward(layer, n, Q, l2(&q.y).backward(&dq)?, grads)?;
    dn = add(dn, &k.backward(layer, n, K, l2(&k.y).backward(&dk)?, grads)?);
    dn = add(dn, &v.backward(layer, n, V, dv, grads)?);
    for (name, d) in [("mixer.a", da), ("mixer.b", db), ("mixer.gate", join_heads(dz)?)] {
        dn = add(dn, &layer.project_backward(name, n, &d, grads)?);
    }
    Ok(dn)
}
