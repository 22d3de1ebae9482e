use super::*;
use crate::Error;
use crate::bench::SeqLens;
use crate::chunked::Chunked;
use crate::compare::{compare, compare_results};
use crate::inputs::{Draw, Regime, generate};
use crate::kernel::kernel;
use crate::precision::Policy;
use crate::problem::{Op, Shape};
use crate::record::Measurement;
use crate::reference::Reference;
use rand::RngExt;

/// What float64 kernels may be apart after a state was composed instead of computed token by token: the states are of order
/// 1, and a composition adds K products.
const EXACT: f64 = 1e-13;

/// Lengths of sequences and of ranks.
fn packed(op: Op, shape: &Shape, lengths: &[usize], regime: Regime) -> Inputs {
    let cu: Vec<usize> = std::iter::once(0)
        .chain(lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        }))
        .collect();
    let shape = Shape { tokens: lengths.iter().sum(), ..*shape };
    generate(op, &shape, regime, 3).unwrap().with_initial_state(3).packed(&cu, 3).unwrap()
}

fn cut(parts: &[usize]) -> Cut {
    let ends = parts.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    Cut::at(std::iter::once(0).chain(ends).collect()).unwrap()
}

/// The largest error of any tensor relative to its largest element, against a single run.
fn apart(kernel: &dyn Kernel, inputs: &Inputs, cut: &Cut) -> f64 {
    let single = kernel.backward(inputs).unwrap();
    let parallel = together(kernel, inputs, cut, true).unwrap();
    let forward = together(kernel, inputs, cut, false).unwrap().results;
    let of_forward = [
        compare("o", &forward.outputs.o, &single.outputs.o).unwrap(),
        compare("final_state", &forward.outputs.final_state, &single.outputs.final_state).unwrap(),
    ];
    let all = compare_results(&parallel.results, &single).unwrap().into_iter().chain(of_forward);
    all.map(|tensor| {
        assert_eq!(tensor.nonfinite, 0, "{}", tensor.tensor);
        tensor.max_rel
    })
    .fold(0.0, f64::max)
}

fn same_bits(a: &Results, b: &Results) -> bool {
    a.named()
        .iter()
        .zip(b.named())
        .all(|((_, a), (_, b))| a.dims == b.dims && a.data.iter().zip(&b.data).all(|(a, b)| a.to_bits() == b.to_bits()))
}

#[test]
fn every_cut_of_packed_sequences_is_exact() {
    let shape = Shape { value_heads: 4, ..Shape::new(0, 2, 12, 20) };
    let cases: [(&[usize], &[usize]); 9] = [
        (&[100], &[100]),
        (&[100], &[37, 63]),
        (&[130], &[1, 64, 64, 1]),
        (&[130], &[0, 50, 0, 0, 70, 10, 0, 0]),
        (&[40, 60, 30], &[40, 60, 30]),
        (&[40, 60, 30], &[20, 30, 50, 30]),
        (&[0, 40, 0, 0, 60, 30, 0], &[40, 10, 50, 30]),
        (&[10, 150, 20], &[15, 20, 20, 20, 20, 20, 20, 45]),
        (&[33, 33, 33], &[22, 22, 22, 33]),
    ];
    for op in Op::ALL {
        for (lengths, parts) in cases {
            let inputs = packed(op, &shape, lengths, Regime::LongMemory);
            let error = apart(&Reference, &inputs, &cut(parts));
            assert!(error < EXACT, "{op} {lengths:?} cut {parts:?}: {error:.2e}");
        }
    }
}

#[test]
fn every_regime_is_exact_over_one_two_four_and_eight_ranks() {
    let shape = Shape::new(0, 2, 16, 8);
    for op in Op::ALL {
        for regime in Regime::ALL {
            let inputs = packed(op, &shape, &[90, 70], regime);
            for ranks in [1, 2, 4, 8] {
                let error = apart(&Reference, &inputs, &Cut::even(160, ranks).unwrap());
                assert!(error < EXACT, "{op} {regime} over {ranks}: {error:.2e}");
            }
        }
    }
}

