//! Times of GDN kernels on the published cases, ours beside those of others: by row, by model, and against what was aimed
//! at.

use super::Mode;
use super::attention::OURS;
use super::roofline::{machine_name, rates};
use super::rows::{distinct, geometric_mean, numbers, texts};
use crate::bench::case::{PUBLISHED_GPU, published};
use crate::bench::tensors::REGIME;
use crate::bench::{Case, SeqLens};
use crate::precision::Format;
use crate::problem::Shape;
use crate::record::{Machine, Measurement, Pass, Record, Workload};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::*;
use std::path::Path;

/// What our kernels' names begin with in records.
const KERNELS: &str = "cuda-chunk-";
/// The default one of them, which is `gdnlab` in tables.
const DEFAULT: &str = "bf16";
/// What the models of cases without packed sequences begin with.
const TRAINING: &str = "training";
/// Names of other people's libraries in records and for a reader.
const LIBRARIES: [(&str, &str); 3] = [("flash_qla", "FlashQLA"), ("flashinfer", "FlashInfer"), ("fla", "fla")];

/// One implementation's time for one case.
struct Timed {
    machine: String,
    implementation: String,
    case: Case,
    mode: Mode,
    ms: f64,
    source: String,
    utc: String,
}

/// The published times of `published`, a folder, and those of `records` on the same inputs, each once (the newest, and one of
/// ours or of this project's run of a library before a published one), with the columns
///
/// - machine, implementation (ours begin with `gdnlab`), pass (fwd or bwd), model, heads, sequences, T, K and V;
/// - ms; floor_ms, what traffic and products at the rates of `rooflines` allow, and bytes_ms, what the traffic alone takes,
///   both empty where the machine has no rates; over_floor = ms / floor_ms;
/// - source: `published`, or the day of the measurement.
///
/// # Errors
/// As [`published`], and [`Error::Input`] for a record without its sizes.
pub fn gdn_times(records: &[Record], published: impl AsRef<Path>, rooflines: &DataFrame) -> Result<DataFrame> {
    let cases = self::published(published)?;
    let mut all: Vec<Timed> = cases.iter().flat_map(published_times).collect();
    for record in records {
        let Some(timed) = of_record(record, &cases)? else { continue };
        let same = |other: &&mut Timed| {
            (&other.machine, &other.implementation, other.case.pass)
                == (&timed.machine, &timed.implementation, timed.case.pass)
                && other.case.is_same_call(&timed.case)
        };
        match all.iter_mut().find(same) {
            Some(known) if timed.utc >= known.utc => *known = timed,
            Some(_) => {}
            None => all.push(timed),
        }
    }
    let place = |timed: &Timed| {
        let found = cases.iter().position(|case| case.pass == timed.case.pass && case.is_same_call(&timed.case));
        (found.unwrap_or(cases.len()), timed.case.pass == Pass::Bwd)
    };
    all.sort_by_cached_key(place);
    let floors = all.iter().map(|timed| floors(timed, rooflines)).collect::<Result<Vec<_>>>()?;
    let text =
        |name: &str, of: &dyn Fn(&Timed) -> String| Column::new(name.into(), all.iter().map(of).collect::<Vec<_>>());
    let whole = |name: &str, of: fn(&Shape) -> usize| {
        Column::new(name.into(), all.iter().map(|timed| of(&timed.case.shape) as u32).collect::<Vec<_>>())
    };
    let floor = |name: &str, of: &dyn Fn(f64, (f64, f64)) -> f64| {
        let value = |(timed, floors): (&Timed, &Option<(f64, f64)>)| floors.map(|floors| of(timed.ms, floors));
        Column::new(name.into(), all.iter().zip(&floors).map(value).collect::<Vec<Option<f64>>>())
    };
    let columns = vec![
        text("machine", &|timed| timed.machine.clone()),
        text("implementation", &|timed| timed.implementation.clone()),
        text("pass", &|timed| timed.case.pass_name().to_owned()),
        text("model", &|timed| timed.case.model()),
        text("heads", &|timed| timed.case.heads_name()),
        text("sequences", &|timed| timed.case.split_name().map_or_else(|| timed.case.sequences_name(), str::to_owned)),
        whole("T", |shape| shape.tokens),
        whole("K", |shape| shape.key_dim),
        whole("V", |shape| shape.value_dim),
        Column::new("ms".into(), all.iter().map(|timed| timed.ms).collect::<Vec<_>>()),
        floor("floor_ms", &|_, (floor, _)| floor),
        floor("bytes_ms", &|_, (_, bytes)| bytes),
        floor("over_floor", &|ms, (floor, _)| ms / floor),
        text("source", &|timed| timed.source.clone()),
    ];
    Ok(DataFrame::new(all.len(), columns)?)
}

