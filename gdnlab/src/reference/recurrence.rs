//! The gated delta rule, token by token in float64.
//!
//! Per head, with `S` in R^{K x V} (GDN is the case `g` scalar, `b = w = beta`):
//!
//! ```text
//! S_t = (I - k_t (b_t*k_t)^T) Diag(e^{g_t}) S_{t-1} + k_t (w_t*v_t)^T        o_t = s S_t^T q_t
//! ```
//!
//! # Units of the state
//!
//! A decay would cost a product for every number of the state. Instead the state is kept in units `c` in R^K that decay
//! with it, `S_t = Diag(c_t) Z_t` with `c_t = e^{g_t} * c_{t-1}`, so that only the vectors of a token feel the decay:
//!
//! ```text
//! u_t = w_t*v_t - Z'^T (c_t*e_t)        Z_t = Z' + (k_t/c_t) u_t^T        o_t = Z_t^T (s c_t*q_t)
//! ```
//!
//! with `e = b*k` and `Z' = Z_{t-1}`. Only at the first token of a segment, behind its last one, and where a unit would
//! leave the range of [`segment`](super::segment), the units are renewed: `Z' = Diag(e^{g_t} * c_{t-1}) Z_{t-1}` and
//! `c_t = 1`. Between segments the state is therefore `S` itself. Each number of `Z` is that of `S` up to a factor, so it
//! rounds as `S` would, but for the products with the decay, which are gone; without decay `Z` is `S`.
//!
//! The backward is the adjoint of exactly these steps. With `dZ` the gradient of `Z_t`:
//!
//! ```text
//! dZ += (s c*q) do^T         d(s c*q) = Z' do + (k/c) (u . do)      du = dZ^T (k/c)      d(k/c) = dZ u
//! dZ' = dZ - (c*e) du^T      d(c*e) = -Z' du                        dg = sum_v Z'*dZ'    d(w*v) = du
//! dZ_{t-1} = dZ', where units are renewed Diag(e^{g_t} * c_{t-1}) dZ'
//! ```
//!
//! In dg, the sum over v of the decayed state times its gradient, the units of the two cancel.
//!
//! # Layout and cost
//!
//! The state is kept transposed, because its V rows never mix: each is a recurrence of its own on a vector of K numbers
//! that stays in the first-level cache. Rows are taken [`ROWS`] at a time, their vectors interleaved ([`Layout`]). The
//! backward keeps a state every [`SEGMENT`] tokens and recomputes the ones between, of which it keeps every second.
//!
//! Work per token and number of the state, in vector operations on one unit (a product or a multiply-add counts one), and
//! in numbers moved; the vectors of a token count a quarter in the first level, since they serve four rows, and an eighth
//! in the second, since the next four rows follow at once:
//!
//! | | operations | L1 loads | L1 stores | L2 loads and stores |
//! |---|---|---|---|---|
//! | forward | 3 | 1 + 3/4 | 1 | 3/8 |
//! | states again | 2 | 1 + 2/4 | 1 | 1/2 + 2/8 |
//! | adjoint | 7 + 1/2 | 2 + 7/4 | 1 + 4/4 | 1/2 + 11/8 |
//!
//! The backward of a segment writes its states and reads them again from the second level, where the token vectors and
//! their gradients stay too. `benches/cpu` measures how near this comes to the rates of the core.

use super::aligned::{Aligned, LINE};
use super::segment::{SEGMENT, Segment, gated};
use super::sweep::{Backward, Forward, ROWS, Sums, Workspace};
use crate::heads::{Head, HeadGateGrads, HeadGrads, HeadOutputs};
use crate::problem::Op;
use gdnlab_deps::pulp::{Arch, Simd, WithSimd};

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

/// Forward, and with `grads` the backward, of one head, with the widest vectors of this machine.
pub(crate) fn run_head(head: &Head<'_>, out: HeadOutputs<'_>, grads: Option<HeadGrads<'_, '_>>) {
    run_head_on(Arch::new(), head, out, grads);
}

