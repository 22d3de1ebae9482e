//! Records as polars tables, the Day 1 tables of errors, and published numbers beside our own.
//!
//! Tables hold full precision; only [`crate::notebook`] rounds, when it shows them.

mod mode;
mod observe;
mod published;
pub(crate) mod rows;

pub use mode::{Mode, format_label};
pub use observe::{bias, gradients_against_forward, growth_with_length, worst};
pub use published::{day1_published, read_csv};

use crate::record::{self, Record};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::*;
use gdnlab_deps::polars_io::SerReader;
use gdnlab_deps::polars_io::json::{JsonFormat, JsonReader};
use std::io::Cursor;

impl From<PolarsError> for Error {
    fn from(error: PolarsError) -> Self {
        Self::Table(error.to_string())
    }
}

/// Every field of `records` as a column, in the names of the files; the machine's as `machine.cpu` and so on. A field
/// that no record has gives no column.
///
/// # Errors
/// [`Error::Input`] without records, [`Error::Table`] where polars cannot build the table.
pub fn frame(records: &[Record]) -> Result<DataFrame> {
    if records.is_empty() {
        return Err(Error::input("no records: expected at least one to make a table of"));
    }
    let lines = record::to_json_lines(records)?;
    let table =
        JsonReader::new(Cursor::new(lines)).with_json_format(JsonFormat::JsonLines).infer_schema_len(None).finish()?;
    Ok(if table.column("machine").is_ok() { table.unnest(["machine"], Some("."))? } else { table })
}

/// The error metrics of `records`, one row each, other kinds of record left out.
///
/// Columns: kernel, mode, regime, seed, T, d_k, d_v, tensor, max_rel, rel_rms, max_abs, mean_abs, cosine, bias, bias_p,
/// nonfinite, unit_roundoff, and for ablations base, step and format.
///
/// # Errors
/// [`Error::Input`] where no record holds errors.
pub fn errors(records: &[Record]) -> Result<DataFrame> {
    let rows: Vec<_> = records.iter().filter_map(|record| Some((record, record.errors()?))).collect();
    if rows.is_empty() {
        return Err(Error::input(format!("none of {} records holds errors of a tensor", records.len())));
    }
    let text = |name: &str, of: fn(&Record) -> Option<&str>| {
        Column::new(name.into(), rows.iter().map(|(record, _)| of(record)).collect::<Vec<_>>())
    };
    let size = |name: &str, of: fn(&Record) -> Option<usize>| {
        let sizes: Vec<Option<u32>> = rows.iter().map(|(record, _)| u32::try_from(of(record)?).ok()).collect();
        Column::new(name.into(), sizes)
    };
    let metric = |name: &str, of: fn(&record::Errors) -> Option<f64>| {
        Column::new(name.into(), rows.iter().map(|(_, errors)| of(errors)).collect::<Vec<_>>())
    };
    let columns = vec![
        text("kernel", |record| record.workload.kernel.as_deref()),
        text("mode", |record| record.workload.mode.as_deref()),
        text("regime", |record| record.workload.regime.as_deref()),
        Column::new("seed".into(), rows.iter().map(|(record, _)| record.workload.seed).collect::<Vec<_>>()),
        size("T", |record| record.workload.tokens),
        size("d_k", |record| record.workload.key_dim),
        size("d_v", |record| record.workload.value_dim),
        Column::new("tensor".into(), rows.iter().map(|(_, errors)| errors.tensor.as_str()).collect::<Vec<_>>()),
        metric("max_rel", |errors| errors.max_rel),
        metric("rel_rms", |errors| errors.rel_rms),
        metric("max_abs", |errors| errors.max_abs),
        metric("mean_abs", |errors| errors.mean_abs),
        metric("cosine", |errors| errors.cosine),
        metric("bias", |errors| errors.bias),
        metric("bias_p", |errors| errors.bias_p),
        Column::new("nonfinite".into(), rows.iter().map(|(_, errors)| errors.nonfinite as u64).collect::<Vec<_>>()),
        metric("unit_roundoff", |errors| errors.unit_roundoff),
        text("base", |record| Some(record.precision()?.base.as_str())),
        text("step", |record| Some(record.precision()?.step.as_str())),
        text("format", |record| record.precision()?.format.as_deref()),
    ];
    let empty = |column: &Column| column.null_count() == column.len();
    Ok(DataFrame::new(rows.len(), columns.into_iter().filter(|column| !empty(column)).collect())?)
}

/// [`errors`] of an ablation, with the column change, which says in words what happened to which policy: "fp32, one step
/// in TF32". The unchanged policies, whose step is `none`, stand under the same words.
///
/// # Errors
/// As [`errors`], and [`Error::Table`] where `records` hold no ablation.
pub fn ablation(records: &[Record]) -> Result<DataFrame> {
    let errors = errors(records)?;
    require(&errors, &["base", "step", "format"])?;
    let (bases, formats) = (errors.column("base")?.str()?, errors.column("format")?.str()?);
    let words = |base: &str| {
        let of_base = bases.iter().zip(formats.iter()).filter(|(other, _)| *other == Some(base));
        let labels = rows::distinct(of_base.filter_map(|(_, format)| format))
            .into_iter()
            .map(|format| format.parse().map_or_else(|_| format.to_owned(), |format| format_label(format).to_owned()));
        format!("{}, one step in {}", Mode::of(base).label, labels.collect::<Vec<_>>().join(" or "))
    };
    let changes: Vec<Option<String>> = bases.iter().map(|base| base.map(words)).collect();
    let mut columns = errors.columns().to_vec();
    columns.push(Column::new("change".into(), changes));
    Ok(DataFrame::new(errors.height(), columns)?)
}

