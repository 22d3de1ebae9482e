//! The kernels without a GPU: all of them compile, for every architecture, within their registers; and what compiles
//! them and keeps the result does so under damage, in several processes, and with a word about what is missing.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod cache;
mod compile;
mod nvrtc;
mod process;

use gdnlab::cuda::Source;

/// A kernel that is not in `kernels/`.
const SCALE: &str = r#"
#include "common.cuh"
#ifndef FACTOR
#define FACTOR 1
#endif
struct Params { u64 x; u32 n; float factor; };
extern "C" __global__ void __launch_bounds__(128) scale(const __grid_constant__ Params p) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.n) ((float*)p.x)[i] *= p.factor * FACTOR;
}
"#;

fn scale() -> Source {
    Source::new("scale.cu", SCALE).unwrap()
}
