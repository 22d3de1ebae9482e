//! The tokens of a segment, prepared for the vector loops: their vectors in the units of the state.

use super::sweep::Vectors;
use crate::heads::Head;
use crate::problem::Op;
use std::ops::RangeInclusive;

/// Tokens between two kept states of the backward, and the tokens whose vectors are prepared together.
pub const SEGMENT: usize = 64;

/// The units `c` that a state is kept in. Numbers of a state above `2^900` would overflow in the smallest of them.
const UNITS: RangeInclusive<f64> = 1.0 / LARGEST_UNIT..=LARGEST_UNIT;
const LARGEST_UNIT: f64 = (1u128 << 120) as f64;

/// Up to [`SEGMENT`] tokens of one head.
pub(super) struct Segment {
    pub tokens: usize,
    pub vectors: Vectors,
    /// `w*v` and do: `[SEGMENT][vp]`.
    pub write: Vec<f64>,
    pub d_o: Vec<f64>,
    units: Units,
}

/// `c` and `1/c` of every token: `[SEGMENT][channels]`.
struct Units {
    /// 1 where all channels decay alike, else K.
    channels: usize,
    units: Vec<f64>,
    inverses: Vec<f64>,
}

impl Units {
    fn new(channels: usize) -> Self {
        let ones = vec![1.0; SEGMENT * channels];
        Self { channels, units: ones.clone(), inverses: ones }
    }

    /// Takes in token `t` with its log decays. Where its units are renewed, `decay` becomes what the state has to be
    /// multiplied by.
    fn push(&mut self, t: usize, g: &[f64], decay: &mut [f64]) -> bool {
        let (before, rest) = self.units.split_at_mut(t * self.channels);
        let units = &mut rest[..self.channels];
        for (n, (unit, g)) in units.iter_mut().zip(g).enumerate() {
            *unit = g.exp() * if t > 0 { before[(t - 1) * self.channels + n] } else { 1.0 };
        }
        let renewed = t == 0 || !units.iter().all(|unit| UNITS.contains(unit));
        if renewed {
            spread(units, decay);
            units.fill(1.0);
        }
        let inverses = &mut self.inverses[t * self.channels..][..self.channels];
        inverses.iter_mut().zip(units).for_each(|(inverse, unit)| *inverse = 1.0 / *unit);
        renewed
    }

    fn unit(&self, t: usize) -> &[f64] {
        &self.units[t * self.channels..][..self.channels]
    }

    fn inverse(&self, t: usize) -> &[f64] {
        &self.inverses[t * self.channels..][..self.channels]
    }
}

impl Segment {
    /// For tokens of `head`, with K and V padded to `kp` and `vp`.
    pub fn new(head: &Head<'_>, kp: usize, vp: usize) -> Self {
        let values = vec![0.0; SEGMENT * vp];
        let channels = match head.op() {
            Op::Gdn => 1,
            Op::Gdn2 => head.key_dim(),
        };
        Self {
            tokens: 0,
            vectors: Vectors::new(kp, SEGMENT + 1),
            write: values.clone(),
            d_o: values,
            units: Units::new(channels),
        }
    }

    /// Prepares the tokens from `first` on for the forward.
    pub fn load(&mut self, head: &Head<'_>, first: usize) {
        self.tokens = SEGMENT.min(head.tokens() - first);
        let vp = self.write.len() / SEGMENT;
        for t in 0..self.tokens {
            self.load_vectors(head, t, first + t);
            gated(head.write(first + t), head.v(first + t), &mut self.write[t * vp..]);
        }
        self.load_end(head.key_dim());
    }

    /// What the backward needs besides.
    pub fn load_d_o(&mut self, head: &Head<'_>, first: usize) {
        let vp = self.d_o.len() / SEGMENT;
        for t in 0..self.tokens {
            let d_o = head.d_o(first + t).unwrap_or_default();
            self.d_o[t * vp..t * vp + d_o.len()].copy_from_slice(d_o);
        }
    }

    fn load_vectors(&mut self, head: &Head<'_>, t: usize, token: usize) {
        let (q, k) = (head.q(token), head.k(token));
        let Vectors { kp, renewed, decay, erase, key, query } = &mut self.vectors;
        let (at, next) = (t * *kp, (t + 1) * *kp);
        renewed[t] = self.units.push(t, head.log_decay(token), &mut decay[at..at + k.len()]);
        let (unit, inverse) = (self.units.unit(t), self.units.inverse(t));
        let erase = &mut erase[at..at + k.len()];
        gated(head.erase(token), k, erase);
        scale(erase, unit);
        gated(inverse, k, &mut key[next..]);
        let query = &mut query[next..next + q.len()];
        gated(&[head.scale()], q, query);
        scale(query, unit);
    }

    /// Behind the last token the units become 1 and nothing is read.
    fn load_end(&mut self, key_dim: usize) {
        let Vectors { kp, renewed, decay, erase, .. } = &mut self.vectors;
        let at = self.tokens * *kp;
        renewed[self.tokens] = true;
        spread(self.units.unit(self.tokens - 1), &mut decay[at..at + key_dim]);
        erase[at..at + key_dim].fill(0.0);
    }

    /// `c*x` of token `t`: `x` is the gradient of a vector that was divided by `c`, or a vector to be multiplied by it.
    pub fn times_unit(&self, t: usize, x: &[f64], out: &mut [f64]) {
        gated(self.units.unit(t), x, out);
    }

    /// `x/c` of token `t`.
    pub fn per_unit(&self, t: usize, x: &[f64], out: &mut [f64]) {
        gated(self.units.inverse(t), x, out);
    }
}

/// `gate * x`, the gate scalar or per channel.
pub(super) fn gated(gate: &[f64], x: &[f64], out: &mut [f64]) {
    match gate {
        [gate] => out.iter_mut().zip(x).for_each(|(out, x)| *out = gate * x),
        _ => out.iter_mut().zip(gate.iter().zip(x)).for_each(|(out, (gate, x))| *out = gate * x),
    }
}

/// Multiplies `x` by a factor that is scalar or per channel.
fn scale(x: &mut [f64], by: &[f64]) {
    match by {
        [by] => x.iter_mut().for_each(|x| *x *= by),
        _ => x.iter_mut().zip(by).for_each(|(x, by)| *x *= by),
    }
}

/// A factor that is scalar or per channel, for every channel.
fn spread(factor: &[f64], out: &mut [f64]) {
    match factor {
        [factor] => out.fill(*factor),
        _ => out.copy_from_slice(factor),
    }
}
