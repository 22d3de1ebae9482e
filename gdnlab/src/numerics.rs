//! Day 1's experiment: errors of kernels against the float64 recurrence on the same rounded inputs, over shapes, and
//! after one step of a policy was changed; and on calls from elsewhere ([`Given`]).

use crate::bench::SeqLens;
use crate::chunked::Chunked;
use crate::compare::{compare_results, tolerance};
use crate::inputs::{Regime, generate};
use crate::kernel::Kernel;
use crate::precision::{Format, Policy, Product};
use crate::problem::{Inputs, Op, Results, Shape};
use crate::record::{Environment, Errors, Measurement, Pass, Precision, Record, Workload};
use crate::reference::Reference;
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

    /// Each problem with what a record says of it, made when it is its turn.
    fn each(&self) -> impl Iterator<Item = Result<(Inputs, Workload)>> + '_ {
        self.shapes.iter().flat_map(move |shape| {
            self.regimes.iter().map(move |&regime| {
                let inputs = generate(self.op, shape, regime, self.seed)?;
                let workload = self.workload(shape).inputs(regime.name(), self.seed);
                let Some(packing) = &self.packing else { return Ok((inputs, workload)) };
                let cu_seqlens: Vec<usize> =
                    std::iter::once(0).chain(packing.ranges().into_iter().map(|tokens| tokens.end)).collect();
                Ok((inputs.with_initial_state(self.seed).packed(&cu_seqlens, self.seed)?, workload))
            })
        })
    }

    /// What a record says of the problem of `shape`, the inputs aside.
    pub(crate) fn workload(&self, shape: &Shape) -> Workload {
        let seqlens = self.packing.as_ref().map(SeqLens::to_string);
        Workload { seqlens, ..Workload::new(self.op, shape) }
    }

    fn count(&self) -> usize {
        self.shapes.len() * self.regimes.len()
    }
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
    measure(problems.each(), problems.count(), &subjects(problems.op, kernels)?, progress)
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
    let Some(op) = given.first().map(|given| given.inputs.op()) else { return Ok(Vec::new()) };
    if let Some(other) = given.iter().find(|given| given.inputs.op() != op) {
        return Err(Error::input(format!(
            "'{}' is not a call of {op}: expected one operator for all calls",
            other.name
        )));
    }
    let each = given.iter().map(|given| Ok((given.inputs.clone(), given.workload())));
    measure(each, given.len(), &subjects(op, kernels)?, progress)
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

