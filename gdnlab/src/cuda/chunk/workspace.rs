//! Memory that the kernels hand each other: one allocation, cut into the tensors of `chunk.cuh`.

use super::config::{COEFFICIENTS, Config};
use super::params::ChunkParams;
use crate::cuda::{Buffer, Gpu};
use crate::problem::Shape;
use crate::{Error, Result};

/// Where a tensor begins: a multiple of this many bytes.
const ALIGNMENT: usize = 256;

/// The workspace of one problem.
pub(super) struct Workspace {
    memory: Buffer<u8>,
    places: Places,
}

/// Offsets of the tensors in bytes; `None` for one that only the backward needs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Places {
    queries: usize,
    keys: usize,
    norms: usize,
    inverse: usize,
    scores: usize,
    coefficients: usize,
    segments: Option<SegmentPlaces>,
    backward: Option<BackwardPlaces>,
    bytes: usize,
}

/// What only cut sequences need.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SegmentPlaces {
    states: usize,
    transitions: usize,
    d_states: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct BackwardPlaces {
    overlaps: usize,
    states: usize,
    state_scales: usize,
    writes: usize,
    write_scales: usize,
    adjoints: usize,
    adjoint_scales: usize,
    d_states: usize,
    d_state_scales: usize,
    d_o_scales: usize,
}

/// What a workspace has to hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Number of chunks.
    pub chunks: usize,
    /// Number of segments.
    pub segments: usize,
    /// Whether the backward is wanted.
    pub backward: bool,
}

/// Hands out memory from the front; `None` once it is more than can be addressed.
pub(super) struct Cut {
    pub bytes: Option<usize>,
}

impl Cut {
    /// The offset of the next `count` elements of `size` bytes.
    pub fn take(&mut self, size: usize, count: &[usize]) -> usize {
        let at = self.bytes.unwrap_or_default();
        let bytes = count.iter().try_fold(size, |product, &n| product.checked_mul(n));
        self.bytes = bytes.and_then(|bytes| self.bytes?.checked_add(bytes)?.checked_next_multiple_of(ALIGNMENT));
        at
    }
}

impl Places {
    fn new(config: &Config, shape: &Shape, extent: Extent) -> Result<Self> {
        let Extent { chunks, segments, backward } = extent;
        let (operand, number) = (config.variant.mode.operand_bytes(), size_of::<f32>());
        let Shape { qk_heads, value_heads, key_dim, value_dim, .. } = *shape;
        let (rows, row) = (config.chunk, config.row_pitch());
        let mut cut = Cut { bytes: Some(0) };
        let tile = [chunks, qk_heads, rows, row];
        let square = [chunks, value_heads, rows, config.square_pitch()];
        let state = [chunks, value_heads, value_dim, key_dim];
        let columns = [chunks, value_heads, rows, value_dim];
        let scales = [chunks, value_heads, value_dim / 16, 2];
        let mut places = Self {
            queries: cut.take(operand, &tile),
            keys: cut.take(operand, &tile),
            norms: cut.take(number, &[chunks, qk_heads, 2, rows]),
            inverse: cut.take(operand, &square),
            scores: cut.take(operand, &square),
            coefficients: cut.take(number, &[chunks, value_heads, COEFFICIENTS, rows]),
            segments: None,
            backward: None,
            bytes: 0,
        };
        if config.cut {
            let state = [segments, value_heads, value_dim, key_dim];
            places.segments = Some(SegmentPlaces {
                states: cut.take(number, &state),
                transitions: cut.take(number, &[segments, value_heads, 2, key_dim, key_dim]),
                d_states: backward.then(|| cut.take(number, &state)),
            });
        }
        if backward {
            places.backward = Some(BackwardPlaces {
                overlaps: cut.take(operand, &square),
                states: cut.take(operand, &state),
                state_scales: cut.take(number, &scales),
                writes: cut.take(operand, &columns),
                write_scales: cut.take(number, &scales),
                adjoints: cut.take(operand, &columns),
                adjoint_scales: cut.take(number, &scales),
                d_states: cut.take(operand, &state),
                d_state_scales: cut.take(number, &scales),
                d_o_scales: cut.take(number, &scales),
            });
        }
        places.bytes = cut.bytes.ok_or_else(|| Error::input(format!("chunk: {shape}: too large to address")))?;
        Ok(places)
    }
}

