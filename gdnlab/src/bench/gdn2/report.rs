//! The table of a person, line by line as rows are measured.

use super::{Finished, Outcome, Row};
use crate::bench::{Ceilings, Samples};
use crate::table::Mode;

/// Writes lines of the table.
pub struct Report<'a> {
    /// What the hardware allows.
    pub ceilings: &'a Ceilings<'a>,
}

impl Report<'_> {
    /// Names of the columns.
    pub fn heading() -> String {
        format!(
            "{:<36} {:<25} {:>8} {:>8} {:>8} {:>7} {:>6} {:>9} {:>9}\n",
            "case", "kernel", "ms", "p20", "p80", "TFLOP/s", "/floor", "tensors", "workspace"
        )
    }

    /// A row, and a line for each of its kernels where they were timed.
    pub fn row(&self, row: &Row) -> String {
        let outcome = match &row.outcome {
            Outcome::Timed(samples) => self.numbers(row, samples),
            Outcome::Wrong(why) => format!("WRONG, so not timed: {why}"),
            Outcome::Failed(why) => format!("failed: {why}"),
        };
        let kernels = row.kernels.iter().map(|kernel| format!("    {:<30} {:>8.4} ms\n", kernel.name, kernel.ms));
        format!("{:<36} {:<25} {outcome}\n{}", row.case.to_string(), row.kernel, kernels.collect::<String>())
    }

    /// What the columns mean, and what is not there.
    pub fn footer(finished: &Finished) -> String {
        let mut text =
            "/floor: time over what the rates of traffic and products allow; memory in MB; times without a cold L2 cache\n\
             where a line is one kernel of the one above\n"
                .to_owned();
        if finished.recorded > 0 {
            text += &format!("{} recorded before for this commit\n", finished.recorded);
        }
        if finished.stopped {
            text += "stopped before the end\n";
        }
        text
    }

    fn numbers(&self, row: &Row, samples: &Samples) -> String {
        let (cost, ms) = (row.cost(), samples.median());
        let (rates, _) = self.ceilings.rates(Mode::of(row.mode).format);
        let (tensors, workspace) = row.memory.unwrap_or_default();
        format!(
            "{ms:>8.4} {:>8.4} {:>8.4} {:>7.1} {:>6.2} {:>9.1} {:>9.1}",
            samples.p20(),
            samples.p80(),
            cost.tflop_s(ms),
            ms / cost.floor_ms(&rates),
            tensors as f64 / 1e6,
            workspace as f64 / 1e6
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::gdn2::Case;
    use crate::bench::roofline::{Copier, CopyBandwidth};
    use crate::cuda::chunk::gdn2::Gdn2;

    #[test]
    fn a_row_is_a_line_and_the_end_says_what_is_missing() {
        let row = Row::new(&Case::suite().unwrap()[1], &Gdn2::presets()[0]);
        let failed = Row { outcome: Outcome::Failed("no memory".to_owned()), ..row };
        let copy = CopyBandwidth {
            bytes_per_s: 4e12,
            theoretical: None,
            copier: Copier::Driver,
            copied_bytes: 1 << 30,
            piece_bytes: 1 << 28,
        };
        let ceilings = Ceilings::named("NVIDIA H200", copy, &[]);
        let line = Report { ceilings: &ceilings }.row(&failed);
        assert_eq!(line, format!("{:<36} {:<25} failed: no memory\n", "bwd H=12 128/128 5120+5120", "cuda-gdn2-bf16"));
        let end = Report::footer(&Finished { recorded: 3, stopped: true, ..Finished::default() });
        assert!(end.contains("3 recorded before for this commit\nstopped before the end\n"), "{end}");
        assert!(!Report::footer(&Finished::default()).contains("recorded"));
    }
}
