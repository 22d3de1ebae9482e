//! How far two implementations are apart, beside what was published, and who of the two is nearer to the truth.

use super::axis::{self, Log, power_of_ten};
use super::panel::{self, Panel, Tick};
use super::style::{self, ACCENT, FAINT, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::problem::Op;
use crate::table::rows::{distinct, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

/// Size of the figure without its rows, and height of a row, in canvas units.
const WIDTH: i32 = 1800;
const HEIGHT: i32 = 420;
const ROW_HEIGHT: i32 = 46;
const LEFT: i32 = 760;
const RIGHT: i32 = 1740;
const TOP: i32 = 200;

/// Draws the largest difference of each pair, `max_diff`, a row per pair and length: those of `published` (a table of
/// [`crate::table::published_backends`]) hollow, those of `pairs` (of [`crate::table::backends`]) filled. Only the output `o`
/// of GDN is drawn. The title says by what factor the largest published difference exceeds the largest of `pairs` at its length.
/// `footer` goes below.
///
/// # Errors
/// [`Error::Figure`] where there is no difference above 0 in one of them, [`Error::Table`] where a column is missing.
pub fn backend_differences(pairs: &DataFrame, published: &DataFrame, footer: &str) -> Result<Figure> {
    let ours = rows(pairs, |table| {
        let (kernels, against) = (texts(table, "kernel")?, texts(table, "against")?);
        let names = kernels.iter().zip(&against).map(|(a, b)| format!("{a} | {b}"));
        let is_gdn = texts(table, "op")?.into_iter().map(|op| op == Op::Gdn.name());
        Ok(names.zip(is_gdn).map(|(name, is_gdn)| is_gdn.then_some(name)).collect())
    })?;
    let theirs = rows(published, |table| {
        let (who, device) = (texts(table, "who")?, texts(table, "device")?);
        Ok(who.iter().zip(&device).map(|(who, device)| Some(format!("{who}, FlashQLA | fla on {device}"))).collect())
    })?;
    let all: Vec<(&Row, bool)> =
        theirs.iter().map(|row| (row, true)).chain(ours.iter().map(|row| (row, false))).collect();
    let Some((low, high)) = axis::extent(all.iter().map(|(row, _)| row.max_diff)) else {
        return Err(Error::Figure("no difference above 0 to draw".to_owned()));
    };
    let lengths = distinct(all.iter().map(|(row, _)| row.tokens));
    let title = title(&ours, &theirs).ok_or_else(|| {
        Error::Figure("no length at which both a published and a measured difference stand".to_owned())
    })?;
    let count = all.len() as i32 + lengths.len() as i32;
    let bottom = TOP + ROW_HEIGHT * count;
    let height = HEIGHT + ROW_HEIGHT * count - 60;
    let plot = Plot {
        panel: Panel { left: LEFT, right: RIGHT, top: TOP, bottom },
        x: Log { low: low / 1.5, high: high * 1.5, from: LEFT, to: RIGHT },
        rows: all,
        lengths,
    };
    let size = (WIDTH as u32 / super::DENSITY, height as u32 / super::DENSITY);
    Figure::draw(size, format!("Largest difference of the outputs of two backends. {title}."), |canvas| {
        canvas.draw_text(&title, &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        let ink = style::text(LABEL, INK, HPos::Left, VPos::Center);
        panel::Look { index: 0 }.mark(canvas, (52, 104), FAINT)?;
        canvas.draw_text("published", &ink, (76, 104))?;
        panel::Look { index: 1 }.mark(canvas, (290, 104), ACCENT)?;
        canvas.draw_text("here, two backends on the same inputs", &ink, (314, 104))?;
        plot.draw(canvas)?;
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, height - 34))
    })
}

struct Row {
    name: String,
    tokens: u32,
    max_diff: f64,
    cosine: Option<f64>,
}

/// Rows of the output `o` that `names` has a name for.
fn rows(table: &DataFrame, names: impl Fn(&DataFrame) -> Result<Vec<Option<String>>>) -> Result<Vec<Row>> {
    let (names, tensors) = (names(table)?, texts(table, "tensor")?);
    let [tokens, differences, cosines] = ["T", "max_diff", "cos_sim"].map(|name| numbers(table, name));
    let (tokens, differences, cosines) = (tokens?, differences?, cosines?);
    let row = |at: usize| {
        let max_diff = differences[at].filter(|difference| *difference > 0.0 && tensors[at] == "o")?;
        Some(Row { name: names[at].clone()?, tokens: tokens[at]? as u32, max_diff, cosine: cosines[at] })
    };
    Ok((0..names.len()).filter_map(row).collect())
}

/// The largest published difference over the largest here, at the longest length that both have.
fn title(ours: &[Row], theirs: &[Row]) -> Option<String> {
    let largest = |rows: &[Row], tokens: u32| {
        rows.iter().filter(|row| row.tokens == tokens).map(|row| row.max_diff).max_by(f64::total_cmp)
    };
    let both = theirs.iter().filter(|row| ours.iter().any(|other| other.tokens == row.tokens));
    let tokens = both.map(|row| row.tokens).max()?;
    let factor = largest(theirs, tokens)? / largest(ours, tokens)?;
    Some(format!(
        "At T = {tokens} the largest reported difference is {} times what rounding gives",
        panel::three_digits((10.0 * factor).round() / 10.0)
    ))
}

struct Plot<'a> {
    panel: Panel,
    x: Log,
    rows: Vec<(&'a Row, bool)>,
    lengths: Vec<u32>,
}

impl Plot<'_> {
    fn draw(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let columns: Vec<Tick> = self.x.decades().map(|e| (self.x.at(10f64.powi(e)), power_of_ten(e))).collect();
        self.panel.columns(canvas, &columns)?;
        self.panel.frame(canvas, "Largest difference of o")?;
        self.panel.caption(canvas, "max |A − B|")?;
        let mut y = TOP + ROW_HEIGHT / 2;
        for tokens in &self.lengths {
            let bold = style::bold(LABEL, INK, HPos::Left, VPos::Center);
            canvas.draw_text(&format!("T = {tokens}"), &bold, (40, y))?;
            y += ROW_HEIGHT;
            for (row, published) in self.rows.iter().filter(|(row, _)| row.tokens == *tokens) {
                canvas.draw_text(&row.name, &style::text(SMALL, INK, HPos::Left, VPos::Center), (40, y))?;
                let (color, index) = if *published { (FAINT, 0) } else { (ACCENT, 1) };
                let at = self.x.at(row.max_diff);
                canvas.draw(&PathElement::new([(LEFT, y), (at, y)], color.mix(0.5).stroke_width(3)))?;
                panel::Look { index }.mark(canvas, (at, y), color)?;
                let cosine =
                    row.cosine.map_or_else(String::new, |cosine| format!(", 1−cos {}", axis::short(1.0 - cosine)));
                let words = format!("{}{cosine}", axis::short(row.max_diff));
                let right = at + 18 + style::width(&words, SMALL) > RIGHT;
                let (h, x) = if right { (HPos::Right, at - 18) } else { (HPos::Left, at + 18) };
                canvas.draw_text(
                    &words,
                    &style::text(SMALL, FAINT, h, VPos::Center),
                    (x, if right { y - 18 } else { y }),
                )?;
                y += ROW_HEIGHT;
            }
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
    fn what_was_published_stands_beside_what_rounding_gives() {
        let pairs = df!(
            "op" => ["gdn", "gdn"], "kernel" => ["a", "a"], "against" => ["b", "b"], "tensor" => ["o", "final_state"],
            "T" => [512u32, 512],
            "max_diff" => [1e-3, 1e-2], "cos_sim" => [Some(0.99999), None]
        )
        .unwrap();
        let published = df!(
            "who" => ["reporter", "maintainer"], "device" => ["H800", "H200"], "tensor" => ["o", "o"],
            "T" => [512u32, 512], "max_diff" => [0.026, 0.0015], "cos_sim" => [Some(0.998), None]
        )
        .unwrap();
        let figure = backend_differences(&pairs, &published, "the footer").unwrap();
        check(&figure, &["a | b", "reporter, FlashQLA | fla on H800", "the footer"]);
        assert!(figure.description().contains("At T = 512 the largest reported difference is 26 times"));
        assert!(backend_differences(&pairs.head(Some(0)), &published, "").is_err());
    }
}
