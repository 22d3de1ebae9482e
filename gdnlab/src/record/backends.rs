//! Two implementations of one call.

use super::Errors;
use serde::{Deserialize, Serialize};

/// One tensor of a kernel beside that of another, and who of the two is right. Shares are of the elements that differ.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Backends {
    /// The other kernel.
    pub against: String,
    /// Distance of the one from the other; `unit_roundoff` is that of the format of q, k and v.
    #[serde(flatten)]
    pub errors: Errors,
    /// `max|r|` of the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_ref: Option<f64>,
    /// Share of all elements in which the two differ.
    pub differing: f64,
    /// Share in which the one is nearer to the truth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nearer: Option<f64>,
    /// Share in which the other is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub against_nearer: Option<f64>,
    /// `rel_rms` of the one against the truth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub truth_rel_rms: Option<f64>,
    /// The same of the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub against_truth_rel_rms: Option<f64>,
    /// `max|x - r|` of the one against the truth.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub truth_max_abs: Option<f64>,
    /// The same of the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub against_truth_max_abs: Option<f64>,
    /// Where the two are furthest apart, one index per axis; empty where they never differ.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub worst: Vec<usize>,
    /// Value of the one there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst_value: Option<f64>,
    /// Value of the other there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst_against: Option<f64>,
    /// The truth there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst_truth: Option<f64>,
}
