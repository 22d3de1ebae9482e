//! Rotary position embedding (RoPE) in float64, forward and backward.
//!
//! Channel `i` of the first half of a head and the channel that stands as far into the second half are a pair, turned by
//! an angle that grows with the token `t`, counted from 0 in each row of the batch:
//!
//! ```text
//! angle = t base^(-2 i / d)                                    i < d / 2
//! y_i = x_i cos(angle) - x_{i + d/2} sin(angle)                y_{i + d/2} = x_{i + d/2} cos(angle) + x_i sin(angle)
//! ```
//! The scores `q_t . k_s` then depend on `t - s` only. A rotation's adjoint turns back: dx is dy turned by `-angle`.

use crate::problem::Tensor;
use crate::{Error, Result};

/// The base of the angles in the models here.
pub const DEFAULT_BASE: f64 = 10_000.0;

/// The rotation, by its base.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// The slowest pair turns by about one radian in `base` tokens; above 0.
    pub base: f64,
}

impl Default for Rope {
    fn default() -> Self {
        Self { base: DEFAULT_BASE }
    }
}

impl Rope {
    /// `y`, in the shape of `x`, `[B, T, H, d]` with d even.
    ///
    /// # Errors
    /// [`Error::Input`] where `x` has another rank, d is odd or 0, the base is not above 0, or a value is not finite.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.turned("x", x, 1.0)
    }

    /// The gradient of `x`, given that of `y`, `dy`; nothing of the forward is needed.
    ///
    /// # Errors
    /// As [`Rope::forward`], for `dy`.
    pub fn backward(&self, dy: &Tensor) -> Result<Tensor> {
        self.turned("dy", dy, -1.0)
    }

    /// `x` with every angle multiplied by `direction`.
    fn turned(&self, name: &str, x: &Tensor, direction: f64) -> Result<Tensor> {
        let &[_, tokens, heads, dim] = &x.dims[..] else {
            return Err(Error::input(format!("tensor '{name}': expected shape [B, T, H, d], got {:?}", x.dims)));
        };
        if dim == 0 || dim % 2 != 0 {
            return Err(Error::input(format!("RoPE: d = {dim}: expected an even number of channels, at least 2")));
        }
        if !(self.base > 0.0 && self.base.is_finite()) {
            return Err(Error::input(format!("RoPE: base = {}: expected a number above 0", self.base)));
        }
        x.expect(name, &x.dims)?;
        let rates: Vec<f64> = (0..dim / 2).map(|i| self.base.powf(-2.0 * i as f64 / dim as f64)).collect();
        let mut y = x.clone();
        for (row, rows) in y.data.chunks_exact_mut((heads * dim).max(1)).enumerate() {
            let t = direction * (row % tokens) as f64;
            let turns: Vec<(f64, f64)> = rates.iter().map(|rate| (t * rate).sin_cos()).collect();
            for head in rows.chunks_exact_mut(dim) {
                let (first, second) = head.split_at_mut(dim / 2);
                for ((a, b), (sin, cos)) in first.iter_mut().zip(second).zip(&turns) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
        Ok(y)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{AWKWARD_LENGTHS, Loss, check_gradient, gaussian, max_rel};
    use super::*;

    /// The formulas number by number.
    fn naive(x: &Tensor, base: f64) -> Tensor {
        let [_, tokens, heads, dim] = x.dims[..] else { panic!() };
        let mut y = x.clone();
        for (at, y) in y.data.iter_mut().enumerate() {
            let (channel, t) = (at % dim, at / dim / heads % tokens);
            let i = channel % (dim / 2);
            let angle = t as f64 / base.powf(2.0 * i as f64 / dim as f64);
            let (partner, sign) = if channel < dim / 2 { (at + dim / 2, -1.0) } else { (at - dim / 2, 1.0) };
            *y = x.data[at] * angle.cos() + sign * x.data[partner] * angle.sin();
        }
        y
    }

    #[test]
    fn forward_equals_the_formulas() {
        for tokens in AWKWARD_LENGTHS {
            let x = gaussian(1, &[2, tokens, 3, 8]);
            let y = Rope::default().forward(&x).unwrap();
            assert!(max_rel(&y, &naive(&x, DEFAULT_BASE)) < 1e-14, "T = {tokens}");
        }
    }

    #[test]
    fn scores_depend_on_the_distance_only() {
        let (q, k) = (gaussian(1, &[1, 1, 1, 16]), gaussian(2, &[1, 1, 1, 16]));
        let repeated = |x: &Tensor| Tensor::new(&[1, 40, 1, 16], x.data.repeat(40)).unwrap();
        let [q, k] = [q, k].map(|x| Rope::default().forward(&repeated(&x)).unwrap());
        let score = |t: usize, s: usize| -> f64 { (0..16).map(|d| q.data[t * 16 + d] * k.data[s * 16 + d]).sum() };
        for t in 7..40 {
            assert!((score(t, t - 7) - score(7, 0)).abs() < 1e-13, "t = {t}");
        }
        assert!((score(8, 0) - score(7, 0)).abs() > 1e-3);
    }

    #[test]
    fn gradients_equal_differences() {
        for (base, dims) in [(DEFAULT_BASE, [2, 5, 2, 6]), (3.0, [1, 1, 1, 2])] {
            let (x, dy) = (gaussian(1, &dims), gaussian(2, &dims));
            let rope = Rope { base };
            check_gradient("dx", &x, &rope.backward(&dy).unwrap(), |x| Loss::new(&rope.forward(x).unwrap(), &dy));
        }
    }

    #[test]
    fn bad_input_is_refused() {
        let refused = |dims: &[usize], base| Rope { base }.forward(&Tensor::zeros(dims)).unwrap_err().to_string();
        assert!(refused(&[2, 3, 4], 10.0).contains("[B, T, H, d]"));
        assert!(refused(&[1, 2, 3, 5], 10.0).contains("d = 5"));
        assert!(refused(&[1, 2, 3, 4], 0.0).contains("base = 0"));
        let dy = Tensor::filled(&[1, 1, 1, 2], f64::NAN);
        assert!(Rope::default().backward(&dy).unwrap_err().to_string().contains("'dy' has 2 non-finite"));
    }
}
