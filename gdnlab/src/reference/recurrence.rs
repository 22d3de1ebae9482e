//! The gated delta rule, token by token in float64.
//!
//! Per head, with `S` in R^{K x V} (GDN is the case `g` scalar, `b = w = beta`):
//!
//! ```text
//! S_t = (I - k_t (b_t*k_t)^T) Diag(e^{g_t}) S_{t-1} + k_t (w_t*v_t)^T        o_t = s S_t^T q_t
//! ```
//!
//! The backward is the adjoint of exactly these steps. With `S' = Diag(e^g) S_{t-1}`, `e = b*k`,
//! `u = w*v - S'^T e`, and `dS` the gradient of `S_t`:
//!
//! ```text
//! dS += s q do^T        dq = s S_t do        du = dS^T k        dk += dS u
//! dS' = dS - e du^T     de = -S' du          dg = sum_v S'*dS'  dS_{t-1} = Diag(e^g) dS'
//! d(w*v) = du           db = k*de            dk += b*de
//! ```
//!
//! Layout: the state is kept transposed, `[V][K]`, because its V rows never mix: each row is a recurrence of its own
//! on a vector of K numbers that stays in the first-level cache, and the long axis of every sum over K is contiguous.
//! Rows are taken four at a time, so that four sums are in flight and the token's vectors are loaded once for four
//! rows. The backward keeps a state every [`SEGMENT`] tokens and recomputes the ones between.

use crate::heads::{Head, HeadGateGrads, HeadGrads, HeadOutputs};
use crate::problem::Op;
use gdnlab_deps::pulp::{Arch, Simd, WithSimd};

/// Tokens between two kept states of the backward, and the tokens whose vectors are prepared together.
pub const SEGMENT: usize = 64;

/// Rows of the transposed state that are taken together.
const ROWS: usize = 4;

/// K is padded with zeros to a multiple of this, the widest vector of float64 there is.
const LANES: usize = 8;

/// The vectors of up to [`SEGMENT`] tokens of one head, each padded to `kp`.
struct Segment {
    kp: usize,
    vp: usize,
    tokens: usize,
    /// `e^g`, `b*k`, `k`, `s q`: `[tokens][kp]`.
    decay: Vec<f64>,
    erase: Vec<f64>,
    key: Vec<f64>,
    query: Vec<f64>,
    /// `w*v` and do: `[tokens][vp]`.
    write: Vec<f64>,
    d_o: Vec<f64>,
}

impl Segment {
    fn new(kp: usize, vp: usize) -> Self {
        let (k, v) = (vec![0.0; SEGMENT * kp], vec![0.0; SEGMENT * vp]);
        Self {
            kp,
            vp,
            tokens: 0,
            decay: k.clone(),
            erase: k.clone(),
            key: k.clone(),
            query: k,
            write: v.clone(),
            d_o: v,
        }
    }

    /// Prepares the tokens from `first` on.
    fn load(&mut self, head: &Head<'_>, first: usize) {
        self.tokens = SEGMENT.min(head.tokens() - first);
        for t in 0..self.tokens {
            let (at_k, at_v) = (t * self.kp, t * self.vp);
            let (q, k, v) = (head.q(first + t), head.k(first + t), head.v(first + t));
            let (g, b, w) = (head.log_decay(first + t), head.erase(first + t), head.write(first + t));
            let of = |gate: &[f64], i: usize| if head.op() == Op::Gdn { gate[0] } else { gate[i] };
            match head.op() {
                Op::Gdn => self.decay[at_k..at_k + k.len()].fill(g[0].exp()),
                Op::Gdn2 => self.decay[at_k..].iter_mut().zip(g).for_each(|(d, g)| *d = g.exp()),
            }
            self.erase[at_k..].iter_mut().zip(k).enumerate().for_each(|(i, (e, k))| *e = of(b, i) * k);
            self.write[at_v..].iter_mut().zip(v).enumerate().for_each(|(i, (x, v))| *x = of(w, i) * v);
            self.key[at_k..at_k + k.len()].copy_from_slice(k);
            self.query[at_k..].iter_mut().zip(q).for_each(|(x, q)| *x = head.scale() * q);
            if let Some(d_o) = head.d_o(first + t) {
                self.d_o[at_v..at_v + d_o.len()].copy_from_slice(d_o);
            }
        }
    }
}

