//! Which specialisation of the chunk kernels runs a problem: the one place where sizes of chunks, blocks and stages are
//! chosen.
//!
//! The chunk size and the split of K over warps decide in which order a head's sums are taken, so they follow from the model
//! alone ([`Variant`]): a sequence gives the same bits whatever it is packed with. All else here changes how the work is
//! spread, and no bit of a result.

use super::gradient::HopperGradient;
use super::sweep::HopperSweep;
use super::{HEAD_DIMS, Mode};
use crate::cuda::{Build, Gpu, source};
use crate::precision::Format;
use crate::{Error, Result};
use std::ops::Range;

/// Lanes of a warp.
const LANES: usize = 32;
/// Columns of V that a group of warps of a sweep takes.
pub(super) const GROUP_COLUMNS: usize = 16;
/// Operands between two rows in shared memory (`PAD`).
pub(super) const PAD: usize = 8;
/// Numbers of a token in `coefficients` (`COEFFICIENTS`).
pub(super) const COEFFICIENTS: usize = 9;
/// Value heads of a block of the preparation, at the most (`MOST_HEADS`).
const MOST_HEADS: usize = 4;
/// No less than the static shared memory of the sweeps: barriers.
pub(super) const SWEEP_STATIC_BYTES: usize = 1024;
/// Groups of warps in a block of a sweep, the most first: as many as there are registers for.
pub(super) const GROUPS: [usize; 5] = [8, 4, 3, 2, 1];
/// Warps of a block of a sweep, at the most.
pub(super) const MOST_WARPS: usize = 8;
/// Value heads from which one warp takes all of K: they fill the GPU well enough, even those of a single sequence.
const MANY_VALUE_HEADS: usize = 24;
/// Segments of a long sequence: their ends fill the GPU once, with the columns of the identity beside those of V, in blocks of
/// 64 columns.
const SEGMENTS: Segments = Segments { heads: 33, more: 1, least_chunks: 32 };
/// The same for models of few value heads: sweeps over V in blocks of 64 columns fill it once, ends in blocks of 128.
const SEGMENTS_OF_FEW: Segments = Segments { heads: 64, more: 0, least_chunks: 16 };
const FEW_VALUE_HEADS: usize = 8;
/// Segments of a sequence that is worth cutting: it is read twice then.
const LEAST_SEGMENTS: usize = 3;
/// Key dimensions from which two warps share K whatever the heads, since one has too few registers.
const LARGE_KEY_DIM: usize = 192;
/// Chunks of a sweep in shared memory at once, at the most.
pub(super) const MOST_STAGES: usize = 4;
/// Columns of V in a block of the gradient's stream, and its stages, the best first.
const GRADIENT_TILES: &[(usize, usize)] = &[(128, 2), (64, 2), (32, 3), (32, 2), (16, 2), (16, 1)];

/// What is compiled in because results depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Format of the operands.
    pub mode: Mode,
    /// Format of q, k, v, do and of o, dq, dk, dv: f32, bf16 or f16.
    pub input: Format,
    /// `K` = d_k.
    pub key_dim: usize,
    /// `V` = d_v.
    pub value_dim: usize,
    /// `HV`: of the model; how many sequences come with it must not matter.
    pub value_heads: usize,
}

/// What there is to do side by side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Value heads of all segments of sequences together.
    pub heads: usize,
    /// Whether a sequence has more than one segment.
    pub cut: bool,
}

/// What a GPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    /// Number of multiprocessors.
    pub multiprocessors: usize,
    /// Shared memory that a block can have at the most, in bytes.
    pub shared_bytes_per_block: usize,
}

impl From<&Gpu> for Card {
    fn from(gpu: &Gpu) -> Self {
        Self {
            multiprocessors: gpu.multiprocessors as usize,
            shared_bytes_per_block: gpu.shared_bytes_per_block as usize,
        }
    }
}

/// A specialisation, and the shape of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// What results depend on.
    pub variant: Variant,
    /// `C`: tokens of a chunk.
    pub chunk: usize,
    /// Groups of warps in a block of the sweeps, 16 columns of V each.
    pub groups: usize,
    /// Chunks of a sweep that are in shared memory at once.
    pub stages: usize,
    /// Whether the sweeps over segments are there too, which a cut sequence needs.
    pub cut: bool,
    /// The gradient of one chunk; `None` where no tile of it fits into the GPU's shared memory.
    pub gradient: Option<GradientTile>,
}

/// The shape of the stream of the gradient kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradientTile {
    /// Columns of V in a block of the stream.
    pub v_block: usize,
    /// Blocks in shared memory at once.
    pub stages: usize,
}

