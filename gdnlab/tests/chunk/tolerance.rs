//! Every mode, head dimension, regime and grouping of heads within the tolerance of its mode.

use crate::case::{AWKWARD, Case, LONG, Precision, SHORT};
use crate::expect_none;
use gdnlab::cuda::chunk::Chunk;
use gdnlab::inputs::{Regime, generate};
use gdnlab::kernel::Kernel;
use gdnlab::problem::{Inputs, Op, Shape, Tensor};

/// Each head dimension, with small and large ones together.
const DIMS: [(usize, usize); 7] = [(32, 256), (64, 32), (96, 96), (128, 64), (192, 128), (256, 192), (256, 256)];

/// Sequences enough for blocks of many warps on every GPU.
const MANY: usize = 80;

fn regimes() -> Vec<Case> {
    let of = |precision| Regime::ALL.map(|regime| Case::new(precision, (128, 128), AWKWARD, regime));
    Precision::presets().into_iter().flat_map(of).collect()
}

fn dims() -> Vec<Case> {
    let of = |precision| DIMS.map(|dims| Case::new(precision, dims, SHORT, Regime::LongMemory));
    Precision::presets().into_iter().flat_map(of).collect()
}

fn mixed() -> Vec<Case> {
    Precision::mixed().map(|precision| Case::new(precision, (96, 64), SHORT, Regime::Gaussian)).to_vec()
}

fn groups() -> Vec<Case> {
    let heads = [((1, 6), 300), ((3, 3), 100), ((1, 8), 4300), ((2, 14), 700)];
    let of = |precision| {
        heads.map(|(heads, tokens)| Case { heads, ..Case::new(precision, (64, 64), &[tokens, 70], Regime::LongMemory) })
    };
    let [default, .., fp32] = &Precision::presets()[..] else { unreachable!() };
    [*default, *fp32].into_iter().flat_map(of).collect()
}

fn many_heads() -> Vec<Case> {
    let lengths = [1, 63, 0, 65, 100];
    let of = |precision| {
        let dims = [(32, 64), (64, 128), (96, 32)].map(|dims| Case::new(precision, dims, &lengths, Regime::LongMemory));
        let regimes = Regime::ALL.map(|regime| Case::new(precision, (128, 128), &lengths, regime));
        dims.into_iter().chain(regimes).map(|case| case.with_many_heads())
    };
    Precision::presets().into_iter().flat_map(of).collect()
}

fn many() -> Vec<Case> {
    let lengths: Vec<usize> = (0..MANY).map(|n| n * 7 % 71).collect();
    let dims = [(128, 128), (64, 192), (192, 96)];
    let of = |precision| dims.map(|dims| Case::new(precision, dims, &lengths, Regime::MildDecay));
    Precision::presets().into_iter().flat_map(of).collect()
}

/// A sequence that is cut into segments, beside others.
fn long() -> Vec<Case> {
    let of = |precision| {
        let case = |dims, regime| Case::new(precision, dims, LONG, regime);
        let regimes = [Regime::LongMemory, Regime::FastDecay, Regime::Correlated, Regime::BetaTwo];
        let dims = [(64, 96), (96, 32), (192, 64)].map(|dims| case(dims, Regime::NoDecay));
        regimes.map(|regime| case((128, 128), regime)).into_iter().chain(dims)
    };
    Precision::presets().into_iter().flat_map(of).collect()
}

pub fn cases() -> Vec<Case> {
    [regimes(), dims(), mixed(), groups(), many_heads(), many(), long()].concat()
}

fn check(cases: &[Case]) {
    expect_none(&cases.iter().filter_map(Case::check).collect::<Vec<_>>());
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
fn many_short_sequences_are_within_tolerance() {
    check(&many());
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
    let shape = Shape { batch: 3, value_heads: 2, ..Shape::new(70, 1, 64, 32) };
    let mut complaints = Vec::new();
    for precision in Precision::presets() {
        let inputs = generate(Op::Gdn, &shape, Regime::Gaussian, 4).unwrap().rounded_to(precision.input);
        let inputs = Inputs { d_final_state: None, ..inputs };
        let case = Case { heads: (1, 2), ..Case::new(precision, (64, 32), &[70; 3], Regime::Gaussian) };
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
    for kernel in Chunk::presets() {
        let plain = generate(Op::Gdn, &shape, Regime::Gaussian, 1).unwrap().rounded_to(kernel.input_format());
        let zeros = Tensor::zeros(&shape.state_dims(2));
        for inputs in [plain.clone().with_initial_state(2).rounded_to(kernel.input_format()), plain] {
            let results = kernel.backward(&inputs).unwrap();
            let initial = inputs.initial_state.as_ref().unwrap_or(&zeros);
            assert_eq!(&results.outputs.final_state, initial, "{}", kernel.name());
            assert_eq!(results.grads.as_ref().map(|grads| &grads.dh0), inputs.d_final_state.as_ref());
            assert_eq!(kernel.forward(&inputs).unwrap().outputs, results.outputs, "{}", kernel.name());
        }
    }
}