/// A `[K, V]` state transposed into `[vp][kp]`, padded with zeros.
fn transpose_in(state: Option<&[f64]>, head: &Head<'_>, kp: usize, vp: usize) -> Vec<f64> {
    let mut transposed = vec![0.0; vp * kp];
    if let Some(state) = state {
        for (k, row) in state.chunks_exact(head.value_dim()).enumerate() {
            row.iter().enumerate().for_each(|(v, x)| transposed[v * kp + k] = *x);
        }
    }
    transposed
}

fn transpose_out(transposed: &[f64], kp: usize, value_dim: usize, state: &mut [f64]) {
    for (k, row) in state.chunks_exact_mut(value_dim).enumerate() {
        row.iter_mut().enumerate().for_each(|(v, x)| *x = transposed[v * kp + k]);
    }
}

/// Forward, and with `grads` the backward, of one head.
pub(crate) fn run_head(head: &Head<'_>, mut out: HeadOutputs<'_>, grads: Option<HeadGrads<'_, '_>>) {
    let arch = Arch::new();
    let (kp, vp) = (head.key_dim().next_multiple_of(LANES), head.value_dim().next_multiple_of(ROWS));
    let mut segment = Segment::new(kp, vp);
    let mut state = transpose_in(head.initial_state(), head, kp, vp);
    let mut kept = Vec::new();
    let mut o = vec![0.0; SEGMENT * vp];
    for first in (0..head.tokens()).step_by(SEGMENT) {
        if grads.is_some() {
            kept.push(state.clone());
        }
        segment.load(head, first);
        arch.dispatch(Forward { segment: &segment, state: &mut state, o: &mut o });
        for (row, o) in out.o[first..].iter_mut().zip(o.chunks_exact(vp)).take(segment.tokens) {
            row.copy_from_slice(&o[..row.len()]);
        }
    }
    transpose_out(&state, kp, head.value_dim(), out.final_state);
    if let Some(grads) = grads {
        backward_head(head, arch, segment, kept, grads);
    }
}

fn backward_head(
    head: &Head<'_>,
    arch: Arch,
    mut segment: Segment,
    mut kept: Vec<Vec<f64>>,
    mut grads: HeadGrads<'_, '_>,
) {
    let (kp, vp) = (segment.kp, segment.vp);
    let mut adjoint = Adjoint::new(kp, vp);
    let mut d_state = transpose_in(head.d_final_state(), head, kp, vp);
    while let Some(state) = kept.pop() {
        let first = kept.len() * SEGMENT;
        segment.load(head, first);
        adjoint.clear();
        arch.dispatch(Backward { segment: &segment, state: &state, d_state: &mut d_state, adjoint: &mut adjoint });
        adjoint.store(head, first, segment.tokens, &mut grads);
    }
    transpose_out(&d_state, kp, head.value_dim(), grads.dh0);
}

/// Gradients of one segment's vectors, and the states that its backward recomputes.
struct Adjoint {
    kp: usize,
    vp: usize,
    /// Gradients of `q`, `k` (through the write), `e`, `g`: `[SEGMENT][kp]`.
    dq: Vec<f64>,
    dk: Vec<f64>,
    de: Vec<f64>,
    dg: Vec<f64>,
    /// Gradient of `w*v`: `[SEGMENT][vp]`.
    d_write: Vec<f64>,
    /// `S'` and `u` of [`ROWS`] rows: `[SEGMENT][ROWS][kp]` and `[SEGMENT][ROWS]`.
    states: Vec<f64>,
    u: Vec<[f64; ROWS]>,
}

impl Adjoint {
    fn new(kp: usize, vp: usize) -> Self {
        let k = vec![0.0; SEGMENT * kp];
        Self {
            kp,
            vp,
            dq: k.clone(),
            dk: k.clone(),
            de: k.clone(),
            dg: k,
            d_write: vec![0.0; SEGMENT * vp],
            states: vec![0.0; SEGMENT * ROWS * kp],
            u: vec![[0.0; ROWS]; SEGMENT],
        }
    }

    fn clear(&mut self) {
        [&mut self.dq, &mut self.dk, &mut self.de, &mut self.dg].into_iter().for_each(|x| x.fill(0.0));
    }

