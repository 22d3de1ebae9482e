//! The chunk form of GDN-2 on a GPU, forward and backward: decays, erase gates and write gates by channels.
//!
//! | kernel | computes |
//! |---|---|
//! | `gdn2_prepare` | for every chunk and value head at once: decayed rows, `(I + L)^-1`, scores |
//! | `chunk_forward`, `chunk_retain` | sweep over the chunks of a sequence: o and the final state; and what `chunk_states` keeps |
//! | `chunk_states` | the state at the start of each chunk, and U |
//! | `chunk_backward` | sweep from the last chunk to the first: dh0, the gradient of each chunk's state, Y |
//! | `gdn2_gradient` | for every chunk and value head at once: dq, dk, dv, dg, db, dw |
//! | `gdn2_groups` | sums of dq and dk over the value heads of a group |
//! | `gdn2_gate_gradients`, `gdn2_gate_sums` | the gradients of raw gates |
//! | `chunk_segment_ends`, `chunk_join_states` and so on | as for GDN, for a sequence that is cut |
//!
//! The sweeps are those of GDN ([`super`]), on Hopper too, compiled for rows that have their decays in them.

pub mod config;
mod kernel;
mod launches;
mod params;
mod plan;
mod setup;
mod workspace;

use super::backward::BackwardParams;
use super::config::{Variant, Work};
use super::sweep::SweepParams;
use super::{CARDS, Mode};
use crate::Result;
use crate::cuda::{Build, Operator};
use crate::precision::Format;
use config::Config;
use params::{ChannelGateParams, Gdn2Params};

pub use kernel::Gdn2;
pub use plan::Plan;
pub use setup::{Decay, Options, Setup, States};

/// Every file in every mode, with the extremes of K and V, small blocks and large ones.
fn builds() -> Result<Vec<Build>> {
    use Format::{Bf16, F16, F32};
    use Mode::{F16Internals, Fp32, Tf32};
    let [ampere, hopper, small] = CARDS;
    let of = |heads, cut| Work { heads, cut };
    let (few, many, cut) = (of(1, false), of(1 << 16, false), of(40, true));
    let cases = [
        (F16Internals, Bf16, F32, (128, 128, 12), few, hopper),
        (F16Internals, Bf16, Bf16, (128, 128, 16), cut, hopper),
        (F16Internals, Bf16, F32, (128, 128, 64), many, ampere),
        (F16Internals, F16, F32, (64, 128, 8), few, hopper),
        (F16Internals, F32, F32, (96, 256, 8), cut, hopper),
        (Mode::Bf16, F32, F32, (32, 96, 8), few, small),
        (Mode::Bf16, Bf16, F32, (128, 128, 12), few, hopper),
        (Tf32, F32, F32, (128, 128, 12), few, hopper),
        (Tf32, Bf16, F32, (96, 32, 64), few, small),
        (Fp32, F32, F32, (128, 128, 12), few, hopper),
        (Fp32, F32, F32, (64, 64, 8), cut, hopper),
    ];
    let mut all = Vec::new();
    for (mode, input, gates, (key_dim, value_dim, value_heads), work, card) in cases {
        let variant = Variant { mode, input, key_dim, value_dim, value_heads };
        let raw = value_heads == 16;
        let config = Config::new(variant, gates, raw, work, &card)?;
        all.extend(config.builds()?);
        all.extend([config.groups()?, config.gate_gradients()?]);
    }
    all.sort_by_key(ToString::to_string);
    all.dedup();
    Ok(all)
}

/// The sweeps for Hopper with the extremes of K, and w in each format.
fn hopper_builds() -> Result<Vec<Build>> {
    use Format::{Bf16, F16, F32};
    let [_, hopper, _] = CARDS;
    let mut all = Vec::new();
    for (input, gates, key_dim, value_dim, cut) in [
        (Bf16, F32, 128, 128, true),
        (Bf16, Bf16, 128, 128, false),
        (F16, F16, 64, 64, true),
        (F16, F32, 64, 256, false),
    ] {
        let variant = Variant { mode: Mode::F16Internals, input, key_dim, value_dim, value_heads: 8 };
        all.extend(Config::new(variant, gates, false, Work { heads: 8, cut }, &hopper)?.hopper_builds()?);
    }
    Ok(all)
}

/// What the tests have to know.
pub(crate) const OPERATOR: Operator = Operator {
    name: "gdn2",
    builds,
    parameters: &[
        ("gdn2_prepare", size_of::<Gdn2Params>()),
        ("chunk_forward", size_of::<Gdn2Params>()),
        ("chunk_retain", size_of::<Gdn2Params>()),
        ("chunk_states", size_of::<Gdn2Params>()),
        ("chunk_backward", size_of::<Gdn2Params>()),
        ("chunk_segment_ends", size_of::<Gdn2Params>()),
        ("chunk_segment_starts", size_of::<Gdn2Params>()),
        ("chunk_join_states", size_of::<Gdn2Params>()),
        ("chunk_join_d_states", size_of::<Gdn2Params>()),
        ("gdn2_gradient", size_of::<Gdn2Params>()),
        ("gdn2_groups", size_of::<Gdn2Params>()),
        ("gdn2_gate_gradients", size_of::<ChannelGateParams>()),
        ("gdn2_gate_sums", size_of::<ChannelGateParams>()),
    ],
};

/// The same of the sweeps for Hopper, which have the names of those for all GPUs.
pub(crate) const HOPPER_OPERATOR: Operator = Operator {
    name: "gdn2-hopper",
    builds: hopper_builds,
    parameters: &[
        ("chunk_forward", size_of::<SweepParams<Gdn2Params>>()),
        ("chunk_retain", size_of::<SweepParams<Gdn2Params>>()),
        ("chunk_states", size_of::<SweepParams<Gdn2Params>>()),
        ("chunk_segment_ends", size_of::<SweepParams<Gdn2Params>>()),
        ("chunk_backward", size_of::<BackwardParams<Gdn2Params>>()),
        ("chunk_segment_starts", size_of::<BackwardParams<Gdn2Params>>()),
    ],
};

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
