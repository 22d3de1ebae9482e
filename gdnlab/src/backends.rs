//! Day 4's experiment: how far apart are two implementations on the same inputs, and which of them is right?
//!
//! The inputs are those of the report that asked: q and k of unit norm, v Gaussian, a zero initial state, bf16. The float64
//! recurrence on the same rounded inputs is the judge.

use crate::compare::{Comparison, check_truth, compare};
use crate::inputs::{Regime, generate};
use crate::kernel::Kernel;
use crate::numerics::Step;
use crate::peer::read_results;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Outputs, Results, Shape, Tensor};
use crate::record::{Backends, Environment, Errors, Measurement, Pass, Record, Workload};
use crate::reference::Reference;
use crate::{Error, Result};
use gdnlab_deps::rayon::prelude::*;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Tokens of the report's two tables.
pub const LENGTHS: [usize; 2] = [512, 20_468];
/// What a regime is called where q is normalised too.
const UNIT_Q: &str = "unit-q";

/// `tokens` with the heads of a model of 16 q/k and 32 value heads on one of four GPUs, K = V = 128: the report's call.
pub fn report_shape(tokens: usize) -> Shape {
    Shape { qk_heads: 4, ..Shape::new(tokens, 8, 128, 128) }
}

/// One call that every implementation gets.
#[derive(Clone, Debug)]
pub struct Case {
    /// The call, rounded.
    pub inputs: Inputs,
    /// Name of the distribution in records.
    pub regime: String,
    /// Seed of the inputs, where they were drawn.
    pub seed: Option<u64>,
}

impl Case {
    /// Inputs of `op` in `regime` with q of unit norm, as k is, v N(0, 1) and a zero initial state, rounded to `format`.
    ///
    /// # Errors
    /// As [`generate`].
    pub fn generate(op: Op, shape: &Shape, regime: Regime, format: Format, seed: u64) -> Result<Self> {
        let mut inputs = generate(op, shape, regime, seed)?;
        for row in inputs.q.data.chunks_exact_mut(shape.key_dim) {
            let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
            row.iter_mut().for_each(|x| *x /= norm);
        }
        inputs.d_o = None;
        inputs.d_final_state = None;
        inputs.round_to(format);
        Ok(Self { inputs, regime: format!("{regime}-{UNIT_Q}"), seed: Some(seed) })
    }

    /// A call that somebody recorded.
    pub fn recorded(inputs: Inputs) -> Self {
        Self { inputs, regime: "recorded".to_owned(), seed: None }
    }

    fn workload(&self) -> Workload {
        let regime = Some(self.regime.clone());
        Workload { regime, seed: self.seed, ..Workload::new(self.inputs.op(), &self.inputs.shape).pass(Pass::Fwd) }
    }
}

/// Results from a file in the place of a kernel: what somebody's kernel gave elsewhere for the same case.
pub struct RecordedResults {
    path: PathBuf,
    name: String,
    format: Format,
}

impl RecordedResults {
    /// The results at `path` for a case whose q, k and v are in `format`.
    pub fn new(path: impl AsRef<Path>, format: Format) -> Self {
        let path = path.as_ref().to_path_buf();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self { path, name, format }
    }
}

impl Kernel for RecordedResults {
    fn name(&self) -> &str {
        &self.name
    }

    fn summary(&self) -> String {
        format!("results in {}", self.path.display())
    }

    fn needs(&self) -> &'static str {
        "the file"
    }

    fn has_backward(&self) -> bool {
        false
    }

    fn ops(&self) -> &'static [Op] {
        &Op::ALL
    }

    fn mode(&self) -> &'static str {
        "recorded"
    }

    fn input_format(&self) -> Format {
        self.format
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        let results = read_results(&self.path, inputs)?.into_results(false);
        results.map_err(|why| Error::input(format!("{}: {why}", self.path.display())))
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        self.forward(inputs)
    }
}

/// What an implementation gave for a case, or in words why nothing.
type Side = Result<Outputs, String>;

/// An implementation that gave nothing for a case, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Its name.
    pub kernel: String,
    /// The case in words.
    pub case: String,
    /// Why, in words.
    pub why: String,
}

