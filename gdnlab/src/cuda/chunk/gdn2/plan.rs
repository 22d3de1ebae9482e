//! A problem of GDN-2 on the GPU.

use super::config::Config;
use super::launches::{Launches, Params, start_all};
use super::params::{ChannelGateParams, Gdn2Params};
use super::setup::{Decay, Setup};
use super::workspace::Workspace;
use crate::cuda::chunk::config::Card;
use crate::cuda::chunk::params::ChunkParams;
use crate::cuda::chunk::passes::significand;
use crate::cuda::chunk::relay::{Parts, Relay, Sizes};
use crate::cuda::chunk::sweep::{HopperSweep, Pass};
use crate::cuda::chunk::table::{ChunkTable, DeviceTable, counted};
use crate::cuda::chunk::tensor::DeviceTensor;
use crate::cuda::{Buffer, Element, Event, Gpu, Stream};
use crate::precision::Format;
use crate::problem::{GateGrads, Grads, Inputs, Outputs, Results, Tensor};
use crate::{Error, Result};

/// A problem on the GPU, ready to run.
///
/// Making one compiles the kernels and allocates everything; running it starts kernels and nothing else, so both passes
/// can be recorded into a [`Graph`](crate::cuda::Graph).
///
/// Tensors have the names and shapes of tensor files: `q`, `k` `[B, T, HK, K]`, `v`, `do` `[B, T, HV, V]`, `g`, `b`
/// `[B, T, HV, K]`, `w` `[B, T, HV, V]`, `initial_state`, `dht` `[N, HV, K, V]`; results `o`, `final_state`, `dq`, `dk`, `dv`,
/// `dg`, `db`, `dw`, `dh0`. With raw gates there are `a` `[B, T, HV, K]`, `A_log` `[HV]` and `dt_bias` `[HV, K]` in place of
/// `g`, and the results `da`, `dA_log` and `ddt_bias` beside `dg`. q, k, v, do, o, dq, dk, dv are in the plan's input format,
/// b, w, db, dw in the format of its options, all else is f32.
pub struct Plan {
    gpu: &'static Gpu,
    setup: Setup,
    config: Config,
    inputs: Vec<DeviceTensor>,
    outputs: Vec<DeviceTensor>,
    workspace: Workspace,
    table: DeviceTable,
    table_bytes: usize,
    /// Sums of parts of the gradients of raw gates.
    partial: Option<Buffer<f64>>,
    launches: Launches,
    side: Side,
    /// Where the forward begins its sweep before all is prepared.
    relay: Option<Relay>,
    params: Params,
}

/// A second stream, and when its work begins and ends.
struct Side {
    stream: Stream,
    begin: Event,
    end: Event,
}

