//! The exact recurrence with an error of a chosen size.

use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Results, Tensor};
use crate::reference::Reference;
use crate::{Error, Result};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use std::sync::atomic::{AtomicU64, Ordering};

/// The recurrence in float64, to each element of whose results Gaussian noise is added: `rel_rms` times the RMS of its row of
/// d_v. Every call has noise of its own, in the order of the calls.
pub struct Noisy {
    name: String,
    rel_rms: f64,
    seed: u64,
    calls: AtomicU64,
}

impl Noisy {
    /// Noise of this relative RMS.
    ///
    /// # Errors
    /// [`Error::Input`] where `rel_rms` is no finite number above 0.
    pub fn new(rel_rms: f64, seed: u64) -> Result<Self> {
        if !(rel_rms > 0.0 && rel_rms.is_finite()) {
            return Err(Error::input(format!("noise of relative RMS {rel_rms}: expected a finite number above 0")));
        }
        Ok(Self { name: format!("noise {rel_rms:.0e}"), rel_rms, seed, calls: AtomicU64::new(0) })
    }

    /// The noise's relative RMS.
    pub fn rel_rms(&self) -> f64 {
        self.rel_rms
    }

    fn disturb(&self, tensor: &mut Tensor, rng: &mut ChaCha8Rng) {
        let width = tensor.dims.last().copied().unwrap_or(1).max(1);
        for row in tensor.data.chunks_exact_mut(width) {
            let rms = (row.iter().map(|x| x * x).sum::<f64>() / width as f64).sqrt();
            for x in row {
                let noise: f64 = rng.sample(StandardNormal);
                *x += self.rel_rms * rms * noise;
            }
        }
    }
}

impl Kernel for Noisy {
    fn name(&self) -> &str {
        &self.name
    }

    fn summary(&self) -> String {
        format!("the recurrence in float64 with noise of relative RMS {:e}", self.rel_rms)
    }

    fn needs(&self) -> &'static str {
        "a CPU"
    }

    fn has_backward(&self) -> bool {
        false
    }

    fn ops(&self) -> &'static [Op] {
        &Op::ALL
    }

    fn mode(&self) -> &'static str {
        "noise"
    }

    fn input_format(&self) -> Format {
        Format::F64
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        let mut results = Reference.forward(inputs)?;
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(self.calls.fetch_add(1, Ordering::Relaxed));
        self.disturb(&mut results.outputs.o, &mut rng);
        self.disturb(&mut results.outputs.final_state, &mut rng);
        Ok(results)
    }

    fn backward(&self, _: &Inputs) -> Result<Results> {
        Err(Error::Unsupported { kernel: self.name.clone(), reason: "it has no backward".to_owned() })
    }
}
