use super::*;
use crate::record::{self, Environment, Machine, Measurement, Record, Roofline, Workload};
use crate::table::{rooflines, timings};
use std::path::Path;

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data");

fn rate(gpu: &str, quantity: &str, value: f64, unit: &str) -> Record {
    let machine = Machine { gpu: Some(gpu.to_owned()), ..Machine::default() };
    let environment = Environment { machine, utc: Some("2999-01-01T00:00:00Z".to_owned()), ..Environment::default() };
    let roofline = Roofline { quantity: quantity.to_owned(), value, theoretical: None, unit: unit.to_owned() };
    Record::new(&environment, &Workload::default(), Measurement::Roofline(roofline))
}

fn tables(records: &[Record]) -> (DataFrame, DataFrame) {
    (timings(records).unwrap(), rooflines(records, Path::new(DATA).join("published")).unwrap())
}

#[test]
fn every_recorded_kernel_of_a_machine_is_a_point_below_its_roof() {
    let mut records = record::read_dir(DATA).unwrap();
    records.retain(|record| !matches!(record.measurement, Measurement::Roofline(_)));
    records.push(rate("NVIDIA H200", "copy_bandwidth", 4200.0, "GB/s"));
    records.push(rate("NVIDIA H200", "bf16_matmul", 840.0, "TFLOP/s"));
    let (timings, rooflines) = tables(&records);
    let figure = roofline(&timings, &rooflines, "H200", "the footer").unwrap();
    let points = points(&timings, "H200").unwrap();
    let peers = points.iter().filter(|point| point.peer.is_some()).count();
    assert!(points.len() >= 18 && peers > 0, "{} points, {peers} peers", points.len());
    let svg = figure.svg();
    let shapes = svg.matches("<circle").count() / 2 + svg.matches("<polygon").count();
    let kernels = distinct(points.iter().map(|point| point.kernel.as_str()));
    let passes = distinct(points.iter().map(|point| point.pass.as_str())).len();
    assert_eq!(shapes, points.len() + peers + kernels.len() + passes + 1, "marks, and those of the legend");
    assert!(!kernels.iter().any(|kernel| ["fla", "flash_qla", "flashinfer"].contains(kernel)), "{kernels:?}");
    for words in [
        "bf16 840 TFLOP/s, 85 %",
        "copy 4200 GB/s",
        "ridge point: 200 FLOP/byte",
        "TF32 494",
        "FLOP/byte",
        "the footer",
    ] {
        assert!(svg.contains(words), "{words}");
    }
    assert!(figure.description().contains("bf16 840 TFLOP/s measured"), "{}", figure.description());
    assert!(figure.png().unwrap().starts_with(b"\x89PNG"));
}

/// Intensity 100 FLOP/byte at 4,000 GB/s allows 400 TFLOP/s; with products of 300 TFLOP/s, 300.
#[test]
fn a_roof_is_the_lower_of_the_slope_and_the_ceiling() {
    let ceiling = |products, measured| Ceiling { products, measured: Some(measured), theoretical: None };
    let top = ceiling(Products::Bf16, 800.0);
    let ceilings = vec![top, ceiling(Products::Tf32, 300.0)];
    let roof = Roof { copy_gb_s: 4000.0, theoretical_gb_s: None, ceilings, top };
    assert_eq!(roof.tflop_s(100.0, Products::Bf16), 400.0);
    assert_eq!(roof.tflop_s(100.0, Products::Tf32), 300.0);
    assert_eq!(roof.tflop_s(1000.0, Products::Bf16), 800.0);
    assert_eq!(roof.tflop_s(1000.0, Products::Fp64), 800.0, "without a rate of its own, the top");
}

#[test]
fn a_machine_without_kernels_has_a_roof_alone_and_one_without_rates_has_no_figure() {
    let records = [
        rate("a card", "copy_bandwidth", 100.0, "GB/s"),
        rate("a card", "fp32_matmul", 2.5, "TFLOP/s"),
        rate("another", "copy_bandwidth", 100.0, "GB/s"),
    ];
    let (timings, rooflines) = tables(&records);
    let figure = roofline(&timings, &rooflines, "a card", "").unwrap();
    assert!(figure.svg().contains("The roofline of a card") && figure.svg().contains("fp32 2.5 TFLOP/s"));
    let refused = |machine| roofline(&timings, &rooflines, machine, "").unwrap_err().to_string();
    assert!(refused("a third").contains("no copy_bandwidth of 'a third'"), "{}", refused("a third"));
    assert!(refused("another").contains("no rate of products"), "{}", refused("another"));
}
