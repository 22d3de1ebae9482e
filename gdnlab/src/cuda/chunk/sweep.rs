//! The sweeps on Hopper, for GDN and GDN-2, by its matrix and copy instructions: which problems they take, and the shape of the
//! launches of the forward's ([`backward`](super::backward) has the other one's).
//!
//! `chunk_sweep_hopper.cu` takes the place of `chunk_forward.cu` there: kernels of the same names read the same workspace and
//! give the same results, up to rounding. Which of the two runs follows from the model and the GPU ([`HopperSweep::takes`]),
//! never from the batch.

use super::config::{Config, PAD, Variant, channel_defines};
use super::launches::grid;
use super::maps::{Rows, SPAN, TILE_BYTES};
use super::params::ChunkParams;
use super::setup::{Mode, Setup};
use super::table::ChunkTable;
use crate::Result;
use crate::cuda::{Build, Gpu, Grid, TensorMap, source};
use crate::precision::Format;

/// Bytes of an operand.
const OPERAND_BYTES: usize = 2;
/// No less than what is in shared memory besides tiles, of GDN and of GDN-2 (`OTHER_BYTES`), and room for the tiles' alignment.
const OTHER_BYTES: [usize; 2] = [2 * 4096, 3 * 4096];
const ALIGNMENT_BYTES: usize = 1024;
/// Threads of a warpgroup: there is one for each chain, and the mover or the output.
const WARPGROUP: usize = 128;
/// What a block takes to begin and to end, in chunks.
const START_CHUNKS: usize = 3;
/// Compute capability of Hopper.
const HOPPER: (u32, u32) = (9, 0);

/// What a sweep over the forward's chunks is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    /// o, and nothing that is kept.
    Output,
    /// Operands that are kept for the backward, whose plans run both.
    Kept,
    /// The ends of segments.
    Ends,
}

impl Pass {
    /// What the forward's sweep of such a plan is for.
    pub fn of(setup: &Setup) -> Self {
        if setup.backward { Self::Kept } else { Self::Output }
    }

    /// Time of a chunk in a block of two chains over that in a block of one: 2.8 over 1.7 us, 3.4 over 1.8, and 2.3 over 1.5.
    fn wide_chunk(self) -> f64 {
        match self {
            Self::Output => 1.6,
            Self::Kept => 1.66,
            Self::Ends => 1.5,
        }
    }
}

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

    /// The sweeps of a problem with these chunks, `None` where `gpu` is no Hopper or they do not take the model. `gates` is the
    /// format of w for GDN-2.
    pub fn on(gpu: &Gpu, config: &Config, gates: Option<Format>, table: &ChunkTable, of: Pass) -> Option<Self> {
        let multiprocessors = gpu.multiprocessors as usize;
        if gpu.capability == HOPPER { Self::quickest(config, gates, table, of, multiprocessors) } else { None }
    }

    /// Of the shapes of blocks the one whose sweep ends first on that many multiprocessors.
    fn quickest(
        config: &Config,
        gates: Option<Format>,
        table: &ChunkTable,
        of: Pass,
        multiprocessors: usize,
    ) -> Option<Self> {
        let time = |sweep: &Self| sweep.time(table, of, multiprocessors);
        Self::all(config, gates).into_iter().min_by(|a, b| time(a).total_cmp(&time(b)))
    }

    /// Time of a sweep, in chunks of a block of one chain. Blocks start in the order of the launch, each as soon as there is a
    /// multiprocessor for it.
    fn time(&self, table: &ChunkTable, of: Pass, multiprocessors: usize) -> f64 {
        let Variant { key_dim, value_dim, value_heads, .. } = self.variant;
        let columns = |segment: usize| {
            let sequence = |segment: usize| table.segment_sequence.get(segment);
            let last = sequence(segment) != sequence(segment + 1);
            let first = segment == 0 || sequence(segment) != sequence(segment - 1);
            match of {
                // The last segment of a sequence has no end that is needed, and the first begins with a known state.
                Pass::Ends if last => 0,
                Pass::Ends if !first => value_dim + key_dim,
                _ => value_dim,
            }
        };
        let mut free = vec![0; multiprocessors.max(1)];
        for (segment, pair) in table.segment.windows(2).enumerate() {
            let blocks = columns(segment) / (SPAN * self.chains) * value_heads;
            // Whole rounds keep all multiprocessors alike.
            let (rounds, rest) = (blocks / free.len(), blocks % free.len());
            let chunks = (pair[1] - pair[0]) as usize + START_CHUNKS;
            free.iter_mut().for_each(|end| *end += rounds * chunks);
            free.sort_unstable();
            free[..rest].iter_mut().for_each(|end| *end += chunks);
        }
        let chunk = if self.chains == 1 { 1.0 } else { of.wide_chunk() };
        chunk * free.into_iter().max().unwrap_or_default() as f64
    }

    /// All shapes of blocks that [`HopperSweep::on`] chooses from, narrow ones first.
    pub fn all(config: &Config, gates: Option<Format>) -> Vec<Self> {
        let Config { variant, cut, .. } = *config;
        // Two chains of GDN-2 are more than shared memory holds.
        let most = if gates.is_none() && variant.divides_into(2 * SPAN, cut) { 2 } else { 1 };
        let most = if Self::takes(&variant) { most } else { 0 };
        (1..=most).map(|chains| Self { variant, gates, cut, chains }).collect()
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

    /// The launch over `columns` columns: those of V, and of the identity where segments are joined. `keeps` where operands
    /// are kept for the backward.
    pub fn grid(&self, segments: usize, columns: usize, keeps: bool) -> Result<Grid> {
        let blocks = [columns / (SPAN * self.chains), self.variant.value_heads, segments];
        grid(blocks, WARPGROUP * (self.chains + 1), self.shared_bytes(keeps))
    }

    /// Dynamic shared memory of a block, in bytes.
    fn shared_bytes(&self, keeps: bool) -> usize {
        // Tiles of keys or queries, or of 64 columns of the state.
        let spans = self.variant.key_dim / SPAN;
        let channels = self.gates.map_or(0, |gates| spans + self.chains * gates.bytes() / OPERAND_BYTES);
        let stage = 2 * (spans + 1) + self.chains + channels;
        let moves = self.gates.is_none() && !keeps;
        let stages = if moves { 3 } else { 2 };
        let of_chain = if moves { 1 } else { spans + 2 };
        let tiles = stages * stage + self.chains * of_chain;
        tiles * TILE_BYTES + OTHER_BYTES[usize::from(self.gates.is_some())] + ALIGNMENT_BYTES
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

#[cfg(test)]
#[path = "sweep_tests.rs"]
mod tests;
