//! The table that a person reads.

use super::gdn::{Finished, Outcome, Row};
use super::peers::SAME_RUN;
use super::{Ceilings, Peer};
use crate::table::rows::distinct;
use std::fmt;

/// Ratio of the 80th to the 20th percentile above which something else disturbed a row.
const STEADY: f64 = 1.1;

/// The peers in the order of their columns.
const PEERS: [&str; 3] = ["flash_qla", "flashinfer", "fla"];
/// The peer that is named first in ratios.
const FLA: &str = "fla";

/// One line per row, then the geometric means and the rows that lose.
pub struct Report<'a> {
    /// What was measured.
    pub finished: &'a Finished,
    /// What the floors are held against.
    pub ceilings: &'a Ceilings<'a>,
}

/// What the columns are.
const LEGEND: &str = "\
ms: median, 20th and 80th percentile; GB/s and TFLOP/s of useful work; /floor: time over the time that the rates allow;
peers: ms, published or, with *, of this run; fla/ and best/: their time over ours, above 1 where we are faster
";

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = &self.finished.rows;
        for kernel in distinct(rows.iter().map(|row| row.kernel.as_str())) {
            let of_kernel: Vec<&Row> = rows.iter().filter(|row| row.kernel == kernel).collect();
            if let Some(first) = of_kernel.first() {
                let (.., basis) = first.cost(self.ceilings);
                writeln!(f, "{kernel}, {}; floor: {basis}", first.mode)?;
            }
            self.table(f, &of_kernel)?;
            self.summary(f, &of_kernel)?;
            writeln!(f)?;
        }
        f.write_str(LEGEND)?;
        if self.finished.stopped { writeln!(f, "stopped before the end") } else { Ok(()) }
    }
}

