//! The arithmetic of the chunk form under a [`Policy`]: products with rounded operands, rounded intermediates, and the
//! triangular inverse.

use super::matrix::{Matrix, Real, View, multiply};
use crate::precision::{Accumulate, Intermediate, Policy, Product};

/// Rows of a block that is inverted by substitution.
const SOLVE_BLOCK: usize = 16;

/// Runs products and keeps intermediates as a policy says.
pub(super) struct Engine<'a> {
    pub policy: &'a Policy,
    /// What every decay `e^x` with `x != 0` is multiplied by; 1 but in a kernel that shows what another number does.
    pub decay_factor: f64,
}

impl Engine<'_> {
    /// Rounds `matrix` to the format that `intermediate` is kept in.
    pub fn keep<T: Real>(&self, intermediate: Intermediate, mut matrix: Matrix<T>) -> Matrix<T> {
        self.keep_slice(intermediate, &mut matrix.data);
        matrix
    }

    pub fn keep_slice<T: Real>(&self, intermediate: Intermediate, values: &mut [T]) {
        T::round_slice(self.policy.format(intermediate), values);
    }

    /// `e^x` of a decay.
    pub fn exp<T: Real>(&self, x: T) -> T {
        if x == T::default() { T::ONE } else { x.exp() * T::from_f64(self.decay_factor) }
    }

    /// `a b`.
    pub fn product<T: Real>(&self, product: Product, a: View<'_, T>, b: View<'_, T>) -> Matrix<T> {
        let mut out = Matrix::zeros(a.rows, b.cols);
        self.add_product(product, a, b, &mut out, T::default(), T::ONE);
        out
    }

    /// `out = keep * out + by * a b`, the operands rounded and the sum kept as the policy says.
    pub fn add_product<T: Real>(
        &self,
        product: Product,
        a: View<'_, T>,
        b: View<'_, T>,
        out: &mut Matrix<T>,
        keep: T,
        by: T,
    ) {
        let how = self.policy.product(product);
        let narrow_sum = how.accumulate == Accumulate::F32 && !T::is_exact_in(crate::precision::Format::F32);
        if narrow_sum {
            let round = |values: &mut [f32]| f32::round_slice(how.operands, values);
            let narrow = |x: T| x.to_f64() as f32;
            let mut sum = Matrix::<f32>::zeros(a.rows, b.cols);
            a.converted(narrow, round, |a| b.converted(narrow, round, |b| multiply(a, b, &mut sum, 0.0, 1.0)));
            for (x, y) in out.data.iter_mut().zip(&sum.data) {
                *x = keep * *x + by * T::from_f64(f64::from(*y));
            }
        } else if T::is_exact_in(how.operands) {
            multiply(a, b, out, keep, by);
        } else {
            let round = |values: &mut [T]| T::round_slice(how.operands, values);
            a.converted(|x| x, round, |a| b.converted(|x| x, round, |b| multiply(a, b, out, keep, by)));
        }
    }

    /// `(I + L)^-1` for strictly lower triangular `L`: 16x16 blocks by substitution in the working format, then merged
    /// pairwise, `T21 = -T22 L21 T11`, by the policy's [`Product::Solve`].
    pub fn inverse<T: Real>(&self, l: &Matrix<T>) -> Matrix<T> {
        let n = l.rows;
        let mut inverse = Matrix::zeros(n, n);
        for start in (0..n).step_by(SOLVE_BLOCK) {
            invert_block(l, start..n.min(start + SOLVE_BLOCK), &mut inverse);
        }
        let mut size = SOLVE_BLOCK;
        while size < n {
            for start in (0..n - size).step_by(2 * size) {
                let (first, second) = (start..start + size, start + size..n.min(start + 2 * size));
                let lower = l.block(second.clone(), first.clone());
                let left = self.product(Product::Solve, inverse.block(second.clone(), second.clone()), lower);
                let mut merged = Matrix::zeros(second.len(), size);
                let right = inverse.block(first.clone(), first);
                self.add_product(Product::Solve, left.view(), right, &mut merged, T::default(), -T::ONE);
                inverse.set_block(second.start, start, &merged);
            }
            size *= 2;
        }
        inverse
    }
}

/// Rows of `(I + L)^-1` within one diagonal block: `t_r = e_r - sum_{c < r} L_rc t_c`.
fn invert_block<T: Real>(l: &Matrix<T>, range: std::ops::Range<usize>, inverse: &mut Matrix<T>) {
    let mut block = [[T::default(); SOLVE_BLOCK]; SOLVE_BLOCK];
    for r in 0..range.len() {
        let mut row = [T::default(); SOLVE_BLOCK];
        row[r] = T::ONE;
        let coefficients = &l.row(range.start + r)[range.start..range.start + r];
        for (factor, solved) in coefficients.iter().zip(&block) {
            row.iter_mut().zip(solved).for_each(|(x, y)| *x += -*factor * *y);
        }
        block[r] = row;
        inverse.row_mut(range.start + r)[range.clone()].copy_from_slice(&row[..range.len()]);
    }
}
