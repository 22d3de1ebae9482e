//! Both passes of a problem at the caller's addresses: the workspace, and the launches.

use super::StateLayout;
use super::backward::BackwardMaps;
use super::config::{COEFFICIENTS, Card, Config, Work};
use super::fused::Fused;
use super::gradient::{GradientMaps, HopperGradient};
use super::launches::{AllParams, Launches, start_all};
use super::params::{ChunkParams, GateParams};
use super::relay::{Parts, Relay, Sizes};
use super::setup::{Beta, Gate, Options, Setup};
use super::sweep::{HopperSweep, Pass, SweepMaps, WorkspaceMaps};
use super::table::{ChunkTable, DeviceTable, counted};
use super::workspace::{Extent, Workspace};
use crate::cuda::{Buffer, Event, Gpu, Stream};
use crate::{Error, Result};

/// What addresses of tensors are a multiple of, in bytes.
const ALIGNMENT_BYTES: u64 = 16;

/// What a forward reads and writes: addresses on the GPU. Names, shapes and formats are those of
/// [`Plan`](super::Plan); every tensor is dense.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tensors {
    /// `[B, T, HK, K]`.
    pub q: u64,
    /// `[B, T, HK, K]`.
    pub k: u64,
    /// `[B, T, HV, V]`.
    pub v: u64,
    /// `g`, or `a` with raw gates: `[B, T, HV]` in f32.
    pub decay: u64,
    /// `beta`, or `beta_logit` where it is made of that: `[B, T, HV]` in f32.
    pub write: u64,
    /// `[HV]` in f32, with raw gates and only then.
    pub a_log: u64,
    /// `[HV]` in f32, with raw gates and only then.
    pub dt_bias: u64,
    /// `[N, HV, K, V]` in f32, where the setup has it and only then.
    pub initial_state: u64,
    /// `[B, T, HV, V]`: written. A backward does not touch it.
    pub o: u64,
    /// `[N, HV, K, V]` in f32: written. 0 where it is not wanted; a backward does not touch it.
    pub final_state: u64,
}

/// What a backward reads and writes beside the [`Tensors`] of its forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GradTensors {
    /// Gradient of o, `[B, T, HV, V]`.
    pub d_o: u64,
    /// Gradient of the final state, where the setup has it and only then.
    pub d_final_state: u64,
    /// `[B, T, HK, K]`: written.
    pub dq: u64,
    /// `[B, T, HK, K]`: written.
    pub dk: u64,
    /// `[B, T, HV, V]`: written.
    pub dv: u64,
    /// `[B, T, HV]` in f32: written, with raw gates too.
    pub dg: u64,
    /// `[B, T, HV]` in f32: written, with logits too.
    pub dbeta: u64,
    /// `[N, HV, K, V]` in f32: written. 0 where it is not wanted.
    pub dh0: u64,
    /// `[B, T, HV]` in f32: written, with raw gates and only then; likewise the next two.
    pub da: u64,
    /// `[HV]` in f32: written.
    pub d_a_log: u64,
    /// `[HV]` in f32: written.
    pub d_dt_bias: u64,
    /// `[B, T, HV]` in f32: written, where beta is made of a logit and only then.
    pub d_write: u64,
}

/// The passes of one problem, at any addresses: kernels and a workspace, but no tensors. Layers of one shape that run one
/// after the other share it, since a backward prepares its workspace by itself.
///
/// [`Plan`](super::Plan) is the same with tensors of its own.
pub struct Passes {
    setup: Setup,
    config: Config,
    pub(super) workspace: Workspace,
    table: DeviceTable,
    /// Sums of parts of the gradients of raw gates.
    partial: Option<Buffer<f64>>,
    launches: Launches,
    /// Where the forward is one sweep.
    fused: Option<Fused>,
    /// Where the sweeps are those for Hopper.
    hopper: Option<(HopperSweep, WorkspaceMaps)>,
    /// Those over the ends of segments.
    ends: Option<HopperSweep>,
    side: Side,
    /// Where the forward begins its sweep before all is prepared.
    relay: Option<Relay>,
    /// All but the tensors.
    params: ChunkParams,
}

