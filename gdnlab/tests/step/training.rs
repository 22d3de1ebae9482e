//! Training: it follows the one on the CPU, the loss falls, and what cannot be trained is refused.

use crate::case::*;
use gdnlab::Error;
use gdnlab::model::adamw::Schedule;
use gdnlab::model::config::{Mixer, ModelConfig, Size};
use gdnlab::model::gpu::{GpuOptions, GpuTraining, train};
use gdnlab::model::text::Text;
use gdnlab::model::train::{Settings, Training};
use std::ops::ControlFlow;

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn steps_follow_those_in_float64() {
    let _alone = alone();
    let text = counting();
    for mixer in Mixer::ALL {
        let mut on_cpu = Training::new(small(mixer), settings(6), &text).unwrap();
        let mut on_gpu = on_gpu(&on_cpu, GpuOptions::default());
        for _ in 0..6 {
            let (expected, found) = (on_cpu.step(&text).unwrap(), on_gpu.step(&text).unwrap());
            println!("{mixer} {}: {} for {}", found.step, found.loss, expected.loss);
            assert!((found.loss / expected.loss - 1.0).abs() < 5e-3, "{mixer}: {found:?} for {expected:?}");
            assert!((found.gradient_norm / expected.gradient_norm - 1.0).abs() < 3e-2, "{found:?} for {expected:?}");
            assert_eq!((found.step, found.rate), (expected.step, expected.rate));
        }
        // The first weights to move most are the same.
        let of = |name: &str, training: &Training| training.model.parameters.get(name).unwrap().clone();
        let found = on_gpu.to_training().unwrap();
        for name in ["final_norm", "layers.1.mixer.o", "layers.0.mlp.down", "head"] {
            let error = rel_rms(&of(name, &found), &of(name, &on_cpu));
            println!("{mixer}: {name} after 6 steps: rel_rms {error:.2e}");
            assert!(error < 0.1, "{mixer}: {name} {error}");
        }
        assert!(on_gpu.is_finished() && on_gpu.step(&text).unwrap_err().to_string().contains("all 6 steps"));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_loss_falls_on_real_text() {
    let _alone = alone();
    let text = Text::of_system().unwrap();
    for mixer in Mixer::ALL {
        let settings = Settings { validate_every: 25, ..settings(50) };
        let mut training = GpuTraining::new(gpu(), small(mixer), settings, GpuOptions::default(), &text).unwrap();
        let before = training.validation_loss(&text).unwrap();
        assert!((before - 256f64.ln()).abs() < 0.1, "{mixer}: {before}");
        let mut steps = Vec::new();
        train(&mut training, &text, |step| {
            steps.push(*step);
            ControlFlow::Continue(())
        })
        .unwrap();
        let losses: Vec<f64> = steps.iter().map(|step| step.loss).collect();
        let after = steps[49].validation.unwrap();
        println!("{mixer} on {}: {before} to {after}; {losses:.2?}", text.name());
        assert!(after < before - 1.5, "{mixer}: {before} to {after}");
        assert!(losses[45..].iter().sum::<f64>() < losses[..5].iter().sum::<f64>() - 5.0 * 1.2, "{mixer}: {losses:?}");
        assert_eq!(steps.iter().filter(|step| step.validation.is_some()).count(), 2);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_training_stops_when_asked_and_when_it_diverges() {
    let _alone = alone();
    let text = counting();
    let mut training = GpuTraining::new(gpu(), small(Mixer::Gdn), settings(3), GpuOptions::default(), &text).unwrap();
    assert!(matches!(train(&mut training, &text, |_| ControlFlow::Break(())), Err(Error::Stopped)));
    assert_eq!(training.steps(), 1);
    let other = Text::new("other", [&[b'x'; 2000][..]]);
    assert!(
        train(&mut training, &other, |_| ControlFlow::Continue(())).unwrap_err().to_string().contains("not the text")
    );
    let few = training.start_step(&[1, 2, 3]).unwrap_err().to_string();
    assert!(few.contains("3 tokens for a step of B = 2, T = 96"), "{few}");
    drop(training);

    let schedule = Schedule { peak: 1e30, floor: 0.0, warmup: 0, steps: 5 };
    let settings = Settings { schedule, ..settings(5) };
    let options = GpuOptions::default();
    let mut training = GpuTraining::new(gpu(), small(Mixer::Attention), settings, options, &text).unwrap();
    let message = train(&mut training, &text, |_| ControlFlow::Continue(())).unwrap_err().to_string();
    assert!(message.contains("of 5") && message.contains("diverged"), "{message}");
    // What was not finite has changed nothing: the model is that of the step before.
    assert!(training.steps() < 5 && training.to_training().is_ok());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_does_not_fit_is_refused_before_memory_is_taken() {
    let _alone = alone();
    let text = Text::of_system().unwrap();
    let free = gpu().free_bytes().unwrap();
    let config = ModelConfig::preset(Mixer::Attention, Size::M250);
    let settings = Settings { batch: 1 << 14, length: 1024, ..settings(5) };
    let refused = GpuTraining::new(gpu(), config, settings, GpuOptions::default(), &text).err().unwrap().to_string();
    assert!(refused.contains("GB are free: use"), "{refused}");
    assert!(gpu().free_bytes().unwrap() + (64 << 20) > free);
    let narrow = ModelConfig { vocabulary: 128, ..small(Mixer::Gdn) };
    let refused =
        GpuTraining::new(gpu(), narrow, crate::case::settings(5), GpuOptions::default(), &text).err().unwrap();
    assert!(refused.to_string().contains("vocabulary = 128"));
}

/// What was counted beforehand is what is taken, but for what the driver adds.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_memory_of_a_training_is_known_beforehand() {
    let _alone = alone();
    for mixer in Mixer::ALL {
        let before = gpu().free_bytes().unwrap();
        let training = GpuTraining::new(gpu(), small(mixer), settings(5), GpuOptions::default(), &counting()).unwrap();
        let taken = before.saturating_sub(gpu().free_bytes().unwrap()) as f64;
        let counted = training.memory().total_bytes() as f64;
        println!("{mixer}: {counted} bytes counted, {taken} taken: {}", training.memory());
        // The pool grows by whole pages of 32 MiB at the most, and compiled kernels take some.
        assert!(taken < counted + f64::from(256 << 20), "{mixer}: {counted} bytes counted, {taken} taken");
    }
}
