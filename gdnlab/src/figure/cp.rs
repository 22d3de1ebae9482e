//! Calls that are cut over ranks: their errors, and their time against the number of ranks.

use super::Figure;
use super::axis::extent;
use super::chart::{Axis, COLORS, Chart, ChartPanel, Entry, Line, Point, Scale, log_axis, named_axis};
use crate::table::rows::{distinct, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::DataFrame;

/// Draws the relative RMS error of each tensor against float64, of a single run and of each number of ranks. `table` is one
/// of [`cp_exactness`](crate::table::cp_exactness); `limit` is where errors have to stay below.
///
/// # Errors
/// [`Error::Figure`] without a positive error, [`Error::Table`] where a column is missing.
pub fn cp_errors(table: &DataFrame, limit: f64, footer: &str) -> Result<Figure> {
    let (tensors, ops) = (texts(table, "tensor")?, texts(table, "op")?);
    let (ranks, errors, single) =
        (numbers(table, "ranks")?, numbers(table, "rel_rms")?, numbers(table, "single_rel_rms")?);
    let range = extent(errors.iter().chain(&single).flatten().copied().chain([limit]));
    let (low, high) = range.ok_or_else(|| Error::Figure("no positive error to draw".to_owned()))?;
    let largest = errors.iter().flatten().copied().fold(0.0, f64::max);
    let counts = distinct(ranks.iter().flatten().map(|count| *count as u64));
    let panel = |op: &String| {
        let rows: Vec<usize> = (0..ops.len()).filter(|&row| ops[row] == *op).collect();
        let names = distinct(rows.iter().map(|&row| tensors[row].clone()));
        let place = |row: usize| names.iter().position(|name| *name == tensors[row]).unwrap_or_default() as f64;
        let spread = |index: usize| (index as f64 - counts.len() as f64 / 2.0) * 0.14;
        let mark = |row: usize, y: Option<f64>, index, filled| {
            Some(Point { x: place(row) + spread(index), y: y.filter(|y| *y > 0.0)?, interval: None, filled })
        };
        let of_single: Vec<Point> = {
            let first = names.iter().filter_map(|name| rows.iter().find(|&&row| tensors[row] == *name));
            first.filter_map(|&row| mark(row, single[row], 0, false)).collect()
        };
        let of_ranks = counts.iter().enumerate().map(|(index, count)| {
            let of_count = rows.iter().filter(|&&row| ranks[row] == Some(*count as f64));
            let points = of_count.filter_map(|&row| mark(row, errors[row], index + 1, true)).collect();
            Line { color: COLORS[index % COLORS.len()], dashed: false, joined: false, marked: true, points }
        });
        let line = Line { color: COLORS[6], dashed: false, joined: false, marked: true, points: of_single };
        ChartPanel {
            x: named_axis(&format!("tensor, {}", in_words(op)), &names),
            y: log_axis("relative RMS error against float64", (low * 0.6, high * 1.6)),
            lines: std::iter::once(line).chain(of_ranks).collect(),
            reference: Some(limit),
        }
    };
    let entry = |(index, count): (usize, &u64)| Entry {
        label: format!("{count} ranks"),
        color: COLORS[index % COLORS.len()],
        dashed: false,
        filled: true,
        marked: true,
    };
    let alone = Entry { label: "single run".to_owned(), color: COLORS[6], dashed: false, filled: false, marked: true };
    let chart = Chart {
        title: "A sequence on several ranks errs like one on a single rank".to_owned(),
        description: format!(
            "Relative RMS error of each tensor against float64, for a single run and {} ranks; largest {largest:.1e}, limit {limit:.1e}.",
            counts.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
        ),
        footer: footer.to_owned(),
        legend: std::iter::once(alone).chain(counts.iter().enumerate().map(entry)).collect(),
        panels: distinct(ops.iter()).into_iter().map(panel).collect(),
    };
    chart.draw()
}

/// A call that was timed on several numbers of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Series {
    op: String,
    pass: String,
    /// Whether its sequences grow with the ranks.
    weak: bool,
    sequences: usize,
    /// Of each sequence, and where they grow on one rank.
    tokens: usize,
}

impl Series {
    /// What is timed.
    fn call(&self) -> String {
        format!("{}, {}", in_words(&self.op), self.pass)
    }

