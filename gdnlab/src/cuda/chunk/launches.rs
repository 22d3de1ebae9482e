//! The launches of both passes.

use super::backward::{BackwardMaps, BackwardParams};
use super::config::{Card, Config};
use super::fused::{Fused, FusedParams};
use super::gradient::{GradientMaps, GradientParams, HopperGradient};
use super::params::{ChunkParams, GateParams};
use super::relay::Kernels;
use super::setup::{Beta, Gate, Setup};
use super::sweep::{HopperSweep, SweepMaps, SweepParams};
use super::table::ChunkTable;
use crate::cuda::{Build, Function, Gpu, Grid, Stream, TensorMap, source};
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
    /// `SweepParams`, and those of the ends of segments, whose blocks may have another shape.
    Sweep(Function, Grid),
    Ends(Function, Grid),
    /// `BackwardParams`.
    Backward(Function, Grid),
    /// `GradientParams`.
    Gradient(Function, Grid),
    /// `GateParams`.
    Gates(Function, Grid),
}

/// The parameters of all kinds of kernels.
pub(super) struct AllParams {
    pub chunk: ChunkParams,
    pub gates: GateParams,
    /// For kernels that take them, and likewise the maps of the kernels for Hopper.
    pub fused: Option<[TensorMap; 3]>,
    pub sweep: Option<SweepMaps>,
    pub ends: Option<SweepMaps>,
    pub backward: Option<BackwardMaps>,
    pub gradient: Option<GradientMaps>,
}

impl Step {
    /// Starts the kernel. All but those of gates wait by themselves for what is before them, so they may be launched `early`.
    ///
    /// # Safety
    /// As for [`Passes::forward_on`](super::Passes::forward_on).
    unsafe fn start(&self, stream: &Stream, early: bool, params: &AllParams) -> Result<()> {
        let chunk = params.chunk;
        let no_maps = || Error::gpu("chunk: a kernel for Hopper without maps of its tensors");
        match self {
            // SAFETY: the workspace was cut for this specialisation, and lives as long as the passes; the rest is the
            // promise of the caller.
            Self::Chunk(kernel, grid) => unsafe { kernel.launch(stream, Grid { early, ..*grid }, &chunk) },
            Self::Fused(kernel, grid) => {
                let fused = FusedParams { maps: params.fused.ok_or_else(no_maps)?, chunk };
                // SAFETY: as above.
                unsafe { kernel.launch(stream, Grid { early, ..*grid }, &fused) }
            }
            Self::Sweep(kernel, grid) | Self::Ends(kernel, grid) => {
                let maps = if matches!(self, Self::Ends(..)) { params.ends } else { params.sweep };
                let sweep = SweepParams::of_all(maps.ok_or_else(no_maps)?, chunk);
                // SAFETY: as above.
                unsafe { kernel.launch(stream, Grid { early, ..*grid }, &sweep) }
            }
            Self::Backward(kernel, grid) => {
                let backward = BackwardParams { maps: params.backward.ok_or_else(no_maps)?, chunk };
                // SAFETY: as above.
                unsafe { kernel.launch(stream, Grid { early, ..*grid }, &backward) }
            }
            Self::Gradient(kernel, grid) => {
                let gradient = GradientParams { maps: params.gradient.ok_or_else(no_maps)?, chunk };
                // SAFETY: as above.
                unsafe { kernel.launch(stream, Grid { early, ..*grid }, &gradient) }
            }
            // SAFETY: as above.
            Self::Gates(kernel, grid) => unsafe { kernel.launch(stream, *grid, &params.gates) },
        }
    }
}

/// The blocks of a kernel that runs beside another one in clusters of two, where they are even along x: so both multiprocessors of a
/// pair, which share a cache of instructions, run the same kernel.
pub(super) fn in_pairs(grid: Grid) -> Grid {
    Grid { cluster: grid.blocks[0].is_multiple_of(2).then_some([2, 1, 1]), ..grid }
}

