//! Cases: the inputs of one call.

use super::file::{self, complaint};
use super::write::{Destination, Stored};
use crate::memory;
use crate::precision::Format;
use crate::problem::{Gates, Inputs, Op, Shape, Tensor};
use crate::{Error, Result};
use safetensors::SafeTensors;
use std::path::Path;

/// Inputs that were read, and what about them deserves a second look.
#[derive(Clone, Debug)]
pub struct Case {
    /// The inputs, validated.
    pub inputs: Inputs,
    /// One line each.
    pub warnings: Vec<String>,
}

const OPTIONAL: [&str; 5] = ["initial_state", "do", "dht", "cu_seqlens", "scale"];

/// Reads the case at `path` and validates all of it.
///
/// # Errors
/// [`Error::Io`] where the file cannot be read; [`Error::Input`], with the path, where it is no safetensors file or
/// does not hold a valid problem, or one that the free memory does not hold.
pub fn read_case(path: impl AsRef<Path>) -> Result<Case> {
    let path = path.as_ref();
    let bytes = file::read_bytes(path)?;
    let (tensors, metadata) = file::parse(path, &bytes)?;
    let reader = Reader { path, tensors: &tensors };
    let op = reader.op(metadata.get("op").map(String::as_str))?;
    let inputs = reader.inputs(op)?;
    let mut warnings = reader.unknown(op);
    let validated = inputs.validate().map_err(|error| complaint(path, error))?;
    warnings.extend(validated);
    let Shape { tokens, value_heads, .. } = inputs.shape;
    if tokens > 1 && tokens < value_heads {
        warnings.push(format!("T = {tokens} is smaller than HV = {value_heads}: axes are [B, T, H, D], heads third"));
    }
    Ok(Case { inputs, warnings })
}

struct Reader<'a> {
    path: &'a Path,
    tensors: &'a SafeTensors<'a>,
}

