//! How accurate the GDN kernels are whose times [`gdn_times`](super::gdn_times) has.

use super::attention::OURS;
use super::day1_fla_on_h200;
use super::roofline::machine_name;
use super::rows::{distinct, numbers, texts};
use super::speed::implementation;
use crate::Result;
use crate::record::{Backends, Errors, Measurement, Record, Workload};
use gdnlab_deps::polars::prelude::*;
use std::path::Path;

/// What the errors of fla 0.5.2 in the published folder were measured on: its regime, `T` and the size of a head.
const SMALL: (&str, usize, usize) = ("gaussian", 256, 64);

/// The error of one tensor.
struct Found {
    machine: String,
    implementation: String,
    inputs: String,
    tokens: usize,
    tensor: String,
    rel_rms: f64,
}

/// Relative RMS errors against the float64 recurrence on a GPU, those where a library and ours had the same inputs: of
/// `backends`, pairs of implementations, and of `numerics`, errors of ours, where `published` has fla's. The columns machine,
/// implementation (as [`gdn_times`](super::gdn_times) has it), inputs, T, tensor and rel_rms; each once, the last.
///
/// # Errors
/// As [`day1_fla_on_h200`].
pub fn gdn_accuracy(backends: &[Record], numerics: &[Record], published: impl AsRef<Path>) -> Result<DataFrame> {
    let mut all: Vec<Found> = Vec::new();
    let mut add = |found: Found| {
        let same = |other: &Found| {
            (&other.machine, &other.implementation, &other.inputs, other.tokens, &other.tensor)
                == (&found.machine, &found.implementation, &found.inputs, found.tokens, &found.tensor)
        };
        all.retain(|other| !same(other));
        all.push(found);
    };
    backends.iter().flat_map(of_pair).for_each(&mut add);
    numerics.iter().filter_map(of_ours).for_each(&mut add);
    of_fla(published.as_ref())?.into_iter().for_each(&mut add);
    let text = |name: &str, of: fn(&Found) -> &str| Column::new(name.into(), all.iter().map(of).collect::<Vec<_>>());
    let columns = vec![
        text("machine", |found| &found.machine),
        text("implementation", |found| &found.implementation),
        text("inputs", |found| &found.inputs),
        Column::new("T".into(), all.iter().map(|found| found.tokens as u32).collect::<Vec<_>>()),
        text("tensor", |found| &found.tensor),
        Column::new("rel_rms".into(), all.iter().map(|found| found.rel_rms).collect::<Vec<_>>()),
    ];
    Ok(DataFrame::new(all.len(), columns)?)
}

/// A table of [`gdn_accuracy`] with one row for each tensor on the same inputs, and a column for each implementation, ours
/// first: machine, inputs, T, tensor, and the relative RMS errors.
///
/// # Errors
/// [`crate::Error::Table`] where a column is missing.
pub fn gdn_accuracy_rows(accuracy: &DataFrame) -> Result<DataFrame> {
    let text = |name: &str| texts(accuracy, name);
    let (machines, names, inputs, tensors) =
        (text("machine")?, text("implementation")?, text("inputs")?, text("tensor")?);
    let (tokens, errors) = (numbers(accuracy, "T")?, numbers(accuracy, "rel_rms")?);
    let key = |row: usize| (&machines[row], &inputs[row], tokens[row].unwrap_or_default() as u32, &tensors[row]);
    let keys = distinct((0..accuracy.height()).map(key));
    let mut implementations = distinct(names.iter());
    implementations.sort_by_key(|name| (!name.starts_with(OURS), name.len()));
    let mut columns = vec![
        Column::new("machine".into(), keys.iter().map(|key| key.0.as_str()).collect::<Vec<_>>()),
        Column::new("inputs".into(), keys.iter().map(|key| key.1.as_str()).collect::<Vec<_>>()),
        Column::new("T".into(), keys.iter().map(|key| key.2).collect::<Vec<_>>()),
        Column::new("tensor".into(), keys.iter().map(|key| key.3.as_str()).collect::<Vec<_>>()),
    ];
    for name in implementations {
        let of = |wanted: &_| (0..names.len()).find(|&row| names[row] == *name && key(row) == *wanted);
        let column = keys.iter().map(|key| errors[of(key)?]).collect::<Vec<Option<f64>>>();
        columns.push(Column::new(name.as_str().into(), column));
    }
    Ok(DataFrame::new(keys.len(), columns)?)
}

