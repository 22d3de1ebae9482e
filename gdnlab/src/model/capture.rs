//! What a recurrence is really called with: the inputs of each layer of a model that learns, with the gradient of the loss.

use super::config::Mixer;
use super::step::Model;
use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Results, Tensor};
use crate::reference::Reference;
use crate::{Error, Result};
use std::sync::{Mutex, PoisonError};

impl Model {
    /// The call of the recurrence in each layer, in a training step on `batch` rows of `length + 1` tokens: queries, keys,
    /// values and gates as training has made them, and `do`, the gradient of the loss by what the recurrence gives. All in
    /// float64, the first layer first.
    ///
    /// The loss is a mean over all tokens, so `do` is the smaller the more there are: [`with_unit_gradient`] takes that out.
    ///
    /// ```
    /// use gdnlab::model::{Model, config::{Mixer, ModelConfig, Size}};
    /// let model = Model::new(ModelConfig::preset(Mixer::Gdn, Size::Tiny), 1)?;
    /// let text: Vec<u32> = "the capital of France".bytes().map(u32::from).collect();
    /// let layers = model.training_inputs(&text, 1, text.len() - 1)?;
    /// assert_eq!((layers.len(), layers[0].shape.tokens), (2, 20));
    /// assert!(layers[0].d_o.is_some());
    /// # Ok::<(), gdnlab::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Input`] for a model of attention, which has no recurrence; otherwise as [`Model::loss_and_grads`].
    pub fn training_inputs(&self, tokens: &[u32], batch: usize, length: usize) -> Result<Vec<Inputs>> {
        let mixer = self.config().mixer;
        if mixer != Mixer::Gdn {
            return Err(Error::input(format!("a model of {mixer} has no recurrence: expected a model of gdn")));
        }
        let kernel = Listener::default();
        self.loss_and_grads_by(&kernel, tokens, batch, length)?;
        let mut heard = kernel.heard.into_inner().unwrap_or_else(PoisonError::into_inner);
        // The backward goes from the last layer to the first.
        heard.reverse();
        Ok(heard)
    }
}

/// The same call with `do` times a power of two, so that its RMS is between 1 and 2. That scales every gradient alike and
/// rounds nothing; it is what loss scaling does for formats with a small range.
#[must_use]
pub fn with_unit_gradient(mut inputs: Inputs) -> Inputs {
    let rms = |tensor: &Tensor| {
        let squares: f64 = tensor.data.iter().map(|x| x * x).sum();
        (squares / tensor.data.len().max(1) as f64).sqrt()
    };
    if let Some(d_o) = inputs.d_o.as_mut() {
        let size = rms(d_o);
        if size > 0.0 {
            let factor = 2f64.powi(-(size.log2().floor() as i32));
            d_o.data.iter_mut().for_each(|x| *x *= factor);
            inputs.d_final_state.iter_mut().flat_map(|state| &mut state.data).for_each(|x| *x *= factor);
        }
    }
    inputs
}

/// The reference, which keeps what its backward was called with.
#[derive(Default)]
struct Listener {
    heard: Mutex<Vec<Inputs>>,
}

impl Kernel for Listener {
    fn name(&self) -> &str {
        Reference.name()
    }

    fn summary(&self) -> String {
        Reference.summary()
    }

