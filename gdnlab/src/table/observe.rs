//! What the error tables say: the worst case, growth with length, gradients against the forward.
//!
//! Errors spread over a factor rather than by an amount, so every estimate is made on logarithms, and intervals are
//! Student's at 95 %.

use super::rows::{Sample, distinct, samples};
use super::{Mode, require};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::*;
use gdnlab_deps::statrs::distribution::{ContinuousCDF, StudentsT};

/// Coverage of the intervals.
const CONFIDENCE: f64 = 0.95;

/// The largest error of each mode: columns mode, tensor, T, d_k, d_v, max_rel and in_u, which is `max_rel` over the
/// unit roundoff of the mode.
///
/// # Errors
/// [`Error::Table`] where a column is missing.
pub fn worst(errors: &DataFrame) -> Result<DataFrame> {
    let samples = samples(errors, "max_rel")?;
    let worst: Vec<&Sample> = modes(&samples)
        .iter()
        .filter_map(|mode| {
            let of_mode = samples.iter().filter(|sample| &sample.mode == mode);
            of_mode.max_by(|a, b| a.error.total_cmp(&b.error))
        })
        .collect();
    let in_u = |sample: &&Sample| sample.error / Mode::of(&sample.mode).unit_roundoff();
    Ok(df!(
        "mode" => worst.iter().map(|sample| sample.mode.as_str()).collect::<Vec<_>>(),
        "tensor" => worst.iter().map(|sample| sample.tensor.as_str()).collect::<Vec<_>>(),
        "T" => worst.iter().map(|sample| sample.tokens).collect::<Vec<_>>(),
        "d_k" => worst.iter().map(|sample| sample.key_dim).collect::<Vec<_>>(),
        "d_v" => worst.iter().map(|sample| sample.value_dim).collect::<Vec<_>>(),
        "max_rel" => worst.iter().map(|sample| sample.error).collect::<Vec<_>>(),
        "in_u" => worst.iter().map(in_u).collect::<Vec<_>>(),
    )?)
}

/// Whether the error grows with sequence length: the factor by which `metric` (such as `max_rel` or
/// `rel_rms`) changes when T doubles, per mode.
///
/// Least squares of log2(metric) on log2(T) with one intercept per tensor and head size, so that only the change with
/// T within each counts. Columns: mode, factor, low, high (95 % interval), p (two-sided, that the factor is 1), n, and the
/// answer, which is that the factor is below, about or above 1 as the interval says.
/// The interval takes the errors for independent; where a longer sequence begins like a shorter one, it is too wide.
///
/// # Errors
/// [`Error::Input`] where a mode has too few lengths for an estimate, [`Error::Table`] where a column is missing.
pub fn growth_with_length(errors: &DataFrame, metric: &str) -> Result<DataFrame> {
    let samples = samples(errors, metric)?;
    let estimate = |mode: &str| {
        let of_mode = || samples.iter().filter(|sample| sample.mode == mode);
        let series = distinct(of_mode().map(Sample::series));
        let (mut sxx, mut sxy, mut syy, mut n) = (0.0, 0.0, 0.0, 0);
        for series in &series {
            let points: Vec<(f64, f64)> = of_mode()
                .filter(|sample| &sample.series() == series)
                .map(|sample| (f64::from(sample.tokens).log2(), sample.error.log2()))
                .collect();
            let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / points.len() as f64;
            let (mean_x, mean_y) = (mean(|p| p.0), mean(|p| p.1));
            for (x, y) in &points {
                sxx += (x - mean_x).powi(2);
                sxy += (x - mean_x) * (y - mean_y);
                syy += (y - mean_y).powi(2);
            }
            n += points.len();
        }
        let freedom = n as f64 - series.len() as f64 - 1.0;
        if sxx <= 0.0 || freedom < 1.0 {
            return Err(Error::input(format!(
                "mode '{mode}': expected errors at two or more lengths T for every tensor, and three for one"
            )));
        }
        let slope = sxy / sxx;
        let error = ((syy - slope * sxy).max(0.0) / freedom / sxx).sqrt();
        Factor::from_log2(slope, error, freedom, n)
    };
    factors(&modes(&samples), estimate, ["shrinks", "does not change", "grows"])
}

