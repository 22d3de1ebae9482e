//! GDN kernels on a list of cases: checked, timed, and turned into records.

use super::check::{self, Verdict};
use super::tensors::REGIME;
use super::{Case, Ceilings, Samples, Stopwatch, Subject, Tensors};
use crate::cost::Cost;
use crate::numerics::Step;
use crate::precision::Format;
use crate::record::{Environment, Measurement, Record, Timing};
use crate::table::Mode;
use crate::{Error, Result};
use std::ops::ControlFlow;

/// Seed of the inputs.
pub const SEED: u64 = 1;

/// One subject on one case.
#[derive(Clone, Debug)]
pub struct Row {
    /// The case.
    pub case: Case,
    /// Name of the subject.
    pub kernel: String,
    /// Its mode.
    pub mode: &'static str,
    /// The format that it takes its inputs in.
    pub input_format: Format,
    /// Versions and settings of other people's software that it depends on.
    pub software: Option<String>,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of a subject on a case.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Its results are right, and this is its time.
    Timed(Samples),
    /// Its results are not right, in words; it was not timed.
    Wrong(String),
    /// It could not run, in words.
    Failed(String),
}

impl Outcome {
    /// The samples, where it was timed.
    pub fn samples(&self) -> Option<&Samples> {
        match self {
            Self::Timed(samples) => Some(samples),
            Self::Wrong(_) | Self::Failed(_) => None,
        }
    }
}

/// What was measured.
#[derive(Clone, Debug, Default)]
pub struct Finished {
    /// In the order of the cases.
    pub rows: Vec<Row>,
    /// Whether it was stopped before the end.
    pub stopped: bool,
}

impl Row {
    /// The samples, where it was timed.
    pub fn samples(&self) -> Option<&Samples> {
        self.outcome.samples()
    }

    /// Cost and floor in milliseconds at the rates of `ceilings`, and the words for where those come from.
    pub fn cost(&self, ceilings: &Ceilings<'_>) -> (Cost, f64, String) {
        let (rates, basis) = ceilings.rates(Mode::of(self.mode).format);
        let cost = self.case.cost(self.input_format.bytes(), &rates);
        (cost, cost.floor_ms(&rates), basis)
    }
}

/// Lets every subject run every case. `watch` is told what comes next, and is asked between samples too; where it breaks,
/// what was measured so far is returned.
///
/// A subject that fails or is wrong on one case is tried on the others.
///
/// # Errors
/// What cannot be blamed on one subject: inputs that cannot be made.
pub fn run(
    cases: &[Case],
    subjects: &[&dyn Subject],
    stopwatch: &mut dyn Stopwatch,
    mut watch: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Finished> {
    let mut finished = Finished::default();
    let mut checked = Checked::default();
    let total = cases.len() * subjects.len();
    for case in cases {
        let mut made: Option<Tensors> = None;
        for subject in subjects {
            let step = Step { done: finished.rows.len(), total, name: format!("{} {case}", subject.name()) };
            let mut go_on = || watch(&step);
            if go_on().is_break() {
                return Ok(Finished { stopped: true, ..finished });
            }
            let format = subject.input_format();
            let tensors = match made.take().filter(|tensors| tensors.format == format) {
                Some(tensors) => tensors,
                None => Tensors::generate(case, format, SEED)?,
            };
            let one = One { subject: *subject, case, tensors: &tensors };
            let outcome = match one.measure(&mut checked, stopwatch, &mut go_on) {
                Ok(outcome) => outcome,
                Err(Error::Stopped) => return Ok(Finished { stopped: true, ..finished }),
                Err(error) => Outcome::Failed(error.to_string()),
            };
            made = Some(tensors);
            finished.rows.push(one_row(*subject, case, outcome));
        }
    }
    Ok(finished)
}

fn one_row(subject: &dyn Subject, case: &Case, outcome: Outcome) -> Row {
    Row {
        case: case.clone(),
        kernel: subject.name().to_owned(),
        mode: subject.mode(),
        input_format: subject.input_format(),
        software: subject.software(),
        outcome,
    }
}

/// One subject, one case, and its inputs.
struct One<'a> {
    subject: &'a dyn Subject,
    case: &'a Case,
    tensors: &'a Tensors,
}

impl One<'_> {
    fn measure(
        &self,
        checked: &mut Checked,
        stopwatch: &mut dyn Stopwatch,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Outcome> {
        let Self { subject, case, tensors } = *self;
        if let Verdict::Wrong(why) = checked.small(subject, case, stopwatch)? {
            return Ok(Outcome::Wrong(format!("on a small case of this configuration, {why}")));
        }
        let mut loaded = subject.load(case.pass, tensors)?;
        check::run(loaded.as_mut(), stopwatch)?;
        if let Verdict::Wrong(why) = check::timed(subject, case.pass, tensors, loaded.as_ref())? {
            return Ok(Outcome::Wrong(format!("on the last sequence and q/k head of the case, {why}")));
        }
        Ok(Outcome::Timed(stopwatch.time(loaded.as_ref(), go_on)?))
    }
}

/// Verdicts on small cases, each found once.
#[derive(Default)]
struct Checked {
    known: Vec<(String, Verdict)>,
}

impl Checked {
    fn small(&mut self, subject: &dyn Subject, case: &Case, stopwatch: &mut dyn Stopwatch) -> Result<Verdict> {
        let small = check::small_inputs(case)?;
        let key = format!("{} {} {} {:?}", subject.name(), case.pass_name(), small.shape, small.cu_seqlens);
        if let Some((_, verdict)) = self.known.iter().find(|(known, _)| *known == key) {
            return Ok(verdict.clone());
        }
        let verdict = check::small(subject, &small, case.pass, stopwatch)?;
        self.known.push((key, verdict.clone()));
        Ok(verdict)
    }
}

/// The rows that were timed, and the measured copy bandwidth, as records.
pub fn records(rows: &[Row], ceilings: &Ceilings<'_>, environment: &Environment) -> Vec<Record> {
    let copy = Record::new(environment, &ceilings.copy().workload(), ceilings.copy().measurement());
    let timed = rows.iter().filter_map(|row| {
        let samples = row.samples()?;
        let (cost, floor_ms, floor_basis) = row.cost(ceilings);
        let best = row.case.best_peer();
        let timing = Timing {
            peer: best.map(|peer| peer.name.clone()),
            peer_ms: best.map(|peer| peer.ms),
            peer_source: best.map(|peer| peer.source.to_owned()),
            ..samples.timing(&cost, floor_ms, floor_basis)
        };
        let workload = row.case.workload().kernel(&row.kernel, row.mode).inputs(REGIME, SEED);
        let environment = Environment { software: row.software.clone(), ..environment.clone() };
        Some(Record::new(&environment, &workload, Measurement::Bench(timing)))
    });
    std::iter::once(copy).chain(timed).collect()
}

#[cfg(test)]
#[path = "gdn_tests.rs"]
mod tests;
