//! Day 5's second question: do errors have a direction?
//!
//! With `x` a result and `r` its truth, the signed error is looked at in two directions:
//!
//! - *up*: `x - r`. Its mean is a shift that does not depend on the sign of the truth.
//! - *outward*: `sign(r) (x - r)`, positive where `x` is larger in magnitude. What is cut off instead of rounded ends nearer to
//!   zero, so its outward error is negative, while its errors up cancel where values of both signs come.
//!
//! Elements of one head share its state and its rounded products, so their errors are not independent, and a test that counts
//! them one by one finds directions where there are none. A *unit* here is one sequence and head, which is drawn independently
//! of every other: the errors of a group of elements are averaged within each unit, over the RMS of the truth in the group,
//! and the tests are made on those means, one for each unit.
//!
//! **Null hypothesis**, for a kernel, a tensor, a group of its elements and a direction: the mean error of a unit is 0 in
//! expectation (two-sided t-test), and as likely above 0 as below (two-sided sign test). The t-test wants the mean of the units
//! near normal; the sign test wants nothing, and tells less.
//!
//! **Many tests**: the groups of a kernel overlap (the same elements by head, by position, by magnitude), so their tests
//! depend on each other, and a single false alarm would call a fair kernel biased. Holm's correction over all tests of one kind
//! of a kernel bounds the probability of even one false alarm, whatever the dependence; that of Benjamini and Hochberg bounds
//! their share, which is not what is asked, and wants positive dependence.

mod exponential;
mod group;
mod signed;
mod statistics;

pub use exponential::LargeDecays;
use group::CHUNK;
pub use group::Group;
pub use statistics::{MeanTest, holm, sign_test, t_test};

use crate::chunked::Chunked;
use crate::compare::{TensorClass, tolerance};
use crate::inputs::{Regime, generate};
use crate::kernel::Kernel;
use crate::numerics::Step;
use crate::precision::{Format, Policy, Product};
use crate::problem::{Inputs, Op, Results, Shape};
use crate::record::{self, Environment, Measurement, Pass, Record, Workload};
use crate::reference::Reference;
use crate::{Error, Result};
use signed::Signed;
use std::fmt;
use std::ops::ControlFlow;

/// Probability of a false alarm in a kernel that has no bias.
pub const LEVEL: f64 = 0.05;
/// Fewest sequences: with fewer no sign test of a single head can survive the correction.
pub const FEWEST_SEQUENCES: usize = 14;

/// Which sign counts as positive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// `x - r`.
    Up,
    /// `sign(r) (x - r)`.
    Outward,
}

impl Direction {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Up, Self::Outward];

    /// Name in records and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Outward => "outward",
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Five ways to round, emulated on the CPU: TF32 operands that are cut off, as a tensor core does with what nobody rounded, and
/// rounded to nearest, all else the same; bf16; bf16 with fp16 inside; and fp32.
///
/// # Errors
/// None at present; the result leaves room for a preset that is no more.
pub fn emulated() -> Result<Vec<Chunked>> {
    let of_preset = |mode: &str| Chunked::new(&format!("cpu-chunk-{mode}"), Policy::preset(mode)?, CHUNK);
    let all = Product::ALL.iter();
    let nearest = all.fold(Policy::tf32(), |policy, &product| policy.operands(product, Format::Tf32));
    let nearest = Chunked::new("cpu-chunk-tf32-nearest", nearest, CHUNK)?;
    Ok(vec![of_preset("tf32")?, nearest, of_preset("bf16")?, of_preset("f16-internals")?, of_preset("fp32")?])
}

/// The calls whose errors are looked at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// Operator.
    pub op: Op,
    /// Sizes; `B` sequences, each with inputs of its own.
    pub shape: Shape,
    /// How the inputs are distributed.
    pub regime: Regime,
    /// Their seed.
    pub seed: u64,
}

/// The tests of one group of elements of one tensor in one direction.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupTest {
    /// Name of the tensor.
    pub tensor: String,
    /// Which elements.
    pub group: Group,
    /// Which sign is positive.
    pub direction: Direction,
    /// The mean over units of the error over the RMS of the truth, in units of [`GroupTest::unit_roundoff`], with its
    /// interval, and the p values without correction.
    pub mean: MeanTest,
    /// Unit roundoff of the kernel's mode for this tensor.
    pub unit_roundoff: f64,
    /// p of the t-test after Holm's correction.
    pub t_holm: f64,
    /// p of the sign test after Holm's correction.
    pub sign_holm: f64,
    /// p of the t-test that takes every element for independent, without correction: what [`crate::compare`] tells.
    pub naive_p: f64,
}

impl GroupTest {
    /// Whether the t-test finds a direction at [`LEVEL`].
    pub fn is_biased(&self) -> bool {
        self.t_holm < LEVEL
    }
}

/// All tests of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Biases {
    /// Name of the kernel.
    pub kernel: String,
    /// Its mode.
    pub mode: String,
    /// One for each tensor, group and direction.
    pub tests: Vec<GroupTest>,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finished {
    /// One for each kernel.
    pub biases: Vec<Biases>,
    /// One record for each kernel, tensor and direction.
    pub records: Vec<Record>,
    /// Kernels that gave nothing, and why.
    pub failures: Vec<(String, String)>,
}

