//! Dense float64 products over strided views, by the GEMM library.

use gdnlab_deps::gemm;

/// A read-only matrix in a slice, by rows and columns with their strides in elements.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    data: &'a [f64],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> View<'a> {
    /// `rows` rows of `cols` contiguous elements, the starts of two rows `row_stride` apart.
    pub(super) fn new(data: &'a [f64], rows: usize, cols: usize, row_stride: usize) -> Self {
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transpose, without a copy.
    pub(super) fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Rows `from..to`.
    pub(super) fn rows(self, from: usize, to: usize) -> Self {
        let data = if from < to { &self.data[from * self.row_stride..] } else { &[] };
        Self { data, rows: to - from, ..self }
    }

    fn is_empty(&self) -> bool {
        self.rows == 0 || self.cols == 0
    }

    fn fits(&self) -> bool {
        self.is_empty() || (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride < self.data.len()
    }
}

/// What a product does to the values that its destination holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Write {
    /// Overwrites them.
    Set,
    /// Adds to them.
    Add,
}

/// `dst = factor a b` or `dst += factor a b`, `dst` row-major and contiguous, on this thread.
///
/// The order of the additions depends on the sizes only, so that two runs agree to the bit.
pub(super) fn product(dst: &mut [f64], write: Write, factor: f64, a: View, b: View) {
    assert!(a.cols == b.rows && dst.len() == a.rows * b.cols, "the sizes of a product do not agree");
    assert!(a.fits() && b.fits(), "a view is larger than its data");
    if dst.is_empty() {
        return;
    }
    if a.cols == 0 {
        if write == Write::Set {
            dst.fill(0.0);
        }
        return;
    }
    let stride = |n: usize| n as isize;
    // SAFETY: `dst` holds a.rows x b.cols contiguous elements and is borrowed mutably, hence apart from `a` and `b`,
    // whose last elements lie within their slices; all three sizes and strides were checked above.
    unsafe {
        gemm::gemm(
            a.rows,
            b.cols,
            a.cols,
            dst.as_mut_ptr(),
            1,
            stride(b.cols),
            write == Write::Add,
            a.data.as_ptr(),
            stride(a.col_stride),
            stride(a.row_stride),
            b.data.as_ptr(),
            stride(b.col_stride),
            stride(b.row_stride),
            1.0,
            factor,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
