use super::*;
use crate::problem::Shape;
use crate::record::{Environment, Timing, Workload};
use crate::rounding::{Setting, search, trials_of_diagnosis, trials_of_steps};
use crate::table::rows::{numbers, texts};
use std::ops::ControlFlow;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published");

fn small() -> Setting {
    Setting { shape: Shape::new(64, 1, 16, 16), seed: 1 }
}

fn measure(trials: &[rounding::Trial]) -> Vec<Record> {
    rounding::measure(trials, |_| ControlFlow::Continue(())).unwrap()
}

#[test]
fn steps_of_the_forward_stand_beside_the_published_ones() {
    let records = measure(&trials_of_steps(small()));
    let table = rounding(&records, FOLDER).unwrap();
    assert_eq!(texts(&table, "step").unwrap(), ["inverse", "write product", "U", "scores", "output", FORWARD]);
    assert_eq!(numbers(&table, "published").unwrap()[0], Some(0.343));
    assert_eq!(numbers(&table, "published").unwrap()[4], None, "the output alone was not published");
    let [bf16, fp32] = ["bf16", "fp32"].map(|name| numbers(&table, name).unwrap());
    assert!(bf16[..5].iter().zip(&fp32).all(|(coarse, fine)| coarse.unwrap() > 1e3 * fine.unwrap()));
    let per_tensor = rounding_per_tensor(&records, Format::F16).unwrap();
    assert_eq!((per_tensor.height(), per_tensor.width()), (12, 10));
    assert!(rounding(&[], FOLDER).unwrap_err().to_string().contains("no record of a rounded"));
}

#[test]
fn every_case_of_the_diagnosis_was_published() {
    let table = diagnosis(&measure(&trials_of_diagnosis(small())), FOLDER).unwrap();
    for column in ["published", "here", "here_over_published"] {
        assert!(numbers(&table, column).unwrap().iter().all(Option::is_some), "{table:?}");
    }
}

#[test]
fn proposals_meet_the_threshold_and_say_what_they_change() {
    let judged = rounding::judge(&measure(&search::forward(small()))).unwrap();
    let table = policies(&judged).unwrap();
    assert_eq!(table.height(), judged.len());
    assert!(texts(&table, "w, u").unwrap().iter().any(String::is_empty), "the residual form has no w, u");
    let of = |threshold| rounding::proposals(&judged, threshold).unwrap();
    let strict = proposals(&of(1e-9), &[]).unwrap();
    assert!(proposals_in_words(&of(1e-9), 1e-9).contains("WY form, cheapest with fp16: no policy is within"));
    let words = proposals_in_words(&of(0.006), 0.006);
    assert!(
        words.contains("no byte more") && words.contains("% in o, within 0.6 %") && words.lines().count() == 8,
        "{words}"
    );
    assert_eq!(numbers(&strict, "bytes").unwrap()[1], None, "no policy meets that");
    let table = proposals(&of(0.006), &[("again_pct", &judged)]).unwrap();
    assert_eq!((table.height(), texts(&table, "changed").unwrap()[0].as_str()), (2 * 4, "nothing"));
    let [bytes, more, error, again] =
        ["bytes", "more_bytes_pct", "error_pct", "again_pct"].map(|name| numbers(&table, name).unwrap());
    assert_eq!((bytes[2], bytes[3], more[2]), (bytes[0], bytes[0], Some(0.0)));
    assert!(error == again && error[3] < error[0]);
    let choices = rounding::choices_of(&of(0.006));
    assert!((4..=8).contains(&choices.len()) && choices.iter().all(|one| judged.iter().any(|all| all.choice == *one)));
    assert!(rounding::proposals(&judged[1..2], 0.006).unwrap_err().to_string().contains("everything in bf16"));
}

#[test]
fn whole_policies_stand_beside_each_other() {
    let (bf16, fp16) =
        (Choice::uniform(WriteForm::Wy, Format::Bf16), Choice::uniform(WriteForm::Residual, Format::F16));
    let records = measure(&search::both_passes_of(small(), [&bf16, &fp16]));
    let table = policies_per_tensor(&records, &[("bf16", &bf16), ("fp16", &fp16)]).unwrap();
    assert_eq!((table.height(), table.width()), (2, 10));
    let o = numbers(&table, "o").unwrap();
    assert!(o[0] > o[1], "{table:?}");
    let other = Choice::uniform(WriteForm::Wy, Format::F32);
    assert!(policies_per_tensor(&records, &[("fp32", &other)]).unwrap_err().to_string().contains("no row with step"));
}

#[test]
fn times_are_those_of_the_mode_and_the_newest() {
    let judged = rounding::judge(&measure(&search::forward(small())[189..191])).unwrap();
    let table = policies(&judged).unwrap();
    let time = |mode: &str, tokens: usize, utc: &str, latency_ms: f64| {
        let environment = Environment { utc: Some(utc.to_owned()), ..Environment::default() };
        let workload = Workload::new(crate::problem::Op::Gdn2, &Shape::new(tokens, 12, 128, 128));
        let workload = workload.kernel("k", mode).pass(Pass::Fwd);
        Record::new(&environment, &workload, Measurement::Bench(Timing { latency_ms, ..Timing::default() }))
    };
    let records =
        [time("bf16", 64, "2", 2.0), time("bf16", 64, "1", 1.0), time("tf32", 64, "3", 3.0), time("bf16", 8, "4", 4.0)];
    let timed = with_times(&table, &records, 64, 12).unwrap();
    assert_eq!(texts(&timed, "mode").unwrap(), ["bf16", ""]);
    assert_eq!(
        (numbers(&timed, "fwd_ms").unwrap(), numbers(&timed, "bwd_ms").unwrap()),
        (vec![Some(2.0), None], vec![None; 2])
    );
}
