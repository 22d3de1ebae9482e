//! A forward whose sweep begins while later chunks are still being prepared.
//!
//! The sweep goes from chunk to chunk, and a few sequences of a model with few heads leave most multiprocessors idle. So
//! sequences are taken in parts: while one part is swept, the next is prepared beside it, and each launch of the sweep begins
//! with the states that the one before it has left. Parts end at chunks where a sweep looks up the largest element of its
//! state in any case (`LOOK_UP_EVERY`), so results are those of one sweep.

use super::config::Config;
use super::launches::{Launches, Params, Step};
use super::params::Gdn2Params;
use crate::cuda::chunk::sweep::{HopperSweep, SweepParams};
use crate::cuda::chunk::table::{ChunkTable, counted};
use crate::cuda::{Buffer, Event, Gpu, Grid, Stream};
use crate::problem::Shape;
use crate::{Error, Result};
use std::ops::Range;

/// Chunks after which a sweep looks up its state (`LOOK_UP_EVERY`).
const LOOK_UP_EVERY: usize = 8;
/// Chunks of the longest sequence at the least: shorter ones start more kernels than they save.
const LEAST_CHUNKS: usize = 64;
/// Parts of a sequence, of the same length. More of them take more time, not less.
const PARTS: usize = 2;
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
    row_bytes: u64,
    square_bytes: u64,
    coefficient_bytes: u64,
}

/// How sequences are taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Parts {
    /// The chunks of each part, sequence by sequence: `[N][PARTS]`. Parts of short sequences are empty but for the last.
    pub chunks: Vec<Vec<Range<usize>>>,
}

impl Parts {
    /// Of the chunks of all sequences, `first[n]` to `first[n + 1]` those of sequence n; `None` where it is not worthwhile,
    /// with `blocks` blocks in a sweep.
    pub fn of(first: &[usize], blocks: usize, multiprocessors: usize) -> Option<Self> {
        let lengths = || first.windows(2).map(|pair| pair[1] - pair[0]);
        let short = lengths().max()? < LEAST_CHUNKS;
        if short || lengths().count() > MOST_SEQUENCES || 2 * blocks > multiprocessors {
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
}

impl Relay {
    /// The relay of a plan with these sweeps, `None` where one launch is as good.
    ///
    /// # Errors
    /// [`Error::Gpu`] where there is too little memory.
    pub fn new(
        gpu: &Gpu,
        config: &Config,
        shape: &Shape,
        table: &ChunkTable,
        hopper: &HopperSweep,
    ) -> Result<Option<Self>> {
        if hopper.cut {
            return Ok(None);
        }
        let first: Vec<usize> = table.sequence.iter().map(|&chunk| chunk as usize).collect();
        let [columns, heads, sequences] =
            hopper.grid(table.segments(), shape.value_dim, true)?.blocks.map(|n| n as usize);
        let Some(parts) = Parts::of(&first, columns * heads * sequences, gpu.multiprocessors as usize) else {
            return Ok(None);
        };
        let all = || parts.chunks.iter().flatten();
        let mut segment = all().map(|chunks| counted(chunks.start)).collect::<Result<Vec<_>>>()?;
        segment.push(counted(table.chunks())?);
        let of_segment = (0..parts.chunks.len()).flat_map(|n| std::iter::repeat_n(n, PARTS));
        let segment_sequence = of_segment.map(counted).collect::<Result<Vec<_>>>()?;
        let bytes = |elements: usize, size: usize| (elements * size * shape.value_heads) as u64;
        let (chunk, operand) = (config.sweep.chunk, config.sweep.variant.mode.operand_bytes());
        Ok(Some(Self {
            segment: gpu.upload(&segment)?,
            segment_sequence: gpu.upload(&segment_sequence)?,
            states: gpu.alloc(all().count() * shape.value_heads * shape.value_dim * shape.key_dim)?,
            moment: gpu.alloc(1)?,
            stream: gpu.new_urgent_stream()?,
            prepared: (0..PARTS).map(|_| gpu.event()).collect::<Result<_>>()?,
            end: gpu.event()?,
            row_bytes: bytes(chunk * config.sweep.row_pitch(), operand),
            square_bytes: bytes(chunk * config.sweep.square_pitch(), operand),
            coefficient_bytes: bytes(config.coefficient_numbers(), size_of::<f32>()),
            parts,
        }))
    }

    /// Size in bytes of what it holds on the GPU.
    pub fn bytes(&self) -> usize {
        let numbers = self.segment.size_bytes() + self.segment_sequence.size_bytes();
        self.states.size_bytes() + numbers + self.moment.size_bytes()
    }

    /// Starts the forward on `stream`.
    ///
    /// # Errors
    /// [`Error::Gpu`] where a launch is refused.
    ///
    /// # Safety
    /// As for [`Plan::forward_on`](super::Plan::forward_on).
    pub unsafe fn start(&self, stream: &Stream, launches: &Launches, params: &Params) -> Result<()> {
        let (Some(Step::Chunk(prepare, of_chunk)), Some(Step::Sweep(sweep, of_all)), Some(maps)) =
            (launches.shared.first(), launches.forward.first(), params.sweep)
        else {
            return Err(Error::gpu("gdn2: a relay without its kernels"));
        };
        let mut chunk = params.chunk;
        chunk.chunk.segment_chunk = self.segment.address();
        chunk.chunk.segment_sequence = self.segment_sequence.address();
        chunk.chunk.segment_states = self.states.address();
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
                unsafe { prepare.launch(stream, grid, &self.params_from(params.chunk, chunks.start as u64))? };
            }
            prepared.record(stream)?;
            self.stream.wait(prepared)?;
            let first_segment = counted(part)?;
            let params = SweepParams { maps, chunk, first_segment, segment_step: count, relay: 1 };
            // SAFETY: the promise of the caller; what is prepared next does not touch the chunks of this part.
            unsafe { sweep.launch(&self.stream, Grid { early: false, ..*of_all }, &params)? };
        }
        self.end.record(&self.stream)?;
        stream.wait(&self.end)
    }

