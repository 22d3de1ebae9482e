use super::*;
use crate::problem::{Op, Shape};
use crate::record::{Environment, Machine, Measurement, Pass, Timing, Workload, parse, to_json_lines};
use std::path::Path;
use tempfile::TempDir;

fn timed(machine: &str, utc: &str, tokens: usize, latency_ms: f64) -> Record {
    let machine = Machine { gpu: Some(machine.to_owned()), cpu: Some("a CPU".to_owned()), ..Machine::default() };
    let environment = Environment {
        machine,
        utc: Some(utc.to_owned()),
        commit: Some(format!("commit of {utc}")),
        ..Environment::default()
    };
    let workload = Workload::new(Op::Gdn, &Shape::new(tokens, 2, 128, 128)).kernel("k", "bf16").pass(Pass::Fwd);
    Record::new(&environment, &workload, Measurement::Bench(Timing { latency_ms, ..Timing::default() }))
}

/// Files with these records.
fn sources(parts: &[&[Record]]) -> Vec<Source> {
    let source = |(index, records): (usize, &&[Record])| {
        Source::new(format!("part{index}.jsonl"), to_json_lines(records).unwrap().as_bytes()).unwrap()
    };
    parts.iter().enumerate().map(source).collect()
}

fn latencies(merged: &Merged) -> Vec<f64> {
    let text = merged.lines.join("\n") + "\n";
    let latency = |record: &Record| match &record.measurement {
        Measurement::Bench(timing) => timing.latency_ms,
        other => panic!("a time, not {other:?}"),
    };
    parse(&text, Path::new("merged")).unwrap().iter().map(latency).collect()
}

#[test]
fn of_one_measurement_the_newest_stays_whichever_file_holds_it() {
    let old = timed("H200", "2026-11-30T01:00:00Z", 64, 1.0);
    let new = timed("H200", "2026-11-30T02:00:00Z", 64, 2.0);
    let other = timed("H200", "2026-11-30T01:00:00Z", 128, 3.0);
    for parts in [[vec![old.clone(), other.clone()], vec![new.clone()]], [vec![new.clone()], vec![old, other]]] {
        let merged = merge(&sources(&parts.each_ref().map(Vec::as_slice)), &Machines::One).unwrap();
        let mut left = latencies(&merged);
        left.sort_by(f64::total_cmp);
        assert_eq!(left, [2.0, 3.0]);
        assert_eq!(merged.dropped.len(), 1);
        let words = merged.dropped[0].to_string();
        assert!(words.contains("bench op=gdn kernel=k mode=bf16 pass=fwd B=1 T=64"), "{words}");
        assert!(words.contains("measured again in") && words.contains("part"), "{words}");
        assert_eq!(merged.commits.iter().map(|(_, count)| count).sum::<usize>(), 2);
    }
}

#[test]
fn another_result_of_the_same_second_is_told_from_a_later_one() {
    let of = |ms| timed("H200", "2026-11-30T01:00:00Z", 64, ms);
    let merged = merge(&sources(&[&[of(1.0)], &[of(2.0)]]), &Machines::One).unwrap();
    assert_eq!(latencies(&merged), [2.0]);
    assert!(matches!(merged.dropped[0].why, Why::Differs(_)), "{:?}", merged.dropped);
    assert!(merged.dropped[0].to_string().contains("another result of the same second stands in"));
}

#[test]
fn lines_stay_as_they_were_written_and_a_repeated_one_stays_once() {
    let records: Vec<Record> = (1..=3).map(|n| timed("H200", "2026-11-30T01:00:00Z", 64 * n, 0.1 * n as f64)).collect();
    let mut all = sources(&[&records, &records[1..]]);
    let lines = to_json_lines(&records).unwrap();
    // Other spaces and an empty line are no other measurement, and a byte order mark is none of its letters.
    let spaced = lines.lines().next().unwrap().replace(",\"", ", \"");
    all.push(Source::new("spaced.jsonl", format!("\u{feff}\n{spaced}\n").as_bytes()).unwrap());
    let merged = merge(&all, &Machines::One).unwrap();
    assert_eq!(merged.lines.len(), 3);
    assert!(merged.lines.contains(&spaced));
    let repeated = merged.dropped.iter().filter(|dropped| matches!(dropped.why, Why::Repeated(_))).count();
    assert_eq!((repeated, merged.dropped.len()), (2, 3));
    // The same from a folder.
    let folder = TempDir::new().unwrap();
    all.iter().for_each(|source| std::fs::write(folder.path().join(&source.path), &source.text).unwrap());
    let of_folder = merge(&Source::read_all(folder.path()).unwrap(), &Machines::One).unwrap();
    assert_eq!(of_folder.lines, merged.lines);
}

