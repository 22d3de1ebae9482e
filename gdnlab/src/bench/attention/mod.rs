//! Causal attention on a GPU: each backend checked against float64, then timed.

mod backend;
mod loaded;

pub use super::gdn::Outcome;
pub use backend::{Absent, Backend};

use super::{Ceilings, Samples, Timer};
use crate::cost::Cost;
use crate::cost::attention::Call;
use crate::cuda::attention::Setup;
use crate::cuda::{Gpu, Stream};
use crate::numerics::Step;
use crate::precision::Format;
use crate::problem::Shape;
use crate::record::{Environment, Measurement, Pass, Record, Timing, Workload};
use crate::{Error, Result};
use half::bf16;
use loaded::{Loaded, check};
use std::fmt;
use std::ops::ControlFlow;

/// Seed of the inputs.
pub const SEED: u64 = 1;
/// Tokens of the small problem that is checked before a case is timed, with a tile that is not full.
const CHECKED_TOKENS: usize = 200;

/// One shape and pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Forward or backward.
    pub pass: Pass,
    /// `B`.
    pub batch: usize,
    /// `T`.
    pub tokens: usize,
    /// `H`, of q, k and v alike.
    pub heads: usize,
    /// `d`.
    pub head_dim: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pass, batch, tokens, heads, head_dim } = self;
        let pass = if *pass == Pass::Bwd { "bwd" } else { "fwd" };
        write!(f, "{pass} B={batch} T={tokens} H={heads} d={head_dim}")
    }
}

impl Case {
    /// The cases of Day 2: `B = 32`, `T = 1024`, `d = 64` with 8, 12 and 16 heads, then lengths from 256 to 16,384 at as
    /// many tokens with 12 heads; both passes.
    pub fn day2() -> Vec<Self> {
        const TOKENS: usize = 32 * 1024;
        let at = |tokens: usize, heads| {
            [Pass::Fwd, Pass::Bwd].map(|pass| Self { pass, batch: TOKENS / tokens, tokens, heads, head_dim: 64 })
        };
        let heads = [8, 12, 16].into_iter().flat_map(|heads| at(1024, heads));
        heads.chain([256, 512, 2048, 4096, 8192, 16_384].into_iter().flat_map(|tokens| at(tokens, 12))).collect()
    }

    fn setup(&self) -> Setup {
        Setup {
            batch: self.batch,
            tokens: self.tokens,
            heads: self.heads,
            head_dim: self.head_dim,
            scale: (self.head_dim as f32).powf(-0.5),
            backward: self.pass == Pass::Bwd,
        }
    }

    fn call(&self) -> Call {
        Call {
            batch: self.batch,
            tokens: self.tokens,
            heads: self.heads,
            head_dim: self.head_dim,
            element_bytes: size_of::<bf16>(),
        }
    }

    /// FLOPs and bytes of a kernel that stores no scores.
    pub fn cost(&self) -> Cost {
        if self.pass == Pass::Bwd { self.call().backward() } else { self.call().forward() }
    }

    fn workload(&self, kernel: &str) -> Workload {
        let shape = Shape {
            batch: self.batch,
            tokens: self.tokens,
            qk_heads: self.heads,
            value_heads: self.heads,
            key_dim: self.head_dim,
            value_dim: self.head_dim,
        };
        let workload = Workload { op: Some("attention".to_owned()), ..Workload::new(crate::problem::Op::Gdn, &shape) };
        workload.kernel(kernel, "bf16").inputs("gaussian", SEED).pass(self.pass)
    }
}

/// One backend on one case.
#[derive(Clone, Debug)]
pub struct Row {
    /// The case.
    pub case: Case,
    /// The backend.
    pub backend: Backend,
    /// Its name in records.
    pub kernel: String,
    /// What came of it.
    pub outcome: Outcome,
}

/// What was measured.
#[derive(Clone, Debug, Default)]
pub struct Finished {
    /// In the order of the cases.
    pub rows: Vec<Row>,
    /// Backends that this machine does not have, which have no rows.
    pub absent: Vec<Absent>,
    /// How many were left out, because there are records of the same code and machine.
    pub recorded: usize,
    /// Whether it was stopped before the end.
    pub stopped: bool,
}

