//! How a state is cut into blocks, warps and lanes.

use super::StateLayout;

/// Bytes of one access.
const ACCESS_BYTES: usize = 16;
/// Lanes of a warp.
const WARP: usize = 32;
/// Columns of a warp where a column lies along its lanes.
const WARP_COLUMNS: usize = 8;

/// The columns of one head that a block works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    /// Warps of a block.
    pub warps: usize,
    /// Lanes of a warp along the contiguous axis of the state: 8 of them access a line of 128 bytes.
    pub lanes: usize,
    /// Columns of a lane, where a column lies along the lanes.
    pub slots: usize,
    layout: StateLayout,
    /// Elements in an access.
    per_access: usize,
}

impl Tile {
    /// For states whose contiguous axis has `along` elements of `state_bytes`, and the other one `across`.
    pub fn new(layout: StateLayout, along: usize, across: usize, state_bytes: usize) -> Self {
        let per_access = ACCESS_BYTES / state_bytes;
        let lanes = if along.is_multiple_of(8 * per_access) { 8 } else { 4 };
        let slots = match layout {
            StateLayout::KeyValue => 1,
            StateLayout::ValueKey => WARP_COLUMNS * lanes / WARP,
        };
        let tile = Self { warps: 4, lanes, slots, layout, per_access };
        debug_assert!(tile.divides(along, across), "{tile:?} of {along} x {across}");
        tile
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        (self.warps * WARP) as u32
    }

    /// Columns of a block.
    pub fn columns(&self) -> usize {
        match self.layout {
            StateLayout::KeyValue => self.lanes * self.per_access,
            StateLayout::ValueKey => self.warps * self.slots * (WARP / self.lanes),
        }
    }

    /// Whether a state of `along` contiguous elements by `across` divides into whole tiles.
    fn divides(&self, along: usize, across: usize) -> bool {
        let accesses = along.is_multiple_of(self.lanes * self.per_access);
        let others = match self.layout {
            // The rows of a column are spread over warps and the lanes that are not along it.
            StateLayout::KeyValue => self.warps * (WARP / self.lanes),
            StateLayout::ValueKey => self.columns(),
        };
        accesses && across.is_multiple_of(others)
    }
}

#[cfg(test)]
mod tests {
    use super::super::HEAD_DIMS;
    use super::*;

    #[test]
    fn every_state_divides_into_tiles() {
        for layout in [StateLayout::KeyValue, StateLayout::ValueKey] {
            for state_bytes in [2, 4] {
                for along in HEAD_DIMS {
                    for across in HEAD_DIMS {
                        let tile = Tile::new(layout, along, across, state_bytes);
                        assert!(tile.divides(along, across), "{tile:?} of {along} x {across}");
                        assert!(tile.threads() <= 1024 && tile.slots > 0);
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_of_floats_is_read_in_whole_lines() {
        let tile = Tile::new(StateLayout::KeyValue, 128, 128, 4);
        assert_eq!((tile.lanes * ACCESS_BYTES, tile.columns(), tile.threads()), (128, 32, 128));
        let tile = Tile::new(StateLayout::ValueKey, 128, 128, 4);
        assert_eq!((tile.lanes * ACCESS_BYTES, tile.columns(), tile.slots), (128, 32, 2));
    }
}
