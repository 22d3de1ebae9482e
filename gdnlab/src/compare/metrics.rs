//! Distances between a tensor and its ground truth.

use super::heads::{HeadError, head_errors};
use super::sum::sum;
use crate::precision::Format;
use crate::problem::{Inputs, Op, PIECE, Results, Tensor};
use crate::{Error, Result};
use gdnlab_deps::rayon::prelude::*;
use gdnlab_deps::statrs::distribution::{ContinuousCDF, StudentsT};
use serde::Serialize;
use std::fmt;
use std::ops::Range;

/// How far a tensor `x` is from its ground truth `r`.
///
/// Non-finite values come before any distance: an element where `x` or `r` is NaN, or where one is infinite and the
/// other is not the same infinity, is counted in `nonfinite` and enters no other number. Equal infinities agree.
/// The remaining `n` elements give the distances.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Name of the tensor, such as `o` or `dq`.
    pub tensor: String,
    /// Number of elements.
    pub elements: usize,
    /// Elements that are not finite where they should be; a tensor with one never passes.
    pub nonfinite: usize,
    /// `max|x - r| / max|r|`. An `r` of zeros has no scale of its own: `terms` takes its place, and where that is zero
    /// too, an exact match gives 0 and anything else infinity.
    pub max_rel: f64,
    /// `||x - r|| / ||r||`, that is RMS error over RMS of `r`; an `r` of zeros is treated as in `max_rel`.
    pub rel_rms: f64,
    /// `max|x - r|`.
    pub max_abs: f64,
    /// Mean of `|x - r|`.
    pub mean_abs: f64,
    /// `<x, r> / (||x|| ||r||)`; 1 where both are zero throughout, 0 where one of them is.
    pub cosine: f64,
    /// Signed bias: mean of `x - r` over the RMS of `r` (replaced as in `max_rel`).
    pub bias: f64,
    /// Probability of a mean error at least this far from 0 if the errors were independent and centred on 0:
    /// two-sided t-test with `n - 1` degrees of freedom. 1 for fewer than two elements.
    pub bias_p: f64,
    /// `max|r|`.
    pub max_expected: f64,
    /// RMS of `r`.
    pub rms_expected: f64,
    /// Size of the terms that `r` is a sum of, 0 where it is not known. Rounding errors scale with it rather than with
    /// `r` where the terms cancel: see [`compare_call`].
    pub terms: f64,
    /// The narrowest format that holds every value found: a result that went through bf16 betrays itself here. Zeros
    /// alone tell nothing and count as binary64.
    pub narrowest: Format,
    /// The element that is furthest off, a non-finite one first; `None` where every element is exact.
    pub worst: Option<Worst>,
    /// Each head of each sequence whose truth is not zero and large enough to have an RMS of its own.
    #[serde(skip)]
    pub heads: Vec<HeadError>,
}

/// One element, with what was found and what was expected there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worst {
    /// One index per axis.
    pub index: Vec<usize>,
    /// Value found.
    pub got: f64,
    /// Value of the ground truth.
    pub expected: f64,
}

/// Compares `got` with the ground truth `expected`, which must have the same shape.
///
/// ```
/// use gdnlab::{compare::compare, problem::Tensor};
/// let truth = Tensor::new(&[2], vec![4.0, -2.0])?;
/// let found = Tensor::new(&[2], vec![4.0, -1.5])?;
/// let comparison = compare("o", &found, &truth)?;
/// assert_eq!(comparison.max_rel, 0.125);
/// assert_eq!(comparison.worst.map(|worst| worst.index), Some(vec![1]));
/// # Ok::<(), gdnlab::Error>(())
/// ```
///
/// # Errors
/// [`Error::Input`] where the shapes differ.
pub fn compare(name: &str, got: &Tensor, expected: &Tensor) -> Result<Comparison> {
    compare_scaled(name, got, expected, &[], None)
}

/// Compares all that `got` holds with `expected`; gradients only where both have them.
///
/// # Errors
/// [`Error::Input`] where shapes differ.
pub fn compare_results(got: &Results, expected: &Results) -> Result<Vec<Comparison>> {
    compare_each(&got.named(), &expected.named(), &[], None)
}

