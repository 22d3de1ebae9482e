//! What every notebook has in scope from its first cell: `use gdnlab::prelude::*;`.
//!
//! The crate's own vocabulary, and polars for tables.

pub use crate::chunked::Chunked;
pub use crate::compare::{Comparison, compare, compare_results};
pub use crate::figure::{Emulation, Figure, Rows};
pub use crate::inputs::{Regime, generate};
pub use crate::kernel::{Kernel, kernel, kernels};
pub use crate::model::config::{Mixer, ModelConfig, Size};
pub use crate::notebook::{
    OnGpu, Recorded, Show, numerics_on_gpu, progress_lines, recorded_on_gpu, records_on_gpu, show_tables,
};
pub use crate::precision::{Format, Policy};
pub use crate::problem::{Gates, Inputs, Op, Results, Shape, Tensor};
pub use crate::reference::Reference;
pub use crate::{Error, Result, backends, bench, cost, figure, model, numerics, record, rounding, table, tokens};
pub use crate::{bias, cp, determinism, distribution, noise};
pub use gdnlab_deps::polars::prelude::*;
pub use gdnlab_deps::{plotters, polars};
