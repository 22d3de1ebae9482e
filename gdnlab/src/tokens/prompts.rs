//! Rows of text that a model reads.

use crate::model::text::Text;
use crate::{Error, Result};

/// The byte that fills prompts up: a line's end, which text of any kind has.
pub const PAD: u32 = b'\n' as u32;

/// `B` rows of equal length, row by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompts {
    /// All tokens.
    pub tokens: Vec<u32>,
    /// `B`.
    pub rows: usize,
}

impl Prompts {
    /// `rows` windows of `length` bytes, spread evenly over the part of `text` that was kept from training.
    ///
    /// # Errors
    /// [`Error::Input`] where that part is shorter than a window, and for no row or length.
    pub fn of_text(text: &Text, rows: usize, length: usize) -> Result<Self> {
        let Some(shorter) = length.checked_sub(1).filter(|_| rows > 0) else {
            return Err(Error::input(format!("{rows} prompts of {length} bytes: expected at least one of each")));
        };
        Ok(Self { tokens: text.validation_batch(rows, shorter)?, rows })
    }

    /// Tokens of a row.
    pub fn length(&self) -> usize {
        self.tokens.len() / self.rows.max(1)
    }

    /// Each row.
    pub fn iter(&self) -> impl Iterator<Item = &[u32]> {
        self.tokens.chunks_exact(self.length().max(1))
    }
}
