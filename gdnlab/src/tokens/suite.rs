//! The three experiments for a list of kernels, as records.

use super::{Decoded, Padding, Prompts, Reading, Unpadded, decode, greedy};
use crate::kernel::Kernel;
use crate::model::Model;
use crate::model::config::{Mixer, ModelConfig, Size};
use crate::model::text::Text;
use crate::model::train::{self, Settings, Training, train};
use crate::numerics::Step;
use crate::problem::Op;
use crate::record::{Environment, Experiment, Measurement, Record, TokenFlips, Workload};
use crate::reference::Reference;
use crate::{Error, Result};
use std::ops::ControlFlow;

/// The tiny model of GDN after `steps` steps on `text`.
///
/// # Errors
/// As [`Training::new`] and [`train()`].
pub fn trained(
    text: &Text,
    steps: u64,
    seed: u64,
    progress: impl FnMut(&train::Step) -> ControlFlow<()>,
) -> Result<Training> {
    let mut training = Training::new(ModelConfig::preset(Mixer::Gdn, Size::Tiny), Settings::tiny(steps, seed), text)?;
    train(&mut training, text, progress)?;
    Ok(training)
}

/// A model and the text that it was trained on.
pub struct Taught<'a> {
    /// The model.
    pub model: &'a Model,
    /// What records call it: its sizes and how far it was trained.
    pub name: String,
    /// The text, of which it has not seen the part for validation.
    pub text: &'a Text,
}

impl<'a> Taught<'a> {
    /// The model of `training`, which learnt from `text`.
    pub fn new(training: &'a Training, text: &'a Text) -> Self {
        let Settings { batch, length, seed, .. } = *training.settings();
        let (config, steps) = (training.model.config(), training.steps());
        let name = format!("{config}, {steps} steps of {batch} x {length} bytes, seed {seed}");
        Self { model: &training.model, name, text }
    }
}

/// How much is asked of each kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Suite {
    /// Rows of text that are read position by position, and tokens of each.
    pub rows: usize,
    /// Tokens of a row.
    pub length: usize,
    /// Prompts that are decoded and padded.
    pub prompts: usize,
    /// Tokens of a prompt.
    pub prompt_length: usize,
    /// Tokens that are decoded after each.
    pub decoded: usize,
    /// Tokens that prompts are padded to.
    pub padded: usize,
}

impl Default for Suite {
    /// What a CPU does for a kernel in a few seconds.
    fn default() -> Self {
        Self { rows: 64, length: 512, prompts: 32, prompt_length: 48, decoded: 128, padded: 1024 }
    }
}

/// A kernel under test.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// The kernel.
    pub kernel: &'a dyn Kernel,
    /// Whether it is only asked position by position.
    pub forced_alone: bool,
}

/// What was measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finished {
    /// In the order of the kernels.
    pub records: Vec<Record>,
    /// Kernels that failed, and why.
    pub failures: Vec<(String, String)>,
    /// Kernels that were recorded before, by the very code.
    pub known: usize,
    /// Whether it was stopped before the end.
    pub stopped: bool,
}

