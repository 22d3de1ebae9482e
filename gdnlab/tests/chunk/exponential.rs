//! The exponential function of the fp32 mode by itself, which no part of the algorithm hides.

use gdnlab::cuda::{Build, Gpu, Grid, Source};

const KERNELS: &str = r#"
#include "chunk.cuh"
struct Params { const float* x; float* y; int n; };
extern "C" __global__ void kept(const __grid_constant__ Params p) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.y[i] = exponential_f32(p.x[i]);
}
extern "C" __global__ void of_cuda(const __grid_constant__ Params p) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) p.y[i] = expf(p.x[i]);
}
"#;

/// Unit roundoff of binary32.
const U: f64 = 1.0 / (1 << 24) as f64;

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    x: u64,
    y: u64,
    n: i32,
}

fn build() -> Build {
    let defines = [("MODE", "3"), ("INPUT", "float"), ("KD", "64"), ("VD", "64"), ("CHUNK", "64")];
    let source = Source::new("exponential.cu", KERNELS).unwrap();
    Build { source, defines: defines.map(|(name, value)| (name, value.to_owned())).to_vec() }
}

/// `e^x` by `function`.
fn exponentials(function: &str, x: &[f32]) -> Vec<f32> {
    let gpu = Gpu::shared().unwrap();
    let kernel = gpu.module(&build()).unwrap().function(function).unwrap();
    let (from, to) = (gpu.upload(x).unwrap(), gpu.upload(&vec![f32::NAN; x.len()]).unwrap());
    let params = Params { x: from.address(), y: to.address(), n: x.len() as i32 };
    let grid = Grid { blocks: [x.len().div_ceil(128) as u32, 1, 1], threads: 128, ..Grid::default() };
    // SAFETY: both buffers have `n` elements, and the download below waits for the kernel.
    unsafe { kernel.launch(gpu.stream(), grid, &params).unwrap() };
    gpu.download(&to).unwrap()
}

/// Mean and largest magnitude of the relative errors, in units of `U`.
fn errors(x: &[f32], y: &[f32]) -> (f64, f64) {
    let errors = x.iter().zip(y).map(|(&x, &y)| (f64::from(y) / f64::from(x).exp() - 1.0) / U);
    let (sum, most) = errors.fold((0.0, 0.0f64), |(sum, most), error| (sum + error, most.max(error.abs())));
    (sum / x.len() as f64, most)
}

/// The standard error of the means is 0.0006 u.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn errors_of_decays_that_are_kept_in_binary32_have_no_direction() {
    const COUNT: u32 = 500_000;
    for lowest in [-1.0f32, -20.0, -80.0] {
        let x: Vec<f32> = (1..=COUNT).map(|i| lowest * (i as f32 / COUNT as f32)).collect();
        let (mean, most) = errors(&x, &exponentials("kept", &x));
        let (mean_of_cuda, most_of_cuda) = errors(&x, &exponentials("of_cuda", &x));
        println!(
            "x in [{lowest}, 0]: e^x of the fp32 mode errs by {mean:+.4} u on average, {most:.2} u at most; expf by \
             {mean_of_cuda:+.4} u and {most_of_cuda:.2} u"
        );
        assert!(mean.abs() < 0.01 && most < 1.3, "{lowest}: {mean} u, {most} u");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn extreme_decays_are_what_they_should_be() {
    let x = [0.0, -0.0, f32::NEG_INFINITY, -1e30, -105.5, -104.5, f32::INFINITY, 88.8, 1e30, 1e-30, -1e-40];
    let expected = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, f32::INFINITY, f32::INFINITY, f32::INFINITY, 1.0, 1.0];
    assert_eq!(exponentials("kept", &x), expected);
    assert!(exponentials("kept", &[f32::NAN])[0].is_nan());
    // Subnormal results are rounded twice: as a number of 24 bits, then to the spacing there.
    let subnormal: Vec<f32> = (0..1600).map(|i| -87.5 - i as f32 / 100.0).collect();
    for (x, y) in subnormal.iter().zip(exponentials("kept", &subnormal)) {
        let error = f64::from(y) - f64::from(*x).exp();
        let bound = 2.0f64.powi(-150) + 1.3 * U * f64::from(*x).exp();
        assert!(error.abs() < bound, "e^{x} = {y:e}: off by {error:e}");
    }
}
