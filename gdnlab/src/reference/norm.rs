//! Norms over the last axis in float64, forward and backward.
//!
//! With `D` the extent of the last axis, and `r` one number per row:
//!
//! ```text
//! L2 norm       r = (sum x^2 + eps)^-1/2       y = x r
//! RMSNorm       r = (sum x^2 / D + eps)^-1/2   y = x r * weight
//! gated RMSNorm r as RMSNorm, of o             y = o r * weight * silu(z)
//! ```
//! The gradient of `n = x r`, given `dn`, is `dx = r (dn - n (n . dn))` for the L2 norm, and `dx = r (dn - n (n . dn) / D)`
//! for the RMSNorm.

use crate::activation::{silu, silu_slope};
use crate::problem::Tensor;
use crate::{Error, Result};

/// L2 norm over the last axis, `eps` under the root: `y = x / sqrt(sum x^2 + eps)`.
#[derive(Clone, Copy, Debug)]
pub struct L2Norm<'a> {
    /// Input, `[..., D]`.
    pub x: &'a Tensor,
    /// Added to the sum of squares; above 0.
    pub eps: f64,
}

impl L2Norm<'_> {
    /// `y`, in the shape of `x`.
    ///
    /// # Errors
    /// [`Error::Input`] where a value is not finite, `x` has no axis, or `eps` is not above 0.
    pub fn forward(&self) -> Result<Tensor> {
        let dim = last_axis("x", self.x, self.eps)?;
        let mut y = self.x.clone();
        y.data.chunks_exact_mut(dim).for_each(|row| {
            normalise(row, self.eps, 1.0);
        });
        Ok(y)
    }

    /// The gradient of `x`, given that of `y`, `dy`, in the shape of `x`.
    ///
    /// # Errors
    /// As [`L2Norm::forward`], for `dy` too.
    pub fn backward(&self, dy: &Tensor) -> Result<Tensor> {
        let dim = last_axis("x", self.x, self.eps)?;
        dy.expect("dy", &self.x.dims)?;
        let mut dx = dy.clone();
        for (dx, x) in dx.data.chunks_exact_mut(dim).zip(self.x.data.chunks_exact(dim)) {
            let mut n = x.to_vec();
            let r = normalise(&mut n, self.eps, 1.0);
            gradient_of_normalised(dx, &n, r, 1.0);
        }
        Ok(dx)
    }
}

/// RMSNorm over the last axis: `y = x / sqrt(sum x^2 / D + eps) * weight`.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a> {
    /// Input, `[..., D]`.
    pub x: &'a Tensor,
    /// Weight, `[D]`.
    pub weight: &'a Tensor,
    /// Added to the mean of squares; above 0.
    pub eps: f64,
}

/// Gradients of a [`RmsNorm`].
#[derive(Clone, Debug, PartialEq)]
pub struct RmsNormGrads {
    /// Gradient of `x`, in its shape.
    pub dx: Tensor,
    /// Gradient of the weight, `[D]`, summed over the rows.
    pub dweight: Tensor,
}

impl RmsNorm<'_> {
    /// `y`, in the shape of `x`.
    ///
    /// # Errors
    /// [`Error::Input`] where shapes do not agree, a value is not finite, or `eps` is not above 0.
    pub fn forward(&self) -> Result<Tensor> {
        let dim = self.validate()?;
        let mut y = self.x.clone();
        for row in y.data.chunks_exact_mut(dim) {
            normalise(row, self.eps, dim as f64);
            row.iter_mut().zip(&self.weight.data).for_each(|(n, w)| *n *= w);
        }
        Ok(y)
    }

    /// The gradients of `x` and the weight, given that of `y`, `dy`, in the shape of `x`.
    ///
    /// # Errors
    /// As [`RmsNorm::forward`], for `dy` too.
    pub fn backward(&self, dy: &Tensor) -> Result<RmsNormGrads> {
        let dim = self.validate()?;
        dy.expect("dy", &self.x.dims)?;
        let mut grads = RmsNormGrads { dx: dy.clone(), dweight: Tensor::zeros(&[dim]) };
        for (dx, x) in grads.dx.data.chunks_exact_mut(dim).zip(self.x.data.chunks_exact(dim)) {
            let mut n = x.to_vec();
            let r = normalise(&mut n, self.eps, dim as f64);
            for i in 0..dim {
                grads.dweight.data[i] += dx[i] * n[i];
                dx[i] *= self.weight.data[i];
            }
            gradient_of_normalised(dx, &n, r, dim as f64);
        }
        Ok(grads)
    }

    fn validate(&self) -> Result<usize> {
        let dim = last_axis("x", self.x, self.eps)?;
        self.weight.expect("weight", &[dim])?;
        Ok(dim)
    }
}

/// Gated RMSNorm over the last axis: `y = o / sqrt(sum o^2 / D + eps) * weight * silu(z)`.
#[derive(Clone, Copy, Debug)]
pub struct GatedRmsNorm<'a> {
    /// Input, `[..., D]`.
    pub o: &'a Tensor,
    /// Raw output gate, in the shape of `o`.
    pub z: &'a Tensor,
    /// Weight, `[D]`.
    pub weight: &'a Tensor,
    /// Added to the mean of squares; above 0.
    pub eps: f64,
}

