//! `cargo lab train`.

use crate::checkout::Checkout;
use crate::output::{Interrupt, gpu_if_any, note, print};
use gdnlab::model::adamw::Schedule;
use gdnlab::model::config::{Mixer, ModelConfig, Size};
use gdnlab::model::gpu::{GpuOptions, GpuTraining};
use gdnlab::model::text::Text;
use gdnlab::model::train::{Settings, Step, Training};
use gdnlab::peer::Destination;
use gdnlab::record::{self, Environment, Measurement, Record, TrainingStep, Workload};
use gdnlab::{Error, Result};
use std::path::PathBuf;
use std::process::ExitCode;

/// Name of the records' file in `data/`.
const SUITE: &str = "training";
/// Steps between two lines for the person, and between two checkpoints.
const SAY_EVERY: u64 = 10;
const SAVE_EVERY: u64 = 100;

/// Train a model of the ladder on a text, byte by byte, on the GPU where there is one, else on the CPU in float64.
///
/// With --checkpoint the training is kept in a file every 100 steps and at the end. Where the file exists, the training goes
/// on from there, on the same machine to the same bits. Ctrl-C stops after a step and keeps it.
///
/// Exit code: 0 when all steps were taken, 130 when it was stopped, 2 for bad input.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab train --mixer gdn                                   the tiny model, on any machine
  cargo lab train --mixer gdn --size 30M --batch 32 --length 1024 --steps 300 --checkpoint gdn.safetensors --save")]
pub struct Args {
    /// Sequence mixer: attn or gdn.
    #[arg(long)]
    mixer: Mixer,
    /// Size of the model: tiny, 30M, 60M, 125M or 250M.
    #[arg(long, default_value = "tiny")]
    size: Size,
    /// Steps in all.
    #[arg(long, value_name = "N", default_value_t = 100)]
    steps: u64,
    /// Sequences of a step.
    #[arg(long, value_name = "B", default_value_t = 4)]
    batch: usize,
    /// Tokens of a sequence.
    #[arg(long, value_name = "T", default_value_t = 128)]
    length: usize,
    /// Largest learning rate, after a tenth of the steps; the last is a tenth of it. Without it, 3e-3 for the tiny model and
    /// 1e-3 for the others.
    #[arg(long, value_name = "RATE")]
    rate: Option<f64>,
    /// Seed of the weights and of the order of the text.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A file, or a folder of files, in UTF-8. Without it, a text of this system.
    #[arg(long, value_name = "PATH")]
    text: Option<PathBuf>,
    /// The file that keeps the training, and from which it goes on where it exists.
    #[arg(long, value_name = "FILE")]
    checkpoint: Option<PathBuf>,
    /// Train on the CPU, also where there is a GPU.
    #[arg(long)]
    cpu: bool,
    /// Add each step to the records in `data/`.
    #[arg(long)]
    save: bool,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        let data = if self.save { Some(Checkout::find()?.root().join("data")) } else { None };
        let text = self.text.as_ref().map_or_else(Text::of_system, Text::from_path)?;
        let destination = self.checkpoint.as_ref().map(|path| Destination::new(path, &[])).transpose()?;
        let interrupt = Interrupt::new()?;
        let mut training = self.training(&text)?;
        note(format_args!(
            "{} {} on {}, {:.1} MB of {}, {} of {} steps taken",
            self.mixer,
            self.size,
            training.place(),
            text.bytes() as f64 / 1e6,
            text.name(),
            training.steps(),
            self.steps
        ));
        let mut taken: Vec<Record> = Vec::new();
        let environment = Environment::detect();
        let mut last = None;
        while training.steps() < self.steps {
            let step = training.step(&text)?;
            taken.push(self.record(&step, &text, &environment));
            let stop = interrupt.control().is_break();
            let end = stop || step.step == self.steps;
            if step.step % SAY_EVERY == 0 || step.validation.is_some() || end {
                say(&step);
            }
            if step.step % SAVE_EVERY == 0 || end {
                destination.as_ref().map_or(Ok(()), |destination| training.save(destination))?;
                if let Some(data) = &data {
                    record::keep(data, SUITE, &std::mem::take(&mut taken))?;
                }
            }
            last = Some(step);
            if stop {
                break;
            }
        }
        let stopped = last.is_some_and(|step| step.step < self.steps);
        if stopped {
            match &self.checkpoint {
                Some(path) => {
                    note(format_args!("stopped; kept in {}, from where the same command goes on", path.display()))
                }
                None => note("stopped; nothing is kept without --checkpoint"),
            }
        }
        match last {
            None => print(&format!("all {} steps were taken before\n", self.steps))?,
            Some(step) => {
                let validation = validation(&step);
                print(&format!(
                    "step {} of {}: loss {:.4}{validation} nats per byte\n",
                    step.step, step.steps, step.loss
                ))?;
            }
        }
        Ok(if stopped { Interrupt::EXIT_CODE.into() } else { ExitCode::SUCCESS })
    }

    fn settings(&self) -> Settings {
        let tiny = Settings::tiny(self.steps, self.seed);
        let peak = self.rate.unwrap_or(if self.size == Size::Tiny { tiny.schedule.peak } else { 1e-3 });
        let schedule = Schedule { peak, floor: peak / 10.0, ..tiny.schedule };
        Settings { batch: self.batch, length: self.length, schedule, ..tiny }
    }

    /// A new training, or the one in the checkpoint.
    fn training(&self, text: &Text) -> Result<Trainer> {
        let gpu = if self.cpu { None } else { gpu_if_any("training")? };
        let (config, settings) = (ModelConfig::preset(self.mixer, self.size), self.settings());
        let options = GpuOptions { tuned: self.size != Size::Tiny, ..GpuOptions::default() };
        let Some(path) = self.checkpoint.as_ref().filter(|path| path.exists()) else {
            return match gpu {
                Some(gpu) => Ok(Trainer::Gpu(Box::new(GpuTraining::new(gpu, config, settings, options, text)?))),
                None => Ok(Trainer::Cpu(Box::new(Training::new(config, settings, text)?))),
            };
        };
        let training = match gpu {
            Some(gpu) => Trainer::Gpu(Box::new(GpuTraining::load(gpu, path, options)?)),
            None => Trainer::Cpu(Box::new(Training::load(path)?)),
        };
        let differing = differences((training.config(), training.settings()), (&config, &settings));
        if !differing.is_empty() {
            return Err(Error::input(format!(
                "{}: holds a training with other options: {}; give those, or another file",
                path.display(),
                differing.join(", ")
            )));
        }
        if training.text() != text.fingerprint() {
            return Err(Error::input(format!(
                "{}: was trained on another text than {}: expected the one with fingerprint {}",
                path.display(),
                text.name(),
                training.text()
            )));
        }
        Ok(training)
    }

    fn record(&self, step: &Step, text: &Text, environment: &Environment) -> Record {
        let workload = Workload {
            batch: Some(self.batch),
            tokens: Some(self.length),
            seed: Some(self.seed),
            ..Workload::default()
        };
        let step = TrainingStep {
            mixer: self.mixer.name().to_owned(),
            size: self.size.name().to_owned(),
            step: step.step,
            steps: step.steps,
            text: text.fingerprint(),
            loss: step.loss,
            validation: step.validation,
            rate: step.rate,
            gradient_norm: step.gradient_norm,
            latency_ms: step.latency_ms,
        };
        Record::new(environment, &workload, Measurement::Training(step))
    }
}

