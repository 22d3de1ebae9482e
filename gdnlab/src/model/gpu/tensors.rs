//! All memory of a training, cut from one allocation.
//!
//! Of each block stays what its backward cannot compute again element by element. Everything else is scratch that all blocks
//! share; what is never needed at the same time lies in the same place: the logits, the inside of a mixer, the inside of an
//! MLP.

use super::arena::Arena;
use super::sizes::Sizes;
use crate::cost::memory::TrainingMemory;
use crate::cuda::Element;
use crate::cuda::layers::{AdamW, GradientNorm, Qkv, RawGates, View};
use crate::model::config::Mixer;
use half::bf16;

/// Where a tensor begins: a multiple of this many bytes.
const ALIGNMENT_BYTES: u128 = 256;

/// Hands out memory from the front.
struct Cut {
    next: u128,
}

impl Cut {
    fn take<T: Element>(&mut self, elements: usize) -> View<T> {
        let at = self.next;
        self.next += (elements as u128 * size_of::<T>() as u128).next_multiple_of(ALIGNMENT_BYTES);
        View::at(at as u64, elements)
    }

    /// What each of `parts` takes lies in the same place.
    fn overlay<R>(&mut self, parts: impl IntoIterator<Item = impl FnOnce(&mut Self) -> R>) -> Vec<R> {
        let (first, mut end) = (self.next, self.next);
        let all = parts.into_iter().map(|part| {
            self.next = first;
            let result = part(self);
            end = end.max(self.next);
            result
        });
        let all = all.collect();
        self.next = end;
        all
    }
}

/// Elements of scratch that kernels ask for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ScratchElements {
    /// Sums over blocks, of the layer with the most.
    pub parts: usize,
}

/// The parameters and what the optimizer holds for each.
#[derive(Clone, Copy)]
pub(super) struct State {
    pub weights: View<f32>,
    pub m: View<f32>,
    pub v: View<f32>,
    pub gradient: View<f32>,
    pub rounded: View<bf16>,
    pub parts: View<f64>,
    pub norm: View<GradientNorm>,
    /// The mean loss, one number.
    pub loss: View<f32>,
    /// The loss of each row.
    pub losses: View<f32>,
}

/// What the forward of a block leaves to its backward, which overwrites some of it.
#[derive(Clone, Copy)]
pub(super) struct Kept {
    /// The residual stream before the mixer, `[rows, D]`.
    pub x: View<bf16>,
    /// The residual stream before the MLP, `[rows, D]`.
    pub middle: View<bf16>,
    /// What the normed stream is projected to, `[rows, input width]`: of attention after the rotation, of GDN before the
    /// convolution.
    pub input: View<bf16>,
    /// What the mixer's heads give, `[rows, H V]`.
    pub o: View<bf16>,
    /// Attention's logarithms, `[B, H, T]`; empty in GDN.
    pub lse: View<f32>,
    /// `[rows, 2 F]`.
    pub gate_up: View<bf16>,
}

/// What all blocks share.
#[derive(Clone, Copy)]
pub(super) struct Shared {
    /// The norm of the stream, `[rows, D]`.
    pub normed: View<bf16>,
    /// What a mixer or an MLP adds to the stream, and in the backward the gradient of the norm: `[rows, D]`.
    pub branch: View<bf16>,
    /// The gradient of the stream, `[rows, D]`.
    pub dx: View<bf16>,
    /// The stream behind the last block, `[rows, D]`.
    pub last: View<bf16>,
    /// Sums over blocks.
    pub parts: View<f32>,
    /// `[logit rows, vocabulary]`; with what follows up to the MLP in the same place.
    pub logits: View<bf16>,
    /// SwiGLU's product, and its gradient before it: `[rows, F]`.
    pub hidden: View<bf16>,
    pub attention: AttentionScratch,
    pub gdn: GdnScratch,
}

/// Scratch of attention; empty in GDN.
#[derive(Clone, Copy)]
pub(super) struct AttentionScratch {
    /// `[rows, D]`.
    pub d_o: View<bf16>,
    /// `[B, H, T]`.
    pub delta: View<f32>,
    /// `[rows, 3 D]`.
    pub d_input: View<bf16>,
}

/// Scratch of GDN; empty in attention.
#[derive(Clone, Copy)]
pub(super) struct GdnScratch {
    /// After convolution and SiLU, `[rows, H K]`, `[rows, H K]`, `[rows, H V]`.
    pub qkv: Qkv,
    /// `[rows, H]`.
    pub gates: RawGates,
    /// The gated norm of o, and its gradient before it: `[rows, H V]`.
    pub gated: View<bf16>,
    pub d_qkv: Qkv,
    /// `[rows, H]`: of the raw gates, and of what they become.
    pub d_gates: RawGates,
    pub dg: View<f32>,
    pub dbeta: View<f32>,
    /// `[rows, input width]`.
    pub d_input: View<bf16>,
}

