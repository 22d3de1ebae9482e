use super::super::config::Mixer;
use super::super::train::tests::{counting, settings, small};
use super::super::train::train;
use super::*;
use std::ops::ControlFlow;

fn after_two_steps(mixer: Mixer) -> Training {
    let text = counting();
    let mut training = Training::new(small(mixer), settings(4), &text).unwrap();
    (0..2).for_each(|_| {
        training.step(&text).unwrap();
    });
    training
}

#[test]
fn a_resumed_training_equals_one_that_never_stopped() {
    let (folder, text) = (tempfile::tempdir().unwrap(), counting());
    for mixer in Mixer::ALL {
        let path = folder.path().join("checkpoint.safetensors");
        let mut training = after_two_steps(mixer);
        training.save(&Destination::new(&path, &[]).unwrap()).unwrap();
        let mut resumed = Training::load(&path).unwrap();
        assert_eq!(resumed, training);
        for run in [&mut training, &mut resumed] {
            train(run, &text, |_| ControlFlow::Continue(())).unwrap();
        }
        let bits = |run: &Training| {
            let sets = [&run.model.parameters, &run.moments.m, &run.moments.v];
            let tensors = sets.into_iter().flat_map(Parameters::iter);
            tensors.flat_map(|(_, tensor)| &tensor.data).map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(bits(&resumed), bits(&training));
        assert_eq!(resumed, training);
        assert_eq!(resumed.steps(), 4);
    }
}

#[test]
fn what_is_no_checkpoint_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let destination = Destination::new(&path, &[]).unwrap();
    let training = after_two_steps(Mixer::Gdn);
    let refused = |what: &str, words: &str| {
        let message = Training::load(&path).unwrap_err().to_string();
        assert!(message.starts_with(&path.display().to_string()) && message.contains(words), "{what}: {message}");
    };
    let tensor = &training.model.parameters.iter().next().unwrap().1;
    refused("missing", "expected a safetensors file");

    let write = |metadata: &[(&str, &str)]| {
        destination.write(vec![Stored::values("embedding", tensor, Format::F64)], metadata).unwrap();
    };
    write(&[]);
    refused("a case", "expected a checkpoint of version 1, got none");
    write(&[("checkpoint", "2")]);
    refused("a later version", "version 1, got 2");
    write(&[("checkpoint", "1")]);
    refused("no sizes", "has no metadata entry 'config'");
    write(&[("checkpoint", "1"), ("config", "{}")]);
    refused("empty sizes", "metadata config: missing field");
    let mut config = *training.model.config();
    let with_config = |config: &ModelConfig| {
        let (config, settings) =
            (serde_json::to_string(config).unwrap(), serde_json::to_string(&training.settings).unwrap());
        write(&[("checkpoint", "1"), ("config", &config), ("settings", &settings), ("steps", "2"), ("text", "x")]);
    };
    with_config(&config);
    refused("one tensor", "has no tensor 'layers.0.mixer_norm'");
    config.layers = 1 << 20;
    with_config(&config);
    refused("many layers", "holds 1 tensors");
    config.layers = 0;
    with_config(&config);
    refused("no layer", "layers = 0");

    let mut wrong = training.clone();
    wrong.moments.steps = 5;
    wrong.save(&destination).unwrap();
    refused("too many steps", "5 of 4 steps taken");
    let mut wrong = training.clone();
    wrong.moments.v.iter_mut().for_each(|(_, tensor)| tensor.data[0] = -1.0);
    wrong.save(&destination).unwrap();
    refused("a negative square", "second moment of 'embedding' is below 0");
    let mut wrong = training.clone();
    wrong.settings.length = 0;
    wrong.save(&destination).unwrap();
    refused("senseless settings", "length = 0");
    let mut wrong = training.clone();
    wrong.model.parameters.iter_mut().for_each(|(_, tensor)| tensor.data[0] = f64::NAN);
    wrong.save(&destination).unwrap();
    refused("NaN", "'embedding' has 1 non-finite");

    training.save(&destination).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 8]).unwrap();
    refused("truncated", "truncated");
}