/// The options in which the training that a file holds differs from the one that was asked for.
fn differences(held: (&ModelConfig, &Settings), asked: (&ModelConfig, &Settings)) -> Vec<String> {
    let options = |(config, settings): (&ModelConfig, &Settings)| {
        [
            ("--mixer", config.mixer.to_string()),
            ("--steps", settings.schedule.steps.to_string()),
            ("--batch", settings.batch.to_string()),
            ("--length", settings.length.to_string()),
            ("--rate", settings.schedule.peak.to_string()),
            ("--seed", settings.seed.to_string()),
        ]
    };
    let pairs = options(held).into_iter().zip(options(asked));
    let mut differing: Vec<String> = pairs
        .filter(|(held, asked)| held.1 != asked.1)
        .map(|((name, held), (_, asked))| format!("{name} is {held} there and {asked} here"))
        .collect();
    if differing.is_empty() && held != asked {
        differing.push("--size or what this version trains with is another".to_owned());
    }
    differing
}

/// The loss of validation in words, where it was measured.
fn validation(step: &Step) -> String {
    step.validation.map_or_else(String::new, |loss| format!(", validation {loss:.4}"))
}

fn say(step: &Step) {
    let validation = validation(step);
    note(format_args!("[{}/{}] loss {:.4}{validation}, {:.1} ms", step.step, step.steps, step.loss, step.latency_ms));
}

/// A training on either machine.
enum Trainer {
    Gpu(Box<GpuTraining>),
    Cpu(Box<Training>),
}

impl Trainer {
    fn place(&self) -> &'static str {
        match self {
            Self::Gpu(_) => "the GPU, bf16",
            Self::Cpu(_) => "the CPU, float64",
        }
    }

    fn steps(&self) -> u64 {
        match self {
            Self::Gpu(training) => training.steps(),
            Self::Cpu(training) => training.steps(),
        }
    }

    fn config(&self) -> &ModelConfig {
        match self {
            Self::Gpu(training) => training.config(),
            Self::Cpu(training) => training.model.config(),
        }
    }

    fn settings(&self) -> &Settings {
        match self {
            Self::Gpu(training) => training.settings(),
            Self::Cpu(training) => training.settings(),
        }
    }

    fn text(&self) -> &str {
        match self {
            Self::Gpu(training) => training.text(),
            Self::Cpu(training) => training.text(),
        }
    }

    fn step(&mut self, text: &Text) -> Result<Step> {
        match self {
            Self::Gpu(training) => training.step(text),
            Self::Cpu(training) => training.step(text),
        }
    }

    fn save(&self, destination: &Destination) -> Result<()> {
        match self {
            Self::Gpu(training) => training.save(destination),
            Self::Cpu(training) => training.save(destination),
        }
    }
}
