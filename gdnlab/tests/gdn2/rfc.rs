//! The case of the GDN-2 precision RFC: 12 heads of 128, 10,240 tokens in two sequences, almost collinear keys and bounded gates.

use crate::case::{Case, Precision};
use crate::expect_none;
use gdnlab::compare::compare_results;
use gdnlab::inputs::Regime;
use gdnlab::kernel::Kernel;
use gdnlab::reference::Reference;

/// Largest relative RMS error of o: twice the rounding to bf16. The library that the RFC measures has 1.35e-2, its
/// token-by-token kernel 4.3e-3.
const LIMIT: f64 = 4e-3;

pub fn cases() -> Vec<Case> {
    let of =
        |precision| Case { heads: (12, 12), ..Case::new(precision, (128, 128), &[5120, 5120], Regime::Correlated) };
    Precision::presets().into_iter().map(of).collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_output_is_as_accurate_as_promised_on_the_inputs_of_the_rfc() {
    let mut complaints = Vec::new();
    let mut known: Vec<(gdnlab::precision::Format, gdnlab::problem::Results)> = Vec::new();
    for case in cases() {
        let inputs = case.inputs();
        let format = case.precision.input;
        if !known.iter().any(|(known, _)| *known == format) {
            known.push((format, Reference.backward(&inputs).unwrap()));
        }
        let truth = known.iter().find(|(known, _)| *known == format).map(|(_, truth)| truth).unwrap();
        let errors = compare_results(&case.run(&inputs), truth).unwrap();
        let words: Vec<String> = errors.iter().map(|error| format!("{} {:.2e}", error.tensor, error.rel_rms)).collect();
        println!("{case} {}", words.join("  "));
        let limited = case.precision.tolerance != "bf16";
        complaints.extend(errors.iter().filter(|error| error.nonfinite > 0).map(|error| format!("{case}: {error:?}")));
        let o = errors.iter().find(|error| error.tensor == "o").unwrap();
        if limited && o.rel_rms > LIMIT {
            complaints.push(format!("{case}: o has {:.2e}, limit {LIMIT:.1e}", o.rel_rms));
        }
    }
    expect_none(&complaints);
}
