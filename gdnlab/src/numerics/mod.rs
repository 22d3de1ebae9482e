//! Day 1's experiment: errors of kernels against the float64 recurrence on the same rounded inputs, over shapes, and
//! after one step of a policy was changed; and on calls from elsewhere ([`Given`]). Long lists run in parts, and again
//! from where they were stopped ([`Sweep`]).

mod ablation;

pub use ablation::{Variant, ablation};

use crate::bench::SeqLens;
use crate::compare::{compare_results, tolerance};
use crate::inputs::{Regime, generate};
use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Results, Shape};
use crate::record::{Environment, Errors, Measurement, Pass, Record, Workload};
use crate::reference::Reference;
use crate::sweep::{Known, Shard};
use crate::{Error, Result};
use std::ops::ControlFlow;

/// `(T, d_k, d_v)` of the nine rows of the Day 1 tables.
pub const DAY1_SHAPES: [(usize, usize, usize); 9] = [
    (256, 64, 64),
    (256, 64, 128),
    (256, 128, 128),
    (1024, 64, 64),
    (1024, 64, 128),
    (1024, 128, 128),
    (4096, 64, 64),
    (4096, 64, 128),
    (4096, 128, 128),
];

/// Heads of the Day 1 problems; the batch is 1.
pub const DAY1_HEADS: usize = 2;

/// The problems of an experiment: each shape in each regime.
#[derive(Clone, Debug)]
pub struct Problems {
    /// Operator.
    pub op: Op,
    /// Shapes, in the order in which they run.
    pub shapes: Vec<Shape>,
    /// Input regimes.
    pub regimes: Vec<Regime>,
    /// Seed of the inputs.
    pub seed: u64,
    /// Lengths of packed sequences, which begin from a state then; their sum is `T` of every shape.
    pub packing: Option<SeqLens>,
}

impl Problems {
    /// GDN on the nine shapes of Day 1.
    pub fn day1(regimes: &[Regime], seed: u64) -> Self {
        let shapes = DAY1_SHAPES.map(|(t, k, v)| Shape::new(t, DAY1_HEADS, k, v)).to_vec();
        Self { op: Op::Gdn, shapes, regimes: regimes.to_vec(), seed, packing: None }
    }

    /// Each problem: its place in the list is the same wherever the list is made.
    fn each(&self) -> impl Iterator<Item = Problem<'_>> {
        self.shapes.iter().flat_map(move |shape| {
            self.regimes.iter().map(move |&regime| Problem {
                workload: self.workload(shape).inputs(regime.name(), self.seed),
                shape: *shape,
                is_seeded: true,
                inputs: Box::new(move || self.inputs(shape, regime)),
            })
        })
    }

    fn inputs(&self, shape: &Shape, regime: Regime) -> Result<Inputs> {
        let inputs = generate(self.op, shape, regime, self.seed)?;
        let Some(packing) = &self.packing else { return Ok(inputs) };
        let cu_seqlens: Vec<usize> =
            std::iter::once(0).chain(packing.ranges().into_iter().map(|tokens| tokens.end)).collect();
        inputs.with_initial_state(self.seed).packed(&cu_seqlens, self.seed)
    }

    /// What a record says of the problem of `shape`, the inputs aside.
    pub(crate) fn workload(&self, shape: &Shape) -> Workload {
        let seqlens = self.packing.as_ref().map(SeqLens::to_string);
        Workload { seqlens, ..Workload::new(self.op, shape) }
    }
}

/// One call, made when it is its turn.
struct Problem<'a> {
    /// What a record says of it.
    workload: Workload,
    shape: Shape,
    /// Whether the workload says all of its inputs, so that a record of it can stand for a measurement.
    is_seeded: bool,
    inputs: Box<dyn Fn() -> Result<Inputs> + 'a>,
}

