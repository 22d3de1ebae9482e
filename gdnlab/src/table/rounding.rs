//! Day 3: errors after an intermediate was rounded, beside the published ones; and policies with their price.

use super::published::read_csv;
use super::rows::distinct;
use super::{errors, format_label, largest_per_tensor, only};
use crate::precision::{Format, WriteForm};
use crate::record::{Measurement, Pass, Record};
use crate::rounding::{self, Choice, DIAGNOSIS, FORMATS, FORWARD, Judged, Proposal, Slot};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::*;
use std::path::Path;

/// File of the published errors, in percent.
const PUBLISHED: &str = "rfc_gdn2_precision.csv";

/// The published case of each step of the rounding table.
const STEPS: [(&str, &str); 6] = [
    ("none", "none (fp64 chunk algebra vs fp32 recurrence)"),
    ("inverse", "triangular inverse only"),
    ("scores", "causal QK score matrix only"),
    ("write product", "write product only"),
    ("U", "WY value tensor u only"),
    (FORWARD, "inverse + scores + write product + u + output"),
];

/// The published errors: case and percent.
fn published(folder: &Path) -> Result<Vec<(String, f64)>> {
    let columns = [("case", DataType::String), ("rel_rms_pct", DataType::Float64)];
    let table = read_csv(folder.join(PUBLISHED), &columns)?;
    let (cases, percents) = (super::rows::texts(&table, "case")?, super::rows::numbers(&table, "rel_rms_pct")?);
    Ok(cases.into_iter().zip(percents).filter_map(|(case, percent)| Some((case, percent?))).collect())
}

/// The published error in percent for a step of the rounding table, from the folder `data/published`.
///
/// # Errors
/// As [`read_csv`].
pub fn published_rounding(folder: impl AsRef<Path>, step: &str) -> Result<Option<f64>> {
    let case = STEPS.iter().find(|(known, _)| *known == step).map(|(_, case)| *case);
    let published = published(folder.as_ref())?;
    Ok(case.and_then(|case| published.iter().find(|(known, _)| known == case)).map(|(_, percent)| *percent))
}

/// The relative RMS error in percent of `tensor` after `step` was given `format`.
fn percent(records: &[Record], step: &str, format: Option<Format>, tensor: &str) -> Option<f64> {
    let found = records.iter().filter_map(Record::precision).find(|precision| {
        let of_format = precision.format.as_deref() == format.map(Format::name);
        precision.step == step && of_format && precision.errors.tensor == tensor
    })?;
    found.errors.rel_rms.map(|error| 100.0 * error)
}

/// The rounding table of [`rounding::trials_of_steps`] for the output: a row per step of the forward, relative RMS errors in
/// percent. Columns: step, published, then bf16, fp16, TF32 and fp32, and bf16_over_published.
///
/// `folder` is `data/published`.
///
/// # Errors
/// As [`read_csv`], and [`Error::Input`] where the records hold no such step.
pub fn rounding(records: &[Record], folder: impl AsRef<Path>) -> Result<DataFrame> {
    let folder = folder.as_ref();
    let steps = distinct(records.iter().filter_map(|record| Some(record.precision()?.step.as_str())));
    let of_output = |step: &&str| FORMATS.iter().any(|&format| percent(records, step, Some(format), "o") > Some(1e-9));
    let steps: Vec<&str> = steps.into_iter().filter(of_output).filter(|step| *step != rounding::EVERYTHING).collect();
    if steps.is_empty() {
        return Err(Error::input("no record of a rounded intermediate: expected those of rounding::trials_of_steps"));
    }
    let published = steps.iter().map(|step| published_rounding(folder, step)).collect::<Result<Vec<_>>>()?;
    let of_format =
        |format| steps.iter().map(|step| percent(records, step, Some(format), "o")).collect::<Vec<Option<f64>>>();
    let mut columns = vec![Column::new("step".into(), &steps), Column::new("published".into(), &published)];
    columns.extend(FORMATS.map(|format| Column::new(format_label(format).into(), of_format(format))));
    let ratio = of_format(Format::Bf16).into_iter().zip(published).map(|(found, published)| Some(found? / published?));
    columns.push(Column::new("bf16_over_published".into(), ratio.collect::<Vec<_>>()));
    Ok(DataFrame::new(steps.len(), columns)?)
}

/// The rounding table for one format and every tensor: a row per step, a column per tensor, relative RMS errors in percent.
///
/// # Errors
/// As [`errors`] and [`only`].
pub fn rounding_per_tensor(records: &[Record], format: Format) -> Result<DataFrame> {
    let of_format = only(&errors(records)?, "format", format.name())?;
    largest_per_tensor(&[&of_format], "step", "rel_rms", 0.01)
}

