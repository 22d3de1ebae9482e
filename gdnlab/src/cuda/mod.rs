//! The CUDA layer: one GPU, its memory, and kernels that are compiled on their first use.
//!
//! A kernel is a file `kernels/<operator>.cu`, embedded in the crate, whose entry points take one structure:
//! `extern "C" __global__ void name(const __grid_constant__ Params p)`. Macros specialise it ([`Build`]). NVIDIA's
//! run-time compiler makes machine code of it for the GPU at hand, once: the result stays in a [`Cache`] on disk.
//! Building the crate needs no CUDA, and neither does a program that never asks for a [`Gpu`].
//!
//! ```no_run
//! use gdnlab::cuda::{Build, Gpu, Grid, Source};
//!
//! #[derive(Clone, Copy)]
//! #[repr(C)]
//! struct Params {
//!     x: u64,
//!     n: i32,
//!     factor: f32,
//! }
//!
//! # fn main() -> gdnlab::Result<()> {
//! let text = r#"
//! struct Params { float* x; int n; float factor; };
//! extern "C" __global__ void scale(const __grid_constant__ Params p) {
//!     int i = blockIdx.x * blockDim.x + threadIdx.x;
//!     if (i < p.n) p.x[i] *= p.factor;
//! }"#;
//! let gpu = Gpu::shared()?;
//! let module = gpu.module(&Build { source: Source::new("scale.cu", text)?, defines: vec![] })?;
//! let scale = module.function("scale")?;
//! let x = gpu.upload(&[1.0f32, 2.0, 3.0])?;
//! let grid = Grid { blocks: [1, 1, 1], threads: 128, ..Grid::default() };
//! // SAFETY: `x` holds three floats, and lives until the download has waited for the kernel.
//! unsafe { scale.launch(gpu.stream(), grid, &Params { x: x.address(), n: 3, factor: 2.0 })? };
//! assert_eq!(gpu.download(&x)?, [2.0, 4.0, 6.0]);
//! # Ok(())
//! # }
//! ```
//!
//! | variable | meaning |
//! |---|---|
//! | `GDNLAB_GPU` | which GPU, counted from 0 among those that `CUDA_VISIBLE_DEVICES` leaves visible; 0 without it |
//! | `GDNLAB_NVRTC` | the library `libnvrtc.so.13` or its folder; see [`Compiler::find`] for where it is looked for otherwise |
//! | `GDNLAB_CUBLAS` | the library `libcublasLt.so.13` or its folder; looked for in the same places otherwise |
//! | `GDNLAB_CUDNN` | the library `libcudnn.so.9` or its folder, with which attention is compared; the same places otherwise |
//! | `GDNLAB_NCCL` | the library `libnccl.so.2` or its folder, with which GPUs exchange states; the same places otherwise |
//! | `GDNLAB_CACHE` | folder of the compiled kernels; `~/.cache/gdnlab/kernels` without it. At most 256 MiB |
//! | `GDNLAB_KERNELS` | folder whose `.cu` and `.cuh` files are used instead of the embedded ones |

pub mod attention;
mod blas;
mod blas_raw;
mod blas_tune;
mod buffer;
mod build;
mod cache;
pub mod chunk;
mod copy;
mod cubin;
mod cudnn_graph;
mod cudnn_raw;
pub mod decode;
mod gpu;
mod launch;
pub mod layers;
mod locate;
mod module;
pub mod nccl;
mod nvrtc;
mod profile;
mod raw;
mod recurrent;
mod report;
mod stream;
mod tensor_map;

pub use blas::{Batch, Compute, Matmul, Operand, Product};
pub(crate) use blas_tune::Matrices;
pub use buffer::{Buffer, Element};
pub use build::{Architecture, Build, Compiled, Source, source, sources};
pub use cache::Cache;
pub use copy::CopyKernel;
pub use gpu::Gpu;
pub use launch::{Grid, Limits};
pub use locate::Compiler;
pub use module::{Function, Module};
pub use profile::{KernelSum, KernelTime, kernel_times};
pub use raw::TensorMap;
pub use recurrent::Recurrent;
pub use report::{FunctionReport, Report, Spills};
pub use stream::{Event, Graph, Stream};
pub use tensor_map::{Swizzle, TileFormat, Tiles};

/// What the tests have to know about an operator's kernels.
pub struct Operator {
    /// Its name.
    pub name: &'static str,
    /// Every specialisation that it can ask for, on a list that covers each combination of macros that changes code.
    pub builds: fn() -> crate::Result<Vec<Build>>,
    /// Each kernel that it launches, with the size in bytes of the structure that it passes.
    pub parameters: &'static [(&'static str, usize)],
}

/// The operators that have kernels. The tests compile all of their builds.
pub fn operators() -> &'static [Operator] {
    &[
        recurrent::OPERATOR,
        decode::OPERATOR,
        chunk::OPERATOR,
        chunk::HOPPER_OPERATOR,
        chunk::gdn2::OPERATOR,
        chunk::gdn2::HOPPER_OPERATOR,
        copy::OPERATOR,
        attention::OPERATOR,
        attention::math::OPERATOR,
        layers::adamw::OPERATOR,
        layers::cross_entropy::OPERATOR,
        layers::embedding::OPERATOR,
        layers::gated_norm::OPERATOR,
        layers::part_sums::OPERATOR,
        layers::rms_norm::OPERATOR,
        layers::rope::OPERATOR,
        layers::short_conv::OPERATOR,
        layers::swiglu::OPERATOR,
        layers::widen::OPERATOR,
    ]
}
