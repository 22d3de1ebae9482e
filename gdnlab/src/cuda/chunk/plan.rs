//! A problem on the GPU: its tensors, its workspace, and the launches of both passes.

use super::StateLayout;
use super::config::{Card, Config};
use super::launches::{Launches, Step};
use super::params::{ChunkParams, GateParams};
use super::setup::{Beta, Gate, Options, Setup};
use super::table::{ChunkTable, DeviceTable, counted};
use super::tensor::DeviceTensor;
use super::workspace::{Extent, Workspace};
use crate::cuda::{Buffer, Element, Event, Gpu, Grid, Stream};
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
/// `dh0`. With raw gates ([`Gate::Raw`], [`Beta::Logit`]) there are `a` `[B, T, HV]`, `A_log`, `dt_bias` `[HV]` in place of
/// `g`, `beta_logit` `[B, T, HV]` in place of `beta`, and the results `da`, `dA_log`, `ddt_bias` and `dbeta_logit` beside `dg`
/// and `dbeta`. With [`StateLayout::ValueKey`] states are `[N, HV, V, K]`. q, k, v, do, o, dq, dk, dv are in the plan's
/// input format, all else is f32.
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
    setup: Setup,
    config: Config,
    inputs: Vec<DeviceTensor>,
    outputs: Vec<DeviceTensor>,
    workspace: Workspace,
    table: DeviceTable,
    /// Sums of parts of the gradients of raw gates.
    partial: Option<Buffer<f64>>,
    launches: Launches,
    side: Side,
    params: ChunkParams,
    gate_params: GateParams,
}

impl Plan {
    /// Compiles the kernels, or takes them from the cache, and allocates everything. Nothing is uploaded yet.
    ///
    /// # Errors
    /// [`Error::Input`] where `setup` asks for what there is no kernel for, [`Error::Gpu`] where the GPU has too little
    /// memory of some kind, or the kernels cannot be had.
    pub fn new(gpu: &'static Gpu, setup: Setup) -> Result<Self> {
        setup.validate()?;
        let config = Config::new(setup.variant(), setup.work(), &Card::from(gpu))?;
        let table = ChunkTable::new(&setup.sequences, &config.variant)?;
        let launches = Launches::new(gpu, &config, &setup, &table)?;
        let new =
            |(name, dims, format): (&'static str, Vec<usize>, Format)| DeviceTensor::new(gpu, name, &dims, format);
        let shape = setup.shape;
        let extent = Extent { chunks: table.chunks(), segments: table.segments(), backward: setup.backward };
        let partial = setup.options.gate == Gate::Raw && setup.backward;
        let mut plan = Self {
            gpu,
            config,
            inputs: setup.input_tensors().into_iter().map(new).collect::<Result<_>>()?,
            outputs: setup.output_tensors().into_iter().map(new).collect::<Result<_>>()?,
            workspace: Workspace::new(gpu, &config, &shape, extent)?,
            partial: if partial { Some(gpu.alloc(launches.gate_parts * 2 * shape.value_heads)?) } else { None },
            table: DeviceTable::new(gpu, &table)?,
            launches,
            side: Side { stream: gpu.new_stream()?, begin: gpu.event()?, end: gpu.event()? },
            params: ChunkParams::default(),
            gate_params: GateParams::default(),
            setup,
        };
        plan.params = plan.chunk_params(table.chunks())?;
        plan.gate_params = plan.gate_params()?;
        // What was allocated on the GPU's stream may be used on another one from now on.
        gpu.synchronize()?;
        Ok(plan)
    }

    /// What it was made for.
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// The specialisation that runs it.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Size of the workspace in bytes, inputs and results not counted.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.bytes()
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
        let transpose = self.setup.options.state_layout == StateLayout::ValueKey;
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
        gpu.fill_bytes(self.workspace.memory_mut(), NAN)
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
        let steps = self.launches.shared.iter().chain(&self.launches.forward);
        // SAFETY: the promise of the caller.
        unsafe { self.start_all(stream, steps) }
    }

    /// Starts the backward on `stream`, such as the one of a graph that is being recorded.
    ///
    /// # Errors
    /// As [`Plan::backward`].
    ///
    /// # Safety
    /// As for [`Plan::forward_on`].
    pub unsafe fn backward_on(&self, stream: &Stream) -> Result<()> {
        self.has_backward()?;
        // SAFETY: the promise of the caller.
        unsafe {
            self.start_all(stream, &self.launches.shared)?;
            self.backward_after_forward_on(stream)
        }
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
        self.has_backward()?;
        let Side { stream: side, begin, end } = &self.side;
        begin.record(stream)?;
        side.wait(begin)?;
        // SAFETY: the promise of the caller, and the two sweeps write to different memory; both have ended when the
        // gradient starts.
        unsafe {
            self.start_all(side, &self.launches.states)?;
            self.start_all(stream, &self.launches.d_states)?;
            end.record(side)?;
            stream.wait(end)?;
            self.start_all(stream, &self.launches.gradient)
        }
    }

