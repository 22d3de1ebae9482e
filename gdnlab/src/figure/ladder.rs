//! Training throughput and MFU over the ladder of models.

use super::axis::{self, Log};
use super::panel::{self, Linear, Look, Panel, Tick, mixer_color, mixer_label};
use super::style::{self, FAINT, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::model::config::{Mixer, Size};
use crate::table::rows::distinct;
use crate::table::{Rung, rungs};
use crate::{Error, Result};
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

/// Width of the figure, and its height without the rows of factors, in canvas units.
const WIDTH: i32 = 1920;
const HEIGHT: i32 = 850;
const ROW_HEIGHT: i32 = 34;
/// The two panels.
const LEFT: Panel = Panel { left: 250, right: 1000, top: 210, bottom: 690 };
const RIGHT: Panel = Panel { left: 1130, right: 1880, ..LEFT };
/// Distance of the first and the last rung from the sides.
const INSET: i32 = 70;

/// Draws tokens per second and MFU over the sizes of a table of [`crate::table::ladder`]: a colour for each mixer, marks for
/// each source, which is a machine with an implementation. Below stand the factors of GDN's rates over attention's, and the
/// title says their range on each machine, for what trains fastest there; and the factors between two implementations on the
/// same machine. `footer` goes below.
///
/// # Errors
/// [`Error::Figure`] where the table is empty, [`Error::Table`] where a column is missing.
pub fn throughput_and_mfu(ladder: &DataFrame, footer: &str) -> Result<Figure> {
    let rungs = rungs(ladder)?;
    let plot = Plot::new(&rungs)?;
    let height = HEIGHT + ROW_HEIGHT * plot.sources.len().max(plot.same_machine().len()) as i32;
    let size = (WIDTH as u32 / super::DENSITY, height as u32 / super::DENSITY);
    Figure::draw(size, plot.description(), |canvas| {
        canvas.draw_text(&plot.title(), &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        panel::legend(canvas, &plot.mixers, &plot.sources, (40, 104))?;
        plot.throughput(canvas)?;
        plot.mfu(canvas)?;
        plot.on_the_same_machine(canvas)?;
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, height - 34))
    })
}

/// Height of a row of factors below the panels.
fn row_below(row: usize) -> i32 {
    LEFT.bottom + 74 + ROW_HEIGHT * row as i32
}

/// Rungs by source, mixer and size; the figures of the ladder share it.
pub(super) struct Plot<'a> {
    pub rungs: &'a [Rung],
    pub sources: Vec<String>,
    pub mixers: Vec<Mixer>,
    pub sizes: Vec<Size>,
}

impl<'a> Plot<'a> {
    pub fn new(rungs: &'a [Rung]) -> Result<Self> {
        if rungs.is_empty() {
            return Err(Error::Figure("no models to draw: the table of the ladder has no rows".to_owned()));
        }
        let mut sizes = distinct(rungs.iter().map(|rung| rung.size));
        sizes.sort();
        let mut mixers = distinct(rungs.iter().map(|rung| rung.mixer));
        mixers.sort();
        Ok(Self { rungs, sources: distinct(rungs.iter().map(Rung::source)), mixers, sizes })
    }

    pub fn rung(&self, source: &str, mixer: Mixer, size: Size) -> Option<&Rung> {
        self.rungs.iter().find(|rung| rung.source() == source && rung.mixer == mixer && rung.size == size)
    }

    /// Where the rung of a size stands in `panel`.
    pub fn x(&self, panel: &Panel, size: Size) -> i32 {
        let steps = self.sizes.len().saturating_sub(1).max(1) as i32;
        let at = self.sizes.iter().position(|other| *other == size).unwrap_or(0) as i32;
        panel.left + INSET + (panel.right - panel.left - 2 * INSET) * at / steps
    }

    /// The sizes as ticks.
    pub fn size_ticks(&self, panel: &Panel) -> Vec<Tick> {
        self.sizes.iter().map(|&size| (self.x(panel, size), size.name().to_owned())).collect()
    }

    /// GDN's tokens per second over attention's at a size.
    fn factor(&self, source: &str, size: Size) -> Option<f64> {
        let rate = |mixer| Some(self.rung(source, mixer, size)?.tok_per_s);
        Some(rate(Mixer::Gdn)? / rate(Mixer::Attention)?)
    }

