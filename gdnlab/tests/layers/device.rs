//! What the tests share: seeded tensors on the GPU, and the distance of what comes back from the truth.

use gdnlab::cuda::layers::View;
use gdnlab::cuda::{Buffer, Element, Gpu};
use gdnlab::problem::Tensor;
use half::bf16;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// `||x - r|| / ||r||` at the most, by the format of a result. Rounding a result to bf16 alone gives 1.7e-3, and one more
/// rounding on the way (of what a sum is taken of) up to 2.4e-3. In binary32 a sum of some thousand terms gives about 1e-6,
/// and the fast exponential as much.
const BF16: f64 = 3e-3;
const F32: f64 = 1e-5;

pub fn gpu() -> &'static Gpu {
    Gpu::shared().unwrap()
}

/// iid N(0, 1), rounded to bf16.
pub fn gaussian(seed: u64, dims: &[usize]) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut tensor = Tensor::zeros(dims);
    tensor.data.fill_with(|| {
        let x: f64 = StandardNormal.sample(&mut rng);
        f64::from(bf16::from_f64(x))
    });
    tensor
}

/// iid N(mean, deviation^2), rounded to binary32.
pub fn vector(seed: u64, dims: &[usize], mean: f64, deviation: f64) -> Tensor {
    let mut tensor = gaussian(seed, dims);
    tensor.data.iter_mut().for_each(|x| *x = f64::from((mean + deviation * *x) as f32));
    tensor
}

/// `tensor`, whose values bf16 holds, on the GPU.
pub fn narrow(tensor: &Tensor) -> Buffer<bf16> {
    gpu().upload(&tensor.data.iter().map(|&x| bf16::from_f64(x)).collect::<Vec<_>>()).unwrap()
}

/// `tensor`, whose values binary32 holds, on the GPU.
pub fn wide(tensor: &Tensor) -> Buffer<f32> {
    gpu().upload(&tensor.data.iter().map(|&x| x as f32).collect::<Vec<_>>()).unwrap()
}

/// Memory in which every number is NaN.
pub fn empty<T: Element>(elements: usize) -> Buffer<T> {
    let mut buffer = gpu().alloc(elements).unwrap();
    gpu().fill_bytes(&mut buffer, 0xff).unwrap();
    buffer
}

pub fn view<T: Element>(buffer: &Buffer<T>) -> View<T> {
    View::of(buffer)
}

/// What `buffer` holds, as `[dims]`.
pub fn download<T: Element + Into<f64>>(buffer: &Buffer<T>, dims: &[usize]) -> Tensor {
    Tensor::new(dims, gpu().download(buffer).unwrap().into_iter().map(Into::into).collect()).unwrap()
}

pub fn rel_rms(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |sum: f64, x: f64| sum + x * x;
    let error = found.iter().zip(expected).map(|(x, r)| x - r).fold(0.0, square);
    let size = expected.iter().copied().fold(0.0, square);
    if error == 0.0 { 0.0 } else { (error / size).sqrt() }
}

#[track_caller]
fn check(name: &str, found: &[f64], expected: &Tensor, tolerance: f64) {
    let error = rel_rms(found, &expected.data);
    println!("{name}: rel_rms {error:.2e}");
    assert!(error <= tolerance, "{name}: rel_rms {error:.2e} above {tolerance:.0e}");
}

#[track_caller]
pub fn check_bf16(name: &str, found: &Buffer<bf16>, expected: &Tensor) {
    check(name, &download(found, &expected.dims).data, expected, BF16);
}

#[track_caller]
pub fn check_f32(name: &str, found: &Buffer<f32>, expected: &Tensor) {
    check(name, &download(found, &expected.dims).data, expected, F32);
}

/// Columns `first..first + width` of a matrix of `pitch` columns, as a tensor of `dims`.
pub fn columns(matrix: &Tensor, first: usize, dims: &[usize]) -> Tensor {
    let (pitch, rows) = (matrix.dims[1], matrix.dims[0]);
    let width = dims.iter().product::<usize>() / rows;
    let data = matrix.data.chunks_exact(pitch).flat_map(|row| &row[first..first + width]).copied().collect();
    Tensor::new(dims, data).unwrap()
}

#[track_caller]
pub fn check_columns(name: &str, matrix: &Tensor, first: usize, expected: &Tensor) {
    check(name, &columns(matrix, first, &expected.dims).data, expected, BF16);
}

/// The bits of two runs, of which each fills all its memory anew.
#[track_caller]
pub fn same_bits<T: Element + PartialEq + std::fmt::Debug>(name: &str, one: &Buffer<T>, other: &Buffer<T>) {
    let bytes = |buffer: &Buffer<T>| {
        let values = gpu().download(buffer).unwrap();
        values.iter().map(|x| format!("{x:?}")).collect::<Vec<_>>()
    };
    assert!(bytes(one) == bytes(other), "{name}: two runs differ");
}