    fn label(&self) -> String {
        let (count, tokens) = (self.sequences, super::panel::grouped(self.tokens));
        let sequences = if count == 1 { "one sequence".to_owned() } else { format!("{count} sequences") };
        let a_rank = if self.weak { " a rank" } else { "" };
        format!("{sequences} of {tokens} tokens{a_rank}")
    }
}

/// How many times as fast `ranks` ranks are at most on a sequence that is all there is. Two take turns. Of more, each makes its
/// transition and its local state before its own run, so forward three runs of its part follow one another; with gradients,
/// where forward and backward take four times a forward, nine quarters of such a call.
fn at_most(pass: &str, ranks: f64) -> f64 {
    if ranks <= 2.0 { 1.0 } else { ranks / if pass == "fwd" { 3.0 } else { 2.25 } }
}

/// Draws the speed-up over a single run against the number of ranks, beside the ideal and beside what one sequence allows at
/// most. `table` is one of [`cp_scaling`](crate::table::cp_scaling).
///
/// # Errors
/// [`Error::Figure`] without times of several ranks, [`Error::Table`] where a column is missing.
pub fn cp_scaling(table: &DataFrame, footer: &str) -> Result<Figure> {
    let measured = speedups(table)?;
    let largest = measured.iter().map(|(_, ranks, _)| *ranks).fold(1.0, f64::max);
    if largest < 2.0 {
        return Err(Error::Figure("times of one rank alone: expected some of several ranks".to_owned()));
    }
    // Up to where the bound is above 1.
    let most = largest.max(8.0);
    let counts: Vec<f64> =
        std::iter::successors(Some(1.0), |count| Some(count * 2.0)).take_while(|n| *n <= most).collect();
    let series = distinct(measured.iter().map(|(series, ..)| series.clone()));
    // What is timed stands in the caption, unless there are several.
    let calls = distinct(series.iter().map(Series::call));
    let named = |label: String, call: &str| if calls.len() > 1 { format!("{label}, {call}") } else { label };
    let caption = if calls.len() > 1 { String::new() } else { format!(", {}", calls.concat()) };
    let passes = distinct(series.iter().filter(|series| series.sequences == 1).map(|series| series.pass.as_str()));
    let point = |x: f64, y: f64, filled| Point { x, y, interval: None, filled };
    let line = |color, dashed, marked, points| Line { color, dashed, joined: true, marked, points };
    let bare = |label: String, color| Entry { label, color, dashed: true, filled: true, marked: false };
    let mut lines = vec![line(COLORS[6], true, false, counts.iter().map(|&n| point(n, n, true)).collect())];
    let mut legend = vec![bare("ideal".to_owned(), COLORS[6])];
    for (index, pass) in passes.iter().enumerate() {
        let color = COLORS[5 - index % 2];
        let bound = counts.iter().copied().chain([3.0]).map(|n| point(n, at_most(pass, n), true));
        let mut bound: Vec<Point> = bound.collect();
        bound.sort_by(|a, b| a.x.total_cmp(&b.x));
        lines.push(line(color, true, false, bound));
        let share = if *pass == "fwd" { "N/3" } else { "N/2.25" };
        legend.push(bare(named(format!("one sequence at most: {share} on N > 2 ranks"), pass), color));
    }
    for (index, of) in series.iter().enumerate() {
        let color = COLORS[index % 4];
        let of_series = measured.iter().filter(|(series, ..)| series == of);
        let mut points: Vec<Point> = of_series.map(|(_, ranks, speedup)| point(*ranks, *speedup, !of.weak)).collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        lines.push(line(color, of.weak, true, points));
        let label = named(of.label(), &of.call());
        legend.push(Entry { label, color, dashed: of.weak, filled: !of.weak, marked: true });
    }
    let (low, high) = extent(lines.iter().flat_map(|line| &line.points).map(|point| point.y)).unwrap_or((0.5, most));
    let ticks = counts.iter().map(|count| (*count, format!("{count}"))).collect();
    let panel = ChartPanel {
        x: Axis { scale: Scale::Log(0.95, most * 1.05), caption: "ranks".to_owned(), ticks },
        y: log_axis(&format!("speed-up over a single run{caption}"), (low * 0.85, high * 1.15)),
        lines,
        reference: Some(1.0),
    };
    let title = found_in_words(&measured, largest);
    let description = format!("{title}. Beside it the ideal, and what one sequence allows at most.");
    Chart { title, description, footer: footer.to_owned(), legend, panels: vec![panel] }.draw()
}

