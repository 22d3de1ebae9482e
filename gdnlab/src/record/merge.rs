//! Records of many files as one list.
//!
//! Machines that share a sweep, or repeat what failed, leave files that overlap. What is the same measurement is told by
//! its fields: all but results, commit and time ([`FIELDS`]). Of several the newest stays, as it was written.

use super::{Place, Record, Source};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::*;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::fmt;

/// Fields that say what was measured, of every kind of record. A field that a kind does not have says nothing.
const FIELDS: [&str; 38] = [
    "kind",
    "op",
    "kernel",
    "mode",
    "regime",
    "seed",
    "pass",
    "B",
    "T",
    "HK",
    "HV",
    "K",
    "V",
    "seqlens",
    "software",
    "tensor",
    "base",
    "step",
    "format",
    "against",
    "experiment",
    "model",
    "positions",
    "decoded",
    "padding",
    "check",
    "direction",
    "quantity",
    "unit",
    "mixer",
    "size",
    "steps",
    "text",
    "ranks",
    "transport",
    "cut",
    "scaling",
    "clock",
];

/// Which machines' records come into one list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Machines {
    /// Those of one machine; several are refused.
    #[default]
    One,
    /// Those of the machines whose name contains this text.
    Named(String),
    /// Those of all. Only records of one machine take the place of each other.
    All,
}

/// Why a record was left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// The line is there once more.
    Repeated(Place),
    /// The same was measured again, later.
    Older(Place),
    /// The same was measured in the same second, with another result, which was read later.
    Differs(Place),
    /// It is of a machine that was not asked for.
    OtherMachine(String),
}

/// A record that was left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// Where it stands.
    pub place: Place,
    /// What it measured, in words.
    pub what: String,
    /// Why it was left out.
    pub why: Why,
}

impl fmt::Display for Dropped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: ", self.place, self.what)?;
        match &self.why {
            Why::Repeated(place) => write!(f, "the same line as {place}"),
            Why::Older(place) => write!(f, "measured again in {place}"),
            Why::Differs(place) => write!(f, "another result of the same second stands in {place}"),
            Why::OtherMachine(machine) => write!(f, "of {machine}"),
        }
    }
}

/// What became of the records of several files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// The lines that stay, as they were written, in the order in which they were read.
    pub lines: Vec<String>,
    /// What was left out, in that order too.
    pub dropped: Vec<Dropped>,
    /// The machines of what stays, and the commits, each with the number of its records.
    pub machines: Vec<(String, usize)>,
    /// See `machines`; empty where the commit is not known.
    pub commits: Vec<(String, usize)>,
    /// Last lines that were cut short, as by an interrupted write. They are left out too.
    pub torn: Vec<Place>,
}

/// A line with its record.
struct Line {
    place: Place,
    text: String,
    record: Record,
    what: String,
    machine: String,
}

/// The records of `sources`, each measurement once: see [`Merged`].
///
/// # Errors
/// [`Error::Input`] for records of several machines where `machines` allows one, and where nothing is left; otherwise as
/// [`Source::records`].
pub fn merge(sources: &[Source], machines: &Machines) -> Result<Merged> {
    let mut lines = Vec::new();
    for source in sources {
        lines.append(&mut lines_of(source)?);
    }
    let torn = sources.iter().filter_map(|source| source.torn.clone()).collect();
    let mut merged = Merged { torn, ..Merged::default() };
    let of_machine = |line: &Line| match machines {
        Machines::Named(name) => line.machine.contains(name.as_str()),
        Machines::One | Machines::All => true,
    };
    let known = counts(lines.iter().map(|line| line.machine.as_str()));
    let (lines, others): (Vec<Line>, Vec<Line>) = lines.into_iter().partition(of_machine);
    merged.dropped.extend(others.into_iter().map(|Line { place, what, machine, .. }| Dropped {
        place,
        what,
        why: Why::OtherMachine(machine),
    }));
    if lines.is_empty() {
        let names: Vec<&str> = known.iter().map(|(name, _)| name.as_str()).collect();
        let reason =
            if names.is_empty() { "the files are empty".to_owned() } else { format!("there are {}", names.join("; ")) };
        return Err(Error::input(format!("no records to merge: {reason}")));
    }
    if *machines == Machines::One {
        refuse_several(&lines)?;
    }
    let newest = newest(&lines)?;
    for (index, line) in lines.iter().enumerate() {
        let winner = newest[index];
        if winner == index {
            merged.lines.push(line.text.clone());
            continue;
        }
        let other = &lines[winner];
        let utc = |line: &Line| line.record.environment.utc.clone();
        let why = if other.text == line.text {
            Why::Repeated
        } else if utc(other) == utc(line) && other.record != line.record {
            Why::Differs // and not in its spaces alone
        } else {
            Why::Older
        };
        let (place, what) = (line.place.clone(), line.what.clone());
        merged.dropped.push(Dropped { place, what, why: why(other.place.clone()) });
    }
    let kept = || lines.iter().enumerate().filter(|(index, _)| newest[*index] == *index).map(|(_, line)| line);
    merged.machines = counts(kept().map(|line| line.machine.as_str()));
    merged.commits = counts(kept().map(|line| line.record.environment.commit.as_deref().unwrap_or_default()));
    Ok(merged)
}

