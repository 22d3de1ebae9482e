//! The backward equations of one chunk.
//!
//! ```text
//! dU = P^T do + (k*e^{G_C-G}) dS                      (I + L)^T Y = dU
//! dL = -stril(Y U^T)       dP = tril(do U^T)          dv = Y*w      dw = Y*v
//! dS0 = Diag(e^{G_C}) dS + (s q*e^G)^T do - ((b*k)*e^G)^T Y
//! dq = s e^G*(do S0^T) + s sum_j dP_ij k_j E_ij
//! A  = -e^G*(Y S0^T) + sum_j dL_ij k_j E_ij           (the gradient of b*k)
//! kcol_j = sum_i s dP_ij q_i E_ij + sum_i dL_ij (b*k)_i E_ij          kst = e^{G_C-G}*(U dS^T)
//! dk = b*A + kcol + kst                               db = k*A
//! dG = q*dq + (b*k)*A - k*kcol - k*kst,  dG_C += sum_v e^{G_C}*(dS*S0) + sum_i (k*kst)_i,  dg = reverse cumsum of dG
//! ```
//!
//! The adjoint solve (Y, dL) takes the place of `dT` and `-T^T dT T^T`: fewer products and fewer roundings.

use super::chunk::{Chunk, Solved};
use super::engine::Engine;
use super::matrix::{Matrix, Real};
use crate::precision::{Intermediate, Product};
use crate::problem::Op;

/// Gradients of one chunk's inputs.
pub(super) struct ChunkGrads<T> {
    /// `[n, K]`.
    pub dq: Matrix<T>,
    /// `[n, K]`.
    pub dk: Matrix<T>,
    /// `[n, V]`.
    pub dv: Matrix<T>,
    /// `[n, 1]` or `[n, K]`.
    pub dg: Matrix<T>,
    /// Gradient of `b`, `[n, 1]` or `[n, K]`.
    pub d_erase: Matrix<T>,
    /// Gradient of `w`, `[n, 1]` or `[n, V]`.
    pub d_write: Matrix<T>,
}

impl<T: Real> Chunk<T> {
    /// The gradients of this chunk's inputs; `d_state` is the gradient of the state after the chunk on entry, of the
    /// one before it on return. `before` is the running state before the chunk.
    pub fn backward(
        &self,
        engine: &Engine<'_>,
        solved: &Solved<T>,
        before: &Matrix<T>,
        d_o: &Matrix<T>,
        d_state: &mut Matrix<T>,
    ) -> ChunkGrads<T> {
        let adjoint = |a, b| engine.product(Product::Adjoint, a, b);
        let d_state_operand = engine.keep(Intermediate::DState, d_state.clone());

        let mut du = self.decay.write_adjoint_u(engine, &self.k, &d_state_operand);
        engine.add_product(Product::Adjoint, solved.scores.t(), d_o.view(), &mut du, T::ONE, T::ONE);
        let du = engine.keep(Intermediate::DU, du);
        let y = engine.product(Product::ApplyInverse, solved.inverse.t(), du.view());
        let y = engine.keep(Intermediate::Y, y);
        let dl = engine.keep(Intermediate::DGram, adjoint(y.view(), solved.u.t()).scale(-T::ONE).lower(true));
        let dp = adjoint(d_o.view(), solved.u.t()).scale(self.scale).lower(false);
        let dp = engine.keep(Intermediate::DScores, dp);

        let keys = self.erase_keys();
        let from_start = self.decay.since_start();
        let mut dq = adjoint(d_o.view(), solved.state.t()).scale(self.scale).scale_rows(from_start);
        self.decay.add_apply(engine, &dp, &self.k, &mut dq);
        let mut a = adjoint(y.view(), solved.state.t()).scale(-T::ONE).scale_rows(from_start);
        self.decay.add_apply(engine, &dl, &self.k, &mut a);
        let mut k_column = Matrix::zeros(self.len(), self.k.cols);
        self.decay.add_apply_transposed(engine, &dp, &self.q, &mut k_column);
        self.decay.add_apply_transposed(engine, &dl, &keys, &mut k_column);
        let k_state = self.decay.write_adjoint_k(engine, &solved.u, &d_state_operand);

        let dg = self.log_decay_gradient(&keys, (&dq, &a), (&k_column, &k_state), (d_state, before));
        self.decay.decay_state(d_state);
        self.decay.add_read_transposed(engine, &self.q, d_o, d_state, self.scale);
        self.decay.add_read_transposed(engine, &keys, &y, d_state, -T::ONE);

        let mut dk = a.clone().scale_rows(&self.erase);
        dk.add_assign(&k_column);
        dk.add_assign(&k_state);
        ChunkGrads {
            dq: engine.keep(Intermediate::InputGrads, dq),
            dk: engine.keep(Intermediate::InputGrads, dk),
            dv: engine.keep(Intermediate::InputGrads, y.clone().scale_rows(&self.write)),
            dg: engine.keep(Intermediate::GateGrads, dg),
            d_erase: self.gate_gradient(engine, &self.k, &a),
            d_write: self.gate_gradient(engine, &self.v, &y),
        }
    }

    /// `x*dx`, summed over channels where the gate is a scalar.
    fn gate_gradient(&self, engine: &Engine<'_>, x: &Matrix<T>, dx: &Matrix<T>) -> Matrix<T> {
        match self.op {
            Op::Gdn => Matrix { rows: x.rows, cols: 1, data: (0..x.rows).map(|i| dot(x.row(i), dx.row(i))).collect() },
            Op::Gdn2 => engine.keep(Intermediate::InputGrads, x.clone().scale_rows(dx)),
        }
    }

    fn log_decay_gradient(
        &self,
        keys: &Matrix<T>,
        (dq, a): (&Matrix<T>, &Matrix<T>),
        (k_column, k_state): (&Matrix<T>, &Matrix<T>),
        (d_state, before): (&Matrix<T>, &Matrix<T>),
    ) -> Matrix<T> {
        let (n, dim, whole) = (self.len(), self.k.cols, self.decay.whole());
        let decay_of = |d: usize| whole[if whole.len() == 1 { 0 } else { d }];
        // What the last token's cumulative decay receives: from the decayed state and from every write.
        let mut end: Vec<T> = (0..dim).map(|d| decay_of(d) * dot(d_state.row(d), before.row(d))).collect();
        let mut per_channel = Matrix::zeros(n, dim);
        for i in 0..n {
            let row = &mut per_channel.data[i * dim..(i + 1) * dim];
            for (d, x) in row.iter_mut().enumerate() {
                let at = i * dim + d;
                let write = self.k.data[at] * k_state.data[at];
                *x = self.q.data[at] * dq.data[at] + keys.data[at] * a.data[at]
                    - self.k.data[at] * k_column.data[at]
                    - write;
                end[d] += write;
            }
        }
        per_channel.row_mut(n - 1).iter_mut().zip(&end).for_each(|(x, end)| *x += *end);
        let mut dg = match self.op {
            Op::Gdn => {
                let sum = |i| per_channel.row(i).iter().fold(T::default(), |sum, x| sum + *x);
                Matrix { rows: n, cols: 1, data: (0..n).map(sum).collect() }
            }
            Op::Gdn2 => per_channel,
        };
        for i in (1..n).rev() {
            let (before, after) = dg.data.split_at_mut(i * dg.cols);
            before[(i - 1) * dg.cols..].iter_mut().zip(after.iter()).for_each(|(x, y)| *x += *y);
        }
        dg
    }
}

fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    a.iter().zip(b).fold(T::default(), |sum, (a, b)| sum + *a * *b)
}
