//! Number formats, and the [`Policy`] that says which intermediate is kept in which.

mod format;
mod policy;

pub use format::Format;
pub use policy::{Accumulate, Intermediate, Policy, Product, ProductFormat, WriteForm};
