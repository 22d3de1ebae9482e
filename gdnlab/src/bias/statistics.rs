//! The tests: Student's t, signs, and Holm's correction.

use crate::{Error, Result};
use gdnlab_deps::statrs::distribution::{Binomial, ContinuousCDF, DiscreteCDF, StudentsT};
use std::cmp::Ordering;

/// Coverage of the intervals.
const CONFIDENCE: f64 = 0.95;

/// The mean of independent values, and how far from 0 it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeanTest {
    /// Number of values.
    pub units: usize,
    /// Mean.
    pub mean: f64,
    /// Lower end of the mean's 95 % interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// p of [`t_test`].
    pub t_p: f64,
    /// p of [`sign_test`].
    pub sign_p: f64,
}

impl MeanTest {
    /// Of `values`, two at least.
    ///
    /// # Errors
    /// [`Error::Input`] for fewer than two, or values that are not finite.
    pub fn of(values: &[f64]) -> Result<Self> {
        if values.len() < 2 || values.iter().any(|x| !x.is_finite()) {
            return Err(Error::input(format!(
                "{} values to test, or some that are not finite: expected two at least, all finite",
                values.len()
            )));
        }
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let squares: f64 = values.iter().map(|x| (x - mean).powi(2)).sum();
        let error = (squares / (n - 1.0) / n).sqrt();
        let reach = student(n - 1.0)?.inverse_cdf(0.5 + CONFIDENCE / 2.0) * error;
        Ok(Self {
            units: values.len(),
            mean,
            low: mean - reach,
            high: mean + reach,
            t_p: t_test(mean, squares, n)?,
            sign_p: sign_test(values)?,
        })
    }
}

fn student(freedom: f64) -> Result<StudentsT> {
    StudentsT::new(0.0, 1.0, freedom)
        .map_err(|problem| Error::input(format!("{freedom} degrees of freedom: {problem}")))
}

/// Two-sided p of "the expectation is 0" for `n` independent values with this mean and sum of squared deviations, by Student's
/// t with `n - 1` degrees of freedom: `t = mean / sqrt(squares / (n - 1) / n)`.
///
/// # Errors
/// [`Error::Input`] for fewer than two values.
pub fn t_test(mean: f64, squares: f64, n: f64) -> Result<f64> {
    if n < 2.0 {
        return Err(Error::input(format!("a t-test on {n} values: expected two at least")));
    }
    let t = mean / (squares / (n - 1.0) / n).sqrt();
    Ok(match mean == 0.0 {
        true => 1.0,
        false if t.is_infinite() => 0.0,
        false => (2.0 * student(n - 1.0)?.cdf(-t.abs())).min(1.0),
    })
}

/// Two-sided p of "above 0 is as likely as below" for independent values: with k of n values that are not 0 above it,
/// `2 P(X <= min(k, n - k))` for X binomial with n trials and probability 1/2, at most 1.
///
/// # Errors
/// [`Error::Input`] where there are too many values for the distribution.
pub fn sign_test(values: &[f64]) -> Result<f64> {
    let count = |sign: Ordering| values.iter().filter(|x| x.partial_cmp(&&0.0) == Some(sign)).count() as u64;
    let (below, above) = (count(Ordering::Less), count(Ordering::Greater));
    if below + above == 0 {
        return Ok(1.0);
    }
    let signs = Binomial::new(0.5, below + above)
        .map_err(|problem| Error::input(format!("{} signs to count: {problem}", below + above)))?;
    Ok((2.0 * signs.cdf(below.min(above))).min(1.0))
}

/// p values after Holm's correction, in their order: the i-th smallest of m times `m - i + 1`, never below that of a smaller
/// one, and at most 1. The probability of one or more below a level is at most that level where every null hypothesis holds,
/// however the tests depend on each other.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[a].total_cmp(&p[b]));
    let mut corrected = vec![1.0; p.len()];
    let mut largest: f64 = 0.0;
    for (rank, index) in order.into_iter().enumerate() {
        largest = largest.max((p[index] * (p.len() - rank) as f64).min(1.0));
        corrected[index] = largest;
    }
    corrected
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_t_test_is_students() {
        // Student's own example, hours of sleep gained (Biometrika 6, 1908): t = 4.0621 with 9 degrees of freedom.
        let gained = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4];
        let test = MeanTest::of(&gained).unwrap();
        assert!((test.mean - 1.58).abs() < 1e-12 && (test.t_p - 0.002_833).abs() < 1e-6, "{test:?}");
        assert!((test.low - 0.700_114).abs() < 1e-5 && (test.high - 2.459_886).abs() < 1e-5, "{test:?}");
        // All signs but one zero are positive: 2 / 2^9.
        assert!((test.sign_p - 2.0 / 512.0).abs() < 1e-12, "{test:?}");
    }

    #[test]
    fn signs_are_counted_both_ways() {
        let p = |values: &[f64]| sign_test(values).unwrap();
        assert_eq!(p(&[0.0, 0.0]), 1.0);
        assert_eq!(p(&[1.0, -1.0]), 1.0);
        // 1 of 8: 2 (1 + 8) / 256.
        let one_of_eight = [1.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0];
        assert!((p(&one_of_eight) - 18.0 / 256.0).abs() < 1e-12);
        assert_eq!(p(&one_of_eight), p(&one_of_eight.map(|x| -x)));
    }

    #[test]
    fn constant_values_are_certain() {
        assert_eq!(MeanTest::of(&[0.0; 5]).unwrap().t_p, 1.0);
        assert_eq!(MeanTest::of(&[0.5; 5]).unwrap().t_p, 0.0);
        assert!(MeanTest::of(&[1.0]).is_err() && MeanTest::of(&[1.0, f64::NAN]).is_err());
        assert!(t_test(1.0, 1.0, 1.0).is_err());
    }

    #[test]
    fn holm_corrects_the_smallest_most() {
        let close = |found: &[f64], expected: &[f64]| found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-15);
        assert!(close(&holm(&[0.01, 0.04, 0.03, 0.005]), &[0.03, 0.06, 0.06, 0.02]));
        assert!(close(&holm(&[0.5, 0.9]), &[1.0, 1.0]));
        assert!(holm(&[]).is_empty());
    }
}
