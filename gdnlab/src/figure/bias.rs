//! Directions of errors, by tensor and by group of elements.

use super::Figure;
use super::chart::{COLORS, Chart, ChartPanel, Entry, Line, Point, linear_axis, named_axis};
use crate::bias::LEVEL;
use crate::table::rows::{distinct, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::DataFrame;

/// Kinds of groups that have an order, and how their axes are called.
const ORDERED: [(&str, &str); 3] = [
    ("position in the chunk", "eighth of the chunk"),
    ("position in the sequence", "eighth of the sequence"),
    ("magnitude", "eighth of the magnitudes, from small"),
];

/// Draws, of a table of [`crate::table::bias_tests`] or [`crate::table::recorded_biases`], the bias of each tensor in
/// `direction`, all elements together, in unit roundoffs with its 95 % interval: a colour per kernel. A mark is filled where the
/// t-test finds a direction after Holm's correction. `footer` goes below.
///
/// # Errors
/// [`Error::Table`] where a column is missing, [`Error::Figure`] where there is no such test.
pub fn bias_by_tensor(tests: &DataFrame, direction: &str, footer: &str) -> Result<Figure> {
    let rows = Row::all(tests)?;
    let wanted: Vec<&Row> = rows.iter().filter(|row| row.direction == direction && row.group == "all").collect();
    let tensors: Vec<String> = distinct(wanted.iter().map(|row| row.tensor.clone()));
    let kernels = distinct(wanted.iter().map(|row| row.kernel.as_str()));
    let spread = 0.7 / kernels.len().max(1) as f64;
    let lines = kernels.iter().enumerate().map(|(index, kernel)| Line {
        joined: false,
        points: of_kernel(&wanted, kernel, |row| {
            let tensor = tensors.iter().position(|tensor| *tensor == row.tensor)?;
            Some(tensor as f64 + (index as f64 - (kernels.len() as f64 - 1.0) / 2.0) * spread)
        }),
        ..line(index)
    });
    let panel = ChartPanel {
        x: named_axis("tensor", &tensors),
        y: linear_axis(&format!("Mean error {direction}, in unit roundoffs, with its 95 % interval"), extent(&wanted)?),
        lines: lines.collect(),
        reference: Some(0.0),
    };
    let found: Vec<String> = kernels
        .iter()
        .map(|kernel| {
            let of_kernel = || wanted.iter().filter(|row| row.kernel == *kernel);
            let biased = of_kernel().filter(|row| row.holm < LEVEL).count();
            let largest = of_kernel().map(|row| row.bias).max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap_or(0.0);
            format!("{kernel}: {biased} of {} tensors biased, the largest bias is {largest:.2e} u", of_kernel().count())
        })
        .collect();
    let clear: Vec<String> = kernels
        .iter()
        .filter_map(|kernel| {
            let biased = || wanted.iter().filter(|row| row.kernel == *kernel && row.holm < LEVEL);
            let largest = biased().map(|row| row.bias).max_by(|a, b| a.abs().total_cmp(&b.abs()))?;
            Some(format!("{kernel} in {} of {} tensors, up to {largest:.2} u", biased().count(), tensors.len()))
        })
        .collect();
    let title = match clear.as_slice() {
        [] => format!("No kernel's errors have a direction {direction}"),
        some => format!("A direction {direction}: {}; {} others in none", some.join(", "), kernels.len() - some.len()),
    };
    let description = format!("Mean signed error {direction} of each tensor. {}.", found.join("; "));
    draw(title, description, footer, &kernels, vec![panel])
}

/// Draws, of a table of [`crate::table::bias_tests`], the bias of `tensor` in `direction` by position in the chunk, by position
/// in the sequence and by magnitude of the truth. Marks as in [`bias_by_tensor`].
///
/// # Errors
/// As [`bias_by_tensor`].
pub fn bias_by_group(tests: &DataFrame, tensor: &str, direction: &str, footer: &str) -> Result<Figure> {
    let rows = Row::all(tests)?;
    let wanted: Vec<&Row> = rows
        .iter()
        .filter(|row| {
            row.direction == direction && row.tensor == tensor && ORDERED.iter().any(|(kind, _)| row.group == *kind)
        })
        .collect();
    let kernels = distinct(wanted.iter().map(|row| row.kernel.as_str()));
    let range = extent(&wanted)?;
    let panel = |(kind, caption): &(&str, &str)| {
        let of_kind: Vec<&Row> = wanted.iter().copied().filter(|row| row.group == *kind).collect();
        let parts = distinct(of_kind.iter().map(|row| row.part as usize)).len();
        let names: Vec<String> = (1..=parts).map(|part| part.to_string()).collect();
        let lines = kernels
            .iter()
            .enumerate()
            .map(|(index, kernel)| Line { points: of_kernel(&of_kind, kernel, |row| Some(row.part)), ..line(index) });
        ChartPanel {
            x: named_axis(caption, &names),
            y: linear_axis(&format!("By {kind}, in u"), range),
            lines: lines.collect(),
            reference: Some(0.0),
        }
    };
    let panels = ORDERED.iter().map(panel).collect();
    let counts: Vec<(&str, usize, usize)> = kernels
        .iter()
        .map(|kernel| {
            let of_kernel = || wanted.iter().filter(|row| row.kernel == *kernel);
            (*kernel, of_kernel().filter(|row| row.holm < LEVEL).count(), of_kernel().count())
        })
        .collect();
    let found: Vec<String> = counts.iter().map(|(kernel, biased, of)| format!("{kernel}: {biased} of {of}")).collect();
    let description = format!(
        "Mean signed error {direction} of {tensor} by position and magnitude. Groups of {tensor} with a bias {direction}: {}.",
        found.join(", ")
    );
    draw(title_of_groups(&counts, tensor), description, footer, &kernels, panels)
}

/// The kernel with the most biased groups, beside the others: names with the number of biased groups and of all.
fn title_of_groups(counts: &[(&str, usize, usize)], tensor: &str) -> String {
    let Some((kernel, biased, of)) = counts.iter().max_by_key(|(_, biased, _)| *biased) else { return String::new() };
    let others = counts.iter().filter(|(name, ..)| name != kernel).map(|(_, biased, _)| *biased).max();
    match (*biased, others) {
        (0, _) => format!("No group of {tensor} has a bias"),
        (_, None) => format!("{kernel}: {biased} of {of} groups of {tensor} have a bias"),
        (_, Some(0)) => {
            format!("{kernel}: {biased} of {of} groups of {tensor} have a bias, of the others none")
        }
        (_, Some(most)) => {
            format!("{kernel}: {biased} of {of} groups of {tensor} have a bias, of the others at most {most}")
        }
    }
}

fn draw(title: String, description: String, footer: &str, kernels: &[&str], panels: Vec<ChartPanel>) -> Result<Figure> {
    let entry = |(index, kernel): (usize, &&str)| Entry {
        label: (*kernel).to_owned(),
        color: line(index).color,
        dashed: false,
        filled: true,
        marked: true,
    };
    let legend = kernels.iter().enumerate().map(entry).collect();
    Chart { title, description, footer: format!("{footer} · filled: biased after Holm's correction"), legend, panels }
        .draw()
}

fn line(index: usize) -> Line {
    // The first two are told apart best.
    Line { color: COLORS[(index + 1) % COLORS.len()], dashed: false, joined: true, marked: true, points: Vec::new() }
}

struct Row {
    kernel: String,
    tensor: String,
    group: String,
    part: f64,
    direction: String,
    bias: f64,
    low: f64,
    high: f64,
    holm: f64,
}

impl Row {
    fn all(tests: &DataFrame) -> Result<Vec<Self>> {
        let [kernels, tensors, directions] = ["kernel", "tensor", "direction"].map(|name| texts(tests, name));
        let (kernels, tensors, directions) = (kernels?, tensors?, directions?);
        let [bias, low, high, holm] = ["bias_u", "low_u", "high_u", "t_holm"].map(|name| numbers(tests, name));
        let (bias, low, high, holm) = (bias?, low?, high?, holm?);
        // Records hold whole tensors alone.
        let groups = texts(tests, "group").unwrap_or_else(|_| vec!["all".to_owned(); kernels.len()]);
        let parts = numbers(tests, "part").unwrap_or_else(|_| vec![Some(0.0); kernels.len()]);
        let row = |at: usize| {
            Some(Self {
                kernel: kernels[at].clone(),
                tensor: tensors[at].clone(),
                group: groups[at].clone(),
                part: parts[at]?,
                direction: directions[at].clone(),
                bias: bias[at]?,
                low: low[at]?,
                high: high[at]?,
                holm: holm[at]?,
            })
        };
        Ok((0..kernels.len()).filter_map(row).collect())
    }
}

fn of_kernel(rows: &[&Row], kernel: &str, x: impl Fn(&Row) -> Option<f64>) -> Vec<Point> {
    let of_kernel = rows.iter().filter(|row| row.kernel == kernel);
    let point = |row: &&Row| {
        Some(Point { x: x(row)?, y: row.bias, interval: Some((row.low, row.high)), filled: row.holm < LEVEL })
    };
    of_kernel.filter_map(point).collect()
}

/// The smallest and the largest end of the intervals, and 0.
fn extent(rows: &[&Row]) -> Result<(f64, f64)> {
    if rows.is_empty() {
        return Err(Error::Figure("no test of a bias to draw".to_owned()));
    }
    Ok(rows.iter().fold((0.0, 0.0), |(low, high), row| (f64::min(low, row.low), f64::max(high, row.high))))
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;
    use gdnlab_deps::polars::prelude::df;

    #[test]
    fn the_title_names_the_kernel_with_the_most_biased_groups() {
        let title = |counts: &[(&str, usize, usize)]| title_of_groups(counts, "o");
        assert_eq!(title(&[("a", 0, 24), ("b", 0, 24)]), "No group of o has a bias");
        assert_eq!(title(&[("a", 23, 24), ("b", 0, 24)]), "a: 23 of 24 groups of o have a bias, of the others none");
        assert!(title(&[("a", 1, 24), ("b", 5, 24)]).ends_with("of the others at most 1"));
        assert_eq!(title(&[("a", 1, 24)]), "a: 1 of 24 groups of o have a bias");
    }

    #[test]
    fn biased_tensors_are_filled_and_named() {
        let table = df!(
            "kernel" => ["cut", "cut", "near", "near", "cut"],
            "tensor" => ["o", "dq", "o", "dq", "o"],
            "group" => ["all", "all", "all", "all", "magnitude"],
            "part" => [0u32, 0, 0, 0, 3],
            "direction" => ["outward"; 5],
            "bias_u" => [-2.0, -3.0, 0.01, -0.02, -2.5],
            "low_u" => [-2.1, -3.1, -0.1, -0.1, -2.7],
            "high_u" => [-1.9, -2.9, 0.1, 0.1, -2.3],
            "t_holm" => [1e-9, 1e-9, 1.0, 0.7, 1e-4],
        )
        .unwrap();
        let figure = bias_by_tensor(&table, "outward", "the footer").unwrap();
        check(
            &figure,
            &[
                "A direction outward: cut in 2 of 2 tensors, up to -3.00 u; 1 others in none",
                "dq",
                "the footer",
                "near",
            ],
        );
        assert!(figure.description().contains("cut: 2 of 2 tensors biased, the largest bias is -3.00e0 u"));
        let by_group = bias_by_group(&table, "o", "outward", "x").unwrap();
        check(&by_group, &["By magnitude, in u"]);
        assert!(bias_by_tensor(&table, "up", "x").is_err());
    }
}
