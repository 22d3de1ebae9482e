//! Times of attention backends, and the rates that follow from them.

use super::read_csv;
use super::roofline::{PUBLISHED_MACHINE, machine_name, rates};
use super::rows::{column, distinct, numbers, texts};
use crate::cost::Cost;
use crate::cost::attention::Call;
use crate::record::{Measurement, Pass, Record, Workload};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::*;
use std::path::Path;

/// Times that others' kernels took.
struct Others {
    file: &'static str,
    machine: &'static str,
    /// The name of a backend's kernel.
    kernel: fn(&str) -> String,
}

/// The published times, and what we measured of PyTorch.
const OTHERS: [Others; 2] = [
    Others {
        file: "day02_gb10_attention_backends.csv",
        machine: PUBLISHED_MACHINE,
        kernel: |backend| format!("PyTorch {backend}, published"),
    },
    Others {
        file: "day02_h200_torch_2.11_attention.csv",
        machine: "H200",
        kernel: |backend| format!("PyTorch 2.11 {backend}"),
    },
];
/// The products that rates are held against.
const PRODUCTS: &str = "bf16_matmul";
/// What our backends' names begin with.
pub(crate) const OURS: &str = "gdnlab";
/// Bytes of an element of q, k, v and o in 16 bits.
const ELEMENT_BYTES: usize = 2;

/// One backend's time for one call.
#[derive(Clone, Debug, PartialEq)]
struct Timed {
    machine: String,
    kernel: String,
    backward: bool,
    call: Call,
    ms: f64,
}

impl Timed {
    fn cost(&self) -> Cost {
        if self.backward { self.call.backward() } else { self.call.forward() }
    }

    fn same_call(&self, other: &Self) -> bool {
        (&self.machine, &self.kernel, self.backward, self.call)
            == (&other.machine, &other.kernel, other.backward, other.call)
    }
}

/// Times of attention: those of others in the folder `published`, below them those of `records`, each once (the newest).
/// The columns machine, kernel (ours begin with `gdnlab`; `cuDNN` is the library as we call it), pass (fwd or bwd), B, T, H,
/// d and ms; TFLOP_per_s, with the FLOPs of the visible scores as [`Call`] counts them; reached_pct, the same over the rate of
/// bf16 products of the machine in `rooflines`, empty where that has none.
///
/// # Errors
/// As [`read_csv`], and [`Error::Input`] for a record without its sizes.
pub fn attention(records: &[Record], published: impl AsRef<Path>, rooflines: &DataFrame) -> Result<DataFrame> {
    let mut all = Vec::new();
    for others in &OTHERS {
        all.extend(times_of(others, published.as_ref())?);
    }
    all.extend(newest(records)?);
    let mut reached = Vec::with_capacity(all.len());
    for timed in &all {
        let flop_per_s = rates(rooflines, &timed.machine, PRODUCTS)?.and_then(|rates| rates.matmul_flop_per_s);
        reached.push(flop_per_s.map(|rate| 100.0 * timed.cost().tflop_s(timed.ms) * 1e12 / rate));
    }
    let text = |name: &str, of: fn(&Timed) -> &str| Column::new(name.into(), all.iter().map(of).collect::<Vec<_>>());
    let whole = |name: &str, of: fn(&Call) -> usize| {
        Column::new(name.into(), all.iter().map(|timed| of(&timed.call) as u32).collect::<Vec<_>>())
    };
    let number = |name: &str, of: fn(&Timed) -> f64| Column::new(name.into(), all.iter().map(of).collect::<Vec<_>>());
    let columns = vec![
        text("machine", |timed| &timed.machine),
        text("kernel", |timed| &timed.kernel),
        text("pass", |timed| if timed.backward { "bwd" } else { "fwd" }),
        whole("B", |call| call.batch),
        whole("T", |call| call.tokens),
        whole("H", |call| call.heads),
        whole("d", |call| call.head_dim),
        number("ms", |timed| timed.ms),
        number("TFLOP_per_s", |timed| timed.cost().tflop_s(timed.ms)),
        Column::new("reached_pct".into(), reached),
    ];
    Ok(DataFrame::new(all.len(), columns)?)
}

