//! The fastest of the algorithms that the heuristics of cuBLASLt propose for a product, by trying them on the GPU.

use super::blas::{Matmul, Product};
use super::{Buffer, Gpu};
use crate::precision::Format;
use crate::{Error, Result};
use half::{bf16, f16};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use std::ops::ControlFlow;

/// A timed loop lasts at least so long, in milliseconds, where one run does not last longer.
const LOOP_MS: f64 = 2.0;
/// Runs of a loop at the most.
const MAX_RUNS: usize = 200;
/// Candidates that take no longer than so many times the best are tried again.
const STILL_GOOD: f64 = 1.1;
/// How often they are tried again, in turns, since the clock of a warm GPU falls.
const ROUNDS: usize = 4;
/// Random numbers in a block that is repeated to fill a matrix.
const BLOCK: usize = 1 << 18;

impl Matmul {
    /// `product` by the fastest of the algorithms that the heuristics propose. Each is timed on the GPU, in loops without
    /// anything in between, on matrices of normal random numbers; they are allocated for that and freed afterwards
    /// ([`Product::bytes`]).
    ///
    /// Two processes may choose different algorithms, whose results differ by rounding; [`Matmul::ranked`] repeats a choice.
    ///
    /// # Errors
    /// As [`Matmul::new`], and [`Error::Gpu`] where the memory for the matrices is missing or every algorithm fails.
    pub fn tuned(gpu: &Gpu, product: &Product) -> Result<Self> {
        Self::tuned_while(gpu, product, &mut || ControlFlow::Continue(()))
    }

    /// The same; `go_on` is asked before each trial.
    ///
    /// # Errors
    /// As [`Matmul::tuned`], and [`Error::Stopped`] where `go_on` said so.
    pub fn tuned_while(gpu: &Gpu, product: &Product, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Self> {
        let mut matmul = Self::new(gpu, product)?;
        let matrices = Matrices::random(gpu, product)?;
        let fastest = fastest(matmul.candidates(), &mut |rank, runs| {
            if go_on().is_break() {
                return Err(Error::Stopped);
            }
            matmul.choose(gpu, rank)?;
            let ms = matrices.time(gpu, &matmul, runs);
            gpu.synchronize()?;
            ms
        })?;
        matmul.choose(gpu, fastest)?;
        Ok(matmul)
    }
}

/// The number below `count` whose run takes the least time. `time` gives the milliseconds per run of a number in a loop of
/// so many runs; one that fails is left out.
///
/// Every candidate runs a loop of about [`LOOP_MS`]; those that are [`STILL_GOOD`] run [`ROUNDS`] more, in turns, and the
/// smallest median decides.
fn fastest(count: usize, time: &mut dyn FnMut(usize, usize) -> Result<f64>) -> Result<usize> {
    let mut times: Vec<(usize, usize, Vec<f64>)> = Vec::new();
    let mut failed = None;
    for candidate in 0..count {
        let tried = time(candidate, 1).and_then(|one| {
            let runs = ((LOOP_MS / one.max(1e-6)).ceil() as usize).clamp(1, MAX_RUNS);
            // The first time says how many runs make a loop, no more: the caches were those of another algorithm.
            Ok((candidate, runs, vec![time(candidate, runs)?]))
        });
        match tried {
            Ok(times_of) => times.push(times_of),
            Err(Error::Stopped) => return Err(Error::Stopped),
            Err(error) => failed = Some(error),
        }
    }
    let best = times.iter().map(|(.., ms)| ms[0]).fold(f64::INFINITY, f64::min);
    times.retain(|(.., ms)| ms[0] <= STILL_GOOD * best);
    if times.len() > 1 {
        for _ in 0..ROUNDS {
            for (candidate, runs, ms) in &mut times {
                ms.push(time(*candidate, *runs)?);
            }
        }
    }
    let medians = times.into_iter().map(|(candidate, _, mut ms)| {
        ms.sort_by(f64::total_cmp);
        (candidate, ms[ms.len() / 2])
    });
    let fastest = medians.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(candidate, _)| candidate);
    fastest.ok_or_else(|| failed.unwrap_or_else(|| Error::gpu("cuBLASLt proposes no algorithm")))
}

/// The matrices of a product, filled with random numbers.
pub(crate) struct Matrices {
    a: Buffer<u8>,
    b: Buffer<u8>,
    c: Buffer<u8>,
}

impl Matrices {
    /// A and B of normal random numbers, C of zeros.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the GPU has no memory for them, which is asked before anything is allocated.
    pub fn random(gpu: &Gpu, product: &Product) -> Result<Self> {
        let (needed, free) = (product.bytes(), gpu.free_bytes()?);
        if needed > free {
            return Err(Error::gpu(format!(
                "the matrices of {product} have {:.2} GB, and {:.2} GB of the GPU's memory are free: multiply smaller ones, \
                 or end what else uses this GPU",
                needed as f64 / 1e9,
                free as f64 / 1e9
            )));
        }
        let factor = |seed, elements| gpu.upload(&random_bytes(product.a.format, seed, elements));
        let mut c = gpu.alloc(product.c_elements() * product.c_format.bytes())?;
        gpu.fill_bytes(&mut c, 0)?;
        Ok(Self { a: factor(1, product.a_elements())?, b: factor(2, product.b_elements())?, c })
    }

