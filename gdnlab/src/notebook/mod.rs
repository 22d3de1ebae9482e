//! What a notebook cell needs: tables and figures on the screen, and progress in lines.
//!
//! A notebook keeps one output of each kind per cell, the last one. So a cell shows one thing: a table, a figure, or
//! several tables together with [`show_tables`].

mod on_gpu;
mod recorded;

pub use on_gpu::{OnGpu, Origin, numerics_on_gpu, recorded_on_gpu};
pub use recorded::{Recorded, records_on_gpu};

use crate::Result;
use crate::figure::Figure;
use crate::numerics::Step;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use gdnlab_deps::polars::prelude::{AnyValue, DataFrame};
use std::fmt::Write;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Least time between two lines of progress.
const BETWEEN_LINES: Duration = Duration::from_secs(5);

/// Rows of a table that are shown; the rest is counted.
const MAX_ROWS: usize = 200;

/// Things that a cell can show.
pub trait Show {
    /// Puts it into the cell's output, rich and as plain text.
    ///
    /// # Errors
    /// [`crate::Error::Figure`] where a figure cannot be rendered.
    fn show(&self) -> Result<()>;
}

impl Show for DataFrame {
    fn show(&self) -> Result<()> {
        show_tables(&[("", self)])
    }
}

impl Show for Figure {
    fn show(&self) -> Result<()> {
        emit(&[("image/png", &STANDARD.encode(self.png()?)), ("text/plain", self.description())]);
        Ok(())
    }
}

/// Shows several tables below each other, each under its title.
///
/// # Errors
/// None at present; the result leaves room for tables that cannot be shown.
pub fn show_tables(tables: &[(&str, &DataFrame)]) -> Result<()> {
    let html: String = tables.iter().map(|(title, table)| Cells::of(table).html(title)).collect();
    emit(&[("text/html", &html), ("text/plain", &text_of_tables(tables))]);
    Ok(())
}

/// Several tables below each other as plain text, each under its title and rounded as a cell shows it.
pub fn text_of_tables(tables: &[(&str, &DataFrame)]) -> String {
    tables.iter().map(|(title, table)| Cells::of(table).text(title)).collect::<Vec<_>>().join("\n")
}

/// Hands contents to the kernel, which collects what stands between its two marks.
fn emit(contents: &[(&str, &str)]) {
    for (mime, content) in contents {
        println!("EVCXR_BEGIN_CONTENT {mime}\n{}\nEVCXR_END_CONTENT", content.trim_end());
    }
}

/// A table as it is shown: rounded, as text.
struct Cells {
    header: Vec<String>,
    /// Whether a column holds numbers, which are aligned right.
    numeric: Vec<bool>,
    rows: Vec<Vec<String>>,
    hidden: usize,
}

impl Cells {
    fn of(table: &DataFrame) -> Self {
        let columns = table.columns();
        let shown = table.height().min(MAX_ROWS);
        let cell =
            |row: usize| columns.iter().map(|column| display(&column.get(row).unwrap_or(AnyValue::Null))).collect();
        Self {
            header: columns.iter().map(|column| column.name().to_string()).collect(),
            numeric: columns.iter().map(|column| column.dtype().is_numeric()).collect(),
            rows: (0..shown).map(cell).collect(),
            hidden: table.height() - shown,
        }
    }

    fn html(&self, title: &str) -> String {
        let mut html = String::from("<table>");
        if !title.is_empty() {
            let _ = write!(html, "<caption style=\"text-align:left\"><b>{}</b></caption>", escape(title));
        }
        let row = |tag: &str, cells: &[String]| -> String {
            let cells = cells.iter().zip(&self.numeric).map(|(cell, numeric)| {
                let align = if *numeric { "right" } else { "left" };
                format!("<{tag} style=\"text-align:{align}\">{}</{tag}>", escape(cell))
            });
            format!("<tr>{}</tr>", cells.collect::<String>())
        };
        let _ = write!(html, "<thead>{}</thead><tbody>", row("th", &self.header));
        self.rows.iter().for_each(|cells| html += &row("td", cells));
        html += "</tbody></table>";
        if self.hidden > 0 {
            let _ = write!(html, "<p>and {} more rows</p>", self.hidden);
        }
        html
    }

