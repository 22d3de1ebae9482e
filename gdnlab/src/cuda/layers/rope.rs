//! Rotary position embedding, in place (`kernels/rope.cu`).

use super::{ACCESS, Columns, grid, too_large};
use crate::cuda::{Buffer, Build, Function, Gpu, Operator, Stream, source};
use crate::{Error, Result};
use half::bf16;

const NAME: &str = "rope";
const THREADS: u32 = 256;

/// The rotation of [`reference::rope`](crate::reference::rope), for one length and head dimension. Its angles are computed
/// once, in binary64.
pub struct Rope {
    tokens: usize,
    dim: usize,
    function: Function,
    cosines: Buffer<f32>,
    sines: Buffer<f32>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    x: u64,
    cosines: u64,
    sines: u64,
    count: u32,
    per_row: u32,
    per_head: u32,
    pitch: u32,
    tokens: u32,
    direction: f32,
}

impl Rope {
    /// For sequences of `tokens` tokens and heads of `dim` channels; `base` is that of the angles.
    ///
    /// # Errors
    /// [`Error::Input`] where `dim` is no multiple of 16, there are no tokens, or the base is not above 0; [`Error::Gpu`]
    /// where kernel or memory cannot be had.
    pub fn new(gpu: &Gpu, tokens: usize, dim: usize, base: f64) -> Result<Self> {
        if dim == 0 || !dim.is_multiple_of(2 * ACCESS) || tokens == 0 {
            return Err(Error::input(format!(
                "{NAME}: d = {dim}, T = {tokens}: expected a multiple of {} and at least one token",
                2 * ACCESS
            )));
        }
        if !(base > 0.0 && base.is_finite()) {
            return Err(Error::input(format!("{NAME}: base = {base}: expected a number above 0")));
        }
        let (cosines, sines): (Vec<f32>, Vec<f32>) = angles(tokens, dim, base).map(of_angle).unzip();
        Ok(Self {
            tokens,
            dim,
            function: gpu.module(&build()?)?.function(NAME)?,
            cosines: gpu.upload(&cosines)?,
            sines: gpu.upload(&sines)?,
        })
    }

    /// Starts, on `stream`, to turn `heads` heads of each row of `x`, which beside each other are its columns from the
    /// first on: row `n` is token `n mod T`.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`].
    pub unsafe fn forward(&self, stream: &Stream, x: Columns<bf16>, heads: usize) -> Result<()> {
        // SAFETY: the promise of the caller.
        unsafe { self.turn(stream, x, heads, 1.0) }
    }

    /// The same the other way round: from the gradient of what came out to that of what went in.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`].
    pub unsafe fn backward(&self, stream: &Stream, dx: Columns<bf16>, heads: usize) -> Result<()> {
        // SAFETY: the promise of the caller.
        unsafe { self.turn(stream, dx, heads, -1.0) }
    }

    unsafe fn turn(&self, stream: &Stream, x: Columns<bf16>, heads: usize, direction: f32) -> Result<()> {
        let rows = x.matrix.len() / x.pitch.max(1);
        x.expect(NAME, "x", rows, heads * self.dim)?;
        let per_head = self.dim / (2 * ACCESS);
        let number = |n: usize| u32::try_from(n).map_err(|_| too_large(NAME, n));
        let params = Params {
            x: x.address(),
            cosines: self.cosines.address(),
            sines: self.sines.address(),
            count: number(rows * heads * per_head)?,
            per_row: number(heads * per_head)?,
            per_head: number(per_head)?,
            pitch: number(x.pitch)?,
            tokens: number(self.tokens)?,
            direction,
        };
        let grid = grid(NAME, rows * heads * per_head, THREADS as usize, THREADS)?;
        // SAFETY: the matrix has the size that the kernel takes it to have, and the tables have those of tokens and
        // channels; the rest is the caller's promise.
        unsafe { self.function.launch(stream, grid, &params) }
    }
}

/// The angle of each token and pair, `[T, d/2]`.
fn angles(tokens: usize, dim: usize, base: f64) -> impl Iterator<Item = f64> {
    (0..tokens).flat_map(move |t| (0..dim / 2).map(move |i| t as f64 * base.powf(-2.0 * i as f64 / dim as f64)))
}

fn of_angle(angle: f64) -> (f32, f32) {
    (angle.cos() as f32, angle.sin() as f32)
}

fn build() -> Result<Build> {
    Ok(Build { source: source(NAME)?, defines: vec![] })
}

pub(in crate::cuda) const OPERATOR: Operator =
    Operator { name: NAME, builds: || Ok(vec![build()?]), parameters: &[(NAME, size_of::<Params>())] };
