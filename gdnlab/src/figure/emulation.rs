//! What an emulation predicts and what was measured: do they agree, mode by mode and tensor by tensor?

use super::axis::{self, Log};
use super::style::{self, ACCENT, FAINT, FRAME, GRID, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::table::Mode;
use crate::table::rows::{Sample, distinct, median, samples};
use crate::{Error, Result};
use gdnlab_deps::plotters::element::DashedPathElement;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

/// Width of the figure, and its height without the rows, in canvas units.
const WIDTH: i32 = 1920;
const HEIGHT: i32 = 436;
/// Height of one emulation in a row, and what a row has beside them.
const LINE_HEIGHT: i32 = 28;
const ROW_GAP: i32 = 20;
/// Left edge of the first panel, right edge of the last, upper edge of both, and what lies between two.
const LEFT: i32 = 190;
const RIGHT: i32 = 1880;
const TOP: i32 = 230;
const GAP: i32 = 44;

/// An implementation, emulated and measured. Both tables have the columns mode, T, d_k, d_v, tensor and max_rel, as
/// [`crate::table::errors`] makes them.
#[derive(Clone, Copy, Debug)]
pub struct Emulation<'a> {
    /// The implementation and what it was measured on, such as `fla 0.5.2 on GB10`.
    pub name: &'a str,
    /// Errors of the emulation. Modes that were not measured are left out.
    pub emulated: &'a DataFrame,
    /// Errors that were measured.
    pub measured: &'a DataFrame,
}

