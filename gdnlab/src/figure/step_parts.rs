//! Where the time of a training step goes: a bar for each model.

use super::panel::{self, Linear, Panel, Tick, mixer_label};
use super::style::{self, FAINT, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::model::config::Mixer;
use crate::table::Part;
use crate::table::rows::{distinct, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

const WIDTH: i32 = 1560;
const LEFT: i32 = 250;
const RIGHT: i32 = 1370;
const TOP: i32 = 160;
/// Height of a bar, and from one bar to the next.
const BAR: i32 = 44;
const ROW: i32 = 62;
/// A share is written into its part from so many percent on.
const WRITTEN_PCT: f64 = 5.0;

/// Draws a table of [`crate::table::step_kernels`]: for each model a bar whose parts are shares of the time of a step's
/// kernels, with the sum at its end. The title names what takes most of the largest model of each mixer. `footer` goes
/// below.
///
/// # Errors
/// [`Error::Figure`] where the table is empty, [`Error::Table`] where a column is missing.
pub fn step_parts(kernels: &DataFrame, footer: &str) -> Result<Figure> {
    let models = models(kernels)?;
    if models.is_empty() {
        return Err(Error::Figure("no model to draw: expected the kernels of one step at least".to_owned()));
    }
    let bottom = TOP + ROW * models.len() as i32;
    let height = bottom + 150;
    let plot = Plot { models: &models, panel: Panel { left: LEFT, right: RIGHT, top: TOP, bottom } };
    let size = (WIDTH as u32 / super::DENSITY, height as u32 / super::DENSITY);
    Figure::draw(size, plot.description(), |canvas| {
        canvas.draw_text(&plot.title(), &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        legend(canvas)?;
        plot.draw(canvas)?;
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, height - 34))
    })
}

/// A model with the milliseconds of each of [`Part::ALL`].
struct Model {
    mixer: Mixer,
    size: String,
    ms: [f64; Part::ALL.len()],
}

impl Model {
    fn total(&self) -> f64 {
        self.ms.iter().sum()
    }

    fn share_pct(&self, part: Part) -> f64 {
        100.0 * self.ms[part as usize] / self.total()
    }

    fn name(&self) -> String {
        format!("{} {}", mixer_label(self.mixer), self.size)
    }
}

fn models(table: &DataFrame) -> Result<Vec<Model>> {
    let [mixers, sizes, parts] = ["mixer", "size", "part"].map(|name| texts(table, name));
    let (mixers, sizes, parts, ms) = (mixers?, sizes?, parts?, numbers(table, "ms")?);
    let key = |row: usize| (mixers[row].as_str(), sizes[row].as_str());
    let model = |(mixer, size): (&str, &str)| {
        let rows = || (0..table.height()).filter(|&row| key(row) == (mixer, size));
        let of = |part: Part| rows().filter(|&row| parts[row] == part.name()).filter_map(|row| ms[row]).sum();
        Ok(Model { mixer: mixer.parse()?, size: size.to_owned(), ms: Part::ALL.map(of) })
    };
    distinct((0..table.height()).map(key)).into_iter().map(model).collect()
}

fn color(part: Part) -> RGBColor {
    match part {
        Part::Products => RGBColor(0x99, 0xb8, 0xcc),
        Part::Mixer => RGBColor(0xd5, 0x5e, 0x00),
        Part::Elementwise => RGBColor(0xf0, 0xc2, 0x4b),
        Part::Vocabulary => RGBColor(0x00, 0x9e, 0x73),
        Part::Optimizer => RGBColor(0xcc, 0x79, 0xa7),
    }
}

fn legend(canvas: &Canvas<'_>) -> Result<(), DrawError> {
    let ink = style::text(LABEL, INK, HPos::Left, VPos::Center);
    let (mut x, y) = (40, 104);
    for part in Part::ALL {
        canvas.draw(&Rectangle::new([(x, y - 11), (x + 22, y + 11)], color(part).filled()))?;
        canvas.draw_text(part.name(), &ink, (x + 34, y))?;
        x += 34 + style::width(part.name(), LABEL) + 30;
    }
    Ok(())
}

struct Plot<'a> {
    models: &'a [Model],
    panel: Panel,
}

