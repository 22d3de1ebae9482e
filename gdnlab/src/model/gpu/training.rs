//! A model in training on a GPU.

use super::arena::Arena;
use super::inputs::{Inputs, optimizer_step};
use super::memory;
use super::products::Choice;
use super::sizes::Sizes;
use super::step::{Kernels, MixerKernels, Step as Launches};
use super::tensors::Tensors;
use crate::cost::memory::{Keep, TrainingMemory};
use crate::cost::model::Batch;
use crate::cuda::layers::View;
use crate::cuda::{self, Buffer, Element, Gpu, Graph, KernelTime};
use crate::model::adamw::REMEDY;
use crate::model::config::ModelConfig;
use crate::model::parameters::{Grads, Parameters};
use crate::model::text::{self, Text};
use crate::model::train::{Settings, Step, Steps, take_all};
use crate::{Error, Result, cost};
use half::bf16;
use std::ops::ControlFlow;
use std::time::Instant;

/// How a step is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuOptions {
    /// Whether the algorithm of each product is the fastest of several trials, which take seconds at the beginning. Two
    /// trainings may then differ by rounding; one that is resumed does not. Otherwise the library's heuristics choose, the
    /// same each time.
    pub tuned: bool,
    /// Whether a step is recorded once and replayed. Otherwise its kernels are launched one by one, to the same bits.
    pub graph: bool,
    /// Tokens whose logits are in memory at once, at the most.
    pub logit_tokens: usize,
}

impl Default for GpuOptions {
    fn default() -> Self {
        Self { tuned: false, graph: true, logit_tokens: 4096 }
    }
}

/// What the last step gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LastStep {
    /// Loss of the batch before the step, in nats per token.
    pub loss: f64,
    /// Norm of the gradient before clipping.
    pub gradient_norm: f64,
}

/// A model in training on a GPU: all that the next step depends on, but for the text.
///
/// ```no_run
/// use gdnlab::cuda::Gpu;
/// use gdnlab::model::{config::{Mixer, ModelConfig, Size}, text::Text, train::Settings};
/// use gdnlab::model::gpu::{GpuOptions, GpuTraining, train};
/// use std::ops::ControlFlow;
/// let text = Text::of_system()?;
/// let config = ModelConfig::preset(Mixer::Gdn, Size::M30);
/// let settings = Settings { batch: 32, length: 1024, ..Settings::tiny(100, 1) };
/// let mut training = GpuTraining::new(Gpu::shared()?, config, settings, GpuOptions::default(), &text)?;
/// train(&mut training, &text, |step| {
///     println!("{} {:.3}", step.step, step.loss);
///     ControlFlow::Continue(())
/// })?;
/// # Ok::<(), gdnlab::Error>(())
/// ```
pub struct GpuTraining {
    // Dropped before the memory that it refers to.
    graph: Option<Graph>,
    pub(super) gpu: &'static Gpu,
    pub(super) settings: Settings,
    /// Fingerprint of the text.
    pub(super) text: String,
    pub(super) steps: u64,
    options: GpuOptions,
    sizes: Sizes,
    pub(super) arena: Arena,
    pub(super) kernels: Kernels,
    pub(super) tensors: Tensors,
    /// What `tensors` was cut from.
    _memory: Buffer<u8>,
    inputs: Buffer<u32>,
    memory_bytes: TrainingMemory,
}

/// What a training begins with.
pub(super) struct Start<'a> {
    pub config: ModelConfig,
    pub settings: Settings,
    pub text: String,
    pub choice: Choice<'a>,
}

