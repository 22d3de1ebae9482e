//! The report that a person reads.

use super::{Comparison, Mode, TensorClass, Tolerance, mode, tolerance};
use crate::Result;
use serde::Serialize;
use std::fmt;

/// A comparison and whether it lies within its limits.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// The distances.
    #[serde(flatten)]
    pub comparison: Comparison,
    /// The limits.
    pub tolerance: Tolerance,
    /// Largest `rel_rms` that passes here.
    pub rel_rms_limit: f64,
    /// Largest `max_rel` that passes here.
    pub max_rel_limit: f64,
    /// Whether the values were rounded to a format coarser than the mode's.
    pub too_coarse: bool,
    /// Whether the tensor is finite, within both limits and not too coarse.
    pub pass: bool,
}

impl Verdict {
    /// Holds `comparison` to the limits of `mode_name`.
    ///
    /// The tensor passes if every element is finite, the largest error is at most `max_rel` times its scale, the RMS
    /// error at most `rel_rms` times its RMS scale, and it was not stored in a format coarser than the mode's. A scale
    /// is that of the truth, or the size of the terms that cancelled in it ([`Comparison::terms`]), or the smallest
    /// normal number ([`Tolerance::smallest_scale`]), whichever is largest. Both limits grow by
    /// [`Tolerance::decay_allowance`].
    ///
    /// # Errors
    /// [`crate::Error::Input`] for an unknown mode, or a tensor that is no result.
    pub fn new(comparison: Comparison, mode_name: &str) -> Result<Self> {
        let tolerance = tolerance(mode_name, TensorClass::of(&comparison.tensor)?)?;
        let allowance = tolerance.decay_allowance(comparison.decay);
        let rms_widening = widening(&comparison, comparison.rms_expected, &tolerance);
        let max_widening = widening(&comparison, comparison.max_expected, &tolerance);
        let rel_rms_limit = (tolerance.rel_rms() + allowance) * rms_widening;
        let max_rel_limit = (tolerance.max_rel() + allowance) * max_widening;
        // What is left of terms that cancelled has few digits in any format.
        let has_digits = comparison.max_abs > 0.0 && comparison.max_expected > 0.0 && max_widening == 1.0;
        let too_coarse = has_digits && comparison.narrowest.fraction_bits() < tolerance.unit.fraction_bits();
        let pass = comparison.nonfinite == 0
            && comparison.max_rel <= max_rel_limit
            && comparison.rel_rms <= rel_rms_limit
            && !too_coarse;
        Ok(Self { comparison, tolerance, rel_rms_limit, max_rel_limit, too_coarse, pass })
    }

    /// The row of the report.
    fn row(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { comparison, tolerance, .. } = self;
        let u = tolerance.unit_roundoff();
        writeln!(
            f,
            "{:<12} {:>5} {:>9.2e} {:>8} {:>6} {:>9.2e} {:>8} {:>6} {:>9.2e} {:>9.2e} {:>9.1e} {:>+9.1e} {:>6.3}  {}",
            comparison.tensor,
            tolerance.unit.name(),
            comparison.rel_rms,
            in_units(comparison.rel_rms / u),
            in_units(self.rel_rms_limit / u),
            comparison.max_rel,
            in_units(comparison.max_rel / u),
            in_units(self.max_rel_limit / u),
            comparison.max_abs,
            comparison.mean_abs,
            1.0 - comparison.cosine,
            comparison.bias,
            comparison.bias_p,
            if self.pass { "ok" } else { "FAIL" }
        )
    }

    /// What is wrong, for a tensor that does not pass.
    fn complaint(&self) -> String {
        let Self { comparison, tolerance, .. } = self;
        let mut wrong = Vec::new();
        if comparison.nonfinite > 0 {
            wrong.push(format!("{} of {} elements are not finite", comparison.nonfinite, comparison.elements));
        }
        for (metric, value, limit) in
            [("rel_rms", comparison.rel_rms, self.rel_rms_limit), ("max_rel", comparison.max_rel, self.max_rel_limit)]
        {
            if value > limit {
                let times = value / limit;
                wrong.push(format!("{metric} {value:.2e} is {} times the limit of {limit:.2e}", in_units(times)));
            }
        }
        if self.too_coarse {
            wrong.push(format!("every value is a {} number, coarser than {}", comparison.narrowest, tolerance.unit));
        }
        let place = comparison.worst.as_ref().map(|worst| worst.describe(&comparison.tensor)).unwrap_or_default();
        let (tensor, wrong) = (&comparison.tensor, wrong.join("; "));
        format!("{tensor}: {wrong}\n  worst at {place}\n  why this limit: {}", tolerance.reason)
    }
}

/// Factor from the scale of the distances to the scale of the verdict, at least 1.
fn widening(comparison: &Comparison, own_scale: f64, tolerance: &Tolerance) -> f64 {
    // Where the truth is zero throughout, the distances are in units of the terms already.
    let used = if own_scale > 0.0 { own_scale } else { comparison.terms };
    let allowed = used.max(comparison.terms).max(tolerance.smallest_scale());
    if used > 0.0 { allowed / used } else { 1.0 }
}

/// Verdicts on all tensors of a result.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The mode whose limits were applied.
    pub mode: Mode,
    /// One per tensor.
    pub verdicts: Vec<Verdict>,
    /// Whether every tensor passes.
    pub pass: bool,
}

impl Report {
    /// Holds `comparisons` to the limits of `mode_name`.
    ///
    /// # Errors
    /// As [`Verdict::new`].
    pub fn new(comparisons: Vec<Comparison>, mode_name: &str) -> Result<Self> {
        let verdicts: Vec<Verdict> =
            comparisons.into_iter().map(|comparison| Verdict::new(comparison, mode_name)).collect::<Result<_>>()?;
        let pass = verdicts.iter().all(|verdict| verdict.pass);
        Ok(Self { mode: mode(mode_name)?, verdicts, pass })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "tolerance {}: {}", self.mode.name, self.mode.summary)?;
        writeln!(
            f,
            "{:<12} {:>5} {:>9} {:>8} {:>6} {:>9} {:>8} {:>6} {:>9} {:>9} {:>9} {:>9} {:>6}",
            "tensor",
            "u of",
            "rel_rms",
            "in u",
            "limit",
            "max_rel",
            "in u",
            "limit",
            "max_abs",
            "mean_abs",
            "1-cosine",
            "bias",
            "p"
        )?;
        self.verdicts.iter().try_for_each(|verdict| verdict.row(f))?;
        for verdict in self.verdicts.iter().filter(|verdict| !verdict.pass) {
            writeln!(f, "{}", verdict.complaint())?;
        }
        Ok(())
    }
}

/// Three significant digits, without an exponent where that fits.
fn in_units(x: f64) -> String {
    match x.abs() {
        size if size == 0.0 || (0.095..10.0).contains(&size) => format!("{x:.2}"),
        size if (10.0..99_999.5).contains(&size) => format!("{x:.0}"),
        _ => format!("{x:.0e}"),
    }
}
