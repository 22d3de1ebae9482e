//! Decoding behind the one trait of all implementations.

use super::{DecodeCall, DecodeConfig, Decoder, GateForm, HEAD_DIMS, MAX_TOKENS, StateLayout};
use crate::cuda::Gpu;
use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Gates, Inputs, Op, Outputs, Results, Tensor};
use crate::{Error, Result};
use half::bf16;
use std::ops::Range;

/// GDN as it is served, on the GPU of this process: a few tokens in a call, states in binary32 that are updated in place,
/// q, k, v and o in bf16. It has no backward.
///
/// A long sequence is many calls, so this is for checking the decoder, not for speed.
#[derive(Clone, Copy, Debug)]
pub struct Decode;

impl Decode {
    fn unsupported(&self, reason: impl Into<String>) -> Error {
        Error::Unsupported { kernel: self.name().to_owned(), reason: reason.into() }
    }

    fn config(&self, inputs: &Inputs) -> Result<DecodeConfig> {
        let shape = inputs.shape;
        for (name, dim) in [("K", shape.key_dim), ("V", shape.value_dim)] {
            if !HEAD_DIMS.contains(&dim) {
                let dims = HEAD_DIMS.map(|dim| dim.to_string()).join(", ");
                return Err(self.unsupported(format!("{name} = {dim}: expected one of {dims}")));
            }
        }
        Ok(DecodeConfig {
            qk_heads: shape.qk_heads,
            value_heads: shape.value_heads,
            key_dim: shape.key_dim,
            value_dim: shape.value_dim,
            scale: inputs.scale as f32,
            layout: StateLayout::KeyValue,
            slot_stride: None,
            gates: GateForm::Final,
            norm_eps: None,
        })
    }
}

/// Sequences that get the same number of tokens in one call: their numbers, and their tokens on the axis `B * T`.
struct Round {
    sequences: Vec<usize>,
    tokens: Vec<Range<usize>>,
}

/// The calls that take every sequence from its first token to its last, each in order.
fn rounds(sequences: &[Range<usize>]) -> Vec<Round> {
    let mut left = sequences.to_vec();
    let mut rounds = Vec::new();
    while let Some(most) = left.iter().map(|tokens| tokens.len().min(MAX_TOKENS)).filter(|&count| count > 0).min() {
        let active: Vec<usize> = (0..left.len()).filter(|&n| !left[n].is_empty()).collect();
        let tokens = active.iter().map(|&n| left[n].start..left[n].start + most).collect();
        active.iter().for_each(|&n| left[n].start += most);
        rounds.push(Round { sequences: active, tokens });
    }
    rounds
}

/// The rows `tokens` of a tensor whose rows have `width` elements, one range after the other.
fn rows<T>(values: &[f64], width: usize, tokens: &[Range<usize>], convert: impl Fn(f64) -> T) -> Vec<T> {
    tokens.iter().flat_map(|range| &values[range.start * width..range.end * width]).map(|&x| convert(x)).collect()
}

impl Kernel for Decode {
    fn name(&self) -> &str {
        "cuda-decode"
    }

    fn summary(&self) -> String {
        format!(
            "token by token on a GPU as in serving: up to {MAX_TOKENS} tokens a call, states updated in place; no backward"
        )
    }

