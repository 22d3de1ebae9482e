//! What panels with two axes are drawn from: scales, frames with ticks, lines, marks, and labels that keep apart.

use super::axis::Log;
use super::style::{self, FAINT, FRAME, GRID, INK, LABEL, SMALL};
use super::{Canvas, DrawError};
use crate::model::config::Mixer;
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};

/// A scale from `low` at position `from` to `high` at position `to`, in canvas units, with equal steps.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    pub low: f64,
    pub high: f64,
    pub from: i32,
    pub to: i32,
}

impl Linear {
    /// Where `value` stands.
    pub fn at(&self, value: f64) -> i32 {
        let along = (value - self.low) / (self.high - self.low);
        self.from + (along * f64::from(self.to - self.from)).round() as i32
    }

    /// Round values from end to end, about `count` of them.
    pub fn ticks(&self, count: u32) -> Vec<f64> {
        let rough = (self.high - self.low) / f64::from(count.max(1));
        let unit = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|m| m * unit).find(|step| *step >= rough * 0.999);
        let step = step.unwrap_or(10.0 * unit);
        let first = (self.low / step - 1e-9).ceil() as i64;
        let last = (self.high / step + 1e-9).floor() as i64;
        (first..=last).map(|n| n as f64 * step).collect()
    }
}

/// Edges of a panel in canvas units.
#[derive(Clone, Copy, Debug)]
pub struct Panel {
    pub left: i32,
    pub right: i32,
    pub top: i32,
    pub bottom: i32,
}

/// Position along an axis and label.
pub type Tick = (i32, String);

impl Panel {
    /// Grid lines with labels at the left.
    pub fn rows(&self, canvas: &Canvas<'_>, ticks: &[Tick]) -> Result<(), DrawError> {
        let label = style::text(SMALL, FAINT, HPos::Right, VPos::Center);
        for (y, text) in ticks {
            canvas.draw(&PathElement::new([(self.left, *y), (self.right, *y)], GRID.stroke_width(2)))?;
            canvas.draw_text(text, &label, (self.left - 12, *y))?;
        }
        Ok(())
    }

    /// Grid lines with labels below.
    pub fn columns(&self, canvas: &Canvas<'_>, ticks: &[Tick]) -> Result<(), DrawError> {
        for (x, _) in ticks {
            canvas.draw(&PathElement::new([(*x, self.top), (*x, self.bottom)], GRID.stroke_width(2)))?;
        }
        self.labels_below(canvas, ticks)
    }

    /// Labels below, without grid lines.
    pub fn labels_below(&self, canvas: &Canvas<'_>, ticks: &[Tick]) -> Result<(), DrawError> {
        let label = style::text(SMALL, FAINT, HPos::Center, VPos::Center);
        ticks.iter().try_for_each(|(x, text)| canvas.draw_text(text, &label, (*x, self.bottom + 26)))
    }

    /// The left and the lower axis, and the panel's title above.
    pub fn frame(&self, canvas: &Canvas<'_>, title: &str) -> Result<(), DrawError> {
        let Self { left, right, top, bottom } = *self;
        canvas.draw(&PathElement::new([(left, top), (left, bottom), (right, bottom)], FRAME.stroke_width(2)))?;
        canvas.draw_text(title, &style::bold(LABEL, INK, HPos::Left, VPos::Center), (left, top - 34))
    }

    /// The caption of the horizontal axis.
    pub fn caption(&self, canvas: &Canvas<'_>, caption: &str) -> Result<(), DrawError> {
        let ink = style::text(LABEL, INK, HPos::Center, VPos::Center);
        canvas.draw_text(caption, &ink, ((self.left + self.right) / 2, self.bottom + 70))
    }
}

/// How a source stands out: the first, which is published or a baseline, is thin and hollow; those after it are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Position among the sources.
    pub index: usize,
}

impl Look {
    /// Draws a mark at a point.
    pub fn mark(self, canvas: &Canvas<'_>, (x, y): (i32, i32), color: RGBColor) -> Result<(), DrawError> {
        let corners = |r: i32| [(x, y - r), (x + r, y), (x, y + r), (x - r, y), (x, y - r)];
        match self.index {
            0 => {
                canvas.draw(&Circle::new((x, y), 9, WHITE.filled()))?;
                canvas.draw(&Circle::new((x, y), 9, color.stroke_width(4)))
            }
            1 => canvas.draw(&Circle::new((x, y), 10, color.filled())),
            2 => canvas.draw(&Rectangle::new([(x - 9, y - 9), (x + 9, y + 9)], color.filled())),
            _ => canvas.draw(&Polygon::new(corners(13), color.filled())),
        }
    }

    /// Draws a line through points.
    pub fn line(self, canvas: &Canvas<'_>, points: Vec<(i32, i32)>, color: RGBColor) -> Result<(), DrawError> {
        match self.index {
            0 => canvas.draw(&PathElement::new(points, color.mix(0.6).stroke_width(3))),
            _ => canvas.draw(&PathElement::new(points, color.stroke_width(5))),
        }
    }
}

/// Colour of a mixer, told apart by colour-blind readers.
pub fn mixer_color(mixer: Mixer) -> RGBColor {
    match mixer {
        Mixer::Attention => style::ACCENT,
        Mixer::Gdn => RGBColor(0xd5, 0x5e, 0x00),
    }
}

/// Name of a mixer for a reader.
pub fn mixer_label(mixer: Mixer) -> &'static str {
    match mixer {
        Mixer::Attention => "attention",
        Mixer::Gdn => "GDN",
    }
}

