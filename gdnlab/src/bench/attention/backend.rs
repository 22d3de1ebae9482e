//! The implementations of attention that are timed, and how each is started.

use crate::cuda::attention::{
    Attention, Backward, CudnnAttention, Forward, Heads, MathAttention, Path, Setup as Problem,
};
use crate::cuda::{Buffer, Gpu, Stream};
use crate::{Error, Result};
use half::bf16;
use std::fmt;

/// An implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Ours, the fastest path of the GPU at hand.
    Flash,
    /// Ours, the path that every GPU from sm_80 on has.
    FlashPortable,
    /// Scores in memory: products by cuBLASLt, and our softmax between them.
    Math,
    /// NVIDIA's library cuDNN, where it is present.
    Cudnn,
}

impl Backend {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Flash, Self::FlashPortable, Self::Math, Self::Cudnn];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flash => "flash",
            Self::FlashPortable => "flash-portable",
            Self::Math => "math",
            Self::Cudnn => "cudnn",
        }
    }

    /// Name in records: for cuDNN with its version, `cudnn-9.19.0`.
    ///
    /// # Errors
    /// [`Error::Gpu`] where it is a library that this machine does not have, or cannot use.
    pub fn kernel(self, gpu: &Gpu) -> Result<String> {
        match self {
            Self::Cudnn => Ok(format!("{}-{}", self.name(), CudnnAttention::library_version(gpu)?)),
            _ => Ok(self.name().to_owned()),
        }
    }

    /// Largest `rel_rms` of a right result.
    ///
    /// P, dS, o and the o in `do . o` are rounded to bf16, 1.7e-3 of RMS each time. Where scores are in memory, S and dP are
    /// rounded too: with normal inputs that makes 3.7e-3 for o and dv and 4.5e-3 for dq and dk in float64 otherwise, since an
    /// error of s is a relative error of e^s, and those that count are large.
    pub(super) fn rel_rms(self) -> f64 {
        if self == Self::Math { 5e-3 } else { 4e-3 }
    }

    /// Whether it moves no more than its inputs and outputs, so that the cost of a call has its bytes.
    pub(super) fn moves_the_least(self) -> bool {
        matches!(self, Self::Flash | Self::FlashPortable)
    }

    /// `buffer` as a tensor as this backend takes it: `[H, B, T, d]` where one batch of products takes all heads, and
    /// `[B, T, H, d]` otherwise, both without gaps.
    pub(super) fn heads(self, problem: &Problem, buffer: &Buffer<bf16>) -> Heads {
        if self == Self::Math { problem.heads_first(buffer) } else { problem.whole(buffer) }
    }

    pub(super) fn plan(self, gpu: &Gpu, problem: Problem) -> Result<Plan> {
        Ok(match self {
            Self::Flash => Plan::Flash(Box::new(Attention::new(gpu, problem)?)),
            Self::FlashPortable => Plan::Flash(Box::new(Attention::with_path(gpu, problem, Path::Portable)?)),
            Self::Math => Plan::Math(Box::new(MathAttention::new(gpu, problem)?)),
            Self::Cudnn => Plan::Cudnn(Box::new(CudnnAttention::new(gpu, problem)?)),
        })
    }
}

/// A backend ready for one problem.
pub(super) enum Plan {
    Flash(Box<Attention>),
    Math(Box<MathAttention>),
    Cudnn(Box<CudnnAttention>),
}

impl Plan {
    /// # Safety
    /// As for the forward of the backend.
    pub unsafe fn forward(&self, stream: &Stream, call: &Forward) -> Result<()> {
        // SAFETY: the promise of the caller.
        unsafe {
            match self {
                Self::Flash(plan) => plan.forward(stream, call),
                Self::Math(plan) => plan.forward(stream, call),
                Self::Cudnn(plan) => plan.forward(stream, call),
            }
        }
    }

    /// # Safety
    /// As for the backward of the backend.
    pub unsafe fn backward(&self, stream: &Stream, call: &Backward) -> Result<()> {
        // SAFETY: the promise of the caller.
        unsafe {
            match self {
                Self::Flash(plan) => plan.backward(stream, call),
                Self::Math(plan) => plan.backward(stream, call),
                Self::Cudnn(plan) => plan.backward(stream, call),
            }
        }
    }
}

/// A backend whose library this machine does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absent {
    /// The backend.
    pub backend: Backend,
    /// What is missing, and how to get it.
    pub why: String,
}

impl Absent {
    pub(super) fn new(backend: Backend, error: Error) -> Self {
        let why = match error {
            Error::Gpu(why) => why,
            other => other.to_string(),
        };
        Self { backend, why }
    }
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: not present: {}", self.backend.name(), self.why)
    }
}
