//! What machines reach: rates of products and of copies, and the ridge points that follow from them.

use super::read_csv;
use super::rows::{distinct, numbers, texts};
use crate::Result;
use crate::bench::roofline::{COPY_BANDWIDTH, Products, RIDGE_POINT};
use crate::cost::Rates;
use crate::record::{Machine, Measurement, Record};
use gdnlab_deps::polars::prelude::*;
use std::path::Path;

/// File of the published rates.
const PUBLISHED: &str = "day02_gb10_roofline.csv";
/// The machine that the published numbers of Day 2 were measured on.
pub(super) const PUBLISHED_MACHINE: &str = "GB10";
/// The products that a ridge point is given for: the first of these that a machine has.
const OF_RIDGE: [Products; 3] = [Products::Bf16, Products::Fp32, Products::Fp64];

/// One rate of one machine.
#[derive(Clone, Debug, PartialEq)]
struct Rate {
    machine: String,
    quantity: String,
    measured: f64,
    theoretical: Option<f64>,
    unit: String,
}

/// The rates of the machines in `records`, below the published ones of the folder `published`, with the columns machine,
/// quantity, measured, theoretical, unit and reached_pct = 100 measured / theoretical.
///
/// Of a rate that was measured several times the newest counts. For each machine that has a rate of copies and one of
/// products follows the ridge point: bf16's, or else fp32's or fp64's, over the copy's. Records of other kinds are left
/// out.
///
/// # Errors
/// As [`read_csv`].
pub fn rooflines(records: &[Record], published: impl AsRef<Path>) -> Result<DataFrame> {
    let mut rates = published_rates(published.as_ref())?;
    rates.extend(recorded_rates(records));
    let machines: Vec<String> = distinct(rates.iter().map(|rate| rate.machine.clone()));
    let mut with_ridges = Vec::new();
    for machine in machines {
        let of_machine: Vec<Rate> = rates.iter().filter(|rate| rate.machine == machine).cloned().collect();
        let ridge = ridge(&of_machine);
        with_ridges.extend(of_machine);
        with_ridges.extend(ridge);
    }
    frame(&with_ridges)
}

/// The rates of `machine` in a table of [`rooflines`], of copies and of the products called `product`, such as
/// `bf16_matmul`; `None` where the rate of copies is not in the table.
///
/// # Errors
/// [`crate::Error::Table`] where a column is missing or of another type.
pub fn rates(rooflines: &DataFrame, machine: &str, product: &str) -> Result<Option<Rates>> {
    let all = rates_in(rooflines)?;
    let of = |quantity: &str| {
        let rate = all.iter().find(|rate| rate.machine == machine && rate.quantity == quantity)?;
        Some(rate.measured * unit_per_s(&rate.unit)?)
    };
    Ok(of(COPY_BANDWIDTH).map(|copy_bytes_per_s| Rates { copy_bytes_per_s, matmul_flop_per_s: of(product) }))
}

/// Name of a machine in tables: that of its GPU or else of its CPU, without what all such names have.
pub fn machine_name(machine: &Machine) -> String {
    let name = machine.gpu.as_deref().or(machine.cpu.as_deref()).unwrap_or("unknown machine");
    let plain = name.replace("(R)", " ").replace("(TM)", " ");
    let words: Vec<&str> =
        plain.split_whitespace().filter(|word| !matches!(*word, "NVIDIA" | "Processor" | "CPU")).collect();
    words.join(" ")
}

fn published_rates(folder: &Path) -> Result<Vec<Rate>> {
    let number = DataType::Float64;
    let columns = [
        ("quantity", DataType::String),
        ("measured", number.clone()),
        ("theoretical", number),
        ("unit", DataType::String),
    ];
    let table = read_csv(folder.join(PUBLISHED), &columns)?;
    let (quantities, units) = (texts(&table, "quantity")?, texts(&table, "unit")?);
    let (measured, theoretical) = (numbers(&table, "measured")?, numbers(&table, "theoretical")?);
    let rate = |row: usize| {
        Some(Rate {
            machine: PUBLISHED_MACHINE.to_owned(),
            quantity: quantities[row].clone(),
            measured: measured[row]?,
            theoretical: theoretical[row],
            unit: units[row].clone(),
        })
    };
    // The ridge point is computed, here as for every machine.
    Ok((0..table.height()).filter_map(rate).filter(|rate| rate.quantity != RIDGE_POINT).collect())
}