/// The cases of [`rounding::trials_of_diagnosis`] beside the published ones, in percent. Columns: case, published, here and
/// here_over_published.
///
/// # Errors
/// As [`read_csv`].
pub fn diagnosis(records: &[Record], folder: impl AsRef<Path>) -> Result<DataFrame> {
    let published = published(folder.as_ref())?;
    let theirs =
        DIAGNOSIS.map(|(_, case)| published.iter().find(|(known, _)| known == case).map(|(_, percent)| *percent));
    let here = DIAGNOSIS.map(|(step, _)| percent(records, step, None, "o"));
    let ratio: Vec<Option<f64>> = here.iter().zip(&theirs).map(|(here, theirs)| Some((*here)? / (*theirs)?)).collect();
    Ok(df!(
        "case" => DIAGNOSIS.map(|(step, _)| step),
        "published" => theirs.to_vec(),
        "here" => here.to_vec(),
        "here_over_published" => ratio,
    )?)
}

/// Policies with their price and error, in their order. Columns: form (WY or residual); a column for each intermediate with
/// its format; formats, the set of them; memory_B, on_chip_B and bytes per token and head; tensor, the one with the largest
/// error, and error_pct, that error; on_front, among those of the same form; and mode, of the kernels that follow this policy,
/// where there are some.
///
/// # Errors
/// [`Error::Table`] where polars cannot build the table.
pub fn policies(judged: &[Judged]) -> Result<DataFrame> {
    let slots = distinct(judged.iter().flat_map(|judged| judged.slots().iter().copied()));
    let text = |name: &str, of: &dyn Fn(&Judged) -> Option<String>| {
        Column::new(name.into(), judged.iter().map(of).collect::<Vec<Option<String>>>())
    };
    let number =
        |name: &str, of: &dyn Fn(&Judged) -> f64| Column::new(name.into(), judged.iter().map(of).collect::<Vec<f64>>());
    let mut columns = vec![text("form", &|judged| Some(form_label(judged.choice.form).to_owned()))];
    for &slot in &slots {
        columns.push(text(slot.name(), &|judged| judged.choice.format(slot).map(|f| format_label(f).to_owned())));
    }
    let of_form = |form| judged.iter().filter(|one| one.choice.form == form).cloned().collect::<Vec<_>>();
    let forms = distinct(judged.iter().map(|one| one.choice.form)).into_iter().map(of_form).collect::<Vec<_>>();
    let front: Vec<&Judged> = forms.iter().flat_map(|of_form| rounding::front(of_form)).collect();
    columns.extend([
        text("formats", &|judged| Some(formats_label(&judged.formats()))),
        number("memory_B", &|judged| judged.bytes.memory),
        number("on_chip_B", &|judged| judged.bytes.on_chip),
        number("bytes", &|judged| judged.bytes.total()),
        text("tensor", &|judged| Some(judged.tensor.clone())),
        number("error_pct", &|judged| 100.0 * judged.rel_rms),
        Column::new("on_front".into(), judged.iter().map(|one| front.contains(&one)).collect::<Vec<bool>>()),
        text("mode", &|judged| judged.mode().map(str::to_owned)),
    ]);
    Ok(DataFrame::new(judged.len(), columns)?)
}

/// What a search proposes, in rows. Columns: form, proposal, changed (what leaves bf16, and its format), bytes per token and
/// head, more_bytes_pct (than everything in bf16), tensor, the one with the largest error, and error_pct, that error; then for
/// each of `again`, which are the same policies measured on another problem, its error in percent under its name. Empty where
/// nothing is proposed.
///
/// # Errors
/// [`Error::Table`] where polars cannot build the table.
pub fn proposals(proposals: &[Proposal], again: &[(&str, &[Judged])]) -> Result<DataFrame> {
    let number = |of: &dyn Fn(&Judged, &Proposal) -> Option<f64>| {
        let of_row = |row: &Proposal| row.found.as_ref().and_then(|found| of(found, row));
        proposals.iter().map(of_row).collect::<Vec<Option<f64>>>()
    };
    let text = |of: &dyn Fn(&Judged) -> String| {
        proposals.iter().map(|row| row.found.as_ref().map(of)).collect::<Vec<Option<String>>>()
    };
    let mut table = df!(
        "form" => proposals.iter().map(|row| form_label(row.form)).collect::<Vec<_>>(),
        "proposal" => proposals.iter().map(|row| row.name.as_str()).collect::<Vec<_>>(),
        "changed" => text(&|found| changed(&found.choice, found.slots())),
        "bytes" => number(&|found, _| Some(found.bytes.total())),
        "more_bytes_pct" => number(&|found, row| Some(100.0 * (found.bytes.total() / row.bf16_bytes - 1.0))),
        "tensor" => text(&|found| found.tensor.clone()),
        "error_pct" => number(&|found, _| Some(100.0 * found.rel_rms)),
    )?;
    for (name, judged) in again {
        let error =
            |found: &Judged| judged.iter().find(|other| other.choice == found.choice).map(|o| 100.0 * o.rel_rms);
        table.with_column(Column::new((*name).into(), number(&|found, _| error(found))))?;
    }
    Ok(table)
}

