//! Error against sequence length, and error per tensor and shape in units of unit roundoff.

use super::axis::{self, Log};
use super::style::{self, FAINT, FRAME, GRID, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure, Named};
use crate::table::Mode;
use crate::table::rows::{Sample, distinct, samples};
use crate::{Error, Result};
use gdnlab_deps::plotters::element::DashedPathElement;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};

/// Width of the figure, and height without the rows of the heatmaps, in canvas units.
const WIDTH: i32 = 2400;
const HEIGHT: i32 = 1120;
/// Left edge of the first panel; distance from one panel to the next, as the free width is shared; inner margin.
const LEFT: i32 = 210;
const GAP: i32 = 112;
/// Upper and lower edge of the panels of the upper row.
const TOP: i32 = 210;
const BOTTOM: i32 = 640;
/// Upper edge and row height of the heatmaps.
const CELLS: i32 = 820;
const CELL_HEIGHT: i32 = 62;
/// Colours of the smallest and the largest error.
const PALE: RGBColor = RGBColor(0xf3, 0xf7, 0xfb);
const DEEP: RGBColor = RGBColor(0x0b, 0x2f, 0x66);

/// Draws one column of panels per mode. Above: the worst tensor's error against T, with a band over all tensors and
/// head sizes; the worst errors of the other series hollow beside it. Below: the first series as a heatmap, in units
/// of the mode's unit roundoff. `source` goes into the footer.
///
/// The vertical axes above have their own ranges but span the same number of decades, so slopes compare.
///
/// # Errors
/// [`Error::Figure`] where a column is missing or no error is positive.
pub fn error_by_length(series: &[Named<'_>], source: &str) -> Result<Figure> {
    let samples = series.iter().map(|(_, table)| samples(table, "max_rel")).collect::<Result<Vec<_>>>()?;
    let ours = samples.first().filter(|samples| !samples.is_empty());
    let ours = ours.ok_or_else(|| Error::Figure("no positive error to draw on a logarithmic axis".to_owned()))?;
    let modes = Mode::all_of(ours.iter().map(|sample| sample.mode.as_str()));
    let mut shapes = distinct(ours.iter().map(Sample::shape));
    shapes.sort();
    let plot = Plot {
        labels: series.iter().map(|(label, _)| *label).collect(),
        samples: &samples,
        ours,
        tensors: distinct(ours.iter().map(|sample| sample.tensor.as_str())),
        lengths: distinct(shapes.iter().map(|&(tokens, ..)| tokens)),
        pitch: (WIDTH - LEFT + GAP - 30) / modes.len() as i32,
        modes,
        shapes,
    };
    let height = HEIGHT + plot.shapes.len() as i32 * CELL_HEIGHT;
    let density = super::DENSITY;
    Figure::draw((WIDTH as u32 / density, height as u32 / density), plot.description(), |canvas| {
        plot.headings(canvas)?;
        for (index, mode) in plot.modes.iter().enumerate() {
            let left = LEFT + plot.pitch * index as i32;
            plot.growth(canvas, mode, left)?;
            plot.heatmap(canvas, mode, left)?;
        }
        plot.shape_labels(canvas)?;
        plot.color_bar(canvas, height - 90)?;
        canvas.draw_text(source, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, height - 30))
    })
}

struct Plot<'a> {
    labels: Vec<&'a str>,
    samples: &'a [Vec<Sample>],
    ours: &'a [Sample],
    modes: Vec<Mode>,
    tensors: Vec<&'a str>,
    lengths: Vec<u32>,
    shapes: Vec<(u32, u32, u32)>,
    pitch: i32,
}

