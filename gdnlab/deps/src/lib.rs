//! The heavy dependencies of `gdnlab`, re-exported from one dynamic library.
//!
//! Notebook cells are dynamic libraries of their own. If each of them linked polars and rayon statically, every
//! cell would take seconds to link and would own a thread pool. With this crate as a `dylib` they share one copy.
//! It holds no code of ours, so it is compiled once and stays.

pub use cudarc;
pub use gemm;
pub use libloading;
pub use plotters;
pub use polars;
pub use polars_io;
pub use pulp;
pub use rayon;
pub use resvg;
pub use statrs;
