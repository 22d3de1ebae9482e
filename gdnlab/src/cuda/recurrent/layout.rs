//! How the recurrence is laid out over warps and blocks, and what memory its backward works in.

use crate::problem::{Op, Shape};
use std::ops::Range;

/// Tokens between two kept states of the backward.
pub(super) const SEGMENT: usize = 32;
/// Most warps in a block.
pub(super) const WARPS: usize = 8;
/// Lanes of a warp.
const LANES: usize = 32;

/// The split of one head's state `[K, V]`: a warp has `columns` of its columns, a lane of it `rows` of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub rows: usize,
    pub columns: usize,
    /// Groups of `columns` columns that V has.
    pub groups: usize,
    /// Warps in a block, one for each group.
    pub warps: usize,
    /// Blocks for one head of one sequence.
    pub blocks: usize,
    key_dim: usize,
    op: Op,
    number_bytes: usize,
}

/// The part of a problem that one launch works on: `heads` of `sequences`, whose tokens are `tokens`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub sequences: Range<usize>,
    pub tokens: Range<usize>,
    pub heads: Range<usize>,
}

/// Numbers in each part of the backward's workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Workspace {
    /// A state every [`SEGMENT`] tokens.
    pub kept: usize,
    /// The states of one segment of every sequence and head.
    pub states: usize,
    /// Sums over the columns of a warp, of one segment of every sequence and head.
    pub vectors: usize,
    /// Sums over the columns of a block: dq and dk each.
    pub vector_sums: usize,
    /// The same for g and for the erase gate each.
    pub gate_sums: usize,
}

impl Layout {
    /// For numbers of `number_bytes`: 4 or 8.
    pub fn new(shape: &Shape, op: Op, number_bytes: usize) -> Self {
        let rows = shape.key_dim.div_ceil(LANES);
        let columns = columns(rows, op, number_bytes);
        let groups = shape.value_dim.div_ceil(columns);
        let warps = groups.min(WARPS);
        let blocks = groups.div_ceil(warps);
        Self { rows, columns, groups, warps, blocks, key_dim: shape.key_dim, op, number_bytes }
    }

    /// Threads of a block.
    pub fn threads(&self) -> usize {
        self.warps * LANES
    }

    /// Numbers of g of one token and head.
    pub fn gate_width(&self) -> usize {
        match self.op {
            Op::Gdn => 1,
            Op::Gdn2 => self.key_dim,
        }
    }

    /// Vectors of K numbers that are summed over warps: dq, dk, and for GDN-2 db and dg.
    fn vectors(&self) -> usize {
        match self.op {
            Op::Gdn => 2,
            Op::Gdn2 => 4,
        }
    }

    /// The workspace of `heads` heads of `sequences` sequences with `tokens` tokens together.
    pub fn workspace(&self, sequences: usize, tokens: usize, heads: usize) -> Workspace {
        let parts = product(&[heads, self.groups, self.rows * LANES]);
        // Each sequence has room for one state more than its whole segments: where its slots begin then follows from
        // the tokens and sequences before it.
        let slots = (tokens / SEGMENT).saturating_add(sequences);
        let sums = product(&[self.blocks, tokens, heads]);
        Workspace {
            kept: product(&[slots, parts, self.columns]),
            states: product(&[sequences, parts, self.columns, SEGMENT]),
            vectors: product(&[sequences, parts, self.vectors(), SEGMENT]),
            vector_sums: product(&[sums, self.key_dim]),
            gate_sums: product(&[sums, self.gate_width()]),
        }
    }

    fn workspace_bytes(&self, sequences: usize, tokens: usize, heads: usize) -> usize {
        let Workspace { kept, states, vectors, vector_sums, gate_sums } = self.workspace(sequences, tokens, heads);
        [kept, states, vectors, vector_sums, vector_sums, gate_sums, gate_sums]
            .into_iter()
            .fold(0, usize::saturating_add)
            .saturating_mul(self.number_bytes)
    }

    /// Splits a problem with these `sequences` on the token axis and `heads` value heads so that no part's workspace has
    /// more than `budget_bytes`, as far as whole sequences and heads allow. Heads of a part run side by side, so as many
    /// as fit are taken.
    pub fn batches(&self, sequences: &[Range<usize>], heads: usize, budget_bytes: usize) -> Vec<Batch> {
        let mut batches = Vec::new();
        let mut first = 0;
        while first < sequences.len() {
            let start = sequences[first].start;
            let fits = |end: usize| {
                let tokens = sequences[end - 1].end - start;
                self.workspace_bytes(end - first, tokens, 1) <= budget_bytes
            };
            let mut end = first + 1;
            while end < sequences.len() && fits(end + 1) {
                end += 1;
            }
            let tokens = start..sequences[end - 1].end;
            let per_head = self.workspace_bytes(end - first, tokens.len(), 1);
            let at_once = (budget_bytes / per_head.max(1)).clamp(1, heads);
            batches.extend((0..heads).step_by(at_once).map(|head| Batch {
                sequences: first..end,
                tokens: tokens.clone(),
                heads: head..heads.min(head + at_once),
            }));
            first = end;
        }
        batches
    }
}

