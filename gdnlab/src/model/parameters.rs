//! The parameters of a model by their names, their initialisation, and what has the same names: gradients and moments.

use super::config::{ModelConfig, ParameterTensor};
use crate::inputs::{Draw, initial_dt_bias, initial_rate};
use crate::problem::Tensor;
use crate::{Error, Result};
use rand::RngExt;
use rand_distr::StandardNormal;

/// Standard deviation that matrices begin with, but for those that write to the residual stream.
pub const INITIAL_DEVIATION: f64 = 0.02;

/// One tensor for each parameter of a model, in the order of [`ModelConfig::parameter_tensors`].
#[derive(Clone, Debug, PartialEq)]
pub struct Parameters {
    tensors: Vec<(String, Tensor)>,
}

/// The gradient of the loss by each parameter, under the parameter's name and in its shape.
pub type Grads = Parameters;

impl Parameters {
    /// What training starts from. Each tensor has a random stream of its own, from the seed and the tensor's name, so
    /// that another layer more, or another mixer, changes none of the others.
    ///
    /// | tensor | begins as |
    /// |---|---|
    /// | norms | 1 |
    /// | `A_log` | log of a rate uniform in (1, 16) |
    /// | `dt_bias` | `softplus(dt_bias)` log-uniform in (0.001, 0.1) |
    /// | `mixer.o`, `mlp.down` | N(0, 0.02^2 / 2L): 2L of them add to the residual stream |
    /// | all others | N(0, 0.02^2) |
    pub fn initial(config: &ModelConfig, seed: u64) -> Self {
        let draw = Draw::new(seed);
        let into_residual = INITIAL_DEVIATION / (2.0 * config.layers as f64).sqrt();
        Self::from_specs(config, |ParameterTensor { name, dims, .. }| {
            let normal = |deviation: f64| {
                draw.tensor(name, dims, |rng| {
                    let x: f64 = rng.sample(StandardNormal);
                    deviation * x
                })
            };
            match name.rsplit('.').next() {
                Some("mixer_norm" | "mlp_norm" | "final_norm" | "norm") => Tensor::filled(dims, 1.0),
                Some("A_log") => draw.tensor(name, dims, |rng| initial_rate(rng).ln()),
                Some("dt_bias") => draw.tensor(name, dims, initial_dt_bias),
                Some("o" | "down") => normal(into_residual),
                _ => normal(INITIAL_DEVIATION),
            }
        })
    }

    /// Zeros in the shape of every parameter.
    pub fn zeros(config: &ModelConfig) -> Self {
        Self::from_specs(config, |spec| Tensor::zeros(&spec.dims))
    }

    /// Takes the tensor of each parameter from `tensor_of`.
    ///
    /// # Errors
    /// What `tensor_of` returns, and [`Error::Input`] where a tensor has another shape than its parameter.
    pub fn try_from_fn(config: &ModelConfig, mut tensor_of: impl FnMut(&str) -> Result<Tensor>) -> Result<Self> {
        let take = |ParameterTensor { name, dims, .. }| {
            let tensor = tensor_of(&name)?;
            expect_dims(&name, &tensor, &dims)?;
            Ok((name, tensor))
        };
        Ok(Self { tensors: config.parameter_tensors().into_iter().map(take).collect::<Result<_>>()? })
    }

    fn from_specs(config: &ModelConfig, tensor: impl Fn(&ParameterTensor) -> Tensor) -> Self {
        let tensors = config.parameter_tensors().into_iter().map(|spec| {
            let tensor = tensor(&spec);
            (spec.name, tensor)
        });
        Self { tensors: tensors.collect() }
    }

    /// Every tensor with its name, in their order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Every tensor with its name, to change in place.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&str, &mut Tensor)> {
        self.tensors.iter_mut().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// [`Error::Input`] where there is none.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        let found = self.iter().find(|(other, _)| *other == name);
        found.map(|(_, tensor)| tensor).ok_or_else(|| missing(name))
    }

    /// Puts `tensor` in the place of the one called `name`.
    ///
    /// # Errors
    /// [`Error::Input`] where there is none, or its shape is another.
    pub fn set(&mut self, name: &str, tensor: Tensor) -> Result<()> {
        let (_, place) = self.iter_mut().find(|(other, _)| *other == name).ok_or_else(|| missing(name))?;
        expect_dims(name, &tensor, &place.dims)?;
        *place = tensor;
        Ok(())
    }

    /// The Euclidean norm of all elements together.
    pub fn norm(&self) -> f64 {
        self.iter().flat_map(|(_, tensor)| &tensor.data).map(|x| x * x).sum::<f64>().sqrt()
    }

    /// Refuses tensors that are not those of `config` in number, name, order, shape or finiteness.
    pub(super) fn validate(&self, config: &ModelConfig) -> Result<()> {
        let specs = config.parameter_tensors();
        if specs.len() != self.tensors.len() {
            return Err(Error::input(format!(
                "{} parameters for a model of {}: expected those of {config}",
                self.tensors.len(),
                specs.len()
            )));
        }
        for (ParameterTensor { name, dims, .. }, (held, tensor)) in specs.iter().zip(self.iter()) {
            if name != held {
                return Err(Error::input(format!("parameter '{held}' where {config} has '{name}'")));
            }
            tensor.expect(name, dims)?;
        }
        Ok(())
    }
}

