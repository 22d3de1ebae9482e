//! Attention with its scores in memory: products by cuBLASLt, and a causal softmax between them (`kernels/softmax.cu`).
//!
//! ```text
//! S = scale Q K^T         P = softmax(S) in the place of S           O = P V
//! dV = P^T dO             dP = dO V^T                                dS = P (dP - rows of P dP) in the place of dP
//! dQ = scale dS K         dK = scale dS^T Q
//! ```
//! A matrix of scores is `[T, T]` in bf16 for each head of each sequence, whole, though half of it is masked: this is what
//! kernels that store no score are held against.

use super::heads::Heads;
use super::setup::{Backward, Forward, Setup};
use crate::cuda::{Batch, Buffer, Build, Function, Gpu, Grid, Matmul, Operand, Operator, Product, Stream, source};
use crate::precision::Format;
use crate::{Error, Result};
use half::bf16;

/// Elements of an access, of which a row of scores takes whole ones.
const ACCESS: usize = 8;
const THREADS: usize = 256;
/// Rows of a block: one to a warp.
const ROWS: usize = THREADS / 32;

/// Causal attention through its scores, for one problem on one GPU. Tensors lie as `[H, B, T, d]` ([`Setup::heads_first`]),
/// so that one batch of products takes all heads of all sequences.
pub struct MathAttention {
    setup: Setup,
    /// `[H, B, T, pitch]`: the scores, then the weights that the backward takes.
    scores: Buffer<bf16>,
    softmax: Function,
    of_scores: Matmul,
    of_output: Matmul,
    backward: Option<BackwardSteps>,
}

struct BackwardSteps {
    /// As the scores.
    gradient: Buffer<bf16>,
    softmax: Function,
    of_keys: Matmul,
}

/// `Softmax` of the kernels; addresses as numbers.
#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    scores: u64,
    gradient: u64,
    lse: u64,
    batch: i32,
    tokens: i32,
    heads: i32,
    pitch: i32,
}

/// Elements from one row of scores to the next.
fn pitch(setup: &Setup) -> usize {
    setup.tokens.next_multiple_of(ACCESS)
}

fn score_elements(setup: &Setup) -> usize {
    setup.rows().saturating_mul(pitch(setup))
}

impl MathAttention {
    /// Bytes of the matrices of scores, and for a backward of their gradients.
    pub fn scores_bytes(setup: &Setup) -> usize {
        let matrices = if setup.backward { 2 } else { 1 };
        score_elements(setup).saturating_mul(matrices * size_of::<bf16>())
    }

    /// Compiles the kernels, takes algorithms for the products, and allocates the scores.
    ///
    /// # Errors
    /// [`Error::Input`] where there are no kernels for `setup`; [`Error::Gpu`] where they or cuBLASLt cannot be had, or the
    /// scores have no room in the GPU's memory, which is asked before anything is allocated.
    pub fn new(gpu: &Gpu, setup: Setup) -> Result<Self> {
        setup.validate()?;
        require(&setup, gpu.free_bytes()?)?;
        let module = gpu.module(&build()?)?;
        let [of_scores, of_output, of_keys] = products(&setup);
        let backward = || -> Result<BackwardSteps> {
            Ok(BackwardSteps {
                gradient: gpu.alloc(score_elements(&setup))?,
                softmax: module.function("softmax_gradient")?,
                of_keys: Matmul::new(gpu, &of_keys)?,
            })
        };
        let plan = Self {
            scores: gpu.alloc(score_elements(&setup))?,
            softmax: module.function("softmax")?,
            of_scores: Matmul::new(gpu, &of_scores)?,
            of_output: Matmul::new(gpu, &of_output)?,
            backward: setup.backward.then(backward).transpose()?,
            setup,
        };
        // Then other streams may use the scores, too.
        gpu.synchronize()?;
        Ok(plan)
    }

