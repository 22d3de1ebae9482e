//! Training of a model on a text, step by step, on the CPU in float64.

use super::adamw::{AdamW, Moments, REMEDY, Schedule};
use super::config::ModelConfig;
use super::step::Model;
use super::text::{self, Text};
use crate::kernel::Kernel;
use crate::reference::Reference;
use crate::{Error, Result, memory};
use serde::{Deserialize, Serialize};
use std::ops::ControlFlow;
use std::time::Instant;

/// How a model is trained.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// `B`, sequences in a step.
    pub batch: usize,
    /// `T`, tokens that are predicted in each.
    pub length: usize,
    /// The learning rate, and how many steps there are.
    pub schedule: Schedule,
    /// The optimizer.
    pub optimizer: AdamW,
    /// Steps between two losses of validation, the last of which follows the last step; 0 for none at all.
    pub validate_every: u64,
    /// Sequences that a loss of validation is the mean of.
    pub validate_rows: usize,
    /// Seed of the initialisation and of the batches.
    pub seed: u64,
}

impl Settings {
    /// For a model that learns in seconds: 4 sequences of 128 tokens, and a rate that rises for a tenth of the steps.
    pub fn tiny(steps: u64, seed: u64) -> Self {
        Self {
            batch: 4,
            length: 128,
            schedule: Schedule { peak: 3e-3, floor: 3e-4, warmup: steps / 10, steps },
            optimizer: AdamW::default(),
            validate_every: (steps / 5).max(1),
            validate_rows: 16,
            seed,
        }
    }

    /// Tokens that one step predicts.
    pub fn tokens_per_step(&self) -> usize {
        self.batch * self.length
    }

    pub(super) fn validate(&self) -> Result<()> {
        for (name, count) in
            [("batch", self.batch), ("length", self.length), ("rows of validation", self.validate_rows)]
        {
            // As many of each as fit their product into usize.
            if !(1..=1 << 30).contains(&count) {
                return Err(Error::input(format!("{name} = {count}: expected 1 to {}", 1 << 30)));
            }
        }
        self.schedule.validate()?;
        self.optimizer.validate()
    }
}

/// A model in training: all that the next step depends on, but for the text.
#[derive(Clone, Debug, PartialEq)]
pub struct Training {
    /// The model as it is now.
    pub model: Model,
    pub(super) moments: Moments,
    pub(super) settings: Settings,
    /// Fingerprint of the text.
    pub(super) text: String,
}

/// One step that was taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Steps taken, this one too.
    pub step: u64,
    /// Steps in all.
    pub steps: u64,
    /// Loss of the batch before the step, in nats per token.
    pub loss: f64,
    /// Loss of validation after the step, in nats per token, where it was asked for.
    pub validation: Option<f64>,
    /// Learning rate of the step.
    pub rate: f64,
    /// Norm of the gradient before clipping.
    pub gradient_norm: f64,
    /// Time that the step took, without validation.
    pub latency_ms: f64,
}

impl Training {
    /// Before the first step.
    ///
    /// # Errors
    /// [`Error::Input`] where `config` or `settings` are not valid, the vocabulary is smaller than that of bytes, the text
    /// is too short, or memory does not suffice.
    pub fn new(config: ModelConfig, settings: Settings, text: &Text) -> Result<Self> {
        settings.validate()?;
        config.validate()?;
        if config.vocabulary < text::VOCABULARY {
            return Err(Error::input(format!(
                "vocabulary = {}: expected at least {}, since the tokens of a text are bytes",
                config.vocabulary,
                text::VOCABULARY
            )));
        }
        memory::require(Model::step_bytes(&config, settings.batch, settings.length))?;
        text.batch(settings.seed, 0, 1, settings.length)?;
        text.validation_batch(1, settings.length)?;
        let model = Model::new(config, settings.seed)?;
        Ok(Self { model, moments: Moments::new(&config), settings, text: text.fingerprint() })
    }

