//! What is measured, row by row: with progress, a way to stop, and without what is recorded already.

use super::{COPY_BANDWIDTH, Products, RIDGE_POINT, TFLOP_S};
use crate::numerics::Step;
use crate::record::{Environment, Measurement, Record, Roofline, Workload};
use crate::{Error, Result};
use std::fmt;
use std::ops::ControlFlow;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// Bytes that a large copy reads and writes, per second.
    Copy,
    /// Rate of a large square product, of the first ones after a rest.
    Matmul(Products),
    /// The same while products have been running for a while, and the clock is what the power limit leaves of it.
    Sustained(Products),
    /// The rate of these products over the copy bandwidth: the arithmetic intensity from which on they, and not the
    /// memory, take the time.
    Ridge(Products),
}

impl Quantity {
    /// Its name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Copy => COPY_BANDWIDTH,
            Self::Matmul(products) => products.quantity(),
            Self::Sustained(products) => products.sustained(),
            Self::Ridge(_) => RIDGE_POINT,
        }
    }

    /// Its unit in records.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Copy => "GB/s",
            Self::Matmul(_) | Self::Sustained(_) => TFLOP_S,
            Self::Ridge(_) => "FLOP/byte",
        }
    }
}

/// A row of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// What is measured.
    pub quantity: Quantity,
    /// Rows and columns of the matrices, where there are some.
    pub size: Option<usize>,
}

impl Row {
    /// The sizes as they stand among the words of a record, such as `8192x8192x8192`.
    pub fn sizes(&self) -> Option<String> {
        self.size.map(|n| format!("{n}x{n}x{n}"))
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.quantity.name())?;
        self.sizes().map_or(Ok(()), |sizes| write!(f, " {sizes}"))
    }
}

/// A measured rate.
#[derive(Clone, Debug, PartialEq)]
pub struct Rate {
    /// In the unit of its quantity.
    pub value: f64,
    /// By the data sheet, in the same unit.
    pub theoretical: Option<f64>,
    /// What it was measured with, in words that contain [`Row::sizes`].
    pub with: String,
}

impl Rate {
    fn record(self, quantity: Quantity, environment: &Environment) -> Record {
        let workload = Workload { kernel: Some(self.with), ..Workload::default() };
        let roofline = Roofline {
            quantity: quantity.name().to_owned(),
            value: self.value,
            theoretical: self.theoretical,
            unit: quantity.unit().to_owned(),
        };
        Record::new(environment, &workload, Measurement::Roofline(roofline))
    }
}

/// A machine whose rates are measured.
pub trait Bench {
    /// What it can measure, the copy first.
    fn rows(&self) -> Vec<Row>;

    /// Measures a copy or a product; `go_on` is asked again and again.
    ///
    /// # Errors
    /// [`Error::Stopped`] where `go_on` said so, and what the machine lacks.
    fn measure(&mut self, row: &Row, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Rate>;
}

/// What came of a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Measured now.
    Measured(Record),
    /// Not measured, because there is this record of the same code and machine.
    Recorded(Record),
    /// It could not be measured, in words.
    Failed(String),
}

impl Outcome {
    /// The record, measured now or before.
    pub fn record(&self) -> Option<&Record> {
        match self {
            Self::Measured(record) | Self::Recorded(record) => Some(record),
            Self::Failed(_) => None,
        }
    }

    /// Value and theoretical value.
    pub fn roofline(&self) -> Option<&Roofline> {
        match &self.record()?.measurement {
            Measurement::Roofline(roofline) => Some(roofline),
            _ => None,
        }
    }
}

/// What was measured.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finished {
    /// In the order of the list.
    pub rows: Vec<(Row, Outcome)>,
    /// Whether it was stopped before the end.
    pub stopped: bool,
}

impl Finished {
    fn roofline(&self, quantity: Quantity) -> Option<&Roofline> {
        self.rows.iter().find(|(row, _)| row.quantity == quantity)?.1.roofline()
    }

    /// The rate of products over the copy bandwidth, where both are there.
    fn ridge(&self, products: Products) -> Result<Rate> {
        let copy = self.roofline(Quantity::Copy);
        let Some((copy, matmul)) = copy.zip(self.roofline(Quantity::Matmul(products))) else {
            return Err(Error::input(format!("{} or {COPY_BANDWIDTH} is missing", products.quantity())));
        };
        let flop_per_byte = |matmul_tflop_s: f64, copy_gb_s: f64| 1e3 * matmul_tflop_s / copy_gb_s;
        Ok(Rate {
            value: flop_per_byte(matmul.value, copy.value),
            theoretical: matmul.theoretical.zip(copy.theoretical).map(|(matmul, copy)| flop_per_byte(matmul, copy)),
            with: format!("{} over {COPY_BANDWIDTH}", products.quantity()),
        })
    }
}

/// Measures every row of `bench` that is not among the records in `known` of the same code and machine, and hands each
/// record to `keep` at once, but for ridge points, which follow from two others. `watch` is told what comes next, and is asked in between too; where it breaks, what was
/// measured so far is returned. `environment` says code, time and machine of a measurement that has just ended.
///
/// Records of code that differs from its commit are not trusted, and such code measures everything.
///
/// # Errors
/// What `keep` returns.
pub fn run(
    bench: &mut dyn Bench,
    known: &[Record],
    environment: &dyn Fn() -> Environment,
    keep: &mut dyn FnMut(&Record) -> Result<()>,
    mut watch: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Finished> {
    let mut finished = Finished::default();
    let rows = bench.rows();
    let now = environment();
    for (done, row) in rows.iter().enumerate() {
        let step = Step { done, total: rows.len(), name: row.to_string() };
        if let Some(record) = recorded(row, known, &now) {
            finished.rows.push((*row, Outcome::Recorded(record.clone())));
            continue;
        }
        let mut go_on = || watch(&step);
        if go_on().is_break() {
            return Ok(Finished { stopped: true, ..finished });
        }
        let measured = match row.quantity {
            Quantity::Ridge(products) => finished.ridge(products),
            _ => bench.measure(row, &mut go_on),
        };
        let outcome = match measured {
            Ok(rate) => {
                let record = rate.record(row.quantity, &environment());
                if !matches!(row.quantity, Quantity::Ridge(_)) {
                    keep(&record)?;
                }
                Outcome::Measured(record)
            }
            Err(Error::Stopped) => return Ok(Finished { stopped: true, ..finished }),
            Err(error) => Outcome::Failed(error.to_string()),
        };
        finished.rows.push((*row, outcome));
    }
    Ok(finished)
}

/// The newest record of `row` by this code on this machine.
fn recorded<'a>(row: &Row, known: &'a [Record], now: &Environment) -> Option<&'a Record> {
    let same = |record: &&Record| {
        let Measurement::Roofline(roofline) = &record.measurement else { return false };
        let with = record.workload.kernel.as_deref().unwrap_or_default();
        roofline.quantity == row.quantity.name()
            && roofline.unit == row.quantity.unit()
            && row.sizes().is_none_or(|sizes| with.contains(&sizes))
            && record.is_of(now)
    };
    known.iter().filter(same).max_by_key(|record| record.environment.utc.as_deref())
}

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;
