//! Decays within a chunk: `E_ij = e^{G_i - G_j}` for `i >= j`, one per token (GDN) or per key channel (GDN-2).
//!
//! `e^{-G}` alone is never formed. Scalar decays multiply the results of products. Channel-wise ones sit inside the
//! sum over channels: blocks of [`BLOCK`] tokens are tied to the block's first token `r`, so that a pair of tokens
//! from two blocks has `E_ij = e^{G_i - G_r} e^{G_r - G_j}` with both exponents at most 0, and goes through a product;
//! pairs within a block are summed directly.

use super::engine::Engine;
use super::matrix::{Matrix, Real};
use crate::precision::{Intermediate, Product};

/// Tokens of a block with channel-wise decays.
const BLOCK: usize = 16;

/// The cumulative log decays of one chunk.
pub(super) struct Decay<T> {
    /// `G`, `[n, 1]` or `[n, K]`.
    cumsum: Matrix<T>,
    /// `E`, `[n, n]`, lower triangular, for scalar decays.
    scalar: Option<Matrix<T>>,
    /// `e^G` and `e^{G_C - G}`, in the dimensions of `cumsum`.
    from_start: Matrix<T>,
    to_end: Matrix<T>,
}

impl<T: Real> Decay<T> {
    /// From the log decays `g`, `[n, 1]` or `[n, K]`.
    pub fn new(engine: &Engine<'_>, mut g: Matrix<T>) -> Self {
        let (n, dim) = (g.rows, g.cols);
        for i in 1..n {
            let (before, row) = g.data.split_at_mut(i * dim);
            row.iter_mut().zip(&before[(i - 1) * dim..]).take(dim).for_each(|(x, y)| *x += *y);
        }
        let cumsum = engine.keep(Intermediate::GateCumsum, g);
        let last = cumsum.row(n - 1).to_vec();
        let mut from_start = cumsum.clone();
        let mut to_end = cumsum.clone();
        from_start.data.iter_mut().for_each(|x| *x = engine.exp(*x));
        to_end.data.chunks_exact_mut(dim).for_each(|row| {
            row.iter_mut().zip(&last).for_each(|(x, last)| *x = engine.exp(*last - *x));
        });
        let scalar = (dim == 1).then(|| {
            let mut e = Matrix::zeros(n, n);
            for i in 0..n {
                let end = cumsum.data[i];
                e.row_mut(i).iter_mut().zip(&cumsum.data[..=i]).for_each(|(x, start)| *x = engine.exp(end - *start));
            }
            e
        });
        Self { cumsum, scalar, from_start, to_end }
    }

    /// `e^G`, `[n, 1]` or `[n, K]`.
    pub fn since_start(&self) -> &Matrix<T> {
        &self.from_start
    }

    /// `e^{G_C}`: one value, or one per key channel.
    pub fn whole(&self) -> &[T] {
        self.from_start.row(self.from_start.rows - 1)
    }

    /// `(x * e^G) s` for `x` `[n, K]` and a state `s` `[K, V]`.
    pub fn read(&self, engine: &Engine<'_>, product: Product, x: &Matrix<T>, s: &Matrix<T>) -> Matrix<T> {
        match self.scalar {
            Some(_) => engine.product(product, x.view(), s.view()).scale_rows(&self.from_start),
            None => engine.product(product, x.clone().scale_rows(&self.from_start).view(), s.view()),
        }
    }

    /// `s += (x * e^G)^T y` for `x` `[n, K]`, `y` `[n, V]`.
    pub fn add_read_transposed(&self, engine: &Engine<'_>, x: &Matrix<T>, y: &Matrix<T>, s: &mut Matrix<T>, by: T) {
        self.add_outer(engine, Product::Adjoint, &self.from_start, (x, y), s, by);
    }

    /// `s = Diag(e^{G_C}) s + (k * e^{G_C - G})^T u`.
    pub fn write(&self, engine: &Engine<'_>, k: &Matrix<T>, u: &Matrix<T>, s: &mut Matrix<T>) {
        self.decay_state(s);
        self.add_outer(engine, Product::StateUpdate, &self.to_end, (k, u), s, T::ONE);
    }

