//! Errors of the output after one intermediate was rounded, by format, beside the published ones.

use super::axis::Log;
use super::panel::{Panel, Tick, three_digits};
use super::style::{self, ACCENT, FAINT, GRID, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::precision::Format;
use crate::rounding::{FORMATS, FORWARD};
use crate::table::format_label;
use crate::table::rows::{numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::plotters::element::DashedPathElement;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

const WIDTH: i32 = 1920;
/// Height without the rows, and that of a row.
const HEIGHT: i32 = 400;
const ROW_HEIGHT: i32 = 76;
const LEFT: i32 = 430;
const RIGHT: i32 = 1640;
const TOP: i32 = 200;

/// Draws, of a table of [`crate::table::rounding`], a row for each step, the smallest error in bf16 first and what rounds
/// everything last: a dot per format, and a diamond where an error was published. A dashed line stands at `threshold_pct`, and
/// at the right how ours in bf16 compares with the published one. `footer` goes below.
///
/// # Errors
/// [`Error::Table`] where a column is missing, [`Error::Figure`] where the table lacks the row that rounds everything.
pub fn rounding_by_step(table: &DataFrame, threshold_pct: f64, footer: &str) -> Result<Figure> {
    let mut rows = rows(table)?;
    let together = rows.iter().find(|row| row.step == FORWARD).cloned();
    let together = together.ok_or_else(|| Error::Figure(format!("no row '{FORWARD}' in the table of roundings")))?;
    rows.sort_by(|a, b| {
        let key = |row: &Row| (row.step == FORWARD, row.of(Format::Bf16).unwrap_or_default());
        key(a).partial_cmp(&key(b)).unwrap_or(std::cmp::Ordering::Equal)
    });
    let all = rows.iter().flat_map(|row| row.errors.iter().copied().flatten().chain(row.published));
    let (low, high) = super::axis::extent(all.chain([threshold_pct])).unwrap_or((1e-6, 1.0));
    let height = HEIGHT + ROW_HEIGHT * rows.len() as i32;
    let plot = Plot {
        panel: Panel { left: LEFT, right: RIGHT, top: TOP, bottom: height - 200 },
        x: Log { low: low / 1.6, high: high * 1.8, from: LEFT, to: RIGHT },
        rows: &rows,
        threshold_pct,
    };
    let percent = |format| together.of(format).map_or_else(|| "–".to_owned(), |error| format!("{error:.2} %"));
    let title = format!(
        "Kept in bf16 the forward errs by {}, in fp16 by {}; the test allows {} %",
        percent(Format::Bf16),
        percent(Format::F16),
        three_digits(threshold_pct)
    );
    Figure::draw((WIDTH as u32 / super::DENSITY, height as u32 / super::DENSITY), plot.description(&title), |canvas| {
        canvas.draw_text(&title, &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        plot.legend(canvas)?;
        plot.draw(canvas)?;
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, height - 34))
    })
}

#[derive(Clone, Debug)]
struct Row {
    step: String,
    /// In percent, in the order of [`FORMATS`].
    errors: Vec<Option<f64>>,
    published: Option<f64>,
}

impl Row {
    fn of(&self, format: Format) -> Option<f64> {
        self.errors[FORMATS.iter().position(|known| *known == format)?]
    }
}

fn rows(table: &DataFrame) -> Result<Vec<Row>> {
    let (steps, published) = (texts(table, "step")?, numbers(table, "published")?);
    let columns = FORMATS.map(|format| numbers(table, format_label(format)));
    let columns = columns.into_iter().collect::<Result<Vec<_>>>()?;
    let row = |(index, step): (usize, String)| Row {
        step,
        errors: columns.iter().map(|column| column[index]).collect(),
        published: published[index],
    };
    Ok(steps.into_iter().enumerate().map(row).collect())
}

/// Colour of a format, as of the mode that it is the mark of.
pub(super) fn format_color(format: Format) -> RGBColor {
    match format {
        Format::Bf16 => RGBColor(0x00, 0x9e, 0x73),
        Format::F16 => RGBColor(0x56, 0xb4, 0xe9),
        Format::Tf32 | Format::Tf32Truncated => RGBColor(0xe6, 0x9f, 0x00),
        Format::F32 => RGBColor(0xcc, 0x79, 0xa7),
        Format::F64 => FAINT,
    }
}

/// A dot; that of TF32 is a ring around what has as many digits.
fn mark(canvas: &Canvas<'_>, at: (i32, i32), format: Format) -> Result<(), DrawError> {
    match format {
        Format::Tf32 => canvas.draw(&Circle::new(at, 15, format_color(format).stroke_width(5))),
        _ => canvas.draw(&Circle::new(at, 11, format_color(format).filled())),
    }
}

fn diamond(canvas: &Canvas<'_>, (x, y): (i32, i32)) -> Result<(), DrawError> {
    let corners = [(x, y - 19), (x + 19, y), (x, y + 19), (x - 19, y), (x, y - 19)];
    canvas.draw(&PathElement::new(corners, INK.stroke_width(4)))
}

struct Plot<'a> {
    panel: Panel,
    x: Log,
    rows: &'a [Row],
    threshold_pct: f64,
}