impl Report<'_> {
    fn table(&self, f: &mut fmt::Formatter<'_>, rows: &[&Row]) -> fmt::Result {
        let length = |row: &&Row| sequences(row).chars().count();
        let width = rows.iter().map(length).max().unwrap_or(0).max("sequences".len());
        writeln!(
            f,
            "{:<4} {:>5} {:>7} {:<width$} {:>8} {:>8} {:>8} {:>6} {:>7} {:>8} {:>6}  {:>9} {:>10} {:>7} {:>5} {:>5}",
            "pass",
            "heads",
            "K/V",
            "sequences",
            "ms",
            "p20",
            "p80",
            "GB/s",
            "TFLOP/s",
            "floor",
            "/floor",
            PEERS[0],
            PEERS[1],
            PEERS[2],
            "fla/",
            "best/"
        )?;
        for row in rows {
            let dims = format!("{}/{}", row.case.shape.key_dim, row.case.shape.value_dim);
            let case = format!(
                "{:<4} {:>5} {dims:>7} {:<width$}",
                row.case.pass_name(),
                row.case.heads_name(),
                sequences(row)
            );
            match &row.outcome {
                Outcome::Timed(_) => writeln!(f, "{case} {}", self.numbers(row))?,
                Outcome::Wrong(_) => writeln!(f, "{case}    WRONG, so not timed; see below")?,
                Outcome::Failed(why) => writeln!(f, "{case}    {}", why.lines().next().unwrap_or_default())?,
            }
        }
        Ok(())
    }

    /// The columns behind the case.
    fn numbers(&self, row: &Row) -> String {
        let Some(samples) = row.samples() else { return String::new() };
        let ms = samples.median();
        let (cost, floor, _) = row.cost(self.ceilings);
        let ours = format!(
            "{ms:>8.4} {:>8.4} {:>8.4} {:>6.0} {:>7.1} {floor:>8.4} {:>6.2}",
            samples.p20(),
            samples.p80(),
            cost.gb_s(ms),
            cost.tflop_s(ms),
            ms / floor
        );
        let peer = |name: &str| {
            let mark = |peer: &Peer| if peer.source == SAME_RUN { "*" } else { "" };
            row.case.peer(name).map_or("-".to_owned(), |peer| format!("{:.3}{}", peer.ms, mark(peer)))
        };
        let ratio = |ratio: Option<f64>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        let [first, second, third] = PEERS.map(peer);
        format!(
            "{ours}  {first:>9} {second:>10} {third:>7} {:>5} {:>5}",
            ratio(against(row, Against::Fla)),
            ratio(against(row, Against::Best))
        )
    }

    /// Geometric means by pass, the rows that lose, and what else has to be said.
    fn summary(&self, f: &mut fmt::Formatter<'_>, rows: &[&Row]) -> fmt::Result {
        for pass in distinct(rows.iter().map(|row| row.case.pass_name())) {
            let of_pass: Vec<&&Row> = rows.iter().filter(|row| row.case.pass_name() == pass).collect();
            let floors = of_pass.iter().filter_map(|row| Some(row.samples()?.median() / row.cost(self.ceilings).1));
            let Some((mean, count)) = geometric_mean(floors) else { continue };
            write!(f, "{pass}, geometric mean of {count}: {mean:.2} times the floor")?;
            for (peer, words) in [(Against::Fla, "fla"), (Against::Best, "the best peer")] {
                let ratios = of_pass.iter().filter_map(|row| against(row, peer));
                if let Some((mean, count)) = geometric_mean(ratios) {
                    write!(f, ", {mean:.2} times as fast as {words} ({count})")?;
                }
            }
            writeln!(f)?;
        }
        for (peer, words) in [(Against::Fla, "fla"), (Against::Best, "the best peer")] {
            list(f, &format!("slower than {words}"), rows, |row| {
                against(row, peer).filter(|ratio| *ratio < 1.0).map(|ratio| format!("{ratio:.2}"))
            })?;
        }
        list(f, "unsteady, so repeat while nothing else runs", rows, |row| {
            let samples = row.samples()?;
            let spread = samples.p80() / samples.p20();
            (spread > STEADY).then(|| format!("p80/p20 = {spread:.2}"))
        })?;
        for row in rows {
            if let Outcome::Wrong(why) = &row.outcome {
                writeln!(f, "WRONG: {} {}: {why}", row.kernel, row.case)?;
            }
        }
        Ok(())
    }
}

/// Which peer is compared with.
#[derive(Clone, Copy)]
enum Against {
    Fla,
    Best,
}

/// The peer's time over ours.
fn against(row: &Row, peer: Against) -> Option<f64> {
    let peer = match peer {
        Against::Fla => row.case.peer(FLA),
        Against::Best => row.case.best_peer(),
    };
    Some(peer?.ms / row.samples()?.median())
}

/// One line with the rows about which `words` says something; none where there are none.
fn list(f: &mut fmt::Formatter<'_>, title: &str, rows: &[&Row], words: impl Fn(&Row) -> Option<String>) -> fmt::Result {
    let items: Vec<String> = rows
        .iter()
        .filter_map(|row| {
            let (heads, sequences) = (row.case.heads_name(), sequences(row));
            Some(format!("{} {heads} {sequences} ({})", row.case.pass_name(), words(row)?))
        })
        .collect();
    if items.is_empty() { Ok(()) } else { writeln!(f, "{title} ({}): {}", items.len(), items.join(", ")) }
}

/// The sequences as the published table names them where it has a name for a random split.
fn sequences(row: &Row) -> String {
    let label = &row.case.label;
    if label.ends_with("seq") { label.clone() } else { row.case.sequences_name() }
}

/// The geometric mean of `values` and their number; `None` without any.
fn geometric_mean(values: impl Iterator<Item = f64>) -> Option<(f64, usize)> {
    let logarithms: Vec<f64> = values.map(f64::ln).collect();
    let count = logarithms.len();
    (count > 0).then(|| ((logarithms.iter().sum::<f64>() / count as f64).exp(), count))
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
