use super::super::config::{Mixer, Size};
use super::*;

/// A model of bytes that learns in tenths of a second.
pub(in super::super) fn small(mixer: Mixer) -> ModelConfig {
    ModelConfig { d_model: 32, layers: 1, heads: 1, hidden: 64, ..ModelConfig::preset(mixer, Size::Tiny) }
}

pub(in super::super) fn settings(steps: u64) -> Settings {
    Settings { batch: 2, length: 32, validate_rows: 3, validate_every: 3, ..Settings::tiny(steps, 7) }
}

/// Prose without randomness: numbers in words.
pub(in super::super) fn counting() -> Text {
    let digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];
    let words: Vec<String> =
        (0..2000).map(|n| format!("{} {} {}\n", digits[n / 100 % 10], digits[n / 10 % 10], digits[n % 10])).collect();
    Text::new("counting", [words.concat().as_bytes()])
}

fn all(training: &mut Training, text: &Text) -> Vec<Step> {
    let mut steps = Vec::new();
    train(training, text, |step| {
        steps.push(*step);
        ControlFlow::Continue(())
    })
    .unwrap();
    steps
}

#[test]
fn the_loss_falls_on_real_text() {
    let text = Text::of_system().unwrap();
    let without_context = text.loss_without_context();
    for mixer in Mixer::ALL {
        let settings = Settings { length: 64, validate_every: 80, ..Settings::tiny(80, 1) };
        let config = ModelConfig::preset(mixer, Size::Tiny);
        let mut training = Training::new(config, settings, &text).unwrap();
        let before = training.validation_loss(&text).unwrap();
        let steps = all(&mut training, &text);
        let after = steps[79].validation.unwrap();
        let of_text = format!("{mixer} on {}: {before} to {after}, without context {without_context}", text.name());
        assert!((before - 256f64.ln()).abs() < 0.1, "{of_text}");
        assert!(after < without_context - 0.1, "{of_text}");
        assert_eq!(after, training.validation_loss(&text).unwrap());
    }
}

#[test]
fn a_step_reports_what_it_did() {
    let text = counting();
    let mut training = Training::new(small(Mixer::Attention), settings(7), &text).unwrap();
    let first = text.batch(7, 0, 2, 32).unwrap();
    let (loss, grads) = training.model.loss_and_grads(&first, 2, 32).unwrap();
    let steps = all(&mut training, &text);
    assert_eq!((steps[0].loss, steps[0].gradient_norm), (loss, grads.norm()));
    assert_eq!(steps.iter().map(|step| step.step).collect::<Vec<_>>(), (1..=7).collect::<Vec<_>>());
    let validated: Vec<u64> = steps.iter().filter(|step| step.validation.is_some()).map(|step| step.step).collect();
    assert_eq!(validated, [3, 6, 7]);
    assert!(steps.iter().all(|step| step.latency_ms > 0.0 && step.steps == 7));
    assert_eq!(steps[3].rate, training.settings().schedule.rate(3));
    assert!(training.is_finished());
    assert!(all(&mut training, &text).is_empty());
}

#[test]
fn two_trainings_agree_to_the_bit() {
    let text = counting();
    for mixer in Mixer::ALL {
        let mut runs = [1, 2].map(|_| Training::new(small(mixer), settings(3), &text).unwrap());
        let losses = runs.each_mut().map(|run| all(run, &text).iter().map(|step| step.loss).collect::<Vec<_>>());
        assert_eq!(losses[0], losses[1]);
        assert_eq!(runs[0], runs[1]);
    }
}

#[test]
fn a_training_stops_when_asked_and_goes_on() {
    let text = counting();
    let mut whole = Training::new(small(Mixer::Gdn), settings(4), &text).unwrap();
    let mut parted = whole.clone();
    all(&mut whole, &text);
    let stopped =
        train(
            &mut parted,
            &text,
            |step| {
                if step.step == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            },
        );
    assert!(matches!(stopped, Err(Error::Stopped)));
    assert_eq!(parted.steps(), 2);
    assert_eq!(all(&mut parted, &text).len(), 2);
    assert_eq!(parted, whole);
    let mut again = Training::new(small(Mixer::Gdn), settings(1), &text).unwrap();
    assert!(train(&mut again, &text, |_| ControlFlow::Break(())).is_ok(), "nothing was left to stop");
}

#[test]
fn bad_input_is_refused() {
    let text = counting();
    let refused = |config, settings, text: &Text| Training::new(config, settings, text).unwrap_err().to_string();
    let (config, settings) = (small(Mixer::Attention), settings(5));
    let narrow = ModelConfig { vocabulary: 128, ..config };
    assert!(refused(narrow, settings, &text).contains("vocabulary = 128: expected at least 256"));
    assert!(refused(ModelConfig { heads: 3, ..config }, settings, &text).contains("attention heads"));
    assert!(refused(config, Settings { batch: 0, ..settings }, &text).contains("batch = 0"));
    assert!(refused(config, Settings { validate_rows: 0, ..settings }, &text).contains("rows of validation = 0"));
    assert!(refused(config, Settings { batch: usize::MAX, ..settings }, &text).contains("batch ="));
    assert!(refused(config, Settings { batch: 1 << 28, ..settings }, &text).contains("of memory"));
    let endless = Schedule { warmup: 5, ..settings.schedule };
    assert!(refused(config, Settings { schedule: endless, ..settings }, &text).contains("5 of 5 steps"));
    let optimizer = AdamW { beta1: 2.0, ..settings.optimizer };
    assert!(refused(config, Settings { optimizer, ..settings }, &text).contains("beta1 = 2"));
    assert!(refused(config, Settings { length: 10_000, ..settings }, &text).contains("shorter sequences"));

    let mut training = Training::new(config, settings, &text).unwrap();
    let other = Text::new("other", [&[b'x'; 1000][..]]);
    let message = train(&mut training, &other, |_| ControlFlow::Continue(())).unwrap_err().to_string();
    assert!(message.contains("other (1000 bytes) is not the text"), "{message}");
}

#[test]
fn a_training_that_diverges_says_so() {
    let text = counting();
    let mut settings = settings(5);
    settings.schedule = Schedule { peak: 1e300, floor: 0.0, warmup: 0, steps: 5 };
    let mut training = Training::new(small(Mixer::Attention), settings, &text).unwrap();
    let message = train(&mut training, &text, |_| ControlFlow::Continue(())).unwrap_err().to_string();
    assert!(message.contains("step 2 of 5") && message.contains("diverged"), "{message}");
}