#[test]
fn random_cuts_of_random_sequences_are_exact() {
    let shape = Shape { value_heads: 2, ..Shape::new(0, 1, 8, 6) };
    for seed in 0..40 {
        let mut rng = Draw::new(seed).stream("cuts");
        let lengths: Vec<usize> = (0..rng.random_range(1..6)).map(|_| rng.random_range(0..50)).collect();
        let tokens: usize = lengths.iter().sum();
        let mut borders: Vec<usize> = (0..rng.random_range(0..8)).map(|_| rng.random_range(0..=tokens)).collect();
        borders.extend([0, tokens]);
        borders.sort_unstable();
        let cut = Cut::at(borders).unwrap();
        let op = Op::ALL[seed as usize % 2];
        let error = apart(&Reference, &packed(op, &shape, &lengths, Regime::MildDecay), &cut);
        assert!(error < EXACT, "seed {seed}: {op} {lengths:?} cut {cut}: {error:.2e}");
    }
}

#[test]
fn rows_of_a_batch_are_sequences() {
    let shape = Shape { batch: 3, ..Shape::new(40, 2, 16, 16) };
    for op in Op::ALL {
        let inputs = generate(op, &shape, Regime::MildDecay, 5).unwrap().with_initial_state(5);
        for ranks in [1, 2, 3, 4] {
            let error = apart(&Reference, &inputs, &Cut::even(120, ranks).unwrap());
            assert!(error < EXACT, "{op} over {ranks}: {error:.2e}");
        }
    }
}

#[test]
fn the_chunk_form_in_float64_is_exact_with_borders_in_and_between_chunks() {
    let kernel = Chunked::new("mine", Policy::fp64(), 16).unwrap();
    for op in Op::ALL {
        let inputs = packed(op, &Shape::new(0, 2, 16, 16), &[100, 92], Regime::MildDecay);
        for cut in [Cut::aligned(192, 4, 16).unwrap(), Cut::even(192, 8).unwrap(), cut(&[7, 80, 90, 15])] {
            let error = apart(&kernel, &inputs, &cut);
            assert!(error < EXACT, "{op} cut {cut}: {error:.2e}");
        }
    }
}

#[test]
fn where_no_sequence_crosses_every_bit_is_that_of_a_single_run_and_nothing_is_computed_twice() {
    for name in ["reference", "cpu-chunk-fp32", "cpu-chunk-bf16", "cpu-chunk-f16-internals"] {
        let kernel = kernel(name).unwrap();
        for op in Op::ALL {
            let shape = Shape { value_heads: 2, ..Shape::new(0, 1, 32, 32) };
            let inputs = packed(op, &shape, &[70, 0, 65, 130], Regime::Gaussian).rounded_to(kernel.input_format());
            let cut = cut(&[70, 0, 65, 130, 0]);
            assert_eq!(cut.crossings(&inputs), 0);
            let parallel = together(kernel.as_ref(), &inputs, &cut, true).unwrap();
            assert!(same_bits(&parallel.results, &kernel.backward(&inputs).unwrap()), "{name} {op}");
            for (rank, steps) in parallel.steps.iter().enumerate() {
                let once = matches!(steps.as_slice(), [Step::Compute { work: Work::Run, .. }]);
                assert!(once != cut.tokens(rank).is_empty(), "{name} rank {rank}: {steps:?}");
            }
            let forward = together(kernel.as_ref(), &inputs, &cut, false).unwrap().results;
            assert!(same_bits(&forward, &kernel.forward(&inputs).unwrap()), "{name} {op}");
        }
    }
}

#[test]
fn a_state_goes_over_each_border_once_in_each_direction() {
    let inputs = packed(Op::Gdn, &Shape::new(0, 3, 16, 8), &[100, 20], Regime::MildDecay);
    let cut = cut(&[30, 0, 40, 40, 10]);
    assert_eq!(cut.crossings(&inputs), 3);
    let steps = together(&Reference, &inputs, &cut, true).unwrap().steps;
    let sent: Vec<Vec<(usize, usize)>> = steps
        .iter()
        .map(|steps| {
            let sends = steps.iter().filter_map(|step| match step {
                Step::Send { to, bytes, .. } => Some((*to, *bytes)),
                _ => None,
            });
            sends.collect()
        })
        .collect();
    let state = 3 * 16 * 8 * 8;
    // The second sequence is cut too; the empty rank is passed by.
    let expected =
        [vec![(2, state)], vec![], vec![(3, state), (0, state)], vec![(4, state), (2, state)], vec![(3, state)]];
    assert_eq!(sent, expected);
}