/// A call from elsewhere than [`generate`], such as a layer of a trained model.
#[derive(Clone, Debug)]
pub struct Given {
    /// The call; with `do`, or only the forward is measured.
    pub inputs: Inputs,
    /// Name of its distribution, in the place of a regime.
    pub name: String,
}

impl Given {
    fn workload(&self) -> Workload {
        Workload { regime: Some(self.name.clone()), ..Workload::new(self.inputs.op(), &self.inputs.shape) }
    }

    fn problem(&self) -> Problem<'_> {
        let inputs = Box::new(|| Ok(self.inputs.clone()));
        Problem { workload: self.workload(), shape: self.inputs.shape, is_seeded: false, inputs }
    }
}

/// What kernels are measured on.
#[derive(Clone, Copy, Debug)]
pub enum Calls<'a> {
    /// Seeded inputs.
    Problems(&'a Problems),
    /// Calls from elsewhere, of one operator.
    Given(&'a [Given]),
}

impl<'a> Calls<'a> {
    /// # Errors
    /// [`Error::Input`] for calls of different operators, or none.
    fn op(&self) -> Result<Op> {
        let given = match self {
            Self::Problems(problems) => return Ok(problems.op),
            Self::Given(given) => given,
        };
        let op = given.first().map(|given| given.inputs.op());
        let Some(op) = op else { return Err(Error::input("no calls to measure on: expected at least one")) };
        match given.iter().find(|given| given.inputs.op() != op) {
            Some(other) => Err(Error::input(format!(
                "'{}' is not a call of {op}: expected one operator for all calls",
                other.name
            ))),
            None => Ok(op),
        }
    }

    /// How many there are.
    pub fn count(self) -> usize {
        self.each().len()
    }

    fn each(self) -> Vec<Problem<'a>> {
        match self {
            Self::Problems(problems) => problems.each().collect(),
            Self::Given(given) => given.iter().map(Given::problem).collect(),
        }
    }
}

/// Which of the calls run, and what becomes of the records.
pub struct Sweep<'a> {
    /// The part of the calls. All kernels run a call one after the other, since they share its float64 truth.
    pub shard: Shard,
    /// Records: what they hold of this code and machine on seeded inputs is not measured again.
    pub records: &'a [Record],
    /// Is given the records of one kernel on one call as soon as they are there.
    pub keep: Box<Keep<'a>>,
    /// Is told which step failed, and why. The others go on unless it returns an error.
    pub fail: Box<Fail<'a>>,
}

/// Takes records of which none is to be lost.
pub type Keep<'a> = dyn FnMut(&[Record]) -> Result<()> + 'a;
/// Takes what failed.
pub type Fail<'a> = dyn FnMut(&Step, Error) -> Result<()> + 'a;

impl Sweep<'_> {
    /// Everything, anew, and only returned; the first failure ends it.
    pub fn whole() -> Self {
        Self { shard: Shard::default(), records: &[], keep: Box::new(|_| Ok(())), fail: Box::new(|_, why| Err(why)) }
    }
}

/// One step of long work: `done` of `total` are finished, `name` is next. Return [`ControlFlow::Break`] to stop.
#[derive(Clone, Debug)]
pub struct Step {
    /// Steps that are finished.
    pub done: usize,
    /// All steps.
    pub total: usize,
    /// What comes next.
    pub name: String,
}

/// The float64 truths of one problem, one for each input format that was asked for.
struct Truths {
    inputs: Inputs,
    known: Vec<(Format, Inputs, Results)>,
}

impl Truths {
    fn new(inputs: Inputs) -> Self {
        Self { inputs, known: Vec::new() }
    }

    /// The inputs rounded to `format`, and what the recurrence makes of them.
    fn of(&mut self, format: Format) -> Result<(&Inputs, &Results)> {
        if !self.known.iter().any(|(known, ..)| *known == format) {
            let rounded = self.inputs.rounded_to(format);
            let truth =
                if rounded.d_o.is_some() { Reference.backward(&rounded)? } else { Reference.forward(&rounded)? };
            self.known.push((format, rounded, truth));
        }
        self.known
            .iter()
            .find(|(known, ..)| *known == format)
            .map(|(_, inputs, truth)| (inputs, truth))
            .ok_or_else(|| Error::input(format!("no truth for {format} inputs")))
    }

