//! The kernels of one problem, ready to be launched.

use super::build;
use super::heads::{HeadsParam, Rows};
use super::hopper::{BackwardParams, ForwardParams};
use super::setup::{Backward, Forward, Setup};
use crate::cuda::{Function, Gpu, Grid, Module, Stream};
use crate::{Error, Result};

/// Elements that pad a row in shared memory (`PAD`).
const PAD: usize = 8;
const ELEMENT_BYTES: usize = 2;

/// Causal attention for one problem on one GPU.
///
/// ```no_run
/// use gdnlab::cuda::{Gpu, attention::{Attention, Forward, Rows, Setup}};
/// use half::bf16;
/// # fn main() -> gdnlab::Result<()> {
/// let gpu = Gpu::shared()?;
/// let setup = Setup { batch: 2, tokens: 1000, heads: 8, head_dim: 64, scale: 0.125, backward: false };
/// let plan = Attention::new(gpu, setup)?;
/// let qkv = gpu.upload(&vec![bf16::ONE; 3 * setup.elements()])?;
/// let (o, lse) = (gpu.alloc(setup.elements())?, gpu.alloc(setup.rows())?);
/// let [q, k, v] = setup.fused(&qkv);
/// // SAFETY: the buffers live until the download has waited for the kernel, and do not overlap.
/// unsafe { plan.forward(gpu.stream(), &Forward { q, k, v, o: setup.whole(&o), lse: Rows::of(&lse) })? };
/// assert_eq!(gpu.download(&o)?.len(), 2 * 1000 * 8 * 64);
/// # Ok(())
/// # }
/// ```
pub struct Attention {
    setup: Setup,
    section: i32,
    path: Path,
    forward: Step,
    backward: Option<BackwardSteps>,
}

/// Which kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Those for every GPU from compute capability 8.0 on.
    Portable,
    /// Those for compute capability 9.0 alone.
    Hopper,
}

impl Path {
    /// The faster one of those that a GPU of this compute capability has.
    fn of(capability: (u32, u32)) -> Self {
        if capability == (9, 0) { Self::Hopper } else { Self::Portable }
    }
}

/// In the order of their launches.
struct BackwardSteps {
    delta: Step,
    queries: Step,
    keys: Step,
}

/// A kernel with the shape of its launch.
struct Step {
    function: Function,
    grid: Grid,
}

/// `AttentionParams` of the kernels; addresses as numbers.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Params {
    q: HeadsParam,
    k: HeadsParam,
    v: HeadsParam,
    o: HeadsParam,
    d_o: HeadsParam,
    dq: HeadsParam,
    dk: HeadsParam,
    dv: HeadsParam,
    lse: u64,
    delta: u64,
    batch: i32,
    tokens: i32,
    heads: i32,
    section: i32,
    scale: f32,
}

/// What a block of a kernel takes: constants of the kernel's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    /// Tokens of a head.
    pub tokens: usize,
    /// Threads.
    pub threads: usize,
    /// Shared memory in bytes.
    pub shared_bytes: usize,
}

impl Tile {
    /// `attention_forward`: 128 queries; two stages of 64 keys and values.
    pub fn forward(head_dim: usize) -> Self {
        Self { tokens: 128, threads: 256, shared_bytes: 4 * rows(64, head_dim) }
    }

    /// `attention_forward_hopper`: 128 queries; 112 KiB of queries, keys and values, and what keeps order.
    pub fn forward_hopper() -> Self {
        Self { tokens: 128, threads: 256, shared_bytes: (112 << 10) + 128 }
    }

    /// `attention_backward_queries`: as `attention_forward`, of fewer queries where registers suffice for more blocks.
    pub fn queries(head_dim: usize) -> Self {
        let (tokens, threads) = if head_dim == 64 { (64, 128) } else { (128, 256) };
        Self { tokens, threads, shared_bytes: 4 * rows(64, head_dim) }
    }

    /// `attention_backward_keys`: keys and values; two stages of queries, do, lse and delta.
    pub fn keys(head_dim: usize) -> Self {
        let (tokens, threads, queries) = if head_dim == 64 { (128, 256, 64) } else { (64, 128, 32) };
        let stage = 2 * rows(queries, head_dim) + 2 * queries * size_of::<f32>();
        Self { tokens, threads, shared_bytes: 2 * rows(tokens, head_dim) + 2 * stage }
    }

