//! The roofline of a machine, and every timed kernel below it.

use super::axis::{self, Log};
use super::chart::COLORS;
use super::panel::three_digits;
use super::speed::PASSES;
use super::style::{self, FAINT, FRAME, GRID, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::bench::roofline::{COPY_BANDWIDTH, DataSheet, Products};
use crate::table::Mode;
use crate::table::rows::{distinct, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::plotters::element::DashedPathElement;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

/// Size of the figure, and the edges of its panel, in canvas units.
const WIDTH: i32 = 1920;
const HEIGHT: i32 = 1240;
const LEFT: i32 = 150;
const RIGHT: i32 = 1560;
const TOP: i32 = 200;
const BOTTOM: i32 = 1060;
/// Distance of labels at the right edge.
const LINE: i32 = 30;
/// What is neither a forward nor a backward pass, such as a colour of the legend.
const OTHER: &str = "";
/// Parts of the roof that are drawn as lines below it.
const PARTS: [f64; 3] = [0.5, 0.2, 0.1];

/// Draws, in FLOP/s over FLOPs per byte, both logarithmic: the roof of `machine`, which is the copy bandwidth as a slope and
/// the rates of products as ceilings, solid where they were measured and dashed by the data sheet; every kernel of
/// `timings`, a table of [`crate::table::timings`], as a filled mark; and its peer as a hollow one. The rates are those of
/// `machine` in `rooflines`, a table of [`crate::table::rooflines`]. `footer` goes below.
///
/// # Errors
/// [`Error::Figure`] where `machine` has no copy bandwidth in `rooflines` or no ceiling is known, [`Error::Table`] where a
/// column is missing.
pub fn roofline(timings: &DataFrame, rooflines: &DataFrame, machine: &str, footer: &str) -> Result<Figure> {
    let points = points(timings, machine)?;
    let roof = Roof::of(rooflines, machine)?;
    let plot = Plot::new(&points, &roof, machine);
    let size = (WIDTH as u32 / super::DENSITY, HEIGHT as u32 / super::DENSITY);
    Figure::draw(size, plot.description(), |canvas| {
        plot.headings(canvas)?;
        plot.axes(canvas)?;
        plot.parts(canvas)?;
        plot.roof(canvas)?;
        plot.marks(canvas)?;
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, HEIGHT - 34))
    })
}

/// A timed kernel.
#[derive(Clone, Debug, PartialEq)]
struct Point {
    kernel: String,
    pass: String,
    products: Products,
    flop_per_byte: f64,
    tflop_s: f64,
    peer: Option<(String, f64)>,
}

fn points(timings: &DataFrame, machine: &str) -> Result<Vec<Point>> {
    let [machines, kernels, modes, passes, peers] =
        ["machine", "kernel", "mode", "pass", "peer"].map(|name| texts(timings, name));
    let (machines, kernels, modes, passes, peers) = (machines?, kernels?, modes?, passes?, peers?);
    let (intensities, rates) = (numbers(timings, "flop_per_byte")?, numbers(timings, "tflop_s")?);
    let peer_rates = numbers(timings, "peer_tflop_s")?;
    let point = |row: usize| {
        Some(Point {
            kernel: kernels[row].clone(),
            pass: passes[row].clone(),
            products: Products::of(Mode::of(&modes[row]).format),
            flop_per_byte: intensities[row]?,
            tflop_s: rates[row]?,
            peer: peer_rates[row].map(|rate| (peers[row].clone(), rate)),
        })
    };
    // What a peer did in a row of its own is the hollow mark of ours already.
    let is_wanted = |&row: &usize| machines[row] == machine && !peers.contains(&kernels[row]);
    Ok((0..timings.height()).filter(is_wanted).filter_map(point).collect())
}

/// A ceiling in TFLOP/s.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ceiling {
    products: Products,
    measured: Option<f64>,
    theoretical: Option<f64>,
}

impl Ceiling {
    /// The measured rate, or else the data sheet's.
    fn tflop_s(&self) -> Option<f64> {
        self.measured.or(self.theoretical)
    }

