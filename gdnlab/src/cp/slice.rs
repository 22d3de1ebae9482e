//! Pieces of sequences as calls of their own, and results put together again.

use crate::problem::{GateGrads, Gates, Grads, Inputs, Outputs, Results, Shape, Tensor};
use crate::{Error, Result};
use std::ops::Range;

/// What a rank has of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Which of the call's sequences.
    pub sequence: usize,
    /// Its tokens on the call's flattened token axis.
    pub tokens: Range<usize>,
    /// Whether the sequence's first token is among them.
    pub begins: bool,
    /// Whether its last token is.
    pub ends: bool,
}

/// Consecutive pieces of `inputs`, packed into one row. Each has the initial state, and the gradient of the final state, of
/// its sequence.
pub(super) fn select(inputs: &Inputs, pieces: &[Piece]) -> Inputs {
    let start = pieces.first().map_or(0, |piece| piece.tokens.start);
    let tokens = start..pieces.last().map_or(start, |piece| piece.tokens.end);
    let rows = |tensor: &Tensor| {
        let width: usize = tensor.dims[2..].iter().product();
        let dims = [&[1, tokens.len()], &tensor.dims[2..]].concat();
        Tensor { dims, data: tensor.data[tokens.start * width..tokens.end * width].to_vec() }
    };
    let states = |tensor: &Option<Tensor>| {
        tensor.as_ref().map(|tensor| {
            let size: usize = tensor.dims[1..].iter().product();
            let of = |piece: &Piece| &tensor.data[piece.sequence * size..(piece.sequence + 1) * size];
            let dims = [&[pieces.len()], &tensor.dims[1..]].concat();
            Tensor { dims, data: pieces.iter().flat_map(of).copied().collect() }
        })
    };
    let ends = pieces.iter().map(|piece| piece.tokens.end - start);
    Inputs {
        shape: Shape { batch: 1, tokens: tokens.len(), ..inputs.shape },
        cu_seqlens: Some(std::iter::once(0).chain(ends).collect()),
        scale: inputs.scale,
        dtype: inputs.dtype,
        q: rows(&inputs.q),
        k: rows(&inputs.k),
        v: rows(&inputs.v),
        gates: match &inputs.gates {
            Gates::Gdn { g, beta } => Gates::Gdn { g: rows(g), beta: rows(beta) },
            Gates::Gdn2 { g, b, w } => Gates::Gdn2 { g: rows(g), b: rows(b), w: rows(w) },
        },
        initial_state: states(&inputs.initial_state),
        d_o: inputs.d_o.as_ref().map(rows),
        d_final_state: states(&inputs.d_final_state),
    }
}

/// Sets those states to zero that are not `kept`.
pub(super) fn zero_states(states: &mut Option<Tensor>, kept: impl Iterator<Item = bool>) {
    let Some(states) = states else { return };
    let size: usize = states.dims[1..].iter().product();
    let rows = states.data.chunks_exact_mut(size.max(1)).zip(kept);
    rows.filter(|(_, kept)| !kept).for_each(|(row, _)| row.fill(0.0));
}

/// Results of consecutive pieces, one after the other.
///
/// # Errors
/// [`Error::Input`] without parts, or where some have gradients and others none.
pub(super) fn join(parts: &[&Results]) -> Result<Results> {
    let Some((first, rest)) = parts.split_first() else {
        return Err(Error::input("no results to put together: expected those of one rank at least"));
    };
    let mut whole = (*first).clone();
    for part in rest {
        let (into, from) = (named_mut(&mut whole), part.named());
        if into.len() != from.len() {
            return Err(Error::input("results with gradients and without: expected one kind"));
        }
        for ((name, into), (_, from)) in into.into_iter().zip(from) {
            let axis = usize::from(!matches!(name, "final_state" | "dh0"));
            into.dims[axis] += from.dims[axis];
            into.data.extend_from_slice(&from.data);
        }
    }
    Ok(whole)
}

/// Every tensor in the order of [`Results::named`], to change in place.
pub(super) fn named_mut(results: &mut Results) -> Vec<(&'static str, &mut Tensor)> {
    let Results { outputs: Outputs { o, final_state }, grads } = results;
    let mut all = vec![("o", o), ("final_state", final_state)];
    if let Some(Grads { dq, dk, dv, dg, gates, dh0 }) = grads {
        all.extend([("dq", dq), ("dk", dk), ("dv", dv), ("dg", dg)]);
        match gates {
            GateGrads::Gdn { dbeta } => all.push(("dbeta", dbeta)),
            GateGrads::Gdn2 { db, dw } => all.extend([("db", db), ("dw", dw)]),
        }
        all.push(("dh0", dh0));
    }
    all
}
