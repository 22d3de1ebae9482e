//! What must agree to the bit: replays and launches, two runs, a training that was resumed.

use crate::case::*;
use gdnlab::model::config::Mixer;
use gdnlab::model::gpu::{GpuOptions, GpuTraining};
use gdnlab::model::train::Training;
use gdnlab::peer::Destination;

/// Losses of `steps` steps, and what remains.
fn after(training: &mut GpuTraining, steps: usize) -> (Vec<f64>, Training) {
    let text = counting();
    let losses = (0..steps).map(|_| training.step(&text).unwrap().loss).collect();
    (losses, training.to_training().unwrap())
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_replayed_step_equals_a_launched_one_and_two_runs_agree() {
    let _alone = alone();
    for mixer in Mixer::ALL {
        let training = lively(mixer);
        let [replayed, again, launched] = [true, true, false].map(|graph| {
            let mut on_gpu = on_gpu(&training, GpuOptions { graph, ..GpuOptions::default() });
            after(&mut on_gpu, 3)
        });
        assert!(replayed == again, "{mixer}: two runs differ: {:?} and {:?}", replayed.0, again.0);
        assert!(replayed == launched, "{mixer}: replays differ from launches: {:?}, {:?}", replayed.0, launched.0);
        assert_ne!(replayed.1.model, training.model);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_resumed_training_equals_one_that_never_stopped() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    for mixer in Mixer::ALL {
        let options = GpuOptions { logit_tokens: 80, ..GpuOptions::default() };
        let mut whole = GpuTraining::new(gpu(), small(mixer), settings(4), options, &counting()).unwrap();
        let before = after(&mut whole, 2);
        let path = folder.path().join(mixer.name());
        whole.save(&Destination::new(&path, &[]).unwrap()).unwrap();
        assert!(Training::load(&path).unwrap() == before.1, "{mixer}: the CPU reads what the GPU wrote");
        // The slices of logits are those of the checkpoint.
        let mut resumed = GpuTraining::load(gpu(), &path, GpuOptions::default()).unwrap();
        assert_eq!((resumed.steps(), resumed.options().logit_tokens), (2, 80));
        assert!(resumed.to_training().unwrap() == before.1, "{mixer}: nothing is lost on the way");
        let (resumed, whole) = (after(&mut resumed, 2), after(&mut whole, 2));
        assert!(resumed == whole, "{mixer}: {:?} and {:?}", resumed.0, whole.0);
    }
}

/// Algorithms that were chosen by trials are part of the checkpoint.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_tuned_training_is_resumed_with_its_algorithms() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tuned");
    let tuned = GpuOptions { tuned: true, ..GpuOptions::default() };
    let mut whole = GpuTraining::new(gpu(), small(Mixer::Gdn), settings(4), tuned, &counting()).unwrap();
    after(&mut whole, 1);
    whole.save(&Destination::new(&path, &[]).unwrap()).unwrap();
    let mut resumed = GpuTraining::load(gpu(), &path, GpuOptions::default()).unwrap();
    assert!(after(&mut resumed, 2) == after(&mut whole, 2));
}
