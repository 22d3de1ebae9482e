//! Training throughput of the models of the ladder on a GPU.
//!
//! Each model trains on random tokens of its whole vocabulary, which cost what those of a text cost; a step is the whole of
//! it, with clipping and the optimizer. The time is that of the clock on the wall from one moment when the GPU is idle to
//! the next, over many steps, uploads of tokens included.

use super::{Ceilings, Samples};
use crate::cost::model::{Batch, Utilization, training_cost_per_token};
use crate::cuda::{Gpu, KernelSum};
use crate::model::config::{Mixer, ModelConfig, Size};
use crate::model::gpu::{GpuOptions, GpuTraining};
use crate::model::text::Text;
use crate::model::train::Settings;
use crate::numerics::Step;
use crate::precision::Format;
use crate::record::{Environment, Ladder, Measurement, Pass, Record, StepKernel, Workload};
use crate::{Error, Result};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::fmt;
use std::ops::ControlFlow;
use std::time::Instant;

/// Seed of weights and tokens.
const SEED: u64 = 1;
/// Steps before the first that is timed.
const WARM_UP: u64 = 3;
/// Times that are taken, of so many steps each.
const SAMPLES: u64 = 5;
const STEPS: u64 = 4;
/// Different batches of tokens, which take turns.
const BATCHES: u64 = 2;

/// A model of the ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rung {
    /// Its mixer.
    pub mixer: Mixer,
    /// Its size.
    pub size: Size,
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.mixer.name(), self.size.name())
    }
}

impl Rung {
    /// Those of the post.
    pub fn all() -> Vec<Self> {
        let sizes = [Size::M30, Size::M60, Size::M125, Size::M250];
        [Mixer::Attention, Mixer::Gdn].into_iter().flat_map(|mixer| sizes.map(|size| Self { mixer, size })).collect()
    }

    fn config(&self) -> ModelConfig {
        ModelConfig::preset(self.mixer, self.size)
    }
}

/// What one model reached.
#[derive(Clone, Debug, PartialEq)]
pub struct Throughput {
    /// Milliseconds of a step.
    pub step_ms: Samples,
    /// Memory of the GPU that it took, in gigabytes of 10^9 bytes, what the library of products keeps included.
    pub peak_gb: f64,
    /// Loss of the last batch, in nats per token.
    pub loss: f64,
    /// The kernels of a step, launched one by one, by name; the largest first.
    pub kernels: Vec<KernelSum>,
}

/// What came of a model.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It was measured.
    Measured(Throughput),
    /// There is a record of the same code and GPU.
    Recorded,
    /// It could not run, in words.
    Failed(String),
}

/// One model of the ladder and what came of it.
#[derive(Clone, Debug)]
pub struct Row {
    /// The model.
    pub rung: Rung,
    /// What came of it.
    pub outcome: Outcome,
}

/// What was measured.
#[derive(Clone, Debug, Default)]
pub struct Finished {
    /// In the order of the models.
    pub rows: Vec<Row>,
    /// Whether it was stopped before the end.
    pub stopped: bool,
}

