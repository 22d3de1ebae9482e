//! Small dense matrices in binary32 or binary64, and their product through the GEMM library.

use crate::precision::Format;
use gdnlab_deps::gemm::{self, Parallelism};
use std::fmt::Debug;
use std::ops::{Add, AddAssign, Mul, Neg, Sub};

/// The arithmetic that the chunk form runs in.
pub(super) trait Real:
    Copy
    + Debug
    + Default
    + PartialEq
    + Add<Output = Self>
    + AddAssign
    + Mul<Output = Self>
    + Neg<Output = Self>
    + Sub<Output = Self>
    + Send
    + Sync
    + 'static
{
    const ONE: Self;
    /// A log decay so low that its exponential is exactly zero; lower ones (down to minus infinity) are raised to it,
    /// so that differences of cumulative sums stay finite and lose no digits to a huge summand.
    const ZERO_LOG_DECAY: f64;

    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
    fn exp(self) -> Self;
    fn round_slice(format: Format, values: &mut [Self]);
    /// Whether rounding to `format` changes nothing.
    fn is_exact_in(format: Format) -> bool;
}

impl Real for f32 {
    const ONE: Self = 1.0;
    const ZERO_LOG_DECAY: f64 = -104.0;

    fn from_f64(x: f64) -> Self {
        x as Self
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    fn exp(self) -> Self {
        Self::exp(self)
    }
    fn round_slice(format: Format, values: &mut [Self]) {
        format.round_slice_f32(values);
    }
    fn is_exact_in(format: Format) -> bool {
        format.contains(Format::F32)
    }
}

impl Real for f64 {
    const ONE: Self = 1.0;
    const ZERO_LOG_DECAY: f64 = -746.0;

    fn from_f64(x: f64) -> Self {
        x
    }
    fn to_f64(self) -> f64 {
        self
    }
    fn exp(self) -> Self {
        Self::exp(self)
    }
    fn round_slice(format: Format, values: &mut [Self]) {
        format.round_slice(values);
    }
    fn is_exact_in(format: Format) -> bool {
        format.contains(Format::F64)
    }
}

/// A dense row-major matrix.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Matrix<T> {
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<T>,
}

impl<T: Real> Matrix<T> {
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self { rows, cols, data: vec![T::default(); rows * cols] }
    }

    /// A matrix whose row `i` is `row(i)`, converted.
    pub fn from_rows<'a>(rows: usize, cols: usize, row: impl Fn(usize) -> &'a [f64]) -> Self {
        let mut data = Vec::with_capacity(rows * cols);
        (0..rows).for_each(|i| data.extend(row(i).iter().map(|&x| T::from_f64(x))));
        Self { rows, cols, data }
    }

    pub fn row(&self, i: usize) -> &[T] {
        &self.data[i * self.cols..(i + 1) * self.cols]
    }

    pub fn row_mut(&mut self, i: usize) -> &mut [T] {
        &mut self.data[i * self.cols..(i + 1) * self.cols]
    }

    pub fn view(&self) -> View<'_, T> {
        self.block(0..self.rows, 0..self.cols)
    }

    /// The transpose, without moving anything.
    pub fn t(&self) -> View<'_, T> {
        self.view().t()
    }

    pub fn block(&self, rows: std::ops::Range<usize>, cols: std::ops::Range<usize>) -> View<'_, T> {
        let at = (rows.start * self.cols + cols.start).min(self.data.len());
        View { data: &self.data[at..], rows: rows.len(), cols: cols.len(), row_stride: self.cols, col_stride: 1 }
    }

    /// Copies `block` to the place that starts at (`row`, `col`).
    pub fn set_block(&mut self, row: usize, col: usize, block: &Self) {
        for i in 0..block.rows {
            let at = (row + i) * self.cols + col;
            self.data[at..at + block.cols].copy_from_slice(block.row(i));
        }
    }

    /// Multiplies row `i` by `factors`: one factor, or one per column.
    pub fn scale_row(&mut self, i: usize, factors: &[T]) {
        let row = self.row_mut(i);
        match factors {
            [factor] => row.iter_mut().for_each(|x| *x = *x * *factor),
            _ => row.iter_mut().zip(factors).for_each(|(x, factor)| *x = *x * *factor),
        }
    }

    /// Multiplies every row by its row of `factors` (one column, or as many as this has).
    pub fn scale_rows(mut self, factors: &Self) -> Self {
        (0..self.rows).for_each(|i| self.scale_row(i, factors.row(i)));
        self
    }

    pub fn scale(mut self, factor: T) -> Self {
        self.data.iter_mut().for_each(|x| *x = *x * factor);
        self
    }

    pub fn add_assign(&mut self, other: &Self) {
        self.data.iter_mut().zip(&other.data).for_each(|(x, y)| *x += *y);
    }

    /// Sets every element right of the diagonal to zero, and with `strict` the diagonal too.
    pub fn lower(mut self, strict: bool) -> Self {
        let cols = self.cols;
        for i in 0..self.rows {
            self.row_mut(i)[(i + usize::from(!strict)).min(cols)..].fill(T::default());
        }
        self
    }
}

/// A matrix inside somebody's memory, possibly transposed.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a, T> {
    data: &'a [T],
    pub rows: usize,
    pub cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<T: Real> View<'_, T> {
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// A copy, row-major in the direction in which the elements lie in memory, each element passed through `convert`.
    fn map<U: Real>(self, convert: impl Fn(T) -> U) -> (Vec<U>, usize, usize) {
        let transposed = self.col_stride != 1;
        let (outer, inner, stride) =
            if transposed { (self.cols, self.rows, self.col_stride) } else { (self.rows, self.cols, self.row_stride) };
        let mut data = Vec::with_capacity(outer * inner);
        (0..outer).for_each(|i| data.extend(self.data[i * stride..i * stride + inner].iter().map(|&x| convert(x))));
        if transposed { (data, 1, inner) } else { (data, inner, 1) }
    }

    /// Calls `body` with this matrix after `convert` and, in place, `finish`.
    pub fn converted<U: Real, R>(
        self,
        convert: impl Fn(T) -> U,
        finish: impl FnOnce(&mut [U]),
        body: impl FnOnce(View<'_, U>) -> R,
    ) -> R {
        let (mut data, row_stride, col_stride) = self.map(convert);
        finish(&mut data);
        body(View { data: &data, rows: self.rows, cols: self.cols, row_stride, col_stride })
    }

    /// One past the last element that is read.
    fn extent(&self) -> usize {
        if self.rows == 0 || self.cols == 0 {
            return 0;
        }
        (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride + 1
    }
}

/// `out = keep * out + by * a b`.
pub(super) fn multiply<T: Real>(a: View<'_, T>, b: View<'_, T>, out: &mut Matrix<T>, keep: T, by: T) {
    assert!(a.cols == b.rows && out.rows == a.rows && out.cols == b.cols, "product of matrices that do not fit");
    assert!(a.extent() <= a.data.len() && b.extent() <= b.data.len() && out.data.len() == out.rows * out.cols);
    if out.data.is_empty() {
        return;
    }
    // SAFETY: the extents of all three matrices lie within their slices (checked above), `out` is borrowed mutably and
    // so overlaps neither operand, and T is f32 or f64, the only implementors of `Real`.
    unsafe {
        gemm::gemm(
            a.rows,
            b.cols,
            a.cols,
            out.data.as_mut_ptr(),
            1,
            out.cols as isize,
            keep != T::default(),
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            keep,
            by,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