fn run_head_on(arch: Arch, head: &Head<'_>, mut out: HeadOutputs<'_>, grads: Option<HeadGrads<'_, '_>>) {
    let layout = Layout::new(head, arch);
    let mut segment = Segment::new(head, layout.kp, layout.vp);
    let mut state = layout.load(head.initial_state(), head);
    let mut kept = Vec::with_capacity(if grads.is_some() { head.tokens().div_ceil(SEGMENT) * state.len() } else { 0 });
    let mut o = vec![0.0; SEGMENT * layout.vp];
    for first in (0..head.tokens()).step_by(SEGMENT) {
        if grads.is_some() {
            kept.extend_from_slice(&state);
        }
        segment.load(head, first);
        arch.dispatch(Forward {
            vectors: &segment.vectors,
            tokens: segment.tokens,
            vp: layout.vp,
            write: &segment.write,
            state: &mut state,
            o: &mut o,
        });
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
        segment.load_d_o(head, first);
        adjoint.run(arch, &segment, state, &mut d_state);
        adjoint.store(head, first, &segment, &mut grads);
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
    fn run(&mut self, arch: Arch, segment: &Segment, state: &[f64], d_state: &mut [f64]) {
        self.sums.clear();
        arch.dispatch(Backward {
            vectors: &segment.vectors,
            tokens: segment.tokens,
            vp: self.vp,
            write: &segment.write,
            d_o: &segment.d_o,
            state,
            d_state,
            workspace: &mut self.workspace,
            sums: &mut self.sums,
            d_write: &mut self.d_write,
        });
    }

    /// Turns the gradients of the prepared vectors into those of the inputs.
    fn store(&self, head: &Head<'_>, first: usize, segment: &Segment, grads: &mut HeadGrads<'_, '_>) {
        let (key_dim, scale) = (head.key_dim(), head.scale());
        let [mut dq, mut dk, mut de, mut through_erase] = std::array::from_fn(|_| vec![0.0; key_dim]);
        for t in 0..segment.tokens {
            let token = first + t;
            let (k, v) = (head.k(token), head.v(token));
            let (now, next) = (t * self.kp..t * self.kp + key_dim, (t + 1) * self.kp..(t + 1) * self.kp + key_dim);
            segment.times_unit(t, &self.sums.dq[now.clone()], &mut dq);
            segment.per_unit(t, &self.sums.dk[next], &mut dk);
            segment.times_unit(t, &self.sums.de[now.clone()], &mut de);
            let dg = &self.sums.dg[now];
            let d_write = &self.d_write[t * self.vp..t * self.vp + v.len()];
            let u_do = self.sums.u_do[t + 1];
            add(grads.dq[token], dq.iter().zip(k).map(|(dq, k)| scale * (dq + u_do * k)));
            gated(head.erase(token), &de, &mut through_erase);
            add(grads.dk[token], dk.iter().zip(&through_erase).map(|(dk, de)| dk + de));
            gated(head.write(token), d_write, grads.dv[token]);
            match head.op() {
                Op::Gdn => grads.dg[token][0] = dg.iter().sum(),
                Op::Gdn2 => grads.dg[token].copy_from_slice(dg),
            }
            match &mut grads.gates {
                HeadGateGrads::Gdn { dbeta } => dbeta[token][0] = dot(k, &de) + dot(v, d_write),
                HeadGateGrads::Gdn2 { db, dw } => {
                    gated(k, &de, db[token]);
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
    use crate::problem::{Gates, Results, Shape};
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
            for (tokens, key_dim, value_dim) in [(1, 1, 1), (65, 9, 7), (130, 64, 11)] {
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

    /// The formulas at the top of this module, number by number, without units, every state kept.
    fn plain(head: &Head<'_>, mut out: HeadOutputs<'_>, grads: Option<HeadGrads<'_, '_>>) {
        let (keys, values, scale) = (head.key_dim(), head.value_dim(), head.scale());
        let of = |gate: &[f64], n: usize| gate[n % gate.len()];
        let mut state = head.initial_state().map_or_else(|| vec![0.0; keys * values], <[f64]>::to_vec);
        let mut kept = Vec::new();
        for t in 0..head.tokens() {
            let (q, k, v) = (head.q(t), head.k(t), head.v(t));
            (0..keys * values).for_each(|n| state[n] *= of(head.log_decay(t), n / values).exp());
            let read = |j: usize| (0..keys).map(|i| state[i * values + j] * of(head.erase(t), i) * k[i]).sum::<f64>();
            let u: Vec<f64> = (0..values).map(|j| of(head.write(t), j) * v[j] - read(j)).collect();
            kept.push((state.clone(), u.clone()));
            (0..keys * values).for_each(|n| state[n] += k[n / values] * u[n % values]);
            for (j, o) in out.o[t].iter_mut().enumerate() {
                *o = scale * (0..keys).map(|i| state[i * values + j] * q[i]).sum::<f64>();
            }
        }
        out.final_state.copy_from_slice(&state);
        let Some(mut grads) = grads else { return };
        let mut d_state = head.d_final_state().map_or_else(|| vec![0.0; keys * values], <[f64]>::to_vec);
        for (t, (decayed, u)) in kept.iter().enumerate().rev() {
            let (q, k, v, d_o) = (head.q(t), head.k(t), head.v(t), head.d_o(t).unwrap());
            (0..keys * values).for_each(|n| d_state[n] += scale * q[n / values] * d_o[n % values]);
            let du: Vec<f64> = (0..values).map(|j| (0..keys).map(|i| d_state[i * values + j] * k[i]).sum()).collect();
            let (mut de, mut dg) = (vec![0.0; keys], vec![0.0; keys]);
            for i in 0..keys {
                let (row, d_row) = (&decayed[i * values..][..values], &mut d_state[i * values..][..values]);
                let e = of(head.erase(t), i) * k[i];
                de[i] = -dot(row, &du);
                grads.dq[t][i] += scale * (dot(row, d_o) + k[i] * dot(u, d_o));
                grads.dk[t][i] += dot(d_row, u) + of(head.erase(t), i) * de[i];
                d_row.iter_mut().zip(&du).for_each(|(d, du)| *d -= e * du);
                dg[i] = dot(row, d_row);
                d_row.iter_mut().for_each(|d| *d *= of(head.log_decay(t), i).exp());
            }
            gated(head.write(t), &du, grads.dv[t]);
            match &mut grads.gates {
                HeadGateGrads::Gdn { dbeta } => {
                    dbeta[t][0] = dot(k, &de) + dot(v, &du);
                    grads.dg[t][0] = dg.iter().sum();
                }
                HeadGateGrads::Gdn2 { db, dw } => {
                    gated(k, &de, db[t]);
                    gated(v, &du, dw[t]);
                    grads.dg[t].copy_from_slice(&dg);
                }
            }
        }
        grads.dh0.copy_from_slice(&d_state);
    }

    /// Log decay of token `t` in channel `n`.
    type Decay = fn(t: usize, n: usize) -> f64;

    /// Units that stay, shrink and grow out of their range within a segment, drift apart, and end in a decay to nothing.
    const DECAYS: [(&str, Decay); 5] = [
        ("none", |_, _| 0.0),
        ("steady", |_, _| -3.0),
        ("growth", |_, _| 1.5),
        ("uneven", |t, n| if (t + n) % 5 == 0 { -30.0 } else { -(n as f64) }),
        ("cut", |t, _| if t % 7 == 3 { -1000.0 } else { -0.1 }),
    ];

    #[test]
    fn units_change_no_result() {
        for op in Op::ALL {
            let shape = Shape { qk_heads: 1, value_heads: 2, ..Shape::new(150, 1, 9, 6) };
            for (name, decay) in DECAYS {
                let mut inputs = generate(op, &shape, Regime::Gaussian, 5).unwrap().with_initial_state(6);
                let (Gates::Gdn { g, .. } | Gates::Gdn2 { g, .. }) = &mut inputs.gates;
                let channels = g.data.len() / (shape.tokens * shape.value_heads);
                for (at, g) in g.data.iter_mut().enumerate() {
                    *g = decay(at / (channels * shape.value_heads), at % channels);
                }
                let [found, expected] = [heads::run(&inputs, true, run_head), heads::run(&inputs, true, plain)];
                let (found, expected) = (found.unwrap(), expected.unwrap());
                for ((tensor, found), (_, expected)) in found.named().into_iter().zip(expected.named()) {
                    let error = max_rel(found, expected);
                    assert!(error < 1e-13, "{op}, {name}: {tensor} differs by {error:e}");
                }
            }
        }
    }
}