impl Plan {
    /// Compiles the kernels, or takes them from the cache, and allocates everything. Nothing is uploaded yet.
    ///
    /// # Errors
    /// [`Error::Input`] where `setup` asks for what there is no kernel for, [`Error::Gpu`] where the GPU has too little
    /// memory of some kind, or the kernels cannot be had.
    pub fn new(gpu: &'static Gpu, setup: Setup) -> Result<Self> {
        setup.validate()?;
        let variant = setup.variant();
        let work = variant.work(&setup.sequences);
        let config = Config::new(variant, setup.options.gates, setup.raw(), work, &Card::from(gpu))?;
        let table = ChunkTable::new(&setup.sequences, &variant)?;
        let hopper = HopperSweep::on(gpu, &config.sweep, Some(config.gates), &table, Pass::Kept);
        let launches = Launches::new(gpu, &config, &setup, &table, hopper.as_ref())?;
        let new =
            |(name, dims, format): (&'static str, Vec<usize>, Format)| DeviceTensor::new(gpu, name, &dims, format);
        let partial = if setup.raw() && setup.backward {
            Some(gpu.alloc(Launches::parts_of_gates(&setup) * setup.shape.value_heads * 2 * setup.shape.key_dim)?)
        } else {
            None
        };
        let parts = match &hopper {
            Some(sweep) => Parts::of_sweep(gpu, &table, sweep, 1)?,
            None => None,
        };
        let sizes = Sizes::new(&config.sweep, setup.shape.value_heads, config.coefficient_numbers(), 0);
        let relay = parts.map(|parts| Relay::new(gpu, parts, sizes, &setup.shape, &table)).transpose()?;
        let mut plan = Self {
            gpu,
            inputs: setup.input_tensors().into_iter().map(new).collect::<Result<_>>()?,
            outputs: setup.output_tensors().into_iter().map(new).collect::<Result<_>>()?,
            workspace: Workspace::new(gpu, &config, &setup, table.chunks(), table.segments())?,
            table_bytes: table.bytes(),
            table: DeviceTable::new(gpu, &table)?,
            partial,
            launches,
            side: Side { stream: gpu.new_stream()?, begin: gpu.event()?, end: gpu.event()? },
            relay,
            params: Params::default(),
            config,
            setup,
        };
        plan.params = plan.all_params(table.chunks())?;
        if let Some(sweep) = &hopper {
            plan.add_maps(sweep)?;
        }
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

    /// Bytes of memory that inputs and results take.
    pub fn tensor_bytes(&self) -> usize {
        let all = self.setup.input_tensors().into_iter().chain(self.setup.output_tensors());
        all.map(|(_, dims, format)| dims.iter().product::<usize>() * format.bytes()).sum()
    }

    /// Bytes of memory that everything else takes.
    pub fn workspace_bytes(&self) -> usize {
        let partial = self.partial.as_ref().map_or(0, Buffer::size_bytes);
        self.relay.as_ref().map_or(0, |relay| relay.bytes(&self.setup.shape))
            + self.workspace.bytes()
            + self.table_bytes
            + partial
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

    /// Copies all of `inputs` that this plan takes: not g where it makes that itself, nor what only the backward needs
    /// where there is none.
    ///
    /// # Errors
    /// [`Error::Input`] where shapes differ.
    pub fn upload_inputs(&mut self, inputs: &Inputs) -> Result<()> {
        for (name, tensor) in inputs.named() {
            if self.inputs.iter().any(|input| input.name() == name) {
                self.upload_rounded(name, &tensor.data)?;
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
        // SAFETY: every tensor has the size that shape and sequences say, and lives as long as the plan; the rest is the
        // promise of the caller.
        unsafe {
            match &self.relay {
                Some(relay) => {
                    let no_kernels = || Error::gpu("gdn2: a relay without its kernels");
                    let (kernels, Params { chunk, sweep, .. }) = (self.launches.to_relay(), self.params);
                    relay.start(stream, kernels.ok_or_else(no_kernels)?, sweep.ok_or_else(no_kernels)?, chunk)
                }
                None => start_all(stream, steps, &self.params),
            }
        }
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
        // SAFETY: as in `forward_on`.
        unsafe {
            start_all(stream, &self.launches.shared, &self.params)?;
            self.start_backward(stream, true)
        }
    }

    /// Starts the backward on `stream` after a forward of the same inputs, with what that has left: T, the scores and the
    /// decayed rows, and the states where its setup retains them ([`States`](super::States)).
    ///
    /// # Errors
    /// As [`Plan::backward`].
    ///
    /// # Safety
    /// As for [`Plan::forward_on`].
    pub unsafe fn backward_after_forward_on(&self, stream: &Stream) -> Result<()> {
        self.has_backward()?;
        // SAFETY: as in `forward_on`.
        unsafe { self.start_backward(stream, !self.setup.retains()) }
    }

    fn has_backward(&self) -> Result<()> {
        if self.setup.backward {
            return Ok(());
        }
        Err(Error::input("gdn2: this was made for the forward alone: set `backward` in its Setup"))
    }

    /// Starts what both kinds of backward have in common.
    ///
    /// # Safety
    /// As for [`Plan::forward_on`].
    unsafe fn start_backward(&self, stream: &Stream, states: bool) -> Result<()> {
        let Side { stream: side, begin, end } = &self.side;
        // SAFETY: the promise of the caller, and the two sweeps write to different memory; both have ended when the
        // gradient starts.
        unsafe {
            if states {
                begin.record(stream)?;
                side.wait(begin)?;
                start_all(side, &self.launches.states, &self.params)?;
            }
            start_all(stream, &self.launches.d_states, &self.params)?;
            if states {
                end.record(side)?;
                stream.wait(end)?;
            }
            start_all(stream, &self.launches.gradient, &self.params)
        }
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

    /// What the passes have given; gradients with `backward`.
    ///
    /// # Errors
    /// As [`Plan::download`].
    pub fn results(&self, backward: bool) -> Result<Results> {
        let outputs = Outputs { o: self.tensor_of("o")?, final_state: self.tensor_of("final_state")? };
        if !backward {
            return Ok(Results { outputs, grads: None });
        }
        let grads = Grads {
            dq: self.tensor_of("dq")?,
            dk: self.tensor_of("dk")?,
            dv: self.tensor_of("dv")?,
            dg: self.tensor_of("dg")?,
            gates: GateGrads::Gdn2 { db: self.tensor_of("db")?, dw: self.tensor_of("dw")? },
            dh0: self.tensor_of("dh0")?,
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

    fn all_params(&self, chunks: usize) -> Result<Params> {
        let Setup { shape, options, .. } = &self.setup;
        let decay = if self.setup.raw() { "a" } else { "g" };
        let lower_bound = match options.decay {
            Decay::Bounded { lower_bound } => lower_bound,
            Decay::Log | Decay::Softplus => 0.0,
        };
        let chunk = ChunkParams {
            q: self.address("q"),
            k: self.address("k"),
            v: self.address("v"),
            g: self.address(decay),
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
            dh0: self.address("dh0"),
            chunks: counted(chunks)?,
            qk_heads: counted(shape.qk_heads)?,
            value_heads: counted(shape.value_heads)?,
            heads_per_block: 1,
            scale: options.scale,
            scale_unit: significand(options.scale),
            norm_epsilon: -1.0,
            ..ChunkParams::default()
        };
        let mut params = Gdn2Params {
            chunk,
            b: self.address("b"),
            w: self.address("w"),
            db: self.address("db"),
            dw: self.address("dw"),
            lower_bound,
            ..Gdn2Params::default()
        };
        self.table.enter(&mut params.chunk);
        self.workspace.enter(&mut params, &self.config, &self.setup);
        let gates = ChannelGateParams {
            a: self.address("a"),
            a_log: self.address("A_log"),
            dt_bias: self.address("dt_bias"),
            dg: self.address("dg"),
            da: self.address("da"),
            d_a_log: self.address("dA_log"),
            d_dt_bias: self.address("ddt_bias"),
            partial: self.partial.as_ref().map_or(0, Buffer::address),
            tokens: i64::from(counted(self.setup.tokens())?),
            parts: counted(Launches::parts_of_gates(&self.setup))?,
            heads: params.chunk.value_heads,
            lower_bound,
        };
        Ok(Params { chunk: params, gates, sweep: None, backward: None })
    }

    /// The maps of what the sweeps on Hopper read.
    fn add_maps(&mut self, sweep: &HopperSweep) -> Result<()> {
        let Gdn2Params { chunk, w, write_keys, .. } = self.params.chunk;
        let (workspace, tokens) = (sweep.workspace_maps(&chunk, write_keys)?, self.setup.tokens());
        self.params.sweep = Some(sweep.maps(&workspace, tokens, chunk.v, Some(w))?);
        if self.setup.backward {
            self.params.backward = Some(sweep.backward_maps(&workspace, tokens, chunk.d_o)?);
        }
        Ok(())
    }
}

fn no_tensor<'a>(name: &str, tensors: impl Iterator<Item = &'a DeviceTensor>) -> Error {
    let names = tensors.map(DeviceTensor::name).collect::<Vec<_>>().join(", ");
    Error::input(format!("gdn2: this plan has no tensor '{name}': expected one of {names}"))
}
