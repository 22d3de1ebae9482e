//! GPU time of launches.
//!
//! The launches are recorded into a graph once, so that the CPU's part of a launch does not count. Each sample flushes
//! the L2 cache by writing a buffer that is larger, replays the graph once, and reads the time between an event before
//! and an event after. The written lines that are still in the cache go to memory during the replay, at the cost of
//! every kernel alike; the published times of others have the same in them.

use crate::cost::Cost;
use crate::cuda::{Buffer, Event, Gpu, Stream};
use crate::record::Timing;
use crate::{Error, Result};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Bytes that are written to flush the L2 cache, at the least; twice the cache where that is more.
const FLUSH_BYTES: usize = 256 << 20;

/// How long something is timed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Time that replays go on before the first sample, so that clocks have risen and memory is mapped.
    pub warm_up: Duration,
    /// Samples at the least.
    pub min_samples: usize,
    /// Samples at the most.
    pub max_samples: usize,
    /// Time after which no sample begins once there are enough.
    pub time: Duration,
}

impl Default for Budget {
    /// Twenty samples, and more of what is quick, in half a second.
    fn default() -> Self {
        Self {
            warm_up: Duration::from_millis(100),
            min_samples: 20,
            max_samples: 200,
            time: Duration::from_millis(500),
        }
    }
}

impl Budget {
    /// Exactly so many samples.
    ///
    /// # Errors
    /// [`Error::Input`] for none.
    pub fn of_samples(samples: usize) -> Result<Self> {
        if samples == 0 {
            return Err(Error::input("0 samples: expected at least 1"));
        }
        Ok(Self { min_samples: samples, max_samples: samples, ..Self::default() })
    }

    fn is_spent(&self, samples: usize, elapsed: Duration) -> bool {
        samples >= self.max_samples || samples >= self.min_samples && elapsed >= self.time
    }
}

/// The part of a series of runs back to back that counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// How long the GPU rests before.
    pub rest: Duration,
    /// Runs that begin before this time do not count.
    pub from: Duration,
    /// No run begins after it.
    pub until: Duration,
}

/// Times of one thing in milliseconds, in the order in which they were taken; one at least.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples {
    ms: Vec<f64>,
    sorted: Vec<f64>,
}

impl Samples {
    /// Wraps the times.
    ///
    /// # Errors
    /// [`Error::Input`] where there are none, or one is no number.
    pub fn new(ms: Vec<f64>) -> Result<Self> {
        if ms.is_empty() || ms.iter().any(|x| !x.is_finite()) {
            return Err(Error::input(format!("{} samples: expected at least one, and finite times", ms.len())));
        }
        let mut sorted = ms.clone();
        sorted.sort_by(f64::total_cmp);
        Ok(Self { ms, sorted })
    }

    /// Every sample.
    pub fn ms(&self) -> &[f64] {
        &self.ms
    }

    /// The value below which a `fraction` of the samples lies, linear between the samples next to it.
    pub fn quantile(&self, fraction: f64) -> f64 {
        let at = fraction.clamp(0.0, 1.0) * (self.sorted.len() - 1) as f64;
        let (low, high) = (self.sorted[at.floor() as usize], self.sorted[at.ceil() as usize]);
        low + (high - low) * at.fract()
    }

    /// These times as a record has them, of a call that costs `cost` and cannot take less than `floor_ms`.
    pub fn timing(&self, cost: &Cost, floor_ms: f64, floor_basis: String) -> Timing {
        Timing {
            latency_ms: self.median(),
            p20_ms: Some(self.p20()),
            p80_ms: Some(self.p80()),
            samples_ms: Some(self.ms.clone()),
            floor_ms: Some(floor_ms),
            floor_basis: Some(floor_basis),
            gb_s: Some(cost.gb_s(self.median())),
            tflop_s: Some(cost.tflop_s(self.median())),
            ..Timing::default()
        }
    }

    /// The median.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The 20th percentile.
    pub fn p20(&self) -> f64 {
        self.quantile(0.2)
    }

    /// The 80th percentile.
    pub fn p80(&self) -> f64 {
        self.quantile(0.8)
    }
}