/// A second stream, and when its work begins and ends.
struct Side {
    stream: Stream,
    begin: Event,
    end: Event,
}

impl Passes {
    /// Compiles the kernels, or takes them from the cache, and allocates the workspace.
    ///
    /// # Errors
    /// [`Error::Input`] where `setup` asks for what there is no kernel for, [`Error::Gpu`] where the GPU has too little
    /// memory of some kind, or the kernels cannot be had.
    pub fn new(gpu: &Gpu, setup: Setup) -> Result<Self> {
        setup.validate()?;
        if setup.options.fused {
            Fused::check(gpu)?;
        }
        let card = Card::from(gpu);
        let (config, table) = specialise(&setup, &card)?;
        let fused = setup.options.fused.then(|| Fused::new(&setup, table.segments(), config.cut, &card));
        let hopper = sweep_on(gpu, &setup, &config, &table, Pass::of(&setup));
        let ends = if config.cut { sweep_on(gpu, &setup, &config, &table, Pass::Ends) } else { None };
        let launches = match &fused {
            Some(fused) => Launches::fused(gpu, &config, &setup, &table, fused)?,
            None => Launches::new(gpu, &config, &setup, &table, hopper.as_ref(), ends.as_ref())?,
        };
        let workspace = Workspace::new(gpu, &config, &setup.shape, extent(&setup, &table))?;
        let parts = parts_of(gpu, &setup, &table, hopper.as_ref())?;
        let sizes = Sizes::new(&config, setup.shape.qk_heads, COEFFICIENTS * config.chunk, 2 * config.chunk);
        let relay = parts.map(|parts| Relay::new(gpu, parts, sizes, &setup.shape, &table)).transpose()?;
        let partial = partial_elements(&setup);
        let mut passes = Self {
            config,
            workspace,
            partial: if partial > 0 { Some(gpu.alloc(partial)?) } else { None },
            table: DeviceTable::new(gpu, &table)?,
            launches,
            fused,
            hopper: None,
            ends,
            side: Side { stream: gpu.new_stream()?, begin: gpu.event()?, end: gpu.event()? },
            relay,
            params: ChunkParams::default(),
            setup,
        };
        passes.params = passes.fixed_params(table.chunks())?;
        if let Some(sweep) = hopper {
            passes.hopper = Some((sweep, sweep.workspace_maps(&passes.params, passes.params.keys)?));
        }
        // What was allocated on the GPU's stream may be used on another one from now on.
        gpu.synchronize()?;
        Ok(passes)
    }

    /// Bytes of memory that [`Passes::new`] would take for `setup` on `gpu`.
    ///
    /// # Errors
    /// As [`Passes::new`], but for memory.
    pub fn bytes(gpu: &Gpu, setup: &Setup) -> Result<usize> {
        setup.validate()?;
        let (config, table) = specialise(setup, &Card::from(gpu))?;
        let workspace = Workspace::bytes_for(&config, &setup.shape, extent(setup, &table))?;
        let sweep = sweep_on(gpu, setup, &config, &table, Pass::of(setup));
        let relay = parts_of(gpu, setup, &table, sweep.as_ref())?.map_or(0, |parts| parts.bytes(&setup.shape));
        Ok(workspace + partial_elements(setup) * size_of::<f64>() + table.bytes() + relay)
    }

