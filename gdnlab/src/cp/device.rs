//! The chunk kernels of the GPU, and calls of theirs whose tensors stay there.

use super::chain::Way;
use crate::cuda::chunk::gdn2::{self, Gdn2};
use crate::cuda::chunk::{Chunk, Plan, Setup};
use crate::cuda::{Batch, Gpu, Product, Stream};
use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Inputs, Shape};
use crate::{Error, Result};

/// A chunk kernel of either operator.
pub(super) enum ChunkKernel {
    Gdn(Chunk),
    Gdn2(Gdn2),
}

impl ChunkKernel {
    /// The kernel called `name`; none where it is no chunk kernel of the GPU.
    pub fn named(name: &str) -> Option<Self> {
        let gdn = Chunk::presets().into_iter().chain([Chunk::fused()]).find(|kernel| kernel.name() == name);
        let gdn2 = || Gdn2::presets().into_iter().find(|kernel| kernel.name() == name);
        gdn.map(Self::Gdn).or_else(|| gdn2().map(Self::Gdn2))
    }

    /// Compiles what `inputs` need, allocates everything and uploads them.
    ///
    /// # Errors
    /// [`Error::Input`] where the kernel does not take them, and what the GPU reports.
    pub fn call(&self, gpu: &'static Gpu, inputs: &Inputs, backward: bool) -> Result<DeviceCall> {
        match self {
            Self::Gdn(kernel) => {
                let mut setup = Setup::of_inputs(inputs, kernel.operands(), kernel.input_format(), backward)?;
                setup.options.fused = kernel.is_fused();
                let mut plan = Plan::new(gpu, setup)?;
                plan.upload_inputs(inputs)?;
                Ok(DeviceCall::Gdn(Box::new(plan)))
            }
            Self::Gdn2(kernel) => {
                let setup = gdn2::Setup::of_inputs(inputs, kernel.operands(), kernel.input_format(), backward)?;
                let mut plan = gdn2::Plan::new(gpu, setup)?;
                plan.upload_inputs(inputs)?;
                Ok(DeviceCall::Gdn2(Box::new(plan)))
            }
        }
    }
}

/// A call whose tensors are on the GPU.
pub(super) enum DeviceCall {
    Gdn(Box<Plan>),
    Gdn2(Box<gdn2::Plan>),
}

impl DeviceCall {
    /// Starts the forward on `stream`.
    ///
    /// # Errors
    /// [`Error::Gpu`] where a launch is refused.
    ///
    /// # Safety
    /// As for [`Plan::forward_on`].
    pub unsafe fn forward_on(&self, stream: &Stream) -> Result<()> {
        // SAFETY: the promise of the caller.
        unsafe {
            match self {
                Self::Gdn(plan) => plan.forward_on(stream),
                Self::Gdn2(plan) => plan.forward_on(stream),
            }
        }
    }

    /// Starts the backward on `stream` after a forward, with what that has left.
    ///
    /// # Errors
    /// [`Error::Input`] where there is none, [`Error::Gpu`] where a launch is refused.
    ///
    /// # Safety
    /// As for [`Plan::forward_on`].
    pub unsafe fn backward_after_forward_on(&self, stream: &Stream) -> Result<()> {
        // SAFETY: the promise of the caller.
        unsafe {
            match self {
                Self::Gdn(plan) => plan.backward_after_forward_on(stream),
                Self::Gdn2(plan) => plan.backward_after_forward_on(stream),
            }
        }
    }

    /// Address of the tensor called `name`.
    ///
    /// # Errors
    /// [`Error::Input`] where the call has no such tensor.
    pub fn address(&self, name: &str) -> Result<u64> {
        let address = match self {
            Self::Gdn(plan) => plan.address(name),
            Self::Gdn2(plan) => plan.address(name),
        };
        match address {
            0 => Err(Error::input(format!("a call on the GPU without '{name}': expected one that has it"))),
            address => Ok(address),
        }
    }
}

/// A transition times a state of these heads, in binary32, for cuBLASLt to add to what is there.
pub(super) fn composition(shape: &Shape, way: Way) -> Product {
    let Shape { value_heads: count, key_dim, value_dim, .. } = *shape;
    let batch = Batch { count, a: key_dim * key_dim, b: key_dim * value_dim, c: key_dim * value_dim };
    let product = Product { batch, ..Product::new(key_dim, value_dim, key_dim, Format::F32) };
    if way == Way::Backward { product.a_transposed() } else { product }
}
