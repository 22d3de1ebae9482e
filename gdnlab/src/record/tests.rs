use super::*;
use crate::problem::{Op, Shape};
use crate::record::{Environment, Errors, Measurement, Pass, Precision, Roofline, Timing, Workload};

fn errors(tensor: &str, max_rel: f64) -> Errors {
    Errors {
        tensor: tensor.to_owned(),
        max_rel: Some(max_rel),
        cosine: Some(0.999_999_987_654_321),
        ..Errors::default()
    }
}

fn sample() -> Vec<Record> {
    let environment = Environment::detect();
    let workload = Workload::new(Op::Gdn, &Shape::new(256, 2, 64, 128))
        .kernel("cpu-chunk-bf16", "bf16")
        .inputs("gaussian", u64::from(u32::MAX) + 7)
        .pass(Pass::Fwd);
    let timing = Timing { latency_ms: 0.25, samples_ms: Some(vec![0.2, 0.25, 0.3]), ..Timing::default() };
    let precision = Precision {
        base: "fp32".to_owned(),
        step: "solve".to_owned(),
        format: Some("tf32".to_owned()),
        errors: errors("dq", 1.0 / 3.0 * 1e-4),
    };
    let roofline = Roofline { quantity: "copy".to_owned(), value: 222.37, theoretical: None, unit: "GB/s".to_owned() };
    [
        Measurement::Numerics(errors("o", 3.906e-3)),
        Measurement::Precision(precision),
        Measurement::Bench(timing),
        Measurement::Roofline(roofline),
    ]
    .map(|measurement| Record::new(&environment, &workload, measurement))
    .to_vec()
}

fn complaint(text: &str) -> String {
    parse(text, Path::new("data/x.jsonl")).unwrap_err().to_string()
}

/// The first sample line with `from` replaced by `to`.
fn altered(from: &str, to: &str) -> String {
    let line = to_json_lines(&sample()[..1]).unwrap();
    assert!(line.contains(from), "{line}");
    line.replacen(from, to, 1)
}

fn with_utc(utc: &str) -> String {
    let mut record = sample().remove(0);
    record.environment.utc = Some(utc.to_owned());
    to_json_lines(&[record]).unwrap()
}

#[test]
fn records_survive_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("day01.jsonl");
    let records = sample();
    write(&path, &records).unwrap();
    let back = read(&path).unwrap();
    assert_eq!(back.len(), records.len());
    assert!(back.iter().zip(&records).all(|(a, b)| same_measurement(a, b) && a.environment == b.environment));
}

#[test]
fn a_line_holds_the_documented_fields_and_no_empty_ones() {
    let line = to_json_lines(&sample()[..1]).unwrap();
    for field in [
        r#""schema":1"#,
        r#""kind":"numerics""#,
        r#""T":256"#,
        r#""HV":2"#,
        r#""K":64"#,
        r#""V":128"#,
        r#""pass":"fwd""#,
    ] {
        assert!(line.contains(field), "{field} in {line}");
    }
    assert!(!line.contains("null") && !line.contains("seqlens"), "{line}");
}

