//! `cargo lab bench attention`.

use crate::checkout::Checkout;
use crate::output::{Interrupt, Said, note, print};
use crate::sharding::{Done, Sharding};
use gdnlab::bench::attention::{Backend, Case, Finished, Outcome, Report, Row, run};
use gdnlab::bench::roofline::copy_bandwidth;
use gdnlab::bench::{Budget, Ceilings, Timer};
use gdnlab::cuda::Gpu;
use gdnlab::record::{self, Environment, Measurement};
use gdnlab::{Error, Result};
use std::process::ExitCode;

/// Name of the records' file in `data/`.
const SUITE: &str = "bench-attention";
/// What counts as done.
const DONE: Done<'_> =
    Done { experiment: SUITE, anywhere: true, is_it: |measurement| matches!(measurement, Measurement::Attention(_)) };

/// Time causal attention on the GPU, forward and backward: the cases of Day 2.
///
/// Each backend is first checked against float64 on a small problem with heads of the same size; without a green check
/// there is no time. A time is the median of GPU times of graph replays, each with a cold L2 cache. FLOPs count visible
/// scores only. What is recorded in `data/` for this commit and this machine is not measured again, unless the code was
/// changed since the commit. Ctrl-C ends early and keeps what was measured.
///
/// Exit code: 0 when every case was timed, 1 when one was wrong or could not run, 2 for bad input or no GPU.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab bench attention --save             everything, kept in data/
  cargo lab bench attention --filter 'T=1024'  the cases of the post")]
pub struct Args {
    /// Backends: flash (the fastest path of the GPU at hand), flash-portable, math (scores in memory), cudnn (NVIDIA's
    /// library, where it is present). Without it, all.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    backend: Vec<String>,
    /// Only cases whose line `fwd B=32 T=1024 H=12 d=64` contains this text.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Exactly so many samples per case. Without it, 20 to 200 in half a second.
    #[arg(long, value_name = "N")]
    samples: Option<usize>,
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
        let (cases, backends) = (self.sharding.cases(self.cases()?), self.backends()?);
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
        let mut kept = Vec::new();
        let mut keep = |row: &Row| {
            if let Some(record) = row.record(&ceilings, &environment) {
                if self.save {
                    record::keep(&data, &self.sharding.experiment(SUITE), std::slice::from_ref(&record))?;
                }
                kept.push(record);
            }
            Ok(())
        };
        let mut said = Said::default();
        let finished = run(&cases, &backends, &mut timer, &recorded.done, &mut keep, |step| {
            said.step(step);
            interrupt.control()
        })?;
        if self.json {
            print(&record::to_json_lines(&kept)?)?;
        } else {
            print(&Report { finished: &finished, ceilings: &ceilings }.to_string())?;
        }
        Ok(exit_code(&finished))
    }

    fn cases(&self) -> Result<Vec<Case>> {
        let wanted = |case: &Case| self.filter.as_ref().is_none_or(|text| case.to_string().contains(text));
        let all = Case::day2();
        let cases: Vec<Case> = all.iter().copied().filter(wanted).collect();
        if cases.is_empty() {
            let filter = self.filter.as_deref().unwrap_or_default();
            let first = all.first().map(Case::to_string).unwrap_or_default();
            return Err(Error::input(format!("no case contains --filter '{filter}': a case reads '{first}'")));
        }
        Ok(cases)
    }

    fn backends(&self) -> Result<Vec<Backend>> {
        let named = |name: &String| {
            Backend::ALL.into_iter().find(|backend| backend.name() == name).ok_or_else(|| {
                let names = Backend::ALL.map(Backend::name).join(", ");
                Error::input(format!("unknown backend '{name}': expected one of {names}"))
            })
        };
        if self.backend.is_empty() { Ok(Backend::ALL.to_vec()) } else { self.backend.iter().map(named).collect() }
    }
}

fn exit_code(finished: &Finished) -> ExitCode {
    if finished.stopped {
        return Interrupt::EXIT_CODE.into();
    }
    let timed = finished.rows.iter().all(|row| matches!(row.outcome, Outcome::Timed(_)));
    if timed && finished.rows.len() + finished.recorded > 0 { ExitCode::SUCCESS } else { ExitCode::from(1) }
}