    /// How it is trained.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Fingerprint of the text that it began with.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.moments.steps
    }

    /// Whether all steps are taken.
    pub fn is_finished(&self) -> bool {
        self.steps() >= self.settings.schedule.steps
    }

    /// Mean loss of the windows for validation, in nats per token.
    ///
    /// # Errors
    /// As [`Model::loss`].
    pub fn validation_loss(&self, text: &Text) -> Result<f64> {
        let Settings { batch, length, validate_rows: rows, .. } = self.settings;
        let tokens = text.validation_batch(rows, length)?;
        let mut sum = 0.0;
        for tokens in tokens.chunks(batch * (length + 1)) {
            let rows = tokens.len() / (length + 1);
            sum += self.model.loss(tokens, rows, length)? * rows as f64;
        }
        Ok(sum / rows as f64)
    }

    /// Takes the next step.
    ///
    /// # Errors
    /// As [`Model::loss_and_grads`] and [`AdamW::step`]; then the model is as it was.
    pub fn step(&mut self, text: &Text) -> Result<Step> {
        self.step_by(&Reference, text)
    }

    /// The same with the recurrence of GDN by `kernel`, as in [`Model::loss_and_grads_by`]. The loss of validation is that of
    /// the reference, so that it tells about the parameters alone.
    ///
    /// # Errors
    /// As [`Training::step`], and what the kernel reports.
    pub fn step_by(&mut self, kernel: &dyn Kernel, text: &Text) -> Result<Step> {
        let start = Instant::now();
        let Settings { batch, length, schedule, optimizer, validate_every, seed, .. } = self.settings;
        let rate = schedule.rate(self.steps());
        let tokens = text.batch(seed, self.steps(), batch, length)?;
        let in_step = |error| match error {
            Error::Input(what) => Error::input(format!(
                "step {} of {}: {what}; where numbers are not finite, training has diverged: {REMEDY}",
                self.steps() + 1,
                schedule.steps
            )),
            other => other,
        };
        let (loss, grads) = self.model.loss_and_grads_by(kernel, &tokens, batch, length).map_err(in_step)?;
        let gradient_norm = optimizer.step(&mut self.model.parameters, &mut self.moments, &grads, rate)?;
        let latency_ms = start.elapsed().as_secs_f64() * 1e3;
        let due = validate_every > 0 && (self.steps().is_multiple_of(validate_every) || self.is_finished());
        let validation = due.then(|| self.validation_loss(text)).transpose()?;
        Ok(Step { step: self.steps(), steps: schedule.steps, loss, validation, rate, gradient_norm, latency_ms })
    }
}

/// Takes all steps that remain. `progress` sees each one and may stop the training after it, which goes on from there when
/// this is called again, or from a checkpoint.
///
/// ```no_run
/// use gdnlab::model::{config::{Mixer, ModelConfig, Size}, text::Text, train::{Settings, Training, train}};
/// use std::ops::ControlFlow;
/// let text = Text::of_system()?;
/// let mut training = Training::new(ModelConfig::preset(Mixer::Gdn, Size::Tiny), Settings::tiny(100, 1), &text)?;
/// train(&mut training, &text, |step| {
///     println!("{} {:.3}", step.step, step.loss);
///     ControlFlow::Continue(())
/// })?;
/// # Ok::<(), gdnlab::Error>(())
/// ```
///
/// # Errors
/// [`Error::Stopped`] where `progress` asked to stop before the last step, [`Error::Input`] where `text` is not the one that
/// the training began with, and what [`Training::step`] reports.
pub fn train(training: &mut Training, text: &Text, progress: impl FnMut(&Step) -> ControlFlow<()>) -> Result<()> {
    take_all(training, text, progress)
}

/// A training on whatever machine, as far as taking its steps needs it.
pub(super) trait Steps {
    /// Fingerprint of the text that it began with.
    fn text(&self) -> &str;
    fn is_finished(&self) -> bool;
    fn step(&mut self, text: &Text) -> Result<Step>;
}

impl Steps for Training {
    fn text(&self) -> &str {
        &self.text
    }

    fn is_finished(&self) -> bool {
        Self::is_finished(self)
    }

    fn step(&mut self, text: &Text) -> Result<Step> {
        Self::step(self, text)
    }
}

/// [`train`] on whatever machine.
pub(super) fn take_all(
    training: &mut impl Steps,
    text: &Text,
    mut progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<()> {
    if text.fingerprint() != training.text() {
        return Err(Error::input(format!(
            "{} ({} bytes) is not the text that this training began with: expected the one with fingerprint {}",
            text.name(),
            text.bytes(),
            training.text()
        )));
    }
    while !training.is_finished() {
        let step = training.step(text)?;
        if progress(&step).is_break() && !training.is_finished() {
            return Err(Error::Stopped);
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "train_tests.rs"]
pub(super) mod tests;