#[test]
fn machines_are_never_mixed_unasked() {
    let (one, two) = (timed("H200", "2026-11-30T01:00:00Z", 64, 1.0), timed("H100", "2026-11-30T02:00:00Z", 64, 2.0));
    let mut beside = one.clone();
    beside.environment.machine.gpu = None;
    let names = sources(&[&[one.clone(), beside], std::slice::from_ref(&two)]);
    let refused = merge(&names, &Machines::One).unwrap_err().to_string();
    assert!(refused.contains("2 machines: H200 with a CPU (1), H100 with a CPU (1)"), "{refused}");
    let all = merge(&names, &Machines::All).unwrap();
    assert_eq!((all.lines.len(), all.dropped.len(), all.machines.len()), (3, 0, 3), "the same call, three machines");
    let named = merge(&names, &Machines::Named("H100".to_owned())).unwrap();
    assert_eq!((latencies(&named), named.dropped.len()), (vec![2.0], 2));
    assert!(named.dropped[0].to_string().ends_with(": of H200 with a CPU"), "{}", named.dropped[0]);
    let none = merge(&names, &Machines::Named("B200".to_owned())).unwrap_err().to_string();
    assert!(none.contains("there are H200 with a CPU; a CPU; H100 with a CPU"), "{none}");
    // A processor beside its GPU is one machine.
    assert!(merge(&names[..1], &Machines::One).is_ok());
}

#[test]
fn what_cannot_be_read_is_said() {
    let folder = TempDir::new().unwrap();
    let complaint = |path: &Path| Source::read_all(path).unwrap_err().to_string();
    assert!(complaint(folder.path()).contains("expected files *.jsonl"));
    assert!(complaint(Path::new("/no/such/file.jsonl")).contains("/no/such/file.jsonl"));
    let empty = merge(&[Source::new("empty.jsonl", b"\n").unwrap()], &Machines::One).unwrap_err().to_string();
    assert!(empty.contains("the files are empty"), "{empty}");
}

#[test]
fn a_last_line_that_was_cut_short_is_skipped_and_any_other_is_an_error() {
    let records: Vec<Record> = (1..=3).map(|n| timed("H200", "2026-11-30T01:00:00Z", 64 * n, 0.1 * n as f64)).collect();
    let lines = to_json_lines(&records).unwrap();
    let cut = &lines[..lines.len() - 30];
    let merged = merge(&[Source::new("a.jsonl", cut.as_bytes()).unwrap()], &Machines::One).unwrap();
    assert_eq!((merged.lines.len(), merged.torn[0].to_string().as_str()), (2, "a.jsonl:3"));
    let mended = format!("{cut}\n{lines}");
    let refused = merge(&[Source::new("a.jsonl", mended.as_bytes()).unwrap()], &Machines::One).unwrap_err().to_string();
    assert!(refused.starts_with("a.jsonl:3: expected one JSON object"), "{refused}");
}

/// What one commit measured holds nothing twice, whatever the kind of record.
#[test]
fn no_two_measurements_of_a_run_are_taken_for_one() {
    let data = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../data"));
    let mut kinds = std::collections::BTreeSet::new();
    for name in [
        "backends_nvidia-h200_2026-11-30",
        "bench-gdn2_nvidia-h200_2026-11-30",
        "bench-gdn_nvidia-h200_2026-11-30",
        "day01-peers_h200_2026-11-29",
        "day01_ablation_amd-epyc_2026-11-29",
        "day03_precision_intel-xeon_2026-11-30",
        "day05_bias_nvidia-h200_2026-11-30",
        "day05_determinism_nvidia-h200_2026-11-30",
        "day07_cp_intel-xeon_2026-11-30",
        "day07_cp_nvidia-h200_2026-11-30",
        "training_nvidia-h200_2026-11-30",
    ] {
        let text = std::fs::read_to_string(data.join(format!("{name}.jsonl"))).unwrap();
        let field = |line: &str, name: &str| serde_json::from_str::<Value>(line).unwrap()[name].clone();
        let mut runs: std::collections::BTreeMap<String, String> = std::collections::BTreeMap::new();
        for line in text.lines() {
            let run = runs.entry(field(line, "commit").to_string()).or_default();
            run.push_str(line);
            run.push('\n');
            kinds.insert(field(line, "kind").as_str().unwrap().to_owned());
        }
        for (commit, lines) in runs {
            let merged = merge(&[Source::new("run.jsonl", lines.as_bytes()).unwrap()], &Machines::One).unwrap();
            assert!(merged.dropped.is_empty(), "{name} of {commit}: {}", merged.dropped[0]);
        }
    }
    assert!(kinds.len() >= 9, "{kinds:?}");
}
