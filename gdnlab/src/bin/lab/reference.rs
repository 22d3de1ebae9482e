//! `cargo lab reference`.

use crate::compute::compute_into;
use gdnlab::Result;
use gdnlab::reference::Reference;
use std::path::PathBuf;
use std::process::ExitCode;

/// Compute the float64 truth of a tensor file.
///
/// CASE holds the inputs of one call: q, k [B,T,HK,K], v [B,T,HV,V]; for GDN g, beta [B,T,HV]; for GDN-2 g, b [B,T,HV,K]
/// and w [B,T,HV,V]; optionally initial_state and dht [N,HV,K,V], do [B,T,HV,V], cu_seqlens [N+1] (then B = 1) and
/// scale [1]. The token-by-token recurrence runs in float64 on the values as they are stored. OUT gets o and final_state
/// and, where the case has do, the gradients dq, dk, dv, dg, dbeta (or db and dw) and dh0, all in float64.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  cargo lab reference case.safetensors -o truth.safetensors")]
pub struct Args {
    /// Tensor file with the inputs.
    case: PathBuf,
    /// Tensor file to write; one that exists is replaced.
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        compute_into(&self.case, &Reference, &self.output)
    }
}
