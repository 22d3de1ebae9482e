//! Other people's numbers: CSV files in `data/published/`, each with a comment line that names its source.

use super::require;
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::*;
use gdnlab_deps::polars_io::SerReader;
use gdnlab_deps::polars_io::csv::read::CsvReadOptions;
use std::io::Cursor;
use std::path::Path;

/// File of the Day 1 errors.
const DAY1: &str = "day01_gb10_fla_0.5.2_max_rel.csv";

/// File of what the library of Day 1 gives on an H200.
const DAY1_FLA_ON_H200: &str = "day01_h200_fla_0.5.2_rel_rms.csv";

/// Reads a CSV file with a header line; lines that begin with `#` are comments. `columns` names the columns that must
/// be there and their types.
///
/// # Errors
/// [`Error::Io`] where the file cannot be read, [`Error::Input`] where it is empty, lacks a column, has rows of unequal
/// length, an empty field or a value of another type in one of `columns`.
pub fn read_csv(path: impl AsRef<Path>, columns: &[(&str, DataType)]) -> Result<DataFrame> {
    let path = path.as_ref();
    let bytes = std::fs::read(path).map_err(|error| Error::io(path, error))?;
    let complain = |problem: String| Error::input(format!("{}: {problem}", path.display()));
    let parsed = CsvReadOptions::default()
        .with_has_header(true)
        .with_schema_overwrite(Some(
            columns.iter().map(|(name, dtype)| Field::new((*name).into(), dtype.clone())).collect::<Schema>().into(),
        ))
        .map_parse_options(|options| options.with_comment_prefix(Some("#")))
        .into_reader_with_file_handle(Cursor::new(bytes))
        .finish();
    let table = parsed.map_err(|error| complain(format!("expected comma-separated values, {error}")))?;
    let names: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    require(&table, &names).map_err(|error| complain(error.to_string()))?;
    if table.height() == 0 {
        return Err(complain("expected rows of numbers below the header, got none".to_owned()));
    }
    for name in names {
        if let Some(row) = table.column(name)?.is_null().iter().position(|null| null == Some(true)) {
            return Err(complain(format!("data row {}: expected a value in column '{name}', got none", row + 1)));
        }
    }
    Ok(table)
}

/// The published errors of fla 0.5.2 on a GB10 (189 rows), from the folder `data/published`, with the columns mode, T,
/// d_k, d_v, tensor and max_rel.
///
/// The published mode `fp32_ieee` is named `fp32-tf32-solve` here. It asks Triton for IEEE products and gets them,
/// except in the triangular solve, whose precision fla fixes at TF32.
///
/// # Errors
/// As [`read_csv`].
pub fn day1_published(folder: impl AsRef<Path>) -> Result<DataFrame> {
    let sizes = ["T", "d_k", "d_v"].map(|size| (size, DataType::UInt32));
    let mut columns = vec![("mode", DataType::String), ("tensor", DataType::String), ("max_rel", DataType::Float64)];
    columns.extend(sizes);
    let table = read_csv(folder.as_ref().join(DAY1), &columns)?;
    let renamed = when(col("mode").eq(lit("fp32_ieee"))).then(lit("fp32-tf32-solve")).otherwise(col("mode"));
    Ok(table.lazy().with_column(renamed.alias("mode")).collect()?)
}

/// Errors of fla 0.5.2 on an H200, as this project measured them, from the folder `data/published`: gaussian inputs,
/// T = 256, d_k = d_v = 64, with the columns kernel, mode, regime, T, d_k, d_v, tensor and rel_rms.
///
/// # Errors
/// As [`read_csv`].
pub fn day1_fla_on_h200(folder: impl AsRef<Path>) -> Result<DataFrame> {
    let sizes = ["T", "d_k", "d_v"].map(|size| (size, DataType::UInt32));
    let mut columns: Vec<_> = ["kernel", "mode", "regime", "tensor"].map(|name| (name, DataType::String)).into();
    columns.push(("rel_rms", DataType::Float64));
    columns.extend(sizes);
    read_csv(folder.as_ref().join(DAY1_FLA_ON_H200), &columns)
}