/// How long sequences are cut.
pub(super) struct Segments {
    /// Of a sequence, times value heads; and so many more.
    pub heads: usize,
    pub more: usize,
    /// Chunks of a segment at the least.
    pub least_chunks: usize,
}

/// As many as `wanted` segments of `chunks` chunks, or 1 where they would be shorter than `least_chunks`, or too few.
pub(super) fn worthwhile_segments(wanted: usize, chunks: usize, least_chunks: usize) -> usize {
    let segments = usize::min(wanted, chunks / least_chunks);
    if segments >= LEAST_SEGMENTS { segments } else { 1 }
}

impl Variant {
    /// Refuses what there is no kernel for.
    ///
    /// # Errors
    /// [`Error::Input`] with the accepted values.
    pub fn validate(&self) -> Result<()> {
        for (name, dim) in [("K", self.key_dim), ("V", self.value_dim)] {
            if !HEAD_DIMS.contains(&dim) {
                let dims = HEAD_DIMS.map(|dim| dim.to_string()).join(", ");
                return Err(Error::input(format!("chunk: {name} = {dim}: expected one of {dims}")));
            }
        }
        self.input_in_cuda().map(|_| ())
    }

    /// `C`: tokens of a chunk.
    pub fn chunk(&self) -> usize {
        if self.mode.operand_bytes() == 2 && self.key_dim <= 128 { 64 } else { 32 }
    }

    /// `SPLIT`: warps of a group of the sweeps. With two, a chunk takes less time, and all of them together more.
    pub fn split(&self) -> usize {
        if self.value_heads >= MANY_VALUE_HEADS && self.key_dim < LARGE_KEY_DIM { 1 } else { 2 }
    }

    /// Segments into which a sequence of `chunks` chunks is cut, which then run side by side. The sums of a state have
    /// another order then, so the batch has no say.
    pub fn segments(&self, chunks: usize) -> usize {
        let Segments { heads, more, least_chunks } =
            if self.value_heads <= FEW_VALUE_HEADS { SEGMENTS_OF_FEW } else { SEGMENTS };
        worthwhile_segments(heads / self.value_heads.max(1) + more, chunks, least_chunks)
    }

    /// Whether blocks of so many columns divide those of V, and of the identity where sequences are cut.
    pub(super) fn divides_into(&self, columns: usize, cut: bool) -> bool {
        self.value_dim.is_multiple_of(columns) && (!cut || self.key_dim.is_multiple_of(columns))
    }

    /// What there is to do side by side for `sequences`; an empty one is nothing.
    pub fn work(&self, sequences: &[Range<usize>]) -> Work {
        let segments = |tokens: &Range<usize>| self.segments(tokens.len().div_ceil(self.chunk()));
        let lengths = || sequences.iter().filter(|tokens| !tokens.is_empty()).map(segments);
        Work { heads: lengths().sum::<usize>().saturating_mul(self.value_heads), cut: lengths().any(|n| n > 1) }
    }

    /// The name of the input format in CUDA.
    fn input_in_cuda(&self) -> Result<&'static str> {
        in_cuda(self.input)
    }

    pub(super) fn defines(&self) -> Result<Vec<(&'static str, String)>> {
        Ok(vec![
            ("MODE", self.mode.number().to_string()),
            ("INPUT", self.input_in_cuda()?.to_owned()),
            ("KD", self.key_dim.to_string()),
            ("VD", self.value_dim.to_string()),
            ("CHUNK", self.chunk().to_string()),
        ])
    }
}

impl Config {
    /// The specialisation for this much work on `card`.
    ///
    /// # Errors
    /// [`Error::Input`] where there is no kernel for `variant`, [`Error::Gpu`] where `card` has too little shared memory.
    pub fn new(variant: Variant, work: Work, card: &Card) -> Result<Self> {
        variant.validate()?;
        let Work { heads, cut } = work;
        let mut config = Self { variant, chunk: variant.chunk(), groups: 1, stages: 1, cut, gradient: None };
        let fits = |config: &Self| config.sweep_bytes(true) + SWEEP_STATIC_BYTES <= card.shared_bytes_per_block;
        // Large blocks share what they read; more of them than half of the multiprocessors run side by side.
        let enough = |config: &Self| heads.saturating_mul(config.sweep_blocks()) >= card.multiprocessors / 2;
        let mut blocks = GROUPS
            .into_iter()
            .filter(|groups| groups * variant.split() <= MOST_WARPS)
            .filter(|groups| variant.divides_into(GROUP_COLUMNS * groups, cut))
            .map(|groups| Self { groups, ..config })
            .filter(fits);
        config = blocks
            .clone()
            .find(enough)
            .or_else(|| blocks.next_back())
            .ok_or_else(|| too_little("the sweep", &config, card, |config| config.sweep_bytes(true)))?;
        let ahead = (1..=MOST_STAGES).rev().map(|stages| Self { stages, ..config }).find(fits);
        config = ahead.unwrap_or(config);
        config.gradient = GRADIENT_TILES
            .iter()
            .map(|&(v_block, stages)| GradientTile { v_block, stages })
            .filter(|tile| variant.value_dim.is_multiple_of(tile.v_block))
            .find(|tile| config.gradient_bytes(*tile) + config.gradient_static_bytes() <= card.shared_bytes_per_block);
        Ok(config)
    }

