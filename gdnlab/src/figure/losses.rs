//! Loss against step.

use super::panel::{self, Linear, Panel, Tick, mixer_color, mixer_label};
use super::style::{self, FAINT, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure, axis};
use crate::model::config::Mixer;
use crate::table::rows::{distinct, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::plotters::element::DashedPathElement;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

/// Size of the figure in canvas units; right of the panel stand the names of the lines.
const WIDTH: i32 = 1560;
const HEIGHT: i32 = 860;
const PANEL: Panel = Panel { left: 130, right: 1130, top: 200, bottom: 680 };

/// Draws the losses of a table of [`crate::table::losses`] against the step: a thin line for the batches, a thick one with
/// marks for validation; a dashed line for each of `known`, a loss with its name, such as that of one who knows nothing.
/// The title says where validation ends. `footer` goes below.
///
/// # Errors
/// [`Error::Figure`] where there are fewer than two steps, [`Error::Table`] where a column is missing.
pub fn loss_curves(losses: &DataFrame, known: &[(&str, f64)], footer: &str) -> Result<Figure> {
    let curves = curves(losses)?;
    let all = || curves.iter().flat_map(Curve::losses).chain(known.iter().map(|(_, loss)| *loss));
    let steps = curves.iter().flat_map(|curve| curve.batches.iter().map(|(step, _)| *step)).fold(0.0, f64::max);
    let (Some((low, high)), true) = (axis::extent(all()), steps > 1.0) else {
        return Err(Error::Figure("no curve to draw: expected the losses of two steps at least".to_owned()));
    };
    let margin = (0.05 * (high - low)).max(0.01);
    let plot = Plot {
        x: Linear { low: 0.0, high: steps, from: PANEL.left, to: PANEL.right },
        y: Linear { low: low - margin, high: high + margin, from: PANEL.bottom, to: PANEL.top },
        curves: &curves,
        known,
    };
    let size = (WIDTH as u32 / super::DENSITY, HEIGHT as u32 / super::DENSITY);
    Figure::draw(size, plot.description(), |canvas| {
        canvas.draw_text(&plot.title(), &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        plot.legend(canvas)?;
        plot.draw(canvas)?;
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, HEIGHT - 34))
    })
}

/// The losses of one mixer: step and nats per token.
struct Curve {
    mixer: Mixer,
    batches: Vec<(f64, f64)>,
    validation: Vec<(f64, f64)>,
}

impl Curve {
    fn losses(&self) -> impl Iterator<Item = f64> {
        self.batches.iter().chain(&self.validation).map(|(_, loss)| *loss)
    }

    /// Where validation ends.
    fn end(&self) -> Option<f64> {
        self.validation.last().map(|(_, loss)| *loss)
    }
}

fn curves(table: &DataFrame) -> Result<Vec<Curve>> {
    let mixers = texts(table, "mixer")?;
    let [steps, losses, validation] = ["step", "loss", "validation"].map(|name| numbers(table, name));
    let (steps, losses, validation) = (steps?, losses?, validation?);
    let points = |mixer: &str, of: &[Option<f64>]| -> Vec<(f64, f64)> {
        let of_mixer = (0..mixers.len()).filter(|&row| mixers[row] == mixer);
        of_mixer.filter_map(|row| Some((steps[row]?, of[row]?))).collect()
    };
    distinct(mixers.iter())
        .into_iter()
        .map(|mixer| {
            let batches = points(mixer, &losses);
            Ok(Curve { mixer: mixer.parse()?, batches, validation: points(mixer, &validation) })
        })
        .collect()
}

struct Plot<'a> {
    curves: &'a [Curve],
    known: &'a [(&'a str, f64)],
    x: Linear,
    y: Linear,
}

