//! The kernels of GDN-2: each precision checked, timed, and with the memory that it takes.

pub use super::gdn::Outcome;

use super::seqlens::SeqLens;
use super::{Ceilings, Samples, Timer};
use crate::compare::Report as Comparison;
use crate::cost::Cost;
use crate::cost::gdn::{Call, ChunkStates};
use crate::cuda::chunk::gdn2::{Gdn2, Options, Plan, Setup, States};
use crate::cuda::{Gpu, KernelTime, Stream, kernel_times};
use crate::inputs::{Regime, generate};
use crate::kernel::Kernel;
use crate::numerics::Step;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Shape};
use crate::record::{Environment, Measurement, Pass, Record, Timing, Workload};
use crate::reference::Reference;
use crate::table::Mode;
use crate::{Error, Result};
use std::fmt;
use std::ops::ControlFlow;

/// Seed of the inputs.
pub const SEED: u64 = 1;
/// How they are distributed: as in the GDN-2 precision RFC.
const REGIME: Regime = Regime::Correlated;
/// Tokens of a chunk in the cost model.
const CHUNK: usize = 64;
/// Bytes of the log decay and of its gradient.
const DECAY_BYTES: f64 = 4.0;
/// Sequences and heads of the small problem that is checked before a case is timed.
const CHECKED_LENGTHS: [usize; 5] = [63, 1, 0, 128, 72];
const CHECKED_HEADS: usize = 2;

/// One shape, pass and source of the states of chunks.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Forward or backward. The backward is timed alone.
    pub pass: Pass,
    /// Where the backward has the states from; the forward of a case that retains them keeps them.
    pub states: States,
    /// Sizes.
    pub shape: Shape,
    /// Lengths of the packed sequences; `None` where the `B` rows are the sequences.
    pub seqlens: Option<SeqLens>,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { batch, tokens, value_heads, key_dim, value_dim, .. } = self.shape;
        let pass = if self.pass == Pass::Bwd { "bwd" } else { "fwd" };
        write!(f, "{pass} H={value_heads} {key_dim}/{value_dim} ")?;
        match &self.seqlens {
            Some(seqlens) => write!(f, "{seqlens}")?,
            None => write!(f, "B{batch} T{tokens}")?,
        }
        if self.states == States::Retained { write!(f, " retained") } else { Ok(()) }
    }
}

impl Case {
    /// The shape of the RFC, two sequences of 5,120 tokens with 12 heads; 8,192 tokens with 16 heads; and a training step of 32
    /// sequences of 1,024 tokens with 6 heads. Both passes, with states computed again and retained.
    ///
    /// # Errors
    /// None: the lengths are well-formed.
    pub fn suite() -> Result<Vec<Self>> {
        let shapes = [
            (Shape::new(10_240, 12, 128, 128), Some("5120x2".parse()?)),
            (Shape::new(8192, 16, 128, 128), None),
            (Shape { batch: 32, ..Shape::new(1024, 6, 128, 128) }, None),
        ];
        let of = |(shape, seqlens): (Shape, Option<SeqLens>)| {
            [States::Recomputed, States::Retained].into_iter().flat_map(move |states| {
                let seqlens = seqlens.clone();
                [Pass::Fwd, Pass::Bwd].map(|pass| Self { pass, states, shape, seqlens: seqlens.clone() })
            })
        };
        Ok(shapes.into_iter().flat_map(of).collect())
    }

    fn inputs(&self) -> Result<Inputs> {
        let inputs = generate(Op::Gdn2, &self.shape, REGIME, SEED)?.with_initial_state(SEED);
        match &self.seqlens {
            Some(seqlens) => inputs.packed(&boundaries(&seqlens.ranges()), SEED),
            None => Ok(inputs),
        }
    }

