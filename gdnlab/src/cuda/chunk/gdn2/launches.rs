//! The launches of both passes.

use super::config::{Config, Tiles};
use super::params::{ChannelGateParams, Gdn2Params};
use super::setup::Setup;
use crate::cuda::chunk::backward::{BackwardMaps, BackwardParams};
use crate::cuda::chunk::config::{Card, Config as Sweep};
use crate::cuda::chunk::launches::{JOIN_THREADS, grid, in_pairs};
use crate::cuda::chunk::relay::Kernels;
use crate::cuda::chunk::sweep::{HopperSweep, SweepMaps, SweepParams};
use crate::cuda::chunk::table::ChunkTable;
use crate::cuda::{Function, Gpu, Grid, Stream};
use crate::{Error, Result};

/// Tokens that a block of `gdn2_gate_gradients` takes (`PART`).
const GATE_PART: usize = 64;

/// A kernel with the shape of its launch, by the structure that it takes.
pub(super) enum Step {
    /// `ChunkParams` with `CHANNELS`.
    Chunk(Function, Grid),
    /// `SweepParams` of that.
    Sweep(Function, Grid),
    /// `BackwardParams` of that.
    Backward(Function, Grid),
    /// `ChannelGateParams`.
    Gates(Function, Grid),
}

/// The parameters of all kinds of kernels.
#[derive(Clone, Copy, Default)]
pub(super) struct Params {
    pub chunk: Gdn2Params,
    pub gates: ChannelGateParams,
    /// For sweeps on Hopper.
    pub sweep: Option<SweepMaps>,
    pub backward: Option<BackwardMaps>,
}

/// Starts kernels one after the other. Those of the chunk form wait by themselves for what is before them, so all but the
/// first may be launched early.
///
/// # Safety
/// As for [`Plan::forward_on`](super::Plan::forward_on).
pub(super) unsafe fn start_all<'a>(
    stream: &Stream,
    steps: impl IntoIterator<Item = &'a Step>,
    params: &Params,
) -> Result<()> {
    let Params { chunk, gates, sweep, backward } = *params;
    let no_maps = || Error::gpu("gdn2: a sweep for Hopper without maps of its tensors");
    for (number, step) in steps.into_iter().enumerate() {
        let early = number > 0;
        match step {
            // SAFETY: the workspace was cut for this specialisation, and lives as long as the plan; the rest is the
            // promise of the caller.
            Step::Chunk(kernel, grid) => unsafe { kernel.launch(stream, Grid { early, ..*grid }, &chunk)? },
            Step::Sweep(kernel, grid) => {
                let sweep = SweepParams::of_all(sweep.ok_or_else(no_maps)?, chunk);
                // SAFETY: as above.
                unsafe { kernel.launch(stream, Grid { early, ..*grid }, &sweep)? }
            }
            Step::Backward(kernel, grid) => {
                let backward = BackwardParams { maps: backward.ok_or_else(no_maps)?, chunk };
                // SAFETY: as above.
                unsafe { kernel.launch(stream, Grid { early, ..*grid }, &backward)? }
            }
            // SAFETY: as above.
            Step::Gates(kernel, grid) => unsafe { kernel.launch(stream, *grid, &gates)? },
        }
    }
    Ok(())
}

/// What each pass starts, in this order.
pub(super) struct Launches {
    /// First in both passes; a backward after a forward finds their results.
    pub shared: Vec<Step>,
    pub forward: Vec<Step>,
    /// None of these three where no backward is wanted. The states and their gradients are computed side by side.
    pub states: Vec<Step>,
    pub d_states: Vec<Step>,
    /// Of both.
    pub gradient: Vec<Step>,
}

