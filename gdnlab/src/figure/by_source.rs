//! Errors of the same modes from several sources, such as an emulation, a GPU and a publication: do they agree?

use super::axis::{self, Log};
use super::style::{self, ACCENT, FAINT, FRAME, GRID, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure, Named};
use crate::table::Mode;
use crate::table::rows::{Sample, distinct, median, samples};
use crate::{Error, Result};
use gdnlab_deps::plotters::element::DashedPathElement;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};

/// Width of the figure, and its height without the rows, in canvas units.
const WIDTH: i32 = 1920;
const HEIGHT: i32 = 436;
/// Height of one source in a row, and what a row has beside its sources.
const SOURCE_HEIGHT: i32 = 22;
const ROW_GAP: i32 = 22;
/// Left edge of the first panel, right edge of the last, upper edge of both, and what lies between two.
const LEFT: i32 = 190;
const RIGHT: i32 = 1880;
const TOP: i32 = 230;
const GAP: i32 = 44;

/// Draws a panel per mode and a row per tensor. In each row stands, for each of `sources`, a dot at the median over shapes
/// of `max_rel` and a bar from the smallest to the largest. All panels span the same number of decades, so that the same
/// distance is the same factor everywhere; a dashed line stands at the mode's unit roundoff where it lies inside. A
/// heading says by which typical factor each source differs from the first: `exp` of the RMS over tensors of the logarithm
/// of the medians' ratio.
/// `footer` goes below.
///
/// # Errors
/// [`Error::Figure`] where a column is missing or no error is positive.
pub fn error_by_source(sources: &[Named<'_>], footer: &str) -> Result<Figure> {
    let samples = sources.iter().map(|(_, table)| samples(table, "max_rel")).collect::<Result<Vec<_>>>()?;
    let all = || samples.iter().flatten();
    let tensors = distinct(all().map(|sample| sample.tensor.as_str()));
    let panels: Vec<Panel> = Mode::all_of(all().map(|sample| sample.mode.as_str()))
        .into_iter()
        .filter_map(|mode| Panel::new(mode, &tensors, &samples))
        .collect();
    let decades = panels.iter().map(|panel| (panel.high / panel.low).log10()).fold(0.0, f64::max);
    if panels.is_empty() {
        return Err(Error::Figure("no positive error to draw on a logarithmic axis".to_owned()));
    }
    let row_height = SOURCE_HEIGHT * sources.len() as i32 + ROW_GAP;
    let plot = Plot {
        labels: sources.iter().map(|(label, _)| *label).collect(),
        bottom: TOP + row_height * tensors.len() as i32,
        tensors,
        panels,
        // A margin on both sides, for the dots at the ends.
        span: 10f64.powf(decades) * 1.35,
        row_height,
    };
    let height = HEIGHT + plot.row_height * plot.tensors.len() as i32;
    let size = (WIDTH as u32 / super::DENSITY, height as u32 / super::DENSITY);
    Figure::draw(size, plot.description(), |canvas| {
        plot.headings(canvas)?;
        for (index, panel) in plot.panels.iter().enumerate() {
            plot.panel(canvas, panel, index as i32)?;
        }
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, height - 34))
    })
}

/// Smallest, median and largest error over shapes.
#[derive(Clone, Copy)]
struct Range {
    low: f64,
    median: f64,
    high: f64,
}

impl Range {
    fn of(errors: &[f64]) -> Option<Self> {
        let (low, high) = axis::extent(errors.iter().copied())?;
        Some(Self { low, median: median(errors.iter().copied())?, high })
    }
}

/// One mode.
struct Panel {
    mode: Mode,
    low: f64,
    high: f64,
    /// For each source, one for each tensor.
    ranges: Vec<Vec<Option<Range>>>,
}

impl Panel {
    fn new(mode: Mode, tensors: &[&str], samples: &[Vec<Sample>]) -> Option<Self> {
        let range = |samples: &[Sample], tensor: &str| {
            let of_cell = |sample: &&Sample| sample.mode == mode.name && sample.tensor == tensor;
            Range::of(&samples.iter().filter(of_cell).map(|sample| sample.error).collect::<Vec<_>>())
        };
        let ranges: Vec<Vec<Option<Range>>> =
            samples.iter().map(|samples| tensors.iter().map(|tensor| range(samples, tensor)).collect()).collect();
        let ends = ranges.iter().flatten().flatten().flat_map(|range| [range.low, range.high]);
        let (low, high) = axis::extent(ends)?;
        Some(Self { mode, low, high, ranges })
    }

    /// Typical factor between the medians of source `index` and those of the first, over the tensors that both have.
    fn factor_from_first(&self, index: usize) -> Option<f64> {
        let pairs = self.ranges.first()?.iter().zip(self.ranges.get(index)?);
        let squares: Vec<f64> =
            pairs.filter_map(|(first, other)| Some(((*other)?.median / (*first)?.median).ln().powi(2))).collect();
        (!squares.is_empty()).then(|| (squares.iter().sum::<f64>() / squares.len() as f64).sqrt().exp())
    }
}

struct Plot<'a> {
    labels: Vec<&'a str>,
    tensors: Vec<&'a str>,
    panels: Vec<Panel>,
    /// Ratio of the ends of every panel's axis.
    span: f64,
    row_height: i32,
    bottom: i32,
}

