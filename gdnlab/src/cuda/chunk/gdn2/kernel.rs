//! The kernels of GDN-2 behind the one trait of all implementations.

use super::config;
use super::{Plan, Setup};
use crate::cuda::Gpu;
use crate::cuda::chunk::Mode;
use crate::cuda::chunk::config::Variant;
use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Results, Shape};
use crate::{Error, Result};

/// The chunk form of GDN-2 on the GPU of this process, in one mode and for one input format.
///
/// ```no_run
/// use gdnlab::{cuda::chunk::gdn2::Gdn2, inputs::{self, Regime}, kernel::Kernel, problem::{Op, Shape}};
/// let kernel = Gdn2::bf16();
/// let inputs = inputs::generate(Op::Gdn2, &Shape::new(1000, 4, 128, 128), Regime::Correlated, 1)?;
/// let results = kernel.backward(&inputs.rounded_to(kernel.input_format()))?;
/// assert_eq!(results.outputs.o.dims, [1, 1000, 4, 128]);
/// # Ok::<(), gdnlab::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Gdn2 {
    name: &'static str,
    mode: Mode,
    input: Format,
    tolerance: &'static str,
    summary: &'static str,
}

impl Gdn2 {
    /// bf16 inputs and results, f16 operands inside.
    pub fn bf16() -> Self {
        Self {
            name: "cuda-gdn2-bf16",
            mode: Mode::F16Internals,
            input: Format::Bf16,
            tolerance: "f16-internals",
            summary: "bf16 inputs and results, scaled f16 operands",
        }
    }

    /// bf16 throughout.
    pub fn bf16_internals() -> Self {
        Self {
            name: "cuda-gdn2-bf16-internals",
            mode: Mode::Bf16,
            input: Format::Bf16,
            tolerance: "bf16",
            summary: "bf16 inputs, results and operands",
        }
    }

    /// f16 throughout.
    pub fn f16() -> Self {
        Self {
            name: "cuda-gdn2-f16",
            mode: Mode::F16Internals,
            input: Format::F16,
            tolerance: "fp16",
            summary: "f16 inputs and results, scaled f16 operands",
        }
    }

    /// binary32 inputs and results, TF32 operands.
    pub fn tf32() -> Self {
        Self {
            name: "cuda-gdn2-tf32",
            mode: Mode::Tf32,
            input: Format::F32,
            tolerance: "tf32",
            summary: "f32 inputs and results, TF32 operands rounded to nearest",
        }
    }

    /// binary32 throughout, without tensor cores.
    pub fn fp32() -> Self {
        Self {
            name: "cuda-gdn2-fp32",
            mode: Mode::Fp32,
            input: Format::F32,
            tolerance: "fp32",
            summary: "IEEE f32 throughout, the triangular solve too, without tensor cores",
        }
    }

    /// All of them, the default one first.
    pub fn presets() -> Vec<Self> {
        vec![Self::bf16(), Self::bf16_internals(), Self::f16(), Self::tf32(), Self::fp32()]
    }

    /// Format of its operands.
    pub fn operands(&self) -> Mode {
        self.mode
    }

    fn run(&self, inputs: &Inputs, backward: bool) -> Result<Results> {
        if inputs.op() != Op::Gdn2 {
            return Err(self.unsupported(format!("the operator {}: expected gdn2", inputs.op())));
        }
        self.supports_shape(&inputs.shape)?;
        let setup = Setup::of_inputs(inputs, self.mode, self.input, backward)?;
        setup.validate()?;
        let mut plan = Plan::new(Gpu::shared()?, setup)?;
        plan.upload_inputs(inputs)?;
        plan.fill_outputs_with_nan()?;
        plan.forward()?;
        if backward {
            plan.backward()?;
        }
        plan.results(backward)
    }

    /// Refuses head dimensions that there is no kernel for.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with those that there are.
    pub(crate) fn supports_shape(&self, shape: &Shape) -> Result<()> {
        let Shape { key_dim, value_dim, value_heads, .. } = *shape;
        let variant = Variant { mode: self.mode, input: self.input, key_dim, value_dim, value_heads };
        config::validate(&variant, Format::F32)
            .map_err(|error| self.unsupported(format!("{error}; cuda-recurrent-fp32 takes every K and V up to 256")))
    }

    fn unsupported(&self, reason: String) -> Error {
        Error::Unsupported { kernel: self.name.to_owned(), reason }
    }
}

impl Kernel for Gdn2 {
    fn name(&self) -> &str {
        self.name
    }

    fn summary(&self) -> String {
        format!("chunked form on a GPU: {}", self.summary)
    }

    fn needs(&self) -> &'static str {
        "an NVIDIA GPU, sm_80 or newer"
    }

    fn on_gpu(&self) -> bool {
        true
    }

    fn ops(&self) -> &'static [Op] {
        &[Op::Gdn2]
    }

    fn mode(&self) -> &'static str {
        self.tolerance
    }

    fn input_format(&self) -> Format {
        self.input
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        self.run(inputs, false)
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        self.run(inputs, true)
    }
}
