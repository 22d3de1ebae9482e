//! What one core reaches in loops that do nothing else, in float64: the terms of the reference's bound.

use crate::report::Report;
use crate::timing::Timer;
use gdnlab_deps::pulp::{Arch, Simd, WithSimd};
use std::hint::black_box;

/// Numbers in a buffer that stays in the first-level cache: 16 KiB.
const L1_LEN: usize = 2048;
/// Numbers in each of two buffers that stay in the second-level cache: 128 KiB each.
const L2_LEN: usize = 16_384;
/// Numbers in the widest vector, whose size is that of a cache line.
const LINE: usize = 8;
/// Sums in flight: enough for two units with a latency of four clocks, and few enough for 16 registers.
const IN_FLIGHT: usize = 12;
/// Rounds of multiply-adds in one timed call.
const ROUNDS: usize = 10_000;
/// Passes over a first-level buffer in one timed call.
const PASSES: usize = 200;

/// Rates in float64 numbers per second.
#[derive(Clone, Copy)]
pub struct Rates {
    pub fma: f64,
    pub l1_load: f64,
    pub l1_store: f64,
    /// Loaded and stored, together.
    pub l2: f64,
}

/// Float64 numbers that the reference handles per token and head, each times `K V`: the table in
/// `gdnlab::reference::recurrence`.
#[derive(Clone, Copy)]
pub struct Cost {
    fma: f64,
    l1_load: f64,
    l1_store: f64,
    l2: f64,
}

impl Cost {
    pub const FORWARD: Self = Self { fma: 3.0, l1_load: 1.75, l1_store: 1.0, l2: 0.375 };

    /// The forward, the states again, and the adjoint.
    pub const BOTH: Self = Self {
        fma: Self::FORWARD.fma + 2.0 + 7.5,
        l1_load: Self::FORWARD.l1_load + 1.5 + 3.75,
        l1_store: Self::FORWARD.l1_store + 1.0 + 2.0,
        l2: Self::FORWARD.l2 + 0.75 + 1.875,
    };
}

/// The time that no loop of this [`Cost`] can go below, and what takes it.
pub fn bound(cost: Cost, rates: Rates, state: usize) -> (f64, &'static str) {
    let terms = [
        (cost.fma / rates.fma, "multiply-adds"),
        (cost.l1_load / rates.l1_load, "L1 loads"),
        (cost.l1_store / rates.l1_store, "L1 stores"),
        (cost.l2 / rates.l2, "L2 traffic"),
    ];
    let (per_element, what) = terms.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default();
    (per_element * state as f64, what)
}

impl Rates {
    /// Times the four loops.
    pub fn measure(timer: &mut Timer, report: &mut Report) -> Self {
        let arch = Arch::new();
        let mut l1 = Buffer::new(L1_LEN);
        let (mut from, mut to) = (Buffer::new(L2_LEN), Buffer::new(L2_LEN));
        let mut rate = |name: &str, numbers: usize, run: &mut dyn FnMut()| {
            let rate = numbers as f64 / timer.time(name, run).median();
            report.rate(name, String::new(), rate, "f64");
            rate
        };
        let fma = ROUNDS * IN_FLIGHT * arch.dispatch(Lanes);
        Self {
            fma: rate("f64 multiply-adds", fma, &mut || arch.dispatch(MulAdd)),
            l1_load: rate("f64 L1 loads", PASSES * L1_LEN, &mut || arch.dispatch(Load(l1.aligned()))),
            l1_store: rate("f64 L1 stores", PASSES * L1_LEN, &mut || arch.dispatch(Store(l1.aligned()))),
            l2: rate("f64 L2 loads and stores", 2 * L2_LEN, &mut || arch.dispatch(Copy(from.aligned(), to.aligned()))),
        }
    }
}

/// Zeros whose first element begins a cache line.
struct Buffer {
    data: Vec<f64>,
    len: usize,
}

impl Buffer {
    fn new(len: usize) -> Self {
        Self { data: vec![0.0; len + LINE], len }
    }

    fn aligned(&mut self) -> &mut [f64] {
        let first = self.data.as_ptr().align_offset(LINE * size_of::<f64>()).min(LINE);
        &mut self.data[first..first + self.len]
    }
}

struct Lanes;

impl WithSimd for Lanes {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        S::F64_LANES
    }
}

/// The sum of all numbers. No closure takes part in this or in the loops below: one that is not inlined would be
/// compiled without the vector instructions.
#[inline(always)]
fn sum<S: Simd>(simd: S, vectors: &[S::f64s]) -> f64 {
    let mut total = 0.0;
    for &vector in vectors {
        total += simd.reduce_sum_f64s(vector);
    }
    total
}

/// `x = x a + b`, over and over in registers.
struct MulAdd;

impl WithSimd for MulAdd {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let (a, b) = (simd.splat_f64s(black_box(0.5)), simd.splat_f64s(black_box(1.0)));
        let mut x = [b; IN_FLIGHT];
        for _ in 0..ROUNDS {
            for x in &mut x {
                *x = simd.mul_add_e_f64s(*x, a, b);
            }
        }
        black_box(sum(simd, &x));
    }
}

/// Sums a buffer.
struct Load<'a>(&'a mut [f64]);

impl WithSimd for Load<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let mut sums = [simd.splat_f64s(0.0); LINE];
        for _ in 0..PASSES {
            for vectors in S::as_simd_f64s(black_box(&*self.0)).0.chunks_exact(LINE) {
                for (sum, &x) in sums.iter_mut().zip(vectors) {
                    *sum = simd.add_f64s(*sum, x);
                }
            }
        }
        black_box(sum(simd, &sums));
    }
}

/// Fills a buffer.
struct Store<'a>(&'a mut [f64]);

impl WithSimd for Store<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let value = simd.splat_f64s(black_box(0.0));
        for _ in 0..PASSES {
            S::as_mut_simd_f64s(black_box(&mut *self.0)).0.fill(value);
        }
    }
}

/// Copies a buffer, adding one.
struct Copy<'a>(&'a mut [f64], &'a mut [f64]);

impl WithSimd for Copy<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let one = simd.splat_f64s(1.0);
        let (from, to) = (S::as_simd_f64s(self.0).0, S::as_mut_simd_f64s(black_box(self.1)).0);
        for (to, &from) in to.iter_mut().zip(from) {
            *to = simd.add_f64s(from, one);
        }
    }
}