/// What was measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finished {
    /// One record for each case, pair and tensor.
    pub records: Vec<Record>,
    /// Implementations that gave nothing.
    pub failures: Vec<Failure>,
    /// Cases that were recorded before, for the very code.
    pub known: usize,
    /// Whether it was stopped before the end.
    pub stopped: bool,
}

/// Lets every implementation run every case, and compares each pair of them; the one that is named later is what the
/// other is compared with. One that fails on a case is left out there, and listed.
///
/// Cases whose pairs are all in `known`, measured by this very code, are skipped. `keep` gets the records of a case as soon
/// as they are there.
///
/// # Errors
/// [`Error::Input`] for fewer than two implementations, or a case whose truth is not finite; what `keep` returns.
pub fn run(
    cases: &[Case],
    kernels: &[&dyn Kernel],
    known: &[Record],
    mut keep: impl FnMut(&[Record]) -> Result<()>,
    mut progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Finished> {
    if kernels.len() < 2 {
        return Err(Error::input(format!("{} implementations: expected two or more to compare", kernels.len())));
    }
    let environment = Environment::detect();
    let mut finished = Finished::default();
    let steps_per_case = kernels.len() + 1;
    for (index, case) in cases.iter().enumerate() {
        if is_known(case, kernels, known, &environment) {
            finished.known += 1;
            continue;
        }
        let mut stop = |done: usize, name: &str| {
            let step = Step {
                done: index * steps_per_case + done,
                total: cases.len() * steps_per_case,
                name: format!("{name}, {}", case.inputs.shape),
            };
            progress(&step).is_break()
        };
        if stop(0, "truth") {
            return Ok(Finished { stopped: true, ..finished });
        }
        let truth = Reference.forward(&case.inputs)?;
        check_truth(&truth)?;
        let mut sides: Vec<(&dyn Kernel, Side)> = Vec::new();
        for (at, &kernel) in kernels.iter().enumerate() {
            if stop(at + 1, kernel.name()) {
                return Ok(Finished { stopped: true, ..finished });
            }
            sides.push((kernel, side(kernel, &case.inputs)));
        }
        let records = compare_all(case, &sides, &truth.outputs, &environment)?;
        keep(&records)?;
        finished.records.extend(records);
        finished.failures.extend(sides.into_iter().filter_map(|(kernel, side)| {
            let case = format!("{} {}", case.inputs.shape, case.regime);
            Some(Failure { kernel: kernel.name().to_owned(), case, why: side.err()? })
        }));
    }
    Ok(finished)
}

/// The forward of `kernel`, whose own rounding of inputs that it does not take as they are counts as its error.
fn side(kernel: &dyn Kernel, inputs: &Inputs) -> Side {
    if !kernel.ops().contains(&inputs.op()) {
        return Err(format!("it does not implement {}", inputs.op()));
    }
    let results = if kernel.input_format().contains(inputs.dtype) {
        kernel.forward(inputs)
    } else {
        kernel.forward(&inputs.rounded_to(kernel.input_format()))
    };
    results.map(|results| results.outputs).map_err(|error| error.to_string())
}

fn compare_all(
    case: &Case,
    sides: &[(&dyn Kernel, Side)],
    truth: &Outputs,
    environment: &Environment,
) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for (index, (kernel, one)) in sides.iter().enumerate() {
        for (against, other) in &sides[index + 1..] {
            let (Ok(one), Ok(other)) = (one, other) else { continue };
            let workload = case.workload().kernel(kernel.name(), kernel.mode());
            let environment = both(environment, *kernel, *against);
            for (name, tensors) in [
                ("o", [&one.o, &other.o, &truth.o]),
                ("final_state", [&one.final_state, &other.final_state, &truth.final_state]),
            ] {
                let pair = pair(name, against.name(), tensors, case.inputs.dtype)?;
                records.push(Record::new(&environment, &workload, Measurement::Backends(pair)));
            }
        }
    }
    Ok(records)
}

/// The environment of both: the GPU where one of them ran there, and the software of each.
fn both(environment: &Environment, one: &dyn Kernel, other: &dyn Kernel) -> Environment {
    let of_one = environment.of_kernel(one);
    let of_both = if of_one.machine.gpu.is_some() { of_one } else { environment.of_kernel(other) };
    let software: Vec<String> = [one, other]
        .into_iter()
        .filter_map(|kernel| kernel.software().map(|software| format!("{}: {software}", kernel.name())))
        .collect();
    Environment { software: (!software.is_empty()).then(|| software.join(" | ")), ..of_both }
}

