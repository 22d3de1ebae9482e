//! The mixers of a block, between the products before and behind them.

use super::arena::GdnParts;
use super::sizes::Sizes;
use super::tensors::{AttentionScratch, GdnScratch, Kept};
use crate::Result;
use crate::cuda::attention::{Attention, Backward, Forward, Heads, Rows};
use crate::cuda::chunk::{GradTensors, Passes, Tensors};
use crate::cuda::layers::{
    Columns, GatedNorm, GatedNormBackward, GatedNormForward, Rope, ShortConv, ShortConvBackward, ShortConvForward,
    View, Widen,
};
use crate::cuda::{Gpu, Stream};
use crate::model::layer::NORM_EPS;
use crate::reference::rope::DEFAULT_BASE;
use half::bf16;

/// Attention: RoPE in place on q and k, and causal softmax attention.
///
/// ```text
/// q | k | v = input      o = attention(RoPE(q), RoPE(k), v)
/// ```
pub(super) struct AttentionMixer {
    sizes: Sizes,
    rope: Rope,
    attention: Attention,
}

/// GDN: short convolution with SiLU, the recurrence with q and k normalised in its kernels, the gated norm.
///
/// ```text
/// q | k | v | gate | a | b = input      q, k, v = silu(conv(q | k | v))
/// o = GDN(q, k, v, a, b)                gated = RMSNorm(o) * weight * silu(gate)
/// ```
pub(super) struct GdnMixer {
    sizes: Sizes,
    conv: ShortConv,
    widen: Widen,
    norm: GatedNorm,
    /// Made when memory is allocated.
    passes: Option<Passes>,
}

/// The parameters of GDN, or their gradients.
#[derive(Clone, Copy)]
pub(super) struct GdnViews {
    pub taps: View<f32>,
    pub a_log: View<f32>,
    pub dt_bias: View<f32>,
    pub norm: View<f32>,
}

impl GdnViews {
    /// Those of an arena.
    pub fn of(arena: View<f32>, parts: &GdnParts) -> Result<Self> {
        let part = |range: &std::ops::Range<usize>| arena.part(range.clone());
        Ok(Self {
            taps: part(&parts.taps)?,
            a_log: part(&parts.a_log)?,
            dt_bias: part(&parts.dt_bias)?,
            norm: part(&parts.norm)?,
        })
    }
}

impl AttentionMixer {
    pub fn new(gpu: &Gpu, sizes: &Sizes) -> Result<Self> {
        Ok(Self {
            sizes: *sizes,
            rope: Rope::new(gpu, sizes.batch.tokens, sizes.config.key_dim, DEFAULT_BASE)?,
            attention: Attention::new(gpu, sizes.attention())?,
        })
    }

    /// q, k and v, or their gradients, in a matrix of all three.
    fn split(&self, matrix: View<bf16>) -> Result<[Heads; 3]> {
        let width = self.sizes.config.key_width();
        let part = |n: usize| {
            let rest = matrix.part(n * width..matrix.len())?;
            Ok::<_, crate::Error>(heads(rest, self.sizes.input_width(), self.sizes.config.key_dim))
        };
        Ok([part(0)?, part(1)?, part(2)?])
    }

    fn turned(&self, matrix: View<bf16>) -> Columns<bf16> {
        Columns { matrix, pitch: self.sizes.input_width(), first: 0 }
    }

    fn o(&self, o: View<bf16>) -> Heads {
        heads(o, self.sizes.config.value_width(), self.sizes.config.key_dim)
    }

    /// Starts the forward: from `kept.input`, where it turns q and k, to `kept.o`.
    ///
    /// # Safety
    /// The views are those of a training of these sizes, which lives until the kernels have ended.
    pub unsafe fn forward(&self, stream: &Stream, kept: &Kept) -> Result<()> {
        let [q, k, v] = self.split(kept.input)?;
        let call = Forward { q, k, v, o: self.o(kept.o), lse: rows(kept.lse) };
        // SAFETY: the promise of the caller.
        unsafe {
            self.rope.forward(stream, self.turned(kept.input), 2 * self.sizes.config.heads)?;
            self.attention.forward(stream, &call)
        }
    }

    /// Starts the backward: from `scratch.d_o` to `scratch.d_input`.
    ///
    /// # Safety
    /// As for [`AttentionMixer::forward`].
    pub unsafe fn backward(&self, stream: &Stream, kept: &Kept, scratch: &AttentionScratch) -> Result<()> {
        let [q, k, v] = self.split(kept.input)?;
        let [dq, dk, dv] = self.split(scratch.d_input)?;
        let call = Backward {
            q,
            k,
            v,
            o: self.o(kept.o),
            lse: rows(kept.lse),
            d_o: self.o(scratch.d_o),
            delta: rows(scratch.delta),
            dq,
            dk,
            dv,
        };
        // SAFETY: the promise of the caller.
        unsafe {
            self.attention.backward(stream, &call)?;
            self.rope.backward(stream, self.turned(scratch.d_input), 2 * self.sizes.config.heads)
        }
    }
}

fn heads(view: View<bf16>, row_pitch: usize, head_pitch: usize) -> Heads {
    Heads { address: view.address(), length: view.len(), row_pitch, head_pitch }
}

fn rows(view: View<f32>) -> Rows {
    Rows { address: view.address(), length: view.len() }
}

impl GdnMixer {
    pub fn new(gpu: &Gpu, sizes: &Sizes) -> Result<Self> {
        let config = &sizes.config;
        Ok(Self {
            sizes: *sizes,
            conv: ShortConv::new(gpu, sizes.conv())?,
            widen: Widen::new(gpu, config.heads)?,
            norm: GatedNorm::new(gpu, config.heads, config.value_dim, NORM_EPS as f32)?,
            passes: None,
        })
    }

