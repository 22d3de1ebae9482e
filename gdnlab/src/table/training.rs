//! Trainings on a CPU, step by step.

use super::roofline::rates;
use super::rows::{distinct, median};
use crate::Result;
use crate::cost::model::{Batch, training_cost_per_token};
use crate::model::train::{Step, Training};
use crate::record::{Measurement, Record, TrainingStep};
use gdnlab_deps::polars::prelude::*;

/// The products of [`crate::model`], whose rate MFU is held against.
const PRODUCTS: &str = "fp64_matmul";

/// A finished training and its steps, as [`crate::model::train::train`] reports them.
pub type Trained<'a> = (&'a Training, &'a [Step]);

/// The losses of `trainings` in nats per token: a row per step with the columns mixer, step, loss (of the batch, before
/// the step) and validation (after it, where it was measured).
///
/// # Errors
/// [`crate::Error::Table`] where polars cannot build the table.
pub fn losses(trainings: &[Trained<'_>]) -> Result<DataFrame> {
    let rows: Vec<(&str, &Step)> = trainings
        .iter()
        .flat_map(|(training, steps)| steps.iter().map(|step| (training.model.config().mixer.name(), step)))
        .collect();
    let columns = vec![
        Column::new("mixer".into(), rows.iter().map(|(mixer, _)| *mixer).collect::<Vec<_>>()),
        Column::new("step".into(), rows.iter().map(|(_, step)| step.step as u32).collect::<Vec<_>>()),
        Column::new("loss".into(), rows.iter().map(|(_, step)| step.loss).collect::<Vec<_>>()),
        Column::new("validation".into(), rows.iter().map(|(_, step)| step.validation).collect::<Vec<_>>()),
    ];
    Ok(DataFrame::new(rows.len(), columns)?)
}

/// The same of the newest training of each mixer whose steps are among `records`, with the columns size and text, the
/// fingerprint of what was read.
///
/// # Errors
/// As [`losses`].
pub fn recorded_losses(records: &[Record]) -> Result<DataFrame> {
    let steps: Vec<(&Record, &TrainingStep)> = records
        .iter()
        .filter_map(|record| match &record.measurement {
            Measurement::Training(step) => Some((record, step)),
            _ => None,
        })
        .collect();
    // The steps of a training follow one another; what began last is the newest.
    let begins = |at: usize| {
        let (before, step) = (at.checked_sub(1).map(|before| steps[before].1), steps[at].1);
        before.is_none_or(|before| before.mixer != step.mixer || before.step >= step.step)
    };
    let newest = |mixer: &str| {
        let begun = (0..steps.len()).filter(|&at| steps[at].1.mixer == mixer && begins(at));
        let start = begun.max_by_key(|&at| steps[at].0.environment.utc.as_deref()).unwrap_or_default();
        let end = (start + 1..steps.len()).find(|&at| begins(at)).unwrap_or(steps.len());
        &steps[start..end]
    };
    let mixers = distinct(steps.iter().map(|(_, step)| step.mixer.as_str()));
    let rows: Vec<&TrainingStep> = mixers.into_iter().flat_map(newest).map(|(_, step)| *step).collect();
    let text = |name: &str, of: fn(&TrainingStep) -> &str| {
        Column::new(name.into(), rows.iter().map(|step| of(step)).collect::<Vec<_>>())
    };
    let columns = vec![
        text("mixer", |step| &step.mixer),
        text("size", |step| &step.size),
        text("text", |step| &step.text),
        Column::new("step".into(), rows.iter().map(|step| step.step as u32).collect::<Vec<_>>()),
        Column::new("loss".into(), rows.iter().map(|step| step.loss).collect::<Vec<_>>()),
        Column::new("validation".into(), rows.iter().map(|step| step.validation).collect::<Vec<_>>()),
    ];
    Ok(DataFrame::new(rows.len(), columns)?)
}

/// How fast `trainings` were on the machine called `machine`, whose rate of float64 products is in `rooflines`: the columns
/// mixer, params_k, tok_per_s (of the median step), F_MFLOP_per_tok, GFLOP_per_s and mfu_pct.
///
/// # Errors
/// [`crate::Error::Table`] where `rooflines` is no table of [`super::rooflines`].
pub fn training_rates(trainings: &[Trained<'_>], rooflines: &DataFrame, machine: &str) -> Result<DataFrame> {
    let flop_per_s = rates(rooflines, machine, PRODUCTS)?.and_then(|rates| rates.matmul_flop_per_s);
    let mut columns: [Vec<Option<f64>>; 5] = Default::default();
    for (training, steps) in trainings {
        let (config, settings) = (training.model.config(), training.settings());
        let batch = Batch { sequences: settings.batch, tokens: settings.length };
        let flop = training_cost_per_token(config, &batch).flop;
        let step_ms = median(steps.iter().map(|step| step.latency_ms));
        let tok_per_s = step_ms.map(|ms| 1e3 * settings.tokens_per_step() as f64 / ms);
        let row = [
            Some(config.parameters().total() as f64 / 1e3),
            tok_per_s,
            Some(flop / 1e6),
            tok_per_s.map(|rate| rate * flop / 1e9),
            tok_per_s.zip(flop_per_s).map(|(rate, most)| 100.0 * rate * flop / most),
        ];
        columns.iter_mut().zip(row).for_each(|(column, value)| column.push(value));
    }
    let mixers: Vec<&str> = trainings.iter().map(|(training, _)| training.model.config().mixer.name()).collect();
    let names = ["params_k", "tok_per_s", "F_MFLOP_per_tok", "GFLOP_per_s", "mfu_pct"];
    let mut all = vec![Column::new("mixer".into(), mixers)];
    all.extend(names.into_iter().zip(columns).map(|(name, values)| Column::new(name.into(), values)));
    Ok(DataFrame::new(trainings.len(), all)?)
}

#[cfg(test)]
#[path = "training_tests.rs"]
mod tests;
