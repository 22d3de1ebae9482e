//! The published tables of Day 2 as the tests of the formulas read them: every field as the text that was printed.

use super::Rates;
use crate::model::config::{Mixer, Size};
use crate::table::read_csv;
use gdnlab_deps::polars::prelude::*;
use std::path::Path;

/// Which table.
#[derive(Clone, Copy, Debug)]
pub(super) enum Table {
    Ladder,
    Chinchilla,
    Roofline,
    AttentionBackends,
}

impl Table {
    fn file_and_columns(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Ladder => (
                "day02_gb10_ladder.csv",
                &[
                    "mixer",
                    "size",
                    "d_model",
                    "layers",
                    "body_Mparams",
                    "tok_per_s",
                    "us_per_tok",
                    "peak_GB",
                    "mfu_pct",
                    "impl_GBps",
                    "bw_pct",
                    "F_MFLOP_per_tok",
                    "B_kB_per_tok",
                    "I_FLOP_per_byte",
                    "I_over_ridge",
                ],
            ),
            Self::Chinchilla => (
                "day02_gb10_chinchilla.csv",
                &["size", "N_body_M", "tokens_body_B", "hours_body", "N_total_M", "tokens_total_B", "hours_total"],
            ),
            Self::Roofline => ("day02_gb10_roofline.csv", &["quantity", "measured", "theoretical", "unit"]),
            Self::AttentionBackends => ("day02_gb10_attention_backends.csv", &["H", "backend", "ms"]),
        }
    }
}

/// A published table.
pub(super) struct Published(DataFrame);

pub(super) fn published(table: Table) -> Published {
    let (file, names) = table.file_and_columns();
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published")).join(file);
    let columns: Vec<(&str, DataType)> = names.iter().map(|name| (*name, DataType::String)).collect();
    let table = read_csv(path, &columns).unwrap();
    assert_eq!(table.get_column_names(), names, "a column that no test knows");
    Published(table)
}

impl Published {
    pub fn height(&self) -> usize {
        self.0.height()
    }

    /// A field as it was printed.
    pub fn text(&self, row: usize, column: &str) -> &str {
        self.0.column(column).unwrap().str().unwrap().get(row).unwrap()
    }

    pub fn number(&self, row: usize, column: &str) -> f64 {
        self.text(row, column).parse().unwrap()
    }

    /// The row with this text in a column.
    pub fn row(&self, column: &str, text: &str) -> usize {
        (0..self.height()).find(|&row| self.text(row, column) == text).unwrap()
    }

    /// The model of a row of the ladder.
    pub fn model(&self, row: usize) -> (Mixer, Size) {
        (self.text(row, "mixer").parse().unwrap(), self.text(row, "size").parse().unwrap())
    }
}

/// The rates that the published machine reaches.
pub(super) fn gb10_rates() -> Rates {
    let roofline = published(Table::Roofline);
    let measured = |quantity| roofline.number(roofline.row("quantity", quantity), "measured");
    Rates {
        copy_bytes_per_s: 1e9 * measured("copy_bandwidth"),
        matmul_flop_per_s: Some(1e12 * measured("bf16_matmul")),
    }
}

/// `value` with as many decimals as were printed.
pub(super) fn as_printed(value: f64, text: &str) -> String {
    let decimals = text.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    format!("{value:.decimals$}")
}
