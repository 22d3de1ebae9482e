//! A copy on the GPU by a kernel (`kernels/copy.cu`). [`Stream::copy`] is the driver's, which does not reach the rate of
//! the memory at every size.

use super::{Buffer, Build, Element, Function, Gpu, Grid, Operator, Stream, source};
use crate::{Error, Result};

/// Bytes of an access.
const ACCESS: usize = 16;
const THREADS: u32 = 256;
/// With these the threads of every GPU's multiprocessor are all in use, or nearly so.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;

/// The kernel, ready to run.
pub struct CopyKernel {
    function: Function,
    blocks: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    from: u64,
    to: u64,
    count: u64,
}

impl CopyKernel {
    /// The kernel on `gpu`.
    ///
    /// # Errors
    /// As [`Gpu::module`].
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let function = gpu.module(&build()?)?.function("copy")?;
        Ok(Self { function, blocks: BLOCKS_PER_MULTIPROCESSOR * gpu.multiprocessors })
    }

    /// Starts a copy of `from` to `to`, which has as many elements, a multiple of 16 bytes.
    ///
    /// # Errors
    /// [`Error::Input`] where the lengths are others, [`Error::Gpu`] where the driver refuses.
    pub fn copy<T: Element>(&self, stream: &Stream, from: &Buffer<T>, to: &mut Buffer<T>) -> Result<()> {
        let bytes = from.size_bytes();
        if bytes != to.size_bytes() || !bytes.is_multiple_of(ACCESS) {
            return Err(Error::input(format!(
                "a copy of {bytes} bytes into a buffer of {}: expected the same number, a multiple of {ACCESS}",
                to.size_bytes()
            )));
        }
        let grid = Grid { blocks: [self.blocks, 1, 1], threads: THREADS, ..Grid::default() };
        let params = Params { from: from.address(), to: to.address(), count: (bytes / ACCESS) as u64 };
        // SAFETY: both buffers hold `count` accesses, at addresses that are multiples of 256; when they may be freed is as
        // for every work on a stream.
        unsafe { self.function.launch(stream, grid, &params) }
    }
}

fn build() -> Result<Build> {
    Ok(Build { source: source("copy")?, defines: vec![] })
}

fn builds() -> Result<Vec<Build>> {
    Ok(vec![build()?])
}

/// What the tests have to know.
pub(super) const OPERATOR: Operator = Operator { name: "copy", builds, parameters: &[("copy", size_of::<Params>())] };
