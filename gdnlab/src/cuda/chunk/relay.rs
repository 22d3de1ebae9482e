//! A forward whose sweep begins while later chunks are still being prepared.
//!
//! The sweep goes from chunk to chunk, and a few sequences of a model with few heads leave most multiprocessors idle. So
//! sequences are taken in parts: while one part is swept, the next is prepared beside it, and each launch of the sweep begins
//! with the states that the one before it has left. Parts end at chunks where a sweep looks up the largest element of its
//! state in any case (`LOOK_UP_EVERY`), so results are those of one sweep.

use super::config::Config;
use super::launches::in_pairs;
use super::params::ChunkParams;
use super::sweep::{HopperSweep, SweepMaps, SweepParams};
use super::table::{ChunkTable, counted};
use crate::Result;
use crate::cuda::{Buffer, Event, Function, Gpu, Grid, Stream};
use crate::problem::Shape;
use std::ops::Range;

/// Chunks after which a sweep looks up its state (`LOOK_UP_EVERY`).
const LOOK_UP_EVERY: usize = 8;
/// Chunks of the longest sequence at the least: shorter ones start more kernels than they save. More where a preparation serves
/// more than `SMALL_GROUP` value heads, and takes less of the time.
const LEAST_CHUNKS: usize = 64;
const LEAST_CHUNKS_OF_GROUPS: usize = 96;
const SMALL_GROUP: usize = 2;
/// Parts of a sequence, of the same length. More of them take more time, not less.
const PARTS: usize = 2;
/// Multiprocessors that sweeps leave idle at the least: a quarter.
const MOST_BLOCKS: (usize, usize) = (3, 4);
/// Sequences at the most: each part of each is prepared by a launch of its own.
const MOST_SEQUENCES: usize = 8;

/// What a forward in parts needs beside the plan.
pub(super) struct Relay {
    parts: Parts,
    /// First chunk of each segment, where every sequence has one for each part; and the sequence of each.
    segment: Buffer<i32>,
    segment_sequence: Buffer<i32>,
    /// `[M, HV, V, K]`: S at the start of each segment but a sequence's first.
    states: Buffer<f32>,
    /// Written by what keeps the next preparation back until the sweep beside it has found its multiprocessors.
    moment: Buffer<u32>,
    /// Where the sweeps run, before other work.
    stream: Stream,
    prepared: Vec<Event>,
    end: Event,
    sizes: Sizes,
}

/// The kernels of a forward, with the launches over all chunks.
pub(super) struct Kernels<'a> {
    pub prepare: (&'a Function, &'a Grid),
    pub sweep: (&'a Function, &'a Grid),
}

/// Bytes of the workspace that a chunk takes in all heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// A tile of rows of keys or queries, a square, the coefficients.
    pub rows: usize,
    pub square: usize,
    pub coefficients: usize,
    /// Norms, of GDN alone.
    pub norms: usize,
}

/// The parameters of a preparation and of a sweep.
pub(super) trait RelayParams: Copy {
    fn chunk(&mut self) -> &mut ChunkParams;

    /// Where the workspace has rows besides.
    fn more_rows(&mut self) -> Option<&mut u64> {
        None
    }
}

impl RelayParams for ChunkParams {
    fn chunk(&mut self) -> &mut ChunkParams {
        self
    }
}

/// How sequences are taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// The chunks of each part, sequence by sequence: `[N][PARTS]`. Parts of short sequences are empty but for the last.
    pub chunks: Vec<Vec<Range<usize>>>,
}

