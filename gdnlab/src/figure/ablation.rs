//! Which step of a computation an error comes from: the format of one step changed at a time.

use super::axis::{self, Log};
use super::style::{self, FAINT, FRAME, GRID, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure, Mode};
use crate::table::rows::{column, distinct, median};
use crate::{Error, Result};
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::{DataFrame, DataType};

/// Width of the figure, and its height without the rows, in canvas units.
const WIDTH: i32 = 1920;
const HEIGHT: i32 = 420;
const ROW_HEIGHT: i32 = 60;
/// Left edge of the first panel, right edge of the last, upper edge of both, free width between two.
const LEFT: i32 = 250;
const RIGHT: i32 = 1870;
const TOP: i32 = 230;
const GAP: i32 = 60;

/// A range of errors to compare with, drawn as a band.
#[derive(Clone, Debug, PartialEq)]
pub struct Level {
    /// Name for the legend.
    pub label: String,
    /// Smallest error.
    pub low: f64,
    /// Largest error.
    pub high: f64,
}

impl Level {
    /// The range of `max_rel` of one mode of a table of errors.
    ///
    /// # Errors
    /// [`Error::Input`] where the mode has no positive error, [`Error::Table`] where a column is missing.
    pub fn of_mode(errors: &DataFrame, mode: &str, label: impl Into<String>) -> Result<Self> {
        let samples = crate::table::rows::samples(errors)?;
        let of_mode = samples.iter().filter(|sample| sample.mode == mode).map(|sample| sample.max_rel);
        let (low, high) = axis::extent(of_mode)
            .ok_or_else(|| Error::input(format!("no errors of mode '{mode}' to draw as a level")))?;
        Ok(Self { label: label.into(), low, high })
    }
}

/// Draws one panel per base policy and one row per changed step: the range of `max_rel` over tensors and shapes, and
/// its median. Rows whose median lies within `level` are the answer and stand out. `source` goes into the footer.
///
/// `errors` has the columns base, step, format and max_rel, as [`crate::table::errors`] makes them of an ablation.
///
/// # Errors
/// [`Error::Table`] where a column is missing, [`Error::Figure`] where no error is positive.
pub fn ablation(errors: &DataFrame, level: &Level, source: &str) -> Result<Figure> {
    let trials = trials(errors)?;
    let (low, high) = axis::extent(trials.iter().map(|trial| trial.max_rel).chain([level.low, level.high]))
        .ok_or_else(|| Error::Figure("no positive error to draw on a logarithmic axis".to_owned()))?;
    let plot = Plot {
        bases: distinct(trials.iter().map(|trial| trial.base.as_str())),
        steps: distinct(trials.iter().map(|trial| trial.step.as_str())),
        // Room on the right for the medians that stand behind the bars.
        range: (low / 1.5, high * 8.0),
        trials: &trials,
        level,
    };
    let height = HEIGHT + ROW_HEIGHT * plot.steps.len() as i32;
    let size = (WIDTH as u32 / super::DENSITY, height as u32 / super::DENSITY);
    Figure::draw(size, plot.description(), |canvas| {
        plot.headings(canvas)?;
        for (index, base) in plot.bases.iter().enumerate() {
            plot.panel(canvas, base, index as i32)?;
        }
        canvas.draw_text(source, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, height - 34))
    })
}

/// The error of one tensor at one shape after one change.
struct Trial {
    base: String,
    step: String,
    format: Option<String>,
    max_rel: f64,
}

fn trials(table: &DataFrame) -> Result<Vec<Trial>> {
    let text = |name: &str| column(table, name, &DataType::String);
    let (base, step, format) = (text("base")?, text("step")?, text("format")?);
    let max_rel = column(table, "max_rel", &DataType::Float64)?;
    let row = |i: usize| {
        Some(Trial {
            base: base.str().ok()?.get(i)?.to_owned(),
            step: step.str().ok()?.get(i)?.to_owned(),
            format: format.str().ok()?.get(i).map(str::to_owned),
            max_rel: max_rel.f64().ok()?.get(i).filter(|error| *error > 0.0 && error.is_finite())?,
        })
    };
    Ok((0..table.height()).filter_map(row).collect())
}

struct Plot<'a> {
    trials: &'a [Trial],
    bases: Vec<&'a str>,
    steps: Vec<&'a str>,
    range: (f64, f64),
    level: &'a Level,
}

