//! By how much GDN kernels are faster than other people's.

use super::axis::{self, Log};
use super::panel::{Panel, Tick, log_ticks};
use super::speed::{PASSES, color_of};
use super::style::{self, ACCENT, FAINT, GRID, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::table::OURS;
use crate::table::rows::{distinct, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

const WIDTH: i32 = 1920;
/// Edges of the panel, the height of a bar's row, and the distance between two passes.
const LEFT: i32 = 470;
const RIGHT: i32 = 1700;
const TOP: i32 = 190;
const ROW_HEIGHT: i32 = 50;
const GAP: i32 = 64;

/// The libraries in the order of the legend.
const LIBRARIES: [&str; 3] = ["FlashQLA", "FlashInfer", "fla"];

/// A row of bars.
struct Bar {
    pass: String,
    model: String,
    rows: u32,
    best: f64,
    span: (f64, f64),
    /// Each library's mean.
    peers: Vec<(&'static str, f64)>,
}

/// Draws a table of [`crate::table::gdn_speedups`]: a bar for each pass and model, right of 1 where ours is faster than the
/// fastest library in the geometric mean over its rows and left of it where it is slower; a line from the worst to the
/// best row; and a dot for the mean against each library. The factor stands at the right. `footer` goes below.
///
/// # Errors
/// [`Error::Figure`] where there is no row, [`Error::Table`] where a column is missing.
pub fn speed_up_bars(speedups: &DataFrame, footer: &str) -> Result<Figure> {
    let bars = bars(speedups)?;
    let values = bars.iter().flat_map(|bar| {
        [bar.best, bar.span.0, bar.span.1, 1.0].into_iter().chain(bar.peers.iter().map(|(_, mean)| *mean))
    });
    let (low, high) = axis::extent(values).ok_or_else(|| {
        Error::Figure(format!("no time of {OURS} beside one of a library: expected rows of both on one machine"))
    })?;
    let passes = distinct(bars.iter().map(|bar| bar.pass.clone()));
    let bottom = TOP + bars.len() as i32 * ROW_HEIGHT + (passes.len() as i32 - 1) * GAP;
    let scale = Log { low: low / 1.15, high: high * 1.15, from: LEFT, to: RIGHT };
    let height = bottom + 170;
    let title = bar_title(&bars);
    let describe = |bar: &Bar| format!("{} {}: {:.2} ({} rows)", bar.pass, bar.model, bar.best, bar.rows);
    let description = format!("Speed-ups. {title}. {}.", bars.iter().map(describe).collect::<Vec<_>>().join(", "));
    Figure::draw((WIDTH as u32 / super::DENSITY, height as u32 / super::DENSITY), description, |canvas| {
        canvas.draw_text(&title, &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        bar_legend(canvas)?;
        let panel = Panel { left: LEFT, right: RIGHT, top: TOP, bottom };
        let ticks: Vec<Tick> = log_ticks(&scale).into_iter().map(|(at, words)| (at, format!("×{words}"))).collect();
        panel.columns(canvas, &ticks)?;
        canvas.draw(&PathElement::new([(scale.at(1.0), TOP), (scale.at(1.0), bottom)], INK.stroke_width(3)))?;
        panel.caption(canvas, &format!("time of the library over that of {OURS}: right of ×1 {OURS} is faster"))?;
        let heading = style::text(SMALL, FAINT, HPos::Right, VPos::Center);
        canvas.draw_text("rows", &heading, (RIGHT + 190, TOP - 26))?;
        let mut y = TOP;
        for (index, bar) in bars.iter().enumerate() {
            if index > 0 && bars[index - 1].pass != bar.pass {
                y += GAP;
            }
            bar.draw(canvas, &scale, y + ROW_HEIGHT / 2)?;
            y += ROW_HEIGHT;
        }
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, height - 34))
    })
}

fn bars(table: &DataFrame) -> Result<Vec<Bar>> {
    let (passes, models) = (texts(table, "pass")?, texts(table, "model")?);
    let (rows, best) = (numbers(table, "rows")?, numbers(table, "best")?);
    let (least, most) = (numbers(table, "least")?, numbers(table, "most")?);
    let peers = LIBRARIES.iter().map(|&name| Ok((name, numbers(table, name)?))).collect::<Result<Vec<_>>>()?;
    let bar = |at: usize| {
        Some(Bar {
            pass: PASSES.iter().find(|(pass, _)| *pass == passes[at]).map_or("", |(_, words)| words).to_owned(),
            model: models[at].clone(),
            rows: rows[at]? as u32,
            best: best[at]?,
            span: (least[at]?, most[at]?),
            peers: peers.iter().filter_map(|(name, means)| Some((*name, means[at]?))).collect(),
        })
    };
    Ok((0..table.height()).filter_map(bar).collect())
}

/// The time of the best library over ours in each pass.
fn bar_title(bars: &[Bar]) -> String {
    let part = |bar: &Bar| format!("{} ×{:.2} ({} rows)", bar.pass, bar.best, bar.rows);
    let parts: Vec<String> = bars.iter().filter(|bar| bar.model == "all").map(part).collect();
    format!("The best library's time over {OURS}'s: {}", parts.join(", "))
}

fn bar_legend(canvas: &Canvas<'_>) -> Result<(), DrawError> {
    let ink = style::text(LABEL, INK, HPos::Left, VPos::Center);
    let y = 104;
    canvas.draw(&Rectangle::new([(44, y - 12), (88, y + 12)], ACCENT.filled()))?;
    let words = "against the fastest in each row (pale: slower), span over rows";
    canvas.draw_text(words, &ink, (104, y))?;
    let mut x = 104 + style::width(words, LABEL) + 50;
    for name in LIBRARIES {
        canvas.draw(&Circle::new((x, y), 10, color_of(name).filled()))?;
        canvas.draw_text(name, &ink, (x + 22, y))?;
        x += 22 + style::width(name, LABEL) + 44;
    }
    Ok(())
}

impl Bar {
    fn draw(&self, canvas: &Canvas<'_>, scale: &Log, y: i32) -> Result<(), DrawError> {
        let is_all = self.model == "all";
        let color = if self.best >= 1.0 { ACCENT } else { style::mix(ACCENT, WHITE, 0.5) };
        let half = if is_all { 17 } else { 12 };
        let (one, at) = (scale.at(1.0), scale.at(self.best));
        canvas.draw(&Rectangle::new([(one.min(at), y - half), (one.max(at), y + half)], color.filled()))?;
        let span = [(scale.at(self.span.0), y), (scale.at(self.span.1), y)];
        canvas.draw(&PathElement::new(span, INK.stroke_width(3)))?;
        for (x, _) in span {
            canvas.draw(&PathElement::new([(x, y - 8), (x, y + 8)], INK.stroke_width(3)))?;
        }
        for (name, mean) in &self.peers {
            canvas.draw(&Circle::new((scale.at(*mean), y), 9, WHITE.filled()))?;
            canvas.draw(&Circle::new((scale.at(*mean), y), 8, color_of(name).filled()))?;
        }
        let name = if is_all { format!("{}, all", self.pass) } else { self.model.clone() };
        let text = |size, color, side| {
            if is_all {
                style::bold(size, color, side, VPos::Center)
            } else {
                style::text(size, color, side, VPos::Center)
            }
        };
        canvas.draw_text(&name, &text(LABEL, INK, HPos::Right), (LEFT - 24, y))?;
        canvas.draw_text(&format!("×{:.2}", self.best), &text(LABEL, INK, HPos::Right), (RIGHT + 110, y))?;
        canvas.draw_text(
            &format!("{}", self.rows),
            &style::text(SMALL, FAINT, HPos::Right, VPos::Center),
            (RIGHT + 190, y),
        )?;
        if is_all {
            let line = [(40, y + ROW_HEIGHT / 2), (WIDTH - 40, y + ROW_HEIGHT / 2)];
            canvas.draw(&PathElement::new(line, GRID.stroke_width(2)))?;
        }
        Ok(())
    }
}
