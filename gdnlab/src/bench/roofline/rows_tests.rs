use super::super::Report;
use super::*;
use crate::record::Machine;

/// A machine that copies 4,000 GB/s and multiplies 800 TFLOP/s in bf16, and has no tensor core for TF32.
#[derive(Default)]
struct Fake {
    measured: Vec<String>,
}

const BF16: Quantity = Quantity::Matmul(Products::Bf16);

impl Bench for Fake {
    fn rows(&self) -> Vec<Row> {
        let matmul = |products| Row { quantity: Quantity::Matmul(products), size: Some(64) };
        let copy = Row { quantity: Quantity::Copy, size: None };
        let ridge = Row { quantity: Quantity::Ridge(Products::Bf16), size: None };
        vec![copy, matmul(Products::Bf16), matmul(Products::Tf32), ridge]
    }

    fn measure(&mut self, row: &Row, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Rate> {
        self.measured.push(row.to_string());
        if go_on().is_break() {
            return Err(Error::Stopped);
        }
        match row.quantity {
            Quantity::Copy => Ok(Rate { value: 4000.0, theoretical: Some(4800.0), with: "a fake copy".to_owned() }),
            BF16 => Ok(Rate { value: 800.0, theoretical: Some(960.0), with: "a fake, 64x64x64, fast".to_owned() }),
            _ => Err(Error::gpu("no tensor core")),
        }
    }
}

fn environment() -> Environment {
    let machine = Machine { gpu: Some("NVIDIA H200".to_owned()), ..Machine::default() };
    let utc = Some("2026-11-30T00:00:00Z".to_owned());
    Environment { commit: Some("abc".to_owned()), dirty: Some(false), utc, machine, software: None }
}

fn go_on(_: &Step) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// The rows of a run, what was measured for it, and the records that were kept.
fn run_with(known: &[Record], environment: &dyn Fn() -> Environment) -> (Finished, Vec<String>, Vec<Record>) {
    let (mut bench, mut kept) = (Fake::default(), Vec::new());
    let mut keep = |record: &Record| {
        kept.push(record.clone());
        Ok(())
    };
    let finished = run(&mut bench, known, environment, &mut keep, go_on).unwrap();
    (finished, bench.measured, kept)
}

#[test]
fn every_rate_is_a_record_beside_the_theoretical_one_and_the_ridge_point_follows() {
    let (finished, _, kept) = run_with(&[], &environment);
    let values = |record: &Record| match &record.measurement {
        Measurement::Roofline(rate) => (rate.quantity.clone(), rate.value, rate.theoretical, rate.unit.clone()),
        _ => panic!("a roofline"),
    };
    let expected = [
        ("copy_bandwidth", 4000.0, Some(4800.0), "GB/s"),
        ("bf16_matmul", 800.0, Some(960.0), "TFLOP/s"),
        ("ridge_point", 200.0, Some(200.0), "FLOP/byte"),
    ];
    let expected =
        expected.map(|(quantity, value, theoretical, unit)| (quantity.to_owned(), value, theoretical, unit.to_owned()));
    let records: Vec<Record> = finished.rows.iter().filter_map(|(_, outcome)| outcome.record().cloned()).collect();
    assert_eq!(records.iter().map(values).collect::<Vec<_>>(), expected);
    assert_eq!(kept, records[..2], "a ridge point is not measured");
    assert_eq!(kept[1].workload.kernel.as_deref(), Some("a fake, 64x64x64, fast"));
    assert!(matches!(&finished.rows[2].1, Outcome::Failed(why) if why.contains("no tensor core")));
    let text = crate::record::to_json_lines(&kept).unwrap();
    assert_eq!(crate::record::parse(&text, std::path::Path::new("x")).unwrap(), kept);

    let machine = environment().machine;
    let report = Report { finished: &finished, machine: &machine, source: Some("a data sheet") }.to_string();
    for words in [
        "NVIDIA H200\n",
        "bf16_matmul              800.0 TFLOP/s          960.0    83.3 %  a fake, 64x64x64, fast\n",
        "tf32_matmul                       failed  GPU: no tensor core",
        "ridge_point",
        "theoretical values: a data sheet",
    ] {
        assert!(report.contains(words), "{words}\n{report}");
    }
}

#[test]
fn what_is_recorded_for_this_commit_and_card_is_not_measured_again() {
    let (_, _, records) = run_with(&[], &environment);
    let (finished, measured, kept) = run_with(&records, &environment);
    assert_eq!(measured, ["tf32_matmul 64x64x64"], "what failed is tried again");
    assert_eq!(kept, []);
    assert_eq!(finished.rows[0].1, Outcome::Recorded(records[0].clone()));
    assert_eq!(finished.rows[3].1.roofline().map(|ridge| ridge.value), Some(200.0));

    let measured = |environment: &dyn Fn() -> Environment, known: &[Record]| run_with(known, environment).1.len();
    let other_commit = || Environment { commit: Some("abd".to_owned()), ..environment() };
    let changed = || Environment { dirty: Some(true), ..environment() };
    let other_gpu = || Environment { machine: Machine::default(), ..environment() };
    for other in [&other_commit as &dyn Fn() -> Environment, &changed, &other_gpu] {
        assert_eq!(measured(other, &records), 3);
        let records_of_other = run_with(&[], other).2;
        assert_eq!(measured(&environment, &records_of_other), 3);
    }
    let mut of_other_size = records[1].clone();
    of_other_size.workload.kernel = Some("a fake, 128x128x128".to_owned());
    assert_eq!(measured(&environment, &[records[0].clone(), of_other_size]), 2);
}

#[test]
fn a_stop_keeps_what_was_measured() {
    let mut calls = 0;
    let mut kept = 0;
    let mut keep = |_: &Record| {
        kept += 1;
        Ok(())
    };
    let watch = |_: &Step| {
        calls += 1;
        if calls < 4 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    };
    let finished = run(&mut Fake::default(), &[], &environment, &mut keep, watch).unwrap();
    assert!(finished.stopped);
    assert_eq!((finished.rows.len(), kept), (1, 1));
}