/// Takes samples of GPU time.
pub struct Timer {
    gpu: &'static Gpu,
    flush: Buffer<u8>,
    budget: Budget,
}

impl Timer {
    /// A timer with its buffer to flush the cache.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the GPU has no memory for it.
    pub fn new(gpu: &'static Gpu, budget: Budget) -> Result<Self> {
        Ok(Self { gpu, flush: gpu.alloc(FLUSH_BYTES.max(2 * gpu.l2_bytes))?, budget })
    }

    /// How long something is timed.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Bytes that are written to flush the L2 cache.
    pub fn flush_bytes(&self) -> usize {
        self.flush.len()
    }

    /// The GPU that is timed.
    pub fn gpu(&self) -> &'static Gpu {
        self.gpu
    }

    /// Times `work`, as [`Timer::time`] does, in runs back to back: the caches are not flushed in between. What was running
    /// before has no part in it, since the GPU rests for `rest` first.
    ///
    /// Of the runs that begin in the first `from` none counts, and none begins after `until`; one counts at least.
    ///
    /// # Errors
    /// As [`Timer::time`].
    pub fn time_back_to_back(
        &mut self,
        work: impl FnOnce(&Stream) -> Result<()>,
        window: &Window,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Samples> {
        let graph = self.gpu.capture(work)?;
        let stream = self.gpu.stream();
        let run = || -> Result<(Event, Event)> {
            let (start, end) = (self.gpu.event()?, self.gpu.event()?);
            start.record(stream)?;
            graph.replay(stream)?;
            end.record(stream)?;
            Ok((start, end))
        };
        let (start, end) = run()?;
        stream.synchronize()?;
        let one_ms = f64::from(start.elapsed_ms(&end)?);
        if go_on().is_break() {
            return Err(Error::Stopped);
        }
        std::thread::sleep(window.rest);
        let [before, all] = [window.from, window.until].map(|time| (1e3 * time.as_secs_f64() / one_ms) as usize);
        let events = (0..(before + 1).max(all)).map(|_| run()).collect::<Result<Vec<_>>>()?;
        stream.synchronize()?;
        let ms = events[before..].iter().map(|(start, end)| Ok(f64::from(start.elapsed_ms(end)?)));
        Samples::new(ms.collect::<Result<_>>()?)
    }

    /// Times what `work` starts on the stream that it is given: launches and copies alone, since it is recorded once and
    /// replayed. `go_on` is asked before each sample.
    ///
    /// # Errors
    /// [`Error::Stopped`] where `go_on` said so before there were enough samples, what `work` returns, and
    /// [`Error::Gpu`] where a kernel failed.
    pub fn time(
        &mut self,
        work: impl FnOnce(&Stream) -> Result<()>,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Samples> {
        let graph = self.gpu.capture(work)?;
        let stream = self.gpu.stream();
        let warm = Instant::now();
        loop {
            graph.replay(stream)?;
            stream.synchronize()?;
            if warm.elapsed() >= self.budget.warm_up {
                break;
            }
        }
        let (start, end) = (self.gpu.event()?, self.gpu.event()?);
        let mut byte = 0;
        sample(&self.budget, go_on, || {
            byte ^= 0x5a;
            stream.fill_bytes(&mut self.flush, byte)?;
            start.record(stream)?;
            graph.replay(stream)?;
            end.record(stream)?;
            stream.synchronize()?;
            Ok(f64::from(start.elapsed_ms(&end)?))
        })
    }
}

/// Calls `once`, which gives milliseconds, until the budget is spent.
pub(super) fn sample(
    budget: &Budget,
    go_on: &mut dyn FnMut() -> ControlFlow<()>,
    mut once: impl FnMut() -> Result<f64>,
) -> Result<Samples> {
    let start = Instant::now();
    let mut ms = Vec::new();
    while !budget.is_spent(ms.len(), start.elapsed()) {
        if go_on().is_break() {
            if ms.len() < budget.min_samples {
                return Err(Error::Stopped);
            }
            break;
        }
        ms.push(once()?);
    }
    Samples::new(ms)
}

#[cfg(test)]
#[path = "timer_tests.rs"]
mod tests;
