use super::tests::check;
use super::*;
use crate::rounding::FORWARD;
use gdnlab_deps::polars::prelude::df;

#[test]
fn roundings_are_dots_beside_published_diamonds() {
    let table = df!(
        "step" => ["U", "inverse", FORWARD],
        "published" => [Some(0.8), None, Some(1.16)],
        "bf16" => [0.86, 0.4, 1.24],
        "fp16" => [0.1, 0.05, 0.23],
        "TF32" => [0.1, 0.05, 0.23],
        "fp32" => [1e-5, 1e-5, 0.17],
    )
    .unwrap();
    let figure = rounding_by_step(&table, 0.8, "the source").unwrap();
    check(&figure, &["errs by 1.24 %, in fp16 by 0.23 %", "allowed: 0.8 %", "×1.07", "10⁻⁵", "the source"]);
    // Of each row four dots, and one in the legend.
    assert_eq!(figure.svg().matches("<circle").count(), 3 * 4 + 4);
    let says = figure.description();
    assert!(says.find("inverse").unwrap() < says.find("U: ").unwrap(), "the smallest first: {says}");
    assert!(rounding_by_step(&table.head(Some(2)), 0.8, "").unwrap_err().to_string().contains(FORWARD));
    assert!(matches!(rounding_by_step(&table.drop("TF32").unwrap(), 0.8, ""), Err(Error::Table(_))));
}

#[test]
fn cells_above_the_threshold_are_counted() {
    let table = df!("step" => ["U", "dU"], "o" => [0.9, 0.0], "dq" => [0.5, 0.81]).unwrap();
    let exact = df!("step" => ["U"], "o" => [1e-6]).unwrap();
    let figure = error_by_step_and_tensor(&[("bf16", &table), ("fp32", &exact)], 0.8, "the source").unwrap();
    check(
        &figure,
        &["Errors above 0.8 %: 2 in bf16, none in fp32", "rounded to fp32", "0.90", "·", "dU", "the source"],
    );
    assert!(figure.description().contains("The largest in bf16 is 0.90 % of o, with U."), "{}", figure.description());
    assert!(matches!(error_by_step_and_tensor(&[], 0.8, ""), Err(Error::Figure(_))));
}

#[test]
fn policies_are_dots_and_proposals_are_marked() {
    let policies = df!(
        "form" => ["WY", "WY", "WY", "residual"],
        "formats" => ["bf16", "bf16 and fp32", "fp16", "bf16"],
        "bytes" => [2048.0, 2304.0, 2048.0, 1792.0],
        "error_pct" => [1.5, 0.7, 0.23, 1.2],
        "tensor" => ["o", "o", "o", "o"],
        "on_front" => [false, false, true, true],
    )
    .unwrap();
    let proposals = df!(
        "form" => ["WY", "WY", "WY"],
        "proposal" => ["everything in bf16", "cheapest with fp32", "cheapest with fp16"],
        "changed" => ["nothing", "U in fp32", "all in fp16"],
        "bytes" => [2048.0, 2304.0, 2048.0],
        "more_bytes_pct" => [0.0, 12.5, 0.0],
        "error_pct" => [1.5, 0.7, 0.23],
    )
    .unwrap();
    let figure = bytes_and_errors(&policies, &proposals, 0.8, "the source").unwrap();
    check(
        &figure,
        &[
            "Within 0.8 %: 12 % more bytes with fp32, no more bytes with fp16",
            "WY form",
            "all in bf16: 1.50",
            "the source",
        ],
    );
    // Of each policy a dot, of each proposal a ring, and three in the legend.
    assert_eq!(figure.svg().matches("<circle").count(), 4 + 3 + 3);
    assert!(figure.description().contains("4 policies"), "{}", figure.description());
    let none = bytes_and_errors(&policies, &proposals.head(Some(0)), 0.8, "").unwrap();
    assert!(none.svg().contains("No policy meets 0.8 %"));
    assert!(matches!(bytes_and_errors(&policies.head(Some(0)), &proposals, 0.8, ""), Err(Error::Figure(_))));
}
