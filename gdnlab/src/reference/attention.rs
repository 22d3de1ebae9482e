//! Causal softmax attention in float64, forward and backward.
//!
//! Per query head h and token i of a sequence, with keys and values of head `h / (H / H_kv)`:
//!
//! ```text
//! s_ij = scale q_i . k_j  (j <= i)      lse_i = log sum_j e^{s_ij}      p_ij = e^{s_ij - lse_i}      o_i = sum_j p_ij v_j
//! dp_ij = do_i . v_j                    ds_ij = p_ij (dp_ij - sum_j p_ij dp_ij)
//! dq_i = scale sum_j ds_ij k_j          dk_j = scale sum_i ds_ij q_i    dv_j = sum_i p_ij do_i
//! ```
//! dk and dv are summed over the query heads of a group.

use super::matrix::{View, Write, product};
use crate::problem::{Tensor, sequence_ranges};
use crate::{Error, Result};
use gdnlab_deps::rayon::prelude::*;
use std::ops::Range;

/// Query rows whose scores are held at once.
const ROW_BLOCK: usize = 32;

/// One call of causal attention.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Queries, `[B, T, H, d_k]`.
    pub q: &'a Tensor,
    /// Keys, `[B, T, H_kv, d_k]`, H a multiple of H_kv.
    pub k: &'a Tensor,
    /// Values, `[B, T, H_kv, d_v]`.
    pub v: &'a Tensor,
    /// Factor on the scores, usually `d_k^-1/2`.
    pub scale: f64,
    /// Boundaries of packed sequences, `[N + 1]` from 0 to T with B = 1; `None` when the B rows are the sequences.
    pub cu_seqlens: Option<&'a [usize]>,
}

/// What the forward gives.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutputs {
    /// Output, `[B, T, H, d_v]`.
    pub o: Tensor,
    /// Natural logarithm of the sum of exponentiated scores, `[B, T, H]`.
    pub lse: Tensor,
}

/// What the backward gives.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionGrads {
    /// Gradient of q, `[B, T, H, d_k]`.
    pub dq: Tensor,
    /// Gradient of k, `[B, T, H_kv, d_k]`.
    pub dk: Tensor,
    /// Gradient of v, `[B, T, H_kv, d_v]`.
    pub dv: Tensor,
}

struct Sizes {
    batch: usize,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    d_k: usize,
    d_v: usize,
}

/// The probabilities of one block of query rows, and what they are made of.
struct Block {
    /// Rows of the block, counted from the start of the sequence.
    rows: Range<usize>,
    /// `p`, `[rows, rows.end]`, zero above the diagonal.
    p: Vec<f64>,
    /// `lse`, `[rows]`.
    lse: Vec<f64>,
}

