//! GDN kernels on a list of cases: checked, timed, and turned into records.

use super::check::{self, Verdict};
use super::peers::set_beside;
use super::tensors::REGIME;
use super::{Case, Ceilings, Samples, Stopwatch, Subject, Tensors};
use crate::cost::Cost;
use crate::numerics::Step;
use crate::precision::Format;
use crate::record::{Environment, Measurement, Pass, Record, Timing, Workload};
use crate::sweep::Known;
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
    /// The record that its time was taken from, where it was not measured now.
    pub recorded: Option<Record>,
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

    /// This row as a record: the one that it comes from, or that of its time now, where it has one.
    pub fn record(&self, ceilings: &Ceilings<'_>, environment: &Environment) -> Option<Record> {
        if let Some(record) = &self.recorded {
            return Some(record.clone());
        }
        let samples = self.samples()?;
        let (cost, floor_ms, floor_basis) = self.cost(ceilings);
        let best = self.case.best_peer();
        let timing = Timing {
            peer: best.map(|peer| peer.name.clone()),
            peer_ms: best.map(|peer| peer.ms),
            peer_source: best.map(|peer| peer.source.to_owned()),
            ..samples.timing(&cost, floor_ms, floor_basis)
        };
        let environment = Environment { software: self.software.clone(), ..environment.clone() };
        Some(Record::new(&environment, &workload(&self.case, &self.kernel, self.mode), Measurement::Bench(timing)))
    }
}

/// What a record says of a case under a kernel.
fn workload(case: &Case, kernel: &str, mode: &str) -> Workload {
    case.workload().kernel(kernel, mode).inputs(REGIME, SEED)
}

/// Lets every subject run every case, but for cases that `known` has under every subject: those are taken from there, with
/// the times of others as they were then. All rows of a case go to `keep` as soon as the case is done, its peers set
/// beside the others. `watch` is told what comes next, and is asked between samples too; where it breaks, what was measured
/// so far is returned.
///
/// A subject that fails or is wrong on one case is tried on the others.
///
/// # Errors
/// What `keep` returns, and what cannot be blamed on one subject: inputs that cannot be made.
pub fn run(
    cases: &[Case],
    subjects: &[&dyn Subject],
    stopwatch: &mut dyn Stopwatch,
    known: &Known<'_>,
    keep: &mut dyn FnMut(&[Row]) -> Result<()>,
    mut watch: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Finished> {
    let mut finished = Finished::default();
    let mut checked = Checked::default();
    let mut before: Option<Tensors> = None;
    let peers: Vec<&str> = subjects.iter().filter(|subject| subject.is_peer()).map(|subject| subject.name()).collect();
    let total = cases.len() * subjects.len();
    for case in cases {
        let mut rows = recorded(case, subjects, known);
        if rows.is_empty() {
            let mut one = One { case, tensors: before.take(), checked: &mut checked };
            for subject in subjects {
                let done = finished.rows.len() + rows.len();
                let step = Step { done, total, name: format!("{} {case}", subject.name()) };
                match one.row(*subject, stopwatch, &mut || watch(&step))? {
                    Some(row) => rows.push(row),
                    None => finished.stopped = true,
                }
                if finished.stopped {
                    break;
                }
            }
            before = one.tensors;
            set_beside(&mut rows, &peers);
            keep(&rows)?;
        } else {
            set_beside(&mut rows, &peers);
        }
        finished.rows.append(&mut rows);
        if finished.stopped {
            break;
        }
    }
    Ok(finished)
}

/// The rows of `case` under every subject as they were recorded, the newest where there are several; none where one is
/// missing.
fn recorded(case: &Case, subjects: &[&dyn Subject], known: &Known<'_>) -> Vec<Row> {
    let row = |subject: &&dyn Subject| {
        let workload = workload(case, subject.name(), subject.mode());
        let timed = |record: &Record| matches!(record.measurement, Measurement::Bench(_));
        let record = known.of(&workload, timed).max_by_key(|record| record.environment.utc.as_deref())?;
        let Measurement::Bench(timing) = &record.measurement else { return None };
        let samples = Samples::new(timing.samples_ms.clone().unwrap_or_else(|| vec![timing.latency_ms])).ok()?;
        let row = one_row(*subject, case, Outcome::Timed(samples));
        Some(Row { software: record.environment.software.clone(), recorded: Some(record.clone()), ..row })
    };
    subjects.iter().map(row).collect::<Option<Vec<Row>>>().unwrap_or_default()
}

fn one_row(subject: &dyn Subject, case: &Case, outcome: Outcome) -> Row {
    Row {
        case: case.clone(),
        kernel: subject.name().to_owned(),
        mode: subject.mode(),
        input_format: subject.input_format(),
        software: subject.software(),
        outcome,
        recorded: None,
    }
}

/// One case, the inputs of the last subject that ran it or of the case before, and what is known of small cases.
struct One<'a> {
    case: &'a Case,
    tensors: Option<Tensors>,
    checked: &'a mut Checked,
}

impl One<'_> {
    /// The row of `subject`; `None` where `go_on` breaks before it is finished.
    fn row(
        &mut self,
        subject: &dyn Subject,
        stopwatch: &mut dyn Stopwatch,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<Row>> {
        if go_on().is_break() {
            return Ok(None);
        }
        let tensors = self.tensors_in(subject.input_format())?;
        let outcome = match self.measure(subject, &tensors, stopwatch, go_on) {
            Ok(outcome) => outcome,
            Err(Error::Stopped) => return Ok(None),
            Err(error) => Outcome::Failed(error.to_string()),
        };
        self.tensors = Some(tensors);
        Ok(Some(one_row(subject, self.case, outcome)))
    }

    /// The inputs of the case in `format`.
    fn tensors_in(&mut self, format: Format) -> Result<Tensors> {
        let before = self.tensors.take();
        let is_of_case = |tensors: &Tensors| {
            tensors.format == format
                && tensors.shape == self.case.shape
                && tensors.sequences == self.case.sequences()
                && tensors.gradients.is_some() == (self.case.pass == Pass::Bwd)
        };
        match before {
            Some(tensors) if is_of_case(&tensors) => Ok(tensors),
            before => Tensors::generate_in(before, self.case, format, SEED),
        }
    }

    fn measure(
        &mut self,
        subject: &dyn Subject,
        tensors: &Tensors,
        stopwatch: &mut dyn Stopwatch,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Outcome> {
        let pass = self.case.pass;
        if let Verdict::Wrong(why) = self.checked.small(subject, self.case, stopwatch)? {
            return Ok(Outcome::Wrong(format!("on a small case of this configuration, {why}")));
        }
        let mut loaded = subject.load(pass, tensors)?;
        check::run(loaded.as_mut(), stopwatch)?;
        if let Verdict::Wrong(why) = check::timed(subject, pass, tensors, loaded.as_ref())? {
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
        let small = check::small_inputs(case, subject.is_peer())?;
        let key = format!("{} {} {} {:?}", subject.name(), case.pass_name(), small.shape, small.cu_seqlens);
        if let Some((_, verdict)) = self.known.iter().find(|(known, _)| *known == key) {
            return Ok(verdict.clone());
        }
        let verdict = check::small(subject, &small, case.pass, stopwatch)?;
        self.known.push((key, verdict.clone()));
        Ok(verdict)
    }
}

#[cfg(test)]
#[path = "gdn_tests.rs"]
mod tests;
