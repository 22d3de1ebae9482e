//! The search for a policy: what the kernels keep, each in bf16, fp16 or fp32.
//!
//! Going from bf16 to fp16 costs no byte, and a format with more bits never rounds more. So the policies that matter keep
//! everything in one of two formats: in bf16 or fp32, as was proposed; in bf16 or fp16; or, where bytes are no object, in
//! fp16 or fp32. Of these all are measured, not a selection: `3 2^n - 3` instead of `3^n` for `n` intermediates. A policy of
//! three formats that is left out errs no less than one of the last kind, which has as many bytes.

use super::{Choice, Normalisation, Setting, Slot, Tensors, Trial};
use crate::precision::{Format, WriteForm};

/// The base of the trials of a forward, and of those of a backward.
pub const FORWARD_BASE: &str = "kept by the forward";
/// See [`FORWARD_BASE`].
pub const BACKWARD_BASE: &str = "kept by the backward";

/// The pairs of formats that are searched.
pub const PAIRS: [[Format; 2]; 3] =
    [[Format::Bf16, Format::F32], [Format::Bf16, Format::F16], [Format::F16, Format::F32]];

/// Every way to keep each of `slots` in one of two formats of [`PAIRS`], each once, the others as in `start`.
pub fn pairs(start: &Choice, slots: &[Slot]) -> Vec<Choice> {
    let mut all: Vec<Choice> = Vec::new();
    for pair in PAIRS {
        for mask in 0..1usize << slots.len() {
            let of_slot = |choice: Choice, (bit, &slot): (usize, &Slot)| choice.with(slot, pair[mask >> bit & 1]);
            let choice = slots.iter().enumerate().fold(start.clone(), of_slot);
            if !all.contains(&choice) {
                all.push(choice);
            }
        }
    }
    all
}

/// The forward's policies in both write forms, judged by `o`.
pub fn forward(setting: Setting) -> Vec<Trial> {
    let of_form = |form| pairs(&Choice::uniform(form, Format::Bf16), Choice::forward_slots(form));
    let all = [WriteForm::Wy, WriteForm::Residual].into_iter().flat_map(of_form);
    all.map(|choice| trial(setting, &choice, FORWARD_BASE, Tensors::Output)).collect()
}

/// The backward's policies after the forward of `start`, judged by the gradients.
pub fn backward(setting: Setting, start: &Choice) -> Vec<Trial> {
    let all = pairs(start, Choice::BACKWARD).into_iter();
    all.map(|choice| trial(setting, &choice, BACKWARD_BASE, Tensors::Gradients)).collect()
}

/// The forwards of `choices` again, in another setting.
pub fn forwards_of<'a>(setting: Setting, choices: impl IntoIterator<Item = &'a Choice>) -> Vec<Trial> {
    choices.into_iter().map(|choice| trial(setting, choice, FORWARD_BASE, Tensors::Output)).collect()
}

/// The backwards of `choices` again, in another setting.
pub fn backwards_of<'a>(setting: Setting, choices: impl IntoIterator<Item = &'a Choice>) -> Vec<Trial> {
    choices.into_iter().map(|choice| trial(setting, choice, BACKWARD_BASE, Tensors::Gradients)).collect()
}

/// All results of `choices`, in another setting.
pub fn both_passes_of<'a>(setting: Setting, choices: impl IntoIterator<Item = &'a Choice>) -> Vec<Trial> {
    choices.into_iter().map(|choice| trial(setting, choice, "kept by both passes", Tensors::All)).collect()
}

fn trial(setting: Setting, choice: &Choice, base: &str, tensors: Tensors) -> Trial {
    Trial {
        setting,
        base: base.to_owned(),
        step: choice.to_string(),
        format: None,
        policy: choice.policy(),
        normalisation: Normalisation::Fp32ThenCast,
        truth: Normalisation::Fp32ThenCast,
        tensors,
    }
}