/// [`compare_results`] for results of `inputs`, given by name so that some may be missing: tensors that one side lacks
/// are skipped, and the order is that of `expected`.
///
/// The inputs tell the size of the terms that dg is a sum of. The chunk form accumulates dG from `q*dq` and `k*dk`
/// terms, which cancel where the decay has forgotten the past: at `g = -100` the true dg is near 0, and every chunked
/// kernel leaves rounding errors of the size of its terms there.
///
/// # Errors
/// [`Error::Input`] where shapes differ.
pub fn compare_call(inputs: &Inputs, got: &[(&str, &Tensor)], expected: &[(&str, &Tensor)]) -> Result<Vec<Comparison>> {
    let find = |name: &str| expected.iter().find(|(found, _)| *found == name).map(|(_, tensor)| *tensor);
    let dg_terms = match (find("dq"), find("dk")) {
        (Some(dq), Some(dk)) => dg_terms(inputs, dq, dk),
        _ => Vec::new(),
    };
    compare_each(got, expected, &dg_terms, Some(&inputs.sequence_ranges()))
}

fn compare_each(
    got: &[(&str, &Tensor)],
    expected: &[(&str, &Tensor)],
    dg_terms: &[f64],
    ranges: Option<&[Range<usize>]>,
) -> Result<Vec<Comparison>> {
    expected
        .iter()
        .filter_map(|(name, truth)| {
            let (_, found) = got.iter().find(|(found_name, _)| found_name == name)?;
            let terms = if *name == "dg" { dg_terms } else { &[] };
            Some(compare_scaled(name, found, truth, terms, ranges))
        })
        .collect()
}

/// `|q dq| + |k dk|` for each element of dg, summed over the channels of a head where the gate is a scalar.
fn dg_terms(inputs: &Inputs, dq: &Tensor, dk: &Tensor) -> Vec<f64> {
    let shape = &inputs.shape;
    let channels = match inputs.op() {
        Op::Gdn => shape.key_dim,
        Op::Gdn2 => 1,
    };
    let products: Vec<f64> = (inputs.q.data.iter().zip(&dq.data))
        .zip(inputs.k.data.iter().zip(&dk.data))
        .map(|((q, dq), (k, dk))| (q * dq).abs() + (k * dk).abs())
        .collect();
    let of_qk_heads = products.chunks(shape.key_dim);
    of_qk_heads
        .flat_map(|head| (0..shape.group()).flat_map(|_| head.chunks(channels).map(|sum| sum.iter().sum())))
        .collect()
}

/// The narrowest format that holds all of `values`.
fn narrowest(values: &[f64]) -> Format {
    let all =
        |test: &(dyn Fn(f64) -> bool + Sync)| values.par_chunks(PIECE).all(|piece| piece.iter().all(|&x| test(x)));
    let holds = |format: Format| all(&|x| x.is_nan() || format.round(x) == x);
    if all(&|x| x == 0.0) {
        return Format::F64;
    }
    let narrow_first = [Format::Bf16, Format::F16, Format::Tf32, Format::F32];
    narrow_first.into_iter().find(|&format| holds(format)).unwrap_or(Format::F64)
}

/// [`compare`], with the size of the terms that each element of `expected` is a sum of, and where sequences lie.
fn compare_scaled(
    name: &str,
    got: &Tensor,
    expected: &Tensor,
    terms: &[f64],
    ranges: Option<&[Range<usize>]>,
) -> Result<Comparison> {
    if got.dims != expected.dims {
        return Err(Error::input(format!("tensor '{name}': expected shape {:?}, got {:?}", expected.dims, got.dims)));
    }
    let largest_term = terms.iter().copied().fold(0.0, f64::max);
    let distances = Distances::new(&got.data, &expected.data, largest_term);
    let unit = if distances.zero_reference { 0.0 } else { distances.scale };
    let scan = scan(&got.data, &expected.data);
    let (bias, bias_p) = distances.bias();
    Ok(Comparison {
        tensor: name.to_owned(),
        elements: expected.data.len(),
        nonfinite: scan.nonfinite,
        max_rel: ratio(scan.max_abs, distances.scale),
        rel_rms: distances.rel_rms(),
        max_abs: scan.max_abs,
        mean_abs: distances.mean_abs(),
        cosine: distances.cosine(),
        bias,
        bias_p,
        max_expected: unit,
        rms_expected: unit * distances.reference_rms(),
        terms: largest_term,
        narrowest: narrowest(&got.data),
        worst: scan.worst.map(|at| Worst {
            index: expected.index_of(at),
            got: got.data[at],
            expected: expected.data[at],
        }),
        heads: head_errors(name, got, expected, terms, ranges, unit),
    })
}