    /// The parameters of a preparation whose first block takes `chunk`.
    fn params_from(&self, mut params: Gdn2Params, chunk: u64) -> Gdn2Params {
        let Self { row_bytes, square_bytes, coefficient_bytes, .. } = *self;
        for rows in [&mut params.chunk.queries, &mut params.chunk.keys, &mut params.write_keys] {
            *rows += chunk * row_bytes;
        }
        for square in [&mut params.chunk.inverse, &mut params.chunk.scores] {
            *square += chunk * square_bytes;
        }
        params.chunk.coefficients += chunk * coefficient_bytes;
        for number in [&mut params.chunk.chunk_token, &mut params.chunk.chunk_length] {
            *number += chunk * size_of::<i32>() as u64;
        }
        params
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_side_by_side_and_end_where_states_are_looked_up() {
        let parts = Parts::of(&[0, 80, 160, 163], 50, 132).unwrap();
        assert_eq!(parts.chunks, [[0..40, 40..80], [80..120, 120..160], [160..160, 160..163]]);
        for (chunks, first) in parts.chunks.iter().zip([0, 80, 160]) {
            assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(chunks.iter().skip(1).all(|part| (part.start - first).is_multiple_of(LOOK_UP_EVERY)));
        }
    }

    #[test]
    fn a_full_gpu_many_sequences_and_short_ones_are_swept_at_once() {
        assert_eq!(Parts::of(&[0, 80], 67, 132), None);
        assert_eq!(Parts::of(&[0, 63], 4, 132), None);
        assert_eq!(Parts::of(&(0..10).map(|n| 100 * n).collect::<Vec<_>>(), 4, 132), None);
        assert_eq!(Parts::of(&[0], 0, 132), None);
        assert!(Parts::of(&[0, 64], 4, 132).is_some());
    }
}