fn published_times(case: &Case) -> Vec<Timed> {
    let gpu = Machine { gpu: Some(PUBLISHED_GPU.to_owned()), ..Machine::default() };
    let timed = |peer: &crate::bench::Peer| Timed {
        machine: machine_name(&gpu),
        implementation: library(&peer.name).unwrap_or(&peer.name).to_owned(),
        case: case.clone(),
        mode: Mode::of("bf16"),
        ms: peer.ms,
        source: peer.source.to_owned(),
        utc: String::new(),
    };
    case.peers.iter().map(timed).collect()
}

/// How tables name the kernel of a record; `None` where it is neither ours nor of a library.
pub(super) fn implementation(kernel: &str) -> Option<String> {
    match kernel.strip_prefix(KERNELS) {
        Some(DEFAULT) => Some(OURS.to_owned()),
        Some(other) => Some(format!("{OURS} {other}")),
        None => library(kernel).map(str::to_owned),
    }
}

fn library(name: &str) -> Option<&'static str> {
    LIBRARIES.iter().find(|(known, _)| *known == name).map(|(_, shown)| *shown)
}

/// The time in `record`, where it is one of GDN on the inputs of the published cases.
fn of_record(record: &Record, cases: &[Case]) -> Result<Option<Timed>> {
    let (Measurement::Bench(timing), workload) = (&record.measurement, &record.workload) else { return Ok(None) };
    let Some(implementation) = implementation(workload.kernel.as_deref().unwrap_or_default()) else { return Ok(None) };
    if workload.op.as_deref() != Some("gdn") || workload.regime.as_deref() != Some(REGIME) {
        return Ok(None);
    }
    let case = case_of(workload)?;
    let known = cases.iter().find(|known| known.pass == case.pass && known.is_same_call(&case));
    let label = known.map_or_else(|| case.label.clone(), |known| known.label.clone());
    Ok(Some(Timed {
        machine: machine_name(&record.environment.machine),
        implementation,
        case: Case { label, ..case },
        mode: Mode::of(workload.mode.as_deref().unwrap_or_default()),
        ms: timing.latency_ms,
        source: record.environment.date().unwrap_or("an unknown day").to_owned(),
        utc: record.environment.utc.clone().unwrap_or_default(),
    }))
}

fn case_of(workload: &Workload) -> Result<Case> {
    let sizes = [
        workload.batch,
        workload.tokens,
        workload.qk_heads,
        workload.value_heads,
        workload.key_dim,
        workload.value_dim,
    ];
    let [Some(batch), Some(tokens), Some(qk_heads), Some(value_heads), Some(key_dim), Some(value_dim)] = sizes else {
        return Err(Error::input("a time of GDN lacks one of B, T, HK, HV, K and V: expected all six"));
    };
    let seqlens = workload.seqlens.as_ref().map(|text| text.parse::<SeqLens>()).transpose()?;
    let label = if seqlens.is_none() { TRAINING.to_owned() } else { String::new() };
    Ok(Case {
        pass: workload.pass.unwrap_or(Pass::Fwd),
        shape: Shape { batch, tokens, qk_heads, value_heads, key_dim, value_dim },
        seqlens,
        label,
        peers: Vec::new(),
    })
}

