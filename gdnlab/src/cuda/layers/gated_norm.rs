//! The gated RMSNorm behind GDN (`kernels/gated_norm.cu`).

use super::part_sums::PartSums;
use super::{ACCESS, Columns, View, counted, grid, whole_accesses};
use crate::cuda::{Build, Function, Gpu, Operator, Stream, source};
use crate::{Error, Result};
use half::bf16;

const NAME: &str = "gated_norm";
const THREADS: u32 = 256;
/// Rows that a group of lanes takes in the backward (`TURNS`).
const TURNS: usize = 16;
/// The widest row: one access for each lane of a warp.
const MOST_WIDTH: usize = 32 * ACCESS;

/// `y = o r * weight * silu(z)` over the V channels of each token and head, `r = (sum o^2 / V + eps)^-1/2`, forward and
/// backward, with the weight in binary32.
pub struct GatedNorm {
    heads: usize,
    value_dim: usize,
    eps: f32,
    forward: Function,
    backward: Function,
    sums: PartSums,
}

/// The tensors of a forward.
#[derive(Clone, Copy, Debug)]
pub struct GatedNormForward {
    /// `[tokens, H, V]`.
    pub o: View<bf16>,
    /// The raw gate: `H V` columns of a matrix of `tokens` rows.
    pub z: Columns<bf16>,
    /// `[V]`.
    pub weight: View<f32>,
    /// `[tokens, H, V]`: written.
    pub y: View<bf16>,
}

/// The tensors of a backward.
#[derive(Clone, Copy, Debug)]
pub struct GatedNormBackward {
    /// `[tokens, H, V]`.
    pub o: View<bf16>,
    /// The raw gate: `H V` columns of a matrix of `tokens` rows.
    pub z: Columns<bf16>,
    /// `[V]`.
    pub weight: View<f32>,
    /// Gradient of y, `[tokens, H, V]`.
    pub dy: View<bf16>,
    /// y once more, `[tokens, H, V]`: written. It may be the memory of `dy`.
    pub y: View<bf16>,
    /// Gradient of o, `[tokens, H, V]`: written. It may be the memory of `o`.
    pub d_o: View<bf16>,
    /// Gradient of the raw gate, `H V` columns of a matrix of `tokens` rows: written.
    pub dz: Columns<bf16>,
    /// Scratch, [`GatedNorm::scratch_elements`] of them: overwritten.
    pub scratch: View<f32>,
    /// Gradient of the weight, `[V]`: written.
    pub dweight: View<f32>,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Params {
    o: u64,
    z: u64,
    weight: u64,
    y: u64,
    dy: u64,
    d_o: u64,
    dz: u64,
    parts: u64,
    rows: i32,
    heads: i32,
    pitch: i32,
    d_pitch: i32,
    eps: f32,
}

impl GatedNorm {
    /// The kernels for `heads` heads of `value_dim` channels; `eps` is added to the mean of squares.
    ///
    /// # Errors
    /// [`Error::Input`] where there are none for this width, [`Error::Gpu`] where they cannot be had.
    pub fn new(gpu: &Gpu, heads: usize, value_dim: usize, eps: f32) -> Result<Self> {
        if heads == 0 {
            return Err(Error::input(format!("{NAME}: no heads: expected at least one")));
        }
        let module = gpu.module(&build(value_dim)?)?;
        let (forward, backward) = (module.function("gated_norm_forward")?, module.function("gated_norm_backward")?);
        Ok(Self { heads, value_dim, eps, forward, backward, sums: PartSums::new(gpu)? })
    }

    /// Rows, each of one token and head, that a block takes at once.
    fn groups(&self) -> usize {
        THREADS as usize / lanes(self.value_dim)
    }

    fn parts(&self, tokens: usize) -> usize {
        (tokens * self.heads).div_ceil(self.groups() * TURNS)
    }

    /// Elements of the scratch of a backward over `tokens` tokens.
    pub fn scratch_elements(&self, tokens: usize) -> usize {
        self.parts(tokens) * self.value_dim
    }

