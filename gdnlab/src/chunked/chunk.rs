//! One chunk of one head: its inputs, and the forward equations.

use super::decay::Decay;
use super::engine::Engine;
use super::matrix::{Matrix, Real};
use crate::heads::Head;
use crate::precision::{Intermediate, Product, WriteForm};
use crate::problem::Op;
use std::ops::Range;

/// The inputs of one chunk of `n` tokens.
pub(super) struct Chunk<T> {
    pub op: Op,
    /// `[n, K]`.
    pub q: Matrix<T>,
    /// `[n, K]`.
    pub k: Matrix<T>,
    /// `[n, V]`.
    pub v: Matrix<T>,
    /// `b`: `[n, 1]` for GDN, `[n, K]` for GDN-2.
    pub erase: Matrix<T>,
    /// `w`: `[n, 1]` for GDN, `[n, V]` for GDN-2.
    pub write: Matrix<T>,
    pub decay: Decay<T>,
    pub scale: T,
}

/// What the forward of a chunk computes and the backward needs again.
pub(super) struct Solved<T> {
    /// `T = (I + L)^-1`, `[n, n]`.
    pub inverse: Matrix<T>,
    /// `P`, `[n, n]`.
    pub scores: Matrix<T>,
    /// `U`, `[n, V]`.
    pub u: Matrix<T>,
    /// `S` as products read it, `[K, V]`.
    pub state: Matrix<T>,
}

impl<T: Real> Chunk<T> {
    /// The tokens `range` of `head`.
    pub fn load(engine: &Engine<'_>, head: &Head<'_>, range: Range<usize>) -> Self {
        let (n, first) = (range.len(), range.start);
        let gate_dim = head.log_decay(first).len();
        let mut g = Matrix::<f64>::from_rows(n, gate_dim, |i| head.log_decay(first + i));
        g.data.iter_mut().for_each(|x| *x = x.max(T::ZERO_LOG_DECAY));
        let g = Matrix { rows: n, cols: gate_dim, data: g.data.iter().map(|&x| T::from_f64(x)).collect() };
        Self {
            op: head.op(),
            q: Matrix::from_rows(n, head.key_dim(), |i| head.q(first + i)),
            k: Matrix::from_rows(n, head.key_dim(), |i| head.k(first + i)),
            v: Matrix::from_rows(n, head.value_dim(), |i| head.v(first + i)),
            erase: Matrix::from_rows(n, gate_dim, |i| head.erase(first + i)),
            write: Matrix::from_rows(n, head.write(first).len(), |i| head.write(first + i)),
            decay: Decay::new(engine, g),
            scale: T::from_f64(head.scale()),
        }
    }

    pub fn len(&self) -> usize {
        self.q.rows
    }

    /// `b*k`, `[n, K]`.
    pub fn erase_keys(&self) -> Matrix<T> {
        self.k.clone().scale_rows(&self.erase)
    }

    /// `L_ij = sum_d (b*k)_id k_jd E_ijd`, `i > j`. A scalar `b` multiplies the product, so that the operand is k
    /// itself.
    fn gram(&self, engine: &Engine<'_>) -> Matrix<T> {
        let gram = if self.op == Op::Gdn {
            self.decay.gram(engine, Product::Gram, &self.k, &self.k, true).scale_rows(&self.erase)
        } else {
            self.decay.gram(engine, Product::Gram, &self.erase_keys(), &self.k, true)
        };
        engine.keep(Intermediate::Gram, gram)
    }

    /// `((b*k) * e^G) S`, `[n, V]`.
    fn read(&self, engine: &Engine<'_>, state: &Matrix<T>) -> Matrix<T> {
        if self.op == Op::Gdn {
            self.decay.read(engine, Product::StateRead, &self.k, state).scale_rows(&self.erase)
        } else {
            self.decay.read(engine, Product::StateRead, &self.erase_keys(), state)
        }
    }

    /// `U`, from the state that products read.
    fn written(&self, engine: &Engine<'_>, inverse: &Matrix<T>, state: &Matrix<T>) -> Matrix<T> {
        let write = self.v.clone().scale_rows(&self.write);
        let u = match engine.policy.write_form {
            WriteForm::Residual => {
                let mut rhs = write;
                let read = self.read(engine, state);
                rhs.data.iter_mut().zip(&read.data).for_each(|(x, y)| *x = *x - *y);
                let rhs = engine.keep(Intermediate::WriteRhs, rhs);
                engine.product(Product::ApplyInverse, inverse.view(), rhs.view())
            }
            WriteForm::Wy => {
                let rhs_u = engine.keep(Intermediate::WriteRhs, write);
                let rhs_w = engine.keep(Intermediate::WriteRhs, self.erase_keys().scale_rows(self.decay.since_start()));
                let u = engine.product(Product::ApplyInverse, inverse.view(), rhs_u.view());
                let w = engine.product(Product::ApplyInverse, inverse.view(), rhs_w.view());
                let mut u = engine.keep(Intermediate::Wy, u);
                let w = engine.keep(Intermediate::Wy, w);
                engine.add_product(Product::StateRead, w.view(), state.view(), &mut u, T::ONE, -T::ONE);
                u
            }
        };
        engine.keep(Intermediate::U, u)
    }

    /// Everything of the chunk that does not depend on later chunks, from the running state before it.
    pub fn solve(&self, engine: &Engine<'_>, state: &Matrix<T>) -> Solved<T> {
        let inverse = engine.keep(Intermediate::Inverse, engine.inverse(&self.gram(engine)));
        let scores = self.decay.gram(engine, Product::Scores, &self.q, &self.k, false).scale(self.scale);
        let scores = engine.keep(Intermediate::Scores, scores);
        let state = engine.keep(Intermediate::State, state.clone());
        let u = self.written(engine, &inverse, &state);
        Solved { inverse, scores, u, state }
    }

    /// `o = s (q * e^G) S + P U`, `[n, V]`.
    pub fn output(&self, engine: &Engine<'_>, solved: &Solved<T>) -> Matrix<T> {
        let mut o = self.decay.read(engine, Product::StateRead, &self.q, &solved.state).scale(self.scale);
        engine.add_product(Product::Output, solved.scores.view(), solved.u.view(), &mut o, T::ONE, T::ONE);
        engine.keep(Intermediate::Output, o)
    }

    /// `S = Diag(e^{G_C}) S + (k * e^{G_C - G})^T U`, in place.
    pub fn advance(&self, engine: &Engine<'_>, solved: &Solved<T>, state: &mut Matrix<T>) {
        self.decay.write(engine, &self.k, &solved.u, state);
    }
}
