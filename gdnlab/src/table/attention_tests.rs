use super::super::rooflines;
use super::*;
use crate::record::{Environment, Machine, Timing};

const PUBLISHED_FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published");

fn record(utc: &str, kernel: &str, pass: Pass, heads: usize, ms: f64) -> Record {
    let machine = Machine { gpu: Some("NVIDIA H200".to_owned()), ..Machine::default() };
    let environment = Environment { machine, utc: Some(utc.to_owned()), ..Environment::default() };
    let workload = Workload {
        kernel: Some(kernel.to_owned()),
        pass: Some(pass),
        batch: Some(32),
        tokens: Some(1024),
        value_heads: Some(heads),
        value_dim: Some(64),
        ..Workload::default()
    };
    Record::new(&environment, &workload, Measurement::Attention(Timing { latency_ms: ms, ..Timing::default() }))
}

fn table(records: &[Record]) -> DataFrame {
    attention(records, PUBLISHED_FOLDER, &rooflines(&[], PUBLISHED_FOLDER).unwrap()).unwrap()
}

/// 2 products of `2 d T^2/2` FLOPs in each of 32 x 8 heads, in 5.07 ms: 6.777 TFLOP/s of GB10's 95.45.
#[test]
fn published_times_become_rates() {
    let table = table(&[]);
    assert_eq!(table.height(), 9 + 12, "three backends and four, at three numbers of heads");
    let flop = 2.0 * 2.0 * 64.0 * 1024.0 * 1024.0 / 2.0 * 32.0 * 8.0;
    let rate = flop / 5.07e-3 / 1e12;
    assert!((numbers(&table, "TFLOP_per_s").unwrap()[0].unwrap() - rate).abs() < 1e-9);
    assert!((numbers(&table, "reached_pct").unwrap()[0].unwrap() - 100.0 * rate / 95.45).abs() < 1e-9);
    let kernels = texts(&table, "kernel").unwrap();
    assert_eq!((kernels[0].as_str(), kernels[20].as_str()), ("PyTorch flash, published", "PyTorch 2.11 math"));
}

#[test]
fn the_newest_time_of_a_call_counts() {
    let records = [
        record("2026-11-02T00:00:00Z", "flash", Pass::Fwd, 8, 0.2),
        record("2026-11-03T00:00:00Z", "flash", Pass::Fwd, 8, 0.1),
        record("2026-11-01T00:00:00Z", "flash", Pass::Fwd, 8, 0.3),
        record("2026-11-01T00:00:00Z", "flash", Pass::Bwd, 8, 0.4),
    ];
    let table = table(&records);
    let ms: Vec<f64> = numbers(&table, "ms").unwrap()[21..].iter().flatten().copied().collect();
    assert_eq!(ms, [0.1, 0.4]);
    let rates = &numbers(&table, "TFLOP_per_s").unwrap()[21..];
    // Five products instead of two.
    assert!((rates[1].unwrap() * 0.4 / (rates[0].unwrap() * 0.1) - 2.5).abs() < 1e-9);
    assert_eq!(numbers(&table, "reached_pct").unwrap()[21], None, "no rate of this machine is known");
}

#[test]
fn a_row_for_each_backend_and_a_column_for_each_number_of_heads() {
    let wide = attention_by(&table(&[record("2026-11-02T00:00:00Z", "flash", Pass::Fwd, 12, 0.2)]), "H").unwrap();
    let names: Vec<&str> = wide.get_column_names().iter().map(|name| name.as_str()).collect();
    assert_eq!(names, ["machine", "kernel", "pass", "H = 8", "H = 12", "H = 16"]);
    assert_eq!(numbers(&wide, "H = 12").unwrap(), [7.74, 9.64, 8.26, 0.242, 0.467, 0.151, 7.5, 0.2].map(Some));
    assert_eq!(numbers(&wide, "H = 8").unwrap()[7], None);
    let message = attention_by(&table(&[]), "T").unwrap_err().to_string();
    assert!(message.contains("several times of PyTorch flash, published on GB10 at T = 1024"), "{message}");
}

#[test]
fn a_library_that_we_timed_is_not_ours() {
    let records = ["math", "cudnn-9.19.0"].map(|kernel| record("2026-11-02T00:00:00Z", kernel, Pass::Fwd, 8, 0.2));
    assert_eq!(texts(&table(&records), "kernel").unwrap()[21..], ["gdnlab math", "cuDNN 9.19.0"]);
}

#[test]
fn a_record_without_its_sizes_is_refused() {
    let mut sizeless = record("2026-11-02T00:00:00Z", "flash", Pass::Fwd, 8, 0.2);
    sizeless.workload.value_heads = None;
    let rooflines = rooflines(&[], PUBLISHED_FOLDER).unwrap();
    let message = attention(&[sizeless], PUBLISHED_FOLDER, &rooflines).unwrap_err().to_string();
    assert!(message.contains("lacks one of B, T, HV and V"), "{message}");
}