    /// The errors of each tensor of `kernel`, forward and, where it has one, backward.
    fn errors(&mut self, kernel: &dyn Kernel) -> Result<Vec<Errors>> {
        let (inputs, truth) = self.of(kernel.input_format())?;
        let comparisons = if kernel.has_backward() && truth.grads.is_some() {
            compare_results(&kernel.backward(inputs)?, truth)?
        } else {
            compare_results(&kernel.forward(inputs)?, &Results { grads: None, ..truth.clone() })?
        };
        comparisons
            .iter()
            .map(|comparison| {
                let class = crate::compare::TensorClass::of(&comparison.tensor)?;
                Ok(Errors::new(comparison, tolerance(kernel.mode(), class)?.unit_roundoff()))
            })
            .collect()
    }
}

/// Runs every kernel on every problem; one record for each result tensor.
///
/// # Errors
/// [`Error::Stopped`] where `progress` asked to stop, [`Error::Unsupported`] where a kernel does not implement the
/// operator, and whatever a kernel or the generation of inputs reports.
pub fn run(
    problems: &Problems,
    kernels: &[&dyn Kernel],
    progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Vec<Record>> {
    sweep(Calls::Problems(problems), kernels, Sweep::whole(), progress)
}

/// The same on calls from elsewhere, forward and, where a call has `do` and a kernel a backward, backward.
///
/// # Errors
/// As [`run`], and [`Error::Input`] for calls of different operators.
pub fn run_given(
    given: &[Given],
    kernels: &[&dyn Kernel],
    progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Vec<Record>> {
    if given.is_empty() { Ok(Vec::new()) } else { sweep(Calls::Given(given), kernels, Sweep::whole(), progress) }
}

/// Runs every kernel on those of the calls that `sweep` says; one record for each result tensor, the recorded ones among
/// them.
///
/// # Errors
/// As [`run_given`], and what `sweep.keep` and `sweep.fail` return. What was kept before an error stays kept.
pub fn sweep(
    calls: Calls<'_>,
    kernels: &[&dyn Kernel],
    sweep: Sweep<'_>,
    progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Vec<Record>> {
    measure(calls, &subjects(calls.op()?, kernels)?, sweep, progress)
}

/// The kernels as they are, once it is known that each implements `op`.
fn subjects<'a>(op: Op, kernels: &[&'a dyn Kernel]) -> Result<Vec<Subject<'a>>> {
    let subject = |&kernel: &&'a dyn Kernel| {
        if !kernel.ops().contains(&op) {
            let reason = format!("it does not implement {op}");
            return Err(Error::Unsupported { kernel: kernel.name().to_owned(), reason });
        }
        Ok(Subject {
            kernel,
            title: format!("{} {op}", kernel.name()),
            mode: kernel.mode(),
            measurement: Box::new(Measurement::Numerics),
        })
    };
    kernels.iter().map(subject).collect()
}

/// A kernel under test, and what its errors are a measurement of.
struct Subject<'a> {
    kernel: &'a dyn Kernel,
    title: String,
    mode: &'a str,
    measurement: Box<dyn Fn(Errors) -> Measurement + 'a>,
}

