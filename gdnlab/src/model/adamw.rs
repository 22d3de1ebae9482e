//! AdamW with clipping by the global norm, and the learning rate over time.
//!
//! In step t, counted from 1, with the gradient `g` of all parameters together:
//!
//! ```text
//! g  <- g min(1, clip / |g|)
//! m  <- beta1 m + (1 - beta1) g                    m^ = m / (1 - beta1^t)
//! v  <- beta2 v + (1 - beta2) g^2                  v^ = v / (1 - beta2^t)
//! p  <- p - rate (m^ / (sqrt(v^) + eps) + decay p)
//! ```
//! The decay is for tensors with two axes (matrices and convolutions); vectors (norms, `A_log`, `dt_bias`) have none.

use super::config::ModelConfig;
use super::parameters::{Grads, Parameters};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// What to do about numbers that have grown beyond all bounds.
pub(super) const REMEDY: &str = "lower the learning rate, or resume an earlier checkpoint";

/// The constants of the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamW {
    /// Memory of the first moment, in [0, 1).
    #[serde(with = "super::exact")]
    pub beta1: f64,
    /// Memory of the second moment, in [0, 1).
    #[serde(with = "super::exact")]
    pub beta2: f64,
    /// Added to the root of the second moment; above 0.
    #[serde(with = "super::exact")]
    pub eps: f64,
    /// Weight decay, at least 0.
    #[serde(with = "super::exact")]
    pub decay: f64,
    /// The largest norm that a gradient keeps; above 0, infinite for no clipping.
    #[serde(with = "super::exact")]
    pub clip: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1, clip: 1.0 }
    }
}

/// What the optimizer remembers from step to step.
#[derive(Clone, Debug, PartialEq)]
pub struct Moments {
    /// First moment of each parameter.
    pub m: Parameters,
    /// Second moment of each parameter.
    pub v: Parameters,
    /// Steps taken.
    pub steps: u64,
}

impl Moments {
    /// Before the first step.
    pub fn new(config: &ModelConfig) -> Self {
        Self { m: Parameters::zeros(config), v: Parameters::zeros(config), steps: 0 }
    }
}

impl AdamW {
    /// Changes `parameters` and `moments` by one step down `grads` and returns the norm of `grads` before clipping.
    ///
    /// # Errors
    /// [`Error::Input`] where the tensors do not belong to the same model, or the gradient is not finite; then nothing is
    /// changed.
    pub fn step(&self, parameters: &mut Parameters, moments: &mut Moments, grads: &Grads, rate: f64) -> Result<f64> {
        for other in [&moments.m, &moments.v, grads] {
            if !other.iter().map(|(name, tensor)| (name, &tensor.dims)).eq(parameters.iter().map(|(n, t)| (n, &t.dims)))
            {
                return Err(Error::input("AdamW: expected parameters, moments and gradients of one model"));
            }
        }
        let norm = grads.norm();
        if !norm.is_finite() {
            return Err(Error::input(format!("the norm of the gradient is {norm}: training has diverged: {REMEDY}")));
        }
        let factor = if norm > self.clip { self.clip / norm } else { 1.0 };
        moments.steps += 1;
        let correction = |beta: f64| 1.0 - beta.powf(moments.steps as f64);
        let (correction1, correction2) = (correction(self.beta1), correction(self.beta2));
        let both = moments.m.iter_mut().zip(moments.v.iter_mut());
        for (((_, p), ((_, m), (_, v))), (_, g)) in parameters.iter_mut().zip(both).zip(grads.iter()) {
            let decay = if p.dims.len() == 1 { 0.0 } else { self.decay };
            for (((p, m), v), g) in p.data.iter_mut().zip(&mut m.data).zip(&mut v.data).zip(&g.data) {
                let g = g * factor;
                *m = self.beta1 * *m + (1.0 - self.beta1) * g;
                *v = self.beta2 * *v + (1.0 - self.beta2) * g * g;
                let direction = *m / correction1 / ((*v / correction2).sqrt() + self.eps);
                *p -= rate * (direction + decay * *p);
            }
        }
        Ok(norm)
    }

    /// Refuses constants with which no step makes sense.
    pub(super) fn validate(&self) -> Result<()> {
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return Err(Error::input(format!("{name} = {beta}: expected at least 0 and below 1")));
            }
        }
        // NaN is above and below nothing.
        if !(self.eps > 0.0 && self.eps.is_finite()) {
            return Err(Error::input(format!("eps = {}: expected a number above 0", self.eps)));
        }
        if !(self.decay >= 0.0 && self.decay.is_finite()) {
            return Err(Error::input(format!("weight decay = {}: expected a number, at least 0", self.decay)));
        }
        if self.clip > 0.0 {
            return Ok(());
        }
        Err(Error::input(format!("clip = {}: expected above 0, infinite for no clipping", self.clip)))
    }
}

/// The learning rate over time: a linear warm-up to `peak`, then half a cosine down to `floor`.
///
/// ```text
/// rate(t) = peak (t + 1) / warmup                                                   t < warmup
/// rate(t) = floor + (peak - floor) (1 + cos(pi (t - warmup) / (steps - warmup))) / 2    t < steps
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// The largest rate; above 0.
    #[serde(with = "super::exact")]
    pub peak: f64,
    /// The rate that is approached at the end; from 0 to `peak`.
    #[serde(with = "super::exact")]
    pub floor: f64,
    /// Steps of the warm-up, fewer than `steps`.
    pub warmup: u64,
    /// Steps of the whole training.
    pub steps: u64,
}

impl Schedule {
    /// The rate of step `t`, counted from 0.
    pub fn rate(&self, t: u64) -> f64 {
        if t < self.warmup {
            return self.peak * (t + 1) as f64 / self.warmup as f64;
        }
        let done = t.min(self.steps) - self.warmup;
        let progress = done as f64 / (self.steps - self.warmup) as f64;
        self.floor + (self.peak - self.floor) * (1.0 + (std::f64::consts::PI * progress).cos()) / 2.0
    }

    /// Refuses rates and lengths that make no schedule.
    pub(super) fn validate(&self) -> Result<()> {
        let Self { peak, floor, warmup, steps } = *self;
        if !(peak > 0.0 && peak.is_finite() && (0.0..=peak).contains(&floor)) {
            return Err(Error::input(format!(
                "learning rate from {peak} to {floor}: expected a peak above 0, and a floor from 0 to the peak"
            )));
        }
        if warmup >= steps {
            return Err(Error::input(format!("{warmup} of {steps} steps to warm up: expected fewer than all")));
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "adamw_tests.rs"]
mod tests;