/// All memory of a training, but for what its kernels hold themselves.
pub(super) struct Tensors {
    pub state: State,
    pub blocks: Vec<Kept>,
    pub shared: Shared,
}

/// The inside of a part of the step, of which one is at work at a time.
#[derive(Clone, Copy)]
enum Inside {
    Logits,
    Mlp,
    Attention,
    Gdn,
}

/// Bytes by what they are for.
pub(super) struct Bytes {
    pub total: u128,
    /// The same as [`TrainingMemory`], with nothing for workspace.
    pub by_part: TrainingMemory,
}

impl Tensors {
    /// Cuts the memory that begins at `address`.
    pub fn lay_out(address: u64, sizes: &Sizes, arena: &Arena, scratch: &ScratchElements) -> (Self, Bytes) {
        let mut cut = Cut { next: address.into() };
        let mut before = cut.next;
        let mut taken = |cut: &Cut| {
            let bytes = cut.next - before;
            before = cut.next;
            bytes
        };
        let (rows, config) = (sizes.rows(), &sizes.config);
        let (d, values, heads) = (config.d_model, config.value_width(), config.heads);
        let state = state(&mut cut, rows, arena);
        let parameter_bytes = taken(&cut);

        let of_attention = |elements: usize| if config.mixer == Mixer::Attention { elements } else { 0 };
        let block = |cut: &mut Cut| Kept {
            x: cut.take(rows * d),
            middle: cut.take(rows * d),
            input: cut.take(rows * sizes.input_width()),
            o: cut.take(rows * values),
            lse: cut.take(of_attention(rows * heads)),
            gate_up: cut.take(rows * 2 * config.hidden),
        };
        let blocks = (0..config.layers).map(|_| block(&mut cut)).collect();
        let [normed, branch, dx, last] = [(); 4].map(|()| cut.take(rows * d));
        let parts = cut.take(scratch.parts);
        let activation_bytes = taken(&cut);

        let logit_elements = sizes.logit_rows.min(rows) * config.vocabulary;
        let mixer = if config.mixer == Mixer::Attention { Inside::Attention } else { Inside::Gdn };
        // Each inside has all views, those of the others empty.
        let inside = |which: Inside| {
            move |cut: &mut Cut| {
                let of = |is: bool, elements: usize| if is { elements } else { 0 };
                let (attention, gdn) = (matches!(which, Inside::Attention), matches!(which, Inside::Gdn));
                Shared {
                    normed,
                    branch,
                    dx,
                    last,
                    parts,
                    logits: cut.take(of(matches!(which, Inside::Logits), logit_elements)),
                    hidden: cut.take(of(matches!(which, Inside::Mlp), rows * config.hidden)),
                    attention: attention_scratch(cut, sizes, attention),
                    gdn: gdn_scratch(cut, sizes, gdn),
                }
            }
        };
        let first = cut.next;
        let insides = cut.overlay([Inside::Logits, Inside::Mlp, mixer].map(inside));
        let shared = Shared {
            logits: insides[0].logits,
            hidden: insides[1].hidden,
            attention: insides[2].attention,
            gdn: insides[2].gdn,
            ..insides[0]
        };
        let overlaid = cut.next - first;
        let logit_bytes = (logit_elements as u128 * 2).min(overlaid);
        let by_part = TrainingMemory {
            parameter_bytes,
            activation_bytes,
            backward_bytes: overlaid - logit_bytes,
            logit_bytes,
            workspace_bytes: 0,
        };
        (Self { state, blocks, shared }, Bytes { total: cut.next - u128::from(address), by_part })
    }
}

fn state(cut: &mut Cut, rows: usize, arena: &Arena) -> State {
    State {
        weights: cut.take(arena.elements),
        m: cut.take(arena.elements),
        v: cut.take(arena.elements),
        gradient: cut.take(arena.elements),
        rounded: cut.take(arena.elements),
        parts: cut.take(AdamW::scratch_elements(arena.elements)),
        norm: cut.take(1),
        loss: cut.take(1),
        losses: cut.take(rows),
    }
}

fn attention_scratch(cut: &mut Cut, sizes: &Sizes, wanted: bool) -> AttentionScratch {
    let rows = if wanted { sizes.rows() } else { 0 };
    AttentionScratch {
        d_o: cut.take(rows * sizes.config.value_width()),
        delta: cut.take(rows * sizes.config.heads),
        d_input: cut.take(rows * sizes.input_width()),
    }
}

