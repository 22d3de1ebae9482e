//! Tokens of a language model under a kernel.

use serde::{Deserialize, Serialize};

/// What of tokens was asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Experiment {
    /// Every position of a text, which is read whatever a kernel would have said.
    #[default]
    Forced,
    /// Texts that are decoded greedily.
    Greedy,
    /// The token after a prompt that is padded.
    Padding,
}

/// How often another kernel than the exact recurrence makes another token the most likely one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenFlips {
    /// What was asked.
    pub experiment: Experiment,
    /// The model: its sizes and how far it was trained.
    #[serde(default)]
    pub model: String,
    /// Positions or prompts.
    pub positions: u64,
    /// Those where the token, or the decoded text, is another.
    pub flips: u64,
    /// Their share.
    pub flip_rate: f64,
    /// Lower end of its 95 % interval, by Clopper and Pearson.
    pub flip_rate_low: f64,
    /// Upper end.
    pub flip_rate_high: f64,
    /// Median relative error of a row of the recurrence's output on this model's inputs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rel_rms: Option<f64>,
    /// RMS change of the difference of the two largest exact logits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shift_rms: Option<f64>,
    /// Largest change of that, or with padding of any logit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shift_max: Option<f64>,
    /// Median difference of the two largest exact logits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin_median: Option<f64>,
    /// Rate of flips that the density of margins at 0 and `shift_rms` foretell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected_rate: Option<f64>,
    /// Tokens that were decoded after each prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoded: Option<usize>,
    /// Mean number of them before the first that differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub same_tokens: Option<f64>,
    /// Where padding stands: none, right, left-marked or left-read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub padding: Option<String>,
    /// Share of prompts at which the recurrence gives the same bits when padding is cut off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub same_bits: Option<f64>,
}
