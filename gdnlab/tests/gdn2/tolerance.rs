//! Every mode, head dimension, regime and grouping of heads within the tolerance of its mode.

use crate::case::{AWKWARD, Case, LONG, MANY_HEADS, Precision, SHORT};
use crate::expect_none;
use gdnlab::inputs::{Regime, generate};
use gdnlab::kernel::Kernel;
use gdnlab::problem::{Inputs, Op, Shape, Tensor};

/// Each head dimension, with small and large ones together.
const DIMS: [(usize, usize); 4] = [(32, 256), (64, 32), (96, 96), (128, 64)];

fn regimes() -> Vec<Case> {
    let of = |precision| Regime::ALL.map(|regime| Case::new(precision, (128, 128), AWKWARD, regime));
    Precision::presets().into_iter().flat_map(of).collect()
}

fn dims() -> Vec<Case> {
    let of = |precision| DIMS.map(|dims| Case::new(precision, dims, SHORT, Regime::LongMemory));
    Precision::presets().into_iter().flat_map(of).collect()
}

fn mixed() -> Vec<Case> {
    Precision::mixed().map(|precision| Case::new(precision, (128, 128), SHORT, Regime::Gaussian)).to_vec()
}

fn groups() -> Vec<Case> {
    let heads = [(1, 3), (2, 4)];
    let of =
        |precision| heads.map(|heads| Case { heads, ..Case::new(precision, (64, 64), &[130, 70], Regime::LongMemory) });
    let [default, .., fp32] = &Precision::presets()[..] else { unreachable!() };
    [*default, *fp32].into_iter().flat_map(of).collect()
}

fn many_heads() -> Vec<Case> {
    let of = |precision| {
        let case = |regime| Case { heads: MANY_HEADS, ..Case::new(precision, (128, 128), &[1, 0, 65, 70], regime) };
        [Regime::Gaussian, Regime::LongMemory, Regime::Correlated].map(case)
    };
    Precision::presets().into_iter().flat_map(of).collect()
}

/// A sequence that is cut into segments, beside others.
fn long() -> Vec<Case> {
    let of = |precision| {
        [Regime::LongMemory, Regime::FastDecay, Regime::Correlated]
            .map(|regime| Case::new(precision, (128, 128), LONG, regime))
    };
    let [default, .., fp32] = &Precision::presets()[..] else { unreachable!() };
    [*default, *fp32].into_iter().flat_map(of).collect()
}

/// A case that is small enough for a machine that has no GPU and takes its time.
fn tiny() -> Vec<Case> {
    let of = |precision| {
        let case = |regime| Case { heads: (1, 1), ..Case::new(precision, (32, 32), &[0, 1, 70], regime) };
        [Regime::LongMemory, Regime::FastDecay, Regime::Correlated].map(case)
    };
    Precision::presets().into_iter().flat_map(of).collect()
}

pub fn cases() -> Vec<Case> {
    [regimes(), dims(), mixed(), groups(), many_heads(), long(), tiny()].concat()
}

fn check(cases: &[Case]) {
    expect_none(&cases.iter().filter_map(Case::check).collect::<Vec<_>>());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn tiny_problems_are_within_tolerance() {
    check(&tiny());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_regime_is_within_tolerance() {
    check(&regimes());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_head_dimension_is_within_tolerance() {
    check(&dims());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn input_formats_and_modes_mix() {
    check(&mixed());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn value_heads_share_keys() {
    check(&groups());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn many_heads_are_within_tolerance() {
    check(&many_heads());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cut_sequences_are_within_tolerance() {
    assert!(long().iter().all(|case| case.variant().1.cut));
    check(&long());
}

/// Rows of a batch, without states: all that `Inputs` leave out is zero.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_of_a_batch_begin_at_zero() {
    let shape = Shape { batch: 3, ..Shape::new(70, 2, 64, 32) };
    let mut complaints = Vec::new();
    for precision in Precision::presets() {
        let inputs = generate(Op::Gdn2, &shape, Regime::Gaussian, 4).unwrap().rounded_to(precision.input);
        let inputs = Inputs { d_final_state: None, ..inputs };
        let case = Case::new(precision, (64, 32), &[70; 3], Regime::Gaussian);
        complaints.extend(case.check_inputs(&inputs, "batch"));
    }
    expect_none(&complaints);
}

/// Without a token a state is handed on, to the bit, and so is the gradient of the final state.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn without_tokens_states_are_handed_on() {
    crate::gpu();
    let shape = Shape { batch: 2, ..Shape::new(0, 2, 64, 32) };
    for kernel in gdnlab::cuda::chunk::gdn2::Gdn2::presets() {
        let plain = generate(Op::Gdn2, &shape, Regime::Gaussian, 1).unwrap().rounded_to(kernel.input_format());
        let zeros = Tensor::zeros(&shape.state_dims(2));
        for inputs in [plain.clone().with_initial_state(2).rounded_to(kernel.input_format()), plain] {
            let results = kernel.backward(&inputs).unwrap();
            let initial = inputs.initial_state.as_ref().unwrap_or(&zeros);
            assert_eq!(&results.outputs.final_state, initial, "{}", kernel.name());
            assert_eq!(results.grads.as_ref().map(|grads| &grads.dh0), inputs.d_final_state.as_ref());
        }
    }
}