    /// What it was made for.
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// The specialisation that runs it.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Starts the forward on `stream`, such as the one of a graph that is being recorded.
    ///
    /// # Errors
    /// [`Error::Input`] where an address is missing, not wanted, or no multiple of 16; [`Error::Gpu`] where a launch is
    /// refused.
    ///
    /// # Safety
    /// Every address is that of memory of this GPU which is as large as its tensor. Until the kernels have ended, or the last
    /// replay of a graph that holds them, neither it nor this is freed or used on another stream; and what is written
    /// overlaps nothing else.
    pub unsafe fn forward_on(&self, stream: &Stream, tensors: &Tensors) -> Result<()> {
        let params = self.forward_params(tensors)?;
        if let (Some(relay), Some(kernels), Some(maps)) = (&self.relay, self.launches.to_relay(), params.sweep) {
            // SAFETY: the promise of the caller.
            return unsafe { relay.start(stream, kernels, maps, params.chunk) };
        }
        let steps = self.launches.shared.iter().chain(&self.launches.forward);
        // SAFETY: the promise of the caller.
        unsafe { start_all(stream, steps, &params) }
    }

    /// Starts the backward on `stream`, such as the one of a graph that is being recorded. It needs no forward before it.
    ///
    /// # Errors
    /// As [`Passes::forward_on`], and [`Error::Input`] where this was made for the forward alone.
    ///
    /// # Safety
    /// As for [`Passes::forward_on`].
    pub unsafe fn backward_on(&self, stream: &Stream, tensors: &Tensors, grads: &GradTensors) -> Result<()> {
        let params = self.backward_params(tensors, grads)?;
        // SAFETY: the promise of the caller.
        unsafe {
            start_all(stream, &self.launches.shared, &params)?;
            self.start_backward(stream, &params)
        }
    }

    /// Starts the backward on `stream` after a forward at the same addresses: T, the scores and the cumulated gates are
    /// those that the forward left, like the states between segments; only those within are computed again.
    ///
    /// # Errors
    /// As [`Passes::backward_on`].
    ///
    /// # Safety
    /// As for [`Passes::forward_on`].
    pub unsafe fn backward_after_forward_on(
        &self,
        stream: &Stream,
        tensors: &Tensors,
        grads: &GradTensors,
    ) -> Result<()> {
        let params = self.backward_params(tensors, grads)?;
        // SAFETY: the promise of the caller.
        unsafe { self.start_backward(stream, &params) }
    }

    /// Starts what both kinds of backward have in common.
    ///
    /// # Safety
    /// As for [`Passes::forward_on`].
    unsafe fn start_backward(&self, stream: &Stream, params: &AllParams) -> Result<()> {
        let Side { stream: side, begin, end } = &self.side;
        begin.record(stream)?;
        side.wait(begin)?;
        // SAFETY: the promise of the caller, and the two sweeps write to different memory; both have ended when the
        // gradient starts.
        unsafe {
            start_all(side, &self.launches.states, params)?;
            start_all(stream, &self.launches.d_states, params)?;
            end.record(side)?;
            stream.wait(end)?;
            start_all(stream, &self.launches.gradient, params)
        }
    }

    fn forward_params(&self, tensors: &Tensors) -> Result<AllParams> {
        self.check(tensors)?;
        require("o", tensors.o, true)?;
        let fused = self.fused.map(|fused| fused.maps(&self.setup, tensors)).transpose()?;
        let (chunk, gates) = (self.with_tensors(tensors), GateParams::default());
        let [sweep, ends] = self.sweep_maps(tensors)?;
        Ok(AllParams { chunk, gates, fused, sweep, ends, backward: None, gradient: None })
    }

