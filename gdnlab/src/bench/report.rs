//! The table that a person reads.

use super::gdn::{Finished, Outcome, Row};
use super::peers::SAME_RUN;
use super::{Ceilings, Peer};
use crate::record::Pass;
use crate::table::rows::{distinct, geometric_mean};
use std::fmt;

/// Ratio of the 80th to the 20th percentile above which something else disturbed a row.
const STEADY: f64 = 1.1;

/// The peers in the order of their columns.
const PEERS: [&str; 3] = ["flash_qla", "flashinfer", "fla"];
/// The peer that is named first in ratios.
const FLA: &str = "fla";

/// One line per row, then the geometric means, by pass and by model, and the rows that lose.
pub struct Report<'a> {
    /// What was measured.
    pub finished: &'a Finished,
    /// What the floors are held against.
    pub ceilings: &'a Ceilings<'a>,
}

/// What the columns are.
const LEGEND: &str = "\
ms: median, 20th and 80th percentile; GB/s and TFLOP/s of useful work; /floor: time over the time that the rates allow;
/bytes: over the time that the traffic alone takes; peers: ms, published or, with *, of this run; fla/ and best/: their time
over ours, above 1 where we are faster
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
        let recorded = rows.iter().filter(|row| row.recorded.is_some()).count();
        if recorded > 0 {
            writeln!(f, "{recorded} of {} rows recorded before for this commit and machine", rows.len())?;
        }
        if self.finished.stopped { writeln!(f, "stopped before the end") } else { Ok(()) }
    }
}

impl Report<'_> {
    fn table(&self, f: &mut fmt::Formatter<'_>, rows: &[&Row]) -> fmt::Result {
        let length = |row: &&Row| sequences(row).chars().count();
        let width = rows.iter().map(length).max().unwrap_or(0).max("sequences".len());
        writeln!(
            f,
            "{:<4} {:>5} {:>7} {:<width$} {:>8} {:>8} {:>8} {:>6} {:>7} {:>8} {:>6} {:>6}  {:>9} {:>10} {:>7} {:>5} {:>5}",
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
            "/bytes",
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
            "{ms:>8.4} {:>8.4} {:>8.4} {:>6.0} {:>7.1} {floor:>8.4} {:>6.2} {:>6.2}",
            samples.p20(),
            samples.p80(),
            cost.gb_s(ms),
            cost.tflop_s(ms),
            ms / floor,
            self.ceilings.copy().bytes_per_s / (1e9 * cost.gb_s(ms))
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

    /// Geometric means by pass and by model, the rows that lose, and what else has to be said.
    fn summary(&self, f: &mut fmt::Formatter<'_>, rows: &[&Row]) -> fmt::Result {
        for pass in distinct(rows.iter().map(|row| row.case.pass_name())) {
            let of_pass: Vec<&Row> = rows.iter().copied().filter(|row| row.case.pass_name() == pass).collect();
            // Training steps are no published cases, and have no part in their means where both are there.
            let published: Vec<&Row> = of_pass.iter().copied().filter(|row| row.case.seqlens.is_some()).collect();
            let Some((means, count)) = self.means(&published).or_else(|| self.means(&of_pass)) else { continue };
            writeln!(f, "{pass}, geometric mean of {count}: {means}")?;
            let models = distinct(of_pass.iter().map(|row| row.case.model()));
            let width = models.iter().map(|model| model.chars().count()).max().unwrap_or(0);
            // A model with one row has said all in that row.
            if models.len() < 2 || 2 * models.len() > of_pass.len() {
                continue;
            }
            for model in &models {
                let of_model: Vec<&Row> = of_pass.iter().copied().filter(|row| row.case.model() == *model).collect();
                if let Some((means, count)) = self.means(&of_model) {
                    writeln!(f, "  {pass} {model:<width$} {count:>4}: {means}")?;
                }
            }
        }
        self.both_passes(f, rows)?;
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

impl Report<'_> {
    /// Geometric means of `rows` in words, and how many rows have a time.
    fn means(&self, rows: &[&Row]) -> Option<(String, usize)> {
        let over_floor = rows.iter().filter_map(|row| Some(row.samples()?.median() / row.cost(self.ceilings).1));
        let (mean, count) = geometric_mean(over_floor)?;
        let mut words = format!("{mean:.2} times the floor");
        for (peer, name) in [(Against::Fla, "fla"), (Against::Best, "the best peer")] {
            let ratios = rows.iter().filter_map(|row| against(row, peer));
            if let Some((mean, count)) = geometric_mean(ratios) {
                words += &format!(", {mean:.2} times as fast as {name} ({count})");
            }
        }
        Some((words, count))
    }

    /// Forward and backward together, of calls of which both were timed.
    fn both_passes(&self, f: &mut fmt::Formatter<'_>, rows: &[&Row]) -> fmt::Result {
        let of_pass = |pass: Pass| rows.iter().filter(move |row| row.case.pass == pass);
        for forward in of_pass(Pass::Fwd) {
            let Some(backward) = of_pass(Pass::Bwd).find(|row| row.case.is_same_call(&forward.case)) else { continue };
            let both = |of: &dyn Fn(&Row) -> Option<f64>| Some(of(forward)? + of(backward)?);
            let Some(ms) = both(&|row| Some(row.samples()?.median())) else { continue };
            let (heads, sequences) = (forward.case.heads_name(), sequences(forward));
            write!(f, "fwd + bwd {heads} {sequences}: {ms:.4} ms")?;
            if let Some(floor) = both(&|row| Some(row.cost(self.ceilings).1)) {
                write!(f, ", {:.2} times the floor", ms / floor)?;
            }
            if let Some(fla) = both(&|row| Some(row.case.peer(FLA)?.ms)) {
                write!(f, ", {:.2} times as fast as fla", fla / ms)?;
            }
            writeln!(f)?;
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
    row.case.split_name().map_or_else(|| row.case.sequences_name(), str::to_owned)
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
