//! Where the tensors of a call lie on the GPU.

use crate::cuda::Buffer;
use crate::{Error, Result};
use half::bf16;

/// Elements of one access of a kernel, to whose size addresses and pitches are aligned.
const ACCESS: usize = 8;
const ELEMENT_BYTES: u64 = size_of::<bf16>() as u64;

/// A bf16 tensor `[B, T, H, d]` on the GPU, or a slice of one: element `(b, t, h, i)` is number
/// `(b T + t) row_pitch + h head_pitch + i` from `address` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Address of the first element, a multiple of 16 bytes.
    pub address: u64,
    /// Elements that there are from the address on.
    pub length: usize,
    /// Elements from one token to the next, a multiple of 8.
    pub row_pitch: usize,
    /// Elements from one head to the next, a multiple of 8.
    pub head_pitch: usize,
}

/// Binary32 numbers `[B, H, T]` on the GPU, without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Address of the first, a multiple of 4 bytes.
    pub address: u64,
    /// How many there are from the address on.
    pub length: usize,
}

/// Sizes that a tensor of a call must have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// `B T`.
    pub rows: usize,
    /// `H`.
    pub heads: usize,
    /// `d`.
    pub head_dim: usize,
}

/// As the kernels take it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct HeadsParam {
    at: u64,
    row_pitch: i64,
    head_pitch: i64,
}

impl Heads {
    /// The elements of `buffer` from number `first` on.
    pub fn of(buffer: &Buffer<bf16>, first: usize, row_pitch: usize, head_pitch: usize) -> Self {
        Self {
            address: buffer.address() + first as u64 * ELEMENT_BYTES,
            length: buffer.len().saturating_sub(first),
            row_pitch,
            head_pitch,
        }
    }

    /// Checks that the kernels can access it, and that all its elements are there and differ from each other.
    pub(super) fn check(&self, name: &str, extent: &Extent) -> Result<()> {
        let Self { address, length, row_pitch, head_pitch } = *self;
        let Extent { rows, heads, head_dim } = *extent;
        if !address.is_multiple_of(ACCESS as u64 * ELEMENT_BYTES)
            || !row_pitch.is_multiple_of(ACCESS)
            || !head_pitch.is_multiple_of(ACCESS)
        {
            return Err(Error::input(format!(
                "attention: {name} at {address:#x} with {row_pitch} elements from token to token and {head_pitch} from \
                 head to head: expected an address that is a multiple of 16 and pitches that are multiples of {ACCESS}"
            )));
        }
        // The extent of each axis but the row, and of each but the head.
        let of_row = (heads - 1).saturating_mul(head_pitch).saturating_add(head_dim);
        let of_head = (rows - 1).saturating_mul(row_pitch).saturating_add(head_dim);
        let heads_in_rows = head_pitch >= head_dim && row_pitch >= of_row;
        let rows_in_heads = row_pitch >= head_dim && head_pitch >= of_head;
        if !(heads_in_rows || heads == 1 && row_pitch >= head_dim || rows_in_heads) {
            return Err(Error::input(format!(
                "attention: {name} with {row_pitch} elements from token to token and {head_pitch} from head to head: \
                 heads of {head_dim} would overlap; expected at least {of_row} and {head_dim}, or {head_dim} and {of_head}"
            )));
        }
        let needed = of_head.saturating_add((heads - 1).saturating_mul(head_pitch));
        if length < needed {
            return Err(Error::input(format!(
                "attention: {name} has {length} elements, and with these pitches {rows} tokens of {heads} heads of \
                 {head_dim} need {needed}"
            )));
        }
        Ok(())
    }

    pub(super) fn param(&self) -> HeadsParam {
        HeadsParam { at: self.address, row_pitch: self.row_pitch as i64, head_pitch: self.head_pitch as i64 }
    }
}

impl Rows {
    /// The whole of `buffer`.
    pub fn of(buffer: &Buffer<f32>) -> Self {
        Self { address: buffer.address(), length: buffer.len() }
    }

    pub(super) fn check(&self, name: &str, extent: &Extent) -> Result<()> {
        let needed = extent.rows * extent.heads;
        if !self.address.is_multiple_of(size_of::<f32>() as u64) || self.length < needed {
            return Err(Error::input(format!(
                "attention: {name} of {} numbers at {:#x}: expected an address that is a multiple of 4, and B H T = \
                 {needed} numbers",
                self.length, self.address
            )));
        }
        Ok(())
    }
}
