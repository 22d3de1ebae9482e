//! GDN's short convolution with SiLU (`kernels/short_conv.cu`).

use super::part_sums::PartSums;
use super::{ACCESS, Columns, View, counted, too_large, whole_accesses};
use crate::cuda::{Build, Function, Gpu, Grid, Operator, Stream, source};
use crate::{Error, Result};
use half::bf16;

const NAME: &str = "short_conv";
const THREADS: u32 = 128;
/// Tokens that the convolution sees (`TAPS`).
pub(super) const TAPS: usize = 4;
/// Tokens of a thread (`FORWARD_RUN`, `BACKWARD_RUN`).
const FORWARD_RUN: usize = 16;
const BACKWARD_RUN: usize = 64;
/// Channels of a thread in the backward (`NARROW`).
const NARROW: usize = 4;

/// The causal depthwise convolution over four tokens, and SiLU, from q | k | v beside each other to q, k and v by
/// themselves, forward and backward:
///
/// ```text
/// y_tc = silu(sum_j w_cj x_{t - 3 + j, c})
/// ```
pub struct ShortConv {
    sizes: ShortConvSizes,
    forward: Function,
    backward: Function,
    sums: PartSums,
}

/// What a [`ShortConv`] is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortConvSizes {
    /// `B`: rows of the batch, which do not see each other.
    pub batch: usize,
    /// `T`: tokens of each.
    pub tokens: usize,
    /// Channels of q, and of k.
    pub qk_width: usize,
    /// Channels of v.
    pub value_width: usize,
}

/// q, k, v, or their gradients: `[B T, width]` each.
#[derive(Clone, Copy, Debug)]
pub struct Qkv {
    /// Queries.
    pub q: View<bf16>,
    /// Keys.
    pub k: View<bf16>,
    /// Values.
    pub v: View<bf16>,
}

/// The tensors of a forward.
#[derive(Clone, Copy, Debug)]
pub struct ShortConvForward {
    /// q | k | v in a matrix of `B T` rows.
    pub x: Columns<bf16>,
    /// `[channels, 4]`: of q, of k, of v.
    pub taps: View<f32>,
    /// What comes out: written.
    pub y: Qkv,
}

/// The tensors of a backward.
#[derive(Clone, Copy, Debug)]
pub struct ShortConvBackward {
    /// q | k | v in a matrix of `B T` rows.
    pub x: Columns<bf16>,
    /// `[channels, 4]`.
    pub taps: View<f32>,
    /// Gradient of what came out.
    pub dy: Qkv,
    /// Gradient of x, in a matrix of `B T` rows: written. It overlaps nothing else.
    pub dx: Columns<bf16>,
    /// Scratch, [`ShortConv::scratch_elements`] of them: overwritten.
    pub scratch: View<f32>,
    /// Gradient of the taps, `[channels, 4]`: written.
    pub dtaps: View<f32>,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Params {
    x: u64,
    taps: u64,
    q: u64,
    k: u64,
    v: u64,
    dq: u64,
    dk: u64,
    dv: u64,
    dx: u64,
    parts: u64,
    pitch: i32,
    d_pitch: i32,
    qk_width: i32,
    value_width: i32,
    tokens: i32,
    runs: i32,
}

impl ShortConvSizes {
    /// Channels of q, k and v together.
    pub fn channels(&self) -> usize {
        2 * self.qk_width + self.value_width
    }

    fn rows(&self) -> usize {
        self.batch * self.tokens
    }

    fn validate(&self) -> Result<()> {
        whole_accesses(NAME, "width of q and k", self.qk_width)?;
        whole_accesses(NAME, "width of v", self.value_width)?;
        if self.batch == 0 || self.tokens == 0 {
            return Err(Error::input(format!(
                "{NAME}: B = {}, T = {}: expected at least 1 of each",
                self.batch, self.tokens
            )));
        }
        counted(NAME, self.rows()).map(|_| ())
    }

