//! The loss of the next token and its gradient (`kernels/cross_entropy.cu`).

use super::{View, counted, grid, whole_accesses};
use crate::Result;
use crate::cuda::{Build, Function, Gpu, Grid, Operator, Stream, source};
use half::bf16;

const NAME: &str = "cross_entropy";
const THREADS: u32 = 512;

/// The cross-entropy of targets over one vocabulary:
///
/// ```text
/// loss_n = log sum_v e^{z_nv} - z_{n, target_n}      dz_nv = scale (e^{z_nv - lse_n} - [v = target_n])
/// ```
pub struct CrossEntropy {
    vocabulary: usize,
    rows: Function,
    mean: Function,
}

/// The tensors of a call, for all rows of a step or some of them.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropyCall {
    /// `[rows, vocabulary]`. With a scale they are overwritten by their gradient.
    pub logits: View<bf16>,
    /// `[rows]`, each below the vocabulary's size.
    pub targets: View<i32>,
    /// `[rows]`, in nats: written.
    pub losses: View<f32>,
    /// The factor on the gradient, one over all rows of the step; `None` where the loss alone is wanted.
    pub scale: Option<f32>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    logits: u64,
    targets: u64,
    losses: u64,
    vocabulary: i32,
    scale: f32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct MeanParams {
    losses: u64,
    mean: u64,
    rows: i32,
}

impl CrossEntropy {
    /// The kernels for `vocabulary` different tokens.
    ///
    /// # Errors
    /// [`crate::Error::Input`] where it is no multiple of 8, [`crate::Error::Gpu`] where the kernels cannot be had.
    pub fn new(gpu: &Gpu, vocabulary: usize) -> Result<Self> {
        whole_accesses(NAME, "vocabulary", vocabulary)?;
        let module = gpu.module(&build()?)?;
        Ok(Self { vocabulary, rows: module.function(NAME)?, mean: module.function("loss_mean")? })
    }

    /// Starts a call on `stream`, and does not wait for it.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`], and each target is below the vocabulary's size.
    pub unsafe fn run(&self, stream: &Stream, call: &CrossEntropyCall) -> Result<()> {
        let CrossEntropyCall { logits, targets, losses, scale } = *call;
        logits.expect(NAME, "logits", &[targets.len(), self.vocabulary])?;
        losses.expect(NAME, "losses", &[targets.len()])?;
        let params = Params {
            logits: logits.address(),
            targets: targets.address(),
            losses: losses.address(),
            vocabulary: counted(NAME, self.vocabulary)?,
            scale: scale.unwrap_or(0.0),
        };
        // SAFETY: the views have the lengths that the kernel takes them to have; the rest is the caller's promise.
        unsafe { self.rows.launch(stream, grid(NAME, targets.len(), 1, THREADS)?, &params) }
    }

    /// Starts, on `stream`, to write the mean of `losses` to `mean`, one number.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`].
    pub unsafe fn mean(&self, stream: &Stream, losses: View<f32>, mean: View<f32>) -> Result<()> {
        mean.expect(NAME, "mean", &[1])?;
        let params = MeanParams { losses: losses.address(), mean: mean.address(), rows: counted(NAME, losses.len())? };
        // SAFETY: as in `run`.
        unsafe { self.mean.launch(stream, Grid { threads: THREADS, ..Grid::default() }, &params) }
    }
}

fn build() -> Result<Build> {
    Ok(Build { source: source(NAME)?, defines: vec![] })
}

pub(in crate::cuda) const OPERATOR: Operator = Operator {
    name: NAME,
    builds: || Ok(vec![build()?]),
    parameters: &[(NAME, size_of::<Params>()), ("loss_mean", size_of::<MeanParams>())],
};
