//! One block of a model, forward and backward:
//!
//! ```text
//! m = x + mixer(RMSNorm(x))
//! y = m + (silu(n W_gate^T) * (n W_up^T)) W_down^T          n = RMSNorm(m)
//! ```

use super::attention::{self, AttentionCache};
use super::config::Mixer;
use super::gdn::{self, GdnCache, Mixing};
use super::layer::{Layer, add};
use super::parameters::Grads;
use crate::Result;
use crate::problem::Tensor;
use crate::reference::swiglu::{SwiGlu, SwiGluGrads};
use std::ops::Range;

/// What the backward needs of the forward.
pub(super) struct BlockCache {
    x: Tensor,
    /// What the mixer takes.
    mixer_input: Tensor,
    mixer: MixerCache,
    m: Tensor,
    /// What the SwiGLU takes.
    mlp_input: Tensor,
    gate: Tensor,
    up: Tensor,
    hidden: Tensor,
}

enum MixerCache {
    Attention(AttentionCache),
    Gdn(Box<GdnCache>),
}

/// `y`, in the shape of `x`, `[B, T, D]`.
pub(super) fn forward(layer: &Layer, x: Tensor) -> Result<(Tensor, BlockCache)> {
    let mixer_input = layer.norm("mixer_norm", &x)?;
    let (mixed, mixer) = match layer.config.mixer {
        Mixer::Attention => {
            let (y, cache) = attention::forward(layer, &mixer_input)?;
            (y, MixerCache::Attention(cache))
        }
        Mixer::Gdn => {
            let (y, cache) = gdn::forward(layer, &mixer_input)?;
            (y, MixerCache::Gdn(Box::new(cache)))
        }
    };
    let m = add(mixed, &x);
    let mlp_input = layer.norm("mlp_norm", &m)?;
    let (gate, up) = (layer.project("mlp.gate", &mlp_input)?, layer.project("mlp.up", &mlp_input)?);
    let hidden = SwiGlu { gate: &gate, up: &up }.forward()?;
    let y = add(layer.project("mlp.down", &hidden)?, &m);
    Ok((y, BlockCache { x, mixer_input, mixer, m, mlp_input, gate, up, hidden }))
}

/// `y` for a GDN mixer whose recurrence another kernel computes, at the tokens `needed` alone: what is behind the recurrence
/// goes token by token.
pub(super) fn infer(layer: &Layer, x: Tensor, mixing: &mut Mixing<'_>, needed: Range<usize>) -> Result<Tensor> {
    let n = layer.norm("mixer_norm", &x)?;
    let o = gdn::recur(layer, &n, mixing)?;
    let all = needed.len() == x.dims[1];
    let (x, n, o) =
        if all { (x, n, o) } else { (x.tokens(needed.clone()), n.tokens(needed.clone()), o.tokens(needed)) };
    let m = add(gdn::output(layer, &o, &n)?, &x);
    let n = layer.norm("mlp_norm", &m)?;
    let (gate, up) = (layer.project("mlp.gate", &n)?, layer.project("mlp.up", &n)?);
    Ok(add(layer.project("mlp.down", &SwiGlu { gate: &gate, up: &up }.forward()?)?, &m))
}

/// The gradient of `x`.
pub(super) fn backward(layer: &Layer, cache: BlockCache, dy: Tensor, grads: &mut Grads) -> Result<Tensor> {
    let BlockCache { x, mixer_input, mixer, m, mlp_input, gate, up, hidden } = cache;
    let dh = layer.project_backward("mlp.down", &hidden, &dy, grads)?;
    let SwiGluGrads { dgate, dup } = SwiGlu { gate: &gate, up: &up }.backward(&dh)?;
    let dn = layer.project_backward("mlp.gate", &mlp_input, &dgate, grads)?;
    let dn = add(dn, &layer.project_backward("mlp.up", &mlp_input, &dup, grads)?);
    let dm = add(layer.norm_backward("mlp_norm", &m, &dn, grads)?, &dy);

    let dn = match mixer {
        MixerCache::Attention(cache) => attention::backward(layer, &mixer_input, &cache, &dm, grads)?,
        MixerCache::Gdn(cache) => gdn::backward(layer, &mixer_input, *cache, &dm, grads)?,
    };
    Ok(add(layer.norm_backward("mixer_norm", &x, &dn, grads)?, &dm))
}
