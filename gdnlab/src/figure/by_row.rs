//! Errors of many variants of a computation against one set of errors to explain: which variant has its signature?

use super::axis::{self, Log};
use super::style::{self, ACCENT, FAINT, FRAME, GRID, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure, Named};
use crate::table::Mode;
use crate::table::rows::{column, distinct, median};
use crate::{Error, Result};
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::{DataFrame, DataType};

/// Width of the figure, and its height without the rows, in canvas units.
const WIDTH: i32 = 1920;
const HEIGHT: i32 = 430;
const ROW_HEIGHT: i32 = 58;
/// Left edge of the first panel and right edge of the last, upper edge of both, and what stands right of each: the
/// factors, and free width.
const LEFT: i32 = 270;
const RIGHT: i32 = 1900;
const TOP: i32 = 240;
const FACTORS: i32 = 120;
const GAP: i32 = 30;

/// How the variants are laid out.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Column whose values give one panel each.
    pub panel: &'a str,
    /// Column whose values give one row each.
    pub row: &'a str,
}

/// Draws one panel and row per variant in `variants`: a dot per tensor, its median `max_rel` over shapes, above a band
/// that spans the same medians of `target`. At the right stands how far the variant is from the target, as a typical
/// factor: `exp` of the RMS over tensors of `ln(variant / target)`. The closest variant stands out and is the title.
/// Tensors that the target does not have are left out.
/// `source` goes into the footer.
///
/// Both tables have the columns tensor and max_rel.
///
/// # Errors
/// [`Error::Table`] where a column is missing, [`Error::Figure`] where no tensor has a positive error in both tables.
pub fn error_by_row(variants: &DataFrame, rows: Rows<'_>, target: Named<'_>, source: &str) -> Result<Figure> {
    let (label, table) = target;
    let targets = medians_of(&errors_by_tensor(table)?);
    let mut trials = trials(variants, rows)?;
    for trial in &mut trials {
        trial.medians.retain(|(tensor, _)| targets.iter().any(|(known, _)| known == tensor));
    }
    let (low, high) = axis::extent(targets.iter().map(|(_, error)| *error))
        .ok_or_else(|| Error::Figure(format!("no positive error in the table '{label}'")))?;
    let all = trials.iter().flat_map(|trial| trial.medians.iter().map(|(_, error)| *error));
    let (least, most) = axis::extent(all.chain([low, high])).unwrap_or((low, high));
    let best = trials
        .iter()
        .filter_map(|trial| Some((trial, trial.factor_from(&targets)?)))
        .min_by(|a, b| a.1.total_cmp(&b.1))
        .ok_or_else(|| Error::Figure(format!("no tensor has a positive error both in a variant and in '{label}'")))?;
    let plot = Plot {
        panels: distinct(trials.iter().map(|trial| trial.panel.as_str())),
        rows: distinct(trials.iter().map(|trial| trial.row.as_str())),
        range: (least / 1.6, most * 1.6),
        band: (low, high),
        trials: &trials,
        targets: &targets,
        best: best.0,
        title: format!(
            "{}: {} comes closest to {label}, ×{} off",
            panel_title(&best.0.panel),
            typeset(&best.0.row),
            axis::short(best.1)
        ),
        label,
    };
    let height = HEIGHT + ROW_HEIGHT * plot.rows.len() as i32;
    let size = (WIDTH as u32 / super::DENSITY, height as u32 / super::DENSITY);
    Figure::draw(size, format!("Max relative error per variant. {}.", plot.title), |canvas| {
        plot.headings(canvas)?;
        for (index, panel) in plot.panels.iter().enumerate() {
            plot.panel(canvas, panel, index as i32)?;
        }
        canvas.draw_text(source, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, height - 34))
    })
}

/// Median error of each tensor.
type Medians = Vec<(String, f64)>;

/// One variant.
struct Trial {
    panel: String,
    row: String,
    medians: Medians,
}

impl Trial {
    /// Typical factor between its errors and those of `targets`, over the tensors that both have.
    fn factor_from(&self, targets: &Medians) -> Option<f64> {
        let squares: Vec<f64> = self
            .medians
            .iter()
            .filter_map(|(tensor, error)| {
                let (_, target) = targets.iter().find(|(name, _)| name == tensor)?;
                Some((error / target).ln().powi(2))
            })
            .collect();
        (!squares.is_empty()).then(|| (squares.iter().sum::<f64>() / squares.len() as f64).sqrt().exp())
    }
}

/// Tensor and error of each row that has a positive finite one; `None` for the others.
fn errors_by_tensor(table: &DataFrame) -> Result<Vec<Option<(String, f64)>>> {
    let tensor = column(table, "tensor", &DataType::String)?;
    let max_rel = column(table, "max_rel", &DataType::Float64)?;
    let row = |i: usize| {
        let error = max_rel.f64().ok()?.get(i).filter(|error| *error > 0.0 && error.is_finite())?;
        Some((tensor.str().ok()?.get(i)?.to_owned(), error))
    };
    Ok((0..table.height()).map(row).collect())
}

fn medians_of(errors: &[Option<(String, f64)>]) -> Medians {
    let present = || errors.iter().flatten();
    distinct(present().map(|(tensor, _)| tensor.as_str()))
        .into_iter()
        .filter_map(|tensor| {
            let of_tensor = present().filter(|(name, _)| name == tensor).map(|(_, error)| *error);
            Some((tensor.to_owned(), median(of_tensor)?))
        })
        .collect()
}

