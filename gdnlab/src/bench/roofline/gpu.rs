//! The rates of a GPU.

use super::rows::{Bench, Quantity, Rate, Row};
use super::{DataSheet, Products, copy_bandwidth};
use crate::bench::{Timer, Window};
use crate::cuda::{Matmul, Matrices, Product, Stream};
use crate::{Error, Result};
use std::ops::ControlFlow;
use std::time::Duration;

/// The first products after a rest: one brings the clock up, and after 20 ms an H200 reaches its power limit.
const BURST: Window =
    Window { rest: Duration::from_millis(500), from: Duration::from_millis(3), until: Duration::from_millis(18) };
/// Products of which others have run for a second.
const SUSTAINED: Window =
    Window { rest: Duration::ZERO, from: Duration::from_millis(1000), until: Duration::from_millis(1500) };

/// Copy bandwidth of a GPU, and the rates of products of square matrices by cuBLASLt, each by the fastest of the
/// algorithms that its heuristics propose, on normal random numbers.
pub struct OnGpu {
    timer: Timer,
    size: usize,
}

impl OnGpu {
    /// The size of the matrices of the published rate.
    pub const SIZE: usize = 8192;

    /// With matrices of `size` rows and columns.
    ///
    /// # Errors
    /// [`Error::Input`] where they would be empty.
    pub fn new(timer: Timer, size: usize) -> Result<Self> {
        Product::new(size, size, size, Products::Bf16.format()).validate()?;
        Ok(Self { timer, size })
    }

    fn matmul(&mut self, row: &Row, products: Products, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Rate> {
        let gpu = self.timer.gpu();
        let product = Product::new(self.size, self.size, self.size, products.format());
        let matmul = Matmul::tuned_while(gpu, &product, go_on)?;
        let matrices = Matrices::random(gpu, &product)?;
        let (window, when) = match row.quantity {
            Quantity::Sustained(_) => (&SUSTAINED, "after a second of them"),
            _ => (&BURST, "the first after a rest"),
        };
        // SAFETY: the matrices are the product's, and live longer than the graph that is recorded and replayed here.
        let work = |stream: &Stream| unsafe { matrices.run_on(stream, &matmul) };
        let samples = self.timer.time_back_to_back(work, window, go_on)?;
        Ok(Rate {
            value: product.flop() / samples.median() / 1e9,
            theoretical: DataSheet::of(&gpu.name).and_then(|sheet| sheet.matmul_tflop_s(products)),
            with: format!(
                "cuBLASLt {}, {}, the fastest of {} algorithms, {when}",
                matmul.library_version(),
                row.sizes().unwrap_or_default(),
                matmul.candidates()
            ),
        })
    }
}

impl Bench for OnGpu {
    fn rows(&self) -> Vec<Row> {
        let copy = Row { quantity: Quantity::Copy, size: None };
        let ridge = Row { quantity: Quantity::Ridge(Products::Bf16), size: None };
        let matmul = |products| Row { quantity: Quantity::Matmul(products), size: Some(self.size) };
        let sustained = Row { quantity: Quantity::Sustained(Products::Bf16), size: Some(self.size) };
        std::iter::once(copy).chain(Products::ALL.map(matmul)).chain([sustained, ridge]).collect()
    }

    fn measure(&mut self, row: &Row, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Rate> {
        match row.quantity {
            Quantity::Matmul(products) | Quantity::Sustained(products) => self.matmul(row, products, go_on),
            Quantity::Copy => {
                let copy = copy_bandwidth(&mut self.timer, go_on)?;
                Ok(Rate {
                    value: copy.bytes_per_s / 1e9,
                    theoretical: copy.theoretical.map(|rate| rate / 1e9),
                    with: copy.to_string(),
                })
            }
            Quantity::Ridge(_) => Err(Error::input("a ridge point follows from two rates and is not measured")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Budget;
    use crate::cuda::Gpu;

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn every_rate_comes_near_the_data_sheet_and_not_beyond() {
        let timer = Timer::new(Gpu::shared().unwrap(), Budget::default()).unwrap();
        let mut bench = OnGpu::new(timer, OnGpu::SIZE).unwrap();
        let rows = bench.rows();
        assert_eq!(rows.len(), 8);
        for row in &rows[..7] {
            let rate = bench.measure(row, &mut || ControlFlow::Continue(())).unwrap();
            let part = rate.theoretical.map(|theoretical| rate.value / theoretical);
            println!("{row}: {:.1} {}, {part:?} of the data sheet, {}", rate.value, row.quantity.unit(), rate.with);
            // Products of binary32 without tensor cores are the furthest off.
            assert!(part.is_none_or(|part| (0.5..1.02).contains(&part)), "{row}: {part:?}");
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn matrices_larger_than_the_memory_are_refused_before_anything_is_allocated() {
        let gpu = Gpu::shared().unwrap();
        let mut bench = OnGpu::new(Timer::new(gpu, Budget::default()).unwrap(), 1 << 18).unwrap();
        let row = bench.rows()[1];
        let error = bench.measure(&row, &mut || ControlFlow::Continue(())).unwrap_err().to_string();
        assert!(error.contains("GB of the GPU's memory are free"), "{error}");
        assert!(OnGpu::new(Timer::new(gpu, Budget::default()).unwrap(), 0).is_err());
    }
}
