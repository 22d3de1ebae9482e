use super::super::rows::{numbers, texts};
use super::*;
use crate::model::config::{Mixer, ModelConfig, Size};
use crate::model::text::Text;
use crate::model::train::{Settings, train};
use crate::record::{Environment, Workload};
use std::ops::ControlFlow;

fn trained(mixer: Mixer) -> (Training, Vec<Step>) {
    let words: String = (0..2000).map(|n| format!("{n} ")).collect();
    let text = Text::new("numbers", [words.as_bytes()]);
    let config = ModelConfig { d_model: 32, layers: 1, heads: 1, hidden: 64, ..ModelConfig::preset(mixer, Size::Tiny) };
    let settings = Settings { batch: 2, length: 16, validate_every: 2, ..Settings::tiny(3, 1) };
    let mut training = Training::new(config, settings, &text).unwrap();
    let mut steps = Vec::new();
    train(&mut training, &text, |step| {
        steps.push(*step);
        ControlFlow::Continue(())
    })
    .unwrap();
    (training, steps)
}

#[test]
fn a_row_for_each_step_of_each_training() {
    let runs = Mixer::ALL.map(trained);
    let runs: Vec<Trained<'_>> = runs.iter().map(|(training, steps)| (training, steps.as_slice())).collect();
    let table = losses(&runs).unwrap();
    assert_eq!(texts(&table, "mixer").unwrap(), ["attn", "attn", "attn", "gdn", "gdn", "gdn"]);
    assert_eq!(numbers(&table, "step").unwrap()[3..], [1.0, 2.0, 3.0].map(Some));
    assert_eq!(numbers(&table, "loss").unwrap()[4], Some(runs[1].1[1].loss));
    let validated: Vec<bool> = numbers(&table, "validation").unwrap().iter().map(Option::is_some).collect();
    assert_eq!(validated, [false, true, true, false, true, true]);
}

#[test]
fn a_training_has_a_rate_and_where_products_are_known_an_mfu() {
    let (training, mut steps) = trained(Mixer::Gdn);
    for (step, ms) in steps.iter_mut().zip([4.0, 1.0, 2.0]) {
        step.latency_ms = ms;
    }
    let rooflines = df!(
        "machine" => ["here", "here"],
        "quantity" => ["copy_bandwidth", "fp64_matmul"],
        "measured" => [10.0, 5.0],
        "theoretical" => [None::<f64>, None],
        "unit" => ["GB/s", "GFLOP/s"]
    )
    .unwrap();
    let table = training_rates(&[(&training, &steps)], &rooflines, "here").unwrap();
    let of = |name: &str| numbers(&table, name).unwrap()[0];
    // The median step takes 2 ms for 2 x 16 tokens.
    assert_eq!(of("tok_per_s"), Some(16_000.0));
    let flop_per_s = of("F_MFLOP_per_tok").unwrap() * 1e6 * 16_000.0;
    assert!((of("mfu_pct").unwrap() - 100.0 * flop_per_s / 5e9).abs() < 1e-9);
    let elsewhere = training_rates(&[(&training, &steps)], &rooflines, "elsewhere").unwrap();
    assert_eq!(numbers(&elsewhere, "mfu_pct").unwrap(), [None]);
}

#[test]
fn of_recorded_trainings_the_newest_of_each_mixer_counts() {
    let record = |mixer: &str, utc: &str, step: u64, loss: f64| {
        let environment = Environment { utc: Some(utc.to_owned()), ..Environment::default() };
        let step = TrainingStep {
            mixer: mixer.to_owned(),
            size: "30M".to_owned(),
            step,
            steps: 2,
            text: "abc".to_owned(),
            loss,
            validation: (step == 2).then_some(loss),
            rate: 1e-3,
            gradient_norm: 1.0,
            latency_ms: 1.0,
        };
        Record::new(&environment, &Workload::default(), Measurement::Training(step))
    };
    let records = [
        record("gdn", "2026-11-02", 1, 6.0),
        record("gdn", "2026-11-02", 2, 5.0),
        record("gdn", "2026-11-01", 1, 60.0),
        record("attn", "2026-11-03", 1, 7.0),
    ];
    let table = recorded_losses(&records).unwrap();
    assert_eq!(texts(&table, "mixer").unwrap(), ["gdn", "gdn", "attn"]);
    assert_eq!(numbers(&table, "loss").unwrap(), [6.0, 5.0, 7.0].map(Some));
    assert_eq!(numbers(&table, "validation").unwrap(), [None, Some(5.0), None]);
    assert_eq!(recorded_losses(&[]).unwrap().height(), 0);
}
