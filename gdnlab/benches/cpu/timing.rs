//! Samples of one call's time, taken by criterion.

use criterion::{Criterion, SamplingMode};
use std::time::{Duration, Instant};

const WARM_UP: Duration = Duration::from_millis(500);
const MEASUREMENT: Duration = Duration::from_secs(2);

/// Runs closures under criterion and hands their samples back.
pub struct Timer {
    criterion: Criterion,
    samples: usize,
}

/// Seconds per call, ascending.
#[derive(Clone)]
pub struct Samples(Vec<f64>);

impl Timer {
    pub fn new(samples: usize) -> Self {
        let criterion = Criterion::default().without_plots().warm_up_time(WARM_UP).measurement_time(MEASUREMENT);
        Self { criterion, samples }
    }

    pub fn time(&mut self, name: &str, mut run: impl FnMut()) -> Samples {
        let mut seconds = Vec::new();
        let mut group = self.criterion.benchmark_group("cpu");
        group.sample_size(self.samples).sampling_mode(SamplingMode::Flat);
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|calls| {
                let start = Instant::now();
                (0..calls).for_each(|_| run());
                let elapsed = start.elapsed();
                seconds.push(elapsed.as_secs_f64() / calls as f64);
                elapsed
            });
        });
        group.finish();
        let warm_up = seconds.len().saturating_sub(self.samples);
        Samples::new(seconds.split_off(warm_up))
    }
}

impl Samples {
    pub fn new(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        Self(seconds)
    }

    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The sample at this fraction of the way from the smallest to the largest; NaN where there is none.
    pub fn quantile(&self, fraction: f64) -> f64 {
        let at = (fraction * self.0.len().saturating_sub(1) as f64).round() as usize;
        self.0.get(at).copied().unwrap_or(f64::NAN)
    }

    pub fn seconds(&self) -> &[f64] {
        &self.0
    }
}