/// Draws a panel per mode and a row per tensor. In each row stands, for each of `emulations`, a band from the smallest to the
/// largest `max_rel` over shapes that was emulated, with a tick at the median, and on it a dot at the measured median with a
/// line from the smallest to the largest. All panels span the same number of decades, so that the same distance is the same
/// factor everywhere; a dashed line stands at the mode's unit roundoff where it lies inside. A heading says by which typical
/// factor measured and emulated differ: `exp` of the RMS over tensors of the logarithm of the medians' ratio.
/// `footer` goes below.
///
/// # Errors
/// [`Error::Figure`] where a column is missing or no error is positive.
pub fn emulations(emulations: &[Emulation<'_>], footer: &str) -> Result<Figure> {
    let pairs = emulations
        .iter()
        .map(|one| Ok([samples(one.emulated, "max_rel")?, samples(one.measured, "max_rel")?]))
        .collect::<Result<Vec<_>>>()?;
    let measured = || pairs.iter().flat_map(|[_, measured]| measured);
    let tensors = distinct(measured().map(|sample| sample.tensor.as_str()));
    let panels: Vec<Panel> = Mode::all_of(measured().map(|sample| sample.mode.as_str()))
        .into_iter()
        .filter_map(|mode| Panel::new(mode, &tensors, &pairs))
        .collect();
    let decades = panels.iter().map(|panel| (panel.high / panel.low).log10()).fold(0.0, f64::max);
    if panels.is_empty() {
        return Err(Error::Figure("no positive error to draw on a logarithmic axis".to_owned()));
    }
    let row_height = LINE_HEIGHT * emulations.len() as i32 + ROW_GAP;
    let plot = Plot {
        names: emulations.iter().map(|one| one.name).collect(),
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
    fn of(samples: &[Sample], mode: &Mode, tensor: &str) -> Option<Self> {
        let of_cell = |sample: &&Sample| sample.mode == mode.name && sample.tensor == tensor;
        let errors = || samples.iter().filter(of_cell).map(|sample| sample.error);
        let (low, high) = axis::extent(errors())?;
        Some(Self { low, median: median(errors())?, high })
    }
}

/// What was emulated and what was measured of one tensor, where both were.
type Pair = Option<[Range; 2]>;

/// One mode.
struct Panel {
    mode: Mode,
    low: f64,
    high: f64,
    /// For each emulation, one for each tensor.
    pairs: Vec<Vec<Pair>>,
}

impl Panel {
    fn new(mode: Mode, tensors: &[&str], samples: &[[Vec<Sample>; 2]]) -> Option<Self> {
        let pair = |[emulated, measured]: &[Vec<Sample>; 2], tensor: &str| {
            Some([Range::of(emulated, &mode, tensor)?, Range::of(measured, &mode, tensor)?])
        };
        let pairs: Vec<Vec<Pair>> =
            samples.iter().map(|both| tensors.iter().map(|tensor| pair(both, tensor)).collect()).collect();
        let ends = pairs.iter().flatten().flatten().flatten().flat_map(|range| [range.low, range.high]);
        let (low, high) = axis::extent(ends)?;
        Some(Self { mode, low, high, pairs })
    }

    /// Typical factor between measured and emulated medians.
    fn factor(&self, emulation: usize) -> Option<f64> {
        let squares: Vec<f64> = self
            .pairs
            .get(emulation)?
            .iter()
            .flatten()
            .map(|[emulated, measured]| (measured.median / emulated.median).ln().powi(2))
            .collect();
        (!squares.is_empty()).then(|| (squares.iter().sum::<f64>() / squares.len() as f64).sqrt().exp())
    }
}

struct Plot<'a> {
    names: Vec<&'a str>,
    tensors: Vec<&'a str>,
    panels: Vec<Panel>,
    /// Ratio of the ends of every panel's axis.
    span: f64,
    row_height: i32,
    bottom: i32,
}

impl Plot<'_> {
    fn description(&self) -> String {
        let of =
            |panel: &Panel, index: usize| Some(format!("{} ×{}", panel.mode.label, axis::short(panel.factor(index)?)));
        let sentences = self.names.iter().enumerate().map(|(index, name)| {
            let factors: Vec<String> = self.panels.iter().filter_map(|panel| of(panel, index)).collect();
            format!(" {name} is off its emulation by a typical factor: {}.", factors.join(", "))
        });
        format!(
            "Max relative error of {} per precision mode, emulated and measured: median and range over shapes.{}",
            self.tensors.join(", "),
            sentences.collect::<String>()
        )
    }

    fn headings(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let title = style::bold(TITLE, INK, HPos::Left, VPos::Center);
        canvas.draw_text(
            "Emulated and measured: max relative error, median and range over shapes",
            &title,
            (40, 44),
        )?;
        let text = style::text(LABEL, INK, HPos::Left, VPos::Center);
        let mut x = LEFT;
        for (index, name) in self.names.iter().enumerate() {
            canvas.draw(&Circle::new((x + 10, 104), 9, color_of(index).filled()))?;
            canvas.draw_text(name, &text, (x + 32, 104))?;
            x += 32 + style::width(name, LABEL) + 44;
        }
        x += 20;
        let y = 104;
        canvas.draw(&Rectangle::new([(x, y - 9), (x + 56, y + 9)], FAINT.mix(0.3).filled()))?;
        canvas.draw(&Rectangle::new([(x + 26, y - 9), (x + 30, y + 9)], FAINT.filled()))?;
        canvas.draw_text("emulated", &text, (x + 70, y))?;
        x += 70 + style::width("emulated", LABEL) + 44;
        canvas.draw(&Rectangle::new([(x, y - 2), (x + 56, y + 2)], FAINT.filled()))?;
        canvas.draw(&Circle::new((x + 28, y), 8, FAINT.filled()))?;
        canvas.draw_text("measured", &text, (x + 70, y))?;
        canvas.draw_text("× factor between them", &style::text(LABEL, FAINT, HPos::Right, VPos::Center), (RIGHT, y))?;
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
        for (emulation, pairs) in panel.pairs.iter().enumerate() {
            for (row, pair) in pairs.iter().enumerate() {
                let Some([emulated, measured]) = pair else { continue };
                let above = self.row_height * row as i32 + (ROW_GAP + LINE_HEIGHT) / 2;
                let y = TOP + above + LINE_HEIGHT * emulation as i32;
                let color = color_of(emulation);
                let bar =
                    |from: i32, to: i32, half: i32| Rectangle::new([(from, y - half), (to, y + half)], color.filled());
                let band = [(x.at(emulated.low), y - 9), (x.at(emulated.high), y + 9)];
                canvas.draw(&Rectangle::new(band, color.mix(0.25).filled()))?;
                canvas.draw(&bar(x.at(emulated.median) - 2, x.at(emulated.median) + 2, 9))?;
                canvas.draw(&bar(x.at(measured.low), x.at(measured.high), 2))?;
                canvas.draw(&Circle::new((x.at(measured.median), y), 8, color.filled()))?;
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
        for index in 0..self.names.len() {
            let Some(factor) = panel.factor(index) else { continue };
            let note = format!("×{}", axis::short(factor));
            let ink = style::text(LABEL, color_of(index), HPos::Left, VPos::Center);
            canvas.draw_text(&note, &ink, (at, TOP - 24))?;
            at += style::width(&note, LABEL) + 28;
        }
        Ok(())
    }
}

/// Colour of an emulation, told apart by colour-blind readers.
fn color_of(emulation: usize) -> RGBColor {
    [ACCENT, RGBColor(0xd5, 0x5e, 0x00), RGBColor(0x00, 0x9e, 0x73), FAINT][emulation % 4]
}