    /// `attention_backward_queries_hopper`: 64 queries and do; stages of as many keys and values.
    pub fn queries_hopper(head_dim: usize) -> Self {
        let stages = if head_dim == 64 { 3 } else { 2 };
        Self { tokens: 64, threads: 128, shared_bytes: backward_hopper((1 + stages) * 64, head_dim) }
    }

    /// `attention_backward_keys_hopper`: 64 keys and values; two stages of as many queries and do.
    pub fn keys_hopper(head_dim: usize) -> Self {
        Self { tokens: 64, threads: 128, shared_bytes: backward_hopper(3 * 64, head_dim) }
    }

    fn grid(&self, setup: &Setup) -> Result<Grid> {
        grid(setup.batch * setup.heads * setup.tokens.div_ceil(self.tokens), self.threads, self.shared_bytes)
    }
}

/// Bytes of padded rows in shared memory.
fn rows(count: usize, head_dim: usize) -> usize {
    count * (head_dim + PAD) * ELEMENT_BYTES
}

/// Bytes of rows of two tensors, and up to 2 KiB of lse, delta and what keeps order.
fn backward_hopper(rows: usize, head_dim: usize) -> usize {
    2 * rows * head_dim * ELEMENT_BYTES + (2 << 10)
}

/// `attention_delta`: 8 elements of a row to a thread.
fn delta_grid(setup: &Setup) -> Result<Grid> {
    const THREADS: usize = 256;
    grid((setup.rows() * (setup.head_dim / 8)).div_ceil(THREADS), THREADS, 0)
}

fn grid(blocks: usize, threads: usize, shared_bytes: usize) -> Result<Grid> {
    let blocks = u32::try_from(blocks)
        .map_err(|_| Error::input(format!("attention: {blocks} blocks in a launch: use a smaller problem")))?;
    Ok(Grid { blocks: [blocks, 1, 1], threads: threads as u32, shared_bytes: shared_bytes as u32, ..Grid::default() })
}

impl Attention {
    /// Compiles the kernels, or takes them from the cache.
    ///
    /// # Errors
    /// [`Error::Input`] where there are no kernels for `setup`, [`Error::Gpu`] where they cannot be had.
    pub fn new(gpu: &Gpu, setup: Setup) -> Result<Self> {
        Self::with_path(gpu, setup, Path::of(gpu.capability))
    }

    /// The same with a path of one's choice.
    ///
    /// # Errors
    /// As [`Attention::new`], and [`Error::Input`] for a path that this GPU does not have.
    pub fn with_path(gpu: &Gpu, setup: Setup, path: Path) -> Result<Self> {
        setup.validate()?;
        if path == Path::Hopper && gpu.capability != (9, 0) {
            let (major, minor) = gpu.capability;
            return Err(Error::input(format!(
                "attention: Path::Hopper needs compute capability 9.0, and this GPU has {major}.{minor}: use Path::Portable"
            )));
        }
        let dim = setup.head_dim;
        let (kernel, tile) = match path {
            Path::Portable => ("attention_forward", Tile::forward(dim)),
            Path::Hopper => ("attention_forward_hopper", Tile::forward_hopper()),
        };
        let module = gpu.module(&build(kernel, dim)?)?;
        let forward = Step::new(&module, kernel, tile.grid(&setup)?)?;
        let backward = if setup.backward { Some(BackwardSteps::new(gpu, path, &setup)?) } else { None };
        Ok(Self { setup, section: section(&setup, gpu.l2_bytes), path, forward, backward })
    }

