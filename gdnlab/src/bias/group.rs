//! Groups of elements.

use std::fmt;

/// Tokens of a chunk, as the chunk kernels have them.
pub(super) const CHUNK: usize = 64;
/// Parts that a chunk, a sequence and a range of magnitudes are cut into.
pub(super) const PARTS: usize = 8;

/// Elements that have something in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// All of the tensor.
    All,
    /// Those of one head.
    Head(usize),
    /// Those in one eighth of a chunk of 64 tokens, counted from 0.
    InChunk(usize),
    /// Those in one eighth of the sequence.
    InSequence(usize),
    /// Those whose truth is in one eighth of the magnitudes, the smallest first.
    Magnitude(usize),
}

impl Group {
    /// What kind of group it is, for tables.
    pub fn kind(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Head(_) => "head",
            Self::InChunk(_) => "position in the chunk",
            Self::InSequence(_) => "position in the sequence",
            Self::Magnitude(_) => "magnitude",
        }
    }

    /// Which one of its kind.
    pub fn index(self) -> usize {
        match self {
            Self::All => 0,
            Self::Head(index) | Self::InChunk(index) | Self::InSequence(index) | Self::Magnitude(index) => index,
        }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Head(head) => write!(f, "head {head}"),
            Self::InChunk(part) => {
                let width = CHUNK / PARTS;
                write!(f, "tokens {} to {} of a chunk", part * width, (part + 1) * width - 1)
            }
            Self::InSequence(part) => write!(f, "eighth {} of the sequence", part + 1),
            Self::Magnitude(part) => write!(f, "eighth {} of the magnitudes", part + 1),
        }
    }
}

/// Which group of each kind an element is in.
pub(super) struct Groups {
    heads: usize,
    tokens: Option<usize>,
    /// Magnitudes at which the next eighth begins.
    edges: Vec<f64>,
}

impl Groups {
    /// Of a tensor with `heads` heads and, unless it is a state, `tokens` tokens, and the truth `truth`.
    pub fn new(heads: usize, tokens: Option<usize>, truth: &[f64]) -> Self {
        // Quantiles of a sample are as good as any edges.
        const SAMPLE: usize = 1 << 14;
        let stride = truth.len().div_ceil(SAMPLE).max(1) | 1;
        let mut sample: Vec<f64> = truth.iter().step_by(stride).map(|r| r.abs()).collect();
        sample.sort_by(f64::total_cmp);
        let edge = |part: usize| sample.get(part * sample.len() / PARTS).copied().unwrap_or(f64::INFINITY);
        Self { heads, tokens, edges: (1..PARTS).map(edge).collect() }
    }

    /// All groups.
    pub fn all(&self) -> Vec<Group> {
        let mut all = vec![Group::All];
        all.extend((0..self.heads).map(Group::Head));
        if self.tokens.is_some() {
            all.extend((0..PARTS).map(Group::InChunk));
            all.extend((0..PARTS).map(Group::InSequence));
        }
        all.extend((0..PARTS).map(Group::Magnitude));
        all
    }

    /// Positions in [`Groups::all`] of the groups of an element of `head` at `token` whose truth is `r`.
    pub fn of(&self, head: usize, token: usize, r: f64) -> impl Iterator<Item = usize> {
        let magnitude = self.edges.partition_point(|edge| *edge <= r.abs());
        let first = 1 + self.heads;
        let (positions, last) = match self.tokens {
            None => ([None; 2], first),
            Some(tokens) => {
                let in_chunk = token % CHUNK * PARTS / CHUNK;
                let in_sequence = token * PARTS / tokens.max(1);
                ([Some(first + in_chunk), Some(first + PARTS + in_sequence)], first + 2 * PARTS)
            }
        };
        [Some(0), Some(1 + head)].into_iter().chain(positions).chain([Some(last + magnitude)]).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_in_one_group_of_each_kind() {
        let truth: Vec<f64> = (0..800).map(|n| f64::from(n) - 400.0).collect();
        for tokens in [None, Some(100)] {
            let groups = Groups::new(3, tokens, &truth);
            let all = groups.all();
            for (at, &r) in truth.iter().enumerate() {
                let of: Vec<Group> = groups.of(at % 3, at % 100, r).map(|group| all[group]).collect();
                let kinds: Vec<&str> = of.iter().map(|group| group.kind()).collect();
                let expected = match tokens {
                    None => vec!["all", "head", "magnitude"],
                    Some(_) => vec!["all", "head", "position in the chunk", "position in the sequence", "magnitude"],
                };
                assert_eq!(kinds, expected);
                assert_eq!(of[1], Group::Head(at % 3));
                if tokens.is_some() {
                    assert_eq!(of[2], Group::InChunk(at % 100 % 64 / 8));
                    assert_eq!(of[3], Group::InSequence(at % 100 * 8 / 100));
                }
            }
            let last = |r: f64| groups.of(0, 0, r).last().map(|at| all[at]);
            let in_eighth = |part| truth.iter().filter(|r| last(**r) == Some(Group::Magnitude(part))).count();
            assert!((0..8).all(|part| (95..=105).contains(&in_eighth(part))));
        }
        assert_eq!(Group::InChunk(7).to_string(), "tokens 56 to 63 of a chunk");
    }
}
