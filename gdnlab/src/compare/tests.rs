//! Metrics against values computed by hand, and the table against kernels that must pass or fail.

use super::*;
use crate::chunked::Chunked;
use crate::inputs::{Regime, generate};
use crate::kernel::Kernel;
use crate::precision::{Format, Policy};
use crate::problem::{Gates, Inputs, Op, Results, Shape, Tensor};
use crate::reference::Reference;

fn vector(values: &[f64]) -> Tensor {
    Tensor::new(&[values.len()], values.to_vec()).unwrap()
}

fn close(got: f64, expected: f64) {
    assert!((got - expected).abs() <= 1e-12 * expected.abs(), "got {got:e}, expected {expected:e}");
}

#[test]
fn metrics_are_those_computed_by_hand() {
    // Errors 1, -1, 0, 2 of a reference with norm 10 and RMS 5.
    let c = compare("o", &vector(&[3.0, 3.0, 4.0, 10.0]), &vector(&[2.0, 4.0, 4.0, 8.0])).unwrap();
    assert_eq!((c.elements, c.nonfinite, c.max_abs, c.mean_abs), (4, 0, 2.0, 1.0));
    close(c.max_rel, 0.25);
    close(c.rel_rms, 6f64.sqrt() / 10.0);
    close(c.cosine, (6.0 + 12.0 + 16.0 + 80.0) / (134f64.sqrt() * 10.0));
    close(c.bias, 0.5 / 5.0);
    close(c.max_expected, 8.0);
    close(c.rms_expected, 5.0);
    assert_eq!(c.worst, Some(Worst { index: vec![3], got: 10.0, expected: 8.0 }));
    // t = 0.5 / (sqrt(5/3) / 2) = sqrt(3/5); with 3 degrees of freedom
    // p = 1 - (2/pi) (atan(t/sqrt 3) + (t/sqrt 3) / (1 + t^2/3)).
    let x = (0.6f64 / 3.0).sqrt();
    let p = 1.0 - std::f64::consts::FRAC_2_PI * (x.atan() + x / (1.0 + x * x));
    assert!((c.bias_p - p).abs() < 1e-9, "got {}, expected {p}", c.bias_p);
}

#[test]
fn an_exact_match_is_zero_everywhere() {
    let x = vector(&[1.0, -2.0, 1e-300]);
    let c = compare("o", &x, &x).unwrap();
    assert_eq!((c.max_rel, c.rel_rms, c.mean_abs, c.bias, c.bias_p, c.worst), (0.0, 0.0, 0.0, 0.0, 1.0, None));
    close(c.cosine, 1.0);
}

#[test]
fn nan_is_counted_found_and_never_passes() {
    for (got, expected) in [([1.0, f64::NAN, 3.0], [1.0, 2.0, 3.5]), ([1.0, 2.0, 3.0], [1.0, f64::NAN, 3.5])] {
        let c = compare("o", &vector(&got), &vector(&expected)).unwrap();
        assert_eq!((c.nonfinite, c.max_abs), (1, 0.5));
        assert_eq!(c.worst.as_ref().map(|worst| worst.index.clone()), Some(vec![1]));
        assert!(!Verdict::new(c, "bf16").unwrap().pass);
    }
    let both = compare("o", &vector(&[f64::NAN]), &vector(&[f64::NAN])).unwrap();
    assert_eq!(both.nonfinite, 1);
}

#[test]
fn infinities_agree_only_with_themselves() {
    let infinite = vector(&[f64::INFINITY, 1.0]);
    let same = compare("o", &infinite, &infinite).unwrap();
    assert_eq!((same.nonfinite, same.max_rel, same.max_expected), (0, 0.0, 1.0));
    for other in [f64::NEG_INFINITY, f64::MAX, f64::NAN] {
        assert_eq!(compare("o", &vector(&[other, 1.0]), &infinite).unwrap().nonfinite, 1);
        assert_eq!(compare("o", &infinite, &vector(&[other, 1.0])).unwrap().nonfinite, 1);
    }
}