impl Plot<'_> {
    /// Smallest, middle and largest error after `step` was changed in `base`.
    fn spread(&self, base: &str, step: &str) -> Option<(f64, f64, f64)> {
        let errors =
            || self.trials.iter().filter(|trial| trial.base == base && trial.step == step).map(|trial| trial.max_rel);
        let (low, high) = axis::extent(errors())?;
        Some((low, median(errors())?, high))
    }

    fn reaches_level(&self, median: f64) -> bool {
        (self.level.low..=self.level.high).contains(&median)
    }

    fn description(&self) -> String {
        let panels: Vec<String> = self
            .bases
            .iter()
            .map(|base| {
                let reaching: Vec<&str> = self
                    .steps
                    .iter()
                    .copied()
                    .filter(|step| self.spread(base, step).is_some_and(|(_, middle, _)| self.reaches_level(middle)))
                    .collect();
                let reaching = if reaching.is_empty() { "no step".to_owned() } else { reaching.join(", ") };
                format!("{}: {reaching}", self.title(base))
            })
            .collect();
        format!(
            "Max relative error after one step is changed. Median within {}: {}.",
            self.level.label,
            panels.join("; ")
        )
    }

    fn title(&self, base: &str) -> String {
        let of_base = self.trials.iter().filter(|trial| trial.base == base);
        let formats = distinct(of_base.filter_map(|trial| trial.format.as_deref()));
        let formats: Vec<String> = formats.into_iter().map(|format| Mode::of(format).label).collect();
        format!("{}, one step in {}", Mode::of(base).label, formats.join(" or "))
    }

    fn headings(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let title = style::bold(TITLE, INK, HPos::Left, VPos::Center);
        canvas.draw_text("Which step does the error come from?", &title, (40, 44))?;
        let label = style::text(LABEL, INK, HPos::Left, VPos::Center);
        canvas.draw(&Rectangle::new([(40, 94), (92, 110)], FAINT.mix(0.35).filled()))?;
        canvas.draw(&Circle::new((66, 102), 10, FAINT.filled()))?;
        let entry = "range over tensors and shapes, median";
        canvas.draw_text(entry, &label, (108, 102))?;
        let x = 108 + style::width(entry, LABEL) + 50;
        canvas.draw(&Rectangle::new([(x, 86), (x + 52, 118)], band().filled()))?;
        canvas.draw_text(&self.level.label, &label, (x + 66, 102))
    }

    fn panel(&self, canvas: &Canvas<'_>, base: &str, index: i32) -> Result<(), DrawError> {
        let count = self.bases.len() as i32;
        let width = (RIGHT - LEFT - GAP * (count - 1)) / count;
        let left = LEFT + (width + GAP) * index;
        let right = left + width;
        let bottom = TOP + ROW_HEIGHT * self.steps.len() as i32;
        let x = Log { low: self.range.0, high: self.range.1, from: left, to: right };

        let name = style::bold(LABEL, INK, HPos::Left, VPos::Center);
        canvas.draw_text(&self.title(base), &name, (left, TOP - 56))?;
        let edges = [(x.at(self.level.low), TOP - 24), (x.at(self.level.high), bottom)];
        canvas.draw(&Rectangle::new(edges, band().filled()))?;
        let tick = style::text(SMALL, FAINT, HPos::Center, VPos::Center);
        for exponent in x.decades() {
            let at = x.at(10f64.powi(exponent));
            canvas.draw(&PathElement::new([(at, TOP - 24), (at, bottom)], GRID.stroke_width(2)))?;
            canvas.draw_text(&axis::power_of_ten(exponent), &tick, (at, bottom + 26))?;
        }
        canvas.draw(&PathElement::new([(left, bottom), (right, bottom)], FRAME.stroke_width(2)))?;
        let caption = style::text(LABEL, INK, HPos::Center, VPos::Center);
        canvas.draw_text("max |x − r| / max |r|", &caption, ((left + right) / 2, bottom + 72))?;
        for (row, step) in self.steps.iter().enumerate() {
            let y = TOP + ROW_HEIGHT * row as i32 + ROW_HEIGHT / 2 - 12;
            let spread = self.spread(base, step);
            let answers = spread.is_some_and(|(_, middle, _)| self.reaches_level(middle));
            if index == 0 {
                canvas.draw_text(step, &style::text(LABEL, INK, HPos::Right, VPos::Center), (LEFT - 20, y))?;
            }
            if let Some((low, middle, high)) = spread {
                let color = if answers { Mode::of("fp32-tf32-solve").color } else { FAINT };
                let bar = [(x.at(low), y - 8), (x.at(high), y + 8)];
                canvas.draw(&Rectangle::new(bar, color.mix(0.35).filled()))?;
                canvas.draw(&Circle::new((x.at(middle), y), 10, color.filled()))?;
                let number = if answers { style::bold } else { style::text };
                let number = number(SMALL, color, HPos::Left, VPos::Center);
                canvas.draw_text(&axis::short(middle), &number, (x.at(high) + 16, y))?;
            }
        }
        Ok(())
    }
}

/// Colour of the band that marks the level.
fn band() -> RGBColor {
    style::mix(WHITE, Mode::of("fp32-tf32-solve").color, 0.18)
}
