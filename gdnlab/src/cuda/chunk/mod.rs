//! The chunk form of GDN on a GPU, forward and backward, in four precisions.
//!
//! The mathematics is that of [`chunked`](crate::chunked); the kernels are in `kernels/chunk_*.cu`, whose comments have the
//! equations of each step. A pass is a few launches:
//!
//! | kernel | computes |
//! |---|---|
//! | `chunk_prepare` | for every chunk at once: scaled keys and queries, `(I + L)^-1`, scores, decays |
//! | `chunk_forward` | sweep over the chunks of a sequence: o and the final state |
//! | `chunk_states` | the same sweep for the backward: the state at the start of each chunk, and U |
//! | `chunk_backward` | sweep from the last chunk to the first: dv, dh0, the gradient of each chunk's state |
//! | `chunk_gradient` | for every chunk at once: dq, dk, dg, dbeta |
//! | `chunk_segment_ends`, `chunk_join_states` | for a sequence that is cut: the state at the start of each segment |
//! | `chunk_segment_starts`, `chunk_join_d_states` | the gradient of the state at the end of each segment |
//! | `chunk_fused_forward`, `chunk_fused_segment_ends` | the forward in one sweep on Hopper, for [`Chunk::fused`] |
//! | `gate_gradients`, `gate_sums` | the gradients of raw gates |
//!
//! On Hopper the sweeps of the forward, `chunk_forward`, `chunk_states` and `chunk_segment_ends`, are kernels of their own
//! (`chunk_sweep_hopper.cu`) for f16 operands and head dimensions that divide into tiles of 64.
//!
//! Forward: the first two. Backward: all but the second; it computes the states again rather than keeping them. A long
//! sequence of a model with few heads is cut into segments that run side by side ([`config::Variant::segments`]).
//!
//! On Hopper a few long sequences that leave multiprocessors idle are taken in parts: one is swept while the next is prepared.
//!
//! Two runs give the same bits, and so does a sequence whatever it is packed with: no sum is taken with atomics, and what
//! decides on the order of a sum follows from the mode, the head dimensions and the number of value heads ([`config`]).

mod backward;
pub mod config;
mod fused;
pub mod gdn2;
mod gradient;
mod kernel;
mod launches;
mod maps;
mod params;
mod passes;
mod plan;
mod relay;
mod setup;
mod sweep;
mod table;
mod tensor;
mod workspace;

use super::{Build, Operator};
use crate::Result;
use crate::precision::Format;
use backward::BackwardParams;
use config::{Card, Config, Variant, Work};
use fused::{Fused, FusedParams};
use gradient::GradientParams;
use params::{ChunkParams, GateParams};
use sweep::SweepParams;

pub use super::decode::{HEAD_DIMS, StateLayout};
pub use kernel::Chunk;
pub use passes::{GradTensors, Passes, Tensors};
pub use plan::Plan;
pub use setup::{Beta, Gate, Mode, Options, Setup};

/// A100; H100, H200 and B200; RTX and GB10: by shared memory of a block.
const CARDS: [Card; 3] = [
    Card { multiprocessors: 108, shared_bytes_per_block: 163 << 10 },
    Card { multiprocessors: 132, shared_bytes_per_block: 227 << 10 },
    Card { multiprocessors: 48, shared_bytes_per_block: 99 << 10 },
];