/// Starts kernels one after the other, all but the first early.
///
/// # Safety
/// As for [`Passes::forward_on`](super::Passes::forward_on).
pub(super) unsafe fn start_all<'a>(
    stream: &Stream,
    steps: impl IntoIterator<Item = &'a Step>,
    params: &AllParams,
) -> Result<()> {
    for (number, step) in steps.into_iter().enumerate() {
        // SAFETY: the promise of the caller.
        unsafe { step.start(stream, number > 0, params)? };
    }
    Ok(())
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
    /// The kernels of a forward on Hopper, where it is a preparation and one sweep.
    pub fn to_relay(&self) -> Option<Kernels<'_>> {
        match (&self.shared[..], &self.forward[..]) {
            ([Step::Chunk(prepare, of_chunk)], [Step::Sweep(sweep, of_all)]) => {
                Some(Kernels { prepare: (prepare, of_chunk), sweep: (sweep, of_all) })
            }
            _ => None,
        }
    }

    /// Compiles the kernels of the passes that `setup` asks for; with `hopper` and `ends`, the sweeps and those over
    /// segments are these, and the gradient is that of Hopper where there is one.
    pub fn new(
        gpu: &Gpu,
        config: &Config,
        setup: &Setup,
        table: &ChunkTable,
        hopper: Option<&HopperSweep>,
        ends: Option<&HopperSweep>,
    ) -> Result<Self> {
        let (shape, chunks, segments) = (&setup.shape, table.chunks(), table.segments());
        let card = Card::from(gpu);
        let heads_per_block = config.heads_per_block(chunks, shape.qk_heads, shape.group(), &card);
        let prepare_blocks = [chunks, shape.qk_heads * (shape.group() / heads_per_block), 1];
        let prepare = grid(prepare_blocks, config.prepare_threads(), config.prepare_bytes())?;
        let join = grid([config.join_blocks(), shape.value_heads, setup.sequences.len()], JOIN_THREADS, 0)?;
        let preparation = gpu.module(&config.prepare()?)?;
        let forward = gpu.module(&hopper.map_or_else(|| config.forward(), HopperSweep::build)?)?;
        let of_forward = |name, columns, queries| {
            let kernel = forward.function(name)?;
            Ok::<_, Error>(match hopper {
                Some(hopper) => {
                    let keeps = name == "chunk_states";
                    let grid = hopper.grid(segments, columns, keeps)?;
                    Step::Sweep(kernel, if keeps { in_pairs(grid) } else { grid })
                }
                None => {
                    let blocks = [config.blocks_of(columns), shape.value_heads, segments];
                    Step::Chunk(kernel, grid(blocks, config.sweep_threads(), config.sweep_bytes(queries))?)
                }
            })
        };
        let joining = if config.cut { Some(gpu.module(&config.join()?)?) } else { None };

        let mut shared = vec![Step::Chunk(preparation.function("chunk_prepare")?, prepare)];
        if let Some(joining) = &joining {
            let (name, columns) = ("chunk_segment_ends", shape.value_dim + shape.key_dim);
            shared.push(match ends {
                Some(ends) => {
                    Step::Ends(gpu.module(&ends.build()?)?.function(name)?, ends.grid(segments, columns, false)?)
                }
                None => of_forward(name, columns, false)?,
            });
            shared.push(Step::Chunk(joining.function("chunk_join_states")?, join));
        }
        let mut launches = Self {
            shared,
            forward: vec![of_forward("chunk_forward", shape.value_dim, true)?],
            states: Vec::new(),
            d_states: Vec::new(),
            gradient: Vec::new(),
            heads_per_block,
            gate_parts: Self::parts_of_gates(setup),
        };
        if setup.backward {
            let backward = gpu.module(&hopper.map_or_else(|| config.backward(), HopperSweep::backward_build)?)?;
            let of_back = |name| {
                let kernel = backward.function(name)?;
                Ok::<_, Error>(match hopper {
                    Some(hopper) => Step::Backward(kernel, in_pairs(hopper.backward_grid(segments)?)),
                    None => {
                        let blocks = [config.sweep_blocks(), shape.value_heads, segments];
                        Step::Chunk(kernel, grid(blocks, config.sweep_threads(), config.sweep_bytes(true))?)
                    }
                })
            };
            launches.states.push(of_forward("chunk_states", shape.value_dim, false)?);
            if let Some(joining) = &joining {
                launches.d_states.push(of_back("chunk_segment_starts")?);
                launches.d_states.push(Step::Chunk(joining.function("chunk_join_d_states")?, join));
            }
            launches.d_states.push(of_back("chunk_backward")?);
            launches.gradient.push(match hopper.and_then(|_| HopperGradient::of(config)) {
                Some(gradient) => {
                    let kernel = gpu.module(&gradient.build()?)?.function("chunk_gradient")?;
                    Step::Gradient(kernel, gradient.grid(chunks * shape.qk_heads, &card)?)
                }
                None => {
                    let tile = config.gradient(&card)?;
                    let kernel = gpu.module(&config.gradient_build(tile)?)?.function("chunk_gradient")?;
                    let (threads, bytes) = (config.gradient_threads(), config.gradient_bytes(tile));
                    Step::Chunk(kernel, grid([chunks, shape.qk_heads, 1], threads, bytes)?)
                }
            });
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
