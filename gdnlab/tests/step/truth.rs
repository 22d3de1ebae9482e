//! Loss and gradients against the float64 step.

use crate::case::*;
use gdnlab::model::config::Mixer;
use gdnlab::model::gpu::GpuOptions;
use gdnlab::model::parameters::Grads;

/// Relative error of the loss at the most.
const LOSS: f64 = 1e-3;
/// `||x - r|| / ||r||` of the gradient of a parameter at the most. Each of some ten roundings to bf16 on the way through a
/// block, forward and backward, gives 1.7e-3, and they add up like random steps.
const GRADIENT: f64 = 2.5e-2;

fn compare(label: &str, found: &Grads, expected: &Grads) {
    let mut wrong = Vec::new();
    for ((name, found), (_, expected)) in found.iter().zip(expected.iter()) {
        let error = rel_rms(found, expected);
        println!("{label}: d {name}: rel_rms {error:.2e}");
        // NaN is not below anything.
        if !matches!(error.partial_cmp(&GRADIENT), Some(std::cmp::Ordering::Less)) {
            wrong.push(format!("{name} {error:.2e}"));
        }
    }
    assert!(wrong.is_empty(), "{label}, seed {SEED}: rel_rms above {GRADIENT}: {}", wrong.join(", "));
}

fn compare_step(mixer: Mixer, logit_tokens: usize) {
    let training = lively(mixer);
    let (expected_loss, expected) = training.model.loss_and_grads(&tokens(), BATCH, LENGTH).unwrap();
    let mut on_gpu = on_gpu(&training, GpuOptions { logit_tokens, ..GpuOptions::default() });
    let (loss, grads) = on_gpu.loss_and_grads(&tokens()).unwrap();
    let error = (loss / expected_loss - 1.0).abs();
    println!("{mixer}: loss {loss} for {expected_loss}, {error:.1e}");
    assert!(error < LOSS, "{mixer}: loss {loss} for {expected_loss}");
    compare(mixer.name(), &grads, &expected);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn loss_and_gradients_of_attention_equal_those_in_float64() {
    let _alone = alone();
    compare_step(Mixer::Attention, 4096);
}

/// With three slices of logits, the last of another length.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn loss_and_gradients_of_gdn_equal_those_in_float64() {
    let _alone = alone();
    compare_step(Mixer::Gdn, 80);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn slices_of_logits_change_no_loss() {
    let _alone = alone();
    for mixer in Mixer::ALL {
        let training = lively(mixer);
        let losses = [4096, 96, 80].map(|logit_tokens| {
            let mut on_gpu = on_gpu(&training, GpuOptions { logit_tokens, ..GpuOptions::default() });
            on_gpu.loss_and_grads(&tokens()).unwrap()
        });
        for (loss, grads) in &losses[1..] {
            // Another shape may have another algorithm.
            assert!((loss - losses[0].0).abs() < 1e-4 * loss, "{mixer}: {loss} for {}", losses[0].0);
            compare(mixer.name(), grads, &losses[0].1);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_loss_of_validation_equals_that_in_float64() {
    let _alone = alone();
    for mixer in Mixer::ALL {
        let training = lively(mixer);
        let expected = training.validation_loss(&counting()).unwrap();
        // Three rows in batches of two.
        let loss = on_gpu(&training, GpuOptions::default()).validation_loss(&counting()).unwrap();
        assert!((loss / expected - 1.0).abs() < LOSS, "{mixer}: {loss} for {expected}");
    }
}
