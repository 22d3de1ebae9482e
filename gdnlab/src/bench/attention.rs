//! Causal attention on a GPU: each backend checked against float64, then timed.

pub use super::gdn::Outcome;
use super::{Ceilings, Samples, Timer};
use crate::compare::compare;
use crate::cost::Cost;
use crate::cost::attention::Call;
use crate::cuda::attention::{Attention, Backward, Forward, Heads, Path, Rows, Setup};
use crate::cuda::{Buffer, Gpu, Stream};
use crate::inputs::Draw;
use crate::numerics::Step;
use crate::precision::Format;
use crate::problem::{Shape, Tensor};
use crate::record::{Environment, Measurement, Pass, Record, Workload};
use crate::reference::attention::Attention as Reference;
use crate::{Error, Result};
use half::bf16;
use std::fmt;
use std::ops::ControlFlow;

/// Seed of the inputs.
pub const SEED: u64 = 1;
/// Largest `rel_rms` of a right result: P, dS, o and the o in `do . o` are rounded to bf16, 1.7e-3 of RMS each time.
const REL_RMS: f64 = 4e-3;
/// Tokens of the small problem that is checked before a case is timed, with a tile that is not full.
const CHECKED_TOKENS: usize = 200;

/// One shape and pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Forward or backward.
    pub pass: Pass,
    /// `B`.
    pub batch: usize,
    /// `T`.
    pub tokens: usize,
    /// `H`, of q, k and v alike.
    pub heads: usize,
    /// `d`.
    pub head_dim: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pass, batch, tokens, heads, head_dim } = self;
        let pass = if *pass == Pass::Bwd { "bwd" } else { "fwd" };
        write!(f, "{pass} B={batch} T={tokens} H={heads} d={head_dim}")
    }
}

impl Case {
    /// The cases of Day 2: `B = 32`, `T = 1024`, `d = 64` with 8, 12 and 16 heads, then lengths from 256 to 16,384 at as
    /// many tokens with 12 heads; both passes.
    pub fn day2() -> Vec<Self> {
        const TOKENS: usize = 32 * 1024;
        let at = |tokens: usize, heads| {
            [Pass::Fwd, Pass::Bwd].map(|pass| Self { pass, batch: TOKENS / tokens, tokens, heads, head_dim: 64 })
        };
        let heads = [8, 12, 16].into_iter().flat_map(|heads| at(1024, heads));
        heads.chain([256, 512, 2048, 4096, 8192, 16_384].into_iter().flat_map(|tokens| at(tokens, 12))).collect()
    }

    fn setup(&self) -> Setup {
        Setup {
            batch: self.batch,
            tokens: self.tokens,
            heads: self.heads,
            head_dim: self.head_dim,
            scale: (self.head_dim as f32).powf(-0.5),
            backward: self.pass == Pass::Bwd,
        }
    }

    fn call(&self) -> Call {
        Call {
            batch: self.batch,
            tokens: self.tokens,
            heads: self.heads,
            head_dim: self.head_dim,
            element_bytes: size_of::<bf16>(),
        }
    }

    /// FLOPs and bytes of a kernel that stores no scores.
    pub fn cost(&self) -> Cost {
        if self.pass == Pass::Bwd { self.call().backward() } else { self.call().forward() }
    }

    fn workload(&self, backend: Backend) -> Workload {
        let shape = Shape {
            batch: self.batch,
            tokens: self.tokens,
            qk_heads: self.heads,
            value_heads: self.heads,
            key_dim: self.head_dim,
            value_dim: self.head_dim,
        };
        let workload = Workload { op: Some("attention".to_owned()), ..Workload::new(crate::problem::Op::Gdn, &shape) };
        workload.kernel(backend.name(), "bf16").inputs("gaussian", SEED).pass(self.pass)
    }
}

/// An implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Ours, the fastest path of the GPU at hand.
    Flash,
    /// Ours, the path that every GPU from sm_80 on has.
    FlashPortable,
}

impl Backend {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Flash, Self::FlashPortable];

    /// Name in records and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flash => "flash",
            Self::FlashPortable => "flash-portable",
        }
    }

    fn plan(self, gpu: &Gpu, setup: Setup) -> Result<Attention> {
        match self {
            Self::Flash => Attention::new(gpu, setup),
            Self::FlashPortable => Attention::with_path(gpu, setup, Path::Portable),
        }
    }
}

/// One backend on one case.
#[derive(Clone, Debug)]
pub struct Row {
    /// The case.
    pub case: Case,
    /// The backend.
    pub backend: Backend,
    /// What came of it.
    pub outcome: Outcome,
}

/// What was measured.
#[derive(Clone, Debug, Default)]
pub struct Finished {
    /// In the order of the cases.
    pub rows: Vec<Row>,
    /// Whether it was stopped before the end.
    pub stopped: bool,
}