fn trials(table: &DataFrame, rows: Rows<'_>) -> Result<Vec<Trial>> {
    let errors = errors_by_tensor(table)?;
    let (panels, names) = (column(table, rows.panel, &DataType::String)?, column(table, rows.row, &DataType::String)?);
    let (panels, names) = (panels.str()?, names.str()?);
    let keys: Vec<_> = panels.iter().zip(names.iter()).collect();
    let trial = |key: (Option<&str>, Option<&str>)| {
        let of_key = keys.iter().zip(&errors).filter(|(other, _)| **other == key).map(|(_, error)| error.clone());
        let medians = medians_of(&of_key.collect::<Vec<_>>());
        Some(Trial { panel: key.0?.to_owned(), row: key.1?.to_owned(), medians })
    };
    Ok(distinct(keys.iter().copied()).into_iter().filter_map(trial).collect())
}

struct Plot<'a> {
    trials: &'a [Trial],
    targets: &'a Medians,
    best: &'a Trial,
    title: String,
    label: &'a str,
    panels: Vec<&'a str>,
    rows: Vec<&'a str>,
    range: (f64, f64),
    band: (f64, f64),
}

impl Plot<'_> {
    fn headings(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        canvas.draw_text(&self.title, &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        let label = style::text(LABEL, INK, HPos::Left, VPos::Center);
        canvas.draw(&Circle::new((52, 102), 8, FAINT.filled()))?;
        let entry = "one tensor, median over shapes";
        canvas.draw_text(entry, &label, (74, 102))?;
        let x = 74 + style::width(entry, LABEL) + 50;
        canvas.draw(&Rectangle::new([(x, 86), (x + 52, 118)], band_color().filled()))?;
        canvas.draw_text(&format!("range of {}", self.label), &label, (x + 66, 102))
    }

    fn panel(&self, canvas: &Canvas<'_>, panel: &str, index: i32) -> Result<(), DrawError> {
        let pitch = (RIGHT - LEFT + GAP) / self.panels.len() as i32;
        let left = LEFT + pitch * index;
        let right = left + pitch - GAP - FACTORS;
        let bottom = TOP + ROW_HEIGHT * self.rows.len() as i32;
        let x = Log { low: self.range.0, high: self.range.1, from: left, to: right };

        canvas.draw_text(&panel_title(panel), &style::bold(LABEL, INK, HPos::Left, VPos::Center), (left, TOP - 64))?;
        let factor = style::text(SMALL, FAINT, HPos::Right, VPos::Center);
        canvas.draw_text("factor off", &factor, (right + FACTORS, TOP - 24))?;
        let edges = [(x.at(self.band.0), TOP - 8), (x.at(self.band.1), bottom)];
        canvas.draw(&Rectangle::new(edges, band_color().filled()))?;
        let tick = style::text(SMALL, FAINT, HPos::Center, VPos::Center);
        for exponent in x.decades() {
            let at = x.at(10f64.powi(exponent));
            canvas.draw(&PathElement::new([(at, TOP - 8), (at, bottom)], GRID.stroke_width(2)))?;
            canvas.draw_text(&axis::power_of_ten(exponent), &tick, (at, bottom + 26))?;
        }
        canvas.draw(&PathElement::new([(left, bottom), (right, bottom)], FRAME.stroke_width(2)))?;
        let caption = style::text(LABEL, INK, HPos::Center, VPos::Center);
        canvas.draw_text("max |x − r| / max |r|", &caption, ((left + right) / 2, bottom + 72))?;
        for (row, name) in self.rows.iter().enumerate() {
            let y = TOP + ROW_HEIGHT * row as i32 + ROW_HEIGHT / 2;
            if index == 0 {
                let ink = style::text(LABEL, INK, HPos::Right, VPos::Center);
                canvas.draw_text(&typeset(name), &ink, (LEFT - 20, y))?;
            }
            if let Some(trial) = self.trials.iter().find(|trial| trial.panel == panel && trial.row == *name) {
                self.trial(canvas, trial, &x, y)?;
            }
        }
        Ok(())
    }

    fn trial(&self, canvas: &Canvas<'_>, trial: &Trial, x: &Log, y: i32) -> Result<(), DrawError> {
        let stands_out = std::ptr::eq(trial, self.best);
        let color = if stands_out { ACCENT } else { FAINT };
        if let Some((low, high)) = axis::extent(trial.medians.iter().map(|(_, error)| *error)) {
            canvas.draw(&Rectangle::new([(x.at(low), y - 3), (x.at(high), y + 3)], color.mix(0.45).filled()))?;
        }
        for (_, error) in &trial.medians {
            canvas.draw(&Circle::new((x.at(*error), y), 8, color.filled()))?;
        }
        let Some(factor) = trial.factor_from(self.targets) else { return Ok(()) };
        let number = if stands_out { style::bold } else { style::text };
        let number = number(LABEL, color, HPos::Right, VPos::Center);
        canvas.draw_text(&format!("×{}", axis::short(factor)), &number, (x.to + FACTORS, y))
    }
}

/// Colour of the band that marks the target.
fn band_color() -> RGBColor {
    style::mix(WHITE, ACCENT, 0.18)
}

/// A panel's name, or the label of the mode that it names.
fn panel_title(panel: &str) -> String {
    Mode::of(panel).label
}

/// The name of a step with its transposes raised.
fn typeset(name: &str) -> String {
    name.replace("^T", "ᵀ")
}