/// Gradients of a [`GatedRmsNorm`].
#[derive(Clone, Debug, PartialEq)]
pub struct GatedRmsNormGrads {
    /// Gradient of `o`, in its shape.
    pub d_o: Tensor,
    /// Gradient of `z`, in its shape.
    pub dz: Tensor,
    /// Gradient of the weight, `[D]`, summed over the rows.
    pub dweight: Tensor,
}

impl GatedRmsNorm<'_> {
    /// `y`, in the shape of `o`.
    ///
    /// # Errors
    /// [`Error::Input`] where shapes do not agree, a value is not finite, or `eps` is not above 0.
    pub fn forward(&self) -> Result<Tensor> {
        let mut y = self.normed()?;
        y.data.iter_mut().zip(&self.z.data).for_each(|(y, &z)| *y *= silu(z));
        Ok(y)
    }

    /// The gradients of `o`, `z` and the weight, given that of `y`, `dy`, in the shape of `o`.
    ///
    /// # Errors
    /// As [`GatedRmsNorm::forward`], for `dy` too.
    pub fn backward(&self, dy: &Tensor) -> Result<GatedRmsNormGrads> {
        let mut dz = self.normed()?;
        dy.expect("dy", &self.o.dims)?;
        let mut d_normed = dy.clone();
        for ((dz, d), &z) in dz.data.iter_mut().zip(&mut d_normed.data).zip(&self.z.data) {
            *dz *= *d * silu_slope(z);
            *d *= silu(z);
        }
        let RmsNormGrads { dx, dweight } = self.ungated().backward(&d_normed)?;
        Ok(GatedRmsNormGrads { d_o: dx, dz, dweight })
    }

    fn ungated(&self) -> RmsNorm<'_> {
        RmsNorm { x: self.o, weight: self.weight, eps: self.eps }
    }

    /// What the gate multiplies.
    fn normed(&self) -> Result<Tensor> {
        let normed = self.ungated().forward()?;
        self.z.expect("z", &self.o.dims)?;
        Ok(normed)
    }
}

/// `D`, after the checks that all norms share.
fn last_axis(name: &str, x: &Tensor, eps: f64) -> Result<usize> {
    let dim = x.dims.last().copied().unwrap_or(0);
    if dim == 0 {
        return Err(Error::input(format!(
            "tensor '{name}': expected a last axis of at least 1, got shape {:?}",
            x.dims
        )));
    }
    if !(eps > 0.0 && eps.is_finite()) {
        return Err(Error::input(format!("eps = {eps}: expected above 0, since a row of zeros has no direction")));
    }
    x.expect(name, &x.dims)?;
    Ok(dim)
}

/// Multiplies `row` by `r = (sum x^2 / count + eps)^-1/2` and returns r.
///
/// The sum is taken of numbers scaled by a power of two, which rounds nothing and lets nothing overflow.
fn normalise(row: &mut [f64], eps: f64, count: f64) -> f64 {
    let largest = row.iter().fold(eps.sqrt(), |m, x| m.max(x.abs()));
    let scale = power_of_two_below(largest);
    let squares: f64 = row.iter().map(|x| (x / scale).powi(2)).sum();
    let root = (squares / count + eps / scale / scale).sqrt();
    row.iter_mut().for_each(|x| *x = *x / scale / root);
    1.0 / scale / root
}

/// The largest power of two that is at most the normal number `x > 0`.
fn power_of_two_below(x: f64) -> f64 {
    const EXPONENT_BITS: u64 = 0x7ff0_0000_0000_0000;
    f64::from_bits(x.to_bits() & EXPONENT_BITS)
}

/// Turns the gradient `d` of `n = x r` into that of x, in place.
fn gradient_of_normalised(d: &mut [f64], n: &[f64], r: f64, count: f64) {
    let along = n.iter().zip(&*d).map(|(n, d)| n * d).sum::<f64>() / count;
    d.iter_mut().zip(n).for_each(|(d, n)| *d = r * (*d - n * along));
}

#[cfg(test)]
mod tests {
    use super::super::testing::{AWKWARD_LENGTHS, Loss, check_gradient, gaussian, max_rel};
    use super::*;

    const EPS: f64 = 1e-6;

    /// Applies `norm` to each row, from the formulas as they are printed.
    fn by_row(x: &Tensor, norm: impl Fn(&[f64], usize) -> f64) -> Tensor {
        let dim = *x.dims.last().unwrap();
        let data = (0..x.data.len()).map(|at| norm(&x.data[at / dim * dim..][..dim], at)).collect();
        Tensor::new(&x.dims, data).unwrap()
    }

    fn sum_of_squares(row: &[f64]) -> f64 {
        row.iter().map(|x| x * x).sum()
    }