/// Tests the errors of every kernel, forward and, where it has one, backward.
///
/// # Errors
/// [`Error::Stopped`] where `progress` asked to stop; [`Error::Input`] where the setting is not valid or has fewer than
/// [`FEWEST_SEQUENCES`] sequences. What a kernel reports is among the [`Finished::failures`].
pub fn run(
    setting: &Setting,
    kernels: &[&dyn Kernel],
    mut progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Finished> {
    let Setting { op, shape, regime, seed } = *setting;
    if shape.batch < FEWEST_SEQUENCES {
        return Err(Error::input(format!(
            "B = {}: expected at least {FEWEST_SEQUENCES} sequences, or no test of a single head can find anything",
            shape.batch
        )));
    }
    let drawn = generate(op, &shape, regime, seed)?;
    let environment = Environment::detect();
    let mut truth: Option<(Format, Inputs, Results)> = None;
    let mut finished = Finished::default();
    for (done, &kernel) in kernels.iter().enumerate() {
        let name = format!("{}, {shape} {regime}", kernel.name());
        if progress(&Step { done, total: kernels.len(), name }).is_break() {
            return Err(Error::Stopped);
        }
        let format = kernel.input_format();
        let (_, inputs, truth) = match truth.take().filter(|(known, ..)| *known == format) {
            Some(known) => truth.insert(known),
            None => {
                let inputs = drawn.rounded_to(format);
                let results = Reference.backward(&inputs)?;
                truth.insert((format, inputs, results))
            }
        };
        let biases = match biases(kernel, inputs, truth) {
            Ok(biases) => biases,
            Err(Error::Stopped) => return Err(Error::Stopped),
            Err(why) => {
                finished.failures.push((kernel.name().to_owned(), why.to_string()));
                continue;
            }
        };
        let environment = environment.of_kernel(kernel);
        let workload = Workload::new(op, &shape).inputs(regime.name(), seed).kernel(kernel.name(), kernel.mode());
        finished.records.extend(biases.records(&environment, &workload));
        finished.biases.push(biases);
    }
    Ok(finished)
}

/// The tests of `kernel` on `inputs`, whose truth is `truth`.
fn biases(kernel: &dyn Kernel, inputs: &Inputs, truth: &Results) -> Result<Biases> {
    let found = if kernel.has_backward() { kernel.backward(inputs)? } else { kernel.forward(inputs)? };
    let mut tests = Vec::new();
    for ((name, found), (_, truth)) in found.named().into_iter().zip(truth.named()) {
        let unit_roundoff = tolerance(kernel.mode(), TensorClass::of(name)?)?.unit_roundoff();
        for (group, direction, signed) in Signed::of_groups(name, found, truth) {
            let means: Vec<f64> = signed.unit_means().into_iter().map(|mean| mean / unit_roundoff).collect();
            tests.push(GroupTest {
                tensor: name.to_owned(),
                group,
                direction,
                mean: MeanTest::of(&means)?,
                unit_roundoff,
                t_holm: 1.0,
                sign_holm: 1.0,
                naive_p: signed.naive_p()?,
            });
        }
    }
    let corrected = |of: fn(&MeanTest) -> f64| holm(&tests.iter().map(|test| of(&test.mean)).collect::<Vec<_>>());
    let (t, sign) = (corrected(|mean| mean.t_p), corrected(|mean| mean.sign_p));
    for ((test, t), sign) in tests.iter_mut().zip(t).zip(sign) {
        (test.t_holm, test.sign_holm) = (t, sign);
    }
    Ok(Biases { kernel: kernel.name().to_owned(), mode: kernel.mode().to_owned(), tests })
}

impl Biases {
    /// One for each tensor and direction: the test over all of its elements, and what those of its groups found.
    fn records(&self, environment: &Environment, workload: &Workload) -> Vec<Record> {
        let whole = self.tests.iter().filter(|test| test.group == Group::All);
        let record = |test: &GroupTest| {
            let of_same =
                || self.tests.iter().filter(|other| (&other.tensor, other.direction) == (&test.tensor, test.direction));
            let largest = of_same().max_by(|a, b| a.mean.mean.abs().total_cmp(&b.mean.mean.abs()));
            let bias = record::Bias {
                tensor: test.tensor.clone(),
                direction: test.direction.name().to_owned(),
                units: test.mean.units,
                bias_u: test.mean.mean,
                low_u: test.mean.low,
                high_u: test.mean.high,
                t_p: test.mean.t_p,
                sign_p: test.mean.sign_p,
                t_holm: test.t_holm,
                sign_holm: test.sign_holm,
                naive_p: test.naive_p,
                tests: of_same().count(),
                t_biased: of_same().filter(|test| test.t_holm < LEVEL).count(),
                sign_biased: of_same().filter(|test| test.sign_holm < LEVEL).count(),
                largest_u: largest.map_or(0.0, |largest| largest.mean.mean),
                largest_at: largest.map(|largest| largest.group.to_string()).unwrap_or_default(),
                unit_roundoff: test.unit_roundoff,
            };
            let workload = workload.clone().pass(Pass::of_tensor(&test.tensor));
            Record::new(environment, &workload, Measurement::Bias(bias))
        };
        whole.map(record).collect()
    }
}

#[cfg(test)]
mod tests;