    fn has_backward(&self) -> Result<()> {
        if self.setup.backward {
            return Ok(());
        }
        Err(Error::input("chunk: this plan was made for the forward alone: set `backward` in its Setup"))
    }

    /// Starts kernels one after the other. All wait by themselves for what is before them, so all but the first may be
    /// launched early.
    ///
    /// # Safety
    /// As for [`Plan::forward_on`].
    unsafe fn start_all<'a>(&self, stream: &Stream, steps: impl IntoIterator<Item = &'a Step>) -> Result<()> {
        for (number, step) in steps.into_iter().enumerate() {
            let early = number > 0;
            match step {
                // SAFETY: every tensor has the size that shape and chunk table say, the workspace was cut for this
                // specialisation, and all of it lives as long as the plan; the rest is the promise of the caller.
                Step::Chunk(kernel, grid) => unsafe { kernel.launch(stream, Grid { early, ..*grid }, &self.params)? },
                // SAFETY: as above.
                Step::Gates(kernel, grid) => unsafe { kernel.launch(stream, *grid, &self.gate_params)? },
            }
        }
        Ok(())
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
            Ok::<_, Error>(match self.setup.options.state_layout {
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
    fn address(&self, name: &str) -> u64 {
        self.tensor(name).map_or(0, DeviceTensor::address)
    }

    fn chunk_params(&self, chunks: usize) -> Result<ChunkParams> {
        let Setup { shape, options, .. } = &self.setup;
        let Options { scale, qk_l2norm, gate, beta, state_layout, .. } = *options;
        let (decay, write) = (if gate == Gate::Raw { "a" } else { "g" }, self.setup.write_tensor());
        let mut params = ChunkParams {
            q: self.address("q"),
            k: self.address("k"),
            v: self.address("v"),
            g: self.address(decay),
            beta: self.address(write),
            a_log: self.address("A_log"),
            dt_bias: self.address("dt_bias"),
            initial_state: self.address("initial_state"),
            d_o: self.address("do"),
            d_final_state: self.address("dht"),
            o: self.address("o"),
            final_state: self.address("final_state"),
            dq: self.address("dq"),
            dk: self.address("dk"),
            dv: self.address("dv"),
            dg: self.address("dg"),
            dbeta: self.address("dbeta"),
            dh0: self.address("dh0"),
            chunks: counted(chunks)?,
            qk_heads: counted(shape.qk_heads)?,
            value_heads: counted(shape.value_heads)?,
            heads_per_block: counted(self.launches.heads_per_block)?,
            scale,
            scale_unit: significand(scale),
            norm_epsilon: qk_l2norm.unwrap_or(-1.0),
            beta_scale: match beta {
                Beta::Value => 0.0,
                Beta::Logit { scale } => scale,
            },
            state_transposed: i32::from(state_layout == StateLayout::ValueKey),
            ..ChunkParams::default()
        };
        self.table.enter(&mut params);
        self.workspace.enter(&mut params);
        Ok(params)
    }

    fn gate_params(&self) -> Result<GateParams> {
        Ok(GateParams {
            a: self.address("a"),
            a_log: self.address("A_log"),
            dt_bias: self.address("dt_bias"),
            logit: self.address("beta_logit"),
            dg: self.address("dg"),
            dbeta: self.address("dbeta"),
            da: self.address("da"),
            d_a_log: self.address("dA_log"),
            d_dt_bias: self.address("ddt_bias"),
            d_logit: self.address("dbeta_logit"),
            partial: self.partial.as_ref().map_or(0, Buffer::address),
            tokens: i64::from(counted(self.setup.tokens())?),
            parts: counted(self.launches.gate_parts)?,
            heads: self.params.value_heads,
            beta_scale: self.params.beta_scale,
        })
    }
}

/// A second stream, and when its work begins and ends.
struct Side {
    stream: Stream,
    begin: Event,
    end: Event,
}

fn no_tensor<'a>(name: &str, tensors: impl Iterator<Item = &'a DeviceTensor>) -> Error {
    let names = tensors.map(DeviceTensor::name).collect::<Vec<_>>().join(", ");
    Error::input(format!("chunk: this plan has no tensor '{name}': expected one of {names}"))
}

/// The significand of a number, from 1 to 2; 1 where it has none.
fn significand(x: f32) -> f32 {
    if x.is_normal() { f32::from_bits(x.to_bits() & 0x007f_ffff | 1f32.to_bits()) } else { 1.0 }
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
    fn a_number_is_its_significand_times_a_power_of_two() {
        assert_eq!(
            [0.0, 1.0, -0.25, 3.0, 0.088_388_346, 1e-42].map(significand),
            [1.0, 1.0, 1.0, 1.5, 1.414_213_5, 1.0]
        );
    }

    #[test]
    fn states_are_turned_around_head_by_head() {
        let states = Tensor::new(&[1, 2, 2, 3], (0..12).map(f64::from).collect()).unwrap();
        let turned = transposed(&states);
        assert_eq!(turned.dims, [1, 2, 3, 2]);
        assert_eq!(turned.data, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0, 6.0, 9.0, 7.0, 10.0, 8.0, 11.0]);
        assert_eq!(transposed(&turned), states);
    }
}
