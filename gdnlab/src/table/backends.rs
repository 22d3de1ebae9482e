//! Two implementations of one call beside each other, and published comparisons of two.

use super::roofline::machine_name;
use super::rows::numbers;
use super::{read_csv, require};
use crate::Result;
use crate::record::{Backends, Measurement, Record};
use gdnlab_deps::polars::prelude::*;
use std::path::Path;

/// File of the published comparisons, in `data/published`.
const PUBLISHED: &str = "flashqla_vs_fla.csv";

/// The pairs in `records`, one row for each tensor: machine, op, regime, kernel, against, tensor, T and the columns of the report,
/// max_diff, mean_diff, cos_sim and max_ref; then what the float64 truth says of them: rel_rms (of the two from each other),
/// truth_rel_rms and against_truth_rel_rms, differing (share of elements), nearer and against_nearer (shares of those), and
/// at the element where they are furthest apart worst_error and against_worst_error, the distances from the truth.
///
/// # Errors
/// [`crate::Error::Table`] where polars cannot build the table.
pub fn backends(records: &[Record]) -> Result<DataFrame> {
    let rows: Vec<(&Record, &Backends)> = records
        .iter()
        .filter_map(|record| match &record.measurement {
            Measurement::Backends(pair) => Some((record, pair)),
            _ => None,
        })
        .collect();
    let text = |name: &str, of: fn(&Record, &Backends) -> Option<String>| {
        Column::new(name.into(), rows.iter().map(|(record, pair)| of(record, pair)).collect::<Vec<_>>())
    };
    let number = |name: &str, of: fn(&Backends) -> Option<f64>| {
        Column::new(name.into(), rows.iter().map(|(_, pair)| of(pair)).collect::<Vec<_>>())
    };
    let tokens: Vec<Option<u32>> = rows.iter().map(|(record, _)| u32::try_from(record.workload.tokens?).ok()).collect();
    let columns = vec![
        text("machine", |record, _| Some(machine_name(&record.environment.machine))),
        text("op", |record, _| record.workload.op.clone()),
        text("regime", |record, _| record.workload.regime.clone()),
        text("kernel", |record, _| record.workload.kernel.clone()),
        text("against", |_, pair| Some(pair.against.clone())),
        text("tensor", |_, pair| Some(pair.errors.tensor.clone())),
        Column::new("T".into(), tokens),
        number("max_diff", |pair| pair.errors.max_abs),
        number("mean_diff", |pair| pair.errors.mean_abs),
        number("cos_sim", |pair| pair.errors.cosine),
        number("max_ref", |pair| pair.max_ref),
        number("rel_rms", |pair| pair.errors.rel_rms),
        number("truth_rel_rms", |pair| pair.truth_rel_rms),
        number("against_truth_rel_rms", |pair| pair.against_truth_rel_rms),
        number("differing", |pair| Some(pair.differing)),
        number("nearer", |pair| pair.nearer),
        number("against_nearer", |pair| pair.against_nearer),
        number("worst_error", |pair| Some((pair.worst_value? - pair.worst_truth?).abs())),
        number("against_worst_error", |pair| Some((pair.worst_against? - pair.worst_truth?).abs())),
    ];
    Ok(DataFrame::new(rows.len(), columns)?)
}

/// The published comparisons of FlashQLA with fla, from the folder `data/published`: who, device, tensor, T, max_diff,
/// mean_diff, cos_sim, max_ref, and rel_rms, the relative RMS difference that a cosine stands for where both have the same
/// norm: `||x - r|| / ||r|| = sqrt(2 (1 - cos))`.
///
/// # Errors
/// As [`read_csv`].
pub fn published_backends(folder: impl AsRef<Path>) -> Result<DataFrame> {
    let text = ["who", "device", "tensor"].map(|name| (name, DataType::String));
    let always = [("T", DataType::UInt32), ("max_diff", DataType::Float64)];
    let path = folder.as_ref().join(PUBLISHED);
    let mut table = read_csv(&path, &[text.as_slice(), &always].concat())?;
    require(&table, &["mean_diff", "cos_sim", "max_ref"])?;
    let implied: Vec<Option<f64>> =
        numbers(&table, "cos_sim")?.into_iter().map(|cosine| cosine.map(rel_rms_of_cosine)).collect();
    table.with_column(Column::new("rel_rms".into(), implied))?;
    Ok(table)
}

/// `||x - r|| / ||r||` of two vectors of equal norm with this cosine between them.
pub fn rel_rms_of_cosine(cosine: f64) -> f64 {
    (2.0 * (1.0 - cosine)).max(0.0).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cosine_stands_for_a_difference() {
        // 0.99806 at T = 512 is what was reported.
        assert!((rel_rms_of_cosine(0.99806) - 0.0623).abs() < 1e-4);
        assert_eq!(rel_rms_of_cosine(1.0), 0.0);
    }

    #[test]
    fn the_published_table_is_read() {
        let table = published_backends(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published")).unwrap();
        assert_eq!(table.height(), 6);
        let rel_rms = numbers(&table, "rel_rms").unwrap();
        assert!(rel_rms[0].unwrap() > 0.06 && rel_rms[2].is_none());
        assert_eq!(numbers(&table, "max_ref").unwrap()[2], Some(0.25));
    }
}
