//! `cargo lab bench roofline`.

use crate::checkout::Checkout;
use crate::output::{Interrupt, Said, gpu_if_any, note, print, recorded};
use gdnlab::bench::roofline::{Bench, DataSheet, Finished, OnCpu, OnGpu, Outcome, Report, run};
use gdnlab::bench::{Budget, Timer};
use gdnlab::record::{self, Environment, Record};
use gdnlab::{Error, Result};
use std::process::ExitCode;

/// Name of the records' file in `data/`.
const SUITE: &str = "bench-roofline";
/// Matrices of so many rows and columns at the most: larger ones fit into no memory.
const MAX_SIZE: usize = 1 << 20;

/// Measure what this machine allows: the copy bandwidth, the rates of large products, and the ridge point between them.
///
/// On a GPU the products are 8192 x 8192 x 8192 in bf16, fp16, TF32, IEEE binary32 and binary64, by the fastest algorithm
/// of cuBLASLt, the first ones after a rest; bf16 also after a second of them, when the power limit has lowered the clock.
/// The copy reads and writes 2 GB, by the driver or by a kernel. Without a GPU the CPU's GEMM library and
/// its memory are measured, on all threads. Beside each value stands what the vendor says, where that is known. A time is
/// a median. Rows that are recorded in `data/` for this commit and this card are not measured again, unless the code was
/// changed since the commit. Ctrl-C ends early and keeps what was measured.
///
/// Exit code: 0 when every row has a value, 1 when one could not be measured, 2 for bad input.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab bench roofline --save         everything, kept in data/
  cargo lab bench roofline --cpu --json   the CPU's values, one JSON object a line")]
pub struct Args {
    /// Rows and columns of the matrices. Without it, 8192 on a GPU and 2048 on a CPU.
    #[arg(long, value_name = "N")]
    size: Option<usize>,
    /// Exactly so many samples of what is timed run by run: the copy, and everything on a CPU. Without it, as many as there is
    /// time for.
    #[arg(long, value_name = "N")]
    samples: Option<usize>,
    /// Measure the CPU, also where there is a GPU.
    #[arg(long)]
    cpu: bool,
    /// Measure again what is recorded already.
    #[arg(long)]
    again: bool,
    /// Add each row to the records in `data/` as soon as it is measured.
    #[arg(long)]
    save: bool,
    /// Print records, one JSON object a line, instead of the table.
    #[arg(long)]
    json: bool,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        if let Some(size) = self.size.filter(|size| !(1..=MAX_SIZE).contains(size)) {
            return Err(Error::input(format!("--size {size}: expected 1 to {MAX_SIZE} rows and columns")));
        }
        let budget = self.samples.map(Budget::of_samples).transpose()?;
        let data = Checkout::find()?.root().join("data");
        let interrupt = Interrupt::new()?;
        let mut bench = self.bench(budget)?;
        let known = if self.again { Vec::new() } else { recorded(&data)? };

        let mut kept = None;
        let mut keep = |record: &Record| {
            if self.save {
                kept = Some(record::keep(&data, SUITE, std::slice::from_ref(record))?);
            }
            Ok(())
        };
        let mut said = Said::default();
        let finished = run(bench.as_mut(), &known, &Environment::detect, &mut keep, |step| {
            said.step(step);
            interrupt.control()
        })?;
        self.show(&finished)?;
        if let Some(path) = kept {
            note(format_args!("records: {}", Checkout::find()?.relative(&path)));
        }
        Ok(exit_code(&finished))
    }

    /// The GPU, or the CPU where there is none.
    fn bench(&self, budget: Option<Budget>) -> Result<Box<dyn Bench>> {
        let gpu = if self.cpu { None } else { gpu_if_any("measuring")? };
        if let Some(gpu) = gpu {
            let timer = Timer::new(gpu, budget.unwrap_or_default())?;
            return Ok(Box::new(OnGpu::new(timer, self.size.unwrap_or(OnGpu::SIZE))?));
        }
        let default = OnCpu::default();
        Ok(Box::new(OnCpu {
            size: self.size.unwrap_or(default.size),
            budget: budget.unwrap_or(default.budget),
            ..default
        }))
    }

    fn show(&self, finished: &Finished) -> Result<()> {
        if self.json {
            let records: Vec<Record> =
                finished.rows.iter().filter_map(|(_, outcome)| outcome.record().cloned()).collect();
            for (row, outcome) in &finished.rows {
                if let Outcome::Failed(why) = outcome {
                    note(format_args!("{row}: {why}"));
                }
            }
            return print(&record::to_json_lines(&records)?);
        }
        let machine = Environment::detect().machine;
        let source = machine.gpu.as_deref().and_then(DataSheet::of).map(|sheet| sheet.source);
        print(&Report { finished, machine: &machine, source }.to_string())
    }
}

fn exit_code(finished: &Finished) -> ExitCode {
    if finished.stopped {
        return Interrupt::EXIT_CODE.into();
    }
    let failed = finished.rows.iter().any(|(_, outcome)| matches!(outcome, Outcome::Failed(_)));
    if failed { ExitCode::from(1) } else { ExitCode::SUCCESS }
}
