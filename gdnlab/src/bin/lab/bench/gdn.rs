//! `cargo lab bench gdn`.

use crate::checkout::Checkout;
use crate::output::{Interrupt, Said, note, print};
use crate::peers::Python;
use gdnlab::bench::gdn::{Finished, Outcome, records, run};
use gdnlab::bench::peers::{TimedPeer, set_beside};
use gdnlab::bench::report::Report;
use gdnlab::bench::roofline::copy_bandwidth;
use gdnlab::bench::{Budget, Case, Ceilings, Heads, SeqLens, Subject, Suite, Timer, subjects};
use gdnlab::cuda::Gpu;
use gdnlab::record::{self, Environment, Pass};
use gdnlab::{Error, Result};
use std::process::ExitCode;
use std::str::FromStr;

/// Name of the records' file in `data/`.
const SUITE: &str = "bench-gdn";

/// Time GDN kernels on the GPU: forward and backward of published workloads or of any shape.
///
/// Each kernel is first checked against the float64 recurrence, on a small case of the same configuration and on the
/// results that are timed; without a green check there is no time. A time is the median of GPU times of graph replays,
/// each with a cold L2 cache. Beside it stand the floor, which is what the measured copy bandwidth and the rate of
/// products allow, and on an NVIDIA H200 the published times of others. Ctrl-C ends early and keeps what was measured.
///
/// Exit code: 0 when every case was timed, 1 when one was wrong or could not run, 2 for bad input or no GPU.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab bench gdn                                 18 published cases
  cargo lab bench gdn --suite h200 --pass fwd --save  all published forward cases, kept in data/
  cargo lab bench gdn --peers fla,flash_qla           beside other people's kernels, in this run
  cargo lab bench gdn --shape 8192x4:16,64            any shape, forward and backward")]
pub struct Args {
    /// Cases: sample (18 of the published ones), h200 (all 203 published ones) or day2 (training shapes of Day 2).
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
    /// Exactly so many samples per case. Without it, 20 to 200 in half a second.
    #[arg(long, value_name = "N")]
    samples: Option<usize>,
    /// Add what was measured to the records in `data/`.
    #[arg(long)]
    save: bool,
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
        let cases = self.cases(&data.join("published"))?;
        let mut subjects = subjects(&self.kernel)?;
        for name in &self.peers {
            subjects.push(Box::new(TimedPeer::new(name, self.python.options()?)?));
        }
        let budget = self.samples.map_or_else(|| Ok(Budget::default()), Budget::of_samples)?;
        let interrupt = Interrupt::new()?;
        for case in &cases {
            subjects.iter().try_for_each(|subject| subject.supports(&case.shape))?;
        }

        let gpu = Gpu::shared()?;
        let cases: Vec<Case> = cases.into_iter().map(|case| case.on(&gpu.name)).collect();
        let mut timer = Timer::new(gpu, budget)?;
        note("copy bandwidth");
        let copy = copy_bandwidth(&mut timer, &mut || interrupt.control())?;
        let known = record::read_dir(&data)?;
        let ceilings = Ceilings::new(gpu, copy, &known);

        let subjects: Vec<&dyn Subject> = subjects.iter().map(AsRef::as_ref).collect();
        let mut said = Said::default();
        let mut finished = run(&cases, &subjects, &mut timer, |step| {
            said.step(step);
            interrupt.control()
        })?;
        set_beside(&mut finished.rows, &self.peers.iter().map(String::as_str).collect::<Vec<_>>());
        print(&Report { finished: &finished, ceilings: &ceilings }.to_string())?;
        if self.save {
            let path = record::keep(&data, SUITE, &records(&finished.rows, &ceilings, &Environment::detect()))?;
            print(&format!("records: {}\n", checkout.relative(&path)))?;
        }
        Ok(exit_code(&finished))
    }

    fn cases(&self, published: &std::path::Path) -> Result<Vec<Case>> {
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

fn exit_code(finished: &Finished) -> ExitCode {
    if finished.stopped {
        return Interrupt::EXIT_CODE.into();
    }
    let timed = finished.rows.iter().all(|row| matches!(row.outcome, Outcome::Timed(_)));
    if timed { ExitCode::SUCCESS } else { ExitCode::from(1) }
}
