//! The launches of both passes.

use super::config::{Card, Config};
use super::fused::Fused;
use super::setup::{Beta, Gate, Setup};
use super::table::ChunkTable;
use crate::cuda::{Build, Function, Gpu, Grid, source};
use crate::{Error, Result};

/// Tokens that a block of `gate_gradients` takes (`PART`).
const GATE_PART: usize = 256;
/// Heads of a block of the gate kernels, one for each lane (`HEADS`).
const GATE_HEADS: usize = 32;
/// Threads of a block of the gate kernels.
const GATE_THREADS: u32 = 256;

/// Threads of a block that joins segments.
pub(super) const JOIN_THREADS: usize = 256;

/// A kernel with the shape of its launch, by the structure that it takes.
pub(super) enum Step {
    /// `ChunkParams`.
    Chunk(Function, Grid),
    /// `FusedParams`.
    Fused(Function, Grid),
    /// `GateParams`.
    Gates(Function, Grid),
}

/// What each pass starts, in this order.
pub(super) struct Launches {
    /// First in both passes; a backward after a forward finds their results.
    pub shared: Vec<Step>,
    pub forward: Vec<Step>,
    /// None of these three where no backward is wanted. The states and their gradients depend on what is shared alone, so
    /// they are computed side by side.
    pub states: Vec<Step>,
    pub d_states: Vec<Step>,
    /// Of both.
    pub gradient: Vec<Step>,
    /// Value heads that a block of the preparation takes.
    pub heads_per_block: usize,
    /// Parts of the token axis that the gradients of raw gates are summed over.
    pub gate_parts: usize,
}

impl Launches {
    /// Compiles the kernels of the passes that `setup` asks for.
    pub fn new(gpu: &Gpu, config: &Config, setup: &Setup, table: &ChunkTable) -> Result<Self> {
        let (shape, chunks, segments) = (&setup.shape, table.chunks(), table.segments());
        let card = Card::from(gpu);
        let heads_per_block = config.heads_per_block(chunks, shape.qk_heads, shape.group(), &card);
        let prepare_blocks = [chunks, shape.qk_heads * (shape.group() / heads_per_block), 1];
        let prepare = grid(prepare_blocks, config.prepare_threads(), config.prepare_bytes())?;
        let blocks = [config.sweep_blocks(), shape.value_heads, segments];
        let sweep = |queries| grid(blocks, config.sweep_threads(), config.sweep_bytes(queries));
        let of_all = [config.segment_blocks(), shape.value_heads, segments];
        let join = grid([config.join_blocks(), shape.value_heads, setup.sequences.len()], JOIN_THREADS, 0)?;
        let preparation = gpu.module(&config.prepare()?)?;
        let forward = gpu.module(&config.forward()?)?;
        let joining = if config.cut { Some(gpu.module(&config.join()?)?) } else { None };

        let mut shared = vec![Step::Chunk(preparation.function("chunk_prepare")?, prepare)];
        if let Some(joining) = &joining {
            let ends = grid(of_all, config.sweep_threads(), config.sweep_bytes(false))?;
            shared.push(Step::Chunk(forward.function("chunk_segment_ends")?, ends));
            shared.push(Step::Chunk(joining.function("chunk_join_states")?, join));
        }
        let mut launches = Self {
            shared,
            forward: vec![Step::Chunk(forward.function("chunk_forward")?, sweep(true)?)],
            states: Vec::new(),
            d_states: Vec::new(),
            gradient: Vec::new(),
            heads_per_block,
            gate_parts: Self::parts_of_gates(setup),
        };
        if setup.backward {
            let tile = config.gradient(&card)?;
            let backward = gpu.module(&config.backward()?)?;
            let gradient = gpu.module(&config.gradient_build(tile)?)?.function("chunk_gradient")?;
            let of_chunk = grid([chunks, shape.qk_heads, 1], config.gradient_threads(), config.gradient_bytes(tile))?;
            launches.states.push(Step::Chunk(forward.function("chunk_states")?, sweep(false)?));
            if let Some(joining) = &joining {
                launches.d_states.push(Step::Chunk(backward.function("chunk_segment_starts")?, sweep(true)?));
                launches.d_states.push(Step::Chunk(joining.function("chunk_join_d_states")?, join));
            }
            launches.d_states.push(Step::Chunk(backward.function("chunk_backward")?, sweep(true)?));
            launches.gradient.push(Step::Chunk(gradient, of_chunk));
            launches.add_gates(gpu, setup)?;
        }
        Ok(launches)
    }

    /// Compiles the kernels of a forward in one sweep.
    pub fn fused(gpu: &Gpu, config: &Config, setup: &Setup, table: &ChunkTable, fused: &Fused) -> Result<Self> {
        let (shape, segments) = (&setup.shape, table.segments());
        let module = gpu.module(&fused.build(config)?)?;
        let mut shared = Vec::new();
        if config.cut {
            let of_all = fused.grid(setup, segments, shape.value_dim + shape.key_dim)?;
            shared.push(Step::Fused(module.function("chunk_fused_segment_ends")?, of_all));
            let join = grid([config.join_blocks(), shape.value_heads, setup.sequences.len()], JOIN_THREADS, 0)?;
            shared.push(Step::Chunk(gpu.module(&config.join()?)?.function("chunk_join_states")?, join));
        }
        let sweep = fused.grid(setup, segments, shape.value_dim)?;
        Ok(Self {
            shared,
            forward: vec![Step::Fused(module.function("chunk_fused_forward")?, sweep)],
            states: Vec::new(),
            d_states: Vec::new(),
            gradient: Vec::new(),
            heads_per_block: 1,
            gate_parts: 0,
        })
    }

    /// Parts of the token axis that the gradients of raw gates are summed over.
    pub fn parts_of_gates(setup: &Setup) -> usize {
        setup.tokens().div_ceil(GATE_PART)
    }

    /// The gradients of raw gates, where there are any.
    fn add_gates(&mut self, gpu: &Gpu, setup: &Setup) -> Result<()> {
        let raw = setup.options.gate == Gate::Raw;
        if !raw && setup.options.beta == Beta::Value {
            return Ok(());
        }
        let module = gpu.module(&gates()?)?;
        let heads = setup.shape.value_heads.div_ceil(GATE_HEADS);
        let shape = |blocks| Ok::<_, Error>(Grid { threads: GATE_THREADS, ..grid(blocks, 0, 0)? });
        self.gradient.push(Step::Gates(module.function("gate_gradients")?, shape([self.gate_parts, heads, 1])?));
        if raw {
            self.gradient.push(Step::Gates(module.function("gate_sums")?, shape([heads, 1, 1])?));
        }
        Ok(())
    }
}

/// The gradients of raw gates, which are the same for every problem.
pub(super) fn gates() -> Result<Build> {
    Ok(Build { source: source("chunk_gates")?, defines: vec![] })
}

pub(super) fn grid(blocks: [usize; 3], threads: usize, shared_bytes: usize) -> Result<Grid> {
    let number = |size: usize| {
        u32::try_from(size)
            .map_err(|_| Error::input(format!("chunk: {size} blocks in a launch: use a smaller problem")))
    };
    let [x, y, z] = blocks;
    Ok(Grid {
        blocks: [number(x)?, number(y)?, number(z)?],
        threads: number(threads)?,
        shared_bytes: number(shared_bytes)?,
        cluster: None,
        early: false,
    })
}
