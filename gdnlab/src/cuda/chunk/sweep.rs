//! The sweeps on Hopper, for GDN and GDN-2, by its matrix and copy instructions: which problems they take, and the shape of the
//! launches of the forward's ([`backward`](super::backward) has the other one's).
//!
//! `chunk_sweep_hopper.cu` takes the place of `chunk_forward.cu` there: kernels of the same names read the same workspace and
//! give the same results, up to rounding. Which of the two runs follows from the model and the GPU ([`HopperSweep::takes`]),
//! never from the batch.

use super::config::{Card, Config, PAD, Variant, channel_defines};
use super::launches::grid;
use super::maps::{Rows, SPAN, TILE_BYTES};
use super::params::ChunkParams;
use super::setup::Mode;
use crate::Result;
use crate::cuda::{Build, Gpu, Grid, TensorMap, source};
use crate::precision::Format;

/// Bytes of an operand.
const OPERAND_BYTES: usize = 2;
/// Chunks that are in shared memory at once (`TURNS`).
const STAGES: usize = 2;
/// Room for the coefficients of a chunk, and for those that o is multiplied by.
const COEFFICIENT_BYTES: usize = 4096;
const OUTPUT_COEFFICIENT_BYTES: usize = 1024;
/// Room for barriers and scales, and for the alignment of what follows.
const BARRIER_BYTES: usize = 2048;
const ALIGNMENT_BYTES: usize = 1024;
/// Threads of a warpgroup: there is one for each chain, and one that follows them with the output.
const WARPGROUP: usize = 128;
/// Compute capability of Hopper.
const HOPPER: (u32, u32) = (9, 0);

/// What the copy engine has to know of the workspace.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct WorkspaceMaps {
    pub keys: TensorMap,
    /// The keys that write into the state; for GDN those that read from it.
    pub write_keys: TensorMap,
    pub queries: TensorMap,
    pub inverse: TensorMap,
    pub scores: TensorMap,
}

/// The same with v and w; for GDN w is v.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct SweepMaps {
    pub workspace: WorkspaceMaps,
    pub v: TensorMap,
    pub w: TensorMap,
}

/// `ChunkSweepParams`: `P` is `ChunkParams` of GDN or of GDN-2.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct SweepParams<P> {
    pub maps: SweepMaps,
    pub chunk: P,
    pub first_segment: i32,
    pub segment_step: i32,
    pub relay: i32,
}

impl<P> SweepParams<P> {
    /// Of a launch over all segments.
    pub fn of_all(maps: SweepMaps, chunk: P) -> Self {
        Self { maps, chunk, first_segment: 0, segment_step: 1, relay: 0 }
    }
}

/// A specialisation of the sweeps, and the shape of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HopperSweep {
    /// What results depend on.
    pub variant: Variant,
    /// Format of w, for GDN-2 and only then.
    pub gates: Option<Format>,
    /// Whether the sweep over segments is there too.
    pub cut: bool,
    /// Groups of 64 columns of V in a block (`CHAINS`). No bit of a result depends on it.
    pub chains: usize,
}

impl HopperSweep {
    /// Whether the kernels take this model: f16 operands in chunks of 64 tokens, 16-bit inputs, and head dimensions that
    /// divide into tiles.
    pub fn takes(variant: &Variant) -> bool {
        variant.mode == Mode::F16Internals
            && variant.input.bytes() == OPERAND_BYTES
            && variant.chunk() == SPAN
            && [SPAN, 2 * SPAN].contains(&variant.key_dim)
            && variant.value_dim.is_multiple_of(SPAN)
    }

    /// The sweeps of a problem of `segments` segments, `None` where `gpu` is no Hopper or they do not take the model.
    /// `gates` is the format of w for GDN-2.
    pub fn on(gpu: &Gpu, config: &Config, gates: Option<Format>, segments: usize) -> Option<Self> {
        let taken = gpu.capability == HOPPER && Self::takes(&config.variant);
        taken.then(|| Self::new(config, gates, segments, &Card::from(gpu)))
    }

    fn new(config: &Config, gates: Option<Format>, segments: usize, card: &Card) -> Self {
        let Config { variant, cut, .. } = *config;
        // Two chains of GDN-2 are more than shared memory holds.
        let wide = gates.is_none() && fills_wide_blocks(&variant, segments, cut, card);
        Self { variant, gates, cut, chains: if wide { 2 } else { 1 } }
    }

    /// All shapes of blocks that [`HopperSweep::on`] chooses from.
    pub fn all(config: &Config, gates: Option<Format>) -> Vec<Self> {
        let of = |multiprocessors| Self::new(config, gates, 1, &Card { multiprocessors, shared_bytes_per_block: 0 });
        let mut all = if Self::takes(&config.variant) { vec![of(usize::MAX), of(0)] } else { Vec::new() };
        all.dedup();
        all
    }