/// Milliseconds that traffic and products allow, and that the traffic alone takes.
fn floors(timed: &Timed, rooflines: &DataFrame) -> Result<Option<(f64, f64)>> {
    let products = crate::bench::roofline::Products::of(timed.mode.format);
    let Some(rates) = rates(rooflines, &timed.machine, products.quantity())? else { return Ok(None) };
    let element_bytes = match timed.mode.format {
        Format::Bf16 | Format::F16 => 2,
        _ => 4,
    };
    let cost = timed.case.cost(element_bytes, &rates);
    Ok(Some((cost.floor_ms(&rates), 1e3 * cost.bytes / rates.copy_bytes_per_s)))
}

/// A row of [`gdn_times`].
pub(crate) struct TimeRow {
    pub machine: String,
    pub implementation: String,
    pub pass: String,
    pub model: String,
    pub heads: String,
    pub sequences: String,
    pub tokens: u32,
    pub ms: f64,
    pub floor_ms: Option<f64>,
    pub bytes_ms: Option<f64>,
}

impl TimeRow {
    /// Whether it is the default kernel of this project.
    pub fn is_ours(&self) -> bool {
        self.implementation == OURS
    }

    /// Whether it is a step of training rather than a published case.
    pub fn is_training(&self) -> bool {
        self.model.starts_with(TRAINING)
    }

    fn is_peer(&self) -> bool {
        LIBRARIES.iter().any(|(_, name)| *name == self.implementation)
    }

    /// Whether both are times of one case on one machine.
    pub fn is_same_case(&self, other: &Self) -> bool {
        (&self.machine, &self.pass, &self.heads, &self.sequences, &self.model)
            == (&other.machine, &other.pass, &other.heads, &other.sequences, &other.model)
    }
}

/// The rows of a table of [`gdn_times`].
pub(crate) fn time_rows(times: &DataFrame) -> Result<Vec<TimeRow>> {
    let text = |name: &str| texts(times, name);
    let (machine, implementation, pass) = (text("machine")?, text("implementation")?, text("pass")?);
    let (model, heads, sequences) = (text("model")?, text("heads")?, text("sequences")?);
    let (tokens, ms) = (numbers(times, "T")?, numbers(times, "ms")?);
    let (floor_ms, bytes_ms) = (numbers(times, "floor_ms")?, numbers(times, "bytes_ms")?);
    let row = |at: usize| {
        Some(TimeRow {
            machine: machine[at].clone(),
            implementation: implementation[at].clone(),
            pass: pass[at].clone(),
            model: model[at].clone(),
            heads: heads[at].clone(),
            sequences: sequences[at].clone(),
            tokens: tokens[at]? as u32,
            ms: ms[at]?,
            floor_ms: floor_ms[at],
            bytes_ms: bytes_ms[at],
        })
    };
    Ok((0..times.height()).filter_map(row).collect())
}

/// One of our times beside those of the libraries for the same case.
pub(crate) struct Beside<'a> {
    pub ours: &'a TimeRow,
    pub peers: Vec<&'a TimeRow>,
}

impl<'a> Beside<'a> {
    /// The fastest library.
    pub fn best(&self) -> Option<&'a TimeRow> {
        self.peers.iter().copied().min_by(|a, b| a.ms.total_cmp(&b.ms))
    }

    /// The time of `peer` over ours.
    pub fn ratio(&self, peer: &str) -> Option<f64> {
        let peer = self.peers.iter().find(|row| row.implementation == peer)?;
        Some(peer.ms / self.ours.ms)
    }

    /// That of the best one.
    pub fn ratio_to_best(&self) -> Option<f64> {
        Some(self.best()?.ms / self.ours.ms)
    }
}