    /// The factors of a source over its sizes, in percent.
    fn factors(&self, source: &str) -> Option<String> {
        let factors = self.sizes.iter().filter_map(|&size| self.factor(source, size));
        panel::span(factors.map(|factor| 100.0 * factor), |percent| format!("{percent:.0}"))
    }

    /// Each machine with the source that trains fastest there.
    pub fn fastest(&self) -> Vec<(&str, String)> {
        let machines = distinct(self.rungs.iter().map(|rung| rung.machine.as_str()));
        let fastest = |machine: &str| {
            let of_machine = self.rungs.iter().filter(|rung| rung.machine == machine);
            of_machine.max_by(|a, b| a.tok_per_s.total_cmp(&b.tok_per_s)).map(Rung::source)
        };
        machines.into_iter().filter_map(|machine| Some((machine, fastest(machine)?))).collect()
    }

    fn title(&self) -> String {
        let fastest = self.fastest();
        let part = |(machine, source): &(&str, String)| Some(format!("{} % on {machine}", self.factors(source)?));
        let parts: Vec<String> = fastest.iter().filter_map(part).collect();
        if parts.is_empty() {
            return "Training throughput and model FLOP utilization".to_owned();
        }
        format!("GDN trains at this share of attention's speed: {}", parts.join(", "))
    }

    fn description(&self) -> String {
        let mut sentences = vec![format!(
            "Training throughput and MFU of {} models from {} to {}.",
            self.mixers.iter().map(|&mixer| mixer_label(mixer)).collect::<Vec<_>>().join(" and "),
            self.sizes.first().map_or("", |size| size.name()),
            self.sizes.last().map_or("", |size| size.name()),
        )];
        for source in &self.sources {
            if let Some(percent) = self.factors(source) {
                sentences.push(format!("{source}: GDN trains at {percent} % of attention's tokens per second."));
            }
            for &mixer in &self.mixers {
                let of_mixer = self.rungs.iter().filter(|rung| rung.source() == *source && rung.mixer == mixer);
                if let Some(mfu) = panel::span(of_mixer.filter_map(|rung| rung.mfu_pct), |mfu| format!("{mfu:.0}")) {
                    sentences.push(format!("MFU of {}: {mfu} %.", mixer_label(mixer)));
                }
            }
        }
        sentences.extend(self.speedups());
        sentences.join(" ")
    }

    /// Each source with those before it that it is compared with: the first of all, and those on the same machine.
    fn pairs(&self) -> Vec<(usize, usize)> {
        let machine = |source: usize| self.sources[source].split(',').next().unwrap_or_default().to_owned();
        let compared = |later: usize, earlier: usize| earlier == 0 || machine(later) == machine(earlier);
        let later = 1..self.sources.len();
        later
            .flat_map(|later| (0..later).filter(move |&earlier| compared(later, earlier)).map(move |e| (later, e)))
            .collect()
    }

    /// How many times as fast as the second source of a pair the first one trains.
    fn speedup(&self, (later, earlier): (usize, usize), mixer: Mixer, size: Size) -> Option<f64> {
        let rate = |source: usize| Some(self.rung(&self.sources[source], mixer, size)?.tok_per_s);
        Some(rate(later)? / rate(earlier)?)
    }

    fn speedups(&self) -> Vec<String> {
        let of = |pair: (usize, usize), mixer: Mixer| {
            let ratios = self.sizes.iter().filter_map(|&size| self.speedup(pair, mixer, size));
            let times = panel::span(ratios, axis::short)?;
            let (later, earlier) = (&self.sources[pair.0], &self.sources[pair.1]);
            Some(format!("{later} trains {} at {times} times the rate of {earlier}.", mixer_label(mixer)))
        };
        self.pairs().into_iter().flat_map(|pair| self.mixers.iter().filter_map(move |&mixer| of(pair, mixer))).collect()
    }

    /// What the rows below the right panel compare: mixers that two sources on the same machine trained.
    fn same_machine(&self) -> Vec<((usize, usize), Mixer)> {
        let machine = |source: usize| self.sources[source].split(',').next();
        let pairs = self.pairs().into_iter().filter(|(later, earlier)| machine(*later) == machine(*earlier));
        let rows = pairs.flat_map(|pair| self.mixers.iter().map(move |&mixer| (pair, mixer)));
        rows.filter(|(pair, mixer)| self.sizes.iter().any(|&size| self.speedup(*pair, *mixer, size).is_some()))
            .collect()
    }

