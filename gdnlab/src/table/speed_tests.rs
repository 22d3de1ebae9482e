use super::super::gdn_goals;
use super::super::rooflines;
use super::*;
use crate::problem::Op;
use crate::record::{Environment, Roofline, Timing};

const PUBLISHED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published");

fn environment(utc: &str) -> Environment {
    let machine = Machine { gpu: Some(PUBLISHED_GPU.to_owned()), ..Machine::default() };
    Environment { machine, utc: Some(utc.to_owned()), ..Environment::default() }
}

fn rates_of_h200() -> DataFrame {
    let rate = |quantity: &str, value: f64, unit: &str| {
        let rate = Roofline { quantity: quantity.to_owned(), value, theoretical: None, unit: unit.to_owned() };
        Record::new(&environment("2026-11-30T00:00:00Z"), &Workload::default(), Measurement::Roofline(rate))
    };
    rooflines(&[rate("copy_bandwidth", 4000.0, "GB/s"), rate("bf16_matmul", 800.0, "TFLOP/s")], PUBLISHED).unwrap()
}

fn record(case: &Case, kernel: &str, utc: &str, latency_ms: f64) -> Record {
    let workload = case.workload().kernel(kernel, "f16-internals").inputs(REGIME, 1);
    let timing = Timing { latency_ms, ..Timing::default() };
    Record::new(&environment(utc), &workload, Measurement::Bench(timing))
}

/// Ours on every published case, at `part` of the time of the fastest library.
fn ours(part: f64) -> Vec<Record> {
    let of = |case: &Case| record(case, "cuda-chunk-bf16", "2026-12-01T00:00:00Z", part * case.best_peer().unwrap().ms);
    published(PUBLISHED).unwrap().iter().map(of).collect()
}

fn training(pass: Pass, kernel: &str, ms: f64) -> Record {
    let shape = Shape { batch: 32, ..Shape::new(1024, 6, 64, 128) };
    let workload = Workload::new(Op::Gdn, &shape).pass(pass).kernel(kernel, "f16-internals").inputs(REGIME, 1);
    let timing = Timing { latency_ms: ms, ..Timing::default() };
    Record::new(&environment("2026-12-01T00:00:00Z"), &workload, Measurement::Bench(timing))
}

fn number(table: &DataFrame, name: &str, row: usize) -> f64 {
    numbers(table, name).unwrap()[row].unwrap()
}

#[test]
fn without_records_the_published_times_stand_alone() {
    let times = gdn_times(&[], PUBLISHED, &rates_of_h200()).unwrap();
    assert_eq!(times.height(), 171 * 3 + 32 * 2);
    assert_eq!(texts(&times, "implementation").unwrap()[..3], ["FlashQLA", "FlashInfer", "fla"]);
    assert_eq!((texts(&times, "model").unwrap()[0].as_str(), number(&times, "ms", 0)), ("397B/122B TP8, 2/8", 0.32));
    // 163,840 - 2 * 2 * 64 * 128 * 3/4 FLOP per token and value head: q and k are shared by four.
    let flop = 32_768.0 * 8.0 * 163_840.0 - 32_768.0 * 6.0 * 4.0 * 64.0 * 128.0;
    let bytes = 32_768.0 * 8.0 * 648.0 + 8.0 * 8.0 * 16_384.0;
    assert!((number(&times, "floor_ms", 0) / (1e3 * flop / 800e12) - 1.0).abs() < 1e-12);
    assert!((number(&times, "bytes_ms", 0) / (1e3 * bytes / 4e12) - 1.0).abs() < 1e-12);
    assert_eq!((gdn_speedups(&times).unwrap().height(), gdn_losses(&times).unwrap().height()), (0, 0));
    let goals = gdn_goals(&times).unwrap();
    assert!(texts(&goals, "met").unwrap().iter().all(|met| met == "–"));
    // A machine without rates has no floor.
    let unknown = gdn_times(&[], PUBLISHED, &rooflines(&[], PUBLISHED).unwrap()).unwrap();
    assert_eq!(numbers(&unknown, "floor_ms").unwrap()[0], None);
}

#[test]
fn the_newest_time_stands_and_a_library_of_the_same_run_takes_the_place_of_the_published_one() {
    let case = &published(PUBLISHED).unwrap()[0];
    let other_inputs = {
        let mut record = record(case, "cuda-chunk-bf16", "2026-12-03T00:00:00Z", 9.0);
        record.workload.regime = Some("gaussian".to_owned());
        record
    };
    let records = [
        record(case, "cuda-chunk-bf16", "2026-12-02T00:00:00Z", 0.2),
        record(case, "cuda-chunk-bf16", "2026-12-01T00:00:00Z", 0.5),
        record(case, "cuda-chunk-bf16-internals", "2026-12-01T00:00:00Z", 0.4),
        record(case, "fla", "2026-12-01T00:00:00Z", 0.8),
        record(case, "reference", "2026-12-01T00:00:00Z", 100.0),
        other_inputs,
    ];
    let times = gdn_times(&records, PUBLISHED, &rates_of_h200()).unwrap();
    assert_eq!(times.height(), 171 * 3 + 32 * 2 + 2);
    let (names, sources) = (texts(&times, "implementation").unwrap(), texts(&times, "source").unwrap());
    assert_eq!(names[..5], ["FlashQLA", "FlashInfer", "fla", "gdnlab", "gdnlab bf16-internals"]);
    assert_eq!(sources[..4], ["published", "published", "2026-12-01", "2026-12-02"]);
    assert_eq!((number(&times, "ms", 2), number(&times, "ms", 3)), (0.8, 0.2));
    let speedups = gdn_speedups(&times).unwrap();
    assert_eq!(texts(&speedups, "model").unwrap(), ["all", "397B/122B TP8, 2/8"]);
    for (column, expected) in [("FlashQLA", 1.6), ("fla", 4.0), ("best", 1.6), ("least", 1.6), ("rows", 1.0)] {
        assert!((number(&speedups, column, 0) - expected).abs() < 1e-12, "{column}");
    }
}

