//! Attention backends: which is fastest, and how much of the machine it reaches.

use super::panel::{self, Linear, Panel, Tick};
use super::style::{self, ACCENT, FAINT, GRID, INK, LABEL, SMALL, TITLE};
use super::{Canvas, DrawError, Figure};
use crate::table::OURS;
use crate::table::rows::{distinct, numbers, texts};
use crate::{Error, Result};
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::DataFrame;

/// Width of the figure, and its height without the rows, in canvas units.
const WIDTH: i32 = 1920;
const HEIGHT: i32 = 350;
const ROW_HEIGHT: i32 = 54;
const GROUP_GAP: i32 = 64;
/// Edges of the panel; right of it stand the times.
const LEFT: i32 = 420;
const RIGHT: i32 = 1280;
const TOP: i32 = 180;
/// Right edge of the times, and the largest distance between two of their columns.
const TIMES: i32 = 1880;
const TIMES_PITCH: i32 = 150;

/// Draws a table of [`crate::table::attention`]: a group for each machine and pass, in it a row for each backend, fastest
/// first, with a dot for each number of heads or length at the share of the machine's measured matmul rate that it
/// reaches. The times stand at the right; the fastest backend of each group stands out. `footer` goes below.
///
/// # Errors
/// [`Error::Figure`] where no row has a share, [`Error::Table`] where a column is missing.
pub fn attention_backends(attention: &DataFrame, footer: &str) -> Result<Figure> {
    let groups = groups(attention)?;
    let most = groups.iter().flat_map(|group| &group.rows).flat_map(|row| &row.calls).map(|call| call.reached_pct);
    let most = most.fold(0.0, f64::max);
    if most == 0.0 {
        return Err(Error::Figure("no backend's share of the matmul rate is known".to_owned()));
    }
    let rows: i32 = groups.iter().map(|group| group.rows.len() as i32 * ROW_HEIGHT).sum();
    let bottom = TOP + rows + (groups.len() as i32 - 1) * GROUP_GAP;
    let plot = Plot {
        x: Linear { low: 0.0, high: (most * 1.05 / 10.0).ceil() * 10.0, from: LEFT, to: RIGHT },
        panel: Panel { left: LEFT, right: RIGHT, top: TOP, bottom },
        groups,
    };
    let height = HEIGHT - TOP + bottom;
    Figure::draw((WIDTH as u32 / super::DENSITY, height as u32 / super::DENSITY), plot.description(), |canvas| {
        canvas.draw_text(&plot.title(), &style::bold(TITLE, INK, HPos::Left, VPos::Center), (40, 44))?;
        plot.draw(canvas)?;
        canvas.draw_text(footer, &style::text(SMALL, FAINT, HPos::Left, VPos::Center), (40, height - 34))
    })
}

/// The calls of one machine and pass.
struct Group {
    machine: String,
    pass: String,
    rows: Vec<Row>,
}

/// The calls of one backend.
struct Row {
    kernel: String,
    calls: Vec<TimedCall>,
}

struct TimedCall {
    heads: f64,
    tokens: f64,
    ms: f64,
    reached_pct: f64,
}

impl Row {
    /// The kernel without where its times come from.
    fn name(&self) -> &str {
        self.kernel.split(',').next().unwrap_or_default()
    }

    fn is_ours(&self) -> bool {
        self.kernel.starts_with(OURS)
    }

    fn at(&self, heads: f64, tokens: f64) -> Option<&TimedCall> {
        self.calls.iter().find(|call| (call.heads, call.tokens) == (heads, tokens))
    }

    /// Mean logarithm of the time for a FLOP, up to a constant: what the rows of a group are sorted by.
    fn slowness(&self) -> f64 {
        -self.calls.iter().map(|call| call.reached_pct.ln()).sum::<f64>() / self.calls.len().max(1) as f64
    }
}

