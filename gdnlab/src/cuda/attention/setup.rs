//! What is computed, and what is checked before a launch.

use super::heads::{Extent, Heads, Rows};
use crate::cuda::Buffer;
use crate::{Error, Result};
use half::bf16;

/// Head dimensions that there are kernels for.
pub const HEAD_DIMS: [usize; 2] = [64, 128];

/// The problem that a plan is made for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setup {
    /// `B`: sequences, all of the same length.
    pub batch: usize,
    /// `T`: tokens of a sequence.
    pub tokens: usize,
    /// `H`: heads of q, k and v alike.
    pub heads: usize,
    /// `d`, one of [`HEAD_DIMS`].
    pub head_dim: usize,
    /// Factor on the scores, above 0, usually `d^-1/2`.
    pub scale: f32,
    /// Whether the backward is wanted, too.
    pub backward: bool,
}

/// The tensors of a forward.
#[derive(Clone, Copy, Debug)]
pub struct Forward {
    /// Queries: read.
    pub q: Heads,
    /// Keys: read.
    pub k: Heads,
    /// Values: read.
    pub v: Heads,
    /// Output: written.
    pub o: Heads,
    /// Natural logarithm of the sum of the exponentiated scores of each row, `[B, H, T]`: written.
    pub lse: Rows,
}

/// The tensors of a backward.
#[derive(Clone, Copy, Debug)]
pub struct Backward {
    /// Queries: read.
    pub q: Heads,
    /// Keys: read.
    pub k: Heads,
    /// Values: read.
    pub v: Heads,
    /// Output of the forward: read.
    pub o: Heads,
    /// What the forward wrote: read.
    pub lse: Rows,
    /// Gradient of o: read.
    pub d_o: Heads,
    /// Scratch for `do . o` of each row, `[B, H, T]`: overwritten.
    pub delta: Rows,
    /// Gradient of q: written.
    pub dq: Heads,
    /// Gradient of k: written.
    pub dk: Heads,
    /// Gradient of v: written.
    pub dv: Heads,
}

/// Tokens of all sequences, and tokens times heads, that a kernel counts in 32 bits.
const MOST: usize = i32::MAX as usize;

impl Setup {
    /// Numbers of the log-sum-exp and of the scratch of a backward: `B H T`.
    pub fn rows(&self) -> usize {
        self.batch * self.heads * self.tokens
    }

    /// Elements of a tensor without gaps: `B T H d`.
    pub fn elements(&self) -> usize {
        self.rows() * self.head_dim
    }

    /// `buffer` as a tensor `[B, T, H, d]` without gaps.
    pub fn whole(&self, buffer: &Buffer<bf16>) -> Heads {
        Heads::of(buffer, 0, self.heads * self.head_dim, self.head_dim)
    }

    /// `buffer` as a tensor `[H, B, T, d]` without gaps.
    pub fn heads_first(&self, buffer: &Buffer<bf16>) -> Heads {
        Heads::of(buffer, 0, self.head_dim, self.batch * self.tokens * self.head_dim)
    }

    /// q, k and v in a buffer `[B, T, 3, H, d]`, such as one projection for all three gives.
    pub fn fused(&self, qkv: &Buffer<bf16>) -> [Heads; 3] {
        let width = self.heads * self.head_dim;
        [0, 1, 2].map(|part| Heads::of(qkv, part * width, 3 * width, self.head_dim))
    }

    /// Checks the numbers.
    ///
    /// # Errors
    /// [`Error::Input`] where there are no kernels for them.
    pub fn validate(&self) -> Result<()> {
        let Self { batch, tokens, heads, head_dim, scale, .. } = *self;
        let rows = batch.checked_mul(tokens).and_then(|rows| rows.checked_mul(heads));
        if rows.is_none_or(|rows| rows == 0 || rows > MOST) {
            return Err(Error::input(format!(
                "attention: B = {batch}, T = {tokens}, H = {heads}: expected at least 1 of each, and B T H at most {MOST}"
            )));
        }
        if !HEAD_DIMS.contains(&head_dim) {
            let dims = HEAD_DIMS.map(|dim| dim.to_string()).join(" or ");
            return Err(Error::input(format!("attention: d = {head_dim}: expected {dims}")));
        }
        if !(scale.is_normal() && scale > 0.0) {
            return Err(Error::input(format!("attention: scale = {scale}: expected a number above 0")));
        }
        Ok(())
    }

    fn extent(&self) -> Extent {
        Extent { rows: self.batch * self.tokens, heads: self.heads, head_dim: self.head_dim }
    }

    pub(super) fn check_forward(&self, call: &Forward) -> Result<()> {
        let Forward { q, k, v, o, lse } = call;
        let extent = self.extent();
        [("q", q), ("k", k), ("v", v), ("o", o)].iter().try_for_each(|(name, heads)| heads.check(name, &extent))?;
        lse.check("lse", &extent)
    }

    pub(super) fn check_backward(&self, call: &Backward) -> Result<()> {
        let Backward { q, k, v, o, lse, d_o, delta, dq, dk, dv } = call;
        if !self.backward {
            return Err(Error::input("attention: a plan made for the forward alone has no backward: set `backward`"));
        }
        let extent = self.extent();
        let read = [("q", q), ("k", k), ("v", v), ("o", o), ("do", d_o)];
        let written = [("dq", dq), ("dk", dk), ("dv", dv)];
        read.iter().chain(&written).try_for_each(|(name, heads)| heads.check(name, &extent))?;
        lse.check("lse", &extent)?;
        delta.check("delta", &extent)
    }
}