impl Launches {
    /// The kernels of a forward on Hopper, where it is a preparation and one sweep.
    pub fn to_relay(&self) -> Option<Kernels<'_>> {
        match (&self.shared[..], &self.forward[..]) {
            ([Step::Chunk(prepare, of_chunk)], [Step::Sweep(sweep, of_all)]) => {
                Some(Kernels { prepare: (prepare, of_chunk), sweep: (sweep, of_all) })
            }
            _ => None,
        }
    }

    /// Compiles the kernels of the passes that `setup` asks for; with `hopper`, the sweeps are those.
    pub fn new(
        gpu: &Gpu,
        config: &Config,
        setup: &Setup,
        table: &ChunkTable,
        hopper: Option<&HopperSweep>,
    ) -> Result<Self> {
        let (shape, chunks, sweep) = (&setup.shape, table.chunks(), &config.sweep);
        let heads = shape.value_heads;
        let of_chunk = [chunks, heads, 1];
        let grid_of = |columns, sweep: &Sweep, tiles| {
            let blocks = [sweep.blocks_of(columns), heads, table.segments()];
            grid(blocks, sweep.sweep_threads(), config.sweep_bytes(sweep, tiles))
        };
        let join = grid([sweep.join_blocks(), heads, setup.sequences.len()], JOIN_THREADS, 0)?;
        let prepare = grid(of_chunk, config.prepare_threads(), config.prepare_bytes(config.pass))?;
        let preparation = gpu.module(&config.prepare()?)?;
        let of_forward = |name, columns, sweep: &Sweep, tiles| {
            let build = hopper.map_or_else(|| config.forward(sweep), HopperSweep::build)?;
            let kernel = gpu.module(&build)?.function(name)?;
            Ok::<_, Error>(match hopper {
                Some(hopper) => Step::Sweep(kernel, in_pairs(hopper.grid(table.segments(), columns, true)?)),
                None => Step::Chunk(kernel, grid_of(columns, sweep, tiles)?),
            })
        };
        let joining = if sweep.cut { Some(gpu.module(&config.join()?)?) } else { None };

        let mut shared = vec![Step::Chunk(preparation.function("gdn2_prepare")?, prepare)];
        if let Some(joining) = &joining {
            let columns = shape.value_dim + shape.key_dim;
            shared.push(of_forward("chunk_segment_ends", columns, sweep, Tiles::States)?);
            shared.push(Step::Chunk(joining.function("chunk_join_states")?, join));
        }
        let pass = if setup.retains() { "chunk_retain" } else { "chunk_forward" };
        let mut launches = Self {
            shared,
            forward: vec![of_forward(pass, shape.value_dim, sweep, Tiles::Forward)?],
            states: Vec::new(),
            d_states: Vec::new(),
            gradient: Vec::new(),
        };
        if setup.backward {
            let tile = config.gradient(&Card::from(gpu))?;
            let back = if setup.retains() { &config.d_states_alone } else { &config.d_states };
            launches.states.push(of_forward("chunk_states", shape.value_dim, &config.states, Tiles::States)?);
            let backward = gpu.module(&hopper.map_or_else(|| config.backward(back), HopperSweep::backward_build)?)?;
            let of_back = |name| {
                let kernel = backward.function(name)?;
                Ok::<_, Error>(match hopper {
                    Some(hopper) => Step::Backward(kernel, in_pairs(hopper.backward_grid(table.segments())?)),
                    None => Step::Chunk(kernel, grid_of(shape.value_dim, back, Tiles::Backward)?),
                })
            };
            let gradient = gpu.module(&config.gradient_build(&tile)?)?.function("gdn2_gradient")?;
            let of_gradient = [chunks * config.gradient_blocks(&tile), heads, 1];
            let of_gradient = grid(of_gradient, config.gradient_threads(), config.gradient_bytes(&tile))?;
            if let Some(joining) = &joining {
                launches.d_states.push(of_back("chunk_segment_starts")?);
                launches.d_states.push(Step::Chunk(joining.function("chunk_join_d_states")?, join));
            }
            launches.d_states.push(of_back("chunk_backward")?);
            launches.gradient.push(Step::Chunk(gradient, of_gradient));
            launches.add_sums(gpu, config, setup)?;
        }
        Ok(launches)
    }

    /// Parts of the token axis that the gradients of raw gates are summed over.
    pub fn parts_of_gates(setup: &Setup) -> usize {
        setup.tokens().div_ceil(GATE_PART)
    }

    /// What sums gradients over value heads and tokens, where that is asked for.
    fn add_sums(&mut self, gpu: &Gpu, config: &Config, setup: &Setup) -> Result<()> {
        let (shape, threads) = (&setup.shape, setup.shape.key_dim);
        if setup.grouped() {
            let groups = gpu.module(&config.groups()?)?.function("gdn2_groups")?;
            self.gradient.push(Step::Chunk(groups, grid([setup.tokens(), shape.qk_heads, 1], threads, 0)?));
        }
        if setup.raw() {
            let module = gpu.module(&config.gate_gradients()?)?;
            let parts = [Self::parts_of_gates(setup), shape.value_heads, 1];
            self.gradient.push(Step::Gates(module.function("gdn2_gate_gradients")?, grid(parts, threads, 0)?));
            self.gradient
                .push(Step::Gates(module.function("gdn2_gate_sums")?, grid([shape.value_heads, 1, 1], threads, 0)?));
        }
        Ok(())
    }
}
