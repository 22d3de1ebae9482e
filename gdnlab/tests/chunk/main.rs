//! The chunk kernels of GDN on a GPU, against the float64 recurrence: `cargo test --test chunk -- --ignored --nocapture`
//! where there is one. Each case prints a line with the relative RMS error of each tensor.
//!
//! Results and workspace are filled with NaN before every run. Limits are those of the mode
//! ([`gdnlab::compare::tolerance`]); inputs that amplify the errors of every kernel are held to three times what the chunk
//! form errs on a CPU in the same precision ([`gdnlab::compare::Report::of_call`]).

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod accuracy;
mod case;
mod compile;
mod exact;
mod exponential;
mod extremes;
mod fused;
mod gates;
mod tolerance;

use gdnlab::cuda::Gpu;

/// The GPU, once all kernels of these tests are in the cache.
fn gpu() -> &'static Gpu {
    compile::once();
    Gpu::shared().unwrap()
}

/// Fails with all `complaints` at once, so that one run on a GPU shows everything.
fn expect_none(complaints: &[String]) {
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}
