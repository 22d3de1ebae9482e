//! Whether runs gave the same bits.

use super::Errors;
use serde::{Deserialize, Serialize};

/// One tensor of a kernel over runs that should give the same bits, against that of the first run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Determinism {
    /// What changed from run to run, such as `launches` or `packing`.
    pub check: String,
    /// Runs that were compared with the first.
    pub runs: usize,
    /// Those of them with another bit.
    pub differing_runs: usize,
    /// Elements of the tensor.
    pub elements: usize,
    /// Elements with another bit in the run that has most of them.
    pub differing: usize,
    /// The first run with another bit, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_run: Option<String>,
    /// Its first element with another bit, one index per axis.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub first_index: Vec<usize>,
    /// Value found there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_value: Option<f64>,
    /// Value of the first run there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_expected: Option<f64>,
    /// Distance of the run that differs most from the first run.
    #[serde(flatten)]
    pub errors: Errors,
}
