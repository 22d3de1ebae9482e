//! The structures that the kernels of GDN-2 take, field by field as in `chunk.cuh` and `gdn2_gates.cu`.

use crate::cuda::chunk::params::ChunkParams;
use crate::cuda::chunk::relay::RelayParams;

/// `ChunkParams` with `CHANNELS`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Gdn2Params {
    pub chunk: ChunkParams,
    pub b: u64,
    pub w: u64,
    pub db: u64,
    pub dw: u64,
    pub write_keys: u64,
    pub d_queries: u64,
    pub d_keys: u64,
    pub lower_bound: f32,
}

impl RelayParams for Gdn2Params {
    fn chunk(&mut self) -> &mut ChunkParams {
        &mut self.chunk
    }

    fn more_rows(&mut self) -> Option<&mut u64> {
        Some(&mut self.write_keys)
    }
}

/// `ChannelGateParams`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct ChannelGateParams {
    pub a: u64,
    pub a_log: u64,
    pub dt_bias: u64,
    pub dg: u64,
    pub da: u64,
    pub d_a_log: u64,
    pub d_dt_bias: u64,
    pub partial: u64,
    pub tokens: i64,
    pub parts: i32,
    pub heads: i32,
    pub lower_bound: f32,
}
