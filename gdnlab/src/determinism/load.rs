//! Other work on the machine, so that what is measured beside it is scheduled differently each time.

use crate::cuda::{Buffer, CopyKernel, Gpu, Stream};
use crate::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

/// Elements of a buffer that is worked on: 8 MiB of f64, more than a core's caches hold.
const CPU_ELEMENTS: usize = 1 << 20;
/// Streams of the GPU, and elements of f32 that each copies: 64 MiB.
const STREAMS: usize = 3;
const GPU_ELEMENTS: usize = 1 << 24;

/// Work that goes on until it is stopped or dropped.
pub struct Load {
    end: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl Load {
    /// Starts as many threads of work as the CPU has, or with `on_gpu` copies on other streams of the GPU, and waits until
    /// all are at work.
    ///
    /// # Errors
    /// [`Error::Gpu`] where there is no GPU, [`Error::Io`] where the system gives no thread.
    pub fn start(on_gpu: bool) -> Result<Self> {
        let gpu = if on_gpu { Some(Gpu::shared()?) } else { None };
        let end = Arc::new(AtomicBool::new(false));
        let at_work = Arc::new(AtomicUsize::new(0));
        let count = if on_gpu { 1 } else { thread::available_parallelism().map_or(1, usize::from) };
        let mut load = Self { end: end.clone(), threads: Vec::new() };
        for _ in 0..count {
            let (end, at_work) = (end.clone(), at_work.clone());
            let work = move || match gpu {
                Some(gpu) => keep_gpu_busy(gpu, &end, &at_work),
                None => {
                    keep_cpu_busy(&end, &at_work);
                    Ok(())
                }
            };
            let thread = thread::Builder::new().name("load".to_owned()).spawn(work);
            load.threads.push(thread.map_err(|error| Error::io("a thread", error))?);
        }
        while at_work.load(Ordering::Acquire) < count && !load.threads.iter().any(JoinHandle::is_finished) {
            thread::yield_now();
        }
        Ok(load)
    }

    /// Ends the work.
    ///
    /// # Errors
    /// What kept it from working.
    pub fn stop(mut self) -> Result<()> {
        self.end.store(true, Ordering::Release);
        let ended = self.threads.drain(..).map(|thread| thread.join().unwrap_or_else(|_| Err(broken())));
        ended.fold(Ok(()), Result::and)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            // Whoever drops it without stopping it has an error of his own to report.
            let _ = thread.join();
        }
    }
}

fn broken() -> Error {
    Error::input("the load beside the measurement broke down: expected it to run until the end")
}

fn keep_cpu_busy(end: &AtomicBool, at_work: &AtomicUsize) {
    let mut values = vec![1.0f64; CPU_ELEMENTS];
    at_work.fetch_add(1, Ordering::Release);
    while !end.load(Ordering::Acquire) {
        values.iter_mut().for_each(|x| *x = x.mul_add(0.999, 0.001));
        std::hint::black_box(&values);
    }
}

fn keep_gpu_busy(gpu: &'static Gpu, end: &AtomicBool, at_work: &AtomicUsize) -> Result<()> {
    let copy = CopyKernel::new(gpu)?;
    let mut copies = (0..STREAMS)
        .map(|_| Ok((gpu.new_stream()?, gpu.alloc(GPU_ELEMENTS)?, gpu.alloc(GPU_ELEMENTS)?)))
        .collect::<Result<Vec<(Stream, Buffer<f32>, Buffer<f32>)>>>()?;
    // Buffers belong to the stream of the GPU until it has been waited for.
    gpu.synchronize()?;
    at_work.fetch_add(1, Ordering::Release);
    while !end.load(Ordering::Acquire) {
        for (stream, from, to) in &mut copies {
            copy.copy(stream, from, to)?;
        }
        copies.iter().try_for_each(|(stream, ..)| stream.synchronize())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_works_until_it_is_stopped() {
        let load = Load::start(false).unwrap();
        assert!(load.threads.iter().all(|thread| !thread.is_finished()));
        let end = load.end.clone();
        load.stop().unwrap();
        assert!(end.load(Ordering::Acquire));
        drop(Load::start(false).unwrap());
    }
}
