//! The report that a person reads.

use super::yardstick::{MARGIN, yardstick};
use super::{Comparison, HeadError, Mode, TensorClass, Tolerance, compare_call, mode, tolerance};
use crate::Result;
use crate::problem::{Inputs, Results, Tensor};
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
    /// The head that is furthest beyond the limit of a single head, or nearest to it.
    pub worst_head: Option<HeadError>,
    /// Largest `rel_rms` that passes for that head: three times the limit of a tensor, which is the spread between
    /// right kernels, since a head has its own decay and keys and nothing to average them with.
    pub head_limit: f64,
    /// Whether the values were rounded to a format coarser than the mode's.
    pub too_coarse: bool,
    /// Whether the limits were raised because a right kernel of the mode errs that much on these inputs.
    pub hard_inputs: bool,
    /// Whether the tensor is finite, within its limits in whole and in each head, and not too coarse.
    pub pass: bool,
}

impl Verdict {
    /// Holds `comparison` to the limits of `mode_name`.
    ///
    /// The tensor passes if every element is finite, the largest error is at most `max_rel` times its scale, the RMS
    /// error at most `rel_rms` times its RMS scale, and it was not stored in a format coarser than the mode's. The RMS error
    /// of each head of each sequence is held to three times `rel_rms` of that head. A scale
    /// is that of the truth, or the size of the terms that cancelled in it ([`Comparison::terms`]), or the smallest
    /// normal number ([`Tolerance::smallest_scale`]), whichever is largest.
    ///
    /// # Errors
    /// [`crate::Error::Input`] for an unknown mode, or a tensor that is no result.
    pub fn new(comparison: Comparison, mode_name: &str) -> Result<Self> {
        let tolerance = tolerance(mode_name, TensorClass::of(&comparison.tensor)?)?;
        let max_widening = widening(&comparison, comparison.max_expected, &tolerance);
        // What is left of terms that cancelled has few digits in any format.
        let has_digits = comparison.max_abs > 0.0 && comparison.max_expected > 0.0 && max_widening == 1.0;
        let verdict = Self {
            rel_rms_limit: tolerance.rel_rms() * widening(&comparison, comparison.rms_expected, &tolerance),
            max_rel_limit: tolerance.max_rel() * max_widening,
            too_coarse: has_digits && comparison.narrowest.fraction_bits() < tolerance.unit.fraction_bits(),
            worst_head: None,
            head_limit: 0.0,
            hard_inputs: false,
            pass: false,
            comparison,
            tolerance,
        };
        Ok(verdict.with_worst_head(None).decided())
    }

    /// The same with limits that allow [`MARGIN`] times the errors of `emulated`, a right kernel of the mode.
    fn beside(mut self, emulated: &Comparison) -> Self {
        let (rms, max) = (MARGIN * emulated.rel_rms, MARGIN * emulated.max_rel);
        if emulated.nonfinite == 0 && (rms > self.rel_rms_limit || max > self.max_rel_limit) {
            self.hard_inputs = true;
            self.rel_rms_limit = self.rel_rms_limit.max(rms);
            self.max_rel_limit = self.max_rel_limit.max(max);
        }
        self.with_worst_head(Some(emulated)).decided()
    }

    /// Finds the head that exceeds its limit most; [`MARGIN`] times the errors of `emulated` are allowed.
    fn with_worst_head(mut self, emulated: Option<&Comparison>) -> Self {
        let smallest = self.tolerance.smallest_scale();
        let limit_of = |head: &HeadError| {
            let own = MARGIN * self.tolerance.rel_rms() * (smallest / head.scale).max(1.0);
            let same = |other: &&HeadError| (other.sequence, other.head) == (head.sequence, head.head);
            let emulated = emulated.and_then(|emulated| emulated.heads.iter().find(same));
            own.max(emulated.map_or(0.0, |emulated| MARGIN * emulated.rel_rms))
        };
        let limits = self.comparison.heads.iter().map(|head| (head, limit_of(head)));
        let worst = limits.max_by(|a, b| (a.0.rel_rms / a.1).total_cmp(&(b.0.rel_rms / b.1)));
        let Some((head, limit)) = worst else { return self };
        let was_beyond = self.worst_head.is_some() && !self.heads_within();
        (self.worst_head, self.head_limit) = (Some(head.clone()), limit);
        self.hard_inputs |= was_beyond && self.heads_within();
        self
    }

