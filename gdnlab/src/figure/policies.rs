//! What each policy keeps and how far it errs: the front between bytes and accuracy.

use super::axis::{Log, extent};
use super::panel::{Linear, Panel, Tick, log_ticks, three_digits};
use super::rounding::format_color;
use super::style::{self, ACCENT, FAINT, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::precision::Format;
use crate::table::format_label;
use crate::table::rows::{distinct, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::plotters::element::DashedPathElement;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

const WIDTH: i32 = 1920;
const HEIGHT: i32 = 1000;
const LEFT: i32 = 130;
const RIGHT: i32 = 1880;
const TOP: i32 = 210;
const BOTTOM: i32 = 800;
const GAP: i32 = 150;

/// How policies are told apart: by the formats that they keep, as [`crate::table::policies`] names them, and a colour.
const KINDS: [(&str, Format); 3] =
    [("bf16 and fp32", Format::Bf16), ("bf16 and fp16", Format::F16), ("fp16 and fp32", Format::F32)];
/// Share of a panel left of the cheapest policies, for their names.
const NAMES: f64 = 0.47;

/// Draws, of a table of [`crate::table::policies`], a panel per write form: a dot for each policy at its bytes per token and
/// head and its error in percent, a line along the front, and a dashed line at `threshold_pct`. What `proposals`, the table of
/// [`crate::table::proposals`], names is marked. `footer` goes below.
///
/// # Errors
/// [`Error::Table`] where a column is missing, [`Error::Figure`] without policies.
pub fn bytes_and_errors(
    policies: &DataFrame,
    proposals: &DataFrame,
    threshold_pct: f64,
    footer: &str,
) -> Result<Figure> {
    let dots = dots(policies)?;
    let marks = marks(proposals)?;
    let finite = || dots.iter().filter(|dot| dot.error_pct.is_finite());
    let (low, high) = extent(finite().map(|dot| dot.error_pct).chain([threshold_pct]))
        .filter(|_| finite().next().is_some())
        .ok_or_else(|| Error::Figure("no policy with an error to draw".to_owned()))?;
    let plot = Plot {
        forms: distinct(dots.iter().map(|dot| dot.form.clone())),
        y: Log { low: low / 1.25, high: high * 1.25, from: BOTTOM, to: TOP },
        tensors: distinct(dots.iter().map(|dot| dot.tensor.clone())),
        dots: &dots,
        marks: &marks,
        threshold_pct,
    };
    let title = plot.title();
    Figure::draw((WIDTH as u32 / super::DENSITY, HEIGHT as u32 / super::DENSITY), plot.description(&title), |canvas| {
        canvas.draw_text(&title, &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        plot.legend(canvas)?;
        for index in 0..plot.forms.len() {
            plot.panel(canvas, index)?;
        }
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, HEIGHT - 34))
    })
}

struct Dot {
    form: String,
    formats: String,
    bytes: f64,
    error_pct: f64,
    tensor: String,
    on_front: bool,
}

fn dots(table: &DataFrame) -> Result<Vec<Dot>> {
    let [form, formats, tensor] = ["form", "formats", "tensor"].map(|name| texts(table, name));
    let (form, formats, tensor) = (form?, formats?, tensor?);
    let (bytes, errors) = (numbers(table, "bytes")?, numbers(table, "error_pct")?);
    crate::table::require(table, &["on_front"])?;
    let front = table.column("on_front")?.bool()?;
    let dot = |row: usize| Dot {
        form: form[row].clone(),
        formats: formats[row].clone(),
        bytes: bytes[row].unwrap_or(f64::NAN),
        error_pct: errors[row].unwrap_or(f64::INFINITY),
        tensor: tensor[row].clone(),
        on_front: front.get(row) == Some(true),
    };
    Ok((0..table.height()).map(dot).collect())
}

/// A proposal that exists.
struct Mark {
    form: String,
    proposal: String,
    changed: String,
    bytes: f64,
    more_bytes_pct: f64,
    error_pct: f64,
}

fn marks(table: &DataFrame) -> Result<Vec<Mark>> {
    let [form, proposal, changed] = ["form", "proposal", "changed"].map(|name| texts(table, name));
    let (form, proposal, changed) = (form?, proposal?, changed?);
    let [bytes, more, errors] = ["bytes", "more_bytes_pct", "error_pct"].map(|name| numbers(table, name));
    let (bytes, more, errors) = (bytes?, more?, errors?);
    let mark = |row: usize| {
        Some(Mark {
            form: form[row].clone(),
            proposal: proposal[row].clone(),
            changed: changed[row].clone(),
            bytes: bytes[row]?,
            more_bytes_pct: more[row]?,
            error_pct: errors[row]?,
        })
    };
    Ok((0..table.height()).filter_map(mark).collect())
}

struct Plot<'a> {
    forms: Vec<String>,
    tensors: Vec<String>,
    y: Log,
    dots: &'a [Dot],
    marks: &'a [Mark],
    threshold_pct: f64,
}

