//! Which specialisation of the kernels runs a problem of GDN-2.
//!
//! Chunks, the split of K over warps and segments are those of GDN ([`Variant`]), and follow from the model alone; all else
//! changes no bit of a result on one kind of card. How many tokens the preparation takes at once follows from the shared memory
//! of the card, and so does whether its rows stay in registers, whose sums have another order.

use crate::cuda::chunk::config::{
    COEFFICIENTS, Card, Config as Sweep, GROUP_COLUMNS, GROUPS, MOST_STAGES, MOST_WARPS, PAD, SWEEP_STATIC_BYTES,
    Variant, Work, channel_defines, in_cuda,
};
use crate::cuda::chunk::sweep::HopperSweep;
use crate::cuda::{Build, source};
use crate::precision::Format;
use crate::{Error, Result};

/// Key dimensions up to this one have kernels.
const LARGEST_KEY_DIM: usize = 128;
/// Tokens that a block of the preparation takes at a time, the best first.
const PASSES: [usize; 2] = [32, 16];
/// Lanes that read a row.
const ROW_LANES: usize = 8;
/// Tiles of the gradient, the best first: two blocks of the first share a multiprocessor of Hopper.
const GRADIENT_TILES: [GradientTile; 4] = [
    GradientTile { k_block: 64, v_block: 32, stages: 2 },
    GradientTile { k_block: 32, v_block: 32, stages: 2 },
    GradientTile { k_block: 32, v_block: 16, stages: 2 },
    SMALLEST_TILE,
];
const SMALLEST_TILE: GradientTile = GradientTile { k_block: 32, v_block: 16, stages: 1 };
/// Warps that share the columns of K of a block of the gradient.
const COLUMN_WARPS: usize = 2;
/// Rows of coefficients that have a weight for each token (`KEY + 1`).
const WEIGHTS: usize = 6;
/// Numbers of a diagonal block of the preparation (`16 BLOCK_PITCH`), and of the gradient (`BLOCK_PAIRS`).
const BLOCK_NUMBERS: usize = 16 * 20;
const PAIR_NUMBERS: usize = 16 * 16;
/// Bytes of a number in binary32.
const NUMBER: usize = size_of::<f32>();

/// What a sweep has in shared memory of each chunk, besides the tiles of two kinds of keys, T and v or do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tiles {
    /// Q', the scores, and w.
    Forward,
    /// w.
    States,
    /// Q' and the scores.
    Backward,
}

/// The shape of the blocks of the gradient, and of the stream through each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradientTile {
    /// Columns of K of a block.
    pub k_block: usize,
    /// Columns of V that are in shared memory at once,
    pub v_block: usize,
    /// this many times.
    pub stages: usize,
}

/// A specialisation, and the shape of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Blocks of the sweeps of the forward.
    pub sweep: Sweep,
    /// Blocks of the sweeps of the backward that run at once: `chunk_states`,
    pub states: Sweep,
    /// and `chunk_backward`;
    pub d_states: Sweep,
    /// and of the latter where the states are there, and it runs alone.
    pub d_states_alone: Sweep,
    /// Format of b, w, db and dw.
    pub gates: Format,
    /// Whether log decays are made of raw gates.
    pub raw: bool,
    /// Tokens that a block of the preparation takes at a time.
    pub pass: usize,
    /// The gradient of one chunk; `None` where no tile of it fits into the GPU's shared memory.
    pub gradient: Option<GradientTile>,
}

/// Refuses what there is no kernel for.
///
/// # Errors
/// [`Error::Input`] with the accepted values.
pub fn validate(variant: &Variant, gates: Format) -> Result<()> {
    variant.validate()?;
    if variant.key_dim > LARGEST_KEY_DIM {
        return Err(Error::input(format!("gdn2: K = {}: expected {LARGEST_KEY_DIM} at the most", variant.key_dim)));
    }
    in_cuda(gates).map(|_| ())
}