/// Trains each model for some steps of `batch`. Those that `known` has for this code and GPU are skipped. `keep` gets each
/// row as soon as it is measured; `watch` is told what comes next, and asked between samples.
///
/// # Errors
/// What `keep` returns, and [`Error::Input`] for a batch without tokens.
pub fn run(
    rungs: &[Rung],
    batch: &Batch,
    gpu: &'static Gpu,
    known: &[Record],
    mut keep: impl FnMut(&Row) -> Result<()>,
    mut watch: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Finished> {
    batch.validate()?;
    let environment = Environment::detect();
    let mut finished = Finished::default();
    for &rung in rungs {
        let step = Step { done: finished.rows.len(), total: rungs.len(), name: rung.to_string() };
        let mut go_on = || watch(&step);
        if go_on().is_break() {
            return Ok(Finished { stopped: true, ..finished });
        }
        let outcome = if is_known(rung, batch, &environment, known) {
            Outcome::Recorded
        } else {
            match measure(rung, batch, gpu, &mut go_on) {
                Ok(throughput) => Outcome::Measured(throughput),
                Err(Error::Stopped) => return Ok(Finished { stopped: true, ..finished }),
                Err(error) => Outcome::Failed(error.to_string()),
            }
        };
        let row = Row { rung, outcome };
        keep(&row)?;
        finished.rows.push(row);
    }
    Ok(finished)
}

/// Whether `known` has this model for the very code and machine.
fn is_known(rung: Rung, batch: &Batch, environment: &Environment, known: &[Record]) -> bool {
    known.iter().any(|record| {
        let Measurement::Ladder(ladder) = &record.measurement else { return false };
        record.is_of(environment)
            && (ladder.mixer.as_str(), ladder.size.as_str()) == (rung.mixer.name(), rung.size.name())
            && (record.workload.batch, record.workload.tokens) == (Some(batch.sequences), Some(batch.tokens))
    })
}

fn measure(
    rung: Rung,
    batch: &Batch,
    gpu: &'static Gpu,
    go_on: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<Throughput> {
    let config = rung.config();
    let steps = WARM_UP + SAMPLES * STEPS;
    let settings = Settings {
        batch: batch.sequences,
        length: batch.tokens,
        validate_every: 0,
        validate_rows: 1,
        ..Settings::tiny(steps, SEED)
    };
    gpu.synchronize()?;
    let free = gpu.free_bytes()?;
    // A text is asked for, and not used.
    let text = Text::new("bytes", [vec![b'a'; 40 * (batch.tokens + 1)].as_slice()]);
    let options = GpuOptions { tuned: true, ..GpuOptions::default() };
    let mut training = GpuTraining::new(gpu, config, settings, options, &text)?;
    let mut rng = ChaCha8Rng::seed_from_u64(SEED);
    let count = batch.sequences * (batch.tokens + 1);
    let vocabulary = config.vocabulary as u32;
    let batches: Vec<Vec<u32>> =
        (0..BATCHES).map(|_| (0..count).map(|_| rng.random_range(0..vocabulary)).collect()).collect();
    let mut next = batches.iter().cycle();
    let mut take = |training: &mut GpuTraining, steps: u64| -> Result<()> {
        (0..steps).zip(&mut next).try_for_each(|(_, tokens)| training.start_step(tokens))
    };
    take(&mut training, WARM_UP)?;
    training.last()?;
    let taken = free.saturating_sub(gpu.free_bytes()?);
    let mut step_ms = Vec::new();
    for _ in 0..SAMPLES {
        if go_on().is_break() {
            return Err(Error::Stopped);
        }
        gpu.synchronize()?;
        let start = Instant::now();
        take(&mut training, STEPS)?;
        gpu.synchronize()?;
        step_ms.push(start.elapsed().as_secs_f64() * 1e3 / STEPS as f64);
    }
    let loss = training.last()?.loss;
    if !loss.is_finite() {
        return Err(Error::gpu(format!("{rung}: the loss became {loss}: expected a finite number")));
    }
    let kernels = KernelSum::of(&training.kernel_times(&batches[0])?);
    Ok(Throughput { step_ms: Samples::new(step_ms)?, peak_gb: taken as f64 / 1e9, loss, kernels })
}

impl Throughput {
    /// Tokens per second at the median step.
    pub fn tok_per_s(&self, batch: &Batch) -> f64 {
        batch.total_tokens() as f64 / self.step_ms.median() * 1e3
    }
}

impl Row {
    /// What its rate makes of the machine, where it was measured.
    pub fn utilization(&self, batch: &Batch, ceilings: &Ceilings<'_>) -> Option<Utilization> {
        let Outcome::Measured(throughput) = &self.outcome else { return None };
        let (rates, _) = ceilings.rates(Format::Bf16);
        let per_token = training_cost_per_token(&self.rung.config(), batch);
        Some(Utilization::new(&per_token, throughput.tok_per_s(batch), &rates))
    }

    /// This row as a record, where it was measured.
    pub fn record(&self, batch: &Batch, ceilings: &Ceilings<'_>, environment: &Environment) -> Option<Record> {
        let Outcome::Measured(throughput) = &self.outcome else { return None };
        let utilization = self.utilization(batch, ceilings)?;
        let config = self.rung.config();
        let ladder = Ladder {
            mixer: self.rung.mixer.name().to_owned(),
            size: self.rung.size.name().to_owned(),
            d_model: config.d_model,
            layers: config.layers,
            body_params: config.parameters().body(),
            tok_per_s: throughput.tok_per_s(batch),
            us_per_tok: utilization.us_per_tok,
            peak_gb: Some(throughput.peak_gb),
            mfu: utilization.mfu,
            bandwidth_fraction: Some(utilization.bandwidth_fraction),
        };
        Some(Record::new(environment, &workload(batch), Measurement::Ladder(ladder)))
    }

    /// A record for each kernel of a step, the one that takes longest first; none where the model was not measured.
    pub fn kernel_records(&self, batch: &Batch, environment: &Environment) -> Vec<Record> {
        let Outcome::Measured(throughput) = &self.outcome else { return Vec::new() };
        let record = |sum: &KernelSum| {
            let workload = Workload { kernel: Some(sum.name.clone()), ..workload(batch) }.pass(Pass::Step);
            let kernel = StepKernel {
                mixer: self.rung.mixer.name().to_owned(),
                size: self.rung.size.name().to_owned(),
                launches: sum.launches,
                latency_ms: sum.ms,
            };
            Record::new(environment, &workload, Measurement::Kernels(kernel))
        };
        throughput.kernels.iter().map(record).collect()
    }
}

fn workload(batch: &Batch) -> Workload {
    Workload {
        batch: Some(batch.sequences),
        tokens: Some(batch.tokens),
        mode: Some("bf16".to_owned()),
        seed: Some(SEED),
        ..Workload::default()
    }
}

/// The table of a person.
pub struct Report<'a> {
    /// What was measured.
    pub finished: &'a Finished,
    /// What a step had.
    pub batch: &'a Batch,
    /// What the hardware allows.
    pub ceilings: &'a Ceilings<'a>,
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (_, basis) = self.ceilings.rates(Format::Bf16);
        let Batch { sequences, tokens } = self.batch;
        writeln!(f, "training steps of {sequences} x {tokens} tokens; MFU and BW: {basis}")?;
        writeln!(
            f,
            "{:<14} {:>10} {:>9} {:>9} {:>8} {:>7} {:>7} {:>8}",
            "model", "tok/s", "us/token", "ms/step", "peak GB", "MFU %", "BW %", "loss"
        )?;
        for row in &self.finished.rows {
            write!(f, "{:<14} ", row.rung.to_string())?;
            match (&row.outcome, row.utilization(self.batch, self.ceilings)) {
                (Outcome::Measured(throughput), Some(utilization)) => writeln!(
                    f,
                    "{:>10.0} {:>9.3} {:>9.2} {:>8.1} {:>7} {:>7.1} {:>8.3}",
                    throughput.tok_per_s(self.batch),
                    utilization.us_per_tok,
                    throughput.step_ms.median(),
                    throughput.peak_gb,
                    utilization.mfu.map_or_else(|| "-".to_owned(), |mfu| format!("{:.1}", 100.0 * mfu)),
                    100.0 * utilization.bandwidth_fraction,
                    throughput.loss
                )?,
                (Outcome::Failed(why), _) => writeln!(f, "failed: {why}")?,
                _ => writeln!(f, "recorded before")?,
            }
        }
        if self.finished.stopped { writeln!(f, "stopped before the end") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_has_both_mixers_in_four_sizes() {
        let names: Vec<String> = Rung::all().iter().map(Rung::to_string).collect();
        assert_eq!(names.len(), 8);
        assert!(names.iter().any(|name| name.contains("125M")));
    }

    #[test]
    fn a_rate_follows_from_the_median_step() {
        let step_ms = Samples::new(vec![40.0, 50.0, 80.0]).unwrap();
        let throughput = Throughput { step_ms, peak_gb: 1.0, loss: 1.0, kernels: Vec::new() };
        let rate = throughput.tok_per_s(&Batch { sequences: 4, tokens: 100 });
        assert!((rate - 8000.0).abs() < 1e-9);
    }
}