impl Plot<'_> {
    fn description(&self, title: &str) -> String {
        let of_row = |row: &Row| {
            let formats = FORMATS.iter().zip(&row.errors);
            let words =
                formats.filter_map(|(format, error)| Some(format!("{} {:.2e} %", format_label(*format), (*error)?)));
            let published = row.published.map(|error| format!(" (published for bf16: {error} %)")).unwrap_or_default();
            format!("{}: {}{published}", row.step, words.collect::<Vec<_>>().join(", "))
        };
        format!(
            "Relative RMS error of the output after one intermediate was rounded. {title}. {}.",
            self.rows.iter().map(of_row).collect::<Vec<_>>().join("; ")
        )
    }

    fn legend(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let ink = style::text(LABEL, INK, HPos::Left, VPos::Center);
        let (mut x, y) = (56, 104);
        for format in FORMATS {
            mark(canvas, (x, y), format)?;
            canvas.draw_text(format_label(format), &ink, (x + 30, y))?;
            x += 30 + style::width(format_label(format), LABEL) + 60;
        }
        diamond(canvas, (x, y))?;
        canvas.draw_text("published, bf16", &ink, (x + 34, y))
    }

    fn draw(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let (x, panel) = (&self.x, &self.panel);
        let ticks: Vec<Tick> = x.decades().map(|at| (x.at(10f64.powi(at)), percent_tick(at))).collect();
        panel.columns(canvas, &ticks)?;
        panel.frame(canvas, "Rounded, all else in float64")?;
        panel.caption(canvas, "relative RMS error of o, %")?;
        let note = style::text(SMALL, FAINT, HPos::Right, VPos::Center);
        canvas.draw_text("bf16 / published", &note, (WIDTH - 40, TOP - 34))?;
        let at = x.at(self.threshold_pct);
        let line = DashedPathElement::new([(at, TOP - 8), (at, panel.bottom)], 14, 10, ACCENT.stroke_width(4));
        canvas.draw(&line)?;
        let allowed = format!("allowed: {} %", three_digits(self.threshold_pct));
        let ink = style::text(SMALL, ACCENT, HPos::Right, VPos::Center);
        canvas.draw_text(&allowed, &ink, (at - 12, TOP - 20))?;
        let name = style::text(LABEL, INK, HPos::Right, VPos::Center);
        for (index, row) in self.rows.iter().enumerate() {
            let y = TOP + ROW_HEIGHT * index as i32 + ROW_HEIGHT / 2;
            if row.step == FORWARD {
                let top = y - ROW_HEIGHT / 2;
                canvas.draw(&PathElement::new([(40, top), (WIDTH - 40, top)], GRID.stroke_width(3)))?;
            }
            canvas.draw_text(&row.step, &name, (LEFT - 24, y))?;
            for (format, error) in FORMATS.into_iter().zip(&row.errors) {
                if let Some(error) = error.filter(|error| *error > 0.0) {
                    mark(canvas, (x.at(error), y), format)?;
                }
            }
            if let Some(published) = row.published {
                diamond(canvas, (x.at(published), y))?;
                let ratio = row.of(Format::Bf16).map_or(f64::NAN, |error| error / published);
                let ink = style::text(LABEL, INK, HPos::Right, VPos::Center);
                canvas.draw_text(&format!("×{ratio:.2}"), &ink, (WIDTH - 40, y))?;
            }
        }
        Ok(())
    }
}

/// A power of ten in percent: plain from 0.01 on.
fn percent_tick(exponent: i32) -> String {
    if exponent >= -2 { three_digits(10f64.powi(exponent)) } else { super::axis::power_of_ten(exponent) }
}
