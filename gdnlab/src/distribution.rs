//! How the gates, keys and values of a call are distributed: what makes it hard or easy for a kernel.
//!
//! The chunk form solves `(I + L) U = R` with `L_ij = beta_i e^{G_i - G_j} k_i^T k_j` for `i > j` in a chunk: the nearer keys
//! are to one another, the stronger the writes and the slower the decay, the larger `L` and what the solve does to rounding
//! errors. The state keeps what was written for about `1 / -g` tokens.

use crate::problem::{Gates, Inputs};
use crate::{Error, Result};

/// Tokens of a chunk.
const CHUNK: usize = 64;
/// Chunks of a sequence and head that pairs of keys are taken from, at the most.
const MOST_CHUNKS: usize = 16;
/// Shares of the values that lie below each of [`Spread::quantiles`].
pub const SHARES: [f64; 5] = [0.01, 0.25, 0.5, 0.75, 0.99];

/// Quantiles of a quantity.
#[derive(Clone, Debug, PartialEq)]
pub struct Spread {
    /// The quantity in words.
    pub quantity: &'static str,
    /// Its quantiles at [`SHARES`].
    pub quantiles: [f64; SHARES.len()],
}

impl Spread {
    fn of(quantity: &'static str, mut values: Vec<f64>) -> Result<Self> {
        values.sort_by(f64::total_cmp);
        let last = values.len().checked_sub(1).ok_or_else(|| {
            Error::input(format!("no values of '{quantity}': expected a call with two tokens at least"))
        })?;
        let quantiles = SHARES.map(|share| values[(share * last as f64).round() as usize]);
        Ok(Self { quantity, quantiles })
    }
}

/// Quantiles of `inputs`, a call of GDN: of the decay `e^g` and the memory `1 / -g` in tokens; of `beta`; of the norm of keys;
/// of the cosine between two keys of a chunk; of `sum_j |L_ij|` over the rows of a chunk; and of the size of values.
///
/// # Errors
/// [`Error::Input`] for GDN-2, whose gates are not scalars, and for fewer than two tokens.
pub fn distribution(inputs: &Inputs) -> Result<Vec<Spread>> {
    let Gates::Gdn { g, beta } = &inputs.gates else {
        return Err(Error::input("a call of gdn2: expected one of gdn, whose gates are scalars"));
    };
    let pairs = Pairs::of(inputs, &g.data, &beta.data);
    let norms = |data: &[f64], dim: usize| data.chunks_exact(dim).map(norm).collect::<Vec<_>>();
    let value_rms = |norm: f64| norm / (inputs.shape.value_dim as f64).sqrt();
    Ok(vec![
        Spread::of("decay of a token, e^g", g.data.iter().map(|g| g.exp()).collect())?,
        Spread::of("memory, -1/g tokens", g.data.iter().map(|g| -1.0 / g).collect())?,
        Spread::of("write strength, beta", beta.data.clone())?,
        Spread::of("norm of a key", norms(&inputs.k.data, inputs.shape.key_dim))?,
        Spread::of("cosine of two keys in a chunk", pairs.cosines)?,
        Spread::of("sum_j |L_ij| of a row", pairs.row_sums)?,
        Spread::of(
            "RMS of a value",
            norms(&inputs.v.data, inputs.shape.value_dim).into_iter().map(value_rms).collect(),
        )?,
    ])
}

