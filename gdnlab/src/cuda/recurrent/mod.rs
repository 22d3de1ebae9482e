//! The recurrence token by token on a GPU, in binary64 or binary32: the ground truth for sequences that take a CPU too
//! long.
//!
//! The mathematics is that of the [`Reference`](crate::reference::Reference); `kernels/recurrent.cu` says how the work is
//! split. Columns of the state are independent, so a warp carries a few of them from the first token to the last. What
//! is summed over columns is summed in one fixed order: two runs agree to the bit, and a sequence gives the same bits
//! whatever it is packed with, and whatever memory there is to work in.
//!
//! The forward needs no memory but its results. The backward keeps a state every 32 tokens, and sums over blocks of
//! columns: 0.8 GB for one head of 65,536 tokens, d_k = d_v = 128, in binary64. Heads, and then sequences, that do not fit
//! together into the workspace run one after the other.

mod layout;
mod run;

use super::{Build, Gpu, Operator, source};
use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Inputs, MAX_HEAD_DIM, Op, Results, Shape};
use crate::{Error, Result};
use layout::{Layout, SEGMENT, WARPS};
use run::Real;

/// The recurrence on the GPU of this process.
///
/// ```no_run
/// use gdnlab::{cuda::Recurrent, inputs::{self, Regime}, kernel::Kernel, problem::{Op, Shape}};
/// let inputs = inputs::generate(Op::Gdn, &Shape::new(65_536, 2, 128, 128), Regime::LongMemory, 1)?;
/// let results = Recurrent::fp64().backward(&inputs)?;
/// assert_eq!(results.outputs.o.dims, [1, 65_536, 2, 128]);
/// # Ok::<(), gdnlab::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Recurrent {
    format: Format,
    workspace_bytes: Option<usize>,
}

impl Recurrent {
    /// In binary64 throughout.
    pub fn fp64() -> Self {
        Self { format: Format::F64, workspace_bytes: None }
    }

    /// In binary32 throughout: inputs, arithmetic and results.
    pub fn fp32() -> Self {
        Self { format: Format::F32, workspace_bytes: None }
    }

    /// The same with a workspace of at most `bytes` for the backward, or what one head of the longest sequence needs where
    /// that is more. Without this it is a quarter of the GPU's memory. Results do not depend on it.
    #[must_use]
    pub fn with_workspace(self, bytes: usize) -> Self {
        Self { workspace_bytes: Some(bytes), ..self }
    }

    fn run(&self, inputs: &Inputs, backward: bool) -> Result<Results> {
        inputs.validate()?;
        if backward && inputs.d_o.is_none() {
            return Err(Error::input("the backward needs 'do', the gradient of the output, shape [B, T, HV, V]"));
        }
        let gpu = Gpu::shared()?;
        let workspace_bytes = self.workspace_bytes.unwrap_or(gpu.memory_bytes / 4);
        match self.format {
            Format::F64 => run::run::<f64>(gpu, inputs, backward, workspace_bytes),
            _ => run::run::<f32>(gpu, inputs, backward, workspace_bytes),
        }
    }
}

impl Kernel for Recurrent {
    fn name(&self) -> &str {
        match self.format {
            Format::F64 => "cuda-recurrent-fp64",
            _ => "cuda-recurrent-fp32",
        }
    }

    fn summary(&self) -> String {
        match self.format {
            Format::F64 => "token-by-token recurrence in float64 on a GPU: the ground truth for long sequences".into(),
            _ => "token-by-token recurrence in float32 on a GPU".into(),
        }
    }

    fn needs(&self) -> &'static str {
        "an NVIDIA GPU, sm_80 or newer"
    }

    fn on_gpu(&self) -> bool {
        true
    }

    fn ops(&self) -> &'static [Op] {
        &Op::ALL
    }

    fn mode(&self) -> &'static str {
        match self.format {
            Format::F64 => "fp64",
            _ => "fp32",
        }
    }

    fn input_format(&self) -> Format {
        self.format
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        self.run(inputs, false)
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        self.run(inputs, true)
    }
}

/// The specialisation for numbers of type `T`.
fn build<T: Real>(op: Op, layout: &Layout) -> Result<Build> {
    let defines = vec![
        ("STATE", T::CUDA.to_owned()),
        ("CHANNEL_GATES", u32::from(op == Op::Gdn2).to_string()),
        ("ROWS", layout.rows.to_string()),
        ("COLUMNS", layout.columns.to_string()),
        ("SEGMENT", SEGMENT.to_string()),
        ("WARPS", WARPS.to_string()),
    ];
    Ok(Build { source: source("recurrent")?, defines })
}

/// One for each number type, operator and number of rows in a lane.
fn builds() -> Result<Vec<Build>> {
    let mut all = Vec::new();
    for op in Op::ALL {
        for key_dim in (32..=MAX_HEAD_DIM).step_by(32) {
            let shape = Shape::new(1, 1, key_dim, 1);
            all.push(build::<f32>(op, &Layout::new(&shape, op, size_of::<f32>()))?);
            all.push(build::<f64>(op, &Layout::new(&shape, op, size_of::<f64>()))?);
        }
    }
    Ok(all)
}

/// What the tests have to know.
pub(super) const OPERATOR: Operator = Operator { name: "recurrent", builds, parameters: run::PARAMETERS };

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