impl Subject<'_> {
    /// The workload of `problem` under this kernel, the pass aside.
    fn workload(&self, problem: &Problem<'_>) -> Workload {
        problem.workload.clone().kernel(self.kernel.name(), self.mode)
    }

    /// The newest record of each tensor of `problem` that `records` have of this code and machine; none unless all are
    /// there.
    fn recorded(&self, problem: &Problem<'_>, records: &[Record], now: &Environment) -> Vec<Record> {
        if records.is_empty() || !problem.is_seeded {
            return Vec::new();
        }
        let known = Known::new(records, &now.of_kernel(self.kernel));
        let mut found: Vec<Record> = Vec::new();
        let passes = if self.kernel.has_backward() { &[Pass::Fwd, Pass::Bwd][..] } else { &[Pass::Fwd] };
        for &pass in passes {
            let workload = self.workload(problem).pass(pass);
            let mut of_pass: Vec<&Record> = known
                .of(&workload, |record| record.errors().is_some_and(|errors| self.is_of(record, errors)))
                .collect();
            of_pass.sort_by_key(|record| record.environment.utc.as_deref());
            let before = found.len();
            for record in of_pass {
                let tensor = |record: &Record| record.errors().map(|errors| errors.tensor.clone());
                found.retain(|earlier| tensor(earlier) != tensor(record));
                found.push(record.clone());
            }
            // Fewer are what an interrupted write left.
            if found.len() - before < tensors(pass, workload.op.as_deref()) {
                return Vec::new();
            }
        }
        found
    }

    /// Whether `record` with its `errors` is a measurement of this subject.
    fn is_of(&self, record: &Record, errors: &Errors) -> bool {
        (self.measurement)(errors.clone()) == record.measurement
    }
}

/// How many tensors a pass gives: output and final state, or the gradients of q, k, v, g, the other gates and the initial state.
fn tensors(pass: Pass, op: Option<&str>) -> usize {
    match (pass, op) {
        (Pass::Bwd, Some("gdn2")) => 7,
        (Pass::Bwd, _) => 6,
        _ => 2,
    }
}

fn measure(
    calls: Calls<'_>,
    subjects: &[Subject<'_>],
    sweep: Sweep<'_>,
    progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Vec<Record>> {
    measure_at(&Environment::detect(), calls, subjects, sweep, progress)
}

/// [`measure`] by the code and on the machine of `now`.
fn measure_at(
    now: &Environment,
    calls: Calls<'_>,
    subjects: &[Subject<'_>],
    mut sweep: Sweep<'_>,
    mut progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Vec<Record>> {
    let problems: Vec<Problem<'_>> = sweep.shard.of(calls.each()).collect();
    let total = problems.len() * subjects.len();
    let mut records = Vec::new();
    for (at, problem) in problems.iter().enumerate() {
        let mut truths = None;
        for (index, subject) in subjects.iter().enumerate() {
            let mut recorded = subject.recorded(problem, sweep.records, now);
            if !recorded.is_empty() {
                records.append(&mut recorded);
                continue;
            }
            let regime = problem.workload.regime.as_deref().unwrap_or_default();
            let name = format!("{}, {} {regime}", subject.title, problem.shape);
            let step = Step { done: at * subjects.len() + index, total, name };
            if progress(&step).is_break() {
                return Err(Error::Stopped);
            }
            let truths = match &mut truths {
                Some(truths) => truths,
                none => none.insert(Truths::new((problem.inputs)()?)),
            };
            let errors_per_tensor = match truths.errors(subject.kernel) {
                Ok(errors) => errors,
                Err(Error::Stopped) => return Err(Error::Stopped),
                Err(why) => {
                    (sweep.fail)(&step, why)?;
                    continue;
                }
            };
            let environment = Environment { utc: Environment::now(), ..now.of_kernel(subject.kernel) };
            let record = |errors: Errors| {
                let workload = subject.workload(problem).pass(Pass::of_tensor(&errors.tensor));
                Record::new(&environment, &workload, (subject.measurement)(errors))
            };
            let mut measured: Vec<Record> = errors_per_tensor.into_iter().map(record).collect();
            (sweep.keep)(&measured)?;
            records.append(&mut measured);
        }
    }
    Ok(records)
}

#[cfg(test)]
mod tests;
