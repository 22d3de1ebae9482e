//! The copy bandwidth of a GPU.

use super::{COPY_BANDWIDTH, DataSheet};
use crate::bench::Timer;
use crate::cuda::{Buffer, CopyKernel, Stream};
use crate::record::{Measurement, Roofline, Workload};
use crate::{Error, Result};
use std::fmt;
use std::ops::ControlFlow;

/// Bytes that are copied, where the GPU has the room: 2 GB are read and written together.
const COPY_BYTES: usize = 1 << 30;
/// Bytes of a piece; the other way is to copy all at once.
const PIECE_BYTES: usize = 256 << 20;

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
    /// Size of the pieces in which it copied them, in bytes.
    pub piece_bytes: usize,
}

/// Copies 1 GiB on the device, each byte read once and written once, and returns the best rate: that of the driver or of
/// a kernel, at once or in pieces of 256 MiB. The driver at once alone would not do: an H200 copies 256 MiB at 4.1 TB/s by
/// it, and 512 MiB and more at 2.8 TB/s.
///
/// # Errors
/// As [`Timer::time`], and [`Error::Gpu`] where the GPU has no free memory.
pub fn copy_bandwidth(timer: &mut Timer, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<CopyBandwidth> {
    let gpu = timer.gpu();
    let kernel = CopyKernel::new(gpu)?;
    let theoretical = DataSheet::of(&gpu.name).map(|sheet| 1e9 * sheet.memory_gb_s);
    let mut best: Option<CopyBandwidth> = None;
    for (piece_bytes, count) in pieces(gpu.free_bytes()?) {
        let mut pieces = (0..count)
            .map(|_| Ok((gpu.alloc(piece_bytes)?, gpu.alloc(piece_bytes)?)))
            .collect::<Result<Vec<(Buffer<u8>, Buffer<u8>)>>>()?;
        pieces.iter_mut().try_for_each(|(from, _)| gpu.fill_bytes(from, 0x3c))?;
        for copier in [Copier::Driver, Copier::Kernel] {
            let copy = |stream: &Stream| {
                pieces.iter_mut().try_for_each(|(from, to)| match copier {
                    Copier::Driver => stream.copy(from, to),
                    Copier::Kernel => kernel.copy(stream, from, to),
                })
            };
            let copied_bytes = count * piece_bytes;
            let bytes_per_s = 2e3 * copied_bytes as f64 / timer.time(copy, go_on)?.median();
            if best.is_none_or(|best| bytes_per_s > best.bytes_per_s) {
                best = Some(CopyBandwidth { bytes_per_s, theoretical, copier, copied_bytes, piece_bytes });
            }
        }
    }
    best.ok_or_else(|| Error::gpu("the GPU has no free memory to measure its bandwidth with: end what else uses it"))
}

/// Sizes of pieces, multiples of 16 bytes, and how many of each: together at the most a quarter of what is free.
fn pieces(free_bytes: usize) -> Vec<(usize, usize)> {
    let all = COPY_BYTES.min(free_bytes / 4) / 16 * 16;
    let some = PIECE_BYTES.min(all);
    if all == 0 {
        return Vec::new();
    }
    let mut pieces = vec![(some, all / some), (all, 1)];
    pieces.dedup();
    pieces
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

/// Who copied how much, such as `copy.cu, 1024 MiB in pieces of 256 MiB`.
impl fmt::Display for CopyBandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let copier = match self.copier {
            Copier::Driver => "cuMemcpyDtoDAsync",
            Copier::Kernel => "copy.cu",
        };
        write!(f, "{copier}, {} MiB", self.copied_bytes >> 20)?;
        if self.piece_bytes == self.copied_bytes {
            return Ok(());
        }
        write!(f, " in pieces of {} MiB", self.piece_bytes >> 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Budget;
    use crate::cuda::Gpu;

    const MIB: usize = 1 << 20;

    #[test]
    fn the_copy_is_a_record_that_says_who_copied_how_much() {
        let copy = CopyBandwidth {
            bytes_per_s: 4.254e12,
            theoretical: None,
            copier: Copier::Kernel,
            copied_bytes: 1024 * MIB,
            piece_bytes: 256 * MIB,
        };
        let Measurement::Roofline(roofline) = copy.measurement() else { panic!("a roofline") };
        assert_eq!((roofline.quantity.as_str(), roofline.value), (COPY_BANDWIDTH, 4254.0));
        assert_eq!(copy.workload().kernel.as_deref(), Some("copy.cu, 1024 MiB in pieces of 256 MiB"));
        let driver = CopyBandwidth { copier: Copier::Driver, piece_bytes: copy.copied_bytes, ..copy };
        assert_eq!(driver.workload().kernel.as_deref(), Some("cuMemcpyDtoDAsync, 1024 MiB"));
    }

    #[test]
    fn pieces_make_up_two_gigabytes_or_half_of_what_is_free() {
        assert_eq!(pieces(140_000 * MIB), [(256 * MIB, 4), (1024 * MIB, 1)]);
        assert_eq!(pieces(2000 * MIB), [(256 * MIB, 1), (500 * MIB, 1)]);
        assert_eq!(pieces(401 * MIB + 60), [(100 * MIB + MIB / 4, 1)]);
        assert!(pieces(60).is_empty());
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
