//! Max relative error per tensor, one dot per shape: is each mode near its own unit roundoff?

use super::axis::{self, Log};
use super::style::{self, FAINT, FRAME, GRID, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure, Named};
use crate::table::Mode;
use crate::table::rows::{Sample, distinct, median, samples};
use crate::{Error, Result};
use gdnlab_deps::plotters::element::DashedPathElement;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};

const SIZE: (u32, u32) = (960, 600);
/// Edges of the panel in canvas units.
const LEFT: i32 = 150;
const RIGHT: i32 = 1540;
const TOP: i32 = 190;
const BOTTOM: i32 = 1080;
/// Least distance of two notes at the right edge.
const NOTE_HEIGHT: i32 = 34;

/// Draws the errors of each of `series` side by side: dots of the first are filled, those of the others hollow. Dashed
/// lines stand at the unit roundoff of each mode, and notes say how many of them the first series' median error is.
/// `source` goes into the footer.
///
/// # Errors
/// [`Error::Figure`] where a column is missing or no error is positive.
pub fn max_rel_per_tensor(series: &[Named<'_>], source: &str) -> Result<Figure> {
    let labels = series.iter().map(|(label, _)| *label).collect();
    let samples = series.iter().map(|(_, table)| samples(table, "max_rel")).collect::<Result<Vec<_>>>()?;
    let all = || samples.iter().flatten();
    let modes = Mode::all_of(all().map(|sample| sample.mode.as_str()));
    let (low, high) = axis::extent(all().map(|sample| sample.error).chain(modes.iter().map(Mode::unit_roundoff)))
        .ok_or_else(|| Error::Figure("no positive error to draw on a logarithmic axis".to_owned()))?;
    let plot = Plot {
        labels,
        modes,
        tensors: distinct(all().map(|sample| sample.tensor.as_str())),
        y: Log { low: low / 1.5, high: high * 1.5, from: BOTTOM, to: TOP },
        samples: &samples,
    };
    Figure::draw(SIZE, plot.description(), |canvas| {
        plot.headings(canvas)?;
        plot.frame(canvas)?;
        plot.roundoffs(canvas)?;
        plot.dots(canvas)?;
        canvas.draw_text(source, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (LEFT, 1168))
    })
}

struct Plot<'a> {
    labels: Vec<&'a str>,
    samples: &'a [Vec<Sample>],
    modes: Vec<Mode>,
    tensors: Vec<&'a str>,
    y: Log,
}