fn norm(row: &[f64]) -> f64 {
    row.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// What pairs of keys in chunks give.
#[derive(Default)]
struct Pairs {
    cosines: Vec<f64>,
    row_sums: Vec<f64>,
}

impl Pairs {
    fn of(inputs: &Inputs, g: &[f64], beta: &[f64]) -> Self {
        let mut pairs = Self::default();
        for range in inputs.sequence_ranges() {
            let chunks = range.len().div_ceil(CHUNK).max(1);
            for chunk in (0..chunks).step_by(chunks.div_ceil(MOST_CHUNKS)) {
                let first = range.start + chunk * CHUNK;
                let tokens = first..range.end.min(first + CHUNK);
                for head in 0..inputs.shape.value_heads {
                    pairs.add(inputs, (g, beta), tokens.clone(), head);
                }
            }
        }
        pairs
    }

    /// One chunk of one head.
    fn add(&mut self, inputs: &Inputs, (g, beta): (&[f64], &[f64]), tokens: std::ops::Range<usize>, head: usize) {
        let shape = &inputs.shape;
        let key = |token: usize| {
            let at = (token * shape.qk_heads + head / shape.group()) * shape.key_dim;
            &inputs.k.data[at..at + shape.key_dim]
        };
        let gate = |data: &[f64], token: usize| data[token * shape.value_heads + head];
        for i in tokens.clone().skip(1) {
            let (mut decay, mut sum) = (0.0, 0.0);
            // Backwards, so that the decay from j to i grows by one gate at a time.
            for j in (tokens.start..i).rev() {
                decay += gate(g, j + 1);
                let dot: f64 = key(i).iter().zip(key(j)).map(|(a, b)| a * b).sum();
                let norms = norm(key(i)) * norm(key(j));
                self.cosines.push(if norms > 0.0 { dot / norms } else { 0.0 });
                sum += gate(beta, i) * decay.exp() * dot.abs();
            }
            self.row_sums.push(sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::{Regime, generate};
    use crate::problem::{Op, Shape, Tensor};

    fn of(spreads: &[Spread], quantity: &str) -> [f64; 5] {
        spreads.iter().find(|spread| spread.quantity.starts_with(quantity)).unwrap().quantiles
    }

    #[test]
    fn quantiles_are_those_of_the_regime() {
        let shape = Shape::new(300, 2, 64, 32);
        let mild = distribution(&generate(Op::Gdn, &shape, Regime::MildDecay, 1).unwrap()).unwrap();
        // g is uniform in (-0.1, 0).
        assert!(of(&mild, "decay").iter().all(|x| (0.9..1.0).contains(x)));
        assert!((of(&mild, "memory")[2] - 20.0).abs() < 2.0);
        assert!((of(&mild, "write strength")[2] - 0.5).abs() < 0.05);
        assert!(of(&mild, "norm of a key").iter().all(|x| (x - 1.0).abs() < 1e-12));
        // Cosines of unit Gaussians of 64 channels have a deviation of 1/8.
        assert!(of(&mild, "cosine")[2].abs() < 0.02 && (of(&mild, "cosine")[4] - 2.33 / 8.0).abs() < 0.03);
        let correlated = distribution(&generate(Op::Gdn, &shape, Regime::Correlated, 1).unwrap()).unwrap();
        assert!(of(&correlated, "cosine")[0] > 0.9, "almost collinear keys");
        assert!(of(&correlated, "sum_j")[2] > 0.0);
    }

    #[test]
    fn rows_of_l_are_those_of_its_formula() {
        let mut inputs = generate(Op::Gdn, &Shape::new(3, 1, 2, 1), Regime::NoDecay, 1).unwrap();
        inputs.k.data = vec![1.0, 0.0, 0.6, 0.8, -1.0, 0.0];
        let (g, beta) = ([0.0, -1.0, -2.0], [1.0, 0.5, 0.25]);
        inputs.gates = Gates::Gdn {
            g: Tensor::new(&[1, 3, 1], g.to_vec()).unwrap(),
            beta: Tensor::new(&[1, 3, 1], beta.to_vec()).unwrap(),
        };
        let pairs = Pairs::of(&inputs, &g, &beta);
        assert!(pairs.cosines.iter().zip([0.6, -0.6, -1.0]).all(|(a, b)| (a - b).abs() < 1e-12));
        let expected = [0.5 * 0.6 * f64::exp(-1.0), 0.25 * (0.6 * f64::exp(-2.0) + f64::exp(-3.0))];
        assert!(pairs.row_sums.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12));
    }

    #[test]
    fn other_operators_and_single_tokens_are_refused() {
        let gdn2 = generate(Op::Gdn2, &Shape::new(8, 1, 4, 4), Regime::MildDecay, 1).unwrap();
        assert!(distribution(&gdn2).unwrap_err().to_string().contains("gdn2"));
        let one = generate(Op::Gdn, &Shape::new(1, 1, 4, 4), Regime::MildDecay, 1).unwrap();
        assert!(distribution(&one).unwrap_err().to_string().contains("two tokens"));
    }
}
