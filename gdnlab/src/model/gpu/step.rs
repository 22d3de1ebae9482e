//! The launches of a step.
//!
//! ```text
//! forward      x_0 = E[token]
//!              n = RMSNorm(x)    input = n W_in^T     mixer -> o     branch = o W_out^T     middle = x + branch
//!              n = RMSNorm(middle)    gate | up = n W_gu^T    h = silu(gate) * up    branch = h W_down^T    x = middle + branch
//! head         for a slice of rows: logits = n W_head^T, loss and gradient in their place, dn = dlogits W_head,
//!              dW_head += dlogits^T n
//! backward     the blocks from the last to the first; n, h and what GDN makes of its input once more
//! optimizer    |g|, AdamW
//! ```

use super::arena::{Arena, BlockParts};
use super::inputs::Inputs;
use super::mixer::{AttentionMixer, GdnMixer, GdnViews};
use super::products::{Choice, Products, Write};
use super::sizes::Sizes;
use super::tensors::{Kept, ScratchElements, Shared, State, Tensors};
use crate::Result;
use crate::cuda::layers::{
    AdamW, AdamWStep, Addition, CrossEntropy, CrossEntropyCall, Embedding, EmbeddingBackward, EmbeddingForward,
    RmsNorm, RmsNormBackward, RmsNormForward, SwiGlu, SwiGluBackward, View,
};
use crate::cuda::{Gpu, Stream};
use crate::model::config::Mixer;
use crate::model::layer::NORM_EPS;
use half::bf16;
use std::ops::Range;

/// Every kernel and product of a step.
pub(super) struct Kernels {
    pub products: Products,
    pub mixer: MixerKernels,
    embedding: Embedding,
    norm: RmsNorm,
    swiglu: SwiGlu,
    cross_entropy: CrossEntropy,
    adamw: AdamW,
}

/// The mixer of the model.
pub(super) enum MixerKernels {
    Attention(Box<AttentionMixer>),
    Gdn(Box<GdnMixer>),
}

impl Kernels {
    /// Compiles all kernels and chooses algorithms, without the memory of the step.
    pub fn new(gpu: &Gpu, sizes: &Sizes, choice: Choice<'_>) -> Result<Self> {
        let config = &sizes.config;
        Ok(Self {
            mixer: match config.mixer {
                Mixer::Attention => MixerKernels::Attention(Box::new(AttentionMixer::new(gpu, sizes)?)),
                Mixer::Gdn => MixerKernels::Gdn(Box::new(GdnMixer::new(gpu, sizes)?)),
            },
            embedding: Embedding::new(gpu, config.vocabulary, config.d_model)?,
            norm: RmsNorm::new(gpu, config.d_model, NORM_EPS as f32)?,
            swiglu: SwiGlu::new(gpu, config.hidden)?,
            cross_entropy: CrossEntropy::new(gpu, config.vocabulary)?,
            adamw: AdamW::new(gpu)?,
            products: Products::new(gpu, sizes, choice)?,
        })
    }

    /// Scratch that the kernels need.
    pub fn scratch(&self, sizes: &Sizes) -> ScratchElements {
        let rows = sizes.rows();
        let mixer = match &self.mixer {
            MixerKernels::Attention(_) => 0,
            MixerKernels::Gdn(gdn) => gdn.part_elements(),
        };
        let parts = mixer.max(self.norm.scratch_elements(rows)).max(self.embedding.scratch_elements(rows));
        ScratchElements { parts }
    }
}

/// All that the launches of a step refer to.
pub(super) struct Step<'a> {
    pub sizes: &'a Sizes,
    pub arena: &'a Arena,
    pub kernels: &'a Kernels,
    pub tensors: &'a Tensors,
    pub inputs: Inputs,
}

/// The weights of a block as kernels take them, with their gradients.
struct BlockViews<'a> {
    parts: &'a BlockParts,
    state: &'a State,
}

