//! One call: inputs to the GPU, the launches, results back.

use super::super::{Buffer, Element, Function, Gpu, Grid, Module};
use super::build;
use super::layout::{Batch, Layout, Workspace};
use crate::problem::{GateGrads, Gates, Grads, Inputs, Op, Outputs, PIECE, Results, Tensor};
use crate::{Error, Result};
use gdnlab_deps::rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// A number type that the recurrence is compiled for.
pub(super) trait Real: Element {
    /// Its name in CUDA.
    const CUDA: &'static str;
    /// `values` rounded to this type.
    fn narrowed(values: &[f64]) -> Cow<'_, [Self]>;
    /// `values` as float64, which holds them exactly.
    fn widened(values: Vec<Self>) -> Vec<f64>;
}

impl Real for f64 {
    const CUDA: &'static str = "double";

    fn narrowed(values: &[f64]) -> Cow<'_, [Self]> {
        Cow::Borrowed(values)
    }

    fn widened(values: Vec<Self>) -> Vec<f64> {
        values
    }
}

impl Real for f32 {
    const CUDA: &'static str = "float";

    fn narrowed(values: &[f64]) -> Cow<'_, [Self]> {
        Cow::Owned(values.par_iter().with_min_len(PIECE).map(|&x| x as f32).collect())
    }

    fn widened(values: Vec<Self>) -> Vec<f64> {
        values.par_iter().with_min_len(PIECE).map(|&x| f64::from(x)).collect()
    }
}

