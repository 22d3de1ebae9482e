//! What is uploaded before each step: tokens, where they go, and the numbers of the optimizer. It is one array of 32-bit words.

use super::sizes::Sizes;
use crate::cuda::Buffer;
use crate::cuda::layers::{ByToken, OptimizerStep, View};
use crate::model::adamw::AdamW;
use crate::{Error, Result};

/// What each part begins at a multiple of, in words.
const ALIGNMENT: usize = 4;
/// Words of the numbers of the optimizer.
const STEP_WORDS: usize = size_of::<OptimizerStep>() / size_of::<u32>();

/// The inputs of a step on the GPU.
#[derive(Clone, Copy)]
pub(super) struct Inputs {
    /// The tokens that are read, `[rows]`.
    pub tokens: View<i32>,
    /// The tokens that are predicted, `[rows]`.
    pub targets: View<i32>,
    /// Rows by token.
    pub order: View<i32>,
    /// Where the rows of each token begin, `[vocabulary + 1]`.
    pub starts: View<i32>,
    pub step: View<OptimizerStep>,
}

/// First word of each part, and words of all.
fn places(sizes: &Sizes) -> ([usize; 5], usize) {
    let rows = sizes.rows();
    let (mut next, mut first) = (0, [0; 5]);
    for (place, words) in first.iter_mut().zip([rows, rows, rows, sizes.config.vocabulary + 1, STEP_WORDS]) {
        *place = next;
        next += words.next_multiple_of(ALIGNMENT);
    }
    (first, next)
}

impl Inputs {
    /// Words of the array.
    pub fn words(sizes: &Sizes) -> usize {
        places(sizes).1
    }

    /// The parts of `buffer`, which has [`Inputs::words`] words.
    pub fn of(buffer: &Buffer<u32>, sizes: &Sizes) -> Self {
        let ([tokens, targets, order, starts, step], _) = places(sizes);
        let address = |first: usize| buffer.address() + (first * size_of::<u32>()) as u64;
        let rows = sizes.rows();
        Self {
            tokens: View::at(address(tokens), rows),
            targets: View::at(address(targets), rows),
            order: View::at(address(order), rows),
            starts: View::at(address(starts), sizes.config.vocabulary + 1),
            step: View::at(address(step), 1),
        }
    }

    /// The array for `B` rows of `T + 1` tokens, of which the first `T` are read and the last `T` predicted.
    ///
    /// # Errors
    /// [`Error::Input`] where there are not so many tokens, or one is not in the vocabulary.
    pub fn pack(sizes: &Sizes, tokens: &[u32], step: &OptimizerStep) -> Result<Vec<u32>> {
        let (length, vocabulary) = (sizes.batch.tokens, sizes.config.vocabulary);
        if tokens.len() != sizes.batch.sequences * (length + 1) {
            return Err(Error::input(format!(
                "{} tokens for a step of {}: expected B (T + 1), since the last token of each row is a target alone",
                tokens.len(),
                sizes.batch
            )));
        }
        let rows = || tokens.chunks_exact(length + 1);
        let read: Vec<u32> = rows().flat_map(|row| &row[..length]).copied().collect();
        let predicted: Vec<u32> = rows().flat_map(|row| &row[1..]).copied().collect();
        if let Some((n, token)) = predicted.iter().enumerate().find(|(_, token)| **token as usize >= vocabulary) {
            return Err(Error::input(format!(
                "target {n} is {token}: expected tokens below {vocabulary}, the vocabulary's size"
            )));
        }
        let ByToken { order, starts } = ByToken::new(&read, vocabulary)?;
        let (first, words) = places(sizes);
        let mut all = vec![0; words];
        let mut put = |first: usize, part: &mut dyn Iterator<Item = u32>| {
            all[first..].iter_mut().zip(part).for_each(|(word, x)| *word = x);
        };
        put(first[0], &mut read.iter().copied());
        put(first[1], &mut predicted.iter().copied());
        put(first[2], &mut order.iter().map(|&row| row as u32));
        put(first[3], &mut starts.iter().map(|&start| start as u32));
        put(first[4], &mut words_of(step).into_iter());
        Ok(all)
    }
}

/// The numbers of step `t`, counted from 1, at this learning rate.
pub(super) fn optimizer_step(optimizer: &AdamW, rate: f64, t: u64) -> OptimizerStep {
    let AdamW { beta1, beta2, eps, decay, clip } = *optimizer;
    let correction = |beta: f64| (1.0 / (1.0 - beta.powf(t as f64))) as f32;
    OptimizerStep {
        rate: rate as f32,
        decay: (rate * decay) as f32,
        correction1: correction(beta1),
        correction2: correction(beta2),
        beta1: beta1 as f32,
        rest1: (1.0 - beta1) as f32,
        beta2: beta2 as f32,
        rest2: (1.0 - beta2) as f32,
        eps: eps as f32,
        clip: clip as f32,
    }
}

fn words_of(step: &OptimizerStep) -> [u32; STEP_WORDS] {
    let OptimizerStep { rate, decay, correction1, correction2, beta1, rest1, beta2, rest2, eps, clip } = *step;
    [rate, decay, correction1, correction2, beta1, rest1, beta2, rest2, eps, clip].map(f32::to_bits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::model::Batch;
    use crate::model::config::{Mixer, ModelConfig, Size};

    fn sizes() -> Sizes {
        let config = ModelConfig { vocabulary: 8, ..ModelConfig::preset(Mixer::Gdn, Size::Tiny) };
        Sizes { config, batch: Batch { sequences: 2, tokens: 3 }, logit_rows: 4 }
    }

    #[test]
    fn a_step_is_packed_part_by_part() {
        let step = optimizer_step(&AdamW::default(), 0.5, 2);
        let all = Inputs::pack(&sizes(), &[1, 2, 3, 4, 5, 1, 0, 7], &step).unwrap();
        assert_eq!(all.len(), Inputs::words(&sizes()));
        assert_eq!(all[..6], [1, 2, 3, 5, 1, 0]);
        assert_eq!(all[8..14], [2, 3, 4, 1, 0, 7]);
        assert_eq!(all[16..22], [5, 0, 4, 1, 2, 3]);
        assert_eq!(all[24..33], [0, 1, 3, 4, 5, 5, 6, 6, 6]);
        let numbers: Vec<f32> = all[36..46].iter().map(|&word| f32::from_bits(word)).collect();
        assert_eq!(numbers[..3], [0.5, 0.05, (1.0 / 0.19) as f32]);
        assert_eq!(numbers[8..], [1e-8, 1.0]);
    }

    #[test]
    fn foreign_tokens_are_refused() {
        let step = optimizer_step(&AdamW::default(), 0.5, 1);
        let refused = |tokens: &[u32]| Inputs::pack(&sizes(), tokens, &step).unwrap_err().to_string();
        assert!(refused(&[1; 6]).contains("6 tokens for a step of B = 2, T = 3"));
        assert!(refused(&[1, 1, 1, 8, 1, 1, 1, 1]).contains("target 2 is 8: expected tokens below 8"));
        assert!(refused(&[8, 1, 1, 1, 1, 1, 1, 1]).contains("token 0 is 8"));
    }
}