impl Config {
    /// The specialisation for this much work on `card`; `raw` where log decays are made of raw gates.
    ///
    /// # Errors
    /// [`Error::Input`] where there is no kernel for `variant`, [`Error::Gpu`] where `card` has too little shared memory.
    pub fn new(variant: Variant, gates: Format, raw: bool, work: Work, card: &Card) -> Result<Self> {
        validate(&variant, gates)?;
        let sweep = Sweep { variant, chunk: variant.chunk(), groups: 1, stages: 1, cut: work.cut, gradient: None };
        let pass = PASSES[1];
        let mut config =
            Self { sweep, states: sweep, d_states: sweep, d_states_alone: sweep, gates, raw, pass, gradient: None };
        let needed = config.sweep_bytes(&sweep, Tiles::Forward);
        let best = |tiles, at_once| {
            config.best_sweep(work, card, tiles, at_once).ok_or_else(|| config.too_little("a sweep", card, needed))
        };
        let (forward, states) = (best(Tiles::Forward, 1)?, best(Tiles::States, 2)?);
        let (beside, alone) = (best(Tiles::Backward, 2)?, best(Tiles::Backward, 1)?);
        config = Self { sweep: forward, states, d_states: beside, d_states_alone: alone, ..config };
        let preparation = |pass: usize| config.prepare_bytes(pass) + config.prepare_static_bytes();
        config.pass = PASSES
            .into_iter()
            .find(|&pass| preparation(pass) <= card.shared_bytes_per_block)
            .ok_or_else(|| config.too_little("the preparation", card, preparation(PASSES[1])))?;
        config.gradient = GRADIENT_TILES
            .into_iter()
            .filter(|tile| {
                variant.key_dim.is_multiple_of(tile.k_block) && variant.value_dim.is_multiple_of(tile.v_block)
            })
            .find(|tile| {
                config.gradient_bytes(tile) + config.gradient_static_bytes(tile) <= card.shared_bytes_per_block
            });
        Ok(config)
    }

    /// The blocks of a sweep, of which `at_once` run side by side: large ones share what they read, but half of the
    /// multiprocessors or more should have one. `None` where even the smallest do not fit.
    fn best_sweep(&self, work: Work, card: &Card, tiles: Tiles, at_once: usize) -> Option<Sweep> {
        let Variant { key_dim, value_dim, .. } = self.sweep.variant;
        let fits = |sweep: &Sweep| self.sweep_bytes(sweep, tiles) + SWEEP_STATIC_BYTES <= card.shared_bytes_per_block;
        let enough =
            |sweep: &Sweep| work.heads.saturating_mul(at_once * sweep.sweep_blocks()) >= card.multiprocessors / 2;
        let mut sizes = GROUPS
            .into_iter()
            .filter(|groups| groups * self.sweep.variant.split() <= MOST_WARPS)
            .filter(|groups| value_dim.is_multiple_of(GROUP_COLUMNS * groups))
            .filter(|groups| !work.cut || key_dim.is_multiple_of(GROUP_COLUMNS * groups))
            .map(|groups| Sweep { groups, stages: 1, ..self.sweep })
            .filter(fits);
        let chosen = sizes.clone().find(enough).or_else(|| sizes.next_back())?;
        (1..=MOST_STAGES).rev().map(|stages| Sweep { stages, ..chosen }).find(fits)
    }

    /// The tile of the gradient.
    ///
    /// # Errors
    /// [`Error::Gpu`] where `card` has too little shared memory for any.
    pub fn gradient(&self, card: &Card) -> Result<GradientTile> {
        let needed = self.gradient_bytes(&SMALLEST_TILE) + self.gradient_static_bytes(&SMALLEST_TILE);
        self.gradient.ok_or_else(|| self.too_little("the backward", card, needed))
    }

