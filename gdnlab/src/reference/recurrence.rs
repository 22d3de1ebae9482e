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
//! dS += s q do^T        dq = s (S' do + k (u . do))         du = dS^T k        dk += dS u
//! dS' = dS - e du^T     de = -S' du          dg = sum_v S'*dS'  dS_{t-1} = Diag(e^g) dS'
//! d(w*v) = du           db = k*de            dk += b*de
//! ```
//!
//! Layout: the state is kept transposed, because its V rows never mix: each is a recurrence of its own on a vector of
//! K numbers that stays in the first-level cache. Rows are taken [`ROWS`] at a time, their vectors interleaved
//! ([`Layout`]). The backward keeps a state every [`SEGMENT`] tokens and recomputes the ones between.
//!
//! Work per token and number of the state, in vector operations on one unit (a product or a multiply-add counts one), and
//! in numbers moved; the vectors of a token count a quarter, since they serve four rows:
//!
//! | | operations | L1 loads | L1 stores | L2 loads and stores |
//! |---|---|---|---|---|
//! | forward | 4 | 1 + 4/4 | 1 | 4/4 |
//! | states again | 3 | 1 + 3/4 | 1 | 1 + 3/4 |
//! | adjoint | 8 | 3 + 8/4 | 1 + 4/4 | 1 + 12/4 |
//!
//! The backward of a segment writes its states and reads them again from the second level, where the token vectors and
//! their gradients stay too. `benches/cpu` measures how near this comes to the rates of the core.

use super::aligned::{Aligned, LINE};
use super::sweep::{Backward, Forward, ROWS, Sums, Values, Vectors, Workspace};
use crate::heads::{Head, HeadGateGrads, HeadGrads, HeadOutputs};
use crate::problem::Op;
use gdnlab_deps::pulp::{Arch, Simd, WithSimd};

/// Tokens between two kept states of the backward, and the tokens whose vectors are prepared together.
pub const SEGMENT: usize = 64;

/// Where the numbers of a state lie: `[vp / ROWS][kp / lanes][ROWS][lanes]`.
#[derive(Clone, Copy)]
struct Layout {
    /// Numbers in a vector of this machine.
    lanes: usize,
    /// K, padded with zeros to whole cache lines.
    kp: usize,
    /// V, padded with zeros to a multiple of [`ROWS`].
    vp: usize,
}

/// The numbers in a vector.
struct Lanes;

impl WithSimd for Lanes {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        S::F64_LANES
    }
}

impl Layout {
    fn new(head: &Head<'_>, arch: Arch) -> Self {
        let (kp, vp) = (head.key_dim().next_multiple_of(LINE), head.value_dim().next_multiple_of(ROWS));
        Self { lanes: arch.dispatch(Lanes), kp, vp }
    }

    fn groups(self) -> usize {
        self.vp / ROWS
    }

    /// Where the rows of group `group` lie.
    fn group(self, group: usize) -> std::ops::Range<usize> {
        let size = self.kp * ROWS;
        group * size..(group + 1) * size
    }

    /// Where the values of group `group` lie in `[tokens][vp]`.
    fn values(self, group: usize) -> Values {
        Values { first: group * ROWS, stride: self.vp }
    }

    fn index(self, k: usize, v: usize) -> usize {
        let vector = v / ROWS * (self.kp / self.lanes) + k / self.lanes;
        (vector * ROWS + v % ROWS) * self.lanes + k % self.lanes
    }

    /// A `[K, V]` state, zeros where there is none, in this layout.
    fn load(self, state: Option<&[f64]>, head: &Head<'_>) -> Aligned {
        let mut loaded = Aligned::zeros(self.kp * self.vp);
        for (at, x) in state.unwrap_or_default().iter().enumerate() {
            loaded[self.index(at / head.value_dim(), at % head.value_dim())] = *x;
        }
        loaded
    }

    fn store(self, loaded: &[f64], head: &Head<'_>, state: &mut [f64]) {
        for (at, x) in state.iter_mut().enumerate() {
            *x = loaded[self.index(at / head.value_dim(), at % head.value_dim())];
        }
    }
}

/// Up to [`SEGMENT`] tokens of one head, prepared.
struct Segment {
    tokens: usize,
    vectors: Vectors,
    /// `w*v` and do: `[SEGMENT][vp]`.
    write: Vec<f64>,
    d_o: Vec<f64>,
}

impl Segment {
    fn new(layout: Layout) -> Self {
        let values = vec![0.0; SEGMENT * layout.vp];
        Self { tokens: 0, vectors: Vectors::new(layout.kp, SEGMENT + 1), write: values.clone(), d_o: values }
    }

