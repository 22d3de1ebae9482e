//! The product in the middle of a SwiGLU (`kernels/swiglu.cu`).

use super::{ACCESS, View, grid, too_large, whole_accesses};
use crate::Result;
use crate::cuda::{Build, Function, Gpu, Grid, Operator, Stream, source};
use half::bf16;

const NAME: &str = "swiglu";
const THREADS: u32 = 256;

/// `h = silu(gate) * up`, forward and backward, with gate and up beside each other in a row.
pub struct SwiGlu {
    hidden: usize,
    forward: Function,
    backward: Function,
}

/// The tensors of a backward.
#[derive(Clone, Copy, Debug)]
pub struct SwiGluBackward {
    /// `[rows, 2 F]`.
    pub gate_up: View<bf16>,
    /// Gradient of h, `[rows, F]`.
    pub dh: View<bf16>,
    /// h once more, `[rows, F]`: written. It may be the memory of `dh`.
    pub h: View<bf16>,
    /// Gradient of gate and up, `[rows, 2 F]`: written. It may be the memory of `gate_up`.
    pub d_gate_up: View<bf16>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    gate_up: u64,
    dh: u64,
    h: u64,
    d_gate_up: u64,
    count: u32,
    vectors: u32,
}

impl SwiGlu {
    /// The kernels, for a hidden width `F` of `hidden`.
    ///
    /// # Errors
    /// [`crate::Error::Input`] where `hidden` is no multiple of 8, [`crate::Error::Gpu`] where the kernels cannot be had.
    pub fn new(gpu: &Gpu, hidden: usize) -> Result<Self> {
        whole_accesses(NAME, "F", hidden)?;
        let module = gpu.module(&build()?)?;
        Ok(Self { hidden, forward: module.function("swiglu_forward")?, backward: module.function("swiglu_backward")? })
    }

    /// Starts a forward on `stream`: from `gate_up` `[rows, 2 F]` to `h` `[rows, F]`.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`].
    pub unsafe fn forward(&self, stream: &Stream, gate_up: View<bf16>, h: View<bf16>) -> Result<()> {
        let rows = h.len() / self.hidden;
        gate_up.expect(NAME, "gate_up", &[rows, 2 * self.hidden])?;
        h.expect(NAME, "h", &[rows, self.hidden])?;
        let (grid, params) = self.launch(rows, Params { dh: 0, d_gate_up: 0, ..of(gate_up, h) })?;
        // SAFETY: the views have the lengths that the kernel takes them to have; the rest is the caller's promise.
        unsafe { self.forward.launch(stream, grid, &params) }
    }

    /// Starts a backward on `stream`.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`].
    pub unsafe fn backward(&self, stream: &Stream, call: &SwiGluBackward) -> Result<()> {
        let SwiGluBackward { gate_up, dh, h, d_gate_up } = *call;
        let rows = h.len() / self.hidden;
        for (name, view, width) in [("gate_up", gate_up, 2), ("dh", dh, 1), ("h", h, 1), ("d_gate_up", d_gate_up, 2)] {
            view.expect(NAME, name, &[rows, width * self.hidden])?;
        }
        let given = Params { dh: dh.address(), d_gate_up: d_gate_up.address(), ..of(gate_up, h) };
        let (grid, params) = self.launch(rows, given)?;
        // SAFETY: as in `forward`.
        unsafe { self.backward.launch(stream, grid, &params) }
    }

    fn launch(&self, rows: usize, params: Params) -> Result<(Grid, Params)> {
        let vectors = self.hidden / ACCESS;
        let count = rows * vectors;
        let number = |n: usize| u32::try_from(n).map_err(|_| too_large(NAME, n));
        Ok((
            grid(NAME, count, THREADS as usize, THREADS)?,
            Params { count: number(count)?, vectors: number(vectors)?, ..params },
        ))
    }
}

fn of(gate_up: View<bf16>, h: View<bf16>) -> Params {
    Params { gate_up: gate_up.address(), dh: 0, h: h.address(), d_gate_up: 0, count: 0, vectors: 0 }
}

fn build() -> Result<Build> {
    Ok(Build { source: source(NAME)?, defines: vec![] })
}

pub(in crate::cuda) const OPERATOR: Operator = Operator {
    name: NAME,
    builds: || Ok(vec![build()?]),
    parameters: &[("swiglu_forward", size_of::<Params>()), ("swiglu_backward", size_of::<Params>())],
};