    /// Rows below the right panel: how many times as fast one source is as another on the same machine.
    fn on_the_same_machine(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        for (row, (pair, mixer)) in self.same_machine().into_iter().enumerate() {
            let (y, color) = (row_below(row), mixer_color(mixer));
            Look { index: pair.0 }.mark(canvas, (RIGHT.left - 66, y), color)?;
            canvas.draw_text("/", &style::text(SMALL, color, HPos::Center, VPos::Center), (RIGHT.left - 41, y))?;
            Look { index: pair.1 }.mark(canvas, (RIGHT.left - 16, y), color)?;
            let note = style::text(SMALL, color, HPos::Center, VPos::Center);
            for &size in &self.sizes {
                let Some(factor) = self.speedup(pair, mixer, size) else { continue };
                canvas.draw_text(&format!("×{factor:.2}"), &note, (self.x(&RIGHT, size), y))?;
            }
        }
        Ok(())
    }

    /// A line and marks for each source and mixer.
    fn series(&self, canvas: &Canvas<'_>, panel: &Panel, y: impl Fn(&Rung) -> Option<i32>) -> Result<(), DrawError> {
        for (index, source) in self.sources.iter().enumerate() {
            let look = Look { index };
            for &mixer in &self.mixers {
                let point = |&size: &Size| Some((self.x(panel, size), y(self.rung(source, mixer, size)?)?));
                let points: Vec<(i32, i32)> = self.sizes.iter().filter_map(point).collect();
                look.line(canvas, points.clone(), mixer_color(mixer))?;
                points.into_iter().try_for_each(|point| look.mark(canvas, point, mixer_color(mixer)))?;
            }
        }
        Ok(())
    }

    fn throughput(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let (low, high) = axis::extent(self.rungs.iter().map(|rung| rung.tok_per_s)).unwrap_or((1.0, 10.0));
        let y = Log { low: low / 1.5, high: high * 1.3, from: LEFT.bottom, to: LEFT.top };
        LEFT.rows(canvas, &panel::log_ticks(&y))?;
        LEFT.labels_below(canvas, &self.size_ticks(&LEFT))?;
        LEFT.frame(canvas, "Tokens per second, by size of the model")?;
        self.series(canvas, &LEFT, |rung| Some(y.at(rung.tok_per_s)))?;
        let label = style::text(SMALL, mixer_color(Mixer::Gdn), HPos::Right, VPos::Center);
        let note = style::text(SMALL, mixer_color(Mixer::Gdn), HPos::Center, VPos::Center);
        for (index, source) in self.sources.iter().enumerate() {
            if self.factors(source).is_none() {
                continue;
            }
            let y = row_below(index);
            canvas.draw_text("GDN / attention", &label, (LEFT.left - 40, y))?;
            Look { index }.mark(canvas, (LEFT.left - 16, y), FAINT)?;
            for &size in &self.sizes {
                let Some(factor) = self.factor(source, size) else { continue };
                canvas.draw_text(&format!("×{factor:.2}"), &note, (self.x(&LEFT, size), y))?;
            }
        }
        Ok(())
    }

    fn mfu(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let most = self.rungs.iter().filter_map(|rung| rung.mfu_pct).fold(0.0, f64::max);
        if most == 0.0 {
            let ink = style::text(LABEL, FAINT, HPos::Center, VPos::Center);
            let middle = ((RIGHT.left + RIGHT.right) / 2, (RIGHT.top + RIGHT.bottom) / 2);
            return canvas.draw_text("no matmul rate is known to hold MFU against", &ink, middle);
        }
        let y = Linear { low: 0.0, high: (most * 1.1 / 10.0).ceil() * 10.0, from: RIGHT.bottom, to: RIGHT.top };
        let ticks: Vec<Tick> = y.ticks(5).into_iter().map(|tick| (y.at(tick), format!("{tick:.0} %"))).collect();
        RIGHT.rows(canvas, &ticks)?;
        RIGHT.labels_below(canvas, &self.size_ticks(&RIGHT))?;
        RIGHT.frame(canvas, "MFU: model FLOPs over the measured matmul rate")?;
        self.series(canvas, &RIGHT, |rung| Some(y.at(rung.mfu_pct?)))
    }
}

#[cfg(test)]
#[path = "ladder_tests.rs"]
mod tests;