impl Plot<'_> {
    fn description(&self) -> String {
        let modes: Vec<&str> = self.modes.iter().map(|mode| mode.label.as_str()).collect();
        format!(
            "Above: max relative error against sequence length T for {}, worst tensor and band over tensors. Below: the same errors per tensor and shape in units of each mode's unit roundoff u, from {} to {} u.",
            modes.join(", "),
            axis::short(self.units().0),
            axis::short(self.units().1)
        )
    }

    /// Smallest and largest error in units of unit roundoff, over all modes.
    fn units(&self) -> (f64, f64) {
        let in_units = self.ours.iter().map(|sample| sample.error / Mode::of(&sample.mode).unit_roundoff());
        axis::extent(in_units).unwrap_or((1.0, 1.0))
    }

    fn width(&self) -> i32 {
        self.pitch - GAP
    }

    fn headings(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let title = style::bold(TITLE, INK, HPos::Left, VPos::Center);
        canvas.draw_text("Error against sequence length, and per tensor and shape", &title, (40, 44))?;
        let label = style::text(LABEL, INK, HPos::Left, VPos::Center);
        canvas.draw(&PathElement::new([(40, 104), (92, 104)], INK.stroke_width(5)))?;
        canvas.draw(&Circle::new((66, 104), 9, INK.filled()))?;
        let worst = format!("worst tensor, {}", self.labels.first().unwrap_or(&""));
        canvas.draw_text(&worst, &label, (108, 104))?;
        let mut x = 108 + style::width(&worst, LABEL) + 50;
        canvas.draw(&Rectangle::new([(x, 90), (x + 52, 118)], GRID.filled()))?;
        let band = "range over tensors and head sizes";
        canvas.draw_text(band, &label, (x + 66, 104))?;
        x += 66 + style::width(band, LABEL) + 50;
        for other in self.labels.iter().skip(1) {
            canvas.draw(&Circle::new((x, 104), 9, INK.stroke_width(4)))?;
            let other = format!("worst tensor, {other}");
            canvas.draw_text(&other, &label, (x + 22, 104))?;
            x += 22 + style::width(&other, LABEL) + 50;
        }
        let caption = style::text(LABEL, INK, HPos::Center, VPos::Center).transform(FontTransform::Rotate270);
        canvas.draw_text("max |x − r| / max |r|", &caption, (56, (TOP + BOTTOM) / 2))
    }

    /// The errors of `samples` in `mode` at each length: smallest and largest.
    fn ranges(&self, samples: &[Sample], mode: &Mode) -> Vec<(u32, f64, f64)> {
        let range = |&tokens: &u32| {
            let at = samples.iter().filter(|sample| sample.mode == mode.name && sample.tokens == tokens);
            let (low, high) = axis::extent(at.map(|sample| sample.error))?;
            Some((tokens, low, high))
        };
        self.lengths.iter().filter_map(range).collect()
    }

    /// The vertical scale of a mode: around its own errors, as many decades as the widest mode needs.
    fn scale(&self, mode: &Mode) -> Log {
        let of_mode = |mode: &Mode| {
            let all = self.samples.iter().flatten().filter(|sample| sample.mode == mode.name);
            axis::extent(all.map(|sample| sample.error)).unwrap_or((1.0, 1.0))
        };
        let widest = self.modes.iter().map(of_mode).map(|(low, high)| high / low).fold(2.0, f64::max);
        let (low, high) = of_mode(mode);
        let (middle, reach) = ((low * high).sqrt(), (widest * 1.7).sqrt());
        Log { low: middle / reach, high: middle * reach, from: BOTTOM, to: TOP }
    }

    fn growth(&self, canvas: &Canvas<'_>, mode: &Mode, left: i32) -> Result<(), DrawError> {
        let right = left + self.width();
        let y = self.scale(mode);
        let first = self.lengths.first().map_or(1.0, |&tokens| f64::from(tokens));
        let last = self.lengths.last().map_or(2.0, |&tokens| f64::from(tokens)).max(first * 2.0);
        let x = Log { low: first, high: last, from: left + 40, to: right - 40 };
        let at = |tokens: u32, error: f64| (x.at(f64::from(tokens)), y.at(error));

        let name = style::bold(LABEL + 2, style::color_of(mode), HPos::Left, VPos::Center);
        canvas.draw_text(&mode.label, &name, (left, TOP - 30))?;
        let tick = style::text(SMALL, FAINT, HPos::Right, VPos::Center);
        for value in axis::ticks_125(y.low, y.high) {
            let height = y.at(value);
            canvas.draw(&PathElement::new([(left, height), (right, height)], GRID.stroke_width(2)))?;
            canvas.draw_text(&axis::tick_125(value), &tick, (left - 12, height))?;
        }
        canvas.draw(&PathElement::new([(left, TOP), (left, BOTTOM), (right, BOTTOM)], FRAME.stroke_width(2)))?;
        let tick = style::text(SMALL, FAINT, HPos::Center, VPos::Center);
        for &tokens in &self.lengths {
            canvas.draw_text(&tokens.to_string(), &tick, (x.at(f64::from(tokens)), BOTTOM + 24))?;
        }
        let caption = style::text(LABEL, INK, HPos::Center, VPos::Center);
        canvas.draw_text("T, tokens", &caption, ((left + right) / 2, BOTTOM + 62))?;

        let roundoff = mode.unit_roundoff();
        if (y.low..y.high).contains(&roundoff) {
            let height = y.at(roundoff);
            let line = vec![(left, height), (right, height)];
            canvas.draw(&DashedPathElement::new(line, 12, 8, style::color_of(mode).stroke_width(3)))?;
            let note = style::text(SMALL, style::color_of(mode), HPos::Right, VPos::Bottom);
            canvas.draw_text(&mode.roundoff_label(), &note, (right, height - 4))?;
        }
        let ranges = self.ranges(self.ours, mode);
        let upper = ranges.iter().map(|&(tokens, _, high)| at(tokens, high));
        let lower = ranges.iter().rev().map(|&(tokens, low, _)| at(tokens, low));
        let worst: Vec<_> = upper.clone().collect();
        canvas.draw(&Polygon::new(upper.chain(lower).collect::<Vec<_>>(), style::color_of(mode).mix(0.22)))?;
        canvas.draw(&PathElement::new(worst.clone(), style::color_of(mode).stroke_width(5)))?;
        for point in worst {
            canvas.draw(&Circle::new(point, 10, style::color_of(mode).filled()))?;
        }
        for samples in self.samples.iter().skip(1) {
            for (tokens, _, high) in self.ranges(samples, mode) {
                canvas.draw(&Circle::new(at(tokens, high), 10, style::color_of(mode).stroke_width(4)))?;
            }
        }
        Ok(())
    }

    fn heatmap(&self, canvas: &Canvas<'_>, mode: &Mode, left: i32) -> Result<(), DrawError> {
        let width = self.width();
        let column_at = |column: usize| left + width * column as i32 / self.tensors.len() as i32;
        let power = axis::superscript(mode.unit_roundoff().log2() as i32);
        let heading = format!("in {} = 2{power}", mode.roundoff_label());
        canvas.draw_text(&heading, &style::text(LABEL, INK, HPos::Left, VPos::Center), (left, CELLS - 30))?;
        for sample in self.ours.iter().filter(|sample| sample.mode == mode.name) {
            let row = self.shapes.iter().position(|&shape| shape == sample.shape());
            let column = self.tensors.iter().position(|&tensor| tensor == sample.tensor);
            let Some((row, column)) = row.zip(column) else { continue };
            let (x0, x1) = (column_at(column), column_at(column + 1));
            let y0 = CELLS + CELL_HEIGHT * row as i32;
            let value = sample.error / mode.unit_roundoff();
            let depth = self.depth(value);
            let color = style::mix(PALE, DEEP, depth);
            canvas.draw(&Rectangle::new([(x0, y0), (x1 - 2, y0 + CELL_HEIGHT - 2)], color.filled()))?;
            let ink = if depth > 0.45 { WHITE } else { INK };
            let number = style::text(SMALL - 2, ink, HPos::Center, VPos::Center);
            canvas.draw_text(&axis::short(value), &number, ((x0 + x1) / 2, y0 + CELL_HEIGHT / 2))?;
        }
        let name = style::text(SMALL, INK, HPos::Right, VPos::Center).transform(FontTransform::Rotate270);
        let below = CELLS + CELL_HEIGHT * self.shapes.len() as i32;
        for (column, tensor) in self.tensors.iter().enumerate() {
            let x = (column_at(column) + column_at(column + 1)) / 2;
            canvas.draw_text(tensor, &name, (x, below + 12))?;
        }
        Ok(())
    }

    /// How deep the colour of `value` units is, from 0 to 1.
    fn depth(&self, value: f64) -> f64 {
        let (low, high) = self.units();
        (value / low).ln() / (high / low).ln().max(1e-9)
    }

    fn shape_labels(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let label = style::text(SMALL, INK, HPos::Right, VPos::Center);
        canvas.draw_text("T, d_k/d_v", &style::text(LABEL, INK, HPos::Right, VPos::Center), (LEFT - 16, CELLS - 30))?;
        for (row, (tokens, key_dim, value_dim)) in self.shapes.iter().enumerate() {
            let y = CELLS + CELL_HEIGHT * row as i32 + CELL_HEIGHT / 2;
            canvas.draw_text(&format!("{tokens}, {key_dim}/{value_dim}"), &label, (LEFT - 16, y))?;
        }
        Ok(())
    }

    fn color_bar(&self, canvas: &Canvas<'_>, y: i32) -> Result<(), DrawError> {
        let (low, high) = self.units();
        let (left, width) = (LEFT, 420);
        for step in 0..width / 4 {
            let x = left + step * 4;
            let color = style::mix(PALE, DEEP, f64::from(step * 4) / f64::from(width));
            canvas.draw(&Rectangle::new([(x, y - 12), (x + 4, y + 12)], color.filled()))?;
        }
        let label = |h| style::text(SMALL, FAINT, h, VPos::Center);
        canvas.draw_text(&axis::short(low), &label(HPos::Right), (left - 12, y))?;
        canvas.draw_text(&format!("{} unit roundoffs", axis::short(high)), &label(HPos::Left), (left + width + 12, y))
    }
}
