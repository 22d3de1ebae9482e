//! `cargo lab bench ladder`.

use crate::checkout::Checkout;
use crate::output::{Interrupt, Said, note, print};
use crate::sharding::{Done, Sharding};
use gdnlab::bench::ladder::{Finished, Outcome, Report, Rung, run};
use gdnlab::bench::roofline::copy_bandwidth;
use gdnlab::bench::{Budget, Ceilings, Timer};
use gdnlab::cost::model::Batch;
use gdnlab::cuda::Gpu;
use gdnlab::record::{self, Environment, Measurement};
use gdnlab::{Error, Result};
use std::process::ExitCode;

/// Name of the records' file in `data/`.
const SUITE: &str = "bench-ladder";
/// What counts as done.
const DONE: Done<'_> =
    Done { experiment: SUITE, anywhere: true, is_it: |measurement| matches!(measurement, Measurement::Ladder(_)) };
/// Name of the file for the kernels of a step.
const KERNELS: &str = "bench-kernels";

/// Train the models of the ladder for some steps on the GPU: tokens per second, memory, and what that is of the hardware.
/// With --save the times of the kernels of a step are kept, too.
///
/// A model whose memory does not suffice is refused before anything is allocated, with the batch that would fit. Models
/// that are recorded in `data/` for this commit and GPU are skipped, so a run that was stopped goes on where it was.
///
/// Exit code: 0 when every model has a rate, 1 when one could not run, 2 for bad input or no GPU.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab bench ladder --save           all eight models, kept in data/
  cargo lab bench ladder --filter 'gdn'   one mixer")]
pub struct Args {
    /// Only models whose line `gdn 125M` contains this text.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Sequences of a step.
    #[arg(long, value_name = "B", default_value_t = Batch::LADDER.sequences)]
    batch: usize,
    /// Tokens of a sequence.
    #[arg(long, value_name = "T", default_value_t = Batch::LADDER.tokens)]
    length: usize,
    #[command(flatten)]
    sharding: Sharding,
    /// Measure again what is recorded already.
    #[arg(long)]
    again: bool,
    /// Add each row to the records in `data/` as soon as it is measured.
    #[arg(long)]
    save: bool,
    /// Print what was measured as records, one JSON object a line, instead of the table.
    #[arg(long)]
    json: bool,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        let rungs = self.sharding.cases(self.rungs()?);
        if rungs.is_empty() {
            // More parts than cases.
            return Ok(ExitCode::SUCCESS);
        }
        let batch = Batch { sequences: self.batch, tokens: self.length };
        batch.validate()?;
        let checkout = Checkout::find()?;
        let data = checkout.root().join("data");
        let interrupt = Interrupt::new()?;
        let gpu = Gpu::shared()?;
        note("copy bandwidth");
        let copy = copy_bandwidth(&mut Timer::new(gpu, Budget::default())?, &mut || interrupt.control())?;
        let environment = Environment::detect();
        let recorded = self.sharding.recorded(&data, &DONE, self.again, &environment)?;
        let ceilings = Ceilings::new(gpu, copy, &recorded.all);
        let mut kept = Vec::new();
        let keep = |row: &gdnlab::bench::ladder::Row| {
            if let Some(record) = row.record(&batch, &ceilings, &environment) {
                if self.save {
                    record::keep(&data, &self.sharding.experiment(SUITE), std::slice::from_ref(&record))?;
                    record::keep(&data, &self.sharding.experiment(KERNELS), &row.kernel_records(&batch, &environment))?;
                }
                kept.push(record);
            }
            Ok(())
        };
        let mut said = Said::default();
        let finished = run(&rungs, &batch, gpu, &recorded.done, keep, |step| {
            said.step(step);
            interrupt.control()
        })?;
        if self.json {
            print(&record::to_json_lines(&kept)?)?;
        } else {
            print(&Report { finished: &finished, batch: &batch, ceilings: &ceilings }.to_string())?;
        }
        Ok(exit_code(&finished))
    }

    fn rungs(&self) -> Result<Vec<Rung>> {
        let all = Rung::all();
        let wanted = |rung: &Rung| self.filter.as_ref().is_none_or(|text| rung.to_string().contains(text));
        let rungs: Vec<Rung> = all.iter().copied().filter(wanted).collect();
        if rungs.is_empty() {
            let names: Vec<String> = all.iter().map(Rung::to_string).collect();
            let filter = self.filter.as_deref().unwrap_or_default();
            return Err(Error::input(format!(
                "no model contains --filter '{filter}': expected one of {}",
                names.join(", ")
            )));
        }
        Ok(rungs)
    }
}

fn exit_code(finished: &Finished) -> ExitCode {
    if finished.stopped {
        return Interrupt::EXIT_CODE.into();
    }
    let failed = finished.rows.iter().any(|row| matches!(row.outcome, Outcome::Failed(_)));
    if failed { ExitCode::from(1) } else { ExitCode::SUCCESS }
}
