//! A problem on the GPU with tensors of its own.

use super::StateLayout;
use super::config::Config;
use super::passes::{GradTensors, Passes, Tensors};
use super::setup::{Gate, Setup};
use super::tensor::DeviceTensor;
use crate::cuda::{Element, Gpu, Stream};
use crate::precision::Format;
use crate::problem::{GateGrads, Grads, Inputs, Outputs, Results, Tensor};
use crate::{Error, Result};

/// A problem on the GPU, ready to run.
///
/// Making one compiles the kernels and allocates everything; running it starts kernels and nothing else, so both passes
/// can be recorded into a [`Graph`](crate::cuda::Graph).
///
/// Tensors have the names and shapes of tensor files: `q`, `k` `[B, T, HK, K]`, `v`, `do` `[B, T, HV, V]`, `g`, `beta`
/// `[B, T, HV]`, `initial_state`, `dht` `[N, HV, K, V]`; results `o`, `final_state`, `dq`, `dk`, `dv`, `dg`, `dbeta`,
/// `dh0`. With raw gates ([`Gate::Raw`], [`Beta::Logit`](super::Beta::Logit)) there are `a` `[B, T, HV]`, `A_log`,
/// `dt_bias` `[HV]` in place of `g`, `beta_logit` `[B, T, HV]` in place of `beta`, and the results `da`, `dA_log`, `ddt_bias`
/// and `dbeta_logit` beside `dg` and `dbeta`. With [`StateLayout::ValueKey`] states are `[N, HV, V, K]`. q, k, v, do, o, dq,
/// dk, dv are in the plan's input format, all else is f32.
///
/// ```no_run
/// use gdnlab::cuda::Gpu;
/// use gdnlab::cuda::chunk::{Mode, Options, Plan, Setup};
/// use gdnlab::{precision::Format, problem::Shape};
/// use half::bf16;
///
/// # fn main() -> gdnlab::Result<()> {
/// let (tokens, heads) = (4096, 16);
/// let setup = Setup {
///     shape: Shape::new(tokens, heads, 128, 128),
///     sequences: vec![0..1000, 1000..tokens],
///     mode: Mode::F16Internals,
///     input: Format::Bf16,
///     options: Options::new(128),
///     backward: false,
/// };
/// let mut plan = Plan::new(Gpu::shared()?, setup)?;
/// for name in ["q", "k", "v"] {
///     plan.upload(name, &vec![bf16::ONE; tokens * heads * 128])?;
/// }
/// plan.upload("g", &vec![-0.1f32; tokens * heads])?;
/// plan.upload("beta", &vec![0.5f32; tokens * heads])?;
/// plan.forward()?;
/// let o: Vec<bf16> = plan.download("o")?;
/// # Ok(())
/// # }
/// ```
pub struct Plan {
    gpu: &'static Gpu,
    passes: Passes,
    inputs: Vec<DeviceTensor>,
    outputs: Vec<DeviceTensor>,
}