#[test]
fn a_reference_of_zeros_accepts_zeros_alone() {
    let zeros = Tensor::zeros(&[3]);
    let exact = compare("dq", &zeros, &zeros).unwrap();
    assert_eq!((exact.max_rel, exact.rel_rms, exact.cosine), (0.0, 0.0, 1.0));
    let off = compare("dq", &vector(&[0.0, 1e-9, 0.0]), &zeros).unwrap();
    assert_eq!((off.max_rel, off.rel_rms, off.cosine), (f64::INFINITY, f64::INFINITY, 0.0));
    assert!(Verdict::new(exact, "fp32").unwrap().pass && !Verdict::new(off, "fp32").unwrap().pass);
}

#[test]
fn empty_tensors_agree() {
    let empty = Tensor::zeros(&[1, 0, 2, 4]);
    let c = compare("o", &empty, &empty).unwrap();
    assert_eq!((c.elements, c.max_rel, c.rel_rms, c.mean_abs, c.cosine, c.bias_p), (0, 0.0, 0.0, 0.0, 1.0, 1.0));
    assert!(Verdict::new(c, "fp64").unwrap().pass);
}

#[test]
fn other_shapes_are_refused_in_words() {
    let error = compare("o", &Tensor::zeros(&[2, 3]), &Tensor::zeros(&[3, 2])).unwrap_err().to_string();
    assert_eq!(error, "tensor 'o': expected shape [3, 2], got [2, 3]");
}

#[test]
fn extreme_magnitudes_neither_overflow_nor_vanish() {
    for scale in [1e-300, 1e300] {
        let c = compare("o", &vector(&[1.01 * scale, -scale]), &vector(&[scale, -scale])).unwrap();
        assert!((c.max_rel - 0.01).abs() < 1e-12 && (c.rel_rms - 0.01 / 2f64.sqrt()).abs() < 1e-12, "{c}");
        assert!((c.cosine - 1.0).abs() < 1e-4, "{c}");
    }
}

#[test]
fn a_bias_shows_in_its_p_value() {
    let truth = Tensor::filled(&[1000], 1.0);
    let alternating: Vec<f64> = (0..1000).map(|i| if i % 2 == 0 { 1.001 } else { 0.999 }).collect();
    let shifted: Vec<f64> = alternating.iter().map(|x| x + 2e-4).collect();
    let unbiased = compare("o", &vector(&alternating), &truth).unwrap();
    let biased = compare("o", &vector(&shifted), &truth).unwrap();
    assert!(unbiased.bias_p > 0.99 && unbiased.bias.abs() < 1e-15, "{unbiased}");
    assert!(biased.bias_p < 1e-9 && (biased.bias - 2e-4).abs() < 1e-12, "{biased}");
    let constant = compare("o", &Tensor::filled(&[10], 1.5), &Tensor::filled(&[10], 1.0)).unwrap();
    assert_eq!(constant.bias_p, 0.0);
}

#[test]
fn axes_have_their_names() {
    let worst = Worst { index: vec![0, 12, 1, 3], got: 0.5, expected: 0.25 };
    assert!(worst.describe("dq").starts_with("(b=0, t=12, h=1, d=3): got 5.0"), "{}", worst.describe("dq"));
    assert!(worst.describe("dh0").starts_with("(n=0, h=12, k=1, v=3)"));
    let gate = Worst { index: vec![1, 2, 3], got: 0.5, expected: 0.25 };
    assert!(gate.describe("dbeta").starts_with("(b=1, t=2, h=3)"));
}

