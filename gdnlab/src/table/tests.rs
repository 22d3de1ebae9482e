use super::*;
use crate::problem::{Op, Shape};
use crate::record::{Environment, Errors, Measurement, Precision, Workload};
use std::path::Path;

const TENSORS: [&str; 7] = ["o", "final_state", "dq", "dk", "dv", "dg", "dbeta"];

/// Errors of `mode` at every tensor and T = 256, 1024, 4096, by a formula of the tensor's index and log2(T).
fn records(mode: &str, error: impl Fn(usize, f64) -> f64) -> Vec<Record> {
    let mut records = Vec::new();
    for tokens in [256usize, 1024, 4096] {
        for (index, tensor) in TENSORS.iter().enumerate() {
            let workload = Workload::new(Op::Gdn, &Shape::new(tokens, 2, 64, 128)).kernel("cpu", mode);
            let errors = Errors {
                tensor: (*tensor).to_owned(),
                max_rel: Some(error(index, (tokens as f64).log2())),
                ..Errors::default()
            };
            records.push(Record::new(&Environment::detect(), &workload, Measurement::Numerics(errors)));
        }
    }
    records
}

fn value(table: &DataFrame, column: &str, row: usize) -> f64 {
    table.column(column).unwrap().f64().unwrap().get(row).unwrap()
}

fn published_folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published"))
}

#[test]
fn every_field_of_a_record_becomes_a_column() {
    let table = frame(&records("bf16", |_, _| 1e-3)).unwrap();
    assert_eq!(table.height(), 21);
    for name in ["schema", "kind", "T", "K", "V", "mode", "tensor", "max_rel", "machine.cpu", "machine.os", "utc"] {
        assert!(table.column(name).is_ok(), "{name} in {:?}", table.get_column_names());
    }
    assert_eq!(value(&table, "max_rel", 20), 1e-3);
    assert!(matches!(frame(&[]), Err(Error::Input(_))));
}

#[test]
fn the_error_table_has_the_metrics_and_no_empty_columns() {
    let table = errors(&records("bf16", |index, _| index as f64)).unwrap();
    let names: Vec<&str> = table.get_column_names().iter().map(|name| name.as_str()).collect();
    assert_eq!(names, ["kernel", "mode", "T", "d_k", "d_v", "tensor", "max_rel", "nonfinite"]);
    let roofline =
        record::Roofline { quantity: "copy".to_owned(), value: 1.0, theoretical: None, unit: "GB/s".to_owned() };
    let other = Record::new(&Environment::default(), &Workload::default(), Measurement::Roofline(roofline));
    assert!(matches!(errors(&[other]), Err(Error::Input(_))));
}

#[test]
fn ablations_say_what_was_changed() {
    let record = |base: &str, step: &str, format: Option<&str>| {
        let errors = Errors { tensor: "o".to_owned(), max_rel: Some(1e-4), ..Errors::default() };
        let format = format.map(str::to_owned);
        let precision = Precision { base: base.to_owned(), step: step.to_owned(), format, errors };
        Record::new(&Environment::default(), &Workload::default(), Measurement::Precision(precision))
    };
    let records =
        [record("fp32", "none", None), record("fp32", "solve", Some("tf32")), record("tf32", "solve", Some("f32"))];
    let table = ablation(&records).unwrap();
    let text = |column: &str| -> Vec<String> {
        table.column(column).unwrap().str().unwrap().iter().flatten().map(str::to_owned).collect()
    };
    assert_eq!(text("step"), ["none", "solve", "solve"]);
    assert_eq!(text("change"), ["fp32, one step in TF32", "fp32, one step in TF32", "TF32, one step in fp32"]);
    assert!(matches!(ablation(&self::records("bf16", |_, _| 1e-3)), Err(Error::Table(_))));
}

#[test]
fn the_published_file_holds_the_tables_of_the_post() {
    let published = day1_published(published_folder()).unwrap();
    assert_eq!(published.height(), 3 * 9 * 7);
    // First and last row of two tables, as printed there.
    let tf32 = day1(&published, "tf32", 1e-3).unwrap();
    let names: Vec<&str> = tf32.get_column_names().iter().map(|name| name.as_str()).collect();
    assert_eq!(names, [["T", "d_k", "d_v"].as_slice(), &TENSORS].concat());
    let row = |table: &DataFrame, row: usize| TENSORS.map(|tensor| (value(table, tensor, row) * 1e3).round() / 1e3);
    assert_eq!(tf32.height(), 9);
    assert_eq!(row(&tf32, 0), [1.477, 0.975, 1.414, 1.743, 1.814, 1.739, 1.970]);
    let ieee = day1(&published, "fp32-tf32-solve", 1e-4).unwrap();
    assert_eq!(row(&ieee, 8), [0.928, 0.510, 0.876, 1.236, 1.127, 0.742, 0.912]);
}