impl Plot<'_> {
    fn description(&self) -> String {
        let factors: Vec<String> = self.panels.iter().filter_map(|panel| self.factors(panel)).collect();
        let agree = if factors.is_empty() { String::new() } else { format!(" {}.", factors.join("; ")) };
        format!(
            "Max relative error of {} per precision mode from {}: median and range over shapes.{agree}",
            self.tensors.join(", "),
            self.labels.join(", "),
        )
    }

    /// How far the sources of a panel are from the first, in words.
    fn factors(&self, panel: &Panel) -> Option<String> {
        let word =
            |index: usize| Some(format!("{} ×{}", self.labels[index], axis::short(panel.factor_from_first(index)?)));
        let words: Vec<String> = (1..self.labels.len()).filter_map(word).collect();
        let first = self.labels.first()?;
        (!words.is_empty()).then(|| format!("{}: {} off {first}", panel.mode.label, words.join(", ")))
    }

    fn headings(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let title = style::bold(TITLE, INK, HPos::Left, VPos::Center);
        canvas.draw_text("Max relative error per tensor: median and range over shapes", &title, (40, 44))?;
        let mut x = LEFT + 12;
        for (index, label) in self.labels.iter().enumerate() {
            canvas.draw(&Circle::new((x, 104), 9, color_of(index).filled()))?;
            canvas.draw_text(label, &style::text(LABEL, INK, HPos::Left, VPos::Center), (x + 22, 104))?;
            x += 22 + style::width(label, LABEL) + 44;
        }
        if let [first, _, ..] = self.labels.as_slice() {
            let note = format!("×  typical factor from {first}");
            canvas.draw_text(&note, &style::text(LABEL, FAINT, HPos::Right, VPos::Center), (RIGHT, 104))?;
        }
        let caption = "max |x − r| / max |r|, r in float64 · the same distance is the same factor in every panel";
        let middle = ((LEFT + RIGHT) / 2, self.bottom + 104);
        canvas.draw_text(caption, &style::text(LABEL, INK, HPos::Center, VPos::Center), middle)?;
        let name = style::text(LABEL, INK, HPos::Right, VPos::Center);
        for (row, tensor) in self.tensors.iter().enumerate() {
            canvas.draw_text(tensor, &name, (LEFT - 18, TOP + self.row_height * row as i32 + self.row_height / 2))?;
        }
        Ok(())
    }

    fn panel(&self, canvas: &Canvas<'_>, panel: &Panel, index: i32) -> Result<(), DrawError> {
        let count = self.panels.len() as i32;
        let width = (RIGHT - LEFT - GAP * (count - 1)) / count;
        let left = LEFT + index * (width + GAP);
        let middle = (panel.low * panel.high).sqrt();
        let half = self.span.sqrt();
        let x = Log { low: middle / half, high: middle * half, from: left, to: left + width };
        self.frame(canvas, panel, &x)?;
        for (source, ranges) in panel.ranges.iter().enumerate() {
            let color = color_of(source);
            for (row, range) in ranges.iter().enumerate() {
                let Some(range) = range else { continue };
                let above = self.row_height * row as i32 + ROW_GAP / 2 + SOURCE_HEIGHT / 2;
                let y = TOP + above + SOURCE_HEIGHT * source as i32;
                let bar = [(x.at(range.low), y - 3), (x.at(range.high), y + 3)];
                canvas.draw(&Rectangle::new(bar, color.mix(0.45).filled()))?;
                canvas.draw(&Circle::new((x.at(range.median), y), 8, color.filled()))?;
            }
        }
        Ok(())
    }

    fn frame(&self, canvas: &Canvas<'_>, panel: &Panel, x: &Log) -> Result<(), DrawError> {
        let (left, right) = (x.from, x.to);
        for row in 1..self.tensors.len() as i32 {
            let y = TOP + row * self.row_height;
            canvas.draw(&PathElement::new([(left, y), (right, y)], GRID.stroke_width(2)))?;
        }
        let tick = style::text(SMALL, FAINT, HPos::Center, VPos::Center);
        for value in axis::ticks_125(x.low, x.high) {
            let at = x.at(value);
            canvas.draw(&PathElement::new([(at, TOP), (at, self.bottom)], GRID.stroke_width(2)))?;
            // Of the ticks between powers of ten, the factor is enough.
            let label = axis::tick_125(value);
            canvas.draw_text(label.split('·').next().unwrap_or(&label), &tick, (at, self.bottom + 26))?;
        }
        let unit_roundoff = panel.mode.unit_roundoff();
        if (x.low..x.high).contains(&unit_roundoff) {
            let at = x.at(unit_roundoff);
            let line = vec![(at, TOP), (at, self.bottom)];
            canvas.draw(&DashedPathElement::new(line, 14, 10, FAINT.stroke_width(3)))?;
            canvas.draw_text(&panel.mode.roundoff_label(), &tick, (at, self.bottom + 56))?;
        }
        let outline = [(left, TOP), (right, TOP), (right, self.bottom), (left, self.bottom), (left, TOP)];
        canvas.draw(&PathElement::new(outline, FRAME.stroke_width(2)))?;
        let title = style::bold(SMALL, INK, HPos::Left, VPos::Center);
        canvas.draw_text(&panel.mode.label, &title, (left, TOP - 58))?;
        let mut at = left;
        for index in 1..self.labels.len() {
            let Some(factor) = panel.factor_from_first(index) else { continue };
            let note = format!("×{}", axis::short(factor));
            let ink = style::text(LABEL, color_of(index), HPos::Left, VPos::Center);
            canvas.draw_text(&note, &ink, (at, TOP - 24))?;
            at += style::width(&note, LABEL) + 28;
        }
        Ok(())
    }
}

/// Colour of a source, told apart by colour-blind readers.
fn color_of(source: usize) -> RGBColor {
    [FAINT, ACCENT, RGBColor(0xd5, 0x5e, 0x00), RGBColor(0x00, 0x9e, 0x73)][source % 4]
}