    fn name(&self) -> &'static str {
        match self.products {
            Products::Bf16 => "bf16",
            Products::Fp16 => "fp16",
            Products::Tf32 => "TF32",
            Products::Fp32 => "fp32",
            Products::Fp64 => "fp64",
        }
    }
}

/// What a machine allows.
struct Roof {
    copy_gb_s: f64,
    theoretical_gb_s: Option<f64>,
    /// Those with a rate, the highest first.
    ceilings: Vec<Ceiling>,
    /// The one that the slope ends at: the highest that was measured, or else the highest.
    top: Ceiling,
}

impl Roof {
    fn of(rooflines: &DataFrame, machine: &str) -> Result<Self> {
        let (machines, quantities) = (texts(rooflines, "machine")?, texts(rooflines, "quantity")?);
        let (measured, units) = (numbers(rooflines, "measured")?, texts(rooflines, "unit")?);
        let rate = |quantity: &str, unit: &str| {
            let same = |row: &usize| machines[*row] == machine && quantities[*row] == quantity && units[*row] == unit;
            (0..rooflines.height()).find(same).and_then(|row| measured[row])
        };
        let sheet = DataSheet::of(machine);
        let copy_gb_s = rate(COPY_BANDWIDTH, "GB/s").ok_or_else(|| {
            let known = distinct(machines.iter().map(String::as_str)).join(", ");
            Error::Figure(format!("no {COPY_BANDWIDTH} of '{machine}' among the rates, which are of {known}"))
        })?;
        let ceiling = |products: Products| Ceiling {
            products,
            measured: rate(products.quantity(), "TFLOP/s"),
            theoretical: sheet.and_then(|sheet| sheet.matmul_tflop_s(products)),
        };
        let mut ceilings: Vec<Ceiling> =
            Products::ALL.map(ceiling).into_iter().filter(|ceiling| ceiling.tflop_s().is_some()).collect();
        ceilings.sort_by(|a, b| b.tflop_s().unwrap_or(0.0).total_cmp(&a.tflop_s().unwrap_or(0.0)));
        let top = ceilings.iter().find(|ceiling| ceiling.measured.is_some()).or(ceilings.first()).copied();
        let top = top.ok_or_else(|| {
            Error::Figure(format!("no rate of products of '{machine}' is measured or on a data sheet"))
        })?;
        Ok(Self { copy_gb_s, theoretical_gb_s: sheet.map(|sheet| sheet.memory_gb_s), ceilings, top })
    }

    /// The ceiling that the slope ends at, in TFLOP/s.
    fn top_tflop_s(&self) -> f64 {
        self.top.tflop_s().unwrap_or(f64::NAN)
    }

    /// What the machine allows at an intensity, with products of this kind: `min(I copy, products)`, in TFLOP/s.
    fn tflop_s(&self, flop_per_byte: f64, products: Products) -> f64 {
        let ceiling = self.ceilings.iter().find(|ceiling| ceiling.products == products);
        let ceiling = ceiling.and_then(Ceiling::tflop_s).unwrap_or_else(|| self.top_tflop_s());
        ceiling.min(flop_per_byte * self.copy_gb_s / 1e3)
    }
}

struct Plot<'a> {
    points: &'a [Point],
    roof: &'a Roof,
    machine: &'a str,
    kernels: Vec<String>,
    x: Log,
    y: Log,
}

impl<'a> Plot<'a> {
    fn new(points: &'a [Point], roof: &'a Roof, machine: &'a str) -> Self {
        let ridge = 1e3 * roof.top_tflop_s() / roof.copy_gb_s;
        let intensities = points.iter().map(|point| point.flop_per_byte).chain([ridge / 6.0, ridge]);
        let (low, high) = axis::extent(intensities).unwrap_or((ridge / 6.0, ridge));
        let x = Log { low: low / 1.5, high: high * 2.5, from: LEFT, to: RIGHT };
        let lowest_ceiling = roof.ceilings.iter().filter_map(Ceiling::tflop_s);
        let rates = points.iter().flat_map(|point| [Some(point.tflop_s), point.peer.as_ref().map(|peer| peer.1)]);
        let (low, high) = axis::extent(rates.flatten().chain(lowest_ceiling)).unwrap_or((1.0, roof.top_tflop_s()));
        let y = Log { low: low / 1.8, high: high.max(roof.top_tflop_s()) * 1.9, from: BOTTOM, to: TOP };
        Self { points, roof, machine, kernels: distinct(points.iter().map(|point| point.kernel.clone())), x, y }
    }

