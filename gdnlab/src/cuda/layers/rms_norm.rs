//! RMSNorm of the residual stream, with the addition to it (`kernels/rms_norm.cu`).

use super::part_sums::PartSums;
use super::{View, counted, grid, whole_accesses};
use crate::cuda::{Build, Function, Gpu, Operator, Stream, source};
use crate::{Error, Result};
use half::bf16;

const NAME: &str = "rms_norm";
const THREADS: u32 = 256;
/// Warps of a block.
const WARPS: usize = 8;
/// Rows that a group of warps takes in the backward (`TURNS`).
const TURNS: usize = 8;
/// Accesses of a lane to a row, at the most: there are no registers for more.
const MOST_ACCESSES: usize = 3;
/// The widest row.
const MOST_WIDTH: usize = MOST_ACCESSES * WARPS * 32 * super::ACCESS;

/// RMSNorm over rows of one width, forward and backward, with the weight in binary32:
///
/// ```text
/// x = stream + branch      r = (sum x^2 / D + eps)^-1/2      y = x r * weight
/// dn = dy * weight         dx = r (dn - x r (x r . dn) / D) + d_stream
/// ```
pub struct RmsNorm {
    dim: usize,
    eps: f32,
    forward: Function,
    backward: Function,
    sums: PartSums,
}

/// What is added to the stream before it is normed.
#[derive(Clone, Copy, Debug)]
pub struct Addition {
    /// What is added, `[rows, D]`.
    pub branch: View<bf16>,
    /// The sum x, `[rows, D]`: written.
    pub x: View<bf16>,
}

/// The tensors of a forward.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormForward {
    /// The residual stream, `[rows, D]`. It is x itself where nothing is added.
    pub stream: View<bf16>,
    /// What is added to it, if anything.
    pub addition: Option<Addition>,
    /// `[D]`.
    pub weight: View<f32>,
    /// The norm, `[rows, D]`: written.
    pub y: View<bf16>,
}

