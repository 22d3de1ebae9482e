//! Which specialisation of the kernels runs a problem of GDN-2.
//!
//! Chunks, the split of K over warps and segments are those of GDN ([`Variant`]), and follow from the model alone; all else
//! changes no bit of a result.

use crate::cuda::chunk::config::{
    COEFFICIENTS, Card, Config as Sweep, GROUP_COLUMNS, GROUPS, GradientTile, MOST_STAGES, MOST_WARPS, PAD,
    SWEEP_STATIC_BYTES, Variant, Work, in_cuda,
};
use crate::cuda::{Build, source};
use crate::precision::Format;
use crate::{Error, Result};

/// Key dimensions up to this one have kernels.
const LARGEST_KEY_DIM: usize = 128;
/// Tokens that a block of the preparation takes at a time, the best first.
const PASSES: [usize; 2] = [32, 16];
/// Lanes that read a row.
const ROW_LANES: usize = 8;
/// Columns of V in a block of the gradient's stream, and its stages, the best first.
const GRADIENT_TILES: &[(usize, usize)] = &[(64, 2), (32, 3), (32, 2), (16, 2), (16, 1)];
/// Rows of coefficients that have a weight for each token (`KEY + 1`).
const WEIGHTS: usize = 6;
/// Numbers of a diagonal block of the preparation (`16 BLOCK_PITCH`), and of the gradient (`BLOCK_PAIRS`).
const BLOCK_NUMBERS: usize = 16 * 20;
const PAIR_NUMBERS: usize = 16 * 16;
/// Bytes of a number in binary32.
const NUMBER: usize = size_of::<f32>();

