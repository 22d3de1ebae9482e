//! The vector loops of the recurrence: what happens to the rows of the transposed state over a segment of tokens.
//!
//! Each loop passes over the rows once per token, and does in that pass all that can be done with a number once it is
//! loaded: the end of one token's step and the beginning of the next one's. Slot `t` of the token vectors therefore
//! pairs the erase vector of token `t` with the key and the query of token `t - 1`; at both ends of the segment the
//! missing partner is one that changes nothing.
//!
//! A pass ends in sums whose result the next pass over the same rows needs at once. So that the core has work while they
//! are formed, the passes of [`GROUPS`] groups of rows alternate.

use super::aligned::Aligned;
use gdnlab_deps::pulp::{Simd, WithSimd};

/// Rows of the transposed state that are taken together: a token's vectors are loaded once for all of them, and as many
/// sums are in flight.
pub(super) const ROWS: usize = 4;

/// Groups of [`ROWS`] rows whose passes alternate.
const GROUPS: usize = 2;

/// The vectors of a segment's tokens, each `[slots][kp]`, in the units `c` of the state.
pub(super) struct Vectors {
    pub kp: usize,
    /// Whether token `t` has other units than the one before: then the state is multiplied by `decay` in slot `t`.
    pub renewed: Vec<bool>,
    pub decay: Aligned,
    /// `c*e` of token `t` in slot `t`; zeros in the slot after the last one.
    pub erase: Aligned,
    /// `k/c` and `s c*q` of token `t` in slot `t + 1`; zeros in slot 0.
    pub key: Aligned,
    pub query: Aligned,
}

impl Vectors {
    pub fn new(kp: usize, slots: usize) -> Self {
        let zeros = || Aligned::zeros(slots * kp);
        Self { kp, renewed: vec![true; slots], decay: zeros(), erase: zeros(), key: zeros(), query: zeros() }
    }
}

/// Where the values of [`ROWS`] rows lie in `[tokens][stride]`.
#[derive(Clone, Copy)]
struct Values {
    first: usize,
    stride: usize,
}

impl Values {
    /// Of group `group` in `[tokens][vp]`.
    #[inline(always)]
    fn new(group: usize, vp: usize) -> Self {
        Self { first: group * ROWS, stride: vp }
    }

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

/// The forward of a segment.
pub(super) struct Forward<'a> {
    pub vectors: &'a Vectors,
    pub tokens: usize,
    /// V, padded.
    pub vp: usize,
    /// `w*v`, `[tokens][vp]`.
    pub write: &'a [f64],
    /// `[groups][kp]` interleaved.
    pub state: &'a mut [f64],
    /// `[tokens][vp]`.
    pub o: &'a mut [f64],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { vectors, tokens, vp, write, state, o } = self;
        let size = vectors.kp * ROWS;
        for (n, groups) in state.chunks_mut(size * GROUPS).enumerate() {
            let mut u = [[0.0; ROWS]; GROUPS];
            for t in 0..=tokens {
                for (g, state) in groups.chunks_exact_mut(size).enumerate() {
                    let values = Values::new(n * GROUPS + g, vp);
                    let (out, read) = if vectors.renewed[t] {
                        step::<S, true>(simd, vectors, t, u[g], rows_mut::<S>(state))
                    } else {
                        step::<S, false>(simd, vectors, t, u[g], rows_mut::<S>(state))
                    };
                    if t > 0 {
                        values.set(o, t - 1, sums(simd, out));
                    }
                    if t < tokens {
                        u[g] = difference(values.get(write, t), sums(simd, read));
                    }
                }
            }
        }
    }
}