    /// The tile of the gradient.
    ///
    /// # Errors
    /// [`Error::Gpu`] where `card` has too little shared memory for any.
    pub fn gradient(&self, card: &Card) -> Result<GradientTile> {
        let smallest = GradientTile { v_block: 16, stages: 1 };
        let needed = |config: &Self| config.gradient_bytes(smallest) + config.gradient_static_bytes();
        self.gradient.ok_or_else(|| too_little("the backward", self, card, needed))
    }

    fn operand_bytes(&self) -> usize {
        self.variant.mode.operand_bytes()
    }

    /// Operands from a row of K' or Q' to the next.
    pub(super) fn row_pitch(&self) -> usize {
        self.variant.key_dim + PAD
    }

    /// Operands from a row of T or the scores to the next.
    pub(super) fn square_pitch(&self) -> usize {
        self.chunk + PAD
    }

    /// Threads of a block of the preparation: two warps for 16 rows.
    pub fn prepare_threads(&self) -> usize {
        4 * self.chunk
    }

    /// Dynamic shared memory of the preparation, in bytes: K' and Q', then squares in their place.
    pub fn prepare_bytes(&self) -> usize {
        self.chunk * self.operand_bytes() * usize::max(2 * self.row_pitch(), 4 * self.square_pitch())
    }

    /// Value heads of a group that a block of the preparation takes: as many as leave a block for each multiprocessor.
    pub fn heads_per_block(&self, chunks: usize, qk_heads: usize, group: usize, card: &Card) -> usize {
        let blocks = |heads: usize| chunks.saturating_mul(qk_heads).saturating_mul(group / heads);
        (1..=group.min(MOST_HEADS))
            .rev()
            .filter(|&heads| group.is_multiple_of(heads))
            .find(|&heads| heads == 1 || blocks(heads) >= card.multiprocessors)
            .unwrap_or(1)
    }

    /// Threads of a block of the sweeps.
    pub fn sweep_threads(&self) -> usize {
        LANES * self.variant.split() * self.groups
    }

    /// Blocks of a head of the sweeps.
    pub fn sweep_blocks(&self) -> usize {
        self.blocks_of(self.variant.value_dim)
    }

    /// Blocks of a head of a sweep over this many columns: those of V, and of the identity where segments are joined.
    pub fn blocks_of(&self, columns: usize) -> usize {
        columns / (GROUP_COLUMNS * self.groups)
    }

    /// Blocks of a head that join its segments.
    pub fn join_blocks(&self) -> usize {
        self.variant.value_dim / if self.variant.key_dim > 128 { 4 } else { 8 }
    }

    /// Dynamic shared memory of a sweep, with or without tiles of Q' and the scores, in bytes.
    pub fn sweep_bytes(&self, queries: bool) -> usize {
        let (operand, input) = (self.operand_bytes(), self.variant.input.bytes());
        let columns = GROUP_COLUMNS * self.groups;
        // Results are turned around in place of the values, or beside them where an operand is wider.
        let beside = if input < operand { columns * input } else { 0 };
        let value_pitch = beside + columns * input.max(operand) + 16;
        let tiles = self.chunk * (self.row_pitch() + self.square_pitch()) * operand;
        let kinds = if queries { 2 } else { 1 };
        let stage = kinds * tiles + COEFFICIENTS * self.chunk * size_of::<f32>() + self.chunk * value_pitch;
        self.groups * self.exchange_bytes() + self.stages * stage
    }

    /// No less than what the two warps of a group exchange in a sweep (`Exchange`), in bytes: sums of 16 columns by the
    /// tokens of the chunk, and seven sets of left operands (`Left`) of half the chunk, each with a scale; and two numbers.
    pub(super) fn exchange_bytes(&self) -> usize {
        if self.variant.split() == 1 {
            return 0;
        }
        let sums = GROUP_COLUMNS * self.chunk * size_of::<f32>();
        let left = 8 * self.operand_bytes();
        let operands = self.chunk / 32 * LANES * left + 16;
        sums + 7 * operands + 16
    }

    /// Warps that share the columns of K in the gradient.
    fn column_warps(&self) -> usize {
        if self.chunk == 32 && self.variant.key_dim.is_multiple_of(64) { 4 } else { 2 }
    }