    /// The sources of all of them, and of the backward sweep.
    pub fn builds(config: &Config, gates: Option<Format>) -> Result<Vec<Build>> {
        let all = Self::all(config, gates);
        all.iter().map(Self::build).chain(all.first().map(Self::backward_build)).collect()
    }

    /// What both directions are compiled with.
    pub(super) fn defines(&self) -> Result<Vec<(&'static str, String)>> {
        let mut defines = self.variant.defines()?;
        if let Some(gates) = self.gates {
            defines.extend(channel_defines(gates)?);
        }
        if self.cut {
            defines.push(("CUT", "1".to_owned()));
        }
        Ok(defines)
    }

    /// `chunk_forward`, `chunk_states`, `chunk_retain` for GDN-2, and `chunk_segment_ends` where a sequence is cut.
    pub fn build(&self) -> Result<Build> {
        let mut defines = self.defines()?;
        defines.push(("CHAINS", self.chains.to_string()));
        Ok(Build { source: source("chunk_sweep_hopper")?, defines })
    }

    /// The launch over `columns` columns: those of V, and of the identity where segments are joined.
    pub fn grid(&self, segments: usize, columns: usize) -> Result<Grid> {
        let blocks = [columns / (SPAN * self.chains), self.variant.value_heads, segments];
        grid(blocks, WARPGROUP * (self.chains + 1), self.shared_bytes())
    }

    /// Dynamic shared memory of a block, in bytes: the same for all kernels.
    fn shared_bytes(&self) -> usize {
        // A tile of keys or queries, or 64 columns of the state.
        let rows = SPAN * self.variant.key_dim * OPERAND_BYTES;
        let channels = self.gates.map_or(0, |gates| rows + self.chains * SPAN * SPAN * gates.bytes());
        let coefficients = COEFFICIENT_BYTES + OUTPUT_COEFFICIENT_BYTES;
        let stage = 2 * (rows + TILE_BYTES) + self.chains * TILE_BYTES + channels + coefficients;
        let chain = rows + 2 * TILE_BYTES;
        STAGES * stage + self.chains * chain + BARRIER_BYTES + ALIGNMENT_BYTES
    }

    /// The maps of the workspace whose sizes and addresses are in `params`; `write_keys` is the address of those keys.
    pub fn workspace_maps(&self, params: &ChunkParams, write_keys: u64) -> Result<WorkspaceMaps> {
        let key_dim = self.variant.key_dim;
        // The rows of GDN-2 have the decays of a value head in them.
        let heads = if self.gates.is_some() { params.value_heads } else { params.qk_heads };
        let tiles = |address, heads: i32, columns| {
            let rows = params.chunks as usize * heads as usize * SPAN;
            Rows { format: Format::F16, address, rows, heads: 1, columns, pad: PAD }.map(columns / SPAN)
        };
        Ok(WorkspaceMaps {
            keys: tiles(params.keys, heads, key_dim)?,
            write_keys: tiles(write_keys, heads, key_dim)?,
            queries: tiles(params.queries, heads, key_dim)?,
            inverse: tiles(params.inverse, params.value_heads, SPAN)?,
            scores: tiles(params.scores, params.value_heads, SPAN)?,
        })
    }

    /// All maps, with those of `tokens` tokens of v and of w, which GDN does not have, at their addresses.
    pub fn maps(&self, workspace: &WorkspaceMaps, tokens: usize, v: u64, w: Option<u64>) -> Result<SweepMaps> {
        let of = |format: Format, address| {
            let spans = self.chains * format.bytes() / OPERAND_BYTES;
            Rows::of_values(&self.variant, format, address, tokens).map(spans)
        };
        let v = of(self.variant.input, v)?;
        let w = match (self.gates, w) {
            (Some(gates), Some(address)) => of(gates, address)?,
            _ => v,
        };
        Ok(SweepMaps { workspace: *workspace, v, w })
    }
}

/// Whether blocks of 128 columns of V, rather than 64, leave no more than half of the multiprocessors idle: with `segments`
/// segments of all sequences together, and columns that divide so.
pub(super) fn fills_wide_blocks(variant: &Variant, segments: usize, cut: bool, card: &Card) -> bool {
    let wide = 2 * SPAN;
    let divide = variant.value_dim.is_multiple_of(wide) && (!cut || variant.key_dim.is_multiple_of(wide));
    let blocks = segments.saturating_mul(variant.value_heads).saturating_mul(variant.value_dim / wide);
    divide && blocks > card.multiprocessors / 2
}

#[cfg(test)]
#[path = "sweep_tests.rs"]
mod tests;
