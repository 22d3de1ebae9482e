//! How long 20 tokens per parameter take.

use super::axis::Log;
use super::panel::{self, Look, Panel, Tick, mixer_color, mixer_label};
use super::style::{self, FAINT, GRID, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure, axis};
use crate::model::config::{Mixer, Size};
use crate::table::rows::{distinct, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

/// Width of the figure, and its height without the rows, in canvas units.
const WIDTH: i32 = 1920;
const HEIGHT: i32 = 390;
const ROW_HEIGHT: i32 = 40;
const GROUP_GAP: i32 = 20;
/// Edges of the panel; right of it stand the times in words.
const LEFT: i32 = 270;
const RIGHT: i32 = 1480;
const TOP: i32 = 200;
/// Hours that have a tick, and their names.
const TICKS: [(f64, &str); 13] = [
    (1.0 / 60.0, "1 min"),
    (1.0 / 12.0, "5 min"),
    (0.25, "15 min"),
    (1.0, "1 h"),
    (3.0, "3 h"),
    (6.0, "6 h"),
    (12.0, "12 h"),
    (24.0, "1 day"),
    (72.0, "3 days"),
    (168.0, "1 week"),
    (336.0, "2 weeks"),
    (720.0, "30 days"),
    (2160.0, "90 days"),
];

/// Draws the hours of a table of [`crate::table::chinchilla`]: a row for each size, mixer and source, with a mark for the
/// tokens that the parameters of the body ask for and one for those of all parameters. The title says how long the largest
/// model that all machines trained takes on each. `footer` goes below.
///
/// # Errors
/// [`Error::Figure`] where the table is empty, [`Error::Table`] where a column is missing.
pub fn hours_to_chinchilla(chinchilla: &DataFrame, footer: &str) -> Result<Figure> {
    let runs = runs(chinchilla)?;
    let (low, high) = axis::extent(runs.iter().flat_map(|run| [run.body, run.total]))
        .ok_or_else(|| Error::Figure("no hours to draw on a logarithmic axis".to_owned()))?;
    let mut sizes = distinct(runs.iter().map(|run| run.size));
    sizes.sort();
    let mut mixers = distinct(runs.iter().map(|run| run.mixer));
    mixers.sort();
    let rows = runs.len() as i32 * ROW_HEIGHT + (sizes.len() as i32 - 1) * GROUP_GAP;
    let plot = Plot {
        sources: distinct(runs.iter().map(|run| run.source.clone())),
        x: Log { low: low / 1.3, high: high * 1.3, from: LEFT, to: RIGHT },
        panel: Panel { left: LEFT, right: RIGHT, top: TOP, bottom: TOP + rows },
        runs,
        sizes,
        mixers,
    };
    let height = HEIGHT + rows;
    Figure::draw((WIDTH as u32 / super::DENSITY, height as u32 / super::DENSITY), plot.description(), |canvas| {
        canvas.draw_text(&plot.title(), &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        panel::legend(canvas, &plot.mixers, &plot.sources, (40, 104))?;
        plot.draw(canvas)?;
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, height - 34))
    })
}

struct Run {
    source: String,
    mixer: Mixer,
    size: Size,
    body: f64,
    total: f64,
}

impl Run {
    fn machine(&self) -> &str {
        self.source.split(',').next().unwrap_or_default()
    }
}

fn runs(table: &DataFrame) -> Result<Vec<Run>> {
    let [machines, implementations, mixers, sizes] =
        ["machine", "implementation", "mixer", "size"].map(|name| texts(table, name));
    let (machines, implementations, mixers, sizes) = (machines?, implementations?, mixers?, sizes?);
    let (body, total) = (numbers(table, "hours_body")?, numbers(table, "hours_total")?);
    let run = |row: usize| {
        Ok(Run {
            source: format!("{}, {}", machines[row], implementations[row]),
            mixer: mixers[row].parse()?,
            size: sizes[row].parse()?,
            body: body[row].unwrap_or(f64::NAN),
            total: total[row].unwrap_or(f64::NAN),
        })
    };
    (0..table.height()).map(run).collect()
}

struct Plot {
    runs: Vec<Run>,
    sources: Vec<String>,
    sizes: Vec<Size>,
    mixers: Vec<Mixer>,
    x: Log,
    panel: Panel,
}