/// The table of Day 1 for one mode: a row per shape, a column per tensor, `max_rel` in units of `unit` (such as 1e-3).
///
/// `errors` has the columns mode, T, d_k, d_v, tensor and max_rel, as [`errors`] and [`day1_published`] make them.
///
/// # Errors
/// [`Error::Input`] where the mode is not in the table, [`Error::Table`] where a column is missing.
pub fn day1(errors: &DataFrame, mode: &str, unit: f64) -> Result<DataFrame> {
    require(errors, &["mode", "T", "d_k", "d_v", "tensor", "max_rel"])?;
    let of_mode = errors.clone().lazy().filter(col("mode").eq(lit(mode))).collect()?;
    let tensors = rows::distinct(of_mode.column("tensor")?.str()?.iter().flatten());
    if tensors.is_empty() {
        let modes = rows::distinct(errors.column("mode")?.str()?.iter().flatten()).join(", ");
        return Err(Error::input(format!("no errors of mode '{mode}': the table has {modes}")));
    }
    let of_tensor =
        |tensor: &&str| col("max_rel").filter(col("tensor").eq(lit(*tensor))).first().alias(*tensor) / lit(unit);
    let cells: Vec<Expr> = tensors.iter().map(of_tensor).collect();
    let shape = ["T", "d_k", "d_v"];
    Ok(of_mode.clone().lazy().group_by_stable(shape.map(col)).agg(cells).sort(shape, Default::default()).collect()?)
}

/// Ours and the published numbers joined: a row per mode, shape and tensor that both have, with the columns measured,
/// published and ratio = measured / published.
///
/// # Errors
/// [`Error::Table`] where a column is missing.
pub fn beside(measured: &DataFrame, published: &DataFrame) -> Result<DataFrame> {
    let keys = ["mode", "T", "d_k", "d_v", "tensor"];
    let part = |table: &DataFrame, name: &str| -> Result<LazyFrame> {
        require(table, &["mode", "T", "d_k", "d_v", "tensor", "max_rel"])?;
        let mut columns: Vec<Expr> = vec![col("mode"), col("tensor")];
        columns.extend(["T", "d_k", "d_v"].map(|size| col(size).cast(DataType::UInt32)));
        columns.push(col("max_rel").alias(name));
        Ok(table.clone().lazy().select(columns))
    };
    let how = JoinArgs { maintain_order: MaintainOrderJoin::Left, ..JoinArgs::new(JoinType::Inner) };
    Ok(part(measured, "measured")?
        .join(part(published, "published")?, keys.map(col), keys.map(col), how)
        .select(keys.map(col).into_iter().chain([col("measured"), col("published")]).collect::<Vec<_>>())
        .with_column((col("measured") / col("published")).alias("ratio"))
        .collect()?)
}

/// [`day1`] of ours and of the published numbers in one table for reading: each cell is `ours | theirs`. Tensors that were
/// not published are left out.
///
/// # Errors
/// As [`day1`].
pub fn day1_beside(measured: &DataFrame, published: &DataFrame, mode: &str, unit: f64) -> Result<DataFrame> {
    let ours = day1(measured, mode, unit)?;
    let theirs = day1(published, mode, unit)?;
    let mut columns: Vec<Column> = ours.columns()[..3].to_vec();
    for column in &ours.columns()[3..] {
        let Ok(other) = theirs.column(column.name()) else { continue };
        let (left, right) = (column.f64()?, other.f64()?);
        let cell = |(a, b): (Option<f64>, Option<f64>)| {
            let [a, b] = [a, b].map(|value| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.3}")));
            format!("{a} | {b}")
        };
        columns.push(Column::new(column.name().clone(), left.iter().zip(right.iter()).map(cell).collect::<Vec<_>>()));
    }
    let same = |name: &str| -> Result<bool> {
        Ok(ours.column(name)?.cast(&DataType::UInt32)? == theirs.column(name)?.cast(&DataType::UInt32)?)
    };
    if !(same("T")? && same("d_k")? && same("d_v")?) {
        return Err(Error::input(format!("mode '{mode}': ours and the published numbers have different shapes")));
    }
    Ok(DataFrame::new(ours.height(), columns)?)
}

/// Refuses a table that lacks one of `names`.
pub(crate) fn require(table: &DataFrame, names: &[&str]) -> Result<()> {
    match names.iter().find(|name| table.column(name).is_err()) {
        None => Ok(()),
        Some(missing) => {
            let has: Vec<&str> = table.get_column_names().iter().map(|name| name.as_str()).collect();
            Err(Error::Table(format!("expected the column '{missing}', got the columns {}", has.join(", "))))
        }
    }
}

#[cfg(test)]
mod tests;
