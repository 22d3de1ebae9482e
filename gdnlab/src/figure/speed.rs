//! GDN kernels against the floor of the hardware and against each other.

use super::axis::Log;
use super::chart::COLORS;
use super::panel::{Panel, Tick, log_ticks};
use super::style::{self, ACCENT, FAINT, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure, axis};
use crate::table::OURS;
use crate::table::rows::{distinct, geometric_mean};
use crate::table::{TimeRow, time_rows};
use crate::{Error, Result};
use gdnlab_deps::plotters::element::DashedPathElement;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

const WIDTH: i32 = 1920;
const HEIGHT: i32 = 1130;
/// Edges of the panels.
const TOP: i32 = 240;
const BOTTOM: i32 = 960;
const LEFT: i32 = 130;
const PANEL_WIDTH: i32 = 800;
const PITCH: i32 = 950;
/// Lines at so many times the floor.
const MULTIPLES: [f64; 4] = [1.0, 2.0, 5.0, 10.0];

/// The colour of an implementation.
pub(super) fn color_of(implementation: &str) -> RGBColor {
    match implementation {
        OURS => ACCENT,
        "FlashQLA" => COLORS[1],
        "FlashInfer" => COLORS[2],
        "fla" => COLORS[6],
        _ => COLORS[5],
    }
}

/// The passes of a table of times, in the words of a reader.
pub(super) const PASSES: [(&str, &str); 2] = [("fwd", "forward"), ("bwd", "backward")];

/// The rows of the machine that ours ran on, or of the first one; which implementations there are, ours last, so that they
/// are drawn on top.
pub(super) struct Times {
    pub machine: String,
    pub rows: Vec<TimeRow>,
    pub implementations: Vec<String>,
}

impl Times {
    pub(super) fn new(times: &DataFrame) -> Result<Self> {
        let rows = time_rows(times)?;
        let first = rows.iter().find(|row| row.is_ours()).or(rows.first());
        let machine = first.map(|row| row.machine.clone()).ok_or_else(|| Error::Figure("no times".to_owned()))?;
        let rows: Vec<TimeRow> = rows.into_iter().filter(|row| row.machine == machine).collect();
        let mut implementations = distinct(rows.iter().map(|row| row.implementation.clone()));
        // By how slow they are, slowest first.
        let mean = |name: &String| over_floor(rows.iter().filter(|row| row.implementation == *name)).unwrap_or(0.0);
        implementations.sort_by(|a, b| {
            (a.starts_with(OURS), mean(b))
                .partial_cmp(&(b.starts_with(OURS), mean(a)))
                .unwrap_or(std::cmp::Ordering::Equal)
        });
        Ok(Self { machine, rows, implementations })
    }

    /// The rows of `pass` of published cases that ours has a time for; all of them where it has none.
    pub(super) fn common(&self, pass: &str) -> Vec<&TimeRow> {
        let of_pass = || self.rows.iter().filter(|row| row.pass == pass && !row.is_training());
        let ours: Vec<&TimeRow> = of_pass().filter(|row| row.is_ours()).collect();
        if ours.is_empty() {
            return of_pass().collect();
        }
        of_pass().filter(|row| ours.iter().any(|ours| ours.is_same_case(row))).collect()
    }

    /// The geometric mean of time over floor of an implementation in [`Times::common`], and the number of rows.
    pub(super) fn mean(&self, pass: &str, implementation: &str) -> Option<(f64, usize)> {
        let common = self.common(pass);
        let rows = common.iter().copied().filter(|row| row.implementation == implementation);
        geometric_mean(rows.filter_map(|row| Some(row.ms / row.floor_ms?)))
    }

    /// That of the fastest library in each row.
    fn mean_of_best(&self, pass: &str) -> Option<f64> {
        let common = self.common(pass);
        let peers: Vec<&TimeRow> = common.iter().copied().filter(|row| !row.implementation.starts_with(OURS)).collect();
        let is_best = |row: &&&TimeRow| !peers.iter().any(|other| other.is_same_case(row) && other.ms < row.ms);
        over_floor(peers.iter().filter(is_best).copied())
    }
}

fn over_floor<'a>(rows: impl Iterator<Item = &'a TimeRow>) -> Option<f64> {
    Some(geometric_mean(rows.filter_map(|row| Some(row.ms / row.floor_ms?)))?.0)
}

