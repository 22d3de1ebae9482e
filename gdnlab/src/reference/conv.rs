//! Short causal depthwise convolution in float64, forward and backward.
//!
//! Per channel, with `W` taps and the inputs before the first token of a sequence taken from the cache:
//!
//! ```text
//! u_t = bias + sum_{j < W} weight_j x_{t - W + 1 + j}         y_t = u_t, or silu(u_t)
//! du_t = dy_t, or dy_t silu'(u_t)                             dx_t = sum_j weight_j du_{t + W - 1 - j}
//! dweight_j = sum_t du_t x_{t - W + 1 + j}                    dbias = sum_t du_t
//! ```
//! The cache holds the last `W - 1` inputs of a sequence, the oldest first: decoding goes on from it.

use crate::activation::{silu, silu_slope};
use crate::problem::{Tensor, sequence_ranges};
use crate::{Error, Result};
use std::ops::Range;

/// Taps of the convolution in GDN models.
pub const DEFAULT_WIDTH: usize = 4;

/// One call of the short convolution.
#[derive(Clone, Copy, Debug)]
pub struct ShortConv<'a> {
    /// Input, `[B, T, D]`.
    pub x: &'a Tensor,
    /// Taps, `[D, W]`; the last one meets the present token.
    pub weight: &'a Tensor,
    /// Offset, `[D]`.
    pub bias: Option<&'a Tensor>,
    /// Inputs before the first token, `[N, D, W - 1]`, the oldest first; zeros when absent.
    pub initial_state: Option<&'a Tensor>,
    /// Whether SiLU follows.
    pub silu: bool,
    /// Boundaries of packed sequences, `[N + 1]` from 0 to T with B = 1; `None` when the B rows are the sequences.
    pub cu_seqlens: Option<&'a [usize]>,
}

/// What the forward gives.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvOutputs {
    /// Output, `[B, T, D]`.
    pub y: Tensor,
    /// The last inputs of each sequence, `[N, D, W - 1]`.
    pub final_state: Tensor,
}

/// What the backward gives.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvGrads {
    /// Gradient of x, `[B, T, D]`.
    pub dx: Tensor,
    /// Gradient of the taps, `[D, W]`.
    pub dweight: Tensor,
    /// Gradient of the bias, `[D]`, also where that was zero by default.
    pub dbias: Tensor,
    /// Gradient of the initial state, `[N, D, W - 1]`, also where that was zero by default.
    pub d_initial_state: Tensor,
}

struct Sizes {
    channels: usize,
    width: usize,
    sequences: Vec<Range<usize>>,
}