/// The tensors of a backward.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormBackward {
    /// What was normed, `[rows, D]`.
    pub x: View<bf16>,
    /// Gradient of y, `[rows, D]`.
    pub dy: View<bf16>,
    /// Gradient of x from elsewhere, which is added: `[rows, D]`.
    pub d_stream: Option<View<bf16>>,
    /// `[D]`.
    pub weight: View<f32>,
    /// Gradient of x, `[rows, D]`: written. It may be the memory of `d_stream` or of `dy`.
    pub dx: View<bf16>,
    /// The norm once more, `[rows, D]`, where it is wanted: written.
    pub y: Option<View<bf16>>,
    /// Scratch, [`RmsNorm::scratch_elements`] of them: overwritten.
    pub scratch: View<f32>,
    /// Gradient of the weight, `[D]`: written.
    pub dweight: View<f32>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ForwardParams {
    stream: u64,
    branch: u64,
    weight: u64,
    x: u64,
    y: u64,
    rows: i32,
    eps: f32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct BackwardParams {
    x: u64,
    dy: u64,
    d_stream: u64,
    weight: u64,
    dx: u64,
    y: u64,
    parts: u64,
    rows: i32,
    eps: f32,
}

impl RmsNorm {
    /// The kernels for rows of `dim` elements; `eps` is added to the mean of squares.
    ///
    /// # Errors
    /// [`Error::Input`] where there are none for this width, [`Error::Gpu`] where they cannot be had.
    pub fn new(gpu: &Gpu, dim: usize, eps: f32) -> Result<Self> {
        let module = gpu.module(&build(dim)?)?;
        Ok(Self {
            dim,
            eps,
            forward: module.function("rms_norm_forward")?,
            backward: module.function("rms_norm_backward")?,
            sums: PartSums::new(gpu)?,
        })
    }

    /// Rows that a block of the backward takes.
    fn rows_of_part(&self) -> usize {
        WARPS / warps_of_row(self.dim) * TURNS
    }

    fn parts(&self, rows: usize) -> usize {
        rows.div_ceil(self.rows_of_part())
    }

    /// Elements of the scratch of a backward over `rows` rows.
    pub fn scratch_elements(&self, rows: usize) -> usize {
        self.parts(rows) * self.dim
    }

    /// Starts a forward on `stream`, and does not wait for it.
    ///
    /// # Errors
    /// [`Error::Input`] where a tensor has not the length that it should have, [`Error::Gpu`] where the launch is refused.
    ///
    /// # Safety
    /// Each view names memory of this GPU, which is neither freed nor used by another stream until the kernels have ended, or
    /// the last replay of a graph that holds them. What is written overlaps nothing else of the call, where it does not say
    /// so.
    pub unsafe fn forward(&self, stream: &Stream, call: &RmsNormForward) -> Result<()> {
        let RmsNormForward { stream: residual, addition, weight, y } = *call;
        let rows = residual.len() / self.dim;
        let tensors = [("stream", Some(residual)), ("y", Some(y))];
        let added = [("branch", addition.map(|added| added.branch)), ("x", addition.map(|added| added.x))];
        self.check(rows, weight, tensors.into_iter().chain(added))?;
        let params = ForwardParams {
            stream: residual.address(),
            branch: added[0].1.map_or(0, View::address),
            weight: weight.address(),
            x: added[1].1.map_or(0, View::address),
            y: y.address(),
            rows: counted(NAME, rows)?,
            eps: self.eps,
        };
        let grid = grid(NAME, rows, WARPS / warps_of_row(self.dim), THREADS)?;
        // SAFETY: the views have the lengths that the kernel takes them to have; the rest is the caller's promise.
        unsafe { self.forward.launch(stream, grid, &params) }
    }

    /// Starts a backward on `stream`, and does not wait for it.
    ///
    /// # Errors
    /// As [`RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`RmsNorm::forward`].
    pub unsafe fn backward(&self, stream: &Stream, call: &RmsNormBackward) -> Result<()> {
        let RmsNormBackward { x, dy, d_stream, weight, dx, y, scratch, dweight } = *call;
        let rows = x.len() / self.dim;
        let tensors = [("x", Some(x)), ("dy", Some(dy)), ("d_stream", d_stream), ("dx", Some(dx)), ("y", y)];
        self.check(rows, weight, tensors)?;
        dweight.expect(NAME, "dweight", &[self.dim])?;
        let parts = scratch.part(0..self.scratch_elements(rows))?;
        let params = BackwardParams {
            x: x.address(),
            dy: dy.address(),
            d_stream: d_stream.map_or(0, View::address),
            weight: weight.address(),
            dx: dx.address(),
            y: y.map_or(0, View::address),
            parts: parts.address(),
            rows: counted(NAME, rows)?,
            eps: self.eps,
        };
        let grid = grid(NAME, rows, self.rows_of_part(), THREADS)?;
        // SAFETY: as in `forward`; each block writes one part.
        unsafe {
            self.backward.launch(stream, grid, &params)?;
            self.sums.run(stream, parts, dweight, self.parts(rows))
        }
    }

    fn check<'a>(
        &self,
        rows: usize,
        weight: View<f32>,
        tensors: impl IntoIterator<Item = (&'a str, Option<View<bf16>>)>,
    ) -> Result<()> {
        weight.expect(NAME, "weight", &[self.dim])?;
        let mut given = tensors.into_iter().filter_map(|(name, view)| Some((name, view?)));
        given.try_for_each(|(name, view)| view.expect(NAME, name, &[rows, self.dim]))
    }
}

/// Warps that share a row: the fewest in which a lane has not too many accesses.
fn warps_of_row(dim: usize) -> usize {
    [1, 2, 4].into_iter().find(|warps| dim.div_ceil(super::ACCESS * 32 * warps) <= MOST_ACCESSES).unwrap_or(WARPS)
}

fn build(dim: usize) -> Result<Build> {
    whole_accesses(NAME, "D", dim)?;
    if dim > MOST_WIDTH {
        return Err(Error::input(format!("{NAME}: D = {dim}: expected {MOST_WIDTH} at the most")));
    }
    let defines = vec![("DIM", dim.to_string()), ("WARPS", warps_of_row(dim).to_string())];
    Ok(Build { source: source(NAME)?, defines })
}

/// Widths with every number of warps, those of the ladder among them.
fn builds() -> Result<Vec<Build>> {
    [32, 512, 768, 1024, 2048, MOST_WIDTH].into_iter().map(build).collect()
}

pub(in crate::cuda) const OPERATOR: Operator = Operator {
    name: NAME,
    builds,
    parameters: &[("rms_norm_forward", size_of::<ForwardParams>()), ("rms_norm_backward", size_of::<BackwardParams>())],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_get_as_many_warps_as_their_registers_need() {
        for (dim, warps) in [(8, 1), (512, 1), (768, 1), (776, 2), (1024, 2), (1536, 2), (2048, 4), (6144, 8)] {
            assert_eq!(warps_of_row(dim), warps, "{dim}");
        }
        let refused = |dim| build(dim).unwrap_err().to_string();
        assert!(refused(6152).contains("6144 at the most") && refused(100).contains("multiple of 8"));
    }
}
