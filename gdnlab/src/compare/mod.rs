//! Error metrics, the tolerances they are held to, and the report a person reads.
//!
//! [`compare`] measures one tensor, [`compare_call`] all that one call gave; [`tolerance`] is the one table of limits, and a
//! [`Report`] puts both together.

mod heads;
mod metrics;
mod report;
mod share;
mod sum;
mod tolerance;
mod truth;
mod yardstick;

#[cfg(test)]
mod tests;

pub use heads::HeadError;
pub use metrics::{Comparison, Worst, compare, compare_call, compare_results};
pub use report::{Report, Verdict};
pub use share::Share;
pub use tolerance::{Mode, TensorClass, Tolerance, mode, modes, tolerance};
pub use truth::check_truth;