impl Parts {
    /// Of the chunks of all sequences, `first[n]` to `first[n + 1]` those of sequence n; `None` where it is not worthwhile,
    /// with `blocks` blocks in a sweep and `group` value heads for which the rows of a chunk are prepared once.
    pub fn of(first: &[usize], blocks: usize, group: usize, multiprocessors: usize) -> Option<Self> {
        let lengths = || first.windows(2).map(|pair| pair[1] - pair[0]);
        let least = if group > SMALL_GROUP { LEAST_CHUNKS_OF_GROUPS } else { LEAST_CHUNKS };
        let short = lengths().max()? < least;
        if short || lengths().count() > MOST_SEQUENCES || MOST_BLOCKS.1 * blocks > MOST_BLOCKS.0 * multiprocessors {
            return None;
        }
        let begin = |chunks: usize, part: usize| match part {
            PARTS => chunks,
            _ => chunks / LOOK_UP_EVERY * part / PARTS * LOOK_UP_EVERY,
        };
        let of_sequence = |pair: &[usize]| {
            let (first, chunks) = (pair[0], pair[1] - pair[0]);
            (0..PARTS).map(|part| first + begin(chunks, part)..first + begin(chunks, part + 1)).collect()
        };
        Some(Self { chunks: first.windows(2).map(of_sequence).collect() })
    }

    /// Those of a problem on `gpu`, where its forward is a preparation and one launch of these sweeps, with `group` as above.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) where there are more blocks than a launch has.
    pub fn of_sweep(gpu: &Gpu, table: &ChunkTable, sweep: &HopperSweep, group: usize) -> Result<Option<Self>> {
        if sweep.cut {
            return Ok(None);
        }
        let first: Vec<usize> = table.sequence.iter().map(|&chunk| chunk as usize).collect();
        let blocks = sweep.grid(table.segments(), sweep.variant.value_dim, false)?.blocks;
        Ok(Self::of(&first, blocks.iter().map(|&n| n as usize).product(), group, gpu.multiprocessors as usize))
    }

    fn all(&self) -> impl Iterator<Item = &Range<usize>> {
        self.chunks.iter().flatten()
    }

    /// Elements of the states between the parts.
    fn state_elements(&self, shape: &Shape) -> usize {
        self.all().count() * shape.value_heads * shape.value_dim * shape.key_dim
    }

    /// Size in bytes of what a relay with these parts holds on the GPU.
    pub fn bytes(&self, shape: &Shape) -> usize {
        let numbers = 2 * self.all().count() + 2;
        self.state_elements(shape) * size_of::<f32>() + numbers * size_of::<i32>()
    }
}

