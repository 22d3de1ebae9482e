//! The chunk kernels behind the one trait of all implementations.

use super::fused::Fused;
use super::{HEAD_DIMS, Mode, Plan, Setup};
use crate::cuda::Gpu;
use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Results, Shape};
use crate::{Error, Result};

/// The chunk form of GDN on the GPU of this process, in one mode and for one input format.
///
/// ```no_run
/// use gdnlab::{cuda::chunk::Chunk, inputs::{self, Regime}, kernel::Kernel, problem::{Op, Shape}};
/// let kernel = Chunk::bf16();
/// let inputs = inputs::generate(Op::Gdn, &Shape::new(1000, 4, 128, 128), Regime::Gaussian, 1)?;
/// let results = kernel.backward(&inputs.rounded_to(kernel.input_format()))?;
/// assert_eq!(results.outputs.o.dims, [1, 1000, 4, 128]);
/// # Ok::<(), gdnlab::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Chunk {
    name: &'static str,
    mode: Mode,
    input: Format,
    tolerance: &'static str,
    summary: &'static str,
    fused: bool,
}

impl Chunk {
    /// bf16 inputs and results, f16 operands inside.
    pub fn bf16() -> Self {
        Self {
            name: "cuda-chunk-bf16",
            mode: Mode::F16Internals,
            input: Format::Bf16,
            tolerance: "f16-internals",
            summary: "bf16 inputs and results, scaled f16 operands",
            fused: false,
        }
    }

    /// bf16 throughout.
    pub fn bf16_internals() -> Self {
        Self {
            name: "cuda-chunk-bf16-internals",
            mode: Mode::Bf16,
            input: Format::Bf16,
            tolerance: "bf16",
            summary: "bf16 inputs, results and operands",
            fused: false,
        }
    }

    /// f16 throughout.
    pub fn f16() -> Self {
        Self {
            name: "cuda-chunk-f16",
            mode: Mode::F16Internals,
            input: Format::F16,
            tolerance: "fp16",
            summary: "f16 inputs and results, scaled f16 operands",
            fused: false,
        }
    }

    /// binary32 inputs and results, TF32 operands.
    pub fn tf32() -> Self {
        Self {
            name: "cuda-chunk-tf32",
            mode: Mode::Tf32,
            input: Format::F32,
            tolerance: "tf32",
            summary: "f32 inputs and results, TF32 operands rounded to nearest",
            fused: false,
        }
    }

    /// binary32 throughout, without tensor cores.
    pub fn fp32() -> Self {
        Self {
            name: "cuda-chunk-fp32",
            mode: Mode::Fp32,
            input: Format::F32,
            tolerance: "fp32",
            summary: "IEEE f32 throughout, the triangular solve too, without tensor cores",
            fused: false,
        }
    }

    /// bf16 inputs and results, f16 operands inside; the forward alone, in one sweep by the warpgroups of a Hopper GPU.
    ///
    /// It keeps nothing of a chunk, so it takes hardly any memory beside its tensors. Faster than [`Chunk::bf16`] where
    /// sequences and heads are many or a sequence is cut; slower for one sequence of many heads.
    pub fn fused() -> Self {
        Self {
            name: "cuda-chunk-fused",
            summary: "bf16 inputs and results, scaled f16 operands, the forward in one sweep",
            fused: true,
            ..Self::bf16()
        }
    }

    /// All of them that have a backward, the default one first.
    pub fn presets() -> Vec<Self> {
        vec![Self::bf16(), Self::bf16_internals(), Self::f16(), Self::tf32(), Self::fp32()]
    }

    /// Format of its operands.
    pub fn operands(&self) -> Mode {
        self.mode
    }

    /// Whether its forward is one sweep.
    pub fn is_fused(&self) -> bool {
        self.fused
    }

    fn run(&self, inputs: &Inputs, backward: bool) -> Result<Results> {
        self.supports(inputs)?;
        let mut setup = Setup::of_inputs(inputs, self.mode, self.input, backward)?;
        setup.options.fused = self.fused;
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

    /// Refuses problems that other kernels take.
    fn supports(&self, inputs: &Inputs) -> Result<()> {
        if inputs.op() != Op::Gdn {
            return Err(self.unsupported(format!("the operator {}: expected gdn", inputs.op())));
        }
        self.supports_shape(&inputs.shape)
    }

    /// Refuses head dimensions that there is no kernel for.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with those that there are.
    pub(crate) fn supports_shape(&self, shape: &Shape) -> Result<()> {
        for (name, dim) in [("K", shape.key_dim), ("V", shape.value_dim)] {
            if !HEAD_DIMS.contains(&dim) {
                let dims = HEAD_DIMS.map(|dim| dim.to_string()).join(", ");
                return Err(self.unsupported(format!(
                    "{name} = {dim}: expected one of {dims}; cuda-recurrent-fp32 takes every {name} up to 256"
                )));
            }
        }
        if self.fused && !Fused::takes(shape) {
            let (key_dim, value_dim) = (shape.key_dim, shape.value_dim);
            return Err(self.unsupported(format!(
                "K = {key_dim}, V = {value_dim}: expected K = 64 or 128 and V a multiple of 64; cuda-chunk-bf16 takes more"
            )));
        }
        Ok(())
    }

    fn unsupported(&self, reason: String) -> Error {
        Error::Unsupported { kernel: self.name.to_owned(), reason }
    }
}

impl Kernel for Chunk {
    fn name(&self) -> &str {
        self.name
    }

    fn summary(&self) -> String {
        format!("chunked form on a GPU: {}", self.summary)
    }

    fn needs(&self) -> &'static str {
        if self.fused { "an NVIDIA Hopper GPU (sm_90a)" } else { "an NVIDIA GPU, sm_80 or newer" }
    }

    fn on_gpu(&self) -> bool {
        true
    }

    fn has_backward(&self) -> bool {
        !self.fused
    }

    fn ops(&self) -> &'static [Op] {
        &[Op::Gdn]
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
        if self.fused {
            return Err(self.unsupported("a backward: cuda-chunk-bf16 has one".to_owned()));
        }
        self.run(inputs, true)
    }
}
