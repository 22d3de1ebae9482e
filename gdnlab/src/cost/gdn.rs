//! FLOPs and bytes of GDN in the chunk form, in the notation of [`chunked`](crate::chunked).
//!
//! One product of a `C x C` matrix with `C x V` values costs `2 C V` FLOPs per token; one of the state `K x V` with keys
//! or values costs `2 K V`. With `C = 64` and `K = V = 128` the first is 16,384 FLOPs, one unit `u`, and the second `2u`.

use super::Cost;
use crate::problem::Shape;

/// Bytes of a gate, of its gradient, and of an element of a state that comes from or goes to the caller.
const FP32_BYTES: f64 = 4.0;
/// Bytes of an intermediate that one kernel leaves to another: fp16 or bf16.
const INTERMEDIATE_BYTES: f64 = 2.0;

/// A call, as far as its cost depends on it.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Sizes.
    pub shape: Shape,
    /// Tokens of each sequence.
    pub lengths: &'a [usize],
    /// `C`, tokens of a chunk. The last one of a sequence may be shorter, and costs less.
    pub chunk: usize,
    /// Bytes of an element of q, k, v and o and of their gradients.
    pub element_bytes: usize,
}

/// Where the backward has the state at the start of each chunk from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkStates {
    /// The forward kept them.
    Kept,
    /// A sweep like the forward's computes them again from k, v and the gates.
    Recomputed,
}

/// What the formulas sum over, each per value head or q/k head.
struct Sums {
    qk_heads: f64,
    value_heads: f64,
    /// `sum T`.
    tokens: f64,
    /// `sum C^2` over the chunks.
    pairs: f64,
    /// Number of chunks.
    chunks: f64,
    /// Number of sequences.
    sequences: f64,
    k: f64,
    v: f64,
    element: f64,
}

