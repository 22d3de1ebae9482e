//! Errors on real inputs and on drawn ones, by length.

use super::Figure;
use super::axis;
use super::chart::{Axis, COLORS, Chart, ChartPanel, Entry, Line, Point, Scale, log_axis};
use crate::table::Mode;
use crate::table::rows::{distinct, median, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::DataFrame;

/// Draws, of a table of [`crate::table::errors`], a panel per mode: relative RMS error in unit roundoffs against T, a line for
/// each kind of inputs (the column regime) through the medians over tensors, with the range over tensors. Kinds in `real` are
/// filled and solid, the others hollow and dashed. `footer` goes below.
///
/// # Errors
/// [`Error::Table`] where a column is missing, [`Error::Figure`] where there is no positive error.
pub fn errors_by_inputs(errors: &DataFrame, real: &[&str], footer: &str) -> Result<Figure> {
    let rows = Row::all(errors)?;
    let modes = Mode::all_of(rows.iter().map(|row| row.mode.as_str()));
    let kinds = distinct(rows.iter().map(|row| row.kind.as_str()));
    let lengths = distinct(rows.iter().map(|row| row.tokens));
    let (Some((low, high)), Some((first, last))) =
        (axis::extent(rows.iter().map(|row| row.error)), axis::extent(lengths.iter().copied()))
    else {
        return Err(Error::Figure("no positive error to draw on a logarithmic axis".to_owned()));
    };
    let color = |kind: &str| COLORS[kinds.iter().position(|known| *known == kind).unwrap_or(0) % COLORS.len()];
    let range = |mode: &Mode| {
        let of_mode = rows.iter().filter(|row| row.mode == mode.name);
        axis::extent(of_mode.map(|row| row.error)).unwrap_or((low, high))
    };
    let panel = |mode: &Mode| ChartPanel {
        x: Axis {
            scale: Scale::Log(first / 1.3, last * 1.3),
            caption: "T, tokens".to_owned(),
            ticks: lengths.iter().map(|tokens| (*tokens, tokens.to_string())).collect(),
        },
        y: log_axis(
            &format!("{}, in {}", mode.label, mode.roundoff_label()),
            (range(mode).0 / 1.5, range(mode).1 * 1.5),
        ),
        lines: kinds
            .iter()
            .enumerate()
            .map(|(index, kind)| {
                // Marks of one length stand beside each other.
                let aside = 1.06f64.powf(index as f64 - (kinds.len() as f64 - 1.0) / 2.0);
                let is_real = real.contains(kind);
                Line {
                    color: color(kind),
                    dashed: !is_real,
                    joined: true,
                    marked: true,
                    points: points(&rows, (&mode.name, kind), aside, is_real),
                }
            })
            .collect(),
        reference: Some(1.0).filter(|one| (range(mode).0 / 1.5..range(mode).1 * 1.5).contains(one)),
    };
    let entry = |kind: &&str| {
        let is_real = real.contains(kind);
        Entry { label: (*kind).to_owned(), color: color(kind), dashed: !is_real, filled: is_real, marked: true }
    };
    let ratios: Vec<String> = modes.iter().filter_map(|mode| ratio_in_words(&rows, mode, real)).collect();
    Chart {
        title: format!("Errors, real over drawn inputs: {}", ratios.join(", ")),
        description: format!(
            "Relative RMS error against T on real inputs and drawn ones, median and range over tensors. Real over drawn: {}.",
            ratios.join(", ")
        ),
        footer: format!("{footer} · marks: median over tensors, bars: from the least to the largest"),
        legend: kinds.iter().map(entry).collect(),
        panels: modes.iter().map(panel).collect(),
    }
    .draw()
}

struct Row {
    mode: String,
    kind: String,
    tokens: f64,
    /// In unit roundoffs of the mode.
    error: f64,
}

impl Row {
    fn all(table: &DataFrame) -> Result<Vec<Self>> {
        let (modes, kinds) = (texts(table, "mode")?, texts(table, "regime")?);
        let (tokens, errors) = (numbers(table, "T")?, numbers(table, "rel_rms")?);
        let row = |at: usize| {
            let error = errors[at]? / Mode::of(&modes[at]).unit_roundoff();
            Some(Self { mode: modes[at].clone(), kind: kinds[at].clone(), tokens: tokens[at]?, error })
        };
        Ok((0..modes.len()).filter_map(row).collect())
    }
}

fn points(rows: &[Row], (mode, kind): (&str, &str), aside: f64, filled: bool) -> Vec<Point> {
    let of_line = || rows.iter().filter(|row| row.mode == mode && row.kind == kind);
    let mut lengths = distinct(of_line().map(|row| row.tokens));
    lengths.sort_by(f64::total_cmp);
    let point = |tokens: f64| {
        let errors = || of_line().filter(|row| row.tokens == tokens).map(|row| row.error);
        Some(Point { x: tokens * aside, y: median(errors())?, interval: axis::extent(errors()), filled })
    };
    lengths.into_iter().filter_map(point).collect()
}

/// `bf16 ×1.2`.
fn ratio_in_words(rows: &[Row], mode: &Mode, real: &[&str]) -> Option<String> {
    let of = |is_real: bool| {
        let of_kind = rows.iter().filter(|row| row.mode == mode.name && real.contains(&row.kind.as_str()) == is_real);
        median(of_kind.map(|row| row.error))
    };
    Some(format!("{} ×{}", mode.label, axis::short(of(true)? / of(false)?)))
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;
    use gdnlab_deps::polars::prelude::df;

    #[test]
    fn real_and_drawn_inputs_have_a_line_each() {
        let table = df!(
            "mode" => ["bf16"; 8],
            "regime" => ["layer 0", "layer 0", "layer 0", "layer 0", "gaussian", "gaussian", "gaussian", "gaussian"],
            "T" => [1024u32, 1024, 2048, 2048, 1024, 1024, 2048, 2048],
            "rel_rms" => [2e-3, 4e-3, 2e-3, 4e-3, 1e-3, 2e-3, 1e-3, 2e-3],
        )
        .unwrap();
        let figure = errors_by_inputs(&table, &["layer 0"], "the footer").unwrap();
        check(&figure, &["layer 0", "gaussian", "2048", "bf16, in u(bf16)", "bf16 ×2.0", "the footer"]);
        let none = df!("mode" => ["bf16"], "regime" => ["x"], "T" => [1u32], "rel_rms" => [0.0]).unwrap();
        assert!(errors_by_inputs(&none, &[], "").is_err());
    }
}
