//! The GPU's clock for the chunk kernels.

use super::chain::Way;
use super::device::{ChunkKernel, composition};
use super::rank::Clock;
use crate::bench::{Budget, Timer};
use crate::cuda::{Gpu, Matmul, Stream};
use crate::problem::{Inputs, Shape};
use crate::{Error, Result};
use std::collections::HashMap;
use std::ops::{ControlFlow, Range};
use std::sync::{Mutex, PoisonError};

/// Times the launches of a chunk kernel's calls on the GPU of this process: the median of graph replays, each with a cold L2
/// cache. Copies between host and GPU, which a model does not make, are not in it. Calls of the same sizes take the same time,
/// so each is timed once.
pub struct DeviceClock {
    kernel: ChunkKernel,
    timer: Mutex<Timer>,
    known: Mutex<HashMap<Sizes, f64>>,
}

/// What the time of a call depends on.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Sizes {
    shape: Shape,
    sequences: Vec<Range<usize>>,
    initial_state: bool,
    d_final_state: bool,
    backward: bool,
}

impl DeviceClock {
    /// A clock for the kernel called `kernel`; none where it is no chunk kernel of the GPU.
    ///
    /// # Errors
    /// [`Error::Gpu`] where there is no GPU, or it has no memory left.
    pub fn of(kernel: &str) -> Result<Option<Self>> {
        let Some(kernel) = ChunkKernel::named(kernel) else { return Ok(None) };
        let timer = Mutex::new(Timer::new(Gpu::shared()?, Budget::default())?);
        Ok(Some(Self { kernel, timer, known: Mutex::default() }))
    }

    fn time(&self, work: impl FnOnce(&Stream) -> Result<()>) -> Result<f64> {
        let mut timer = self.timer.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(timer.time(work, &mut || ControlFlow::Continue(()))?.median())
    }

    fn gpu(&self) -> &'static Gpu {
        self.timer.lock().unwrap_or_else(PoisonError::into_inner).gpu()
    }

    fn known(&self, sizes: Sizes, measure: impl FnOnce() -> Result<f64>) -> Result<f64> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ms) = known.get(&sizes) {
            return Ok(*ms);
        }
        let ms = measure()?;
        known.insert(sizes, ms);
        Ok(ms)
    }
}

impl Clock for DeviceClock {
    fn run_ms(&self, call: &Inputs, backward: bool) -> Result<f64> {
        let sizes = Sizes {
            shape: call.shape,
            sequences: call.sequence_ranges(),
            initial_state: call.initial_state.is_some(),
            d_final_state: call.d_final_state.is_some(),
            backward,
        };
        let gpu = self.gpu();
        self.known(sizes, || {
            let call = self.kernel.call(gpu, call, backward)?;
            // SAFETY: the call lives until its replays, which the timer waits for, have ended.
            let forward = self.time(|stream| unsafe { call.forward_on(stream) })?;
            // SAFETY: as above; what the forward keeps is there.
            let after = |stream: &Stream| unsafe { call.backward_after_forward_on(stream) };
            Ok(forward + if backward { self.time(after)? } else { 0.0 })
        })
    }

    /// That of products in binary32 by cuBLASLt, added to what is there.
    fn compose_ms(&self, shape: &Shape) -> Result<f64> {
        let Shape { value_heads: heads, key_dim, value_dim, .. } = *shape;
        let sizes =
            Sizes { shape: *shape, sequences: Vec::new(), initial_state: true, d_final_state: false, backward: false };
        let gpu = self.gpu();
        self.known(sizes, || {
            let matmul = Matmul::new(gpu, &composition(shape, Way::Forward))?;
            let transition = gpu.upload(&vec![0.5f32; heads * key_dim * key_dim])?;
            let state = gpu.upload(&vec![0.5f32; heads * key_dim * value_dim])?;
            let local = gpu.upload(&vec![0.5f32; heads * key_dim * value_dim])?;
            // SAFETY: the buffers have the sizes of the product, and live until all that is started here has ended.
            let run = |stream: &Stream| unsafe {
                matmul.run_on(stream, transition.address(), state.address(), local.address(), 1.0, 1.0)
            };
            // The library prepares itself at its first product, which cannot be recorded.
            run(gpu.stream())?;
            gpu.synchronize()?;
            self.time(run)
        })
        .map_err(|error| match error {
            Error::Gpu(why) => Error::gpu(format!("timing the product with the transition: {why}")),
            other => other,
        })
    }
}
