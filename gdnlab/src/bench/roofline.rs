//! The rates that floors are held against: measured in the same run where that is possible, and otherwise from a record
//! or a data sheet, which is said.

use super::timer::Timer;
use crate::Result;
use crate::cost::Rates;
use crate::cuda::Gpu;
use crate::precision::Format;
use crate::record::{Measurement, Record, Roofline};
use std::ops::ControlFlow;

/// Bytes of each of the two buffers of the copy, where the GPU has the room.
const COPY_BYTES: usize = 1 << 30;
/// The name of the copy's rate in records.
pub const COPY_BANDWIDTH: &str = "copy_bandwidth";

/// What the vendor says that a GPU reaches. Products are dense.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DataSheet {
    /// A part of the name that the driver gives the GPU.
    pub gpu: &'static str,
    /// Memory bandwidth in GB/s.
    pub memory_gb_s: f64,
    /// Products of bf16 or fp16 operands in TFLOP/s.
    pub bf16_tflop_s: f64,
    /// Products of TF32 operands in TFLOP/s.
    pub tf32_tflop_s: f64,
    /// Binary32 outside of the tensor cores in TFLOP/s.
    pub fp32_tflop_s: f64,
    /// Where the numbers stand.
    pub source: &'static str,
}

/// A name that contains another stands before it.
#[rustfmt::skip]
const DATA_SHEETS: [DataSheet; 5] = [
    DataSheet { gpu: "H200 NVL", memory_gb_s: 4800.0, bf16_tflop_s: 835.5, tf32_tflop_s: 417.5, fp32_tflop_s: 60.0,
                source: "NVIDIA H200 data sheet, NVL, without sparsity" },
    DataSheet { gpu: "H200", memory_gb_s: 4800.0, bf16_tflop_s: 989.5, tf32_tflop_s: 494.5, fp32_tflop_s: 67.0,
                source: "NVIDIA H200 data sheet, SXM, without sparsity" },
    DataSheet { gpu: "H100 80GB HBM3", memory_gb_s: 3350.0, bf16_tflop_s: 989.5, tf32_tflop_s: 494.5, fp32_tflop_s: 67.0,
                source: "NVIDIA H100 data sheet, SXM, without sparsity" },
    DataSheet { gpu: "A100-SXM4-80GB", memory_gb_s: 2039.0, bf16_tflop_s: 312.0, tf32_tflop_s: 156.0, fp32_tflop_s: 19.5,
                source: "NVIDIA A100 data sheet" },
    DataSheet { gpu: "A100-SXM4-40GB", memory_gb_s: 1555.0, bf16_tflop_s: 312.0, tf32_tflop_s: 156.0, fp32_tflop_s: 19.5,
                source: "NVIDIA A100 data sheet" },
];

impl DataSheet {
    /// The one of the GPU with this name.
    pub fn of(gpu: &str) -> Option<&'static Self> {
        DATA_SHEETS.iter().find(|sheet| gpu.contains(sheet.gpu))
    }

    fn matmul_tflop_s(&self, products: Products) -> f64 {
        match products {
            Products::Bf16 => self.bf16_tflop_s,
            Products::Tf32 => self.tf32_tflop_s,
            Products::Fp32 => self.fp32_tflop_s,
        }
    }
}

/// The unit that products run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Products {
    Bf16,
    Tf32,
    Fp32,
}

impl Products {
    /// Of a mode whose products have operands in `format`; `None` in float64, for which there is no rate.
    fn of(format: Format) -> Option<Self> {
        match format {
            Format::Bf16 | Format::F16 => Some(Self::Bf16),
            Format::F32 => Some(Self::Fp32),
            Format::F64 => None,
            _ => Some(Self::Tf32),
        }
    }

    /// The name of the rate in records.
    fn quantity(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16_matmul",
            Self::Tf32 => "tf32_matmul",
            Self::Fp32 => "fp32_matmul",
        }
    }
}

/// A measured copy bandwidth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyBandwidth {
    /// Bytes read and written together, per second.
    pub bytes_per_s: f64,
    /// By the data sheet, in the same unit.
    pub theoretical: Option<f64>,
}

