//! Shares of things that were counted, with their confidence intervals.

use gdnlab_deps::statrs::distribution::{Beta, ContinuousCDF};
use serde::{Deserialize, Serialize};

/// `count` of `of` things had a property.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Those that had it.
    pub count: u64,
    /// All of them.
    pub of: u64,
}

impl Share {
    /// The share itself; `None` of nothing.
    pub fn rate(self) -> Option<f64> {
        (self.of > 0).then(|| self.count as f64 / self.of as f64)
    }

    /// The exact (Clopper-Pearson) interval for the probability behind the share: each end is where a count at least as
    /// far away would come with a probability of `(1 - confidence) / 2`. From 0 to 1 of nothing.
    ///
    /// The lower end is the `(1 - confidence) / 2` quantile of Beta(count, of - count + 1), the upper one the other
    /// quantile of Beta(count + 1, of - count). Things must be independent of each other.
    pub fn interval(self, confidence: f64) -> (f64, f64) {
        let (count, rest) = (self.count as f64, self.of.saturating_sub(self.count) as f64);
        let tail = (1.0 - confidence) / 2.0;
        let low = if self.count == 0 { 0.0 } else { beta_quantile(count, rest + 1.0, tail) };
        let high = if rest == 0.0 { 1.0 } else { beta_quantile(count + 1.0, rest, 1.0 - tail) };
        (low, high)
    }
}

/// Where the distribution Beta(a, b) reaches `probability`, by halving an interval: sure to end, for any `a` and `b`.
fn beta_quantile(a: f64, b: f64, probability: f64) -> f64 {
    let Ok(beta) = Beta::new(a, b) else { return f64::NAN };
    let (mut low, mut high) = (0.0, 1.0);
    loop {
        let middle = f64::midpoint(low, high);
        if middle <= low || middle >= high || high - low < 1e-12 * high {
            return middle;
        }
        if beta.cdf(middle) < probability { low = middle } else { high = middle }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_those_of_the_binomial_distribution() {
        // Where nothing was seen, the upper end is 1 - 0.025^(1/n).
        let (low, high) = Share { count: 0, of: 100 }.interval(0.95);
        assert!(low == 0.0 && (high - (1.0 - 0.025f64.powf(0.01))).abs() < 1e-9, "{high}");
        let (low, high) = Share { count: 100, of: 100 }.interval(0.95);
        assert!((low - 0.025f64.powf(0.01)).abs() < 1e-9 && high == 1.0);
        // Published values for 10 of 100.
        let (low, high) = Share { count: 10, of: 100 }.interval(0.95);
        assert!((low - 0.049_004_7).abs() < 1e-6 && (high - 0.176_222_6).abs() < 1e-6, "{low} {high}");
        let rare = Share { count: 3, of: 1_000_000 }.interval(0.95);
        assert!((rare.0 * 1e6 - 0.6187).abs() < 1e-2 && (rare.1 * 1e6 - 8.7673).abs() < 1e-2, "{rare:?}");
    }

    #[test]
    fn a_share_of_nothing_says_nothing() {
        assert_eq!((Share::default().rate(), Share::default().interval(0.95)), (None, (0.0, 1.0)));
        assert_eq!(Share { count: 1, of: 4 }.rate(), Some(0.25));
    }
}