impl Plot<'_> {
    fn ends(&self) -> String {
        let end = |curve: &Curve| Some(format!("{:.2} with {}", curve.end()?, mixer_label(curve.mixer)));
        self.curves.iter().filter_map(end).collect::<Vec<_>>().join(", ")
    }

    fn title(&self) -> String {
        if self.curves.iter().all(|curve| curve.end().is_none()) {
            return "Loss of the batches, nats per byte".to_owned();
        }
        format!("After {} steps the loss of validation is {}", self.x.high, self.ends())
    }

    fn description(&self) -> String {
        let known: Vec<String> = self.known.iter().map(|(name, loss)| format!("{name}: {loss:.2}.")).collect();
        let first = self.curves.first().and_then(|curve| curve.batches.first());
        let from = first.map_or_else(String::new, |(_, loss)| format!(" from {loss:.2} at the first step"));
        format!(
            "Loss in nats per byte over {} steps,{from}; validation ends at {}. {}",
            self.x.high,
            self.ends(),
            known.join(" ")
        )
    }

    fn legend(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let ink = style::text(LABEL, INK, HPos::Left, VPos::Center);
        let y = 104;
        canvas.draw(&PathElement::new([(40, y), (96, y)], FAINT.mix(0.6).stroke_width(3)))?;
        canvas.draw_text("batch, before the step", &ink, (110, y))?;
        let x = 110 + style::width("batch, before the step", LABEL) + 44;
        canvas.draw(&PathElement::new([(x, y), (x + 56, y)], FAINT.stroke_width(5)))?;
        canvas.draw(&Circle::new((x + 28, y), 10, FAINT.filled()))?;
        canvas.draw_text("validation, after the step", &ink, (x + 70, y))
    }

    fn draw(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let rows: Vec<Tick> =
            self.y.ticks(6).into_iter().map(|loss| (self.y.at(loss), panel::three_digits(loss))).collect();
        PANEL.rows(canvas, &rows)?;
        let columns: Vec<Tick> = self.x.ticks(6).into_iter().map(|step| (self.x.at(step), format!("{step}"))).collect();
        PANEL.labels_below(canvas, &columns)?;
        PANEL.frame(canvas, "Cross-entropy, nats per byte")?;
        PANEL.caption(canvas, "step")?;
        let mut labels: Vec<(String, RGBColor, i32)> = Vec::new();
        for (name, loss) in self.known {
            let y = self.y.at(*loss);
            canvas.draw(&DashedPathElement::new(
                vec![(PANEL.left, y), (PANEL.right, y)],
                12,
                8,
                FAINT.stroke_width(3),
            ))?;
            labels.push((format!("{name}, {loss:.2}"), FAINT, y));
        }
        for curve in self.curves {
            let color = mixer_color(curve.mixer);
            let at = |&(step, loss): &(f64, f64)| (self.x.at(step), self.y.at(loss));
            let points = |of: &[(f64, f64)]| of.iter().map(at).collect::<Vec<_>>();
            canvas.draw(&PathElement::new(points(&curve.batches), color.mix(0.45).stroke_width(3)))?;
            canvas.draw(&PathElement::new(points(&curve.validation), color.stroke_width(5)))?;
            for point in points(&curve.validation) {
                canvas.draw(&Circle::new(point, 10, color.filled()))?;
            }
            let end = curve.end().or_else(|| curve.batches.last().map(|(_, loss)| *loss));
            labels.extend(end.map(|loss| (format!("{}, {loss:.2}", mixer_label(curve.mixer)), color, self.y.at(loss))));
        }
        let wanted: Vec<i32> = labels.iter().map(|(.., y)| *y).collect();
        for ((text, color, _), y) in labels.iter().zip(panel::apart(&wanted, 32)) {
            canvas.draw_text(text, &style::text(LABEL, *color, HPos::Left, VPos::Center), (PANEL.right + 20, y))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;
    use gdnlab_deps::polars::prelude::df;

    #[test]
    fn each_mixer_has_its_curve_and_its_end() {
        let table = df!(
            "mixer" => ["attn", "attn", "attn", "gdn", "gdn", "gdn"],
            "step" => [1u32, 2, 3, 1, 2, 3],
            "loss" => [5.5, 4.0, 3.0, 5.5, 3.5, 2.5],
            "validation" => [None, Some(3.8), Some(2.9), None, Some(3.4), Some(2.4)]
        )
        .unwrap();
        let known = [("uniform over 256 bytes", 256f64.ln())];
        let figure = loss_curves(&table, &known, "the footer").unwrap();
        check(&figure, &["attention, 2.90", "GDN, 2.40", "uniform over 256 bytes, 5.55", "the footer"]);
        assert!(figure.svg().contains("After 3 steps the loss of validation is 2.90 with attention, 2.40 with GDN"));
        assert_eq!(figure.svg().matches("<circle").count(), 4 + 1);
        let says = figure.description();
        assert!(says.contains("from 5.50 at the first step; validation ends at 2.90 with attention"), "{says}");
        assert!(matches!(loss_curves(&table.head(Some(1)), &known, ""), Err(Error::Figure(_))));
        assert!(loss_curves(&table.drop("loss").unwrap(), &known, "").unwrap_err().to_string().contains("'loss'"));
    }
}