/// Lets every backend run every case. `watch` is told what comes next, and is asked between samples too; where it breaks,
/// what was measured so far is returned.
///
/// # Errors
/// [`Error::Gpu`] where there is no memory for the inputs.
pub fn run(
    cases: &[Case],
    backends: &[Backend],
    timer: &mut Timer,
    mut watch: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Finished> {
    let mut finished = Finished::default();
    let mut known: Vec<(Case, Backend, Option<String>)> = Vec::new();
    let total = cases.len() * backends.len();
    for &case in cases {
        for &backend in backends {
            let step = Step { done: finished.rows.len(), total, name: format!("{} {case}", backend.name()) };
            let mut go_on = || watch(&step);
            if go_on().is_break() {
                return Ok(Finished { stopped: true, ..finished });
            }
            let small = Case { batch: 2, tokens: CHECKED_TOKENS, heads: 2, ..case };
            let outcome = match verdict(&mut known, small, backend, timer.gpu()) {
                Ok(Some(why)) => Ok(Outcome::Wrong(why)),
                Ok(None) => time(case, backend, timer, &mut go_on).map(Outcome::Timed),
                Err(error) => Err(error),
            };
            let outcome = match outcome {
                Ok(outcome) => outcome,
                Err(Error::Stopped) => return Ok(Finished { stopped: true, ..finished }),
                Err(error) => Outcome::Failed(error.to_string()),
            };
            finished.rows.push(Row { case, backend, outcome });
        }
    }
    Ok(finished)
}

/// What is wrong with the results of `backend` on the small problem `case`, found once; `None` where nothing is.
fn verdict(
    known: &mut Vec<(Case, Backend, Option<String>)>,
    case: Case,
    backend: Backend,
    gpu: &'static Gpu,
) -> Result<Option<String>> {
    if let Some((.., verdict)) = known.iter().find(|(other, by, _)| (*other, *by) == (case, backend)) {
        return Ok(verdict.clone());
    }
    let verdict = check(case, backend, gpu)?;
    known.push((case, backend, verdict.clone()));
    Ok(verdict)
}

fn check(case: Case, backend: Backend, gpu: &'static Gpu) -> Result<Option<String>> {
    let loaded = Loaded::new(case, backend, gpu)?;
    // SAFETY: this is the stream in whose order memory is freed, and the downloads wait for it.
    unsafe { loaded.forward(gpu.stream())? };
    if case.pass == Pass::Bwd {
        // SAFETY: as above.
        unsafe { loaded.backward(gpu.stream())? };
    }
    let [q, k, v, d_o] = loaded.inputs.each_ref();
    let reference = Reference { q, k, v, scale: f64::from(case.setup().scale), cu_seqlens: None };
    let outputs = reference.forward()?;
    let mut wrong = Vec::new();
    let mut judge = |name: &str, found: &Buffer<bf16>, truth: &Tensor| -> Result<()> {
        let values = gpu.download(found)?.into_iter().map(bf16::to_f64).collect();
        let comparison = compare(name, &Tensor::new(&truth.dims, values)?, truth)?;
        if comparison.nonfinite > 0 || comparison.rel_rms > REL_RMS {
            let (error, lost) = (comparison.rel_rms, comparison.nonfinite);
            wrong.push(format!("{name}: rel_rms {error:.2e}, {lost} not finite, expected {REL_RMS:.0e} at the most"));
        }
        Ok(())
    };
    judge("o", &loaded.o, &outputs.o)?;
    if case.pass == Pass::Bwd {
        let grads = reference.backward(d_o)?;
        for (name, found, truth) in [
            ("dq", &loaded.grads[0], &grads.dq),
            ("dk", &loaded.grads[1], &grads.dk),
            ("dv", &loaded.grads[2], &grads.dv),
        ] {
            judge(name, found, truth)?;
        }
    }
    Ok((!wrong.is_empty()).then(|| format!("on {case}: {}", wrong.join("; "))))
}

fn time(
    case: Case,
    backend: Backend,
    timer: &mut Timer,
    go_on: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Samples> {
    let gpu = timer.gpu();
    let loaded = Loaded::new(case, backend, gpu)?;
    // SAFETY: this is the stream in whose order memory is freed; the backward needs what the forward left.
    unsafe { loaded.forward(gpu.stream())? };
    gpu.stream().synchronize()?;
    let work = |stream: &Stream| {
        // SAFETY: the graph lives as long as the call of the timer, and its replays run on the stream of the GPU.
        unsafe { if case.pass == Pass::Bwd { loaded.backward(stream) } else { loaded.forward(stream) } }
    };
    timer.time(work, go_on)
}

/// A case in the memory of the GPU. All sequences have the same values.
struct Loaded {
    plan: Attention,
    setup: Setup,
    /// q, k, v and do of all sequences.
    inputs: [Tensor; 4],
    on_gpu: [Buffer<bf16>; 4],
    o: Buffer<bf16>,
    grads: [Buffer<bf16>; 3],
    lse: Buffer<f32>,
    delta: Buffer<f32>,
}

impl Loaded {
    fn new(case: Case, backend: Backend, gpu: &'static Gpu) -> Result<Self> {
        let setup = case.setup();
        let plan = backend.plan(gpu, setup)?;
        let one = [1, case.tokens, case.heads, case.head_dim];
        let draw = Draw::new(SEED);
        let inputs = ["q", "k", "v", "do"].map(|name| {
            let mut tensor = draw.normal(name, &one);
            tensor.data.iter_mut().for_each(|x| *x = Format::Bf16.round(*x));
            tensor.data = tensor.data.repeat(case.batch);
            tensor.dims[0] = case.batch;
            tensor
        });
        let upload = |tensor: &Tensor| {
            let values: Vec<bf16> = tensor.data.iter().map(|&x| bf16::from_f64(x)).collect();
            gpu.upload(&values)
        };
        let [q, k, v, d_o] = inputs.each_ref().map(upload);
        let nan = |length: usize| {
            let mut buffer = gpu.alloc(length)?;
            gpu.stream().fill_bytes(&mut buffer, 0xff)?;
            Ok::<Buffer<bf16>, Error>(buffer)
        };
        let length = setup.elements();
        Ok(Self {
            plan,
            setup,
            on_gpu: [q?, k?, v?, d_o?],
            inputs,
            o: nan(length)?,
            grads: [nan(length)?, nan(length)?, nan(length)?],
            lse: gpu.alloc(setup.rows())?,
            delta: gpu.alloc(setup.rows())?,
        })
    }

    fn whole(&self, buffer: &Buffer<bf16>) -> Heads {
        self.setup.whole(buffer)
    }

    /// # Safety
    /// As for [`Attention::forward`].
    unsafe fn forward(&self, stream: &Stream) -> Result<()> {
        let [q, k, v, _] = self.on_gpu.each_ref().map(|buffer| self.whole(buffer));
        let call = Forward { q, k, v, o: self.whole(&self.o), lse: Rows::of(&self.lse) };
        // SAFETY: the promise of the caller.
        unsafe { self.plan.forward(stream, &call) }
    }

    /// # Safety
    /// As for [`Attention::backward`].
    unsafe fn backward(&self, stream: &Stream) -> Result<()> {
        let [q, k, v, d_o] = self.on_gpu.each_ref().map(|buffer| self.whole(buffer));
        let [dq, dk, dv] = self.grads.each_ref().map(|buffer| self.whole(buffer));
        let (o, lse, delta) = (self.whole(&self.o), Rows::of(&self.lse), Rows::of(&self.delta));
        // SAFETY: the promise of the caller.
        unsafe { self.plan.backward(stream, &Backward { q, k, v, o, lse, d_o, delta, dq, dk, dv }) }
    }
}

impl Row {
    /// This row as a record, where it was timed.
    pub fn record(&self, ceilings: &Ceilings<'_>, environment: &Environment) -> Option<Record> {
        let samples = self.outcome.samples()?;
        let (rates, floor_basis) = ceilings.rates(Format::Bf16);
        let cost = self.case.cost();
        let timing = samples.timing(&cost, cost.floor_ms(&rates), floor_basis);
        Some(Record::new(environment, &self.case.workload(self.backend), Measurement::Attention(timing)))
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
        let (rates, basis) = self.ceilings.rates(Format::Bf16);
        writeln!(f, "causal attention, bf16; floor: {basis}")?;
        writeln!(
            f,
            "{:<32} {:<15} {:>9} {:>9} {:>9} {:>8} {:>7}",
            "case", "backend", "ms", "p20", "p80", "TFLOP/s", "/floor"
        )?;
        for row in &self.finished.rows {
            write!(f, "{:<32} {:<15} ", row.case.to_string(), row.backend.name())?;
            match &row.outcome {
                Outcome::Timed(samples) => {
                    let (cost, ms) = (row.case.cost(), samples.median());
                    writeln!(
                        f,
                        "{ms:>9.4} {:>9.4} {:>9.4} {:>8.1} {:>7.2}",
                        samples.p20(),
                        samples.p80(),
                        cost.tflop_s(ms),
                        ms / cost.floor_ms(&rates)
                    )?;
                }
                Outcome::Wrong(why) => writeln!(f, "WRONG, so not timed: {why}")?,
                Outcome::Failed(why) => writeln!(f, "failed: {why}")?,
            }
        }
        if self.finished.stopped { writeln!(f, "stopped before the end") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cases_are_those_of_the_post_and_a_sweep_at_as_many_tokens() {
        let cases = Case::day2();
        assert_eq!(cases.len(), 18);
        assert!(cases.iter().all(|case| case.batch * case.tokens == 32_768 && case.setup().validate().is_ok()));
        assert_eq!(cases[2].to_string(), "fwd B=32 T=1024 H=12 d=64");
    }

    #[test]
    fn a_record_says_what_ran() {
        let case = Case::day2()[1];
        let workload = case.workload(Backend::FlashPortable);
        assert_eq!(workload.op.as_deref(), Some("attention"));
        assert_eq!((workload.kernel.as_deref(), workload.pass), (Some("flash-portable"), Some(Pass::Bwd)));
        assert_eq!(
            (workload.batch, workload.tokens, workload.value_heads, workload.value_dim),
            (Some(32), Some(1024), Some(8), Some(64))
        );
    }
}
