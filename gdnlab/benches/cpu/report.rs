//! The table that the benchmark prints, and the records that it keeps when asked.

use crate::timing::Samples;
use gdnlab::record::{self, Environment, Measurement, Record, Roofline, Timing, Workload};
use std::path::PathBuf;

/// Where records are kept.
const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data");
const SUITE: &str = "bench-cpu";

/// Ratio of the 80th to the 20th percentile above which something else disturbed a row.
const STEADY: f64 = 1.2;

/// Lines of text, printed together at the end, and the measurements behind them.
#[derive(Default)]
pub struct Report {
    lines: Vec<[String; 4]>,
    notes: Vec<String>,
    measurements: Vec<(Workload, Measurement)>,
}

impl Report {
    /// A line that has no record of its own.
    pub fn line(&mut self, name: &str, time: String, comparison: String) {
        self.lines.push([name.to_owned(), time, String::new(), comparison]);
    }

    /// A rate that the machine reaches, per second.
    pub fn rate(&mut self, name: &str, time: String, rate: f64, unit: &str) {
        let (value, unit) = (rate / 1e9, format!("G{unit}/s"));
        self.lines.push([name.to_owned(), time, format!("{value:.1} {unit}"), String::new()]);
        let roofline = Roofline { quantity: name.to_owned(), value, theoretical: None, unit };
        self.measurements.push((Workload::default(), Measurement::Roofline(roofline)));
    }

    /// The time of a workload. The timing holds what it is compared with.
    pub fn workload(&mut self, name: &str, time: &Samples, workload: Workload, timing: Timing, comparison: String) {
        let tokens = workload.tokens.unwrap_or(1);
        let rate = timing.tflop_s.map_or(String::new(), |rate| format!("{:.1} GFLOP/s", 1e3 * rate));
        self.lines.push([name.to_owned(), per(time, tokens, "token"), rate, comparison]);
        let ms = |fraction| 1e3 * time.quantile(fraction);
        if ms(0.8) > STEADY * ms(0.2) {
            self.notes.push(format!("{name}: unsteady; repeat it while nothing else runs, the ratios may be wrong"));
        }
        let timing = Timing {
            latency_ms: ms(0.5),
            p20_ms: Some(ms(0.2)),
            p80_ms: Some(ms(0.8)),
            samples_ms: Some(time.seconds().iter().map(|s| 1e3 * s).collect()),
            ..timing
        };
        self.measurements.push((workload, Measurement::Bench(timing)));
    }

    pub fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    pub fn print(&self) {
        let width = |column: usize| self.lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
        let [name, time, rate] = [0, 1, 2].map(width);
        println!("\none thread; median (20th to 80th percentile)");
        for [a, b, c, d] in &self.lines {
            println!("{a:name$}  {b:>time$}  {c:>rate$}  {d}");
        }
        self.notes.iter().for_each(|note| println!("{note}"));
    }

    /// Adds the measurements to the records in `data/`.
    pub fn save(&self) -> gdnlab::Result<PathBuf> {
        let environment = Environment::detect();
        let records: Vec<Record> = self
            .measurements
            .iter()
            .map(|(workload, measurement)| Record::new(&environment, workload, measurement.clone()))
            .collect();
        record::keep(DATA, SUITE, &records)
    }
}

/// Microseconds per `unit`, of which one call has `count`.
pub fn per(samples: &Samples, count: usize, unit: &str) -> String {
    let us = |fraction| 1e6 * samples.quantile(fraction) / count as f64;
    format!("{:.2} us/{unit} ({:.2}-{:.2})", us(0.5), us(0.2), us(0.8))
}
