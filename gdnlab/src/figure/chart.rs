//! Panels of lines and marks side by side.

use super::axis::Log;
use super::panel::{Linear, Panel, Tick};
use super::style::{self, FAINT, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::Result;
use gdnlab_deps::plotters::element::DashedPathElement;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};

const WIDTH: i32 = 1920;
const LEFT: i32 = 150;
const GAP: i32 = 130;
const BELOW_LEGEND: i32 = 110;
const PANEL_HEIGHT: i32 = 480;
const BELOW_PANEL: i32 = 170;
const LEGEND_LINE: i32 = 44;

/// Colours of lines that are no mode and no mixer: from the palette of Okabe and Ito.
pub const COLORS: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x55, 0x55, 0x55),
];

/// How values become positions.
#[derive(Clone, Copy, Debug)]
pub enum Scale {
    /// Equal steps from the first to the second.
    Linear(f64, f64),
    /// Equal factors.
    Log(f64, f64),
}

impl Scale {
    fn at(self, value: f64, from: i32, to: i32) -> i32 {
        match self {
            Self::Linear(low, high) => Linear { low, high, from, to }.at(value),
            Self::Log(low, high) => Log { low, high, from, to }.at(value),
        }
    }
}

/// An axis: its scale, its caption, and where it has which labels.
#[derive(Clone, Debug)]
pub struct Axis {
    pub scale: Scale,
    pub caption: String,
    pub ticks: Vec<(f64, String)>,
}

/// A mark, with the interval that it lies in.
#[derive(Clone, Copy, Debug)]
pub struct Point {
    pub x: f64,
    pub y: f64,
    pub interval: Option<(f64, f64)>,
    /// Whether it is filled or hollow.
    pub filled: bool,
}

/// Marks of one colour, joined by a line or not.
#[derive(Clone, Debug)]
pub struct Line {
    pub color: RGBColor,
    pub dashed: bool,
    pub joined: bool,
    /// Whether its points are marked; a line that was not measured has no marks.
    pub marked: bool,
    pub points: Vec<Point>,
}

/// One panel. Its vertical axis has its caption as the panel's title.
#[derive(Clone, Debug)]
pub struct ChartPanel {
    pub x: Axis,
    pub y: Axis,
    pub lines: Vec<Line>,
    /// A horizontal line that the eye compares with.
    pub reference: Option<f64>,
}

/// An entry of the legend.
#[derive(Clone, Debug)]
pub struct Entry {
    pub label: String,
    pub color: RGBColor,
    pub dashed: bool,
    pub filled: bool,
    pub marked: bool,
}

/// All that is drawn.
#[derive(Clone, Debug)]
pub struct Chart {
    pub title: String,
    pub description: String,
    pub footer: String,
    pub legend: Vec<Entry>,
    pub panels: Vec<ChartPanel>,
}

impl Chart {
    /// The figure.
    pub fn draw(&self) -> Result<Figure> {
        let legend = self.legend_places();
        let top = BELOW_LEGEND + legend.last().map_or(104, |(_, y)| *y);
        let height = top + PANEL_HEIGHT + BELOW_PANEL;
        let size = (WIDTH as u32 / super::DENSITY, height as u32 / super::DENSITY);
        Figure::draw(size, self.description.clone(), |canvas| {
            canvas.draw_text(&self.title, &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
            for (entry, place) in self.legend.iter().zip(&legend) {
                entry.draw(canvas, *place)?;
            }
            let count = self.panels.len().max(1) as i32;
            let pitch = (WIDTH - LEFT - 40 + GAP) / count;
            for (index, panel) in self.panels.iter().enumerate() {
                let left = LEFT + pitch * index as i32;
                panel.draw(canvas, Panel { left, right: left + pitch - GAP, top, bottom: top + PANEL_HEIGHT })?;
            }
            canvas.draw_text(&self.footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, height - 34))
        })
    }

    /// Where each entry of the legend stands: a new line where one is full.
    fn legend_places(&self) -> Vec<(i32, i32)> {
        let (mut x, mut y) = (40, 104);
        let mut places = Vec::new();
        for entry in &self.legend {
            let width = 74 + style::width(&entry.label, LABEL) + 40;
            if x > 40 && x + width > WIDTH - 20 {
                (x, y) = (40, y + LEGEND_LINE);
            }
            places.push((x, y));
            x += width;
        }
        places
    }
}