impl Workspace {
    /// For a problem of `shape`.
    pub fn new(gpu: &Gpu, config: &Config, shape: &Shape, extent: Extent) -> Result<Self> {
        let places = Places::new(config, shape, extent)?;
        Ok(Self { memory: gpu.alloc(places.bytes)?, places })
    }

    /// Size in bytes of the workspace for such a problem.
    pub fn bytes_for(config: &Config, shape: &Shape, extent: Extent) -> Result<usize> {
        Ok(Places::new(config, shape, extent)?.bytes)
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.places.bytes
    }

    pub fn memory_mut(&mut self) -> &mut Buffer<u8> {
        &mut self.memory
    }

    /// Writes the addresses into `params`; null for what the forward does not need where there is no backward.
    pub fn enter(&self, params: &mut ChunkParams) {
        let address = |offset: usize| self.memory.address() + offset as u64;
        let Places { queries, keys, norms, inverse, scores, coefficients, segments, backward, .. } = &self.places;
        params.queries = address(*queries);
        params.keys = address(*keys);
        params.norms = address(*norms);
        params.inverse = address(*inverse);
        params.scores = address(*scores);
        params.coefficients = address(*coefficients);
        if let Some(places) = segments {
            params.segment_states = address(places.states);
            params.transitions = address(places.transitions);
            params.segment_d_states = places.d_states.map_or(0, address);
        }
        if let Some(places) = backward {
            params.overlaps = address(places.overlaps);
            params.states = address(places.states);
            params.state_scales = address(places.state_scales);
            params.writes = address(places.writes);
            params.write_scales = address(places.write_scales);
            params.adjoints = address(places.adjoints);
            params.adjoint_scales = address(places.adjoint_scales);
            params.d_states = address(places.d_states);
            params.d_state_scales = address(places.d_state_scales);
            params.d_o_scales = address(places.d_o_scales);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::{Card, Variant, Work};
    use super::super::setup::Mode;
    use super::*;
    use crate::precision::Format;

    fn places(mode: Mode, chunks: usize, backward: bool) -> Result<Places> {
        let variant = Variant { mode, input: Format::F32, key_dim: 128, value_dim: 64, value_heads: 6 };
        let card = Card { multiprocessors: 132, shared_bytes_per_block: 232_448 };
        let config = Config::new(variant, Work { heads: 1, cut: false }, &card).unwrap();
        let shape = Shape { qk_heads: 2, value_heads: 6, ..Shape::new(1, 1, 128, 64) };
        Places::new(&config, &shape, Extent { chunks, segments: 1, backward })
    }

    #[test]
    fn tensors_have_the_sizes_of_chunk_cuh() {
        let places = places(Mode::F16Internals, 5, true).unwrap();
        assert_eq!(places.keys - places.queries, 5 * 2 * 64 * 136 * 2);
        assert_eq!(places.inverse - places.norms, 5 * 2 * 2 * 64 * 4);
        assert_eq!(places.scores - places.inverse, 5 * 6 * 64 * 72 * 2);
        let backward = places.backward.unwrap();
        assert_eq!(backward.overlaps - places.coefficients, 5 * 6 * 9 * 64 * 4);
        assert_eq!(backward.state_scales - backward.states, 5 * 6 * 64 * 128 * 2);
        assert_eq!(backward.writes - backward.state_scales, (5usize * 6 * 4 * 2 * 4).next_multiple_of(ALIGNMENT));
        assert_eq!(backward.write_scales - backward.writes, 5 * 6 * 64 * 64 * 2);
    }

    #[test]
    fn the_forward_alone_needs_less_and_nothing_needs_nothing() {
        let (both, forward) = (places(Mode::Fp32, 7, true).unwrap(), places(Mode::Fp32, 7, false).unwrap());
        assert!(forward.bytes < both.bytes / 2 && forward.backward.is_none());
        assert_eq!(places(Mode::Fp32, 0, true).unwrap().bytes, 0);
    }

    #[test]
    fn more_than_can_be_addressed_is_refused() {
        assert!(places(Mode::Tf32, usize::MAX / 64, true).unwrap_err().to_string().contains("too large"));
    }
}
