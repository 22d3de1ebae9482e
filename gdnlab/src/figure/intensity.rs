//! Arithmetic intensity of training over the ladder, and where the models lie below the roofs of their machines.

use super::axis::{self, Log};
use super::ladder::Plot;
use super::panel::{self, Linear, Look, Panel, Tick, mixer_color, mixer_label};
use super::style::{self, FAINT, GRID, INK, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::cost::Rates;
use crate::table::rows::distinct;
use crate::table::{rates, rungs};
use crate::{Error, Result};
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

/// Size of the figure in canvas units.
const WIDTH: i32 = 1920;
const HEIGHT: i32 = 900;
/// The two panels.
const LEFT: Panel = Panel { left: 130, right: 860, top: 210, bottom: 700 };
const RIGHT: Panel = Panel { left: 1080, right: 1850, ..LEFT };
/// The products that the roofs are made of.
const PRODUCTS: &str = "bf16_matmul";

/// Draws, of a table of [`crate::table::ladder`] and the rates in `rooflines`, one of [`crate::table::rooflines`]: at the left
/// the FLOPs per byte of each model with the ridge point of each machine; at the right the roofs, `min(I copy, products)`,
/// and below them the FLOPs per second that each model reaches. Machines without such rates are left out. `footer` goes below.
///
/// # Errors
/// [`Error::Figure`] where the ladder is empty or no machine's ridge is known, [`Error::Table`] where a column is missing.
pub fn arithmetic_intensity(ladder: &DataFrame, rooflines: &DataFrame, footer: &str) -> Result<Figure> {
    let mut rungs = rungs(ladder)?;
    let mut roofs = Vec::new();
    for machine in distinct(rungs.iter().map(|rung| rung.machine.clone())) {
        let rates = rates(rooflines, &machine, PRODUCTS)?;
        roofs.extend(rates.and_then(|rates| Some(Roof { machine, rates, ridge: rates.ridge_flop_per_byte()? })));
    }
    rungs.retain(|rung| roofs.iter().any(|roof| roof.machine == rung.machine));
    if roofs.is_empty() {
        return Err(Error::Figure(format!(
            "no machine of the ladder has a copy bandwidth and a {PRODUCTS} in the rates"
        )));
    }
    let plot = Intensity { ladder: Plot::new(&rungs)?, roofs };
    let size = (WIDTH as u32 / super::DENSITY, HEIGHT as u32 / super::DENSITY);
    Figure::draw(size, plot.description(), |canvas| {
        canvas.draw_text(&plot.title(), &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        panel::legend(canvas, &plot.ladder.mixers, &plot.ladder.sources, (40, 104))?;
        plot.intensity(canvas)?;
        plot.below_the_roofs(canvas)?;
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, HEIGHT - 34))
    })
}

/// What a machine allows.
struct Roof {
    machine: String,
    rates: Rates,
    ridge: f64,
}

impl Roof {
    fn flop_per_s(&self, intensity: f64) -> f64 {
        let traffic = intensity * self.rates.copy_bytes_per_s;
        self.rates.matmul_flop_per_s.map_or(traffic, |products| products.min(traffic))
    }
}

struct Intensity<'a> {
    ladder: Plot<'a>,
    roofs: Vec<Roof>,
}