/// `error / scale`, where an exact match is 0 whatever the scale.
fn ratio(error: f64, scale: f64) -> f64 {
    if error == 0.0 { 0.0 } else { error / scale }
}

#[derive(Default)]
struct Scan {
    nonfinite: usize,
    max_abs: f64,
    worst: Option<usize>,
}

impl Scan {
    /// Of elements whose first has the index `first`.
    fn of(first: usize, got: &[f64], expected: &[f64]) -> Self {
        let mut scan = Self::default();
        for (at, (&x, &r)) in got.iter().zip(expected).enumerate() {
            if x.is_finite() && r.is_finite() {
                let error = (x - r).abs();
                if error > scan.max_abs {
                    scan.max_abs = error;
                    if scan.nonfinite == 0 {
                        scan.worst = Some(first + at);
                    }
                }
            } else if x != r {
                if scan.nonfinite == 0 {
                    scan.worst = Some(first + at);
                }
                scan.nonfinite += 1;
            }
        }
        scan
    }

    /// Of both, `next` with the elements behind those of `self`.
    fn and(self, next: Self) -> Self {
        let of_next = match (self.nonfinite, next.nonfinite) {
            (0, 0) => next.max_abs > self.max_abs,
            (before, _) => before == 0,
        };
        Self {
            nonfinite: self.nonfinite + next.nonfinite,
            max_abs: self.max_abs.max(next.max_abs),
            worst: if of_next { next.worst } else { self.worst },
        }
    }
}

fn scan(got: &[f64], expected: &[f64]) -> Scan {
    let pieces = got.par_chunks(PIECE).zip(expected.par_chunks(PIECE)).enumerate();
    let scans: Vec<Scan> = pieces.map(|(index, (x, r))| Scan::of(index * PIECE, x, r)).collect();
    scans.into_iter().fold(Scan::default(), Scan::and)
}

/// Sums over the elements that are finite on both sides, in units of `scale` so that squares neither overflow nor
/// vanish. Threads take pieces, whose results are put together in their order, so no bit depends on the number of threads.
struct Distances<'a> {
    got: &'a [f64],
    expected: &'a [f64],
    count: usize,
    /// `max|r|`, or what stands in for it.
    scale: f64,
    /// Whether `r` is zero throughout.
    zero_reference: bool,
}

impl<'a> Distances<'a> {
    fn new(got: &'a [f64], expected: &'a [f64], terms: f64) -> Self {
        let mut distances = Self { got, expected, count: 0, scale: 0.0, zero_reference: false };
        distances.count = distances.pieces().map(|(got, expected)| pairs(got, expected).count()).sum();
        let largest = distances.largest(|(_, r)| r);
        distances.zero_reference = largest == 0.0;
        distances.scale = if distances.zero_reference { terms } else { largest };
        distances
    }

