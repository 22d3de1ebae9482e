//! Flips of tokens against the error of the recurrence.

use super::axis::{self, Log, power_of_ten};
use super::panel::{self, Panel, Tick};
use super::style::{self, ACCENT, FAINT, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::table::rows::{numbers, texts};
use crate::table::{Mode, require};
use crate::{Error, Result};
use gdnlab_deps::plotters::element::DashedPathElement;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

/// Size of the figure in canvas units; right of the panel stand the names of the kernels.
const WIDTH: i32 = 1720;
const HEIGHT: i32 = 900;
const PANEL: Panel = Panel { left: 150, right: 1180, top: 200, bottom: 720 };
/// Name of the mode of noise.
const NOISE: &str = "noise";

/// Draws a table of [`crate::table::token_flips`]: the share of tokens that flip against the error of the recurrence's output,
/// each with its 95 % interval, both axes logarithmic. Noise of known size is a line of small marks, kernels are large ones in
/// the colour of their mode. `tolerance`, a table of [`crate::table::token_tolerance`], gives the dashed line of proportion;
/// its row of 0.1 % is the title. `footer` goes below.
///
/// # Errors
/// [`Error::Figure`] where no row has an error above 0, [`Error::Table`] where a column is missing.
pub fn flips_by_error(flips: &DataFrame, tolerance: &DataFrame, footer: &str) -> Result<Figure> {
    let points = points(flips)?;
    let range = |of: fn(&Point) -> [f64; 2]| axis::extent(points.iter().flat_map(of));
    let (Some((least, most)), Some((low, high))) = (range(|p| [p.error; 2]), range(|p| [p.high, p.low])) else {
        return Err(Error::Figure("no error above 0 to draw flips against".to_owned()));
    };
    // What nobody saw flip has an upper end alone, and is drawn down to the floor.
    let floor = points.iter().filter(|p| p.rate > 0.0).map(|p| p.rate).fold(high, f64::min).max(low / 10.0) / 2.0;
    let plot = Plot {
        x: Log { low: least / 1.6, high: most * 1.6, from: PANEL.left, to: PANEL.right },
        y: Log { low: floor, high: (high * 1.5).min(100.0), from: PANEL.bottom, to: PANEL.top },
        slope: slope(tolerance)?,
        points: &points,
    };
    let size = (WIDTH as u32 / super::DENSITY, HEIGHT as u32 / super::DENSITY);
    Figure::draw(size, plot.description(), |canvas| {
        canvas.draw_text(&plot.title(), &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        plot.legend(canvas)?;
        plot.draw(canvas)?;
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, HEIGHT - 34))
    })
}

/// A row; rates in percent.
struct Point {
    kernel: String,
    mode: String,
    error: f64,
    rate: f64,
    low: f64,
    high: f64,
}

fn points(table: &DataFrame) -> Result<Vec<Point>> {
    let (kernels, modes) = (texts(table, "kernel")?, texts(table, "mode")?);
    let [errors, rates, lows, highs] = ["error", "flip_pct", "low_pct", "high_pct"].map(|name| numbers(table, name));
    let (errors, rates, lows, highs) = (errors?, rates?, lows?, highs?);
    let point = |row: usize| {
        Some(Point {
            kernel: kernels[row].clone(),
            mode: modes[row].clone(),
            error: errors[row].filter(|error| *error > 0.0)?,
            rate: rates[row]?,
            low: lows[row]?,
            high: highs[row]?,
        })
    };
    Ok((0..kernels.len()).filter_map(point).collect())
}

/// Percent of flips per unit of error, and the error of 0.1 %.
fn slope(tolerance: &DataFrame) -> Result<Option<(f64, f64)>> {
    require(tolerance, &["flip_pct", "error"])?;
    let rows = numbers(tolerance, "flip_pct")?.into_iter().zip(numbers(tolerance, "error")?);
    let mut known = rows.filter_map(|(rate, error)| Some((rate?, error?)));
    Ok(known.find(|(rate, _)| (rate - 0.1).abs() < 1e-9).map(|(rate, error)| (rate / error, error)))
}

struct Plot<'a> {
    points: &'a [Point],
    slope: Option<(f64, f64)>,
    x: Log,
    y: Log,
}

