//! The chunked (WY) form of the gated delta rule on the CPU, under a [`Policy`].
//!
//! With `G` the cumulative log decay in a chunk of C tokens, `E_ij = e^{G_i - G_j}` and `S` the state before it:
//!
//! ```text
//! L_ij = sum_d (b*k)_id k_jd E_ijd   (i > j)          P_ij = s sum_d q_id k_jd E_ijd   (i >= j)
//! R = w*v - ((b*k)*e^G) S                             (I + L) U = R
//! o = s (q*e^G) S + P U                               S_C = Diag(e^{G_C}) S + (k*e^{G_C - G})^T U
//! ```
//!
//! The arithmetic runs in binary32 where the policy fits into it and in binary64 otherwise; whatever the policy keeps
//! in a narrower format is rounded there. The backward keeps the state before each chunk and recomputes the rest.

mod backward;
mod chunk;
mod decay;
mod engine;
mod matrix;

use crate::heads::{self, Head, HeadGateGrads, HeadGrads, HeadOutputs};
use crate::kernel::Kernel;
use crate::precision::{Format, Intermediate, Policy, Product};
use crate::problem::{Inputs, Op, Results};
use crate::{Error, Result};
use backward::ChunkGrads;
use chunk::Chunk;
use engine::Engine;
use matrix::{Matrix, Real};

/// Chunk sizes that are accepted.
pub const CHUNK_SIZES: [usize; 4] = [16, 32, 64, 128];

/// The chunked form with a chunk size and a policy.
///
/// ```
/// use gdnlab::{chunked::Chunked, inputs::{self, Regime}, kernel::Kernel, precision::Policy, problem::{Op, Shape}};
/// let inputs = inputs::generate(Op::Gdn, &Shape::new(100, 2, 16, 32), Regime::Gaussian, 1)?;
/// let results = Chunked::new("mine", Policy::bf16(), 64)?.forward(&inputs.rounded_to(Policy::bf16().inputs))?;
/// assert_eq!(results.outputs.final_state.dims, [1, 2, 16, 32]);
/// # Ok::<(), gdnlab::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Chunked {
    name: String,
    policy: Policy,
    chunk: usize,
    mode: &'static str,
    decay_factor: f64,
}

impl Chunked {
    /// A chunked kernel called `name`.
    ///
    /// # Errors
    /// [`Error::Input`] where `chunk` is none of [`CHUNK_SIZES`].
    pub fn new(name: &str, policy: Policy, chunk: usize) -> Result<Self> {
        if !CHUNK_SIZES.contains(&chunk) {
            return Err(Error::input(format!("chunk size {chunk}: expected one of 16, 32, 64, 128")));
        }
        let mode = mode_of(&policy);
        Ok(Self { name: name.to_owned(), policy, chunk, mode, decay_factor: 1.0 })
    }

    /// One kernel for each of [`Policy::presets`], with chunks of 64: `cpu-chunk-` and the preset's name.
    pub fn presets() -> Vec<Self> {
        Policy::presets()
            .into_iter()
            .map(|(mode, policy)| Self {
                name: format!("cpu-chunk-{mode}"),
                policy,
                chunk: 64,
                mode,
                decay_factor: 1.0,
            })
            .collect()
    }

    /// What the chunk kernel for a GPU that is called `name` does, emulated: the same algebra with the same operands, and held
    /// to the same mode. Three things are not emulated: the kernel sums in another order, its scales reach further than f16
    /// itself, and it takes the gradient of g from terms that cancel less.
    ///
    /// # Errors
    /// [`Error::Input`] where there is no such kernel.
    pub fn emulating(name: &str) -> Result<Self> {
        let (inputs, operands, mode) = match name {
            "cuda-chunk-bf16" => (Format::Bf16, Format::F16, "f16-internals"),
            "cuda-chunk-bf16-internals" => (Format::Bf16, Format::Bf16, "bf16"),
            "cuda-chunk-f16" => (Format::F16, Format::F16, "fp16"),
            "cuda-chunk-tf32" => (Format::F32, Format::Tf32, "tf32"),
            "cuda-chunk-fp32" => (Format::F32, Format::F32, "fp32"),
            _ => {
                return Err(Error::input(format!(
                    "'{name}' cannot be emulated: expected cuda-chunk- with bf16, bf16-internals, f16, tf32 or fp32"
                )));
            }
        };
        let policy = Policy::of_gpu(inputs, operands);
        Ok(Self { name: format!("emulated {name}"), policy, chunk: 64, mode, decay_factor: 1.0 })
    }

    /// The same with every decay `e^x` but `e^0` times `factor`, to see what an exponential function with an error in one
    /// direction does.
    #[must_use]
    pub fn with_decays_times(self, factor: f64) -> Self {
        Self { decay_factor: factor, ..self }
    }

    /// The policy that this kernel follows.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Tokens per chunk.
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    fn run(&self, inputs: &Inputs, backward: bool) -> Result<Results> {
        if self.policy.fits_f32() {
            heads::run(inputs, backward, |head, out, grads| self.run_head::<f32>(head, out, grads))
        } else {
            heads::run(inputs, backward, |head, out, grads| self.run_head::<f64>(head, out, grads))
        }
    }

