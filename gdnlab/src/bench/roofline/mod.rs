//! What the hardware reaches: the copy bandwidth and the rates of large products, measured, beside what the vendor says,
//! and the ridge point between the two.
//!
//! Products heat a GPU up to its power limit, which lowers its clock within some tens of milliseconds: an H200 multiplies
//! bf16 matrices at 810 TFLOP/s after a rest and at 703 after a second of it. The rate of the first products is what data sheets and
//! other people's tables mean, and all shares here are of it; the sustained one, which a training step has to live on, is
//! measured beside it for bf16.
//!
//! [`run`] measures them for [`OnGpu`] or [`OnCpu`], one record each, and leaves out what is recorded already. Floors are
//! held against [`Ceilings`]: the copy bandwidth of the same run, and products from a record or from a data sheet, which
//! is said.

mod copy;
mod cpu;
mod data_sheet;
mod gpu;
mod report;
mod rows;

pub use copy::{Copier, CopyBandwidth, copy_bandwidth};
pub use cpu::OnCpu;
pub use data_sheet::DataSheet;
pub use gpu::OnGpu;
pub use report::Report;
pub use rows::{Bench, Finished, Outcome, Quantity, Rate, Row, run};

use crate::cost::Rates;
use crate::cuda::Gpu;
use crate::precision::Format;
use crate::record::{Measurement, Record};

/// The name of the copy's rate in records.
pub const COPY_BANDWIDTH: &str = "copy_bandwidth";
/// The name of the ridge point in records.
pub const RIDGE_POINT: &str = "ridge_point";
/// The unit of products' rates in records.
pub const TFLOP_S: &str = "TFLOP/s";

/// The format that products are computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Products {
    /// bf16 operands, sums in binary32.
    Bf16,
    /// fp16 operands, sums in binary32.
    Fp16,
    /// TF32 operands, sums in binary32.
    Tf32,
    /// IEEE binary32.
    Fp32,
    /// IEEE binary64.
    Fp64,
}

impl Products {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Bf16, Self::Fp16, Self::Tf32, Self::Fp32, Self::Fp64];

    /// Of a mode whose products have operands in `format`.
    pub fn of(format: Format) -> Self {
        match format {
            Format::Bf16 => Self::Bf16,
            Format::F16 => Self::Fp16,
            Format::Tf32 | Format::Tf32Truncated => Self::Tf32,
            Format::F32 => Self::Fp32,
            Format::F64 => Self::Fp64,
        }
    }

    /// The format of the operands.
    pub fn format(self) -> Format {
        match self {
            Self::Bf16 => Format::Bf16,
            Self::Fp16 => Format::F16,
            Self::Tf32 => Format::Tf32,
            Self::Fp32 => Format::F32,
            Self::Fp64 => Format::F64,
        }
    }

    /// The name of the sustained rate in records.
    pub fn sustained(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16_matmul_sustained",
            Self::Fp16 => "fp16_matmul_sustained",
            Self::Tf32 => "tf32_matmul_sustained",
            Self::Fp32 => "fp32_matmul_sustained",
            Self::Fp64 => "fp64_matmul_sustained",
        }
    }

    /// The name of the rate in records.
    pub fn quantity(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16_matmul",
            Self::Fp16 => "fp16_matmul",
            Self::Tf32 => "tf32_matmul",
            Self::Fp32 => "fp32_matmul",
            Self::Fp64 => "fp64_matmul",
        }
    }
}

/// The rates of one GPU, and where each comes from.
#[derive(Clone, Debug)]
pub struct Ceilings<'a> {
    gpu: &'a str,
    copy: CopyBandwidth,
    records: &'a [Record],
}

impl<'a> Ceilings<'a> {
    /// The GPU called `gpu`, whose copy bandwidth was measured in this run. Rates of products come from the newest of
    /// `records` of such a GPU that has them, or else from its data sheet.
    pub fn new(gpu: &'a Gpu, copy: CopyBandwidth, records: &'a [Record]) -> Self {
        Self::named(&gpu.name, copy, records)
    }

    /// The same for a GPU of this name that need not be here.
    pub fn named(gpu: &'a str, copy: CopyBandwidth, records: &'a [Record]) -> Self {
        Self { gpu, copy, records }
    }

    /// The copy bandwidth.
    pub fn copy(&self) -> CopyBandwidth {
        self.copy
    }

