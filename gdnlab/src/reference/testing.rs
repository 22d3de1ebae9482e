//! What the tests of the layers share: seeded tensors, gradients by finite differences, bit-exact comparison.

use crate::problem::Tensor;
use gdnlab_deps::rayon::ThreadPoolBuilder;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// Lengths around the sizes of blocks and chunks.
pub(super) const AWKWARD_LENGTHS: [usize; 5] = [0, 1, 15, 63, 65];

/// iid N(0, 1).
pub(crate) fn gaussian(seed: u64, dims: &[usize]) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut tensor = Tensor::zeros(dims);
    tensor.data.fill_with(|| StandardNormal.sample(&mut rng));
    tensor
}

/// `sum y dy`, and the sum of the magnitudes of its terms, which bounds its rounding error.
#[derive(Clone, Copy)]
pub(crate) struct Loss {
    value: f64,
    magnitude: f64,
}

impl Loss {
    pub(crate) fn new(y: &Tensor, dy: &Tensor) -> Self {
        assert_eq!(y.dims, dy.dims);
        let terms = || y.data.iter().zip(&dy.data).map(|(y, dy)| y * dy);
        Self { value: terms().sum(), magnitude: terms().map(f64::abs).sum() }
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self { value: self.value + other.value, magnitude: self.magnitude + other.magnitude }
    }
}

/// Compares `grad` with central differences of `loss` in every element of `x`, as [`check_elements`] does.
pub(crate) fn check_gradient(name: &str, x: &Tensor, grad: &Tensor, loss: impl Fn(&Tensor) -> Loss) {
    check_elements(name, x, grad, 0..x.data.len(), loss);
}

/// Compares `grad` with central differences of `loss` in some `elements` of `x`.
///
/// The step `h = eps^(1/3) max(1, |x|)` balances truncation, of order `h^2`, against rounding, of order `eps / h`. The
/// truncation is estimated by the same difference over twice the step, of which it is a third of the change; each
/// rounding of the loss is taken to be at most 8 eps of the magnitudes that were summed.
pub(crate) fn check_elements(
    name: &str,
    x: &Tensor,
    grad: &Tensor,
    elements: impl IntoIterator<Item = usize>,
    loss: impl Fn(&Tensor) -> Loss,
) {
    assert_eq!(x.dims, grad.dims, "{name}");
    let largest = grad.data.iter().fold(f64::MIN_POSITIVE, |m, g| m.max(g.abs()));
    for at in elements {
        let h = f64::EPSILON.cbrt() * x.data[at].abs().max(1.0);
        let moved = |by: f64| {
            let mut x = x.clone();
            x.data[at] += by;
            loss(&x)
        };
        let difference = |h: f64| {
            let (up, down) = (moved(h), moved(-h));
            ((up.value - down.value) / (2.0 * h), up.magnitude)
        };
        let (slope, magnitude) = difference(h);
        let truncation = (difference(2.0 * h).0 - slope).abs() / 3.0;
        let tolerance = 2.0 * truncation + 8.0 * f64::EPSILON * magnitude / h;
        assert!(tolerance < 1e-5 * largest, "{name} {:?}: the difference is too coarse, {tolerance:e}", x.index_of(at));
        let error = (grad.data[at] - slope).abs();
        assert!(
            error <= tolerance,
            "{name} {:?}: difference {slope:e}, gradient {:e}, error {error:e} above {tolerance:e}",
            x.index_of(at),
            grad.data[at]
        );
    }
}

/// The largest difference, relative to the largest magnitude of `expected`.
pub(crate) fn max_rel(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(found.dims, expected.dims);
    let largest = expected.data.iter().fold(f64::MIN_POSITIVE, |m, x| m.max(x.abs()));
    found.data.iter().zip(&expected.data).fold(0.0, |m: f64, (f, e)| m.max((f - e).abs())) / largest
}

/// Runs `compute` on one thread and on three.
pub(crate) fn on_one_and_three_threads<R: Send>(compute: impl Fn() -> R + Sync) -> [R; 2] {
    [1, 3].map(|threads| ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(&compute))
}

/// Tokens `range` of the first row of `tensor` `[1, T, ..]`.
pub(super) fn tokens_of(tensor: &Tensor, range: std::ops::Range<usize>) -> Tensor {
    let per_token: usize = tensor.dims[2..].iter().product();
    let mut dims = tensor.dims.clone();
    (dims[0], dims[1]) = (1, range.len());
    Tensor::new(&dims, tensor.data[range.start * per_token..range.end * per_token].to_vec()).unwrap()
}
