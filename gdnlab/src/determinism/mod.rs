//! Day 5's first question: does a kernel give the same bits every time?
//!
//! One call is repeated in ways that leave its inputs as they are, and each result is compared with the first one bit by
//! bit. [`Check`] lists the ways. A sum in another order has other bits, so that two of them tell about the order: atomics
//! change it from launch to launch, and a division of work that depends on what else is in the call changes it from packing
//! to packing.

mod load;
mod packing;
mod same;

pub use load::Load;
pub use packing::{Arrangement, arrangements};
pub use same::Sameness;

use crate::inputs::{Regime, generate};
use crate::kernel::Kernel;
use crate::numerics::Step;
use crate::problem::{Inputs, Op, Results, Shape, Tensor};
use crate::record::{Determinism, Environment, Measurement, Pass, Record, Workload};
use crate::{Error, Result};
use gdnlab_deps::rayon::ThreadPoolBuilder;
use std::fmt;
use std::ops::ControlFlow;
use std::str::FromStr;

/// Numbers of threads that a kernel of the CPU is run on.
const THREADS: [usize; 4] = [1, 2, 3, 7];

/// What is changed from run to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Nothing: the same call again.
    Launches,
    /// The same call again while the machine is busy: other streams of the GPU, all threads of the CPU.
    Load,
    /// The number of threads, for kernels of the CPU.
    Threads,
    /// What else is packed into the row: the sequence alone, first, in the middle and last among others of other lengths.
    Packing,
    /// The batch: the sequence as one of several rows.
    Batch,
}

impl Check {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Launches, Self::Load, Self::Threads, Self::Packing, Self::Batch];

    /// Name on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Launches => "launches",
            Self::Load => "load",
            Self::Threads => "threads",
            Self::Packing => "packing",
            Self::Batch => "batch",
        }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Check {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|check| check.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::input(format!("unknown check '{text}': expected one of {names}"))
        })
    }
}

/// The call that is repeated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// Operator.
    pub op: Op,
    /// Sizes of one sequence; `B` is 1.
    pub shape: Shape,
    /// How the inputs are distributed. They begin from a state.
    pub regime: Regime,
    /// Their seed.
    pub seed: u64,
    /// How often the call is repeated by [`Check::Launches`] and [`Check::Load`].
    pub launches: usize,
}

impl Setting {
    fn inputs(&self, seed: u64, tokens: usize) -> Result<Inputs> {
        let shape = Shape { tokens, ..self.shape };
        Ok(generate(self.op, &shape, self.regime, seed)?.with_initial_state(seed))
    }

    fn workload(&self, kernel: &dyn Kernel) -> Workload {
        let workload = Workload::new(self.op, &self.shape).inputs(self.regime.name(), self.seed);
        workload.kernel(kernel.name(), kernel.mode())
    }

    fn validate(&self) -> Result<()> {
        self.shape.validate()?;
        if self.shape.batch != 1 || self.shape.tokens == 0 || self.launches == 0 {
            return Err(Error::input(format!(
                "{} launches of {}: expected at least one launch of one sequence with at least one token",
                self.launches, self.shape
            )));
        }
        Ok(())
    }

    /// Runs that the check compares with the first one.
    fn runs(&self, check: Check) -> usize {
        match check {
            Check::Launches | Check::Load => self.launches,
            Check::Threads => THREADS.len(),
            Check::Packing | Check::Batch => arrangements(check).len(),
        }
    }
}

/// A check that could not be made, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// Kernel.
    pub kernel: String,
    /// The check.
    pub check: Check,
    /// Why, in words.
    pub why: String,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finished {
    /// One record for each kernel, check and tensor.
    pub records: Vec<Record>,
    /// Checks that a kernel cannot be given.
    pub left: Vec<Left>,
    /// Checks that were recorded before, for the very code and machine.
    pub known: usize,
    /// Whether it was stopped before the end.
    pub stopped: bool,
}

impl Finished {
    /// Whether there is one of `kernels` that no check could be made of, now or before.
    pub fn untested(&self, kernels: &[&dyn Kernel]) -> bool {
        let tested = |kernel: &&dyn Kernel| {
            self.records.iter().any(|record| record.workload.kernel.as_deref() == Some(kernel.name()))
        };
        self.known == 0 && !kernels.iter().all(tested)
    }

    /// Whether any run had another bit than the first.
    pub fn differs(&self) -> bool {
        self.records.iter().any(|record| match &record.measurement {
            Measurement::Determinism(determinism) => determinism.differing > 0,
            _ => false,
        })
    }
}