    fn backward_params(&self, tensors: &Tensors, grads: &GradTensors) -> Result<AllParams> {
        let Options { gate, beta, d_final_state, .. } = self.setup.options;
        if !self.setup.backward {
            return Err(Error::input("chunk: this was made for the forward alone: set `backward` in its Setup"));
        }
        self.check(tensors)?;
        let GradTensors { d_o, dq, dk, dv, dg, dbeta, .. } = *grads;
        for (name, address) in [("do", d_o), ("dq", dq), ("dk", dk), ("dv", dv), ("dg", dg), ("dbeta", dbeta)] {
            require(name, address, true)?;
        }
        require("dht", grads.d_final_state, d_final_state)?;
        let raw = gate == Gate::Raw;
        for (name, address) in [("da", grads.da), ("dA_log", grads.d_a_log), ("ddt_bias", grads.d_dt_bias)] {
            require(name, address, raw)?;
        }
        require("dbeta_logit", grads.d_write, beta != Beta::Value)?;
        let chunk = ChunkParams {
            d_o,
            d_final_state: grads.d_final_state,
            dq,
            dk,
            dv,
            dg,
            dbeta,
            dh0: grads.dh0,
            ..self.with_tensors(tensors)
        };
        let gates = self.gate_params(tensors, grads)?;
        let ([sweep, ends], backward, gradient) =
            (self.sweep_maps(tensors)?, self.backward_maps(d_o)?, self.gradient_maps(&chunk)?);
        Ok(AllParams { chunk, gates, fused: None, sweep, ends, backward, gradient })
    }

    /// Those of the sweeps over the forward's chunks, and over the ends of segments.
    fn sweep_maps(&self, tensors: &Tensors) -> Result<[Option<SweepMaps>; 2]> {
        let Some((sweep, workspace)) = &self.hopper else { return Ok([None; 2]) };
        let maps = |sweep: &HopperSweep| sweep.maps(workspace, self.setup.tokens(), tensors.v, None);
        Ok([Some(maps(sweep)?), self.ends.as_ref().map(maps).transpose()?])
    }

    fn backward_maps(&self, d_o: u64) -> Result<Option<BackwardMaps>> {
        let maps = |(sweep, workspace): &(HopperSweep, WorkspaceMaps)| {
            sweep.backward_maps(workspace, self.setup.tokens(), d_o)
        };
        self.hopper.as_ref().map(maps).transpose()
    }

    fn gradient_maps(&self, params: &ChunkParams) -> Result<Option<GradientMaps>> {
        let kernels = self.hopper.as_ref().zip(HopperGradient::of(&self.config));
        let maps = |((_, workspace), gradient): (&(HopperSweep, WorkspaceMaps), HopperGradient)| {
            gradient.maps(workspace, self.setup.tokens(), params)
        };
        kernels.map(maps).transpose()
    }

    /// Refuses addresses that do not go with the options.
    fn check(&self, tensors: &Tensors) -> Result<()> {
        let Options { gate, initial_state, .. } = self.setup.options;
        let Tensors { q, k, v, decay, write, .. } = *tensors;
        for (name, address) in [("q", q), ("k", k), ("v", v), ("g or a", decay), ("beta or its logit", write)] {
            require(name, address, true)?;
        }
        require("A_log", tensors.a_log, gate == Gate::Raw)?;
        require("dt_bias", tensors.dt_bias, gate == Gate::Raw)?;
        require("initial_state", tensors.initial_state, initial_state)
    }

    fn with_tensors(&self, tensors: &Tensors) -> ChunkParams {
        let Tensors { q, k, v, decay, write, a_log, dt_bias, initial_state, o, final_state } = *tensors;
        ChunkParams { q, k, v, g: decay, beta: write, a_log, dt_bias, initial_state, o, final_state, ..self.params }
    }

