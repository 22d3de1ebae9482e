//! Whether kernels gave the same bits.

use super::rows::distinct;
use crate::record::{Determinism, Measurement, Record};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::*;

/// A row for each kernel and check of `records`: the columns kernel, check, runs (each compared with a first one), tensors,
/// differing_tensors, differing_runs (in the tensor with most of them), max_rel (the largest distance from the first run), and
/// first: where the first other bit was, in words. Where a check was recorded twice, the last one counts.
///
/// # Errors
/// [`Error::Input`] where no record is about determinism.
pub fn determinism(records: &[Record]) -> Result<DataFrame> {
    let found: Vec<(&str, &Determinism)> = records.iter().filter_map(found).collect();
    let rows = distinct(found.iter().map(|(kernel, found)| (*kernel, found.check.as_str())));
    if rows.is_empty() {
        return Err(Error::input("no record of determinism: expected those of `cargo lab determinism`"));
    }
    let tensors: Vec<Vec<&Determinism>> = rows.iter().map(|row| last_of_each_tensor(&found, *row)).collect();
    let count = |of: &dyn Fn(&[&Determinism]) -> usize| {
        tensors.iter().map(|tensors| u32::try_from(of(tensors)).unwrap_or(u32::MAX)).collect::<Vec<_>>()
    };
    let most = |tensors: &[&Determinism], of: fn(&Determinism) -> usize| {
        tensors.iter().map(|found| of(found)).max().unwrap_or_default()
    };
    let max_rel = |tensors: &Vec<&Determinism>| {
        tensors.iter().map(|found| found.errors.max_rel.unwrap_or(f64::NAN)).fold(0.0, f64::max)
    };
    Ok(df!(
        "kernel" => rows.iter().map(|(kernel, _)| *kernel).collect::<Vec<_>>(),
        "check" => rows.iter().map(|(_, check)| *check).collect::<Vec<_>>(),
        "runs" => count(&|tensors| most(tensors, |found| found.runs)),
        "tensors" => count(&|tensors| tensors.len()),
        "differing_tensors" => count(&|tensors| tensors.iter().filter(|found| found.differing > 0).count()),
        "differing_runs" => count(&|tensors| most(tensors, |found| found.differing_runs)),
        "max_rel" => tensors.iter().map(max_rel).collect::<Vec<f64>>(),
        "first" => tensors.iter().map(|tensors| tensors.iter().find_map(|found| first(found))).collect::<Vec<_>>(),
    )?)
}

fn found(record: &Record) -> Option<(&str, &Determinism)> {
    match &record.measurement {
        Measurement::Determinism(found) => Some((record.workload.kernel.as_deref().unwrap_or_default(), found)),
        _ => None,
    }
}

fn last_of_each_tensor<'a>(
    found: &[(&'a str, &'a Determinism)],
    (kernel, check): (&str, &str),
) -> Vec<&'a Determinism> {
    let of_row = || found.iter().filter(|(of, found)| (*of, found.check.as_str()) == (kernel, check));
    let tensors = distinct(of_row().map(|(_, found)| found.errors.tensor.as_str()));
    let last = |tensor| of_row().rev().map(|(_, found)| *found).find(|found| found.errors.tensor == tensor);
    tensors.into_iter().filter_map(last).collect()
}

/// `launch 7: dk[0, 3, 1, 5] = 0.25, not 0.5`.
fn first(found: &Determinism) -> Option<String> {
    let run = found.first_run.as_ref()?;
    let value = |value: Option<f64>| value.map_or_else(|| "not finite".to_owned(), |value| value.to_string());
    let (got, expected) = (value(found.first_value), value(found.first_expected));
    Some(format!("{run}: {}{:?} = {got}, not {expected}", found.errors.tensor, found.first_index))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Environment, Errors, Workload};

    fn record(kernel: &str, tensor: &str, differing: usize) -> Record {
        let errors = Errors { tensor: tensor.to_owned(), max_rel: Some(differing as f64 * 1e-3), ..Errors::default() };
        let found = Determinism {
            check: "packing".to_owned(),
            runs: 6,
            differing_runs: differing,
            elements: 100,
            differing,
            first_run: (differing > 0).then(|| "row 1 of 3".to_owned()),
            first_index: if differing > 0 { vec![0, 7] } else { Vec::new() },
            first_value: Some(0.5),
            first_expected: Some(0.25),
            errors,
        };
        let workload = Workload { kernel: Some(kernel.to_owned()), ..Workload::default() };
        Record::new(&Environment::default(), &workload, Measurement::Determinism(found))
    }

    #[test]
    fn a_row_says_how_many_tensors_differ_and_where_first() {
        let records = [record("a", "o", 0), record("a", "dq", 2), record("b", "o", 4), record("b", "o", 0)];
        let table = determinism(&records).unwrap();
        assert_eq!(table.height(), 2, "the second o of b replaces the first");
        let number = |name: &str, row| table.column(name).unwrap().u32().unwrap().get(row);
        assert_eq!(
            (number("tensors", 0), number("differing_tensors", 0), number("differing_runs", 0)),
            (Some(2), Some(1), Some(2))
        );
        assert_eq!((number("differing_tensors", 1), number("runs", 1)), (Some(0), Some(6)));
        let first = table.column("first").unwrap().str().unwrap();
        assert_eq!((first.get(0), first.get(1)), (Some("row 1 of 3: dq[0, 7] = 0.5, not 0.25"), None));
        assert!(determinism(&[]).is_err());
    }
}