    fn too_little(&self, what: &str, card: &Card, needed: usize) -> Error {
        let Variant { mode, key_dim, value_dim, .. } = self.sweep.variant;
        Error::gpu(format!(
            "gdn2: {what} of K = {key_dim}, V = {value_dim} in mode {mode} needs {needed} bytes of shared memory in a block, \
             and this GPU has {}: use smaller heads, or cuda-recurrent-fp32",
            card.shared_bytes_per_block
        ))
    }

    fn operand_bytes(&self) -> usize {
        self.sweep.variant.mode.operand_bytes()
    }

    /// Blocks of 16 tokens of a chunk.
    fn blocks(&self) -> usize {
        self.sweep.chunk / 16
    }

    /// Numbers of a chunk and value head in `coefficients`.
    pub(super) fn coefficient_numbers(&self) -> usize {
        COEFFICIENTS * self.sweep.chunk + self.sweep.variant.key_dim
    }

    /// Dynamic shared memory of a sweep, in bytes.
    pub fn sweep_bytes(&self, sweep: &Sweep, tiles: Tiles) -> usize {
        let (queries, gates) = (tiles != Tiles::States, tiles != Tiles::Backward);
        // What GDN does not have: the tile of a second kind of keys, a decay of each channel, and w.
        let keys = sweep.chunk * sweep.row_pitch() * self.operand_bytes();
        let gate_pitch = if gates { GROUP_COLUMNS * sweep.groups * self.gates.bytes() + 16 } else { 0 };
        let more = keys + sweep.variant.key_dim * NUMBER + sweep.chunk * gate_pitch;
        sweep.sweep_bytes(queries) + sweep.stages * more
    }

    /// Threads of a block of the preparation.
    pub fn prepare_threads(&self) -> usize {
        ROW_LANES * self.pass
    }

    /// Dynamic shared memory of the preparation, in bytes: three arrays of a pass, rows of the levels, L.
    pub fn prepare_bytes(&self, pass: usize) -> usize {
        let rows: usize = self.levels().map(|blocks| 3 * 16 * blocks).sum();
        let square = self.sweep.chunk * self.sweep.square_pitch();
        let arrays = 3 * pass * self.sweep.variant.key_dim * NUMBER;
        arrays + (rows * self.sweep.row_pitch() + square) * self.operand_bytes()
    }

