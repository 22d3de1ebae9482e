//! The loss of a model and its gradient, in float64: the truth for any other training step.

use super::block;
use super::config::{Mixer, ModelConfig};
use super::layer::{Layer, join_rows};
use super::parameters::{Grads, Parameters};
use crate::kernel::Kernel;
use crate::problem::Tensor;
use crate::reference::Reference;
use crate::reference::token::{CrossEntropy, Embedding};
use crate::{Error, Result, memory};

/// A language model: its sizes and its parameters.
///
/// ```
/// use gdnlab::model::{Model, config::{Mixer, ModelConfig, Size}};
/// let model = Model::new(ModelConfig::preset(Mixer::Gdn, Size::Tiny), 1)?;
/// let tokens: Vec<u32> = (0..2 * 17).map(|n| n * n % 256).collect();
/// let (loss, grads) = model.loss_and_grads(&tokens, 2, 16)?;
/// assert!((loss - 256f64.ln()).abs() < 0.1, "an untrained model knows nothing");
/// assert_eq!(grads.get("layers.0.mixer.A_log")?.dims, [2]);
/// # Ok::<(), gdnlab::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    config: ModelConfig,
    /// The parameters. Each step refuses those that do not fit the sizes, or are not finite.
    pub parameters: Parameters,
}

/// `B` rows of `T + 1` tokens: the first `T` are read, the last `T` predicted.
struct Windows {
    dims: [usize; 2],
    inputs: Vec<u32>,
    targets: Vec<u32>,
}

impl Windows {
    fn new(tokens: &[u32], batch: usize, length: usize) -> Result<Self> {
        let expected = length.checked_add(1).and_then(|row| row.checked_mul(batch));
        if batch == 0 || length == 0 || expected != Some(tokens.len()) {
            return Err(Error::input(format!(
                "{} tokens for a batch of {batch} and a length of {length}: expected at least 1 of each, and in each row one token more than the length, since it is the last target",
                tokens.len()
            )));
        }
        let rows = || tokens.chunks_exact(length + 1);
        Ok(Self {
            dims: [batch, length],
            inputs: rows().flat_map(|row| &row[..length]).copied().collect(),
            targets: rows().flat_map(|row| &row[1..]).copied().collect(),
        })
    }
}

impl Model {
    /// A model with the parameters that training starts from, [`Parameters::initial`].
    ///
    /// # Errors
    /// [`Error::Input`] where `config` is not valid, or has more parameters than the memory holds.
    pub fn new(config: ModelConfig, seed: u64) -> Result<Self> {
        config.validate()?;
        memory::require(bytes(config.parameters().total().into()))?;
        Ok(Self { config, parameters: Parameters::initial(&config, seed) })
    }

    /// A model with parameters from elsewhere.
    ///
    /// # Errors
    /// [`Error::Input`] where `config` is not valid, or `parameters` are not the finite tensors that it names.
    pub fn from_parameters(config: ModelConfig, parameters: Parameters) -> Result<Self> {
        config.validate()?;
        parameters.validate(&config)?;
        Ok(Self { config, parameters })
    }

    /// The sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The mean cross-entropy of the next token, in nats, over `batch` rows of `length + 1` tokens, of which the first
    /// `length` are read and the last `length` predicted.
    ///
    /// # Errors
    /// [`Error::Input`] where there are not `batch (length + 1)` tokens of the vocabulary, a parameter is not finite, or
    /// memory does not suffice.
    pub fn loss(&self, tokens: &[u32], batch: usize, length: usize) -> Result<f64> {
        let windows = self.windows(tokens, batch, length)?;
        let mut x = self.embed(&windows)?;
        for index in 0..self.config.layers {
            x = block::forward(&self.block(index), x)?.0;
        }
        let n = self.outer().norm("final_norm", &x)?;
        let logits = self.outer().project("head", &n)?;
        CrossEntropy { logits: &join_rows(logits)?, targets: &windows.targets }.forward()
    }

