//! The forward in one sweep on Hopper: which problems it takes, and the shape of its launches.

use super::config::{Card, Config, Variant, worthwhile_segments};
use super::launches::grid;
use super::maps::{Rows, SPAN, TILE_BYTES};
use super::params::ChunkParams;
use super::passes::Tensors;
use super::setup::{Mode, Setup};
use crate::cuda::{Build, Gpu, Grid, TensorMap, source};
use crate::precision::Format;
use crate::problem::Shape;
use crate::{Error, Result};

/// Chunks whose q, k and v are in shared memory at once, and chunks that are prepared at once (`TURNS`, `READY`).
const TURNS: usize = 3;
const READY: usize = 3;
/// No less than what is in shared memory besides tiles: squares, coefficients, gates and barriers.
const OTHER_BYTES: usize = 24 << 10;
/// Threads of a warpgroup.
const WARPGROUP: usize = 128;
/// Segments of a long sequence, times value heads: they fill an H200 once.
const SEGMENT_HEADS: usize = 132;
/// Chunks of a segment at the least.
const LEAST_CHUNKS: usize = 32;
/// Value heads up to which a sequence is cut: more of them fill the GPU better uncut.
const FEW_VALUE_HEADS: usize = 16;

/// `ChunkFusedParams`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct FusedParams {
    pub maps: [TensorMap; 3],
    pub chunk: ChunkParams,
}

/// The shape of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fused {
    /// Warpgroups that take 64 columns of V each (`CONSUMERS`).
    pub consumers: usize,
}

impl Fused {
    /// Refuses problems that it does not take.
    ///
    /// # Errors
    /// [`Error::Input`] saying what is taken.
    pub fn validate(setup: &Setup) -> Result<()> {
        let complaint = if setup.backward {
            "a backward: it keeps nothing that one could begin with"
        } else if setup.mode != Mode::F16Internals || setup.input != Format::Bf16 {
            "this mode and input format: expected f16-internals with bf16 inputs"
        } else if !Self::takes(&setup.shape) {
            "these head dimensions: expected K = 64 or 128, and V = 64, 128, 192 or 256"
        } else {
            return Ok(());
        };
        Err(Error::input(format!("chunk: the fused forward does not take {complaint}")))
    }

    /// Whether it takes these head dimensions.
    pub fn takes(shape: &Shape) -> bool {
        [SPAN, 2 * SPAN].contains(&shape.key_dim) && shape.value_dim.is_multiple_of(SPAN)
    }

    /// Refuses other GPUs than Hopper.
    ///
    /// # Errors
    /// [`Error::Gpu`] with what this one is.
    pub fn check(gpu: &Gpu) -> Result<()> {
        let (major, minor) = gpu.capability;
        if (major, minor) == (9, 0) {
            return Ok(());
        }
        Err(Error::gpu(format!(
            "chunk: the fused forward needs compute capability 9.0 (H100, H200), and this GPU has {major}.{minor}: use \
             cuda-chunk-bf16"
        )))
    }

    /// Segments into which a sequence of `chunks` chunks is cut. The batch has no say, as for
    /// [`Variant::segments`](super::config::Variant::segments).
    pub fn segments(variant: &Variant, chunks: usize) -> usize {
        if variant.value_heads > FEW_VALUE_HEADS {
            return 1;
        }
        worthwhile_segments(SEGMENT_HEADS / variant.value_heads.max(1), chunks, LEAST_CHUNKS)
    }

    /// The block for `segments` segments of all sequences together: as wide as leaves no more than half of the
    /// multiprocessors idle. No bit of a result depends on it.
    pub fn new(setup: &Setup, segments: usize, cut: bool, card: &Card) -> Self {
        let (variant, columns) = (setup.variant(), 2 * SPAN);
        let blocks = segments.saturating_mul(variant.value_heads).saturating_mul(variant.value_dim / columns);
        let wide = variant.divides_into(columns, cut) && blocks > card.multiprocessors / 2;
        Self { consumers: if wide { 2 } else { 1 } }
    }

    /// `chunk_fused_forward`, and `chunk_fused_segment_ends` where a sequence is cut.
    pub fn build(&self, config: &Config) -> Result<Build> {
        let mut defines = config.variant.defines()?;
        defines.push(("CONSUMERS", self.consumers.to_string()));
        if config.cut {
            defines.push(("CUT", "1".to_owned()));
        }
        Ok(Build { source: source("chunk_fused_hopper")?, defines })
    }

    /// The launch over `columns` columns: those of V, and of the identity where segments are joined.
    pub fn grid(&self, setup: &Setup, segments: usize, columns: usize) -> Result<Grid> {
        let spans = setup.shape.key_dim / SPAN;
        let shared = (TURNS * (2 * spans + self.consumers) + 2 * READY) * TILE_BYTES + OTHER_BYTES;
        let blocks = [columns / (SPAN * self.consumers), setup.shape.value_heads, segments];
        grid(blocks, WARPGROUP * (self.consumers + 1), shared)
    }

    /// What the copy engine has to know of q, k and v.
    pub fn maps(&self, setup: &Setup, tensors: &Tensors) -> Result<[TensorMap; 3]> {
        let Shape { qk_heads, value_heads, key_dim, value_dim, .. } = setup.shape;
        let map = |address, heads, columns, spans| {
            Rows { format: Format::Bf16, address, rows: setup.tokens(), heads, columns, pad: 0 }.map(spans)
        };
        Ok([
            map(tensors.q, qk_heads, key_dim, key_dim / SPAN)?,
            map(tensors.k, qk_heads, key_dim, key_dim / SPAN)?,
            map(tensors.v, value_heads, value_dim, self.consumers)?,
        ])
    }
}
