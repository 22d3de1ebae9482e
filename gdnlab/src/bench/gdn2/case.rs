//! Shapes and passes of GDN-2 that are timed, and what each costs at the least.

use super::super::seqlens::SeqLens;
use crate::Result;
use crate::cost::Cost;
use crate::cost::gdn::{Call, ChunkStates};
use crate::cuda::chunk::gdn2::States;
use crate::inputs::{Regime, generate};
use crate::problem::{Inputs, Op, Shape};
use crate::record::{Pass, Workload};
use std::fmt;

/// Seed of the inputs.
pub const SEED: u64 = 1;
/// How they are distributed: as in the GDN-2 precision RFC.
const REGIME: Regime = Regime::Correlated;
/// Tokens of a chunk in the cost model.
const CHUNK: usize = 64;
/// Bytes of the log decay and of its gradient.
const DECAY_BYTES: f64 = 4.0;

/// One shape, pass and source of the states of chunks.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Forward or backward. The backward is timed alone.
    pub pass: Pass,
    /// Where the backward has the states from; the forward of a case that retains them keeps them.
    pub states: States,
    /// Sizes.
    pub shape: Shape,
    /// Lengths of the packed sequences; `None` where the `B` rows are the sequences.
    pub seqlens: Option<SeqLens>,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { batch, tokens, value_heads, key_dim, value_dim, .. } = self.shape;
        let pass = if self.pass == Pass::Bwd { "bwd" } else { "fwd" };
        write!(f, "{pass} H={value_heads} {key_dim}/{value_dim} ")?;
        match &self.seqlens {
            Some(seqlens) => write!(f, "{seqlens}")?,
            None => write!(f, "B{batch} T{tokens}")?,
        }
        if self.states == States::Retained { write!(f, " retained") } else { Ok(()) }
    }
}

impl Case {
    /// The shape of the RFC, two sequences of 5,120 tokens with 12 heads; 8,192 tokens with 16 heads; and a training step of 32
    /// sequences of 1,024 tokens with 6 heads. Both passes, with states computed again and retained.
    ///
    /// # Errors
    /// None: the lengths are well-formed.
    pub fn suite() -> Result<Vec<Self>> {
        let shapes = [
            (Shape::new(10_240, 12, 128, 128), Some("5120x2".parse()?)),
            (Shape::new(8192, 16, 128, 128), None),
            (Shape { batch: 32, ..Shape::new(1024, 6, 128, 128) }, None),
        ];
        let of = |(shape, seqlens): (Shape, Option<SeqLens>)| {
            [States::Recomputed, States::Retained].into_iter().flat_map(move |states| {
                let seqlens = seqlens.clone();
                [Pass::Fwd, Pass::Bwd].map(|pass| Self { pass, states, shape, seqlens: seqlens.clone() })
            })
        };
        Ok(shapes.into_iter().flat_map(of).collect())
    }

    /// What a record says of it, the kernel aside.
    pub(super) fn workload(&self) -> Workload {
        let seqlens = self.seqlens.as_ref().map(SeqLens::to_string);
        Workload { seqlens, ..Workload::new(Op::Gdn2, &self.shape) }.inputs(REGIME.name(), SEED).pass(self.pass)
    }

    /// Whether `other` has the same inputs.
    pub(super) fn has_inputs_of(&self, other: &Self) -> bool {
        (self.shape, &self.seqlens) == (other.shape, &other.seqlens)
    }

    /// Its inputs, seeded.
    pub(super) fn inputs(&self) -> Result<Inputs> {
        let inputs = generate(Op::Gdn2, &self.shape, REGIME, SEED)?.with_initial_state(SEED);
        match &self.seqlens {
            Some(seqlens) => inputs.packed(&boundaries(&seqlens.ranges()), SEED),
            None => Ok(inputs),
        }
    }

    /// Useful arithmetic and traffic with inputs of `element` bytes, and b and w of `gate` bytes: those of GDN with a gate
    /// for each channel.
    pub fn cost(&self, element: usize, gate: usize) -> Cost {
        let Shape { batch, tokens, value_heads, key_dim, value_dim, .. } = self.shape;
        let lengths: Vec<usize> = match &self.seqlens {
            Some(seqlens) => seqlens.ranges().iter().map(ExactSizeIterator::len).collect(),
            None => vec![tokens; batch],
        };
        let call = Call { shape: self.shape, lengths: &lengths, chunk: CHUNK, element_bytes: element };
        let states = if self.states == States::Retained { ChunkStates::Kept } else { ChunkStates::Recomputed };
        let (of_gdn, times) = if self.pass == Pass::Bwd { (call.backward(states), 2.0) } else { (call.forward(), 1.0) };
        let (k, v, gate) = (key_dim as f64, value_dim as f64, gate as f64);
        let scalar_gates = 2.0 * DECAY_BYTES;
        let gates = DECAY_BYTES * k + gate * (k + v) - scalar_gates;
        Cost { bytes: of_gdn.bytes + times * (batch * tokens * value_heads) as f64 * gates, ..of_gdn }
    }
}

fn boundaries(ranges: &[std::ops::Range<usize>]) -> Vec<usize> {
    std::iter::once(0).chain(ranges.iter().map(|range| range.end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_suite_has_both_passes_of_each_shape_with_states_from_both_sources() {
        let suite = Case::suite().unwrap();
        let names: Vec<String> = suite.iter().map(Case::to_string).collect();
        assert_eq!(names.len(), 12);
        assert_eq!(names[0], "fwd H=12 128/128 5120+5120");
        assert_eq!(names[3], "bwd H=12 128/128 5120+5120 retained");
        assert_eq!(names[11], "bwd H=6 128/128 B32 T1024 retained");
        let small =
            Case { shape: Shape::new(100, 2, 32, 32), seqlens: Some("60+40".parse().unwrap()), ..suite[0].clone() };
        let inputs = small.inputs().unwrap();
        assert_eq!((inputs.op(), inputs.cu_seqlens.as_deref()), (Op::Gdn2, Some(&[0, 60, 100][..])));
    }

    /// q, k, v and o in two bytes, b and w too, g in four: 1,024 + 512 + 512 bytes at 128/128, and the states once each.
    #[test]
    fn the_forward_costs_its_tensors_once() {
        let case = Case { shape: Shape::new(640, 1, 128, 128), seqlens: None, ..Case::suite().unwrap()[0].clone() };
        let cost = case.cost(2, 2);
        assert_eq!(cost.bytes, 640.0 * (1024.0 + 512.0 + 512.0) + 8.0 * 128.0 * 128.0);
        let narrow = case.cost(2, 4);
        assert_eq!(narrow.bytes - cost.bytes, 640.0 * 2.0 * 256.0);
    }
}
