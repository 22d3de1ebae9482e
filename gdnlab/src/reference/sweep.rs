//! The vector loops of the recurrence: what happens to a few rows of the transposed state over a segment of tokens.
//!
//! Each loop passes over the rows once per token, and does in that pass all that can be done with a number once it is
//! loaded: the end of one token's step and the beginning of the next one's. Slot `t` of the token vectors therefore
//! pairs the decay and the erase vector of token `t` with the key and the query of token `t - 1`; at both ends of the
//! segment the missing partner is one that changes nothing.

use super::aligned::Aligned;
use gdnlab_deps::pulp::{Simd, WithSimd};

/// Rows of the transposed state that are taken together: a token's vectors are loaded once for all of them, and as many
/// sums are in flight.
pub(super) const ROWS: usize = 4;

/// The vectors of a segment's tokens, each `[slots][kp]`.
pub(super) struct Vectors {
    pub kp: usize,
    /// `e^g` and `e = b*k` of token `t` in slot `t`; in the slot after the last one 1 and 0.
    pub decay: Aligned,
    pub erase: Aligned,
    /// `k` and `s q` of token `t` in slot `t + 1`; zeros in slot 0.
    pub key: Aligned,
    pub query: Aligned,
}

impl Vectors {
    pub fn new(kp: usize, slots: usize) -> Self {
        let zeros = || Aligned::zeros(slots * kp);
        Self { kp, decay: zeros(), erase: zeros(), key: zeros(), query: zeros() }
    }
}

/// Where the values of [`ROWS`] rows lie in `[tokens][stride]`.
#[derive(Clone, Copy)]
pub(super) struct Values {
    pub first: usize,
    pub stride: usize,
}

impl Values {
    #[inline(always)]
    fn get(self, data: &[f64], token: usize) -> [f64; ROWS] {
        let at = token * self.stride + self.first;
        let mut values = [0.0; ROWS];
        values.copy_from_slice(&data[at..at + ROWS]);
        values
    }

    #[inline(always)]
    fn set(self, data: &mut [f64], token: usize, values: [f64; ROWS]) {
        let at = token * self.stride + self.first;
        data[at..at + ROWS].copy_from_slice(&values);
    }
}

/// Slot `slot` of `data` `[slots][kp]`.
#[inline(always)]
fn at<S: Simd>(data: &[f64], slot: usize, kp: usize) -> &[S::f64s] {
    S::as_simd_f64s(&data[slot * kp..(slot + 1) * kp]).0
}

#[inline(always)]
fn at_mut<S: Simd>(data: &mut [f64], slot: usize, kp: usize) -> &mut [S::f64s] {
    S::as_mut_simd_f64s(&mut data[slot * kp..(slot + 1) * kp]).0
}

/// [`ROWS`] rows, their vectors interleaved.
#[inline(always)]
fn rows<S: Simd>(data: &[f64]) -> &[[S::f64s; ROWS]] {
    S::as_simd_f64s(data).0.as_chunks().0
}

#[inline(always)]
fn rows_mut<S: Simd>(data: &mut [f64]) -> &mut [[S::f64s; ROWS]] {
    S::as_mut_simd_f64s(data).0.as_chunks_mut().0
}

#[inline(always)]
fn splat<S: Simd>(simd: S, x: [f64; ROWS]) -> [S::f64s; ROWS] {
    let mut vectors = [simd.splat_f64s(0.0); ROWS];
    for r in 0..ROWS {
        vectors[r] = simd.splat_f64s(x[r]);
    }
    vectors
}

#[inline(always)]
fn sums<S: Simd>(simd: S, x: [S::f64s; ROWS]) -> [f64; ROWS] {
    let mut sums = [0.0; ROWS];
    for r in 0..ROWS {
        sums[r] = simd.reduce_sum_f64s(x[r]);
    }
    sums
}

#[inline(always)]
fn difference(a: [f64; ROWS], b: [f64; ROWS]) -> [f64; ROWS] {
    let mut difference = a;
    for r in 0..ROWS {
        difference[r] -= b[r];
    }
    difference
}

