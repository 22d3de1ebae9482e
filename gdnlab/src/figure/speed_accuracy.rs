//! Accuracy beside speed.

use super::axis::{self, Log};
use super::panel::{self, Panel, Tick, log_ticks};
use super::speed::{PASSES, Times, color_of};
use super::style::{self, FAINT, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::table::OURS;
use crate::table::rows::{distinct, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::plotters::element::DashedPathElement;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

const WIDTH: i32 = 1920;
const HEIGHT: i32 = 1010;
const TOP: i32 = 260;
const BOTTOM: i32 = 830;
const LEFT: i32 = 130;
const PANEL_WIDTH: i32 = 780;
const PITCH: i32 = 950;
/// Least distance of two labels.
const LABEL_GAP: i32 = 24;

/// Draws a table of [`crate::table::gdn_accuracy`] beside one of [`crate::table::gdn_times`]: a panel for the results of
/// each pass, in it a dot for each implementation and tensor at the geometric mean of its time over the floor and at its
/// error, that of the longest sequences where there are several. Nearer to the lower left corner is faster and more
/// accurate. A dashed line stands for an implementation whose errors were not measured. `footer` goes below.
///
/// # Errors
/// [`Error::Figure`] where no implementation has a time and an error, [`Error::Table`] where a column is missing.
pub fn speed_and_accuracy(times: &DataFrame, accuracy: &DataFrame, footer: &str) -> Result<Figure> {
    let times = Times::new(times)?;
    let errors = errors(accuracy, &times.machine)?;
    let mut panels = Vec::new();
    for (pass, words) in PASSES {
        let speeds: Vec<(String, f64)> =
            times.implementations.iter().filter_map(|name| Some((name.clone(), times.mean(pass, name)?.0))).collect();
        let of_pass = |error: &&FoundError| error.tensor.starts_with('d') == (pass == "bwd");
        let known = |error: &&FoundError| speeds.iter().any(|(name, _)| *name == error.implementation);
        let errors: Vec<FoundError> = errors.iter().filter(of_pass).filter(known).cloned().collect();
        panels.push(Side { words, speeds, errors });
    }
    let (low, high) = axis::extent(panels.iter().flat_map(|side| side.errors.iter().map(|error| error.rel_rms)))
        .ok_or_else(|| Error::Figure("no implementation has a time and an error on this machine".to_owned()))?;
    let speeds = panels.iter().flat_map(|side| side.speeds.iter().map(|(_, mean)| *mean));
    let (fastest, slowest) = axis::extent(speeds.chain([1.0])).unwrap_or((1.0, 10.0));
    let plot = Plot { panels, x: (fastest / 1.1, slowest * 1.35), y: (low / 1.5, high * 1.6) };
    let description = plot.description();
    Figure::draw((WIDTH as u32 / super::DENSITY, HEIGHT as u32 / super::DENSITY), description, |canvas| {
        canvas.draw_text(&plot.title(), &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        plot.legend(canvas, &times.implementations)?;
        for (index, side) in plot.panels.iter().enumerate() {
            let left = LEFT + PITCH * index as i32;
            plot.panel(canvas, Panel { left, right: left + PANEL_WIDTH, top: TOP, bottom: BOTTOM }, side)?;
        }
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, HEIGHT - 34))
    })
}

#[derive(Clone)]
struct FoundError {
    implementation: String,
    tensor: String,
    tokens: f64,
    rel_rms: f64,
}

/// The error of each implementation and tensor on `machine`, that at the most tokens.
fn errors(table: &DataFrame, machine: &str) -> Result<Vec<FoundError>> {
    let (machines, implementations) = (texts(table, "machine")?, texts(table, "implementation")?);
    let (tensors, tokens, errors) = (texts(table, "tensor")?, numbers(table, "T")?, numbers(table, "rel_rms")?);
    let mut longest: Vec<FoundError> = Vec::new();
    for row in (0..table.height()).filter(|&row| machines[row] == machine) {
        let (Some(tokens), Some(rel_rms)) = (tokens[row], errors[row]) else { continue };
        let found =
            FoundError { implementation: implementations[row].clone(), tensor: tensors[row].clone(), tokens, rel_rms };
        let same =
            |other: &&mut FoundError| (&other.implementation, &other.tensor) == (&found.implementation, &found.tensor);
        match longest.iter_mut().find(same) {
            Some(known) if known.tokens <= found.tokens => *known = found,
            Some(_) => {}
            None => longest.push(found),
        }
    }
    Ok(longest)
}

/// The results of one pass.
struct Side {
    words: &'static str,
    /// Each implementation with its time over the floor.
    speeds: Vec<(String, f64)>,
    errors: Vec<FoundError>,
}

impl Side {
    /// By what factor the errors of fla are larger than ours, the smallest and the largest over tensors.
    fn factors(&self) -> Option<String> {
        let of = |name: &str, tensor: &str| {
            let found = self.errors.iter().find(|error| error.implementation == name && error.tensor == tensor)?;
            Some(found.rel_rms)
        };
        let tensors = distinct(self.errors.iter().map(|error| error.tensor.as_str()));
        let factors = tensors.into_iter().filter_map(|tensor| Some(of("fla", tensor)? / of(OURS, tensor)?));
        panel::span(factors, |factor| format!("{factor:.1}"))
    }
}

struct Plot {
    panels: Vec<Side>,
    /// Of the times over the floor, and of the errors.
    x: (f64, f64),
    y: (f64, f64),
}

impl Plot {
    fn title(&self) -> String {
        let part = |side: &Side| Some(format!("{} times {OURS}'s {}", side.factors()?, side.words));
        let parts: Vec<String> = self.panels.iter().filter_map(part).collect();
        if parts.is_empty() {
            return "Accuracy beside speed".to_owned();
        }
        format!("Errors of fla are {}", parts.join(", "))
    }

    fn description(&self) -> String {
        let of_side = |side: &Side| {
            let words = side.words;
            let speed = |(name, mean): &(String, f64)| {
                let errors = side.errors.iter().filter(|error| error.implementation == *name);
                let errors: Vec<String> =
                    errors.map(|error| format!("{} {}", error.tensor, axis::short(error.rel_rms))).collect();
                let errors = if errors.is_empty() { "errors not measured".to_owned() } else { errors.join(", ") };
                format!("{words} {name}: {mean:.2} times the floor, {errors}")
            };
            side.speeds.iter().map(speed).collect::<Vec<_>>().join("; ")
        };
        let sides: Vec<String> = self.panels.iter().map(of_side).collect();
        format!("{}. {}.", self.title(), sides.join(". "))
    }

    fn legend(&self, canvas: &Canvas<'_>, implementations: &[String]) -> Result<(), DrawError> {
        let ink = style::text(LABEL, INK, HPos::Left, VPos::Center);
        let mut x = 52;
        for name in implementations.iter().rev() {
            canvas.draw(&Circle::new((x, 104), 10, color_of(name).filled()))?;
            canvas.draw_text(name, &ink, (x + 24, 104))?;
            x += 24 + style::width(name, LABEL) + 60;
        }
        let note = "dashed: its errors were not measured here; lower left is better";
        canvas.draw_text(note, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (x, 104))
    }

    fn panel(&self, canvas: &Canvas<'_>, panel: Panel, side: &Side) -> Result<(), DrawError> {
        let x = Log { low: self.x.0, high: self.x.1, from: panel.left, to: panel.right };
        let y = Log { low: self.y.0, high: self.y.1, from: panel.bottom, to: panel.top };
        let rows = axis::ticks_125(self.y.0, self.y.1).into_iter().map(|tick| (y.at(tick), axis::tick_125(tick)));
        panel.rows(canvas, &rows.collect::<Vec<Tick>>())?;
        let columns: Vec<Tick> = log_ticks(&x).into_iter().map(|(at, words)| (at, format!("×{words}"))).collect();
        panel.labels_below(canvas, &columns)?;
        panel.frame(canvas, &format!("{}: relative RMS error against float64", side.words))?;
        panel.caption(canvas, "time over the floor, geometric mean over rows")?;
        let errors_of =
            |name: &str| side.errors.iter().filter(|error| error.implementation == name).collect::<Vec<_>>();
        let (measured, dashed): (Vec<_>, Vec<_>) =
            side.speeds.iter().partition(|(name, _)| !errors_of(name).is_empty());
        for (name, mean) in dashed {
            let line = [(x.at(*mean), panel.top), (x.at(*mean), panel.bottom)];
            canvas.draw(&DashedPathElement::new(line, 12, 10, color_of(name).stroke_width(3)))?;
        }
        for (name, mean) in measured {
            let (at, errors) = (x.at(*mean), errors_of(name));
            let places: Vec<i32> = errors.iter().map(|error| y.at(error.rel_rms)).collect();
            let labels = panel::apart(&places, LABEL_GAP);
            for ((error, place), label) in errors.iter().zip(&places).zip(labels) {
                canvas.draw(&Circle::new((at, *place), 10, color_of(name).filled()))?;
                // Over what the label would lie on otherwise.
                let (left, right) = (at + 14, at + 22 + style::width(&error.tensor, SMALL));
                canvas.draw(&Rectangle::new([(left, label - 11), (right, label + 11)], WHITE.filled()))?;
                let ink = style::text(SMALL, color_of(name), HPos::Left, VPos::Center);
                canvas.draw_text(&error.tensor, &ink, (at + 18, label))?;
            }
        }
        Ok(())
    }
}