    /// Blocks on each side of the splits of each level.
    fn levels(&self) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(self.blocks() / 2), |&blocks| (blocks > 1).then_some(blocks / 2))
    }

    fn prepare_static_bytes(&self) -> usize {
        let Sweep { variant, chunk, .. } = self.sweep;
        let channels = (3 * self.blocks() + 1) * variant.key_dim;
        1024 + NUMBER * (channels + WEIGHTS * chunk + self.blocks() * BLOCK_NUMBERS)
    }

    /// Threads of a block of the gradient.
    pub fn gradient_threads(&self) -> usize {
        32 * self.blocks() * COLUMN_WARPS
    }

    /// Blocks of the gradient of a chunk and head.
    pub fn gradient_blocks(&self, tile: &GradientTile) -> usize {
        self.sweep.variant.key_dim / tile.k_block
    }

    /// Dynamic shared memory of the gradient, in bytes: first the ring of the stream, then two arrays of decays and the rows of
    /// the levels, with the squares behind them; in place of both at the end three arrays and the rows of q, k and b; and
    /// the blocks on the diagonal.
    pub fn gradient_bytes(&self, tile: &GradientTile) -> usize {
        let Sweep { variant, chunk, .. } = self.sweep;
        let &GradientTile { k_block, v_block, stages } = tile;
        let (operand, input, row) = (self.operand_bytes(), variant.input.bytes(), k_block + PAD);
        let values = chunk * (v_block * input + 16 + 2 * (v_block + PAD) * operand);
        let ring = stages * (values + 2 * v_block * row * operand);
        let array = chunk * (k_block + 8) * NUMBER;
        let levels = self.levels().count() * 3 * chunk / 2 * row * operand;
        let pairs = 4 * (chunk - 16) * (chunk - 16 + PAD) * operand;
        let last = 3 * array + chunk * k_block * (2 * input + self.gates.bytes());
        let flow = ring.max(2 * array + levels).max(last.saturating_sub(pairs));
        flow + pairs + 2 * self.blocks() * PAIR_NUMBERS * NUMBER
    }

    fn gradient_static_bytes(&self, tile: &GradientTile) -> usize {
        let Sweep { variant, chunk, .. } = self.sweep;
        let channels = (7 * self.blocks() + 4) * tile.k_block;
        // Scales of the stream, the largest of each warp, and some of their own.
        let scales = 5 * (6 * variant.value_dim / 16 + 1) + 4 * self.gradient_threads() / 32 + 16;
        NUMBER * (channels + (WEIGHTS + 1) * chunk + scales)
    }

    /// The preparation.
    pub fn prepare(&self) -> Result<Build> {
        self.build("gdn2_prepare", &[("RAW", self.raw.into()), ("PASS", self.pass)])
    }

    /// `chunk_forward`, `chunk_retain`, `chunk_states`, and `chunk_segment_ends` where a sequence is cut, in blocks of this
    /// shape.
    pub fn forward(&self, sweep: &Sweep) -> Result<Build> {
        self.build("chunk_forward", &sweep.sweep_defines())
    }

    /// `chunk_join_states` and `chunk_join_d_states`.
    pub fn join(&self) -> Result<Build> {
        self.build("chunk_join", &[])
    }

    /// `chunk_backward`, and `chunk_segment_starts` where a sequence is cut, in blocks of this shape.
    pub fn backward(&self, sweep: &Sweep) -> Result<Build> {
        self.build("chunk_backward", &sweep.sweep_defines())
    }

    /// `gdn2_gradient`.
    pub fn gradient_build(&self, tile: &GradientTile) -> Result<Build> {
        let &GradientTile { k_block, v_block, stages } = tile;
        let raw = ("RAW", self.raw.into());
        self.build("gdn2_gradient", &[raw, ("K_BLOCK", k_block), ("V_BLOCK", v_block), ("STAGES", stages)])
    }

    /// `gdn2_groups`.
    pub fn groups(&self) -> Result<Build> {
        self.build("gdn2_groups", &[])
    }

    /// `gdn2_gate_gradients` and `gdn2_gate_sums`.
    pub fn gate_gradients(&self) -> Result<Build> {
        let defines = vec![("KD", self.sweep.variant.key_dim.to_string())];
        Ok(Build { source: source("gdn2_gates")?, defines })
    }

    /// All but the last two.
    pub fn builds(&self) -> Result<Vec<Build>> {
        let mut builds = vec![self.prepare()?, self.forward(&self.sweep)?, self.forward(&self.states)?];
        builds.extend([self.backward(&self.d_states)?, self.backward(&self.d_states_alone)?]);
        if self.sweep.cut {
            builds.push(self.join()?);
        }
        if let Some(tile) = &self.gradient {
            builds.push(self.gradient_build(tile)?);
        }
        Ok(builds)
    }

    /// What takes the place of the sweeps on Hopper: `chunk_sweep_hopper`, in all shapes of blocks, and
    /// `chunk_backward_hopper`; none where they do not take the model.
    pub fn hopper_builds(&self) -> Result<Vec<Build>> {
        HopperSweep::builds(&self.sweep, Some(self.gates))
    }

    fn build(&self, file: &str, own: &[(&'static str, usize)]) -> Result<Build> {
        let mut defines = self.sweep.variant.defines()?;
        defines.extend(channel_defines(self.gates)?);
        defines.extend(own.iter().map(|&(name, value)| (name, value.to_string())));
        Ok(Build { source: source(file)?, defines })
    }
}