fn groups(table: &DataFrame) -> Result<Vec<Group>> {
    let [machines, kernels, passes] = ["machine", "kernel", "pass"].map(|name| texts(table, name));
    let (machines, kernels, passes) = (machines?, kernels?, passes?);
    let (heads, tokens) = (numbers(table, "H")?, numbers(table, "T")?);
    let (ms, reached) = (numbers(table, "ms")?, numbers(table, "reached_pct")?);
    let mut groups: Vec<Group> = Vec::new();
    for (machine, pass) in distinct(machines.iter().zip(&passes)) {
        let in_group: Vec<usize> =
            (0..machines.len()).filter(|&row| machines[row] == *machine && passes[row] == *pass).collect();
        let calls = |kernel: &str| -> Vec<TimedCall> {
            let of_kernel = in_group.iter().filter(|&&row| kernels[row] == kernel);
            let call = |&row: &usize| {
                let (heads, tokens, ms, reached_pct) = (heads[row]?, tokens[row]?, ms[row]?, reached[row]?);
                Some(TimedCall { heads, tokens, ms, reached_pct })
            };
            of_kernel.filter_map(call).collect()
        };
        let mut rows: Vec<Row> = distinct(in_group.iter().map(|&row| kernels[row].as_str()))
            .into_iter()
            .map(|kernel| Row { kernel: kernel.to_owned(), calls: calls(kernel) })
            .filter(|row| !row.calls.is_empty())
            .collect();
        rows.sort_by(|a, b| a.slowness().total_cmp(&b.slowness()));
        if !rows.is_empty() {
            groups.push(Group { machine: machine.clone(), pass: pass.clone(), rows });
        }
    }
    Ok(groups)
}

impl Group {
    fn pass_name(&self) -> &'static str {
        if self.pass == "bwd" { "backward" } else { "forward" }
    }

    fn title(&self) -> String {
        format!("{}, {}", self.machine, self.pass_name())
    }
}

struct Plot {
    groups: Vec<Group>,
    panel: Panel,
    x: Linear,
}

impl Plot {
    /// What is fastest on each machine, forward; and how many times as long ours takes, where it is another's.
    fn title(&self) -> String {
        let part = |group: &Group| {
            let fastest = group.rows.first()?;
            let ours = group.rows.iter().find(|row| row.is_ours());
            let times = ours.filter(|_| !fastest.is_ours()).and_then(|ours| {
                let ratio = |call: &TimedCall| Some(call.ms / fastest.at(call.heads, call.tokens)?.ms);
                panel::span(ours.calls.iter().filter_map(ratio), |ratio| format!("{ratio:.2}"))
            });
            let times = times.map_or_else(String::new, |times| format!(" (gdnlab ×{times})"));
            Some(format!("{} on {}{times}", fastest.name(), group.machine))
        };
        let parts: Vec<String> = self.groups.iter().filter(|group| group.pass != "bwd").filter_map(part).collect();
        if parts.is_empty() {
            return "Attention backends".to_owned();
        }
        format!("Fastest forward: {}", parts.join(", "))
    }

    fn description(&self) -> String {
        let mut sentences = Vec::new();
        for group in &self.groups {
            for row in &group.rows {
                let shares = row.calls.iter().map(|call| call.reached_pct);
                let percent = panel::span(shares, |share| format!("{share:.0}")).unwrap_or_default();
                let title = group.title();
                sentences.push(format!("{title}: {} reaches {percent} % of the matmul rate.", row.kernel));
            }
        }
        format!("Time of causal attention by backend. {}", sentences.join(" "))
    }

    /// What tells the calls apart: numbers of heads, or lengths.
    fn by_heads(&self) -> bool {
        let calls = self.groups.iter().flat_map(|group| &group.rows).flat_map(|row| &row.calls);
        distinct(calls.map(|call| call.tokens)).len() < 2
    }