impl BlockViews<'_> {
    /// A matrix for a product.
    fn matrix(&self, range: &Range<usize>) -> Result<View<bf16>> {
        self.state.rounded.part(range.clone())
    }

    /// A vector.
    fn vector(&self, range: &Range<usize>) -> Result<View<f32>> {
        self.state.weights.part(range.clone())
    }

    fn gradient(&self, range: &Range<usize>) -> Result<View<f32>> {
        self.state.gradient.part(range.clone())
    }

    /// Weights and gradients that only GDN has.
    fn gdn(&self) -> Result<(GdnViews, GdnViews)> {
        let parts = self.parts.gdn.as_ref().ok_or_else(|| crate::Error::input("a block of attention, not of GDN"))?;
        Ok((GdnViews::of(self.state.weights, parts)?, GdnViews::of(self.state.gradient, parts)?))
    }
}

// SAFETY of every call below: the views of `Tensors` and `Inputs` were cut for these sizes, and do not overlap but where
// one thing is done with the memory before the next begins; the caller of each function promises that they live.
impl Step<'_> {
    fn block(&self, layer: usize) -> (BlockViews<'_>, &Kept) {
        let state = &self.tensors.state;
        (BlockViews { parts: &self.arena.blocks[layer], state }, &self.tensors.blocks[layer])
    }

    fn shared(&self) -> &Shared {
        &self.tensors.shared
    }

    fn state(&self) -> &State {
        &self.tensors.state
    }

    /// Starts the whole step on `stream`: loss, gradients, and the optimizer.
    ///
    /// # Safety
    /// All memory of the training lives until the kernels have ended, or the last replay of a graph with them, and is not used
    /// on another stream. The inputs were made by [`super::inputs`] for this vocabulary.
    pub unsafe fn all(&self, stream: &Stream) -> Result<()> {
        // SAFETY: see above.
        unsafe {
            self.gradients(stream)?;
            self.optimize(stream)
        }
    }

    /// Starts loss and gradients.
    ///
    /// # Safety
    /// As for [`Step::all`].
    pub unsafe fn gradients(&self, stream: &Stream) -> Result<()> {
        // SAFETY: see above.
        unsafe {
            self.forward(stream)?;
            self.head(stream, Some(1.0 / self.sizes.rows() as f32))?;
            self.backward(stream)
        }
    }

    /// Starts the loss alone.
    ///
    /// # Safety
    /// As for [`Step::all`].
    pub unsafe fn loss(&self, stream: &Stream) -> Result<()> {
        // SAFETY: see above.
        unsafe {
            self.forward(stream)?;
            self.head(stream, None)
        }
    }

    /// From the tokens to the last norm, which is left in `shared.normed`.
    unsafe fn forward(&self, stream: &Stream) -> Result<()> {
        let (shared, state, kernels) = (self.shared(), self.state(), self.kernels);
        let x0 = self.tensors.blocks[0].x;
        let weight = state.rounded.part(self.arena.embedding.clone())?;
        // SAFETY: see above.
        unsafe {
            kernels.embedding.forward(stream, &EmbeddingForward { weight, tokens: self.inputs.tokens, y: x0 })?;
            for layer in 0..self.sizes.config.layers {
                self.forward_block(stream, layer)?;
            }
            let last = &self.tensors.blocks[self.sizes.config.layers - 1];
            let weight = state.weights.part(self.arena.final_norm.clone())?;
            self.add_and_norm(stream, last.middle, Some(shared.last), weight)
        }
    }

    /// `n = RMSNorm(stream + branch)` and the sum to `x`; without an `x`, `n = RMSNorm(stream)`.
    unsafe fn add_and_norm(
        &self,
        stream: &Stream,
        residual: View<bf16>,
        x: Option<View<bf16>>,
        weight: View<f32>,
    ) -> Result<()> {
        let shared = self.shared();
        let addition = x.map(|x| Addition { branch: shared.branch, x });
        let call = RmsNormForward { stream: residual, addition, weight, y: shared.normed };
        // SAFETY: see above.
        unsafe { self.kernels.norm.forward(stream, &call) }
    }

    unsafe fn forward_block(&self, stream: &Stream, layer: usize) -> Result<()> {
        let (block, kept) = self.block(layer);
        let (shared, kernels, parts) = (self.shared(), self.kernels, block.parts);
        let products = &kernels.products;
        let norm_weight = block.vector(&parts.mixer_norm)?;
        // SAFETY: see above.
        unsafe {
            match layer.checked_sub(1) {
                None => self.add_and_norm(stream, kept.x, None, norm_weight)?,
                Some(before) => {
                    let middle = self.tensors.blocks[before].middle;
                    self.add_and_norm(stream, middle, Some(kept.x), norm_weight)?;
                }
            }
            products.input.forward(stream, shared.normed, block.matrix(&parts.input)?, kept.input)?;
            let mixed = match &kernels.mixer {
                MixerKernels::Attention(attention) => {
                    attention.forward(stream, kept)?;
                    kept.o
                }
                MixerKernels::Gdn(gdn) => {
                    gdn.forward(stream, kept, &block.gdn()?.0, &shared.gdn)?;
                    shared.gdn.gated
                }
            };
            products.output.forward(stream, mixed, block.matrix(&parts.output)?, shared.branch)?;

            self.add_and_norm(stream, kept.x, Some(kept.middle), block.vector(&parts.mlp_norm)?)?;
            products.gate_up.forward(stream, shared.normed, block.matrix(&parts.gate_up)?, kept.gate_up)?;
            kernels.swiglu.forward(stream, kept.gate_up, shared.hidden)?;
            products.down.forward(stream, shared.hidden, block.matrix(&parts.down)?, shared.branch)
        }
    }

    /// The loss of every row from `shared.normed`; with the `scale` of the gradient also that of `shared.normed`, to
    /// `shared.branch`, and that of the head.
    unsafe fn head(&self, stream: &Stream, scale: Option<f32>) -> Result<()> {
        let (shared, state) = (self.shared(), self.state());
        let (d, vocabulary) = (self.sizes.config.d_model, self.sizes.config.vocabulary);
        let weight = state.rounded.part(self.arena.head.clone())?;
        let gradient = state.gradient.part(self.arena.head.clone())?;
        for (number, rows) in self.sizes.slices().into_iter().enumerate() {
            let product = self.kernels.products.head(rows.len());
            let of_rows = d * rows.start..d * rows.end;
            let normed = shared.normed.part(of_rows.clone())?;
            let logits = shared.logits.part(0..rows.len() * vocabulary)?;
            let call = CrossEntropyCall {
                logits,
                targets: self.inputs.targets.part(rows.clone())?,
                losses: state.losses.part(rows)?,
                scale,
            };
            // SAFETY: see above.
            unsafe {
                product.forward(stream, normed, weight, logits)?;
                self.kernels.cross_entropy.run(stream, &call)?;
                if scale.is_some() {
                    let write = if number == 0 { Write::Set } else { Write::Add };
                    product.of_x(stream, logits, weight, shared.branch.part(of_rows)?)?;
                    product.of_w(stream, logits, normed, gradient, write)?;
                }
            }
        }
        // SAFETY: see above.
        unsafe { self.kernels.cross_entropy.mean(stream, state.losses, state.loss) }
    }

    /// From the gradient of the last norm, in `shared.branch`, to that of the embedding.
    unsafe fn backward(&self, stream: &Stream) -> Result<()> {
        let (shared, state) = (self.shared(), self.state());
        let last = NormBackward {
            x: shared.last,
            d_stream: None,
            again: None,
            weight: state.weights.part(self.arena.final_norm.clone())?,
            dweight: state.gradient.part(self.arena.final_norm.clone())?,
        };
        let call = EmbeddingBackward {
            dy: shared.dx,
            tokens: self.inputs.tokens,
            order: self.inputs.order,
            starts: self.inputs.starts,
            scratch: shared.parts,
            dweight: state.gradient.part(self.arena.embedding.clone())?,
        };
        // SAFETY: see above.
        unsafe {
            self.norm_backward(stream, last)?;
            for layer in (0..self.sizes.config.layers).rev() {
                self.backward_mlp(stream, layer)?;
                self.backward_mixer(stream, layer)?;
            }
            self.kernels.embedding.backward(stream, &call)
        }
    }

    /// The gradient of the stream before a norm, from that of the norm in `shared.branch`: to `shared.dx`.
    unsafe fn norm_backward(&self, stream: &Stream, norm: NormBackward) -> Result<()> {
        let shared = self.shared();
        let NormBackward { x, d_stream, again: y, weight, dweight } = norm;
        let (dy, dx, scratch) = (shared.branch, shared.dx, shared.parts);
        let call = RmsNormBackward { x, dy, d_stream, weight, dx, y, scratch, dweight };
        // SAFETY: see above.
        unsafe { self.kernels.norm.backward(stream, &call) }
    }

    /// Through the second half of a block: from the gradient of what it gives, in `shared.dx`, to that of `kept.middle`.
    unsafe fn backward_mlp(&self, stream: &Stream, layer: usize) -> Result<()> {
        let (block, kept) = self.block(layer);
        let (shared, parts, products) = (self.shared(), block.parts, &self.kernels.products);
        let (dx, hidden, gate_up) = (shared.dx, shared.hidden, kept.gate_up);
        let call = SwiGluBackward { gate_up, dh: hidden, h: hidden, d_gate_up: gate_up };
        let norm = NormBackward {
            x: kept.middle,
            d_stream: Some(dx),
            again: Some(shared.normed),
            weight: block.vector(&parts.mlp_norm)?,
            dweight: block.gradient(&parts.mlp_norm)?,
        };
        // SAFETY: see above.
        unsafe {
            products.down.of_x(stream, dx, block.matrix(&parts.down)?, hidden)?;
            self.kernels.swiglu.backward(stream, &call)?;
            products.down.of_w(stream, dx, hidden, block.gradient(&parts.down)?, Write::Set)?;
            products.gate_up.of_x(stream, gate_up, block.matrix(&parts.gate_up)?, shared.branch)?;
            self.norm_backward(stream, norm)?;
            products.gate_up.of_w(stream, gate_up, shared.normed, block.gradient(&parts.gate_up)?, Write::Set)
        }
    }

    /// Through the first half of a block: from the gradient of `kept.middle`, in `shared.dx`, to that of `kept.x`.
    unsafe fn backward_mixer(&self, stream: &Stream, layer: usize) -> Result<()> {
        let (block, kept) = self.block(layer);
        let (shared, parts, products) = (self.shared(), block.parts, &self.kernels.products);
        let (dx, weight) = (shared.dx, block.matrix(&parts.output)?);
        let d_weight = block.gradient(&parts.output)?;
        let norm = NormBackward {
            x: kept.x,
            d_stream: Some(dx),
            again: Some(shared.normed),
            weight: block.vector(&parts.mixer_norm)?,
            dweight: block.gradient(&parts.mixer_norm)?,
        };
        // SAFETY: see above.
        unsafe {
            let d_input = match &self.kernels.mixer {
                MixerKernels::Attention(attention) => {
                    let scratch = &shared.attention;
                    products.output.of_x(stream, dx, weight, scratch.d_o)?;
                    products.output.of_w(stream, dx, kept.o, d_weight, Write::Set)?;
                    attention.backward(stream, kept, scratch)?;
                    scratch.d_input
                }
                MixerKernels::Gdn(gdn) => {
                    let (scratch, (weights, grads)) = (&shared.gdn, block.gdn()?);
                    products.output.of_x(stream, dx, weight, scratch.gated)?;
                    gdn.backward_of_norm(stream, kept, &weights, &grads, scratch, shared.parts)?;
                    products.output.of_w(stream, dx, scratch.gated, d_weight, Write::Set)?;
                    gdn.backward(stream, kept, &weights, &grads, scratch, shared.parts)?;
                    scratch.d_input
                }
            };
            products.input.of_x(stream, d_input, block.matrix(&parts.input)?, shared.branch)?;
            self.norm_backward(stream, norm)?;
            products.input.of_w(stream, d_input, shared.normed, block.gradient(&parts.input)?, Write::Set)
        }
    }

    unsafe fn optimize(&self, stream: &Stream) -> Result<()> {
        let state = self.state();
        let call = AdamWStep {
            weights: state.weights,
            m: state.m,
            v: state.v,
            gradient: state.gradient,
            rounded: state.rounded,
            decayed: self.arena.decayed,
            step: self.inputs.step,
            norm: state.norm,
            scratch: state.parts,
        };
        // SAFETY: see above.
        unsafe { self.kernels.adamw.run(stream, &call) }
    }
}

/// What differs between the norms of the backward.
struct NormBackward {
    x: View<bf16>,
    d_stream: Option<View<bf16>>,
    /// Where the norm goes once more.
    again: Option<View<bf16>>,
    weight: View<f32>,
    dweight: View<f32>,
}
