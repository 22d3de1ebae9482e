//! `cargo lab bench gdn`.

use crate::checkout::Checkout;
use crate::output::{Interrupt, Said, note, print};
use crate::peers::Python;
use crate::sharding::{Done, Sharding};
use gdnlab::bench::gdn::{Finished, Outcome, Row, run};
use gdnlab::bench::peers::TimedPeer;
use gdnlab::bench::report::Report;
use gdnlab::bench::roofline::copy_bandwidth;
use gdnlab::bench::{Budget, Case, Ceilings, Heads, SeqLens, Subject, Suite, Timer, subjects};
use gdnlab::cuda::Gpu;
use gdnlab::record::{self, Environment, Measurement, Pass, Record};
use gdnlab::sweep::Known;
use gdnlab::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

/// Name of the records' file in `data/`.
const SUITE: &str = "bench-gdn";
/// What counts as done.
const DONE: Done<'_> =
    Done { experiment: SUITE, anywhere: true, is_it: |measurement| matches!(measurement, Measurement::Bench(_)) };

/// Time GDN kernels on the GPU: forward and backward of published workloads or of any shape.
///
/// Each kernel is first checked against the float64 recurrence, on a small case of the same configuration and on the
/// results that are timed; without a green check there is no time. A time is the median of GPU times of graph replays,
/// each with a cold L2 cache. Beside it stand the floor, which is what the measured copy bandwidth and the rate of
/// products allow, and on an NVIDIA H200 the published times of others; below, geometric means by pass and by model, and
/// the rows that lose. Each case is recorded when it is done. Ctrl-C ends early; what `data/` holds of this commit and this
/// machine, with --shard in the files of parts, is not measured again, unless the code was changed since the commit.
///
/// Exit code: 0 when every case was timed, 1 when one was wrong or could not run, 2 for bad input or no GPU.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab bench gdn                                 18 published cases
  cargo lab bench gdn --suite h200                    all 203 published cases and the shapes of Day 2, kept in data/
  cargo lab bench gdn --suite h200 --pass fwd --json  the forward ones, as records
  cargo lab bench gdn --suite h200 --shard 3/8        what the third of eight machines does
  cargo lab bench gdn --peers fla,flash_qla           beside other people's kernels, in this run
  cargo lab bench gdn --shape 8192x4:16,64            any shape, forward and backward")]
pub struct Args {
    /// Cases: sample (18 of the published ones), h200 (all 203 published ones and those of day2, each kept in data/) or
    /// day2 (training shapes of Day 2, B = 32, T = 1,024, K = 64, V = 128, H = 6, 9, 12). The inputs are those of the
    /// published times: bf16, a quarter of the heads without decay, a state in fp32 before and after. The random splits of
    /// the published backward are cut where torch.randperm on a CPU cuts them for the published seed.
    #[arg(long, value_name = "NAME", default_value_t = Suite::Sample)]
    suite: Suite,
    /// Shapes instead of a suite, each as SEQLENS:HK,HV or SEQLENS:HK,HV,K,V, where SEQLENS is 1x32768 (one sequence),
    /// 8192x4 (four) or 28672+4096 (two); K = V = 128 unless given.
    #[arg(long, value_name = "SEQLENS:HEADS", num_args = 1.., conflicts_with = "suite")]
    shape: Vec<Size>,
    /// Only this pass: fwd or bwd. The backward is timed alone.
    #[arg(long, value_enum)]
    pass: Option<PassName>,
    /// Kernels by their names in `cargo lab kernels`. Without it, the default kernel.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    kernel: Vec<String>,
    /// Kernels of others to time on the same tensors in the same run, in your own Python: fla, flash_qla, flashinfer or
    /// MODULE:FUNCTION.
    #[arg(long, value_name = "NAME", value_delimiter = ',', num_args = 1..)]
    peers: Vec<String>,
    #[command(flatten)]
    python: Python,
    /// Only cases whose line `fwd 16/64 128/128 1x32768 (397B/122B TP1)` contains this text.
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Exactly so many samples per case. Without it, 20 to 200 in half a second, or 20 to 100 in a tenth of one with the
    /// suite h200.
    #[arg(long, value_name = "N")]
    samples: Option<usize>,
    #[command(flatten)]
    sharding: Sharding,
    /// Measure again what is recorded already.
    #[arg(long)]
    again: bool,
    /// Add each case to the records in `data/` as soon as it is measured. The suite h200 always does.
    #[arg(long)]
    save: bool,
    /// Print what was measured as records, one JSON object a line, instead of the table.
    #[arg(long)]
    json: bool,
}

/// `SEQLENS:HEADS` on the command line.
#[derive(Clone)]
struct Size {
    seqlens: SeqLens,
    heads: Heads,
}

impl FromStr for Size {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (seqlens, heads) = text
            .split_once(':')
            .ok_or_else(|| Error::input("expected SEQLENS:HK,HV such as 8192x4:16,64 or 1x1000:4,4,64,96"))?;
        Ok(Self { seqlens: seqlens.parse()?, heads: heads.parse()? })
    }
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum PassName {
    /// Forward.
    Fwd,
    /// Backward.
    Bwd,
}

