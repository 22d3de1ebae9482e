//! Greedy decoding: a kernel reads the prompt and every token that it chose itself.

use super::{Prompts, argmax, flips};
use crate::Result;
use crate::compare::Share;
use crate::kernel::Kernel;
use crate::model::Model;
use crate::model::infer::{Reader, Tokens};
use crate::record::{Experiment, TokenFlips};

/// What was decoded: `count` tokens for each prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// Row by row.
    pub tokens: Vec<Vec<u32>>,
}

impl Decoded {
    /// How many tokens of each row agree with `other` before the first that does not.
    pub fn agreeing(&self, other: &Self) -> Vec<usize> {
        let rows = self.tokens.iter().zip(&other.tokens);
        rows.map(|(a, b)| a.iter().zip(b).take_while(|(a, b)| a == b).count()).collect()
    }
}

/// The `count` tokens after each prompt that are most likely one after the other, with `kernel` in every layer.
///
/// # Errors
/// What the model or the kernel reports.
pub fn decode(model: &Model, prompts: &Prompts, count: usize, kernel: &dyn Kernel) -> Result<Decoded> {
    let mut reader = Reader::new(model, prompts.rows)?;
    let mut logits = reader.read_last(Tokens::new(&prompts.tokens), kernel)?;
    let mut rows = vec![Vec::with_capacity(count); prompts.rows];
    for done in 1..=count {
        let vocabulary = model.config().vocabulary;
        let next: Vec<u32> = logits.data.chunks_exact(vocabulary).map(|row| argmax(row) as u32).collect();
        rows.iter_mut().zip(&next).for_each(|(row, token)| row.push(*token));
        if done < count {
            logits = reader.read_last(Tokens::new(&next), kernel)?;
        }
    }
    Ok(Decoded { tokens: rows })
}

/// Decodes as many tokens after each prompt with `kernel` as `exact` has, which is what [`decode`] gives with the exact
/// recurrence. A flip is a prompt whose texts differ; `same_tokens` is the mean number of tokens before they do.
///
/// # Errors
/// As [`decode`].
pub fn greedy(model: &Model, prompts: &Prompts, exact: &Decoded, kernel: &dyn Kernel) -> Result<TokenFlips> {
    let count = exact.tokens.first().map_or(0, Vec::len);
    let agreeing = exact.agreeing(&decode(model, prompts, count, kernel)?);
    let differing = agreeing.iter().filter(|same| **same < count).count() as u64;
    let mean = agreeing.iter().sum::<usize>() as f64 / agreeing.len().max(1) as f64;
    Ok(TokenFlips {
        decoded: Some(count),
        same_tokens: Some(mean),
        ..flips(Experiment::Greedy, Share { count: differing, of: agreeing.len() as u64 })
    })
}
