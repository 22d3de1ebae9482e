//! The rounding table: one intermediate at a time in another format, in an otherwise float64 chunk algebra.

use super::{Normalisation, Setting, Tensors, Trial};
use crate::precision::{Format, Intermediate, Policy, WriteForm};

/// The base of these trials: everything but the step in float64, in the WY form.
pub const ALGEBRA: &str = "fp64 chunk algebra";

/// The step that rounds everything the forward keeps; the output is in bf16 then, whatever the format.
pub const FORWARD: &str = "all intermediates, bf16 output";

/// The step that rounds everything that forward and backward keep; results are in bf16 then.
pub const EVERYTHING: &str = "all of both passes, bf16 results";

/// The formats that steps are rounded to, coarsest first.
pub const FORMATS: [Format; 4] = [Format::Bf16, Format::F16, Format::Tf32, Format::F32];

/// What one chunk of the forward keeps, and its backward.
const KEPT_FORWARD: [Intermediate; 4] =
    [Intermediate::Inverse, Intermediate::WriteRhs, Intermediate::U, Intermediate::Scores];
const KEPT_BACKWARD: [Intermediate; 4] =
    [Intermediate::DU, Intermediate::Y, Intermediate::DScores, Intermediate::DGram];

/// The unchanged algebra (`none`), then for each of [`FORMATS`] each intermediate alone, the results alone, and the two
/// sums [`FORWARD`] and [`EVERYTHING`].
///
/// Meant for a single chunk, which begins from a state of zeros: the first 64 tokens. The operands of products that hold a
/// state are no steps here, since nothing is read from it.
pub fn trials_of_steps(setting: Setting) -> Vec<Trial> {
    let mut algebra = Policy::fp64();
    algebra.write_form = WriteForm::Wy;
    let trial = |step: &str, format: Option<Format>, policy: Policy| Trial {
        setting,
        base: ALGEBRA.to_owned(),
        step: step.to_owned(),
        format,
        policy,
        normalisation: Normalisation::Fp32ThenCast,
        truth: Normalisation::Fp32ThenCast,
        tensors: Tensors::All,
    };
    let keep = |policy: Policy, kept: &[Intermediate], format: Format| {
        kept.iter().fold(policy, |policy, &kept| policy.keep(kept, format))
    };
    let mut trials = vec![trial("none", None, algebra.clone())];
    for format in FORMATS {
        let alone = KEPT_FORWARD.iter().chain([&Intermediate::Output]).chain(&KEPT_BACKWARD);
        for &kept in alone.chain([&Intermediate::InputGrads]) {
            trials.push(trial(kept.name(), Some(format), algebra.clone().keep(kept, format)));
        }
        let forward = keep(algebra.clone(), &KEPT_FORWARD, format).keep(Intermediate::Output, Format::Bf16);
        let everything = keep(forward.clone(), &KEPT_BACKWARD, format).keep(Intermediate::InputGrads, Format::Bf16);
        trials.push(trial(FORWARD, Some(format), forward));
        trials.push(trial(EVERYTHING, Some(format), everything));
    }
    trials
}