impl Attention<'_> {
    /// The output and the log-sum-exp of every row. Threads over sequences and heads.
    ///
    /// # Errors
    /// [`Error::Input`] where shapes do not agree, `cu_seqlens` does not fit or a value is not finite.
    pub fn forward(&self) -> Result<AttentionOutputs> {
        let (sizes, sequences) = self.validate()?;
        let heads: Vec<_> = tasks(&sequences, sizes.heads)
            .into_par_iter()
            .map(|(sequence, head)| {
                let (o, lse) = self.forward_head(&sizes, &sequence, head);
                (sequence, head, o, lse)
            })
            .collect();
        let Sizes { batch, tokens, heads: n, d_v, .. } = sizes;
        let mut outputs =
            AttentionOutputs { o: Tensor::zeros(&[batch, tokens, n, d_v]), lse: Tensor::zeros(&[batch, tokens, n]) };
        for (sequence, head, o, lse) in &heads {
            scatter(&mut outputs.o, sequence, *head, o);
            scatter(&mut outputs.lse, sequence, *head, lse);
        }
        Ok(outputs)
    }

    /// The gradients of q, k and v, given that of the output, `d_o` `[B, T, H, d_v]`. Threads over sequences and
    /// key/value heads; nothing of the forward is needed.
    ///
    /// # Errors
    /// As [`Attention::forward`], for `d_o` too.
    pub fn backward(&self, d_o: &Tensor) -> Result<AttentionGrads> {
        let (sizes, sequences) = self.validate()?;
        let Sizes { batch, tokens, heads, kv_heads, d_k, d_v } = sizes;
        d_o.expect("do", &[batch, tokens, heads, d_v])?;
        let groups: Vec<_> = tasks(&sequences, kv_heads)
            .into_par_iter()
            .map(|(sequence, head)| {
                let grads = self.backward_group(&sizes, &sequence, head, d_o);
                (sequence, head, grads)
            })
            .collect();
        let mut grads = AttentionGrads {
            dq: Tensor::zeros(&[batch, tokens, heads, d_k]),
            dk: Tensor::zeros(&[batch, tokens, kv_heads, d_k]),
            dv: Tensor::zeros(&[batch, tokens, kv_heads, d_v]),
        };
        for (sequence, kv_head, group) in &groups {
            for (i, dq) in group.dq.iter().enumerate() {
                scatter(&mut grads.dq, sequence, kv_head * sizes.group() + i, dq);
            }
            scatter(&mut grads.dk, sequence, *kv_head, &group.dk);
            scatter(&mut grads.dv, sequence, *kv_head, &group.dv);
        }
        Ok(grads)
    }

    fn forward_head(&self, sizes: &Sizes, sequence: &Range<usize>, head: usize) -> (Vec<f64>, Vec<f64>) {
        let kv_head = head / sizes.group();
        let (q, k, v) =
            (view(self.q, sequence, head), view(self.k, sequence, kv_head), view(self.v, sequence, kv_head));
        let mut o = vec![0.0; sequence.len() * sizes.d_v];
        let mut lse = Vec::with_capacity(sequence.len());
        for rows in row_blocks(sequence.len()) {
            let block = Block::new(q, k, self.scale, rows.clone());
            let end = rows.end;
            let o_rows = &mut o[rows.start * sizes.d_v..end * sizes.d_v];
            product(o_rows, Write::Set, 1.0, block.p(), v.rows(0, end));
            lse.extend(block.lse);
        }
        (o, lse)
    }

    fn backward_group(&self, sizes: &Sizes, sequence: &Range<usize>, kv_head: usize, d_o: &Tensor) -> GroupGrads {
        let Sizes { d_k, d_v, .. } = *sizes;
        let (k, v) = (view(self.k, sequence, kv_head), view(self.v, sequence, kv_head));
        let tokens = sequence.len();
        let mut grads = GroupGrads { dq: Vec::new(), dk: vec![0.0; tokens * d_k], dv: vec![0.0; tokens * d_v] };
        for head in kv_head * sizes.group()..(kv_head + 1) * sizes.group() {
            let (q, d_o) = (view(self.q, sequence, head), view(d_o, sequence, head));
            let mut dq = vec![0.0; tokens * d_k];
            for rows in row_blocks(tokens) {
                let Range { start, end } = rows;
                let block = Block::new(q, k, self.scale, rows);
                let d_o_rows = d_o.rows(start, end);
                let ds = block.score_gradient(d_o_rows, v);
                let ds = View::new(&ds, end - start, end, end);
                product(&mut dq[start * d_k..end * d_k], Write::Set, self.scale, ds, k.rows(0, end));
                product(&mut grads.dk[..end * d_k], Write::Add, self.scale, ds.t(), q.rows(start, end));
                product(&mut grads.dv[..end * d_v], Write::Add, 1.0, block.p().t(), d_o_rows);
            }
            grads.dq.push(dq);
        }
        grads
    }

    fn validate(&self) -> Result<(Sizes, Vec<Range<usize>>)> {
        let (&[batch, tokens, heads, d_k], &[_, _, kv_heads, d_v]) = (&self.q.dims[..], &self.v.dims[..]) else {
            return Err(Error::input(format!(
                "attention: expected q [B, T, H, d_k] and v [B, T, H_kv, d_v], got {:?} and {:?}",
                self.q.dims, self.v.dims
            )));
        };
        if [batch, heads, kv_heads, d_k, d_v].contains(&0) || heads % kv_heads != 0 {
            return Err(Error::input(format!(
                "attention: B = {batch}, H = {heads}, H_kv = {kv_heads}, d_k = {d_k}, d_v = {d_v}: expected at least 1 of each, and H a multiple of H_kv"
            )));
        }
        if !self.scale.is_finite() {
            return Err(Error::input(format!("scale = {}: expected a finite number", self.scale)));
        }
        self.q.expect("q", &[batch, tokens, heads, d_k])?;
        self.k.expect("k", &[batch, tokens, kv_heads, d_k])?;
        self.v.expect("v", &[batch, tokens, kv_heads, d_v])?;
        let sequences = sequence_ranges(self.cu_seqlens, batch, tokens)?;
        Ok((Sizes { batch, tokens, heads, kv_heads, d_k, d_v }, sequences))
    }
}

