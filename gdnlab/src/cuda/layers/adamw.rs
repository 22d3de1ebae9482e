//! AdamW on all parameters at once (`kernels/adamw.cu`).

use super::{ACCESS, View, counted, grid};
use crate::cuda::{Build, Element, Function, Gpu, Grid, Operator, Stream, source};
use crate::{Error, Result};
use half::bf16;

const NAME: &str = "adamw";
const THREADS: u32 = 256;
/// Elements of a block.
const BLOCK: usize = THREADS as usize * ACCESS;
/// Accesses of a thread to the gradient (`TURNS`).
const TURNS: usize = 8;

/// Clipping by the norm of the whole gradient, and AdamW, as in [`model::adamw`](crate::model::adamw). The moments and the
/// weights are binary32; the weights that products take are a bf16 copy, which the step writes too.
pub struct AdamW {
    parts: Function,
    norm: Function,
    step: Function,
}

/// What changes from step to step: the numbers of a step as the kernel reads them.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct OptimizerStep {
    /// Learning rate.
    pub rate: f32,
    /// Learning rate times weight decay.
    pub decay: f32,
    /// `1 / (1 - beta1^t)`.
    pub correction1: f32,
    /// `1 / (1 - beta2^t)`.
    pub correction2: f32,
    /// Memory of the first moment.
    pub beta1: f32,
    /// `1 - beta1`.
    pub rest1: f32,
    /// Memory of the second moment.
    pub beta2: f32,
    /// `1 - beta2`.
    pub rest2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// The largest norm that a gradient keeps; infinite for no clipping.
    pub clip: f32,
}

// SAFETY: ten numbers of 4 bytes without padding, any bits of which are values.
unsafe impl Element for OptimizerStep {}

/// What is known about the gradient before clipping.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct GradientNorm {
    /// Its norm. Where it is not finite the step has changed nothing.
    pub norm: f64,
    /// What it was multiplied by; NaN where the norm is not finite.
    pub factor: f32,
    unused: f32,
}

// SAFETY: 16 bytes without padding, any bits of which are values.
unsafe impl Element for GradientNorm {}

/// The tensors of a step.
#[derive(Clone, Copy, Debug)]
pub struct AdamWStep {
    /// `[count]`, a multiple of 8: changed.
    pub weights: View<f32>,
    /// First moments, `[count]`: changed.
    pub m: View<f32>,
    /// Second moments, `[count]`: changed.
    pub v: View<f32>,
    /// `[count]`.
    pub gradient: View<f32>,
    /// The weights, rounded: written.
    pub rounded: View<bf16>,
    /// How many of the weights, from the first on, have weight decay: a multiple of 8.
    pub decayed: usize,
    /// The numbers of the step, one.
    pub step: View<OptimizerStep>,
    /// What is known about the gradient, one: written.
    pub norm: View<GradientNorm>,
    /// Scratch, [`AdamW::scratch_elements`] of them: overwritten.
    pub scratch: View<f64>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    weights: u64,
    m: u64,
    v: u64,
    gradient: u64,
    rounded: u64,
    step: u64,
    norm: u64,
    parts: u64,
    count: u64,
    decayed: u64,
    blocks: i32,
    unused: i32,
}

impl AdamW {
    /// The kernels.
    ///
    /// # Errors
    /// [`Error::Gpu`] where they cannot be had.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let module = gpu.module(&build()?)?;
        Ok(Self {
            parts: module.function("gradient_norm_parts")?,
            norm: module.function("gradient_norm")?,
            step: module.function(NAME)?,
        })
    }

    /// Elements of the scratch of a step of `count` weights.
    pub fn scratch_elements(count: usize) -> usize {
        count.div_ceil(BLOCK * TURNS)
    }

    /// Starts a step on `stream`, and does not wait for it.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`].
    pub unsafe fn run(&self, stream: &Stream, call: &AdamWStep) -> Result<()> {
        let count = call.weights.len();
        for (name, view) in [("weights", call.weights), ("m", call.m), ("v", call.v), ("gradient", call.gradient)] {
            view.expect(NAME, name, &[count])?;
        }
        call.rounded.expect(NAME, "rounded", &[count])?;
        call.step.expect(NAME, "step", &[1])?;
        call.norm.expect(NAME, "norm", &[1])?;
        if [count, call.decayed].iter().any(|n| !n.is_multiple_of(ACCESS)) {
            return Err(Error::input(format!(
                "{NAME}: {count} weights, {} with decay: expected multiples of {ACCESS}",
                call.decayed
            )));
        }
        let blocks = Self::scratch_elements(count);
        let params = Params {
            weights: call.weights.address(),
            m: call.m.address(),
            v: call.v.address(),
            gradient: call.gradient.address(),
            rounded: call.rounded.address(),
            step: call.step.address(),
            norm: call.norm.address(),
            parts: call.scratch.part(0..blocks)?.address(),
            count: count as u64,
            decayed: call.decayed as u64,
            blocks: counted(NAME, blocks)?,
            unused: 0,
        };
        let one = Grid { threads: THREADS, ..Grid::default() };
        // SAFETY: the views have the lengths that the kernels take them to have; the rest is the caller's promise.
        unsafe {
            self.parts.launch(stream, grid(NAME, count, BLOCK * TURNS, THREADS)?, &params)?;
            self.norm.launch(stream, one, &params)?;
            self.step.launch(stream, grid(NAME, count, BLOCK, THREADS)?, &params)
        }
    }
}

fn build() -> Result<Build> {
    Ok(Build { source: source(NAME)?, defines: vec![] })
}

pub(in crate::cuda) const OPERATOR: Operator = Operator {
    name: NAME,
    builds: || Ok(vec![build()?]),
    parameters: &[
        ("gradient_norm_parts", size_of::<Params>()),
        ("gradient_norm", size_of::<Params>()),
        (NAME, size_of::<Params>()),
    ],
};
