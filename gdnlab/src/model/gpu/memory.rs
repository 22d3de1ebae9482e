//! The memory of a training, counted before any of it is taken.

use super::arena::Arena;
use super::sizes::Sizes;
use super::step::{Kernels, MixerKernels};
use super::tensors::Tensors;
use crate::Result;
use crate::cost::memory::{self, TrainingMemory};
use crate::cost::model::Batch;
use crate::cuda::Gpu;
use crate::cuda::chunk::Passes;

/// Bytes of a training by what they are for, to the byte but for what the driver adds to allocations.
pub(super) fn count(gpu: &Gpu, sizes: &Sizes, arena: &Arena, kernels: &Kernels) -> Result<TrainingMemory> {
    let tensors = Tensors::lay_out(0, sizes, arena, &kernels.scratch(sizes)).1.by_part;
    let recurrence = match &kernels.mixer {
        MixerKernels::Attention(_) => 0,
        MixerKernels::Gdn(_) => Passes::bytes(gpu, &sizes.chunk())?,
    };
    let inputs = super::inputs::Inputs::words(sizes) * size_of::<u32>();
    let workspace_bytes = (kernels.products.workspace_bytes() + recurrence + inputs) as u128;
    Ok(TrainingMemory { workspace_bytes, ..tensors })
}

/// Refuses a training that does not fit into the memory that is free now, and tells how many sequences would.
pub(super) fn require(gpu: &Gpu, sizes: &Sizes, arena: &Arena, kernels: &Kernels) -> Result<TrainingMemory> {
    let needed = count(gpu, sizes, arena, kernels)?;
    // What a smaller batch would need: all but the parameters grows with it.
    let of_batch = |batch: &Batch| {
        let share = |bytes: u128| bytes.saturating_mul(batch.total_tokens()) / sizes.batch.total_tokens();
        TrainingMemory {
            parameter_bytes: needed.parameter_bytes,
            activation_bytes: share(needed.activation_bytes),
            backward_bytes: share(needed.backward_bytes),
            logit_bytes: needed.logit_bytes,
            workspace_bytes: share(needed.workspace_bytes),
        }
    };
    memory::require_counted(&sizes.config, &sizes.batch, gpu.free_bytes()?, of_batch)
}