impl Relay {
    /// A relay over these parts of the problem whose chunks `table` has.
    ///
    /// # Errors
    /// [`Error::Gpu`] where there is too little memory.
    pub fn new(gpu: &Gpu, parts: Parts, sizes: Sizes, shape: &Shape, table: &ChunkTable) -> Result<Self> {
        let mut segment = parts.all().map(|chunks| counted(chunks.start)).collect::<Result<Vec<_>>>()?;
        segment.push(counted(table.chunks())?);
        let of_segment = (0..parts.chunks.len()).flat_map(|n| std::iter::repeat_n(n, PARTS));
        let segment_sequence = of_segment.map(counted).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            segment: gpu.upload(&segment)?,
            segment_sequence: gpu.upload(&segment_sequence)?,
            states: gpu.alloc(parts.state_elements(shape))?,
            moment: gpu.alloc(1)?,
            stream: gpu.new_urgent_stream()?,
            prepared: (0..PARTS).map(|_| gpu.event()).collect::<Result<_>>()?,
            end: gpu.event()?,
            sizes,
            parts,
        })
    }

    /// Size in bytes of what it holds on the GPU.
    pub fn bytes(&self, shape: &Shape) -> usize {
        self.parts.bytes(shape)
    }

    /// Starts the forward on `stream`.
    ///
    /// # Errors
    /// [`Error::Gpu`] where a launch is refused.
    ///
    /// # Safety
    /// As for [`Plan::forward_on`](super::Plan::forward_on).
    pub unsafe fn start<P: RelayParams>(
        &self,
        stream: &Stream,
        kernels: Kernels<'_>,
        maps: SweepMaps,
        params: P,
    ) -> Result<()> {
        let Kernels { prepare: (prepare, of_chunk), sweep: (sweep, of_all) } = kernels;
        let (mut of_sweep, of_all) = (params, in_pairs(*of_all));
        let chunk = of_sweep.chunk();
        chunk.segment_chunk = self.segment.address();
        chunk.segment_sequence = self.segment_sequence.address();
        chunk.segment_states = self.states.address();
        let count = counted(PARTS)?;
        for (part, prepared) in self.prepared.iter().enumerate() {
            if part > 0 {
                // SAFETY: no other stream uses it.
                unsafe { stream.clear_at(self.moment.address(), self.moment.size_bytes())? };
            }
            for chunks in self.parts.chunks.iter().map(|parts| &parts[part]).filter(|chunks| !chunks.is_empty()) {
                let [_, heads, z] = of_chunk.blocks;
                let grid = Grid { blocks: [chunks.len() as u32, heads, z], early: false, ..*of_chunk };
                // SAFETY: the promise of the caller; from its first chunk on a part has as many chunks in the workspace.
                unsafe { prepare.launch(stream, grid, &self.params_from(params, chunks.start as u64))? };
            }
            prepared.record(stream)?;
            self.stream.wait(prepared)?;
            let first_segment = counted(part)?;
            let params = SweepParams { maps, chunk: of_sweep, first_segment, segment_step: count, relay: 1 };
            // SAFETY: the promise of the caller; what is prepared next does not touch the chunks of this part.
            unsafe { sweep.launch(&self.stream, Grid { early: false, ..of_all }, &params)? };
        }
        self.end.record(&self.stream)?;
        stream.wait(&self.end)
    }

    /// The parameters of a preparation whose first block takes `chunk`.
    fn params_from<P: RelayParams>(&self, mut params: P, chunk: u64) -> P {
        let Sizes { rows, square, coefficients, norms } = self.sizes;
        // What there is none of stays so.
        let move_on = |address: &mut u64, bytes: usize| {
            if *address != 0 {
                *address += chunk * bytes as u64;
            }
        };
        if let Some(address) = params.more_rows() {
            move_on(address, rows);
        }
        let of = params.chunk();
        for address in [&mut of.queries, &mut of.keys] {
            move_on(address, rows);
        }
        for address in [&mut of.inverse, &mut of.scores, &mut of.overlaps] {
            move_on(address, square);
        }
        move_on(&mut of.coefficients, coefficients);
        move_on(&mut of.norms, norms);
        for address in [&mut of.chunk_token, &mut of.chunk_length] {
            move_on(address, size_of::<i32>());
        }
        params
    }
}

impl Sizes {
    /// Of rows in `row_heads` heads, with `numbers` coefficients of a chunk and value head.
    pub fn new(config: &Config, row_heads: usize, numbers: usize, norms: usize) -> Self {
        let (chunk, operand) = (config.chunk, config.variant.mode.operand_bytes());
        Self {
            rows: chunk * config.row_pitch() * operand * row_heads,
            square: chunk * config.square_pitch() * operand * config.variant.value_heads,
            coefficients: numbers * size_of::<f32>() * config.variant.value_heads,
            norms: norms * size_of::<f32>() * row_heads,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_side_by_side_and_end_where_states_are_looked_up() {
        let parts = Parts::of(&[0, 80, 160, 163], 99, 1, 132).unwrap();
        assert_eq!(parts.chunks, [[0..40, 40..80], [80..120, 120..160], [160..160, 160..163]]);
        for (chunks, first) in parts.chunks.iter().zip([0, 80, 160]) {
            assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(chunks.iter().skip(1).all(|part| (part.start - first).is_multiple_of(LOOK_UP_EVERY)));
        }
    }

    #[test]
    fn a_full_gpu_many_sequences_and_short_ones_are_swept_at_once() {
        assert_eq!(Parts::of(&[0, 80], 100, 1, 132), None);
        assert_eq!(Parts::of(&[0, 63], 4, 2, 132), None);
        assert_eq!(Parts::of(&(0..10).map(|n| 100 * n).collect::<Vec<_>>(), 4, 1, 132), None);
        assert_eq!(Parts::of(&[0], 0, 1, 132), None);
        assert_eq!(
            [(64, 2), (95, 3), (96, 3)].map(|(n, group)| Parts::of(&[0, n], 4, group, 132).is_some()),
            [true, false, true]
        );
    }
}
