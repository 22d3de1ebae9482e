//! No speed without a green check.
//!
//! A kernel is checked twice against the float64 recurrence: on a small case of the same configuration, every tensor of
//! every head, with sequences of awkward lengths; and on the very results that it is timed for, one sequence of one q/k
//! head with its value heads. Every element of those is checked for being finite, after the memory was filled with NaN.

use super::case::Case;
use super::tensors::{Part, Source, Tensors};
use super::{Loaded, Stopwatch, Subject, results_of};
use crate::compare::{Report, check_truth};
use crate::inputs::{Regime, generate};
use crate::kernel::Kernel;
use crate::problem::{Inputs, Op, Shape, Tensor};
use crate::record::Pass;
use crate::reference::Reference;
use crate::{Error, Result};

/// Tokens of the sequences of the small case: less than a chunk, one, a whole chunk and more, none.
const SMALL_LENGTHS: [usize; 5] = [63, 1, 0, 128, 72];
/// Tokens of a row of the small case where the rows of a batch are the sequences.
const SMALL_ROW: usize = 130;
/// q/k heads of the small case.
const SMALL_HEADS: usize = 2;
const SEED: u64 = 7;

/// What a check says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every tensor is within the tolerance of the subject's mode.
    Right,
    /// In words, what is wrong.
    Wrong(String),
}

/// The configuration of `case` with few heads and tokens. Of sequences in one row one is empty, but not where the subject is a
/// peer: FlashQLA refuses such a call, and no case that is timed has one.
///
/// # Errors
/// As [`generate`].
pub fn small_inputs(case: &Case, peer: bool) -> Result<Inputs> {
    let qk_heads = case.shape.qk_heads.min(SMALL_HEADS);
    let shape = Shape { qk_heads, value_heads: qk_heads * case.shape.group(), ..case.shape };
    if case.seqlens.is_none() {
        let shape = Shape { batch: 2, tokens: SMALL_ROW, ..shape };
        return Ok(generate(Op::Gdn, &shape, Regime::LongMemory, SEED)?.with_initial_state(SEED));
    }
    let lengths = SMALL_LENGTHS.iter().filter(|&&length| length > 0 || !peer);
    let ends = lengths.scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    let boundaries: Vec<usize> = std::iter::once(0).chain(ends).collect();
    let shape = Shape { batch: 1, tokens: SMALL_LENGTHS.iter().sum(), ..shape };
    generate(Op::Gdn, &shape, Regime::LongMemory, SEED)?.with_initial_state(SEED).packed(&boundaries, SEED)
}

/// Checks every result of `subject` on a small call.
///
/// # Errors
/// What the subject or the GPU reports.
pub fn small(subject: &dyn Subject, inputs: &Inputs, pass: Pass, stopwatch: &mut dyn Stopwatch) -> Result<Verdict> {
    let inputs = inputs.rounded_to(subject.input_format());
    let tensors = Tensors::of_inputs(&inputs)?;
    let mut loaded = subject.load(pass, &tensors)?;
    run(loaded.as_mut(), stopwatch)?;
    let mut found = Vec::new();
    for &name in results_of(pass) {
        let values = loaded.read(name)?;
        let mut data = Vec::with_capacity(values.len());
        values.append(0..values.len(), &mut data);
        found.push((name, Tensor::new(&dims_of(name, &inputs), data)?));
    }
    judge(&inputs, &found, subject, pass)
}

/// Checks what `loaded` gave for `tensors`: all of it for being finite, and the last part against the recurrence.
///
/// # Errors
/// What the subject or the GPU reports.
pub fn timed(subject: &dyn Subject, pass: Pass, tensors: &Tensors, loaded: &dyn Loaded) -> Result<Verdict> {
    let last = tensors.sequences.iter().rposition(|range| !range.is_empty());
    let Some(sequence) = last else { return Err(Error::input("no tokens: expected at least one")) };
    let part = Part { sequence, qk_head: tensors.shape.qk_heads - 1 };
    let mut found = Vec::new();
    for &name in results_of(pass) {
        let values = loaded.read(name)?;
        let nonfinite = values.nonfinite();
        if nonfinite > 0 {
            let count = values.len();
            return Ok(Verdict::Wrong(format!(
                "{name}: {nonfinite} of {count} elements are not finite, or were not written"
            )));
        }
        found.push((name, part.cut(Source::Values(&values), name, tensors)?));
    }
    judge(&tensors.part(part)?, &found, subject, pass)
}

/// Fills the results with NaN and lets the subject write them once.
///
/// # Errors
/// What the subject or the GPU reports.
pub fn run(loaded: &mut dyn Loaded, stopwatch: &mut dyn Stopwatch) -> Result<()> {
    loaded.spoil()?;
    stopwatch.once(loaded)
}

fn judge(inputs: &Inputs, found: &[(&str, Tensor)], subject: &dyn Subject, pass: Pass) -> Result<Verdict> {
    let truth = if pass == Pass::Bwd { Reference.backward(inputs)? } else { Reference.forward(inputs)? };
    check_truth(&truth)?;
    let found: Vec<(&str, &Tensor)> = found.iter().map(|(name, tensor)| (*name, tensor)).collect();
    let report = Report::of_call(inputs, &found, &truth, subject.mode())?;
    Ok(if report.pass { Verdict::Right } else { Verdict::Wrong(format!("{}\n{report}", inputs.shape)) })
}

fn dims_of(name: &str, inputs: &Inputs) -> Vec<usize> {
    let shape = &inputs.shape;
    match name {
        "dq" | "dk" => shape.qk_dims().to_vec(),
        "o" | "dv" => shape.value_dims().to_vec(),
        "dg" | "dbeta" => shape.gate_dims().to_vec(),
        _ => shape.state_dims(inputs.sequences()).to_vec(),
    }
}