impl Plot<'_> {
    /// The largest model of each mixer and its largest part.
    fn largest(&self) -> Vec<(&Model, Part)> {
        let mixers = distinct(self.models.iter().map(|model| model.mixer));
        let of = |mixer| {
            let models = self.models.iter().filter(|model| model.mixer == mixer);
            let model = models.max_by(|a, b| a.total().total_cmp(&b.total()))?;
            let part = Part::ALL.into_iter().max_by(|a, b| model.share_pct(*a).total_cmp(&model.share_pct(*b)))?;
            Some((model, part))
        };
        mixers.into_iter().filter_map(of).collect()
    }

    fn title(&self) -> String {
        let words = |(model, part): &(&Model, Part)| {
            format!("{}: {:.0} % {}", model.name(), model.share_pct(*part), part.name())
        };
        format!("Where a step goes. {}", self.largest().iter().map(words).collect::<Vec<_>>().join("; "))
    }

    fn description(&self) -> String {
        let words = |model: &Model| {
            let parts = Part::ALL.map(|part| format!("{:.0} % {}", model.share_pct(part), part.name()));
            format!("{} {:.1} ms: {}.", model.name(), model.total(), parts.join(", "))
        };
        self.models.iter().map(words).collect::<Vec<_>>().join(" ")
    }

    fn draw(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let Panel { left, right, top, .. } = self.panel;
        let x = Linear { low: 0.0, high: 100.0, from: left, to: right };
        let ticks: Vec<Tick> = x.ticks(5).into_iter().map(|pct| (x.at(pct), format!("{pct:.0} %"))).collect();
        self.panel.columns(canvas, &ticks)?;
        self.panel.caption(canvas, "share of the time of the step's kernels")?;
        let label = style::text(LABEL, INK, HPos::Right, VPos::Center);
        let sum = style::text(LABEL, INK, HPos::Left, VPos::Center);
        let inside = style::text(SMALL, INK, HPos::Center, VPos::Center);
        for (row, model) in self.models.iter().enumerate() {
            let y = top + ROW * row as i32 + (ROW - BAR) / 2;
            canvas.draw_text(&model.name(), &label, (left - 16, y + BAR / 2))?;
            let mut from = 0.0;
            for part in Part::ALL {
                let share = model.share_pct(part);
                let (begin, end) = (x.at(from), x.at(from + share));
                canvas.draw(&Rectangle::new([(begin, y), (end, y + BAR)], color(part).filled()))?;
                if share >= WRITTEN_PCT {
                    canvas.draw_text(&format!("{share:.0}"), &inside, ((begin + end) / 2, y + BAR / 2))?;
                }
                from += share;
            }
            let total = format!("{} ms", panel::three_digits(model.total()));
            canvas.draw_text(&total, &sum, (right + 16, y + BAR / 2))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;
    use crate::table::kernel_record as kernel;
    use crate::table::step_kernels;

    #[test]
    fn each_model_has_a_bar_and_the_title_says_what_takes_longest() {
        let records = [
            kernel("attn", "", "1x2x3 bf16", 30.0),
            kernel("attn", "", "attention_forward", 10.0),
            kernel("gdn", "", "chunk_states", 24.0),
            kernel("gdn", "", "rms_norm_forward", 8.0),
        ];
        let figure = step_parts(&step_kernels(&records).unwrap(), "the footer").unwrap();
        check(&figure, &["attention 30M", "GDN 30M", "40 ms", "32 ms", "75", "25", "the footer"]);
        let title = "Where a step goes. attention 30M: 75 % products; GDN 30M: 75 % attention or GDN";
        assert!(figure.svg().contains(title));
        assert!(figure.description().starts_with("attention 30M 40.0 ms: 75 % products, 25 % attention or GDN"));
        assert!(matches!(step_parts(&step_kernels(&[]).unwrap(), ""), Err(Error::Figure(_))));
    }
}