#[test]
fn metrics_that_are_not_numbers_are_absent() {
    let mut record = sample().remove(0);
    record.measurement = Measurement::Numerics(Errors { nonfinite: 3, max_rel: None, ..errors("o", 0.0) });
    let line = to_json_lines(&[record]).unwrap();
    assert!(!line.contains("max_rel") && line.contains(r#""nonfinite":3"#), "{line}");
}

#[test]
fn garbage_is_refused_with_its_line_and_what_was_expected() {
    let good = to_json_lines(&sample()[..1]).unwrap();
    for (text, expected) in [
        (format!("{good}{{\n"), "data/x.jsonl:2: expected one JSON object"),
        (format!("{good}\n[1, 2]\n"), "data/x.jsonl:3: expected a JSON object"),
        (altered(r#""schema":1"#, r#""schema":2"#), "reads records of schema 1, but the line says 2"),
        (altered(r#""schema":1"#, r#""schema":"one""#), "the line says \"one\""),
        (altered(r#""schema":1,"#, ""), "expected the field `schema`"),
        (altered("numerics", "numeric"), "unknown variant `numeric`"),
        (altered(r#""tensor":"o","#, ""), "missing field `tensor`"),
        (altered(r#""max_rel""#, r#""max_relative""#), "field `max_relative` does not belong"),
        (altered(r#""T":256"#, r#""T":-256"#), "-256"),
        (altered(r#""T":256"#, r#""T":"256""#), "256"),
        (good.trim_end()[..good.len() / 2].to_owned(), "cut short"),
        (with_utc("yesterday"), "expected a time such as 2026-11-30T12:34:56Z in `utc`, got 'yesterday'"),
    ] {
        let message = complaint(&text);
        assert!(message.contains(expected), "{message}\nshould contain {expected}");
        assert!(message.starts_with("data/x.jsonl:"), "{message}");
    }
}

#[test]
fn bytes_that_are_no_text_are_refused_with_their_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.jsonl");
    let mut bytes = to_json_lines(&sample()).unwrap().into_bytes();
    bytes.extend([0xff, 0xfe]);
    std::fs::write(&path, bytes).unwrap();
    assert!(read(&path).unwrap_err().to_string().contains("x.jsonl:5: expected JSON Lines in UTF-8"));
    assert!(matches!(read(folder.path()), Err(Error::Io { .. })));
}

#[test]
fn an_existing_file_is_never_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.jsonl");
    write(&path, &sample()).unwrap();
    let before = std::fs::read(&path).unwrap();
    assert!(write(&path, &sample()[..1]).unwrap_err().to_string().contains("exists already"));
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn appending_keeps_every_row() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.jsonl");
    let line = to_json_lines(&sample()[..1]).unwrap();
    std::fs::write(&path, line.trim_end()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..5).for_each(|_| append(&path, &sample()).unwrap()));
        }
    });
    assert_eq!(read(&path).unwrap().len(), 1 + 4 * 5 * sample().len());
}

#[test]
fn what_an_interrupted_write_left_gives_way_and_nothing_is_appended_to_a_damaged_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.jsonl");
    let lines = to_json_lines(&sample()).unwrap();
    std::fs::write(&path, &lines[..lines.len() - 20]).unwrap();
    assert!(read(&path).unwrap_err().to_string().contains("x.jsonl:4: cut short"));
    append(&path, &sample()).unwrap();
    assert_eq!(read(&path).unwrap().len(), 2 * sample().len() - 1);
    let damaged = format!("{}\n", &lines[..lines.len() - 20]);
    std::fs::write(&path, &damaged).unwrap();
    assert!(append(&path, &sample()).unwrap_err().to_string().contains("x.jsonl:4: expected one JSON object"));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), damaged);
}

#[test]
fn a_name_leads_nowhere_else() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["", "..", "../evil", "/evil", "a/b", ".hidden", "a b"] {
        let refused = keep(folder.path().join("data"), name, &sample()).unwrap_err().to_string();
        assert!(refused.contains("expected the name of an experiment"), "{refused}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_byte_order_mark_is_no_letter_of_a_record() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.jsonl");
    std::fs::write(&path, format!("\u{feff}{}", to_json_lines(&sample()).unwrap())).unwrap();
    append(&path, &sample()).unwrap();
    assert_eq!(read(&path).unwrap().len(), 2 * sample().len());
}

#[test]
fn the_same_measurement_is_kept_once() {
    let folder = tempfile::tempdir().unwrap();
    let records = sample();
    let path = keep(folder.path(), "day01", &records).unwrap();
    let name = path.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("day01_") && name.ends_with(&format!("{}.jsonl", records[0].environment.date().unwrap())));

    let mut later = records.clone();
    later.iter_mut().for_each(|record| record.environment.utc = Some("2031-01-02T03:04:05Z".to_owned()));
    assert_eq!(keep(folder.path(), "day01", &later).unwrap(), path);
    assert_eq!(read(&path).unwrap().len(), records.len());

    later[0].measurement = Measurement::Numerics(errors("o", 4e-3));
    let second = keep(folder.path(), "day01", &later).unwrap();
    assert!(second.to_string_lossy().ends_with("2031-01-02.jsonl"));
    assert_eq!(read_dir(folder.path()).unwrap().len(), 2 * records.len());
    assert!(keep(folder.path(), "day01", &[]).is_err());
}

#[test]
fn a_file_that_was_cut_short_stops_nobody_who_does_not_need_it() {
    let folder = tempfile::tempdir().unwrap();
    let records = sample();
    write(folder.path().join("b.jsonl"), &records).unwrap();
    let text = to_json_lines(&records).unwrap();
    std::fs::write(folder.path().join("a.jsonl"), &text[..text.len() - 20]).unwrap();
    std::fs::write(folder.path().join("c.jsonl"), "no records\n").unwrap();
    assert!(read_dir(folder.path()).is_err());
    let mut told = Vec::new();
    let held = read_what_can_be(folder.path(), |what| told.push(what.to_owned())).unwrap();
    assert_eq!(held.iter().map(|held| held.records.len()).collect::<Vec<_>>(), [records.len() - 1, records.len()]);
    assert!(held[1].path.ends_with("b.jsonl") && held[1].records == records);
    assert!(told[0].contains("a.jsonl:4: cut short") && told[1].contains("c.jsonl:1: expected one JSON"), "{told:?}");
    assert!(read_what_can_be(folder.path().join("none"), |_| ()).is_err());
}