    fn grid(&self, run: usize, channels: usize) -> Result<(Grid, i32)> {
        let runs = self.tokens.div_ceil(run);
        let blocks = counted(NAME, self.batch * runs)? as u32;
        let across = self.channels().div_ceil(channels * THREADS as usize);
        let across = u32::try_from(across).map_err(|_| too_large(NAME, across))?;
        Ok((Grid { blocks: [blocks, across, 1], threads: THREADS, ..Grid::default() }, counted(NAME, runs)?))
    }
}

impl ShortConv {
    /// The kernels for `sizes`.
    ///
    /// # Errors
    /// [`Error::Input`] where a width is no multiple of 8, [`Error::Gpu`] where the kernels cannot be had.
    pub fn new(gpu: &Gpu, sizes: ShortConvSizes) -> Result<Self> {
        sizes.validate()?;
        let module = gpu.module(&build()?)?;
        let (forward, backward) = (module.function("short_conv_forward")?, module.function("short_conv_backward")?);
        Ok(Self { sizes, forward, backward, sums: PartSums::new(gpu)? })
    }

    fn parts(&self) -> usize {
        self.sizes.batch * self.sizes.tokens.div_ceil(BACKWARD_RUN)
    }

    /// Elements of the scratch of a backward.
    pub fn scratch_elements(&self) -> usize {
        self.parts() * self.sizes.channels() * TAPS
    }

    /// Starts a forward on `stream`, and does not wait for it.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`].
    pub unsafe fn forward(&self, stream: &Stream, call: &ShortConvForward) -> Result<()> {
        let ShortConvForward { x, taps, y } = *call;
        self.check(x, taps, y)?;
        let (grid, runs) = self.sizes.grid(FORWARD_RUN, ACCESS)?;
        let params = Params { q: y.q.address(), k: y.k.address(), v: y.v.address(), ..self.params(x, taps, runs)? };
        // SAFETY: the views have the lengths that the kernel takes them to have; the rest is the caller's promise.
        unsafe { self.forward.launch(stream, grid, &params) }
    }

    /// Starts a backward on `stream`, and does not wait for it.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`].
    pub unsafe fn backward(&self, stream: &Stream, call: &ShortConvBackward) -> Result<()> {
        let ShortConvBackward { x, taps, dy, dx, scratch, dtaps } = *call;
        self.check(x, taps, dy)?;
        dx.expect(NAME, "dx", self.sizes.rows(), self.sizes.channels())?;
        dtaps.expect(NAME, "dtaps", &[self.sizes.channels(), TAPS])?;
        let parts = scratch.part(0..self.scratch_elements())?;
        let (grid, runs) = self.sizes.grid(BACKWARD_RUN, NARROW)?;
        let params = Params {
            dq: dy.q.address(),
            dk: dy.k.address(),
            dv: dy.v.address(),
            dx: dx.address(),
            parts: parts.address(),
            d_pitch: counted(NAME, dx.pitch)?,
            ..self.params(x, taps, runs)?
        };
        // SAFETY: as in `forward`; each run of each row of the batch writes one part.
        unsafe {
            self.backward.launch(stream, grid, &params)?;
            self.sums.run(stream, parts, dtaps, self.parts())
        }
    }

    fn check(&self, x: Columns<bf16>, taps: View<f32>, y: Qkv) -> Result<()> {
        let ShortConvSizes { qk_width, value_width, .. } = self.sizes;
        let rows = self.sizes.rows();
        x.expect(NAME, "x", rows, self.sizes.channels())?;
        taps.expect(NAME, "taps", &[self.sizes.channels(), TAPS])?;
        y.q.expect(NAME, "q", &[rows, qk_width])?;
        y.k.expect(NAME, "k", &[rows, qk_width])?;
        y.v.expect(NAME, "v", &[rows, value_width])
    }

    fn params(&self, x: Columns<bf16>, taps: View<f32>, runs: i32) -> Result<Params> {
        Ok(Params {
            x: x.address(),
            taps: taps.address(),
            pitch: counted(NAME, x.pitch)?,
            qk_width: counted(NAME, self.sizes.qk_width)?,
            value_width: counted(NAME, self.sizes.value_width)?,
            tokens: counted(NAME, self.sizes.tokens)?,
            runs,
            ..Params::default()
        })
    }
}

fn build() -> Result<Build> {
    Ok(Build { source: source(NAME)?, defines: vec![] })
}

pub(in crate::cuda) const OPERATOR: Operator = Operator {
    name: NAME,
    builds: || Ok(vec![build()?]),
    parameters: &[("short_conv_forward", size_of::<Params>()), ("short_conv_backward", size_of::<Params>())],
};