/// One line of a legend: a colour for each of `mixers`, then a mark for each of `sources`.
pub fn legend(
    canvas: &Canvas<'_>,
    mixers: &[Mixer],
    sources: &[String],
    (mut x, y): (i32, i32),
) -> Result<(), DrawError> {
    let ink = style::text(LABEL, INK, HPos::Left, VPos::Center);
    for &mixer in mixers {
        canvas.draw(&Rectangle::new([(x, y - 5), (x + 44, y + 5)], mixer_color(mixer).filled()))?;
        canvas.draw_text(mixer_label(mixer), &ink, (x + 58, y))?;
        x += 58 + style::width(mixer_label(mixer), LABEL) + 44;
    }
    x += 16;
    for (index, source) in sources.iter().enumerate() {
        let look = Look { index };
        look.line(canvas, vec![(x, y), (x + 56, y)], FAINT)?;
        look.mark(canvas, (x + 28, y), FAINT)?;
        canvas.draw_text(source, &ink, (x + 70, y))?;
        x += 70 + style::width(source, LABEL) + 44;
    }
    Ok(())
}

/// Positions near `wanted` that keep `gap` from each other, in the order of `wanted`: what would overlap is moved apart
/// around its middle.
pub fn apart(wanted: &[i32], gap: i32) -> Vec<i32> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by_key(|&index| wanted[index]);
    // Groups of neighbours at equal distances, each with the sum of where its members would have its first one.
    let mut groups: Vec<(i64, Vec<usize>)> = Vec::new();
    let first = |(sum, members): &(i64, Vec<usize>)| sum.div_euclid(members.len() as i64) as i32;
    for index in order {
        let mut group = (i64::from(wanted[index]), vec![index]);
        while let Some(before) = groups.pop() {
            let length = before.1.len() as i32;
            if first(&before) + gap * length <= first(&group) {
                groups.push(before);
                break;
            }
            let shift = i64::from(gap * length) * group.1.len() as i64;
            group = (before.0 + group.0 - shift, [before.1, group.1].concat());
        }
        groups.push(group);
    }
    let mut placed = vec![0; wanted.len()];
    for group in &groups {
        for (position, &index) in group.1.iter().enumerate() {
            placed[index] = first(group) + gap * position as i32;
        }
    }
    placed
}

/// Ticks of a logarithmic axis at 1, 2 and 5 times the powers of ten.
pub fn log_ticks(scale: &Log) -> Vec<Tick> {
    super::axis::ticks_125(scale.low, scale.high).into_iter().map(|tick| (scale.at(tick), thousands(tick))).collect()
}

/// A number as ticks and notes have it: `0.5`, `200`, `20k`, `1.5M`.
pub fn thousands(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        size if size >= 999_500.0 => (value / 1e6, "M"),
        size if size >= 9_999.5 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    format!("{}{unit}", three_digits(scaled))
}

/// A whole number with a comma between each three digits: `16,384`.
pub fn grouped(value: usize) -> String {
    let digits = value.to_string();
    let comma = |(index, digit): (usize, char)| {
        let before = if index > 0 && (digits.len() - index).is_multiple_of(3) { "," } else { "" };
        format!("{before}{digit}")
    };
    digits.chars().enumerate().map(comma).collect()
}

/// A number with at most three significant digits and no zeros at its end: `12.9`, `0.5`, `200`.
pub fn three_digits(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    let decimals = (2.0 - value.abs().log10().floor()).clamp(0.0, 6.0) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// The smallest and the largest of `values` as words: `62 to 66`, or `62` where both are written the same.
pub fn span(values: impl Iterator<Item = f64>, write: impl Fn(f64) -> String) -> Option<String> {
    let (low, high) = super::axis::extent(values)?;
    let (low, high) = (write(low), write(high));
    Some(if low == high { low } else { format!("{low} to {high}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_ticks_are_round_and_reach_both_ends() {
        let scale = |low, high| Linear { low, high, from: 0, to: 100 };
        assert_eq!(scale(0.0, 50.0).ticks(5), [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]);
        assert_eq!(scale(2.3, 5.6).ticks(4), [3.0, 4.0, 5.0]);
        assert_eq!(scale(0.0, 1000.0).ticks(4), [0.0, 250.0, 500.0, 750.0, 1000.0]);
        assert_eq!([0.0, 25.0, 50.0].map(|value| scale(0.0, 50.0).at(value)), [0, 50, 100]);
    }

    #[test]
    fn labels_keep_apart_and_in_order() {
        assert_eq!(apart(&[10, 100], 20), [10, 100]);
        assert_eq!(apart(&[50, 50], 20), [40, 60]);
        assert_eq!(apart(&[100, 0, 95, 99], 20), [118, 0, 78, 98]);
        assert!(apart(&[], 20).is_empty());
        // The group that moves apart pushes a third one.
        let placed = apart(&[50, 52, 70], 20);
        assert!(placed.windows(2).all(|pair| pair[1] - pair[0] >= 20), "{placed:?}");
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in
            [(77_546.0, "77.5k"), (1e6, "1M"), (999_600.0, "1M"), (0.5, "0.5"), (1234.0, "1234"), (12.94, "12.9")]
        {
            assert_eq!(thousands(value), text);
        }
        let whole = |value: f64| format!("{value:.0}");
        assert_eq!(span([66.4, 62.1].into_iter(), whole).unwrap(), "62 to 66");
        assert_eq!(span([66.4, 66.1].into_iter(), whole).unwrap(), "66");
        assert_eq!(span(std::iter::empty(), whole), None);
    }
}