/// Makes every one of `checks` on every kernel. A kernel with a backward is run forward and backward.
///
/// Checks that `known` holds, made by the very code on the same machine, are not made again. `keep` gets the records of a
/// check as soon as they are there; `progress` is asked before every run.
///
/// # Errors
/// [`Error::Input`] where the setting is not valid, and what `keep`, or a kernel that fails on the call itself, reports.
pub fn run(
    setting: &Setting,
    kernels: &[&dyn Kernel],
    checks: &[Check],
    known: &[Record],
    mut keep: impl FnMut(&[Record]) -> Result<()>,
    mut progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Finished> {
    setting.validate()?;
    let environment = Environment::detect();
    let mut finished = Finished::default();
    let mut done = 0;
    let total = kernels.len() * checks.len();
    for &kernel in kernels {
        for &check in checks {
            let name = format!("{} {check}, {}", kernel.name(), setting.shape);
            let step = Step { done, total, name };
            done += 1;
            let left = |why: String| Left { kernel: kernel.name().to_owned(), check, why };
            if let Some(mut records) = known_records(setting, kernel, check, known, &environment) {
                finished.records.append(&mut records);
                finished.known += 1;
                continue;
            }
            if check == Check::Threads && kernel.on_gpu() {
                finished.left.push(left("it runs on the GPU".to_owned()));
                continue;
            }
            match compared(setting, kernel, check, &mut || progress(&step)) {
                Ok(found) => {
                    let records = records_of(setting, kernel, check, &found, &environment)?;
                    keep(&records)?;
                    finished.records.extend(records);
                }
                Err(Error::Stopped) => return Ok(Finished { stopped: true, ..finished }),
                Err(Error::Unsupported { reason, .. }) => finished.left.push(left(reason)),
                Err(error) => return Err(error),
            }
        }
    }
    Ok(finished)
}

/// Results by name.
type Named = Vec<(&'static str, Tensor)>;

/// All tensors of the call, each compared over the runs of `check` with the first run.
fn compared(
    setting: &Setting,
    kernel: &dyn Kernel,
    check: Check,
    go_on: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Vec<Sameness>> {
    if !kernel.ops().contains(&setting.op) {
        let reason = format!("it does not implement {}", setting.op);
        return Err(Error::Unsupported { kernel: kernel.name().to_owned(), reason });
    }
    let mut ask = || if go_on().is_break() { Err(Error::Stopped) } else { Ok(()) };
    ask()?;
    let inputs = setting.inputs(setting.seed, setting.shape.tokens)?.rounded_to(kernel.input_format());
    let first = named(results(kernel, &inputs)?);
    let mut all: Vec<Sameness> = first.into_iter().map(|(name, tensor)| Sameness::with(name, tensor)).collect();
    let mut add = |run: &str, found: Named| -> Result<()> {
        all.iter_mut().zip(&found).try_for_each(|(same, (_, tensor))| same.add(run, tensor))
    };
    match check {
        Check::Launches | Check::Load => {
            let load = (check == Check::Load).then(|| Load::start(kernel.on_gpu())).transpose()?;
            for run in 1..=setting.launches {
                ask()?;
                add(&format!("launch {run}"), named(results(kernel, &inputs)?))?;
            }
            load.map_or(Ok(()), Load::stop)?;
        }
        Check::Threads => {
            for threads in THREADS {
                ask()?;
                let pool = ThreadPoolBuilder::new().num_threads(threads).build();
                let pool = pool.map_err(|error| Error::input(format!("{threads} threads: {error}")))?;
                add(&format!("{threads} threads"), named(pool.install(|| results(kernel, &inputs))?))?;
            }
        }
        Check::Packing | Check::Batch => {
            for arrangement in arrangements(check) {
                ask()?;
                let other = |index: usize, tokens: usize| setting.inputs(setting.seed + 1 + index as u64, tokens);
                let (together, at) = arrangement.around(&inputs, other)?;
                let found = results(kernel, &together.rounded_to(kernel.input_format()))?;
                add(&arrangement.to_string(), packing::cut(&found, &together, at)?)?;
            }
        }
    }
    Ok(all)
}

/// Forward and backward, or the forward where there is no backward.
fn results(kernel: &dyn Kernel, inputs: &Inputs) -> Result<Results> {
    if kernel.has_backward() { kernel.backward(inputs) } else { kernel.forward(inputs) }
}

fn named(results: Results) -> Named {
    results.named().into_iter().map(|(name, tensor)| (name, tensor.clone())).collect()
}

fn records_of(
    setting: &Setting,
    kernel: &dyn Kernel,
    check: Check,
    found: &[Sameness],
    environment: &Environment,
) -> Result<Vec<Record>> {
    let environment = environment.of_kernel(kernel);
    let record = |same: &Sameness| {
        let workload = setting.workload(kernel).pass(Pass::of_tensor(same.tensor()));
        Ok(Record::new(&environment, &workload, Measurement::Determinism(same.record(check, kernel.mode())?)))
    };
    found.iter().map(record).collect()
}

/// The records of a check among `known`, the newest of each tensor, made by the same code on the same machine.
fn known_records(
    setting: &Setting,
    kernel: &dyn Kernel,
    check: Check,
    known: &[Record],
    environment: &Environment,
) -> Option<Vec<Record>> {
    let Environment { commit: Some(commit), dirty: Some(false), .. } = environment else { return None };
    let workload = setting.workload(kernel);
    let mut found: Vec<(&Determinism, &Record)> = Vec::new();
    for record in known {
        let Measurement::Determinism(determinism) = &record.measurement else { continue };
        let code = &record.environment;
        let same_code = code.commit.as_ref() == Some(commit)
            && code.dirty == Some(false)
            && code.machine.cpu == environment.machine.cpu
            && code.machine.gpu.is_some() == kernel.on_gpu();
        let same_work = Workload { pass: None, ..record.workload.clone() } == workload
            && determinism.check == check.name()
            && determinism.runs == setting.runs(check);
        if same_code && same_work {
            found.retain(|(earlier, _)| earlier.errors.tensor != determinism.errors.tensor);
            found.push((determinism, record));
        }
    }
    (!found.is_empty()).then(|| found.into_iter().map(|(_, record)| record.clone()).collect())
}

#[cfg(test)]
mod tests;
