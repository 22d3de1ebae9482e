//! One row per kernel, regime or other kind, and one column per tensor: what a reader compares line by line.

use super::require;
use super::rows::{column, distinct};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::*;

/// The rows of `table` in which the text column `name` is `value`.
///
/// # Errors
/// [`Error::Input`] with the values that there are where there is none, [`Error::Table`] where the column is missing.
pub fn only(table: &DataFrame, name: &str, value: &str) -> Result<DataFrame> {
    let texts = column(table, name, &DataType::String)?;
    let rows = table.filter(&texts.str()?.iter().map(|text| Some(text == Some(value))).collect())?;
    if rows.height() == 0 {
        let known = distinct(texts.str()?.iter().flatten()).join(", ");
        return Err(Error::input(format!("no row with {name} '{value}': the table has {known}")));
    }
    Ok(rows)
}

/// The largest `metric` (such as `max_rel` or `rel_rms`) of each tensor, in units of `unit`: a row for each value of the text
/// column `by` (such as `kernel` or `regime`) in `tables`, and a column per tensor. Empty where there is no such tensor; NaN
/// where it has values that are not finite.
///
/// # Errors
/// [`Error::Input`] without tables, [`Error::Table`] where a column is missing.
pub fn largest_per_tensor(tables: &[&DataFrame], by: &str, metric: &str, unit: f64) -> Result<DataFrame> {
    let largest = tables.iter().map(|table| Largest::by(table, by, metric)).collect::<Result<Vec<_>>>()?.concat();
    if largest.is_empty() {
        return Err(Error::input("no errors: expected at least one table with a row"));
    }
    wide(by, &largest, |largest, tensor| Some(largest.of(tensor)? / unit))
}

/// How much larger the first table's errors are than the second's: the largest `metric` of each tensor in one over that in
/// the other, a row for each pair under its name. Tensors that no pair has in common are left out.
///
/// # Errors
/// As [`largest_per_tensor`].
pub fn error_ratio(pairs: &[(&str, &DataFrame, &DataFrame)], metric: &str) -> Result<DataFrame> {
    let largest = |name: &str, table: &DataFrame| {
        let mut rows = Largest::by(&table.clone().lazy().with_column(lit(name).alias("of")).collect()?, "of", metric)?;
        rows.pop().ok_or_else(|| Error::input(format!("'{name}': no errors, expected at least one row")))
    };
    let mut ratios = Vec::new();
    for (name, above, below) in pairs {
        let (above, below) = (largest(name, above)?, largest(name, below)?);
        let ratio = |(tensor, error): &(String, f64)| Some((tensor.clone(), error / below.of(tensor)?));
        ratios.push(Largest { name: above.name, tensors: above.tensors.iter().filter_map(ratio).collect() });
    }
    if ratios.is_empty() {
        return Err(Error::input("no pairs of tables of errors: expected at least one"));
    }
    wide("of", &ratios, Largest::of)
}

/// The largest error of each tensor.
#[derive(Clone)]
struct Largest {
    name: String,
    tensors: Vec<(String, f64)>,
}

impl Largest {
    /// One for each value of the column `by`.
    fn by(table: &DataFrame, by: &str, metric: &str) -> Result<Vec<Self>> {
        require(table, &[by, "tensor", metric])?;
        let [names, tensors] = [by, "tensor"].map(|name| column(table, name, &DataType::String));
        let (names, tensors, errors) = (names?, tensors?, column(table, metric, &DataType::Float64)?);
        let mut all: Vec<Self> = Vec::new();
        for ((name, tensor), error) in names.str()?.iter().zip(tensors.str()?.iter()).zip(errors.f64()?.iter()) {
            let (Some(name), Some(tensor)) = (name, tensor) else { continue };
            let at = all.iter().position(|largest| largest.name == name).unwrap_or_else(|| {
                all.push(Self { name: name.to_owned(), tensors: Vec::new() });
                all.len() - 1
            });
            // A metric is absent where it is no finite number.
            all[at].raise(tensor, error.unwrap_or(f64::NAN));
        }
        Ok(all)
    }

    fn raise(&mut self, tensor: &str, error: f64) {
        match self.tensors.iter_mut().find(|(name, _)| name == tensor) {
            Some((_, known)) if known.is_nan() || *known >= error => {}
            Some((_, known)) => *known = error,
            None => self.tensors.push((tensor.to_owned(), error)),
        }
    }

    fn of(&self, tensor: &str) -> Option<f64> {
        self.tensors.iter().find(|(name, _)| name == tensor).map(|(_, error)| *error)
    }
}

/// A row per entry of `all` under its name in the column `by`, a column per tensor with what `cell` says.
fn wide(by: &str, all: &[Largest], cell: impl Fn(&Largest, &str) -> Option<f64>) -> Result<DataFrame> {
    let names: Vec<&str> = all.iter().map(|largest| largest.name.as_str()).collect();
    let mut columns = vec![Column::new(by.into(), names)];
    for tensor in distinct(all.iter().flat_map(|largest| largest.tensors.iter().map(|(name, _)| name.as_str()))) {
        columns.push(Column::new(tensor.into(), all.iter().map(|largest| cell(largest, tensor)).collect::<Vec<_>>()));
    }
    Ok(DataFrame::new(all.len(), columns)?)
}