/// What was measured: each call, the number of ranks and the speed-up.
fn speedups(table: &DataFrame) -> Result<Vec<(Series, f64, f64)>> {
    let (ops, passes, scalings) = (texts(table, "op")?, texts(table, "pass")?, texts(table, "scaling")?);
    let [ranks, tokens, sequences, speedup] = ["ranks", "T", "sequences", "speedup"].map(|name| numbers(table, name));
    let (ranks, tokens, sequences, speedup) = (ranks?, tokens?, sequences?, speedup?);
    let measured = |row: usize| {
        let (ranks, weak) = (ranks[row]?, scalings[row] == "weak");
        let (tokens, sequences) = (tokens[row]?, sequences[row]?);
        let tokens = tokens / sequences / if weak { ranks } else { 1.0 };
        let (op, pass) = (ops[row].clone(), passes[row].clone());
        let series = Series { op, pass, weak, sequences: sequences as usize, tokens: tokens as usize };
        Some((series, ranks, speedup[row].filter(|speedup| speedup.is_finite())?))
    };
    Ok((0..ops.len()).filter_map(measured).collect())
}

/// What the most ranks gave, for one sequence and for many.
fn found_in_words(measured: &[(Series, f64, f64)], ranks: f64) -> String {
    let of = |one: bool| {
        let there = measured.iter().filter(|(series, at, _)| (series.sequences == 1) == one && *at == ranks);
        super::panel::span(there.map(|(.., speedup)| *speedup), |speedup| format!("{speedup:.2}"))
    };
    let words = |name: &str, one: bool| of(one).map(|speedups| format!("{name} {speedups} times as fast"));
    let parts: Vec<String> =
        [words("many sequences", false), words("one sequence", true)].into_iter().flatten().collect();
    format!("On {ranks} ranks: {}", parts.join(", "))
}

fn in_words(op: &str) -> &str {
    match op {
        "gdn" => "GDN",
        "gdn2" => "GDN-2",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;
    use gdnlab_deps::polars::prelude::df;

    #[test]
    fn errors_stand_beside_those_of_a_single_run() {
        let table = df!(
            "op" => ["gdn", "gdn", "gdn2", "gdn2"], "tensor" => ["o", "dq", "o", "o"], "ranks" => [2u64, 2, 2, 4],
            "rel_rms" => [1e-3, 2e-3, 1.5e-3, 0.0], "single_rel_rms" => [1e-3, 1.9e-3, 1.5e-3, 1.5e-3],
        )
        .unwrap();
        let figure = cp_errors(&table, 4e-3, "the footer").unwrap();
        check(&figure, &["single run", "2 ranks", "4 ranks", "tensor, GDN-2", "the footer"]);
        assert!(figure.description().contains("largest 2.0e-3"), "{}", figure.description());
    }

    #[test]
    fn speed_up_stands_beside_the_ideal_and_what_one_sequence_allows() {
        let table = df!(
            "op" => ["gdn"; 6], "pass" => ["fwd+bwd"; 6],
            "scaling" => ["strong", "strong", "weak", "weak", "strong", "strong"],
            "ranks" => [1u64, 2, 1, 2, 1, 2], "T" => [16384u64, 16384, 16384, 32768, 32768, 32768],
            "sequences" => [1u64, 1, 1, 1, 8, 8], "speedup" => [1.0, 0.86, 1.0, 1.05, 1.0, 1.84],
        )
        .unwrap();
        let figure = cp_scaling(&table, "the footer").unwrap();
        let labels = [
            "ideal",
            "one sequence at most: N/2.25 on N &gt; 2 ranks",
            "one sequence of 16,384 tokens",
            "one sequence of 16,384 tokens a rank",
            "8 sequences of 4,096 tokens",
            "speed-up over a single run, GDN, fwd+bwd",
            "On 2 ranks: many sequences 1.84 times as fast, one sequence 0.86 to 1.05 times as fast",
        ];
        check(&figure, &labels);
        assert!(cp_scaling(&table.head(Some(1)), "").is_err());
        assert_eq!([2.0, 3.0, 9.0].map(|ranks| at_most("fwd", ranks)), [1.0, 1.0, 3.0]);
        assert_eq!(at_most("fwd+bwd", 9.0), 4.0);
    }
}