#[test]
fn every_mode_has_limits_for_every_class() {
    for mode in modes() {
        for class in TensorClass::ALL {
            let t = tolerance(mode.name, class).unwrap();
            assert!(t.rel_rms() <= t.max_rel() && t.rel_rms() > t.unit_roundoff() / 5.0, "{t:?}");
            assert!(!t.reason.is_empty());
        }
    }
    for (name, _) in Policy::presets() {
        assert!(mode(name).is_ok(), "no tolerance for the preset {name}");
    }
    assert!(mode("fp8").unwrap_err().to_string().contains("expected one of fp64, fp32"));
}

/// Published maxima of a library that is known to be right in each of its modes.
#[test]
fn published_errors_of_a_right_kernel_pass_in_their_mode_and_not_as_fp32() {
    let csv = include_str!("../../../data/published/day01_gb10_fla_0.5.2_max_rel.csv");
    for row in csv.lines().filter(|line| !line.starts_with('#')).skip(1) {
        let fields: Vec<&str> = row.split(',').collect();
        let (tensor, max_rel) = (fields[4], fields[5].parse::<f64>().unwrap());
        let own = if fields[0] == "fp32_ieee" { "fp32-tf32-solve" } else { fields[0] };
        let limit = |mode: &str| tolerance(mode, TensorClass::of(tensor).unwrap()).unwrap().max_rel();
        assert!(max_rel <= limit(own), "{row}");
        assert!(max_rel > limit("fp32"), "{row}");
    }
}

/// Values over five binades, so that every mantissa occurs.
fn spread(n: usize) -> Vec<f64> {
    (0..n).map(|i| (f64::from(i as u32) * 0.618_033_988_75).fract() * if i % 3 == 0 { -4.0 } else { 3.0 }).collect()
}

#[test]
fn a_result_that_went_through_a_narrower_format_does_not_pass() {
    let truth = vector(&spread(20_000));
    let pass = |stored: Format, mode: &str| {
        let mut rounded = truth.clone();
        rounded.round_to(stored);
        Verdict::new(compare("o", &rounded, &truth).unwrap(), mode).unwrap().pass
    };
    assert!(pass(Format::F32, "fp32") && pass(Format::Tf32, "tf32") && pass(Format::F16, "fp16"));
    assert!(pass(Format::Bf16, "bf16") && pass(Format::Bf16, "f16-internals"));
    assert!(!pass(Format::F32, "fp64"));
    assert!(!pass(Format::Tf32, "fp32") && !pass(Format::Bf16, "fp32"));
    assert!(!pass(Format::Bf16, "tf32") && !pass(Format::Bf16, "fp16"));
}

/// Inputs as ordinary training has them, and every regime that makes a right kernel err most.
fn cases() -> Vec<Inputs> {
    let mut all = Vec::new();
    for (op, regime) in Op::ALL.into_iter().flat_map(|op| Regime::ALL.map(|regime| (op, regime))) {
        for (tokens, key_dim, value_dim) in [(130, 32, 48), (1, 16, 8), (65, 16, 16)] {
            let inputs = generate(op, &Shape::new(tokens, 4, key_dim, value_dim), regime, 11).unwrap();
            all.extend([inputs.clone(), inputs.with_initial_state(12)]);
        }
    }
    all
}

fn report(inputs: &Inputs, got: &Results, truth: &Results, mode: &str) -> Report {
    Report::of_call(inputs, &got.named(), truth, mode).unwrap()
}

/// Chunks of 32, which the yardstick for hard inputs does not have.
#[test]
fn every_kernel_passes_in_its_mode_on_every_regime() {
    for inputs in cases() {
        for (name, policy) in Policy::presets() {
            let kernel = Chunked::new(name, policy, 32).unwrap();
            let rounded = inputs.rounded_to(kernel.input_format());
            let truth = Reference.backward(&rounded).unwrap();
            let report = report(&rounded, &kernel.backward(&rounded).unwrap(), &truth, name);
            assert!(report.pass, "{} {}\n{report}", inputs.op(), inputs.shape);
        }
    }
}

