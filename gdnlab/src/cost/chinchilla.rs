//! How much text a model needs for the least loss that its FLOPs can buy, and how long training on it takes.
//!
//! Hoffmann et al. 2022 ("Training Compute-Optimal Large Language Models") find about 20 tokens per parameter.

/// Tokens per parameter.
pub const TOKENS_PER_PARAMETER: f64 = 20.0;

/// A compute-optimal run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Run {
    /// Tokens to train on, `20 N`.
    pub tokens: f64,
    /// Hours that this takes, `20 N / (3600 tok/s)`.
    pub hours: f64,
}

impl Run {
    /// A model of `parameters`, trained at `tok_per_s`. Which parameters count is for the caller to say: the post
    /// "Research Sprint Day 2" gives one row for the body and one for all.
    pub fn new(parameters: u64, tok_per_s: f64) -> Self {
        let tokens = TOKENS_PER_PARAMETER * parameters as f64;
        Self { tokens, hours: tokens / tok_per_s / 3600.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_takes_its_tokens_over_the_rate() {
        assert_eq!(Run::new(36_000_000, 100_000.0), Run { tokens: 720e6, hours: 2.0 });
    }
}