    /// Turns the gradients of the prepared vectors into those of the inputs.
    fn store(&self, head: &Head<'_>, first: usize, tokens: usize, grads: &mut HeadGrads<'_, '_>) {
        for t in 0..tokens {
            let (at_k, at_v) = (t * self.kp, t * self.vp);
            let (k, v) = (head.k(first + t), head.v(first + t));
            let (b, w) = (head.erase(first + t), head.write(first + t));
            let (de, d_write) = (&self.de[at_k..at_k + k.len()], &self.d_write[at_v..at_v + v.len()]);
            let dg = &self.dg[at_k..at_k + k.len()];
            let of = |gate: &[f64], i: usize| if head.op() == Op::Gdn { gate[0] } else { gate[i] };
            for (i, x) in grads.dq[first + t].iter_mut().enumerate() {
                *x += head.scale() * self.dq[at_k + i];
            }
            for (i, x) in grads.dk[first + t].iter_mut().enumerate() {
                *x += self.dk[at_k + i] + of(b, i) * de[i];
            }
            for (i, x) in grads.dv[first + t].iter_mut().enumerate() {
                *x = of(w, i) * d_write[i];
            }
            match head.op() {
                Op::Gdn => grads.dg[first + t][0] = dg.iter().sum(),
                Op::Gdn2 => grads.dg[first + t].copy_from_slice(dg),
            }
            match &mut grads.gates {
                HeadGateGrads::Gdn { dbeta } => dbeta[first + t][0] = dot(k, de) + dot(v, d_write),
                HeadGateGrads::Gdn2 { db, dw } => {
                    db[first + t].iter_mut().zip(k.iter().zip(de)).for_each(|(x, (k, de))| *x = k * de);
                    dw[first + t].iter_mut().zip(v.iter().zip(d_write)).for_each(|(x, (v, d))| *x = v * d);
                }
            }
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// [`ROWS`] consecutive rows of `kp` numbers each, as vectors.
fn rows<S: Simd>(block: &[f64], kp: usize) -> [&[S::f64s]; ROWS] {
    let mut rest = block.chunks_exact(kp);
    std::array::from_fn(|_| S::as_simd_f64s(rest.next().unwrap_or_default()).0)
}

fn rows_mut<S: Simd>(block: &mut [f64], kp: usize) -> [&mut [S::f64s]; ROWS] {
    let mut rest = block.chunks_exact_mut(kp);
    std::array::from_fn(|_| S::as_mut_simd_f64s(rest.next().unwrap_or_default()).0)
}

fn token<S: Simd>(data: &[f64], t: usize, kp: usize) -> &[S::f64s] {
    S::as_simd_f64s(&data[t * kp..(t + 1) * kp]).0
}

fn token_mut<S: Simd>(data: &mut [f64], t: usize, kp: usize) -> &mut [S::f64s] {
    S::as_mut_simd_f64s(&mut data[t * kp..(t + 1) * kp]).0
}

/// `S = Diag(e^g) S` in place; returns `S^T e` of each row.
#[inline(always)]
fn decay_and_read<S: Simd>(
    simd: S,
    state: [&mut [S::f64s]; ROWS],
    decay: &[S::f64s],
    erase: &[S::f64s],
) -> [f64; ROWS] {
    let n = decay.len();
    let [s0, s1, s2, s3] = state.map(|row| &mut row[..n]);
    let mut read = [simd.splat_f64s(0.0); ROWS];
    for (i, (&decay, &erase)) in decay.iter().zip(&erase[..n]).enumerate() {
        for (s, read) in [&mut s0[i], &mut s1[i], &mut s2[i], &mut s3[i]].into_iter().zip(&mut read) {
            *s = simd.mul_f64s(decay, *s);
            *read = simd.mul_add_e_f64s(*s, erase, *read);
        }
    }
    read.map(|read| simd.reduce_sum_f64s(read))
}

/// `S += k u^T` in place; returns `S^T (s q)` of each row.
#[inline(always)]
fn write_and_query<S: Simd>(
    simd: S,
    state: [&mut [S::f64s]; ROWS],
    key: &[S::f64s],
    query: &[S::f64s],
    u: [f64; ROWS],
) -> [f64; ROWS] {
    let n = key.len();
    let u = u.map(|u| simd.splat_f64s(u));
    let [s0, s1, s2, s3] = state.map(|row| &mut row[..n]);
    let mut out = [simd.splat_f64s(0.0); ROWS];
    for (i, (&key, &query)) in key.iter().zip(&query[..n]).enumerate() {
        for (r, s) in [&mut s0[i], &mut s1[i], &mut s2[i], &mut s3[i]].into_iter().enumerate() {
            *s = simd.mul_add_e_f64s(key, u[r], *s);
            out[r] = simd.mul_add_e_f64s(*s, query, out[r]);
        }
    }
    out.map(|out| simd.reduce_sum_f64s(out))
}

/// [`write_and_query`] of one token and [`decay_and_read`] of the next, with one pass over the state.
#[inline(always)]
fn write_and_go_on<S: Simd>(
    simd: S,
    state: [&mut [S::f64s]; ROWS],
    (key, query): (&[S::f64s], &[S::f64s]),
    (decay, erase): (&[S::f64s], &[S::f64s]),
    u: [f64; ROWS],
) -> ([f64; ROWS], [f64; ROWS]) {
    let n = key.len();
    let u = u.map(|u| simd.splat_f64s(u));
    let [s0, s1, s2, s3] = state.map(|row| &mut row[..n]);
    let (query, decay, erase) = (&query[..n], &decay[..n], &erase[..n]);
    let (mut out, mut read) = ([simd.splat_f64s(0.0); ROWS], [simd.splat_f64s(0.0); ROWS]);
    for (i, &key) in key.iter().enumerate() {
        for (r, s) in [&mut s0[i], &mut s1[i], &mut s2[i], &mut s3[i]].into_iter().enumerate() {
            let written = simd.mul_add_e_f64s(key, u[r], *s);
            out[r] = simd.mul_add_e_f64s(written, query[i], out[r]);
            *s = simd.mul_f64s(decay[i], written);
            read[r] = simd.mul_add_e_f64s(*s, erase[i], read[r]);
        }
    }
    (out.map(|out| simd.reduce_sum_f64s(out)), read.map(|read| simd.reduce_sum_f64s(read)))
}

/// One segment of the forward.
struct Forward<'a> {
    segment: &'a Segment,
    /// `[vp][kp]`.
    state: &'a mut [f64],
    /// `[SEGMENT][vp]`.
    o: &'a mut [f64],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { segment, state, o } = self;
        let (kp, vp, last) = (segment.kp, segment.vp, segment.tokens - 1);
        let vectors = |data, t| token::<S>(data, t, kp);
        for v in (0..vp).step_by(ROWS) {
            let block = &mut state[v * kp..(v + ROWS) * kp];
            let written =
                |t: usize, read: [f64; ROWS]| std::array::from_fn(|r| segment.write[t * vp + v + r] - read[r]);
            let mut read =
                decay_and_read(simd, rows_mut::<S>(block, kp), vectors(&segment.decay, 0), vectors(&segment.erase, 0));
            for t in 0..last {
                let this = (vectors(&segment.key, t), vectors(&segment.query, t));
                let next = (vectors(&segment.decay, t + 1), vectors(&segment.erase, t + 1));
                let (out, next_read) = write_and_go_on(simd, rows_mut::<S>(block, kp), this, next, written(t, read));
                o[t * vp + v..t * vp + v + ROWS].copy_from_slice(&out);
                read = next_read;
            }
            let (key, query) = (vectors(&segment.key, last), vectors(&segment.query, last));
            let out = write_and_query(simd, rows_mut::<S>(block, kp), key, query, written(last, read));
            o[last * vp + v..last * vp + v + ROWS].copy_from_slice(&out);
        }
    }
}

/// One segment of the backward.
struct Backward<'a> {
    segment: &'a Segment,
    /// State before the segment's first token, `[vp][kp]`.
    state: &'a [f64],
    /// Gradient of the state after its last token on entry, before its first on return, `[vp][kp]`.
    d_state: &'a mut [f64],
    adjoint: &'a mut Adjoint,
}

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { segment, state, d_state, adjoint } = self;
        let kp = segment.kp;
        for v in (0..segment.vp).step_by(ROWS) {
            let block = v * kp..(v + ROWS) * kp;
            recompute(simd, segment, &state[block.clone()], v, adjoint);
            for t in (0..segment.tokens).rev() {
                step_back(simd, segment, &mut d_state[block.clone()], v, t, adjoint);
            }
        }
    }
}

