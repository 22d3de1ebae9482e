//! Linear layers without a bias in float64, forward and backward.
//!
//! ```text
//! y = x W^T          dx = dy W          dW = dy^T x
//! ```
//! with `x` `[N, I]`, `W` `[O, I]`, `y` `[N, O]`: N rows of any number of axes.

use super::matrix::{View, Write, product};
use crate::problem::Tensor;
use crate::{Error, Result};
use gdnlab_deps::rayon::prelude::*;

/// Rows of a product that one task computes. It is fixed, so that results do not depend on the number of threads.
const ROW_BLOCK: usize = 64;

/// One call of a linear layer.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// Input, `[..., I]`.
    pub x: &'a Tensor,
    /// Weight, `[O, I]`.
    pub weight: &'a Tensor,
}

/// Gradients of a [`Linear`].
#[derive(Clone, Debug, PartialEq)]
pub struct LinearGrads {
    /// Gradient of `x`, in its shape.
    pub dx: Tensor,
    /// Gradient of the weight, `[O, I]`, summed over the rows.
    pub dweight: Tensor,
}

struct Sizes {
    rows: usize,
    inputs: usize,
    outputs: usize,
}

impl Linear<'_> {
    /// `y`, `[..., O]`. Threads over blocks of rows.
    ///
    /// # Errors
    /// [`Error::Input`] where shapes do not agree or a value is not finite.
    pub fn forward(&self) -> Result<Tensor> {
        let sizes = self.validate()?;
        let mut y = Tensor::zeros(&self.output_dims(&sizes));
        let weight = View::new(&self.weight.data, sizes.outputs, sizes.inputs, sizes.inputs);
        by_row_block(&mut y.data, sizes.outputs, &self.x.data, sizes.inputs, weight.t());
        Ok(y)
    }

    /// The gradients of `x` and the weight, given that of `y`, `dy` `[..., O]`. Threads over blocks of rows.
    ///
    /// # Errors
    /// As [`Linear::forward`], for `dy` too.
    pub fn backward(&self, dy: &Tensor) -> Result<LinearGrads> {
        let sizes = self.validate()?;
        let Sizes { rows, inputs, outputs } = sizes;
        dy.expect("dy", &self.output_dims(&sizes))?;
        let mut grads = LinearGrads { dx: Tensor::zeros(&self.x.dims), dweight: Tensor::zeros(&self.weight.dims) };
        let weight = View::new(&self.weight.data, outputs, inputs, inputs);
        by_row_block(&mut grads.dx.data, inputs, &dy.data, outputs, weight);
        if rows > 0 {
            let x = View::new(&self.x.data, rows, inputs, inputs);
            grads.dweight.data.par_chunks_mut(ROW_BLOCK * inputs).enumerate().for_each(|(block, dweight)| {
                let dy = View::new(&dy.data[block * ROW_BLOCK..], rows, dweight.len() / inputs, outputs);
                product(dweight, Write::Set, 1.0, dy.t(), x);
            });
        }
        Ok(grads)
    }

    fn output_dims(&self, sizes: &Sizes) -> Vec<usize> {
        let mut dims = self.x.dims.clone();
        dims.pop();
        dims.push(sizes.outputs);
        dims
    }

    fn validate(&self) -> Result<Sizes> {
        let (&[outputs, inputs], [leading @ .., _]) = (&self.weight.dims[..], &self.x.dims[..]) else {
            return Err(Error::input(format!(
                "linear layer: expected x [..., I] and weight [O, I], got {:?} and {:?}",
                self.x.dims, self.weight.dims
            )));
        };
        if inputs == 0 || outputs == 0 {
            return Err(Error::input(format!(
                "linear layer: O = {outputs}, I = {inputs}: expected at least 1 of each"
            )));
        }
        self.x.expect("x", &[leading, &[inputs]].concat())?;
        self.weight.expect("weight", &[outputs, inputs])?;
        Ok(Sizes { rows: leading.iter().product(), inputs, outputs })
    }
}