impl Reader<'_> {
    fn has(&self, name: &str) -> bool {
        self.tensors.names().contains(&name)
    }

    /// The operator that the names tell, which `stated` must agree with.
    fn op(&self, stated: Option<&str>) -> Result<Op> {
        let named = match (self.has("beta"), self.has("b") || self.has("w")) {
            (true, false) => Op::Gdn,
            (false, true) => Op::Gdn2,
            (true, true) => {
                return Err(self.complaint("has 'beta' (GDN) beside 'b' or 'w' (GDN-2): expected the gates of one"));
            }
            (false, false) => {
                return Err(
                    self.complaint(format!("has no 'beta' (GDN) and no 'b' and 'w' (GDN-2); it holds {}", self.held()))
                );
            }
        };
        match stated
            .map(str::parse::<Op>)
            .transpose()
            .map_err(|error| self.complaint(format!("metadata op: {error}")))?
        {
            Some(op) if op != named => {
                Err(self.complaint(format!("metadata op is '{op}', but its gates are those of {named}")))
            }
            _ => Ok(named),
        }
    }

    fn inputs(&self, op: Op) -> Result<Inputs> {
        let (q, dtype) = self.tensor("q")?;
        let [batch, tokens, qk_heads, key_dim] = file::dims(self.path, "q", &q.dims, ["B", "T", "HK", "K"])?;
        let (k, _) = self.tensor("k")?;
        let (v, _) = self.tensor("v")?;
        let [.., value_heads, value_dim] = file::dims(self.path, "v", &v.dims, ["B", "T", "HV", "V"])?;
        let shape = Shape { batch, tokens, qk_heads, value_heads, key_dim, value_dim };
        shape.validate().map_err(|error| self.complaint(error))?;
        let cu_seqlens = self.cu_seqlens()?;
        let sequences = cu_seqlens.as_ref().map_or(batch, |cu| cu.len().saturating_sub(1));
        memory::require(shape.bytes(op, sequences, self.has("do"))).map_err(|error| self.complaint(error))?;
        for name in ["k", "v"] {
            let other = self.format(name)?;
            if other != dtype {
                return Err(self.complaint(format!(
                    "q is {dtype} and {name} is {other}: expected q, k and v in one dtype (gates and states may differ)"
                )));
            }
        }
        let required = |name| Ok::<_, Error>(self.tensor(name)?.0);
        let gates = match op {
            Op::Gdn => Gates::Gdn { g: required("g")?, beta: required("beta")? },
            Op::Gdn2 => Gates::Gdn2 { g: required("g")?, b: required("b")?, w: required("w")? },
        };
        let optional = |name| if self.has(name) { required(name).map(Some) } else { Ok(None) };
        Ok(Inputs {
            shape,
            cu_seqlens,
            scale: self.scale(key_dim)?,
            dtype,
            q,
            k,
            v,
            gates,
            initial_state: optional("initial_state")?,
            d_o: optional("do")?,
            d_final_state: optional("dht")?,
        })
    }

    fn format(&self, name: &str) -> Result<Format> {
        let view = self.tensors.tensor(name).map_err(|_| self.missing(name))?;
        file::format_of(self.path, name, view.dtype())
    }

    fn tensor(&self, name: &str) -> Result<(Tensor, Format)> {
        let view = self.tensors.tensor(name).map_err(|_| self.missing(name))?;
        Ok((file::decode(self.path, name, &view)?, file::format_of(self.path, name, view.dtype())?))
    }

    fn cu_seqlens(&self) -> Result<Option<Vec<usize>>> {
        let Ok(view) = self.tensors.tensor("cu_seqlens") else { return Ok(None) };
        file::dims(self.path, "cu_seqlens", view.shape(), ["N + 1"])?;
        let entries = file::decode_integers(self.path, "cu_seqlens", &view)?;
        entries
            .iter()
            .enumerate()
            .map(|(at, &entry)| {
                usize::try_from(entry).map_err(|_| {
                    self.complaint(format!("cu_seqlens entry {at} is {entry}: expected token positions from 0 to T"))
                })
            })
            .collect::<Result<Vec<_>>>()
            .map(Some)
    }

    fn scale(&self, key_dim: usize) -> Result<f64> {
        if !self.has("scale") {
            return Ok(Inputs::default_scale(key_dim));
        }
        match self.tensor("scale")?.0.data.as_slice() {
            [scale] => Ok(*scale),
            several => Err(self.complaint(format!("tensor 'scale' has {} values: expected 1", several.len()))),
        }
    }

    /// A warning for each tensor that means nothing here.
    fn unknown(&self, op: Op) -> Vec<String> {
        let required = required_names(op);
        let mut names = self.tensors.names();
        names.sort_unstable();
        names
            .into_iter()
            .filter(|name| !required.contains(name) && !OPTIONAL.contains(name))
            .map(|name| {
                format!(
                    "tensor '{}' is not used: a {op} case has {}, and optionally {}",
                    name.escape_debug(),
                    required.join(", "),
                    OPTIONAL.join(", ")
                )
            })
            .collect()
    }

    fn held(&self) -> String {
        let mut names = self.tensors.names();
        names.sort_unstable();
        if names.is_empty() { "no tensors".to_owned() } else { names.join(", ").escape_debug().to_string() }
    }

    fn missing(&self, name: &str) -> Error {
        self.complaint(format!("tensor '{name}' is missing; it holds {}", self.held()))
    }

    fn complaint(&self, what: impl std::fmt::Display) -> Error {
        complaint(self.path, what)
    }
}

fn required_names(op: Op) -> &'static [&'static str] {
    match op {
        Op::Gdn => &["q", "k", "v", "g", "beta"],
        Op::Gdn2 => &["q", "k", "v", "g", "b", "w"],
    }
}

/// Writes `inputs` as a case: q, k, v and do in `inputs.dtype`, gates and states in f32, or f64 where `dtype` is that.
///
/// Values that the format does not hold are rounded to it.
///
/// # Errors
/// [`Error::Io`] where the file cannot be written.
pub fn write_case(destination: &Destination, inputs: &Inputs) -> Result<()> {
    let wide = if inputs.dtype == Format::F64 { Format::F64 } else { Format::F32 };
    let scale = Tensor { dims: vec![1], data: vec![inputs.scale] };
    let mut stored: Vec<Stored<'_>> = inputs
        .named()
        .into_iter()
        .map(|(name, tensor)| {
            let narrow = matches!(name, "q" | "k" | "v" | "do");
            Stored::values(name, tensor, if narrow { inputs.dtype } else { wide })
        })
        .collect();
    stored.push(Stored::values("scale", &scale, Format::F64));
    stored.extend(inputs.cu_seqlens.as_ref().map(|cu| Stored::positions("cu_seqlens", cu)));
    destination.write(stored, &[("op", inputs.op().name())])
}
