//! Look-up of embeddings, and the sum over equal tokens (`kernels/embedding.cu`).

use super::{ACCESS, View, counted, grid, too_large, whole_accesses};
use crate::cuda::{Build, Function, Gpu, Grid, Operator, Stream, source};
use crate::{Error, Result};
use half::bf16;

const NAME: &str = "embedding";
const THREADS: u32 = 256;
/// Warps of a block.
const WARPS: usize = 8;
/// Places of the order that a warp walks along (`PIECE`).
const PIECE: usize = 32;
/// Columns of a warp.
const COLUMNS: usize = 32 * ACCESS;

/// `y_n = W_{token_n}` and its gradient, for one vocabulary and width.
pub struct Embedding {
    vocabulary: usize,
    dim: usize,
    forward: Function,
    pieces: Function,
    rows: Function,
}

/// The tensors of a forward.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingForward {
    /// `[vocabulary, D]`.
    pub weight: View<bf16>,
    /// `[rows]`, each below the vocabulary's size.
    pub tokens: View<i32>,
    /// `[rows, D]`: written.
    pub y: View<bf16>,
}

/// The tensors of a backward.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingBackward {
    /// `[rows, D]`.
    pub dy: View<bf16>,
    /// `[rows]`, each below the vocabulary's size.
    pub tokens: View<i32>,
    /// [`ByToken::order`] of these tokens.
    pub order: View<i32>,
    /// [`ByToken::starts`] of these tokens.
    pub starts: View<i32>,
    /// Scratch, [`Embedding::scratch_elements`] of them: overwritten.
    pub scratch: View<f32>,
    /// Gradient of the weight, `[vocabulary, D]`: written.
    pub dweight: View<f32>,
}

/// Rows sorted by their tokens; those of one token keep their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByToken {
    /// Numbers of rows.
    pub order: Vec<i32>,
    /// Where the rows of each token of the vocabulary begin in `order`, and behind the last one the number of rows.
    pub starts: Vec<i32>,
}

