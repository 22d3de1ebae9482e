//! When does a kernel's error flip a token?
//!
//! A trained model reads text with its recurrence in one kernel or another, and everything else in float64. A *flip* is a
//! position where the most likely next token is another than with the exact recurrence. With margin `m = z_1 - z_2` between
//! the two largest exact logits, and `d` the change of that difference under a kernel, the two change places where
//! `m + d < 0`. Where `d` is centred, small against the spread of margins and independent of them, with standard deviation
//! `sigma`,
//!
//! ```text
//! P(flip) = int_0^inf p(m) Phi(-m / sigma) dm ~ p(0) sigma / sqrt(2 pi),
//! ```
//!
//! with `p(0)` the density of margins at 0. As sigma grows with the error of the kernel in proportion, so does the rate
//! of flips, and a rate that one can live with stands for a tolerance: [`Tolerance`].

mod forced;
mod greedy;
mod noise;
mod padding;
mod parallel;
mod prompts;
mod suite;

pub use forced::{Forced, Position, Reading, forced, kernel_error};
pub use greedy::{Decoded, decode, greedy};
pub use noise::Noisy;
pub use padding::{Padding, Unpadded};
pub use prompts::{PAD, Prompts};
pub use suite::{Finished, Subject, Suite, Taught, trained};

use crate::compare::Share;
use crate::record::{Experiment, TokenFlips};
use gdnlab_deps::statrs::distribution::{ContinuousCDF, Gamma};

/// Confidence of the intervals.
pub const CONFIDENCE: f64 = 0.95;

/// The most likely token of a row of logits, the first of several.
pub fn argmax(logits: &[f64]) -> usize {
    let mut best = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > logits[best] || logits[best].is_nan() {
            best = token;
        }
    }
    best
}

/// A record of `flips`, with what else is known of it left to fill in.
fn flips(experiment: Experiment, share: Share) -> TokenFlips {
    let (low, high) = share.interval(CONFIDENCE);
    TokenFlips {
        experiment,
        positions: share.of,
        flips: share.count,
        flip_rate: share.rate().unwrap_or_default(),
        flip_rate_low: low,
        flip_rate_high: high,
        ..TokenFlips::default()
    }
}

/// The relative error of the recurrence's output at which a rate of flips is to be expected, from rates that were measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Flips per position and unit of relative RMS error.
    pub slope: f64,
    /// Its interval, of [`CONFIDENCE`].
    pub slope_interval: (f64, f64),
}

/// Above this rate flips do not grow in proportion any more.
const PROPORTIONAL_BELOW: f64 = 0.03;

impl Tolerance {
    /// The slope that makes the flips of `rows` most likely: all flips over the sum of positions times errors, for rates
    /// below 3 %. Flips are taken for a Poisson process; the ends of its exact interval are quantiles of Gamma(n) and Gamma(n + 1).
    /// `None` where no row has a flip.
    pub fn of<'a>(rows: impl IntoIterator<Item = &'a TokenFlips>) -> Option<Self> {
        let usable = |row: &&TokenFlips| row.flip_rate < PROPORTIONAL_BELOW && row.rel_rms.is_some();
        let (mut count, mut exposure) = (0, 0.0);
        for row in rows.into_iter().filter(usable) {
            count += row.flips;
            exposure += row.positions as f64 * row.rel_rms.unwrap_or_default();
        }
        if count == 0 || exposure <= 0.0 {
            return None;
        }
        let tail = (1.0 - CONFIDENCE) / 2.0;
        let quantile =
            |shape: u64, at: f64| Gamma::new(shape as f64, 1.0).map_or(f64::NAN, |gamma| gamma.inverse_cdf(at));
        let (low, high) = (quantile(count, tail), quantile(count + 1, 1.0 - tail));
        Some(Self { slope: count as f64 / exposure, slope_interval: (low / exposure, high / exposure) })
    }

    /// The error at which `rate` of the tokens flips, and its interval.
    pub fn error_at(&self, rate: f64) -> (f64, (f64, f64)) {
        let (low, high) = self.slope_interval;
        (rate / self.slope, (rate / high, rate / low))
    }
}

#[cfg(test)]
mod tests;