impl Call<'_> {
    fn sums(&self) -> Sums {
        let square = |n: usize| (n * n) as f64;
        let of_length =
            |&length: &usize| (length / self.chunk) as f64 * square(self.chunk) + square(length % self.chunk);
        Sums {
            qk_heads: self.shape.qk_heads as f64,
            value_heads: self.shape.value_heads as f64,
            tokens: self.lengths.iter().sum::<usize>() as f64,
            pairs: self.lengths.iter().map(of_length).sum(),
            chunks: self.lengths.iter().map(|length| length.div_ceil(self.chunk)).sum::<usize>() as f64,
            sequences: self.lengths.len() as f64,
            k: self.shape.key_dim as f64,
            v: self.shape.value_dim as f64,
            element: self.element_bytes as f64,
        }
    }

    /// The forward from an initial state to the output and the final state.
    ///
    /// | product | FLOPs per token | per head of |
    /// |---|---|---|
    /// | `k k^T` of L, `q k^T` of P | `2 * 2 C K` | q and k |
    /// | `U = T R`, `P U` | `2 * 2 C V` | v |
    /// | `k S0`, `q S0`, `k^T U` | `3 * 2 K V` | v |
    ///
    /// which is `10u` = 163.8 kFLOP per token and head at 64/128/128. The inverse `T = (I + L)^-1` adds `C^2/3`, less
    /// than one in a hundred, and is left out.
    ///
    /// Bytes per token: q and k `2 K`, v and o `2 V` elements, g and beta in fp32; 1,032 with bf16. Per sequence the
    /// state is read and written in fp32.
    pub fn forward(&self) -> Cost {
        let s = self.sums();
        let per_qk_head = 2.0 * (2.0 * s.pairs * s.k);
        let per_value_head = 2.0 * (2.0 * s.pairs * s.v) + 3.0 * (2.0 * s.tokens * s.k * s.v);
        let gates = 2.0 * FP32_BYTES * s.tokens;
        let states = 2.0 * FP32_BYTES * s.sequences * s.k * s.v;
        Cost {
            flop: s.qk_heads * per_qk_head + s.value_heads * per_value_head,
            bytes: s.tokens * s.element * (2.0 * s.qk_heads * s.k + 2.0 * s.value_heads * s.v)
                + s.value_heads * (gates + states),
        }
    }

    /// The backward, which has T of each chunk from the forward.
    ///
    /// | product | FLOPs per token | per head of |
    /// |---|---|---|
    /// | `q k^T` of P once more | `2 C K` | q and k |
    /// | `U = T R` once more, `P^T do`, `Y = T^T dU`, `Y U^T`, `do U^T` | `5 * 2 C V` | v |
    /// | `dP k`, `dL k`, `dP^T q`, `dL^T k` | `4 * 2 C K` | v |
    /// | `k S0` once more, `k dS`, `q^T do`, `k^T Y`, `do S0^T`, `Y S0^T`, `U dS^T` | `7 * 2 K V` | v |
    ///
    /// which is `24u` = 393 kFLOP. Recomputing the states costs `k S0`, `T R` and `k^T U` more: `29u` = 475 kFLOP.
    ///
    /// Bytes per token: q, k, dq, dk `4 K`, v, do, dv `3 V` elements, and g, beta, dg, dbeta in fp32, 1,808 with bf16;
    /// T `C` and the state `K V / C`, both in 16 bits, T read, the state written by whoever computes it and read:
    /// 2,960 in all. Recomputing reads k, v, the gates and T once more: 3,608. Per sequence the initial state and the
    /// gradient of the final one are read, and the gradient of the initial one is written, in fp32.
    ///
    /// A backward that keeps the state of every `n`-th chunk alone, and never T, can do with fewer bytes, and then needs
    /// the arithmetic of [`ChunkStates::Recomputed`].
    pub fn backward(&self, states: ChunkStates) -> Cost {
        let s = self.sums();
        let (narrow_k, narrow_v, wide) = (2.0 * s.pairs * s.k, 2.0 * s.pairs * s.v, 2.0 * s.tokens * s.k * s.v);
        let gates = 2.0 * FP32_BYTES * s.tokens;
        let inverse = INTERMEDIATE_BYTES * s.pairs;
        let chunk_states = 2.0 * INTERMEDIATE_BYTES * s.chunks * s.k * s.v;
        let caller_states = 3.0 * FP32_BYTES * s.sequences * s.k * s.v;
        let kept = Cost {
            flop: s.qk_heads * narrow_k + s.value_heads * (5.0 * narrow_v + 4.0 * narrow_k + 7.0 * wide),
            bytes: s.tokens * s.element * (4.0 * s.qk_heads * s.k + 3.0 * s.value_heads * s.v)
                + s.value_heads * (2.0 * gates + inverse + chunk_states + caller_states),
        };
        match states {
            ChunkStates::Kept => kept,
            ChunkStates::Recomputed => Cost {
                flop: kept.flop + s.value_heads * (narrow_v + 2.0 * wide),
                bytes: kept.bytes
                    + s.tokens * s.element * (s.qk_heads * s.k + s.value_heads * s.v)
                    + s.value_heads * (gates + inverse),
            },
        }
    }

    /// The recurrence, token by token, with the state in fast memory between the tokens of a call.
    ///
    /// `7 K V` FLOPs per token and value head: the decay `K V`, then `S^T k`, `k u^T` and `S^T q` with `2 K V` each. Per
    /// sequence and value head the state is read and written in fp32, `8 K V` bytes, beside which the tokens are little.
    pub fn decode(&self) -> Cost {
        let s = self.sums();
        Cost { flop: 7.0 * s.value_heads * s.tokens * s.k * s.v, bytes: self.forward().bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cost of one token and head beside which the caller's states do not count.
    fn per_token(cost: impl Fn(&Call<'_>) -> Cost, shape: Shape) -> Cost {
        let length = 1 << 30;
        let cost = cost(&Call { shape, lengths: &[length], chunk: 64, element_bytes: 2 });
        let count = length as f64 * shape.value_heads as f64;
        Cost { flop: cost.flop / count, bytes: cost.bytes / count }
    }

    fn near(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 5e-4, "{found} instead of {expected}");
    }

    fn head() -> Shape {
        Shape::new(0, 1, 128, 128)
    }

    #[test]
    fn the_forward_costs_what_the_design_says() {
        let cost = per_token(|call| call.forward(), head());
        near(cost.flop, 163.84e3);
        near(cost.bytes, 1032.0);
    }

    #[test]
    fn the_backward_costs_what_the_design_says() {
        let kept = per_token(|call| call.backward(ChunkStates::Kept), head());
        near(kept.flop, 393.2e3);
        near(kept.bytes, 2960.0);
        let recomputed = per_token(|call| call.backward(ChunkStates::Recomputed), head());
        near(recomputed.flop, 475.1e3);
        near(recomputed.bytes, 3608.0);
    }

    #[test]
    fn a_token_on_an_h200_takes_a_quarter_of_a_nanosecond_per_head() {
        let rates = super::super::Rates { copy_bytes_per_s: 4254e9, matmul_flop_per_s: Some(803e12) };
        let forward_ns = 1e6 * per_token(|call| call.forward(), head()).floor_ms(&rates);
        assert!((0.24..0.25).contains(&forward_ns), "{forward_ns}");
        let backward_ns = 1e6 * per_token(|call| call.backward(ChunkStates::Kept), head()).floor_ms(&rates);
        assert!((0.69..0.71).contains(&backward_ns), "{backward_ns}");
    }

    #[test]
    fn grouped_value_heads_share_queries_and_keys() {
        let grouped = Shape { qk_heads: 16, value_heads: 64, ..head() };
        let cost = per_token(|call| call.forward(), grouped);
        // Per value head: a quarter of q k^T and k k^T, and of the bytes of q and k.
        near(cost.flop, 163_840.0 - 0.75 * 2.0 * 16_384.0);
        near(cost.bytes, 128.0 + 512.0 + 8.0);
        let backward = per_token(|call| call.backward(ChunkStates::Kept), grouped);
        near(backward.flop, 23.25 * 16_384.0);
        near(backward.bytes, 2960.0 - 0.75 * 1024.0);
    }

    /// Every product written out for a ragged call, beside the closed form.
    #[test]
    fn short_chunks_and_sequences_are_counted_as_they_are() {
        let (k, v, lengths) = (64.0, 96.0, [130usize, 0, 1, 64]);
        let shape = Shape { batch: 1, tokens: 195, qk_heads: 1, value_heads: 2, key_dim: 64, value_dim: 96 };
        let call = Call { shape, lengths: &lengths, chunk: 64, element_bytes: 4 };
        let chunks = [64.0f64, 64.0, 2.0, 1.0, 64.0];
        let forward: f64 =
            chunks.iter().map(|c| 2.0 * 2.0 * c * c * k + 2.0 * (2.0 * 2.0 * c * c * v + 3.0 * 2.0 * c * k * v)).sum();
        let cost = call.forward();
        assert_eq!(cost.flop, forward);
        let tokens = 195.0 * (4.0 * (2.0 * k + 2.0 * 2.0 * v) + 2.0 * 2.0 * 4.0);
        assert_eq!(cost.bytes, tokens + 4.0 * 2.0 * 2.0 * 4.0 * k * v);
        let states = call.backward(ChunkStates::Recomputed).flop - call.backward(ChunkStates::Kept).flop;
        let expected: f64 = chunks.iter().map(|c| 2.0 * (2.0 * c * c * v + 2.0 * 2.0 * c * k * v)).sum();
        assert_eq!(states, expected);
    }

    #[test]
    fn decoding_is_the_traffic_of_the_state() {
        let shape = Shape { batch: 64, tokens: 1, qk_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128 };
        let cost = Call { shape, lengths: &[1; 64], chunk: 64, element_bytes: 2 }.decode();
        near(cost.flop, 7.0 * 64.0 * 32.0 * 16_384.0);
        let state = 64.0 * 32.0 * 8.0 * 16_384.0;
        assert!(state < cost.bytes && cost.bytes < 1.02 * state, "{cost:?}");
    }
}