    fn pieces(&self) -> impl IndexedParallelIterator<Item = (&'a [f64], &'a [f64])> + use<'a> {
        self.got.par_chunks(PIECE).zip(self.expected.par_chunks(PIECE))
    }

    fn largest(&self, value: impl Fn((f64, f64)) -> f64 + Sync) -> f64 {
        let largest = |(got, expected)| pairs(got, expected).map(|pair| value(pair).abs()).fold(0.0, f64::max);
        self.pieces().map(largest).reduce(|| 0.0, f64::max)
    }

    fn sum(&self, term: impl Fn((f64, f64)) -> f64 + Sync) -> f64 {
        let sums: Vec<f64> = self.pieces().map(|(got, expected)| sum(pairs(got, expected).map(&term))).collect();
        sum(sums.into_iter())
    }

    /// `(x - r) / scale` of an element.
    fn error(&self, (x, r): (f64, f64)) -> f64 {
        ratio(x - r, self.scale)
    }

    /// RMS of `r` in units of `scale`.
    fn reference_rms(&self) -> f64 {
        if self.zero_reference {
            return 1.0;
        }
        (self.sum(|(_, r)| (r / self.scale).powi(2)) / self.count as f64).sqrt()
    }

    fn rel_rms(&self) -> f64 {
        if self.count == 0 {
            return 0.0;
        }
        (self.sum(|pair| self.error(pair).powi(2)) / self.count as f64).sqrt() / self.reference_rms()
    }

    fn mean_abs(&self) -> f64 {
        self.sum(|(x, r)| (x - r).abs()) / self.count.max(1) as f64
    }

    fn cosine(&self) -> f64 {
        let largest = self.largest(|(x, _)| x);
        match (largest == 0.0, self.zero_reference) {
            (true, true) => return 1.0,
            (false, false) => {}
            _ => return 0.0,
        }
        let unit = |(x, r): (f64, f64)| (x / largest, r / self.scale);
        let sum = |term: fn((f64, f64)) -> f64| self.sum(|pair| term(unit(pair)));
        let dot = sum(|(x, r)| x * r);
        let norms = sum(|(x, _)| x * x) * sum(|(_, r)| r * r);
        dot / norms.sqrt()
    }

    /// Signed bias and the p-value of its t-test.
    fn bias(&self) -> (f64, f64) {
        if self.count == 0 {
            return (0.0, 1.0);
        }
        let n = self.count as f64;
        let mean = self.sum(|pair| self.error(pair)) / n;
        let squares = self.sum(|pair| (self.error(pair) - mean).powi(2));
        (mean / self.reference_rms(), two_sided_p(mean, squares, n))
    }
}

/// The elements that are finite on both sides.
fn pairs<'a>(got: &'a [f64], expected: &'a [f64]) -> impl Iterator<Item = (f64, f64)> + use<'a> {
    let both = got.iter().copied().zip(expected.iter().copied());
    both.filter(|(x, r)| x.is_finite() && r.is_finite())
}

/// p-value of `mean` under "the mean is 0", from the sum of squared deviations of `n` values.
fn two_sided_p(mean: f64, squares: f64, n: f64) -> f64 {
    if mean == 0.0 || n < 2.0 {
        return 1.0;
    }
    let t = mean / (squares / (n - 1.0) / n).sqrt();
    match StudentsT::new(0.0, 1.0, n - 1.0) {
        Ok(student) if t.is_finite() => 2.0 * student.cdf(-t.abs()),
        _ => 0.0,
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: rel_rms {:.2e}, max_rel {:.2e}, max_abs {:.2e}, mean_abs {:.2e}, cosine {:.9}, bias {:+.1e} (p = {:.2}), {} of {} not finite",
            self.tensor,
            self.rel_rms,
            self.max_rel,
            self.max_abs,
            self.mean_abs,
            self.cosine,
            self.bias,
            self.bias_p,
            self.nonfinite,
            self.elements
        )?;
        match &self.worst {
            None => write!(f, "; exact"),
            Some(worst) => write!(f, "; worst at {}", worst.describe(&self.tensor)),
        }
    }
}

impl Worst {
    /// The element with the names of its axes: `(b=0, t=12, h=1, d=3): got 0.5, expected 0.25`.
    pub fn describe(&self, tensor: &str) -> String {
        let axes: &[&str] = match (tensor, self.index.len()) {
            ("final_state" | "dh0" | "initial_state" | "dht", 4) => &["n", "h", "k", "v"],
            (_, 3) => &["b", "t", "h"],
            (_, 4) => &["b", "t", "h", "d"],
            _ => &[],
        };
        let named: Vec<String> = self
            .index
            .iter()
            .enumerate()
            .map(|(axis, i)| axes.get(axis).map_or_else(|| i.to_string(), |name| format!("{name}={i}")))
            .collect();
        format!("({}): got {:.9e}, expected {:.9e}", named.join(", "), self.got, self.expected)
    }
}