/// Draws a table of [`crate::table::gdn_times`]: a panel for each pass, in it a dot for each row and implementation at the
/// floor and at its time, above lines at one, two, five and ten times the floor. The title says the means. `footer` goes
/// below.
///
/// # Errors
/// [`Error::Figure`] where no row has a floor, [`Error::Table`] where a column is missing.
pub fn time_against_floor(times: &DataFrame, footer: &str) -> Result<Figure> {
    let times = Times::new(times)?;
    let floors = times.rows.iter().filter_map(|row| row.floor_ms);
    let (low, high) = axis::extent(floors)
        .ok_or_else(|| Error::Figure(format!("no floor is known for {}: its rates are not recorded", times.machine)))?;
    let (least, most) = axis::extent(times.rows.iter().map(|row| row.ms)).unwrap_or((low, high));
    let plot = Floors { floors: (low / 1.4, high * 1.4), times_ms: (least / 4.0, most * 1.3), times };
    let size = (WIDTH as u32 / super::DENSITY, HEIGHT as u32 / super::DENSITY);
    Figure::draw(size, plot.description(), |canvas| {
        canvas.draw_text(&plot.title(), &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        plot.legend(canvas)?;
        for (index, (pass, words)) in PASSES.into_iter().enumerate() {
            let left = LEFT + PITCH * index as i32;
            plot.panel(canvas, Panel { left, right: left + PANEL_WIDTH, top: TOP, bottom: BOTTOM }, pass, words)?;
        }
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, HEIGHT - 34))
    })
}

struct Floors {
    times: Times,
    /// The ranges of the floors and of the times, in milliseconds.
    floors: (f64, f64),
    times_ms: (f64, f64),
}

impl Floors {
    fn title(&self) -> String {
        let times = &self.times;
        let mut parts: Vec<String> = Vec::new();
        for (pass, words) in PASSES {
            let Some(best) = times.mean_of_best(pass) else { continue };
            // The first says whose the numbers are.
            let [us, peer] =
                if parts.is_empty() { [format!("{OURS} "), "best peer ".to_owned()] } else { Default::default() };
            let ours = times.mean(pass, OURS).map_or_else(String::new, |(ours, _)| format!("{us}×{ours:.1}, "));
            parts.push(format!("{words} {ours}{peer}×{best:.1}"));
        }
        format!("Time over the floor, {}: {}", times.machine, parts.join("; "))
    }

    fn description(&self) -> String {
        let mean = |(pass, words): (&str, &str), name: &String| {
            let (mean, rows) = self.times.mean(pass, name)?;
            Some(format!("{name} {words} {mean:.2} times the floor in {rows} rows"))
        };
        let of_pass = |pass| self.times.implementations.iter().rev().filter_map(move |name| mean(pass, name));
        let means: Vec<String> = PASSES.into_iter().flat_map(of_pass).collect();
        format!(
            "Time of GDN kernels against the floor of the hardware. {}. Geometric means: {}.",
            self.title(),
            means.join(", ")
        )
    }

    fn legend(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let ink = style::text(LABEL, INK, HPos::Left, VPos::Center);
        let mut x = 52;
        for name in self.times.implementations.iter().rev() {
            canvas.draw(&Circle::new((x, 104), 10, color_of(name).filled()))?;
            canvas.draw_text(name, &ink, (x + 24, 104))?;
            x += 24 + style::width(name, LABEL) + 60;
        }
        let note = "one dot for each row; lines at so many times the floor";
        canvas.draw_text(note, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (x, 104))
    }

    fn panel(&self, canvas: &Canvas<'_>, panel: Panel, pass: &str, words: &str) -> Result<(), DrawError> {
        let ((low, high), (least, most)) = (self.floors, self.times_ms);
        let x = Log { low, high, from: panel.left, to: panel.right };
        let y = Log { low: least, high: most, from: panel.bottom, to: panel.top };
        panel.rows(canvas, &log_ticks(&y))?;
        let ticks: Vec<Tick> = log_ticks(&x);
        panel.labels_below(canvas, &ticks)?;
        panel.frame(canvas, &format!("{words}, time in ms"))?;
        panel.caption(canvas, "floor in ms: traffic and products at the measured rates")?;
        for multiple in MULTIPLES {
            let (start, end) = (low.max(least / multiple), high.min(most / multiple));
            let from = (x.at(start), y.at(start * multiple));
            let line = vec![from, (x.at(end), y.at(end * multiple))];
            let label = if multiple == 1.0 {
                canvas.draw(&PathElement::new(line, INK.stroke_width(3)))?;
                "floor".to_owned()
            } else {
                canvas.draw(&DashedPathElement::new(line, 10, 8, FAINT.stroke_width(2)))?;
                format!("×{multiple}")
            };
            let ink = style::text(SMALL, INK, HPos::Left, VPos::Center);
            canvas.draw_text(&label, &ink, (from.0 + 46, from.1 - 14))?;
        }
        for name in &self.times.implementations {
            let color = color_of(name);
            let ours = name.starts_with(OURS);
            for row in self.times.rows.iter().filter(|row| row.pass == pass && row.implementation == *name) {
                let Some(floor) = row.floor_ms else { continue };
                let at = (x.at(floor), y.at(row.ms));
                canvas.draw(&Circle::new(
                    at,
                    if ours { 8 } else { 6 },
                    color.mix(if ours { 0.9 } else { 0.55 }).filled(),
                ))?;
            }
        }
        Ok(())
    }
}
