//! Checkpoints of a training on a GPU: those of a training on the CPU, which each can read of the other, with an entry for
//! what the bits of a step depend on beside them.

use super::products::Choice;
use super::training::{GpuOptions, GpuTraining, Start};
use crate::cuda::Gpu;
use crate::model::adamw::Moments;
use crate::model::step::Model;
use crate::model::train::Training;
use crate::peer::Destination;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Key of the entry.
const KEY: &str = "gpu";

/// What the bits of a step depend on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Bits {
    /// Name of the GPU.
    gpu: String,
    /// Version of the library of products.
    cublaslt: String,
    /// Tokens whose logits are in memory at once.
    logit_tokens: usize,
    /// Number of the algorithm of each product.
    ranks: Vec<usize>,
}

impl GpuTraining {
    /// The same as a training on the CPU, which goes on from here in float64.
    ///
    /// # Errors
    /// [`Error::Gpu`] where a kernel has failed, [`Error::Input`] where a number is not finite.
    pub fn to_training(&self) -> Result<Training> {
        let moments = Moments {
            m: self.read_arena(self.tensors.state.m)?,
            v: self.read_arena(self.tensors.state.v)?,
            steps: self.steps,
        };
        let model = Model::from_parameters(*self.config(), self.parameters()?)?;
        Ok(Training { model, moments, settings: self.settings, text: self.text.clone() })
    }

    /// Writes the training to `destination`, in the format of [`Training::save`]: the file is there in full or not at all.
    ///
    /// # Errors
    /// As [`GpuTraining::to_training`], and [`Error::Io`] where it cannot be written.
    pub fn save(&self, destination: &Destination) -> Result<()> {
        let bits = serde_json::to_string(&self.bits())
            .map_err(|error| Error::input(format!("{}: cannot be written: {error}", destination.path().display())))?;
        self.to_training()?.save_with(destination, &[(KEY, &bits)])
    }

    fn bits(&self) -> Bits {
        Bits {
            gpu: self.gpu.name.clone(),
            cublaslt: self.kernels.products.library_version(),
            logit_tokens: self.options().logit_tokens,
            ranks: self.kernels.products.ranks(),
        }
    }

    /// The training that [`GpuTraining::save`] or [`Training::save`] wrote to `path`. One that was on such a GPU, with the
    /// same version of cuBLASLt, goes on to the same bits: with the algorithms and the slices of logits that it had, whatever
    /// `options` says of them.
    ///
    /// # Errors
    /// As [`Training::load`] and [`GpuTraining::resume`].
    pub fn load(gpu: &'static Gpu, path: impl AsRef<Path>, options: GpuOptions) -> Result<Self> {
        let path = path.as_ref();
        let (training, metadata) = Training::load_with_metadata(path)?;
        let bits = match metadata.get(KEY) {
            None => None,
            Some(text) => Some(
                serde_json::from_str::<Bits>(text)
                    .map_err(|error| Error::input(format!("{}: metadata {KEY}: {error}", path.display())))?,
            ),
        };
        let Some(bits) = bits.filter(|bits| bits.gpu == gpu.name) else {
            return Self::resume(gpu, training, options);
        };
        let of_before = GpuOptions { logit_tokens: bits.logit_tokens, ..options };
        let resumed = Self::of(gpu, &training, of_before, Choice::Ranks(&bits.ranks));
        match resumed {
            Ok(resumed) if resumed.kernels.products.library_version() == bits.cublaslt => Ok(resumed),
            // Another library has other algorithms.
            _ => Self::resume(gpu, training, options),
        }
    }

    /// Goes on with `training` on a GPU.
    ///
    /// # Errors
    /// As [`GpuTraining::new`].
    pub fn resume(gpu: &'static Gpu, training: Training, options: GpuOptions) -> Result<Self> {
        let choice = if options.tuned { Choice::Tuned } else { Choice::Heuristics };
        Self::of(gpu, &training, options, choice)
    }

    fn of(gpu: &'static Gpu, training: &Training, options: GpuOptions, choice: Choice<'_>) -> Result<Self> {
        let Training { model, moments, settings, text } = training;
        let start = Start { config: *model.config(), settings: *settings, text: text.clone(), choice };
        let mut resumed = Self::without_parameters(gpu, options, start)?;
        resumed.set_parameters(&model.parameters)?;
        let state = &resumed.tensors.state;
        for (view, set) in [(state.m, &moments.m), (state.v, &moments.v)] {
            resumed.write(view, &resumed.arena.gather(set)?)?;
        }
        resumed.steps = moments.steps;
        Ok(resumed)
    }
}