    /// Useful arithmetic and traffic with inputs of `element` bytes, and b and w of `gate` bytes: those of GDN with a gate
    /// for each channel.
    pub fn cost(&self, element: usize, gate: usize) -> Cost {
        let Shape { batch, tokens, value_heads, key_dim, value_dim, .. } = self.shape;
        let lengths: Vec<usize> = match &self.seqlens {
            Some(seqlens) => seqlens.ranges().iter().map(ExactSizeIterator::len).collect(),
            None => vec![tokens; batch],
        };
        let call = Call { shape: self.shape, lengths: &lengths, chunk: CHUNK, element_bytes: element };
        let states = if self.states == States::Retained { ChunkStates::Kept } else { ChunkStates::Recomputed };
        let (of_gdn, times) = if self.pass == Pass::Bwd { (call.backward(states), 2.0) } else { (call.forward(), 1.0) };
        let (k, v, gate) = (key_dim as f64, value_dim as f64, gate as f64);
        let scalar_gates = 2.0 * DECAY_BYTES;
        let gates = DECAY_BYTES * k + gate * (k + v) - scalar_gates;
        Cost { bytes: of_gdn.bytes + times * (batch * tokens * value_heads) as f64 * gates, ..of_gdn }
    }
}

fn boundaries(ranges: &[std::ops::Range<usize>]) -> Vec<usize> {
    std::iter::once(0).chain(ranges.iter().map(|range| range.end)).collect()
}

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
    /// Whether it was stopped before the end.
    pub stopped: bool,
}

