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
            Line { color: COLORS[index % COLORS.len()], dashed: false, joined: false, points }
        });
        let line = Line { color: COLORS[6], dashed: false, joined: false, points: of_single };
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
    };
    let alone = Entry { label: "single run".to_owned(), color: COLORS[6], dashed: false, filled: false };
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

/// Draws the speed-up over a single run, the share of the messages in the time, and their time over its floor, against the
/// number of ranks. `table` is one of [`cp_scaling`](crate::table::cp_scaling).
///
/// # Errors
/// [`Error::Figure`] without times of several ranks, [`Error::Table`] where a column is missing.
pub fn cp_scaling(table: &DataFrame, footer: &str) -> Result<Figure> {
    let columns = ["op", "pass", "scaling"].map(|name| texts(table, name));
    let [ops, passes, scalings] = columns;
    let (ops, passes, scalings) = (ops?, passes?, scalings?);
    let ranks = numbers(table, "ranks")?;
    let most = ranks.iter().flatten().copied().fold(1.0, f64::max);
    if most < 2.0 {
        return Err(Error::Figure("times of one rank alone: expected some of several ranks".to_owned()));
    }
    let names: Vec<(String, String, String)> =
        (0..ops.len()).map(|row| (ops[row].clone(), passes[row].clone(), scalings[row].clone())).collect();
    let series = distinct(names.iter().cloned());
    let lines = |column: &str, factor: f64| -> Result<Vec<Line>> {
        let values = numbers(table, column)?;
        let line = |(index, name): (usize, &(String, String, String))| {
            let point = |row: usize| {
                let y = values[row].filter(|y| y.is_finite())? * factor;
                Some(Point { x: ranks[row]?, y, interval: None, filled: name.2 == "strong" })
            };
            let mut points: Vec<Point> =
                (0..names.len()).filter(|&row| names[row] == *name).filter_map(point).collect();
            points.sort_by(|a, b| a.x.total_cmp(&b.x));
            Line { color: COLORS[index % COLORS.len()], dashed: name.2 != "strong", joined: true, points }
        };
        Ok(series.iter().enumerate().map(line).collect())
    };
    let x = |caption: &str| {
        let ticks = distinct(ranks.iter().flatten().copied()).into_iter().map(|count| (count, format!("{count}")));
        Axis { scale: Scale::Log(0.9, most * 1.15), caption: caption.to_owned(), ticks: ticks.collect() }
    };
    let spanned = |lines: &[Line], more: &[f64]| {
        let all = lines.iter().flat_map(|line| &line.points).map(|point| point.y).chain(more.iter().copied());
        extent(all).unwrap_or((0.1, 1.0))
    };
    let ideal = |(x, _)| Point { x, y: x, interval: None, filled: true };
    let mut speedup = lines("speedup", 1.0)?;
    let (low, high) = spanned(&speedup, &[1.0, most]);
    let ideal: Vec<Point> = [(1.0, ()), (most, ())].map(ideal).to_vec();
    speedup.push(Line { color: COLORS[6], dashed: true, joined: true, points: ideal });
    let several = |mut lines: Vec<Line>| {
        lines.iter_mut().for_each(|line| line.points.retain(|point| point.x > 1.0 && point.y > 0.0));
        lines
    };
    let (share, over) = (several(lines("share", 100.0)?), several(lines("over_floor", 1.0)?));
    let around = |(low, high): (f64, f64)| (low * 0.8, high * 1.25);
    let (of_share, of_over) = (around(spanned(&share, &[])), around(spanned(&over, &[1.0])));
    let entry = |(index, (op, pass, scaling)): (usize, &(String, String, String))| Entry {
        label: format!("{}, {pass}, {scaling}", in_words(op)),
        color: COLORS[index % COLORS.len()],
        dashed: scaling != "strong",
        filled: scaling == "strong",
    };
    let ideal = Entry { label: "ideal".to_owned(), color: COLORS[6], dashed: true, filled: true };
    let best = speedup.iter().take(series.len()).flat_map(|line| &line.points).map(|point| point.y / point.x);
    let panels = vec![
        ChartPanel {
            x: x("ranks"),
            y: log_axis("speed-up over a single run", (low * 0.8, high * 1.25)),
            lines: speedup.clone(),
            reference: None,
        },
        ChartPanel { x: x("ranks"), y: log_axis("messages, % of the time", of_share), lines: share, reference: None },
        ChartPanel {
            x: x("ranks"),
            y: log_axis("messages over their floor", of_over),
            lines: over,
            reference: Some(1.0),
        },
    ];
    let chart = Chart {
        title: format!("One sequence on up to {most} ranks"),
        description: format!(
            "Speed-up over a single run on up to {most} ranks, the share of messages in the time, and their time over what the link's rate allows. Speed-up over ranks: {}.",
            super::panel::span(best, super::panel::three_digits).unwrap_or_default()
        ),
        footer: footer.to_owned(),
        legend: series.iter().enumerate().map(entry).chain([ideal]).collect(),
        panels,
    };
    chart.draw()
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
    fn speed_up_stands_beside_the_ideal() {
        let table = df!(
            "op" => ["gdn"; 4], "pass" => ["fwd"; 4], "scaling" => ["strong", "strong", "weak", "weak"],
            "ranks" => [1u64, 4, 1, 4], "speedup" => [1.0, 1.3, 1.0, 1.4], "share" => [0.0, 0.1, 0.0, 0.05],
            "over_floor" => [None, Some(3.0), None, Some(2.0)],
        )
        .unwrap();
        let figure = cp_scaling(&table, "the footer").unwrap();
        check(&figure, &["ideal", "GDN, fwd, strong", "speed-up over a single run", "up to 4 ranks"]);
        assert!(cp_scaling(&table.head(Some(1)), "").is_err());
    }
}
