//! Long lists of cases: in parts for several machines ([`Shard`]), and without what is recorded already ([`Known`]).

use crate::record::{Environment, Record, Workload};
use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
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

    /// Whether the file `name`, of an experiment's name, a machine and a date, holds records of `experiment`: of any part, or with
    /// `and_whole` of none.
    pub fn is_of(name: &str, experiment: &str, and_whole: bool) -> bool {
        let Some(first) = name.rsplitn(3, '_').nth(2) else { return false };
        Self::of_file(first).map_or(and_whole && first == experiment, |(of, _)| of == experiment)
    }

    /// The experiment and the part that the file `name`, of [`Shard::experiment`] and a machine, belongs to; none where it is of
    /// no part.
    pub fn of_file(name: &str) -> Option<(&str, Self)> {
        let (experiment, rest) = name.rsplit_once("-part")?;
        let (number, rest) = rest.split_once("of")?;
        let digits = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
        let part = Self::new(number.parse().ok()?, rest[..digits].parse().ok()?).ok()?;
        (rest[digits..].is_empty() || rest[digits..].starts_with(['_', '.'])).then_some((experiment, part))
    }
}

/// Parts of an experiment that no file is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    experiment: String,
    count: usize,
    there: BTreeSet<usize>,
}

/// What lacks where `names` are those of all files. An experiment that is there in one number of parts lacks none of another.
pub fn missing_parts<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<Missing> {
    let mut found: BTreeMap<&str, BTreeMap<usize, BTreeSet<usize>>> = BTreeMap::new();
    for (experiment, part) in names.into_iter().filter_map(Shard::of_file) {
        found.entry(experiment).or_default().entry(part.count).or_default().insert(part.number);
    }
    found.retain(|_, counts| counts.iter().all(|(count, there)| there.len() < *count));
    let missing = |(experiment, counts): (&str, BTreeMap<usize, BTreeSet<usize>>)| {
        let of_count = |(count, there)| Missing { experiment: experiment.to_owned(), count, there };
        counts.into_iter().map(of_count).collect::<Vec<_>>()
    };
    found.into_iter().flat_map(missing).collect()
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMED: usize = 10;
        let numbers = (1..=self.count).filter(|number| !self.there.contains(number)).take(NAMED);
        let numbers: Vec<String> = numbers.map(|number| number.to_string()).collect();
        let lacking = self.count - self.there.len();
        let (part, is) = if lacking == 1 { ("part", "is") } else { ("parts", "are") };
        write!(f, "{part} {}", numbers.join(", "))?;
        if lacking > NAMED {
            write!(f, " and {} more", lacking - NAMED)?;
        }
        write!(f, " of {} of {} {is} not there", self.count, self.experiment)
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
        assert_eq!(Shard::of_file("a_b-part3of8_nvidia-h200_2026-11-30.jsonl"), Some(("a_b", third)));
        assert_eq!(Shard::of_file(&third.experiment("of-part")), Some(("of-part", third)));
        for name in ["a_nvidia-h200.jsonl", "a-part9of8_x", "a-part3of8b", "a-partof", "a-part3"] {
            assert_eq!(Shard::of_file(name), None, "{name}");
        }
        let is_of = |name: &str, and_whole| Shard::is_of(name, "a_b", and_whole);
        assert!(is_of("a_b-part3of8_h200_2026-11-30.jsonl", false) && !is_of("a_b_h200_2026-11-30.jsonl", false));
        assert!(is_of("a_b_h200_2026-11-30.jsonl", true) && !is_of("a_b_c_h200_2026-11-30.jsonl", true));
        assert!(!is_of("a_b-c-part3of8_h200_2026-11-30.jsonl", true) && !is_of("a_b.jsonl", true));
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
    fn parts_that_no_file_is_of_are_named() {
        let missing =
            |names: &[&str]| missing_parts(names.iter().copied()).iter().map(Missing::to_string).collect::<Vec<_>>();
        let none: [&str; 0] = [];
        assert_eq!(missing(&["a_h200_2026-11-30.jsonl", "a-part1of2_h200.jsonl", "a-part2of2_b200.jsonl"]), none);
        assert_eq!(missing(&["a-part1of3_x.jsonl", "a-part1of3_y.jsonl"]), ["parts 2, 3 of 3 of a are not there"]);
        let names = ["b-part2of2_x.jsonl", "a-part1of12_x.jsonl", "a-part1of1000000000000_x.jsonl"];
        assert_eq!(
            missing(&names),
            [
                "parts 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 1 more of 12 of a are not there",
                "parts 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 999999999989 more of 1000000000000 of a are not there",
                "part 1 of 2 of b is not there",
            ]
        );
        // Begun in four parts, finished in two.
        assert_eq!(missing(&["a-part1of4_x.jsonl", "a-part1of2_x.jsonl", "a-part2of2_x.jsonl"]), none);
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
