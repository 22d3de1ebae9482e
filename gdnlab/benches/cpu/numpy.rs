//! The token loop in numpy that the reference is compared with, in a process of its own.

use crate::timing::Samples;
use gdnlab::problem::{Gates, Inputs, Results};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, Stdio};

const SCRIPT: &str = include_str!("numpy_loop.py");
const RUNS: usize = 5;
/// Largest relative difference of the sums of magnitudes that rounding explains.
const AGREEMENT: f64 = 1e-10;
/// Variables that keep numpy's matrix libraries on one thread.
const ONE_THREAD: [&str; 3] = ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"];

pub struct NumpyTimes {
    pub version: String,
    pub forward: Samples,
    /// Forward and backward.
    pub both: Samples,
}

#[derive(Deserialize)]
struct Reply {
    numpy: String,
    forward_s: Vec<f64>,
    both_s: Vec<f64>,
    magnitudes: BTreeMap<String, f64>,
}

/// Times the loop on one head of GDN, and checks that it gives what `truth` holds.
///
/// # Errors
/// Where `python` or its numpy is missing, the script fails, or its results differ: in words.
pub fn measure(python: &str, inputs: &Inputs, truth: &Results) -> Result<NumpyTimes, String> {
    let shape = &inputs.shape;
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT]).args([shape.tokens, shape.key_dim, shape.value_dim, RUNS].map(|n| n.to_string()));
    command.envs(ONE_THREAD.map(|name| (name, "1")));
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{python}: {error}"))?;
    let sent = child.stdin.take().map(|mut stdin| stdin.write_all(&raw(inputs)));
    let output = child.wait_with_output().map_err(|error| format!("{python}: {error}"))?;
    if !output.status.success() || !matches!(sent, Some(Ok(()))) {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{python}: {}", stderr.lines().last().unwrap_or("stopped without a word")));
    }
    let reply: Reply = serde_json::from_slice(&output.stdout).map_err(|error| format!("reply of {python}: {error}"))?;
    check(&reply, truth)?;
    Ok(NumpyTimes { version: reply.numpy, forward: Samples::new(reply.forward_s), both: Samples::new(reply.both_s) })
}

fn raw(inputs: &Inputs) -> Vec<u8> {
    let Gates::Gdn { g, beta } = &inputs.gates else { return Vec::new() };
    let tensors = [Some(&inputs.q), Some(&inputs.k), Some(&inputs.v), Some(g), Some(beta), inputs.d_o.as_ref()];
    tensors.into_iter().flatten().flat_map(|tensor| &tensor.data).flat_map(|x| x.to_ne_bytes()).collect()
}

fn check(reply: &Reply, truth: &Results) -> Result<(), String> {
    for (name, tensor) in truth.named() {
        let expected: f64 = tensor.data.iter().map(|x| x.abs()).sum();
        match reply.magnitudes.get(name) {
            Some(found) if (found - expected).abs() > AGREEMENT * expected => {
                return Err(format!("numpy's {name} differs: sum of magnitudes {found}, expected {expected}"));
            }
            _ => {}
        }
    }
    Ok(())
}