    /// Prepares the tokens from `first` on.
    fn load(&mut self, head: &Head<'_>, first: usize) {
        self.tokens = SEGMENT.min(head.tokens() - first);
        let vp = self.write.len() / SEGMENT;
        for t in 0..self.tokens {
            self.load_vectors(head, t, first + t);
            gated(head.write(first + t), head.v(first + t), &mut self.write[t * vp..]);
            let d_o = head.d_o(first + t).unwrap_or_default();
            self.d_o[t * vp..t * vp + d_o.len()].copy_from_slice(d_o);
        }
        let Vectors { kp, decay, erase, .. } = &mut self.vectors;
        let end = self.tokens * *kp..(self.tokens + 1) * *kp;
        decay[end.clone()].fill(1.0);
        erase[end].fill(0.0);
    }

    fn load_vectors(&mut self, head: &Head<'_>, t: usize, token: usize) {
        let (q, k, g) = (head.q(token), head.k(token), head.log_decay(token));
        let Vectors { kp, decay, erase, key, query } = &mut self.vectors;
        let (at, next) = (t * *kp, (t + 1) * *kp);
        // Beyond K the decay of an earlier segment's end must not stay.
        decay[at + k.len()..next].fill(0.0);
        let decay = &mut decay[at..at + k.len()];
        match head.op() {
            Op::Gdn => decay.fill(g[0].exp()),
            Op::Gdn2 => decay.iter_mut().zip(g).for_each(|(decay, g)| *decay = g.exp()),
        }
        gated(head.erase(token), k, &mut erase[at..at + k.len()]);
        key[next..next + k.len()].copy_from_slice(k);
        query[next..next + k.len()].iter_mut().zip(q).for_each(|(query, q)| *query = head.scale() * q);
    }
}

/// `gate * x`, the gate scalar or per channel.
fn gated(gate: &[f64], x: &[f64], out: &mut [f64]) {
    match gate {
        [gate] => out.iter_mut().zip(x).for_each(|(out, x)| *out = gate * x),
        _ => out.iter_mut().zip(gate.iter().zip(x)).for_each(|(out, (gate, x))| *out = gate * x),
    }
}

/// Forward, and with `grads` the backward, of one head, with the widest vectors of this machine.
pub(crate) fn run_head(head: &Head<'_>, out: HeadOutputs<'_>, grads: Option<HeadGrads<'_, '_>>) {
    run_head_on(Arch::new(), head, out, grads);
}

fn run_head_on(arch: Arch, head: &Head<'_>, mut out: HeadOutputs<'_>, grads: Option<HeadGrads<'_, '_>>) {
    let layout = Layout::new(head, arch);
    let mut segment = Segment::new(layout);
    let mut state = layout.load(head.initial_state(), head);
    let mut kept = Vec::with_capacity(if grads.is_some() { head.tokens().div_ceil(SEGMENT) * state.len() } else { 0 });
    let mut o = vec![0.0; SEGMENT * layout.vp];
    for first in (0..head.tokens()).step_by(SEGMENT) {
        if grads.is_some() {
            kept.extend_from_slice(&state);
        }
        segment.load(head, first);
        for group in 0..layout.groups() {
            arch.dispatch(Forward {
                vectors: &segment.vectors,
                tokens: segment.tokens,
                values: layout.values(group),
                write: &segment.write,
                state: &mut state[layout.group(group)],
                o: &mut o,
            });
        }
        for (row, o) in out.o[first..].iter_mut().zip(o.chunks_exact(layout.vp)).take(segment.tokens) {
            row.copy_from_slice(&o[..row.len()]);
        }
    }
    layout.store(&state, head, out.final_state);
    if let Some(grads) = grads {
        backward_head(head, arch, layout, segment, &kept, grads);
    }
}

fn backward_head(
    head: &Head<'_>,
    arch: Arch,
    layout: Layout,
    mut segment: Segment,
    kept: &[f64],
    mut grads: HeadGrads<'_, '_>,
) {
    let mut adjoint = Adjoint::new(layout);
    let mut d_state = layout.load(head.d_final_state(), head);
    for (n, state) in kept.chunks_exact(d_state.len()).enumerate().rev() {
        let first = n * SEGMENT;
        segment.load(head, first);
        adjoint.run(arch, layout, &segment, state, &mut d_state);
        adjoint.store(head, first, segment.tokens, &mut grads);
    }
    layout.store(&d_state, head, grads.dh0);
}

