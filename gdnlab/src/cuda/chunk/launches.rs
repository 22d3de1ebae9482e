//! The launches of both passes.

use super::config::{Card, Config};
use super::setup::{Beta, Gate, Setup};
use crate::cuda::{Build, Function, Gpu, Grid, source};
use crate::{Error, Result};

/// Tokens that a block of `gate_gradients` takes (`PART`).
const GATE_PART: usize = 256;
/// Heads of a block of the gate kernels, one for each lane (`HEADS`).
const GATE_HEADS: usize = 32;
/// Threads of a block of the gate kernels.
const GATE_THREADS: u32 = 256;

/// A kernel with the shape of its launch, by the structure that it takes.
pub(super) enum Step {
    /// `ChunkParams`.
    Chunk(Function, Grid),
    /// `GateParams`.
    Gates(Function, Grid),
}

/// What each pass starts, in this order.
pub(super) struct Launches {
    pub forward: Vec<Step>,
    /// Empty where no backward is wanted.
    pub backward: Vec<Step>,
    /// Value heads that a block of the preparation takes.
    pub heads_per_block: usize,
    /// Parts of the token axis that the gradients of raw gates are summed over.
    pub gate_parts: usize,
}

impl Launches {
    /// Steps of the forward and of the backward that neither reads values nor states.
    pub const PREPARATION: usize = 1;

    /// Compiles the kernels of the passes that `setup` asks for.
    pub fn new(gpu: &Gpu, config: &Config, setup: &Setup, chunks: usize) -> Result<Self> {
        let shape = &setup.shape;
        let card = Card::from(gpu);
        let heads_per_block = config.heads_per_block(chunks, shape.qk_heads, shape.group(), &card);
        let prepare_blocks = [chunks, shape.qk_heads * (shape.group() / heads_per_block), 1];
        let prepare = grid(prepare_blocks, config.prepare_threads(), config.prepare_bytes())?;
        let blocks = [config.sweep_blocks(), shape.value_heads, setup.sequences.len()];
        let sweep = |queries| grid(blocks, config.sweep_threads(), config.sweep_bytes(queries));
        let preparation = gpu.module(&config.prepare()?)?;
        let forward = gpu.module(&config.forward()?)?;
        let mut launches = Self {
            forward: vec![
                Step::Chunk(preparation.function("chunk_prepare")?, prepare),
                Step::Chunk(forward.function("chunk_forward")?, sweep(true)?),
            ],
            backward: Vec::new(),
            heads_per_block,
            gate_parts: setup.tokens().div_ceil(GATE_PART),
        };
        if setup.backward {
            let tile = config.gradient(&card)?;
            let backward = gpu.module(&config.backward()?)?.function("chunk_backward")?;
            let gradient = gpu.module(&config.gradient_build(tile)?)?.function("chunk_gradient")?;
            let of_chunk = grid([chunks, shape.qk_heads, 1], config.gradient_threads(), config.gradient_bytes(tile))?;
            launches.backward = vec![
                Step::Chunk(preparation.function("chunk_prepare")?, prepare),
                Step::Chunk(forward.function("chunk_states")?, sweep(false)?),
                Step::Chunk(backward, sweep(true)?),
                Step::Chunk(gradient, of_chunk),
            ];
            launches.add_gates(gpu, setup)?;
        }
        Ok(launches)
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
        self.backward.push(Step::Gates(module.function("gate_gradients")?, shape([self.gate_parts, heads, 1])?));
        if raw {
            self.backward.push(Step::Gates(module.function("gate_sums")?, shape([heads, 1, 1])?));
        }
        Ok(())
    }
}

/// The gradients of raw gates, which are the same for every problem.
pub(super) fn gates() -> Result<Build> {
    Ok(Build { source: source("chunk_gates")?, defines: vec![] })
}

fn grid(blocks: [usize; 3], threads: usize, shared_bytes: usize) -> Result<Grid> {
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
    })
}