#[test]
fn a_mode_that_is_not_there_is_named_with_those_that_are() {
    let table = errors(&records("bf16", |_, _| 1e-3)).unwrap();
    let message = day1(&table, "tf32", 1e-3).unwrap_err().to_string();
    assert!(message.contains("'tf32'") && message.contains("bf16"), "{message}");
    let message = day1(&table.drop("T").unwrap(), "bf16", 1e-3).unwrap_err().to_string();
    assert!(message.contains("expected the column 'T'"), "{message}");
}

#[test]
fn rows_and_cells_of_the_day_1_table_are_in_place() {
    let table = errors(&records("bf16", |index, log_tokens| (index as f64 + log_tokens) * 1e-3)).unwrap();
    let shuffled = table.sort(["max_rel"], SortMultipleOptions::default().with_order_descending(true)).unwrap();
    for day1 in [day1(&table, "bf16", 1e-3).unwrap(), day1(&shuffled, "bf16", 1e-3).unwrap()] {
        let tokens: Vec<u32> = day1.column("T").unwrap().u32().unwrap().iter().flatten().collect();
        assert_eq!(tokens, [256, 1024, 4096]);
        assert!((value(&day1, "dq", 1) - 12.0).abs() < 1e-9);
        assert!((value(&day1, "dbeta", 2) - 18.0).abs() < 1e-9);
    }
}

#[test]
fn ours_stand_beside_the_published_ones() {
    let ours = errors(&records("bf16", |index, _| (index + 2) as f64 * 1e-3)).unwrap();
    let theirs = errors(&records("bf16", |index, _| (index + 1) as f64 * 1e-3)).unwrap();
    let joined = beside(&ours, &theirs).unwrap();
    assert_eq!(joined.height(), 21);
    assert!((value(&joined, "ratio", 1) - 1.5).abs() < 1e-12);
}

#[test]
fn a_cell_holds_every_source() {
    let of = |mode: &str, factor: f64| errors(&records(mode, |index, _| (index + 1) as f64 * factor)).unwrap();
    let (ours, gpu, theirs) = (of("bf16", 1e-3), of("bf16", 2.5e-3), of("fp32", 1.234_56));
    let without_dq = theirs.clone().lazy().filter(col("tensor").neq(lit("dq"))).collect().unwrap();
    let wide = day1_beside(&[(&ours, "bf16"), (&gpu, "bf16"), (&without_dq, "fp32")], 1e-3).unwrap();
    let cell = |tensor: &str| wide.column(tensor).unwrap().str().unwrap().get(0).unwrap().to_owned();
    assert_eq!((cell("o"), cell("dbeta")), ("1.00 | 2.50 | 1235".to_owned(), "7.00 | 17.5 | 8642".to_owned()));
    assert!(wide.column("dq").is_err(), "one source has no dq");
    let alone = day1_beside(&[(&ours, "bf16")], 1e-3).unwrap();
    assert_eq!(alone.column("dk").unwrap().str().unwrap().get(2), Some("4.000"));

    let fewer = ours.head(Some(7));
    assert!(matches!(day1_beside(&[(&ours, "bf16"), (&fewer, "bf16")], 1e-3), Err(Error::Input(_))));
    assert!(matches!(day1_beside(&[], 1e-3), Err(Error::Input(_))));
}

#[test]
fn two_kernels_of_one_mode_are_not_mixed() {
    let mut two = records("bf16", |_, _| 1e-3);
    two.extend(records("bf16", |_, _| 2e-3));
    let message = day1(&errors(&two).unwrap(), "bf16", 1e-3).unwrap_err().to_string();
    assert!(message.contains("choose one kernel"), "{message}");
}

#[test]
fn cells_have_as_many_digits_as_are_asked_for() {
    let words = [4.696_37, 0.975, 0.012_34, 11.337, 1133.6, 0.0].map(|value| significant(value, 4));
    assert_eq!(words, ["4.696", "0.975", "0.012", "11.34", "1134", "0.000"]);
    assert_eq!([4.696_37, 0.012_34, 1133.6].map(|value| significant(value, 3)), ["4.70", "0.01", "1134"]);
}

