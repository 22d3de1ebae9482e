//! Numerics and performance of Gated DeltaNet (GDN): float64 recurrences, the chunked form under a precision policy,
//! error metrics, measured records, tables and figures.
//!
//! Data flows one way: [`inputs`] -> ([`reference`](mod@reference) | [`chunked`] | [`cuda`] | [`peer`]) -> [`compare`] ->
//! [`record`] -> [`table`] -> [`figure`]; and times, beside [`cost`], from [`bench`](mod@bench) to [`record`]. Every
//! implementation of an operator stands behind [`kernel::Kernel`].
//!
//! The experiments of the days, which drive all that: [`numerics`] (Day 1), [`bench`](mod@bench) and [`model`] (Day 2),
//! [`rounding`] (Day 3), [`backends`] and [`tokens`] (Day 4), [`determinism`], [`bias`], [`distribution`] and [`noise`]
//! (Day 5); and [`cp`], a sequence over several ranks (Day 7).

#![warn(missing_docs)]

pub mod activation;
pub mod backends;
pub mod bench;
pub mod bias;
pub mod chunked;
pub mod compare;
pub mod cost;
pub mod cp;
pub mod cuda;
pub mod determinism;
pub mod distribution;
pub mod error;
pub mod figure;
mod file;
mod heads;
pub mod inputs;
pub mod kernel;
pub mod memory;
pub mod model;
pub mod noise;
pub mod notebook;
pub mod numerics;
pub mod peer;
pub mod precision;
pub mod prelude;
pub mod problem;
pub mod record;
pub mod reference;
pub mod rounding;
pub mod sweep;
pub mod table;
pub mod tokens;

pub use error::{Error, Result};