impl Intensity<'_> {
    /// How many of the models that a machine trained lie above its ridge, and how many there are.
    fn above(&self, roof: &Roof) -> (usize, usize) {
        let of_machine = self.ladder.rungs.iter().filter(|rung| rung.machine == roof.machine);
        let above = of_machine.clone().filter(|rung| rung.cost.intensity_flop_per_byte() > roof.ridge).count();
        (above, of_machine.count())
    }

    /// What the trainings on a machine reach, in percent of its roof at their intensity.
    fn reached_pct<'a>(&'a self, roof: &'a Roof) -> impl Iterator<Item = f64> + 'a {
        let of_machine = self.ladder.rungs.iter().filter(|rung| rung.machine == roof.machine);
        of_machine
            .map(|rung| 100.0 * rung.cost.flop * rung.tok_per_s / roof.flop_per_s(rung.cost.intensity_flop_per_byte()))
    }

    fn title(&self) -> String {
        let counts: Vec<(usize, usize)> = self.roofs.iter().map(|roof| self.above(roof)).collect();
        let (above, all) = counts.iter().fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1));
        let machines: Vec<&str> = self.roofs.iter().map(|roof| roof.machine.as_str()).collect();
        let where_they_lie = match above {
            _ if above == all => "Every model lies above the ridge".to_owned(),
            0 => "Every model lies below the ridge".to_owned(),
            _ => format!("{above} of {all} trainings lie above the ridge"),
        };
        let reached = self.roofs.iter().flat_map(|roof| self.reached_pct(roof));
        let reached = panel::span(reached, |percent| format!("{percent:.0}")).unwrap_or_default();
        format!("{where_they_lie} of {}; training reaches {reached} % of the roof", machines.join(" and of "))
    }

    fn description(&self) -> String {
        let mut sentences = Vec::new();
        for &mixer in &self.ladder.mixers {
            let of_mixer = self.ladder.rungs.iter().filter(|rung| rung.mixer == mixer);
            let intensities = of_mixer.map(|rung| rung.cost.intensity_flop_per_byte());
            if let Some(span) = panel::span(intensities, |intensity| format!("{intensity:.0}")) {
                sentences.push(format!("Training {} takes {span} FLOP per byte.", mixer_label(mixer)));
            }
        }
        for roof in &self.roofs {
            let (above, all) = self.above(roof);
            sentences.push(format!(
                "The ridge of {} is at {:.0} FLOP per byte: {above} of {all} trainings there lie above it.",
                roof.machine, roof.ridge
            ));
            if let Some(span) = panel::span(self.reached_pct(roof), |percent| format!("{percent:.0}")) {
                sentences.push(format!("They reach {span} % of what its roof allows."));
            }
        }
        sentences.join(" ")
    }

    fn intensity(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let intensities = self.ladder.rungs.iter().map(|rung| rung.cost.intensity_flop_per_byte());
        let most = intensities.chain(self.roofs.iter().map(|roof| roof.ridge)).fold(0.0, f64::max);
        let y = Linear { low: 0.0, high: most * 1.1, from: LEFT.bottom, to: LEFT.top };
        for roof in &self.roofs {
            let band = [(LEFT.left, y.at(roof.ridge)), (LEFT.right, LEFT.bottom)];
            canvas.draw(&Rectangle::new(band, GRID.mix(0.6).filled()))?;
        }
        let ticks: Vec<Tick> = y.ticks(5).into_iter().map(|tick| (y.at(tick), format!("{tick:.0}"))).collect();
        LEFT.rows(canvas, &ticks)?;
        LEFT.labels_below(canvas, &self.ladder.size_ticks(&LEFT))?;
        LEFT.frame(canvas, "Arithmetic intensity, FLOP per byte, by size of the model")?;
        let note = style::text(SMALL, INK, HPos::Left, VPos::Center);
        let wanted: Vec<i32> = self.roofs.iter().map(|roof| y.at(roof.ridge) + 22).collect();
        for (roof, place) in self.roofs.iter().zip(panel::apart(&wanted, 30)) {
            let line = [(LEFT.left, y.at(roof.ridge)), (LEFT.right, y.at(roof.ridge))];
            canvas.draw(&PathElement::new(line, INK.stroke_width(3)))?;
            let text = format!("ridge of {}, {:.0}: traffic bounds what lies below", roof.machine, roof.ridge);
            canvas.draw_text(&text, &note, (LEFT.left + 16, place))?;
        }
        // The same for all machines: a formula of the model alone.
        for &mixer in &self.ladder.mixers {
            let point = |size: &_| {
                let rung = self.ladder.rungs.iter().find(|rung| rung.mixer == mixer && rung.size == *size)?;
                let intensity = rung.cost.intensity_flop_per_byte();
                Some((self.ladder.x(&LEFT, *size), y.at(intensity), intensity))
            };
            let points: Vec<(i32, i32, f64)> = self.ladder.sizes.iter().filter_map(point).collect();
            let line: Vec<(i32, i32)> = points.iter().map(|(x, y, _)| (*x, *y)).collect();
            canvas.draw(&PathElement::new(line, mixer_color(mixer).stroke_width(5)))?;
            let number = style::text(SMALL, mixer_color(mixer), HPos::Center, VPos::Center);
            for (x, y, intensity) in points {
                canvas.draw(&Circle::new((x, y), 10, mixer_color(mixer).filled()))?;
                canvas.draw_text(&format!("{intensity:.0}"), &number, (x, y - 28))?;
            }
        }
        Ok(())
    }

    fn below_the_roofs(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let intensities = self.ladder.rungs.iter().map(|rung| rung.cost.intensity_flop_per_byte());
        let (low, high) =
            axis::extent(intensities.chain(self.roofs.iter().map(|roof| roof.ridge))).unwrap_or((1.0, 10.0));
        let x = Log { low: low / 2.0, high: high * 1.4, from: RIGHT.left, to: RIGHT.right };
        let reached = self.ladder.rungs.iter().map(|rung| rung.cost.flop * rung.tok_per_s / 1e12);
        let roofs = self.roofs.iter().flat_map(|roof| [x.low, x.high].map(|end| roof.flop_per_s(end) / 1e12));
        let (least, most) = axis::extent(reached.chain(roofs)).unwrap_or((1.0, 10.0));
        let y = Log { low: least / 1.4, high: most * 1.5, from: RIGHT.bottom, to: RIGHT.top };
        RIGHT.rows(canvas, &panel::log_ticks(&y))?;
        RIGHT.columns(canvas, &panel::log_ticks(&x))?;
        RIGHT.frame(canvas, "TFLOP/s reached, below the roof of the machine")?;
        RIGHT.caption(canvas, "arithmetic intensity, FLOP per byte")?;
        let note = style::text(SMALL, INK, HPos::Left, VPos::Bottom);
        for roof in &self.roofs {
            let corners = [x.low, roof.ridge, x.high].map(|at| (x.at(at), y.at(roof.flop_per_s(at) / 1e12)));
            canvas.draw(&PathElement::new(corners, INK.stroke_width(4)))?;
            let products = roof.rates.matmul_flop_per_s.unwrap_or_default() / 1e12;
            let copy = roof.rates.copy_bytes_per_s / 1e9;
            let text = format!("{}: {} TFLOP/s, {copy:.0} GB/s", roof.machine, panel::three_digits(products));
            canvas.draw_text(&text, &note, (RIGHT.left + 16, corners[2].1 - 8))?;
        }
        for (index, source) in self.ladder.sources.iter().enumerate() {
            for rung in self.ladder.rungs.iter().filter(|rung| rung.source() == *source) {
                let at = (x.at(rung.cost.intensity_flop_per_byte()), y.at(rung.cost.flop * rung.tok_per_s / 1e12));
                Look { index }.mark(canvas, at, mixer_color(rung.mixer))?;
            }
        }
        Ok(())
    }
}