impl Plot {
    /// The runs of one model, the largest that every machine has trained, each by what trains it fastest on its machine.
    fn common(&self) -> Vec<(&str, &Run)> {
        let machines = distinct(self.runs.iter().map(Run::machine));
        let fastest = |machine: &'_ str, model: (Size, Mixer)| {
            let of = self.runs.iter().filter(|run| run.machine() == machine && (run.size, run.mixer) == model);
            of.min_by(|a, b| a.body.total_cmp(&b.body))
        };
        let models = self.runs.iter().map(|run| (run.size, run.mixer));
        let common = models.filter(|model| machines.iter().all(|machine| fastest(machine, *model).is_some())).max();
        let of_model =
            |model| machines.iter().filter_map(|machine| Some((*machine, fastest(machine, model)?))).collect();
        common.map(of_model).unwrap_or_default()
    }

    fn title(&self) -> String {
        let common = self.common();
        let Some((_, run)) = common.first() else { return "20 tokens per parameter".to_owned() };
        let part = |(machine, run): &(&str, &Run)| format!("{} on {machine}", duration(run.body));
        let parts: Vec<String> = common.iter().map(part).collect();
        let model = format!("{} {}", mixer_label(run.mixer), run.size.name());
        format!("20 tokens per parameter of the body, {model}: {}", parts.join(", "))
    }

    fn description(&self) -> String {
        let mut sentences =
            vec!["Time to train on 20 tokens per parameter of the body, or of all parameters.".to_owned()];
        for (source, &mixer) in self.sources.iter().flat_map(|source| self.mixers.iter().map(move |m| (source, m))) {
            let of = self.runs.iter().filter(|run| run.source == *source && run.mixer == mixer);
            let ends = of.clone().min_by_key(|run| run.size).zip(of.max_by_key(|run| run.size));
            sentences.extend(ends.map(|(smallest, largest)| {
                let time = |run: &Run| format!("{} {} or {}", run.size.name(), duration(run.body), duration(run.total));
                let sizes = if smallest.size == largest.size {
                    time(smallest)
                } else {
                    format!("from {} to {}", time(smallest), time(largest))
                };
                format!("{source}: {} {sizes}.", mixer_label(mixer))
            }));
        }
        sentences.join(" ")
    }

    fn draw(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let Panel { left, right, top, bottom } = self.panel;
        let ticks: Vec<Tick> = TICKS
            .into_iter()
            .filter(|(hours, _)| (self.x.low..=self.x.high).contains(hours))
            .map(|(hours, name)| (self.x.at(hours), name.to_owned()))
            .collect();
        self.panel.columns(canvas, &ticks)?;
        self.panel.frame(canvas, "Training time")?;
        self.panel.caption(canvas, "left mark: 20 tokens per parameter of the body · right mark: of all parameters")?;
        let (mut y, row_height) = (top, ROW_HEIGHT);
        for (index, &size) in self.sizes.iter().enumerate() {
            if index > 0 {
                let line = [(left - 230, y + GROUP_GAP / 2), (right + 400, y + GROUP_GAP / 2)];
                canvas.draw(&PathElement::new(line, GRID.stroke_width(2)))?;
                y += GROUP_GAP;
            }
            let first = y + row_height / 2;
            canvas.draw_text(size.name(), &style::bold(LABEL, INK, HPos::Left, VPos::Center), (40, first))?;
            for (source, &mixer) in self.sources.iter().flat_map(|source| self.mixers.iter().map(move |m| (source, m)))
            {
                let of_row = |run: &&Run| run.source == *source && run.mixer == mixer && run.size == size;
                for run in self.runs.iter().filter(of_row) {
                    self.row(canvas, run, y + row_height / 2)?;
                    y += row_height;
                }
            }
        }
        debug_assert_eq!(y, bottom);
        Ok(())
    }

    fn row(&self, canvas: &Canvas<'_>, run: &Run, y: i32) -> Result<(), DrawError> {
        let color = mixer_color(run.mixer);
        let index = self.sources.iter().position(|source| *source == run.source).unwrap_or(0);
        let label = style::text(LABEL, color, HPos::Right, VPos::Center);
        canvas.draw_text(mixer_label(run.mixer), &label, (LEFT - 20, y))?;
        let ends = [self.x.at(run.body), self.x.at(run.total)];
        canvas.draw(&Rectangle::new([(ends[0], y - 3), (ends[1], y + 3)], color.mix(0.45).filled()))?;
        ends.into_iter().try_for_each(|x| Look { index }.mark(canvas, (x, y), color))?;
        let words = format!("{} to {}", duration(run.body), duration(run.total));
        let note = style::text(LABEL, color, HPos::Left, VPos::Center);
        canvas.draw_text(&words, &note, (RIGHT + 30, y))
    }
}

/// A time in words: `24 min`, `4.3 h`, `5.3 days`.
fn duration(hours: f64) -> String {
    match hours {
        _ if hours < 1.0 => format!("{:.0} min", 60.0 * hours),
        _ if hours < 48.0 => format!("{hours:.1} h"),
        _ => format!("{:.1} days", hours / 24.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_in_their_natural_unit() {
        let written = [0.4, 4.312, 47.9, 127.4].map(duration);
        assert_eq!(written, ["24 min", "4.3 h", "47.9 h", "5.3 days"]);
    }
}
