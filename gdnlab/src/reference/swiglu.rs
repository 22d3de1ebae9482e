//! The product in the middle of a SwiGLU in float64, forward and backward.
//!
//! ```text
//! h = silu(gate) * up          dgate = dh * up * silu'(gate)          dup = dh * silu(gate)
//! ```

use crate::Result;
use crate::activation::{silu, silu_slope};
use crate::problem::Tensor;

/// One call, between the projections to `gate` and `up` and the one from `h`.
#[derive(Clone, Copy, Debug)]
pub struct SwiGlu<'a> {
    /// What passes through SiLU, any shape.
    pub gate: &'a Tensor,
    /// What it gates, in the same shape.
    pub up: &'a Tensor,
}

/// Gradients of a [`SwiGlu`], each in the shape of its tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct SwiGluGrads {
    /// Gradient of `gate`.
    pub dgate: Tensor,
    /// Gradient of `up`.
    pub dup: Tensor,
}

impl SwiGlu<'_> {
    /// `h`, in the shape of `gate`.
    ///
    /// # Errors
    /// [`crate::Error::Input`] where the shapes differ or a value is not finite.
    pub fn forward(&self) -> Result<Tensor> {
        self.validate()?;
        let mut h = self.up.clone();
        h.data.iter_mut().zip(&self.gate.data).for_each(|(h, &gate)| *h *= silu(gate));
        Ok(h)
    }

    /// The gradients of `gate` and `up`, given that of `h`, `dh`, in the same shape.
    ///
    /// # Errors
    /// As [`SwiGlu::forward`], for `dh` too.
    pub fn backward(&self, dh: &Tensor) -> Result<SwiGluGrads> {
        self.validate()?;
        dh.expect("dh", &self.gate.dims)?;
        let mut grads = SwiGluGrads { dgate: dh.clone(), dup: dh.clone() };
        for (at, (&gate, up)) in self.gate.data.iter().zip(&self.up.data).enumerate() {
            grads.dgate.data[at] *= up * silu_slope(gate);
            grads.dup.data[at] *= silu(gate);
        }
        Ok(grads)
    }

    fn validate(&self) -> Result<()> {
        self.gate.expect("gate", &self.gate.dims)?;
        self.up.expect("up", &self.gate.dims)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Loss, check_gradient, gaussian, max_rel};
    use super::*;

    #[test]
    fn forward_equals_the_formula() {
        let (gate, up) = (gaussian(1, &[3, 5]), gaussian(2, &[3, 5]));
        let mut expected = gate.clone();
        expected.data.iter_mut().zip(&up.data).for_each(|(x, up)| *x = *x / (1.0 + (-*x).exp()) * up);
        assert!(max_rel(&SwiGlu { gate: &gate, up: &up }.forward().unwrap(), &expected) < 1e-15);
    }

    #[test]
    fn gradients_equal_differences() {
        let (gate, up, dh) = (gaussian(1, &[4, 7]), gaussian(2, &[4, 7]), gaussian(3, &[4, 7]));
        let call = SwiGlu { gate: &gate, up: &up };
        let grads = call.backward(&dh).unwrap();
        let loss = |call: SwiGlu| Loss::new(&call.forward().unwrap(), &dh);
        check_gradient("dgate", &gate, &grads.dgate, |gate| loss(SwiGlu { gate, ..call }));
        check_gradient("dup", &up, &grads.dup, |up| loss(SwiGlu { up, ..call }));
    }

    #[test]
    fn extreme_gates_stay_finite() {
        let gate = Tensor::new(&[4], vec![-1e3, 1e3, -1e300, 1e300]).unwrap();
        let up = gaussian(1, &[4]);
        let grads = SwiGlu { gate: &gate, up: &up }.backward(&up).unwrap();
        assert!(grads.dgate.data.iter().chain(&grads.dup.data).all(|x| x.is_finite()));
    }

    #[test]
    fn bad_input_is_refused() {
        let (gate, up) = (gaussian(1, &[4]), gaussian(2, &[3]));
        let message = SwiGlu { gate: &gate, up: &up }.forward().unwrap_err().to_string();
        assert!(message.contains("'up': expected shape [4]"), "{message}");
        let message = SwiGlu { gate: &gate, up: &gate }.backward(&up).unwrap_err().to_string();
        assert!(message.contains("'dh'"), "{message}");
    }
}