#[test]
fn the_largest_errors_stand_in_a_row_per_kind() {
    let named = |name: &str, table: DataFrame| table.lazy().with_column(lit(name).alias("kernel")).collect().unwrap();
    let a = named("a", errors(&records("bf16", |index, log_tokens| (index as f64 + log_tokens) * 1e-3)).unwrap());
    let b = named("b", errors(&records("bf16", |index, _| (index + 1) as f64 * 1e-3)).unwrap());
    let b = b.lazy().filter(col("tensor").neq(lit("dq"))).collect().unwrap();
    let apart = largest_per_tensor(&[&a, &b], "kernel", "max_rel", 1e-3).unwrap();
    let together = largest_per_tensor(&[&a.vstack(&b).unwrap()], "kernel", "max_rel", 1e-3).unwrap();
    for table in [apart, together] {
        let names: Vec<&str> = table.get_column_names().iter().map(|name| name.as_str()).collect();
        assert_eq!(names, [["kernel"].as_slice(), &TENSORS].concat());
        assert!((value(&table, "o", 0) - 12.0).abs() < 1e-9 && (value(&table, "dbeta", 1) - 7.0).abs() < 1e-9);
        assert_eq!(table.column("dq").unwrap().f64().unwrap().get(1), None, "b has no dq");
    }
    assert!(matches!(largest_per_tensor(&[&a], "kernel", "rel_rms", 1.0), Err(Error::Table(_))));
    assert!(matches!(largest_per_tensor(&[], "kernel", "max_rel", 1.0), Err(Error::Input(_))));

    let ratio = error_ratio(&[("a over b", &a, &b)], "max_rel").unwrap();
    assert!((value(&ratio, "dbeta", 0) - 18.0 / 7.0).abs() < 1e-9);
    assert!(ratio.column("dq").is_err(), "what no pair has in common is left out");
    assert!(matches!(error_ratio(&[], "max_rel"), Err(Error::Input(_))));
}

#[test]
fn a_tensor_that_is_not_finite_has_the_largest_error() {
    let table = df!("kernel" => ["x", "x"], "tensor" => ["o", "o"], "max_rel" => [Some(1e-3), None]).unwrap();
    assert!(value(&largest_per_tensor(&[&table], "kernel", "max_rel", 1.0).unwrap(), "o", 0).is_nan());
}

#[test]
fn only_the_rows_that_are_asked_for() {
    let table = df!("kernel" => [Some("x"), Some("y"), None, Some("x")], "n" => [1.0, 2.0, 3.0, 4.0]).unwrap();
    let of_x = only(&table, "kernel", "x").unwrap();
    assert_eq!((of_x.height(), value(&of_x, "n", 1)), (2, 4.0));
    let message = only(&table, "kernel", "z").unwrap_err().to_string();
    assert!(message.contains("'z': the table has x, y"), "{message}");
    assert!(matches!(only(&table, "mode", "x"), Err(Error::Table(_))));
}

#[test]
fn day_1_has_seven_tensors() {
    let mut all = records("bf16", |_, _| 1e-3);
    let mut initial = all[0].clone();
    if let Measurement::Numerics(errors) = &mut initial.measurement {
        errors.tensor = "dh0".to_owned();
    }
    all.push(initial);
    assert_eq!((errors(&all).unwrap().height(), day1_errors(&all).unwrap().height()), (22, 21));
}

#[test]
fn the_library_of_day_1_was_measured_on_an_h200() {
    let fla = day1_fla_on_h200(published_folder()).unwrap();
    let bf16 = fla.lazy().filter(col("mode").eq(lit("bf16"))).collect().unwrap();
    let row = largest_per_tensor(&[&bf16], "kernel", "rel_rms", 1e-3).unwrap();
    assert_eq!(row.column("kernel").unwrap().str().unwrap().get(0), Some("fla 0.5.2"));
    assert_eq!(
        TENSORS.map(|tensor| (value(&row, tensor, 0) * 10.0).round()),
        [32.0, 22.0, 32.0, 36.0, 29.0, 31.0, 30.0]
    );
}

#[test]
fn malformed_csv_files_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.csv");
    let columns = [("mode", DataType::String), ("T", DataType::UInt32), ("max_rel", DataType::Float64)];
    for (content, expected) in [
        ("", "expected"),
        ("# only a comment\n", "expected"),
        ("mode,T,max_rel\n", "got none"),
        ("# c\nmode,T\nbf16,256\n", "max_rel"),
        ("mode,T,max_rel\nbf16,256\n", "expected a value in column 'max_rel'"),
        ("mode,T,max_rel\nbf16,,1e-3\n", "data row 1: expected a value in column 'T'"),
        ("mode,T,max_rel\nbf16,many,1e-3\n", "many"),
        ("mode,T,max_rel\nbf16,256,1e-3,7\n", "expected comma-separated values"),
        ("mode,T,max_rel\nbf16,-256,1e-3\n", "-256"),
    ] {
        std::fs::write(&path, content).unwrap();
        let message = read_csv(&path, &columns).unwrap_err().to_string();
        assert!(message.contains("x.csv: ") && message.contains(expected), "{content:?}: {message}");
    }
    std::fs::write(&path, [0u8, 159, 146, 150, 10, 255]).unwrap();
    assert!(read_csv(&path, &columns).is_err());
    assert!(matches!(read_csv(folder.path(), &columns), Err(Error::Io { .. })));
    std::fs::write(&path, "# source\nmode,T,max_rel\nbf16,256,1e-3\n# between\nbf16,512,2e-3\n").unwrap();
    assert_eq!(read_csv(&path, &columns).unwrap().height(), 2);
}

