//! Seed noise: how far apart are two trainings that differ in the seed, and two that differ in the kernel of the recurrence?
//!
//! All trainings take the same number of steps from the same settings. At the same steps each one reads the same windows of the
//! text, which nobody trains on, with the recurrence in float64: what its parameters have come to, and nothing else.

use crate::kernel::Kernel;
use crate::model::Parameters;
use crate::model::config::ModelConfig;
use crate::model::infer::{Reader, Tokens};
use crate::model::text::Text;
use crate::model::train::{Settings, Training};
use crate::numerics::Step;
use crate::problem::Tensor;
use crate::reference::Reference;
use crate::{Error, Result};
use std::ops::ControlFlow;

/// Windows that are read at each probe.
const PROBE_ROWS: usize = 8;

/// How one training differs from the others.
pub struct Variant<'a> {
    /// Name for tables, such as `other data order`.
    pub name: String,
    /// Seed of the parameters that it starts from.
    pub initialisation: u64,
    /// Seed of the order of the text.
    pub data: u64,
    /// What computes the recurrence, forward and backward.
    pub kernel: &'a dyn Kernel,
}

/// What a training had come to after some steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    /// Steps taken.
    pub step: u64,
    /// Loss on the windows, in nats per token.
    pub loss: f64,
    /// Logarithms of the probabilities of the next token, a row for each token that was read.
    log_probabilities: Vec<f64>,
    parameters: Parameters,
    /// Distance of the parameters from where they started.
    moved: f64,
}

/// One training.
#[derive(Clone, Debug, PartialEq)]
pub struct Trained {
    /// Name of the variant.
    pub name: String,
    /// Name of the kernel.
    pub kernel: String,
    /// Probes, in the order of the steps.
    pub probes: Vec<Probe>,
    vocabulary: usize,
}

/// How far one training is from another after the same number of steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Apart {
    /// Steps taken.
    pub step: u64,
    /// Difference of the losses in magnitude, in nats per token.
    pub loss: f64,
    /// RMS difference of the log probabilities, in nats.
    pub log_probability: f64,
    /// Mean over tokens of the divergence `sum_x p(x) ln(p(x) / q(x))`, in nats, with p of the other training.
    pub divergence: f64,
    /// Share of the tokens after which the two expect another one most.
    pub top_1: f64,
    /// Distance of the parameters, over the distance that those of the other have moved from where they started.
    pub parameters: f64,
}

/// Steps at which trainings of `steps` steps are probed: 1, 2, 5, 10, 20, 50 and so on, and the last.
pub fn probe_steps(steps: u64) -> Vec<u64> {
    let powers = std::iter::successors(Some(1u64), |power| power.checked_mul(10));
    let mut all: Vec<u64> =
        powers.flat_map(|power| [1, 2, 5].map(|n| power.saturating_mul(n))).take_while(|step| *step < steps).collect();
    all.push(steps);
    all
}

/// Trains a model for each of `variants`, and probes it after the steps of [`probe_steps`].
///
/// # Errors
/// [`Error::Stopped`] where `progress` asked to stop; otherwise as [`Training::new`] and [`Training::step_by`].
pub fn train_all(
    config: ModelConfig,
    settings: Settings,
    text: &Text,
    variants: &[Variant<'_>],
    mut progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Vec<Trained>> {
    let steps = settings.schedule.steps;
    let due = probe_steps(steps);
    let windows = text.validation_batch(PROBE_ROWS, settings.length)?;
    let mut all = Vec::new();
    for (index, variant) in variants.iter().enumerate() {
        let settings = Settings { validate_every: 0, seed: variant.data, ..settings };
        let mut training = Training::new(config, settings, text)?;
        let start = Parameters::initial(&config, variant.initialisation);
        training.model.parameters = start.clone();
        let mut probes = Vec::new();
        while !training.is_finished() {
            let done = index * steps as usize + training.steps() as usize;
            let step = Step { done, total: variants.len() * steps as usize, name: variant.name.clone() };
            if progress(&step).is_break() {
                return Err(Error::Stopped);
            }
            training.step_by(variant.kernel, text)?;
            if due.contains(&training.steps()) {
                probes.push(Probe::of(&training, &start, &windows)?);
            }
        }
        let kernel = variant.kernel.name().to_owned();
        all.push(Trained { name: variant.name.clone(), kernel, probes, vocabulary: config.vocabulary });
    }
    Ok(all)
}

impl Probe {
    fn of(training: &Training, start: &Parameters, windows: &[u32]) -> Result<Self> {
        let length = training.settings().length;
        let rows = windows.chunks_exact(length + 1);
        let read: Vec<u32> = rows.clone().flat_map(|row| &row[..length]).copied().collect();
        let targets = rows.clone().flat_map(|row| &row[1..]);
        let logits = Reader::new(&training.model, rows.len())?.read(Tokens::new(&read), &Reference)?;
        let vocabulary = training.model.config().vocabulary;
        let log_probabilities = log_softmax(logits, vocabulary);
        let of_targets =
            log_probabilities.chunks_exact(vocabulary).zip(targets).map(|(row, target)| row[*target as usize]);
        let loss = -of_targets.sum::<f64>() / read.len() as f64;
        let parameters = training.model.parameters.clone();
        let moved = distance(&parameters, start);
        Ok(Self { step: training.steps(), loss, log_probabilities, parameters, moved })
    }
}

/// `x - ln(sum e^x)` of each row.
fn log_softmax(mut logits: Tensor, vocabulary: usize) -> Vec<f64> {
    for row in logits.data.chunks_exact_mut(vocabulary) {
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - largest).exp()).sum();
        row.iter_mut().for_each(|x| *x -= largest + sum.ln());
    }
    logits.data
}

