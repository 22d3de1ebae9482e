//! What the parts of a model share: their parameters by name, layers that leave gradients under those names, and the kernel
//! of the recurrence.

use super::config::ModelConfig;
use super::parameters::{Grads, Parameters};
use crate::Result;
use crate::kernel::Kernel;
use crate::problem::Tensor;
use crate::reference::Reference;
use crate::reference::linear::{Linear, LinearGrads};
use crate::reference::norm::{RmsNorm, RmsNormGrads};

/// Added to the mean of squares in the RMSNorms, and to the sum of squares of q and k in GDN.
pub const NORM_EPS: f64 = 1e-6;

/// The parameters whose names begin with a prefix.
pub(super) struct Layer<'a> {
    pub config: &'a ModelConfig,
    /// What computes the recurrence of a GDN mixer.
    pub kernel: &'a dyn Kernel,
    parameters: &'a Parameters,
    prefix: String,
}

impl<'a> Layer<'a> {
    /// The parameters that stand outside of the blocks.
    pub fn outer(config: &'a ModelConfig, parameters: &'a Parameters) -> Self {
        Self { config, kernel: &Reference, parameters, prefix: String::new() }
    }

    /// Those of block `index`.
    pub fn block(config: &'a ModelConfig, parameters: &'a Parameters, index: usize) -> Self {
        Self { config, kernel: &Reference, parameters, prefix: format!("layers.{index}.") }
    }

    /// The same with the recurrence by `kernel`.
    pub fn by(self, kernel: &'a dyn Kernel) -> Self {
        Self { kernel, ..self }
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The parameter `name`.
    pub fn get(&self, name: &str) -> Result<&'a Tensor> {
        self.parameters.get(&self.name(name))
    }

    /// Leaves the gradient of the parameter `name` in `grads`.
    pub fn set(&self, grads: &mut Grads, name: &str, gradient: Tensor) -> Result<()> {
        grads.set(&self.name(name), gradient)
    }

    /// `x W^T` with the matrix `name`.
    pub fn project(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        Linear { x, weight: self.get(name)? }.forward()
    }

    /// The gradient of `x` through [`Layer::project`]; that of the matrix goes to `grads`.
    pub fn project_backward(&self, name: &str, x: &Tensor, dy: &Tensor, grads: &mut Grads) -> Result<Tensor> {
        let LinearGrads { dx, dweight } = Linear { x, weight: self.get(name)? }.backward(dy)?;
        self.set(grads, name, dweight)?;
        Ok(dx)
    }

    /// RMSNorm with the weight `name`.
    pub fn norm(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        RmsNorm { x, weight: self.get(name)?, eps: NORM_EPS }.forward()
    }

    /// The gradient of `x` through [`Layer::norm`]; that of the weight goes to `grads`.
    pub fn norm_backward(&self, name: &str, x: &Tensor, dy: &Tensor, grads: &mut Grads) -> Result<Tensor> {
        let RmsNormGrads { dx, dweight } = RmsNorm { x, weight: self.get(name)?, eps: NORM_EPS }.backward(dy)?;
        self.set(grads, name, dweight)?;
        Ok(dx)
    }
}

/// `sum + term`, element by element.
pub(super) fn add(mut sum: Tensor, term: &Tensor) -> Tensor {
    sum.data.iter_mut().zip(&term.data).for_each(|(sum, x)| *sum += x);
    sum
}

/// `[B, T, H d]` as `[B, T, H, d]`.
pub(super) fn split_heads(x: Tensor, heads: usize) -> Result<Tensor> {
    Tensor::new(&[x.dims[0], x.dims[1], heads, x.dims[2] / heads], x.data)
}

/// `[B, T, H, d]` as `[B, T, H d]`.
pub(super) fn join_heads(x: Tensor) -> Result<Tensor> {
    Tensor::new(&[x.dims[0], x.dims[1], x.dims[2] * x.dims[3]], x.data)
}

/// `[B, T, D]` as `[B T, D]`.
pub(super) fn join_rows(x: Tensor) -> Result<Tensor> {
    Tensor::new(&[x.dims[0] * x.dims[1], x.dims[2]], x.data)
}