    /// Allocates the workspace of the recurrence.
    pub fn allocate(&mut self, gpu: &Gpu) -> Result<()> {
        self.passes = Some(Passes::new(gpu, self.sizes.chunk())?);
        Ok(())
    }

    /// Numbers of scratch for sums over blocks.
    pub fn part_elements(&self) -> usize {
        self.conv.scratch_elements().max(self.norm.scratch_elements(self.sizes.rows()))
    }

    fn passes(&self) -> Result<&Passes> {
        self.passes.as_ref().ok_or_else(|| crate::Error::gpu("the recurrence has no workspace yet"))
    }

    fn columns(&self, matrix: View<bf16>, first: usize) -> Columns<bf16> {
        Columns { matrix, pitch: self.sizes.input_width(), first }
    }

    /// What the recurrence takes, from `kept.input`: q, k, v, and the raw gates.
    ///
    /// # Safety
    /// As for [`AttentionMixer::forward`].
    unsafe fn prepare(
        &self,
        stream: &Stream,
        kept: &Kept,
        weights: &GdnViews,
        scratch: &GdnScratch,
    ) -> Result<Tensors> {
        let call = ShortConvForward { x: self.columns(kept.input, 0), taps: weights.taps, y: scratch.qkv };
        let raw = self.columns(kept.input, self.sizes.raw_gate_column());
        // SAFETY: the promise of the caller.
        unsafe {
            self.conv.forward(stream, &call)?;
            self.widen.forward(stream, raw, scratch.gates)?;
        }
        Ok(Tensors {
            q: scratch.qkv.q.address(),
            k: scratch.qkv.k.address(),
            v: scratch.qkv.v.address(),
            decay: scratch.gates.a.address(),
            write: scratch.gates.b.address(),
            a_log: weights.a_log.address(),
            dt_bias: weights.dt_bias.address(),
            initial_state: 0,
            o: kept.o.address(),
            final_state: 0,
        })
    }

    /// Starts the forward: from `kept.input` to `kept.o` and `scratch.gated`.
    ///
    /// # Safety
    /// As for [`AttentionMixer::forward`].
    pub unsafe fn forward(&self, stream: &Stream, kept: &Kept, weights: &GdnViews, scratch: &GdnScratch) -> Result<()> {
        let call = GatedNormForward {
            o: kept.o,
            z: self.columns(kept.input, self.sizes.gate_column()),
            weight: weights.norm,
            y: scratch.gated,
        };
        // SAFETY: the promise of the caller.
        unsafe {
            let tensors = self.prepare(stream, kept, weights, scratch)?;
            self.passes()?.forward_on(stream, &tensors)?;
            self.norm.forward(stream, &call)
        }
    }

    /// Starts the first part of the backward, through the gated norm: from the gradient in `scratch.gated` to that of o, in
    /// `kept.o`; `scratch.gated` then holds the gated norm once more.
    ///
    /// # Safety
    /// As for [`AttentionMixer::forward`].
    pub unsafe fn backward_of_norm(
        &self,
        stream: &Stream,
        kept: &Kept,
        weights: &GdnViews,
        grads: &GdnViews,
        scratch: &GdnScratch,
        parts: View<f32>,
    ) -> Result<()> {
        let call = GatedNormBackward {
            o: kept.o,
            z: self.columns(kept.input, self.sizes.gate_column()),
            weight: weights.norm,
            dy: scratch.gated,
            y: scratch.gated,
            d_o: kept.o,
            dz: self.columns(scratch.d_input, self.sizes.gate_column()),
            scratch: parts,
            dweight: grads.norm,
        };
        // SAFETY: the promise of the caller.
        unsafe { self.norm.backward(stream, &call) }
    }

    /// Starts the second part of the backward: from the gradient of o, in `kept.o`, to `scratch.d_input`.
    ///
    /// # Safety
    /// As for [`AttentionMixer::forward`].
    pub unsafe fn backward(
        &self,
        stream: &Stream,
        kept: &Kept,
        weights: &GdnViews,
        grads: &GdnViews,
        scratch: &GdnScratch,
        parts: View<f32>,
    ) -> Result<()> {
        let of_recurrence = GradTensors {
            d_o: kept.o.address(),
            d_final_state: 0,
            dq: scratch.d_qkv.q.address(),
            dk: scratch.d_qkv.k.address(),
            dv: scratch.d_qkv.v.address(),
            dg: scratch.dg.address(),
            dbeta: scratch.dbeta.address(),
            dh0: 0,
            da: scratch.d_gates.a.address(),
            d_a_log: grads.a_log.address(),
            d_dt_bias: grads.dt_bias.address(),
            d_write: scratch.d_gates.b.address(),
        };
        let of_conv = ShortConvBackward {
            x: self.columns(kept.input, 0),
            taps: weights.taps,
            dy: scratch.d_qkv,
            dx: self.columns(scratch.d_input, 0),
            scratch: parts,
            dtaps: grads.taps,
        };
        let raw = self.columns(scratch.d_input, self.sizes.raw_gate_column());
        // SAFETY: the promise of the caller.
        unsafe {
            let tensors = self.prepare(stream, kept, weights, scratch)?;
            self.passes()?.backward_on(stream, &tensors, &of_recurrence)?;
            self.conv.backward(stream, &of_conv)?;
            self.widen.backward(stream, scratch.d_gates, raw)
        }
    }
}
