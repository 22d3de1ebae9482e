//! Distances of each head of each sequence, which are problems of their own: a head of small values that is wrong
//! throughout does not show in the RMS of a tensor that holds larger ones.

use crate::problem::Tensor;
use gdnlab_deps::rayon::prelude::*;
use serde::Serialize;
use std::ops::Range;

/// Elements that a head needs to be measured by itself: the RMS of fewer is left to chance.
const FEWEST: usize = 16;

/// How far one head of one sequence is from its truth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HeadError {
    /// Index of the sequence: of the batch, or of the packed sequences.
    pub sequence: usize,
    /// Index of the head, a q/k head for dq and dk.
    pub head: usize,
    /// RMS error over the RMS of the truth or over `terms`, whichever is larger.
    pub rel_rms: f64,
    /// What `rel_rms` is relative to.
    pub scale: f64,
}

#[derive(Default)]
struct Sums {
    count: usize,
    errors: f64,
    truth: f64,
    terms: f64,
}

/// The heads of the result tensor `name` whose truth is not zero. `terms` has one value per element; `ranges` tells
/// which tokens of the flattened axis `B * T` belong to which sequence.
///
/// Squares are taken in units of `unit`, the largest value of the truth.
pub(super) fn head_errors(
    name: &str,
    got: &Tensor,
    expected: &Tensor,
    terms: &[f64],
    ranges: Option<&[Range<usize>]>,
    unit: f64,
) -> Vec<HeadError> {
    let dims = &expected.dims;
    let is_state = matches!(name, "final_state" | "dh0");
    if !matches!((dims.len(), is_state), (4, _) | (3, false)) || unit == 0.0 {
        return Vec::new();
    }
    let heads = dims[if is_state { 1 } else { 2 }];
    let inner = dims.iter().skip(if is_state { 2 } else { 3 }).product::<usize>().max(1);
    // Rows of `inner` elements of each sequence, `heads` for each token; a state is like one token.
    let sequences: Vec<Range<usize>> = match ranges {
        _ if is_state => (0..dims[0]).map(|n| n..n + 1).collect(),
        Some(ranges) => ranges.to_vec(),
        None => (0..dims[0]).map(|b| b * dims[1]..(b + 1) * dims[1]).collect(),
    };
    let sums: Vec<Sums> = (0..sequences.len() * heads)
        .into_par_iter()
        .map(|at| {
            let rows = sequences[at / heads].clone().map(|token| token * heads + at % heads);
            let elements = rows.flat_map(|row| row * inner..(row + 1) * inner);
            let mut sums = Sums::default();
            for (at, x, r) in
                elements.map(|at| (at, got.data[at], expected.data[at])).filter(|(_, x, r)| (x - r).is_finite())
            {
                sums.count += 1;
                sums.errors += ((x - r) / unit).powi(2);
                sums.truth += (r / unit).powi(2);
                sums.terms = sums.terms.max(terms.get(at).copied().unwrap_or(0.0));
            }
            sums
        })
        .collect();
    let measured = sums.into_iter().enumerate().filter(|(_, sums)| sums.count >= FEWEST && sums.truth > 0.0);
    measured
        .map(|(at, sums)| {
            let rms = |squares: f64| unit * (squares / sums.count as f64).sqrt();
            let scale = rms(sums.truth).max(sums.terms);
            HeadError { sequence: at / heads, head: at % heads, rel_rms: rms(sums.errors) / scale, scale }
        })
        .collect()
}
