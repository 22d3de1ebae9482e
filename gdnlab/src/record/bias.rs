//! Directions of errors.

use serde::{Deserialize, Serialize};

/// Direction of the errors of one tensor: means over units (a sequence and head) in unit roundoffs, relative to the RMS of the
/// truth, and p values, whose null hypothesis stands in [`crate::bias`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Bias {
    /// Name in tensor files, such as `o` or `dq`.
    pub tensor: String,
    /// `up` for `x - r`, `outward` for `sign(r) (x - r)`.
    pub direction: String,
    /// Independent units.
    pub units: usize,
    /// Mean over all elements.
    pub bias_u: f64,
    /// Lower end of its 95 % interval.
    pub low_u: f64,
    /// Upper end of its 95 % interval.
    pub high_u: f64,
    /// p of the t-test.
    pub t_p: f64,
    /// p of the sign test.
    pub sign_p: f64,
    /// p of the t-test after Holm's correction over all tests of the kernel.
    pub t_holm: f64,
    /// p of the sign test after Holm's correction.
    pub sign_holm: f64,
    /// p of the t-test that takes every element for independent.
    pub naive_p: f64,
    /// Tests of this tensor and direction: all elements, by head, by position, by magnitude.
    pub tests: usize,
    /// Those of them with a `t_holm` below 0.05.
    pub t_biased: usize,
    /// Those of them with a `sign_holm` below 0.05.
    pub sign_biased: usize,
    /// The mean that is furthest from 0 among them.
    pub largest_u: f64,
    /// The group of elements that has it, in words.
    pub largest_at: String,
    /// Unit roundoff that the means are in units of.
    pub unit_roundoff: f64,
}