fn measure(
    problems: impl Iterator<Item = Result<(Inputs, Workload)>>,
    count: usize,
    subjects: &[Subject<'_>],
    mut progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Vec<Record>> {
    let environment = Environment::detect();
    let total = count * subjects.len();
    let mut records = Vec::new();
    let mut done = 0;
    for problem in problems {
        let (inputs, workload) = problem?;
        let shape = inputs.shape;
        let regime = workload.regime.clone().unwrap_or_default();
        let mut truths = Truths::new(inputs);
        for subject in subjects {
            let name = format!("{}, {shape} {regime}", subject.title);
            if progress(&Step { done, total, name }).is_break() {
                return Err(Error::Stopped);
            }
            let workload = workload.clone().kernel(subject.kernel.name(), subject.mode);
            let errors_per_tensor = truths.errors(subject.kernel)?;
            let environment = environment.of_kernel(subject.kernel);
            for errors in errors_per_tensor {
                let workload = workload.clone().pass(Pass::of_tensor(&errors.tensor));
                records.push(Record::new(&environment, &workload, (subject.measurement)(errors)));
            }
            done += 1;
        }
    }
    Ok(records)
}

/// A policy with one step changed.
#[derive(Clone, Debug)]
pub struct Variant {
    /// Name of the policy that the change starts from.
    pub base: String,
    /// The step that was changed.
    pub step: String,
    /// The format that its operands were given, or `None` where nothing was changed.
    pub format: Option<Format>,
    /// The policy that results.
    pub policy: Policy,
}

impl Variant {
    /// `base` as it is, then with the operands of one product after the other in `format`, then with all of them.
    ///
    /// # Errors
    /// [`Error::Input`] where `base` is no preset.
    pub fn products(base: &str, format: Format) -> Result<Vec<Self>> {
        let start = Policy::preset(base)?;
        let variant =
            |step: &str, format, policy| Self { base: base.to_owned(), step: step.to_owned(), format, policy };
        let mut all = vec![variant("none", None, start.clone())];
        for &product in Product::ALL {
            all.push(variant(product.name(), Some(format), start.clone().operands(product, format)));
        }
        let every = Product::ALL.iter().fold(start, |policy, &product| policy.operands(product, format));
        all.push(variant("every product", Some(format), every));
        Ok(all)
    }

    fn title(&self) -> String {
        match self.format {
            Some(format) => format!("{} with {} in {format}", self.base, self.step),
            None => format!("{} unchanged", self.base),
        }
    }
}

/// Errors of each variant on each problem: the ablation, one step at a time. Chunks have 64 tokens.
///
/// # Errors
/// As [`run`].
pub fn ablation(
    problems: &Problems,
    variants: &[Variant],
    progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Vec<Record>> {
    let kernels: Vec<Chunked> =
        variants.iter().map(|variant| Chunked::new("cpu-chunk", variant.policy.clone(), 64)).collect::<Result<_>>()?;
    let subjects: Vec<Subject<'_>> = variants
        .iter()
        .zip(&kernels)
        .map(|(variant, kernel)| Subject {
            kernel,
            title: variant.title(),
            mode: &variant.base,
            measurement: Box::new(|errors| {
                Measurement::Precision(Precision {
                    base: variant.base.clone(),
                    step: variant.step.clone(),
                    format: variant.format.map(|format| format.name().to_owned()),
                    errors,
                })
            }),
        })
        .collect();
    measure(problems.each(), problems.count(), &subjects, progress)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn go_on(_: &Step) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    fn small() -> Problems {
        Problems { shapes: vec![Shape::new(80, 1, 16, 8)], ..Problems::day1(&[Regime::MildDecay], 1) }
    }

    fn max_rel(records: &[Record], step: &str) -> f64 {
        let of_step = |record: &&Record| record.precision().is_some_and(|precision| precision.step == step);
        records.iter().filter(of_step).filter_map(|record| record.errors()?.max_rel).fold(0.0, f64::max)
    }

    #[test]
    fn every_kernel_and_tensor_gives_a_record() {
        let kernels = [Chunked::presets().remove(0), Chunked::presets().remove(4)];
        let kernels: Vec<&dyn Kernel> = kernels.iter().map(|kernel| kernel as &dyn Kernel).collect();
        let mut steps = Vec::new();
        let records = run(&small(), &kernels, |step| {
            steps.push(step.done);
            ControlFlow::Continue(())
        })
        .expect("valid");
        assert_eq!((records.len(), steps), (2 * 8, vec![0, 1]));
        assert!(records.iter().all(|record| record.errors().is_some_and(|errors| errors.nonfinite == 0)));
    }

    #[test]
    fn packed_sequences_and_grouped_heads_are_measured_as_such() {
        let shape = Shape { qk_heads: 1, ..Shape::new(80, 2, 16, 8) };
        let packing = Some(SeqLens::new(vec![1, 0, 15, 64]));
        let problems = Problems { shapes: vec![shape], packing, ..small() };
        let kernel = Chunked::presets().remove(0);
        let records = run(&problems, &[&kernel], go_on).expect("valid");
        let workload = &records[0].workload;
        assert_eq!(
            (workload.seqlens.as_deref(), workload.qk_heads, workload.value_heads),
            (Some("1+0+15+64"), Some(1), Some(2))
        );
        let wrong = Problems { packing: Some(SeqLens::new(vec![1, 2])), ..problems };
        assert!(run(&wrong, &[&kernel], go_on).unwrap_err().to_string().contains("cu_seqlens"));
    }

    #[test]
    fn calls_from_elsewhere_are_measured_as_they_are() {
        let shape = Shape { batch: 2, ..Shape::new(80, 1, 16, 8) };
        let inputs = generate(Op::Gdn, &shape, Regime::MildDecay, 1).expect("valid");
        let kernel = Chunked::presets().remove(4);
        let of_regime = run(&Problems { shapes: vec![shape], ..small() }, &[&kernel], go_on).expect("valid");
        let given = [Given { inputs: inputs.clone(), name: "layer 1".to_owned() }];
        let of_given = run_given(&given, &[&kernel], go_on).expect("valid");
        let errors = |records: &[Record]| records.iter().filter_map(Record::errors).cloned().collect::<Vec<_>>();
        assert_eq!((errors(&of_given), of_given.len()), (errors(&of_regime), 8));
        assert_eq!(
            (of_given[0].workload.regime.as_deref(), of_given[0].workload.batch, of_given[0].workload.seed),
            (Some("layer 1"), Some(2), None)
        );
        let forward = [Given { inputs: Inputs { d_o: None, ..inputs.clone() }, name: "no gradient".to_owned() }];
        assert_eq!(run_given(&forward, &[&kernel], go_on).expect("valid").len(), 2);
        let gdn2 = generate(Op::Gdn2, &shape, Regime::MildDecay, 1).expect("valid");
        let refused =
            run_given(&[Given { inputs: gdn2, name: "x".to_owned() }], &[&crate::cuda::chunk::Chunk::bf16()], go_on);
        assert!(matches!(refused, Err(Error::Unsupported { .. })));
    }

    #[test]
    fn a_step_in_tf32_costs_accuracy_and_none_does_not() {
        let variants = Variant::products("fp32", Format::Tf32Truncated).expect("a preset");
        let records = ablation(&small(), &variants, go_on).expect("valid");
        let (none, solve, every) =
            (max_rel(&records, "none"), max_rel(&records, "solve"), max_rel(&records, "every product"));
        assert!(none < 1e-5 && none < solve / 3.0 && solve < every, "{none:e} {solve:e} {every:e}");
    }

    #[test]
    fn rounded_results_leave_the_rounding_alone() {
        let exact_but_rounded =
            Chunked::new("rounded", Policy::rounded_results(Format::Bf16), 64).expect("a chunk size");
        let records = run(&small(), &[&exact_but_rounded], go_on).expect("valid");
        for errors in records.iter().filter_map(Record::errors) {
            let rel_rms = errors.rel_rms.unwrap_or(f64::NAN) / Format::Bf16.unit_roundoff();
            let in_bf16 = ["o", "dq", "dk", "dv"].contains(&errors.tensor.as_str());
            // Rounding to nearest errs by 1/sqrt(3) of half a spacing, which is 0.5u to 1u of a value.
            let expected = if in_bf16 { 0.3..0.5 } else { 0.0..1e-4 };
            assert!(expected.contains(&rel_rms), "{}: {rel_rms} u", errors.tensor);
        }
    }

    #[test]
    fn a_stop_is_reported() {
        let stopped = run(&small(), &[&Reference], |_| ControlFlow::Break(()));
        assert!(matches!(stopped, Err(Error::Stopped)));
    }
}
