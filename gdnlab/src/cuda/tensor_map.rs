//! Tensor maps: what Hopper's copy engine (TMA) has to know of a tensor to copy tiles of it into shared memory.

use super::raw::{self, TensorMap, failed};
use crate::{Error, Result};

/// Axes of a tensor at the most.
pub(super) const MAX_AXES: usize = 5;
/// Elements of a tile along one axis at the most.
const MAX_TILE: u32 = 256;

/// A tensor in the memory of the GPU, and the tiles that are copied of it. Axes are listed from the contiguous one on.
///
/// What of a tile lies outside of the tensor is 0.
#[derive(Clone, Copy, Debug)]
pub struct Tiles<'a> {
    /// Format of an element.
    pub format: TileFormat,
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// Number of elements along each axis.
    pub shape: &'a [u64],
    /// Bytes from one element to the next along each axis but the first; multiples of 16.
    pub strides_bytes: &'a [u64],
    /// Number of elements of a tile along each axis, 256 at the most. Along the first, a multiple of 16 bytes.
    pub tile: &'a [u32],
    /// How the tile lies in shared memory.
    pub swizzle: Swizzle,
}

/// Format of an element for the copy engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileFormat {
    /// 32 bits as they are.
    F32,
    /// 32 bits, rounded to TF32 by the copy.
    Tf32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

/// The order of 16-byte pieces in shared memory: permuted within spans of so many bytes, so that a column of a tile is
/// spread over the banks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    /// As in memory.
    None,
    /// Within 32 bytes.
    Bytes32,
    /// Within 64 bytes.
    Bytes64,
    /// Within 128 bytes.
    Bytes128,
}

impl TileFormat {
    fn size_bytes(self) -> u64 {
        match self {
            Self::F32 | Self::Tf32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

impl Swizzle {
    /// Bytes of a tile's first axis at the most.
    fn span_bytes(self) -> Option<u64> {
        match self {
            Self::None => None,
            Self::Bytes32 => Some(32),
            Self::Bytes64 => Some(64),
            Self::Bytes128 => Some(128),
        }
    }
}

impl Tiles<'_> {
    /// The map for a kernel's parameters, where it stands by value. It needs the driver, and no time of the GPU.
    ///
    /// # Errors
    /// [`Error::Input`] where a number is not what the copy engine takes, [`Error::Gpu`] where the driver refuses.
    pub fn map(&self) -> Result<TensorMap> {
        if let Some(complaint) = self.complaint() {
            return Err(Error::input(format!("tensor map: {complaint}")));
        }
        raw::tensor_map(self).map_err(|error| failed(&format!("making a tensor map of {self:?}"), error))
    }

    fn complaint(&self) -> Option<String> {
        let rank = self.shape.len();
        if rank == 0 || rank > MAX_AXES || self.tile.len() != rank || self.strides_bytes.len() + 1 != rank {
            return Some(format!(
                "{rank} axes, {} of a tile and {} strides: expected 1 to {MAX_AXES} axes, as many of a tile, \
                 and a stride for each but the first",
                self.tile.len(),
                self.strides_bytes.len()
            ));
        }
        if let Some(stride) = self.strides_bytes.iter().chain([&self.address]).find(|&&bytes| bytes % 16 != 0) {
            return Some(format!("{stride}: expected an address and strides that are multiples of 16 bytes"));
        }
        if let Some(size) = self.tile.iter().find(|&&size| size == 0 || size > MAX_TILE) {
            return Some(format!("{size} elements of a tile along an axis: expected 1 to {MAX_TILE}"));
        }
        let row_bytes = u64::from(self.tile[0]) * self.format.size_bytes();
        let span = self.swizzle.span_bytes().filter(|&span| row_bytes > span);
        match span {
            Some(span) => Some(format!("a row of {row_bytes} bytes: expected {span} at the most with this swizzle")),
            None if !row_bytes.is_multiple_of(16) => {
                Some(format!("a row of {row_bytes} bytes: expected a multiple of 16"))
            }
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Tiles = Tiles {
        format: TileFormat::Bf16,
        address: 0x7000_0000_0100,
        shape: &[128, 1000],
        strides_bytes: &[256],
        tile: &[64, 64],
        swizzle: Swizzle::Bytes128,
    };

    #[test]
    fn what_the_copy_engine_does_not_take_is_refused_before_the_driver_is_asked() {
        assert_eq!(GOOD.complaint(), None);
        for (tiles, expected) in [
            (Tiles { shape: &[128], ..GOOD }, "a stride for each but the first"),
            (Tiles { shape: &[], strides_bytes: &[], tile: &[], ..GOOD }, "1 to 5 axes"),
            (Tiles { address: 8, ..GOOD }, "multiples of 16 bytes"),
            (Tiles { strides_bytes: &[200], ..GOOD }, "200: expected"),
            (Tiles { tile: &[64, 257], ..GOOD }, "257 elements"),
            (Tiles { tile: &[0, 64], ..GOOD }, "0 elements"),
            (Tiles { tile: &[128, 64], ..GOOD }, "256 bytes: expected 128"),
            (Tiles { tile: &[12, 64], ..GOOD }, "24 bytes: expected a multiple of 16"),
        ] {
            let error = tiles.map().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
