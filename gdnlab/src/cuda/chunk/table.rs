//! Where the chunks of all sequences lie.

use super::config::Variant;
use super::params::ChunkParams;
use crate::cuda::{Buffer, Gpu};
use crate::{Error, Result};
use std::ops::Range;

/// The chunks of all sequences, one after the other. A sequence starts a chunk of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ChunkTable {
    /// First token of each chunk.
    pub first_token: Vec<i32>,
    /// Tokens of each chunk, from 1 to the chunk size.
    pub length: Vec<i32>,
    /// First chunk of each sequence, and the number of chunks: `[N + 1]`.
    pub sequence: Vec<i32>,
    /// First chunk of each segment, and the number of chunks: `[M + 1]`. A sequence has one or more segments.
    pub segment: Vec<i32>,
    /// The sequence of each segment: `[M]`.
    pub segment_sequence: Vec<i32>,
    /// First segment of each sequence, and the number of segments: `[N + 1]`.
    pub sequence_segment: Vec<i32>,
}

impl ChunkTable {
    /// The chunks of `sequences`, cut as `variant` says.
    ///
    /// # Errors
    /// [`Error::Input`] where tokens or chunks are more than a kernel can count.
    pub fn new(sequences: &[Range<usize>], variant: &Variant) -> Result<Self> {
        Self::cut(sequences, variant.chunk(), |chunks| variant.segments(chunks))
    }

    /// The chunks of `size` tokens of `sequences`, cut into as many segments as `segments` says for a number of chunks.
    ///
    /// # Errors
    /// As [`ChunkTable::new`].
    pub fn cut(sequences: &[Range<usize>], size: usize, segments: impl Fn(usize) -> usize) -> Result<Self> {
        let mut table = Self {
            first_token: Vec::new(),
            length: Vec::new(),
            sequence: vec![0],
            segment: vec![0],
            segment_sequence: Vec::new(),
            sequence_segment: vec![0],
        };
        for (number, tokens) in sequences.iter().enumerate() {
            let before = table.chunks();
            for first in tokens.clone().step_by(size) {
                table.first_token.push(counted(first)?);
                table.length.push(counted(size.min(tokens.end - first))?);
            }
            table.sequence.push(counted(table.chunks())?);
            let chunks = table.chunks() - before;
            let segments = segments(chunks);
            for segment in 1..=segments {
                table.segment.push(counted(before + chunks * segment / segments)?);
                table.segment_sequence.push(counted(number)?);
            }
            table.sequence_segment.push(counted(table.segments())?);
        }
        Ok(table)
    }

    /// Number of chunks.
    pub fn chunks(&self) -> usize {
        self.first_token.len()
    }

    /// Number of segments.
    pub fn segments(&self) -> usize {
        self.segment_sequence.len()
    }

    /// Whether a sequence has more than one segment.
    pub fn is_cut(&self) -> bool {
        self.sequence_segment.windows(2).any(|pair| pair[1] - pair[0] > 1)
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        let Self { first_token, length, sequence, segment, segment_sequence, sequence_segment } = self;
        [first_token, length, sequence, segment, segment_sequence, sequence_segment].map(Vec::len).iter().sum::<usize>()
            * size_of::<i32>()
    }
}

/// The same in the memory of a GPU.
pub(super) struct DeviceTable {
    first_token: Buffer<i32>,
    length: Buffer<i32>,
    sequence: Buffer<i32>,
    segment: Buffer<i32>,
    segment_sequence: Buffer<i32>,
    sequence_segment: Buffer<i32>,
}

impl DeviceTable {
    pub fn new(gpu: &Gpu, table: &ChunkTable) -> Result<Self> {
        Ok(Self {
            first_token: gpu.upload(&table.first_token)?,
            length: gpu.upload(&table.length)?,
            sequence: gpu.upload(&table.sequence)?,
            segment: gpu.upload(&table.segment)?,
            segment_sequence: gpu.upload(&table.segment_sequence)?,
            sequence_segment: gpu.upload(&table.sequence_segment)?,
        })
    }

    /// Writes the addresses into `params`.
    pub fn enter(&self, params: &mut ChunkParams) {
        params.chunk_token = self.first_token.address();
        params.chunk_length = self.length.address();
        params.sequence_chunk = self.sequence.address();
        params.segment_chunk = self.segment.address();
        params.segment_sequence = self.segment_sequence.address();
        params.sequence_segment = self.sequence_segment.address();
    }
}

/// A number as the kernels take it.
pub(super) fn counted(number: usize) -> Result<i32> {
    number.try_into().map_err(|_| Error::input(format!("chunk: {number} tokens or chunks: expected less than 2^31")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::chunk::Mode;
    use crate::precision::Format;

    fn variant(mode: Mode) -> Variant {
        Variant { mode, input: Format::F32, key_dim: 64, value_dim: 64, value_heads: 8 }
    }

    #[test]
    fn each_sequence_starts_a_chunk_and_an_empty_one_has_none() {
        let table = ChunkTable::new(&[0..0, 0..65, 65..66, 66..66, 66..194], &variant(Mode::Bf16)).unwrap();
        assert_eq!(table.first_token, [0, 64, 65, 66, 130]);
        assert_eq!(table.length, [64, 1, 1, 64, 64]);
        assert_eq!(table.sequence, [0, 0, 2, 3, 3, 5]);
        assert_eq!(table.chunks(), 5);
        assert_eq!((table.segment, table.segment_sequence), (table.sequence.clone(), vec![0, 1, 2, 3, 4]));
        let nothing = ChunkTable::new(&[0..0, 0..0], &variant(Mode::Fp32)).unwrap();
        assert_eq!((nothing.chunks(), nothing.sequence), (0, vec![0, 0, 0]));
    }

    #[test]
    fn a_long_sequence_has_segments_of_whole_chunks() {
        let table = ChunkTable::new(&[0..100, 100..100 + 64 * 200, 12_900..12_901], &variant(Mode::Bf16)).unwrap();
        assert_eq!(table.sequence, [0, 2, 202, 203]);
        assert_eq!(table.segment, [0, 2, 27, 52, 77, 102, 127, 152, 177, 202, 203]);
        assert_eq!(table.segment_sequence, [0, 1, 1, 1, 1, 1, 1, 1, 1, 2]);
        assert_eq!(table.sequence_segment, [0, 1, 9, 10]);
        assert_eq!(table.segments(), 10);
    }

    #[test]
    fn more_tokens_than_a_kernel_counts_are_refused() {
        let (near, far) = (0..1, (1 << 31)..(1 << 31) + 1);
        assert!(ChunkTable::new(&[near, far], &variant(Mode::Bf16)).unwrap_err().to_string().contains("2147483648"));
    }
}
