//! The one trait that every implementation of an operator stands behind, and the list of those this build has.

use crate::peer::{Peer, PeerOptions};
use crate::problem::{Inputs, Op, Results};
use crate::{Error, Result};

/// An implementation of GDN or GDN-2.
pub trait Kernel: Send + Sync {
    /// Name on the command line and in records, such as `cpu-chunk-bf16`.
    fn name(&self) -> &str;

    /// One line for a list: what it computes and in which precision.
    fn summary(&self) -> String;

    /// What it needs of the machine, such as "a CPU" or "an NVIDIA GPU, sm_80 or newer".
    fn needs(&self) -> &'static str;

    /// Whether it computes on the GPU, which is then part of what its measurements were made on.
    fn on_gpu(&self) -> bool {
        false
    }

    /// Versions and settings of other people's software that its results depend on, after it ran, in one line; `None` for
    /// what this crate computes.
    fn software(&self) -> Option<String> {
        None
    }

    /// Whether it has a backward; where it has none, [`Kernel::backward`] says so.
    fn has_backward(&self) -> bool {
        true
    }

    /// Operators that it implements.
    fn ops(&self) -> &'static [Op];

    /// Name of the mode whose tolerance its results are held to, a key of `compare::tolerance`.
    fn mode(&self) -> &'static str;

    /// The format that q, k, v and do are rounded to before it sees them.
    fn input_format(&self) -> crate::precision::Format;

    /// The forward: output and final state.
    ///
    /// # Errors
    /// [`Error::Input`] where `inputs` do not validate, [`Error::Unsupported`] where this kernel cannot run them.
    fn forward(&self, inputs: &Inputs) -> Result<Results>;

    /// Forward and backward; `inputs.d_o` must be present.
    ///
    /// # Errors
    /// As [`Kernel::forward`], and [`Error::Input`] where `d_o` is missing.
    fn backward(&self, inputs: &Inputs) -> Result<Results>;
}

/// Every kernel of this build, the ground truth first.
pub fn kernels() -> Vec<Box<dyn Kernel>> {
    let mut all: Vec<Box<dyn Kernel>> = vec![Box::new(crate::reference::Reference)];
    all.extend(crate::chunked::Chunked::presets().into_iter().map(|kernel| Box::new(kernel) as Box<dyn Kernel>));
    all.push(Box::new(crate::cuda::Recurrent::fp64()));
    all.push(Box::new(crate::cuda::Recurrent::fp32()));
    all.extend(crate::cuda::chunk::Chunk::presets().into_iter().map(|kernel| Box::new(kernel) as Box<dyn Kernel>));
    all.push(Box::new(crate::cuda::chunk::Chunk::fused()));
    all.extend(crate::cuda::chunk::gdn2::Gdn2::presets().into_iter().map(|kernel| Box::new(kernel) as Box<dyn Kernel>));
    all.push(Box::new(crate::cuda::decode::Decode));
    all
}

/// The kernel called `name`, one of [`kernels`] or a [`Peer`] with the options of the environment.
///
/// # Errors
/// [`Error::Input`] where there is none.
pub fn kernel(name: &str) -> Result<Box<dyn Kernel>> {
    if Peer::is_name(name) {
        return Ok(Box::new(Peer::new(name, PeerOptions::from_environment()?)?));
    }
    let all = kernels();
    let names: Vec<String> = all.iter().map(|kernel| kernel.name().to_owned()).collect();
    all.into_iter().find(|kernel| kernel.name() == name).ok_or_else(|| {
        Error::input(format!(
            "unknown kernel '{name}': expected one of {}, or a peer: fla, flash_qla, flashinfer or MODULE:FUNCTION",
            names.join(", ")
        ))
    })
}