/// Lets every kernel run every case; with `each_kernel` its own kernels are timed too. `watch` is told what comes next, and
/// is asked between samples too; where it breaks, what was measured so far is returned.
///
/// # Errors
/// What cannot be blamed on one kernel: inputs that cannot be made.
pub fn run(
    cases: &[Case],
    kernels: &[Gdn2],
    timer: &mut Timer,
    each_kernel: bool,
    mut watch: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Finished> {
    let mut finished = Finished::default();
    let mut inputs: Option<(Case, Inputs)> = None;
    let total = cases.len() * kernels.len();
    for case in cases {
        let same = |made: &(Case, Inputs)| (made.0.shape, &made.0.seqlens) == (case.shape, &case.seqlens);
        let made = match inputs.take().filter(same) {
            Some(made) => made,
            None => (case.clone(), case.inputs()?),
        };
        for kernel in kernels {
            let step = Step { done: finished.rows.len(), total, name: format!("{} {case}", kernel.name()) };
            let mut go_on = || watch(&step);
            if go_on().is_break() {
                return Ok(Finished { stopped: true, ..finished });
            }
            let mut row = Row {
                case: case.clone(),
                kernel: kernel.name().to_owned(),
                mode: Kernel::mode(kernel),
                input_format: kernel.input_format(),
                outcome: Outcome::Wrong(String::new()),
                memory: None,
                kernels: Vec::new(),
            };
            row.outcome = match measure(kernel, &made.1, &mut row, timer, each_kernel, &mut go_on) {
                Ok(outcome) => outcome,
                Err(Error::Stopped) => return Ok(Finished { stopped: true, ..finished }),
                Err(error) => Outcome::Failed(error.to_string()),
            };
            finished.rows.push(row);
        }
        inputs = Some(made);
    }
    Ok(finished)
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
    if let Some(why) = check(kernel, &case)? {
        return Ok(Outcome::Wrong(format!("on a small problem of this kind, {why}")));
    }
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

/// What is wrong with the results of `kernel` on a small problem with heads of the same size; `None` where nothing is.
fn check(kernel: &Gdn2, case: &Case) -> Result<Option<String>> {
    let heads = case.shape.value_heads.min(CHECKED_HEADS);
    let shape =
        Shape { batch: 1, tokens: CHECKED_LENGTHS.iter().sum(), qk_heads: heads, value_heads: heads, ..case.shape };
    let seqlens = SeqLens::new(CHECKED_LENGTHS.to_vec());
    let small = Case { shape, seqlens: Some(seqlens), ..case.clone() };
    let mut inputs = small.inputs()?.rounded_to(kernel.input_format());
    for (name, tensor) in inputs.named_mut() {
        if matches!(name, "b" | "w") {
            tensor.round_to(gates_of(kernel));
        }
    }
    let plan = plan(kernel, &inputs, &small, true)?;
    plan.forward()?;
    // SAFETY: this is the GPU's own stream, in whose order everything else of the plan happens.
    unsafe { plan.backward_after_forward_on(Gpu::shared()?.stream())? };
    let truth = Reference.backward(&inputs)?;
    let report = Comparison::of_call(&inputs, &plan.results(true)?.named(), &truth, Kernel::mode(kernel))?;
    Ok((!report.pass).then(|| format!("{}\n{report}", inputs.shape)))
}

impl Row {
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
        let retained = if self.case.states == States::Retained { " retained" } else { "" };
        let workload = Workload {
            seqlens: self.case.seqlens.as_ref().map(SeqLens::to_string),
            ..Workload::new(Op::Gdn2, &self.case.shape)
        };
        let kernel = format!("{}{retained}", self.kernel);
        let workload = workload.kernel(&kernel, self.mode).inputs(REGIME.name(), SEED).pass(self.case.pass);
        Some(Record::new(environment, &workload, Measurement::Bench(timing)))
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
        writeln!(
            f,
            "{:<36} {:<25} {:>8} {:>8} {:>8} {:>7} {:>6} {:>9} {:>9}",
            "case", "kernel", "ms", "p20", "p80", "TFLOP/s", "/floor", "tensors", "workspace"
        )?;
        for row in &self.finished.rows {
            write!(f, "{:<36} {:<25} ", row.case.to_string(), row.kernel)?;
            match &row.outcome {
                Outcome::Timed(samples) => self.numbers(f, row, samples)?,
                Outcome::Wrong(why) => writeln!(f, "WRONG, so not timed: {why}")?,
                Outcome::Failed(why) => writeln!(f, "failed: {why}")?,
            }
            for kernel in &row.kernels {
                writeln!(f, "    {:<30} {:>8.4} ms", kernel.name, kernel.ms)?;
            }
        }
        writeln!(
            f,
            "/floor: time over what the rates of traffic and products allow; memory in MB; times without a cold L2 cache"
        )?;
        writeln!(f, "where a line is one kernel of the one above")?;
        if self.finished.stopped { writeln!(f, "stopped before the end") } else { Ok(()) }
    }
}

impl Report<'_> {
    fn numbers(&self, f: &mut fmt::Formatter<'_>, row: &Row, samples: &Samples) -> fmt::Result {
        let (cost, ms) = (row.cost(), samples.median());
        let (rates, _) = self.ceilings.rates(Mode::of(row.mode).format);
        let (tensors, workspace) = row.memory.unwrap_or_default();
        writeln!(
            f,
            "{ms:>8.4} {:>8.4} {:>8.4} {:>7.1} {:>6.2} {:>9.1} {:>9.1}",
            samples.p20(),
            samples.p80(),
            cost.tflop_s(ms),
            ms / cost.floor_ms(&rates),
            tensors as f64 / 1e6,
            workspace as f64 / 1e6
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_suite_has_both_passes_of_each_shape_with_states_from_both_sources() {
        let suite = Case::suite().unwrap();
        let names: Vec<String> = suite.iter().map(Case::to_string).collect();
        assert_eq!(names.len(), 12);
        assert_eq!(names[0], "fwd H=12 128/128 5120+5120");
        assert_eq!(names[3], "bwd H=12 128/128 5120+5120 retained");
        assert_eq!(names[11], "bwd H=6 128/128 B32 T1024 retained");
        let small =
            Case { shape: Shape::new(100, 2, 32, 32), seqlens: Some("60+40".parse().unwrap()), ..suite[0].clone() };
        let inputs = small.inputs().unwrap();
        assert_eq!((inputs.op(), inputs.cu_seqlens.as_deref()), (Op::Gdn2, Some(&[0, 60, 100][..])));
    }

    /// q, k, v and o in two bytes, b and w too, g in four: 1,024 + 512 + 512 bytes at 128/128, and the states once each.
    #[test]
    fn the_forward_costs_its_tensors_once() {
        let case = Case { shape: Shape::new(640, 1, 128, 128), seqlens: None, ..Case::suite().unwrap()[0].clone() };
        let cost = case.cost(2, 2);
        assert_eq!(cost.bytes, 640.0 * (1024.0 + 512.0 + 512.0) + 8.0 * 128.0 * 128.0);
        let narrow = case.cost(2, 4);
        assert_eq!(narrow.bytes - cost.bytes, 640.0 * 2.0 * 256.0);
    }
}
