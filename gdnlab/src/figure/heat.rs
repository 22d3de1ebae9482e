//! Errors of every tensor after each step, as numbers on colours.

use super::style::{self, ACCENT, FAINT, GRID, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure, Named};
use crate::table::rows::{distinct, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};

const WIDTH: i32 = 1920;
const HEIGHT: i32 = 330;
const ROW_HEIGHT: i32 = 50;
const LEFT: i32 = 470;
const RIGHT: i32 = 1890;
const TOP: i32 = 210;
const GAP: i32 = 50;
/// What is above the threshold.
const ABOVE: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
/// The smallest error that has a colour, over the threshold.
const LEAST: f64 = 1e-2;

/// Draws a panel for each of `tables`, as [`crate::table::rounding_per_tensor`] makes them: a row per step, a column per
/// tensor, each cell with its error in percent. Those above `threshold_pct` stand out. `footer` goes below.
///
/// # Errors
/// [`Error::Table`] where a column is missing, [`Error::Figure`] without tables.
pub fn error_by_step_and_tensor(tables: &[Named<'_>], threshold_pct: f64, footer: &str) -> Result<Figure> {
    let panels = tables.iter().map(|(label, table)| Heat::of(label, table)).collect::<Result<Vec<_>>>()?;
    let steps = distinct(panels.iter().flat_map(|panel| panel.steps.iter().cloned()));
    if panels.is_empty() || steps.is_empty() {
        return Err(Error::Figure("no errors by step and tensor to draw".to_owned()));
    }
    let counts = panels.iter().map(|panel| {
        let cells = panel.columns.iter().flat_map(|(_, errors)| errors.iter().flatten());
        let above = cells.filter(|error| **error > threshold_pct).count();
        format!("{} in {}", if above == 0 { "none".to_owned() } else { above.to_string() }, panel.label)
    });
    let threshold = super::panel::three_digits(threshold_pct);
    let title = format!("Errors above {threshold} %: {}", counts.collect::<Vec<_>>().join(", "));
    let height = HEIGHT + ROW_HEIGHT * steps.len() as i32;
    let worst: Vec<String> = panels.iter().map(Heat::worst).collect();
    let description =
        format!("Relative RMS error of each tensor after one step was rounded. {title}. {}", worst.join(" "));
    Figure::draw((WIDTH as u32 / super::DENSITY, height as u32 / super::DENSITY), description, |canvas| {
        canvas.draw_text(&title, &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        let words = "relative RMS error in % of each tensor (columns) after the intermediate in the row was rounded";
        canvas.draw_text(words, &style::text(LABEL, FAINT, HPos::Left, VPos::Center), (40, 96))?;
        let name = style::text(SMALL, INK, HPos::Right, VPos::Center);
        for (row, step) in steps.iter().enumerate() {
            canvas.draw_text(step, &name, (LEFT - 18, center(row)))?;
        }
        let pitch = (RIGHT - LEFT + GAP) / panels.len() as i32;
        for (index, panel) in panels.iter().enumerate() {
            let left = LEFT + pitch * index as i32;
            panel.draw(canvas, &steps, (left, left + pitch - GAP), threshold_pct)?;
        }
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, height - 34))
    })
}

fn center(row: usize) -> i32 {
    TOP + ROW_HEIGHT * row as i32 + ROW_HEIGHT / 2
}

struct Heat<'a> {
    label: &'a str,
    steps: Vec<String>,
    /// Tensor, and its errors in percent in the order of the steps.
    columns: Vec<(String, Vec<Option<f64>>)>,
}

impl<'a> Heat<'a> {
    fn of(label: &'a str, table: &gdnlab_deps::polars::prelude::DataFrame) -> Result<Self> {
        let tensors = table.get_column_names().into_iter().filter(|name| name.as_str() != "step");
        let columns = tensors.map(|name| Ok((name.to_string(), numbers(table, name)?))).collect::<Result<_>>()?;
        Ok(Self { label, steps: texts(table, "step")?, columns })
    }

    fn worst(&self) -> String {
        let cells = self.columns.iter().flat_map(|(tensor, errors)| {
            self.steps.iter().zip(errors).filter_map(move |(step, error)| Some((tensor, step, (*error)?)))
        });
        let worst = cells.max_by(|a, b| a.2.total_cmp(&b.2));
        worst.map_or_else(String::new, |(tensor, step, error)| {
            format!("The largest in {} is {error:.2} % of {tensor}, with {step}.", self.label)
        })
    }

    fn draw(
        &self,
        canvas: &Canvas<'_>,
        steps: &[String],
        (left, right): (i32, i32),
        threshold_pct: f64,
    ) -> Result<(), DrawError> {
        let heading = format!("rounded to {}", self.label);
        canvas.draw_text(&heading, &style::bold(LABEL, INK, HPos::Left, VPos::Center), (left, TOP - 70))?;
        let width = (right - left) / self.columns.len().max(1) as i32;
        for (index, (tensor, errors)) in self.columns.iter().enumerate() {
            let x = left + width * index as i32;
            let heading = style::text(SMALL - 3, FAINT, HPos::Center, VPos::Center);
            let short = if tensor == "final_state" { "state" } else { tensor };
            canvas.draw_text(short, &heading, (x + width / 2, TOP - 24))?;
            for (step, error) in self.steps.iter().zip(errors) {
                let Some(row) = steps.iter().position(|known| known == step) else { continue };
                let error = error.unwrap_or(f64::NAN);
                let (fill, ink) = colors(error, threshold_pct);
                let y = center(row);
                let cell = [(x + 1, y - ROW_HEIGHT / 2 + 1), (x + width - 1, y + ROW_HEIGHT / 2 - 1)];
                canvas.draw(&Rectangle::new(cell, fill.filled()))?;
                let number = style::text(SMALL - 4, ink, HPos::Center, VPos::Center);
                canvas.draw_text(&cell_text(error), &number, (x + width / 2, y))?;
            }
        }
        Ok(())
    }
}

/// The fill of a cell, and the ink on it.
fn colors(error: f64, threshold_pct: f64) -> (RGBColor, RGBColor) {
    if error > threshold_pct || error.is_nan() {
        return (ABOVE, WHITE);
    }
    let along = 1.0 - (error / threshold_pct).max(LEAST).ln() / LEAST.ln();
    (style::mix(style::mix(WHITE, GRID, 0.4), ACCENT, 0.75 * along), if along > 0.75 { WHITE } else { INK })
}

/// `0.86`; a point for what is below a hundredth of a percent.
fn cell_text(error: f64) -> String {
    match error {
        nan if nan.is_nan() => "NaN".to_owned(),
        small if small < 0.005 => "·".to_owned(),
        _ => format!("{error:.2}"),
    }
}
