//! Numbers that begin at the start of a cache line, so that no vector lies across two.

use std::ops::{Deref, DerefMut};

/// Numbers in a cache line, and in the widest vector of float64 there is.
pub(super) const LINE: usize = 8;

/// A fixed number of float64 values, aligned to a cache line.
pub(super) struct Aligned {
    data: Vec<f64>,
    first: usize,
    len: usize,
}

impl Aligned {
    pub(super) fn zeros(len: usize) -> Self {
        let data = vec![0.0; len + LINE];
        // An offset that cannot be found only costs speed.
        let first = data.as_ptr().align_offset(LINE * size_of::<f64>()).min(LINE);
        Self { data, first, len }
    }
}

impl Deref for Aligned {
    type Target = [f64];

    fn deref(&self) -> &[f64] {
        &self.data[self.first..self.first + self.len]
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [f64] {
        &mut self.data[self.first..self.first + self.len]
    }
}