    /// The loss of [`Model::loss`], and its gradient by every parameter. Threads over blocks of rows, sequences and
    /// heads; no bit depends on their number.
    ///
    /// # Errors
    /// As [`Model::loss`].
    pub fn loss_and_grads(&self, tokens: &[u32], batch: usize, length: usize) -> Result<(f64, Grads)> {
        self.loss_and_grads_by(&Reference, tokens, batch, length)
    }

    /// The same with the recurrence of GDN, forward and backward, by `kernel`, on inputs rounded to its input format; all else
    /// is float64. Attention has no recurrence.
    ///
    /// # Errors
    /// As [`Model::loss`], and what the kernel reports.
    pub fn loss_and_grads_by(
        &self,
        kernel: &dyn Kernel,
        tokens: &[u32],
        batch: usize,
        length: usize,
    ) -> Result<(f64, Grads)> {
        let windows = self.windows(tokens, batch, length)?;
        let mut grads = Parameters::zeros(&self.config);
        let mut x = self.embed(&windows)?;
        let mut caches = Vec::with_capacity(self.config.layers);
        for index in 0..self.config.layers {
            let (y, cache) = block::forward(&self.block(index).by(kernel), x)?;
            caches.push(cache);
            x = y;
        }
        let outer = self.outer();
        let n = outer.norm("final_norm", &x)?;
        let logits = join_rows(outer.project("head", &n)?)?;
        let head = CrossEntropy { logits: &logits, targets: &windows.targets };
        let loss = head.forward()?;

        let dn = outer.project_backward("head", &join_rows(n)?, &head.backward()?, &mut grads)?;
        let mut dx = outer.norm_backward("final_norm", &x, &Tensor::new(&x.dims, dn.data)?, &mut grads)?;
        for (index, cache) in caches.into_iter().enumerate().rev() {
            dx = block::backward(&self.block(index).by(kernel), cache, dx, &mut grads)?;
        }
        outer.set(&mut grads, "embedding", self.embedding(&windows)?.backward(&join_rows(dx)?)?)?;
        Ok((loss, grads))
    }

    /// Bytes that one step of [`Model::loss_and_grads`] needs at most, about: activations that are kept, and parameters,
    /// gradients and two moments.
    pub fn step_bytes(config: &ModelConfig, batch: usize, length: usize) -> u128 {
        let ModelConfig { vocabulary, d_model, layers, hidden, .. } = *config;
        let (keys, values) = (config.key_width(), config.value_width());
        let mixer = match config.mixer {
            Mixer::Attention => 2 * keys + 2 * values,
            Mixer::Gdn => 6 * keys + 7 * values,
        };
        let per_block = 4 * d_model + mixer + 3 * hidden;
        // The block at work holds gradients beside what is kept; the head holds logits, their gradient and copies.
        let per_token = (layers + 2) as u128 * per_block as u128 + 3 * vocabulary as u128;
        let tokens = (batch as u128).saturating_mul(length as u128);
        bytes(tokens.saturating_mul(per_token).saturating_add(4 * u128::from(config.parameters().total())))
    }

    fn windows(&self, tokens: &[u32], batch: usize, length: usize) -> Result<Windows> {
        let windows = Windows::new(tokens, batch, length)?;
        self.parameters.validate(&self.config)?;
        memory::require(Self::step_bytes(&self.config, batch, length))?;
        Ok(windows)
    }

    fn outer(&self) -> Layer<'_> {
        Layer::outer(&self.config, &self.parameters)
    }

    fn block(&self, index: usize) -> Layer<'_> {
        Layer::block(&self.config, &self.parameters, index)
    }

    fn embedding<'a>(&'a self, windows: &'a Windows) -> Result<Embedding<'a>> {
        Ok(Embedding { weight: self.parameters.get("embedding")?, tokens: &windows.inputs })
    }

    /// `[B, T, D]`.
    fn embed(&self, windows: &Windows) -> Result<Tensor> {
        let x = self.embedding(windows)?.forward()?;
        let [batch, length] = windows.dims;
        Tensor::new(&[batch, length, self.config.d_model], x.data)
    }
}

fn bytes(elements: u128) -> u128 {
    elements.saturating_mul(size_of::<f64>() as u128)
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
