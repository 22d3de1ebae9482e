//! What was aimed at on Hopper, and what was reached.

use super::rows::geometric_mean;
use super::speed::{Beside, TimeRow, beside_peers, time_rows};
use crate::Result;
use gdnlab_deps::polars::prelude::*;

/// One aim: what is measured, over which rows, and where it should lie.
struct Goal {
    words: &'static str,
    wanted: Wanted,
    measured: Option<f64>,
    rows: usize,
}

#[derive(Clone, Copy)]
enum Wanted {
    AtLeast(f64),
    AtMost(f64),
}

impl Wanted {
    fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(limit) => value >= limit,
            Self::AtMost(limit) => value <= limit,
        }
    }

    fn words(self) -> String {
        match self {
            Self::AtLeast(limit) => format!("at least {limit}"),
            Self::AtMost(limit) => format!("at most {limit}"),
        }
    }
}

/// A table of [`gdn_times`](super::gdn_times) against what this project aims at on an H200, with the columns goal, wanted,
/// measured (empty where no row of ours says), rows (of ours that say it) and met (yes, no, or – where nothing is
/// measured).
///
/// # Errors
/// [`crate::Error::Table`] where a column is missing.
pub fn gdn_goals(times: &DataFrame) -> Result<DataFrame> {
    let rows = time_rows(times)?;
    let all = beside_peers(&rows);
    let goals = goals(&all, &rows);
    let met = |goal: &Goal| match goal.measured {
        Some(value) if goal.wanted.is_met(value) => "yes",
        Some(_) => "no",
        None => "–",
    };
    let columns = vec![
        Column::new("goal".into(), goals.iter().map(|goal| goal.words).collect::<Vec<_>>()),
        Column::new("wanted".into(), goals.iter().map(|goal| goal.wanted.words()).collect::<Vec<_>>()),
        Column::new("measured".into(), goals.iter().map(|goal| goal.measured).collect::<Vec<_>>()),
        Column::new("rows".into(), goals.iter().map(|goal| goal.rows as u32).collect::<Vec<_>>()),
        Column::new("met".into(), goals.iter().map(met).collect::<Vec<_>>()),
    ];
    Ok(DataFrame::new(goals.len(), columns)?)
}

fn goals(all: &[Beside<'_>], rows: &[TimeRow]) -> Vec<Goal> {
    let ratios = |pass: &str, of: &dyn Fn(&Beside<'_>) -> Option<f64>| -> Vec<f64> {
        let is_published = |beside: &&Beside<'_>| beside.ours.pass == pass && !beside.ours.is_training();
        all.iter().filter(is_published).filter_map(of).collect()
    };
    let goal = |words, wanted, values: Vec<f64>, of: fn(&[f64]) -> Option<f64>| Goal {
        words,
        wanted,
        measured: of(&values),
        rows: values.len(),
    };
    let least = |values: &[f64]| values.iter().copied().reduce(f64::min);
    let most = |values: &[f64]| values.iter().copied().reduce(f64::max);
    let mean = |values: &[f64]| Some(geometric_mean(values.iter().copied())?.0);
    let to_best = |beside: &Beside<'_>| beside.ratio_to_best();
    let to_flash_qla = |beside: &Beside<'_>| beside.ratio("FlashQLA");
    let full = |beside: &Beside<'_>| {
        let ours = beside.ours;
        (ours.heads == "16/64" && ours.sequences == "8192x4").then_some(ours.ms / ours.bytes_ms?)
    };
    let long = |beside: &Beside<'_>| {
        let ours = beside.ours;
        (ours.heads == "16/32" && ours.tokens == 32_768).then_some(ours.ms / ours.floor_ms?)
    };
    vec![
        goal("forward, slowest row against the best peer", Wanted::AtLeast(1.0), ratios("fwd", &to_best), least),
        goal("forward, geometric mean against the best peer", Wanted::AtLeast(1.5), ratios("fwd", &to_best), mean),
        goal("forward, 16/64 heads 8192x4, over the floor of traffic", Wanted::AtMost(1.5), ratios("fwd", &full), most),
        goal("backward, slowest row against FlashQLA", Wanted::AtLeast(1.0), ratios("bwd", &to_flash_qla), least),
        goal("backward, geometric mean against FlashQLA", Wanted::AtLeast(2.0), ratios("bwd", &to_flash_qla), mean),
        goal("backward, 16/32 heads 32k, over the floor", Wanted::AtMost(2.5), ratios("bwd", &long), most),
        goal("training shapes, forward + backward against fla", Wanted::AtLeast(3.0), of_training(all, rows), least),
    ]
}

/// fla's time for both passes over ours, for each call of a training step that both have times of.
fn of_training(all: &[Beside<'_>], rows: &[TimeRow]) -> Vec<f64> {
    let forward = all.iter().filter(|beside| beside.ours.pass == "fwd" && beside.ours.is_training());
    let both = |beside: &Beside<'_>| {
        let ours = beside.ours;
        let of = |implementation: &str, pass: &str| {
            let same = |row: &&TimeRow| {
                (&row.machine, &row.model, &row.sequences) == (&ours.machine, &ours.model, &ours.sequences)
                    && (row.implementation.as_str(), row.pass.as_str()) == (implementation, pass)
            };
            Some(rows.iter().find(same)?.ms)
        };
        let fla = of("fla", "fwd")? + of("fla", "bwd")?;
        Some(fla / (ours.ms + of(&ours.implementation, "bwd")?))
    };
    forward.filter_map(both).collect()
}
