//! Every kernel against truths that an independent program computed.

use gdnlab::chunked::{CHUNK_SIZES, Chunked};
use gdnlab::compare::{Comparison, Report, compare_call};
use gdnlab::kernel::Kernel;
use gdnlab::peer::{read_case, read_results};
use gdnlab::precision::Policy;
use gdnlab::reference::Reference;
use std::path::Path;

const CASES: [&str; 4] = ["gdn", "gdn2", "gdn-grouped-packed", "gdn-fast-decay"];

/// The comparisons of every tensor that `kernel` computes for `case`, with the independent truth.
fn compared(kernel: &dyn Kernel, case: &str) -> Vec<Comparison> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    let inputs = read_case(folder.join(format!("{case}.case.safetensors"))).expect("a fixture").inputs;
    let truth = read_results(folder.join(format!("{case}.truth.safetensors")), &inputs).expect("a fixture");
    assert!(truth.missing.is_empty(), "{case} has every tensor");
    let results = kernel.backward(&inputs).expect("valid");
    compare_call(&inputs, &results.named(), &truth.named()).expect("same shapes")
}

#[test]
fn the_recurrence_agrees_with_an_independent_one() {
    for case in CASES {
        for error in compared(&Reference, case) {
            assert!(error.nonfinite == 0 && error.max_rel <= 1e-13, "{case} {error}");
        }
    }
}

/// Within the tolerance of fp64, 1e-12. In the case of fast decay the true dg is below 2e-7 while the terms that the
/// chunk form sums are of order 1, and it is these that the error is relative to.
#[test]
fn the_chunk_form_in_f64_agrees_at_every_chunk_size() {
    for chunk in CHUNK_SIZES {
        let kernel = Chunked::new("fp64", Policy::fp64(), chunk).expect("a chunk size");
        for case in CASES {
            let report = Report::new(compared(&kernel, case), "fp64").expect("a mode");
            assert!(report.pass, "{case} with chunks of {chunk}\n{report}");
        }
    }
}
