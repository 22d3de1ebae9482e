//! The kernels of GDN-2: each precision checked, timed, and with the memory that it takes.

mod case;
mod report;

pub use super::gdn::Outcome;
pub use case::{Case, SEED};
pub use report::Report;

use super::seqlens::SeqLens;
use super::{Ceilings, Timer};
use crate::compare::Report as Comparison;
use crate::cost::Cost;
use crate::cuda::chunk::gdn2::{Gdn2, Options, Plan, Setup, States};
use crate::cuda::{Gpu, KernelTime, Stream, kernel_times};
use crate::kernel::Kernel;
use crate::numerics::Step;
use crate::precision::Format;
use crate::problem::{Inputs, Shape};
use crate::record::{Environment, Measurement, Pass, Record, Timing, Workload};
use crate::reference::Reference;
use crate::table::Mode;
use crate::{Error, Result};
use std::ops::ControlFlow;

/// Sequences and heads of the small problem that is checked before a case is timed.
const CHECKED_LENGTHS: [usize; 5] = [63, 1, 0, 128, 72];
const CHECKED_HEADS: usize = 2;

/// The format of b and w for a kernel: narrow where its inputs are.
fn gates_of(kernel: &Gdn2) -> Format {
    kernel.input_format()
}

fn plan(kernel: &Gdn2, inputs: &Inputs, case: &Case, backward: bool) -> Result<Plan> {
    let setup = Setup::of_inputs(inputs, kernel.operands(), kernel.input_format(), backward)?;
    let options = Options { gates: gates_of(kernel), states: case.states, ..setup.options };
    let mut plan = Plan::new(Gpu::shared()?, Setup { options, ..setup })?;
    plan.upload_inputs(inputs)?;
    plan.fill_outputs_with_nan()?;
    Ok(plan)
}

/// One kernel on one case.
#[derive(Clone, Debug)]
pub struct Row {
    /// The case.
    pub case: Case,
    /// Name of the kernel.
    pub kernel: String,
    /// Its mode.
    pub mode: &'static str,
    /// The format of its inputs, and of b and w.
    pub input_format: Format,
    /// What came of it.
    pub outcome: Outcome,
    /// Bytes of memory on the GPU that inputs and results take, and those of the workspace.
    pub memory: Option<(usize, usize)>,
    /// The time of each of its kernels, where that was asked for.
    pub kernels: Vec<KernelTime>,
}

/// What was measured.
#[derive(Clone, Debug, Default)]
pub struct Finished {
    /// In the order of the cases.
    pub rows: Vec<Row>,
    /// How many were left out, because there are records of the same code and machine.
    pub recorded: usize,
    /// Whether it was stopped before the end.
    pub stopped: bool,
}