    /// Starts a forward on `stream`, and does not wait for it.
    ///
    /// # Errors
    /// As [`Attention::forward`](super::Attention::forward), and [`Error::Input`] where a tensor does not lie as
    /// [`Setup::heads_first`].
    ///
    /// # Safety
    /// As for [`Attention::forward`](super::Attention::forward), and until then neither is this dropped or used on another
    /// stream.
    pub unsafe fn forward(&self, stream: &Stream, call: &Forward) -> Result<()> {
        self.setup.check_forward(call)?;
        let Forward { q, k, v, o, lse } = call;
        self.check_layout(&[("q", q), ("k", k), ("v", v), ("o", o)])?;
        let scores = self.scores.address();
        // SAFETY: the tensors have the sizes of the products, and so do the scores; the rest is the caller's promise.
        unsafe {
            self.of_scores.run_on(stream, q.address, k.address, scores, self.setup.scale, 0.0)?;
            self.softmax.launch(stream, self.grid()?, &self.params(0, lse.address))?;
            self.of_output.run_on(stream, scores, v.address, o.address, 1.0, 0.0)
        }
    }

    /// Starts a backward on `stream`, and does not wait for it. It takes the weights that the last forward left here; o, lse
    /// and delta are not used.
    ///
    /// # Errors
    /// As [`MathAttention::forward`].
    ///
    /// # Safety
    /// As for [`MathAttention::forward`].
    pub unsafe fn backward(&self, stream: &Stream, call: &Backward) -> Result<()> {
        self.setup.check_backward(call)?;
        let Backward { q, k, v, d_o, dq, dk, dv, .. } = call;
        self.check_layout(&[("q", q), ("k", k), ("v", v), ("do", d_o), ("dq", dq), ("dk", dk), ("dv", dv)])?;
        let Some(steps) = &self.backward else {
            return Err(Error::gpu("attention: this plan has no kernels for a backward"));
        };
        let (weights, gradient, scale) = (self.scores.address(), steps.gradient.address(), self.setup.scale);
        // SAFETY: as in the forward. A gradient of the scores has their size.
        unsafe {
            steps.of_keys.run_on(stream, weights, d_o.address, dv.address, 1.0, 0.0)?;
            self.of_scores.run_on(stream, d_o.address, v.address, gradient, 1.0, 0.0)?;
            steps.softmax.launch(stream, self.grid()?, &self.params(gradient, 0))?;
            self.of_output.run_on(stream, gradient, k.address, dq.address, scale, 0.0)?;
            steps.of_keys.run_on(stream, gradient, q.address, dk.address, scale, 0.0)
        }
    }

    fn check_layout(&self, tensors: &[(&str, &Heads)]) -> Result<()> {
        tensors.iter().try_for_each(|(name, heads)| check_layout(&self.setup, name, heads))
    }

    fn grid(&self) -> Result<Grid> {
        let blocks = self.setup.rows().div_ceil(ROWS);
        let blocks = u32::try_from(blocks)
            .map_err(|_| Error::input(format!("attention: {blocks} blocks in a launch: use a smaller problem")))?;
        Ok(Grid { blocks: [blocks, 1, 1], threads: THREADS as u32, ..Grid::default() })
    }

    fn params(&self, gradient: u64, lse: u64) -> Params {
        let Setup { batch, tokens, heads, .. } = self.setup;
        let [batch, tokens, heads, pitch] = [batch, tokens, heads, pitch(&self.setup)].map(|size| size as i32);
        Params { scores: self.scores.address(), gradient, lse, batch, tokens, heads, pitch }
    }
}

/// `[T, d] x [d, T]` into scores; scores with `[T, d]`; transposed scores with `[T, d]`. For all heads of all sequences.
fn products(setup: &Setup) -> [Product; 3] {
    let Setup { tokens, head_dim, .. } = *setup;
    let (pitch, count) = (pitch(setup), setup.batch * setup.heads);
    let (of_tensor, of_scores) = (tokens * head_dim, tokens * pitch);
    let into = Product {
        c_pitch: pitch,
        batch: Batch { count, a: of_tensor, b: of_tensor, c: of_scores },
        ..Product::new(tokens, tokens, head_dim, Format::Bf16).b_transposed()
    };
    let from = |product: Product| Product {
        a: Operand { pitch, ..product.a },
        batch: Batch { count, a: of_scores, b: of_tensor, c: of_tensor },
        ..product
    };
    let with = Product::new(tokens, head_dim, tokens, Format::Bf16);
    [into, from(with), from(with.a_transposed())]
}

