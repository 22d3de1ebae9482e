use super::search::{PAIRS, forward, forwards_of, pairs};
use super::trial::Finished;
use super::*;
use crate::precision::{Format, Intermediate, WriteForm};
use crate::problem::Shape;
use crate::record::{Environment, Pass, Record};
use crate::table;
use std::ops::ControlFlow;

fn measured(trials: &[Trial]) -> Vec<Record> {
    measure(trials, |_| ControlFlow::Continue(())).unwrap()
}

fn small(tokens: usize) -> Setting {
    Setting { shape: Shape::new(tokens, 2, 32, 32), seed: 1 }
}

/// Published in percent, first 64 tokens: the intermediates alone, then all of them with the output.
const PUBLISHED: [(&str, f64); 5] =
    [("write product", 0.1657), ("inverse", 0.3430), ("scores", 0.7154), ("U", 0.8027), (FORWARD, 1.1573)];

#[test]
fn the_published_roundings_are_met_within_a_quarter_and_in_their_order() {
    for seed in 1..=3 {
        let mut trials = trials_of_steps(Setting::rfc(64, seed));
        trials.retain(|trial| trial.format == Some(Format::Bf16));
        let found = PUBLISHED.map(|(step, published)| {
            let mut trial = trials.iter().find(|trial| trial.step == step).unwrap().clone();
            trial.tensors = Tensors::Output;
            let percent = 100.0 * measured(&[trial])[0].errors().unwrap().rel_rms.unwrap();
            let ratio = percent / published;
            assert!((0.75..1.25).contains(&ratio), "seed {seed}, {step}: {percent} %, published {published} %");
            percent
        });
        assert!(found.is_sorted(), "seed {seed}: {found:?}");
    }
}

/// The numbers that the tests hold themselves to are those of the file.
#[test]
fn the_file_of_published_roundings_says_the_same() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published");
    for (step, percent) in PUBLISHED {
        assert_eq!(table::published_rounding(folder, step).unwrap(), Some(percent), "{step}");
    }
}

/// What exists only on paper must be exact, and each format must err about as its unit roundoff says.
#[test]
fn each_format_errs_by_its_unit_roundoff() {
    let mut trials = trials_of_steps(small(64));
    trials.retain(|trial| ["none", "U"].contains(&trial.step.as_str()));
    let records = measured(&trials);
    let errors = |format: Option<&'static str>| {
        let of_format = records.iter().filter(move |r| r.precision().unwrap().format.as_deref() == format);
        of_format.map(|record| record.errors().unwrap())
    };
    assert_eq!(errors(None).count(), Tensors::All.names().len());
    assert!(errors(None).all(|errors| errors.rel_rms.unwrap() < 1e-12));
    let of_u = |format: Format| errors(Some(format.name())).find(|e| e.tensor == "o").unwrap().rel_rms.unwrap();
    for (coarse, fine) in [(Format::Bf16, Format::F16), (Format::F16, Format::F32)] {
        let expected = coarse.unit_roundoff() / fine.unit_roundoff();
        let factor = of_u(coarse) / of_u(fine);
        assert!((0.6..1.6).contains(&(factor / expected)), "{coarse} over {fine}: {factor}, expected {expected}");
    }
    assert!((of_u(Format::Tf32) / of_u(Format::F16) - 1.0).abs() < 0.1, "f16 has the digits of TF32");
}

/// The five cases of a GPU, in order; the recurrence is far below the chunk forms, and the reference's bf16 costs.
#[test]
fn the_diagnosis_has_the_order_of_the_published_one() {
    let records = measured(&trials_of_diagnosis(Setting::rfc(256, 1)));
    let error = |row: usize| records[row].errors().unwrap().rel_rms.unwrap();
    assert_eq!(records.len(), DIAGNOSIS.len());
    assert!(error(0) > 1.03 * error(1), "normalising in bf16: {} against {}", error(0), error(1));
    assert!(error(2) < error(1) && (error(2) / error(3) - 1.0).abs() < 0.05, "an IEEE solve helps a little");
    assert!(error(4) < 0.5 * error(3), "the recurrence: {}", error(4));
}

