//! Tiles of 64 rows for Hopper's copy engine, as its matrix instructions take operands.

use super::config::Variant;
use crate::cuda::{Swizzle, TensorMap, TileFormat, Tiles};
use crate::precision::Format;
use crate::{Error, Result};

/// Rows of a tile, and columns of one of 16-bit operands (`SPAN`): tokens of a chunk, columns of K or V.
pub(super) const SPAN: usize = 64;
/// A tile of 64 rows of 64 operands: T, the scores, and 64 columns of v, U or o.
pub(super) const TILE_BYTES: usize = SPAN * SPAN_BYTES;
/// Bytes of a row that lie together in shared memory (`SPAN_BYTES`).
const SPAN_BYTES: usize = 128;

/// A tensor `[rows, heads, columns]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub format: Format,
    pub address: u64,
    pub rows: usize,
    pub heads: usize,
    pub columns: usize,
    /// Elements between a row of one head and the next.
    pub pad: usize,
}

/// The axes `(span, heads, rows, columns / span)`, where a span is 128 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Axes {
    shape: [u64; 4],
    strides_bytes: [u64; 3],
    tile: [u32; 4],
}

impl Rows {
    /// `tokens` tokens of v, do or w, all value heads: `[tokens, HV, V]`.
    pub fn of_values(variant: &Variant, format: Format, address: u64, tokens: usize) -> Self {
        let Variant { value_heads: heads, value_dim: columns, .. } = *variant;
        Self { format, address, rows: tokens, heads, columns, pad: 0 }
    }

    /// Tiles of `spans` spans: they lie one after the other in shared memory. Rows beyond the last are 0 there.
    pub fn map(&self, spans: usize) -> Result<TensorMap> {
        let Axes { shape, strides_bytes, tile } = self.axes(spans);
        let (address, swizzle) = (self.address, Swizzle::Bytes128);
        let format = tile_format(self.format)?;
        Tiles { format, address, shape: &shape, strides_bytes: &strides_bytes, tile: &tile, swizzle }.map()
    }

    fn axes(&self, spans: usize) -> Axes {
        let (element, rows) = (self.format.bytes(), self.rows.max(1));
        let span = SPAN_BYTES / element;
        let row = (self.columns + self.pad) * element;
        Axes {
            shape: [span, self.heads, rows, self.columns / span].map(|size| size as u64),
            strides_bytes: [row, self.heads * row, SPAN_BYTES].map(|bytes| bytes as u64),
            tile: [span, 1, SPAN, spans].map(|size| size as u32),
        }
    }
}

/// A format as the copy engine has it.
fn tile_format(format: Format) -> Result<TileFormat> {
    match format {
        Format::F32 => Ok(TileFormat::F32),
        Format::Bf16 => Ok(TileFormat::Bf16),
        Format::F16 => Ok(TileFormat::F16),
        other => Err(Error::input(format!("chunk: copies of {other}: expected f32, bf16 or f16"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_begin_with_a_span_of_128_bytes() {
        let v = Rows { format: Format::Bf16, address: 0, rows: 1000, heads: 3, columns: 256, pad: 0 };
        let expected = Axes { shape: [64, 3, 1000, 4], strides_bytes: [512, 1536, 128], tile: [64, 1, 64, 2] };
        assert_eq!(v.axes(2), expected);
        let w = Rows { format: Format::F32, ..v };
        let expected = Axes { shape: [32, 3, 1000, 8], strides_bytes: [1024, 3072, 128], tile: [32, 1, 64, 2] };
        assert_eq!(w.axes(2), expected);
    }

    /// Tiles of the workspace, whose rows are padded.
    #[test]
    fn strides_count_the_padding_and_shapes_do_not() {
        let keys = Rows { format: Format::F16, address: 0, rows: 5 * 2 * 64, heads: 1, columns: 128, pad: 8 };
        let expected = Axes { shape: [64, 1, 640, 2], strides_bytes: [272, 272, 128], tile: [64, 1, 64, 2] };
        assert_eq!(keys.axes(2), expected);
        let inverse = Rows { columns: 64, ..keys };
        let expected = Axes { shape: [64, 1, 640, 1], strides_bytes: [144, 144, 128], tile: [64, 1, 64, 1] };
        assert_eq!(inverse.axes(1), expected);
        assert_eq!(Rows { rows: 0, ..keys }.axes(2).shape, [64, 1, 1, 2]);
    }

    #[test]
    fn a_format_that_there_is_no_copy_of_is_refused() {
        let keys = Rows { format: Format::F64, address: 0, rows: 64, heads: 1, columns: 64, pad: 8 };
        assert!(keys.map(1).unwrap_err().to_string().contains("f64: expected f32, bf16 or f16"));
    }
}