    /// `s = Diag(e^{G_C}) s`.
    pub fn decay_state(&self, s: &mut Matrix<T>) {
        let whole = self.whole();
        for i in 0..s.rows {
            let factor = whole[if whole.len() == 1 { 0 } else { i }];
            s.scale_row(i, &[factor]);
        }
    }

    fn add_outer(
        &self,
        engine: &Engine<'_>,
        product: Product,
        factors: &Matrix<T>,
        (x, y): (&Matrix<T>, &Matrix<T>),
        s: &mut Matrix<T>,
        by: T,
    ) {
        if self.scalar.is_some() {
            let y = y.clone().scale_rows(factors);
            engine.add_product(product, x.t(), y.view(), s, T::ONE, by);
        } else {
            let x = x.clone().scale_rows(factors);
            engine.add_product(product, x.t(), y.view(), s, T::ONE, by);
        }
    }

    /// `(k * e^{G_C - G}) ds` for `ds` `[K, V]`: what the final state's gradient gives to U.
    pub fn write_adjoint_u(&self, engine: &Engine<'_>, k: &Matrix<T>, ds: &Matrix<T>) -> Matrix<T> {
        match self.scalar {
            Some(_) => engine.product(Product::Adjoint, k.view(), ds.view()).scale_rows(&self.to_end),
            None => engine.product(Product::Adjoint, k.clone().scale_rows(&self.to_end).view(), ds.view()),
        }
    }

    /// `e^{G_C - G} * (u ds^T)`, `[n, K]`: what it gives to k.
    pub fn write_adjoint_k(&self, engine: &Engine<'_>, u: &Matrix<T>, ds: &Matrix<T>) -> Matrix<T> {
        engine.product(Product::Adjoint, u.view(), ds.t()).scale_rows(&self.to_end)
    }

    /// `M_ij = sum_d a_id b_jd E_ijd` for `i > j` (`strict`) or `i >= j`, zero elsewhere.
    pub fn gram(&self, engine: &Engine<'_>, product: Product, a: &Matrix<T>, b: &Matrix<T>, strict: bool) -> Matrix<T> {
        if let Some(e) = &self.scalar {
            let mut m = engine.product(product, a.view(), b.t());
            m.data.iter_mut().zip(&e.data).for_each(|(x, e)| *x = *x * *e);
            return m.lower(strict);
        }
        let n = a.rows;
        let mut m = Matrix::zeros(n, n);
        for start in (0..n).step_by(BLOCK) {
            let end = n.min(start + BLOCK);
            if start > 0 {
                let (left, right) = (self.since(engine, a, start..end, start), self.until(engine, b, 0..start, start));
                m.set_block(start, 0, &engine.product(product, left.view(), right.t()));
            }
            for i in start..end {
                for j in start..i + usize::from(!strict) {
                    let mut sum = T::default();
                    self.within(engine, i, j, |d, e| sum += a.row(i)[d] * b.row(j)[d] * e);
                    m.data[i * n + j] = sum;
                }
            }
        }
        m
    }

    /// `x_i += sum_j M_ij b_j * E_ij`, `[n, K]`, for lower triangular `M`.
    pub fn add_apply(&self, engine: &Engine<'_>, m: &Matrix<T>, b: &Matrix<T>, x: &mut Matrix<T>) {
        if let Some(e) = &self.scalar {
            let m = self.scaled(m, e);
            engine.add_product(Product::Adjoint, m.view(), b.view(), x, T::ONE, T::ONE);
            return;
        }
        let n = m.rows;
        for start in (0..n).step_by(BLOCK) {
            let end = n.min(start + BLOCK);
            if start > 0 {
                let right = self.until(engine, b, 0..start, start);
                let part = engine.product(Product::Adjoint, m.block(start..end, 0..start), right.view());
                let part = self.scale_since(engine, part, start);
                (0..part.rows).for_each(|r| add(x.row_mut(start + r), part.row(r)));
            }
            for i in start..end {
                for j in start..=i {
                    let factor = m.data[i * n + j];
                    let row = &mut x.data[i * b.cols..(i + 1) * b.cols];
                    self.within(engine, i, j, |d, e| row[d] += factor * b.row(j)[d] * e);
                }
            }
        }
    }