    #[test]
    fn forward_equals_the_formulas() {
        for (tokens, dim) in AWKWARD_LENGTHS.into_iter().zip([64, 1, 7, 3, 128]) {
            let (x, z) = (gaussian(1, &[2, tokens, dim]), gaussian(2, &[2, tokens, dim]));
            let weight = gaussian(3, &[dim]);
            let l2 = by_row(&x, |row, at| x.data[at] / (sum_of_squares(row) + EPS).sqrt());
            assert!(max_rel(&L2Norm { x: &x, eps: EPS }.forward().unwrap(), &l2) < 1e-14);
            let rms = by_row(&x, |row, at| {
                x.data[at] * weight.data[at % dim] / (sum_of_squares(row) / dim as f64 + EPS).sqrt()
            });
            assert!(max_rel(&RmsNorm { x: &x, weight: &weight, eps: EPS }.forward().unwrap(), &rms) < 1e-14);
            let gated = by_row(&rms, |_, at| rms.data[at] * z.data[at] / (1.0 + (-z.data[at]).exp()));
            let call = GatedRmsNorm { o: &x, z: &z, weight: &weight, eps: EPS };
            assert!(max_rel(&call.forward().unwrap(), &gated) < 1e-14);
        }
    }

    #[test]
    fn gradients_equal_differences() {
        for (eps, dims) in [(EPS, [3, 2, 5]), (0.5, [1, 3, 65]), (0.5, [4, 1, 1])] {
            let (x, z, dy) = (gaussian(1, &dims), gaussian(2, &dims), gaussian(3, &dims));
            let weight = gaussian(4, &dims[2..]);
            let l2 = L2Norm { x: &x, eps };
            check_gradient("L2 dx", &x, &l2.backward(&dy).unwrap(), |x| {
                Loss::new(&L2Norm { x, ..l2 }.forward().unwrap(), &dy)
            });

            let rms = RmsNorm { x: &x, weight: &weight, eps };
            let grads = rms.backward(&dy).unwrap();
            let loss = |call: RmsNorm| Loss::new(&call.forward().unwrap(), &dy);
            check_gradient("dx", &x, &grads.dx, |x| loss(RmsNorm { x, ..rms }));
            check_gradient("dweight", &weight, &grads.dweight, |weight| loss(RmsNorm { weight, ..rms }));

            let gated = GatedRmsNorm { o: &x, z: &z, weight: &weight, eps };
            let grads = gated.backward(&dy).unwrap();
            let loss = |call: GatedRmsNorm| Loss::new(&call.forward().unwrap(), &dy);
            check_gradient("do", &x, &grads.d_o, |o| loss(GatedRmsNorm { o, ..gated }));
            check_gradient("dz", &z, &grads.dz, |z| loss(GatedRmsNorm { z, ..gated }));
            check_gradient("gated dweight", &weight, &grads.dweight, |weight| loss(GatedRmsNorm { weight, ..gated }));
        }
    }

    #[test]
    fn extreme_values_stay_finite() {
        for size in [0.0, 5e-324, 1e-300, 1e-160, 1e160, 1e300] {
            let mut x = gaussian(1, &[3, 8]);
            x.data.iter_mut().for_each(|x| *x *= size);
            let mut z = gaussian(2, &[3, 8]);
            z.data.iter_mut().for_each(|z| *z *= 1e3);
            let (weight, dy) = (gaussian(3, &[8]), gaussian(4, &[3, 8]));
            let l2 = L2Norm { x: &x, eps: EPS };
            let gated = GatedRmsNorm { o: &x, z: &z, weight: &weight, eps: EPS };
            let (y, grads) = (l2.forward().unwrap(), gated.backward(&dy).unwrap());
            for tensor in
                [&y, &l2.backward(&dy).unwrap(), &gated.forward().unwrap(), &grads.d_o, &grads.dz, &grads.dweight]
            {
                assert!(tensor.data.iter().all(|x| x.is_finite()), "{size:e}");
            }
            if size > 1.0 {
                y.data.chunks_exact(8).for_each(|row| assert!((sum_of_squares(row) - 1.0).abs() < 1e-14));
            }
        }
    }

    #[test]
    fn bad_input_is_refused() {
        let (x, weight) = (gaussian(1, &[2, 3]), gaussian(2, &[3]));
        let refused = |x: &Tensor, eps| L2Norm { x, eps }.forward().unwrap_err().to_string();
        assert!(refused(&x, 0.0).contains("eps = 0"));
        assert!(refused(&x, f64::NAN).contains("eps = NaN"));
        assert!(refused(&Tensor::zeros(&[2, 0]), EPS).contains("last axis"));
        assert!(refused(&Tensor::filled(&[1], f64::NAN), EPS).contains("non-finite"));
        let message = RmsNorm { x: &x, weight: &x, eps: EPS }.forward().unwrap_err().to_string();
        assert!(message.contains("'weight'"));
        let gated = GatedRmsNorm { o: &x, z: &weight, weight: &weight, eps: EPS };
        assert!(gated.forward().unwrap_err().to_string().contains("'z'"));
    }
}
