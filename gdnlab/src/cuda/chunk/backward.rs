//! The backward sweep on Hopper, for GDN and GDN-2: `chunk_backward_hopper.cu` takes the place of `chunk_backward.cu` wherever
//! [`HopperSweep`] takes that of the forward's, with kernels of the same names and results, up to rounding.

use super::config::Variant;
use super::launches::grid;
use super::maps::{Rows, SPAN, TILE_BYTES};
use super::sweep::{HopperSweep, WorkspaceMaps};
use crate::Result;
use crate::cuda::{Build, Grid, TensorMap, source};

/// Chunks whose tiles for the role ahead of the chain are in shared memory at once, and those tiles: the scores and do.
const AHEAD_TURNS: usize = 2;
const AHEAD_TILES: usize = 2;
/// No less than what is in shared memory besides tiles, and what their alignment takes.
const OTHER_BYTES: usize = 38 << 10;
/// Three warpgroups.
const THREADS: usize = 3 * 128;

/// What the copy engine has to know.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct BackwardMaps {
    pub workspace: WorkspaceMaps,
    pub d_o: TensorMap,
}

/// `ChunkBackwardParams`: `P` is `ChunkParams` of GDN or of GDN-2.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct BackwardParams<P> {
    pub maps: BackwardMaps,
    pub chunk: P,
}

impl HopperSweep {
    /// `chunk_backward`, and `chunk_segment_starts` where a sequence is cut.
    pub fn backward_build(&self) -> Result<Build> {
        Ok(Build { source: source("chunk_backward_hopper")?, defines: self.defines()? })
    }

    /// The launch of the backward sweep over all segments.
    pub fn backward_grid(&self, segments: usize) -> Result<Grid> {
        let Variant { key_dim, value_dim, value_heads, .. } = self.variant;
        let (spans, channels) = (key_dim / SPAN, self.gates.is_some());
        // For the chain T and two tiles of rows of keys and queries, or three; dS; Y twice.
        let chain = 1 + spans * if channels { 3 } else { 2 };
        let chain_turns = if channels && spans == 2 { 2 } else { 3 };
        let tiles = chain_turns * chain + AHEAD_TURNS * AHEAD_TILES + spans + 2;
        let bytes = tiles * TILE_BYTES + OTHER_BYTES;
        grid([value_dim / SPAN, value_heads, segments], THREADS, bytes)
    }

    /// The maps of the backward sweep, with those of `tokens` tokens of do at its address.
    pub fn backward_maps(&self, workspace: &WorkspaceMaps, tokens: usize, d_o: u64) -> Result<BackwardMaps> {
        let d_o = Rows::of_values(&self.variant, self.variant.input, d_o, tokens);
        Ok(BackwardMaps { workspace: *workspace, d_o: d_o.map(1)? })
    }
}

#[cfg(test)]
mod tests {
    use super::super::setup::Mode;
    use super::*;
    use crate::precision::Format;

    #[test]
    fn blocks_fit_into_shared_memory_and_divide_the_columns() {
        for (key_dim, value_dim) in [(64, 64), (64, 256), (128, 192), (128, 128)] {
            for gates in [None, Some(Format::F32)] {
                let variant =
                    Variant { mode: Mode::F16Internals, input: Format::Bf16, key_dim, value_dim, value_heads: 6 };
                let sweep = HopperSweep { variant, gates, cut: false, chains: 1 };
                let grid = sweep.backward_grid(7).unwrap();
                assert_eq!((grid.blocks, grid.threads), ([value_dim as u32 / 64, 6, 7], 384));
                assert!(grid.shared_bytes <= 232_448, "{sweep:?}: {grid:?}");
            }
        }
    }

    #[test]
    fn a_specialisation_says_all_that_changes_its_code() {
        let variant =
            Variant { mode: Mode::F16Internals, input: Format::F16, key_dim: 64, value_dim: 128, value_heads: 6 };
        let build =
            |gates, cut, chains| HopperSweep { variant, gates, cut, chains }.backward_build().unwrap().to_string();
        let common = "chunk_backward_hopper.cu MODE=0 INPUT=f16 KD=64 VD=128 CHUNK=64";
        assert_eq!(build(None, false, 2), common);
        assert_eq!(build(Some(Format::Bf16), true, 1), format!("{common} CHANNELS=1 GATE=bf16 CUT=1"));
    }
}