impl Suite {
    /// Asks every subject, each on its own: one that fails is listed, and the others go on. Those that `known` has for this
    /// model and the very code are skipped; `keep` gets the records of a kernel as soon as they are there.
    ///
    /// # Errors
    /// [`Error::Input`] where the text is too short, and what `keep` returns.
    pub fn run(
        &self,
        taught: &Taught<'_>,
        subjects: &[Subject<'_>],
        known: &[Record],
        mut keep: impl FnMut(&[Record]) -> Result<()>,
        mut progress: impl FnMut(&Step) -> ControlFlow<()>,
    ) -> Result<Finished> {
        let Taught { model, name, text } = taught;
        let rows = Prompts::of_text(text, self.rows, self.length)?;
        let prompts = Prompts::of_text(text, self.prompts, self.prompt_length)?;
        let environment = Environment::detect();
        let mut finished = Finished::default();
        let mut exact = Exact::default();
        for (index, subject) in subjects.iter().enumerate() {
            let kernel = subject.kernel;
            if self.is_known(*subject, name, known, &environment) {
                finished.known += 1;
                continue;
            }
            let step = Step { done: index, total: subjects.len(), name: kernel.name().to_owned() };
            let mut go_on = || progress(&step);
            let asked = Asked { suite: self, model, rows: &rows, prompts: &prompts };
            let outcome = asked.ask(*subject, &mut exact, &mut go_on);
            match outcome {
                Err(Error::Stopped) => return Ok(Finished { stopped: true, ..finished }),
                Err(error) => finished.failures.push((kernel.name().to_owned(), error.to_string())),
                Ok(all) => {
                    let environment = environment.of_kernel(kernel);
                    let record = |flips: TokenFlips| {
                        let workload = self.workload(&flips).kernel(kernel.name(), kernel.mode());
                        let flips = TokenFlips { model: name.clone(), ..flips };
                        Record::new(&environment, &workload, Measurement::Tokens(flips))
                    };
                    let records: Vec<Record> = all.into_iter().map(record).collect();
                    keep(&records)?;
                    finished.records.extend(records);
                }
            }
        }
        Ok(finished)
    }

    fn workload(&self, flips: &TokenFlips) -> Workload {
        let (batch, tokens) = match flips.experiment {
            Experiment::Forced => (self.rows, self.length),
            Experiment::Greedy => (self.prompts, self.prompt_length),
            Experiment::Padding => (self.prompts, self.padded),
        };
        Workload {
            op: Some(Op::Gdn.name().to_owned()),
            batch: Some(batch),
            tokens: Some(tokens),
            ..Workload::default()
        }
    }

    fn is_known(&self, subject: Subject<'_>, name: &str, known: &[Record], environment: &Environment) -> bool {
        if environment.dirty != Some(false) || environment.commit.is_none() {
            return false;
        }
        let mut wanted = vec![TokenFlips::default()];
        if !subject.forced_alone {
            wanted.push(TokenFlips { experiment: Experiment::Greedy, ..TokenFlips::default() });
            wanted.push(TokenFlips { experiment: Experiment::Padding, ..TokenFlips::default() });
        }
        let has = |wanted: &TokenFlips| {
            let workload = self.workload(wanted).kernel(subject.kernel.name(), subject.kernel.mode());
            known.iter().any(|record| match &record.measurement {
                Measurement::Tokens(flips) => {
                    (flips.experiment, flips.model.as_str()) == (wanted.experiment, name)
                        && record.workload == workload
                        && (&record.environment.commit, record.environment.dirty) == (&environment.commit, Some(false))
                        && record.environment.machine.cpu == environment.machine.cpu
                }
                _ => false,
            })
        };
        wanted.iter().all(has)
    }
}

/// What every subject is asked.
struct Asked<'a> {
    suite: &'a Suite,
    model: &'a Model,
    rows: &'a Prompts,
    prompts: &'a Prompts,
}

/// What the exact recurrence says, from the first subject on that is compared with it.
#[derive(Default)]
struct Exact<'a> {
    reading: Option<Reading<'a>>,
    decoded: Option<Decoded>,
    unpadded: Option<Unpadded<'a>>,
}

impl<'a> Asked<'a> {
    fn ask(
        &self,
        subject: Subject<'_>,
        exact: &mut Exact<'a>,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Vec<TokenFlips>> {
        let Self { suite, model, rows, prompts } = *self;
        let kernel = subject.kernel;
        let reading = kept(&mut exact.reading, || Reading::new(model, rows, go_on))?;
        let mut all = vec![reading.under(kernel, go_on)?.summary];
        if subject.forced_alone {
            return Ok(all);
        }
        let decoded = kept(&mut exact.decoded, || decode(model, prompts, suite.decoded, &Reference))?;
        all.push(greedy(model, prompts, decoded, kernel)?);
        let unpadded = kept(&mut exact.unpadded, || Unpadded::new(model, prompts))?;
        for padding in Padding::ALL {
            all.push(unpadded.under(padding, suite.padded, kernel, go_on)?);
        }
        Ok(all)
    }
}

/// What `place` holds, made where it is empty.
fn kept<T>(place: &mut Option<T>, make: impl FnOnce() -> Result<T>) -> Result<&T> {
    let value = match place.take() {
        Some(value) => value,
        None => make()?,
    };
    Ok(place.insert(value))
}