/// The forward of `tokens` tokens for [`ROWS`] rows.
pub(super) struct Forward<'a> {
    pub vectors: &'a Vectors,
    pub tokens: usize,
    pub values: Values,
    /// `w*v`, `[tokens][stride]`.
    pub write: &'a [f64],
    /// `[kp]` interleaved.
    pub state: &'a mut [f64],
    /// `[tokens][stride]`.
    pub o: &'a mut [f64],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { vectors, tokens, values, write, state, o } = self;
        let kp = vectors.kp;
        let state = rows_mut::<S>(state);
        let mut u = [0.0; ROWS];
        for t in 0..=tokens {
            let (key, query) = (at::<S>(&vectors.key, t, kp), at::<S>(&vectors.query, t, kp));
            let (decay, erase) = (at::<S>(&vectors.decay, t, kp), at::<S>(&vectors.erase, t, kp));
            let written = splat(simd, u);
            let (mut out, mut read) = (splat(simd, [0.0; ROWS]), splat(simd, [0.0; ROWS]));
            for ((((s, &key), &query), &decay), &erase) in state.iter_mut().zip(key).zip(query).zip(decay).zip(erase) {
                for r in 0..ROWS {
                    let after = simd.mul_add_e_f64s(key, written[r], s[r]);
                    out[r] = simd.mul_add_e_f64s(after, query, out[r]);
                    s[r] = simd.mul_f64s(decay, after);
                    read[r] = simd.mul_add_e_f64s(s[r], erase, read[r]);
                }
            }
            if t > 0 {
                values.set(o, t - 1, sums(simd, out));
            }
            if t < tokens {
                u = difference(values.get(write, t), sums(simd, read));
            }
        }
    }
}

/// The backward of `tokens` tokens for [`ROWS`] rows: the states again, then the adjoint of each token.
pub(super) struct Backward<'a> {
    pub vectors: &'a Vectors,
    pub tokens: usize,
    pub values: Values,
    /// `w*v` and do, `[tokens][stride]`.
    pub write: &'a [f64],
    pub d_o: &'a [f64],
    /// State before the first token, `[kp]` interleaved.
    pub state: &'a [f64],
    /// Gradient of the state after the last token on entry, before the first on return, `[kp]` interleaved.
    pub d_state: &'a mut [f64],
    pub workspace: &'a mut Workspace,
    pub sums: &'a mut Sums,
    /// `du`, `[tokens][stride]`.
    pub d_write: &'a mut [f64],
}

/// What the backward keeps of the states that it computes again.
pub(super) struct Workspace {
    /// `S'`, `[tokens][kp]` interleaved.
    states: Aligned,
    /// `u` of token `t` in slot `t + 1`.
    u: Vec<[f64; ROWS]>,
}

/// Gradients that are summed over the rows of the state, `[slots][kp]`.
pub(super) struct Sums {
    /// `S' do` and `dS u` of token `t` in slot `t + 1`.
    pub dq: Aligned,
    pub dk: Aligned,
    /// `-S' du` and `S' * dS'` of token `t` in slot `t`.
    pub de: Aligned,
    pub dg: Aligned,
    /// `u . do` of token `t` in slot `t + 1`.
    pub u_do: Vec<f64>,
}

impl Workspace {
    pub fn new(kp: usize, tokens: usize) -> Self {
        Self { states: Aligned::zeros(tokens * kp * ROWS), u: vec![[0.0; ROWS]; tokens + 1] }
    }
}

impl Sums {
    pub fn new(kp: usize, slots: usize) -> Self {
        let zeros = || Aligned::zeros(slots * kp);
        Self { dq: zeros(), dk: zeros(), de: zeros(), dg: zeros(), u_do: vec![0.0; slots] }
    }

    pub fn clear(&mut self) {
        self.dq.fill(0.0);
        self.dk.fill(0.0);
        self.de.fill(0.0);
        self.dg.fill(0.0);
        self.u_do.fill(0.0);
    }
}

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { vectors, tokens, values, write, d_o, state, d_state, workspace, sums, d_write } = self;
        recompute(simd, vectors, tokens, (values, write), state, workspace);
        let size = vectors.kp * ROWS;
        let mut du = [0.0; ROWS];
        for t in (0..=tokens).rev() {
            let (earlier, later) = (t.saturating_sub(1), t.min(tokens - 1));
            let token = Token {
                later: rows::<S>(&workspace.states[later * size..(later + 1) * size]),
                earlier: rows::<S>(&workspace.states[earlier * size..(earlier + 1) * size]),
                du,
                u: workspace.u[t],
                d_o: if t > 0 { values.get(d_o, t - 1) } else { [0.0; ROWS] },
            };
            for r in 0..ROWS {
                sums.u_do[t] += token.u[r] * token.d_o[r];
            }
            du = step_back(simd, vectors, t, token, rows_mut::<S>(d_state), sums);
            if t > 0 {
                values.set(d_write, t - 1, du);
            }
        }
    }
}

