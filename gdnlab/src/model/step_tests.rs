use super::super::config::Size;
use super::*;
use crate::reference::testing::{Loss, check_elements, check_gradient, gaussian, on_one_and_three_threads};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const BATCH: usize = 2;
const LENGTH: usize = 7;
const SEED: u64 = 3;

fn small(mixer: Mixer) -> ModelConfig {
    let heads = if mixer == Mixer::Attention { 1 } else { 2 };
    ModelConfig {
        vocabulary: 16,
        d_model: 32,
        layers: 2,
        mixer,
        heads,
        key_dim: 32,
        value_dim: if mixer == Mixer::Attention { 32 } else { 64 },
        hidden: 24,
    }
}

/// A model in which every parameter matters: matrices keep the size of what they are applied to, norms and gates differ
/// from element to element.
fn lively(mixer: Mixer) -> Model {
    let config = small(mixer);
    let mut model = Model::new(config, SEED).unwrap();
    for (n, (name, tensor)) in model.parameters.iter_mut().enumerate() {
        let mut noise = gaussian(SEED + n as u64, &tensor.dims);
        let (base, deviation) = match *tensor.dims {
            _ if name == "embedding" => (0.0, 1.0),
            [_, inputs] => (0.0, (inputs as f64).powf(-0.5)),
            _ if name.ends_with("norm") => (1.0, 0.3),
            _ => (-0.5, 0.5),
        };
        noise.data.iter_mut().for_each(|x| *x = base + deviation * *x);
        *tensor = noise;
    }
    model
}

fn tokens(vocabulary: usize) -> Vec<u32> {
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    (0..BATCH * (LENGTH + 1)).map(|_| rng.random_range(0..vocabulary as u32)).collect()
}

/// The loss as the differences want it, with the magnitude of what was summed.
fn loss(model: &Model) -> Loss {
    let loss = model.loss(&tokens(16), BATCH, LENGTH).unwrap();
    Loss::new(&Tensor::filled(&[1], loss), &Tensor::filled(&[1], 1.0))
}

fn with(model: &Model, name: &str, tensor: Tensor) -> Model {
    let mut changed = model.clone();
    changed.parameters.set(name, tensor).unwrap();
    changed
}

#[test]
fn the_gradient_of_every_parameter_equals_differences() {
    for mixer in Mixer::ALL {
        let model = lively(mixer);
        let (_, grads) = model.loss_and_grads(&tokens(16), BATCH, LENGTH).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(SEED);
        for (name, gradient) in grads.iter() {
            let tensor = model.parameters.get(name).unwrap();
            let largest =
                (0..gradient.data.len()).max_by(|&a, &b| gradient.data[a].abs().total_cmp(&gradient.data[b].abs()));
            let elements: Vec<usize> =
                largest.into_iter().chain((0..3).map(|_| rng.random_range(0..gradient.data.len()))).collect();
            let label = format!("{mixer}, seed {SEED}, d {name}");
            check_elements(&label, tensor, gradient, elements, |x| loss(&with(&model, name, x.clone())));
        }
    }
}

/// The change of the loss along a random direction of a whole tensor, which no wrong element escapes.
#[test]
fn the_gradient_along_every_tensor_equals_differences() {
    for mixer in Mixer::ALL {
        let model = lively(mixer);
        let (_, grads) = model.loss_and_grads(&tokens(16), BATCH, LENGTH).unwrap();
        for (n, (name, gradient)) in grads.iter().enumerate() {
            let mut direction = gaussian(SEED * 100 + n as u64, &gradient.dims);
            let norm = direction.data.iter().map(|x| x * x).sum::<f64>().sqrt();
            direction.data.iter_mut().for_each(|x| *x /= norm);
            let slope: f64 = gradient.data.iter().zip(&direction.data).map(|(g, d)| g * d).sum();
            let at = |s: f64| {
                let mut tensor = model.parameters.get(name).unwrap().clone();
                tensor.data.iter_mut().zip(&direction.data).for_each(|(x, d)| *x += s * d);
                loss(&with(&model, name, tensor))
            };
            let label = format!("{mixer}, seed {SEED}, along {name}");
            check_gradient(&label, &Tensor::zeros(&[1]), &Tensor::filled(&[1], slope), |s| at(s.data[0]));
        }
    }
}