impl Workspace {
    /// The workspace of `batch`.
    pub fn of(layout: &Layout, batch: &Batch) -> Self {
        layout.workspace(batch.sequences.len(), batch.tokens.len(), batch.heads.len())
    }
}

/// Columns of a warp: as many as the registers of a lane have room for, beside a state and its gradient.
fn columns(rows: usize, op: Op, number_bytes: usize) -> usize {
    match (number_bytes, rows, op) {
        (8, 7.., Op::Gdn2) => 1,
        (8, 5.., _) => 2,
        _ => 4,
    }
}

/// A product of sizes. What is too large for memory is refused where the memory is asked for.
fn product(sizes: &[usize]) -> usize {
    sizes.iter().fold(1, |product, &size| product.saturating_mul(size))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(key_dim: usize, value_dim: usize, op: Op, number_bytes: usize) -> Layout {
        Layout::new(&Shape::new(100, 2, key_dim, value_dim), op, number_bytes)
    }

    fn ranges(lengths: &[usize]) -> Vec<Range<usize>> {
        let mut end = 0;
        let mut next = |length: &usize| {
            end += length;
            end - length..end
        };
        lengths.iter().map(&mut next).collect()
    }

    #[test]
    fn every_column_belongs_to_one_warp() {
        for number_bytes in [4, 8] {
            for op in Op::ALL {
                for key_dim in [1, 32, 33, 128, 129, 193, 256] {
                    for value_dim in 1..=256 {
                        let Layout { rows, columns, groups, warps, blocks, .. } =
                            layout(key_dim, value_dim, op, number_bytes);
                        assert!(rows * LANES >= key_dim && (rows - 1) * LANES < key_dim);
                        assert!(groups * columns >= value_dim && (groups - 1) * columns < value_dim);
                        assert!(warps <= WARPS && blocks * warps >= groups && (blocks - 1) * warps < groups);
                    }
                }
            }
        }
    }

    #[test]
    fn a_long_head_needs_what_the_formulas_say() {
        let layout = layout(128, 128, Op::Gdn, 8);
        assert_eq!((layout.columns, layout.groups, layout.warps, layout.blocks), (4, 32, 8, 4));
        let state = 128 * 128;
        let workspace = layout.workspace(1, 65_536, 3);
        assert_eq!(workspace.kept, 3 * (65_536 / SEGMENT + 1) * state);
        assert_eq!(workspace.states, 3 * SEGMENT * state);
        assert_eq!(workspace.vectors, 3 * 32 * 2 * SEGMENT * 128);
        assert_eq!((workspace.vector_sums, workspace.gate_sums), (3 * 4 * 65_536 * 128, 3 * 4 * 65_536));
        let numbers = workspace.kept + workspace.states + workspace.vectors + 2 * (3 * 4 * 65_536 * 129);
        assert_eq!(layout.workspace_bytes(1, 65_536, 3), 8 * numbers);
    }

    #[test]
    fn slots_of_kept_states_do_not_overlap() {
        let sequences = ranges(&[0, 1, 31, 32, 33, 0, 64, 100, 7, 0]);
        // As the kernel numbers them.
        let mut taken = Vec::new();
        for (n, tokens) in sequences.iter().enumerate() {
            let first = tokens.start / SEGMENT + n;
            taken.extend((0..tokens.len()).step_by(SEGMENT).map(|t| first + t / SEGMENT));
        }
        assert!(taken.windows(2).all(|pair| pair[0] < pair[1]), "{taken:?}");
        let tokens = sequences[sequences.len() - 1].end;
        assert!(taken.iter().all(|&slot| slot < tokens / SEGMENT + sequences.len()));
    }

    #[test]
    fn batches_cover_each_head_of_each_sequence_once_within_the_budget() {
        let layout = layout(64, 96, Op::Gdn2, 4);
        let sequences = ranges(&[100, 0, 3000, 1, 1, 200, 0]);
        let heads = 5;
        let largest = layout.workspace_bytes(1, 3000, 1);
        for budget in [0, largest / 4, largest, 2 * largest, 3 * largest, usize::MAX] {
            let batches = layout.batches(&sequences, heads, budget);
            let mut seen = vec![0; sequences.len() * heads];
            for batch in &batches {
                let Batch { sequences: part, tokens, heads: some } = batch;
                assert_eq!(*tokens, sequences[part.start].start..sequences[part.end - 1].end);
                let bytes = layout.workspace_bytes(part.len(), tokens.len(), some.len());
                assert!(bytes <= budget || (part.len(), some.len()) == (1, 1), "{batch:?} in {budget}");
                for sequence in part.clone() {
                    some.clone().for_each(|head| seen[sequence * heads + head] += 1);
                }
            }
            assert!(seen.iter().all(|&count| count == 1), "{seen:?} in {budget}");
        }
        assert_eq!(layout.batches(&sequences, heads, usize::MAX).len(), 1);
        assert_eq!(layout.batches(&sequences, heads, 0).len(), sequences.len() * heads);
        assert!(layout.batches(&[], heads, 0).is_empty());
    }
}