impl Plot<'_> {
    fn description(&self) -> String {
        let medians: Vec<String> = self
            .modes
            .iter()
            .filter_map(|mode| Some((mode, self.median(mode)?)))
            .map(|(mode, median)| format!("{} {}", mode.label, in_roundoffs(median, mode)))
            .collect();
        format!(
            "Max relative error of {} per precision mode, one dot per shape; {}. Median error: {}.",
            self.tensors.join(", "),
            self.labels.join(" beside "),
            medians.join("; ")
        )
    }

    /// Median error of the first series.
    fn median(&self, mode: &Mode) -> Option<f64> {
        let ours = self.samples.first()?.iter();
        median(ours.filter(|sample| sample.mode == mode.name).map(|sample| sample.error))
    }

    fn x(&self, column: f64) -> i32 {
        LEFT + (column / self.tensors.len() as f64 * f64::from(RIGHT - LEFT)).round() as i32
    }

    fn headings(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let title = style::bold(TITLE, INK, HPos::Left, VPos::Center);
        canvas.draw_text("Max relative error per tensor, one dot per shape", &title, (LEFT, 44))?;
        let modes = self.modes.iter().map(|mode| (mode.label.as_str(), style::color_of(mode).filled()));
        legend(canvas, 100, modes)?;
        let hollow = std::iter::repeat(FAINT.stroke_width(4));
        legend(canvas, 146, self.labels.iter().copied().zip(std::iter::once(FAINT.filled()).chain(hollow)))
    }

    fn frame(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let tick = style::text(LABEL, FAINT, HPos::Right, VPos::Center);
        for exponent in self.y.decades() {
            let y = self.y.at(10f64.powi(exponent));
            canvas.draw(&PathElement::new([(LEFT, y), (RIGHT, y)], GRID.stroke_width(2)))?;
            canvas.draw_text(&axis::power_of_ten(exponent), &tick, (LEFT - 14, y))?;
        }
        for column in 1..self.tensors.len() {
            let x = self.x(column as f64);
            canvas.draw(&PathElement::new([(x, TOP), (x, BOTTOM)], GRID.stroke_width(2)))?;
        }
        canvas.draw(&PathElement::new([(LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)], FRAME.stroke_width(2)))?;
        let name = style::text(LABEL + 2, INK, HPos::Center, VPos::Center);
        for (column, tensor) in self.tensors.iter().enumerate() {
            canvas.draw_text(tensor, &name, (self.x(column as f64 + 0.5), BOTTOM + 30))?;
        }
        let caption = style::text(LABEL, INK, HPos::Center, VPos::Center).transform(FontTransform::Rotate270);
        canvas.draw_text("max |x − r| / max |r|,  r in float64", &caption, (38, (TOP + BOTTOM) / 2))
    }

    /// A dashed line at each unit roundoff, its name, and each mode's median error in units of it.
    fn roundoffs(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let mut notes = Vec::new();
        let mut named = Vec::new();
        for mode in self.modes.iter().rev() {
            if let Some(median) = self.median(mode) {
                notes.push((
                    self.y.at(median),
                    style::color_of(mode),
                    format!("median {}", in_roundoffs(median, mode)),
                ));
            }
            if named.contains(&mode.format) {
                continue;
            }
            named.push(mode.format);
            let y = self.y.at(mode.unit_roundoff());
            let line = vec![(LEFT, y), (RIGHT, y)];
            canvas.draw(&DashedPathElement::new(line, 14, 10, style::color_of(mode).stroke_width(3)))?;
            let power = axis::superscript(mode.unit_roundoff().log2() as i32);
            notes.push((y, style::color_of(mode), format!("{} = 2{power}", mode.roundoff_label())));
        }
        notes.sort_by_key(|(y, ..)| *y);
        let mut lowest_free = TOP;
        for (y, color, note) in &notes {
            let y = (*y).max(lowest_free);
            lowest_free = y + NOTE_HEIGHT;
            canvas.draw_text(note, &style::text(LABEL, *color, HPos::Left, VPos::Center), (RIGHT + 16, y))?;
        }
        Ok(())
    }

    fn dots(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let share = 1.0 / self.samples.len() as f64;
        for (index, samples) in self.samples.iter().enumerate().rev() {
            for mode in &self.modes {
                let (radius, dot) = if index == 0 {
                    (8, style::color_of(mode).filled())
                } else {
                    (7, style::color_of(mode).stroke_width(3))
                };
                for (column, tensor) in self.tensors.iter().enumerate() {
                    let of_cell = |sample: &&Sample| sample.mode == mode.name && &sample.tensor == tensor;
                    let errors: Vec<f64> = samples.iter().filter(of_cell).map(|sample| sample.error).collect();
                    for (i, &error) in errors.iter().enumerate() {
                        let along = 0.12 + 0.76 * (i as f64 + 0.5) / errors.len() as f64;
                        let x = self.x(column as f64 + (index as f64 + along) * share);
                        canvas.draw(&Circle::new((x, self.y.at(error)), radius, dot))?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// `error` in units of the mode's unit roundoff: `1.3 u(bf16)`.
fn in_roundoffs(error: f64, mode: &Mode) -> String {
    format!("{} {}", axis::short(error / mode.unit_roundoff()), mode.roundoff_label())
}

/// A row of dots with their names at height `y`.
fn legend<'a>(
    canvas: &Canvas<'_>,
    y: i32,
    entries: impl Iterator<Item = (&'a str, ShapeStyle)>,
) -> Result<(), DrawError> {
    let mut x = LEFT + 12;
    for (label, dot) in entries {
        canvas.draw(&Circle::new((x, y), 9, dot))?;
        canvas.draw_text(label, &style::text(LABEL, INK, HPos::Left, VPos::Center), (x + 22, y))?;
        x += 22 + style::width(label, LABEL) + 44;
    }
    Ok(())
}