#[test]
fn both_passes_give_the_same_loss() {
    for mixer in Mixer::ALL {
        let model = lively(mixer);
        let (loss, _) = model.loss_and_grads(&tokens(16), BATCH, LENGTH).unwrap();
        assert_eq!(loss, model.loss(&tokens(16), BATCH, LENGTH).unwrap());
    }
}

#[test]
fn an_untrained_model_finds_all_tokens_alike() {
    for mixer in Mixer::ALL {
        let model = Model::new(ModelConfig::preset(mixer, Size::Tiny), SEED).unwrap();
        let loss = model.loss(&tokens(256), BATCH, LENGTH).unwrap();
        assert!((loss - 256f64.ln()).abs() < 0.05, "{mixer}: {loss}");
    }
}

/// Rows of a batch do not see each other, and no token sees the next: the loss of both rows is the mean of theirs, and
/// changing the last tokens changes no earlier loss.
#[test]
fn rows_and_later_tokens_are_not_seen() {
    for mixer in Mixer::ALL {
        let model = lively(mixer);
        let tokens = tokens(16);
        let row = |n: usize| model.loss(&tokens[n * (LENGTH + 1)..][..LENGTH + 1], 1, LENGTH).unwrap();
        let both = model.loss(&tokens, BATCH, LENGTH).unwrap();
        assert!((both - (row(0) + row(1)) / 2.0).abs() < 1e-14, "{mixer}");

        let prefix = |tokens: &[u32], length: usize| model.loss(&tokens[..=length], 1, length).unwrap() * length as f64;
        let last = |token: u32| {
            let mut changed = tokens[..=LENGTH].to_vec();
            changed[LENGTH] = token;
            prefix(&changed, LENGTH) - prefix(&tokens, LENGTH - 1)
        };
        // What remains is the loss of the last token alone, so over the vocabulary its probabilities sum to 1.
        let sum: f64 = (0..16).map(|token| (-last(token)).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-12, "{mixer}: {sum}");
    }
}

#[test]
fn threads_change_no_bit() {
    for mixer in Mixer::ALL {
        let model = Model::new(ModelConfig::preset(mixer, Size::Tiny), SEED).unwrap();
        let tokens = tokens(256);
        let [one, three] = on_one_and_three_threads(|| model.loss_and_grads(&tokens, BATCH, LENGTH).unwrap());
        assert_eq!(one, three, "{mixer}");
    }
}

#[test]
fn bad_input_is_refused() {
    let model = Model::new(small(Mixer::Gdn), SEED).unwrap();
    let refused = |model: &Model, tokens: &[u32], batch, length| {
        let message = model.loss_and_grads(tokens, batch, length).unwrap_err().to_string();
        assert_eq!(message, model.loss(tokens, batch, length).unwrap_err().to_string());
        message
    };
    assert!(refused(&model, &[1; 16], 2, 8).contains("16 tokens for a batch of 2 and a length of 8"));
    assert!(refused(&model, &[], 0, 8).contains("at least 1 of each"));
    assert!(refused(&model, &[1; 3], 3, 0).contains("at least 1 of each"));
    assert!(refused(&model, &[1], 1, usize::MAX).contains("1 tokens"));
    assert!(refused(&model, &[0, 16, 0], 1, 2).contains("token 1 is 16: expected tokens below 16"));
    assert!(refused(&model, &[0, 0, 16], 1, 2).contains("expected tokens below 16"));

    let head = Tensor::filled(&[16, 32], f64::INFINITY);
    assert!(refused(&with(&model, "head", head), &[0, 1, 2], 1, 2).contains("'head' has 512 non-finite"));
    let mut foreign = model.clone();
    foreign.parameters = Parameters::zeros(&small(Mixer::Attention));
    assert!(refused(&foreign, &[0, 1, 2], 1, 2).contains("parameters for a model of"));

    assert!(Model::new(ModelConfig { d_model: 33, ..small(Mixer::Gdn) }, 1).is_err());
    let parameters = Parameters::zeros(&small(Mixer::Attention));
    assert!(Model::from_parameters(small(Mixer::Gdn), parameters).is_err());
}

#[test]
fn memory_is_counted_before_it_is_used() {
    let config = small(Mixer::Attention);
    let bytes = |batch| Model::step_bytes(&config, batch, LENGTH);
    assert!(bytes(2) > bytes(1));
    assert_eq!(Model::step_bytes(&config, usize::MAX, usize::MAX), u128::MAX);
}