/// Gradients of one segment's vectors.
struct Adjoint {
    kp: usize,
    sums: Sums,
    workspace: Workspace,
    vp: usize,
    /// Gradient of `w*v`: `[SEGMENT][vp]`.
    d_write: Vec<f64>,
}

impl Adjoint {
    fn new(layout: Layout) -> Self {
        Self {
            kp: layout.kp,
            sums: Sums::new(layout.kp, SEGMENT + 1),
            workspace: Workspace::new(layout.kp, SEGMENT),
            vp: layout.vp,
            d_write: vec![0.0; SEGMENT * layout.vp],
        }
    }

    /// The adjoint of a segment that begins with `state`.
    fn run(&mut self, arch: Arch, layout: Layout, segment: &Segment, state: &[f64], d_state: &mut [f64]) {
        self.sums.clear();
        for group in 0..layout.groups() {
            arch.dispatch(Backward {
                vectors: &segment.vectors,
                tokens: segment.tokens,
                values: layout.values(group),
                write: &segment.write,
                d_o: &segment.d_o,
                state: &state[layout.group(group)],
                d_state: &mut d_state[layout.group(group)],
                workspace: &mut self.workspace,
                sums: &mut self.sums,
                d_write: &mut self.d_write,
            });
        }
    }

    /// Turns the gradients of the prepared vectors into those of the inputs.
    fn store(&self, head: &Head<'_>, first: usize, tokens: usize, grads: &mut HeadGrads<'_, '_>) {
        let (key_dim, scale) = (head.key_dim(), head.scale());
        let mut through_erase = vec![0.0; key_dim];
        for t in 0..tokens {
            let token = first + t;
            let (k, v) = (head.k(token), head.v(token));
            let (now, next) = (t * self.kp..t * self.kp + key_dim, (t + 1) * self.kp..(t + 1) * self.kp + key_dim);
            let (dq, dk) = (&self.sums.dq[next.clone()], &self.sums.dk[next]);
            let (de, dg) = (&self.sums.de[now.clone()], &self.sums.dg[now]);
            let d_write = &self.d_write[t * self.vp..t * self.vp + v.len()];
            let u_do = self.sums.u_do[t + 1];
            add(grads.dq[token], dq.iter().zip(k).map(|(dq, k)| scale * (dq + u_do * k)));
            gated(head.erase(token), de, &mut through_erase);
            add(grads.dk[token], dk.iter().zip(&through_erase).map(|(dk, de)| dk + de));
            gated(head.write(token), d_write, grads.dv[token]);
            match head.op() {
                Op::Gdn => grads.dg[token][0] = dg.iter().sum(),
                Op::Gdn2 => grads.dg[token].copy_from_slice(dg),
            }
            match &mut grads.gates {
                HeadGateGrads::Gdn { dbeta } => dbeta[token][0] = dot(k, de) + dot(v, d_write),
                HeadGateGrads::Gdn2 { db, dw } => {
                    gated(k, de, db[token]);
                    gated(v, d_write, dw[token]);
                }
            }
        }
    }
}

fn add(sum: &mut [f64], by: impl Iterator<Item = f64>) {
    sum.iter_mut().zip(by).for_each(|(sum, by)| *sum += by);
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heads;
    use crate::inputs::{Regime, generate};
    use crate::problem::{Results, Shape};
    use crate::reference::testing::max_rel;

    /// Every width of vectors that this machine has; numbers one by one are the first.
    fn architectures() -> Vec<Arch> {
        #[allow(unused_mut)]
        let mut all = vec![Arch::Scalar, Arch::new()];
        #[cfg(target_arch = "x86_64")]
        all.extend(gdnlab_deps::pulp::x86::V3::try_new().map(Arch::V3));
        all
    }

    #[test]
    fn every_vector_width_gives_the_same() {
        for op in Op::ALL {
            for (tokens, key_dim, value_dim) in [(1, 1, 1), (65, 9, 7), (130, 64, 6)] {
                let shape = Shape::new(tokens, 2, key_dim, value_dim);
                let inputs = generate(op, &shape, Regime::Gaussian, 1).unwrap();
                let results: Vec<Results> = architectures()
                    .into_iter()
                    .map(|arch| heads::run(&inputs, true, |h, o, g| run_head_on(arch, h, o, g)).unwrap())
                    .collect();
                for other in &results[1..] {
                    for ((name, found), (_, expected)) in other.named().into_iter().zip(results[0].named()) {
                        let error = max_rel(found, expected);
                        assert!(error < 1e-13, "{op} {shape}: {name} differs by {error:e}");
                    }
                }
            }
        }
    }
}
