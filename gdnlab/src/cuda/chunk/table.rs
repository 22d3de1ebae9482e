//! Where the chunks of all sequences lie.

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
}

impl ChunkTable {
    /// The chunks of `size` tokens of `sequences`.
    ///
    /// # Errors
    /// [`Error::Input`] where tokens or chunks are more than a kernel can count.
    pub fn new(sequences: &[Range<usize>], size: usize) -> Result<Self> {
        let mut table = Self { first_token: Vec::new(), length: Vec::new(), sequence: vec![0] };
        for tokens in sequences {
            for first in tokens.clone().step_by(size) {
                table.first_token.push(counted(first)?);
                table.length.push(counted(size.min(tokens.end - first))?);
            }
            table.sequence.push(counted(table.chunks())?);
        }
        Ok(table)
    }

    /// Number of chunks.
    pub fn chunks(&self) -> usize {
        self.first_token.len()
    }
}

/// A number as the kernels take it.
pub(super) fn counted(number: usize) -> Result<i32> {
    number.try_into().map_err(|_| Error::input(format!("chunk: {number} tokens or chunks: expected less than 2^31")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sequence_starts_a_chunk_and_an_empty_one_has_none() {
        let table = ChunkTable::new(&[0..0, 0..65, 65..66, 66..66, 66..194], 64).unwrap();
        assert_eq!(table.first_token, [0, 64, 65, 66, 130]);
        assert_eq!(table.length, [64, 1, 1, 64, 64]);
        assert_eq!(table.sequence, [0, 0, 2, 3, 3, 5]);
        assert_eq!(table.chunks(), 5);
        let nothing = ChunkTable::new(&[0..0, 0..0], 32).unwrap();
        assert_eq!((nothing.chunks(), nothing.sequence), (0, vec![0, 0, 0]));
    }

    #[test]
    fn more_tokens_than_a_kernel_counts_are_refused() {
        let (near, far) = (0..1, (1 << 31)..(1 << 31) + 1);
        assert!(ChunkTable::new(&[near, far], 64).unwrap_err().to_string().contains("2147483648"));
    }
}