    /// The part of the roof that points reach: the smallest and the largest.
    fn reached<'b>(&self, rates: impl Iterator<Item = (&'b Point, f64)>) -> Option<(f64, f64)> {
        axis::extent(rates.map(|(point, rate)| rate / self.roof.tflop_s(point.flop_per_byte, point.products)))
    }

    fn title(&self) -> String {
        let ours = self.reached(self.points.iter().map(|point| (point, point.tflop_s)));
        let peers = self.points.iter().filter_map(|point| Some((point, point.peer.as_ref()?.1)));
        let words = |(low, high): (f64, f64)| {
            let [low, high] = [low, high].map(|part| format!("{:.0}", 100.0 * part));
            if low == high { format!("{low} %") } else { format!("{low} to {high} %") }
        };
        match (ours, self.reached(peers)) {
            (None, _) => format!("The roofline of {}", self.machine),
            (Some(ours), None) => format!("{}: kernels reach {} of their roofs", self.machine, words(ours)),
            (Some(ours), Some(peers)) => format!(
                "{}: kernels reach {} of their roofs, their fastest peers {}",
                self.machine,
                words(ours),
                words(peers)
            ),
        }
    }

    fn description(&self) -> String {
        let ceilings = self.roof.ceilings.iter().filter_map(|ceiling| {
            let origin = if ceiling.measured.is_some() { "measured" } else { "by the data sheet" };
            Some(format!("{} {} TFLOP/s {origin}", ceiling.name(), three_digits(ceiling.tflop_s()?)))
        });
        format!(
            "Roofline of {}: copies at {} GB/s; products in {}. {}.",
            self.machine,
            three_digits(self.roof.copy_gb_s),
            ceilings.collect::<Vec<_>>().join(", "),
            self.title()
        )
    }

    fn headings(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        canvas.draw_text(&self.title(), &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        let peers = distinct(self.points.iter().filter_map(|point| point.peer.as_ref().map(|peer| peer.0.as_str())));
        let colors = self.kernels.iter().map(|kernel| (OTHER, self.color(kernel), true, kernel.clone()));
        let words =
            |pass: &str| PASSES.iter().find(|(name, _)| *name == pass).map_or(pass, |(_, words)| words).to_owned();
        let passes = distinct(self.points.iter().map(|point| point.pass.as_str()));
        let shapes = passes.into_iter().map(|pass| (pass, FAINT, true, words(pass)));
        let hollow = (!peers.is_empty())
            .then(|| ("fwd", FAINT, false, format!("hollow: the fastest peer ({})", peers.join(", "))));
        let label = style::text(LABEL, INK, HPos::Left, VPos::Center);
        let (mut x, mut y) = (52, 96);
        for (pass, color, filled, words) in colors.chain(shapes).chain(hollow) {
            let width = 24 + style::width(&words, LABEL);
            if x + width > WIDTH - 20 && x > 52 {
                (x, y) = (52, y + 40);
            }
            shape(canvas, pass, color, (x, y), filled)?;
            canvas.draw_text(&words, &label, (x + 24, y))?;
            x += width + 48;
        }
        Ok(())
    }

    fn axes(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let ticks = style::text(SMALL, FAINT, HPos::Center, VPos::Center);
        for tick in axis::ticks_125(self.x.low, self.x.high) {
            let x = self.x.at(tick);
            canvas.draw(&PathElement::new([(x, TOP), (x, BOTTOM)], GRID.stroke_width(1)))?;
            canvas.draw_text(&three_digits(tick), &ticks, (x, BOTTOM + 28))?;
        }
        let ticks = style::text(SMALL, FAINT, HPos::Right, VPos::Center);
        for tick in axis::ticks_125(self.y.low, self.y.high) {
            let y = self.y.at(tick);
            canvas.draw(&PathElement::new([(LEFT, y), (RIGHT, y)], GRID.stroke_width(1)))?;
            canvas.draw_text(&three_digits(tick), &ticks, (LEFT - 14, y))?;
        }
        canvas.draw(&PathElement::new([(LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)], FRAME.stroke_width(2)))?;
        let caption = style::text(LABEL, INK, HPos::Center, VPos::Center);
        canvas.draw_text("arithmetic intensity, FLOP/byte", &caption, ((LEFT + RIGHT) / 2, BOTTOM + 74))?;
        let caption = caption.transform(FontTransform::Rotate270);
        canvas.draw_text("achieved, TFLOP/s", &caption, (44, (TOP + BOTTOM) / 2))
    }

    /// Where the slope of `gb_s` and the ceiling of `tflop_s` begin in the panel, meet, and end. A ceiling so low that
    /// they meet left of the panel begins at its edge.
    fn line(&self, gb_s: f64, tflop_s: f64) -> Vec<(i32, i32)> {
        let start = self.x.low.max(1e3 * self.y.low / gb_s);
        let ridge = (1e3 * tflop_s / gb_s).max(self.x.low);
        let at = |intensity: f64, rate: f64| (self.x.at(intensity), self.y.at(rate));
        vec![at(start, start * gb_s / 1e3), at(ridge, tflop_s), at(self.x.high, tflop_s)]
    }

    /// Lines at parts of the roof.
    fn parts(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let note = style::text(SMALL - 2, FAINT, HPos::Right, VPos::Bottom);
        for part in PARTS {
            let line = self.line(part * self.roof.copy_gb_s, part * self.roof.top_tflop_s());
            if self.y.low > part * self.roof.top_tflop_s() {
                continue;
            }
            let end = line[2];
            canvas.draw(&DashedPathElement::new(line, 5, 9, FRAME.stroke_width(2)))?;
            canvas.draw_text(&format!("{:.0} % of the roof", 100.0 * part), &note, (end.0 - 8, end.1 - 4))?;
        }
        Ok(())
    }

    fn roof(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        if let Some((gb_s, tflop_s)) = self.roof.theoretical_gb_s.zip(self.roof.top.theoretical) {
            let line = self.line(gb_s, tflop_s);
            canvas.draw(&DashedPathElement::new(line, 14, 9, FAINT.stroke_width(3)))?;
            let words = format!("data sheet: {} GB/s, {} TFLOP/s", three_digits(gb_s), three_digits(tflop_s));
            let note = style::text(SMALL, FAINT, HPos::Right, VPos::Bottom);
            canvas.draw_text(&words, &note, (RIGHT, self.y.at(tflop_s) - 8))?;
        }
        for ceiling in self.roof.ceilings.iter().filter(|ceiling| **ceiling != self.roof.top) {
            let Some(tflop_s) = ceiling.tflop_s() else { continue };
            let line = self.line(self.roof.copy_gb_s, tflop_s)[1..].to_vec();
            match ceiling.measured {
                Some(_) => canvas.draw(&PathElement::new(line, INK.mix(0.7).stroke_width(3)))?,
                None => canvas.draw(&DashedPathElement::new(line, 14, 9, FAINT.stroke_width(3)))?,
            }
        }
        let line = self.line(self.roof.copy_gb_s, self.roof.top_tflop_s());
        let ridge = line[1];
        canvas.draw(&PathElement::new(line[..2].to_vec(), INK.stroke_width(5)))?;
        if self.roof.top.measured.is_some() {
            canvas.draw(&PathElement::new(line[1..].to_vec(), INK.stroke_width(5)))?;
        }
        let copy = format!("copy {} GB/s", three_digits(self.roof.copy_gb_s));
        // Left of the line, above that of the data sheet, and inside of the panel.
        let places = [0.4, 0.5, 0.6, 0.7, 0.8].map(|part| along(&line, part));
        let inside = |place: &&(i32, i32)| place.0 - 10 - style::width(&copy, LABEL) > LEFT;
        let place = places.iter().find(inside).unwrap_or(&places[4]);
        canvas.draw_text(&copy, &style::text(LABEL, INK, HPos::Right, VPos::Bottom), (place.0 - 10, place.1 - 36))?;
        canvas.draw(&DashedPathElement::new(vec![ridge, (ridge.0, BOTTOM)], 4, 8, INK.stroke_width(2)))?;
        let words =
            format!("ridge point: {} FLOP/byte", three_digits(1e3 * self.roof.top_tflop_s() / self.roof.copy_gb_s));
        canvas.draw_text(&words, &style::text(SMALL, INK, HPos::Left, VPos::Bottom), (ridge.0 + 8, BOTTOM - 8))?;
        self.ceiling_labels(canvas)
    }

    /// Names of the ceilings at the right, moved apart where two are close.
    fn ceiling_labels(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let note = style::text(SMALL - 2, FAINT, HPos::Left, VPos::Center);
        canvas.draw_text("measured, part of the data sheet", &note, (RIGHT + 12, TOP))?;
        let mut free = TOP;
        for ceiling in &self.roof.ceilings {
            let Some(tflop_s) = ceiling.tflop_s() else { continue };
            let y = self.y.at(tflop_s).max(free + LINE);
            free = y;
            let part = ceiling.measured.zip(ceiling.theoretical).map(|(measured, theoretical)| measured / theoretical);
            let words = match part {
                Some(part) => format!("{} {} TFLOP/s, {:.0} %", ceiling.name(), three_digits(tflop_s), 100.0 * part),
                None if ceiling.measured.is_some() => format!("{} {} TFLOP/s", ceiling.name(), three_digits(tflop_s)),
                None => format!("{} {}, data sheet", ceiling.name(), three_digits(tflop_s)),
            };
            canvas.draw_text(&words, &style::text(SMALL, INK, HPos::Left, VPos::Center), (RIGHT + 12, y))?;
        }
        Ok(())
    }

    fn marks(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let at = |intensity: f64, rate: f64| (self.x.at(intensity), self.y.at(rate));
        for point in self.points {
            if let Some((_, rate)) = &point.peer {
                shape(canvas, &point.pass, self.color(&point.kernel), at(point.flop_per_byte, *rate), false)?;
            }
        }
        for point in self.points {
            shape(canvas, &point.pass, self.color(&point.kernel), at(point.flop_per_byte, point.tflop_s), true)?;
        }
        Ok(())
    }

    /// A colour for each kernel, as long as there are some.
    fn color(&self, kernel: &str) -> RGBColor {
        COLORS[self.kernels.iter().position(|known| known == kernel).unwrap_or(0) % COLORS.len()]
    }
}