    /// `x_j += sum_i M_ij a_i * E_ij`, `[n, K]`, for lower triangular `M`.
    pub fn add_apply_transposed(&self, engine: &Engine<'_>, m: &Matrix<T>, a: &Matrix<T>, x: &mut Matrix<T>) {
        if let Some(e) = &self.scalar {
            let m = self.scaled(m, e);
            engine.add_product(Product::Adjoint, m.t(), a.view(), x, T::ONE, T::ONE);
            return;
        }
        let n = m.rows;
        for start in (0..n).step_by(BLOCK) {
            let end = n.min(start + BLOCK);
            if start > 0 {
                let left = self.since(engine, a, start..end, start);
                let part = engine.product(Product::Adjoint, m.block(start..end, 0..start).t(), left.view());
                let part = self.scale_until(engine, part, start);
                (0..part.rows).for_each(|r| add(x.row_mut(r), part.row(r)));
            }
            for i in start..end {
                for j in start..=i {
                    let factor = m.data[i * n + j];
                    let row = &mut x.data[j * a.cols..(j + 1) * a.cols];
                    self.within(engine, i, j, |d, e| row[d] += factor * a.row(i)[d] * e);
                }
            }
        }
    }

    fn scaled(&self, m: &Matrix<T>, e: &Matrix<T>) -> Matrix<T> {
        let data = m.data.iter().zip(&e.data).map(|(x, e)| *x * *e).collect();
        Matrix { rows: m.rows, cols: m.cols, data }
    }

    /// Calls `body` with each channel `d` and `E_ijd`, for channel-wise decays.
    fn within(&self, engine: &Engine<'_>, i: usize, j: usize, mut body: impl FnMut(usize, T)) {
        let (end, start) = (self.cumsum.row(i), self.cumsum.row(j));
        end.iter().zip(start).enumerate().for_each(|(d, (end, start))| body(d, engine.exp(*end - *start)));
    }

    /// Rows `range` of `x`, times `e^{G_i - G_r}`.
    fn since(&self, engine: &Engine<'_>, x: &Matrix<T>, range: std::ops::Range<usize>, r: usize) -> Matrix<T> {
        self.scale_since(engine, rows(x, range), r)
    }

    /// Rows `range` of `x`, times `e^{G_r - G_j}`.
    fn until(&self, engine: &Engine<'_>, x: &Matrix<T>, range: std::ops::Range<usize>, r: usize) -> Matrix<T> {
        self.scale_until(engine, rows(x, range), r)
    }

    /// Row `i` of `x` belongs to token `r + i` and is multiplied by `e^{G_{r+i} - G_r}`.
    fn scale_since(&self, engine: &Engine<'_>, mut x: Matrix<T>, r: usize) -> Matrix<T> {
        for i in 0..x.rows {
            let (end, start) = (self.cumsum.row(r + i), self.cumsum.row(r));
            scale_exp(engine, x.row_mut(i), end, start);
        }
        x
    }

    /// Row `j` of `x` belongs to token `j < r` and is multiplied by `e^{G_r - G_j}`.
    fn scale_until(&self, engine: &Engine<'_>, mut x: Matrix<T>, r: usize) -> Matrix<T> {
        for j in 0..x.rows {
            let (end, start) = (self.cumsum.row(r), self.cumsum.row(j));
            scale_exp(engine, x.row_mut(j), end, start);
        }
        x
    }
}

fn rows<T: Real>(x: &Matrix<T>, range: std::ops::Range<usize>) -> Matrix<T> {
    let data = x.data[range.start * x.cols..range.end * x.cols].to_vec();
    Matrix { rows: range.len(), cols: x.cols, data }
}

fn scale_exp<T: Real>(engine: &Engine<'_>, row: &mut [T], end: &[T], start: &[T]) {
    row.iter_mut().zip(end.iter().zip(start)).for_each(|(x, (end, start))| *x = *x * engine.exp(*end - *start));
}

fn add<T: Real>(row: &mut [T], other: &[T]) {
    row.iter_mut().zip(other).for_each(|(x, y)| *x += *y);
}