    /// Threads of a block of the gradient.
    pub fn gradient_threads(&self) -> usize {
        LANES * (self.chunk / 16) * self.column_warps()
    }

    /// Dynamic shared memory of the gradient, in bytes.
    pub fn gradient_bytes(&self, tile: GradientTile) -> usize {
        let (operand, input) = (self.operand_bytes(), self.variant.input.bytes());
        let operand_tile = self.chunk * (tile.v_block + PAD) * operand;
        let input_tile = self.chunk * (tile.v_block * input + 16);
        let squares = 2 * input_tile + 2 * operand_tile;
        let product = operand_tile.max(input_tile) + tile.v_block * self.row_pitch() * operand;
        let resident = 2 * self.chunk * (self.row_pitch() + self.square_pitch()) * operand;
        resident + tile.stages * squares.max(product)
    }

    /// No less than the static shared memory of the gradient, in bytes: 40 numbers for each token, and some for each tile of V.
    fn gradient_static_bytes(&self) -> usize {
        1024 + size_of::<f32>() * (40 * self.chunk + 700)
    }

    /// The preparation, one specialisation of its file; likewise the others.
    pub fn prepare(&self) -> Result<Build> {
        self.build("chunk_prepare", &[])
    }

    pub(super) fn sweep_defines(&self) -> Vec<(&'static str, usize)> {
        let shape = [("SPLIT", self.variant.split()), ("GROUPS", self.groups), ("STAGES", self.stages)];
        let cut = self.cut.then_some(("CUT", 1));
        shape.into_iter().chain(cut).collect()
    }

    /// `chunk_forward`, `chunk_states`, and `chunk_segment_ends` where a sequence is cut.
    pub fn forward(&self) -> Result<Build> {
        self.build("chunk_forward", &self.sweep_defines())
    }

    /// `chunk_join_states` and `chunk_join_d_states`.
    pub fn join(&self) -> Result<Build> {
        self.build("chunk_join", &[])
    }

    /// `chunk_backward`, and `chunk_segment_starts` where a sequence is cut.
    pub fn backward(&self) -> Result<Build> {
        self.build("chunk_backward", &self.sweep_defines())
    }

    /// `chunk_gradient`.
    pub fn gradient_build(&self, tile: GradientTile) -> Result<Build> {
        self.build("chunk_gradient", &[("V_BLOCK", tile.v_block), ("STAGES", tile.stages)])
    }

    /// All of them that there are on this GPU.
    pub fn builds(&self) -> Result<Vec<Build>> {
        let mut builds = vec![self.prepare()?, self.forward()?, self.backward()?];
        if self.cut {
            builds.push(self.join()?);
        }
        if let Some(tile) = self.gradient {
            builds.push(self.gradient_build(tile)?);
        }
        Ok(builds)
    }

    /// What takes the place of these on Hopper: `chunk_sweep_hopper` that of [`Config::forward`], in all shapes of blocks,
    /// `chunk_backward_hopper` and `chunk_gradient_hopper`; none where they do not take the model.
    pub fn hopper_builds(&self) -> Result<Vec<Build>> {
        let gradient = HopperGradient::of(self);
        let mut builds = HopperSweep::builds(self, None)?;
        builds.extend(gradient.as_ref().map(HopperGradient::build).transpose()?);
        Ok(builds)
    }

    fn build(&self, file: &str, own: &[(&'static str, usize)]) -> Result<Build> {
        let mut defines = self.variant.defines()?;
        defines.extend(own.iter().map(|&(name, value)| (name, value.to_string())));
        Ok(Build { source: source(file)?, defines })
    }
}

/// The name of a format in CUDA.
pub(super) fn in_cuda(format: Format) -> Result<&'static str> {
    match format {
        Format::F32 => Ok("float"),
        Format::Bf16 => Ok("bf16"),
        Format::F16 => Ok("f16"),
        other => Err(Error::input(format!("chunk: inputs in {other}: expected f32, bf16 or f16"))),
    }
}

/// What tells the kernels that gates are those of GDN-2, in this format.
pub(super) fn channel_defines(gates: Format) -> Result<[(&'static str, String); 2]> {
    Ok([("CHANNELS", "1".to_owned()), ("GATE", in_cuda(gates)?.to_owned())])
}

fn too_little(what: &str, config: &Config, card: &Card, needed: impl Fn(&Config) -> usize) -> Error {
    let Variant { mode, input, key_dim, value_dim, .. } = config.variant;
    Error::gpu(format!(
        "chunk: {what} of K = {key_dim}, V = {value_dim} in mode {mode} with {input} inputs needs {} bytes of shared \
         memory in a block, and this GPU has {}: use smaller heads or a mode of 16 bits",
        needed(config),
        card.shared_bytes_per_block
    ))
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