/// Each of our times with those of others on the same machine.
pub(crate) fn beside_peers(rows: &[TimeRow]) -> Vec<Beside<'_>> {
    let peers = |ours: &TimeRow| rows.iter().filter(|row| row.is_peer() && row.is_same_case(ours)).collect();
    rows.iter().filter(|row| row.is_ours()).map(|ours| Beside { ours, peers: peers(ours) }).collect()
}

/// A table of [`gdn_times`] with one row for each case, and the implementations side by side: machine, pass, model, sequences,
/// floor_ms (of bf16), FlashQLA, FlashInfer, fla and gdnlab in ms, over_floor and best_over_ours; what nobody measured is
/// empty.
///
/// # Errors
/// [`Error::Table`] where a column is missing.
pub fn gdn_rows(times: &DataFrame) -> Result<DataFrame> {
    let rows = time_rows(times)?;
    let mut cases: Vec<&TimeRow> = Vec::new();
    for row in &rows {
        if !cases.iter().any(|case| case.is_same_case(row)) {
            cases.push(row);
        }
    }
    let of = |case: &TimeRow, name: &str| {
        rows.iter().find(|row| row.implementation == name && row.is_same_case(case)).map(|row| row.ms)
    };
    let text = |name: &str, of: fn(&TimeRow) -> &str| {
        Column::new(name.into(), cases.iter().map(|case| of(case)).collect::<Vec<_>>())
    };
    let number = |name: &str, of: &dyn Fn(&TimeRow) -> Option<f64>| {
        Column::new(name.into(), cases.iter().map(|case| of(case)).collect::<Vec<_>>())
    };
    let best = |case: &TimeRow| LIBRARIES.iter().filter_map(|(_, name)| of(case, name)).reduce(f64::min);
    let mut columns = vec![
        text("machine", |case| &case.machine),
        text("pass", |case| &case.pass),
        text("model", |case| &case.model),
        text("sequences", |case| &case.sequences),
        number("floor_ms", &|case| case.floor_ms),
    ];
    let names = LIBRARIES.iter().map(|(_, name)| *name).chain([OURS]);
    columns.extend(names.map(|name| number(name, &|case| of(case, name))));
    columns.push(number("over_floor", &|case| Some(of(case, OURS)? / case.floor_ms?)));
    columns.push(number("best_over_ours", &|case| Some(best(case)? / of(case, OURS)?)));
    Ok(DataFrame::new(cases.len(), columns)?)
}

