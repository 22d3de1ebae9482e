//! Results: what a kernel made of a case.

use super::file::{self, complaint};
use super::write::{Destination, Stored};
use crate::Result;
use crate::precision::Format;
use crate::problem::{GateGrads, Grads, Inputs, Op, Outputs, Results, Tensor};
use std::path::Path;

/// The result tensors of a file; some may be missing.
#[derive(Clone, Debug)]
pub struct ResultFile {
    /// Name, values and the format they were stored in, in the order of the Day 1 tables.
    pub tensors: Vec<(&'static str, Tensor, Format)>,
    /// Results of the operator that the file does not hold.
    pub missing: Vec<&'static str>,
    /// One line each.
    pub warnings: Vec<String>,
}

impl ResultFile {
    /// Every tensor with its name.
    pub fn named(&self) -> Vec<(&'static str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor, _)| (*name, tensor)).collect()
    }

    /// All results of a call, with the gradients where `backward` says so; in words what is missing.
    pub(crate) fn into_results(self, backward: bool) -> Result<Results, String> {
        let mut tensors: Vec<(&'static str, Tensor)> =
            self.tensors.into_iter().map(|(name, tensor, _)| (name, tensor)).collect();
        let mut take = |name: &str| {
            let at = tensors.iter().position(|(held, _)| *held == name);
            at.map(|at| tensors.swap_remove(at).1).ok_or_else(|| format!("it gave no '{name}'"))
        };
        let outputs = Outputs { o: take("o")?, final_state: take("final_state")? };
        if !backward {
            return Ok(Results { outputs, grads: None });
        }
        let gates = match take("dbeta") {
            Ok(dbeta) => GateGrads::Gdn { dbeta },
            Err(no_dbeta) => match (take("db"), take("dw")) {
                (Ok(db), Ok(dw)) => GateGrads::Gdn2 { db, dw },
                _ => return Err(no_dbeta),
            },
        };
        let [dq, dk, dv, dg, dh0] = ["dq", "dk", "dv", "dg", "dh0"].map(take);
        let grads = Grads { dq: dq?, dk: dk?, dv: dv?, dg: dg?, gates, dh0: dh0? };
        Ok(Results { outputs, grads: Some(grads) })
    }

    /// Whether the file holds any gradient.
    pub fn has_gradients(&self) -> bool {
        self.tensors.iter().any(|(name, ..)| !matches!(*name, "o" | "final_state"))
    }
}

/// Reads the results at `path` of the call that takes `inputs`. Values may be non-finite: to say so is the comparison's
/// business.
///
/// # Errors
/// [`crate::Error::Io`] where the file cannot be read; [`crate::Error::Input`], with the path, where it is no
/// safetensors file, a tensor has another shape or dtype than `inputs` ask for, or no result is in it.
pub fn read_results(path: impl AsRef<Path>, inputs: &Inputs) -> Result<ResultFile> {
    let path = path.as_ref();
    let bytes = file::read_bytes(path)?;
    let (held, metadata) = file::parse(path, &bytes)?;
    if let Some(stated) = metadata.get("op").filter(|stated| *stated != inputs.op().name()) {
        return Err(complaint(
            path,
            format!("metadata op is '{}', but the case is {}", stated.escape_debug(), inputs.op()),
        ));
    }
    let expected = expected_dims(inputs);
    let names: Vec<&str> = expected.iter().map(|(name, _)| *name).collect();
    let mut result = ResultFile { tensors: Vec::new(), missing: Vec::new(), warnings: Vec::new() };
    for (name, dims) in &expected {
        let Ok(view) = held.tensor(name) else {
            result.missing.push(name);
            continue;
        };
        if view.shape() != dims {
            let got = view.shape();
            return Err(complaint(
                path,
                format!("tensor '{name}': expected shape {dims:?} for {}, got {got:?}", inputs.shape),
            ));
        }
        let format = file::format_of(path, name, view.dtype())?;
        result.tensors.push((name, file::decode(path, name, &view)?, format));
    }
    let mut unknown: Vec<&str> = held.names().into_iter().filter(|name| !names.contains(name)).collect();
    unknown.sort_unstable();
    let unknown: Vec<String> = unknown.into_iter().map(|name| name.escape_debug().to_string()).collect();
    if result.tensors.is_empty() {
        let held = if unknown.is_empty() { "no tensors".to_owned() } else { unknown.join(", ") };
        return Err(complaint(
            path,
            format!("holds no result of {}: expected some of {}, got {held}", inputs.op(), names.join(", ")),
        ));
    }
    result.warnings.extend(
        unknown.into_iter().map(|name| {
            format!("tensor '{name}' is not compared: results of {} are {}", inputs.op(), names.join(", "))
        }),
    );
    Ok(result)
}

/// Names and dimensions of all results of `inputs`, in the order of the Day 1 tables.
fn expected_dims(inputs: &Inputs) -> Vec<(&'static str, Vec<usize>)> {
    let shape = &inputs.shape;
    let state = shape.state_dims(inputs.sequences()).to_vec();
    let (qk, value) = (shape.qk_dims().to_vec(), shape.value_dims().to_vec());
    let mut all = vec![
        ("o", value.clone()),
        ("final_state", state.clone()),
        ("dq", qk.clone()),
        ("dk", qk),
        ("dv", value.clone()),
        ("dg", inputs.gates.log_decay().dims.clone()),
    ];
    match inputs.op() {
        Op::Gdn => all.push(("dbeta", shape.gate_dims().to_vec())),
        Op::Gdn2 => all.extend([("db", shape.channel_gate_dims().to_vec()), ("dw", value)]),
    }
    all.push(("dh0", state));
    all
}

/// Writes `results` of a call of `op`, every tensor in f64. `made_by` names the kernel.
///
/// # Errors
/// [`crate::Error::Io`] where the file cannot be written.
pub fn write_results(destination: &Destination, op: Op, made_by: &str, results: &Results) -> Result<()> {
    let stored = results.named().into_iter().map(|(name, tensor)| Stored::values(name, tensor, Format::F64)).collect();
    destination.write(stored, &[("op", op.name()), ("kernel", made_by)])
}