fn times_of(others: &Others, folder: &Path) -> Result<Vec<Timed>> {
    let columns = [("H", DataType::UInt32), ("backend", DataType::String), ("ms", DataType::Float64)];
    let table = read_csv(folder.join(others.file), &columns)?;
    let (heads, backends, ms) = (numbers(&table, "H")?, texts(&table, "backend")?, numbers(&table, "ms")?);
    let row = |row: usize| {
        Some(Timed {
            machine: others.machine.to_owned(),
            kernel: (others.kernel)(&backends[row].trim_end_matches("_ATTENTION").to_lowercase()),
            backward: false,
            call: Call {
                batch: 32,
                tokens: 1024,
                heads: heads[row]? as usize,
                head_dim: 64,
                element_bytes: ELEMENT_BYTES,
            },
            ms: ms[row]?,
        })
    };
    Ok((0..table.height()).filter_map(row).collect())
}

fn newest(records: &[Record]) -> Result<Vec<Timed>> {
    let mut newest: Vec<(Timed, Option<&str>)> = Vec::new();
    for record in records {
        let Measurement::Attention(timing) = &record.measurement else { continue };
        let timed = Timed {
            machine: machine_name(&record.environment.machine),
            kernel: name(record.workload.kernel.as_deref().unwrap_or("unnamed")),
            backward: record.workload.pass == Some(Pass::Bwd),
            call: call_of(&record.workload)?,
            ms: timing.latency_ms,
        };
        let utc = record.environment.utc.as_deref();
        match newest.iter_mut().find(|(known, _)| known.same_call(&timed)) {
            Some((known, at)) if utc >= *at => (*known, *at) = (timed, utc),
            Some(_) => {}
            None => newest.push((timed, utc)),
        }
    }
    Ok(newest.into_iter().map(|(timed, _)| timed).collect())
}

/// `gdnlab flash` for a kernel of ours, `cuDNN 9.19.0` for the library that we timed.
fn name(kernel: &str) -> String {
    kernel.strip_prefix("cudnn-").map_or_else(|| format!("{OURS} {kernel}"), |version| format!("cuDNN {version}"))
}

fn call_of(workload: &Workload) -> Result<Call> {
    match (workload.batch, workload.tokens, workload.value_heads, workload.value_dim) {
        (Some(batch), Some(tokens), Some(heads), Some(head_dim)) => {
            Ok(Call { batch, tokens, heads, head_dim, element_bytes: ELEMENT_BYTES })
        }
        _ => Err(Error::input("a record of attention lacks one of B, T, HV and V: expected all four")),
    }
}

/// A table of [`attention`] with one row per backend and pass, and one column of milliseconds for each value of the column
/// `by`, H or T: `H = 8`, `H = 12` and so on. Filter it before, so that nothing else differs.
///
/// # Errors
/// [`Error::Input`] where a backend has several times for one value, [`Error::Table`] where a column is missing.
pub fn attention_by(attention: &DataFrame, by: &str) -> Result<DataFrame> {
    let [machines, kernels, passes] = ["machine", "kernel", "pass"].map(|name| texts(attention, name));
    let (machines, kernels, passes) = (machines?, kernels?, passes?);
    let values = column(attention, by, &DataType::UInt32)?;
    let values: Vec<u32> = values.u32()?.iter().flatten().collect();
    let ms = numbers(attention, "ms")?;
    let rows: Vec<[&str; 3]> =
        (0..attention.height()).map(|row| [&*machines[row], &*kernels[row], &*passes[row]]).collect();
    let keys = distinct(rows.iter().copied());
    let mut columns: Vec<Column> = ["machine", "kernel", "pass"]
        .iter()
        .enumerate()
        .map(|(at, name)| Column::new((*name).into(), keys.iter().map(|key| key[at]).collect::<Vec<_>>()))
        .collect();
    let mut wanted = distinct(values.iter().copied());
    wanted.sort_unstable();
    for value in wanted {
        let mut cells = Vec::with_capacity(keys.len());
        for key in &keys {
            let mut of_cell = (0..rows.len()).filter(|&row| rows[row] == *key && values[row] == value);
            let first = of_cell.next();
            if of_cell.next().is_some() {
                return Err(Error::input(format!(
                    "several times of {} on {} at {by} = {value}: expected one; filter the table by what else differs",
                    key[1], key[0]
                )));
            }
            cells.push(first.and_then(|row| ms[row]));
        }
        columns.push(Column::new(format!("{by} = {value}").into(), cells));
    }
    Ok(DataFrame::new(keys.len(), columns)?)
}

#[cfg(test)]
#[path = "attention_tests.rs"]
mod tests;
