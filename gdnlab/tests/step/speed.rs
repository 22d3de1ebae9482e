//! How fast a step is, and where its time goes: `--nocapture` shows the tables.

use crate::case::{alone, gpu, small};
use gdnlab::cost::model::{Batch, training_cost_per_token};
use gdnlab::cuda::KernelSum;
use gdnlab::model::adamw::Schedule;
use gdnlab::model::config::{Mixer, ModelConfig, Size};
use gdnlab::model::gpu::{GpuOptions, GpuTraining};
use gdnlab::model::text::Text;
use gdnlab::model::train::Settings;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Instant;

/// Steps before the clock starts, and steps that it counts.
const WARM: usize = 3;
const TIMED: usize = 10;

/// Tokens of the whole vocabulary.
fn random_tokens(config: &ModelConfig, settings: &Settings) -> Vec<u32> {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let count = settings.batch * (settings.length + 1);
    (0..count).map(|_| rng.random_range(0..config.vocabulary as u32)).collect()
}

fn training(config: ModelConfig, batch: Batch, tuned: bool) -> GpuTraining {
    let steps = (WARM + TIMED) as u64;
    let settings = Settings {
        batch: batch.sequences,
        length: batch.tokens,
        schedule: Schedule { peak: 1e-3, floor: 1e-4, warmup: 2, steps },
        validate_every: 0,
        ..Settings::tiny(steps, 1)
    };
    let options = GpuOptions { tuned, ..GpuOptions::default() };
    GpuTraining::new(gpu(), config, settings, options, &Text::of_system().unwrap()).unwrap()
}

/// Each kernel of a step by its name, the largest sum first.
fn by_name(training: GpuTraining, tokens: &[u32]) -> Vec<KernelSum> {
    KernelSum::of(&training.kernel_times(tokens).unwrap())
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_kernel_of_a_step_is_timed() {
    let _alone = alone();
    for mixer in Mixer::ALL {
        let config = small(mixer);
        let training = training(config, Batch { sequences: 2, tokens: 70 }, false);
        let tokens = random_tokens(&config, training.settings());
        let times = by_name(training, &tokens);
        let count = |name: &str| times.iter().find(|sum| sum.name == name).map_or(0, |sum| sum.launches);
        // Two blocks with two norms each, and the last norm.
        assert_eq!([count("rms_norm_forward"), count("rms_norm_backward"), count("adamw")], [5, 5, 1], "{times:?}");
        // Four products of each block and the head, forward, and for both gradients.
        let products: usize = times.iter().filter(|sum| sum.name.contains(" bf16")).map(|sum| sum.launches).sum();
        assert_eq!(products, 3 * (4 * 2 + 1), "{times:?}");
        assert!(times.iter().all(|sum| sum.ms >= 0.0));
    }
}

/// PyTorch's tokens per second on an H200, eager, with SDPA and fla's layer of GDN, where they were measured.
const PYTORCH: [(Mixer, Size, Option<f64>); 8] = [
    (Mixer::Attention, Size::M30, Some(574e3)),
    (Mixer::Gdn, Size::M30, Some(390e3)),
    (Mixer::Attention, Size::M60, None),
    (Mixer::Gdn, Size::M60, None),
    (Mixer::Attention, Size::M125, Some(235e3)),
    (Mixer::Gdn, Size::M125, None),
    (Mixer::Attention, Size::M250, Some(153e3)),
    (Mixer::Gdn, Size::M250, None),
];

#[test]
#[ignore = "needs an NVIDIA H200 for itself"]
fn the_ladder_is_faster_than_pytorch_on_an_h200() {
    let _alone = alone();
    assert!(gpu().name.contains("H200"), "{}: the times to compare with are those of an H200", gpu().name);
    for (mixer, size, pytorch) in PYTORCH {
        let config = ModelConfig::preset(mixer, size);
        let start = Instant::now();
        let mut training = training(config, Batch::LADDER, true);
        let ready_s = start.elapsed().as_secs_f64();
        let tokens = random_tokens(&config, training.settings());
        (0..WARM).for_each(|_| training.start_step(&tokens).unwrap());
        training.last().unwrap();
        let start = Instant::now();
        (0..TIMED).for_each(|_| training.start_step(&tokens).unwrap());
        let last = training.last().unwrap();
        let step_s = start.elapsed().as_secs_f64() / TIMED as f64;
        let rate = training.settings().tokens_per_step() as f64 / step_s;
        let tflop_s = rate * training_cost_per_token(&config, &Batch::LADDER).flop / 1e12;
        println!(
            "{mixer} {size}: {:.1} ms, {rate:.0} tok/s, {tflop_s:.0} TFLOP/s, {}; loss {:.3}, ready in {ready_s:.1} s",
            step_s * 1e3,
            training.memory(),
            last.loss
        );
        let times = by_name(training, &tokens);
        let total: f64 = times.iter().map(|sum| sum.ms).sum();
        println!("  {:>8.2} ms in kernels launched one by one", total);
        for KernelSum { name, launches, ms } in times.iter().take(24) {
            println!("  {ms:>8.2} ms {:>5.1} % {launches:>4} x {name}", 100.0 * ms / total);
        }
        if let Some(pytorch) = pytorch {
            assert!(rate > pytorch, "{mixer} {size}: {rate:.0} tok/s, PyTorch {pytorch:.0}");
        }
    }
}
