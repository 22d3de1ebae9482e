//! The launches of both passes.

use super::config::{Config, Tiles};
use super::setup::Setup;
use crate::Result;
use crate::cuda::chunk::config::{Card, Config as Sweep};
use crate::cuda::chunk::launches::{JOIN_THREADS, grid};
use crate::cuda::chunk::table::ChunkTable;
use crate::cuda::{Function, Gpu, Grid};

/// Tokens that a block of `gdn2_gate_gradients` takes (`PART`).
const GATE_PART: usize = 64;

/// A kernel with the shape of its launch, by the structure that it takes.
pub(super) enum Step {
    /// `ChunkParams` with `CHANNELS`.
    Chunk(Function, Grid),
    /// `ChannelGateParams`.
    Gates(Function, Grid),
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
    /// Compiles the kernels of the passes that `setup` asks for.
    pub fn new(gpu: &Gpu, config: &Config, setup: &Setup, table: &ChunkTable) -> Result<Self> {
        let (shape, chunks, sweep) = (&setup.shape, table.chunks(), &config.sweep);
        let heads = shape.value_heads;
        let of_chunk = [chunks, heads, 1];
        let blocks_of = |sweep: &Sweep| [sweep.sweep_blocks(), heads, table.segments()];
        let grid_of =
            |blocks, sweep: &Sweep, tiles| grid(blocks, sweep.sweep_threads(), config.sweep_bytes(sweep, tiles));
        let join = grid([sweep.join_blocks(), heads, setup.sequences.len()], JOIN_THREADS, 0)?;
        let prepare = grid(of_chunk, config.prepare_threads(), config.prepare_bytes(config.pass))?;
        let preparation = gpu.module(&config.prepare()?)?;
        let forward = gpu.module(&config.forward()?)?;
        let joining = if sweep.cut { Some(gpu.module(&config.join()?)?) } else { None };

        let mut shared = vec![Step::Chunk(preparation.function("gdn2_prepare")?, prepare)];
        if let Some(joining) = &joining {
            let of_all = [sweep.segment_blocks(), heads, table.segments()];
            let ends = grid_of(of_all, sweep, Tiles::States)?;
            shared.push(Step::Chunk(forward.function("chunk_segment_ends")?, ends));
            shared.push(Step::Chunk(joining.function("chunk_join_states")?, join));
        }
        let pass = if setup.retains() { "chunk_retain" } else { "chunk_forward" };
        let mut launches = Self {
            shared,
            forward: vec![Step::Chunk(forward.function(pass)?, grid_of(blocks_of(sweep), sweep, Tiles::Forward)?)],
            states: Vec::new(),
            d_states: Vec::new(),
            gradient: Vec::new(),
        };
        if setup.backward {
            let tile = config.gradient(&Card::from(gpu))?;
            let back = if setup.retains() { &config.d_states_alone } else { &config.d_states };
            let states = gpu.module(&config.states()?)?.function("chunk_states")?;
            let of_states = grid_of(blocks_of(&config.states), &config.states, Tiles::States)?;
            launches.states.push(Step::Chunk(states, of_states));
            let backward = gpu.module(&config.backward(back)?)?;
            let of_back = grid_of(blocks_of(back), back, Tiles::Backward)?;
            let gradient = gpu.module(&config.gradient_build(&tile)?)?.function("gdn2_gradient")?;
            let of_gradient = [chunks * config.gradient_blocks(&tile), heads, 1];
            let of_gradient = grid(of_gradient, config.gradient_threads(), config.gradient_bytes(&tile))?;
            if let Some(joining) = &joining {
                launches.d_states.push(Step::Chunk(backward.function("chunk_segment_starts")?, of_back));
                launches.d_states.push(Step::Chunk(joining.function("chunk_join_d_states")?, join));
            }
            launches.d_states.push(Step::Chunk(backward.function("chunk_backward")?, of_back));
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