/// Writes `u` of the earlier token; returns the terms of its output and of what the later token erases.
#[inline(always)]
fn step<S: Simd, const RENEWED: bool>(
    simd: S,
    vectors: &Vectors,
    slot: usize,
    u: [f64; ROWS],
    state: &mut [[S::f64s; ROWS]],
) -> ([S::f64s; ROWS], [S::f64s; ROWS]) {
    let kp = vectors.kp;
    let (key, query) = (at::<S>(&vectors.key, slot, kp), at::<S>(&vectors.query, slot, kp));
    let (decay, erase) = (at::<S>(&vectors.decay, slot, kp), at::<S>(&vectors.erase, slot, kp));
    let u = splat(simd, u);
    let (mut out, mut read) = (splat(simd, [0.0; ROWS]), splat(simd, [0.0; ROWS]));
    for ((((s, &key), &query), &decay), &erase) in state.iter_mut().zip(key).zip(query).zip(decay).zip(erase) {
        for r in 0..ROWS {
            let after = simd.mul_add_e_f64s(key, u[r], s[r]);
            out[r] = simd.mul_add_e_f64s(after, query, out[r]);
            s[r] = if RENEWED { simd.mul_f64s(decay, after) } else { after };
            read[r] = simd.mul_add_e_f64s(s[r], erase, read[r]);
        }
    }
    (out, read)
}

/// The backward of a segment: the states again, then the adjoint of each token.
pub(super) struct Backward<'a> {
    pub vectors: &'a Vectors,
    pub tokens: usize,
    /// V, padded.
    pub vp: usize,
    /// `w*v` and do, `[tokens][vp]`.
    pub write: &'a [f64],
    pub d_o: &'a [f64],
    /// State before the first token, `[groups][kp]` interleaved.
    pub state: &'a [f64],
    /// Gradient of the state after the last token on entry, before the first on return, `[groups][kp]` interleaved.
    pub d_state: &'a mut [f64],
    pub workspace: &'a mut Workspace,
    pub sums: &'a mut Sums,
    /// `du`, `[tokens][vp]`.
    pub d_write: &'a mut [f64],
}

/// What the backward keeps of the states that it computes again.
pub(super) struct Workspace([Kept; GROUPS]);

/// `Z'`, the state that a token reads, of every second token: the one after is a write away.
struct Kept {
    /// Of tokens 0, 2, ...: `[tokens / 2][kp]` interleaved.
    even: Aligned,
    /// Of the latest of tokens 1, 3, ...
    odd: Aligned,
    /// `u` of token `t` in slot `t + 1`.
    u: Vec<[f64; ROWS]>,
    /// `du` of the latest token on the way back.
    du: [f64; ROWS],
}

/// Gradients of the token vectors in the units of the state, summed over its rows, `[slots][kp]`.
pub(super) struct Sums {
    /// `dZ u` of token `t` in slot `t + 1`.
    pub dk: Aligned,
    /// `Z' do`, `-Z' du` and `Z' * dZ'` of token `t` in slot `t`.
    pub dq: Aligned,
    pub de: Aligned,
    pub dg: Aligned,
    /// `u . do` of token `t` in slot `t + 1`.
    pub u_do: Vec<f64>,
}

impl Workspace {
    pub fn new(kp: usize, tokens: usize) -> Self {
        let kept = || Kept {
            even: Aligned::zeros(tokens.div_ceil(2) * kp * ROWS),
            odd: Aligned::zeros(kp * ROWS),
            u: vec![[0.0; ROWS]; tokens + 1],
            du: [0.0; ROWS],
        };
        Self([kept(), kept()])
    }
}

impl Sums {
    pub fn new(kp: usize, slots: usize) -> Self {
        let zeros = || Aligned::zeros(slots * kp);
        Self { dk: zeros(), dq: zeros(), de: zeros(), dg: zeros(), u_do: vec![0.0; slots] }
    }