impl Plot<'_> {
    fn title(&self) -> String {
        match self.slope {
            Some((_, error)) => format!("One token in a thousand flips at an error of {}", axis::short(error)),
            None => "No token flipped".to_owned(),
        }
    }

    fn description(&self) -> String {
        let kernels = self.points.iter().filter(|point| point.mode != NOISE);
        let words = kernels.map(|point| {
            format!("{}: {} % at an error of {}", point.kernel, axis::short(point.rate), axis::short(point.error))
        });
        format!(
            "Share of tokens whose most likely successor is another, against the relative error of the recurrence. {}. {}.",
            self.title(),
            words.collect::<Vec<_>>().join("; ")
        )
    }

    fn legend(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let ink = style::text(LABEL, INK, HPos::Left, VPos::Center);
        let (mut x, y) = (40, 104);
        canvas.draw(&Circle::new((x + 10, y), 8, FAINT.filled()))?;
        let noise = "noise of that size added to the exact output";
        canvas.draw_text(noise, &ink, (x + 34, y))?;
        x += 34 + style::width(noise, LABEL) + 40;
        canvas.draw(&Circle::new((x + 10, y), 12, ACCENT.filled()))?;
        canvas.draw_text("a kernel; bars: 95 % interval", &ink, (x + 34, y))?;
        x += 34 + style::width("a kernel; bars: 95 % interval", LABEL) + 40;
        canvas.draw(&DashedPathElement::new(vec![(x, y), (x + 56, y)], 12, 8, FAINT.stroke_width(3)))?;
        canvas.draw_text("in proportion", &ink, (x + 70, y))
    }

    fn draw(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let rows: Vec<Tick> = self.y.decades().map(|e| (self.y.at(10f64.powi(e)), percent(e))).collect();
        PANEL.rows(canvas, &rows)?;
        let columns: Vec<Tick> = self.x.decades().map(|e| (self.x.at(10f64.powi(e)), power_of_ten(e))).collect();
        PANEL.columns(canvas, &columns)?;
        PANEL.frame(canvas, "Tokens that flip")?;
        PANEL.caption(canvas, "relative error of the recurrence's output, median over rows")?;
        if let Some((slope, _)) = self.slope {
            // The part of the line that lies in the panel.
            let low = self.x.low.max(self.y.low / slope);
            let high = self.x.high.min(self.y.high / slope);
            let end = |error: f64| (self.x.at(error), self.y.at(error * slope));
            canvas.draw(&DashedPathElement::new(vec![end(low), end(high)], 12, 8, FAINT.stroke_width(3)))?;
        }
        let mut labels: Vec<(String, RGBColor, i32)> = Vec::new();
        for point in self.points {
            let is_noise = point.mode == NOISE;
            let color = if is_noise { FAINT } else { style::color_of(&Mode::of(&point.mode)) };
            let at = |rate: f64| (self.x.at(point.error), self.y.at(rate.max(self.y.low)));
            canvas.draw(&PathElement::new([at(point.low), at(point.high)], color.stroke_width(3)))?;
            let (center, size) = (at(point.rate), if is_noise { 8 } else { 12 });
            if point.rate > 0.0 {
                canvas.draw(&Circle::new(center, size, color.filled()))?;
            } else {
                canvas.draw(&Circle::new(center, size, WHITE.filled()))?;
                canvas.draw(&Circle::new(center, size, color.stroke_width(4)))?;
            }
            if !is_noise {
                labels.push((format!("{}, {} %", point.kernel, axis::short(point.rate)), color, center.1));
            }
        }
        let wanted: Vec<i32> = labels.iter().map(|(.., y)| *y).collect();
        for ((text, color, _), y) in labels.iter().zip(panel::apart(&wanted, 34)) {
            canvas.draw_text(text, &style::text(LABEL, *color, HPos::Left, VPos::Center), (PANEL.right + 24, y))?;
        }
        Ok(())
    }
}

/// A power of ten as percent: `0.01 %`.
fn percent(exponent: i32) -> String {
    if exponent >= -3 { format!("{} %", 10f64.powi(exponent)) } else { format!("{} %", power_of_ten(exponent)) }
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;
    use gdnlab_deps::polars::prelude::df;

    #[test]
    fn kernels_stand_on_the_line_of_noise() {
        let flips = df!(
            "kernel" => ["noise 1e-3", "noise 1e-2", "cpu-chunk-bf16", "cpu-chunk-fp32"],
            "mode" => ["noise", "noise", "bf16", "fp32"],
            "error" => [1e-3, 1e-2, 4e-3, 1e-6],
            "flip_pct" => [0.05, 0.5, 0.2, 0.0],
            "low_pct" => [0.03, 0.45, 0.16, 0.0],
            "high_pct" => [0.08, 0.56, 0.25, 0.01]
        )
        .unwrap();
        let tolerance = df!("flip_pct" => [1.0, 0.1], "error" => [2e-2, 2e-3]).unwrap();
        let figure = flips_by_error(&flips, &tolerance, "the footer").unwrap();
        check(&figure, &["cpu-chunk-bf16, 0.20 %", "cpu-chunk-fp32, 0 %", "the footer"]);
        assert!(figure.svg().contains("One token in a thousand flips at an error of 2.0·10⁻³"));
        assert!(figure.description().contains("cpu-chunk-bf16: 0.20 % at an error of 4.0·10⁻³"));
        let none = df!("flip_pct" => Vec::<f64>::new(), "error" => Vec::<f64>::new()).unwrap();
        assert!(flips_by_error(&flips, &none, "").unwrap().svg().contains("No token flipped"));
        assert!(matches!(flips_by_error(&flips.head(Some(0)), &tolerance, ""), Err(Error::Figure(_))));
        assert!(flips_by_error(&flips.drop("error").unwrap(), &tolerance, "").is_err());
    }
}