/// Every file in every mode, with the extremes of K and V, small blocks and large ones.
fn builds() -> Result<Vec<Build>> {
    use Format::{Bf16, F16, F32};
    use Mode::{F16Internals, Fp32, Tf32};
    let [ampere, hopper, small] = CARDS;
    let of = |heads, cut| Work { heads, cut };
    let (few, many, cut) = (of(1, false), of(1 << 16, false), of(40, true));
    let cases = [
        (F16Internals, Bf16, 128, 128, 64, many, hopper),
        (F16Internals, Bf16, 128, 128, 8, few, hopper),
        (F16Internals, Bf16, 128, 128, 64, few, small),
        (F16Internals, F16, 256, 256, 64, many, ampere),
        (Mode::Bf16, F32, 32, 96, 8, few, small),
        (Mode::Bf16, Bf16, 128, 256, 64, many, hopper),
        (Tf32, F32, 256, 256, 8, many, hopper),
        (Tf32, Bf16, 96, 32, 64, few, small),
        (Fp32, F32, 256, 128, 64, many, ampere),
        (F16Internals, Bf16, 128, 128, 8, cut, hopper),
        (Fp32, F32, 256, 128, 8, cut, ampere),
        (F16Internals, F32, 256, 96, 8, cut, hopper),
        (Tf32, F32, 128, 128, 8, few, hopper),
        (Tf32, F32, 64, 64, 8, few, hopper),
        (Fp32, F32, 128, 128, 8, few, hopper),
        (Fp32, F32, 64, 64, 8, few, hopper),
    ];
    let mut all = vec![launches::gates()?];
    for (mode, input, key_dim, value_dim, value_heads, work, card) in cases {
        let variant = Variant { mode, input, key_dim, value_dim, value_heads };
        let builds = Config::new(variant, work, &card)?.builds()?;
        all.extend(builds);
    }
    for (key_dim, value_dim, consumers, cut) in
        [(128, 128, 2, true), (128, 128, 1, true), (64, 128, 2, false), (128, 64, 1, false), (64, 64, 1, true)]
    {
        let variant = Variant { mode: F16Internals, input: Bf16, key_dim, value_dim, value_heads: 16 };
        all.push(Fused { consumers }.build(&Config::new(variant, of(16, cut), &hopper)?)?);
    }
    all.sort_by_key(ToString::to_string);
    all.dedup();
    Ok(all)
}

/// The sweeps for Hopper with the extremes of K and V, one chain and two, and what the backward has there.
fn hopper_builds() -> Result<Vec<Build>> {
    use Format::{Bf16, F16};
    let [_, hopper, _] = CARDS;
    let mut all = Vec::new();
    for (input, key_dim, value_dim, cut) in
        [(Bf16, 128, 128, true), (Bf16, 64, 128, false), (F16, 128, 256, false), (F16, 64, 64, true)]
    {
        let variant = Variant { mode: Mode::F16Internals, input, key_dim, value_dim, value_heads: 16 };
        all.extend(Config::new(variant, Work { heads: 16, cut }, &hopper)?.hopper_builds()?);
    }
    Ok(all)
}

/// What the tests have to know.
pub(super) const OPERATOR: Operator = Operator {
    name: "chunk",
    builds,
    parameters: &[
        ("chunk_prepare", size_of::<ChunkParams>()),
        ("chunk_forward", size_of::<ChunkParams>()),
        ("chunk_states", size_of::<ChunkParams>()),
        ("chunk_backward", size_of::<ChunkParams>()),
        ("chunk_segment_ends", size_of::<ChunkParams>()),
        ("chunk_segment_starts", size_of::<ChunkParams>()),
        ("chunk_join_states", size_of::<ChunkParams>()),
        ("chunk_join_d_states", size_of::<ChunkParams>()),
        ("chunk_gradient", size_of::<ChunkParams>()),
        ("chunk_fused_forward", size_of::<FusedParams>()),
        ("chunk_fused_segment_ends", size_of::<FusedParams>()),
        ("gate_gradients", size_of::<GateParams>()),
        ("gate_sums", size_of::<GateParams>()),
    ],
};

/// The same of the kernels for Hopper, which have the names of those for all GPUs.
pub(super) const HOPPER_OPERATOR: Operator = Operator {
    name: "chunk-hopper",
    builds: hopper_builds,
    parameters: &[
        ("chunk_forward", size_of::<SweepParams<ChunkParams>>()),
        ("chunk_states", size_of::<SweepParams<ChunkParams>>()),
        ("chunk_segment_ends", size_of::<SweepParams<ChunkParams>>()),
        ("chunk_backward", size_of::<BackwardParams<ChunkParams>>()),
        ("chunk_segment_starts", size_of::<BackwardParams<ChunkParams>>()),
        ("chunk_gradient", size_of::<GradientParams>()),
    ],
};

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