impl Plot<'_> {
    /// The price of the cheapest policies that meet the threshold, in bytes more than bf16.
    fn title(&self) -> String {
        let price = |kind: &&str| {
            let of_kind = self.marks.iter().filter(|mark| mark.proposal == format!("cheapest with {kind}"));
            let cheapest = of_kind.min_by(|a, b| a.bytes.total_cmp(&b.bytes))?;
            Some(match cheapest.more_bytes_pct {
                more if more < 0.05 => format!("no more bytes with {kind}"),
                more => format!("{more:.0} % more bytes with {kind}"),
            })
        };
        let prices: Vec<String> = ["fp32", "fp16"].iter().filter_map(price).collect();
        let threshold = three_digits(self.threshold_pct);
        if prices.is_empty() {
            format!("No policy meets {threshold} %")
        } else {
            format!("Within {threshold} %: {}", prices.join(", "))
        }
    }

    fn description(&self, title: &str) -> String {
        let of_mark = |mark: &Mark| {
            format!(
                "{}, {}: {}, {:.0} bytes, {:.2} %",
                mark.form, mark.proposal, mark.changed, mark.bytes, mark.error_pct
            )
        };
        format!(
            "Bytes per token and head that {} policies keep, and their error. {title}. {}.",
            self.dots.len(),
            self.marks.iter().map(of_mark).collect::<Vec<_>>().join("; ")
        )
    }

    fn legend(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let ink = style::text(LABEL, INK, HPos::Left, VPos::Center);
        let (mut x, y) = (54, 104);
        for (kind, format) in KINDS {
            canvas.draw(&Circle::new((x, y), 9, format_color(format).filled()))?;
            canvas.draw_text(kind, &ink, (x + 24, y))?;
            x += 24 + style::width(kind, LABEL) + 56;
        }
        canvas.draw(&PathElement::new([(x, y), (x + 50, y)], INK.stroke_width(3)))?;
        canvas.draw_text("most accurate for its bytes", &ink, (x + 64, y))
    }

    fn panel(&self, canvas: &Canvas<'_>, index: usize) -> Result<(), DrawError> {
        let pitch = (RIGHT - LEFT + GAP) / self.forms.len() as i32;
        let left = LEFT + pitch * index as i32;
        let panel = Panel { left, right: left + pitch - GAP, top: TOP, bottom: BOTTOM };
        let of_form = || self.dots.iter().filter(|dot| dot.form == self.forms[index]);
        let (low, high) = extent(of_form().map(|dot| dot.bytes)).unwrap_or((1.0, 2.0));
        let range = (high - low).max(1.0) / (1.0 - NAMES);
        let x = Linear { low: low - NAMES * range, high: high + 0.05 * range, from: panel.left, to: panel.right };
        let ticks = x.ticks(6).into_iter().filter(|tick| *tick >= low - 0.1 * range);
        let ticks: Vec<Tick> = ticks.map(|tick| (x.at(tick), format!("{tick:.0}"))).collect();
        panel.columns(canvas, &ticks)?;
        panel.rows(canvas, &log_ticks(&self.y))?;
        let tensors = match self.tensors.as_slice() {
            [one] => one.clone(),
            _ => "the worst gradient".to_owned(),
        };
        panel.frame(canvas, &format!("{} form: relative RMS error of {tensors}, %", self.forms[index]))?;
        panel.caption(canvas, "bytes kept per token and head")?;
        let at = self.y.at(self.threshold_pct);
        canvas.draw(&DashedPathElement::new([(panel.left, at), (panel.right, at)], 14, 10, ACCENT.stroke_width(4)))?;
        let note = style::text(SMALL, ACCENT, HPos::Left, VPos::Bottom);
        let allowed = format!("allowed: {} %", three_digits(self.threshold_pct));
        canvas.draw_text(&allowed, &note, (panel.left + 10, at - 6))?;
        for dot in of_form().filter(|dot| dot.error_pct.is_finite()) {
            let is_of = |(kind, format): &&(&str, Format)| *kind == dot.formats || format_label(*format) == dot.formats;
            let color = KINDS.iter().find(is_of).map_or(FAINT, |(_, format)| format_color(*format));
            let center = (x.at(dot.bytes), self.y.at(dot.error_pct));
            canvas.draw(&Circle::new(center, 7, color.mix(0.8).filled()))?;
        }
        let mut front: Vec<&Dot> = of_form().filter(|dot| dot.on_front).collect();
        front.sort_by(|a, b| a.bytes.total_cmp(&b.bytes));
        let line: Vec<(i32, i32)> = front.iter().map(|dot| (x.at(dot.bytes), self.y.at(dot.error_pct))).collect();
        canvas.draw(&PathElement::new(line, INK.stroke_width(3)))?;
        self.label(canvas, &panel, &x, &self.forms[index])
    }

    /// Rings around the proposals of a form, and their names: left of them where nothing is cheaper, else below.
    fn label(&self, canvas: &Canvas<'_>, panel: &Panel, x: &Linear, form: &str) -> Result<(), DrawError> {
        let of_form = || self.marks.iter().filter(|mark| mark.form == form);
        let least = of_form().map(|mark| mark.bytes).fold(f64::INFINITY, f64::min);
        for mark in of_form() {
            let at = (x.at(mark.bytes), self.y.at(mark.error_pct));
            canvas.draw(&Circle::new(at, 15, INK.stroke_width(4)))?;
            let changed = if mark.changed == "nothing" { "all in bf16" } else { &mark.changed };
            let label = format!("{changed}: {:.2}", mark.error_pct);
            let left = at.0 - 28;
            if mark.bytes > least {
                let half = style::width(&label, SMALL) / 2;
                let place = (at.0.min(panel.right - half), at.1 + 38);
                canvas.draw_text(&label, &style::text(SMALL, INK, HPos::Center, VPos::Center), place)?;
            } else {
                canvas.draw_text(&label, &style::text(SMALL, INK, HPos::Right, VPos::Center), (left, at.1))?;
            }
        }
        Ok(())
    }
}
