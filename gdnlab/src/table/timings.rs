//! Times of kernels as rates: what each reaches of what a roofline allows.

use super::roofline::machine_name;
use crate::Result;
use crate::record::{Measurement, Pass, Record, Timing, Workload};
use gdnlab_deps::polars::prelude::*;

/// One timed workload.
struct Row<'a> {
    machine: String,
    workload: &'a Workload,
    timing: &'a Timing,
    utc: Option<&'a str>,
    tflop_s: f64,
    gb_s: f64,
}

/// Every time in `records` of a kernel whose useful arithmetic and traffic are known, with the columns machine, op, kernel,
/// mode, pass, heads, sequences, latency_ms, flop_per_byte, tflop_s, gb_s, peer, peer_ms and peer_tflop_s.
///
/// `flop_per_byte` is the arithmetic intensity, and the peer's is the same: it does the same useful work. Of a workload
/// that a kernel was timed on several times the newest counts.
///
/// # Errors
/// [`crate::Error::Table`] where polars cannot build the table.
pub fn timings(records: &[Record]) -> Result<DataFrame> {
    let mut rows: Vec<Row<'_>> = Vec::new();
    for row in records.iter().filter_map(row) {
        let same = |other: &&mut Row<'_>| other.machine == row.machine && other.workload == row.workload;
        match rows.iter_mut().find(same) {
            Some(known) if row.utc >= known.utc => *known = row,
            Some(_) => {}
            None => rows.push(row),
        }
    }
    let text = |name: &str, of: fn(&Row<'_>) -> Option<String>| {
        Column::new(name.into(), rows.iter().map(of).collect::<Vec<Option<String>>>())
    };
    let number = |name: &str, of: fn(&Row<'_>) -> Option<f64>| {
        Column::new(name.into(), rows.iter().map(of).collect::<Vec<Option<f64>>>())
    };
    let columns = vec![
        text("machine", |row| Some(row.machine.clone())),
        text("op", |row| row.workload.op.clone()),
        text("kernel", |row| row.workload.kernel.clone()),
        text("mode", |row| row.workload.mode.clone()),
        text("pass", |row| row.workload.pass.map(|pass| pass_name(pass).to_owned())),
        text("heads", |row| heads(row.workload)),
        text("sequences", |row| sequences(row.workload)),
        number("latency_ms", |row| Some(row.timing.latency_ms)),
        number("flop_per_byte", |row| Some(1e3 * row.tflop_s / row.gb_s)),
        number("tflop_s", |row| Some(row.tflop_s)),
        number("gb_s", |row| Some(row.gb_s)),
        text("peer", |row| row.timing.peer.clone()),
        number("peer_ms", |row| row.timing.peer_ms),
        number("peer_tflop_s", |row| Some(row.tflop_s * row.timing.latency_ms / row.timing.peer_ms?)),
    ];
    Ok(DataFrame::new(rows.len(), columns)?)
}

fn row(record: &Record) -> Option<Row<'_>> {
    let (Measurement::Bench(timing) | Measurement::Attention(timing)) = &record.measurement else { return None };
    let (tflop_s, gb_s) = timing.tflop_s.zip(timing.gb_s).filter(|(tflop_s, gb_s)| *tflop_s > 0.0 && *gb_s > 0.0)?;
    Some(Row {
        machine: machine_name(&record.environment.machine),
        workload: &record.workload,
        timing,
        utc: record.environment.utc.as_deref(),
        tflop_s,
        gb_s,
    })
}

fn pass_name(pass: Pass) -> &'static str {
    match pass {
        Pass::Fwd => "fwd",
        Pass::Bwd => "bwd",
        Pass::Decode => "decode",
        Pass::Step => "step",
    }
}

/// `16/64`: q/k and value heads.
fn heads(workload: &Workload) -> Option<String> {
    let heads = workload.qk_heads.or(workload.value_heads)?;
    Some(format!("{heads}/{}", workload.value_heads.unwrap_or(heads)))
}

/// The packed sequences, or `32 x 1024`.
fn sequences(workload: &Workload) -> Option<String> {
    let of_batch = || Some(format!("{} x {}", workload.batch?, workload.tokens?));
    workload.seqlens.clone().or_else(of_batch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Op, Shape};
    use crate::record::{Environment, Machine};

    fn timed(utc: &str, kernel: &str, latency_ms: f64) -> Record {
        let machine = Machine { gpu: Some("NVIDIA H200".to_owned()), ..Machine::default() };
        let environment = Environment { machine, utc: Some(utc.to_owned()), ..Environment::default() };
        let workload = Workload::new(Op::Gdn, &Shape::new(1024, 2, 128, 128)).kernel(kernel, "bf16").pass(Pass::Fwd);
        let timing = Timing {
            latency_ms,
            gb_s: Some(400.0 / latency_ms),
            tflop_s: Some(60.0 / latency_ms),
            peer: Some("fla".to_owned()),
            peer_ms: Some(3.0),
            ..Timing::default()
        };
        Record::new(&environment, &workload, Measurement::Bench(timing))
    }

    fn number(table: &DataFrame, name: &str, row: usize) -> f64 {
        table.column(name).unwrap().f64().unwrap().get(row).unwrap()
    }

    #[test]
    fn the_newest_time_of_each_workload_becomes_rates() {
        let unknown_work = {
            let mut record = timed("2026-11-30T00:00:00Z", "c", 1.0);
            let Measurement::Bench(timing) = &mut record.measurement else { panic!("a time") };
            timing.gb_s = None;
            record
        };
        let records = [
            timed("2026-11-30T00:00:00Z", "a", 1.0),
            timed("2026-11-29T00:00:00Z", "a", 2.0),
            timed("2026-11-29T00:00:00Z", "b", 2.0),
            unknown_work,
        ];
        let table = timings(&records).unwrap();
        assert_eq!(table.height(), 2);
        assert_eq!([0, 1].map(|row| number(&table, "latency_ms", row)), [1.0, 2.0]);
        for row in [0, 1] {
            assert!((number(&table, "flop_per_byte", row) - 150.0).abs() < 1e-9);
            assert!((number(&table, "peer_tflop_s", row) - 20.0).abs() < 1e-9);
        }
        let text = |name: &str| table.column(name).unwrap().str().unwrap().get(0).unwrap().to_owned();
        assert_eq!(
            [text("machine"), text("pass"), text("heads"), text("sequences")],
            ["H200", "fwd", "2/2", "1 x 1024"]
        );
        assert_eq!(timings(&[]).unwrap().height(), 0);
    }
}