/// What a search proposes, in words: a line for each proposal, whether it is within `threshold` or not.
pub fn proposals_in_words(proposals: &[Proposal], threshold: f64) -> String {
    let allowed = 100.0 * threshold;
    let line = |row: &Proposal| {
        let start = format!("{} form, {}: ", form_label(row.form), row.name);
        let Some(found) = &row.found else { return start + &format!("no policy is within {allowed} %.") };
        let more = 100.0 * (found.bytes.total() / row.bf16_bytes - 1.0);
        let price = if more < 0.05 { "no byte more".to_owned() } else { format!("{more:.0} % more bytes") };
        let side = if found.rel_rms <= threshold { "within" } else { "outside" };
        let changed = changed(&found.choice, found.slots());
        let change = if row.name.ends_with(&format!("in {}", format_label(Format::Bf16))) {
            String::new()
        } else {
            format!("{changed}, {price}, ")
        };
        start + &format!("{change}{:.2} % in {}, {side} {allowed} %.", 100.0 * found.rel_rms, found.tensor)
    };
    proposals.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Errors of whole policies in every tensor: a row for each of `named`, a column per tensor, relative RMS errors in percent.
///
/// # Errors
/// [`Error::Input`] where `records` lack one of them.
pub fn policies_per_tensor(records: &[Record], named: &[(&str, &Choice)]) -> Result<DataFrame> {
    let table = errors(records)?;
    let rows = |(name, choice): &(&str, &Choice)| -> Result<DataFrame> {
        Ok(only(&table, "step", &choice.to_string())?.lazy().with_column(lit(*name).alias("policy")).collect()?)
    };
    let tables = named.iter().map(rows).collect::<Result<Vec<_>>>()?;
    largest_per_tensor(&tables.iter().collect::<Vec<_>>(), "policy", "rel_rms", 0.01)
}

/// `policies`, a table of [`policies`], with the columns fwd_ms and bwd_ms: the newest times of GDN-2 kernels of the same mode
/// in `on_gpu` with `tokens` tokens and `heads` heads. Empty where there are none.
///
/// # Errors
/// [`Error::Table`] where the table has no column mode.
pub fn with_times(policies: &DataFrame, on_gpu: &[Record], tokens: usize, heads: usize) -> Result<DataFrame> {
    let modes = super::rows::texts(policies, "mode")?;
    let time = |mode: &str, pass: Pass| {
        let of_mode = on_gpu.iter().filter(|record| {
            let workload = &record.workload;
            workload.op.as_deref() == Some("gdn2")
                && workload.mode.as_deref() == Some(mode)
                && workload.pass == Some(pass)
                && workload.batch.unwrap_or(1) * workload.tokens.unwrap_or_default() == tokens
                && workload.value_heads == Some(heads)
        });
        let timed = of_mode.filter_map(|record| match &record.measurement {
            Measurement::Bench(timing) => Some((record.environment.utc.as_deref(), timing.latency_ms)),
            _ => None,
        });
        timed.max_by_key(|(utc, _)| *utc).map(|(_, latency_ms)| latency_ms)
    };
    let times = |pass| modes.iter().map(|mode| time(mode, pass)).collect::<Vec<Option<f64>>>();
    let mut columns = policies.columns().to_vec();
    columns.extend(
        [("fwd_ms", Pass::Fwd), ("bwd_ms", Pass::Bwd)].map(|(name, pass)| Column::new(name.into(), times(pass))),
    );
    Ok(DataFrame::new(policies.height(), columns)?)
}

/// Name of a write form for a reader.
pub(crate) fn form_label(form: WriteForm) -> &'static str {
    match form {
        WriteForm::Residual => "residual",
        WriteForm::Wy => "WY",
    }
}

fn formats_label(formats: &[Format]) -> String {
    formats.iter().map(|&format| format_label(format)).collect::<Vec<_>>().join(" and ")
}

/// `U and scores in fp16`.
fn changed(choice: &Choice, slots: &[Slot]) -> String {
    let mut parts = Vec::new();
    for format in choice.formats_of(slots).into_iter().filter(|&format| format != Format::Bf16) {
        let of_format = slots.iter().filter(|&&slot| choice.format(slot) == Some(format)).map(|slot| slot.name());
        let names: Vec<&str> = of_format.collect();
        let names = if names.len() == slots.len() { "all".to_owned() } else { names.join(", ") };
        parts.push(format!("{names} in {}", format_label(format)));
    }
    if parts.is_empty() { "nothing".to_owned() } else { parts.join("; ") }
}

#[cfg(test)]
#[path = "rounding_tests.rs"]
mod tests;