#[test]
fn every_row_goes_into_the_means_and_losses_are_listed_worst_first() {
    let mut records = ours(0.5);
    records.extend(
        [(0, 0.4), (5, 1.0)]
            .map(|(at, ms)| record(&published(PUBLISHED).unwrap()[at], "cuda-chunk-bf16", "2026-12-02T00:00:00Z", ms)),
    );
    let times = gdn_times(&records, PUBLISHED, &rates_of_h200()).unwrap();
    let speedups = gdn_speedups(&times).unwrap();
    // All, nine models, all, four numbers of heads.
    assert_eq!(speedups.height(), 1 + 9 + 1 + 4);
    assert_eq!(
        (number(&speedups, "rows", 0), number(&speedups, "rows", 1), number(&speedups, "rows", 10)),
        (171.0, 19.0, 32.0)
    );
    assert_eq!((number(&speedups, "loses", 0), number(&speedups, "loses", 10)), (2.0, 0.0));
    let exact = (169.0 * 2f64.ln() + (0.32f64 / 0.4).ln() + 0.316f64.ln()) / 171.0;
    assert!((number(&speedups, "best", 0) - exact.exp()).abs() < 1e-9);
    assert!((number(&speedups, "best", 10) - 2.0).abs() < 1e-12);
    assert_eq!(numbers(&speedups, "FlashInfer").unwrap()[10], None, "it has no backward");
    let losses = gdn_losses(&times).unwrap();
    assert_eq!(texts(&losses, "sequences").unwrap(), ["28672+4096", "1x32768"]);
    assert!((number(&losses, "ratio", 0) - 0.316).abs() < 1e-12);
}

#[test]
fn a_case_is_one_row_with_everybody_side_by_side() {
    let records = [ours(0.5).remove(0), training(Pass::Bwd, "cuda-chunk-bf16", 2.0)];
    let table = gdn_rows(&gdn_times(&records, PUBLISHED, &rates_of_h200()).unwrap()).unwrap();
    assert_eq!(table.height(), 204);
    let columns = ["FlashQLA", "FlashInfer", "fla", "gdnlab", "best_over_ours"].map(|name| number(&table, name, 0));
    assert_eq!(columns, [0.32, 1.655, 0.902, 0.16, 2.0]);
    let (last, models) = (203, texts(&table, "model").unwrap());
    assert_eq!((models[last].as_str(), number(&table, "gdnlab", last)), ("training, 6/6", 2.0));
    assert!(numbers(&table, "best_over_ours").unwrap()[last].is_none() && number(&table, "over_floor", last) > 1.0);
}

#[test]
fn goals_are_met_or_not_by_what_was_measured() {
    let mut records = ours(0.4);
    for (kernel, forward, backward) in [("cuda-chunk-bf16", 0.5, 1.0), ("fla", 1.5, 4.5)] {
        records.extend([training(Pass::Fwd, kernel, forward), training(Pass::Bwd, kernel, backward)]);
    }
    let times = gdn_times(&records, PUBLISHED, &rates_of_h200()).unwrap();
    let goals = gdn_goals(&times).unwrap();
    let (met, words) = (texts(&goals, "met").unwrap(), texts(&goals, "goal").unwrap());
    let row = |start: &str| words.iter().position(|words| words.starts_with(start)).unwrap();
    for (start, value, rows, yes) in [
        ("forward, slowest", 2.5, 171.0, "yes"),
        ("forward, geometric", 2.5, 171.0, "yes"),
        ("backward, slowest", 2.5, 32.0, "yes"),
        ("backward, geometric", 2.5, 32.0, "yes"),
        ("training", 4.0, 1.0, "yes"),
    ] {
        let row = row(start);
        assert!((number(&goals, "measured", row) - value).abs() < 1e-9, "{start}");
        assert_eq!((number(&goals, "rows", row), met[row].as_str()), (rows, yes), "{start}");
    }
    // 0.4 * 0.827 ms against 32,768 tokens of 64 heads with 648 bytes, and 256 states in and out.
    let bytes = 32_768.0 * 64.0 * 648.0 + 4.0 * 64.0 * 8.0 * 16_384.0;
    let full = row("forward, 16/64");
    assert!((number(&goals, "measured", full) - 0.4 * 0.827 / (1e3 * bytes / 4e12)).abs() < 1e-9);
    assert_eq!(number(&goals, "rows", row("backward, 16/32")), 4.0);
    let slower = gdn_times(&ours(0.9), PUBLISHED, &rates_of_h200()).unwrap();
    let met = texts(&gdn_goals(&slower).unwrap(), "met").unwrap();
    assert_eq!(met[..2], ["yes", "no"]);
    assert_eq!(met[6], "–");
}