/// `Problem` of the kernels; addresses as numbers.
#[derive(Clone, Copy)]
#[repr(C)]
struct ProblemParams {
    q: u64,
    k: u64,
    v: u64,
    g: u64,
    erase: u64,
    write: u64,
    cu_seqlens: u64,
    scale: f64,
    qk_heads: i32,
    value_heads: i32,
    key_dim: i32,
    value_dim: i32,
    first_sequence: i32,
    first_head: i32,
    heads: i32,
    column_blocks: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ForwardParams {
    problem: ProblemParams,
    initial_state: u64,
    o: u64,
    final_state: u64,
    kept: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct BackwardParams {
    problem: ProblemParams,
    d_o: u64,
    d_final_state: u64,
    kept: u64,
    states: u64,
    vectors: u64,
    dq: u64,
    dk: u64,
    dg: u64,
    d_erase: u64,
    dv: u64,
    dw: u64,
    dh0: u64,
    batch_tokens: i64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ReduceParams {
    partial: u64,
    out: u64,
    first_token: i64,
    batch_tokens: i64,
    first_head: i32,
    heads: i32,
    column_blocks: i32,
    width: i32,
    out_heads: i32,
    group: i32,
}

/// Each kernel with the size of its parameter in bytes.
pub(super) const PARAMETERS: &[(&str, usize)] = &[
    ("recurrent_forward", size_of::<ForwardParams>()),
    ("recurrent_backward", size_of::<BackwardParams>()),
    ("recurrent_reduce", size_of::<ReduceParams>()),
];

/// Threads of a block of `recurrent_reduce`.
const REDUCE_THREADS: usize = 256;

/// The inputs on the GPU.
struct DeviceInputs<T> {
    q: Buffer<T>,
    k: Buffer<T>,
    v: Buffer<T>,
    g: Buffer<T>,
    /// beta, or b.
    erase: Buffer<T>,
    /// w of GDN-2.
    write: Option<Buffer<T>>,
    cu_seqlens: Buffer<i64>,
    initial_state: Option<Buffer<T>>,
    d_o: Option<Buffer<T>>,
    d_final_state: Option<Buffer<T>>,
}

impl<T: Real> DeviceInputs<T> {
    fn upload(gpu: &Gpu, inputs: &Inputs, backward: bool) -> Result<Self> {
        let upload = |tensor: &Tensor| gpu.upload(&T::narrowed(&tensor.data));
        let optional = |tensor: &Option<Tensor>| tensor.as_ref().map(upload).transpose();
        let (erase, write) = match &inputs.gates {
            Gates::Gdn { beta, .. } => (beta, None),
            Gates::Gdn2 { b, w, .. } => (b, Some(w)),
        };
        let ranges = inputs.sequence_ranges();
        let last = ranges.last().map_or(0, |tokens| tokens.end);
        let cu_seqlens: Vec<i64> = ranges.iter().map(|tokens| tokens.start).chain([last]).map(|at| at as i64).collect();
        Ok(Self {
            q: upload(&inputs.q)?,
            k: upload(&inputs.k)?,
            v: upload(&inputs.v)?,
            g: upload(inputs.gates.log_decay())?,
            erase: upload(erase)?,
            write: write.map(upload).transpose()?,
            cu_seqlens: gpu.upload(&cu_seqlens)?,
            initial_state: optional(&inputs.initial_state)?,
            d_o: if backward { optional(&inputs.d_o)? } else { None },
            d_final_state: if backward { optional(&inputs.d_final_state)? } else { None },
        })
    }
}

/// A result on the GPU, NaN where no kernel has written, and the shape that it has.
struct DeviceTensor<T> {
    dims: Vec<usize>,
    data: Buffer<T>,
}

impl<T: Real> DeviceTensor<T> {
    fn unwritten(gpu: &Gpu, dims: &[usize]) -> Result<Self> {
        let mut data = gpu.alloc(dims.iter().product())?;
        gpu.fill_bytes(&mut data, 0xff)?;
        Ok(Self { dims: dims.to_vec(), data })
    }

    fn download(&self, gpu: &Gpu) -> Result<Tensor> {
        Tensor::new(&self.dims, T::widened(gpu.download(&self.data)?))
    }

    fn address(&self) -> u64 {
        self.data.address()
    }
}

struct DeviceOutputs<T> {
    o: DeviceTensor<T>,
    final_state: DeviceTensor<T>,
}

struct DeviceGrads<T> {
    dq: DeviceTensor<T>,
    dk: DeviceTensor<T>,
    dv: DeviceTensor<T>,
    dg: DeviceTensor<T>,
    /// dbeta, or db.
    d_erase: DeviceTensor<T>,
    /// GDN-2.
    dw: Option<DeviceTensor<T>>,
    dh0: DeviceTensor<T>,
}

impl<T: Real> DeviceGrads<T> {
    fn unwritten(gpu: &Gpu, inputs: &Inputs) -> Result<Self> {
        let shape = &inputs.shape;
        let new = |dims: &[usize]| DeviceTensor::unwritten(gpu, dims);
        let gate_dims = &inputs.gates.log_decay().dims;
        let dw = match inputs.op() {
            Op::Gdn => None,
            Op::Gdn2 => Some(new(&shape.value_dims())?),
        };
        Ok(Self {
            dq: new(&shape.qk_dims())?,
            dk: new(&shape.qk_dims())?,
            dv: new(&shape.value_dims())?,
            dg: new(gate_dims)?,
            d_erase: new(gate_dims)?,
            dw,
            dh0: new(&shape.state_dims(inputs.sequences()))?,
        })
    }

    fn download(&self, gpu: &Gpu) -> Result<Grads> {
        let d_erase = self.d_erase.download(gpu)?;
        let gates = match &self.dw {
            None => GateGrads::Gdn { dbeta: d_erase },
            Some(dw) => GateGrads::Gdn2 { db: d_erase, dw: dw.download(gpu)? },
        };
        Ok(Grads {
            dq: self.dq.download(gpu)?,
            dk: self.dk.download(gpu)?,
            dv: self.dv.download(gpu)?,
            dg: self.dg.download(gpu)?,
            gates,
            dh0: self.dh0.download(gpu)?,
        })
    }
}

/// All that the launches of one call share.
struct Call<'a, T> {
    gpu: &'a Gpu,
    inputs: &'a Inputs,
    layout: Layout,
    module: Arc<Module>,
    on_gpu: DeviceInputs<T>,
}

/// Forward, and with `backward` the gradients, of validated inputs, in a workspace of `workspace_bytes`.
pub(super) fn run<T: Real>(gpu: &Gpu, inputs: &Inputs, backward: bool, workspace_bytes: usize) -> Result<Results> {
    let layout = Layout::new(&inputs.shape, inputs.op(), size_of::<T>());
    let call = Call {
        gpu,
        inputs,
        layout,
        module: gpu.module(&build::<T>(inputs.op(), &layout)?)?,
        on_gpu: DeviceInputs::<T>::upload(gpu, inputs, backward)?,
    };
    let outputs = DeviceOutputs {
        o: DeviceTensor::unwritten(gpu, &inputs.shape.value_dims())?,
        final_state: DeviceTensor::unwritten(gpu, &inputs.shape.state_dims(inputs.sequences()))?,
    };
    let grads = if backward {
        Some(call.forward_and_backward(&outputs, workspace_bytes)?)
    } else {
        call.forward(&outputs, &call.everything(), None)?;
        None
    };
    let outputs = Outputs { o: outputs.o.download(gpu)?, final_state: outputs.final_state.download(gpu)? };
    Ok(Results { outputs, grads: grads.map(|grads| grads.download(gpu)).transpose()? })
}

impl<T: Real> Call<'_, T> {
    /// The whole problem as one batch.
    fn everything(&self) -> Batch {
        let shape = &self.inputs.shape;
        Batch {
            sequences: 0..self.inputs.sequences(),
            tokens: 0..shape.batch * shape.tokens,
            heads: 0..shape.value_heads,
        }
    }

    fn params(&self, batch: &Batch) -> Result<ProblemParams> {
        let shape = &self.inputs.shape;
        let DeviceInputs { q, k, v, g, erase, write, cu_seqlens, .. } = &self.on_gpu;
        Ok(ProblemParams {
            q: q.address(),
            k: k.address(),
            v: v.address(),
            g: g.address(),
            erase: erase.address(),
            write: write.as_ref().unwrap_or(erase).address(),
            cu_seqlens: cu_seqlens.address(),
            scale: self.inputs.scale,
            qk_heads: count(shape.qk_heads)?,
            value_heads: count(shape.value_heads)?,
            key_dim: count(shape.key_dim)?,
            value_dim: count(shape.value_dim)?,
            first_sequence: count(batch.sequences.start)?,
            first_head: count(batch.heads.start)?,
            heads: count(batch.heads.len())?,
            column_blocks: count(self.layout.blocks)?,
        })
    }

    /// A block for each block of columns of each head of each sequence.
    fn grid(&self, batch: &Batch) -> Result<Grid> {
        let blocks = [batch.sequences.len(), batch.heads.len(), self.layout.blocks];
        let blocks = blocks.into_iter().fold(1, usize::saturating_mul);
        Ok(Grid { blocks: [block_count(blocks)?, 1, 1], threads: self.layout.threads() as u32, ..Grid::default() })
    }

    /// Computes outputs; with `kept`, keeps the states that the backward begins from.
    fn forward(&self, outputs: &DeviceOutputs<T>, batch: &Batch, kept: Option<&Buffer<T>>) -> Result<()> {
        let params = ForwardParams {
            problem: self.params(batch)?,
            initial_state: address(self.on_gpu.initial_state.as_ref()),
            o: outputs.o.address(),
            final_state: outputs.final_state.address(),
            kept: address(kept),
        };
        let kernel = self.function("recurrent_forward")?;
        // SAFETY: the inputs were validated, so every tensor has the size that the shape says; `kept` was allocated for
        // this batch. All of them live until `run` has downloaded results, or go back to the pool in the stream's order.
        unsafe { kernel.launch(self.gpu.stream(), self.grid(batch)?, &params) }
    }

    fn forward_and_backward(&self, outputs: &DeviceOutputs<T>, workspace_bytes: usize) -> Result<DeviceGrads<T>> {
        let grads = DeviceGrads::unwritten(self.gpu, self.inputs)?;
        let heads = self.inputs.shape.value_heads;
        for batch in self.layout.batches(&self.inputs.sequence_ranges(), heads, workspace_bytes) {
            let sizes = Workspace::of(&self.layout, &batch);
            let kept = self.gpu.alloc(sizes.kept)?;
            self.forward(outputs, &batch, Some(&kept))?;
            self.backward(&grads, &batch, &sizes, &kept)?;
        }
        Ok(grads)
    }

    fn backward(&self, grads: &DeviceGrads<T>, batch: &Batch, sizes: &Workspace, kept: &Buffer<T>) -> Result<()> {
        let gpu = self.gpu;
        let (states, vectors) = (gpu.alloc::<T>(sizes.states)?, gpu.alloc::<T>(sizes.vectors)?);
        let (dq, dk) = (gpu.alloc::<T>(sizes.vector_sums)?, gpu.alloc::<T>(sizes.vector_sums)?);
        let (dg, d_erase) = (gpu.alloc::<T>(sizes.gate_sums)?, gpu.alloc::<T>(sizes.gate_sums)?);
        let params = BackwardParams {
            problem: self.params(batch)?,
            d_o: address(self.on_gpu.d_o.as_ref()),
            d_final_state: address(self.on_gpu.d_final_state.as_ref()),
            kept: kept.address(),
            states: states.address(),
            vectors: vectors.address(),
            dq: dq.address(),
            dk: dk.address(),
            dg: dg.address(),
            d_erase: d_erase.address(),
            dv: grads.dv.address(),
            dw: grads.dw.as_ref().map_or(0, DeviceTensor::address),
            dh0: grads.dh0.address(),
            batch_tokens: batch.tokens.len() as i64,
        };
        let kernel = self.function("recurrent_backward")?;
        // SAFETY: as in `forward`; the workspace has the sizes of this batch, and is freed in the stream's order.
        unsafe { kernel.launch(gpu.stream(), self.grid(batch)?, &params)? };
        let sums = [(&dq, &grads.dq), (&dk, &grads.dk), (&dg, &grads.dg), (&d_erase, &grads.d_erase)];
        sums.into_iter().try_for_each(|(partial, out)| self.reduce(batch, partial, out))
    }

    /// Adds up over the blocks of columns, and over the value heads that share a q/k head.
    fn reduce(&self, batch: &Batch, partial: &Buffer<T>, out: &DeviceTensor<T>) -> Result<()> {
        // [B, T, H] or [B, T, H, width]
        let (out_heads, width) = (out.dims[2], out.dims.get(3).copied().unwrap_or(1));
        let group = self.inputs.shape.value_heads / out_heads;
        let outs = out_head_range(&batch.heads, group).len();
        let numbers = [batch.tokens.len(), outs, width].into_iter().fold(1, usize::saturating_mul);
        let blocks = block_count(numbers.div_ceil(REDUCE_THREADS))?;
        let params = ReduceParams {
            partial: partial.address(),
            out: out.address(),
            first_token: batch.tokens.start as i64,
            batch_tokens: batch.tokens.len() as i64,
            first_head: count(batch.heads.start)?,
            heads: count(batch.heads.len())?,
            column_blocks: count(self.layout.blocks)?,
            width: count(width)?,
            out_heads: count(out_heads)?,
            group: count(group)?,
        };
        let grid = Grid { blocks: [blocks, 1, 1], threads: REDUCE_THREADS as u32, ..Grid::default() };
        let kernel = self.function("recurrent_reduce")?;
        // SAFETY: `partial` has the numbers of this batch, `out` those of the whole tensor; the rest as in `forward`.
        unsafe { kernel.launch(self.gpu.stream(), grid, &params) }
    }

    fn function(&self, name: &str) -> Result<Function> {
        self.module.function(name)
    }
}

/// Output heads that the value heads `heads` add to, `group` to each.
fn out_head_range(heads: &Range<usize>, group: usize) -> Range<usize> {
    heads.start / group..heads.end.div_ceil(group)
}

fn address<T: Element>(buffer: Option<&Buffer<T>>) -> u64 {
    buffer.map_or(0, Buffer::address)
}

/// A size as the kernels take it.
fn count(size: usize) -> Result<i32> {
    size.try_into().map_err(|_| Error::input(format!("{size} sequences or heads: expected {} at the most", i32::MAX)))
}

fn block_count(blocks: usize) -> Result<u32> {
    blocks.try_into().map_err(|_| Error::input(format!("{blocks} blocks of threads: use a smaller problem")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_group_add_to_its_head() {
        assert_eq!(out_head_range(&(0..4), 2), 0..2);
        assert_eq!(out_head_range(&(1..2), 2), 0..1);
        assert_eq!(out_head_range(&(1..5), 2), 0..3);
        assert_eq!(out_head_range(&(3..6), 1), 3..6);
    }

    #[test]
    fn sizes_that_a_kernel_cannot_count_are_refused() {
        assert_eq!(count(7).unwrap(), 7);
        assert!(count(1 << 31).unwrap_err().to_string().contains("2147483648"));
        assert!(block_count(1 << 32).unwrap_err().to_string().contains("smaller problem"));
    }
}
