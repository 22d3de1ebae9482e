//! Inputs at the ends of what is allowed: results are finite, and within tolerance, wherever the recurrence is.

use crate::case::{Case, Precision, SHORT, gates, run_plan};
use crate::expect_none;
use gdnlab::compare::check_truth;
use gdnlab::cuda::chunk::gdn2::Plan;
use gdnlab::inputs::Regime;
use gdnlab::kernel::Kernel;
use gdnlab::problem::Inputs;
use gdnlab::reference::Reference;

const LENGTHS: &[usize] = &[150, 63, 0, 65];

pub fn cases() -> Vec<Case> {
    Precision::presets()
        .into_iter()
        .map(|precision| Case::new(precision, (128, 128), LENGTHS, Regime::Gaussian))
        .collect()
}

/// Checks each precision with what `change` makes of the inputs.
fn check(name: &str, wanted: impl Fn(&Precision) -> bool, change: impl Fn(&mut Inputs)) {
    let mut complaints = Vec::new();
    for case in cases().into_iter().filter(|case| wanted(&case.precision)) {
        let mut inputs = case.inputs();
        change(&mut inputs);
        let inputs = inputs.rounded_to(case.precision.input);
        let truth = Reference.backward(&inputs).unwrap();
        check_truth(&truth).unwrap();
        complaints.extend(case.judge(&inputs, &case.run(&inputs), &truth, name));
    }
    expect_none(&complaints);
}

fn all(_: &Precision) -> bool {
    true
}

/// Formats whose range is that of binary32.
fn wide(precision: &Precision) -> bool {
    precision.input.max_exponent() == 127
}

/// A decay of exactly 0 in some channels: what they held ends there. For the recurrence a log decay of -10,000 is the same.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_log_decay_of_minus_infinity_ends_a_channel() {
    let mut complaints = Vec::new();
    for case in cases() {
        let mut inputs = case.inputs();
        let (g, ..) = gates(&mut inputs);
        let ends: Vec<bool> = (0..g.data.len()).map(|at| at % 37 == 0 || (100..1100).contains(&at)).collect();
        g.data.iter_mut().zip(&ends).filter(|(_, end)| **end).for_each(|(g, _)| *g = -1e4);
        let mut plan = Plan::new(crate::gpu(), case.setup(&inputs)).unwrap();
        plan.upload_inputs(&inputs).unwrap();
        let infinite = |(g, end): (&f64, &bool)| if *end { f64::NEG_INFINITY } else { *g };
        let log_decay: Vec<f64> = gates(&mut inputs).0.data.iter().zip(&ends).map(infinite).collect();
        plan.upload_rounded("g", &log_decay).unwrap();
        let truth = Reference.backward(&inputs).unwrap();
        complaints.extend(case.judge(&inputs, &run_plan(&mut plan), &truth, "g = -inf"));
    }
    expect_none(&complaints);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sums_of_log_decays_may_be_far_below_what_an_exponential_holds() {
    // The decay of one token is a normal number in binary32, that of two is none.
    check("g = -80", all, |inputs| gates(inputs).0.data.fill(-80.0));
    check("g = 0 or -3000", all, |inputs| {
        let steps = gates(inputs).0.data.iter_mut().enumerate();
        steps.for_each(|(at, g)| *g = if at % 5 == 0 { -3000.0 } else { 0.0 });
    });
    check("g = 0 or -5", all, |inputs| {
        let steps = gates(inputs).0.data.iter_mut().enumerate();
        steps.for_each(|(at, g)| *g = if at % 3 == 0 { 0.0 } else { -5.0 });
    });
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gates_of_0_and_1_are_exact_cases() {
    check("b, w in 0, 1", all, |inputs| {
        let (_, b, w) = gates(inputs);
        b.data.iter_mut().enumerate().for_each(|(at, b)| *b = (at * 7 % 11 % 2) as f64);
        w.data.iter_mut().enumerate().for_each(|(at, w)| *w = (at * 5 % 7 % 2) as f64);
    });
    check("b = 0", all, |inputs| gates(inputs).1.data.fill(0.0));
    check("w = 0", all, |inputs| gates(inputs).2.data.fill(0.0));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn values_may_be_huge_or_tiny() {
    for factor in [1e30, 1e-30] {
        check(&format!("v times {factor:e}"), wide, |inputs| {
            inputs.v.data.iter_mut().for_each(|v| *v *= factor);
            let state = inputs.initial_state.as_mut().unwrap();
            state.data.iter_mut().for_each(|s| *s *= factor);
        });
    }
}

/// All keys of a head the same: the triangle L is full, and its inverse as large as it gets.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn keys_may_be_the_same() {
    check("same k, g = 0", all, |inputs| {
        let row = inputs.shape.qk_heads * inputs.shape.key_dim;
        let first = inputs.k.data[..row].to_vec();
        inputs.k.data.chunks_exact_mut(row).for_each(|keys| keys.copy_from_slice(&first));
        gates(inputs).0.data.fill(0.0);
    });
}

/// Rows of zeros leave no trace.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_may_be_zero() {
    check("every third row 0", all, |inputs| {
        let dim = inputs.shape.key_dim;
        for tensor in [&mut inputs.q, &mut inputs.k] {
            tensor.data.chunks_exact_mut(dim).step_by(3).for_each(|row| row.fill(0.0));
        }
    });
}

/// A gradient of zeros gives gradients of zeros.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn without_gradients_nothing_flows_back() {
    for precision in Precision::presets() {
        let case = Case::new(precision, (128, 128), SHORT, Regime::Gaussian);
        let mut inputs = case.inputs();
        for tensor in [&mut inputs.d_o, &mut inputs.d_final_state].into_iter().flatten() {
            tensor.data.fill(0.0);
        }
        let results = case.run(&inputs);
        for (name, tensor) in results.named().into_iter().skip(2) {
            assert!(tensor.data.iter().all(|&x| x == 0.0), "{case}: {name}");
        }
    }
}