/// Refuses scores that do not fit into `free` bytes.
fn require(setup: &Setup, free: usize) -> Result<()> {
    let needed = MathAttention::scores_bytes(setup);
    if needed <= free {
        return Ok(());
    }
    Err(Error::gpu(format!(
        "attention: the scores of B = {}, H = {}, T = {}{} have {:.2} GB, and {:.2} GB of the GPU's memory are free: take fewer \
         or shorter sequences, or a kernel that stores no scores",
        setup.batch,
        setup.heads,
        setup.tokens,
        if setup.backward { " and their gradients" } else { "" },
        needed as f64 / 1e9,
        free as f64 / 1e9
    )))
}

fn check_layout(setup: &Setup, name: &str, heads: &Heads) -> Result<()> {
    let Setup { head_dim, .. } = *setup;
    let of_head = setup.batch * setup.tokens * head_dim;
    if heads.row_pitch == head_dim && (setup.heads == 1 || heads.head_pitch == of_head) {
        return Ok(());
    }
    Err(Error::input(format!(
        "attention through its scores: {name} with {} elements from token to token and {} from head to head: expected \
         {head_dim} and {of_head}, a tensor [H, B, T, d] without gaps",
        heads.row_pitch, heads.head_pitch
    )))
}

fn build() -> Result<Build> {
    Ok(Build { source: source("softmax")?, defines: vec![] })
}

/// What the tests have to know.
pub(in crate::cuda) const OPERATOR: Operator = Operator {
    name: "softmax",
    builds: || Ok(vec![build()?]),
    parameters: &[("softmax", size_of::<Params>()), ("softmax_gradient", size_of::<Params>())],
};

#[cfg(test)]
mod tests {
    use super::*;

    const SETUP: Setup = Setup { batch: 2, tokens: 100, heads: 3, head_dim: 64, scale: 0.125, backward: true };

    #[test]
    fn products_take_whole_matrices_of_all_heads() {
        for setup in [SETUP, Setup { batch: 1, heads: 1, ..SETUP }, Setup { tokens: 1, head_dim: 128, ..SETUP }] {
            let [of_scores, of_output, of_keys] = products(&setup);
            let last_row = pitch(&setup) - setup.tokens;
            for (product, scores, tensors) in [
                (of_scores, of_scores.c_elements(), [of_scores.a_elements(), of_scores.b_elements()]),
                (of_output, of_output.a_elements(), [of_output.b_elements(), of_output.c_elements()]),
                (of_keys, of_keys.a_elements(), [of_keys.b_elements(), of_keys.c_elements()]),
            ] {
                product.validate().unwrap();
                assert_eq!(scores + last_row, score_elements(&setup), "{product}");
                assert_eq!(tensors, [setup.elements(); 2], "{product}");
            }
        }
        assert_eq!(pitch(&SETUP), 104);
    }

    #[test]
    fn scores_that_do_not_fit_are_refused_with_their_size() {
        assert_eq!(MathAttention::scores_bytes(&SETUP), 2 * 2 * 600 * 104);
        assert_eq!(MathAttention::scores_bytes(&Setup { backward: false, ..SETUP }), 2 * 600 * 104);
        require(&SETUP, 249_600).unwrap();
        let large = Setup { batch: 2, tokens: 16_384, heads: 12, ..SETUP };
        let error = require(&large, 24_000_000_000).unwrap_err().to_string();
        assert!(error.contains("25.77 GB") && error.contains("24.00 GB") && error.contains("gradients"), "{error}");
        require(&Setup { backward: false, ..large }, 24_000_000_000).unwrap();
    }

    #[test]
    fn other_layouts_are_refused() {
        let heads = Heads { address: 256, length: 38_400, row_pitch: 64, head_pitch: 12_800 };
        check_layout(&SETUP, "q", &heads).unwrap();
        check_layout(&Setup { heads: 1, ..SETUP }, "q", &Heads { head_pitch: 0, ..heads }).unwrap();
        let error = check_layout(&SETUP, "dk", &Heads { row_pitch: 192, head_pitch: 64, ..heads }).unwrap_err();
        assert!(error.to_string().contains("dk with 192") && error.to_string().contains("64 and 12800"), "{error}");
    }
}