impl GpuTraining {
    /// Before the first step, with the parameters of [`Parameters::initial`].
    ///
    /// # Errors
    /// [`Error::Input`] where `config`, `settings` or `options` are not valid, there is no kernel for them, the vocabulary is
    /// smaller than that of bytes, the text is too short, or the memory of the GPU does not suffice (which is known before
    /// any is taken); [`Error::Gpu`] where a kernel or a library cannot be had.
    pub fn new(
        gpu: &'static Gpu,
        config: ModelConfig,
        settings: Settings,
        options: GpuOptions,
        text: &Text,
    ) -> Result<Self> {
        settings.validate()?;
        text.batch(settings.seed, 0, 1, settings.length)?;
        text.validation_batch(1, settings.length)?;
        let choice = if options.tuned { Choice::Tuned } else { Choice::Heuristics };
        let mut training =
            Self::without_parameters(gpu, options, Start { config, settings, text: text.fingerprint(), choice })?;
        training.set_parameters(&Parameters::initial(&config, settings.seed))?;
        Ok(training)
    }

    /// A training whose weights and moments are zeros.
    pub(super) fn without_parameters(gpu: &'static Gpu, options: GpuOptions, start: Start<'_>) -> Result<Self> {
        let Start { config, settings, text, choice } = start;
        settings.validate()?;
        config.validate()?;
        if config.vocabulary < text::VOCABULARY {
            return Err(Error::input(format!(
                "vocabulary = {}: expected at least {}, since the tokens of a text are bytes",
                config.vocabulary,
                text::VOCABULARY
            )));
        }
        let batch = Batch { sequences: settings.batch, tokens: settings.length };
        let sizes = Sizes { config, batch, logit_rows: options.logit_tokens };
        sizes.validate()?;
        // What is far too large is refused before a product of that size is asked for.
        let keep = Keep { logit_tokens: Some(options.logit_tokens), ..Keep::LEAN };
        cost::memory::require(&config, &batch, keep, gpu.free_bytes()?.saturating_mul(2))?;

        let arena = Arena::new(&config);
        let mut kernels = Kernels::new(gpu, &sizes, choice)?;
        let memory_bytes = memory::require(gpu, &sizes, &arena, &kernels)?;
        if let MixerKernels::Gdn(gdn) = &mut kernels.mixer {
            gdn.allocate(gpu)?;
        }
        let scratch = kernels.scratch(&sizes);
        let bytes = Tensors::lay_out(0, &sizes, &arena, &scratch).1.total;
        let bytes = usize::try_from(bytes).map_err(|_| Error::input(format!("{bytes} bytes for a step")))?;
        let mut memory = gpu.alloc(bytes)?;
        gpu.fill_bytes(&mut memory, 0)?;
        let tensors = Tensors::lay_out(memory.address(), &sizes, &arena, &scratch).0;
        let mut training = Self {
            graph: None,
            gpu,
            settings,
            text,
            steps: 0,
            options,
            sizes,
            arena,
            kernels,
            tensors,
            _memory: memory,
            inputs: gpu.alloc(Inputs::words(&sizes))?,
            memory_bytes,
        };
        training.prepare()?;
        Ok(training)
    }

    /// Runs a step, after which every kernel is loaded, and records one. All weights are zeros, and so are all gradients:
    /// nothing changes.
    fn prepare(&mut self) -> Result<()> {
        let tokens = vec![0; self.settings.batch * (self.settings.length + 1)];
        self.upload(&tokens, 0.0)?;
        // SAFETY: the memory lives as long as `self`, which waits in `drop`; only the GPU's stream works on it.
        unsafe { self.launches().all(self.gpu.stream())? };
        self.gpu.synchronize()?;
        if self.options.graph {
            // SAFETY: as above; `self` drops the graph before the memory.
            self.graph = Some(self.gpu.capture(|stream| unsafe { self.launches().all(stream) })?);
        }
        Ok(())
    }