impl Sizes {
    /// Query heads per key/value head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Gradients of one sequence and one key/value head, each contiguous.
struct GroupGrads {
    /// One per query head of the group, `[T, d_k]`.
    dq: Vec<Vec<f64>>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

impl Block {
    /// Scores, then the softmax of each row up to the diagonal, its maximum taken off first.
    fn new(q: View, k: View, scale: f64, rows: Range<usize>) -> Self {
        let Range { start, end } = rows;
        let mut p = vec![0.0; rows.len() * end];
        product(&mut p, Write::Set, scale, q.rows(start, end), k.rows(0, end).t());
        let lse = p.chunks_exact_mut(end).zip(start..).map(|(row, i)| softmax(row, i + 1)).collect();
        Self { rows, p, lse }
    }

    fn p(&self) -> View<'_> {
        View::new(&self.p, self.rows.len(), self.rows.end, self.rows.end)
    }

    /// `ds`, `[rows, rows.end]`.
    fn score_gradient(&self, d_o: View, v: View) -> Vec<f64> {
        let end = self.rows.end;
        let mut ds = vec![0.0; self.p.len()];
        product(&mut ds, Write::Set, 1.0, d_o, v.rows(0, end).t());
        for (ds, p) in ds.chunks_exact_mut(end).zip(self.p.chunks_exact(end)) {
            let mean: f64 = ds.iter().zip(p).map(|(dp, p)| dp * p).sum();
            ds.iter_mut().zip(p).for_each(|(dp, p)| *dp = p * (*dp - mean));
        }
        ds
    }
}

/// Softmax of the first `visible` scores in place, the rest set to zero; returns the log-sum-exp.
fn softmax(row: &mut [f64], visible: usize) -> f64 {
    let (scores, masked) = row.split_at_mut(visible);
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    scores.iter_mut().for_each(|s| *s = (*s - max).exp());
    let sum: f64 = scores.iter().sum();
    scores.iter_mut().for_each(|s| *s /= sum);
    masked.fill(0.0);
    max + sum.ln()
}

fn tasks(sequences: &[Range<usize>], heads: usize) -> Vec<(Range<usize>, usize)> {
    sequences.iter().flat_map(|sequence| (0..heads).map(|head| (sequence.clone(), head))).collect()
}

fn row_blocks(tokens: usize) -> impl Iterator<Item = Range<usize>> {
    (0..tokens).step_by(ROW_BLOCK).map(move |start| start..tokens.min(start + ROW_BLOCK))
}

/// Head `head` of `tensor` `[B, T, H, d]` over the tokens of `sequence`: `[T, d]`.
fn view<'a>(tensor: &'a Tensor, sequence: &Range<usize>, head: usize) -> View<'a> {
    let (heads, dim) = (tensor.dims[2], tensor.dims[3]);
    let stride = heads * dim;
    let data = if sequence.is_empty() { &[] } else { &tensor.data[sequence.start * stride + head * dim..] };
    View::new(data, sequence.len(), dim, stride)
}