impl Entry {
    fn draw(&self, canvas: &Canvas<'_>, (x, y): (i32, i32)) -> Result<(), DrawError> {
        stroke(canvas, vec![(x, y), (x + 56, y)], self.color, self.dashed)?;
        if self.marked {
            mark(canvas, (x + 28, y), self.color, self.filled)?;
        }
        canvas.draw_text(&self.label, &style::text(LABEL, INK, HPos::Left, VPos::Center), (x + 70, y))
    }
}

impl ChartPanel {
    fn draw(&self, canvas: &Canvas<'_>, panel: Panel) -> Result<(), DrawError> {
        let x = |value: f64| self.x.scale.at(value, panel.left, panel.right);
        let y = |value: f64| self.y.scale.at(value, panel.bottom, panel.top);
        let ticks = |axis: &Axis, at: &dyn Fn(f64) -> i32| -> Vec<Tick> {
            axis.ticks.iter().map(|(value, label)| (at(*value), label.clone())).collect()
        };
        panel.rows(canvas, &ticks(&self.y, &y))?;
        panel.labels_below(canvas, &ticks(&self.x, &x))?;
        panel.frame(canvas, &self.y.caption)?;
        panel.caption(canvas, &self.x.caption)?;
        if let Some(value) = self.reference {
            let line = vec![(panel.left, y(value)), (panel.right, y(value))];
            canvas.draw(&DashedPathElement::new(line, 12, 8, FAINT.stroke_width(3)))?;
        }
        for line in &self.lines {
            if line.joined {
                stroke(
                    canvas,
                    line.points.iter().map(|point| (x(point.x), y(point.y))).collect(),
                    line.color,
                    line.dashed,
                )?;
            }
            for point in line.points.iter().filter(|_| line.marked) {
                let at = x(point.x);
                if let Some((low, high)) = point.interval {
                    canvas.draw(&PathElement::new([(at, y(low)), (at, y(high))], line.color.stroke_width(4)))?;
                }
                mark(canvas, (at, y(point.y)), line.color, point.filled)?;
            }
        }
        Ok(())
    }
}

fn stroke(canvas: &Canvas<'_>, points: Vec<(i32, i32)>, color: RGBColor, dashed: bool) -> Result<(), DrawError> {
    if dashed {
        canvas.draw(&DashedPathElement::new(points, 14, 10, color.stroke_width(4)))
    } else {
        canvas.draw(&PathElement::new(points, color.stroke_width(4)))
    }
}

fn mark(canvas: &Canvas<'_>, at: (i32, i32), color: RGBColor, filled: bool) -> Result<(), DrawError> {
    if filled {
        return canvas.draw(&Circle::new(at, 9, color.filled()));
    }
    canvas.draw(&Circle::new(at, 8, WHITE.filled()))?;
    canvas.draw(&Circle::new(at, 8, color.stroke_width(4)))
}

/// Ticks of a logarithmic axis: the powers of ten, or 1, 2 and 5 times them where there are few.
pub fn log_axis(caption: &str, (low, high): (f64, f64)) -> Axis {
    let scale = Log { low, high, from: 0, to: 1 };
    let decades: Vec<(f64, String)> =
        scale.decades().map(|exponent| (10f64.powi(exponent), super::axis::power_of_ten(exponent))).collect();
    let ticks = if decades.len() >= 3 {
        let every = decades.len().div_ceil(8);
        decades.into_iter().step_by(every).collect()
    } else {
        super::axis::ticks_125(low, high).into_iter().map(|tick| (tick, super::panel::three_digits(tick))).collect()
    };
    Axis { scale: Scale::Log(low, high), caption: caption.to_owned(), ticks }
}

/// A linear axis around the values, with round ticks.
pub fn linear_axis(caption: &str, (low, high): (f64, f64)) -> Axis {
    let margin = (0.06 * (high - low)).max(1e-12);
    let (low, high) = (low - margin, high + margin);
    let ticks = Linear { low, high, from: 0, to: 1 }.ticks(6);
    let ticks = ticks.into_iter().map(|tick| (tick, super::panel::three_digits(tick))).collect();
    Axis { scale: Scale::Linear(low, high), caption: caption.to_owned(), ticks }
}

/// An axis of names: the n-th at n.
pub fn named_axis(caption: &str, names: &[String]) -> Axis {
    let ticks = names.iter().enumerate().map(|(at, name)| (at as f64, name.clone())).collect();
    Axis { scale: Scale::Linear(-0.6, names.len() as f64 - 0.4), caption: caption.to_owned(), ticks }
}