    fn launches(&self) -> Launches<'_> {
        let Self { sizes, arena, kernels, tensors, inputs, .. } = self;
        Launches { sizes, arena, kernels, tensors, inputs: Inputs::of(inputs, sizes) }
    }

    /// Waits for the step before, and uploads the inputs of the next.
    fn upload(&mut self, tokens: &[u32], rate: f64) -> Result<()> {
        let step = optimizer_step(&self.settings.optimizer, rate, self.steps + 1);
        let words = Inputs::pack(&self.sizes, tokens, &step)?;
        self.gpu.stream().upload(&words, &mut self.inputs)
    }

    /// Sets all weights, in binary32 and bf16.
    pub(super) fn set_parameters(&mut self, parameters: &Parameters) -> Result<()> {
        let weights = self.arena.gather(parameters)?;
        let rounded: Vec<bf16> = weights.iter().map(|&x| bf16::from_f32(x)).collect();
        self.write(self.tensors.state.weights, &weights)?;
        self.write(self.tensors.state.rounded, &rounded)
    }

    /// The model's sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.sizes.config
    }

    /// How it is trained.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// How a step is computed.
    pub fn options(&self) -> &GpuOptions {
        &self.options
    }

    /// Memory on the GPU by what it is for.
    pub fn memory(&self) -> &TrainingMemory {
        &self.memory_bytes
    }

    /// Fingerprint of the text that it began with.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Whether all steps are taken.
    pub fn is_finished(&self) -> bool {
        self.steps >= self.settings.schedule.steps
    }

    /// The parameters as they are now.
    ///
    /// # Errors
    /// [`Error::Gpu`] where a kernel has failed.
    pub fn parameters(&self) -> Result<Parameters> {
        self.read_arena(self.tensors.state.weights)
    }

    /// Starts a step on `tokens`, `B` rows of `T + 1` of which the first `T` are read and the last `T` predicted, and does
    /// not wait for it. Where the gradient is not finite it changes nothing; [`GpuTraining::last`] tells.
    ///
    /// # Errors
    /// [`Error::Input`] where there are not so many tokens of the vocabulary, or all steps are taken; [`Error::Gpu`] where
    /// the driver refuses.
    pub fn start_step(&mut self, tokens: &[u32]) -> Result<()> {
        if self.is_finished() {
            return Err(Error::input(format!("all {} steps are taken", self.steps)));
        }
        self.upload(tokens, self.settings.schedule.rate(self.steps))?;
        match &self.graph {
            Some(graph) => graph.replay(self.gpu.stream())?,
            // SAFETY: the memory lives as long as `self`, which waits in `drop`; only the GPU's stream works on it.
            None => unsafe { self.launches().all(self.gpu.stream())? },
        }
        self.steps += 1;
        Ok(())
    }

    /// Waits for the last step, and tells what it gave.
    ///
    /// # Errors
    /// [`Error::Gpu`] where a kernel has failed.
    pub fn last(&self) -> Result<LastStep> {
        let loss = self.read(self.tensors.state.loss)?[0];
        let norm = self.read(self.tensors.state.norm)?[0].norm;
        Ok(LastStep { loss: loss.into(), gradient_norm: norm })
    }

    /// Takes the next step on `text`.
    ///
    /// # Errors
    /// As [`GpuTraining::start_step`], and [`Error::Input`] where loss or gradient are not finite; then the model is as it
    /// was.
    pub fn step(&mut self, text: &Text) -> Result<Step> {
        let start = Instant::now();
        let Settings { batch, length, schedule, validate_every, seed, .. } = self.settings;
        let rate = schedule.rate(self.steps);
        self.start_step(&text.batch(seed, self.steps, batch, length)?)?;
        let LastStep { loss, gradient_norm } = self.last()?;
        if !(loss.is_finite() && gradient_norm.is_finite()) {
            self.steps -= 1;
            return Err(Error::input(format!(
                "step {} of {}: the loss is {loss} and the norm of the gradient {gradient_norm}: training has diverged: {REMEDY}",
                self.steps + 1,
                schedule.steps
            )));
        }
        let latency_ms = start.elapsed().as_secs_f64() * 1e3;
        let due = validate_every > 0 && (self.steps.is_multiple_of(validate_every) || self.is_finished());
        let validation = due.then(|| self.validation_loss(text)).transpose()?;
        Ok(Step { step: self.steps, steps: schedule.steps, loss, validation, rate, gradient_norm, latency_ms })
    }

    /// The loss of `tokens`, as [`GpuTraining::start_step`] takes them, and its gradient by every parameter. Nothing is
    /// changed but what [`GpuTraining::last`] tells.
    ///
    /// # Errors
    /// As [`GpuTraining::start_step`].
    pub fn loss_and_grads(&mut self, tokens: &[u32]) -> Result<(f64, Grads)> {
        self.upload(tokens, 0.0)?;
        // SAFETY: the memory lives as long as `self`, which waits in `drop`; only the GPU's stream works on it.
        unsafe { self.launches().gradients(self.gpu.stream())? };
        let loss = self.read(self.tensors.state.loss)?[0];
        Ok((loss.into(), self.read_arena(self.tensors.state.gradient)?))
    }

    /// The time of each kernel and product of a step on `tokens`, in their order, launched one by one. It uses the training
    /// up: two steps are taken.
    ///
    /// # Errors
    /// As [`GpuTraining::start_step`].
    pub fn kernel_times(mut self, tokens: &[u32]) -> Result<Vec<KernelTime>> {
        self.upload(tokens, 0.0)?;
        let stream = self.gpu.stream();
        // SAFETY: as in `loss_and_grads`.
        let step = || unsafe { self.launches().all(stream) };
        // The first keeps the GPU busy while the second is launched.
        step()?;
        cuda::kernel_times(stream, step)
    }

    /// Mean loss of the windows for validation, in nats per token.
    ///
    /// # Errors
    /// As [`GpuTraining::start_step`], and [`Error::Input`] where the text is too short.
    pub fn validation_loss(&mut self, text: &Text) -> Result<f64> {
        let Settings { batch, length, validate_rows: rows, .. } = self.settings;
        let tokens = text.validation_batch(rows, length)?;
        let mut sum = 0.0;
        for tokens in tokens.chunks(batch * (length + 1)) {
            // A batch that is not full is filled with its first row, which then does not count.
            let (given, mut filled) = (tokens.len() / (length + 1), tokens.to_vec());
            (given..batch).for_each(|_| filled.extend_from_slice(&tokens[..=length]));
            self.upload(&filled, 0.0)?;
            // SAFETY: as in `loss_and_grads`.
            unsafe { self.launches().loss(self.gpu.stream())? };
            let losses = self.read(self.tensors.state.losses)?;
            sum += losses[..given * length].iter().map(|&loss| f64::from(loss)).sum::<f64>();
        }
        Ok(sum / (rows * length) as f64)
    }

    /// What lies at `view`, a part of this training's memory, once all that was started before has ended.
    pub(super) fn read<T: Element>(&self, view: View<T>) -> Result<Vec<T>> {
        // SAFETY: the view was cut from memory that lives as long as `self`.
        unsafe { self.gpu.stream().download_from(view.address(), view.len()) }
    }

    /// Overwrites what lies at `view`, a part of this training's memory.
    pub(super) fn write<T: Element>(&self, view: View<T>, values: &[T]) -> Result<()> {
        if values.len() != view.len() {
            return Err(Error::input(format!("{} values into memory of {}", values.len(), view.len())));
        }
        // SAFETY: the view was cut from memory that lives as long as `self`, and is as long as the values.
        unsafe { self.gpu.stream().upload_to(values, view.address()) }
    }

    /// What lies in an arena, by parameter.
    pub(super) fn read_arena(&self, arena: View<f32>) -> Result<Parameters> {
        self.arena.scatter(&self.read(arena)?)
    }
}

impl Drop for GpuTraining {
    fn drop(&mut self) {
        // A failure has been or will be reported by whoever waits for results.
        let _ = self.gpu.synchronize();
    }
}

/// Takes all steps that remain, as [`crate::model::train::train`] does.
///
/// # Errors
/// [`Error::Stopped`] where `progress` asked to stop before the last step, [`Error::Input`] where `text` is not the one that
/// the training began with, and what [`GpuTraining::step`] reports.
pub fn train(training: &mut GpuTraining, text: &Text, progress: impl FnMut(&Step) -> ControlFlow<()>) -> Result<()> {
    take_all(training, text, progress)
}

impl Steps for GpuTraining {
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