/// The test of the GDN-2 precision RFC in small: two sequences of half the tokens on two ranks, correlated inputs; then a cut
/// where one crosses.
#[test]
fn the_test_of_the_rfc_holds_in_bits_and_within_its_limit() {
    for op in Op::ALL {
        let kernel = kernel("cpu-chunk-f16-internals").unwrap();
        let shape = Shape::new(0, 2, 64, 64);
        let inputs = packed(op, &shape, &[640, 640], Regime::Correlated).rounded_to(kernel.input_format());
        let single = kernel.backward(&inputs).unwrap();
        let apart = together(kernel.as_ref(), &inputs, &Cut::even(1280, 2).unwrap(), true).unwrap().results;
        assert!(same_bits(&apart, &single), "{op}");
        let truth = Reference.backward(&inputs).unwrap();
        let crossed = together(kernel.as_ref(), &inputs, &cut(&[300, 500, 480]), true).unwrap().results;
        for error in compare_results(&crossed, &truth).unwrap() {
            assert!(error.rel_rms < 4e-3, "{op} {}: {:.2e}", error.tensor, error.rel_rms);
        }
    }
}

#[test]
fn a_trial_that_is_cut_again_finds_what_a_new_one_does() {
    let kernel = kernel("cpu-chunk-f16-internals").unwrap();
    let seqlens = SeqLens::new(vec![130, 70]);
    let setting = Setting { shape: Shape::new(200, 2, 32, 32), seqlens, ..Setting::rfc(Op::Gdn, 2) };
    let found = |trial: &Trial<'_>| -> Vec<Measurement> {
        trial.virtual_exactness(3).unwrap().into_iter().map(|record| record.measurement).collect()
    };
    let (even, aligned) = (Cuts::Even, Cuts::Aligned);
    let trial = Trial::new(&setting, &even, kernel.as_ref());
    let first = found(&trial);
    let again = found(&trial.cut_by(&aligned));
    assert!(first.len() == 8 && first != again);
    assert_eq!(again, found(&Trial::new(&setting, &aligned, kernel.as_ref())));
}

#[test]
fn what_does_not_fit_is_refused() {
    let inputs = packed(Op::Gdn, &Shape::new(0, 1, 8, 8), &[10], Regime::Gaussian);
    let message = |result: Result<Cut>| result.unwrap_err().to_string();
    assert!(message(Cut::even(10, 0)).contains("0 ranks"));
    assert!(message(Cut::at(vec![0, 5, 3])).contains("[0, 5, 3]"));
    assert!(message(Cut::at(vec![1, 3])).contains("from 0"));
    let other = Cut::even(11, 2).unwrap();
    assert!(together(&Reference, &inputs, &other, true).unwrap_err().to_string().contains("10 tokens"));
    let without = Inputs { d_o: None, ..inputs.clone() };
    assert!(together(&Reference, &without, &Cut::even(10, 2).unwrap(), true).unwrap_err().to_string().contains("'do'"));
    assert!(gather(&inputs, &Cut::even(10, 2).unwrap(), &[None, None]).is_err());
}

#[test]
fn the_rank_that_fails_is_named_and_not_one_that_waits_for_it() {
    let failed: Result<Vec<()>> = virtual_ranks(3, VIRTUAL_TIMEOUT, |exchange| match exchange.rank() {
        1 => Err(Error::input("no memory left")),
        _ => exchange.receive(1, 8).map(drop),
    });
    assert_eq!(failed.unwrap_err().to_string(), "no memory left");
    let panicked: Result<Vec<()>> = virtual_ranks(2, VIRTUAL_TIMEOUT, |exchange| match exchange.rank() {
        0 => exchange.receive(1, 8).map(drop),
        _ => panic!("on purpose"),
    });
    assert_eq!(panicked.unwrap_err().to_string(), "rank 1 panicked");
    let silent: Result<Vec<()>> = virtual_ranks(2, Duration::from_millis(50), |exchange| match exchange.rank() {
        0 => exchange.receive(1, 8).map(drop),
        _ => {
            std::thread::sleep(Duration::from_millis(500));
            Ok(())
        }
    });
    assert!(silent.unwrap_err().to_string().contains("has sent nothing for 0.05 s"));
    let short: Result<Vec<()>> = virtual_ranks(2, VIRTUAL_TIMEOUT, |exchange| match exchange.rank() {
        0 => exchange.receive(1, 8).map(drop),
        _ => exchange.send(0, &[0; 4]),
    });
    assert!(short.unwrap_err().to_string().contains("sent 4 bytes where 8"));
}