impl ByToken {
    /// Sorts rows by their `tokens`.
    ///
    /// # Errors
    /// [`Error::Input`] where a token is not in the vocabulary, or there are 2^31 of them.
    pub fn new(tokens: &[u32], vocabulary: usize) -> Result<Self> {
        counted(NAME, tokens.len())?;
        let mut starts = vec![0i32; vocabulary + 1];
        for (n, &token) in tokens.iter().enumerate() {
            let count = starts[1..].get_mut(token as usize).ok_or_else(|| {
                Error::input(format!("token {n} is {token}: expected tokens below {vocabulary}, the vocabulary's size"))
            })?;
            *count += 1;
        }
        for token in 0..vocabulary {
            starts[token + 1] += starts[token];
        }
        let (mut next, mut order) = (starts.clone(), vec![0i32; tokens.len()]);
        for (row, &token) in tokens.iter().enumerate() {
            let place = &mut next[token as usize];
            order[*place as usize] = row as i32;
            *place += 1;
        }
        Ok(Self { order, starts })
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ForwardParams {
    weight: u64,
    tokens: u64,
    y: u64,
    count: u32,
    vectors: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct BackwardParams {
    dy: u64,
    tokens: u64,
    order: u64,
    starts: u64,
    parts: u64,
    dweight: u64,
    rows: i32,
    vocabulary: i32,
    dim: i32,
}

impl Embedding {
    /// The kernels for a weight `[vocabulary, dim]`.
    ///
    /// # Errors
    /// [`Error::Input`] where `dim` is no multiple of 8, [`Error::Gpu`] where the kernels cannot be had.
    pub fn new(gpu: &Gpu, vocabulary: usize, dim: usize) -> Result<Self> {
        whole_accesses(NAME, "D", dim)?;
        let module = gpu.module(&build()?)?;
        Ok(Self {
            vocabulary,
            dim,
            forward: module.function("embedding_forward")?,
            pieces: module.function("embedding_pieces")?,
            rows: module.function("embedding_rows")?,
        })
    }

    /// Elements of the scratch of a backward over `rows` rows.
    pub fn scratch_elements(&self, rows: usize) -> usize {
        rows.div_ceil(PIECE) * 2 * self.dim
    }

    /// Starts a forward on `stream`, and does not wait for it.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`], and each token is below the vocabulary's size.
    pub unsafe fn forward(&self, stream: &Stream, call: &EmbeddingForward) -> Result<()> {
        let EmbeddingForward { weight, tokens, y } = *call;
        weight.expect(NAME, "weight", &[self.vocabulary, self.dim])?;
        y.expect(NAME, "y", &[tokens.len(), self.dim])?;
        let vectors = self.dim / ACCESS;
        let count = tokens.len() * vectors;
        let number = |n: usize| u32::try_from(n).map_err(|_| too_large(NAME, n));
        let params = ForwardParams {
            weight: weight.address(),
            tokens: tokens.address(),
            y: y.address(),
            count: number(count)?,
            vectors: number(vectors)?,
        };
        // SAFETY: the views have the lengths that the kernel takes them to have; the rest is the caller's promise.
        unsafe { self.forward.launch(stream, grid(NAME, count, THREADS as usize, THREADS)?, &params) }
    }

    /// Starts a backward on `stream`, and does not wait for it.
    ///
    /// # Errors
    /// As [`super::RmsNorm::forward`].
    ///
    /// # Safety
    /// As for [`super::RmsNorm::forward`], each token is below the vocabulary's size, and `order` and `starts` are what
    /// [`ByToken::new`] makes of the tokens.
    pub unsafe fn backward(&self, stream: &Stream, call: &EmbeddingBackward) -> Result<()> {
        let EmbeddingBackward { dy, tokens, order, starts, scratch, dweight } = *call;
        let rows = tokens.len();
        dy.expect(NAME, "dy", &[rows, self.dim])?;
        order.expect(NAME, "order", &[rows])?;
        starts.expect(NAME, "starts", &[self.vocabulary + 1])?;
        dweight.expect(NAME, "dweight", &[self.vocabulary, self.dim])?;
        let params = BackwardParams {
            dy: dy.address(),
            tokens: tokens.address(),
            order: order.address(),
            starts: starts.address(),
            parts: scratch.part(0..self.scratch_elements(rows))?.address(),
            dweight: dweight.address(),
            rows: counted(NAME, rows)?,
            vocabulary: counted(NAME, self.vocabulary)?,
            dim: counted(NAME, self.dim)?,
        };
        let [x, _, z] = grid(NAME, rows.div_ceil(PIECE), WARPS, THREADS)?.blocks;
        let across = u32::try_from(self.dim.div_ceil(COLUMNS)).map_err(|_| too_large(NAME, self.dim))?;
        let of_pieces = Grid { blocks: [x, across, z], threads: THREADS, ..Grid::default() };
        // SAFETY: as in `forward`.
        unsafe {
            self.pieces.launch(stream, of_pieces, &params)?;
            self.rows.launch(stream, grid(NAME, self.vocabulary, WARPS, THREADS)?, &params)
        }
    }
}

fn build() -> Result<Build> {
    Ok(Build { source: source(NAME)?, defines: vec![] })
}

pub(in crate::cuda) const OPERATOR: Operator = Operator {
    name: NAME,
    builds: || Ok(vec![build()?]),
    parameters: &[
        ("embedding_forward", size_of::<ForwardParams>()),
        ("embedding_pieces", size_of::<BackwardParams>()),
        ("embedding_rows", size_of::<BackwardParams>()),
    ],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_token_keep_their_order() {
        let sorted = ByToken::new(&[3, 0, 3, 2, 0, 3], 5).unwrap();
        assert_eq!(sorted.order, [1, 4, 3, 0, 2, 5]);
        assert_eq!(sorted.starts, [0, 2, 2, 3, 6, 6]);
        assert_eq!(ByToken::new(&[], 2).unwrap().starts, [0, 0, 0]);
        let message = ByToken::new(&[1, 5], 5).unwrap_err().to_string();
        assert!(message.contains("token 1 is 5: expected tokens below 5"), "{message}");
    }
}
