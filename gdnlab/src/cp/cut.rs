//! Where a call is cut over ranks, and what each rank has of it.

use super::slice::{Piece, select, zero_states};
use crate::problem::{Inputs, Results, Tensor};
use crate::{Error, Result};
use std::fmt;
use std::ops::Range;

/// The borders of the ranks on the flattened token axis `B * T`: rank `r` has the tokens from border `r` to border `r + 1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut(Vec<usize>);

impl Cut {
    /// `tokens` in parts for `ranks` ranks whose lengths differ by one at the most.
    ///
    /// # Errors
    /// [`Error::Input`] for no rank.
    pub fn even(tokens: usize, ranks: usize) -> Result<Self> {
        Self::aligned(tokens, ranks, 1)
    }

    /// The same with borders at multiples of `multiple` tokens, such as the tokens of a chunk.
    ///
    /// # Errors
    /// [`Error::Input`] for no rank, or a multiple of 0.
    pub fn aligned(tokens: usize, ranks: usize, multiple: usize) -> Result<Self> {
        if ranks == 0 || multiple == 0 {
            return Err(Error::input(format!("{ranks} ranks at multiples of {multiple}: expected at least 1 of each")));
        }
        let units = tokens.div_ceil(multiple);
        Self::at((0..=ranks).map(|rank| (rank * units / ranks * multiple).min(tokens)).collect())
    }

    /// Borders at will; ranks may be empty.
    ///
    /// # Errors
    /// [`Error::Input`] where they do not begin at 0, go back, or name no rank.
    pub fn at(borders: Vec<usize>) -> Result<Self> {
        if borders.len() < 2 || borders[0] != 0 || borders.windows(2).any(|pair| pair[0] > pair[1]) {
            return Err(Error::input(format!(
                "borders {borders:?}: expected one more than ranks, from 0 to the number of tokens, none below the one before"
            )));
        }
        Ok(Self(borders))
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.0.len() - 1
    }

    /// The borders, one more than ranks.
    pub fn borders(&self) -> &[usize] {
        &self.0
    }

    /// Tokens of a rank.
    pub fn tokens(&self, rank: usize) -> Range<usize> {
        self.0[rank]..self.0[rank + 1]
    }

    /// The ranks that hand on the state of a sequence, which goes on at another rank.
    pub fn crossings(&self, inputs: &Inputs) -> usize {
        self.pieces(inputs).iter().filter(|pieces| pieces.last().is_some_and(|piece| !piece.ends)).count()
    }

    /// What each rank has of each sequence, in their order. A sequence without tokens belongs to the rank of the token that
    /// comes next, or of the last token.
    pub(super) fn pieces(&self, inputs: &Inputs) -> Vec<Vec<Piece>> {
        let sequences = inputs.sequence_ranges();
        let holds = |at: usize| (0..self.ranks()).find(|&rank| self.tokens(rank).contains(&at));
        let last = (0..self.ranks()).rev().find(|&rank| !self.tokens(rank).is_empty()).unwrap_or(0);
        let piece = |rank: usize, (sequence, of): (usize, &Range<usize>)| {
            let own = self.tokens(rank);
            if of.is_empty() {
                let home = holds(of.start).unwrap_or(last);
                return (home == rank).then(|| Piece { sequence, tokens: of.clone(), begins: true, ends: true });
            }
            let tokens = of.start.max(own.start)..of.end.min(own.end);
            let (begins, ends) = (of.start >= own.start, of.end <= own.end);
            (!tokens.is_empty()).then_some(Piece { sequence, tokens, begins, ends })
        };
        (0..self.ranks())
            .map(|rank| sequences.iter().enumerate().filter_map(|sequence| piece(rank, sequence)).collect())
            .collect()
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lengths: Vec<String> = (0..self.ranks()).map(|rank| self.tokens(rank).len().to_string()).collect();
        f.write_str(&lengths.join("+"))
    }
}

