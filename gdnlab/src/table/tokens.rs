//! Tokens of a language model under kernels.

use super::roofline::machine_name;
use crate::Result;
use crate::record::{Experiment, Measurement, Record, TokenFlips};
use crate::tokens::{Forced, Position, Tolerance};
use gdnlab_deps::polars::prelude::*;
use gdnlab_deps::statrs::distribution::{Binomial, DiscreteCDF};

fn rows(records: &[Record], experiment: Experiment) -> Vec<(&Record, &TokenFlips)> {
    let mut rows = Vec::new();
    for record in records {
        match &record.measurement {
            Measurement::Tokens(flips) if flips.experiment == experiment => rows.push((record, flips)),
            _ => {}
        }
    }
    rows
}

/// The columns machine, kernel, mode and T of rows.
fn workloads(rows: &[(&Record, &TokenFlips)]) -> Vec<Column> {
    let text = |name: &str, of: fn(&Record) -> Option<String>| {
        Column::new(name.into(), rows.iter().map(|(record, _)| of(record)).collect::<Vec<_>>())
    };
    let tokens = rows.iter().map(|(record, _)| record.workload.tokens.and_then(|tokens| u32::try_from(tokens).ok()));
    vec![
        text("machine", |record| Some(machine_name(&record.environment.machine))),
        text("kernel", |record| record.workload.kernel.clone()),
        text("mode", |record| record.workload.mode.clone()),
        Column::new("T".into(), tokens.collect::<Vec<Option<u32>>>()),
    ]
}

fn numbers(rows: &[(&Record, &TokenFlips)], name: &str, of: impl Fn(&TokenFlips) -> Option<f64>) -> Column {
    Column::new(name.into(), rows.iter().map(|(_, flips)| of(flips)).collect::<Vec<_>>())
}

fn counts(rows: &[(&Record, &TokenFlips)], name: &str, of: impl Fn(&TokenFlips) -> u64) -> Column {
    Column::new(name.into(), rows.iter().map(|(_, flips)| of(flips)).collect::<Vec<_>>())
}

/// Flips position by position: machine, kernel, mode, T, error (of the recurrence's output), positions, flips, flip_pct with
/// its interval low_pct and high_pct, expected_pct from margins and shifts, shift_rms and margin_median.
///
/// # Errors
/// [`crate::Error::Table`] where polars cannot build the table.
pub fn token_flips(records: &[Record]) -> Result<DataFrame> {
    let rows = rows(records, Experiment::Forced);
    let percent =
        |name: &str, of: fn(&TokenFlips) -> Option<f64>| numbers(&rows, name, move |flips| Some(100.0 * of(flips)?));
    let mut columns = workloads(&rows);
    columns.extend([
        numbers(&rows, "error", |flips| flips.rel_rms),
        counts(&rows, "positions", |flips| flips.positions),
        counts(&rows, "flips", |flips| flips.flips),
        percent("flip_pct", |flips| Some(flips.flip_rate)),
        percent("low_pct", |flips| Some(flips.flip_rate_low)),
        percent("high_pct", |flips| Some(flips.flip_rate_high)),
        percent("expected_pct", |flips| flips.expected_rate),
        numbers(&rows, "shift_rms", |flips| flips.shift_rms),
        numbers(&rows, "margin_median", |flips| flips.margin_median),
    ]);
    Ok(DataFrame::new(rows.len(), columns)?)
}

/// The error of the recurrence's output at which 1 %, 0.1 % and 0.01 % of the tokens flip, with 95 % intervals, from the rows
/// of [`token_flips`] that are of noise: flip_pct, error, low, high. No rows where there are no flips.
///
/// # Errors
/// [`crate::Error::Table`] where polars cannot build the table.
pub fn token_tolerance(records: &[Record]) -> Result<DataFrame> {
    let noise = rows(records, Experiment::Forced)
        .into_iter()
        .filter(|(record, _)| record.workload.mode.as_deref() == Some("noise"))
        .map(|(_, flips)| flips);
    let tolerance = Tolerance::of(noise);
    let rates: &[f64] = if tolerance.is_some() { &[1e-2, 1e-3, 1e-4] } else { &[] };
    let errors: Vec<_> =
        tolerance.iter().flat_map(|tolerance| rates.iter().map(|rate| tolerance.error_at(*rate))).collect();
    let column = |name: &str, of: fn(&(f64, (f64, f64))) -> f64| {
        Column::new(name.into(), errors.iter().map(of).collect::<Vec<_>>())
    };
    let columns = vec![
        Column::new("flip_pct".into(), rates.iter().map(|rate| 100.0 * rate).collect::<Vec<_>>()),
        column("error", |(error, _)| *error),
        column("low", |(_, (low, _))| *low),
        column("high", |(_, (_, high))| *high),
    ];
    Ok(DataFrame::new(errors.len(), columns)?)
}

/// Greedy decoding: machine, kernel, mode, T (of the prompts), prompts, decoded, differing, differing_pct with low_pct and
/// high_pct, and same_tokens, the mean number of tokens before the first that differs.
///
/// # Errors
/// [`crate::Error::Table`] where polars cannot build the table.
pub fn decoded_texts(records: &[Record]) -> Result<DataFrame> {
    let rows = rows(records, Experiment::Greedy);
    let mut columns = workloads(&rows);
    columns.extend([
        counts(&rows, "prompts", |flips| flips.positions),
        counts(&rows, "decoded", |flips| flips.decoded.unwrap_or_default() as u64),
        counts(&rows, "differing", |flips| flips.flips),
        numbers(&rows, "differing_pct", |flips| Some(100.0 * flips.flip_rate)),
        numbers(&rows, "low_pct", |flips| Some(100.0 * flips.flip_rate_low)),
        numbers(&rows, "high_pct", |flips| Some(100.0 * flips.flip_rate_high)),
        numbers(&rows, "same_tokens", |flips| flips.same_tokens),
    ]);
    Ok(DataFrame::new(rows.len(), columns)?)
}