    pub fn clear(&mut self) {
        self.dk.fill(0.0);
        self.dq.fill(0.0);
        self.de.fill(0.0);
        self.dg.fill(0.0);
        self.u_do.fill(0.0);
    }
}

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let groups = self.vp / ROWS;
        for first in (0..groups).step_by(GROUPS) {
            let groups = first..groups.min(first + GROUPS);
            for t in 0..self.tokens {
                for group in groups.clone() {
                    self.state_again(simd, group, t);
                }
            }
            for slot in (0..=self.tokens).rev() {
                for group in groups.clone() {
                    self.adjoint(simd, group, slot);
                }
            }
        }
    }
}

impl Backward<'_> {
    /// `Z'` and `u` of token `t`.
    #[inline(always)]
    fn state_again<S: Simd>(&mut self, simd: S, group: usize, t: usize) {
        let size = self.vectors.kp * ROWS;
        let Kept { even, odd, u, .. } = &mut self.workspace.0[group % GROUPS];
        let even = &mut even[t / 2 * size..][..size];
        let (before, after) = match t {
            0 => (&self.state[group * size..][..size], even),
            _ if t.is_multiple_of(2) => (&**odd, even),
            _ => (&*even, &mut **odd),
        };
        let (before, after) = (rows::<S>(before), rows_mut::<S>(after));
        let read = if self.vectors.renewed[t] {
            step_again::<S, true>(simd, self.vectors, t, u[t], before, after)
        } else {
            step_again::<S, false>(simd, self.vectors, t, u[t], before, after)
        };
        u[t + 1] = difference(Values::new(group, self.vp).get(self.write, t), sums(simd, read));
    }

    /// The end of the step back over token `slot`, and the beginning of the one over the token before.
    #[inline(always)]
    fn adjoint<S: Simd>(&mut self, simd: S, group: usize, slot: usize) {
        let size = self.vectors.kp * ROWS;
        let values = Values::new(group, self.vp);
        let kept = &mut self.workspace.0[group % GROUPS];
        let none = [0.0; ROWS];
        // Behind the last token any state will do, since nothing is read there.
        let (t, is_token) = (slot.min(self.tokens - 1), slot < self.tokens);
        let token = Token {
            even: rows::<S>(&kept.even[t / 2 * size..][..size]),
            d_o: if is_token { values.get(self.d_o, slot) } else { none },
            du: if is_token { kept.du } else { none },
            d_o_before: if slot > 0 { values.get(self.d_o, slot - 1) } else { none },
            u_before: kept.u[slot],
        };
        for r in 0..ROWS {
            self.sums.u_do[slot] += token.u_before[r] * token.d_o_before[r];
        }
        let (vectors, totals) = (self.vectors, &mut *self.sums);
        let d_state = rows_mut::<S>(&mut self.d_state[group * size..][..size]);
        let du = match (vectors.renewed[slot], t % 2 == 1) {
            (false, false) => step_back::<S, false, false>(simd, vectors, slot, token, d_state, totals),
            (false, true) => step_back::<S, false, true>(simd, vectors, slot, token, d_state, totals),
            (true, false) => step_back::<S, true, false>(simd, vectors, slot, token, d_state, totals),
            (true, true) => step_back::<S, true, true>(simd, vectors, slot, token, d_state, totals),
        };
        kept.du = sums(simd, du);
        if slot > 0 {
            values.set(self.d_write, slot - 1, kept.du);
        }
    }
}

/// [`step`] from one place to another, without the output.
#[inline(always)]
fn step_again<S: Simd, const RENEWED: bool>(
    simd: S,
    vectors: &Vectors,
    slot: usize,
    u: [f64; ROWS],
    before: &[[S::f64s; ROWS]],
    after: &mut [[S::f64s; ROWS]],
) -> [S::f64s; ROWS] {
    let kp = vectors.kp;
    let key = at::<S>(&vectors.key, slot, kp);
    let (decay, erase) = (at::<S>(&vectors.decay, slot, kp), at::<S>(&vectors.erase, slot, kp));
    let u = splat(simd, u);
    let mut read = splat(simd, [0.0; ROWS]);
    for ((((after, before), &key), &decay), &erase) in after.iter_mut().zip(before).zip(key).zip(decay).zip(erase) {
        for r in 0..ROWS {
            after[r] = write::<S, RENEWED>(simd, key, u[r], decay, before[r]);
            read[r] = simd.mul_add_e_f64s(after[r], erase, read[r]);
        }
    }
    read
}

