//! How far trainings are from one another, step by step.

use super::Figure;
use super::axis;
use super::chart::{Axis, COLORS, Chart, ChartPanel, Entry, Line, Point, Scale, log_axis};
use crate::table::rows::{distinct, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::DataFrame;

/// What is drawn: the column, and its name above the panel.
const PANELS: [(&str, &str); 2] = [
    ("log_probability", "RMS difference of log probabilities, nats"),
    ("parameters", "Distance of parameters over distance trained"),
];

/// Draws, of a table of [`crate::table::apart`], the distance of each training from the first against the step, both on
/// logarithmic axes. Trainings in `seeds`, which differ in the seed, are dashed and hollow; the others, which differ in the
/// kernel, solid and filled. `footer` goes below.
///
/// # Errors
/// [`Error::Table`] where a column is missing, [`Error::Figure`] where no distance is positive.
pub fn trainings_apart(apart: &DataFrame, seeds: &[&str], footer: &str) -> Result<Figure> {
    let (names, steps) = (texts(apart, "training")?, numbers(apart, "step")?);
    let trainings = distinct(names.iter().map(String::as_str));
    let (first, last) = axis::extent(steps.iter().copied().flatten())
        .ok_or_else(|| Error::Figure("no distance between trainings to draw".to_owned()))?;
    let mut panels = Vec::new();
    let mut ends: Vec<(&str, f64)> = Vec::new();
    for (column, caption) in PANELS {
        let distances = numbers(apart, column)?;
        let (low, high) = axis::extent(distances.iter().copied().flatten())
            .ok_or_else(|| Error::Figure(format!("no positive distance in the column {column}")))?;
        let lines = trainings.iter().enumerate().map(|(index, training)| {
            let rows = (0..names.len()).filter(|&row| names[row] == *training);
            let point = |row: usize| {
                let y = distances[row].filter(|distance| *distance > 0.0)?;
                Some(Point { x: steps[row]?, y, interval: None, filled: !seeds.contains(training) })
            };
            Line { points: rows.filter_map(point).collect(), ..style_of(index, training, seeds) }
        });
        let lines: Vec<Line> = lines.collect();
        if column == PANELS[0].0 {
            let both = trainings.iter().zip(&lines);
            ends = both.filter_map(|(name, line)| Some((*name, line.points.last()?.y))).collect();
        }
        let ticks = axis::ticks_125(first, last).into_iter().map(|step| (step, step.to_string())).collect();
        panels.push(ChartPanel {
            x: Axis { scale: Scale::Log(first / 1.2, last * 1.2), caption: "steps".to_owned(), ticks },
            y: log_axis(caption, (low / 2.0, high * 2.0)),
            lines,
            reference: None,
        });
    }
    let entry = |(index, training): (usize, &&str)| {
        let Line { color, dashed, .. } = style_of(index, training, seeds);
        Entry { label: (*training).to_owned(), color, dashed, filled: !dashed, marked: true }
    };
    let words: Vec<String> = ends.iter().map(|(name, end)| format!("{name}: {end:.1e}")).collect();
    Chart {
        title: title(&ends, seeds, last),
        description: format!(
            "Distance of trainings from the first one. After {last} steps the RMS difference of log probabilities is, in nats, {}.",
            words.join("; ")
        ),
        footer: footer.to_owned(),
        legend: trainings.iter().enumerate().map(entry).collect(),
        panels,
    }
    .draw()
}

fn style_of(index: usize, training: &str, seeds: &[&str]) -> Line {
    let is_seed = seeds.contains(&training);
    let nth = seeds.iter().position(|seed| *seed == training).unwrap_or_default();
    let color = if is_seed { style_seed(nth) } else { COLORS[index % COLORS.len()] };
    Line { color, dashed: is_seed, joined: true, marked: true, points: Vec::new() }
}

/// Trainings from other seeds are told apart by their shade.
fn style_seed(index: usize) -> gdnlab_deps::plotters::prelude::RGBColor {
    let shade = (0x33 + 0x40 * index.min(3)) as u8;
    gdnlab_deps::plotters::prelude::RGBColor(shade, shade, shade)
}

/// What the ends of the lines say: the furthest kernel beside the nearest seed.
fn title(ends: &[(&str, f64)], seeds: &[&str], last: f64) -> String {
    let of = |is_seed: bool| ends.iter().filter(move |(name, _)| seeds.contains(name) == is_seed).copied();
    let nearest_seed = of(true).min_by(|a, b| a.1.total_cmp(&b.1));
    let furthest_kernel = of(false).max_by(|a, b| a.1.total_cmp(&b.1));
    match nearest_seed.zip(furthest_kernel) {
        Some(((seed, at), (kernel, to))) => {
            format!("After {last} steps {kernel} has moved the model {} times as far as {seed}", axis::short(to / at))
        }
        None => "Distance of trainings from the first one".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;
    use gdnlab_deps::polars::prelude::df;

    #[test]
    fn seeds_and_kernels_have_a_line_each() {
        let table = df!(
            "training" => ["bf16", "bf16", "bf16", "other data", "other data", "other data"],
            "step" => [1u32, 10, 100, 1, 10, 100],
            "log_probability" => [1e-4, 1e-3, 1e-2, 1e-2, 1e-1, 1.0],
            "parameters" => [0.0, 1e-3, 1e-2, 0.5, 0.5, 0.6],
        )
        .unwrap();
        let figure = trainings_apart(&table, &["other data"], "the footer").unwrap();
        check(
            &figure,
            &[
                "After 100 steps bf16 has moved the model 0.010 times as far as other data",
                "steps",
                "the footer",
                "10⁻³",
            ],
        );
        assert!(figure.description().contains("bf16: 1.0e-2; other data: 1.0e0"), "{}", figure.description());
        assert!(trainings_apart(&table.head(Some(0)), &[], "").is_err());
    }
}