fn missing(name: &str) -> Error {
    Error::input(format!("no parameter is called '{name}': expected one of ModelConfig::parameter_tensors"))
}

fn expect_dims(name: &str, tensor: &Tensor, dims: &[usize]) -> Result<()> {
    if tensor.dims == dims {
        return Ok(());
    }
    Err(Error::input(format!("parameter '{name}': expected shape {dims:?}, got {:?}", tensor.dims)))
}

#[cfg(test)]
mod tests {
    use super::super::config::{Mixer, Size};
    use super::*;
    use crate::activation::softplus;

    fn config(mixer: Mixer) -> ModelConfig {
        ModelConfig::preset(mixer, Size::Tiny)
    }

    #[test]
    fn tensors_are_those_of_the_configuration() {
        for mixer in Mixer::ALL {
            let parameters = Parameters::initial(&config(mixer), 1);
            parameters.validate(&config(mixer)).unwrap();
            let elements: usize = parameters.iter().map(|(_, tensor)| tensor.data.len()).sum();
            assert_eq!(elements as u64, config(mixer).parameters().total());
        }
    }

    #[test]
    fn each_tensor_begins_in_its_distribution() {
        let parameters = Parameters::initial(&config(Mixer::Gdn), 1);
        let deviation = |name: &str| {
            let data = &parameters.get(name).unwrap().data;
            (data.iter().map(|x| x * x).sum::<f64>() / data.len() as f64).sqrt()
        };
        // The relative error of a deviation of n samples is about 1 / sqrt(2n); n is at least 4,096.
        for (name, expected) in [
            ("embedding", 0.02),
            ("head", 0.02),
            ("layers.1.mixer.q", 0.02),
            ("layers.1.mixer.o", 0.01),
            ("layers.0.mlp.down", 0.01),
        ] {
            assert!((deviation(name) / expected - 1.0).abs() < 0.05, "{name}: {}", deviation(name));
        }
        for (name, tensor) in parameters.iter() {
            let all = |test: fn(f64) -> bool| assert!(tensor.data.iter().all(|&x| test(x)), "{name}");
            match name {
                "layers.0.mixer.A_log" => all(|x| (0.0..16f64.ln()).contains(&x)),
                "layers.0.mixer.dt_bias" => all(|x| (0.000_999..0.100_1).contains(&softplus(x))),
                _ if name.ends_with("norm") => all(|x| x == 1.0),
                _ => {}
            }
        }
    }

    #[test]
    fn a_tensor_depends_on_the_seed_and_its_name_only() {
        let (one, gdn) = (Parameters::initial(&config(Mixer::Attention), 1), config(Mixer::Gdn));
        let same = |name: &str, other: &Parameters| one.get(name).unwrap() == other.get(name).unwrap();
        assert!(same("layers.1.mlp.up", &Parameters::initial(&gdn, 1)));
        assert!(!same("layers.1.mlp.up", &Parameters::initial(&gdn, 2)));
        assert_ne!(one.get("layers.0.mlp.up").unwrap(), one.get("layers.1.mlp.up").unwrap());
        let deeper = ModelConfig { layers: 3, ..gdn };
        assert!(same("embedding", &Parameters::initial(&deeper, 1)));
    }

    #[test]
    fn foreign_tensors_are_refused() {
        let mut parameters = Parameters::zeros(&config(Mixer::Attention));
        assert!(parameters.get("mixer.q").unwrap_err().to_string().contains("no parameter is called 'mixer.q'"));
        let message = parameters.set("head", Tensor::zeros(&[1])).unwrap_err().to_string();
        assert!(message.contains("'head': expected shape [256, 64], got [1]"), "{message}");
        assert!(parameters.set("tail", Tensor::zeros(&[1])).is_err());
        let refused = |config: &ModelConfig| parameters.validate(config).unwrap_err().to_string();
        assert!(refused(&config(Mixer::Gdn)).contains("parameters for a model of"));
        let narrow = ModelConfig { hidden: 8, ..config(Mixer::Attention) };
        assert!(refused(&narrow).contains("'layers.0.mlp.gate'"));
        let made = Parameters::try_from_fn(&narrow, |_| Ok(Tensor::zeros(&[1])));
        assert!(made.unwrap_err().to_string().contains("'embedding'"));
        let mut broken = Parameters::zeros(&narrow);
        broken.set("head", Tensor::filled(&[256, 64], f64::NAN)).unwrap();
        assert!(broken.validate(&narrow).unwrap_err().to_string().contains("'head' has 16384 non-finite"));
    }

    #[test]
    fn the_norm_is_over_all_tensors() {
        let mut parameters = Parameters::zeros(&config(Mixer::Attention));
        parameters.iter_mut().take(2).for_each(|(_, tensor)| tensor.data[0] = 3.0);
        parameters.iter_mut().skip(2).take(2).for_each(|(_, tensor)| tensor.data[1] = -4.0);
        assert_eq!(parameters.norm(), 50f64.sqrt());
    }
}