/// What one rank has of a call: its tokens as a call of their own, and the ranks that it is joined with by a state.
#[derive(Clone, Debug)]
pub struct Part {
    /// Its tokens, `B = 1`, `N` pieces of sequences; none where it has neither tokens nor sequences. An initial state or a
    /// gradient of a final state that another rank has, or makes, is zero here.
    pub inputs: Option<Inputs>,
    /// The rank that has the tokens before the first piece, where that sequence began there.
    pub from: Option<usize>,
    /// The rank that has the tokens after the last piece, where that sequence goes on there.
    pub to: Option<usize>,
    pub(super) pieces: Vec<Piece>,
}

impl Part {
    /// The part of `rank`.
    ///
    /// # Errors
    /// [`Error::Input`] where the cut is of another number of tokens, or has no such rank.
    pub fn of(inputs: &Inputs, cut: &Cut, rank: usize) -> Result<Self> {
        let (tokens, borders) = (inputs.shape.batch * inputs.shape.tokens, cut.borders());
        if borders.last() != Some(&tokens) || rank >= cut.ranks() {
            return Err(Error::input(format!(
                "rank {rank} of a cut into {cut}: expected one of {} ranks and {tokens} tokens together",
                cut.ranks()
            )));
        }
        let mut all = cut.pieces(inputs);
        let with_tokens = |rank: &usize| !cut.tokens(*rank).is_empty();
        let pieces = all.swap_remove(rank);
        let from = pieces.first().filter(|piece| !piece.begins).and_then(|_| (0..rank).rev().find(with_tokens));
        let to = pieces.last().filter(|piece| !piece.ends).and_then(|_| (rank + 1..cut.ranks()).find(with_tokens));
        let part = (!pieces.is_empty()).then(|| {
            let mut part = select(inputs, &pieces);
            zero_states(&mut part.initial_state, pieces.iter().map(|piece| piece.begins));
            zero_states(&mut part.d_final_state, pieces.iter().map(|piece| piece.ends));
            part
        });
        Ok(Self { inputs: part, from, to, pieces })
    }

    /// Whether one sequence fills it that began before and goes on after it.
    pub fn is_spanned(&self) -> bool {
        self.pieces.len() == 1 && self.from.is_some() && self.to.is_some()
    }
}

/// The results of all ranks in the shape of the whole call. A final state comes from the rank with the last token of its
/// sequence, the gradient of an initial state from that with the first.
///
/// # Errors
/// [`Error::Input`] where the parts are not those of the cut.
pub fn gather(inputs: &Inputs, cut: &Cut, parts: &[Option<Results>]) -> Result<Results> {
    let pieces = cut.pieces(inputs);
    let fits = |(pieces, part): (&Vec<Piece>, &Option<Results>)| pieces.is_empty() == part.is_none();
    if pieces.len() != parts.len() || !pieces.iter().zip(parts).all(fits) {
        return Err(Error::input(format!(
            "{} results: expected one of each rank of {cut} that has tokens",
            parts.len()
        )));
    }
    let present: Vec<&Results> = parts.iter().flatten().collect();
    let mut whole = super::slice::join(&present)?;
    let shape = &inputs.shape;
    for (name, tensor) in super::slice::named_mut(&mut whole) {
        if matches!(name, "final_state" | "dh0") {
            let keeps = |piece: &Piece| if name == "dh0" { piece.begins } else { piece.ends };
            *tensor = chosen(tensor, pieces.iter().flatten().map(keeps));
        } else {
            (tensor.dims[0], tensor.dims[1]) = (shape.batch, shape.tokens);
        }
    }
    Ok(whole)
}

/// The states that are `kept`.
fn chosen(states: &Tensor, kept: impl Iterator<Item = bool>) -> Tensor {
    let size: usize = states.dims[1..].iter().product();
    let rows = states.data.chunks_exact(size.max(1)).zip(kept).filter(|(_, kept)| *kept);
    let data: Vec<f64> = rows.flat_map(|(row, _)| row.iter().copied()).collect();
    let mut dims = states.dims.clone();
    dims[0] = data.len() / size.max(1);
    Tensor { dims, data }
}
