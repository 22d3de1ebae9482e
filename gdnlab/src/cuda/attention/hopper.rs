//! What the kernels on Hopper take besides: maps for the copy engine.

use super::heads::Heads;
use super::plan;
use super::setup::{Backward, Forward, Setup};
use crate::Result;
use crate::cuda::{Swizzle, TensorMap, TileFormat, Tiles};

/// Columns and tokens of one copy (`SPAN` and `BOX`).
const COPY: u32 = 64;
const ELEMENT_BYTES: u64 = 2;

/// `AttentionHopperParams` with maps of q, k and v.
pub(super) type ForwardParams = Params<3>;
/// `AttentionBackwardHopperParams` with maps of q, k, v and do.
pub(super) type BackwardParams = Params<4>;

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Params<const MAPS: usize> {
    maps: [TensorMap; MAPS],
    attention: plan::Params,
}

impl ForwardParams {
    /// For a call that was checked.
    pub fn new(setup: &Setup, call: &Forward, attention: plan::Params) -> Result<Self> {
        let map = |heads| map(setup, heads);
        Ok(Self { maps: [map(&call.q)?, map(&call.k)?, map(&call.v)?], attention })
    }
}

impl BackwardParams {
    /// For a call that was checked.
    pub fn new(setup: &Setup, call: &Backward, attention: plan::Params) -> Result<Self> {
        let map = |heads| map(setup, heads);
        Ok(Self { maps: [map(&call.q)?, map(&call.k)?, map(&call.v)?, map(&call.d_o)?], attention })
    }
}

/// Axes `(d, H, T, B)`: tokens of another sequence or beyond the last are outside of a tile, and come as zeros.
fn map(setup: &Setup, heads: &Heads) -> Result<TensorMap> {
    let shape = [setup.head_dim, setup.heads, setup.tokens, setup.batch].map(|size| size as u64);
    let strides_bytes = strides_bytes(setup, heads);
    let tile = [COPY, 1, COPY, 1];
    let (format, swizzle) = (TileFormat::Bf16, Swizzle::Bytes128);
    Tiles { format, address: heads.address, shape: &shape, strides_bytes: &strides_bytes, tile: &tile, swizzle }.map()
}

/// Of heads, tokens and sequences. The pitch of an only head may be anything, 0 for one.
pub(super) fn strides_bytes(setup: &Setup, heads: &Heads) -> [u64; 3] {
    let row = heads.row_pitch as u64 * ELEMENT_BYTES;
    let head = if setup.heads == 1 { row } else { heads.head_pitch as u64 * ELEMENT_BYTES };
    [head, row, setup.tokens as u64 * row]
}