    /// Starts `matmul`, a product with such matrices, with alpha 1 and beta 0.
    ///
    /// # Errors
    /// As [`Matmul::run_on`].
    ///
    /// # Safety
    /// The matrices are those of the product, and are not dropped until the stream, or the last replay of a graph with
    /// this, has been waited for.
    pub unsafe fn run_on(&self, stream: &super::Stream, matmul: &Matmul) -> Result<()> {
        // SAFETY: the buffers have the product's sizes; the rest is the caller's promise.
        unsafe { matmul.run_on(stream, self.a.address(), self.b.address(), self.c.address(), 1.0, 0.0) }
    }

    /// Milliseconds per run of `matmul` in a loop of `runs`, which is recorded so that the CPU's part does not count.
    fn time(&self, gpu: &Gpu, matmul: &Matmul, runs: usize) -> Result<f64> {
        let stream = gpu.stream();
        // SAFETY: the matrices are the product's, and the stream is waited for before this returns.
        unsafe { self.run_on(stream, matmul)? };
        // SAFETY: the same; the graph is replayed on the stream that is waited for.
        let graph = gpu.capture(|stream| (0..runs).try_for_each(|_| unsafe { self.run_on(stream, matmul) }))?;
        let (start, end) = (gpu.event()?, gpu.event()?);
        start.record(stream)?;
        graph.replay(stream)?;
        end.record(stream)?;
        stream.synchronize()?;
        Ok(f64::from(start.elapsed_ms(&end)?) / runs as f64)
    }
}

/// `elements` normal random numbers in `format`, as bytes: a block of them, over and over.
fn random_bytes(format: Format, seed: u64, elements: usize) -> Vec<u8> {
    let mut generator = ChaCha8Rng::seed_from_u64(seed);
    let numbers = (0..elements.min(BLOCK)).map(|_| StandardNormal.sample(&mut generator));
    let block: Vec<u8> = match format {
        Format::F64 => numbers.flat_map(|x: f64| x.to_le_bytes()).collect(),
        Format::F16 => numbers.flat_map(|x: f64| f16::from_f64(x).to_le_bytes()).collect(),
        Format::Bf16 => numbers.flat_map(|x: f64| bf16::from_f64(x).to_le_bytes()).collect(),
        _ => numbers.flat_map(|x: f64| (x as f32).to_le_bytes()).collect(),
    };
    let mut bytes = block.repeat(elements.div_ceil(BLOCK));
    bytes.truncate(elements * format.bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clock on which candidate `i` takes `ms[i]` per run, and its very first run much longer.
    fn clock(ms: &[f64]) -> impl FnMut(usize, usize) -> Result<f64> {
        let mut seen = vec![false; ms.len()];
        move |candidate, _| {
            let first = !std::mem::replace(&mut seen[candidate], true);
            Ok(ms[candidate] * if first { 50.0 } else { 1.0 })
        }
    }

    #[test]
    fn the_fastest_candidate_is_found_whatever_its_first_run_took() {
        assert_eq!(fastest(4, &mut clock(&[1.4, 1.31, 1.3, 5.0])).unwrap(), 2);
        assert_eq!(fastest(1, &mut clock(&[0.004])).unwrap(), 0);
    }

    /// A GPU whose clock falls while it works: the order of the first trials alone would decide wrongly.
    #[test]
    fn good_candidates_are_tried_again_in_turns() {
        let mut calls = 0usize;
        let mut time = |candidate: usize, _: usize| {
            calls += 1;
            let slower = 1.0 + 0.08 * (1.0 - f64::exp(-(calls as f64) / 6.0));
            Ok(slower * if candidate == 0 { 1.02 } else { 1.0 })
        };
        assert_eq!(fastest(3, &mut time).unwrap(), 1);
        assert!(calls > 3 * ROUNDS, "{calls}");
    }

    #[test]
    fn slow_candidates_are_tried_once_and_failing_ones_are_left_out() {
        let mut runs = [0usize; 3];
        let mut time = |candidate: usize, count: usize| {
            runs[candidate] += 1;
            if candidate == 1 {
                return Err(Error::gpu("not supported"));
            }
            assert!(count == 1 || candidate == 2 || count == (LOOP_MS / 0.5) as usize, "{count}");
            Ok([0.5, 0.0, 2.5][candidate])
        };
        assert_eq!(fastest(3, &mut time).unwrap(), 0);
        assert_eq!(runs, [2, 1, 2]);
        let error = fastest(2, &mut |_, _| Err(Error::gpu("not supported"))).unwrap_err().to_string();
        assert!(error.contains("not supported"), "{error}");
        assert!(matches!(fastest(2, &mut |_, _| Err(Error::Stopped)), Err(Error::Stopped)));
    }

    #[test]
    fn matrices_repeat_a_block_of_finite_numbers() {
        for format in [Format::F64, Format::F32, Format::F16, Format::Bf16] {
            let bytes = random_bytes(format, 1, BLOCK + 3);
            assert_eq!(bytes.len(), (BLOCK + 3) * format.bytes());
            let (block, rest) = bytes.split_at(BLOCK * format.bytes());
            assert!(block.starts_with(rest) && block.iter().any(|&byte| byte != 0));
        }
        let numbers = random_bytes(Format::F32, 2, 1000);
        let numbers: Vec<f32> = numbers.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();
        let square = numbers.iter().map(|x| x * x).sum::<f32>() / 1000.0;
        assert!((0.8..1.2).contains(&square), "{square}");
        assert_ne!(random_bytes(Format::Bf16, 1, 8), random_bytes(Format::Bf16, 2, 8));
    }
}