    fn heads_within(&self) -> bool {
        self.worst_head.as_ref().is_none_or(|head| head.rel_rms <= self.head_limit)
    }

    fn decided(mut self) -> Self {
        let Comparison { nonfinite, rel_rms, max_rel, .. } = self.comparison;
        let within = rel_rms <= self.rel_rms_limit && max_rel <= self.max_rel_limit;
        self.pass = nonfinite == 0 && within && self.heads_within() && !self.too_coarse;
        self
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
            match (self.pass, self.hard_inputs) {
                (true, false) => "ok",
                (true, true) => "ok *",
                (false, false) => "FAIL",
                (false, true) => "FAIL *",
            }
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
        if let Some(HeadError { sequence, head, rel_rms, .. }) =
            self.worst_head.as_ref().filter(|_| !self.heads_within())
        {
            wrong.push(format!(
                "head {head} of sequence {sequence}: relative RMS {} of that head, limit {:.2e}",
                in_units(*rel_rms),
                self.head_limit
            ));
        }
        if self.too_coarse {
            let (found, unit) = (comparison.narrowest, tolerance.unit);
            wrong.push(format!("the values have only the digits of {found}, fewer than {unit}"));
        }
        let place = comparison.worst.as_ref().map(|worst| worst.describe(&comparison.tensor)).unwrap_or_default();
        format!("{}: {}\n  worst at {place}", comparison.tensor, wrong.join("; "))
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
        Ok(Self::of_verdicts(mode(mode_name)?, verdicts))
    }

    fn of_verdicts(mode: Mode, verdicts: Vec<Verdict>) -> Self {
        let pass = verdicts.iter().all(|verdict| verdict.pass);
        Self { mode, verdicts, pass }
    }

    /// Compares the results `got` of the call that takes `inputs` with its `truth`, and holds them to the limits of
    /// `mode_name`.
    ///
    /// Some inputs amplify the errors of every kernel: almost collinear keys, extreme decays. Where a tensor exceeds
    /// its limits, the chunk form is run in the mode's own precision, and three times its errors are allowed.
    ///
    /// # Errors
    /// [`crate::Error::Input`] where shapes differ, for an unknown mode, or for a tensor that is no result.
    pub fn of_call(inputs: &Inputs, got: &[(&str, &Tensor)], truth: &Results, mode_name: &str) -> Result<Self> {
        let truth = truth.named();
        let report = Self::new(compare_call(inputs, got, &truth)?, mode_name)?;
        if report.pass {
            return Ok(report);
        }
        let emulated = yardstick(mode_name, inputs, &truth)?;
        let beside = |verdict: Verdict| {
            let same = emulated.iter().find(|emulated| emulated.tensor == verdict.comparison.tensor);
            same.map_or_else(|| verdict.clone(), |emulated| verdict.clone().beside(emulated))
        };
        Ok(Self::of_verdicts(report.mode, report.verdicts.into_iter().map(beside).collect()))
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
        if self.verdicts.iter().any(|verdict| verdict.hard_inputs) {
            writeln!(f, "* {MARGIN} times what the chunk form errs in this precision: these inputs amplify roundoff")?;
        }
        let failed = || self.verdicts.iter().filter(|verdict| !verdict.pass);
        failed().try_for_each(|verdict| writeln!(f, "{}", verdict.complaint()))?;
        let mut reasons: Vec<&str> = failed().map(|verdict| verdict.tolerance.reason).collect();
        reasons.sort_unstable();
        reasons.dedup();
        reasons.iter().try_for_each(|reason| writeln!(f, "why this limit: {reason}"))
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