/// Fills `adjoint.states` and `adjoint.u` for the rows from `v` on.
#[inline(always)]
fn recompute<S: Simd>(simd: S, segment: &Segment, state: &[f64], v: usize, adjoint: &mut Adjoint) {
    let (kp, vp) = (segment.kp, segment.vp);
    let mut now = state.to_vec();
    for t in 0..segment.tokens {
        let (decay, erase) = (token::<S>(&segment.decay, t, kp), token::<S>(&segment.erase, t, kp));
        let read = decay_and_read(simd, rows_mut::<S>(&mut now, kp), decay, erase);
        adjoint.states[t * ROWS * kp..(t + 1) * ROWS * kp].copy_from_slice(&now);
        let u: [f64; ROWS] = std::array::from_fn(|r| segment.write[t * vp + v + r] - read[r]);
        adjoint.u[t] = u;
        let key = token::<S>(&segment.key, t, kp);
        for (row, u) in rows_mut::<S>(&mut now, kp).into_iter().zip(u) {
            let u = simd.splat_f64s(u);
            row.iter_mut().zip(key).for_each(|(s, &key)| *s = simd.mul_add_e_f64s(key, u, *s));
        }
    }
}

/// The adjoint of one token for the rows from `v` on.
#[inline(always)]
fn step_back<S: Simd>(simd: S, segment: &Segment, d_state: &mut [f64], v: usize, t: usize, adjoint: &mut Adjoint) {
    let (kp, vp) = (segment.kp, segment.vp);
    let u: [S::f64s; ROWS] = adjoint.u[t].map(|u| simd.splat_f64s(u));
    let d_o: [S::f64s; ROWS] = std::array::from_fn(|r| simd.splat_f64s(segment.d_o[t * vp + v + r]));
    let states = rows::<S>(&adjoint.states[t * ROWS * kp..(t + 1) * ROWS * kp], kp);
    let (key, query) = (token::<S>(&segment.key, t, kp), token::<S>(&segment.query, t, kp));
    let n = key.len();
    let [s0, s1, s2, s3] = states.map(|row| &row[..n]);

    let [d0, d1, d2, d3] = rows_mut::<S>(d_state, kp).map(|row| &mut row[..n]);
    let dq = &mut token_mut::<S>(&mut adjoint.dq, t, kp)[..n];
    let dk = &mut token_mut::<S>(&mut adjoint.dk, t, kp)[..n];
    let mut du = [simd.splat_f64s(0.0); ROWS];
    for (i, (&key, &query)) in key.iter().zip(&query[..n]).enumerate() {
        let (mut q, mut k) = (dq[i], dk[i]);
        for (r, (d, s)) in
            [&mut d0[i], &mut d1[i], &mut d2[i], &mut d3[i]].into_iter().zip([s0[i], s1[i], s2[i], s3[i]]).enumerate()
        {
            *d = simd.mul_add_e_f64s(query, d_o[r], *d);
            q = simd.mul_add_e_f64s(simd.mul_add_e_f64s(key, u[r], s), d_o[r], q);
            k = simd.mul_add_e_f64s(*d, u[r], k);
            du[r] = simd.mul_add_e_f64s(*d, key, du[r]);
        }
        (dq[i], dk[i]) = (q, k);
    }
    let du = du.map(|du| simd.reduce_sum_f64s(du));
    adjoint.d_write[t * vp + v..t * vp + v + ROWS].copy_from_slice(&du);

    let du = du.map(|du| simd.splat_f64s(-du));
    let (decay, erase) = (token::<S>(&segment.decay, t, kp), token::<S>(&segment.erase, t, kp));
    let de = &mut token_mut::<S>(&mut adjoint.de, t, kp)[..n];
    let dg = &mut token_mut::<S>(&mut adjoint.dg, t, kp)[..n];
    for (i, (&decay, &erase)) in decay.iter().zip(&erase[..n]).enumerate() {
        let (mut e, mut g) = (de[i], dg[i]);
        for (r, (d, s)) in
            [&mut d0[i], &mut d1[i], &mut d2[i], &mut d3[i]].into_iter().zip([s0[i], s1[i], s2[i], s3[i]]).enumerate()
        {
            let d_decayed = simd.mul_add_e_f64s(erase, du[r], *d);
            e = simd.mul_add_e_f64s(s, du[r], e);
            g = simd.mul_add_e_f64s(s, d_decayed, g);
            *d = simd.mul_f64s(decay, d_decayed);
        }
        (de[i], dg[i]) = (e, g);
    }
}
