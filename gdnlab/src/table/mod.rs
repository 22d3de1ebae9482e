//! Records as polars tables, the tables of Day 1 (errors), Day 2 (rates, times, models) and Day 3 (roundings, policies), and
//! published numbers beside our own.
//!
//! Tables hold full precision; only [`crate::notebook`] rounds, when it shows them.

mod attention;
mod backends;
mod bias;
mod cp;
mod determinism;
mod kernels;
mod ladder;
mod mode;
mod noise;
mod observe;
mod per_tensor;
mod published;
mod roofline;
mod rounding;
pub(crate) mod rows;
mod speed;
mod speed_accuracy;
mod speed_goals;
mod timings;
mod tokens;
mod training;

pub(crate) use attention::OURS;
pub use attention::{attention, attention_by};
pub use backends::{backends, published_backends, rel_rms_of_cosine};
pub use bias::{bias_counts, bias_tests, recorded_biases, repeated_biases};
pub use cp::{cp_exactness, cp_scaling};
pub use determinism::determinism;
pub(crate) use kernels::Part;
pub use kernels::step_kernels;
#[cfg(test)]
pub(crate) use kernels::tests::kernel as kernel_record;
pub(crate) use ladder::{Rung, rungs};
pub use ladder::{chinchilla, crossovers, ladder, peak_memory};
pub use mode::{Mode, format_label};
pub use noise::{apart, distributions};
pub use observe::{bias, gradients_against_forward, growth_with_length, worst};
pub use per_tensor::{error_ratio, largest_per_tensor, only};
pub use published::{day1_fla_on_h200, day1_published, read_csv};
pub use roofline::{machine_name, rates, rooflines};
pub use rounding::{
    diagnosis, policies, policies_per_tensor, proposals, proposals_in_words, published_rounding, rounding,
    rounding_per_tensor, with_times,
};
pub(crate) use speed::{TimeRow, time_rows};
pub use speed::{gdn_losses, gdn_rows, gdn_speedups, gdn_times};
pub use speed_accuracy::{gdn_accuracy, gdn_accuracy_rows};
pub use speed_goals::gdn_goals;
pub use timings::timings;
pub use tokens::{decoded_texts, padded_prompts, positions, reported_flips, token_flips, token_tolerance};
pub use training::{Trained, losses, recorded_losses, training_rates};

use crate::record::{self, Record};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::*;
use gdnlab_deps::polars_io::SerReader;
use gdnlab_deps::polars_io::json::{JsonFormat, JsonReader};
use std::io::Cursor;

/// The columns that name a shape.
const SHAPE: [&str; 3] = ["T", "d_k", "d_v"];

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

/// [`errors`] of the seven tensors of Day 1: those of the others are dh0's, which was not published.
///
/// # Errors
/// As [`errors`].
pub fn day1_errors(records: &[Record]) -> Result<DataFrame> {
    Ok(errors(records)?.lazy().filter(col("tensor").neq(lit("dh0"))).collect()?)
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
/// [`Error::Input`] where the mode is not in the table, or a tensor has several errors at one shape (of several kernels
/// or input regimes, say); [`Error::Table`] where a column is missing.
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
    let by_shape = of_mode.clone().lazy().group_by_stable(SHAPE.map(col)).agg(cells);
    let table = by_shape.sort(SHAPE, Default::default()).collect()?;
    if of_mode.height() > table.height() * tensors.len() {
        return Err(Error::input(format!(
            "mode '{mode}': several errors of one tensor at one shape, expected one: choose one kernel and one input regime"
        )));
    }
    Ok(table)
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

/// Errors of one mode: a table and the name of the mode that is read from it.
pub type OfMode<'a> = (&'a DataFrame, &'a str);

/// [`day1`] of several sources in one table for reading: each cell is `first | second | ...`, in four digits, or in three
/// from three sources on. Tensors that one of them lacks are left out.
///
/// # Errors
/// As [`day1`], and [`Error::Input`] without sources or where they have different shapes.
pub fn day1_beside(sources: &[OfMode<'_>], unit: f64) -> Result<DataFrame> {
    let tables = sources.iter().map(|(table, mode)| day1(table, mode, unit)).collect::<Result<Vec<_>>>()?;
    let (Some(first), Some((_, mode))) = (tables.first(), sources.first()) else {
        return Err(Error::input("no tables of errors: expected at least one"));
    };
    for size in SHAPE {
        for table in &tables {
            if rows::column(table, size, &DataType::UInt32)? != rows::column(first, size, &DataType::UInt32)? {
                return Err(Error::input(format!(
                    "mode '{mode}': the sources have different shapes, see column '{size}'"
                )));
            }
        }
    }
    let mut columns: Vec<Column> = first.columns()[..SHAPE.len()].to_vec();
    for tensor in first.columns()[SHAPE.len()..].iter().map(Column::name) {
        let present = || tables.iter().filter_map(|table| table.column(tensor).ok());
        if present().count() < tables.len() {
            continue;
        }
        let sides = present().map(Column::f64).collect::<PolarsResult<Vec<_>>>()?;
        let digits = if tables.len() < 3 { 4 } else { 3 };
        let word = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| significant(value, digits));
        let cell = |row| sides.iter().map(|side| word(side.get(row))).collect::<Vec<_>>().join(" | ");
        let cells = (0..first.height()).map(cell);
        columns.push(Column::new(tensor.clone(), cells.collect::<Vec<_>>()));
    }
    Ok(DataFrame::new(first.height(), columns)?)
}

/// `value` with `digits` significant digits, and at most one decimal less: `4.696`, `0.975` and `1134` with four.
fn significant(value: f64, digits: u8) -> String {
    let most = f64::from(digits) - 1.0;
    let decimals = if value == 0.0 { most } else { most - value.abs().log10().floor() };
    format!("{value:.*}", decimals.clamp(0.0, most) as usize)
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
