//! The rates of a GPU.

use super::rows::{Bench, Quantity, Rate, Row};
use super::{DataSheet, Products, copy_bandwidth};
use crate::bench::Timer;
use crate::cuda::{Matmul, Matrices, Product};
use crate::{Error, Result};
use std::ops::ControlFlow;

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

    fn matmul(&mut self, products: Products, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Rate> {
        let gpu = self.timer.gpu();
        let product = Product::new(self.size, self.size, self.size, products.format());
        let matmul = Matmul::tuned_while(gpu, &product, go_on)?;
        let matrices = Matrices::random(gpu, &product)?;
        // SAFETY: the matrices are the product's, and live longer than the graph that is recorded and replayed here.
        let samples = self.timer.time(|stream| unsafe { matrices.run_on(stream, &matmul) }, go_on)?;
        Ok(Rate {
            value: product.flop() / samples.median() / 1e9,
            theoretical: DataSheet::of(&gpu.name).and_then(|sheet| sheet.matmul_tflop_s(products)),
            with: format!(
                "cuBLASLt {}, {}, the fastest of {} algorithms",
                matmul.library_version(),
                Row { quantity: Quantity::Matmul(products), size: Some(self.size) }.sizes().unwrap_or_default(),
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
        std::iter::once(copy).chain(Products::ALL.map(matmul)).chain([ridge]).collect()
    }

    fn measure(&mut self, row: &Row, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Rate> {
        match row.quantity {
            Quantity::Matmul(products) => self.matmul(products, go_on),
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
        assert_eq!(rows.len(), 7);
        for row in &rows[..6] {
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
