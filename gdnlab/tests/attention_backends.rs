//! The attention that ours is compared with, through its scores and by cuDNN, against float64:
//! `cargo test --test attention_backends -- --ignored --nocapture` where there is an NVIDIA GPU. Each case prints the relative
//! RMS error of each tensor.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use gdnlab::Result;
use gdnlab::compare::compare;
use gdnlab::cuda::attention::{Backward, CudnnAttention, Forward, HEAD_DIMS, Heads, MathAttention, Rows, Setup};
use gdnlab::cuda::{Buffer, Gpu, Stream};
use gdnlab::problem::Tensor;
use gdnlab::reference::attention::Attention as Reference;
use half::bf16;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// Limit of `rel_rms` by cuDNN. P, dS, o and delta's o are rounded to bf16, which errs by 1.7e-3 of RMS each time: 2.4e-3 for
/// o, and 3.4e-3 for gradients with four roundings.
const REL_RMS: f64 = 4e-3;
/// The same through scores in bf16. With those roundings and float64 otherwise, normal inputs give 3.6e-3 for o and dv and
/// 4.4e-3 for dq and dk at 1024 tokens.
const REL_RMS_SCORES: f64 = 5e-3;
/// log-sum-exp of scores in binary32.
const REL_RMS_LSE: f64 = 1e-6;
/// The same of scores in bf16: a single one errs by up to 2^-8.
const REL_RMS_LSE_SCORES: f64 = 4e-3;

/// A backend ready for a case.
enum Backend {
    Math(Box<MathAttention>),
    Cudnn(Box<CudnnAttention>),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Math,
    Cudnn,
}

/// Everything on the GPU that a case needs.
struct Run {
    kind: Kind,
    setup: Setup,
    backend: Backend,
    /// q, k, v and do.
    inputs: Vec<Buffer<bf16>>,
    /// o, dq, dk and dv.
    outputs: Vec<Buffer<bf16>>,
    lse: Buffer<f32>,
    delta: Buffer<f32>,
}

fn setup(batch: usize, tokens: usize, heads: usize, head_dim: usize) -> Setup {
    Setup { batch, tokens, heads, head_dim, scale: (head_dim as f32).powf(-0.5), backward: true }
}

/// q, k, v and do, `[B, T, H, d]`.
fn inputs(setup: &Setup) -> [Tensor; 4] {
    let dims = [setup.batch, setup.tokens, setup.heads, setup.head_dim];
    let seed = dims.iter().fold(1, |seed, &size| seed * 1009 + size as u64);
    [0, 1, 2, 3].map(|part| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed + part);
        let mut draw = |_| -> f64 {
            let x: f64 = StandardNormal.sample(&mut rng);
            bf16::from_f64(x).to_f64()
        };
        Tensor::new(&dims, (0..setup.elements()).map(&mut draw).collect()).unwrap()
    })
}

impl Kind {
    fn heads(self, setup: &Setup, buffer: &Buffer<bf16>) -> Heads {
        if self == Self::Math { setup.heads_first(buffer) } else { setup.whole(buffer) }
    }

    /// Number in memory of the element that is number `at` of a tensor `[B, T, H, d]`.
    fn place(self, setup: &Setup, at: usize) -> usize {
        let Setup { batch, tokens, heads, head_dim, .. } = *setup;
        let (row, head, i) = (at / head_dim / heads, at / head_dim % heads, at % head_dim);
        if self == Self::Math { (head * batch * tokens + row) * head_dim + i } else { at }
    }
}

impl Run {
    fn new(kind: Kind, setup: Setup, inputs: &[Tensor; 4]) -> Result<Self> {
        let gpu = Gpu::shared().unwrap();
        let backend = match kind {
            Kind::Math => Backend::Math(Box::new(MathAttention::new(gpu, setup)?)),
            Kind::Cudnn => Backend::Cudnn(Box::new(CudnnAttention::new(gpu, setup)?)),
        };
        let upload = |tensor: &Tensor| {
            let mut values = vec![bf16::NAN; setup.elements()];
            for (at, &x) in tensor.data.iter().enumerate() {
                values[kind.place(&setup, at)] = bf16::from_f64(x);
            }
            gpu.upload(&values).unwrap()
        };
        Ok(Self {
            kind,
            setup,
            backend,
            inputs: inputs.iter().map(upload).collect(),
            outputs: (0..4).map(|_| gpu.upload(&vec![bf16::NAN; setup.elements()]).unwrap()).collect(),
            lse: gpu.upload(&vec![f32::NAN; setup.rows()]).unwrap(),
            delta: gpu.upload(&vec![f32::NAN; setup.rows()]).unwrap(),
        })
    }

    fn heads(&self, buffer: &Buffer<bf16>) -> Heads {
        self.kind.heads(&self.setup, buffer)
    }

    fn fill_with_nan(&mut self) {
        let gpu = Gpu::shared().unwrap();
        for buffer in &mut self.outputs {
            gpu.fill_bytes(buffer, 0xff).unwrap();
        }
        gpu.fill_bytes(&mut self.lse, 0xff).unwrap();
    }

    /// # Safety
    /// As for the backends.
    unsafe fn both_passes(&self, stream: &Stream) -> Result<()> {
        let [q, k, v, d_o] = [0, 1, 2, 3].map(|i| self.heads(&self.inputs[i]));
        let [o, dq, dk, dv] = [0, 1, 2, 3].map(|i| self.heads(&self.outputs[i]));
        let (lse, delta) = (Rows::of(&self.lse), Rows::of(&self.delta));
        let forward = Forward { q, k, v, o, lse };
        let backward = Backward { q, k, v, o, lse, d_o, delta, dq, dk, dv };
        // SAFETY: the promise of the caller.
        unsafe {
            match &self.backend {
                Backend::Math(plan) => {
                    plan.forward(stream, &forward)?;
                    plan.backward(stream, &backward)
                }
                Backend::Cudnn(plan) => {
                    plan.forward(stream, &forward)?;
                    plan.backward(stream, &backward)
                }
            }
        }
    }