/// Lets every backend run every case that `records` does not have for this code and machine, and hands each row to `keep` at
/// once. `watch` is told what comes next, and is asked between samples too; where it breaks, what was measured so far is
/// returned. A backend whose library is missing is told and left out.
///
/// # Errors
/// What `keep` returns, and none of a backend's: those are in the rows.
pub fn run(
    cases: &[Case],
    backends: &[Backend],
    timer: &mut Timer,
    records: &[Record],
    keep: &mut dyn FnMut(&Row) -> Result<()>,
    mut watch: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Finished> {
    let mut finished = Finished::default();
    let environment = Environment::detect();
    let records: Vec<&Record> = records.iter().filter(|record| record.is_of(&environment)).collect();
    let is_recorded = |workload: &Workload| {
        records
            .iter()
            .any(|record| matches!(record.measurement, Measurement::Attention(_)) && record.workload == *workload)
    };
    let mut known: Vec<(Case, Backend, Option<String>)> = Vec::new();
    let mut present = Vec::new();
    for &backend in backends {
        match backend.kernel(timer.gpu()) {
            Ok(kernel) => present.push((backend, kernel)),
            Err(error) => finished.absent.push(Absent::new(backend, error)),
        }
    }
    let total = cases.len() * present.len();
    for &case in cases {
        for (backend, kernel) in &present {
            let (backend, kernel) = (*backend, kernel.clone());
            if is_recorded(&case.workload(&kernel)) {
                finished.recorded += 1;
                continue;
            }
            let done = finished.rows.len() + finished.recorded;
            let step = Step { done, total, name: format!("{} {case}", backend.name()) };
            let mut go_on = || watch(&step);
            if go_on().is_break() {
                return Ok(Finished { stopped: true, ..finished });
            }
            let small = Case { batch: 2, tokens: CHECKED_TOKENS, heads: 2, ..case };
            let outcome = match verdict(&mut known, small, backend, timer.gpu()) {
                Ok(Some(why)) => Ok(Outcome::Wrong(why)),
                Ok(None) => time(case, backend, timer, &mut go_on).map(Outcome::Timed),
                Err(error) => Err(error),
            };
            let outcome = match outcome {
                Ok(outcome) => outcome,
                Err(Error::Stopped) => return Ok(Finished { stopped: true, ..finished }),
                Err(error) => Outcome::Failed(error.to_string()),
            };
            let row = Row { case, backend, kernel, outcome };
            keep(&row)?;
            finished.rows.push(row);
        }
    }
    Ok(finished)
}

/// What is wrong with the results of `backend` on the small problem `case`, found once; `None` where nothing is.
fn verdict(
    known: &mut Vec<(Case, Backend, Option<String>)>,
    case: Case,
    backend: Backend,
    gpu: &'static Gpu,
) -> Result<Option<String>> {
    if let Some((.., verdict)) = known.iter().find(|(other, by, _)| (*other, *by) == (case, backend)) {
        return Ok(verdict.clone());
    }
    let verdict = check(case, backend, gpu)?;
    known.push((case, backend, verdict.clone()));
    Ok(verdict)
}

fn time(
    case: Case,
    backend: Backend,
    timer: &mut Timer,
    go_on: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Samples> {
    let gpu = timer.gpu();
    let loaded = Loaded::new(case, backend, gpu)?;
    let work = |stream: &Stream| {
        // SAFETY: the graph lives as long as the call of the timer, and its replays run on the stream of the GPU, as does
        // what is started without it.
        unsafe { if case.pass == Pass::Bwd { loaded.backward(stream) } else { loaded.forward(stream) } }
    };
    // SAFETY: this is the stream in whose order memory is freed; the backward needs what the forward left.
    unsafe { loaded.forward(gpu.stream())? };
    // At its first run a library may load kernels, which cannot be recorded.
    work(gpu.stream())?;
    gpu.stream().synchronize()?;
    timer.time(work, go_on)
}

impl Row {
    /// This row as a record, where it was timed.
    pub fn record(&self, ceilings: &Ceilings<'_>, environment: &Environment) -> Option<Record> {
        let samples = self.outcome.samples()?;
        let (rates, floor_basis) = ceilings.rates(Format::Bf16);
        let cost = self.case.cost();
        let timing = samples.timing(&cost, cost.floor_ms(&rates), floor_basis);
        let gb_s = timing.gb_s.filter(|_| self.backend.moves_the_least());
        let timing = Timing { gb_s, ..timing };
        Some(Record::new(environment, &self.case.workload(&self.kernel), Measurement::Attention(timing)))
    }
}

/// The table of a person.
pub struct Report<'a> {
    /// What was measured.
    pub finished: &'a Finished,
    /// What the hardware allows.
    pub ceilings: &'a Ceilings<'a>,
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rates, basis) = self.ceilings.rates(Format::Bf16);
        writeln!(f, "causal attention, bf16; floor: {basis}")?;
        writeln!(
            f,
            "{:<32} {:<15} {:>9} {:>9} {:>9} {:>8} {:>7}",
            "case", "backend", "ms", "p20", "p80", "TFLOP/s", "/floor"
        )?;
        for row in &self.finished.rows {
            write!(f, "{:<32} {:<15} ", row.case.to_string(), row.kernel)?;
            match &row.outcome {
                Outcome::Timed(samples) => {
                    let (cost, ms) = (row.case.cost(), samples.median());
                    writeln!(
                        f,
                        "{ms:>9.4} {:>9.4} {:>9.4} {:>8.1} {:>7.2}",
                        samples.p20(),
                        samples.p80(),
                        cost.tflop_s(ms),
                        ms / cost.floor_ms(&rates)
                    )?;
                }
                Outcome::Wrong(why) => writeln!(f, "WRONG, so not timed: {why}")?,
                Outcome::Failed(why) => writeln!(f, "failed: {why}")?,
            }
        }
        self.finished.absent.iter().try_for_each(|absent| writeln!(f, "{absent}"))?;
        if self.finished.recorded > 0 {
            writeln!(f, "{} recorded before for this commit", self.finished.recorded)?;
        }
        if self.finished.stopped { writeln!(f, "stopped before the end") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cases_are_those_of_the_post_and_a_sweep_at_as_many_tokens() {
        let cases = Case::day2();
        assert_eq!(cases.len(), 18);
        assert!(cases.iter().all(|case| case.batch * case.tokens == 32_768 && case.setup().validate().is_ok()));
        assert_eq!(cases[2].to_string(), "fwd B=32 T=1024 H=12 d=64");
    }

    #[test]
    fn a_record_says_what_ran() {
        let case = Case::day2()[1];
        let workload = case.workload("flash-portable");
        assert_eq!(workload.op.as_deref(), Some("attention"));
        assert_eq!((workload.kernel.as_deref(), workload.pass), (Some("flash-portable"), Some(Pass::Bwd)));
        assert_eq!(
            (workload.batch, workload.tokens, workload.value_heads, workload.value_dim),
            (Some(32), Some(1024), Some(8), Some(64))
        );
    }

    #[test]
    fn a_missing_library_is_a_line_of_the_report() {
        let absent = Absent::new(Backend::Cudnn, Error::gpu("the library was not found: install it"));
        assert_eq!(absent.to_string(), "cudnn: not present: the library was not found: install it");
    }
}