/// A table of [`gdn_times`] as speed-ups of our default kernel: a row for each pass and model, and before them `all` of a
/// pass but training steps, with the columns machine, pass, model, rows (ours), over_floor; geometric means of the others' times over ours,
/// FlashQLA, FlashInfer, fla and best (the fastest of the three in each row); least and most of the latter, and loses, the
/// number of rows where it is below 1. No rows where there are none of ours.
///
/// # Errors
/// [`Error::Table`] where a column is missing.
pub fn gdn_speedups(times: &DataFrame) -> Result<DataFrame> {
    let rows = time_rows(times)?;
    let all = beside_peers(&rows);
    let mut groups: Vec<(&str, &str, Option<&str>)> = Vec::new();
    for (machine, pass) in distinct(all.iter().map(|beside| (&*beside.ours.machine, &*beside.ours.pass))) {
        groups.push((machine, pass, None));
        let of_pass = all.iter().filter(|beside| (&*beside.ours.machine, &*beside.ours.pass) == (machine, pass));
        groups.extend(
            distinct(of_pass.map(|beside| &*beside.ours.model)).into_iter().map(|model| (machine, pass, Some(model))),
        );
    }
    let members = |&(machine, pass, model): &(&str, &str, Option<&str>)| -> Vec<&Beside<'_>> {
        let is_member = |beside: &&Beside<'_>| {
            let ours = beside.ours;
            (&*ours.machine, &*ours.pass) == (machine, pass)
                && model.map_or(!ours.is_training(), |model| ours.model == model)
        };
        all.iter().filter(is_member).collect()
    };
    let groups_of: Vec<Vec<&Beside<'_>>> = groups.iter().map(members).collect();
    let mean = |name: &str, of: &dyn Fn(&Beside<'_>) -> Option<f64>| {
        let value = |group: &Vec<&Beside<'_>>| Some(geometric_mean(group.iter().filter_map(|beside| of(beside)))?.0);
        Column::new(name.into(), groups_of.iter().map(value).collect::<Vec<Option<f64>>>())
    };
    let of_ratios = |name: &str, fold: fn(f64, f64) -> f64| {
        let value = |group: &Vec<&Beside<'_>>| group.iter().filter_map(|beside| beside.ratio_to_best()).reduce(fold);
        Column::new(name.into(), groups_of.iter().map(value).collect::<Vec<Option<f64>>>())
    };
    let loses = |group: &Vec<&Beside<'_>>| {
        group.iter().filter_map(|beside| beside.ratio_to_best()).filter(|ratio| *ratio < 1.0).count() as u32
    };
    let mut columns = vec![
        Column::new("machine".into(), groups.iter().map(|group| group.0).collect::<Vec<_>>()),
        Column::new("pass".into(), groups.iter().map(|group| group.1).collect::<Vec<_>>()),
        Column::new("model".into(), groups.iter().map(|group| group.2.unwrap_or("all")).collect::<Vec<_>>()),
        Column::new("rows".into(), groups_of.iter().map(|group| group.len() as u32).collect::<Vec<_>>()),
        mean("over_floor", &|beside| Some(beside.ours.ms / beside.ours.floor_ms?)),
    ];
    columns.extend(LIBRARIES.iter().map(|(_, name)| mean(name, &|beside| beside.ratio(name))));
    columns.push(mean("best", &|beside| beside.ratio_to_best()));
    columns.push(of_ratios("least", f64::min));
    columns.push(of_ratios("most", f64::max));
    columns.push(Column::new("loses".into(), groups_of.iter().map(loses).collect::<Vec<_>>()));
    Ok(DataFrame::new(groups.len(), columns)?)
}

/// The rows of a table of [`gdn_times`] in which our default kernel is slower than the fastest library, worst first: pass,
/// model, sequences, ms, best, best_ms and ratio = best_ms / ms.
///
/// # Errors
/// [`Error::Table`] where a column is missing.
pub fn gdn_losses(times: &DataFrame) -> Result<DataFrame> {
    let rows = time_rows(times)?;
    let mut lost: Vec<(&TimeRow, &TimeRow)> = Vec::new();
    for beside in beside_peers(&rows) {
        if let Some(best) = beside.best().filter(|best| best.ms < beside.ours.ms) {
            lost.push((beside.ours, best));
        }
    }
    lost.sort_by(|a, b| (a.1.ms / a.0.ms).total_cmp(&(b.1.ms / b.0.ms)));
    let text = |name: &str, of: fn(&(&TimeRow, &TimeRow)) -> String| {
        Column::new(name.into(), lost.iter().map(of).collect::<Vec<_>>())
    };
    let number = |name: &str, of: fn(&(&TimeRow, &TimeRow)) -> f64| {
        Column::new(name.into(), lost.iter().map(of).collect::<Vec<_>>())
    };
    let columns = vec![
        text("pass", |(ours, _)| ours.pass.clone()),
        text("model", |(ours, _)| ours.model.clone()),
        text("sequences", |(ours, _)| ours.sequences.clone()),
        number("ms", |(ours, _)| ours.ms),
        text("best", |(_, best)| best.implementation.clone()),
        number("best_ms", |(_, best)| best.ms),
        number("ratio", |(ours, best)| best.ms / ours.ms),
    ];
    Ok(DataFrame::new(lost.len(), columns)?)
}

#[cfg(test)]
#[path = "speed_tests.rs"]
mod tests;
