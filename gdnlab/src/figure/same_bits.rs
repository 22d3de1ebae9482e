//! Which kernels gave the same bits in which check.

use super::style::{self, FAINT, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::table::rows::{distinct, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

const LEFT: i32 = 480;
const TOP: i32 = 170;
const CELL: (i32, i32) = (270, 62);
/// Colours of cells whose runs agree and differ.
const SAME: RGBColor = RGBColor(0xbf, 0xe6, 0xd8);
const OTHER: RGBColor = RGBColor(0xf3, 0xc4, 0xa5);
const EMPTY: RGBColor = RGBColor(0xf2, 0xf2, 0xf2);

/// Draws, of a table of [`crate::table::determinism`], a row per kernel and a column per check: in how many runs every bit was
/// that of the first run. `footer` goes below.
///
/// # Errors
/// [`Error::Table`] where a column is missing, [`Error::Figure`] where the table is empty.
pub fn same_bits(table: &DataFrame, footer: &str) -> Result<Figure> {
    let (kernels, checks) = (texts(table, "kernel")?, texts(table, "check")?);
    let (runs, differing) = (numbers(table, "runs")?, numbers(table, "differing_runs")?);
    let (rows, columns) = (distinct(kernels.iter()), distinct(checks.iter()));
    if rows.is_empty() {
        return Err(Error::Figure("no check of a kernel to draw".to_owned()));
    }
    let cell = |kernel: &str, check: &str| {
        let at = (0..kernels.len()).find(|&at| kernels[at] == kernel && checks[at] == check)?;
        Some((runs[at]?, differing[at]?))
    };
    let differ = (0..kernels.len()).filter(|&at| differing[at].is_some_and(|runs| runs > 0.0));
    let differ: Vec<String> = differ.map(|at| format!("{} by {}", kernels[at], checks[at])).collect();
    let all: f64 = runs.iter().flatten().sum();
    let title = match differ.len() {
        0 => format!("The same bits in all of {all} runs"),
        some => format!("Other bits in {some} of {} checks", kernels.len()),
    };
    let description = match differ.is_empty() {
        true => format!("Runs of each kernel that were compared with a first one, by check. {title}."),
        false => format!(
            "Runs of each kernel that were compared with a first one, by check. {title}: {}.",
            differ.join(", ")
        ),
    };
    let (width, height) = (LEFT + CELL.0 * columns.len() as i32 + 40, TOP + CELL.1 * rows.len() as i32 + 90);
    Figure::draw((width as u32 / super::DENSITY, height as u32 / super::DENSITY), description, |canvas| {
        canvas.draw_text(&title, &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        for (row, kernel) in rows.iter().enumerate() {
            let y = TOP + CELL.1 * row as i32;
            let name = style::text(LABEL, INK, HPos::Right, VPos::Center);
            canvas.draw_text(kernel, &name, (LEFT - 20, y + CELL.1 / 2))?;
            for (column, check) in columns.iter().enumerate() {
                draw_cell(canvas, (LEFT + CELL.0 * column as i32, y), cell(kernel, check))?;
            }
        }
        for (column, check) in columns.iter().enumerate() {
            let name = style::text(LABEL, INK, HPos::Center, VPos::Center);
            canvas.draw_text(check, &name, (LEFT + CELL.0 * column as i32 + CELL.0 / 2, TOP - 30))?;
        }
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, height - 34))
    })
}

fn draw_cell(canvas: &Canvas<'_>, (x, y): (i32, i32), cell: Option<(f64, f64)>) -> Result<(), DrawError> {
    let (color, words) = match cell {
        None => (EMPTY, "–".to_owned()),
        Some((runs, 0.0)) => (SAME, format!("same in {runs}")),
        Some((runs, differing)) => (OTHER, format!("other in {differing} of {runs}")),
    };
    canvas.draw(&Rectangle::new([(x + 2, y + 2), (x + CELL.0 - 2, y + CELL.1 - 2)], color.filled()))?;
    let ink = style::text(SMALL, INK, HPos::Center, VPos::Center);
    canvas.draw_text(&words, &ink, (x + CELL.0 / 2, y + CELL.1 / 2))
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;
    use gdnlab_deps::polars::prelude::df;

    #[test]
    fn checks_that_differ_stand_out_and_those_not_made_are_empty() {
        let table = |differing: u32| {
            df!("kernel" => ["a", "a", "b"], "check" => ["launches", "packing", "launches"],
                "runs" => [100u32, 6, 100], "differing_runs" => [0u32, differing, 0])
            .unwrap()
        };
        let figure = same_bits(&table(2), "the footer").unwrap();
        check(&figure, &["Other bits in 1 of 3 checks", "other in 2 of 6", "same in 100", "–", "the footer"]);
        assert!(figure.description().contains("a by packing"));
        check(&same_bits(&table(0), "x").unwrap(), &["The same bits in all of 206 runs"]);
        assert!(same_bits(&table(0).head(Some(0)), "").is_err());
    }
}