/// Writes `rows` `[T, d]` to head `head` of `tensor` `[B, T, H, d]` or `[B, T, H]` over the tokens of `sequence`.
fn scatter(tensor: &mut Tensor, sequence: &Range<usize>, head: usize, rows: &[f64]) {
    let heads = tensor.dims[2];
    let dim = tensor.dims.get(3).copied().unwrap_or(1);
    for (row, token) in rows.chunks_exact(dim).zip(sequence.start..) {
        let at = (token * heads + head) * dim;
        tensor.data[at..at + dim].copy_from_slice(row);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        AWKWARD_LENGTHS, Loss, check_gradient, gaussian, max_rel, on_one_and_three_threads, tokens_of,
    };
    use super::*;

    struct Case {
        q: Tensor,
        k: Tensor,
        v: Tensor,
        d_o: Tensor,
    }

    impl Case {
        /// Four query heads on two key/value heads, d_k = 3, d_v = 2.
        fn new(batch: usize, tokens: usize) -> Self {
            let tensor = |seed, heads, dim| gaussian(seed, &[batch, tokens, heads, dim]);
            Self { q: tensor(1, 4, 3), k: tensor(2, 2, 3), v: tensor(3, 2, 2), d_o: tensor(4, 4, 2) }
        }

        fn call<'a>(&'a self, cu_seqlens: Option<&'a [usize]>) -> Attention<'a> {
            Attention { q: &self.q, k: &self.k, v: &self.v, scale: 0.7, cu_seqlens }
        }
    }

    /// `o_i` and `lse_i` as quotients and logarithms of plain sums.
    fn naive(call: &Attention) -> AttentionOutputs {
        let [batch, tokens, heads, d_k] = call.q.dims[..] else { panic!() };
        let (kv_heads, d_v) = (call.v.dims[2], call.v.dims[3]);
        let mut out = AttentionOutputs {
            o: Tensor::zeros(&[batch, tokens, heads, d_v]),
            lse: Tensor::zeros(&[batch, tokens, heads]),
        };
        for (b, i, h) in (0..batch).flat_map(|b| (0..tokens).flat_map(move |i| (0..heads).map(move |h| (b, i, h)))) {
            let row = (b * tokens + i) * heads + h;
            let mut sum = 0.0;
            for j in 0..=i {
                let kv = (b * tokens + j) * kv_heads + h * kv_heads / heads;
                let score: f64 = (0..d_k).map(|d| call.q.data[row * d_k + d] * call.k.data[kv * d_k + d]).sum();
                let e = (call.scale * score).exp();
                sum += e;
                (0..d_v).for_each(|d| out.o.data[row * d_v + d] += e * call.v.data[kv * d_v + d]);
            }
            (0..d_v).for_each(|d| out.o.data[row * d_v + d] /= sum);
            out.lse.data[row] = sum.ln();
        }
        out
    }

    #[test]
    fn forward_equals_plain_sums() {
        for tokens in AWKWARD_LENGTHS {
            let case = Case::new(2, tokens);
            let call = case.call(None);
            let (found, expected) = (call.forward().unwrap(), naive(&call));
            assert!(max_rel(&found.o, &expected.o) < 1e-13, "T = {tokens}");
            assert!(max_rel(&found.lse, &expected.lse) < 1e-13, "T = {tokens}");
        }
    }

    #[test]
    fn gradients_equal_differences() {
        for tokens in [1, 15, ROW_BLOCK + 1] {
            let case = Case::new(1, tokens);
            let cu = [0, tokens / 3, tokens];
            let call = case.call(Some(&cu));
            let grads = call.backward(&case.d_o).unwrap();
            let loss = |call: Attention| Loss::new(&call.forward().unwrap().o, &case.d_o);
            check_gradient("dv", &case.v, &grads.dv, |v| loss(Attention { v, ..call }));
            if tokens > 1 {
                check_gradient("dq", &case.q, &grads.dq, |q| loss(Attention { q, ..call }));
                check_gradient("dk", &case.k, &grads.dk, |k| loss(Attention { k, ..call }));
            }
        }
    }

    #[test]
    fn packed_equals_separate() {
        let case = Case::new(1, 144);
        let cu = [0, 0, 63, 64, 79, 144];
        let call = case.call(Some(&cu));
        let (packed, grads) = (call.forward().unwrap(), call.backward(&case.d_o).unwrap());
        for pair in cu.windows(2) {
            let of = |tensor| tokens_of(tensor, pair[0]..pair[1]);
            let alone = Case { q: of(&case.q), k: of(&case.k), v: of(&case.v), d_o: of(&case.d_o) };
            let call = alone.call(None);
            assert_eq!(of(&packed.o), call.forward().unwrap().o);
            assert_eq!(of(&packed.lse), call.forward().unwrap().lse);
            let separate = call.backward(&alone.d_o).unwrap();
            assert_eq!((of(&grads.dq), of(&grads.dk), of(&grads.dv)), (separate.dq, separate.dk, separate.dv));
        }
    }

    #[test]
    fn later_tokens_change_nothing_earlier() {
        let case = Case::new(1, 65);
        let mut changed = Case::new(1, 65);
        for tensor in [&mut changed.q, &mut changed.k, &mut changed.v] {
            let from = 40 * tensor.dims[2] * tensor.dims[3];
            tensor.data[from..].iter_mut().for_each(|x| *x = 1e3 - *x);
        }
        let early = |case: &Case| {
            let out = case.call(None).forward().unwrap();
            (tokens_of(&out.o, 0..40), tokens_of(&out.lse, 0..40))
        };
        assert_eq!(early(&case), early(&changed));
    }

    #[test]
    fn extreme_scores_stay_finite() {
        let mut case = Case::new(1, 65);
        case.q.data.iter_mut().for_each(|x| *x *= 1e150);
        case.k.data.iter_mut().for_each(|x| *x *= 1e150);
        let out = case.call(None).forward().unwrap();
        let grads = case.call(None).backward(&case.d_o).unwrap();
        for tensor in [&out.o, &out.lse, &grads.dq, &grads.dk, &grads.dv] {
            assert!(tensor.data.iter().all(|x| x.is_finite()));
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let case = Case::new(3, 65);
        let [one, three] = on_one_and_three_threads(|| {
            (case.call(None).forward().unwrap(), case.call(None).backward(&case.d_o).unwrap())
        });
        assert_eq!(one, three);
    }

    #[test]
    fn bad_input_is_refused() {
        let case = Case::new(1, 4);
        let refused = |call: Attention| call.forward().unwrap_err().to_string();
        let three_heads = gaussian(5, &[1, 4, 3, 3]);
        assert!(refused(Attention { q: &three_heads, ..case.call(None) }).contains("multiple"));
        assert!(refused(Attention { k: &case.v, ..case.call(None) }).contains("'k'"));
        assert!(refused(case.call(Some(&[0, 3, 2, 4]))).contains("monotone"));
        assert!(refused(Attention { scale: f64::NAN, ..case.call(None) }).contains("scale"));
        let flat = Tensor::zeros(&[4]);
        assert!(refused(Attention { q: &flat, ..case.call(None) }).contains("[B, T, H, d_k]"));
        assert!(case.call(None).backward(&case.v).unwrap_err().to_string().contains("'do'"));
    }
}