    fn draw(&self, canvas: &Canvas<'_>) -> Result<(), DrawError> {
        let ticks: Vec<Tick> = self.x.ticks(6).iter().map(|&tick| (self.x.at(tick), format!("{tick:.0} %"))).collect();
        self.panel.columns(canvas, &ticks)?;
        self.panel.frame(canvas, "")?;
        self.panel.caption(canvas, "FLOPs of the visible scores per second, over the measured matmul rate")?;
        let by_heads = self.by_heads();
        let varied = |call: &TimedCall| if by_heads { call.heads } else { call.tokens };
        let calls = self.groups.iter().flat_map(|group| &group.rows).flat_map(|row| &row.calls);
        let mut values = distinct(calls.map(varied));
        values.sort_by(f64::total_cmp);
        let pitch = TIMES_PITCH.min((TIMES - RIGHT) / values.len().max(1) as i32);
        let column = |position: usize| TIMES - pitch * (values.len() - 1 - position) as i32;
        let heading = style::text(SMALL, FAINT, HPos::Right, VPos::Center);
        for (position, value) in values.iter().enumerate() {
            let unit = if position == 0 { "ms, " } else { "" };
            let heading_text = format!("{unit}{} = {value}", if by_heads { "H" } else { "T" });
            canvas.draw_text(&heading_text, &heading, (column(position), TOP - 30))?;
        }
        let mut y = TOP;
        for (index, group) in self.groups.iter().enumerate() {
            if index > 0 {
                y += GROUP_GAP;
            }
            canvas.draw_text(&group.title(), &style::bold(LABEL, INK, HPos::Left, VPos::Center), (40, y - 26))?;
            canvas.draw(&PathElement::new([(40, y - 4), (WIDTH - 40, y - 4)], GRID.stroke_width(2)))?;
            for (position, row) in group.rows.iter().enumerate() {
                let (middle, stands_out) = (y + ROW_HEIGHT / 2, position == 0);
                self.row(canvas, row, middle, stands_out)?;
                let ink = style::text(LABEL, if stands_out { ACCENT } else { FAINT }, HPos::Right, VPos::Center);
                for (position, value) in values.iter().enumerate() {
                    let Some(call) = row.calls.iter().find(|call| varied(call) == *value) else { continue };
                    canvas.draw_text(&milliseconds(call.ms), &ink, (column(position), middle))?;
                }
                y += ROW_HEIGHT;
            }
        }
        Ok(())
    }

    fn row(&self, canvas: &Canvas<'_>, row: &Row, y: i32, stands_out: bool) -> Result<(), DrawError> {
        let color = if stands_out { ACCENT } else { FAINT };
        let label = style::text(LABEL, if stands_out { ACCENT } else { INK }, HPos::Right, VPos::Center);
        canvas.draw_text(&row.kernel, &label, (LEFT - 20, y))?;
        let places: Vec<i32> = row.calls.iter().map(|call| self.x.at(call.reached_pct)).collect();
        if let (Some(&low), Some(&high)) = (places.iter().min(), places.iter().max()) {
            canvas.draw(&Rectangle::new([(low, y - 3), (high, y + 3)], color.mix(0.45).filled()))?;
        }
        places.into_iter().try_for_each(|x| canvas.draw(&Circle::new((x, y), 10, color.filled())))
    }
}

/// A time with three significant digits: `0.105`, `5.07`, `10.2`.
fn milliseconds(ms: f64) -> String {
    format!("{ms:.*}", (2.0 - ms.abs().log10().floor()).clamp(0.0, 6.0) as usize)
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;
    use crate::table::{attention, rooflines};
    use gdnlab_deps::polars::prelude::{IntoLazy, col, lit};

    const PUBLISHED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published");

    #[test]
    fn the_fastest_backend_of_each_machine_and_pass_comes_first() {
        let table = attention(&[], PUBLISHED, &rooflines(&[], PUBLISHED).unwrap()).unwrap();
        let figure = attention_backends(&table, "the footer").unwrap();
        check(
            &figure,
            &["GB10, forward", "PyTorch cudnn, published", "ms, H = 8", "H = 16", "5.07", "12.5", "the footer"],
        );
        assert!(figure.svg().contains("Fastest forward: PyTorch flash on GB10"));
        assert_eq!(figure.svg().matches("<circle").count(), 9);
        let says = figure.description();
        assert!(says.contains("GB10, forward: PyTorch flash, published reaches 7 % of the matmul rate."), "{says}");

        let backward = table.clone().lazy().with_column(lit("bwd").alias("pass")).collect().unwrap();
        let both = attention_backends(&table.vstack(&backward).unwrap(), "").unwrap();
        check(&both, &["GB10, backward", "Fastest forward: PyTorch flash on GB10"]);
        let slower = table.clone().lazy().with_columns([
            lit("gdnlab flash").alias("kernel"),
            (col("ms") * lit(1.1)).alias("ms"),
            (col("reached_pct") * lit(0.5)).alias("reached_pct"),
        ]);
        let beside = attention_backends(&table.vstack(&slower.collect().unwrap().head(Some(1))).unwrap(), "").unwrap();
        check(&beside, &["PyTorch flash on GB10 (gdnlab ×1.10)"]);
        let unknown = table.lazy().with_column(lit(0.0).alias("reached_pct")).collect().unwrap();
        assert!(matches!(attention_backends(&unknown, ""), Err(Error::Figure(_))));
    }

    #[test]
    fn times_have_three_digits() {
        assert_eq!([0.105, 5.07, 10.234, 0.21].map(milliseconds), ["0.105", "5.07", "10.2", "0.210"]);
    }
}