impl ShortConv<'_> {
    /// The output, and the cache after the last token of each sequence.
    ///
    /// # Errors
    /// [`Error::Input`] where shapes do not agree, `cu_seqlens` does not fit or a value is not finite.
    pub fn forward(&self) -> Result<ConvOutputs> {
        let sizes = self.validate()?;
        let mut y = Tensor::zeros(&self.x.dims);
        let mut final_state = Tensor::zeros(&sizes.state_dims());
        for (n, sequence) in sizes.sequences.iter().enumerate() {
            let padded = self.padded(&sizes, n);
            let u = self.convolve(&sizes, &padded);
            let out = &mut y.data[sequence.start * sizes.channels..sequence.end * sizes.channels];
            out.iter_mut().zip(u).for_each(|(y, u)| *y = if self.silu { silu(u) } else { u });
            let tail = &padded[sequence.len() * sizes.channels..];
            transpose(tail, sizes.channels, sizes.state_of(&mut final_state, n));
        }
        Ok(ConvOutputs { y, final_state })
    }

    /// The gradients of all inputs, given that of y, `dy` `[B, T, D]`, and that of the final state where there is one,
    /// `d_final_state` `[N, D, W - 1]`.
    ///
    /// # Errors
    /// As [`ShortConv::forward`], for `dy` and `d_final_state` too.
    pub fn backward(&self, dy: &Tensor, d_final_state: Option<&Tensor>) -> Result<ConvGrads> {
        let sizes = self.validate()?;
        let Sizes { channels, width, .. } = sizes;
        dy.expect("dy", &self.x.dims)?;
        if let Some(d) = d_final_state {
            d.expect("d_final_state", &sizes.state_dims())?;
        }
        let mut grads = ConvGrads {
            dx: Tensor::zeros(&self.x.dims),
            dweight: Tensor::zeros(&[channels, width]),
            dbias: Tensor::zeros(&[channels]),
            d_initial_state: Tensor::zeros(&sizes.state_dims()),
        };
        for (n, sequence) in sizes.sequences.iter().enumerate() {
            let padded = self.padded(&sizes, n);
            let du = self.pre_activation_gradient(&sizes, &padded, &dy.data[sizes.elements(sequence)]);
            let mut d_padded = vec![0.0; padded.len()];
            if let Some(d) = d_final_state {
                transpose(sizes.state(d, n), width - 1, &mut d_padded[sequence.len() * channels..]);
            }
            self.accumulate(&sizes, &padded, &du, &mut d_padded, &mut grads);
            let (d_cache, dx) = d_padded.split_at((width - 1) * channels);
            transpose(d_cache, channels, sizes.state_of(&mut grads.d_initial_state, n));
            grads.dx.data[sizes.elements(sequence)].copy_from_slice(dx);
        }
        Ok(grads)
    }

    /// The cache of sequence `n` followed by its tokens, `[W - 1 + T, D]`.
    fn padded(&self, sizes: &Sizes, n: usize) -> Vec<f64> {
        let mut padded = vec![0.0; (sizes.width - 1) * sizes.channels];
        if let Some(state) = self.initial_state {
            transpose(sizes.state(state, n), sizes.width - 1, &mut padded);
        }
        padded.extend_from_slice(&self.x.data[sizes.elements(&sizes.sequences[n])]);
        padded
    }

    /// `u`, `[T, D]`.
    fn convolve(&self, sizes: &Sizes, padded: &[f64]) -> Vec<f64> {
        let Sizes { channels, width, .. } = *sizes;
        let tokens = padded.len() / channels + 1 - width;
        let mut u = vec![0.0; tokens * channels];
        for (t, u) in u.chunks_exact_mut(channels).enumerate() {
            for (c, u) in u.iter_mut().enumerate() {
                let taps = &self.weight.data[c * width..(c + 1) * width];
                let sum: f64 = taps.iter().enumerate().map(|(j, w)| w * padded[(t + j) * channels + c]).sum();
                *u = sum + self.bias.map_or(0.0, |bias| bias.data[c]);
            }
        }
        u
    }

    /// `du`, `[T, D]`.
    fn pre_activation_gradient(&self, sizes: &Sizes, padded: &[f64], dy: &[f64]) -> Vec<f64> {
        if !self.silu {
            return dy.to_vec();
        }
        let u = self.convolve(sizes, padded);
        dy.iter().zip(u).map(|(dy, u)| dy * silu_slope(u)).collect()
    }

    /// Adds what `du` contributes to the gradients of the padded input, the taps and the bias.
    fn accumulate(&self, sizes: &Sizes, padded: &[f64], du: &[f64], d_padded: &mut [f64], grads: &mut ConvGrads) {
        let Sizes { channels, width, .. } = *sizes;
        for (t, du) in du.chunks_exact(channels).enumerate() {
            for (c, &du) in du.iter().enumerate() {
                grads.dbias.data[c] += du;
                for j in 0..width {
                    let at = (t + j) * channels + c;
                    d_padded[at] += du * self.weight.data[c * width + j];
                    grads.dweight.data[c * width + j] += du * padded[at];
                }
            }
        }
    }

    fn validate(&self) -> Result<Sizes> {
        let (&[batch, tokens, channels], &[_, width]) = (&self.x.dims[..], &self.weight.dims[..]) else {
            return Err(Error::input(format!(
                "short convolution: expected x [B, T, D] and weight [D, W], got {:?} and {:?}",
                self.x.dims, self.weight.dims
            )));
        };
        if [batch, channels, width].contains(&0) {
            return Err(Error::input(format!(
                "short convolution: B = {batch}, D = {channels}, W = {width}: expected at least 1 of each"
            )));
        }
        let sequences = sequence_ranges(self.cu_seqlens, batch, tokens)?;
        let sizes = Sizes { channels, width, sequences };
        self.x.expect("x", &[batch, tokens, channels])?;
        self.weight.expect("weight", &[channels, width])?;
        if let Some(bias) = self.bias {
            bias.expect("bias", &[channels])?;
        }
        if let Some(state) = self.initial_state {
            state.expect("initial_state", &sizes.state_dims())?;
        }
        Ok(sizes)
    }
}

impl Sizes {
    fn state_dims(&self) -> [usize; 3] {
        [self.sequences.len(), self.channels, self.width - 1]
    }

    fn state_range(&self, n: usize) -> Range<usize> {
        let size = self.channels * (self.width - 1);
        n * size..(n + 1) * size
    }

    fn state<'t>(&self, states: &'t Tensor, n: usize) -> &'t [f64] {
        &states.data[self.state_range(n)]
    }

    fn state_of<'t>(&self, states: &'t mut Tensor, n: usize) -> &'t mut [f64] {
        &mut states.data[self.state_range(n)]
    }

    /// Where the elements of a sequence lie in x.
    fn elements(&self, sequence: &Range<usize>) -> Range<usize> {
        sequence.start * self.channels..sequence.end * self.channels
    }
}

