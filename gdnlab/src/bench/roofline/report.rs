//! The table that a person reads.

use super::rows::{Finished, Outcome};
use crate::record::Machine;
use std::fmt;

/// One line per row: measured, by the data sheet, the fraction of it, and what it was measured with.
pub struct Report<'a> {
    /// What was measured.
    pub finished: &'a Finished,
    /// Where.
    pub machine: &'a Machine,
    /// Where the values of the vendor stand.
    pub source: Option<&'a str>,
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = self.machine.gpu.as_deref().or(self.machine.cpu.as_deref()).unwrap_or("this machine");
        writeln!(f, "{machine}")?;
        writeln!(f, "{:<21} {:>18} {:>12} {:>9}  measured with", "quantity", "measured", "theoretical", "fraction")?;
        for (row, outcome) in &self.finished.rows {
            let name = row.quantity.name();
            match (outcome, outcome.record().zip(outcome.roofline())) {
                (Outcome::Failed(why), _) => writeln!(f, "{name:<21} {:>18}  {why}", "failed")?,
                (_, None) => {}
                (outcome, Some((record, roofline))) => {
                    let theoretical = roofline.theoretical.map_or("-".to_owned(), number);
                    let fraction = roofline.theoretical.map(|theoretical| roofline.value / theoretical);
                    let fraction = fraction.map_or("-".to_owned(), |part| format!("{:.1} %", 100.0 * part));
                    let with = record.workload.kernel.as_deref().unwrap_or_default();
                    let measured = format!("{} {:<9}", number(roofline.value), roofline.unit);
                    write!(f, "{name:<21} {measured:>18} {theoretical:>12} {fraction:>9}  {with}")?;
                    match outcome {
                        Outcome::Recorded(record) => {
                            writeln!(f, " (recorded at {})", record.environment.utc.as_deref().unwrap_or_default())?;
                        }
                        _ => writeln!(f)?,
                    }
                }
            }
        }
        if let Some(source) = self.source {
            writeln!(f, "theoretical values: {source}")?;
        }
        if self.finished.stopped { writeln!(f, "stopped before the end") } else { Ok(()) }
    }
}

/// Four digits, or the whole part where it has more.
fn number(value: f64) -> String {
    let digits = if value > 0.0 { value.log10().floor() as i32 } else { 0 };
    format!("{value:.*}", (3 - digits).clamp(0, 4) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_four_digits() {
        let numbers = [4132.3, 803.07, 194.34, 50.951, 1.2345, 0.25678, 0.0].map(number);
        assert_eq!(numbers, ["4132", "803.1", "194.3", "50.95", "1.234", "0.2568", "0.000"]);
    }
}