/// One tensor of two implementations and the truth.
fn pair(name: &str, against: &str, [one, other, truth]: [&Tensor; 3], format: Format) -> Result<Backends> {
    let apart = compare(name, one, other)?;
    let judged = [compare(name, one, truth)?, compare(name, other, truth)?];
    let nearest = Nearest::count(&one.data, &other.data, &truth.data);
    let finite = |value: f64| value.is_finite().then_some(value);
    let rel_rms = |of: &Comparison| finite(of.rel_rms).filter(|_| of.nonfinite == 0);
    let max_abs = |of: &Comparison| finite(of.max_abs).filter(|_| of.nonfinite == 0);
    let worst = apart.worst.as_ref();
    let at = worst.map(|worst| worst.index.iter().zip(&truth.dims).fold(0, |at, (i, extent)| at * extent + i));
    Ok(Backends {
        against: against.to_owned(),
        max_ref: finite(apart.max_expected),
        differing: nearest.differing as f64 / truth.data.len().max(1) as f64,
        nearer: nearest.share(nearest.one),
        against_nearer: nearest.share(nearest.other),
        truth_rel_rms: rel_rms(&judged[0]),
        against_truth_rel_rms: rel_rms(&judged[1]),
        truth_max_abs: max_abs(&judged[0]),
        against_truth_max_abs: max_abs(&judged[1]),
        worst: worst.map(|worst| worst.index.clone()).unwrap_or_default(),
        worst_value: worst.and_then(|worst| finite(worst.got)),
        worst_against: worst.and_then(|worst| finite(worst.expected)),
        worst_truth: at.and_then(|at| truth.data.get(at).copied()),
        errors: Errors::new(&apart, format.unit_roundoff()),
    })
}

/// In how many elements two differ, and which of the two is nearer to the truth there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Nearest {
    differing: usize,
    one: usize,
    other: usize,
}

impl Nearest {
    fn count(one: &[f64], other: &[f64], truth: &[f64]) -> Self {
        const PIECE: usize = 1 << 16;
        let pieces = one.par_chunks(PIECE).zip(other.par_chunks(PIECE)).zip(truth.par_chunks(PIECE));
        let count = |((one, other), truth): ((&[f64], &[f64]), &[f64])| {
            one.iter().zip(other).zip(truth).filter(|((a, b), _)| a != b).fold(Self::default(), |sum, ((a, b), r)| {
                let (a, b) = ((a - r).abs(), (b - r).abs());
                Self {
                    differing: sum.differing + 1,
                    one: sum.one + usize::from(a < b || b.is_nan() && !a.is_nan()),
                    other: sum.other + usize::from(b < a || a.is_nan() && !b.is_nan()),
                }
            })
        };
        pieces.map(count).reduce(Self::default, |a, b| Self {
            differing: a.differing + b.differing,
            one: a.one + b.one,
            other: a.other + b.other,
        })
    }

    fn share(&self, count: usize) -> Option<f64> {
        (self.differing > 0).then(|| count as f64 / self.differing as f64)
    }
}

/// Whether `known` has every pair of `kernels` on `case`, measured by the very code. What was recorded elsewhere, or on a
/// GPU, has its own code: those pairs are only taken from the same commit, as all others.
fn is_known(case: &Case, kernels: &[&dyn Kernel], known: &[Record], environment: &Environment) -> bool {
    if case.seed.is_none() || environment.dirty != Some(false) || environment.commit.is_none() {
        return false;
    }
    let same_code = |record: &&Record| {
        (&record.environment.commit, record.environment.dirty) == (&environment.commit, Some(false))
            && record.environment.machine.cpu == environment.machine.cpu
    };
    let has = |kernel: &dyn Kernel, against: &dyn Kernel| {
        let workload = case.workload().kernel(kernel.name(), kernel.mode());
        known.iter().filter(same_code).any(|record| match &record.measurement {
            Measurement::Backends(pair) => pair.against == against.name() && record.workload == workload,
            _ => false,
        })
    };
    kernels.iter().enumerate().all(|(index, kernel)| kernels[index + 1..].iter().all(|other| has(*kernel, *other)))
}

#[cfg(test)]
#[path = "backends_tests.rs"]
mod tests;
