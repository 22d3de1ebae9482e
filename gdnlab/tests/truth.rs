//! Every kernel against truths that an independent program computed.

use gdnlab::chunked::{CHUNK_SIZES, Chunked};
use gdnlab::compare::compare_results;
use gdnlab::kernel::Kernel;
use gdnlab::peer::{read_case, read_results};
use gdnlab::precision::Policy;
use gdnlab::problem::Results;
use gdnlab::reference::Reference;
use std::path::Path;

const CASES: [&str; 4] = ["gdn", "gdn2", "gdn-grouped-packed", "gdn-fast-decay"];

fn check(kernel: &dyn Kernel, case: &str, limit: f64) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    let inputs = read_case(folder.join(format!("{case}.case.safetensors"))).expect("a fixture").inputs;
    let truth = read_results(folder.join(format!("{case}.truth.safetensors")), &inputs).expect("a fixture");
    let results: Results = kernel.backward(&inputs).expect("valid");
    let computed = results.named();
    for (name, expected) in truth.named() {
        let (_, got) = computed.iter().find(|(computed, _)| *computed == name).expect("every tensor is computed");
        let error = gdnlab::compare::compare(name, got, expected).expect("same shape");
        assert!(error.nonfinite == 0 && error.max_rel <= limit, "{} {case} {name}: {error:?}", kernel.name());
    }
    assert!(compare_results(&results, &results).expect("same").iter().all(|same| same.max_abs == 0.0));
}

#[test]
fn the_recurrence_agrees_with_an_independent_one() {
    CASES.iter().for_each(|case| check(&Reference, case, 1e-13));
}

#[test]
fn the_chunk_form_in_f64_agrees_at_every_chunk_size() {
    for chunk in CHUNK_SIZES {
        let kernel = Chunked::new("fp64", Policy::fp64(), chunk).expect("a chunk size");
        CASES.iter().for_each(|case| check(&kernel, case, 1e-12));
    }
}