/// `dst = a b` for `dst` `[N, n]`, `a` `[N, k]`, both row-major, in blocks of rows.
fn by_row_block(dst: &mut [f64], n: usize, a: &[f64], k: usize, b: View) {
    dst.par_chunks_mut(ROW_BLOCK * n).zip(a.par_chunks(ROW_BLOCK * k)).for_each(|(dst, a)| {
        product(dst, Write::Set, 1.0, View::new(a, a.len() / k, k, k), b);
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{AWKWARD_LENGTHS, Loss, check_gradient, gaussian, max_rel, on_one_and_three_threads};
    use super::*;

    #[test]
    fn forward_equals_plain_sums() {
        for (tokens, (inputs, outputs)) in AWKWARD_LENGTHS.into_iter().zip([(3, 2), (1, 1), (7, 130), (65, 64), (5, 1)])
        {
            let (x, weight) = (gaussian(1, &[2, tokens, inputs]), gaussian(2, &[outputs, inputs]));
            let y = Linear { x: &x, weight: &weight }.forward().unwrap();
            let mut expected = Tensor::zeros(&[2, tokens, outputs]);
            for (at, y) in expected.data.iter_mut().enumerate() {
                let (row, o) = (at / outputs, at % outputs);
                *y = (0..inputs).map(|i| x.data[row * inputs + i] * weight.data[o * inputs + i]).sum();
            }
            assert!(max_rel(&y, &expected) < 1e-14, "T = {tokens}");
        }
    }

    #[test]
    fn gradients_equal_differences() {
        for (rows, inputs, outputs) in [(1, 1, 1), (5, 3, 4), (2, 1, ROW_BLOCK + 1), (ROW_BLOCK + 1, 2, 1)] {
            let (x, weight) = (gaussian(1, &[rows, inputs]), gaussian(2, &[outputs, inputs]));
            let dy = gaussian(3, &[rows, outputs]);
            let call = Linear { x: &x, weight: &weight };
            let grads = call.backward(&dy).unwrap();
            let loss = |call: Linear| Loss::new(&call.forward().unwrap(), &dy);
            check_gradient("dx", &x, &grads.dx, |x| loss(Linear { x, ..call }));
            check_gradient("dweight", &weight, &grads.dweight, |weight| loss(Linear { weight, ..call }));
        }
    }

    #[test]
    fn no_rows_give_no_gradient() {
        let (x, weight) = (Tensor::zeros(&[0, 3]), gaussian(1, &[2, 3]));
        let grads = Linear { x: &x, weight: &weight }.backward(&Tensor::zeros(&[0, 2])).unwrap();
        assert_eq!(grads, LinearGrads { dx: x, dweight: Tensor::zeros(&[2, 3]) });
    }

    #[test]
    fn threads_change_no_bit() {
        let (x, weight, dy) = (gaussian(1, &[130, 70]), gaussian(2, &[129, 70]), gaussian(3, &[130, 129]));
        let call = Linear { x: &x, weight: &weight };
        let [one, three] = on_one_and_three_threads(|| (call.forward().unwrap(), call.backward(&dy).unwrap()));
        assert_eq!(one, three);
    }

    #[test]
    fn bad_input_is_refused() {
        let (x, weight) = (gaussian(1, &[2, 3]), gaussian(2, &[4, 3]));
        let refused = |x: &Tensor, weight: &Tensor| Linear { x, weight }.forward().unwrap_err().to_string();
        assert!(refused(&x, &gaussian(3, &[3])).contains("[O, I]"));
        assert!(refused(&x, &gaussian(3, &[4, 2])).contains("'x': expected shape [2, 2], got [2, 3]"));
        assert!(refused(&x, &Tensor::zeros(&[0, 3])).contains("O = 0"));
        assert!(refused(&x, &Tensor::filled(&[4, 3], f64::NAN)).contains("'weight' has 12 non-finite"));
        let call = Linear { x: &x, weight: &weight };
        assert!(call.backward(&x).unwrap_err().to_string().contains("'dy'"));
    }
}