impl Plan {
    /// Compiles the kernels, or takes them from the cache, and allocates everything. Nothing is uploaded yet.
    ///
    /// # Errors
    /// [`Error::Input`] where `setup` asks for what there is no kernel for, [`Error::Gpu`] where the GPU has too little
    /// memory of some kind, or the kernels cannot be had.
    pub fn new(gpu: &'static Gpu, setup: Setup) -> Result<Self> {
        setup.validate()?;
        let new =
            |(name, dims, format): (&'static str, Vec<usize>, Format)| DeviceTensor::new(gpu, name, &dims, format);
        let inputs = setup.input_tensors().into_iter().map(new).collect::<Result<_>>()?;
        let outputs = setup.output_tensors().into_iter().map(new).collect::<Result<_>>()?;
        Ok(Self { gpu, inputs, outputs, passes: Passes::new(gpu, setup)? })
    }

    /// What it was made for.
    pub fn setup(&self) -> &Setup {
        self.passes.setup()
    }

    /// The specialisation that runs it.
    pub fn config(&self) -> &Config {
        self.passes.config()
    }

    /// Size of the workspace in bytes, inputs and results not counted.
    pub fn workspace_bytes(&self) -> usize {
        self.passes.workspace.bytes()
    }

    /// Copies `values` into the input `name`.
    ///
    /// # Errors
    /// [`Error::Input`] where there is no such input, `T` is not its format, or the number of elements differs.
    pub fn upload<T: Element>(&mut self, name: &str, values: &[T]) -> Result<()> {
        let gpu = self.gpu;
        self.input_mut(name)?.upload(gpu, values)
    }

    /// Copies `values` into the input `name`, rounded to its format. Values need not be finite.
    ///
    /// # Errors
    /// [`Error::Input`] where there is no such input, or the number of elements differs.
    pub fn upload_rounded(&mut self, name: &str, values: &[f64]) -> Result<()> {
        let gpu = self.gpu;
        self.input_mut(name)?.upload_rounded(gpu, values)
    }

    /// Copies all of `inputs` that this plan takes: not g and beta where it makes them itself, nor what only the backward
    /// needs where there is none.
    ///
    /// # Errors
    /// [`Error::Input`] where shapes differ.
    pub fn upload_inputs(&mut self, inputs: &Inputs) -> Result<()> {
        let transpose = self.setup().options.state_layout == StateLayout::ValueKey;
        for (name, tensor) in inputs.named() {
            if self.inputs.iter().any(|input| input.name() == name) {
                match name {
                    "initial_state" | "dht" if transpose => self.upload_rounded(name, &transposed(tensor).data)?,
                    _ => self.upload_rounded(name, &tensor.data)?,
                }
            }
        }
        Ok(())
    }

    /// Fills results and workspace with NaN, on the GPU's stream, so that what a kernel does not write is seen.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver refuses.
    pub fn fill_outputs_with_nan(&mut self) -> Result<()> {
        const NAN: u8 = 0xff;
        let gpu = self.gpu;
        self.outputs.iter_mut().try_for_each(|output| output.fill_bytes(gpu, NAN))?;
        gpu.fill_bytes(self.passes.workspace.memory_mut(), NAN)
    }

    /// Starts the forward on the GPU's stream, and does not wait for it.
    ///
    /// # Errors
    /// [`Error::Gpu`] where a launch is refused.
    pub fn forward(&self) -> Result<()> {
        // SAFETY: all buffers are freed and copied in the order of the GPU's stream, on which this runs.
        unsafe { self.forward_on(self.gpu.stream()) }
    }

    /// Starts the backward on the GPU's stream, and does not wait for it. It needs no forward before it.
    ///
    /// # Errors
    /// [`Error::Input`] where the plan was made without it, [`Error::Gpu`] where a launch is refused.
    pub fn backward(&self) -> Result<()> {
        // SAFETY: as in `forward`.
        unsafe { self.backward_on(self.gpu.stream()) }
    }

    /// Starts the forward on `stream`, such as the one of a graph that is being recorded.
    ///
    /// # Errors
    /// As [`Plan::forward`].
    ///
    /// # Safety
    /// Until the kernels have ended, or the last replay of a graph that holds them, the plan is neither dropped nor used on
    /// another stream, the GPU's own included.
    pub unsafe fn forward_on(&self, stream: &Stream) -> Result<()> {
        // SAFETY: every tensor has the size that shape and sequences say, and lives as long as the plan; the rest is the
        // promise of the caller.
        unsafe { self.passes.forward_on(stream, &self.tensors()) }
    }

    /// Starts the backward on `stream`, such as the one of a graph that is being recorded.
    ///
    /// # Errors
    /// As [`Plan::backward`].
    ///
    /// # Safety
    /// As for [`Plan::forward_on`].
    pub unsafe fn backward_on(&self, stream: &Stream) -> Result<()> {
        // SAFETY: as in `forward_on`.
        unsafe { self.passes.backward_on(stream, &self.tensors(), &self.grad_tensors()) }
    }

    /// Starts the backward on `stream` after a forward of the same inputs: T, the scores and the cumulated gates are
    /// those that the forward left, like the states between segments; only those within are computed again.
    ///
    /// # Errors
    /// As [`Plan::backward`].
    ///
    /// # Safety
    /// As for [`Plan::forward_on`].
    pub unsafe fn backward_after_forward_on(&self, stream: &Stream) -> Result<()> {
        // SAFETY: as in `forward_on`.
        unsafe { self.passes.backward_after_forward_on(stream, &self.tensors(), &self.grad_tensors()) }
    }

    /// The input or result `name` once all that was started before on the GPU's stream has ended.
    ///
    /// # Errors
    /// [`Error::Input`] where there is no such tensor or `T` is not its format, [`Error::Gpu`] where a kernel has failed.
    pub fn download<T: Element>(&self, name: &str) -> Result<Vec<T>> {
        self.gpu.download(self.tensor(name)?.buffer()?)
    }

    /// The same as float64, with its shape.
    ///
    /// # Errors
    /// As [`Plan::download`].
    pub fn tensor_of(&self, name: &str) -> Result<Tensor> {
        self.tensor(name)?.download(self.gpu)
    }

    /// What the passes have given, states as `[N, HV, K, V]` whatever the layout; gradients with `backward`.
    ///
    /// # Errors
    /// As [`Plan::download`].
    pub fn results(&self, backward: bool) -> Result<Results> {
        let state = |name: &str| {
            let state = self.tensor_of(name)?;
            Ok::<_, Error>(match self.setup().options.state_layout {
                StateLayout::KeyValue => state,
                StateLayout::ValueKey => transposed(&state),
            })
        };
        let outputs = Outputs { o: self.tensor_of("o")?, final_state: state("final_state")? };
        if !backward {
            return Ok(Results { outputs, grads: None });
        }
        let grads = Grads {
            dq: self.tensor_of("dq")?,
            dk: self.tensor_of("dk")?,
            dv: self.tensor_of("dv")?,
            dg: self.tensor_of("dg")?,
            gates: GateGrads::Gdn { dbeta: self.tensor_of("dbeta")? },
            dh0: state("dh0")?,
        };
        Ok(Results { outputs, grads: Some(grads) })
    }

    fn input_mut(&mut self, name: &str) -> Result<&mut DeviceTensor> {
        let missing = no_tensor(name, self.inputs.iter());
        self.inputs.iter_mut().find(|input| input.name() == name).ok_or(missing)
    }

    fn tensor(&self, name: &str) -> Result<&DeviceTensor> {
        let all = || self.inputs.iter().chain(&self.outputs);
        all().find(|tensor| tensor.name() == name).ok_or_else(|| no_tensor(name, all()))
    }

    /// The address of a tensor; null for one that this plan does not have.
    pub(crate) fn address(&self, name: &str) -> u64 {
        self.tensor(name).map_or(0, DeviceTensor::address)
    }

    fn tensors(&self) -> Tensors {
        let decay = if self.setup().options.gate == Gate::Raw { "a" } else { "g" };
        Tensors {
            q: self.address("q"),
            k: self.address("k"),
            v: self.address("v"),
            decay: self.address(decay),
            write: self.address(self.setup().write_tensor()),
            a_log: self.address("A_log"),
            dt_bias: self.address("dt_bias"),
            initial_state: self.address("initial_state"),
            o: self.address("o"),
            final_state: self.address("final_state"),
        }
    }

    fn grad_tensors(&self) -> GradTensors {
        GradTensors {
            d_o: self.address("do"),
            d_final_state: self.address("dht"),
            dq: self.address("dq"),
            dk: self.address("dk"),
            dv: self.address("dv"),
            dg: self.address("dg"),
            dbeta: self.address("dbeta"),
            dh0: self.address("dh0"),
            da: self.address("da"),
            d_a_log: self.address("dA_log"),
            d_dt_bias: self.address("ddt_bias"),
            d_write: self.address("dbeta_logit"),
        }
    }
}

fn no_tensor<'a>(name: &str, tensors: impl Iterator<Item = &'a DeviceTensor>) -> Error {
    let names = tensors.map(DeviceTensor::name).collect::<Vec<_>>().join(", ");
    Error::input(format!("chunk: this plan has no tensor '{name}': expected one of {names}"))
}

/// `[N, HV, R, C]` to `[N, HV, C, R]`.
fn transposed(states: &Tensor) -> Tensor {
    let [sequences, heads, rows, columns] = states.dims[..] else { return states.clone() };
    let state = |data: &[f64]| (0..rows * columns).map(|at| data[at % rows * columns + at / rows]).collect::<Vec<_>>();
    Tensor {
        dims: vec![sequences, heads, columns, rows],
        data: states.data.chunks_exact(rows * columns).flat_map(state).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_turned_around_head_by_head() {
        let states = Tensor::new(&[1, 2, 2, 3], (0..12).map(f64::from).collect()).unwrap();
        let turned = transposed(&states);
        assert_eq!(turned.dims, [1, 2, 3, 2]);
        assert_eq!(turned.data, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0, 6.0, 9.0, 7.0, 10.0, 8.0, 11.0]);
        assert_eq!(transposed(&turned), states);
    }
}
