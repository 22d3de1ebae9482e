//! The rates of a CPU.

use super::Products;
use super::rows::{Bench, Quantity, Rate, Row};
use crate::bench::timer::{Budget, Samples, sample};
use crate::memory;
use crate::{Error, Result};
use gdnlab_deps::gemm::{self, Parallelism};
use gdnlab_deps::rayon::{self, prelude::*};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Bytes that are copied: 2 GB are read and written together.
const COPY_BYTES: usize = 1 << 30;

/// Copy bandwidth of a CPU, and the rates of products of square matrices by the GEMM library, on all of its threads.
pub struct OnCpu {
    /// Rows and columns of the matrices.
    pub size: usize,
    /// Bytes that are copied.
    pub copy_bytes: usize,
    /// How long something is timed; without a warm-up, since everything runs once before.
    pub budget: Budget,
}

impl Default for OnCpu {
    fn default() -> Self {
        let budget = Budget { warm_up: Duration::ZERO, min_samples: 5, max_samples: 100, time: Duration::from_secs(2) };
        Self { size: Self::SIZE, copy_bytes: COPY_BYTES, budget }
    }
}

impl OnCpu {
    /// The size of matrices that keep many threads busy and do not keep a person waiting on few.
    pub const SIZE: usize = 2048;

    /// Milliseconds of `work`, which has run once before.
    fn time(&self, go_on: &mut dyn FnMut() -> ControlFlow<()>, mut work: impl FnMut()) -> Result<Samples> {
        if go_on().is_break() {
            return Err(Error::Stopped);
        }
        work();
        sample(&self.budget, go_on, || {
            let start = Instant::now();
            work();
            Ok(1e3 * start.elapsed().as_secs_f64())
        })
    }

