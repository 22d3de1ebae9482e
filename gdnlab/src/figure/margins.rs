//! Margins of tokens against what a kernel changes of them.

use super::axis::{self, Log, power_of_ten};
use super::panel::{Panel, Tick};
use super::style::{self, ACCENT, FAINT, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::table::require;
use crate::table::rows::numbers;
use crate::{Error, Result};
use gdnlab_deps::plotters::element::DashedPathElement;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::{DataFrame, DataType};

/// Size of the figure in canvas units.
const WIDTH: i32 = 1560;
const HEIGHT: i32 = 1060;
const PANEL: Panel = Panel { left: 150, right: 1500, top: 200, bottom: 880 };
/// Positions that are drawn beside those that flipped.
const DRAWN: usize = 1500;
/// Colour of a flip.
const FLIPPED: RGBColor = RGBColor(0xd5, 0x5e, 0x00);

/// Draws a table of [`crate::table::positions`]: one mark for each position, the margin between the two most likely tokens
/// against the size of its change under the kernel, both axes logarithmic. A position can flip only above the diagonal; all
/// that did stand out, of the others some 1,500 are drawn. `kernel` and the counts are the title. `footer` goes below.
///
/// # Errors
/// [`Error::Figure`] where no position has a margin and a change above 0, [`Error::Table`] where a column is missing.
pub fn margin_against_shift(positions: &DataFrame, kernel: &str, footer: &str) -> Result<Figure> {
    let points = points(positions)?;
    let (x, y) = (axis::extent(points.iter().map(|p| p.margin)), axis::extent(points.iter().map(|p| p.shift)));
    let (Some((least, most)), Some((low, high))) = (x, y) else {
        return Err(Error::Figure("no margin and change above 0 to draw".to_owned()));
    };
    // Margins of a millionth of the largest say no more than smaller ones.
    let plot = Plot {
        x: Log { low: least.max(most * 1e-6), high: most * 1.5, from: PANEL.left, to: PANEL.right },
        y: Log { low: low.max(high * 1e-5), high: high * 2.0, from: PANEL.bottom, to: PANEL.top },
        points: &points,
        kernel,
    };
    let size = (WIDTH as u32 / super::DENSITY, HEIGHT as u32 / super::DENSITY);
    Figure::draw(size, plot.description(), |canvas| {
        canvas.draw_text(&plot.title(), &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        plot.legend(canvas)?;
        plot.draw(canvas)?;
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, HEIGHT - 34))
    })
}

struct Point {
    margin: f64,
    /// Without its sign.
    shift: f64,
    flipped: bool,
}

fn points(table: &DataFrame) -> Result<Vec<Point>> {
    require(table, &["margin", "shift", "flipped"])?;
    let (margins, shifts) = (numbers(table, "margin")?, numbers(table, "shift")?);
    let flipped = table.column("flipped")?.cast(&DataType::Boolean)?;
    let flipped = flipped.bool()?;
    let point = |row: usize| {
        let (margin, shift) = (margins[row]?, shifts[row]?.abs());
        Some(Point { margin, shift, flipped: flipped.get(row)? })
            .filter(|point| point.margin > 0.0 && point.shift > 0.0)
    };
    Ok((0..margins.len()).filter_map(point).collect())
}

struct Plot<'a> {
    points: &'a [Point],
    kernel: &'a str,
    x: Log,
    y: Log,
}

impl Plot<'_> {
    fn flips(&self) -> usize {
        self.points.iter().filter(|point| point.flipped).count()
    }

    fn title(&self) -> String {
        format!("{} of {} tokens flip under {}", self.flips(), self.points.len(), self.kernel)
    }

    fn description(&self) -> String {
        let largest = self.points.iter().filter(|point| point.flipped).map(|point| point.margin).fold(0.0, f64::max);
        let beyond = self.points.iter().filter(|point| point.margin > largest).count();
        format!(
            "Margin between the two most likely tokens against its change. {}, all at margins of at most {}; {} % of the tokens have a larger one.",
            self.title(),
            axis::short(largest),
            axis::short((1000.0 * beyond as f64 / self.points.len() as f64).round() / 10.0)
        )
    }

    fn legend(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let ink = style::text(LABEL, INK, HPos::Left, VPos::Center);
        let (mut x, y) = (40, 104);
        for (color, words) in [(ACCENT, "the same token"), (FLIPPED, "another token")] {
            canvas.draw(&Circle::new((x + 10, y), 9, color.filled()))?;
            canvas.draw_text(words, &ink, (x + 32, y))?;
            x += 32 + style::width(words, LABEL) + 44;
        }
        canvas.draw(&DashedPathElement::new(vec![(x, y), (x + 56, y)], 12, 8, FAINT.stroke_width(3)))?;
        canvas.draw_text("change = margin", &ink, (x + 70, y))
    }

    fn draw(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let rows: Vec<Tick> = self.y.decades().map(|e| (self.y.at(10f64.powi(e)), power_of_ten(e))).collect();
        PANEL.rows(canvas, &rows)?;
        let columns: Vec<Tick> = self.x.decades().map(|e| (self.x.at(10f64.powi(e)), power_of_ten(e))).collect();
        PANEL.columns(canvas, &columns)?;
        PANEL.frame(canvas, "Change of the difference of the two largest logits")?;
        PANEL.caption(canvas, "difference of the two largest logits, exact")?;
        let ends = [self.x.low.max(self.y.low), self.x.high.min(self.y.high)];
        let diagonal = ends.map(|value| (self.x.at(value), self.y.at(value)));
        let step = (self.points.len() / DRAWN).max(1);
        let at = |point: &Point| (self.x.at(point.margin.max(self.x.low)), self.y.at(point.shift.max(self.y.low)));
        for point in self.points.iter().step_by(step).filter(|point| !point.flipped) {
            canvas.draw(&Circle::new(at(point), 5, ACCENT.mix(0.45).filled()))?;
        }
        canvas.draw(&DashedPathElement::new(diagonal.to_vec(), 12, 8, FAINT.stroke_width(3)))?;
        for point in self.points.iter().filter(|point| point.flipped) {
            canvas.draw(&Circle::new(at(point), 9, FLIPPED.filled()))?;
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
    fn every_flip_stands_out() {
        let table = df!(
            "margin" => [2.0, 0.5, 1e-3, 2e-4, 0.0],
            "shift" => [1e-2, -2e-3, -5e-3, 1e-3, 1e-3],
            "flipped" => [false, false, true, false, false]
        )
        .unwrap();
        let figure = margin_against_shift(&table, "cpu-chunk-bf16", "the footer").unwrap();
        check(&figure, &["another token", "the footer"]);
        assert!(figure.svg().contains("1 of 4 tokens flip under cpu-chunk-bf16"));
        assert!(figure.description().contains("at most 1.0·10⁻³; 50 % of the tokens"), "{}", figure.description());
        assert_eq!(figure.svg().matches("<circle").count(), 2 + 4);
        assert!(matches!(margin_against_shift(&table.head(Some(0)), "", ""), Err(Error::Figure(_))));
    }
}
