use super::tests::check;
use super::{speed_and_accuracy, speed_up_bars, time_against_floor};
use crate::Error;
use crate::record::{self, Record};
use crate::table::{gdn_accuracy, gdn_speedups, gdn_times, rooflines};
use gdnlab_deps::polars::prelude::DataFrame;
use std::path::Path;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data");

fn read(name: &str) -> Vec<Record> {
    record::read(Path::new(DATA).join(name)).unwrap()
}

/// The times of 18 rows of ours that were recorded on an H200, or of none, beside the published ones.
fn times(records: &[Record]) -> DataFrame {
    let published = Path::new(DATA).join("published");
    let rates = rooflines(&read("bench-roofline_nvidia-h200_2026-11-30.jsonl"), &published).unwrap();
    gdn_times(records, &published, &rates).unwrap()
}

/// Those of one run, so that the figure does not change with later ones.
fn recorded() -> Vec<Record> {
    let is_of_run =
        |record: &Record| record.environment.commit.as_deref().is_some_and(|hash| hash.starts_with("e05d330c"));
    read("bench-gdn_nvidia-h200_2026-11-30.jsonl").into_iter().filter(is_of_run).collect()
}

fn accuracy() -> DataFrame {
    let (backends, numerics) =
        (read("backends_nvidia-h200_2026-11-30.jsonl"), read("day01_numerics_nvidia-h200_2026-11-30.jsonl"));
    gdn_accuracy(&backends, &numerics, Path::new(DATA).join("published")).unwrap()
}

#[test]
fn every_row_is_a_dot_above_the_floor() {
    let figure = time_against_floor(&times(&recorded()), "the footer").unwrap();
    check(&figure, &["forward, time in ms", "backward, time in ms", "FlashInfer", "gdnlab", "×10", "the footer"]);
    // 171 times three, 32 times two, 18 of ours, and four in the legend.
    assert_eq!(figure.svg().matches("<circle").count(), 171 * 3 + 32 * 2 + 18 + 4);
    let says = figure.description();
    assert!(says.contains("gdnlab forward") && says.contains("times the floor in 10 rows"), "{says}");
    let alone = time_against_floor(&times(&[]), "").unwrap();
    assert!(alone.description().contains("FlashQLA forward") && alone.description().contains("in 171 rows"));
    assert!(alone.svg().contains("forward best peer ×"));
    let no_rates =
        gdn_times(&[], Path::new(DATA).join("published"), &rooflines(&[], Path::new(DATA).join("published")).unwrap());
    assert!(matches!(time_against_floor(&no_rates.unwrap(), ""), Err(Error::Figure(_))));
}

#[test]
fn bars_say_who_is_faster_and_are_not_drawn_without_ours() {
    let figure = speed_up_bars(&gdn_speedups(&times(&recorded())).unwrap(), "the footer").unwrap();
    check(&figure, &["forward, all", "backward, all", "397B/122B TP1, 16/64", "FlashQLA", "the footer"]);
    assert!(figure.description().contains("(10 rows), backward ×"), "{}", figure.description());
    assert!(matches!(speed_up_bars(&gdn_speedups(&times(&[])).unwrap(), ""), Err(Error::Figure(_))));
}

#[test]
fn each_implementation_stands_at_its_speed_and_its_errors_or_is_a_line() {
    let figure = speed_and_accuracy(&times(&recorded()), &accuracy(), "the footer").unwrap();
    check(&figure, &["final_state", "dbeta", "forward: relative RMS error against float64", "the footer"]);
    // o and final_state of both, five gradients of fla, six of ours, and four in the legend.
    assert_eq!(figure.svg().matches("<circle").count(), 2 * 2 + 5 + 6 + 4);
    let says = figure.description();
    assert!(says.contains("FlashQLA") && says.contains("errors not measured"), "{says}");
    assert!(says.starts_with("Errors of fla are 2.6 to 11.9 times gdnlab's forward, "), "{says}");
    let without_ours = speed_and_accuracy(&times(&[]), &accuracy(), "").unwrap();
    assert!(without_ours.description().starts_with("Accuracy beside speed"));
    assert!(matches!(speed_and_accuracy(&times(&[]), &accuracy().head(Some(0)), ""), Err(Error::Figure(_))));
}