#[test]
fn ordinary_inputs_need_no_yardstick() {
    for regime in [Regime::Gaussian, Regime::MildDecay, Regime::LongMemory, Regime::GateInKernel, Regime::BetaTwo] {
        for (op, (name, policy)) in
            Op::ALL.into_iter().flat_map(|op| Policy::presets().into_iter().map(move |p| (op, p)))
        {
            let inputs = generate(op, &Shape::new(130, 4, 32, 48), regime, 21).unwrap().rounded_to(policy.inputs);
            let truth = Reference.backward(&inputs).unwrap();
            let got = Chunked::new(name, policy, 64).unwrap().backward(&inputs).unwrap();
            let report = Report::new(compare_call(&inputs, &got.named(), &truth.named()).unwrap(), name).unwrap();
            assert!(report.pass, "{op} {regime}\n{report}");
        }
    }
}

/// Results as a kernel would give them that computes `change` of the problem, all else exact.
fn wrong(inputs: &Inputs, mode: &str, what: &str, change: impl FnOnce(&mut Inputs)) {
    let truth = Reference.backward(inputs).unwrap();
    let mut changed = inputs.clone();
    change(&mut changed);
    let report = report(inputs, &Reference.backward(&changed).unwrap(), &truth, mode);
    assert!(!report.pass, "{what} passes as {mode} for {} {}\n{report}", inputs.op(), inputs.shape);
}

#[test]
fn wrong_kernels_fail_even_in_the_widest_mode() {
    let shape = Shape::new(130, 4, 32, 32);
    for regime in [Regime::Gaussian, Regime::LongMemory, Regime::Correlated] {
        let inputs = generate(Op::Gdn, &shape, regime, 5).unwrap().with_initial_state(6);
        wrong(&inputs, "bf16", "no initial state", |x| x.initial_state = None);
        wrong(&inputs, "bf16", "no gradient of the final state", |x| x.d_final_state = None);
        wrong(&inputs, "bf16", "a scale that is 5 % off", |x| x.scale *= 1.05);
        wrong(&inputs, "bf16", "no write strength", |x| {
            if let Gates::Gdn { beta, .. } = &mut x.gates {
                beta.data.fill(1.0);
            }
        });
        wrong(&inputs, "bf16", "beta and g swapped", |x| {
            if let Gates::Gdn { g, beta } = &mut x.gates {
                std::mem::swap(g, beta);
                g.data.iter_mut().for_each(|g| *g = g.ln());
                beta.data.iter_mut().for_each(|beta| *beta = beta.exp());
            }
        });
        wrong(&inputs, "bf16", "the state forgotten at a chunk", |x| {
            if let Gates::Gdn { g, .. } = &mut x.gates {
                g.data[64 * 4..65 * 4].fill(-1e3);
            }
        });
        wrong(&inputs, "bf16", "heads of v out of order", |x| {
            x.v.data.chunks_exact_mut(2 * 32).for_each(|pair| pair.rotate_left(32));
        });
    }
}

#[test]
fn narrow_kernels_do_not_pass_as_wider_ones() {
    let shape = Shape::new(130, 4, 64, 64);
    let offered_for = |regime, op, policy: Policy, mode: &str| {
        let kernel = Chunked::new("offered", policy, 64).unwrap();
        let inputs = generate(op, &shape, regime, 5).unwrap().rounded_to(Format::Bf16);
        report(&inputs, &kernel.backward(&inputs).unwrap(), &Reference.backward(&inputs).unwrap(), mode).pass
    };
    let offered = |op, policy, mode: &str| offered_for(Regime::Gaussian, op, policy, mode);
    for op in Op::ALL {
        assert!(!offered(op, Policy::bf16(), "fp32") && !offered(op, Policy::bf16(), "tf32"));
        assert!(!offered(op, Policy::bf16(), "f16-internals") && !offered(op, Policy::f16_internals(), "tf32"));
        assert!(!offered(op, Policy::tf32(), "fp32") && !offered(op, Policy::fp32(), "fp64"));
        // With a fast decay the solve has little to do; with a long memory its rounding shows.
        assert!(!offered_for(Regime::LongMemory, op, Policy::fp32_tf32_solve(), "fp32"));
    }
}

