//! Long lists of cases: in parts for several machines ([`Shard`]), and without what is recorded already ([`Known`]).

use crate::record::{Environment, Record, Workload};
use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// One of several parts of a list, `I/N` on the command line: the cases whose place is `I` modulo `N`, counted from 1.
///
/// The parts depend on the list alone, so that machines that know nothing of each other make it up without a case twice.
/// Neighbours go to different parts, because cases of one size stand side by side in most lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    number: usize,
    count: usize,
}

impl Default for Shard {
    /// The whole list.
    fn default() -> Self {
        Self { number: 1, count: 1 }
    }
}

impl Shard {
    /// Part `number` of `count`.
    ///
    /// # Errors
    /// [`Error::Input`] where `number` is not one of 1 to `count`.
    pub fn new(number: usize, count: usize) -> Result<Self> {
        if (1..=count).contains(&number) {
            Ok(Self { number, count })
        } else {
            Err(Error::input(format!("part {number} of {count}: expected one of 1 to {count}, such as 1/8 to 8/8")))
        }
    }

    /// Whether it is the whole list.
    pub fn is_whole(self) -> bool {
        self.count == 1
    }

    /// Whether the case at `index`, counted from 0, belongs to this part.
    pub fn holds(self, index: usize) -> bool {
        index % self.count == self.number - 1
    }

    /// The cases that belong to this part, in their order.
    pub fn of<T>(self, cases: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
        cases.into_iter().enumerate().filter(move |(index, _)| self.holds(*index)).map(|(_, case)| case)
    }

    /// The name of an experiment's records, with that of this part: parts that run at once write to files of their own.
    pub fn experiment(self, name: &str) -> String {
        if self.is_whole() { name.to_owned() } else { format!("{name}-part{}of{}", self.number, self.count) }
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.count)
    }
}

impl FromStr for Shard {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let numbers = text.split_once('/').and_then(|(number, count)| {
            Some((number.trim().parse::<usize>().ok()?, count.trim().parse::<usize>().ok()?))
        });
        match numbers {
            Some((number, count)) => Self::new(number, count),
            None => Err(Error::input(format!("'{text}': expected I/N, such as 3/8 for the third of eight parts"))),
        }
    }
}

/// Records that need not be measured again: see [`Record::is_of`].
#[derive(Clone, Debug, Default)]
pub struct Known<'a>(Vec<&'a Record>);

impl<'a> Known<'a> {
    /// Those of `records` that the code and the machine of `now` would only repeat.
    pub fn new(records: &'a [Record], now: &Environment) -> Self {
        Self(records.iter().filter(|record| record.is_of(now)).collect())
    }

    /// The records that `is_wanted` says yes to of exactly this workload, in the order in which they were read.
    pub fn of<'b>(
        &'b self,
        workload: &'b Workload,
        is_wanted: impl Fn(&Record) -> bool + 'b,
    ) -> impl Iterator<Item = &'a Record> + 'b {
        self.0.iter().copied().filter(move |record| record.workload == *workload && is_wanted(record))
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Machine, Measurement, Timing};

    #[test]
    fn the_parts_make_up_the_list_and_share_nothing() {
        for (cases, count) in [(209, 8), (9, 4), (3, 5), (0, 2), (7, 1)] {
            let parts = (1..=count).map(|number| Shard::new(number, count).unwrap().of(0..cases).collect::<Vec<_>>());
            let parts: Vec<Vec<usize>> = parts.collect();
            let sizes = parts.iter().map(Vec::len);
            assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1, "{parts:?}");
            let mut all = parts.concat();
            all.sort_unstable();
            assert_eq!(all, (0..cases).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_part_reads_as_i_of_n_and_names_its_own_file() {
        let third: Shard = "3/8".parse().unwrap();
        assert_eq!(third.of(0..20).collect::<Vec<_>>(), [2, 10, 18]);
        assert_eq!((third.to_string(), third.experiment("bench-gdn")), ("3/8".into(), "bench-gdn-part3of8".into()));
        assert_eq!(Shard::default().experiment("bench-gdn"), "bench-gdn");
        for text in ["0/8", "9/8", "1/0", "0/0"] {
            let message = text.parse::<Shard>().unwrap_err().to_string();
            assert!(message.contains("expected one of 1 to"), "{message}");
        }
        for text in ["", "3", "3/", "/8", "a/b", "-1/8", "1/8/2", "1.5/8"] {
            let message = text.parse::<Shard>().unwrap_err().to_string();
            assert!(message.contains("expected I/N"), "{message}");
        }
    }

    #[test]
    fn only_this_code_and_this_machine_are_known() {
        let environment = |commit: &str, dirty: bool, gpu: &str| Environment {
            commit: Some(commit.to_owned()),
            dirty: Some(dirty),
            machine: Machine { gpu: Some(gpu.to_owned()), ..Machine::default() },
            ..Environment::default()
        };
        let workload = Workload { kernel: Some("a".to_owned()), ..Workload::default() };
        let record = |environment: &Environment| {
            Record::new(environment, &workload, Measurement::Bench(Timing { latency_ms: 1.0, ..Timing::default() }))
        };
        let now = environment("1", false, "NVIDIA H200");
        let records = [
            record(&now),
            record(&environment("1", false, "NVIDIA H100")),
            record(&environment("2", false, "NVIDIA H200")),
            record(&environment("1", true, "NVIDIA H200")),
        ];
        let known = Known::new(&records, &now);
        assert_eq!(known.of(&workload, |_| true).count(), 1);
        assert_eq!(known.of(&Workload::default(), |_| true).count(), 0);
        assert_eq!(known.of(&workload, |record| record.errors().is_some()).count(), 0);
        assert!(Known::new(&records, &environment("1", true, "NVIDIA H200")).is_empty());
    }
}
