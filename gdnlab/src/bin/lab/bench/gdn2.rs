//! `cargo lab bench gdn2`.

use crate::checkout::Checkout;
use crate::output::{Interrupt, Said, note, print};
use crate::sharding::{Done, Sharding};
use gdnlab::bench::gdn2::{Case, Finished, Outcome, Report, Row, run};
use gdnlab::bench::roofline::copy_bandwidth;
use gdnlab::bench::{Budget, Ceilings, Timer};
use gdnlab::cuda::Gpu;
use gdnlab::cuda::chunk::gdn2::Gdn2;
use gdnlab::kernel::Kernel;
use gdnlab::record::{self, Environment, Measurement};
use gdnlab::{Error, Result};
use std::process::ExitCode;

/// Name of the records' file in `data/`.
const SUITE: &str = "bench-gdn2";
/// What counts as done.
const DONE: Done<'_> =
    Done { experiment: SUITE, anywhere: true, is_it: |measurement| matches!(measurement, Measurement::Bench(_)) };

/// Time the GDN-2 kernels on the GPU, forward and backward, in each precision, with the memory that each takes.
///
/// The shapes are that of the GDN-2 precision RFC, one long sequence with 16 heads, and a training step of short ones. Each
/// kernel is first checked against the float64 recurrence on a small problem with heads of the same size; without a green
/// check there is no time. A time is the median of GPU times of graph replays, each with a cold L2 cache. Each row is
/// printed as soon as it is measured. What is recorded in `data/` for this commit and this machine is not measured again,
/// unless the code was changed since the commit, or the kernels of a pass are asked for. Ctrl-C ends early and keeps what was
/// measured.
///
/// Exit code: 0 when every case was timed, 1 when one was wrong or could not run, 2 for bad input or no GPU.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab bench gdn2 --save                              everything, kept in data/
  cargo lab bench gdn2 --filter 5120 --each-kernel         the shape of the RFC, and where the time goes")]
pub struct Args {
    /// Kernels by their names in `cargo lab kernels`. Without it, all of GDN-2.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    kernel: Vec<String>,
    /// Only cases whose line `fwd H=12 128/128 5120+5120` contains this text.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Exactly so many samples per case. Without it, 20 to 200 in half a second.
    #[arg(long, value_name = "N")]
    samples: Option<usize>,
    /// Show the time of each kernel of a pass too.
    #[arg(long)]
    each_kernel: bool,
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
        let (cases, kernels) = (self.sharding.cases(self.cases()?), self.kernels()?);
        if cases.is_empty() {
            // More parts than cases.
            return Ok(ExitCode::SUCCESS);
        }
        let budget = self.samples.map_or_else(|| Ok(Budget::default()), Budget::of_samples)?;
        let checkout = Checkout::find()?;
        let data = checkout.root().join("data");
        let interrupt = Interrupt::new()?;
        let gpu = Gpu::shared()?;
        let mut timer = Timer::new(gpu, budget)?;
        note("copy bandwidth");
        let copy = copy_bandwidth(&mut timer, &mut || interrupt.control())?;
        let environment = Environment::detect();
        let recorded = self.sharding.recorded(&data, &DONE, self.again, &environment)?;
        let ceilings = Ceilings::new(gpu, copy, &recorded.all);
        let report = Report { ceilings: &ceilings };
        let mut keep = |row: &Row| {
            let record = row.record(&ceilings, &environment);
            if let Some(record) = record.as_ref().filter(|_| self.save) {
                record::keep(&data, &self.sharding.experiment(SUITE), std::slice::from_ref(record))?;
            }
            print(&if self.json { record::to_json_lines(record.as_slice())? } else { report.row(row) })
        };
        if !self.json {
            print(&Report::heading())?;
        }
        let mut said = Said::default();
        let finished = run(&cases, &kernels, &mut timer, self.each_kernel, &recorded.done, &mut keep, |step| {
            said.step(step);
            interrupt.control()
        })?;
        if !self.json {
            print(&Report::footer(&finished))?;
        }
        Ok(exit_code(&finished))
    }

    fn cases(&self) -> Result<Vec<Case>> {
        let all = Case::suite()?;
        let wanted = |case: &&Case| self.filter.as_ref().is_none_or(|text| case.to_string().contains(text));
        let cases: Vec<Case> = all.iter().filter(wanted).cloned().collect();
        if cases.is_empty() {
            let filter = self.filter.as_deref().unwrap_or_default();
            let first = all.first().map(Case::to_string).unwrap_or_default();
            return Err(Error::input(format!("no case contains --filter '{filter}': a case reads '{first}'")));
        }
        Ok(cases)
    }

    fn kernels(&self) -> Result<Vec<Gdn2>> {
        let all = Gdn2::presets();
        let named = |name: &String| {
            all.iter().find(|kernel| kernel.name() == name).cloned().ok_or_else(|| {
                let names: Vec<&str> = all.iter().map(Kernel::name).collect();
                Error::input(format!("no kernel '{name}' to time: expected some of {}", names.join(", ")))
            })
        };
        if self.kernel.is_empty() { Ok(all.clone()) } else { self.kernel.iter().map(named).collect() }
    }
}

fn exit_code(finished: &Finished) -> ExitCode {
    if finished.stopped {
        return Interrupt::EXIT_CODE.into();
    }
    let timed = finished.rows.iter().all(|row| matches!(row.outcome, Outcome::Timed(_)));
    if timed { ExitCode::SUCCESS } else { ExitCode::from(1) }
}
