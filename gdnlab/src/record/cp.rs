//! A call that is cut over ranks.

use serde::{Deserialize, Serialize};

/// What was found about a call on several ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cp {
    /// Number of ranks.
    pub ranks: usize,
    /// How they exchange states: `virtual` (threads of one process), `tcp` or `nccl`.
    pub transport: String,
    /// Tokens of each rank, such as `5120+5120`.
    pub cut: String,
    /// Borders between ranks that a sequence crosses.
    pub crossings: usize,
    /// How exact it was, or how fast.
    #[serde(flatten)]
    pub found: CpFound,
}

/// How exact, or how fast.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum CpFound {
    /// One tensor.
    Exactness(CpExactness),
    /// The time of all of it.
    Scaling(CpScaling),
}

/// One tensor of a call on several ranks, beside that of a single run and the float64 truth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpExactness {
    /// Name in tensor files.
    pub tensor: String,
    /// Elements.
    pub elements: usize,
    /// Those of them with another bit than in a single run.
    pub differing: usize,
    /// `max|x - y| / max|y|`, with `y` of the single run.
    pub apart: f64,
    /// `||x - r|| / ||r||`, with `r` the truth.
    pub rel_rms: f64,
    /// The same of the single run.
    pub single_rel_rms: f64,
}

/// Time of a call on several ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpScaling {
    /// `strong`: the same call on more ranks; `weak`: a sequence that grows with them.
    pub scaling: String,
    /// What times are. `gpu`: measured on ranks side by side, each by the clock of its GPU, where all tensors stay; `wall`: on
    /// ranks side by side, from inputs to results on the host; `host`: from the wall times of each rank's steps, taken one
    /// rank after the other; `device`: the same from GPU times of its kernels.
    pub clock: String,
    /// From the first rank's begin to the last one's end, median, in milliseconds.
    pub latency_ms: f64,
    /// Every sample, in milliseconds.
    pub samples_ms: Vec<f64>,
    /// The call on one rank without any of this, by the same clock, median, in milliseconds.
    pub single_ms: f64,
    /// Computing of the rank that computes most, in milliseconds.
    pub compute_ms: f64,
    /// The messages alone, one waiting for the other as they do, median, in milliseconds.
    pub communication_ms: f64,
    /// What the link's rate allows for them, in milliseconds.
    pub floor_ms: f64,
    /// Bytes of all messages.
    pub bytes: usize,
    /// Number of messages.
    pub messages: usize,
    /// Measured rate of the link, in gigabytes per second; absent for one rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_gb_s: Option<f64>,
    /// Measured time of a message of one byte, in milliseconds; absent for one rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_latency_ms: Option<f64>,
}
