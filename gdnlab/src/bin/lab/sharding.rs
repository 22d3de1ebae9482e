//! The option with which several machines share the cases of one command, and what of them is done already.

use crate::output::{note, recorded_files};
use gdnlab::Result;
use gdnlab::record::{Environment, Held, Measurement, Record};
use gdnlab::sweep::Shard;
use std::path::Path;

/// Which part of the cases this process runs.
#[derive(clap::Args)]
pub struct Sharding {
    /// Run the I-th of N parts of the cases, such as 3/8: those whose place in the list is I modulo N. Records of a part
    /// go to a file of its own, and `cargo lab merge` makes one of them. As done counts what files of parts hold, of this
    /// commit and machine.
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
}

/// Which records count as done. Where a part is asked for, those in files of parts of the experiment, so that these are the
/// sweep.
pub struct Done<'a> {
    /// The experiment.
    pub experiment: &'a str,
    /// Whether without a part all files count, or only those of the experiment.
    pub anywhere: bool,
    /// Whether it is what the command measures.
    pub is_it: fn(&Measurement) -> bool,
}

/// What is recorded.
pub struct Recorded {
    /// All of it.
    pub all: Vec<Record>,
    /// What need not be measured again, if it is of this commit and machine.
    pub done: Vec<Record>,
}

impl Sharding {
    /// The part; all where none was asked for.
    pub fn part(&self) -> Shard {
        self.shard.unwrap_or_default()
    }

    /// The cases of this part; the person is told how many those are.
    pub fn cases<T>(&self, all: Vec<T>) -> Vec<T> {
        let Some(shard) = self.shard else { return all };
        let total = all.len();
        let cases: Vec<T> = shard.of(all).collect();
        self.say_cases(cases.len(), total);
        cases
    }

    /// Tells the person how many of `total` cases belong to this part, where one was asked for.
    pub fn say_cases(&self, cases: usize, total: usize) {
        if let Some(shard) = self.shard {
            let nothing = if cases == 0 { ", so there is nothing to do: there are more parts than cases" } else { "" };
            note(format_args!("part {shard}: {cases} of {total} cases{nothing}"));
        }
    }

    /// The name of the records' file of this part.
    pub fn experiment(&self, name: &str) -> String {
        self.part().experiment(name)
    }

    /// What the folder `data` holds. The person is told which files hold something that counts as done, or why nothing does.
    pub fn recorded(&self, data: &Path, count: &Done<'_>, again: bool, now: &Environment) -> Result<Recorded> {
        let files = recorded_files(data)?;
        let mut done = Vec::new();
        if !again {
            say_if_nothing_counts(now);
            let counted = files.iter().filter(|held| self.counts(&held.path, count));
            let of_now =
                counted.map(|held| (held, of_commit(held, count, now))).filter(|(_, records)| !records.is_empty());
            for (held, mut records) in of_now {
                let name = held.path.file_name().unwrap_or_default().to_string_lossy();
                note(format_args!("not measured again: what data/{name} holds of this commit ({})", records.len()));
                done.append(&mut records);
            }
        }
        Ok(Recorded { all: files.into_iter().flat_map(|held| held.records).collect(), done })
    }

    fn counts(&self, path: &Path, count: &Done<'_>) -> bool {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_part = self.shard.is_some_and(|shard| !shard.is_whole());
        !is_part && count.anywhere || Shard::is_of(&name, count.experiment, !is_part)
    }
}

/// The records of this code and CPU, whichever GPU they are of.
fn of_commit(held: &Held, count: &Done<'_>, now: &Environment) -> Vec<Record> {
    let is_of = |record: &&Record| {
        let mut there = now.clone();
        there.machine.gpu = record.environment.machine.gpu.clone();
        record.is_of(&there) && (count.is_it)(&record.measurement)
    };
    held.records.iter().filter(is_of).cloned().collect()
}

/// Says why nothing that was recorded counts, where that is so: then an interrupted command begins anew.
fn say_if_nothing_counts(now: &Environment) {
    match (&now.commit, now.dirty) {
        (None, _) => note("no git commit is known, so what is recorded already is measured again"),
        (_, Some(true)) => note("the code differs from its commit, so what is recorded already is measured again"),
        _ => {}
    }
}
