//! The forward in one sweep, which runs on Hopper alone: elsewhere these tests say so and do nothing else.

use crate::case::{AWKWARD, Case, LAYOUTS, Precision, run_forward};
use crate::exact::{differing, part, sequence};
use crate::expect_none;
use gdnlab::cuda::Gpu;
use gdnlab::cuda::chunk::{Chunk, Options, Setup};
use gdnlab::inputs::Regime;
use gdnlab::kernel::Kernel;
use gdnlab::problem::Inputs;
use gdnlab::reference::Reference;

/// Whether the GPU is a Hopper.
fn is_hopper() -> bool {
    let gpu = Gpu::shared().unwrap();
    let found = gpu.capability == (9, 0);
    if !found {
        println!("needs a Hopper GPU: {:?} refuses as it should", gpu.capability);
        let case = case((64, 64), (1, 1), &[1], Regime::Gaussian);
        let error = Chunk::fused().forward(&case.inputs()).unwrap_err().to_string();
        assert!(error.contains("9.0"), "{error}");
    }
    found
}

fn case(dims: (usize, usize), heads: (usize, usize), lengths: &[usize], regime: Regime) -> Case {
    let precision = Precision {
        mode: Chunk::fused().operands(),
        input: Chunk::fused().input_format(),
        tolerance: Kernel::mode(&Chunk::fused()),
    };
    Case { heads, ..Case::new(precision, dims, lengths, regime) }
}

fn setup(inputs: &Inputs, options: impl Fn(Options) -> Options) -> Setup {
    let plain = Setup::of_inputs(inputs, Chunk::fused().operands(), Chunk::fused().input_format(), false).unwrap();
    Setup { options: options(Options { fused: true, ..plain.options }), ..plain }
}

/// Blocks of one and of two consumers, cut and uncut sequences, empty ones, lengths that are no multiples of a chunk.
fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for regime in [Regime::Gaussian, Regime::LongMemory, Regime::FastDecay, Regime::Correlated] {
        all.push(case((128, 128), (2, 4), AWKWARD, regime));
        all.push(case((64, 128), (1, 3), AWKWARD, regime));
        all.push(case((128, 64), (2, 2), AWKWARD, regime));
        all.push(case((128, 256), (1, 24), AWKWARD, regime));
        all.push(case((64, 64), (2, 4), &[65, 6500, 0, 100], regime));
        all.push(case((128, 128), (1, 4), &[65, 6500, 0, 100], regime));
    }
    all
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_fused_forward_is_within_tolerance() {
    if !is_hopper() {
        return;
    }
    let mut complaints = Vec::new();
    for case in cases() {
        let inputs = Inputs { d_o: None, d_final_state: None, ..case.inputs() };
        let got = run_forward(setup(&inputs, |options| options), &inputs);
        complaints.extend(case.judge(&inputs, &got, &Reference.forward(&inputs).unwrap(), "fused"));
    }
    expect_none(&complaints);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_fused_forward_gives_the_same_bits_again_packed_and_for_both_layouts_of_states() {
    if !is_hopper() {
        return;
    }
    for case in cases().into_iter().take(6) {
        let inputs = Inputs { d_o: None, d_final_state: None, ..case.inputs() };
        let together = run_forward(setup(&inputs, |options| options), &inputs);
        for layout in LAYOUTS {
            let again = run_forward(setup(&inputs, |options| Options { state_layout: layout, ..options }), &inputs);
            assert_eq!(differing(&together, &again), [""; 0], "{case} {layout:?}");
        }
        for (n, tokens) in inputs.sequence_ranges().into_iter().enumerate() {
            let alone = sequence(&inputs, n, tokens.clone());
            let alone = run_forward(setup(&alone, |options| options), &alone);
            assert_eq!(differing(&alone, &part(&together, n, tokens)), [""; 0], "{case}, sequence {n}");
        }
        println!("{case} agrees");
    }
}

#[test]
fn the_fused_forward_says_what_it_does_not_take() {
    let inputs = case((128, 128), (1, 1), &[10], Regime::Gaussian).inputs();
    let error = Chunk::fused().backward(&inputs).unwrap_err().to_string();
    assert!(error.contains("cuda-chunk-bf16 has one") && !Chunk::fused().has_backward(), "{error}");
    for dims in [(96, 128), (256, 128), (128, 96)] {
        let inputs = case(dims, (1, 1), &[10], Regime::Gaussian).inputs();
        let error = Chunk::fused().forward(&inputs).unwrap_err().to_string();
        assert!(error.contains("expected K = 64 or 128"), "{error}");
        let error = setup(&inputs, |options| options).validate().unwrap_err().to_string();
        assert!(error.contains("expected K = 64 or 128"), "{error}");
    }
    let backward = Setup { backward: true, ..setup(&inputs, |options| options) };
    assert!(backward.validate().unwrap_err().to_string().contains("backward"));
}
