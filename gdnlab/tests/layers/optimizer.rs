//! AdamW with clipping, against the one that trains on the CPU.

use crate::device::*;
use gdnlab::cuda::Buffer;
use gdnlab::cuda::layers::{AdamW, AdamWStep, GradientNorm, OptimizerStep};
use gdnlab::model::adamw::{self, Moments};
use gdnlab::model::config::{Mixer, ModelConfig, Size};
use gdnlab::model::parameters::Parameters;
use gdnlab::problem::Tensor;
use half::bf16;

/// All tensors of a set, those with weight decay first.
fn flat(set: &Parameters) -> Tensor {
    let of = |vectors: bool| {
        let wanted = set.iter().filter(move |(_, tensor)| (tensor.dims.len() == 1) == vectors);
        wanted.flat_map(|(_, tensor)| tensor.data.clone())
    };
    let data: Vec<f64> = of(false).chain(of(true)).collect();
    Tensor::new(&[data.len()], data).unwrap()
}

fn decayed(set: &Parameters) -> usize {
    set.iter().filter(|(_, tensor)| tensor.dims.len() == 2).map(|(_, tensor)| tensor.data.len()).sum()
}

/// A gradient in binary32.
fn gradient(config: &ModelConfig, seed: u64, size: f64) -> Parameters {
    let mut grads = Parameters::zeros(config);
    for (n, (_, tensor)) in grads.iter_mut().enumerate() {
        *tensor = vector(100 * seed + n as u64, &tensor.dims, 0.0, size);
    }
    grads
}

struct OnGpu {
    weights: Buffer<f32>,
    m: Buffer<f32>,
    v: Buffer<f32>,
    rounded: Buffer<bf16>,
    norm: Buffer<GradientNorm>,
}

impl OnGpu {
    fn step(&self, optimizer: &adamw::AdamW, decayed: usize, grads: &Tensor, rate: f64, t: i32) -> GradientNorm {
        let adamw::AdamW { beta1, beta2, eps, decay, clip } = *optimizer;
        let correction = |beta: f64| (1.0 / (1.0 - beta.powi(t))) as f32;
        let step = gpu()
            .upload(&[OptimizerStep {
                rate: rate as f32,
                decay: (rate * decay) as f32,
                correction1: correction(beta1),
                correction2: correction(beta2),
                beta1: beta1 as f32,
                rest1: (1.0 - beta1) as f32,
                beta2: beta2 as f32,
                rest2: (1.0 - beta2) as f32,
                eps: eps as f32,
                clip: clip as f32,
            }])
            .unwrap();
        let (gradient, scratch) = (wide(grads), empty(AdamW::scratch_elements(grads.data.len())));
        let call = AdamWStep {
            weights: view(&self.weights),
            m: view(&self.m),
            v: view(&self.v),
            gradient: view(&gradient),
            rounded: view(&self.rounded),
            decayed,
            step: view(&step),
            norm: view(&self.norm),
            scratch: view(&scratch),
        };
        // SAFETY: the buffers outlive the download, which waits for the kernels.
        unsafe { AdamW::new(gpu()).unwrap().run(gpu().stream(), &call).unwrap() };
        gpu().download(&self.norm).unwrap()[0]
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn steps_equal_those_of_the_cpu() {
    let config = ModelConfig::preset(Mixer::Gdn, Size::Tiny);
    let optimizer = adamw::AdamW { clip: 60.0, ..adamw::AdamW::default() };
    let mut parameters = Parameters::initial(&config, 1);
    parameters.iter_mut().flat_map(|(_, tensor)| &mut tensor.data).for_each(|x| *x = f64::from(*x as f32));
    let (before, decayed) = (flat(&parameters), decayed(&parameters));
    let count = before.data.len();
    let zeros = Tensor::zeros(&[count]);
    let on_gpu =
        OnGpu { weights: wide(&before), m: wide(&zeros), v: wide(&zeros), rounded: empty(count), norm: empty(1) };
    let mut moments = Moments::new(&config);
    // A gradient that is clipped, one that is not, and a tiny one.
    for (t, size) in [(1, 1.0), (2, 0.05), (3, 1e-6)] {
        let grads = gradient(&config, t, size);
        let rate = 1e-3 * t as f64;
        let norm = optimizer.step(&mut parameters, &mut moments, &grads, rate).unwrap();
        let found = on_gpu.step(&optimizer, decayed, &flat(&grads), rate, t as i32);
        assert!((found.norm / norm - 1.0).abs() < 1e-6, "norm {} for {norm}", found.norm);
        assert!((f64::from(found.factor) / (optimizer.clip / norm).min(1.0) - 1.0).abs() < 1e-6);
        assert_eq!(norm > optimizer.clip, t == 1);
        check_f32("m", &on_gpu.m, &flat(&moments.m));
        check_f32("v", &on_gpu.v, &flat(&moments.v));
        let expected = flat(&parameters);
        check_f32("weights", &on_gpu.weights, &expected);
        let moved = |after: &Tensor| after.data.iter().zip(&before.data).map(|(x, y)| x - y).collect::<Vec<_>>();
        let found = download(&on_gpu.weights, &[count]);
        let error = rel_rms(&moved(&found), &moved(&expected));
        // A weight of 1 has an ulp of 6e-8, and moves by 1e-3 times a few.
        assert!(error < 5e-5, "the way of the weights: {error:.2e}");
        let rounded = download(&on_gpu.rounded, &[count]);
        assert!(rounded.data.iter().zip(&found.data).all(|(r, x)| *r == f64::from(bf16::from_f32(*x as f32))));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_gradient_that_is_not_finite_changes_nothing() {
    let start = vector(1, &[8 * 3000], 0.0, 1.0);
    let squares = Tensor { data: start.data.iter().map(|x| x * x).collect(), ..start.clone() };
    let count = start.data.len();
    for bad in [f64::NAN, f64::INFINITY] {
        let mut grads = vector(2, &[count], 0.0, 1.0);
        grads.data[count - 1] = bad;
        let on_gpu =
            OnGpu { weights: wide(&start), m: wide(&start), v: wide(&squares), rounded: empty(count), norm: empty(1) };
        let found = on_gpu.step(&adamw::AdamW::default(), 8, &grads, 0.1, 1);
        assert!(!found.norm.is_finite() && found.factor.is_nan(), "{found:?}");
        assert!(download(&on_gpu.weights, &[count]) == start && download(&on_gpu.m, &[count]) == start);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn an_infinite_limit_never_clips() {
    let (start, grads) = (vector(1, &[64], 0.0, 1.0), vector(2, &[64], 0.0, 1e9));
    let zeros = Tensor::zeros(&[64]);
    let on_gpu = OnGpu { weights: wide(&start), m: wide(&zeros), v: wide(&zeros), rounded: empty(64), norm: empty(1) };
    let optimizer = adamw::AdamW { clip: f64::INFINITY, ..adamw::AdamW::default() };
    assert_eq!(on_gpu.step(&optimizer, 64, &grads, 0.1, 1).factor, 1.0);
}