    fn text(&self, title: &str) -> String {
        let length = |text: &String| text.chars().count();
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| length(&row[column]));
            cells.chain([length(&self.header[column])]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.header.len()).map(width).collect();
        let line = |cells: &[String]| {
            let padded = cells.iter().zip(&widths).zip(&self.numeric).map(|((cell, &width), numeric)| {
                if *numeric { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
            });
            padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
        };
        let mut text = if title.is_empty() { String::new() } else { format!("{title}\n") };
        text += &line(&self.header);
        self.rows.iter().for_each(|row| text += &line(row));
        if self.hidden > 0 {
            let _ = writeln!(text, "and {} more rows", self.hidden);
        }
        text
    }
}

fn display(value: &AnyValue<'_>) -> String {
    match value {
        AnyValue::Null => "–".to_owned(),
        AnyValue::Float64(number) => four_digits(*number),
        AnyValue::Float32(number) => four_digits(f64::from(*number)),
        AnyValue::String(text) => (*text).to_owned(),
        AnyValue::StringOwned(text) => text.to_string(),
        other => other.to_string(),
    }
}

/// Four significant digits, or all digits of the whole part: `1.477`, `1834`, `77546`, `3.906e-3`.
fn four_digits(number: f64) -> String {
    let size = number.abs();
    if size == 0.0 || !size.is_finite() {
        number.to_string()
    } else if (1e-2..1e7).contains(&size) {
        let decimals = (3.0 - size.log10().floor()).clamp(0.0, 5.0) as usize;
        format!("{number:.decimals$}")
    } else {
        format!("{number:.3e}")
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Progress in lines, since a cell shows nothing of a line before its end. Steps that follow each other quickly share
/// one line.
pub fn progress_lines() -> impl FnMut(&Step) -> ControlFlow<()> {
    let start = Instant::now();
    let mut printed = None;
    move |step| {
        if printed.is_none_or(|at: Instant| at.elapsed() >= BETWEEN_LINES) {
            printed = Some(Instant::now());
            println!("{}", progress_line(step, start.elapsed()));
        }
        ControlFlow::Continue(())
    }
}

fn progress_line(step: &Step, elapsed: Duration) -> String {
    format!("{:>4.0} s  {}/{} done, now {}", elapsed.as_secs_f64(), step.done, step.total, step.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gdnlab_deps::polars::prelude::*;

    fn table() -> DataFrame {
        df!("mode" => ["bf16", "a<b"], "max_rel" => [Some(3.906_25e-3), None], "T" => [256u32, 4096]).unwrap()
    }

    #[test]
    fn numbers_keep_four_digits() {
        for (number, text) in [
            (1.477_2, "1.477"),
            (0.975_04, "0.9750"),
            (1834.56, "1835"),
            (22_345.6, "22346"),
            (1_048_576.0, "1048576"),
            (0.0123, "0.01230"),
            (3.906_25e-3, "3.906e-3"),
            (-1.5e7, "-1.500e7"),
            (0.0, "0"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(four_digits(number), text);
        }
    }

    #[test]
    fn the_plain_twin_is_aligned() {
        let text = Cells::of(&table()).text("Errors");
        assert_eq!(text, "Errors\nmode   max_rel     T\nbf16  3.906e-3   256\na<b          –  4096\n");
    }

    #[test]
    fn html_is_escaped_and_balanced() {
        let html = Cells::of(&table()).html("a & b");
        assert!(html.contains("a &amp; b") && html.contains("a&lt;b") && !html.contains("a<b"), "{html}");
        for tag in ["table", "thead", "tbody", "tr", "td", "th", "caption"] {
            let opened = html.matches(&format!("<{tag}>")).count() + html.matches(&format!("<{tag} ")).count();
            assert_eq!(opened, html.matches(&format!("</{tag}>")).count(), "{tag} in {html}");
        }
    }

    #[test]
    fn long_tables_say_what_they_hide() {
        let long = df!("n" => (0..1000u32).collect::<Vec<_>>()).unwrap();
        let cells = Cells::of(&long);
        assert_eq!(cells.rows.len(), MAX_ROWS);
        assert!(cells.text("").ends_with("and 800 more rows\n") && cells.html("").contains("800 more"));
        assert_eq!(Cells::of(&DataFrame::empty()).text(""), "\n");
    }

    #[test]
    fn progress_says_what_is_done_and_what_comes() {
        let step = Step { done: 3, total: 36, name: "cpu-chunk-tf32".to_owned() };
        assert_eq!(progress_line(&step, Duration::from_secs(12)), "  12 s  3/36 done, now cpu-chunk-tf32");
        assert!(progress_lines()(&step).is_continue());
    }
}
