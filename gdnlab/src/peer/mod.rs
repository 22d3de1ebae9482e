//! Other people's kernels: tensor files in and out, and [`Peer`], which runs them in the user's Python.
//!
//! A *case* is a safetensors file with the inputs of one call, a *result* one with what a kernel made of them.
//!
//! | file | tensors |
//! |---|---|
//! | case | `q`, `k` `[B, T, HK, K]`; `v` `[B, T, HV, V]`; GDN: `g`, `beta` `[B, T, HV]`; GDN-2: `g`, `b` `[B, T, HV, K]`, `w` `[B, T, HV, V]`; optional `initial_state`, `dht` `[N, HV, K, V]`, `do` `[B, T, HV, V]`, `cu_seqlens` `[N + 1]` (then `B = 1`), `scale` `[1]` |
//! | result | `o`, `final_state`, `dq`, `dk`, `dv`, `dg`, `dbeta` or `db` and `dw`, `dh0` |
//!
//! Values are f64, f32, f16 or bf16, `cu_seqlens` is i32 or i64. The names tell the operator; a metadata entry `op`
//! (`gdn` or `gdn2`) must agree with them where it is present.

mod bridge;
mod case;
pub(crate) mod file;
mod kernel;
mod results;
mod write;

#[cfg(test)]
mod tests;

pub use bridge::About;
pub use case::{Case, read_case, write_case};
pub use kernel::{Peer, PeerOptions, PeerSamples, PeerTiming};
pub use results::{ResultFile, read_results, write_results};
pub use write::{Destination, remove_unfinished};
pub(crate) use write::{Numbers, Stored};