impl PassName {
    fn pass(self) -> Pass {
        match self {
            Self::Fwd => Pass::Fwd,
            Self::Bwd => Pass::Bwd,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Fwd => "fwd",
            Self::Bwd => "bwd",
        }
    }
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        let checkout = Checkout::find()?;
        let data = checkout.root().join("data");
        let cases = self.sharding.cases(self.cases(&data.join("published"))?);
        if cases.is_empty() {
            // More parts than cases.
            return Ok(ExitCode::SUCCESS);
        }
        let mut subjects = subjects(&self.kernel)?;
        for name in &self.peers {
            subjects.push(Box::new(TimedPeer::new(name, self.python.options_for(name)?)?));
        }
        let budget = self.samples.map_or_else(|| Ok(self.budget()), Budget::of_samples)?;
        let interrupt = Interrupt::new()?;
        for case in &cases {
            subjects.iter().try_for_each(|subject| subject.supports(&case.shape))?;
        }

        let gpu = Gpu::shared()?;
        let cases: Vec<Case> = cases.into_iter().map(|case| case.on(&gpu.name)).collect();
        let mut timer = Timer::new(gpu, budget)?;
        note("copy bandwidth");
        let copy = copy_bandwidth(&mut timer, &mut || interrupt.control())?;
        let environment = Environment::detect();
        let recorded = self.sharding.recorded(&data, &DONE, self.again, &environment)?;
        let ceilings = Ceilings::new(gpu, copy, &recorded.all);
        let known = Known::new(&recorded.done, &environment);

        let mut kept = Kept {
            into: self.is_kept().then_some(data.as_path()),
            experiment: self.sharding.experiment(SUITE),
            path: None,
            measured: Vec::new(),
        };
        let mut copy_record = Some(Record::new(&environment, &copy.workload(), copy.measurement()));
        let mut keep = |rows: &[Row]| {
            let now = Environment { utc: Environment::now(), ..environment.clone() };
            let measured: Vec<Record> = rows.iter().filter_map(|row| row.record(&ceilings, &now)).collect();
            if measured.is_empty() { Ok(()) } else { kept.add(copy_record.take(), measured) }
        };
        let subjects: Vec<&dyn Subject> = subjects.iter().map(AsRef::as_ref).collect();
        let mut said = Said::default();
        let finished = run(&cases, &subjects, &mut timer, &known, &mut keep, |step| {
            said.step(step);
            interrupt.control()
        })?;
        if let Some(path) = &kept.path {
            note(format_args!("records: {}", checkout.relative(path)));
        }
        if self.json {
            print(&record::to_json_lines(&kept.all(&finished))?)?;
        } else {
            print(&Report { finished: &finished, ceilings: &ceilings }.to_string())?;
        }
        Ok(exit_code(&finished))
    }

    /// How long a case is timed where the person does not say.
    fn budget(&self) -> Budget {
        if self.shape.is_empty() { self.suite.budget() } else { Budget::default() }
    }

    /// Whether what is measured goes to `data/`.
    fn is_kept(&self) -> bool {
        self.save || self.shape.is_empty() && self.suite.is_always_kept()
    }

    fn cases(&self, published: &Path) -> Result<Vec<Case>> {
        let all = if self.shape.is_empty() { self.suite.cases(published)? } else { self.free_cases()? };
        let wanted = |case: &Case| {
            self.pass.is_none_or(|name| name.pass() == case.pass)
                && self.filter.as_ref().is_none_or(|text| case.to_string().contains(text))
        };
        let cases: Vec<Case> = all.iter().filter(|case| wanted(case)).cloned().collect();
        match all.first() {
            Some(first) if cases.is_empty() => {
                let filter = self.filter.as_ref().map(|text| format!("--filter '{text}'"));
                let pass = self.pass.map(|name| format!("--pass {}", name.name()));
                let asked: Vec<String> = filter.into_iter().chain(pass).collect();
                Err(Error::input(format!(
                    "none of the {} cases is left by {}: a case reads '{first}'",
                    all.len(),
                    asked.join(" and ")
                )))
            }
            _ => Ok(cases),
        }
    }

    fn free_cases(&self) -> Result<Vec<Case>> {
        let passes = [Pass::Fwd, Pass::Bwd];
        let of_pass =
            |pass: Pass| self.shape.iter().map(move |size| Case::packed(pass, size.seqlens.clone(), size.heads));
        passes.into_iter().flat_map(of_pass).collect()
    }
}

/// What was measured, and where it is kept.
struct Kept<'a> {
    /// The folder, where it is kept.
    into: Option<&'a Path>,
    /// Name of the file without machine and date.
    experiment: String,
    /// The file that holds the last of it.
    path: Option<PathBuf>,
    measured: Vec<Record>,
}

impl Kept<'_> {
    /// Takes the records of a case, behind `before`.
    fn add(&mut self, before: Option<Record>, mut records: Vec<Record>) -> Result<()> {
        if let Some(folder) = self.into {
            let all: Vec<Record> = before.into_iter().chain(records.iter().cloned()).collect();
            self.path = Some(record::keep(folder, &self.experiment, &all)?);
        }
        self.measured.append(&mut records);
        Ok(())
    }

    /// A record for each row with a time, in the order of the rows.
    fn all(self, finished: &Finished) -> Vec<Record> {
        let mut measured = self.measured.into_iter();
        let of_row = |row: &Row| {
            row.samples()?;
            row.recorded.clone().or_else(|| measured.next())
        };
        finished.rows.iter().filter_map(of_row).collect()
    }
}

fn exit_code(finished: &Finished) -> ExitCode {
    if finished.stopped {
        return Interrupt::EXIT_CODE.into();
    }
    let timed = finished.rows.iter().all(|row| matches!(row.outcome, Outcome::Timed(_)));
    if timed { ExitCode::SUCCESS } else { ExitCode::from(1) }
}
