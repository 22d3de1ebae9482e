//! The structures that the chunk kernels take, field by field as in `chunk.cuh` and `chunk_gates.cu`; addresses as
//! numbers, 0 for null.

/// `ChunkParams`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct ChunkParams {
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub g: u64,
    pub beta: u64,
    pub a_log: u64,
    pub dt_bias: u64,
    pub initial_state: u64,
    pub d_o: u64,
    pub d_final_state: u64,
    pub o: u64,
    pub final_state: u64,
    pub dq: u64,
    pub dk: u64,
    pub dv: u64,
    pub dg: u64,
    pub dbeta: u64,
    pub dh0: u64,
    pub queries: u64,
    pub keys: u64,
    pub norms: u64,
    pub inverse: u64,
    pub scores: u64,
    pub overlaps: u64,
    pub coefficients: u64,
    pub states: u64,
    pub state_scales: u64,
    pub writes: u64,
    pub write_scales: u64,
    pub adjoints: u64,
    pub adjoint_scales: u64,
    pub d_states: u64,
    pub d_state_scales: u64,
    pub d_o_scales: u64,
    pub chunk_token: u64,
    pub chunk_length: u64,
    pub sequence_chunk: u64,
    pub chunks: i32,
    pub qk_heads: i32,
    pub value_heads: i32,
    pub heads_per_block: i32,
    pub scale: f32,
    pub norm_epsilon: f32,
    pub beta_scale: f32,
    pub state_transposed: i32,
}

/// `GateParams`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct GateParams {
    pub a: u64,
    pub a_log: u64,
    pub dt_bias: u64,
    pub logit: u64,
    pub dg: u64,
    pub dbeta: u64,
    pub da: u64,
    pub d_a_log: u64,
    pub d_dt_bias: u64,
    pub d_logit: u64,
    pub partial: u64,
    pub tokens: i64,
    pub parts: i32,
    pub heads: i32,
    pub beta_scale: f32,
}