/// Lets every kernel run every case that `records` does not have for this code and machine, and hands each row to `keep` at
/// once. With `each_kernel` its own kernels are timed too, which no record holds, so that nothing is left out. `watch` is told
/// what comes next, and is asked between samples too; where it breaks, what was measured so far is returned.
///
/// # Errors
/// What `keep` returns, and what cannot be blamed on one kernel: inputs that cannot be made.
pub fn run(
    cases: &[Case],
    kernels: &[Gdn2],
    timer: &mut Timer,
    each_kernel: bool,
    records: &[Record],
    keep: &mut dyn FnMut(&Row) -> Result<()>,
    mut watch: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Finished> {
    let environment = Environment::detect();
    let mut finished = Finished::default();
    let mut verdicts = Verdicts::default();
    let mut inputs: Option<(Case, Inputs)> = None;
    let total = cases.len() * kernels.len();
    for case in cases {
        for kernel in kernels {
            let mut row = Row::new(case, kernel);
            if !each_kernel && is_recorded(&row, records, &environment) {
                finished.recorded += 1;
                continue;
            }
            let done = finished.rows.len() + finished.recorded;
            let step = Step { done, total, name: format!("{} {case}", kernel.name()) };
            let mut go_on = || watch(&step);
            if go_on().is_break() {
                return Ok(Finished { stopped: true, ..finished });
            }
            let made = match inputs.take().filter(|(made, _)| made.has_inputs_of(case)) {
                Some(made) => made,
                None => (case.clone(), case.inputs()?),
            };
            row.outcome = match verdicts.of(kernel, case) {
                Ok(Some(why)) => Outcome::Wrong(format!("on a small problem of this kind, {why}")),
                Err(error) => Outcome::Failed(error.to_string()),
                Ok(None) => match measure(kernel, &made.1, &mut row, timer, each_kernel, &mut go_on) {
                    Ok(outcome) => outcome,
                    Err(Error::Stopped) => return Ok(Finished { stopped: true, ..finished }),
                    Err(error) => Outcome::Failed(error.to_string()),
                },
            };
            keep(&row)?;
            finished.rows.push(row);
            inputs = Some(made);
        }
    }
    Ok(finished)
}

/// Whether `records` has the time of `row` for the very code and machine.
fn is_recorded(row: &Row, records: &[Record], environment: &Environment) -> bool {
    let workload = row.workload();
    records.iter().any(|record| {
        matches!(record.measurement, Measurement::Bench(_)) && record.workload == workload && record.is_of(environment)
    })
}

fn measure(
    kernel: &Gdn2,
    inputs: &Inputs,
    row: &mut Row,
    timer: &mut Timer,
    each_kernel: bool,
    go_on: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Outcome> {
    let case = row.case.clone();
    let backward = case.pass == Pass::Bwd;
    // A forward that retains states has the workspace of both passes.
    let plan = plan(kernel, inputs, &case, backward || case.states == States::Retained)?;
    row.memory = Some((plan.tensor_bytes(), plan.workspace_bytes()));
    let work = |stream: &Stream| {
        // SAFETY: the graph lives as long as the call of the timer, and its replays run on the stream of the GPU, as does
        // what is started without it; the plan outlives both.
        unsafe { if backward { plan.backward_after_forward_on(stream) } else { plan.forward_on(stream) } }
    };
    plan.forward()?;
    if backward {
        plan.backward()?;
    }
    for (name, tensor) in plan.results(backward)?.named() {
        let nonfinite = tensor.data.iter().filter(|x| !x.is_finite()).count();
        if nonfinite > 0 {
            return Ok(Outcome::Wrong(format!(
                "{name} has {nonfinite} elements that are not finite, or were not written"
            )));
        }
    }
    if each_kernel {
        let stream = timer.gpu().stream();
        for _ in 0..3 {
            work(stream)?;
        }
        row.kernels = kernel_times(stream, || work(stream))?;
    }
    Ok(Outcome::Timed(timer.time(work, go_on)?))
}

/// What came of the checks so far.
#[derive(Default)]
struct Verdicts(Vec<(String, Case, Option<String>)>);

impl Verdicts {
    /// What is wrong with the results of `kernel` on a small problem with heads of the size of `case` and states from where it
    /// has them, checked once; `None` where nothing is.
    fn of(&mut self, kernel: &Gdn2, case: &Case) -> Result<Option<String>> {
        let heads = case.shape.value_heads.min(CHECKED_HEADS);
        let tokens = CHECKED_LENGTHS.iter().sum();
        let shape = Shape { batch: 1, tokens, qk_heads: heads, value_heads: heads, ..case.shape };
        // Both passes are checked, whichever is timed.
        let small =
            Case { pass: Pass::Bwd, shape, seqlens: Some(SeqLens::new(CHECKED_LENGTHS.to_vec())), ..case.clone() };
        let known = self.0.iter().find(|(name, case, _)| (name.as_str(), case) == (kernel.name(), &small));
        if let Some((.., verdict)) = known {
            return Ok(verdict.clone());
        }
        let verdict = check(kernel, &small)?;
        self.0.push((kernel.name().to_owned(), small, verdict.clone()));
        Ok(verdict)
    }
}

/// What is wrong with the results of `kernel` on the small problem `case`; `None` where nothing is.
fn check(kernel: &Gdn2, case: &Case) -> Result<Option<String>> {
    let mut inputs = case.inputs()?.rounded_to(kernel.input_format());
    for (name, tensor) in inputs.named_mut() {
        if matches!(name, "b" | "w") {
            tensor.round_to(gates_of(kernel));
        }
    }
    let plan = plan(kernel, &inputs, case, true)?;
    plan.forward()?;
    // SAFETY: this is the GPU's own stream, in whose order everything else of the plan happens.
    unsafe { plan.backward_after_forward_on(Gpu::shared()?.stream())? };
    let truth = Reference.backward(&inputs)?;
    let report = Comparison::of_call(&inputs, &plan.results(true)?.named(), &truth, Kernel::mode(kernel))?;
    Ok((!report.pass).then(|| format!("{}\n{report}", inputs.shape)))
}

impl Row {
    /// `case` and `kernel` before anything was measured.
    fn new(case: &Case, kernel: &Gdn2) -> Self {
        Self {
            case: case.clone(),
            kernel: kernel.name().to_owned(),
            mode: Kernel::mode(kernel),
            input_format: kernel.input_format(),
            outcome: Outcome::Wrong(String::new()),
            memory: None,
            kernels: Vec::new(),
        }
    }

    fn cost(&self) -> Cost {
        self.case.cost(self.input_format.bytes(), self.input_format.bytes())
    }

    /// This row as a record, where it was timed.
    pub fn record(&self, ceilings: &Ceilings<'_>, environment: &Environment) -> Option<Record> {
        let samples = self.outcome.samples()?;
        let (rates, floor_basis) = ceilings.rates(Mode::of(self.mode).format);
        let cost = self.cost();
        let memory_bytes = self.memory.map(|(tensors, workspace)| (tensors + workspace) as u64);
        let timing = Timing { memory_bytes, ..samples.timing(&cost, cost.floor_ms(&rates), floor_basis) };
        Some(Record::new(environment, &self.workload(), Measurement::Bench(timing)))
    }

    /// What a record says of this row; a kernel that retains states is said to be another.
    fn workload(&self) -> Workload {
        let retained = if self.case.states == States::Retained { " retained" } else { "" };
        self.case.workload().kernel(&format!("{}{retained}", self.kernel), self.mode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Samples;

    fn environment(commit: &str, dirty: bool) -> Environment {
        Environment { commit: Some(commit.to_owned()), dirty: Some(dirty), ..Environment::default() }
    }

    #[test]
    fn what_is_recorded_for_this_commit_is_not_measured_again() {
        let cases = Case::suite().unwrap();
        let kernels = Gdn2::presets();
        let outcome = Outcome::Timed(Samples::new(vec![1.0, 2.0]).unwrap());
        let row = Row { outcome, ..Row::new(&cases[2], &kernels[0]) };
        let now = environment("abc", false);
        let timing = Timing { latency_ms: 1.5, ..Timing::default() };
        let records = [Record::new(&now, &row.workload(), Measurement::Bench(timing))];
        assert!(is_recorded(&row, &records, &now));
        assert!(!is_recorded(&row, &records, &environment("abd", false)));
        assert!(!is_recorded(&row, &records, &environment("abc", true)));
        // The same shape and pass with states that are computed again, another pass, another kernel.
        for other in
            [Row::new(&cases[0], &kernels[0]), Row::new(&cases[3], &kernels[0]), Row::new(&cases[2], &kernels[1])]
        {
            assert!(!is_recorded(&other, &records, &now), "{} {}", other.kernel, other.case);
        }
        let retained = row.workload();
        assert_eq!(retained.kernel.as_deref(), Some("cuda-gdn2-bf16 retained"));
        assert_eq!((retained.op.as_deref(), retained.seqlens.as_deref()), (Some("gdn2"), Some("5120+5120")));
    }
}
