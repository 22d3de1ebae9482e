//! Day 3's experiment: which intermediate of the chunk form of GDN-2 may be rounded, and what a wider one costs.
//!
//! The inputs are those of the request for comments on GDN-2's intermediate precision, as far as they are known: almost
//! collinear keys `k ~ 10 N(0, 1) - 50` and queries `q ~ N(0, 1) + 1` in bf16, normalised; decays bounded by -5. See
//! [`Regime::Correlated`](crate::inputs::Regime::Correlated).
//!
//! [`trials_of_steps`] rounds one intermediate at a time in an otherwise float64 chunk algebra, [`trials_of_diagnosis`]
//! repeats what was tried on a GPU, and [`search`] goes through the ways to keep the intermediates. All of them are lists
//! of [`Trial`], which [`run`] measures against the float64 recurrence.

mod choice;
mod diagnosis;
mod judge;
pub mod search;
mod setting;
mod steps;
mod trial;

pub use choice::{Choice, Slot};
pub use diagnosis::{DIAGNOSIS, trials_of_diagnosis};
pub use judge::{Judged, Proposal, cheapest, choices_of, front, judge, most_accurate, proposal, proposals};
pub use setting::{Normalisation, Setting};
pub use steps::{ALGEBRA, EVERYTHING, FORMATS, FORWARD, trials_of_steps};
pub use trial::{Finished, Tensors, Trial, measure, run};

/// The relative RMS error that the test of GDN-2 allows its output.
pub const THRESHOLD: f64 = 0.008;

#[cfg(test)]
mod tests;
