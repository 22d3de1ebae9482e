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
    /// Whether the tensor is finite and within both limits.
    pub pass: bool,
}

impl Verdict {
    /// Holds `comparison` to the limits of `mode_name`.
    ///
    /// The tensor passes if every element is finite, the largest error is at most `max_rel` times its scale and the
    /// RMS error at most `rel_rms` times its RMS. The scale is `max|r|`, or the size of the terms that cancelled
    /// ([`Comparison::terms`]), or the smallest normal number ([`Tolerance::smallest_scale`]), whichever is largest.
    ///
    /// # Errors
    /// [`crate::Error::Input`] for an unknown mode, or a tensor that is no result.
    pub fn new(comparison: Comparison, mode_name: &str) -> Result<Self> {
        let tolerance = tolerance(mode_name, TensorClass::of(&comparison.tensor)?)?;
        let pass = comparison.nonfinite == 0
            && comparison.max_rel <= tolerance.max_rel() * slack(&comparison, comparison.max_expected, &tolerance)
            && comparison.rel_rms <= tolerance.rel_rms() * slack(&comparison, comparison.rms_expected, &tolerance);
        Ok(Self { comparison, tolerance, pass })
    }

    /// What is wrong, for a tensor that does not pass.
    fn complaint(&self) -> String {
        let Self { comparison, tolerance, .. } = self;
        let what = if comparison.nonfinite > 0 {
            format!("{} of {} elements not finite", comparison.nonfinite, comparison.elements)
        } else {
            format!(
                "rel_rms {:.2e} (limit {:.2e}), max_rel {:.2e} (limit {:.2e})",
                comparison.rel_rms,
                tolerance.rel_rms(),
                comparison.max_rel,
                tolerance.max_rel()
            )
        };
        let place = comparison.worst.as_ref().map(|worst| worst.describe(&comparison.tensor)).unwrap_or_default();
        format!("{}: {what}\n  worst at {place}\n  the limit: {}", comparison.tensor, tolerance.reason)
    }
}

/// Factor from the scale in `max_rel` and `rel_rms` to the scale of the verdict, at least 1.
fn slack(comparison: &Comparison, own_scale: f64, tolerance: &Tolerance) -> f64 {
    // Where r is zero throughout, the distances are already in units of the terms.
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
            "{:<12} {:>9} {:>8} {:>6} {:>9} {:>8} {:>6}  {:>5} {:>9} {:>12} {:>10} {:>9}  ",
            "tensor",
            "rel_rms",
            "in u",
            "limit",
            "max_rel",
            "in u",
            "limit",
            "u of",
            "max_abs",
            "1 - cosine",
            "bias",
            "p"
        )?;
        for Verdict { comparison, tolerance, pass } in &self.verdicts {
            let u = tolerance.unit_roundoff();
            writeln!(
                f,
                "{:<12} {:>9.2e} {:>8} {:>6} {:>9.2e} {:>8} {:>6}  {:>5} {:>9.2e} {:>12.2e} {:>+10.1e} {:>9.1e}  {}",
                comparison.tensor,
                comparison.rel_rms,
                in_units(comparison.rel_rms / u),
                in_units(tolerance.rel_rms_u),
                comparison.max_rel,
                in_units(comparison.max_rel / u),
                in_units(tolerance.max_rel_u),
                tolerance.unit.name(),
                comparison.max_abs,
                1.0 - comparison.cosine,
                comparison.bias,
                comparison.bias_p,
                if *pass { "ok" } else { "FAIL" }
            )?;
        }
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
