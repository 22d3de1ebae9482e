//! Numbers in the format in which a kernel takes and gives them.

use crate::precision::Format;
use crate::{Error, Result};
use gdnlab_deps::rayon::prelude::*;
use half::{bf16, f16};
use std::ops::Range;

/// An array of one format.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// binary32, for kernels in TF32 too.
    F32(Vec<f32>),
    /// IEEE binary16.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
}

impl Values {
    /// `values` rounded to `format`.
    ///
    /// # Errors
    /// [`Error::Input`] for binary64, which nothing that is timed takes.
    pub fn rounded(values: Vec<f32>, format: Format) -> Result<Self> {
        match format {
            Format::F64 => Err(Error::input("binary64 values: expected a format of at most 32 bits")),
            Format::F16 => Ok(Self::F16(values.into_iter().map(f16::from_f32).collect())),
            Format::Bf16 => Ok(Self::Bf16(values.into_iter().map(bf16::from_f32).collect())),
            _ => Ok(Self::F32(values)),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element at `index`.
    pub fn get(&self, index: usize) -> Option<f64> {
        match self {
            Self::F32(values) => values.get(index).map(|&x| f64::from(x)),
            Self::F16(values) => values.get(index).map(|&x| f64::from(x)),
            Self::Bf16(values) => values.get(index).map(|&x| f64::from(x)),
        }
    }

    /// Appends the elements of `range` to `to`; nothing where they are not all there.
    pub(crate) fn append(&self, range: Range<usize>, to: &mut Vec<f64>) {
        match self {
            Self::F32(values) => to.extend(values.get(range).unwrap_or_default().iter().map(|&x| f64::from(x))),
            Self::F16(values) => to.extend(values.get(range).unwrap_or_default().iter().map(|&x| f64::from(x))),
            Self::Bf16(values) => to.extend(values.get(range).unwrap_or_default().iter().map(|&x| f64::from(x))),
        }
    }

    /// How many elements are NaN or infinite.
    pub fn nonfinite(&self) -> usize {
        match self {
            Self::F32(values) => count(values, |x| !x.is_finite()),
            Self::F16(values) => count(values, |x| !x.is_finite()),
            Self::Bf16(values) => count(values, |x| !x.is_finite()),
        }
    }

    /// `length` elements: these ones over and over.
    pub(crate) fn repeated(&self, length: usize) -> Self {
        match self {
            Self::F32(values) => Self::F32(repeated(values, length)),
            Self::F16(values) => Self::F16(repeated(values, length)),
            Self::Bf16(values) => Self::Bf16(repeated(values, length)),
        }
    }

    /// `length` elements in the memory of these: those that there are, and behind them the first `period` over and over.
    /// `None` where that takes more than there are.
    pub(crate) fn resized(self, period: usize, length: usize) -> Option<Self> {
        match self {
            Self::F32(values) => resized(values, period, length).map(Self::F32),
            Self::F16(values) => resized(values, period, length).map(Self::F16),
            Self::Bf16(values) => resized(values, period, length).map(Self::Bf16),
        }
    }
}

/// How many of `values` are as `is_counted` says, counted on all processors.
fn count<T: Copy + Sync>(values: &[T], is_counted: impl Fn(T) -> bool + Sync) -> usize {
    const PIECE: usize = 1 << 18;
    values.par_chunks(PIECE).map(|piece| piece.iter().filter(|&&x| is_counted(x)).count()).sum()
}

fn resized<T: Copy>(mut values: Vec<T>, period: usize, length: usize) -> Option<Vec<T>> {
    if length > values.len() && period > values.len() {
        return None;
    }
    values.truncate(length);
    values.reserve_exact(length - values.len());
    while values.len() < length {
        let from = values.len() % period;
        values.extend_from_within(from..period.min(from + length - values.len()));
    }
    Some(values)
}

fn repeated<T: Copy>(values: &[T], length: usize) -> Vec<T> {
    let mut all = Vec::with_capacity(length);
    while all.len() < length && !values.is_empty() {
        all.extend_from_slice(&values[..values.len().min(length - all.len())]);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_to_their_format() {
        let values = vec![1.0f32, 1.003, f32::NAN, 1e30];
        let bf16 = Values::rounded(values.clone(), Format::Bf16).unwrap();
        assert_eq!((bf16.len(), bf16.get(1), bf16.nonfinite()), (4, Some(1.0), 1));
        let f16 = Values::rounded(values.clone(), Format::F16).unwrap();
        assert_eq!((f16.get(1), f16.nonfinite(), f16.get(4)), (Some(1.002_929_687_5), 2, None));
        let f32 = Values::rounded(values.clone(), Format::Tf32).unwrap();
        assert_eq!((f32.get(1), f32.nonfinite()), (Some(f64::from(1.003f32)), 1));
        assert!(Values::rounded(values, Format::F64).is_err());
    }

    #[test]
    fn a_tile_is_repeated_to_the_length() {
        let tile = Values::F32(vec![1.0, 2.0, 3.0]);
        assert_eq!(tile.repeated(7), Values::F32(vec![1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0]));
        assert_eq!(tile.repeated(2), Values::F32(vec![1.0, 2.0]));
        assert!(tile.repeated(0).is_empty() && Values::F32(vec![]).repeated(3).is_empty());
    }

    #[test]
    fn what_is_resized_is_the_tile_repeated_to_the_new_length() {
        let tile = Values::F32(vec![1.0, 2.0, 3.0]);
        for (from, to) in [(7, 2), (7, 7), (4, 11), (3, 12), (2, 1)] {
            assert_eq!(tile.repeated(from).resized(3, to), Some(tile.repeated(to)), "{from} to {to}");
        }
        assert_eq!(tile.repeated(2).resized(3, 4), None, "the tile is not all there");
    }

    #[test]
    fn every_element_is_counted() {
        let mut values = vec![1.0f32; 600_000];
        for at in [0, 262_143, 262_144, 599_999] {
            values[at] = f32::INFINITY;
        }
        assert_eq!(Values::F32(values).nonfinite(), 4);
    }
}