    fn needs(&self) -> &'static str {
        "an NVIDIA GPU, sm_80 or newer"
    }

    fn on_gpu(&self) -> bool {
        true
    }

    fn has_backward(&self) -> bool {
        false
    }

    fn ops(&self) -> &'static [Op] {
        &[Op::Gdn]
    }

    fn mode(&self) -> &'static str {
        "f16-internals"
    }

    fn input_format(&self) -> Format {
        Format::Bf16
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        inputs.validate()?;
        let Gates::Gdn { g, beta } = &inputs.gates else {
            return Err(self.unsupported(format!("the operator {}: expected gdn", inputs.op())));
        };
        let config = self.config(inputs)?;
        let gpu = Gpu::shared()?;
        let decoder = Decoder::<f32, bf16, f32>::new(gpu, config)?;
        let sequences = inputs.sequence_ranges();
        let dims = inputs.shape.state_dims(sequences.len());
        let mut states = match &inputs.initial_state {
            Some(initial) => gpu.upload(&initial.data.iter().map(|&x| x as f32).collect::<Vec<_>>())?,
            None => gpu.upload(&vec![0.0f32; dims.iter().product()])?,
        };
        let (qk, value) = (config.qk_heads * config.key_dim, config.value_heads * config.value_dim);
        let mut o = Tensor::zeros(&inputs.shape.value_dims());
        for round in rounds(&sequences) {
            let Round { sequences, tokens } = round;
            let count = tokens.first().map_or(0, Range::len);
            let input = |tensor: &Tensor, width| gpu.upload(&rows(&tensor.data, width, &tokens, bf16::from_f64));
            let gate = |tensor: &Tensor| gpu.upload(&rows(&tensor.data, config.value_heads, &tokens, |x| x as f32));
            let slots: Vec<i32> = sequences.iter().map(|&n| n as i32).collect();
            let mut output = gpu.alloc(sequences.len() * count * value)?;
            decoder.run(DecodeCall {
                sequences: sequences.len(),
                tokens: count,
                q: &input(&inputs.q, qk)?,
                k: &input(&inputs.k, qk)?,
                v: &input(&inputs.v, value)?,
                g: &gate(g)?,
                beta: &gate(beta)?,
                rates: None,
                states: &mut states,
                slots: Some(&gpu.upload(&slots)?),
                o: &mut output,
            })?;
            let found: Vec<bf16> = gpu.download(&output)?;
            for (range, values) in tokens.iter().zip(found.chunks_exact(count * value)) {
                let to = &mut o.data[range.start * value..range.end * value];
                to.iter_mut().zip(values).for_each(|(to, x)| *to = x.to_f64());
            }
        }
        let values: Vec<f32> = gpu.download(&states)?;
        let final_state = Tensor::new(&dims, values.into_iter().map(f64::from).collect())?;
        Ok(Results { outputs: Outputs { o, final_state }, grads: None })
    }

    fn backward(&self, _: &Inputs) -> Result<Results> {
        Err(self.unsupported("it has no backward"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_in_one_call_and_in_order() {
        let all = [0..3, 3..3, 3..20, 20..21];
        let mut next: Vec<usize> = all.iter().map(|tokens| tokens.start).collect();
        for Round { sequences, tokens } in rounds(&all) {
            let count = tokens[0].len();
            assert!((1..=MAX_TOKENS).contains(&count));
            for (n, range) in sequences.into_iter().zip(tokens) {
                assert_eq!((range.start, range.len()), (next[n], count));
                next[n] = range.end;
            }
        }
        assert_eq!(next, all.map(|tokens| tokens.end));
        assert!(rounds(&[0..0, 0..0]).is_empty());
        assert_eq!(rows(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2, &[2..3, 0..1], |x| x as i32), [5, 6, 1, 2]);
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn packed_sequences_decode_to_what_the_recurrence_says() {
        use crate::compare::compare;
        use crate::inputs::{Regime, generate};
        use crate::problem::Shape;
        use crate::reference::Reference;
        let shape = Shape { value_heads: 4, ..Shape::new(37, 2, 64, 96) };
        let inputs = generate(Op::Gdn, &shape, Regime::LongMemory, 1).unwrap().with_initial_state(2);
        let inputs = inputs.packed(&[0, 1, 1, 20, 37], 3).unwrap().rounded_to(Format::Bf16);
        let (got, truth) = (Decode.forward(&inputs).unwrap(), Reference.forward(&inputs).unwrap());
        for ((name, found), (_, expected)) in got.named().into_iter().zip(truth.named()) {
            let error = compare(name, found, expected).unwrap();
            let limit = if name == "o" { 1.8e-3 } else { 1e-6 };
            assert!(error.nonfinite == 0 && error.rel_rms < limit, "{error:?}");
        }
        assert!(Decode.backward(&inputs).unwrap_err().to_string().contains("no backward"));
    }
}
