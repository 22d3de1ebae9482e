//! Error tables as figures and observations read them.

use super::require;
use crate::record::Pass;
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::{Column, DataFrame, DataType};

/// One point: the error of one tensor at one shape in one mode.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sample {
    pub mode: String,
    pub tokens: u32,
    pub key_dim: u32,
    pub value_dim: u32,
    pub tensor: String,
    pub error: f64,
}

impl Sample {
    /// T, d_k and d_v.
    pub fn shape(&self) -> (u32, u32, u32) {
        (self.tokens, self.key_dim, self.value_dim)
    }

    /// What stays the same when only T changes.
    pub fn series(&self) -> (&str, u32, u32) {
        (&self.tensor, self.key_dim, self.value_dim)
    }

    /// Whether the tensor is a gradient.
    pub fn is_gradient(&self) -> bool {
        Pass::of_tensor(&self.tensor) == Pass::Bwd
    }
}

/// The rows of `table`, which has the columns mode, T, d_k, d_v, tensor and `metric`. Those without a positive finite
/// error (a tensor that is exact, or has non-finite values) are left out: they have no logarithm.
pub(crate) fn samples(table: &DataFrame, metric: &str) -> Result<Vec<Sample>> {
    let text = |name: &str| column(table, name, &DataType::String);
    let number = |name: &str| column(table, name, &DataType::UInt32);
    let (mode, tensor) = (text("mode")?, text("tensor")?);
    let (tokens, key_dim, value_dim) = (number("T")?, number("d_k")?, number("d_v")?);
    let errors = column(table, metric, &DataType::Float64)?;
    let row = |i: usize| {
        Some(Sample {
            mode: mode.str().ok()?.get(i)?.to_owned(),
            tokens: tokens.u32().ok()?.get(i)?,
            key_dim: key_dim.u32().ok()?.get(i)?,
            value_dim: value_dim.u32().ok()?.get(i)?,
            tensor: tensor.str().ok()?.get(i)?.to_owned(),
            error: errors.f64().ok()?.get(i).filter(|error| *error > 0.0 && error.is_finite())?,
        })
    };
    Ok((0..table.height()).filter_map(row).collect())
}

/// The column `name` as `dtype`.
pub(crate) fn column(table: &DataFrame, name: &str, dtype: &DataType) -> Result<Column> {
    require(table, &[name])?;
    let column = table.column(name)?;
    column.strict_cast(dtype).map_err(|error| Error::Table(format!("column '{name}': expected {dtype}: {error}")))
}

/// The column `name` as text; an empty cell is an empty text.
pub(crate) fn texts(table: &DataFrame, name: &str) -> Result<Vec<String>> {
    let column = column(table, name, &DataType::String)?;
    Ok(column.str()?.iter().map(|text| text.unwrap_or_default().to_owned()).collect())
}

/// The column `name` as numbers; an empty cell is none.
pub(crate) fn numbers(table: &DataFrame, name: &str) -> Result<Vec<Option<f64>>> {
    Ok(column(table, name, &DataType::Float64)?.f64()?.iter().collect())
}

/// The distinct items in the order of their first appearance.
pub(crate) fn distinct<T: PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for item in items {
        if !seen.contains(&item) {
            seen.push(item);
        }
    }
    seen
}

/// The median of `values`; `None` where there are none.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    Some(if values.len() % 2 == 1 { upper } else { f64::midpoint(values[values.len() / 2 - 1], upper) })
}

/// The geometric mean of `values` and their number; `None` without any.
pub(crate) fn geometric_mean(values: impl Iterator<Item = f64>) -> Option<(f64, usize)> {
    let logarithms: Vec<f64> = values.map(f64::ln).collect();
    let count = logarithms.len();
    (count > 0).then(|| ((logarithms.iter().sum::<f64>() / count as f64).exp(), count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_distinct_items() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), Some(2.5));
        assert_eq!(median(std::iter::empty()), None);
        assert_eq!(distinct(["b", "a", "b"].into_iter()), ["b", "a"]);
    }

    #[test]
    fn geometric_means_are_of_what_there_is() {
        let (mean, count) = geometric_mean([2.0, 8.0].into_iter()).unwrap();
        assert!((mean - 4.0).abs() < 1e-12 && count == 2);
        assert_eq!(geometric_mean(std::iter::empty()), None);
    }
}