    /// o, dq, dk and dv as `[B, T, H, d]`.
    fn download(&self) -> Vec<Tensor> {
        let dims = [self.setup.batch, self.setup.tokens, self.setup.heads, self.setup.head_dim];
        let download = |buffer: &Buffer<bf16>| {
            let values = Gpu::shared().unwrap().download(buffer).unwrap();
            let value = |at| values[self.kind.place(&self.setup, at)].to_f64();
            Tensor::new(&dims, (0..values.len()).map(value).collect()).unwrap()
        };
        self.outputs.iter().map(download).collect()
    }

    /// `[B, T, H]`.
    fn log_sum_exp(&self) -> Tensor {
        let Setup { batch, tokens, heads, .. } = self.setup;
        let values = Gpu::shared().unwrap().download(&self.lse).unwrap();
        let value = |at: usize| {
            let (row, head) = (at / heads, at % heads);
            f64::from(values[(row / tokens * heads + head) * tokens + row % tokens])
        };
        Tensor::new(&[batch, tokens, heads], (0..values.len()).map(value).collect()).unwrap()
    }
}

/// What is wrong with a backend on a case; prints a line with the errors. The passes run once as they are and once from a
/// recorded graph, on results full of NaN.
fn check(kind: Kind, setup: Setup) -> Vec<String> {
    let gpu = Gpu::shared().unwrap();
    let inputs = inputs(&setup);
    let [q, k, v, d_o] = &inputs;
    let reference = Reference { q, k, v, scale: f64::from(setup.scale), cu_seqlens: None };
    let (outputs, grads) = (reference.forward().unwrap(), reference.backward(d_o).unwrap());
    let Setup { batch, tokens, heads, head_dim, .. } = setup;
    let case = format!("{kind:?} B={batch} T={tokens} H={heads} d={head_dim}");
    let mut run = match Run::new(kind, setup, &inputs) {
        Ok(run) => run,
        Err(error) => return vec![format!("{case}: {error}")],
    };
    let (limit, limit_of_lse) =
        if kind == Kind::Math { (REL_RMS_SCORES, REL_RMS_LSE_SCORES) } else { (REL_RMS, REL_RMS_LSE) };
    let mut complaints = Vec::new();
    for recorded in [false, true] {
        run.fill_with_nan();
        // SAFETY: all memory lives in `run`, and the downloads wait for the GPU's own stream.
        let started = unsafe {
            if recorded {
                gpu.capture(|stream| run.both_passes(stream)).and_then(|graph| {
                    graph.replay(gpu.stream())?;
                    gpu.synchronize()
                })
            } else {
                run.both_passes(gpu.stream())
            }
        };
        if let Err(error) = started {
            complaints.push(format!("{case}, recorded {recorded}: {error}"));
            return complaints;
        }
        let (found, lse) = (run.download(), run.log_sum_exp());
        let mut line = format!("{case} recorded {recorded}:");
        for (name, found, truth, limit) in [
            ("o", &found[0], &outputs.o, limit),
            ("lse", &lse, &outputs.lse, limit_of_lse),
            ("dq", &found[1], &grads.dq, limit),
            ("dk", &found[2], &grads.dk, limit),
            ("dv", &found[3], &grads.dv, limit),
        ] {
            let comparison = compare(name, found, truth).unwrap();
            // With one token p = 1, and dq and dk vanish.
            let (error, limit) =
                if comparison.max_expected == 0.0 { (comparison.max_abs, 1e-5) } else { (comparison.rel_rms, limit) };
            line += &format!(" {name} {error:.2e}");
            if comparison.nonfinite > 0 || error.is_nan() || error > limit {
                complaints.push(format!(
                    "{case}, recorded {recorded}: {name} {error:.2e} > {limit:.0e}, {} not finite, worst {:?}",
                    comparison.nonfinite, comparison.worst
                ));
            }
        }
        println!("{line}");
    }
    complaints
}

fn check_all(kind: Kind, lengths: &[usize]) {
    let of_dim = |head_dim| lengths.iter().map(move |&tokens| setup(2, tokens, 3, head_dim));
    let complaints: Vec<String> = HEAD_DIMS.into_iter().flat_map(of_dim).flat_map(|setup| check(kind, setup)).collect();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn attention_through_its_scores_agrees_with_float64() {
    check_all(Kind::Math, &[1, 17, 127, 200, 1024]);
}

#[test]
#[ignore = "needs an NVIDIA GPU and cuDNN"]
fn attention_by_cudnn_agrees_with_float64() {
    let gpu = Gpu::shared().unwrap();
    println!("cuDNN {}", CudnnAttention::library_version(gpu).unwrap());
    check_all(Kind::Cudnn, &[200, 1024]);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn scores_that_do_not_fit_are_refused_before_anything_is_allocated() {
    let gpu = Gpu::shared().unwrap();
    let before = gpu.free_bytes().unwrap();
    let error = MathAttention::new(gpu, setup(1, 1 << 20, 12, 64)).err().unwrap().to_string();
    println!("{error}");
    assert!(error.contains("have 52776.56 GB") && error.contains("GB of the GPU's memory are free"), "{error}");
    assert_eq!(before, gpu.free_bytes().unwrap());
}
