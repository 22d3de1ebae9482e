//! The attention mixer, forward and backward.
//!
//! With `n` the normed residual stream, `[B, T, D]`, and H heads of K channels, `H K = D`:
//!
//! ```text
//! q, k = RoPE(n W_q^T), RoPE(n W_k^T)        v = n W_v^T
//! y = attention(q, k, v, scale K^-1/2) W_o^T
//! ```

use super::layer::{Layer, add, join_heads, split_heads};
use super::parameters::Grads;
use crate::Result;
use crate::problem::{Inputs, Tensor};
use crate::reference::attention::{Attention, AttentionGrads};
use crate::reference::rope::Rope;

/// What the backward needs of the forward.
pub(super) struct AttentionCache {
    /// `[B, T, H, K]`, turned.
    q: Tensor,
    k: Tensor,
    v: Tensor,
    /// What the heads give, `[B, T, D]`.
    o: Tensor,
}

fn call<'a>(q: &'a Tensor, k: &'a Tensor, v: &'a Tensor) -> Attention<'a> {
    Attention { q, k, v, scale: Inputs::default_scale(q.dims[3]), cu_seqlens: None }
}

/// `y`, `[B, T, D]`.
pub(super) fn forward(layer: &Layer, n: &Tensor) -> Result<(Tensor, AttentionCache)> {
    let projected = |name| split_heads(layer.project(name, n)?, layer.config.heads);
    let turned = |name| Rope::default().forward(&projected(name)?);
    let (q, k, v) = (turned("mixer.q")?, turned("mixer.k")?, projected("mixer.v")?);
    let o = join_heads(call(&q, &k, &v).forward()?.o)?;
    Ok((layer.project("mixer.o", &o)?, AttentionCache { q, k, v, o }))
}

/// The gradient of `n`.
pub(super) fn backward(
    layer: &Layer,
    n: &Tensor,
    cache: &AttentionCache,
    dy: &Tensor,
    grads: &mut Grads,
) -> Result<Tensor> {
    let d_o = split_heads(layer.project_backward("mixer.o", &cache.o, dy, grads)?, layer.config.heads)?;
    let AttentionGrads { dq, dk, dv } = call(&cache.q, &cache.k, &cache.v).backward(&d_o)?;
    let turned_back = |d: Tensor| Rope::default().backward(&d);
    let mut through = |name, d| layer.project_backward(name, n, &join_heads(d)?, grads);
    let dn = through("mixer.q", turned_back(dq)?)?;
    let dn = add(dn, &through("mixer.k", turned_back(dk)?)?);
    Ok(add(dn, &through("mixer.v", dv)?))
}
