//! FLOPs and bytes of causal softmax attention, `O = softmax(s Q K^T) V` with the scores of later keys left out.
//!
//! As everybody who reports the speed of attention does, only visible scores count, `T^2/2` of the `T^2` per head: kernels
//! that work in blocks skip the others. One product over them, with heads of `d`, costs `2 d T^2/2 = d T^2` FLOPs.

use super::Cost;

/// Bytes of the logarithm of a row's sum, which the forward leaves to the backward.
const FP32_BYTES: f64 = 4.0;

/// A call, as far as its cost depends on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// `B`, sequences.
    pub batch: usize,
    /// `T`, tokens of each.
    pub tokens: usize,
    /// `H`, heads of queries, keys and values alike.
    pub heads: usize,
    /// `d`, dimension of a head, of keys and values alike.
    pub head_dim: usize,
    /// Bytes of an element of q, k, v and o and of their gradients.
    pub element_bytes: usize,
}

impl Call {
    /// `B H`.
    fn sequences_heads(&self) -> f64 {
        self.batch as f64 * self.heads as f64
    }

    /// FLOPs of one product over the visible scores of all heads.
    fn product_flop(&self) -> f64 {
        self.sequences_heads() * self.head_dim as f64 * (self.tokens as f64).powi(2)
    }

    /// Bytes of one of q, k, v, o.
    fn tensor_bytes(&self) -> f64 {
        self.sequences_heads() * self.tokens as f64 * (self.head_dim * self.element_bytes) as f64
    }

    /// Bytes of one fp32 number per query and head.
    fn row_bytes(&self) -> f64 {
        self.sequences_heads() * self.tokens as f64 * FP32_BYTES
    }

    /// The forward of a kernel that never stores a score: two products, `Q K^T` and `P V`; q, k and v read, o and the
    /// logarithm of each row's sum written.
    ///
    /// Per token that is `2 d T` FLOPs and head, `2 T D` in all: a third of the `6 T D` of
    /// [`training_cost_per_token`](super::model::training_cost_per_token).
    pub fn forward(&self) -> Cost {
        Cost { flop: 2.0 * self.product_flop(), bytes: 4.0 * self.tensor_bytes() + self.row_bytes() }
    }

    /// Its backward: five products, `Q K^T` once more, `dP = dO V^T`, `dV = P^T dO`, `dQ = dS K`, `dK = dS^T Q`; q, k, v, o,
    /// dO and the logarithms read, dQ, dK and dV written.
    ///
    /// A model's FLOPs count four of them, since the scores were computed before.
    pub fn backward(&self) -> Cost {
        Cost { flop: 5.0 * self.product_flop(), bytes: 8.0 * self.tensor_bytes() + self.row_bytes() }
    }

    /// The forward that stores its scores, in the format of q, at the least: whole products, since a product of matrices
    /// computes the invisible half too, and four passes over the `T^2` scores of each head: written by `Q K^T`, read and
    /// written by the softmax, read by `P V`.
    pub fn materialised_forward(&self) -> Cost {
        let scores_bytes = self.sequences_heads() * (self.tokens as f64).powi(2) * self.element_bytes as f64;
        Cost { flop: 4.0 * self.product_flop(), bytes: 4.0 * self.tensor_bytes() + 4.0 * scores_bytes }
    }
}

#[cfg(test)]
#[path = "attention_tests.rs"]
mod tests;
