//! The option with which several machines share the cases of one command.

use crate::output::note;
use gdnlab::record::Environment;
use gdnlab::sweep::Shard;

/// Which part of the cases this process runs.
#[derive(clap::Args)]
pub struct Sharding {
    /// Run the I-th of N parts of the cases, such as 3/8: those whose place in the list is I modulo N. Records of a part
    /// go to a file of its own, and `cargo lab merge` makes one of them.
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
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
        note(format_args!("part {shard}: {} of {total} cases", cases.len()));
        cases
    }

    /// The name of the records' file of this part.
    pub fn experiment(&self, name: &str) -> String {
        self.part().experiment(name)
    }
}

/// Says why nothing that was recorded counts, where that is so: then an interrupted command begins anew.
pub fn say_if_nothing_counts(now: &Environment) {
    match (&now.commit, now.dirty) {
        (None, _) => note("no git commit is known, so what is recorded already is measured again"),
        (_, Some(true)) => note("the code differs from its commit, so what is recorded already is measured again"),
        _ => {}
    }
}