#[test]
fn terms_that_cancel_do_not_count_against_a_kernel() {
    // One token from a state of zeros: dg is exactly 0, and what a kernel leaves there is rounding.
    let inputs = generate(Op::Gdn, &Shape::new(1, 1, 4, 4), Regime::Gaussian, 1).unwrap();
    let truth = Reference.backward(&inputs).unwrap();
    let mut got = truth.clone();
    let grads = got.grads.as_mut().unwrap();
    assert_eq!(grads.dg.data, [0.0]);
    grads.dg.data[0] = 1e-7;
    assert!(report(&inputs, &got, &truth, "fp32").pass);
    got.grads.as_mut().unwrap().dg.data[0] = 1e-2;
    assert!(!report(&inputs, &got, &truth, "fp32").pass);
}

#[test]
fn the_report_names_tensor_element_values_and_limits() {
    let truth = Tensor::filled(&[1, 4, 2, 8], 1.0);
    let mut wrong = truth.clone();
    wrong.data[8 + 3] = 1.5;
    let comparisons = vec![compare("o", &wrong, &truth).unwrap(), compare("dq", &truth, &truth).unwrap()];
    let report = Report::new(comparisons, "bf16").unwrap();
    assert!(!report.pass);
    let text = report.to_string();
    for part in [
        "FAIL",
        "ok",
        "(b=0, t=0, h=1, d=3): got 1.5",
        "expected 1.0",
        "26 times the limit of 1.95e-2",
        "128",
        "tolerance bf16",
    ] {
        assert!(text.contains(part), "'{part}' is missing in:\n{text}");
    }
}

#[test]
fn a_truth_that_is_not_finite_is_refused() {
    let mut inputs = generate(Op::Gdn, &Shape::new(100, 2, 8, 8), Regime::Gaussian, 1).unwrap();
    assert!(check_truth(&Reference.backward(&inputs).unwrap()).is_ok());
    inputs.k.data.iter_mut().for_each(|k| *k *= 500.0);
    let message = check_truth(&Reference.forward(&inputs).unwrap()).unwrap_err().to_string();
    assert!(message.starts_with("the float64 truth itself is not finite from t="), "{message}");
    assert!(message.ends_with(" on (tensor o): are q and k normalised and g <= 0?"), "{message}");
    let mut truth = Reference.backward(&inputs).unwrap();
    truth.outputs.o.data.fill(0.0);
    let message = check_truth(&truth).unwrap_err().to_string();
    assert!(message.contains("not finite (tensor final_state)"), "{message}");
}

#[test]
fn a_wrong_head_of_small_values_fails() {
    for mode in ["bf16", "fp32", "f16-internals"] {
        let mut inputs = generate(Op::Gdn, &Shape::new(96, 2, 16, 16), Regime::Gaussian, 3).unwrap();
        inputs.v.data.chunks_mut(16).skip(1).step_by(2).flatten().for_each(|v| *v *= 1e-3);
        let inputs = inputs.rounded_to(Format::Bf16);
        let truth = Reference.forward(&inputs).unwrap();
        let kernel = Chunked::new(mode, Policy::preset(mode).unwrap(), 32).unwrap();
        let mut got = kernel.forward(&inputs).unwrap();
        let right = report(&inputs, &got, &truth, mode);
        assert!(right.pass, "{right}");
        got.outputs.o.data.chunks_mut(16).skip(1).step_by(2).for_each(|head| head.fill(0.0));
        let wrong = report(&inputs, &got, &truth, mode);
        assert!(!wrong.pass, "{wrong}");
        assert!(wrong.to_string().contains("head 1 of sequence 0: relative RMS 1.00"), "{wrong}");
    }
}
