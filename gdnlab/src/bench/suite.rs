//! Lists of cases.

use super::case::{Case, published};
use super::timer::Budget;
use crate::problem::Shape;
use crate::record::Pass;
use crate::{Error, Result};
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

/// A list of cases with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// Ten forward and eight backward cases of the published ones: what is timed on the way.
    Sample,
    /// All 203 published cases, and the training shapes of Day 2.
    H200,
    /// The training shapes of Day 2: B = 32, T = 1,024, K = 64, V = 128, H = 6, 9 and 12.
    Day2,
}

/// Forward cases of [`Suite::Sample`] by heads and lengths: every number of heads, 2/8 twice because few heads fill a
/// machine worst; every way of packing, which is one sequence, two unequal ones, and four and eight equal ones; and every
/// length from the shortest, where launches count, to the longest, where 16/64 heads are the most work of all.
const SAMPLE_FORWARD: [(usize, usize, &str); 10] = [
    (2, 8, "1x32768"),
    (2, 8, "4096x8"),
    (4, 16, "1x8192"),
    (8, 32, "28672+4096"),
    (8, 24, "1x16384"),
    (16, 16, "1x2048"),
    (16, 32, "8192x4"),
    (16, 48, "1024+7168"),
    (16, 64, "1x32768"),
    (32, 32, "1024x8"),
];

/// Backward cases of [`Suite::Sample`] by heads and name of the split: every number of heads with both lengths, every
/// number of sequences with both lengths.
const SAMPLE_BACKWARD: [(usize, usize, &str); 8] = [
    (2, 4, "32k_1seq"),
    (2, 4, "8k_4seq"),
    (4, 8, "32k_8seq"),
    (4, 8, "8k_2seq"),
    (8, 16, "32k_4seq"),
    (8, 16, "8k_1seq"),
    (16, 32, "32k_2seq"),
    (16, 32, "8k_8seq"),
];

/// Heads of the models of Day 2.
const DAY2_HEADS: [usize; 3] = [6, 9, 12];

impl Suite {
    /// All suites.
    pub const ALL: [Self; 3] = [Self::Sample, Self::H200, Self::Day2];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sample => "sample",
            Self::H200 => "h200",
            Self::Day2 => "day2",
        }
    }

    /// Its cases; `published_folder` is `data/published`.
    ///
    /// # Errors
    /// As [`published`], and [`Error::Input`] where that file lacks a case of the sample.
    pub fn cases(self, published_folder: &Path) -> Result<Vec<Case>> {
        match self {
            Self::Sample => sample(&published(published_folder)?),
            Self::H200 => Ok([published(published_folder)?, day2()].concat()),
            Self::Day2 => Ok(day2()),
        }
    }

    /// How long each of its cases is timed unless a person says otherwise: of 209 cases a tenth of a second each, with 20
    /// samples at the least.
    pub fn budget(self) -> Budget {
        match self {
            Self::H200 => Budget {
                warm_up: Duration::from_millis(20),
                min_samples: 20,
                max_samples: 100,
                time: Duration::from_millis(100),
            },
            Self::Sample | Self::Day2 => Budget::default(),
        }
    }

    /// Whether it is so long that every case is kept in `data/` as soon as it is measured, asked for or not.
    pub fn is_always_kept(self) -> bool {
        self == Self::H200
    }
}

impl fmt::Display for Suite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Suite {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|suite| suite.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::input(format!("unknown suite '{text}': expected one of {names}"))
        })
    }
}

fn sample(published: &[Case]) -> Result<Vec<Case>> {
    let forward = SAMPLE_FORWARD.map(|(qk, value, lengths)| (Pass::Fwd, qk, value, lengths));
    let backward = SAMPLE_BACKWARD.map(|(qk, value, lengths)| (Pass::Bwd, qk, value, lengths));
    let mut cases = Vec::new();
    for (pass, qk_heads, value_heads, lengths) in forward.into_iter().chain(backward) {
        let seqlens = lengths.parse()?;
        let wanted = |case: &&Case| {
            let heads = (case.shape.qk_heads, case.shape.value_heads);
            case.pass == pass && heads == (qk_heads, value_heads) && case.seqlens.as_ref() == Some(&seqlens)
        };
        let case = published.iter().find(wanted).ok_or_else(|| {
            Error::input(format!("the published times lack {qk_heads}/{value_heads} heads with {lengths}"))
        })?;
        cases.push(case.clone());
    }
    Ok(cases)
}

fn day2() -> Vec<Case> {
    let case = |pass: Pass, heads: usize| Case {
        pass,
        shape: Shape { batch: 32, ..Shape::new(1024, heads, 64, 128) },
        seqlens: None,
        label: "training".to_owned(),
        peers: Vec::new(),
    };
    [Pass::Fwd, Pass::Bwd].into_iter().flat_map(|pass| DAY2_HEADS.map(|heads| case(pass, heads))).collect()
}