/// Copies a buffer of many times the L2 cache on the device: each byte is read once and written once.
///
/// # Errors
/// As [`Timer::time`].
pub fn copy_bandwidth(timer: &mut Timer, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<CopyBandwidth> {
    let gpu = timer.gpu();
    let bytes = COPY_BYTES.min(gpu.free_bytes()? / 4);
    let (mut from, mut to) = (gpu.alloc::<u8>(bytes)?, gpu.alloc::<u8>(bytes)?);
    gpu.fill_bytes(&mut from, 0x3c)?;
    let samples = timer.time(|stream| stream.copy(&from, &mut to), go_on)?;
    Ok(CopyBandwidth {
        bytes_per_s: 2e3 * bytes as f64 / samples.median(),
        theoretical: DataSheet::of(&gpu.name).map(|sheet| 1e9 * sheet.memory_gb_s),
    })
}

impl CopyBandwidth {
    /// As it stands in records.
    pub fn measurement(&self) -> Measurement {
        Measurement::Roofline(Roofline {
            quantity: COPY_BANDWIDTH.to_owned(),
            value: self.bytes_per_s / 1e9,
            theoretical: self.theoretical.map(|rate| rate / 1e9),
            unit: "GB/s".to_owned(),
        })
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
        let copy = format!("copy {:.0} GB/s measured in this run", self.copy.bytes_per_s / 1e9);
        let rates = |tflop_s: Option<f64>| Rates {
            copy_bytes_per_s: self.copy.bytes_per_s,
            matmul_flop_per_s: tflop_s.map(|rate| 1e12 * rate),
        };
        let Some(products) = Products::of(format) else { return (rates(None), copy) };
        let quantity = products.quantity();
        if let Some((value, utc)) = self.recorded(quantity) {
            return (rates(Some(value)), format!("{copy}, {quantity} {value:.0} TFLOP/s recorded at {utc}"));
        }
        match DataSheet::of(self.gpu) {
            Some(sheet) => {
                let value = sheet.matmul_tflop_s(products);
                (rates(Some(value)), format!("{copy}, {quantity} {value} TFLOP/s of the {}", sheet.source))
            }
            None => (rates(None), format!("{copy}, {quantity} unknown, so traffic alone")),
        }
    }

    /// The newest recorded rate `quantity` in TFLOP/s on such a GPU, and when it was measured.
    fn recorded(&self, quantity: &str) -> Option<(f64, &str)> {
        let of_this = self.records.iter().filter(|record| record.environment.machine.gpu.as_deref() == Some(self.gpu));
        let rates = of_this.filter_map(|record| match &record.measurement {
            Measurement::Roofline(roofline) if roofline.quantity == quantity && roofline.unit == "TFLOP/s" => {
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
    use crate::record::{Environment, Machine, Workload};

    const COPY: CopyBandwidth = CopyBandwidth { bytes_per_s: 4.254e12, theoretical: None };

    fn roofline(gpu: &str, utc: &str, value: f64) -> Record {
        let machine = Machine { gpu: Some(gpu.to_owned()), ..Machine::default() };
        let environment = Environment { machine, utc: Some(utc.to_owned()), ..Environment::default() };
        let rate =
            Roofline { quantity: "bf16_matmul".to_owned(), value, theoretical: None, unit: "TFLOP/s".to_owned() };
        Record::new(&environment, &Workload::default(), Measurement::Roofline(rate))
    }

    #[test]
    fn a_data_sheet_is_found_by_the_name_of_the_gpu() {
        assert_eq!(DataSheet::of("NVIDIA H200").unwrap().bf16_tflop_s, 989.5);
        assert_eq!(DataSheet::of("NVIDIA H200 NVL").unwrap().bf16_tflop_s, 835.5);
        assert_eq!(DataSheet::of("NVIDIA A100-SXM4-40GB").unwrap().memory_gb_s, 1555.0);
        assert_eq!(DataSheet::of("NVIDIA GB10"), None);
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
        let (rates, basis) = Ceilings::named("NVIDIA GB10", COPY, &[]).rates(Format::Bf16);
        assert_eq!(rates.matmul_flop_per_s, None);
        assert!(basis.contains("bf16_matmul unknown"), "{basis}");
        assert_eq!(Ceilings::named("NVIDIA H200", COPY, &[]).rates(Format::F64).0.matmul_flop_per_s, None);
    }

    #[test]
    fn the_copy_is_a_record() {
        let Measurement::Roofline(roofline) = COPY.measurement() else { panic!("a roofline") };
        assert_eq!((roofline.quantity.as_str(), roofline.value), (COPY_BANDWIDTH, 4254.0));
    }
}