#[test]
fn the_worst_case_is_found() {
    let mut all = records("bf16", |index, log_tokens| if index == 4 && log_tokens == 10.0 { 8e-3 } else { 4e-3 });
    all.splice(0..0, records("tf32", |_, _| 1e-3));
    let worst = worst(&errors(&all).unwrap()).unwrap();
    assert_eq!(worst.height(), 2);
    assert_eq!(worst.column("tensor").unwrap().str().unwrap().get(0), Some("dv"));
    assert_eq!(worst.column("T").unwrap().u32().unwrap().get(0), Some(1024));
    assert!((value(&worst, "in_u", 0) - 8e-3 * 256.0).abs() < 1e-12);
}

#[test]
fn growth_is_the_factor_per_doubling_within_its_interval() {
    // Alternating noise of a tenth around an error that grows by a factor 1.25 per doubling of T.
    let noisy = |index: usize, log_tokens: f64| {
        let noise = if (index + log_tokens as usize / 2).is_multiple_of(2) { 1.1 } else { 1.0 / 1.1 };
        1e-5 * (index + 1) as f64 * 1.25f64.powf(log_tokens) * noise
    };
    let growth = growth_with_length(&errors(&records("bf16", noisy)).unwrap(), "max_rel").unwrap();
    let [factor, low, high, p] = ["factor", "low", "high", "p"].map(|column| value(&growth, column, 0));
    assert!(low < 1.25 && 1.25 < high && high / low < 1.1, "{low} {factor} {high}");
    assert!(p < 1e-6, "{p}");
    assert_eq!(growth.column("answer").unwrap().str().unwrap().get(0), Some("grows"));

    let flat = growth_with_length(&errors(&records("bf16", |index, _| 1e-3 * (index + 1) as f64)).unwrap(), "max_rel")
        .unwrap();
    assert!((value(&flat, "factor", 0) - 1.0).abs() < 1e-9);
    let one_length = errors(&records("bf16", |_, _| 1e-3)[..7]).unwrap();
    assert!(matches!(growth_with_length(&one_length, "max_rel"), Err(Error::Input(_))));
}

#[test]
fn the_interval_of_growth_is_that_of_simple_regression() {
    // One tensor: three points (8, 0), (10, 1), (12, 1) in log2. Slope 1/4, residual variance 1/6, sxx 8,
    // so the standard error is sqrt(1/48), and t(0.975, 1) = 12.7062.
    let mut one = records("bf16", |_, log_tokens| if log_tokens < 9.0 { 1.0 } else { 2.0 });
    one.retain(|record| record.errors().unwrap().tensor == "o");
    let growth = growth_with_length(&errors(&one).unwrap(), "max_rel").unwrap();
    let reach = 12.706_204_736 * (1.0f64 / 48.0).sqrt();
    assert!((value(&growth, "factor", 0).log2() - 0.25).abs() < 1e-12);
    assert!((value(&growth, "high", 0).log2() - (0.25 + reach)).abs() < 1e-6);
}

#[test]
fn gradients_are_compared_with_the_forward_by_shape() {
    let ratio = gradients_against_forward(
        &errors(&records("bf16", |index, log_tokens| log_tokens * if index < 2 { 1e-3 } else { 1.5e-3 })).unwrap(),
        "max_rel",
    )
    .unwrap();
    assert!((value(&ratio, "factor", 0) - 1.5).abs() < 1e-9);
    assert!(value(&ratio, "p", 0) < 1e-9);
    let mut forward = records("bf16", |_, _| 1e-3);
    forward.retain(|record| !record.errors().unwrap().tensor.starts_with('d'));
    assert!(matches!(gradients_against_forward(&errors(&forward).unwrap(), "max_rel"), Err(Error::Input(_))));
}

#[test]
fn biased_tests_are_counted() {
    let table = df!(
        "mode" => ["a", "a", "a", "b"],
        "bias" => [1e-5, -3e-5, 2e-5, 0.0],
        "bias_p" => [0.001, 0.5, 0.04, 0.2],
    )
    .unwrap();
    let bias = bias(&table, 0.01).unwrap();
    let count =
        |column: &str, row| bias.column(column).unwrap().cast(&DataType::UInt32).unwrap().u32().unwrap().get(row);
    assert_eq!((count("tests", 0), count("biased", 0), count("biased", 1)), (Some(3), Some(1), Some(0)));
    assert!(
        (value(&bias, "largest_bias", 0) - 3e-5).abs() < 1e-18 && (value(&bias, "by_chance", 0) - 0.03).abs() < 1e-12
    );
    assert!(super::bias(&table.drop("bias_p").unwrap(), 0.01).is_err());
}