fn gdn_scratch(cut: &mut Cut, sizes: &Sizes, wanted: bool) -> GdnScratch {
    let rows = if wanted { sizes.rows() } else { 0 };
    let (keys, values, heads) = (sizes.config.key_width(), sizes.config.value_width(), sizes.config.heads);
    let qkv = |cut: &mut Cut| Qkv { q: cut.take(rows * keys), k: cut.take(rows * keys), v: cut.take(rows * values) };
    let gates = |cut: &mut Cut| RawGates { a: cut.take(rows * heads), b: cut.take(rows * heads) };
    GdnScratch {
        qkv: qkv(cut),
        gates: gates(cut),
        gated: cut.take(rows * values),
        d_qkv: qkv(cut),
        d_gates: gates(cut),
        dg: cut.take(rows * heads),
        dbeta: cut.take(rows * heads),
        d_input: cut.take(rows * sizes.input_width()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::memory::Keep;
    use crate::cost::model::Batch;
    use crate::model::config::{ModelConfig, Size};

    fn laid_out(mixer: Mixer, size: Size, batch: Batch) -> (Tensors, Bytes) {
        let config = ModelConfig::preset(mixer, size);
        let sizes = Sizes { config, batch, logit_rows: 4096 };
        let scratch = ScratchElements { parts: 4 * sizes.rows() / 64 * sizes.gate_column() };
        Tensors::lay_out(1 << 20, &sizes, &Arena::new(&config), &scratch)
    }

    /// Without what the chunk kernels and the products hold themselves, 0.4 GB at the most. The formula also keeps the inverse
    /// and the state of each chunk, which the backward here computes again. PyTorch's peaks on an H200 were
    /// measured at these sizes.
    #[test]
    fn a_step_of_the_ladder_takes_less_than_half_of_what_pytorch_takes() {
        for (mixer, size, pytorch_gb) in [
            (Mixer::Attention, Size::M30, 20.0),
            (Mixer::Attention, Size::M125, 36.0),
            (Mixer::Attention, Size::M250, 49.0),
            (Mixer::Gdn, Size::M30, 23.0),
        ] {
            let bytes = laid_out(mixer, size, Batch::LADDER).1;
            let gb = bytes.total as f64 / 1e9;
            assert!(gb + 0.4 < pytorch_gb / 2.0, "{mixer} {size}: {gb:.1} GB");
            assert_eq!(bytes.by_part.total_bytes(), bytes.total);
            let keep = Keep { logit_tokens: Some(4096), ..Keep::LEAN };
            let formula = TrainingMemory::new(&ModelConfig::preset(mixer, size), &Batch::LADDER, keep).total_bytes();
            let ratio = bytes.total as f64 / formula as f64;
            assert!((0.8..1.05).contains(&ratio), "{mixer} {size}: {gb:.1} GB, {ratio:.3} of the formula");
        }
    }

    #[test]
    fn tensors_do_not_overlap_but_for_the_insides() {
        for mixer in Mixer::ALL {
            let (tensors, bytes) = laid_out(mixer, Size::Tiny, Batch { sequences: 3, tokens: 50 });
            let mut ranges: Vec<(u64, u64)> = Vec::new();
            let mut add = |address: u64, bytes: usize| ranges.push((address, address + bytes as u64));
            let Shared { normed, branch, dx, last, logits, hidden, gdn, attention, .. } = tensors.shared;
            for block in &tensors.blocks {
                for view in [block.x, block.middle, block.input, block.o, block.gate_up] {
                    add(view.address(), 2 * view.len());
                }
                add(block.lse.address(), 4 * block.lse.len());
            }
            [normed, branch, dx, last].iter().for_each(|view| add(view.address(), 2 * view.len()));
            let state = &tensors.state;
            [state.weights, state.m, state.v, state.gradient]
                .iter()
                .for_each(|view| add(view.address(), 4 * view.len()));
            // Of the insides only the largest is looked at here.
            let inside = [logits, hidden, gdn.d_input, attention.d_input];
            let first = inside.iter().filter(|view| !view.is_empty()).map(|view| view.address()).min().unwrap();
            add(first, 0);
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{mixer}");
            assert!(ranges.iter().all(|&(start, end)| start % 256 == 0 && end <= (1 << 20) + bytes.total as u64));
            let end = |view: View<bf16>| view.address() + 2 * view.len() as u64;
            assert!(inside.iter().all(|&view| view.is_empty() || end(view) <= (1 << 20) + bytes.total as u64));
            assert_eq!(logits.address(), hidden.address());
        }
    }
}