    /// Starts a forward on `stream`, and does not wait for it.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`].
    pub unsafe fn forward(&self, stream: &Stream, call: &GatedNormForward) -> Result<()> {
        let GatedNormForward { o, z, weight, y } = *call;
        let rows = self.check(o, z, weight)? * self.heads;
        y.expect(NAME, "y", &[rows, self.value_dim])?;
        let params = Params { y: y.address(), ..self.params(rows, o, z, weight)? };
        // SAFETY: the views have the lengths that the kernel takes them to have; the rest is the caller's promise.
        unsafe { self.forward.launch(stream, grid(NAME, rows, self.groups(), THREADS)?, &params) }
    }

    /// Starts a backward on `stream`, and does not wait for it.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`].
    pub unsafe fn backward(&self, stream: &Stream, call: &GatedNormBackward) -> Result<()> {
        let GatedNormBackward { o, z, weight, dy, y, d_o, dz, scratch, dweight } = *call;
        let tokens = self.check(o, z, weight)?;
        let rows = tokens * self.heads;
        for (name, view) in [("dy", dy), ("y", y), ("do", d_o)] {
            view.expect(NAME, name, &[rows, self.value_dim])?;
        }
        dz.expect(NAME, "dz", tokens, self.heads * self.value_dim)?;
        dweight.expect(NAME, "dweight", &[self.value_dim])?;
        let parts = scratch.part(0..self.scratch_elements(tokens))?;
        let params = Params {
            y: y.address(),
            dy: dy.address(),
            d_o: d_o.address(),
            dz: dz.address(),
            parts: parts.address(),
            d_pitch: counted(NAME, dz.pitch)?,
            ..self.params(rows, o, z, weight)?
        };
        // SAFETY: as in `forward`; each block writes one part.
        unsafe {
            self.backward.launch(stream, grid(NAME, rows, self.groups() * TURNS, THREADS)?, &params)?;
            self.sums.run(stream, parts, dweight, self.parts(tokens))
        }
    }

    /// The number of tokens.
    fn check(&self, o: View<bf16>, z: Columns<bf16>, weight: View<f32>) -> Result<usize> {
        let width = self.heads * self.value_dim;
        let tokens = o.len() / width;
        o.expect(NAME, "o", &[tokens, self.heads, self.value_dim])?;
        z.expect(NAME, "z", tokens, width)?;
        weight.expect(NAME, "weight", &[self.value_dim])?;
        Ok(tokens)
    }

    fn params(&self, rows: usize, o: View<bf16>, z: Columns<bf16>, weight: View<f32>) -> Result<Params> {
        Ok(Params {
            o: o.address(),
            z: z.address(),
            weight: weight.address(),
            rows: counted(NAME, rows)?,
            heads: counted(NAME, self.heads)?,
            pitch: counted(NAME, z.pitch)?,
            eps: self.eps,
            ..Params::default()
        })
    }
}

/// Lanes of a row: as many as it has accesses, or the next power of two.
fn lanes(value_dim: usize) -> usize {
    (value_dim / ACCESS).next_power_of_two()
}

fn build(value_dim: usize) -> Result<Build> {
    whole_accesses(NAME, "V", value_dim)?;
    if value_dim > MOST_WIDTH {
        return Err(Error::input(format!("{NAME}: V = {value_dim}: expected {MOST_WIDTH} at the most")));
    }
    let defines = vec![("VALUE_DIM", value_dim.to_string()), ("LANES", lanes(value_dim).to_string())];
    Ok(Build { source: source(NAME)?, defines })
}

/// Every number of lanes of the head dimensions that GDN has kernels for, whole and with idle ones.
fn builds() -> Result<Vec<Build>> {
    [32, 64, 96, 128, 256].into_iter().map(build).collect()
}

pub(in crate::cuda) const OPERATOR: Operator = Operator {
    name: NAME,
    builds,
    parameters: &[("gated_norm_forward", size_of::<Params>()), ("gated_norm_backward", size_of::<Params>())],
};
