//! Calls that are cut over ranks: how exact, and how fast.

use super::rows::distinct;
use crate::bench::SeqLens;
use crate::record::{Cp, CpExactness, CpFound, CpScaling, Measurement, Pass, Record};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::*;

/// A row for each tensor of each call: the columns op, kernel, T, ranks, cut, crossings, tensor, elements, differing (from a
/// single run, in bits), apart (from the single run, largest difference over largest element), rel_rms and single_rel_rms
/// (against float64). Where a call was recorded twice, the last one counts.
///
/// # Errors
/// [`Error::Input`] where no record is about such a call.
pub fn cp_exactness(records: &[Record]) -> Result<DataFrame> {
    let mut found: Vec<(&Record, &Cp, &CpExactness)> = Vec::new();
    for record in records {
        let Measurement::Cp(cp) = &record.measurement else { continue };
        let CpFound::Exactness(exactness) = &cp.found else { continue };
        let same = |(other, at, tensor): &(&Record, &Cp, &CpExactness)| {
            (&other.workload, &at.cut, &tensor.tensor) == (&record.workload, &cp.cut, &exactness.tensor)
        };
        found.retain(|earlier| !same(earlier));
        found.push((record, cp, exactness));
    }
    if found.is_empty() {
        return Err(Error::input(
            "no record of how exact a call on several ranks is: expected those of `cargo lab cp`",
        ));
    }
    let text = |of: fn(&Record) -> Option<&str>| found.iter().map(|(record, ..)| of(record)).collect::<Vec<_>>();
    let count = |of: &dyn Fn(&Cp, &CpExactness) -> usize| {
        found.iter().map(|(_, cp, found)| of(cp, found) as u64).collect::<Vec<_>>()
    };
    let number = |of: fn(&CpExactness) -> f64| found.iter().map(|(.., found)| of(found)).collect::<Vec<_>>();
    Ok(df!(
        "op" => text(|record| record.workload.op.as_deref()),
        "kernel" => text(|record| record.workload.kernel.as_deref()),
        "T" => found.iter().map(|(record, ..)| record.workload.tokens.map(|tokens| tokens as u64)).collect::<Vec<_>>(),
        "ranks" => count(&|cp, _| cp.ranks),
        "cut" => found.iter().map(|(_, cp, _)| cp.cut.as_str()).collect::<Vec<_>>(),
        "crossings" => count(&|cp, _| cp.crossings),
        "tensor" => found.iter().map(|(.., found)| found.tensor.as_str()).collect::<Vec<_>>(),
        "elements" => count(&|_, found| found.elements),
        "differing" => count(&|_, found| found.differing),
        "apart" => number(|found| found.apart),
        "rel_rms" => number(|found| found.rel_rms),
        "single_rel_rms" => number(|found| found.single_rel_rms),
    )?)
}

/// A row for each timed call: the columns op, kernel, pass, scaling, clock, transport, ranks, T, sequences, latency_ms, single_ms,
/// speedup (the single run's time over that of the ranks), communication_ms, share (of the latency), floor_ms, over_floor
/// (communication over its floor), bytes, messages, link_gb_s and link_latency_ms. Where a call was recorded twice, the last one counts.
///
/// # Errors
/// [`Error::Input`] where no record is about the time of such a call.
pub fn cp_scaling(records: &[Record]) -> Result<DataFrame> {
    let all: Vec<(&Record, &Cp, &CpScaling)> = records.iter().filter_map(timed).collect();
    let keys = distinct(all.iter().map(key));
    let found: Vec<_> = keys.iter().filter_map(|wanted| all.iter().rev().find(|timed| key(timed) == *wanted)).collect();
    if found.is_empty() {
        return Err(Error::input("no times of a call on several ranks: expected records of `cargo lab cp --scaling`"));
    }
    let text = |of: fn(&Record) -> Option<&str>| found.iter().map(|(record, ..)| of(record)).collect::<Vec<_>>();
    let words = |of: fn(&CpScaling) -> &str| found.iter().map(|(.., timed)| of(timed)).collect::<Vec<_>>();
    let number = |of: fn(&CpScaling) -> f64| found.iter().map(|(.., timed)| of(timed)).collect::<Vec<_>>();
    let optional = |of: fn(&CpScaling) -> Option<f64>| found.iter().map(|(.., timed)| of(timed)).collect::<Vec<_>>();
    Ok(df!(
        "op" => text(|record| record.workload.op.as_deref()),
        "kernel" => text(|record| record.workload.kernel.as_deref()),
        "pass" => text(|record| Some(if record.workload.pass? == Pass::Fwd { "fwd" } else { "fwd+bwd" })),
        "scaling" => words(|timed| &timed.scaling),
        "clock" => words(|timed| &timed.clock),
        "transport" => found.iter().map(|(_, cp, _)| cp.transport.as_str()).collect::<Vec<_>>(),
        "ranks" => found.iter().map(|(_, cp, _)| cp.ranks as u64).collect::<Vec<_>>(),
        "T" => found.iter().map(|(record, ..)| record.workload.tokens.map(|tokens| tokens as u64)).collect::<Vec<_>>(),
        "sequences" => found.iter().map(|(record, ..)| sequences(record)).collect::<Vec<_>>(),
        "latency_ms" => number(|timed| timed.latency_ms),
        "single_ms" => number(|timed| timed.single_ms),
        "speedup" => number(|timed| timed.single_ms / timed.latency_ms),
        "communication_ms" => number(|timed| timed.communication_ms),
        "share" => number(|timed| timed.communication_ms / timed.latency_ms),
        "floor_ms" => number(|timed| timed.floor_ms),
        "over_floor" => optional(|timed| (timed.floor_ms > 0.0).then(|| timed.communication_ms / timed.floor_ms)),
        "bytes" => found.iter().map(|(.., timed)| timed.bytes as u64).collect::<Vec<_>>(),
        "messages" => found.iter().map(|(.., timed)| timed.messages as u64).collect::<Vec<_>>(),
        "link_gb_s" => optional(|timed| timed.link_gb_s),
        "link_latency_ms" => optional(|timed| timed.link_latency_ms),
    )?)
}

