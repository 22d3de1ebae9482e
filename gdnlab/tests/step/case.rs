//! What the tests share: small models in which every parameter matters, and a text.

use gdnlab::cuda::Gpu;
use gdnlab::model::adamw::Schedule;
use gdnlab::model::config::{Mixer, ModelConfig, swiglu_hidden};
use gdnlab::model::gpu::{GpuOptions, GpuTraining};
use gdnlab::model::text::Text;
use gdnlab::model::train::{Settings, Training};
use gdnlab::problem::Tensor;
use half::bf16;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub const SEED: u64 = 3;
pub const BATCH: usize = 2;
pub const LENGTH: usize = 96;

/// Tests take turns, so that one can tell what memory it takes.
pub fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn gpu() -> &'static Gpu {
    Gpu::shared().unwrap()
}

/// Two blocks of width 128, with heads as the models of the ladder have them.
pub fn small(mixer: Mixer) -> ModelConfig {
    let value_dim = if mixer == Mixer::Attention { 64 } else { 128 };
    ModelConfig {
        vocabulary: 256,
        d_model: 128,
        layers: 2,
        mixer,
        heads: 2,
        key_dim: 64,
        value_dim,
        hidden: swiglu_hidden(128),
    }
}

pub fn settings(steps: u64) -> Settings {
    Settings {
        batch: BATCH,
        length: LENGTH,
        schedule: Schedule { peak: 3e-3, floor: 3e-4, warmup: 1, steps },
        validate_every: 0,
        validate_rows: 3,
        ..Settings::tiny(steps.max(2), SEED)
    }
}

/// Prose without randomness: numbers in words.
pub fn counting() -> Text {
    let digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];
    let words: Vec<String> =
        (0..2000).map(|n| format!("{} {} {}\n", digits[n / 100 % 10], digits[n / 10 % 10], digits[n % 10])).collect();
    Text::new("counting", [words.concat().as_bytes()])
}

/// A model in which every parameter matters: matrices keep the size of what they are applied to, norms and gates differ
/// from element to element. All values are held by bf16, so that both steps begin with the same ones.
pub fn lively(mixer: Mixer) -> Training {
    let mut training = Training::new(small(mixer), settings(5), &counting()).unwrap();
    for (n, (name, tensor)) in training.model.parameters.iter_mut().enumerate() {
        let (base, deviation) = match *tensor.dims {
            _ if name == "embedding" => (0.0, 1.0),
            [_, inputs] => (0.0, (inputs as f64).powf(-0.5)),
            _ if name.ends_with("norm") => (1.0, 0.3),
            _ => (-0.5, 0.5),
        };
        let mut rng = ChaCha8Rng::seed_from_u64(SEED + n as u64);
        tensor.data.iter_mut().for_each(|x| {
            let noise: f64 = StandardNormal.sample(&mut rng);
            *x = f64::from(bf16::from_f64(base + deviation * noise));
        });
    }
    training
}

pub fn on_gpu(training: &Training, options: GpuOptions) -> GpuTraining {
    GpuTraining::resume(gpu(), training.clone(), options).unwrap()
}

/// The tokens of the first step.
pub fn tokens() -> Vec<u32> {
    counting().batch(SEED, 0, BATCH, LENGTH).unwrap()
}

pub fn rel_rms(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.dims, expected.dims);
    let square = |sum: f64, x: f64| sum + x * x;
    let error = found.data.iter().zip(&expected.data).map(|(x, r)| x - r).fold(0.0, square);
    (error / expected.data.iter().copied().fold(0.0, square)).sqrt()
}