/// Both errors of a pair of GDN.
fn of_pair(record: &Record) -> Vec<Found> {
    let Measurement::Backends(Backends { against, errors, truth_rel_rms, against_truth_rel_rms, .. }) =
        &record.measurement
    else {
        return Vec::new();
    };
    if record.workload.op.as_deref() != Some("gdn") || record.environment.machine.gpu.is_none() {
        return Vec::new();
    }
    let kernel = record.workload.kernel.as_deref().unwrap_or_default();
    let sides = [(kernel, truth_rel_rms), (against.as_str(), against_truth_rel_rms)];
    sides.into_iter().filter_map(|(kernel, error)| found(record, kernel, errors, *error)).collect()
}

/// The error of one of our kernels where fla's is published.
fn of_ours(record: &Record) -> Option<Found> {
    let Measurement::Numerics(errors) = &record.measurement else { return None };
    let Workload { regime, tokens, key_dim, value_dim, batch, kernel, .. } = &record.workload;
    let (small, size, head) = SMALL;
    let is_small = regime.as_deref() == Some(small)
        && (*tokens, *key_dim, *value_dim, *batch) == (Some(size), Some(head), Some(head), Some(1));
    record.environment.machine.gpu.as_ref().filter(|_| is_small)?;
    found(record, kernel.as_deref()?, errors, errors.rel_rms)
}

fn found(record: &Record, kernel: &str, errors: &Errors, rel_rms: Option<f64>) -> Option<Found> {
    Some(Found {
        machine: machine_name(&record.environment.machine),
        implementation: implementation(kernel)?,
        inputs: inputs(&record.workload)?,
        tokens: record.workload.tokens?,
        tensor: errors.tensor.clone(),
        rel_rms: rel_rms?,
    })
}

/// `long-memory-unit-q, heads of 128/128`.
fn inputs(workload: &Workload) -> Option<String> {
    Some(format!("{}, heads of {}/{}", workload.regime.as_deref()?, workload.key_dim?, workload.value_dim?))
}

/// The published errors of fla in bf16.
fn of_fla(published: &Path) -> Result<Vec<Found>> {
    let table = day1_fla_on_h200(published)?;
    let (modes, tensors, rel_rms) = (texts(&table, "mode")?, texts(&table, "tensor")?, numbers(&table, "rel_rms")?);
    let (regime, tokens, head) = SMALL;
    let found = |row: usize| {
        Some(Found {
            machine: "H200".to_owned(),
            implementation: "fla".to_owned(),
            inputs: format!("{regime}, heads of {head}/{head}"),
            tokens,
            tensor: tensors[row].clone(),
            rel_rms: rel_rms[row].filter(|_| modes[row] == "bf16")?,
        })
    };
    Ok((0..table.height()).filter_map(found).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data");

    #[test]
    fn every_error_of_fla_has_one_of_ours_on_the_same_inputs() {
        let read = |name: &str| crate::record::read(Path::new(DATA).join(name)).unwrap();
        let backends = read("backends_nvidia-h200_2026-11-30.jsonl");
        let numerics = read("day01_numerics_nvidia-h200_2026-11-30.jsonl");
        let table = gdn_accuracy(&backends, &numerics, Path::new(DATA).join("published")).unwrap();
        let text = |name: &str| texts(&table, name).unwrap();
        let (names, inputs, tensors) = (text("implementation"), text("inputs"), text("tensor"));
        let (tokens, errors) = (numbers(&table, "T").unwrap(), numbers(&table, "rel_rms").unwrap());
        let of = |name: &str| (0..names.len()).filter(|&row| names[row] == name).collect::<Vec<_>>();
        // o and final_state at two lengths, and seven tensors at T = 256.
        assert_eq!(of("fla").len(), 2 * 2 + 7);
        for row in of("fla") {
            let same = |other: &&usize| {
                (&inputs[**other], &tensors[**other], tokens[**other]) == (&inputs[row], &tensors[row], tokens[row])
            };
            let ours = of("gdnlab");
            let ours: Vec<&usize> = ours.iter().filter(same).collect();
            assert_eq!(ours.len(), 1, "{} {} {:?}", inputs[row], tensors[row], tokens[row]);
            assert!(errors[*ours[0]] < errors[row], "{}: fla is nearer to the truth", tensors[row]);
        }
        let rows = gdn_accuracy_rows(&table).unwrap();
        assert_eq!(rows.get_column_names()[4], "gdnlab");
        assert_eq!(rows.column("fla").unwrap().null_count(), rows.height() - (2 * 2 + 7));
        assert!(gdn_accuracy(&[], &[], Path::new(DATA).join("published")).unwrap().height() == 7);
    }
}