/// `S'` and `u` of every token.
#[inline(always)]
fn recompute<S: Simd>(
    simd: S,
    vectors: &Vectors,
    tokens: usize,
    (values, write): (Values, &[f64]),
    state: &[f64],
    workspace: &mut Workspace,
) {
    let kp = vectors.kp;
    let mut u = [0.0; ROWS];
    for t in 0..tokens {
        let (done, rest) = workspace.states.split_at_mut(t * kp * ROWS);
        let before = if t == 0 { state } else { &done[(t - 1) * kp * ROWS..][..kp * ROWS] };
        let decayed = rows_mut::<S>(&mut rest[..kp * ROWS]);
        let key = at::<S>(&vectors.key, t, kp);
        let (decay, erase) = (at::<S>(&vectors.decay, t, kp), at::<S>(&vectors.erase, t, kp));
        let written = splat(simd, u);
        let mut read = splat(simd, [0.0; ROWS]);
        for ((((d, s), &key), &decay), &erase) in
            decayed.iter_mut().zip(rows::<S>(before)).zip(key).zip(decay).zip(erase)
        {
            for r in 0..ROWS {
                d[r] = simd.mul_f64s(decay, simd.mul_add_e_f64s(key, written[r], s[r]));
                read[r] = simd.mul_add_e_f64s(d[r], erase, read[r]);
            }
        }
        u = difference(values.get(write, t), sums(simd, read));
        workspace.u[t + 1] = u;
    }
}

/// What belongs to the rows, at the turn from one token to the one before.
struct Token<'a, V> {
    /// `S'` of the later and of the earlier token.
    later: &'a [[V; ROWS]],
    earlier: &'a [[V; ROWS]],
    /// `du` of the later token.
    du: [f64; ROWS],
    /// `u` and do of the earlier token.
    u: [f64; ROWS],
    d_o: [f64; ROWS],
}

/// The end of the later token's adjoint step and the beginning of the earlier one's; returns the latter's `du`.
#[inline(always)]
fn step_back<S: Simd>(
    simd: S,
    vectors: &Vectors,
    slot: usize,
    token: Token<'_, S::f64s>,
    d_state: &mut [[S::f64s; ROWS]],
    totals: &mut Sums,
) -> [f64; ROWS] {
    let kp = vectors.kp;
    let (key, query) = (at::<S>(&vectors.key, slot, kp), at::<S>(&vectors.query, slot, kp));
    let (decay, erase) = (at::<S>(&vectors.decay, slot, kp), at::<S>(&vectors.erase, slot, kp));
    let (dq, dk) = (at_mut::<S>(&mut totals.dq, slot, kp), at_mut::<S>(&mut totals.dk, slot, kp));
    let (de, dg) = (at_mut::<S>(&mut totals.de, slot, kp), at_mut::<S>(&mut totals.dg, slot, kp));
    let mut minus_du = splat(simd, token.du);
    for du in &mut minus_du {
        *du = simd.neg_f64s(*du);
    }
    let (u, d_o) = (splat(simd, token.u), splat(simd, token.d_o));
    let mut du = splat(simd, [0.0; ROWS]);
    let vectors = key.iter().zip(query).zip(decay).zip(erase);
    let totals = dq.iter_mut().zip(dk).zip(de).zip(dg);
    let states = d_state.iter_mut().zip(token.later).zip(token.earlier);
    for ((((d, later), earlier), (((&key, &query), &decay), &erase)), (((dq, dk), de), dg)) in
        states.zip(vectors).zip(totals)
    {
        let (mut q, mut k, mut e, mut g) = (*dq, *dk, *de, *dg);
        for r in 0..ROWS {
            let d_decayed = simd.mul_add_e_f64s(erase, minus_du[r], d[r]);
            e = simd.mul_add_e_f64s(later[r], minus_du[r], e);
            g = simd.mul_add_e_f64s(later[r], d_decayed, g);
            d[r] = simd.mul_add_e_f64s(query, d_o[r], simd.mul_f64s(decay, d_decayed));
            q = simd.mul_add_e_f64s(earlier[r], d_o[r], q);
            k = simd.mul_add_e_f64s(d[r], u[r], k);
            du[r] = simd.mul_add_e_f64s(d[r], key, du[r]);
        }
        (*dq, *dk, *de, *dg) = (q, k, e, g);
    }
    sums(simd, du)
}
