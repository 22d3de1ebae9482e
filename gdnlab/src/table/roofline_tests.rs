use super::*;
use crate::record::{Environment, Roofline, Workload};

const PUBLISHED_FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published");

fn record(gpu: &str, utc: &str, quantity: &str, value: f64, unit: &str) -> Record {
    let machine = Machine { gpu: Some(gpu.to_owned()), ..Machine::default() };
    let environment = Environment { machine, utc: Some(utc.to_owned()), ..Environment::default() };
    let roofline =
        Roofline { quantity: quantity.to_owned(), value, theoretical: Some(2.0 * value), unit: unit.to_owned() };
    Record::new(&environment, &Workload::default(), Measurement::Roofline(roofline))
}

fn value(table: &DataFrame, machine: &str, quantity: &str, column: &str) -> Option<f64> {
    let (machines, quantities) = (texts(table, "machine").unwrap(), texts(table, "quantity").unwrap());
    let row = (0..table.height()).find(|&row| machines[row] == machine && quantities[row] == quantity)?;
    numbers(table, column).unwrap()[row]
}

/// The post printed 80.3, 81.5 and 98.6 % and ridge points of 429.25 and 435.16, the first from rates of more digits.
#[test]
fn the_published_rates_give_the_printed_fractions_and_ridge_points() {
    let table = rooflines(&[], PUBLISHED_FOLDER).unwrap();
    assert_eq!(table.height(), 3);
    let percent = |quantity| format!("{:.1}", value(&table, "GB10", quantity, "reached_pct").unwrap());
    assert_eq!(["bf16_matmul", "copy_bandwidth", "ridge_point"].map(percent), ["80.3", "81.5", "98.6"]);
    assert!((value(&table, "GB10", "ridge_point", "measured").unwrap() - 429.25).abs() < 0.02);
    assert_eq!(format!("{:.2}", value(&table, "GB10", "ridge_point", "theoretical").unwrap()), "435.16");
    let rates = rates(&table, "GB10", "bf16_matmul").unwrap().unwrap();
    assert_eq!((rates.copy_bytes_per_s, rates.matmul_flop_per_s), (222.37e9, Some(95.45e12)));
}

#[test]
fn the_newest_rate_counts_and_of_one_moment_the_largest() {
    let records = [
        record("NVIDIA H200", "2026-11-02T00:00:00Z", "bf16_matmul", 800.0, "TFLOP/s"),
        record("NVIDIA H200", "2026-11-02T00:00:00Z", "bf16_matmul", 810.0, "TFLOP/s"),
        record("NVIDIA H200", "2026-11-01T00:00:00Z", "bf16_matmul", 900.0, "TFLOP/s"),
        record("NVIDIA H200", "2026-11-02T00:00:00Z", "copy_bandwidth", 4050.0, "GB/s"),
        record("NVIDIA H200", "2026-11-02T00:00:00Z", "ridge_point", 1.0, "FLOP/byte"),
    ];
    let table = rooflines(&records, PUBLISHED_FOLDER).unwrap();
    assert_eq!(value(&table, "H200", "bf16_matmul", "measured"), Some(810.0));
    assert_eq!(value(&table, "H200", "ridge_point", "measured"), Some(200.0), "computed, not read");
    assert_eq!(value(&table, "H200", "bf16_matmul", "reached_pct"), Some(50.0));
    assert_eq!(table.height(), 6, "three of each machine");
}

#[test]
fn a_cpu_has_the_ridge_of_its_own_products() {
    let mut cpu = record("", "2026-11-02T00:00:00Z", "fp32_matmul", 200.0, "GFLOP/s");
    cpu.environment.machine = Machine { cpu: Some("Intel(R) Xeon(R) Processor".to_owned()), ..Machine::default() };
    let mut copy = record("", "2026-11-02T00:00:00Z", "copy_bandwidth", 20.0, "GB/s");
    copy.environment.machine = cpu.environment.machine.clone();
    let table = rooflines(&[cpu, copy], PUBLISHED_FOLDER).unwrap();
    assert_eq!(value(&table, "Intel Xeon", "ridge_point", "measured"), Some(10.0));
    let known = |product| rates(&table, "Intel Xeon", product).unwrap().unwrap().matmul_flop_per_s;
    assert_eq!((known("fp32_matmul"), known("bf16_matmul")), (Some(200e9), None));
    assert_eq!(rates(&table, "H200", "bf16_matmul").unwrap(), None);
}

#[test]
fn a_machine_without_a_copy_has_no_ridge() {
    let alone = record("NVIDIA H200", "2026-11-02T00:00:00Z", "bf16_matmul", 800.0, "TFLOP/s");
    let table = rooflines(&[alone], PUBLISHED_FOLDER).unwrap();
    assert_eq!(value(&table, "H200", "ridge_point", "measured"), None);
}

#[test]
fn a_machine_is_named_by_its_gpu_or_else_its_cpu() {
    let name = |gpu: Option<&str>, cpu: Option<&str>| {
        machine_name(&Machine { gpu: gpu.map(str::to_owned), cpu: cpu.map(str::to_owned), ..Machine::default() })
    };
    assert_eq!(name(Some("NVIDIA H200"), Some("AMD EPYC 9R14")), "H200");
    assert_eq!(name(None, Some("Intel(R) Xeon(R) CPU @ 2.20GHz")), "Intel Xeon @ 2.20GHz");
    assert_eq!(name(None, None), "unknown machine");
}