impl Trained {
    /// How far this one is from `other` at each probe.
    ///
    /// # Errors
    /// [`Error::Input`] where the two were not probed after the same steps on the same windows.
    pub fn apart_from(&self, other: &Self) -> Result<Vec<Apart>> {
        let steps = |trained: &Self| trained.probes.iter().map(|probe| probe.step).collect::<Vec<_>>();
        if steps(self) != steps(other) || self.vocabulary != other.vocabulary {
            return Err(Error::input(format!(
                "'{}' and '{}' were not probed after the same steps: expected trainings of one call of train_all",
                self.name, other.name
            )));
        }
        Ok(self.probes.iter().zip(&other.probes).map(|(a, b)| self.apart(a, b)).collect())
    }

    fn apart(&self, a: &Probe, b: &Probe) -> Apart {
        let rows =
            || a.log_probabilities.chunks_exact(self.vocabulary).zip(b.log_probabilities.chunks_exact(self.vocabulary));
        let tokens = rows().len().max(1) as f64;
        let pairs = || a.log_probabilities.iter().zip(&b.log_probabilities);
        let squares: f64 = pairs().map(|(a, b)| (a - b).powi(2)).sum();
        let other_first = rows().filter(|(a, b)| largest_at(a) != largest_at(b)).count();
        Apart {
            step: a.step,
            loss: (a.loss - b.loss).abs(),
            log_probability: (squares / pairs().len().max(1) as f64).sqrt(),
            divergence: pairs().map(|(a, b)| b.exp() * (b - a)).sum::<f64>() / tokens,
            top_1: other_first as f64 / tokens,
            parameters: distance(&a.parameters, &b.parameters) / b.moved,
        }
    }
}

/// Euclidean distance over all tensors.
fn distance(a: &Parameters, b: &Parameters) -> f64 {
    let pairs = a.iter().zip(b.iter()).flat_map(|((_, a), (_, b))| a.data.iter().zip(&b.data));
    pairs.map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
}

fn largest_at(row: &[f64]) -> Option<usize> {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunked::Chunked;
    use crate::model::config::{Mixer, Size};
    use crate::precision::Policy;

    fn text() -> Text {
        let words: Vec<String> = (0..800).map(|n| format!("{} plus {} is {}\n", n, n % 7, n + n % 7)).collect();
        Text::new("sums", [words.concat().as_bytes()])
    }

    fn trained() -> Vec<Trained> {
        let config =
            ModelConfig { d_model: 32, layers: 1, heads: 1, hidden: 64, ..ModelConfig::preset(Mixer::Gdn, Size::Tiny) };
        let settings = Settings { batch: 2, length: 32, ..Settings::tiny(12, 1) };
        let policies = [Policy::fp64(), Policy::fp32(), Policy::bf16()];
        let kernels = policies.map(|policy| Chunked::new("mine", policy, 16).unwrap());
        let variant =
            |name: &str, initialisation, data, kernel| Variant { name: name.to_owned(), initialisation, data, kernel };
        let variants = [
            variant("base", 1, 1, &Reference as &dyn Kernel),
            variant("same", 1, 1, &Reference),
            variant("fp64", 1, 1, &kernels[0]),
            variant("fp32", 1, 1, &kernels[1]),
            variant("bf16", 1, 1, &kernels[2]),
            variant("data", 1, 2, &Reference),
            variant("start", 2, 1, &Reference),
        ];
        train_all(config, settings, &text(), &variants, |_| ControlFlow::Continue(())).unwrap()
    }

    #[test]
    fn kernels_are_apart_by_their_precision_and_seeds_by_far_more() {
        let all = trained();
        let last = |index: usize| *all[index].apart_from(&all[0]).unwrap().last().unwrap();
        assert_eq!(
            last(1),
            Apart { step: 12, loss: 0.0, log_probability: 0.0, divergence: 0.0, top_1: 0.0, parameters: 0.0 }
        );
        let [fp64, fp32, bf16, data, start] = [2, 3, 4, 5, 6].map(last);
        assert!(fp64.parameters < 1e-9 && fp64.parameters > 0.0, "{fp64:?}");
        assert!(fp64.parameters < fp32.parameters && fp32.parameters < bf16.parameters / 10.0, "{fp32:?} {bf16:?}");
        assert!(
            bf16.log_probability < data.log_probability && data.parameters < start.parameters,
            "{data:?} {start:?}"
        );
        assert!(start.parameters > 1.0, "other parameters altogether: {start:?}");
        assert!([fp32, bf16, data, start].iter().all(|apart| apart.divergence > -1e-12), "{data:?}");
        assert_eq!(all[0].probes.iter().map(|probe| probe.step).collect::<Vec<_>>(), [1, 2, 5, 10, 12]);
        assert!(all[0].probes[4].loss < all[0].probes[0].loss);
    }

    #[test]
    fn probes_come_at_steps_of_a_logarithmic_axis() {
        assert_eq!(probe_steps(1), [1]);
        assert_eq!(probe_steps(20), [1, 2, 5, 10, 20]);
        assert_eq!(probe_steps(150), [1, 2, 5, 10, 20, 50, 100, 150]);
    }

    #[test]
    fn what_was_not_probed_alike_is_not_compared() {
        let all = trained();
        let shorter = Trained { probes: all[0].probes[..2].to_vec(), ..all[0].clone() };
        assert!(shorter.apart_from(&all[1]).unwrap_err().to_string().contains("the same steps"));
    }
}