/// Writes the transpose of `from`, whose rows have `cols` elements, to `to`.
fn transpose(from: &[f64], cols: usize, to: &mut [f64]) {
    let rows = from.len().checked_div(cols).unwrap_or(0);
    for (at, &x) in from.iter().enumerate() {
        to[at % cols * rows + at / cols] = x;
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{AWKWARD_LENGTHS, Loss, check_gradient, gaussian, max_rel, tokens_of};
    use super::*;

    const CHANNELS: usize = 3;

    struct Case {
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        state: Tensor,
        dy: Tensor,
        d_state: Tensor,
    }

    impl Case {
        fn new(tokens: usize, sequences: usize, width: usize) -> Self {
            let state = [sequences, CHANNELS, width - 1];
            Self {
                x: gaussian(1, &[1, tokens, CHANNELS]),
                weight: gaussian(2, &[CHANNELS, width]),
                bias: gaussian(3, &[CHANNELS]),
                state: gaussian(4, &state),
                dy: gaussian(5, &[1, tokens, CHANNELS]),
                d_state: gaussian(6, &state),
            }
        }

        fn call<'a>(&'a self, cu_seqlens: Option<&'a [usize]>) -> ShortConv<'a> {
            ShortConv {
                x: &self.x,
                weight: &self.weight,
                bias: Some(&self.bias),
                initial_state: Some(&self.state),
                silu: true,
                cu_seqlens,
            }
        }
    }

    /// Token by token with a shift register, as decoding does.
    fn decode(call: &ShortConv, width: usize) -> ConvOutputs {
        let mut state = call.initial_state.unwrap().clone();
        let mut y = Tensor::zeros(&call.x.dims);
        for (at, &x) in call.x.data.iter().enumerate() {
            let c = at % CHANNELS;
            let mut window = state.data[c * (width - 1)..(c + 1) * (width - 1)].to_vec();
            window.push(x);
            let taps = &call.weight.data[c * width..(c + 1) * width];
            let u = call.bias.unwrap().data[c] + taps.iter().zip(&window).map(|(w, x)| w * x).sum::<f64>();
            y.data[at] = if call.silu { u / (1.0 + (-u).exp()) } else { u };
            state.data[c * (width - 1)..(c + 1) * (width - 1)].copy_from_slice(&window[1..]);
        }
        ConvOutputs { y, final_state: state }
    }

    #[test]
    fn forward_equals_decoding() {
        for width in [1, 2, DEFAULT_WIDTH] {
            for tokens in AWKWARD_LENGTHS {
                let case = Case::new(tokens, 1, width);
                for silu in [false, true] {
                    let call = ShortConv { silu, ..case.call(None) };
                    let (found, expected) = (call.forward().unwrap(), decode(&call, width));
                    assert!(max_rel(&found.y, &expected.y) < 1e-14, "T = {tokens}, W = {width}");
                    assert_eq!(found.final_state, expected.final_state, "T = {tokens}, W = {width}");
                }
            }
        }
    }

    #[test]
    fn absent_bias_and_state_are_zeros() {
        let mut case = Case::new(15, 1, DEFAULT_WIDTH);
        let without = ShortConv { bias: None, initial_state: None, ..case.call(None) }.forward().unwrap();
        case.bias.data.fill(0.0);
        case.state.data.fill(0.0);
        assert_eq!(without, case.call(None).forward().unwrap());
    }

    #[test]
    fn gradients_equal_differences() {
        for (cu, width) in [([0, 1, 3], 4), ([0, 0, 15], 4), ([0, 7, 15], 1)] {
            let case = Case::new(cu[2], 2, width);
            for silu in [false, true] {
                let call = ShortConv { silu, ..case.call(Some(&cu)) };
                let grads = call.backward(&case.dy, Some(&case.d_state)).unwrap();
                let loss = |call: ShortConv| {
                    let out = call.forward().unwrap();
                    Loss::new(&out.y, &case.dy).plus(Loss::new(&out.final_state, &case.d_state))
                };
                check_gradient("dx", &case.x, &grads.dx, |x| loss(ShortConv { x, ..call }));
                check_gradient("dweight", &case.weight, &grads.dweight, |weight| loss(ShortConv { weight, ..call }));
                check_gradient("dbias", &case.bias, &grads.dbias, |bias| loss(ShortConv { bias: Some(bias), ..call }));
                check_gradient("d_initial_state", &case.state, &grads.d_initial_state, |state| {
                    loss(ShortConv { initial_state: Some(state), ..call })
                });
            }
        }
    }

    #[test]
    fn packed_equals_separate() {
        let cu = [0, 0, 63, 64, 79];
        let case = Case::new(79, 4, DEFAULT_WIDTH);
        let call = case.call(Some(&cu));
        let packed = call.forward().unwrap();
        let grads = call.backward(&case.dy, Some(&case.d_state)).unwrap();
        let mut sums = (Tensor::zeros(&[CHANNELS, DEFAULT_WIDTH]), Tensor::zeros(&[CHANNELS]));
        for (n, pair) in cu.windows(2).enumerate() {
            let of = |tensor| tokens_of(tensor, pair[0]..pair[1]);
            let state_of = |tensor: &Tensor| {
                let size = CHANNELS * (DEFAULT_WIDTH - 1);
                Tensor::new(&[1, CHANNELS, DEFAULT_WIDTH - 1], tensor.data[n * size..(n + 1) * size].to_vec()).unwrap()
            };
            let (x, dy, state) = (of(&case.x), of(&case.dy), state_of(&case.state));
            let alone = ShortConv { x: &x, initial_state: Some(&state), cu_seqlens: None, ..call };
            let out = alone.forward().unwrap();
            assert_eq!((of(&packed.y), state_of(&packed.final_state)), (out.y, out.final_state));
            let separate = alone.backward(&dy, Some(&state_of(&case.d_state))).unwrap();
            assert_eq!(of(&grads.dx), separate.dx);
            assert_eq!(state_of(&grads.d_initial_state), separate.d_initial_state);
            sums.0.data.iter_mut().zip(separate.dweight.data).for_each(|(sum, d)| *sum += d);
            sums.1.data.iter_mut().zip(separate.dbias.data).for_each(|(sum, d)| *sum += d);
        }
        assert!(max_rel(&grads.dweight, &sums.0) < 1e-14 && max_rel(&grads.dbias, &sums.1) < 1e-14);
    }

    #[test]
    fn splitting_through_the_state_equals_not_splitting() {
        let case = Case::new(65, 1, DEFAULT_WIDTH);
        let whole = case.call(None).forward().unwrap();
        let (head, tail) = (tokens_of(&case.x, 0..2), tokens_of(&case.x, 2..65));
        let first = ShortConv { x: &head, ..case.call(None) }.forward().unwrap();
        let second = ShortConv { x: &tail, initial_state: Some(&first.final_state), ..case.call(None) };
        let second = second.forward().unwrap();
        assert_eq!(whole.final_state, second.final_state);
        assert_eq!(tokens_of(&whole.y, 0..2), first.y);
        assert_eq!(tokens_of(&whole.y, 2..65), second.y);
    }

    #[test]
    fn later_tokens_change_nothing_earlier() {
        let case = Case::new(63, 1, DEFAULT_WIDTH);
        let mut x = case.x.clone();
        x.data[40 * CHANNELS..].fill(1e9);
        let changed = ShortConv { x: &x, ..case.call(None) }.forward().unwrap();
        assert_eq!(tokens_of(&case.call(None).forward().unwrap().y, 0..40), tokens_of(&changed.y, 0..40));
    }

    #[test]
    fn extreme_values_stay_finite() {
        let mut case = Case::new(15, 1, DEFAULT_WIDTH);
        case.x.data.iter_mut().for_each(|x| *x *= 1e300);
        let out = case.call(None).forward().unwrap();
        let grads = case.call(None).backward(&case.dy, None).unwrap();
        for tensor in [&out.y, &grads.dx, &grads.dweight, &grads.dbias, &grads.d_initial_state] {
            assert!(tensor.data.iter().all(|x| x.is_finite()));
        }
    }

    #[test]
    fn bad_input_is_refused() {
        let case = Case::new(4, 1, DEFAULT_WIDTH);
        let refused = |call: ShortConv| call.forward().unwrap_err().to_string();
        assert!(refused(ShortConv { weight: &case.bias, ..case.call(None) }).contains("[D, W]"));
        assert!(refused(ShortConv { bias: Some(&case.x), ..case.call(None) }).contains("'bias'"));
        assert!(refused(ShortConv { initial_state: Some(&case.x), ..case.call(None) }).contains("'initial_state'"));
        assert!(refused(case.call(Some(&[0, 3]))).contains("expected 0 to T = 4"));
        let empty = Tensor::zeros(&[CHANNELS, 0]);
        assert!(refused(ShortConv { weight: &empty, ..case.call(None) }).contains("at least 1"));
        assert!(case.call(None).backward(&case.bias, None).unwrap_err().to_string().contains("'dy'"));
        let message = case.call(None).backward(&case.dy, Some(&case.x)).unwrap_err().to_string();
        assert!(message.contains("'d_final_state'"));
    }
}