/// Padding: machine, kernel, mode, T (with padding), padding, prompts, flips (against the exact recurrence without padding),
/// largest_change of a logit against that, and same_bits_pct of the prompts.
///
/// # Errors
/// [`crate::Error::Table`] where polars cannot build the table.
pub fn padded_prompts(records: &[Record]) -> Result<DataFrame> {
    let rows = rows(records, Experiment::Padding);
    let mut columns = workloads(&rows);
    let padding: Vec<Option<&str>> = rows.iter().map(|(_, flips)| flips.padding.as_deref()).collect();
    columns.extend([
        Column::new("padding".into(), padding),
        counts(&rows, "prompts", |flips| flips.positions),
        counts(&rows, "flips", |flips| flips.flips),
        numbers(&rows, "largest_change", |flips| flips.shift_max),
        numbers(&rows, "same_bits_pct", |flips| Some(100.0 * flips.same_bits?)),
    ]);
    Ok(DataFrame::new(rows.len(), columns)?)
}

/// Every position under one kernel: margin of the two largest exact logits, shift of that difference, and whether the most
/// likely token flipped.
///
/// # Errors
/// [`crate::Error::Table`] where polars cannot build the table.
pub fn positions(forced: &Forced) -> Result<DataFrame> {
    let of = |value: fn(&Position) -> f64| forced.positions.iter().map(value).collect::<Vec<f64>>();
    let flipped: Vec<bool> = forced.positions.iter().map(|position| position.flipped).collect();
    let columns = vec![
        Column::new("margin".into(), of(|position| position.margin)),
        Column::new("shift".into(), of(|position| position.shift)),
        Column::new("flipped".into(), flipped),
    ];
    Ok(DataFrame::new(forced.positions.len(), columns)?)
}

/// What a reported difference of two backends means for tokens: for each row of [`super::published_backends`] with a cosine,
/// the flips per hundred tokens that an error of that size brings by `tolerance`, a table of [`token_tolerance`], and the
/// chance that at least `flipped` of `prompts` first tokens flip: who, T, rel_rms, flip_pct, chance. Errors are taken to be
/// spread over all tokens alike, as those of rounding are.
///
/// # Errors
/// [`crate::Error::Table`] where a column is missing.
pub fn reported_flips(published: &DataFrame, tolerance: &DataFrame, flipped: u64, prompts: u64) -> Result<DataFrame> {
    let slope = super::rows::numbers(tolerance, "flip_pct")?
        .into_iter()
        .zip(super::rows::numbers(tolerance, "error")?)
        .find_map(|(rate, error)| Some(rate? / 100.0 / error?));
    let (who, tokens) = (super::rows::texts(published, "who")?, super::rows::numbers(published, "T")?);
    let errors = super::rows::numbers(published, "rel_rms")?;
    let row = |at: usize| {
        let (error, slope) = (errors[at]?, slope?);
        let rate = (error * slope).min(1.0);
        Some((who[at].clone(), tokens[at]? as u32, error, rate, at_least(flipped, prompts, rate)))
    };
    let rows: Vec<_> = (0..who.len()).filter_map(row).collect();
    let columns = vec![
        Column::new("who".into(), rows.iter().map(|row| row.0.as_str()).collect::<Vec<_>>()),
        Column::new("T".into(), rows.iter().map(|row| row.1).collect::<Vec<_>>()),
        Column::new("rel_rms".into(), rows.iter().map(|row| row.2).collect::<Vec<_>>()),
        Column::new("flip_pct".into(), rows.iter().map(|row| 100.0 * row.3).collect::<Vec<_>>()),
        Column::new("chance".into(), rows.iter().map(|row| row.4).collect::<Vec<_>>()),
    ];
    Ok(DataFrame::new(rows.len(), columns)?)
}

/// The probability of at least `count` of `of` where each has probability `rate`.
fn at_least(count: u64, of: u64, rate: f64) -> f64 {
    if count == 0 {
        return 1.0;
    }
    Binomial::new(rate, of).map_or(f64::NAN, |binomial| binomial.sf(count - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reported_error_is_held_against_what_it_would_flip() {
        let published = df!(
            "who" => ["reporter", "maintainer"], "T" => [512u32, 512], "rel_rms" => [Some(0.06), None]
        )
        .unwrap();
        let tolerance = df!("flip_pct" => [1.0, 0.1], "error" => [0.04, 0.004]).unwrap();
        let table = reported_flips(&published, &tolerance, 2, 3).unwrap();
        assert_eq!(table.height(), 1);
        let value = |name: &str| table.column(name).unwrap().f64().unwrap().get(0).unwrap();
        assert!((value("flip_pct") - 1.5).abs() < 1e-9);
        let chance = 3.0 * 0.015f64.powi(2) * 0.985 + 0.015f64.powi(3);
        assert!((value("chance") - chance).abs() < 1e-9, "{}", value("chance"));
        assert_eq!(reported_flips(&published, &tolerance.head(Some(0)), 2, 3).unwrap().height(), 0);
    }
}
