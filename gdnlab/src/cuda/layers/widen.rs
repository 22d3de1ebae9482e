//! GDN's raw gates between a fused projection and binary32 (`kernels/widen.cu`).

use super::{Columns, View, counted, grid};
use crate::Result;
use crate::cuda::{Build, Function, Gpu, Operator, Stream, source};
use half::bf16;

const NAME: &str = "widen";
const THREADS: u32 = 256;

/// Copies the raw gates a and b, which stand beside each other as columns of a bf16 matrix, to dense binary32 tensors, and
/// their gradients back.
pub struct Widen {
    heads: usize,
    widen: Function,
    narrow: Function,
}

/// The raw gates, or their gradients: `[rows, H]` each.
#[derive(Clone, Copy, Debug)]
pub struct RawGates {
    /// What makes the decay.
    pub a: View<f32>,
    /// What makes the write strength.
    pub b: View<f32>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    matrix: u64,
    a: u64,
    b: u64,
    rows: i32,
    heads: i32,
    columns: i32,
    pitch: i32,
}

impl Widen {
    /// The kernels for `heads` heads.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`] where they cannot be had.
    pub fn new(gpu: &Gpu, heads: usize) -> Result<Self> {
        let module = gpu.module(&build()?)?;
        Ok(Self { heads, widen: module.function("widen")?, narrow: module.function("narrow")? })
    }

    /// Starts, on `stream`, a copy of `2 H` columns of `matrix` to `gates`.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`].
    pub unsafe fn forward(&self, stream: &Stream, matrix: Columns<bf16>, gates: RawGates) -> Result<()> {
        // SAFETY: the promise of the caller.
        unsafe { self.launch(stream, &self.widen, matrix, gates, 2 * self.heads) }
    }

    /// Starts, on `stream`, a copy of `gates` to `2 H` columns of `matrix`; all columns behind them become 0.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`].
    pub unsafe fn backward(&self, stream: &Stream, gates: RawGates, matrix: Columns<bf16>) -> Result<()> {
        // SAFETY: the promise of the caller.
        unsafe { self.launch(stream, &self.narrow, matrix, gates, matrix.pitch.saturating_sub(matrix.first)) }
    }

    unsafe fn launch(
        &self,
        stream: &Stream,
        function: &Function,
        matrix: Columns<bf16>,
        gates: RawGates,
        columns: usize,
    ) -> Result<()> {
        let rows = gates.a.len() / self.heads.max(1);
        matrix.expect(NAME, "matrix", rows, columns.max(2 * self.heads))?;
        gates.a.expect(NAME, "a", &[rows, self.heads])?;
        gates.b.expect(NAME, "b", &[rows, self.heads])?;
        let params = Params {
            matrix: matrix.address(),
            a: gates.a.address(),
            b: gates.b.address(),
            rows: counted(NAME, rows)?,
            heads: counted(NAME, self.heads)?,
            columns: counted(NAME, columns)?,
            pitch: counted(NAME, matrix.pitch)?,
        };
        // SAFETY: the views have the lengths that the kernel takes them to have; the rest is the caller's promise.
        unsafe { function.launch(stream, grid(NAME, rows * columns, THREADS as usize, THREADS)?, &params) }
    }
}

fn build() -> Result<Build> {
    Ok(Build { source: source(NAME)?, defines: vec![] })
}

pub(in crate::cuda) const OPERATOR: Operator = Operator {
    name: NAME,
    builds: || Ok(vec![build()?]),
    parameters: &[("widen", size_of::<Params>()), ("narrow", size_of::<Params>())],
};
