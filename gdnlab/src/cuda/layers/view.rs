//! Memory by its address.

use crate::cuda::{Buffer, Element};
use crate::{Error, Result};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

/// What every address is a multiple of, in bytes: the widest access of a kernel.
const ALIGNMENT_BYTES: u64 = 16;

/// Elements of type `T` that lie one after the other in the memory of the GPU: a [`Buffer`], or a part of one.
///
/// It is an address and a length, no more: it keeps no memory alive and copies none.
pub struct View<T> {
    address: u64,
    length: usize,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for View<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<T> {}

impl<T: Element> View<T> {
    /// The whole of `buffer`.
    pub fn of(buffer: &Buffer<T>) -> Self {
        Self::at(buffer.address(), buffer.len())
    }

    /// `length` elements from `address` on.
    pub fn at(address: u64, length: usize) -> Self {
        Self { address, length, element: PhantomData }
    }

    /// Address of the first element.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Number of elements.
    pub fn len(self) -> usize {
        self.length
    }

    /// Whether it has no element.
    pub fn is_empty(self) -> bool {
        self.length == 0
    }

    /// The elements in `range`.
    ///
    /// # Errors
    /// [`Error::Input`] where they are not all of this view's.
    pub fn part(self, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.length {
            return Err(Error::input(format!("elements {range:?} of memory with {}", self.length)));
        }
        Ok(Self::at(self.address + (range.start * size_of::<T>()) as u64, range.len()))
    }

    /// Refuses memory that is not as long as a tensor of `dims`, or lies where a kernel cannot access it.
    pub(super) fn expect(self, operator: &str, name: &str, dims: &[usize]) -> Result<()> {
        let expected = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
        if expected != Some(self.length) {
            return Err(Error::input(format!("{operator}: {name} has {} elements: expected {dims:?}", self.length)));
        }
        self.expect_alignment(operator, name)
    }

    fn expect_alignment(self, operator: &str, name: &str) -> Result<()> {
        if self.address.is_multiple_of(ALIGNMENT_BYTES) {
            return Ok(());
        }
        Err(Error::input(format!(
            "{operator}: {name} at {:#x}: expected a multiple of {ALIGNMENT_BYTES}",
            self.address
        )))
    }
}

impl<T> fmt::Debug for View<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} at {:#x}", self.length, std::any::type_name::<T>(), self.address)
    }
}

/// Some neighbouring columns of a row-major matrix.
#[derive(Clone, Copy, Debug)]
pub struct Columns<T> {
    /// The whole matrix, `[rows, pitch]`.
    pub matrix: View<T>,
    /// Columns of the matrix.
    pub pitch: usize,
    /// The first of the columns that are meant.
    pub first: usize,
}

impl<T: Element> Columns<T> {
    /// Address of the first of them in the first row.
    pub(super) fn address(self) -> u64 {
        self.matrix.address + (self.first * size_of::<T>()) as u64
    }

    /// Refuses a matrix that has not `rows` rows, or not `width` columns from the first on, or whose rows a kernel cannot
    /// access.
    pub(super) fn expect(self, operator: &str, name: &str, rows: usize, width: usize) -> Result<()> {
        let Self { matrix, pitch, first } = self;
        if first.checked_add(width).is_none_or(|end| end > pitch) {
            return Err(Error::input(format!(
                "{operator}: {name} has {pitch} columns: expected {width} of them from column {first} on"
            )));
        }
        for (what, elements) in [("rows", pitch), ("the first column", first)] {
            let bytes = elements * size_of::<T>();
            if !(bytes as u64).is_multiple_of(ALIGNMENT_BYTES) {
                return Err(Error::input(format!(
                    "{operator}: {what} of {name} lie at multiples of {bytes} bytes: expected multiples of {ALIGNMENT_BYTES}"
                )));
            }
        }
        matrix.expect(operator, name, &[rows, pitch])
    }
}