/// What one token writes to a state, in the units of the next.
#[inline(always)]
fn write<S: Simd, const RENEWED: bool>(simd: S, key: S::f64s, u: S::f64s, decay: S::f64s, state: S::f64s) -> S::f64s {
    let after = simd.mul_add_e_f64s(key, u, state);
    if RENEWED { simd.mul_f64s(decay, after) } else { after }
}

/// What belongs to the rows, at the turn from one token to the one before.
struct Token<'a, V> {
    /// `Z'` of the later token, or where that is an odd one, of the earlier.
    even: &'a [[V; ROWS]],
    /// do and `du` of the later token.
    d_o: [f64; ROWS],
    du: [f64; ROWS],
    /// do and `u` of the earlier token.
    d_o_before: [f64; ROWS],
    u_before: [f64; ROWS],
}

/// The end of the later token's adjoint step and the beginning of the earlier one's; returns the terms of the latter's
/// `du`.
#[inline(always)]
fn step_back<S: Simd, const RENEWED: bool, const ODD: bool>(
    simd: S,
    vectors: &Vectors,
    slot: usize,
    token: Token<'_, S::f64s>,
    d_state: &mut [[S::f64s; ROWS]],
    totals: &mut Sums,
) -> [S::f64s; ROWS] {
    let kp = vectors.kp;
    let (key, query) = (at::<S>(&vectors.key, slot, kp), at::<S>(&vectors.query, slot, kp));
    let (decay, erase) = (at::<S>(&vectors.decay, slot, kp), at::<S>(&vectors.erase, slot, kp));
    let (dk, dq) = (at_mut::<S>(&mut totals.dk, slot, kp), at_mut::<S>(&mut totals.dq, slot, kp));
    let (de, dg) = (at_mut::<S>(&mut totals.de, slot, kp), at_mut::<S>(&mut totals.dg, slot, kp));
    let mut minus_du = splat(simd, token.du);
    for du in &mut minus_du {
        *du = simd.neg_f64s(*du);
    }
    let (d_o, d_o_before, u) = (splat(simd, token.d_o), splat(simd, token.d_o_before), splat(simd, token.u_before));
    let mut du = splat(simd, [0.0; ROWS]);
    let vectors = key.iter().zip(query).zip(decay).zip(erase);
    let totals = dk.iter_mut().zip(dq).zip(de).zip(dg);
    for (((d, even), (((&key, &query), &decay), &erase)), (((dk, dq), de), dg)) in
        d_state.iter_mut().zip(token.even).zip(vectors).zip(totals)
    {
        let (mut k, mut q, mut e, mut g) = (*dk, *dq, *de, *dg);
        for r in 0..ROWS {
            let state = if ODD { write::<S, RENEWED>(simd, key, u[r], decay, even[r]) } else { even[r] };
            let d_read = simd.mul_add_e_f64s(erase, minus_du[r], d[r]);
            q = simd.mul_add_e_f64s(state, d_o[r], q);
            e = simd.mul_add_e_f64s(state, minus_du[r], e);
            g = simd.mul_add_e_f64s(state, d_read, g);
            let d_written = if RENEWED { simd.mul_f64s(decay, d_read) } else { d_read };
            d[r] = simd.mul_add_e_f64s(query, d_o_before[r], d_written);
            k = simd.mul_add_e_f64s(d[r], u[r], k);
            du[r] = simd.mul_add_e_f64s(d[r], key, du[r]);
        }
        (*dk, *dq, *de, *dg) = (k, q, e, g);
    }
    du
}
