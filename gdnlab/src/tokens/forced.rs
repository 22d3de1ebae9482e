//! The same text read by several kernels, position by position: whatever one of them would have said, all go on with the
//! text.

use super::{Noisy, Prompts, argmax, flips};
use crate::compare::{Share, compare};
use crate::kernel::Kernel;
use crate::model::Model;
use crate::model::infer::{Reader, Tokens};
use crate::numerics::Step;
use crate::record::{Experiment, TokenFlips};
use crate::reference::Reference;
use crate::{Error, Result};
use std::ops::ControlFlow;

/// Rows that are read at once.
const ROWS: usize = 8;

/// One position under one kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Position {
    /// Difference of the two largest exact logits.
    pub margin: f64,
    /// Change of that difference under the kernel, `d`.
    pub shift: f64,
    /// Whether the most likely token is another.
    pub flipped: bool,
}

/// What one kernel did to a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Forced {
    /// Name of the kernel.
    pub kernel: String,
    /// Its mode.
    pub mode: String,
    /// Every position, row by row.
    pub positions: Vec<Position>,
    /// The summary that a record holds.
    pub summary: TokenFlips,
}

/// A text that was read with the exact recurrence.
pub struct Reading<'a> {
    model: &'a Model,
    text: &'a Prompts,
    /// Of each position, row by row.
    exact: Vec<Candidates>,
}

/// The two most likely tokens and the difference of their logits.
#[derive(Clone, Copy)]
struct Candidates {
    first: usize,
    second: usize,
    margin: f64,
}

impl Candidates {
    fn of(logits: &[f64]) -> Self {
        let first = argmax(logits);
        let rest = logits.iter().enumerate().filter(|(token, _)| *token != first);
        let second = rest.max_by(|a, b| a.1.total_cmp(b.1)).map_or(first, |(token, _)| token);
        Self { first, second, margin: logits[first] - logits[second] }
    }

    fn under(&self, logits: &[f64]) -> Position {
        let shift = logits[self.first] - logits[self.second] - self.margin;
        Position { margin: self.margin, shift, flipped: argmax(logits) != self.first }
    }
}

