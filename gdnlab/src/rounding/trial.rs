//! One row of the experiment, and the loop over rows: with progress, a way to stop, and without what is known already.

use super::setting::Problem;
use super::{Normalisation, Setting};
use crate::chunked::Chunked;
use crate::compare::compare_results;
use crate::kernel::Kernel;
use crate::numerics::Step;
use crate::precision::{Format, Policy};
use crate::record::{Environment, Errors, Measurement, Pass, Precision, Record, Workload};
use crate::reference::Reference;
use crate::{Error, Result};
use std::ops::ControlFlow;

/// Tokens of a chunk.
pub(super) const CHUNK: usize = 64;

/// Characters of the name of a trial, at the most.
const LINE: usize = 90;

/// Whose errors a trial gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tensors {
    /// `o`, from a forward.
    Output,
    /// `o` and `final_state`, and the gradients dq, dk, dv, dg, db, dw and dh0.
    All,
    /// The gradients.
    Gradients,
}

impl Tensors {
    /// Their names in tensor files.
    pub fn names(self) -> &'static [&'static str] {
        const ALL: [&str; 9] = ["o", "final_state", "dq", "dk", "dv", "dg", "db", "dw", "dh0"];
        match self {
            Self::Output => &ALL[..1],
            Self::All => &ALL,
            Self::Gradients => &ALL[2..],
        }
    }

    fn need_gradients(self) -> bool {
        self != Self::Output
    }
}

/// One row: a policy on a problem.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The problem.
    pub setting: Setting,
    /// What is changed; all rows of one table have the same.
    pub base: String,
    /// What changed it.
    pub step: String,
    /// The format that the step was given, where it is one format.
    pub format: Option<Format>,
    /// The policy that results.
    pub policy: Policy,
    /// q and k as the kernel has them.
    pub normalisation: Normalisation,
    /// q and k as the truth has them.
    pub truth: Normalisation,
    /// Whose errors are wanted.
    pub tensors: Tensors,
}

impl Trial {
    /// What it is, in at most a line.
    fn name(&self) -> String {
        let name = format!("{}: {}", self.base, self.step);
        if name.chars().count() <= LINE { name } else { name.chars().take(LINE - 3).collect::<String>() + "..." }
    }

    fn workload(&self) -> Workload {
        self.setting.workload().kernel("cpu-chunk", &self.base)
    }

    fn precision(&self, errors: Errors) -> Precision {
        let format = self.format.map(|format| format.name().to_owned());
        Precision { base: self.base.clone(), step: self.step.clone(), format, errors }
    }

    fn measure(&self, problem: &mut Problem, environment: &Environment) -> Result<Vec<Record>> {
        let kernel = Chunked::new("cpu-chunk", self.policy.clone(), CHUNK)?;
        problem.truth(self.truth)?;
        let inputs = problem.inputs(self.normalisation);
        let found = if self.tensors.need_gradients() { kernel.backward(inputs)? } else { kernel.forward(inputs)? };
        let comparisons = compare_results(&found, problem.truth(self.truth)?)?;
        let u = self.format.unwrap_or(Format::Bf16).unit_roundoff();
        let wanted = comparisons.iter().filter(|comparison| self.tensors.names().contains(&comparison.tensor.as_str()));
        let record = |comparison| {
            let errors = Errors::new(comparison, u);
            let workload = self.workload().pass(Pass::of_tensor(&errors.tensor));
            Record::new(environment, &workload, Measurement::Precision(self.precision(errors)))
        };
        Ok(wanted.map(record).collect())
    }

    /// The records of this trial among `known`, made by the same code on the same machine; `None` unless all are there.
    fn known(&self, known: &[Record], environment: &Environment) -> Option<Vec<Record>> {
        let Environment { commit: Some(commit), dirty: Some(false), .. } = environment else { return None };
        let same = |record: &&Record| {
            let code = &record.environment;
            code.commit.as_ref() == Some(commit)
                && code.dirty == Some(false)
                && code.machine == environment.machine
                && Workload { pass: None, ..record.workload.clone() } == self.workload()
        };
        let of_trial: Vec<&Record> = known.iter().filter(same).collect();
        let of_tensor = |name: &&str| {
            let found = of_trial.iter().rfind(|record| {
                record.precision().is_some_and(|found| {
                    found.errors.tensor == **name && *found == self.precision(found.errors.clone())
                })
            })?;
            Some((*found).clone())
        };
        self.tensors.names().iter().map(of_tensor).collect()
    }
}

/// What came of a list of trials.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// One record for each trial and tensor, in the order of the trials.
    pub records: Vec<Record>,
    /// Whether it was stopped before the last trial: called again with these records as the known ones, it goes on.
    pub stopped: bool,
}

/// Measures `trials` one after the other. A trial whose records are in `known`, of the same commit without changes and the
/// same machine, is not measured again. `keep` gets the records of each trial that was measured, as soon as they are there.
/// Stops where `progress` says so, and returns what was found until then.
///
/// # Errors
/// [`Error::Input`] where a setting is not valid, and what `keep` returns.
pub fn run(
    trials: &[Trial],
    known: &[Record],
    keep: &mut dyn FnMut(&[Record]) -> Result<()>,
    progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Finished> {
    run_in(&Environment::detect().of_kernel(&Reference), trials, known, keep, progress)
}

/// The records of `trials`, all of them measured now.
///
/// # Errors
/// As [`run`], and [`Error::Stopped`] where `progress` said so.
pub fn measure(trials: &[Trial], progress: impl FnMut(&Step) -> ControlFlow<()>) -> Result<Vec<Record>> {
    let finished = run(trials, &[], &mut |_| Ok(()), progress)?;
    if finished.stopped { Err(Error::Stopped) } else { Ok(finished.records) }
}

/// [`run`] with the code and the machine given.
pub(super) fn run_in(
    environment: &Environment,
    trials: &[Trial],
    known: &[Record],
    keep: &mut dyn FnMut(&[Record]) -> Result<()>,
    mut progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Finished> {
    let mut problem: Option<Problem> = None;
    let mut records = Vec::new();
    for (done, trial) in trials.iter().enumerate() {
        let name = trial.name();
        if progress(&Step { done, total: trials.len(), name }).is_break() {
            return Ok(Finished { records, stopped: true });
        }
        if let Some(mut found) = trial.known(known, environment) {
            records.append(&mut found);
            continue;
        }
        let gradients = trial.tensors.need_gradients();
        let fits = |problem: &Problem| problem.setting == trial.setting && problem.gradients == gradients;
        let mut current = match problem.take().filter(fits) {
            Some(same) => same,
            None => Problem::new(trial.setting, gradients)?,
        };
        let mut measured = trial.measure(&mut current, environment)?;
        problem = Some(current);
        keep(&measured)?;
        records.append(&mut measured);
    }
    Ok(Finished { records, stopped: false })
}