/// A circle for a forward pass, a triangle for a backward pass, a square for others.
fn shape(canvas: &Canvas<'_>, pass: &str, color: RGBColor, (x, y): (i32, i32), filled: bool) -> Result<(), DrawError> {
    let outline = match pass {
        "fwd" => {
            canvas.draw(&Circle::new((x, y), 11, if filled { color.filled() } else { WHITE.filled() }))?;
            return canvas.draw(&Circle::new((x, y), 11, if filled { WHITE } else { color }.stroke_width(3)));
        }
        "bwd" => vec![(x, y - 13), (x + 13, y + 10), (x - 13, y + 10), (x, y - 13)],
        _ => vec![(x - 10, y - 10), (x + 10, y - 10), (x + 10, y + 10), (x - 10, y + 10), (x - 10, y - 10)],
    };
    canvas.draw(&Polygon::new(outline.clone(), if filled { color.filled() } else { WHITE.filled() }))?;
    canvas.draw(&PathElement::new(outline, if filled { WHITE } else { color }.stroke_width(3)))
}

/// The point of the first stretch of `line` at this part of its way.
fn along(line: &[(i32, i32)], part: f64) -> (i32, i32) {
    let between = |from: i32, to: i32| from + (part * f64::from(to - from)).round() as i32;
    (between(line[0].0, line[1].0), between(line[0].1, line[1].1))
}

#[cfg(test)]
#[path = "roofline_tests.rs"]
mod tests;