    /// What it was made for.
    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// Starts a forward on `stream`, such as the one of a graph that is being recorded, and does not wait for it.
    ///
    /// # Errors
    /// [`Error::Input`] where a tensor does not fit, [`Error::Gpu`] where the launch is refused.
    ///
    /// # Safety
    /// Each tensor's memory is that of this GPU, has its length, and is neither freed nor used by another stream until the
    /// forward has ended, or the last replay of a graph that holds it. What is written shares no element with another tensor.
    pub unsafe fn forward(&self, stream: &Stream, call: &Forward) -> Result<()> {
        self.setup.check_forward(call)?;
        let Forward { q, k, v, o, lse } = call;
        let params = Params { q: q.param(), k: k.param(), v: v.param(), o: o.param(), ..self.params(lse) };
        match self.path {
            // SAFETY: all elements are inside of what the caller promises.
            Path::Portable => unsafe { self.forward.launch(stream, &params) },
            Path::Hopper => {
                let params = ForwardParams::new(&self.setup, call, params)?;
                // SAFETY: as above; the maps end where the tensors do.
                unsafe { self.forward.launch(stream, &params) }
            }
        }
    }

    /// Starts a backward on `stream`, and does not wait for it.
    ///
    /// # Errors
    /// As [`Attention::forward`].
    ///
    /// # Safety
    /// As for [`Attention::forward`].
    pub unsafe fn backward(&self, stream: &Stream, call: &Backward) -> Result<()> {
        self.setup.check_backward(call)?;
        let Backward { q, k, v, o, lse, d_o, delta, dq, dk, dv } = call;
        let params = Params {
            q: q.param(),
            k: k.param(),
            v: v.param(),
            o: o.param(),
            d_o: d_o.param(),
            dq: dq.param(),
            dk: dk.param(),
            dv: dv.param(),
            delta: delta.address,
            ..self.params(lse)
        };
        let Some(steps) = &self.backward else {
            return Err(Error::gpu("attention: this plan has no kernels for a backward"));
        };
        // SAFETY: all elements are inside of what the caller promises; maps end where the tensors do.
        unsafe {
            steps.delta.launch(stream, &params)?;
            match self.path {
                Path::Portable => steps.products().try_for_each(|step| step.launch(stream, &params)),
                Path::Hopper => {
                    let params = BackwardParams::new(&self.setup, call, params)?;
                    steps.products().try_for_each(|step| step.launch(stream, &params))
                }
            }
        }
    }

    fn params(&self, lse: &Rows) -> Params {
        let Setup { batch, tokens, heads, scale, .. } = self.setup;
        Params {
            lse: lse.address,
            batch: batch as i32,
            tokens: tokens as i32,
            heads: heads as i32,
            section: self.section,
            scale,
            ..Params::default()
        }
    }
}

impl BackwardSteps {
    fn new(gpu: &Gpu, path: Path, setup: &Setup) -> Result<Self> {
        let dim = setup.head_dim;
        let module = gpu.module(&build("attention_backward", dim)?)?;
        let delta = Step::new(&module, "attention_delta", delta_grid(setup)?)?;
        let (queries, keys) = match path {
            Path::Portable => (
                Step::new(&module, "attention_backward_queries", Tile::queries(dim).grid(setup)?)?,
                Step::new(&module, "attention_backward_keys", Tile::keys(dim).grid(setup)?)?,
            ),
            Path::Hopper => {
                let module = gpu.module(&build("attention_backward_hopper", dim)?)?;
                (
                    Step::new(&module, "attention_backward_queries_hopper", Tile::queries_hopper(dim).grid(setup)?)?,
                    Step::new(&module, "attention_backward_keys_hopper", Tile::keys_hopper(dim).grid(setup)?)?,
                )
            }
        };
        Ok(Self { delta, queries, keys })
    }

    fn products(&self) -> impl Iterator<Item = &Step> {
        [&self.queries, &self.keys].into_iter()
    }
}

impl Step {
    fn new(module: &Module, kernel: &str, grid: Grid) -> Result<Self> {
        Ok(Self { function: module.function(kernel)?, grid })
    }

    /// # Safety
    /// As for [`Function::launch`].
    unsafe fn launch<P: Copy>(&self, stream: &Stream, params: &P) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.function.launch(stream, self.grid, params) }
    }
}

/// Heads that are worked on together: as many as have their keys and values in half of the L2 cache.
pub(super) fn section(setup: &Setup, l2_bytes: usize) -> i32 {
    let head_bytes = 2 * setup.tokens * setup.head_dim * ELEMENT_BYTES;
    (l2_bytes / 2 / head_bytes).clamp(1, setup.batch * setup.heads) as i32
}