    fn fixed_params(&self, chunks: usize) -> Result<ChunkParams> {
        let Setup { shape, options, .. } = &self.setup;
        let Options { scale, qk_l2norm, beta, state_layout, .. } = *options;
        let mut params = ChunkParams {
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

    fn gate_params(&self, tensors: &Tensors, grads: &GradTensors) -> Result<GateParams> {
        let Options { gate, beta, .. } = self.setup.options;
        Ok(GateParams {
            a: if gate == Gate::Raw { tensors.decay } else { 0 },
            a_log: tensors.a_log,
            dt_bias: tensors.dt_bias,
            logit: if beta == Beta::Value { 0 } else { tensors.write },
            dg: grads.dg,
            dbeta: grads.dbeta,
            da: grads.da,
            d_a_log: grads.d_a_log,
            d_dt_bias: grads.d_dt_bias,
            d_logit: grads.d_write,
            partial: self.partial.as_ref().map_or(0, Buffer::address),
            tokens: i64::from(counted(self.setup.tokens())?),
            parts: counted(self.launches.gate_parts)?,
            heads: self.params.value_heads,
            beta_scale: self.params.beta_scale,
        })
    }
}

/// The specialisation that runs `setup`, and where its chunks lie.
fn specialise(setup: &Setup, card: &Card) -> Result<(Config, ChunkTable)> {
    let variant = setup.variant();
    if !setup.options.fused {
        return Ok((Config::new(variant, setup.work(), card)?, ChunkTable::new(&setup.sequences, &variant)?));
    }
    let table = ChunkTable::cut(&setup.sequences, variant.chunk(), |chunks| Fused::segments(&variant, chunks))?;
    let work = Work { heads: table.segments() * variant.value_heads, cut: table.is_cut() };
    Ok((Config::new(variant, work, card)?, table))
}

/// The sweep for Hopper, where it is that.
fn sweep_on(gpu: &Gpu, setup: &Setup, config: &Config, table: &ChunkTable, of: Pass) -> Option<HopperSweep> {
    if setup.options.fused { None } else { HopperSweep::on(gpu, config, None, table, of) }
}

/// How sequences are taken apart, where the sweep begins before all is prepared.
fn parts_of(gpu: &Gpu, setup: &Setup, table: &ChunkTable, sweep: Option<&HopperSweep>) -> Result<Option<Parts>> {
    match sweep {
        Some(sweep) => Parts::of_sweep(gpu, table, sweep, setup.shape.group()),
        None => Ok(None),
    }
}

/// What the workspace has to hold: a fused forward keeps nothing of a chunk.
fn extent(setup: &Setup, table: &ChunkTable) -> Extent {
    let chunks = if setup.options.fused { 0 } else { table.chunks() };
    Extent { chunks, segments: table.segments(), backward: setup.backward }
}

/// Numbers that the gradients of raw gates are summed in: two for each part of the tokens and each value head.
fn partial_elements(setup: &Setup) -> usize {
    let wanted = setup.options.gate == Gate::Raw && setup.backward;
    if wanted { Launches::parts_of_gates(setup) * 2 * setup.shape.value_heads } else { 0 }
}

/// Refuses an address that is missing where one is wanted, given where none is, or out of line.
fn require(name: &str, address: u64, wanted: bool) -> Result<()> {
    if wanted && address != 0 && address.is_multiple_of(ALIGNMENT_BYTES) || !wanted && address == 0 {
        return Ok(());
    }
    let expected = if wanted { "a multiple of 16 above 0" } else { "0, since the setup has no such tensor" };
    Err(Error::input(format!("chunk: {name} at the address {address:#x}: expected {expected}")))
}

/// The significand of a number, from 1 to 2; 1 where it has none.
pub(super) fn significand(x: f32) -> f32 {
    if x.is_normal() { f32::from_bits(x.to_bits() & 0x007f_ffff | 1f32.to_bits()) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_its_significand_times_a_power_of_two() {
        assert_eq!([0.0, 1.0, -0.25, 3.0, 0.7, 1e-42].map(significand), [1.0, 1.0, 1.0, 1.5, 1.4, 1.0]);
    }

    #[test]
    fn addresses_go_with_the_options() {
        assert!(require("q", 32, true).is_ok() && require("A_log", 0, false).is_ok());
        let refused = |address, wanted| require("q", address, wanted).unwrap_err().to_string();
        assert!(refused(0, true).contains("q at the address 0x0: expected a multiple of 16"));
        assert!(refused(40, true).contains("0x28"));
        assert!(refused(32, false).contains("the setup has no such tensor"));
    }
}