impl<'a> Reading<'a> {
    /// Reads `text` with the exact recurrence. `go_on` is asked between blocks of rows.
    ///
    /// # Errors
    /// [`Error::Stopped`] where `go_on` said so, and what the model reports.
    pub fn new(model: &'a Model, text: &'a Prompts, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Self> {
        let mut reading = Self { model, text, exact: Vec::new() };
        let mut exact = Vec::with_capacity(text.tokens.len());
        reading.read(&Reference, go_on, |logits| exact.push(Candidates::of(logits)))?;
        reading.exact = exact;
        Ok(reading)
    }

    /// Reads the text with `kernel`, and compares the logits of every position.
    ///
    /// # Errors
    /// [`Error::Stopped`] where `go_on` said so, and what the kernel or the model reports.
    pub fn under(&self, kernel: &dyn Kernel, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Forced> {
        let mut exact = self.exact.iter();
        let mut positions = Vec::with_capacity(self.exact.len());
        self.read(kernel, go_on, |logits| positions.extend(exact.next().map(|candidates| candidates.under(logits))))?;
        let sample = self.text.iter().next().unwrap_or_default();
        let rel_rms = Some(kernel_error(self.model, sample, kernel)?);
        let summary = TokenFlips { rel_rms, ..summary(&positions) };
        Ok(Forced { kernel: kernel.name().to_owned(), mode: kernel.mode().to_owned(), positions, summary })
    }

    /// Hands over the logits of every position.
    fn read(
        &self,
        kernel: &dyn Kernel,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
        mut each: impl FnMut(&[f64]),
    ) -> Result<()> {
        let length = self.text.length().max(1);
        for block in self.text.tokens.chunks(ROWS * length) {
            if go_on().is_break() {
                return Err(Error::Stopped);
            }
            let logits = Reader::new(self.model, block.len() / length)?.read(Tokens::new(block), kernel)?;
            logits.data.chunks_exact(self.model.config().vocabulary).for_each(&mut each);
        }
        Ok(())
    }
}

/// [`Reading::under`] each of `kernels`.
///
/// # Errors
/// [`Error::Stopped`] where `progress` asked to stop, and what a kernel or the model reports.
pub fn forced(
    model: &Model,
    text: &Prompts,
    kernels: &[&dyn Kernel],
    mut progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Vec<Forced>> {
    let step = |done: usize, name: &str| Step { done, total: kernels.len() + 1, name: name.to_owned() };
    let first = step(0, Reference.name());
    let reading = Reading::new(model, text, &mut || progress(&first))?;
    let under = |(index, kernel): (usize, &&dyn Kernel)| {
        let step = step(index + 1, kernel.name());
        reading.under(*kernel, &mut || progress(&step))
    };
    kernels.iter().enumerate().map(under).collect()
}

fn summary(positions: &[Position]) -> TokenFlips {
    let count = positions.iter().filter(|position| position.flipped).count() as u64;
    let of = positions.len() as u64;
    let mean_square = positions.iter().map(|position| position.shift.powi(2)).sum::<f64>() / of.max(1) as f64;
    let mut margins: Vec<f64> = positions.iter().map(|position| position.margin).collect();
    margins.sort_by(f64::total_cmp);
    let shift_rms = mean_square.sqrt();
    TokenFlips {
        shift_rms: Some(shift_rms),
        shift_max: positions.iter().map(|position| position.shift.abs()).max_by(f64::total_cmp),
        margin_median: margins.get(margins.len() / 2).copied(),
        expected_rate: density_at_zero(&margins).map(|density| density * shift_rms / std::f64::consts::TAU.sqrt()),
        ..flips(Experiment::Forced, Share { count, of })
    }
}

/// Density of sorted margins at 0: that of the smallest twentieth of them.
fn density_at_zero(sorted: &[f64]) -> Option<f64> {
    let at = sorted.len() / 20;
    let width = *sorted.get(at).filter(|width| **width > 0.0)?;
    Some(at as f64 / sorted.len() as f64 / width)
}

/// Relative error of the output of `kernel` on what the layers of `model` feed it when they read `tokens`, the rounding of
/// those inputs to its format included: the median over
/// the rows of d_v of all layers of `||x - r|| / ||r||`, since each row is normalised before it goes on. Rows near zero, whose
/// terms cancel, do not speak for all in a median.
///
/// # Errors
/// What the kernel or the model reports.
pub fn kernel_error(model: &Model, tokens: &[u32], kernel: &dyn Kernel) -> Result<f64> {
    let mut squares = Vec::new();
    for inputs in model.recurrence_inputs(tokens, 1)? {
        let truth = Reference.forward(&inputs)?.outputs.o;
        let found = kernel.forward(&inputs.rounded_to(kernel.input_format()))?.outputs.o;
        // Refuses other shapes, which rows would hide.
        compare("o", &found, &truth)?;
        let width = inputs.shape.value_dim;
        squares.extend(truth.data.chunks_exact(width).zip(found.data.chunks_exact(width)).map(|(r, x)| {
            let norm = r.iter().map(|r| r * r).sum::<f64>();
            let error = r.iter().zip(x).map(|(r, x)| (x - r).powi(2)).sum::<f64>();
            if error == 0.0 { 0.0 } else { error / norm }
        }));
    }
    Ok(median(squares).sqrt())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

impl Noisy {
    /// Noises whose relative RMS grows from `low` to `high` by equal factors, `count` of them.
    ///
    /// # Errors
    /// As [`Noisy::new`].
    pub fn sweep(low: f64, high: f64, count: usize, seed: u64) -> Result<Vec<Self>> {
        let step = (high / low).powf(1.0 / count.saturating_sub(1).max(1) as f64);
        (0..count).map(|index| Self::new(low * step.powi(index as i32), seed + index as u64)).collect()
    }
}