    fn needs(&self) -> &'static str {
        Reference.needs()
    }

    fn ops(&self) -> &'static [Op] {
        Reference.ops()
    }

    fn mode(&self) -> &'static str {
        Reference.mode()
    }

    fn input_format(&self) -> Format {
        Reference.input_format()
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        Reference.forward(inputs)
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).push(inputs.clone());
        Reference.backward(inputs)
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::{ModelConfig, Size};
    use super::*;
    use crate::chunked::Chunked;
    use crate::precision::Policy;

    fn tokens(count: usize) -> Vec<u32> {
        (0..count as u32).map(|n| (n * n * 7 + n * 31 + 11) % 256).collect()
    }

    #[test]
    fn what_is_captured_is_what_was_read_with_the_gradient_of_the_loss() {
        let model = Model::new(ModelConfig::preset(Mixer::Gdn, Size::Tiny), 5).unwrap();
        let rows = tokens(2 * 10);
        let read: Vec<u32> = rows.chunks(10).flat_map(|row| &row[..9]).copied().collect();
        let captured = model.training_inputs(&rows, 2, 9).unwrap();
        let heard = model.recurrence_inputs(&read, 2).unwrap();
        assert_eq!(captured.len(), 2);
        for (captured, heard) in captured.iter().zip(&heard) {
            let gradient = captured.d_o.as_ref().unwrap();
            assert_eq!(gradient.dims, [2, 9, 2, 64]);
            assert!(gradient.data.iter().any(|&x| x != 0.0));
            assert_eq!(Inputs { d_o: None, ..captured.clone() }, *heard);
        }
        let attention = Model::new(ModelConfig::preset(Mixer::Attention, Size::Tiny), 5).unwrap();
        assert!(attention.training_inputs(&rows, 2, 9).unwrap_err().to_string().contains("a model of attn"));
    }

    #[test]
    fn a_unit_gradient_changes_the_gradients_by_one_power_of_two() {
        let model = Model::new(ModelConfig::preset(Mixer::Gdn, Size::Tiny), 5).unwrap();
        let before = model.training_inputs(&tokens(33), 1, 32).unwrap().remove(0);
        let after = with_unit_gradient(before.clone());
        let largest = |inputs: &Inputs| inputs.d_o.as_ref().unwrap().data.iter().fold(0.0, |most, x| x.abs().max(most));
        let factor: f64 = largest(&after) / largest(&before);
        assert_eq!(factor.log2().fract(), 0.0);
        let exact = Chunked::new("exact", Policy::fp64(), 16).unwrap();
        let dq = |inputs: &Inputs| exact.backward(inputs).unwrap().grads.unwrap().dq.data;
        let scaled: Vec<f64> = dq(&before).iter().map(|x| x * factor).collect();
        assert_eq!(dq(&after), scaled);
        let squares: f64 = after.d_o.as_ref().unwrap().data.iter().map(|x| x * x).sum();
        let rms = (squares / after.d_o.as_ref().unwrap().data.len() as f64).sqrt();
        assert!((1.0..2.0).contains(&rms), "{rms}");
    }

    #[test]
    fn a_step_by_a_kernel_errs_as_its_precision_does() {
        let mut model = Model::new(ModelConfig::preset(Mixer::Gdn, Size::Tiny), 5).unwrap();
        for (name, tensor) in model.parameters.iter_mut() {
            if tensor.dims.len() == 2 && !name.contains("conv") {
                tensor.data.iter_mut().for_each(|x| *x *= 6.0);
            }
        }
        let rows = tokens(2 * 33);
        let (loss, grads) = model.loss_and_grads(&rows, 2, 32).unwrap();
        let apart = |policy: Policy| {
            let kernel = Chunked::new("mine", policy, 16).unwrap();
            let (other, by_kernel) = model.loss_and_grads_by(&kernel, &rows, 2, 32).unwrap();
            let squares = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
                let both = grads.iter().zip(by_kernel.iter());
                both.flat_map(|((_, a), (_, b))| a.data.iter().zip(&b.data)).map(|(a, b)| of(*a, *b).powi(2)).sum()
            };
            ((other - loss).abs() / loss, (squares(&|a, b| a - b) / squares(&|a, _| a)).sqrt())
        };
        let (exact, fp32, bf16) = (apart(Policy::fp64()), apart(Policy::fp32()), apart(Policy::bf16()));
        assert!(exact.0 < 1e-12 && exact.1 < 1e-11, "{exact:?}");
        assert!((1e-9..1e-5).contains(&fp32.1), "{fp32:?}");
        assert!((1e-4..2e-2).contains(&bf16.1), "{bf16:?}");
    }
}