    /// The rates for calls whose products have operands in `format`, and the words for where they come from.
    pub fn rates(&self, format: Format) -> (Rates, String) {
        let copy = format!("copy {:.0} GB/s measured in this run ({})", self.copy.bytes_per_s / 1e9, self.copy);
        let rates = |tflop_s: Option<f64>| Rates {
            copy_bytes_per_s: self.copy.bytes_per_s,
            matmul_flop_per_s: tflop_s.map(|rate| 1e12 * rate),
        };
        let products = Products::of(format);
        let quantity = products.quantity();
        if let Some((value, utc)) = self.recorded(quantity) {
            return (rates(Some(value)), format!("{copy}, {quantity} {value:.0} TFLOP/s recorded at {utc}"));
        }
        let printed = DataSheet::of(self.gpu).and_then(|sheet| Some((sheet.matmul_tflop_s(products)?, sheet.source)));
        match printed {
            Some((value, source)) => {
                (rates(Some(value)), format!("{copy}, {quantity} {value} TFLOP/s of the {source}"))
            }
            None => (rates(None), format!("{copy}, {quantity} unknown, so traffic alone")),
        }
    }

    /// The newest recorded rate `quantity` in TFLOP/s on such a GPU, and when it was measured.
    fn recorded(&self, quantity: &str) -> Option<(f64, &str)> {
        let of_this = self.records.iter().filter(|record| record.environment.machine.gpu.as_deref() == Some(self.gpu));
        let rates = of_this.filter_map(|record| match &record.measurement {
            Measurement::Roofline(roofline) if roofline.quantity == quantity && roofline.unit == TFLOP_S => {
                Some((roofline.value, record.environment.utc.as_deref().unwrap_or_default()))
            }
            _ => None,
        });
        rates.max_by_key(|(_, utc)| *utc)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Environment, Machine, Roofline, Workload};

    const COPY: CopyBandwidth = CopyBandwidth {
        bytes_per_s: 4.254e12,
        theoretical: None,
        copier: Copier::Kernel,
        copied_bytes: 1 << 30,
        piece_bytes: 256 << 20,
    };

    fn roofline(gpu: &str, utc: &str, value: f64) -> Record {
        let machine = Machine { gpu: Some(gpu.to_owned()), ..Machine::default() };
        let environment = Environment { machine, utc: Some(utc.to_owned()), ..Environment::default() };
        let rate =
            Roofline { quantity: "bf16_matmul".to_owned(), value, theoretical: None, unit: "TFLOP/s".to_owned() };
        Record::new(&environment, &Workload::default(), Measurement::Roofline(rate))
    }

    #[test]
    fn the_newest_record_of_the_same_gpu_wins_over_the_data_sheet() {
        let records = [
            roofline("NVIDIA H200", "2026-11-02T00:00:00Z", 803.0),
            roofline("NVIDIA H200", "2026-11-01T00:00:00Z", 700.0),
            roofline("NVIDIA GB10", "2026-11-03T00:00:00Z", 95.0),
        ];
        let (rates, basis) = Ceilings::named("NVIDIA H200", COPY, &records).rates(Format::Bf16);
        assert_eq!(rates, Rates { copy_bytes_per_s: 4.254e12, matmul_flop_per_s: Some(803e12) });
        assert!(basis.contains("803 TFLOP/s recorded at 2026-11-02"), "{basis}");
        let (rates, basis) = Ceilings::named("NVIDIA H200", COPY, &records).rates(Format::F32);
        assert_eq!(rates.matmul_flop_per_s, Some(67e12));
        assert!(basis.contains("fp32_matmul 67 TFLOP/s of the NVIDIA H200 data sheet"), "{basis}");
    }

    #[test]
    fn without_a_rate_of_products_traffic_alone_counts() {
        let (rates, basis) = Ceilings::named("NVIDIA GB10", COPY, &[]).rates(Format::F64);
        assert_eq!(rates.matmul_flop_per_s, None);
        assert!(basis.contains("fp64_matmul unknown"), "{basis}");
        assert_eq!(Ceilings::named("Intel Arc", COPY, &[]).rates(Format::Bf16).0.matmul_flop_per_s, None);
    }

    #[test]
    fn every_format_has_its_own_rate() {
        for products in Products::ALL {
            assert_eq!(Products::of(products.format()), products);
            assert!(products.quantity().ends_with("_matmul"));
        }
    }
}