fn lines_of(source: &Source) -> Result<Vec<Line>> {
    let records = source.records()?;
    let texts = source.text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let line = |((index, text), record): ((usize, &str), Record)| {
        Ok(Line {
            place: Place { path: source.path.clone(), line: index + 1 },
            text: text.to_owned(),
            what: what(&record)?,
            machine: record.environment.machine.name(),
            record,
        })
    };
    texts.zip(records).map(line).collect()
}

/// What `record` measured, in one line: each of [`FIELDS`] that it has.
fn what(record: &Record) -> Result<String> {
    let value = serde_json::to_value(record).map_err(|error| Error::input(error.to_string()))?;
    let field = |name: &str| match value.get(name)? {
        Value::Null => None,
        Value::String(text) if name == "kind" => Some(text.clone()),
        Value::String(text) => Some(format!("{name}={text}")),
        other => Some(format!("{name}={other}")),
    };
    Ok(FIELDS.iter().filter_map(|name| field(name)).collect::<Vec<_>>().join(" "))
}

/// For each line the one that stands for the same measurement on the same machine: the newest, and of those the last.
fn newest(lines: &[Line]) -> Result<Vec<usize>> {
    let key = |line: &Line| format!("{}\n{}", line.machine, line.what);
    let utc = |line: &Line| line.record.environment.utc.clone().unwrap_or_default();
    let table = DataFrame::new(
        lines.len(),
        vec![
            Column::new("key".into(), lines.iter().map(key).collect::<Vec<_>>()),
            Column::new("utc".into(), lines.iter().map(utc).collect::<Vec<_>>()),
            Column::new("index".into(), (0..lines.len() as u64).collect::<Vec<_>>()),
        ],
    )?;
    let winners = table
        .clone()
        .lazy()
        .sort(["utc"], SortMultipleOptions::default().with_maintain_order(true))
        .group_by_stable([col("key")])
        .agg([col("index").last().alias("winner")]);
    let how = JoinArgs { maintain_order: MaintainOrderJoin::Left, ..JoinArgs::new(JoinType::Left) };
    let joined = table.lazy().join(winners, [col("key")], [col("key")], how).collect()?;
    Ok(joined.column("winner")?.u64()?.iter().flatten().map(|winner| winner as usize).collect())
}

/// Refuses records of several machines. What a processor computed beside a GPU is of one machine with it.
fn refuse_several(lines: &[Line]) -> Result<()> {
    let machines = || lines.iter().map(|line| &line.record.environment.machine);
    let beside_gpu: HashSet<_> = machines().filter(|of| of.gpu.is_some()).map(|of| &of.cpu).collect();
    let alone = lines.iter().zip(machines()).filter(|(_, of)| of.gpu.is_some() || !beside_gpu.contains(&of.cpu));
    let several = counts(alone.map(|(line, _)| line.machine.as_str()));
    if several.len() < 2 {
        return Ok(());
    }
    let names: Vec<String> = several.iter().map(|(name, count)| format!("{name} ({count})")).collect();
    Err(Error::input(format!(
        "records of {} machines: {}: expected those of one, since times and errors differ between machines; choose one by \
         its name (--machine), or ask for all of them (--mixed)",
        names.len(),
        names.join(", ")
    )))
}

/// The different ones of `names` in their order, each with how often it comes.
fn counts<'a>(names: impl Iterator<Item = &'a str>) -> Vec<(String, usize)> {
    let mut counts: Vec<(String, usize)> = Vec::new();
    let mut places = HashMap::new();
    for name in names {
        let place = *places.entry(name).or_insert_with(|| {
            counts.push((name.to_owned(), 0));
            counts.len() - 1
        });
        counts[place].1 += 1;
    }
    counts
}

#[cfg(test)]
#[path = "merge_tests.rs"]
mod tests;