/// A specialisation, and the shape of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Blocks of the sweeps.
    pub sweep: Sweep,
    /// Format of b, w, db and dw.
    pub gates: Format,
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
    /// The specialisation for this much work on `card`.
    ///
    /// # Errors
    /// [`Error::Input`] where there is no kernel for `variant`, [`Error::Gpu`] where `card` has too little shared memory.
    pub fn new(variant: Variant, gates: Format, work: Work, card: &Card) -> Result<Self> {
        validate(&variant, gates)?;
        let Work { heads, cut } = work;
        let sweep = Sweep { variant, chunk: variant.chunk(), groups: 1, stages: 1, cut, gradient: None };
        let smallest = Self { sweep, gates, pass: PASSES[1], gradient: None };
        let with = |groups: usize, stages: usize| Self { sweep: Sweep { groups, stages, ..sweep }, ..smallest };
        let fits = |config: &Self| config.sweep_bytes(true, true) + SWEEP_STATIC_BYTES <= card.shared_bytes_per_block;
        let enough = |config: &Self| heads.saturating_mul(config.sweep.sweep_blocks()) >= card.multiprocessors / 2;
        let mut blocks = GROUPS
            .into_iter()
            .filter(|groups| groups * variant.split() <= MOST_WARPS)
            .filter(|groups| variant.value_dim.is_multiple_of(GROUP_COLUMNS * groups))
            .filter(|groups| !cut || variant.key_dim.is_multiple_of(GROUP_COLUMNS * groups))
            .map(|groups| with(groups, 1))
            .filter(fits);
        let config = blocks
            .clone()
            .find(enough)
            .or_else(|| blocks.next_back())
            .ok_or_else(|| smallest.too_little("a sweep", card, smallest.sweep_bytes(true, true)))?;
        let groups = config.sweep.groups;
        let mut config = (1..=MOST_STAGES).rev().map(|stages| with(groups, stages)).find(fits).unwrap_or(config);
        let preparation = |pass: usize| config.prepare_bytes(pass) + config.prepare_static_bytes();
        config.pass = PASSES
            .into_iter()
            .find(|&pass| preparation(pass) <= card.shared_bytes_per_block)
            .ok_or_else(|| config.too_little("the preparation", card, preparation(PASSES[1])))?;
        config.gradient = GRADIENT_TILES
            .iter()
            .map(|&(v_block, stages)| GradientTile { v_block, stages })
            .filter(|tile| variant.value_dim.is_multiple_of(tile.v_block))
            .find(|&tile| config.gradient_bytes(tile) + config.gradient_static_bytes() <= card.shared_bytes_per_block);
        Ok(config)
    }

    /// The tile of the gradient.
    ///
    /// # Errors
    /// [`Error::Gpu`] where `card` has too little shared memory for any.
    pub fn gradient(&self, card: &Card) -> Result<GradientTile> {
        let smallest = GradientTile { v_block: 16, stages: 1 };
        let needed = self.gradient_bytes(smallest) + self.gradient_static_bytes();
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

    /// Dynamic shared memory of a sweep, with or without tiles of Q' and the scores, and of w, in bytes.
    pub fn sweep_bytes(&self, queries: bool, values: bool) -> usize {
        let Sweep { variant, chunk, groups, stages, .. } = self.sweep;
        let (operand, input) = (self.operand_bytes(), variant.input.bytes());
        let columns = GROUP_COLUMNS * groups;
        let beside = if input < operand { columns * input } else { 0 };
        let value_pitch = beside + columns * input.max(operand) + 16;
        let gate_pitch = if values { columns * self.gates.bytes() + 16 } else { 0 };
        let rows = chunk * self.sweep.row_pitch() * operand;
        let square = chunk * self.sweep.square_pitch() * operand;
        let kinds = if queries { 2 } else { 1 };
        let stage =
            kinds * (rows + square) + rows + self.coefficient_numbers() * NUMBER + chunk * (value_pitch + gate_pitch);
        groups * self.sweep.exchange_bytes() + stages * stage
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
        let key_dim = self.sweep.variant.key_dim;
        let column_warps = if key_dim.is_multiple_of(64) { key_dim / 32 } else { 2 };
        32 * self.blocks() * column_warps
    }

    /// Dynamic shared memory of the gradient, in bytes: two arrays of decays, the ring or the rows of the levels, squares.
    pub fn gradient_bytes(&self, tile: GradientTile) -> usize {
        let Sweep { variant, chunk, .. } = self.sweep;
        let (operand, row) = (self.operand_bytes(), self.sweep.row_pitch());
        let operand_tile = chunk * (tile.v_block + PAD) * operand;
        let input_tile = chunk * (tile.v_block * variant.input.bytes() + 16);
        let squares = input_tile + 2 * operand_tile;
        let product = operand_tile.max(input_tile) + tile.v_block * row * operand;
        let levels = self.levels().count() * 3 * chunk / 2 * row * operand;
        let array = chunk * (variant.key_dim + 8) * NUMBER;
        let flow = (tile.stages * squares.max(product)).max(levels).max(array);
        let pairs = 4 * (chunk - 16) * (chunk - 16 + PAD) * operand;
        2 * array + flow + pairs + 2 * self.blocks() * PAIR_NUMBERS * NUMBER
    }

    fn gradient_static_bytes(&self) -> usize {
        let Sweep { variant, chunk, .. } = self.sweep;
        let channels = (5 * self.blocks() + 4) * variant.key_dim;
        // Scales of the stream, the largest of each warp, and some of their own.
        let scales = 5 * (6 * variant.value_dim / 16 + 1) + 4 * self.gradient_threads() / 32 + 16;
        NUMBER * (channels + WEIGHTS * chunk + scales)
    }

    /// The preparation.
    pub fn prepare(&self) -> Result<Build> {
        self.build("gdn2_prepare", &[("PASS", self.pass)])
    }

    /// `chunk_forward`, `chunk_retain`, `chunk_states`, and `chunk_segment_ends` where a sequence is cut.
    pub fn forward(&self) -> Result<Build> {
        self.build("chunk_forward", &self.sweep.sweep_defines())
    }

    /// `chunk_join_states` and `chunk_join_d_states`.
    pub fn join(&self) -> Result<Build> {
        self.build("chunk_join", &[])
    }

    /// `chunk_backward`, and `chunk_segment_starts` where a sequence is cut.
    pub fn backward(&self) -> Result<Build> {
        self.build("chunk_backward", &self.sweep.sweep_defines())
    }

    /// `gdn2_gradient`.
    pub fn gradient_build(&self, tile: GradientTile) -> Result<Build> {
        self.build("gdn2_gradient", &[("V_BLOCK", tile.v_block), ("STAGES", tile.stages)])
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
        let mut builds = vec![self.prepare()?, self.forward()?, self.backward()?];
        if self.sweep.cut {
            builds.push(self.join()?);
        }
        if let Some(tile) = self.gradient {
            builds.push(self.gradient_build(tile)?);
        }
        Ok(builds)
    }

    fn build(&self, file: &str, own: &[(&'static str, usize)]) -> Result<Build> {
        let mut defines = self.sweep.variant.defines()?;
        defines.extend([("CHANNELS", "1".to_owned()), ("GATE", in_cuda(self.gates)?.to_owned())]);
        defines.extend(own.iter().map(|&(name, value)| (name, value.to_string())));
        Ok(Build { source: source(file)?, defines })
    }
}
