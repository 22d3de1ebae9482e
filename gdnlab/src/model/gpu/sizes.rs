//! Sizes of a step.

use crate::Result;
use crate::cost::model::Batch;
use crate::cuda::attention;
use crate::cuda::chunk;
use crate::cuda::layers::{ACCESS, ShortConvSizes};
use crate::model::config::{Mixer, ModelConfig};
use crate::model::layer::NORM_EPS;
use crate::precision::Format;
use crate::problem::{Inputs, Shape};
use std::ops::Range;

/// Columns of the matrix that the normed stream is multiplied by in a mixer: q | k | v, and in GDN gate | a | b, filled up so
/// that rows begin at multiples of 16 bytes.
pub(super) fn input_width(config: &ModelConfig) -> usize {
    let (keys, values) = (config.key_width(), config.value_width());
    match config.mixer {
        Mixer::Attention => 2 * keys + values,
        Mixer::Gdn => 2 * keys + 2 * values + (2 * config.heads).next_multiple_of(ACCESS),
    }
}

/// Sizes of a step of one model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub config: ModelConfig,
    /// `B` and `T`.
    pub batch: Batch,
    /// Tokens whose logits are in memory at once, at the most.
    pub logit_rows: usize,
}

impl Sizes {
    /// `B T`: rows of every activation.
    pub fn rows(&self) -> usize {
        self.batch.sequences * self.batch.tokens
    }

    pub fn input_width(&self) -> usize {
        input_width(&self.config)
    }

    /// First column of GDN's output gate in the fused projection, and of the raw gates.
    pub fn gate_column(&self) -> usize {
        2 * self.config.key_width() + self.config.value_width()
    }

    pub fn raw_gate_column(&self) -> usize {
        2 * self.config.key_width() + 2 * self.config.value_width()
    }

    /// The rows whose logits are computed together, one slice after the other: all have as many but the last.
    pub fn slices(&self) -> Vec<Range<usize>> {
        let rows = self.rows();
        (0..rows).step_by(self.logit_rows).map(|first| first..rows.min(first + self.logit_rows)).collect()
    }

    pub fn conv(&self) -> ShortConvSizes {
        ShortConvSizes {
            batch: self.batch.sequences,
            tokens: self.batch.tokens,
            qk_width: self.config.key_width(),
            value_width: self.config.value_width(),
        }
    }

    pub fn attention(&self) -> attention::Setup {
        attention::Setup {
            batch: self.batch.sequences,
            tokens: self.batch.tokens,
            heads: self.config.heads,
            head_dim: self.config.key_dim,
            scale: Inputs::default_scale(self.config.key_dim) as f32,
            backward: true,
        }
    }

    /// GDN on bf16 with f16 operands: raw gates, and q and k normalised in the kernels.
    pub fn chunk(&self) -> chunk::Setup {
        let ModelConfig { heads, key_dim, value_dim, .. } = self.config;
        let Batch { sequences, tokens } = self.batch;
        chunk::Setup {
            shape: Shape { batch: sequences, ..Shape::new(tokens, heads, key_dim, value_dim) },
            sequences: (0..sequences).map(|n| n * tokens..(n + 1) * tokens).collect(),
            mode: chunk::Mode::F16Internals,
            input: Format::Bf16,
            options: chunk::Options {
                qk_l2norm: Some(NORM_EPS as f32),
                gate: chunk::Gate::Raw,
                beta: chunk::Beta::Logit { scale: 1.0 },
                ..chunk::Options::new(key_dim)
            },
            backward: true,
        }
    }

    /// Refuses more tokens than a kernel counts.
    pub fn validate(&self) -> Result<()> {
        self.batch.validate()?;
        let rows = self.batch.total_tokens();
        if rows <= i32::MAX as u128 && self.logit_rows > 0 {
            return Ok(());
        }
        Err(crate::Error::input(format!(
            "{} make {rows} tokens, and logits of {} at once: expected less than 2^31, and at least 1",
            self.batch, self.logit_rows
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::Size;

    #[test]
    fn slices_cover_all_rows() {
        let sizes = |logit_rows| Sizes {
            config: ModelConfig::preset(Mixer::Gdn, Size::M30),
            batch: Batch { sequences: 2, tokens: 96 },
            logit_rows,
        };
        assert_eq!(sizes(80).slices(), [0..80, 80..160, 160..192]);
        assert_eq!(sizes(96).slices(), [0..96, 96..192]);
        assert_eq!(sizes(4096).slices(), vec![0..192]);
        assert_eq!(sizes(80).chunk().sequences, [0..96, 96..192]);
        assert!(sizes(80).chunk().validate().is_ok() && sizes(80).validate().is_ok());
        assert!(sizes(0).validate().is_err());
        // 6 heads of 64/128: 12 raw gates, in 16 columns.
        assert_eq!((sizes(1).gate_column(), sizes(1).raw_gate_column(), sizes(1).input_width()), (1536, 2304, 2320));
    }
}