/// Nothing that the search leaves out is better than what it keeps.
#[test]
fn policies_of_three_formats_are_never_cheaper_and_more_accurate() {
    let setting = small(80);
    let slots = Choice::forward_slots(WriteForm::Residual);
    let mut all = vec![Choice::uniform(WriteForm::Residual, Format::Bf16)];
    for &slot in slots {
        let formats = [Format::Bf16, Format::F16, Format::F32];
        all = all.iter().flat_map(|choice| formats.map(|format| choice.clone().with(slot, format))).collect();
    }
    assert_eq!(all.len(), 3usize.pow(slots.len() as u32));
    let searched = pairs(&all[0], slots);
    assert_eq!(searched.len(), 3 * (1 << slots.len()) - 3);
    let every = judge(&measured(&forwards_of(setting, &all))).unwrap();
    let found = judge(&measured(&forwards_of(setting, &searched))).unwrap();
    for judged in &every {
        let best = most_accurate(&found, judged.bytes.total()).unwrap();
        assert!(best.rel_rms <= 1.02 * judged.rel_rms, "{} beats {}", judged.choice, best.choice);
    }
    for formats in PAIRS {
        let (of_all, of_pairs) = (cheapest(&every, &formats, 0.005), cheapest(&found, &formats, 0.005));
        assert_eq!(of_all.map(|judged| &judged.choice), of_pairs.map(|judged| &judged.choice));
    }
    let proposed = proposal(&found, 0.005).unwrap();
    assert!(
        proposed.rel_rms <= 0.005
            && proposed.bytes.total() <= cheapest(&found, &PAIRS[1], 0.005).unwrap().bytes.total()
    );
    assert!(proposal(&found, 1e-9).is_none());
    let front = front(&found);
    assert!(front.len() > 1 && front.windows(2).all(|pair| pair[0].bytes.total() < pair[1].bytes.total()));
    assert!(front.windows(2).all(|pair| pair[0].rel_rms > pair[1].rel_rms));
}

#[test]
fn the_worst_gradient_judges_a_backward() {
    let start = Choice::uniform(WriteForm::Residual, Format::F16);
    let trials = search::backward(small(32), &start);
    assert_eq!(trials.len(), 3 * 32 - 3);
    let records = measured(&trials[..2]);
    let judged = judge(&records).unwrap();
    assert_eq!((judged.len(), judged[0].pass, records.len()), (2, Pass::Bwd, 14));
    let largest = records[..7].iter().filter_map(|record| record.errors()?.rel_rms).fold(0.0, f64::max);
    assert_eq!(judged[0].rel_rms, largest);
    let both = [records, measured(&forward(small(32))[..1])].concat();
    assert!(judge(&both).unwrap_err().to_string().contains("both passes"));
    assert!(judge(&[]).is_err());
}

/// A run that is stopped and goes on gives what one run gives, and measures nothing twice.
#[test]
fn a_stopped_search_goes_on_where_it_was() {
    let trials = &forward(small(20))[..5];
    let whole = measured(trials);
    let stop_at = |at: usize| {
        move |step: &crate::numerics::Step| {
            if step.done == at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }
    };
    let clean = Environment { commit: Some("c0ffee".to_owned()), dirty: Some(false), ..Environment::detect() };
    let made = |known: &[Record], stop: usize| {
        let mut kept = Vec::new();
        let mut keep = |records: &[Record]| {
            kept.extend_from_slice(records);
            Ok(())
        };
        let finished = trial::run_in(&clean, trials, known, &mut keep, stop_at(stop)).unwrap();
        (finished, kept)
    };
    let (Finished { records: first, stopped }, kept) = made(&[], 2);
    assert!(stopped && first.len() == 2 && kept == first);
    let (Finished { records, stopped }, kept) = made(&first, 9);
    assert!(!stopped && kept.len() == 3);
    let errors = |records: &[Record]| records.iter().map(|record| record.errors().cloned()).collect::<Vec<_>>();
    assert_eq!(errors(&records), errors(&whole));
    let (other_code, _) = made(&whole, 1);
    assert_eq!(other_code.records.len(), 1, "records of other code do not count");
}

#[test]
fn a_setting_that_makes_no_sense_is_refused() {
    let none = Setting { shape: Shape::new(64, 0, 16, 16), seed: 1 };
    let refused = measure(&forward(none), |_| ControlFlow::Continue(()));
    let stopped = measure(&forward(small(4)), |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(crate::Error::Stopped)));
    assert!(refused.unwrap_err().to_string().contains("HV = 0"));
    assert!(Choice::uniform(WriteForm::Wy, Format::F16).format(Intermediate::Output).is_none());
}
