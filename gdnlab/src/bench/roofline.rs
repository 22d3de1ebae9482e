//! The rates that floors are held against: measured in the same run where that is possible, and otherwise from a record
//! or a data sheet, which is said.

use super::timer::Timer;
use crate::cost::Rates;
use crate::cuda::{CopyKernel, Gpu, Stream};
use crate::precision::Format;
use crate::record::{Measurement, Record, Roofline, Workload};
use crate::{Error, Result};
use std::fmt;
use std::ops::ControlFlow;

/// Bytes of each of the two buffers of a copy, at the least, where the GPU has the room.
const COPY_BYTES: [usize; 2] = [256 << 20, 1 << 30];
/// Each is as many times as large as the L2 cache, at the least.
const TIMES_L2: usize = 4;
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

/// Who copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copier {
    /// The driver: `cuMemcpyDtoDAsync`.
    Driver,
    /// A kernel: `kernels/copy.cu`.
    Kernel,
}

/// A measured copy bandwidth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyBandwidth {
    /// Bytes read and written together, per second.
    pub bytes_per_s: f64,
    /// By the data sheet, in the same unit.
    pub theoretical: Option<f64>,
    /// Who copied.
    pub copier: Copier,
    /// How many bytes it copied.
    pub copied_bytes: usize,
}

/// Copies buffers of several times the L2 cache on the device, each byte read once and written once, and returns the best
/// rate: that of the driver or of a kernel, at one of two sizes. The driver alone would not do: an H200 of 4.2 TB/s copies
/// 512 MiB and more at 2.8 TB/s by it.
///
/// # Errors
/// As [`Timer::time`].
pub fn copy_bandwidth(timer: &mut Timer, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<CopyBandwidth> {
    let gpu = timer.gpu();
    let kernel = CopyKernel::new(gpu)?;
    let theoretical = DataSheet::of(&gpu.name).map(|sheet| 1e9 * sheet.memory_gb_s);
    let mut best: Option<CopyBandwidth> = None;
    for copied_bytes in copy_sizes(gpu.l2_bytes, gpu.free_bytes()?) {
        let (mut from, mut to) = (gpu.alloc::<u8>(copied_bytes)?, gpu.alloc::<u8>(copied_bytes)?);
        gpu.fill_bytes(&mut from, 0x3c)?;
        for copier in [Copier::Driver, Copier::Kernel] {
            let copy = |stream: &Stream| match copier {
                Copier::Driver => stream.copy(&from, &mut to),
                Copier::Kernel => kernel.copy(stream, &from, &mut to),
            };
            let bytes_per_s = 2e3 * copied_bytes as f64 / timer.time(copy, go_on)?.median();
            if best.is_none_or(|best| bytes_per_s > best.bytes_per_s) {
                best = Some(CopyBandwidth { bytes_per_s, theoretical, copier, copied_bytes });
            }
        }
    }
    best.ok_or_else(|| Error::gpu("the GPU has no free memory to measure its bandwidth with: end what else uses it"))
}

/// Sizes of the buffers, in multiples of 16 bytes: at the most a quarter of what is free, and none twice.
fn copy_sizes(l2_bytes: usize, free_bytes: usize) -> Vec<usize> {
    let size = |bytes: usize| bytes.max(TIMES_L2 * l2_bytes).min(free_bytes / 4) / 16 * 16;
    let mut sizes: Vec<usize> = COPY_BYTES.into_iter().map(size).filter(|&bytes| bytes > 0).collect();
    sizes.dedup();
    sizes
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

    /// What it was measured with, as it stands in records.
    pub fn workload(&self) -> Workload {
        Workload { kernel: Some(self.to_string()), ..Workload::default() }
    }
}

/// Who copied how much, such as `copy.cu, 256 MiB`.
impl fmt::Display for CopyBandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let copier = match self.copier {
            Copier::Driver => "cuMemcpyDtoDAsync",
            Copier::Kernel => "copy.cu",
        };
        write!(f, "{copier}, {} MiB", self.copied_bytes >> 20)
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
    use crate::bench::Budget;
    use crate::record::{Environment, Machine};

    const COPY: CopyBandwidth =
        CopyBandwidth { bytes_per_s: 4.254e12, theoretical: None, copier: Copier::Kernel, copied_bytes: 256 << 20 };

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
    fn the_copy_is_a_record_that_says_who_copied_how_much() {
        let Measurement::Roofline(roofline) = COPY.measurement() else { panic!("a roofline") };
        assert_eq!((roofline.quantity.as_str(), roofline.value), (COPY_BANDWIDTH, 4254.0));
        assert_eq!(COPY.workload().kernel.as_deref(), Some("copy.cu, 256 MiB"));
        let driver = CopyBandwidth { copier: Copier::Driver, copied_bytes: 1 << 30, ..COPY };
        assert_eq!(driver.workload().kernel.as_deref(), Some("cuMemcpyDtoDAsync, 1024 MiB"));
    }

    #[test]
    fn copies_are_larger_than_the_cache_and_smaller_than_the_memory() {
        const MIB: usize = 1 << 20;
        assert_eq!(copy_sizes(60 * MIB, 140_000 * MIB), [256 * MIB, 1024 * MIB]);
        assert_eq!(copy_sizes(126 * MIB, 140_000 * MIB), [504 * MIB, 1024 * MIB]);
        assert_eq!(copy_sizes(60 * MIB, 2000 * MIB), [256 * MIB, 500 * MIB]);
        assert_eq!(copy_sizes(60 * MIB, 401 * MIB + 60), [100 * MIB + MIB / 4]);
        assert!(copy_sizes(60 * MIB, 60).is_empty());
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn the_copy_comes_near_the_data_sheet_and_not_beyond() {
        let gpu = Gpu::shared().unwrap();
        let mut timer = Timer::new(gpu, Budget::default()).unwrap();
        let copy = copy_bandwidth(&mut timer, &mut || ControlFlow::Continue(())).unwrap();
        println!("{:.0} GB/s ({copy})", copy.bytes_per_s / 1e9);
        if let Some(theoretical) = copy.theoretical {
            let part = copy.bytes_per_s / theoretical;
            assert!((0.75..1.0).contains(&part), "{part:.3} of the data sheet's {:.0} GB/s", theoretical / 1e9);
        }
    }
}
