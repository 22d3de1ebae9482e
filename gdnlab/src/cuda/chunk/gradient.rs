//! The last step of the backward of GDN on Hopper, by its matrix and copy instructions: which problems it takes, and the shape
//! of its launch.
//!
//! `chunk_gradient_hopper.cu` takes the place of `chunk_gradient.cu` there: a kernel of the same name reads the same workspace
//! and gives the same results, up to rounding. Which of the two runs follows from the model and the GPU, never from the batch.

use super::config::{Card, Config, Variant};
use super::launches::grid;
use super::maps::{Rows, SPAN, TILE_BYTES};
use super::params::ChunkParams;
use super::sweep::{HopperSweep, WorkspaceMaps};
use crate::Result;
use crate::cuda::{Build, Grid, TensorMap, source};
use crate::precision::Format;

/// Chunks whose rows of do, U and Y are in shared memory at once (`TURNS`).
const TURNS: usize = 2;
/// No less than what is in shared memory besides tiles, and what their alignment takes.
const OTHER_BYTES: usize = 18 << 10;
/// Three warpgroups.
const THREADS: usize = 3 * 128;
/// V at the most: all tiles of a chunk are in shared memory.
const MOST_VALUE_DIM: usize = 128;

/// What the copy engine has to know.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct GradientMaps {
    pub queries: TensorMap,
    pub keys: TensorMap,
    pub d_o: TensorMap,
    pub writes: TensorMap,
    pub adjoints: TensorMap,
    pub states: TensorMap,
    pub d_states: TensorMap,
}

/// `ChunkGradientParams`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct GradientParams {
    pub maps: GradientMaps,
    pub chunk: ChunkParams,
}

/// A specialisation of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HopperGradient {
    variant: Variant,
}

impl HopperGradient {
    /// Whether the kernel takes this model: what the sweeps take, with values of up to 128 columns.
    pub fn takes(variant: &Variant) -> bool {
        HopperSweep::takes(variant) && variant.value_dim <= MOST_VALUE_DIM
    }

    /// The kernel of a problem, `None` where it does not take the model.
    pub fn of(config: &Config) -> Option<Self> {
        let variant = config.variant;
        Self::takes(&variant).then_some(Self { variant })
    }

    /// `chunk_gradient`.
    pub fn build(&self) -> Result<Build> {
        Ok(Build { source: source("chunk_gradient_hopper")?, defines: self.variant.defines()? })
    }

    /// A block for each multiprocessor takes one of `tiles` chunks and q/k heads after the other.
    pub fn grid(&self, tiles: usize, card: &Card) -> Result<Grid> {
        grid([tiles.min(card.multiprocessors), 1, 1], THREADS, self.shared_bytes())
    }

    /// Dynamic shared memory of a block, in bytes.
    fn shared_bytes(&self) -> usize {
        let (key_spans, value_spans) = (self.variant.key_dim / SPAN, self.variant.value_dim / SPAN);
        let tiles = 2 * key_spans + 3 * TURNS * value_spans + 2 * key_spans * value_spans + 2;
        tiles * TILE_BYTES + OTHER_BYTES
    }

    /// The maps of the workspace whose sizes and addresses are in `params`, and of `tokens` tokens of do.
    pub fn maps(&self, workspace: &WorkspaceMaps, tokens: usize, params: &ChunkParams) -> Result<GradientMaps> {
        let Variant { input, key_dim, value_dim, value_heads, .. } = self.variant;
        let squares = params.chunks as usize * value_heads;
        let operands = |address, rows, columns| {
            let rows = squares * rows;
            Rows { format: Format::F16, address, rows, heads: 1, columns, pad: 0 }.map(columns / SPAN)
        };
        let d_o = Rows::of_values(&self.variant, input, params.d_o, tokens);
        Ok(GradientMaps {
            queries: workspace.queries,
            keys: workspace.keys,
            d_o: d_o.map(value_dim / SPAN)?,
            writes: operands(params.writes, SPAN, value_dim)?,
            adjoints: operands(params.adjoints, SPAN, value_dim)?,
            states: operands(params.states, value_dim, key_dim)?,
            d_states: operands(params.d_states, value_dim, key_dim)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::HEAD_DIMS;
    use super::super::setup::Mode;
    use super::*;

    const VARIANT: Variant =
        Variant { mode: Mode::F16Internals, input: Format::Bf16, key_dim: 128, value_dim: 128, value_heads: 16 };
    const H200: Card = Card { multiprocessors: 132, shared_bytes_per_block: 232_448 };

    #[test]
    fn every_block_fits_into_shared_memory() {
        let variants = HEAD_DIMS
            .into_iter()
            .flat_map(|key_dim| HEAD_DIMS.map(|value_dim| Variant { key_dim, value_dim, ..VARIANT }));
        let taken: Vec<_> = variants.filter(HopperGradient::takes).collect();
        let dims: Vec<_> = taken.iter().map(|variant| (variant.key_dim, variant.value_dim)).collect();
        assert_eq!(dims, [(64, 64), (64, 128), (128, 64), (128, 128)]);
        for variant in taken {
            let grid = HopperGradient { variant }.grid(1000, &H200).unwrap();
            assert!(grid.shared_bytes as usize <= H200.shared_bytes_per_block, "{variant:?}: {grid:?}");
            assert_eq!((grid.blocks, grid.threads), ([132, 1, 1], 384));
        }
        assert!(!HopperGradient::takes(&Variant { input: Format::F32, ..VARIANT }));
    }

    #[test]
    fn a_small_problem_has_a_block_for_each_tile() {
        let gradient = HopperGradient { variant: VARIANT };
        assert_eq!(gradient.grid(5, &H200).unwrap().blocks, [5, 1, 1]);
        assert_eq!(size_of::<GradientParams>(), (7 * 128 + size_of::<ChunkParams>()).next_multiple_of(128));
    }
}