/// The rates in `records`, each once: the newest, and of several that were measured at the same time the largest.
fn recorded_rates(records: &[Record]) -> Vec<Rate> {
    let mut newest: Vec<(Rate, Option<&str>)> = Vec::new();
    for record in records {
        let Measurement::Roofline(roofline) = &record.measurement else { continue };
        if roofline.quantity == RIDGE_POINT {
            continue;
        }
        let rate = Rate {
            machine: machine_name(&record.environment.machine),
            quantity: roofline.quantity.clone(),
            measured: roofline.value,
            theoretical: roofline.theoretical,
            unit: roofline.unit.clone(),
        };
        let utc = record.environment.utc.as_deref();
        let same = |(other, _): &&mut (Rate, Option<&str>)| {
            (&other.machine, &other.quantity) == (&rate.machine, &rate.quantity)
        };
        match newest.iter_mut().find(same) {
            Some((known, at)) if utc > *at || (utc == *at && rate.measured > known.measured) => {
                (*known, *at) = (rate, utc);
            }
            Some(_) => {}
            None => newest.push((rate, utc)),
        }
    }
    newest.into_iter().map(|(rate, _)| rate).collect()
}

/// The ridge point of a machine with these rates.
fn ridge(of_machine: &[Rate]) -> Option<Rate> {
    let of = |quantity: &str| of_machine.iter().find(|rate| rate.quantity == quantity);
    let (products, copy) = (OF_RIDGE.into_iter().find_map(|products| of(products.quantity()))?, of(COPY_BANDWIDTH)?);
    let over = |products_rate: f64, copy_rate: f64| {
        Some(products_rate * unit_per_s(&products.unit)? / (copy_rate * unit_per_s(&copy.unit)?))
    };
    Some(Rate {
        machine: copy.machine.clone(),
        quantity: RIDGE_POINT.to_owned(),
        measured: over(products.measured, copy.measured)?,
        theoretical: products.theoretical.zip(copy.theoretical).and_then(|(products, copy)| over(products, copy)),
        unit: "FLOP/byte".to_owned(),
    })
}

/// FLOPs or bytes per second that one of `unit` is.
fn unit_per_s(unit: &str) -> Option<f64> {
    match unit {
        "TFLOP/s" | "TB/s" => Some(1e12),
        "GFLOP/s" | "GB/s" => Some(1e9),
        _ => None,
    }
}

fn frame(rates: &[Rate]) -> Result<DataFrame> {
    let text = |name: &str, of: fn(&Rate) -> &str| Column::new(name.into(), rates.iter().map(of).collect::<Vec<_>>());
    let number =
        |name: &str, of: fn(&Rate) -> Option<f64>| Column::new(name.into(), rates.iter().map(of).collect::<Vec<_>>());
    let columns = vec![
        text("machine", |rate| &rate.machine),
        text("quantity", |rate| &rate.quantity),
        number("measured", |rate| Some(rate.measured)),
        number("theoretical", |rate| rate.theoretical),
        text("unit", |rate| &rate.unit),
        number("reached_pct", |rate| Some(100.0 * rate.measured / rate.theoretical?)),
    ];
    Ok(DataFrame::new(rates.len(), columns)?)
}

fn rates_in(rooflines: &DataFrame) -> Result<Vec<Rate>> {
    let [machines, quantities, units] = ["machine", "quantity", "unit"].map(|name| texts(rooflines, name));
    let (machines, quantities, units) = (machines?, quantities?, units?);
    let (measured, theoretical) = (numbers(rooflines, "measured")?, numbers(rooflines, "theoretical")?);
    let rate = |row: usize| {
        Some(Rate {
            machine: machines[row].clone(),
            quantity: quantities[row].clone(),
            measured: measured[row]?,
            theoretical: theoretical[row],
            unit: units[row].clone(),
        })
    };
    Ok((0..rooflines.height()).filter_map(rate).collect())
}

#[cfg(test)]
#[path = "roofline_tests.rs"]
mod tests;
