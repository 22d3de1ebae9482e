//! What one rank has, as calls of a kernel.

use super::cut::Part;
use super::slice::{Piece, select};
use crate::problem::Inputs;

/// What a part falls into, by what they wait for.
pub(super) struct Calls {
    /// The first piece, where it began at another rank and ends here.
    pub entering: Option<Inputs>,
    /// Sequences that are here as a whole.
    pub free: Option<Inputs>,
    /// The last piece, where it begins here and goes on at another rank.
    pub leaving: Option<Inputs>,
    /// The only piece, where it does neither.
    pub spanned: Option<Inputs>,
}

impl Calls {
    pub fn of(part: &Part, inputs: &Inputs) -> Self {
        if part.is_spanned() {
            return Self { entering: None, free: None, leaving: None, spanned: Some(inputs.clone()) };
        }
        let pieces = local_pieces(&part.pieces);
        let first = usize::from(part.from.is_some());
        let last = pieces.len() - usize::from(part.to.is_some());
        let call = |pieces: &[Piece]| (!pieces.is_empty()).then(|| select(inputs, pieces));
        Self {
            entering: call(&pieces[..first]),
            free: call(&pieces[first..last]),
            leaving: call(&pieces[last..]),
            spanned: None,
        }
    }

    /// Takes what is free and what leaves, as one call: both begin here, so that a forward can run them at once.
    pub fn take_own(&mut self, part: &Part, inputs: &Inputs) -> Option<Inputs> {
        if self.free.is_none() || self.leaving.is_none() {
            return self.free.take().or_else(|| self.leaving.take());
        }
        let local = local_pieces(&part.pieces);
        let first = local.iter().position(|piece| piece.begins).unwrap_or_default();
        Some(select(inputs, &local[first..]))
    }
}

/// The pieces of a rank, counted in its own sequences and tokens.
fn local_pieces(pieces: &[Piece]) -> Vec<Piece> {
    let start = pieces.first().map_or(0, |piece| piece.tokens.start);
    let local = |(sequence, piece): (usize, &Piece)| Piece {
        sequence,
        tokens: piece.tokens.start - start..piece.tokens.end - start,
        ..piece.clone()
    };
    pieces.iter().enumerate().map(local).collect()
}