    fn copy(&self, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Rate> {
        memory::require(2 * self.copy_bytes as u128)?;
        let part = self.copy_bytes.div_ceil(rayon::current_num_threads()).max(1);
        let (mut from, mut to) = (vec![0u8; self.copy_bytes], vec![0u8; self.copy_bytes]);
        // Memory that was never written is all one page of zeros.
        from.par_chunks_mut(part).for_each(|part| part.fill(0x3c));
        let samples = self.time(go_on, || {
            to.par_chunks_mut(part).zip(from.par_chunks(part)).for_each(|(to, from)| to.copy_from_slice(from));
        })?;
        Ok(Rate {
            value: 2.0 * self.copy_bytes as f64 / samples.median() / 1e6,
            theoretical: None,
            with: format!("memcpy, {} MiB, {}", self.copy_bytes >> 20, threads()),
        })
    }

    fn matmul<T: Real>(&self, row: &Row, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Rate> {
        let n = self.size;
        memory::require(3 * (n as u128) * (n as u128) * size_of::<T>() as u128)?;
        let mut generator = ChaCha8Rng::seed_from_u64(1);
        let mut random =
            || -> Vec<T> { (0..n * n).map(|_| T::from_f64(StandardNormal.sample(&mut generator))).collect() };
        let (a, b, mut c) = (random(), random(), vec![T::from_f64(0.0); n * n]);
        let samples = self.time(go_on, || multiply(n, &a, &b, &mut c))?;
        Ok(Rate {
            value: 2.0 * (n as f64).powi(3) / samples.median() / 1e9,
            theoretical: None,
            with: format!("gemm, {}, {}", row.sizes().unwrap_or_default(), threads()),
        })
    }
}

impl Bench for OnCpu {
    fn rows(&self) -> Vec<Row> {
        let matmul = |products| Row { quantity: Quantity::Matmul(products), size: Some(self.size) };
        let copy = Row { quantity: Quantity::Copy, size: None };
        let ridge = Row { quantity: Quantity::Ridge(Products::Fp32), size: None };
        vec![copy, matmul(Products::Fp32), matmul(Products::Fp64), ridge]
    }

    fn measure(&mut self, row: &Row, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Rate> {
        match row.quantity {
            Quantity::Copy => self.copy(go_on),
            Quantity::Matmul(Products::Fp32) => self.matmul::<f32>(row, go_on),
            Quantity::Matmul(Products::Fp64) => self.matmul::<f64>(row, go_on),
            _ => Err(Error::input(format!("{row}: a CPU has the rates of binary32, binary64 and the copy"))),
        }
    }
}

fn threads() -> String {
    match rayon::current_num_threads() {
        1 => "1 thread".to_owned(),
        count => format!("{count} threads"),
    }
}

/// The two formats that the GEMM library is asked for.
trait Real: Copy + Send + Sync + 'static {
    fn from_f64(x: f64) -> Self;
}

impl Real for f32 {
    fn from_f64(x: f64) -> Self {
        x as Self
    }
}

impl Real for f64 {
    fn from_f64(x: f64) -> Self {
        x
    }
}

/// `c = a b` for row-major matrices with `n` rows and columns; each thread computes rows of `c`.
fn multiply<T: Real>(n: usize, a: &[T], b: &[T], c: &mut [T]) {
    assert!([a.len(), b.len(), c.len()] == [n * n; 3], "matrices of {n} rows and columns");
    let part = n.div_ceil(rayon::current_num_threads()).max(1) * n.max(1);
    c.par_chunks_mut(part).zip(a.par_chunks(part)).for_each(|(c, a)| {
        // SAFETY: `a` and `c` are as many whole rows of n elements, `b` has n rows; T is f32 or f64, for which the library
        // has a product; nothing overlaps, since `c` is borrowed mutably.
        unsafe {
            gemm::gemm(
                c.len() / n,
                n,
                n,
                c.as_mut_ptr(),
                1,
                n as isize,
                false,
                a.as_ptr(),
                1,
                n as isize,
                b.as_ptr(),
                1,
                n as isize,
                T::from_f64(0.0),
                T::from_f64(1.0),
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quick() -> OnCpu {
        let budget = Budget { warm_up: Duration::ZERO, min_samples: 2, max_samples: 3, time: Duration::ZERO };
        OnCpu { size: 70, copy_bytes: 1 << 20, budget }
    }

    #[test]
    fn rows_of_all_threads_make_up_the_product() {
        for n in [1, 2, 37] {
            let a: Vec<f64> = (0..n * n).map(|i| (i % 7) as f64 - 3.0).collect();
            let b: Vec<f64> = (0..n * n).map(|i| (i % 5) as f64 - 2.0).collect();
            let mut c = vec![f64::NAN; n * n];
            multiply(n, &a, &b, &mut c);
            for (at, &got) in c.iter().enumerate() {
                let (row, column) = (at / n, at % n);
                let want: f64 = (0..n).map(|i| a[row * n + i] * b[i * n + column]).sum();
                assert_eq!(got, want, "{n}: {row}, {column}");
            }
        }
    }

    #[test]
    fn every_row_of_the_list_has_a_rate() {
        let mut bench = quick();
        let rows = bench.rows();
        for row in &rows[..3] {
            let rate = bench.measure(row, &mut || ControlFlow::Continue(())).unwrap();
            assert!(rate.value > 0.0 && rate.value.is_finite(), "{row}: {rate:?}");
            assert!(row.sizes().is_none_or(|sizes| rate.with.contains(&sizes)), "{rate:?}");
        }
        assert!(bench.measure(&rows[3], &mut || ControlFlow::Continue(())).is_err());
    }

    #[test]
    fn what_does_not_fit_and_what_is_stopped_is_not_measured() {
        let mut bench = OnCpu { size: 1 << 30, copy_bytes: 1 << 60, ..quick() };
        for row in &bench.rows()[..3] {
            let error = bench.measure(row, &mut || ControlFlow::Continue(())).unwrap_err().to_string();
            assert!(error.contains("needs about"), "{error}");
        }
        let mut bench = quick();
        for row in &bench.rows()[..3] {
            assert!(matches!(bench.measure(row, &mut || ControlFlow::Break(())), Err(Error::Stopped)));
        }
    }
}