/// How many there are.
fn sequences(record: &Record) -> Option<u64> {
    let packed = record.workload.seqlens.as_ref().and_then(|seqlens| seqlens.parse::<SeqLens>().ok());
    packed.map(|seqlens| seqlens.lengths().len() as u64).or(record.workload.batch.map(|batch| batch as u64))
}

fn timed(record: &Record) -> Option<(&Record, &Cp, &CpScaling)> {
    let Measurement::Cp(cp) = &record.measurement else { return None };
    let CpFound::Scaling(scaling) = &cp.found else { return None };
    Some((record, cp, scaling))
}

/// What makes two times those of one thing.
fn key<'a>((record, cp, timed): &(&'a Record, &'a Cp, &'a CpScaling)) -> (String, &'a str, &'a str, &'a str, &'a str) {
    let work = &record.workload;
    let work = format!(
        "{:?} {:?} {:?} {:?} {:?} {}",
        work.op, work.kernel, work.pass, work.seqlens, work.value_heads, cp.ranks
    );
    (work, &cp.transport, &cp.cut, &timed.scaling, &timed.clock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{self, Environment, Workload};

    fn cp(ranks: usize, found: CpFound) -> Measurement {
        let (transport, cut) = ("virtual".to_owned(), "3+4".to_owned());
        Measurement::Cp(Cp { ranks, transport, cut, crossings: 1, found })
    }

    fn exactness(rel_rms: f64) -> Measurement {
        let tensor = "o".to_owned();
        let found = CpExactness { tensor, elements: 9, differing: 2, apart: 1e-3, rel_rms, single_rel_rms: 1e-3 };
        cp(2, CpFound::Exactness(found))
    }

    pub fn scaling(ranks: usize, latency_ms: f64) -> Measurement {
        let several = ranks > 1;
        let found = CpScaling {
            scaling: "strong".to_owned(),
            clock: "host".to_owned(),
            latency_ms,
            samples_ms: vec![latency_ms],
            single_ms: 8.0,
            compute_ms: 3.0,
            communication_ms: if several { 0.5 } else { 0.0 },
            floor_ms: if several { 0.25 } else { 0.0 },
            bytes: 1 << 20,
            messages: ranks - 1,
            link_gb_s: several.then_some(4.0),
            link_latency_ms: several.then_some(0.01),
        };
        cp(ranks, CpFound::Scaling(found))
    }

    fn record(measurement: Measurement) -> Record {
        Record::new(&Environment::default(), &Workload { tokens: Some(7), ..Workload::default() }, measurement)
    }

    #[test]
    fn both_kinds_come_back_from_a_file_as_they_were() {
        let all = [record(exactness(2e-3)), record(scaling(1, 8.0)), record(scaling(4, 3.0))];
        let text = record::to_json_lines(&all).unwrap();
        assert!(text.contains("\"kind\":\"cp\"") && !text.contains("null"), "{text}");
        assert_eq!(record::parse(&text, std::path::Path::new("x")).unwrap(), all);
    }

    #[test]
    fn the_last_of_two_counts_and_ratios_are_right() {
        let all = [exactness(2e-3), scaling(1, 8.0), scaling(4, 3.0), exactness(1e-3), scaling(4, 4.0)].map(record);
        let exact = cp_exactness(&all).unwrap();
        assert_eq!((exact.height(), exact.column("rel_rms").unwrap().f64().unwrap().get(0)), (1, Some(1e-3)));
        let times = cp_scaling(&all).unwrap();
        let value = |name: &str, row| times.column(name).unwrap().f64().unwrap().get(row);
        assert_eq!((times.height(), value("speedup", 1), value("share", 1)), (2, Some(2.0), Some(0.125)));
        assert_eq!((value("over_floor", 0), value("over_floor", 1)), (None, Some(2.0)));
        assert!(cp_scaling(&all[..1]).is_err() && cp_exactness(&all[1..3]).is_err());
    }
}