/// Whether gradients are worse than the forward: the factor between the geometric means of `metric` over the gradients
/// and over o and final_state, per mode.
///
/// One ratio per shape, and a t-test over shapes. Columns as in [`growth_with_length`].
///
/// # Errors
/// [`Error::Input`] where a mode lacks one of the two or has fewer than two shapes, [`Error::Table`] where a column is
/// missing.
pub fn gradients_against_forward(errors: &DataFrame, metric: &str) -> Result<DataFrame> {
    let samples = samples(errors, metric)?;
    let estimate = |mode: &str| {
        let of_mode = || samples.iter().filter(|sample| sample.mode == mode);
        let ratios: Vec<f64> = distinct(of_mode().map(Sample::shape))
            .into_iter()
            .map(|shape| {
                let mean = |gradient: bool| {
                    let logs: Vec<f64> = of_mode()
                        .filter(|sample| sample.shape() == shape && sample.is_gradient() == gradient)
                        .map(|sample| sample.error.log2())
                        .collect();
                    logs.iter().sum::<f64>() / logs.len() as f64
                };
                mean(true) - mean(false)
            })
            .filter(|ratio| ratio.is_finite())
            .collect();
        let n = ratios.len();
        if n < 2 {
            return Err(Error::input(format!(
                "mode '{mode}': expected forward and gradient errors at two or more shapes, got {n}"
            )));
        }
        let mean = ratios.iter().sum::<f64>() / n as f64;
        let freedom = n as f64 - 1.0;
        let variance = ratios.iter().map(|ratio| (ratio - mean).powi(2)).sum::<f64>() / freedom;
        Factor::from_log2(mean, (variance / n as f64).sqrt(), freedom, n)
    };
    factors(&modes(&samples), estimate, ["better", "no difference", "worse"])
}

/// Whether errors have a direction: of the t-tests that the mean of `x - r` is zero, one per tensor and shape, how many
/// give a p below `level`, and how many would by chance. Columns: mode, tests, biased, by_chance, and largest_bias, the
/// largest `|bias|` (mean error over the RMS of the truth).
///
/// # Errors
/// [`Error::Table`] where a column is missing.
pub fn bias(errors: &DataFrame, level: f64) -> Result<DataFrame> {
    require(errors, &["mode", "bias", "bias_p"])?;
    Ok(errors
        .clone()
        .lazy()
        .group_by_stable([col("mode")])
        .agg([
            col("bias_p").count().alias("tests"),
            col("bias_p").lt(lit(level)).sum().alias("biased"),
            (col("bias_p").count().cast(DataType::Float64) * lit(level)).alias("by_chance"),
            col("bias").abs().max().alias("largest_bias"),
        ])
        .collect()?)
}

/// An estimated factor with its interval.
struct Factor {
    value: f64,
    low: f64,
    high: f64,
    p: f64,
    n: u32,
}

impl Factor {
    /// 0 where the interval lies below 1, 1 where it holds 1, 2 where it lies above.
    fn side(&self) -> usize {
        if self.high < 1.0 {
            0
        } else if self.low <= 1.0 {
            1
        } else {
            2
        }
    }

    /// From an estimate of its log2, the standard error of that, and the degrees of freedom.
    fn from_log2(estimate: f64, error: f64, freedom: f64, n: usize) -> Result<Self> {
        let student = StudentsT::new(0.0, 1.0, freedom)
            .map_err(|problem| Error::input(format!("{freedom} degrees of freedom: {problem}")))?;
        let reach = student.inverse_cdf(0.5 + CONFIDENCE / 2.0) * error;
        let p = match (estimate == 0.0, error == 0.0) {
            (true, _) => 1.0,
            (false, true) => 0.0,
            (false, false) => 2.0 * student.cdf(-(estimate / error).abs()),
        };
        Ok(Self {
            value: estimate.exp2(),
            low: (estimate - reach).exp2(),
            high: (estimate + reach).exp2(),
            p,
            n: u32::try_from(n).unwrap_or(u32::MAX),
        })
    }
}

/// A row per mode; `words` say that a factor's interval lies below, around or above 1.
fn factors(modes: &[&str], estimate: impl Fn(&str) -> Result<Factor>, words: [&'static str; 3]) -> Result<DataFrame> {
    let factors = modes.iter().map(|mode| estimate(mode)).collect::<Result<Vec<_>>>()?;
    let column = |of: fn(&Factor) -> f64| factors.iter().map(of).collect::<Vec<_>>();
    Ok(df!(
        "mode" => modes,
        "factor" => column(|factor| factor.value),
        "low" => column(|factor| factor.low),
        "high" => column(|factor| factor.high),
        "p" => column(|factor| factor.p),
        "n" => factors.iter().map(|factor| factor.n).collect::<Vec<_>>(),
        "answer" => factors.iter().map(|factor| words[factor.side()]).collect::<Vec<_>>(),
    )?)
}

fn modes(samples: &[Sample]) -> Vec<&str> {
    let known = distinct(samples.iter().map(|sample| sample.mode.as_str()));
    let ordered = Mode::all_of(known.iter().copied());
    ordered.iter().filter_map(|mode| known.iter().copied().find(|name| *name == mode.name)).collect()
}