    fn run_head<T: Real>(&self, head: &Head<'_>, mut out: HeadOutputs<'_>, grads: Option<HeadGrads<'_, '_>>) {
        let engine = Engine { policy: &self.policy, decay_factor: self.decay_factor };
        let (k, v) = (head.key_dim(), head.value_dim());
        let mut state = state_from::<T>(head.initial_state(), k, v);
        let mut kept = Vec::new();
        for first in (0..head.tokens()).step_by(self.chunk) {
            let chunk = Chunk::<T>::load(&engine, head, first..head.tokens().min(first + self.chunk));
            if grads.is_some() {
                kept.push(state.clone());
            }
            let solved = chunk.solve(&engine, &state);
            copy_rows(&chunk.output(&engine, &solved), &mut out.o[first..]);
            chunk.advance(&engine, &solved, &mut state);
        }
        copy_out(&engine.keep(Intermediate::FinalState, state), out.final_state);
        if let Some(grads) = grads {
            self.backward_head(&engine, head, kept, grads);
        }
    }

    fn backward_head<T: Real>(
        &self,
        engine: &Engine<'_>,
        head: &Head<'_>,
        mut kept: Vec<Matrix<T>>,
        mut grads: HeadGrads<'_, '_>,
    ) {
        let (k, v) = (head.key_dim(), head.value_dim());
        let mut d_state = state_from::<T>(head.d_final_state(), k, v);
        while let Some(before) = kept.pop() {
            let first = kept.len() * self.chunk;
            let range = first..head.tokens().min(first + self.chunk);
            let chunk = Chunk::<T>::load(engine, head, range.clone());
            let d_o = Matrix::from_rows(range.len(), v, |i| head.d_o(first + i).unwrap_or_default());
            let solved = chunk.solve(engine, &before);
            let chunk_grads = chunk.backward(engine, &solved, &before, &d_o, &mut d_state);
            store(engine, &chunk_grads, first, &mut grads);
        }
        copy_out(&engine.keep(Intermediate::StateGrad, d_state), grads.dh0);
    }
}

fn state_from<T: Real>(state: Option<&[f64]>, k: usize, v: usize) -> Matrix<T> {
    state.map_or_else(|| Matrix::zeros(k, v), |state| Matrix::from_rows(k, v, |i| &state[i * v..(i + 1) * v]))
}

fn copy_out<T: Real>(from: &Matrix<T>, to: &mut [f64]) {
    to.iter_mut().zip(&from.data).for_each(|(x, y)| *x = y.to_f64());
}

fn copy_rows<T: Real>(from: &Matrix<T>, to: &mut [&mut [f64]]) {
    for (i, row) in to.iter_mut().enumerate().take(from.rows) {
        row.iter_mut().zip(from.row(i)).for_each(|(x, y)| *x = y.to_f64());
    }
}

fn store<T: Real>(engine: &Engine<'_>, chunk: &ChunkGrads<T>, first: usize, grads: &mut HeadGrads<'_, '_>) {
    add_rows(&chunk.dq, &mut grads.dq[first..]);
    add_rows(&chunk.dk, &mut grads.dk[first..]);
    copy_rows(&chunk.dv, &mut grads.dv[first..]);
    copy_rows(&chunk.dg, &mut grads.dg[first..]);
    match &mut grads.gates {
        HeadGateGrads::Gdn { dbeta } => {
            let mut sum = chunk.d_erase.clone();
            sum.add_assign(&chunk.d_write);
            copy_rows(&engine.keep(Intermediate::GateGrads, sum), &mut dbeta[first..]);
        }
        HeadGateGrads::Gdn2 { db, dw } => {
            copy_rows(&chunk.d_erase, &mut db[first..]);
            copy_rows(&chunk.d_write, &mut dw[first..]);
        }
    }
}

/// Adds to rows that the value heads of a group share.
fn add_rows<T: Real>(from: &Matrix<T>, to: &mut [&mut [f64]]) {
    for (i, row) in to.iter_mut().enumerate().take(from.rows) {
        row.iter_mut().zip(from.row(i)).for_each(|(x, y)| *x += y.to_f64());
    }
}

/// The mode that a policy is held to: its own if it is a preset, TF32's where every product has TF32 operands, or else that of
/// its inputs.
fn mode_of(policy: &Policy) -> &'static str {
    if let Some((preset, _)) = Policy::presets().into_iter().find(|(_, known)| known == policy) {
        return preset;
    }
    let in_tf32 = |&product| matches!(policy.product(product).operands, Format::Tf32 | Format::Tf32Truncated);
    match policy.inputs {
        Format::F32 if Product::ALL.iter().all(in_tf32) => "tf32",
        Format::F64 => "fp64",
        Format::F32 => "fp32",
        Format::Tf32 | Format::Tf32Truncated => "tf32",
        Format::Bf16 => "bf16",
        Format::F16 => "fp16",
    }
}

impl Kernel for Chunked {
    fn name(&self) -> &str {
        &self.name
    }

    fn summary(&self) -> String {
        let [gate, u, output] =
            [Intermediate::GateCumsum, Intermediate::U, Intermediate::Output].map(|kept| self.policy.format(kept));
        let solve = self.policy.product(Product::Solve).operands;
        let others = Product::ALL.iter().filter(|&&product| product != Product::Solve);
        let mut operands: Vec<&str> = others.map(|&product| self.policy.product(product).operands.name()).collect();
        operands.sort_unstable();
        operands.dedup();
        format!(
            "chunked form, chunk {}: inputs {}, products of {}, solve {solve}, U {u}, gates {gate}, output {output}",
            self.chunk,
            self.policy.inputs,
            operands.join(" and ")
        )
    }

    fn needs(&self) -> &'static str {
        "a CPU"
    }

    fn ops(&self) -> &'static [Op] {
        &Op::ALL
    }

    fn mode(&self) -> &'static str {
        self.mode
    }

    fn input_format(&self) -> Format {
        self.policy.inputs
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        self.run(inputs, false)
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        self.run(inputs, true)
    }
}
