//! One sequence among others, and its part of the results.

use super::{Check, Named};
use crate::problem::{Inputs, Results, Tensor};
use crate::{Error, Result};
use std::fmt;

/// Lengths of the other sequences in a row: with an empty one, one token, and no multiple of a chunk but one.
const OTHERS: [&[usize]; 2] = [&[65, 0, 1, 128], &[300]];
/// Rows of the batches.
const ROWS: [usize; 2] = [3, 8];

/// Where one sequence lies among others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// Packed into one row with others of these lengths, at this place among them.
    Packed {
        /// Lengths of the others.
        others: Vec<usize>,
        /// How many of them come before.
        place: usize,
    },
    /// One of several rows of equal length.
    Row {
        /// Number of rows.
        rows: usize,
        /// Which of them.
        row: usize,
    },
}

/// The arrangements of a check; none but for packing and batch.
pub fn arrangements(check: Check) -> Vec<Arrangement> {
    match check {
        Check::Packing => {
            let alone = Arrangement::Packed { others: Vec::new(), place: 0 };
            let places = |others: &'static [usize]| {
                let mut places = vec![0, others.len() / 2, others.len()];
                places.dedup();
                places.into_iter().map(|place| Arrangement::Packed { others: others.to_vec(), place })
            };
            std::iter::once(alone).chain(OTHERS.into_iter().flat_map(places)).collect()
        }
        Check::Batch => {
            ROWS.into_iter().flat_map(|rows| [0, rows - 1].map(|row| Arrangement::Row { rows, row })).collect()
        }
        _ => Vec::new(),
    }
}

impl Arrangement {
    /// `inputs`, one sequence, among others of the same kind that `other` makes from an index and a length; and which of the
    /// sequences it is.
    pub(super) fn around(
        &self,
        inputs: &Inputs,
        mut other: impl FnMut(usize, usize) -> Result<Inputs>,
    ) -> Result<(Inputs, usize)> {
        let (lengths, at) = match self {
            Self::Packed { others, place } => (others.clone(), *place),
            Self::Row { rows, row } => (vec![inputs.shape.tokens; rows - 1], *row),
        };
        let mut parts: Vec<Inputs> =
            lengths.into_iter().enumerate().map(|(index, tokens)| other(index, tokens)).collect::<Result<_>>()?;
        parts.insert(at, inputs.clone());
        Ok((self.joined(parts)?, at))
    }

    /// Tokens follow one another in memory, those of a row and those of the next one alike.
    fn joined(&self, parts: Vec<Inputs>) -> Result<Inputs> {
        let lengths: Vec<usize> = parts.iter().map(|part| part.shape.tokens).collect();
        let mut parts = parts.into_iter();
        let mut whole = parts.next().ok_or_else(|| Error::input("no sequence to pack"))?;
        for part in parts {
            for ((_, whole), (_, part)) in whole.named_mut().into_iter().zip(part.named()) {
                whole.data.extend_from_slice(&part.data);
            }
        }
        match self {
            Self::Packed { .. } => {
                let ends = lengths.iter().scan(0, |end, length| {
                    *end += length;
                    Some(*end)
                });
                let cu_seqlens: Vec<usize> = std::iter::once(0).chain(ends).collect();
                whole.shape.tokens = lengths.iter().sum();
                whole.cu_seqlens = Some(cu_seqlens);
            }
            Self::Row { rows, .. } => whole.shape.batch = *rows,
        }
        let (shape, sequences) = (whole.shape, lengths.len());
        for (name, tensor) in whole.named_mut() {
            if matches!(name, "initial_state" | "dht") {
                tensor.dims[0] = sequences;
            } else {
                (tensor.dims[0], tensor.dims[1]) = (shape.batch, shape.tokens);
            }
        }
        whole.validate()?;
        Ok(whole)
    }
}

impl fmt::Display for Arrangement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packed { others, .. } if others.is_empty() => f.write_str("packed alone"),
            Self::Packed { others, place } => {
                let lengths: Vec<String> = others.iter().map(usize::to_string).collect();
                write!(f, "place {} of {} beside {}", place + 1, others.len() + 1, lengths.join("+"))
            }
            Self::Row { rows, row } => write!(f, "row {} of {rows}", row + 1),
        }
    }
}

/// The part of `results` that belongs to sequence `at` of `inputs`, in the shapes of that sequence alone.
pub(super) fn cut(results: &Results, inputs: &Inputs, at: usize) -> Result<Named> {
    let ranges = inputs.sequence_ranges();
    let range = ranges.get(at).ok_or_else(|| Error::input(format!("no sequence {at} of {}", ranges.len())))?;
    let rows = inputs.shape.batch * inputs.shape.tokens;
    let part = |(name, tensor): (&'static str, &Tensor)| {
        let mut dims = tensor.dims.clone();
        dims[0] = 1;
        let (from, to, of) = if matches!(name, "final_state" | "dh0") {
            (at, at + 1, ranges.len())
        } else {
            dims[1] = range.len();
            (range.start, range.end, rows)
        };
        let width = tensor.data.len() / of.max(1);
        Ok((name, Tensor::new(&dims, tensor.data[from * width..to * width].to_vec())?))
    };
    results.named().into_iter().map(part).collect()
}
