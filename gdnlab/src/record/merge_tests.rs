use super::*;
use crate::problem::{Op, Shape};
use crate::record::{Environment, Measurement, Pass, Timing, Workload, to_json_lines, write};
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

/// Files with these records, and the arguments that name them.
fn written(parts: &[&[Record]]) -> (TempDir, Vec<String>) {
    let folder = TempDir::new().unwrap();
    let name = |index: usize| folder.path().join(format!("part{index}.jsonl"));
    parts.iter().enumerate().for_each(|(index, records)| write(name(index), records).unwrap());
    let names = (0..parts.len()).map(|index| name(index).display().to_string()).collect();
    (folder, names)
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
        let (_folder, names) = written(&parts.each_ref().map(Vec::as_slice));
        let merged = merge(&names, &Machines::One).unwrap();
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
fn lines_stay_as_they_were_written_and_a_repeated_one_stays_once() {
    let records: Vec<Record> = (1..=3).map(|n| timed("H200", "2026-11-30T01:00:00Z", 64 * n, 0.1 * n as f64)).collect();
    let (folder, mut names) = written(&[&records, &records[1..]]);
    let lines = to_json_lines(&records).unwrap();
    // Other spaces and an empty line are no other measurement.
    let spaced = folder.path().join("spaced.jsonl");
    std::fs::write(&spaced, format!("\n{}\n", lines.lines().next().unwrap().replace(",\"", ", \""))).unwrap();
    names.push(spaced.display().to_string());
    let merged = merge(&names, &Machines::One).unwrap();
    assert_eq!(merged.lines.len(), 3);
    assert!(merged.lines.contains(&std::fs::read_to_string(&spaced).unwrap().trim().to_owned()));
    let repeated = merged.dropped.iter().filter(|dropped| matches!(dropped.why, Why::Repeated(_))).count();
    assert_eq!((repeated, merged.dropped.len()), (2, 3));
    // The same from the folder.
    let of_folder = merge(&[format!("file://{}", folder.path().display())], &Machines::One).unwrap();
    assert_eq!(of_folder, merged);
}

#[test]
fn machines_are_never_mixed_unasked() {
    let (one, two) = (timed("H200", "2026-11-30T01:00:00Z", 64, 1.0), timed("H100", "2026-11-30T02:00:00Z", 64, 2.0));
    let mut beside = one.clone();
    beside.environment.machine.gpu = None;
    let (_folder, names) = written(&[&[one.clone(), beside], std::slice::from_ref(&two)]);
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
    let message = |source: &str| merge(&[source.to_owned()], &Machines::One).unwrap_err().to_string();
    for store in ["s3://bucket/a.jsonl", "gs://bucket/a.jsonl", "https://host/a.jsonl"] {
        let refused = message(store);
        assert!(refused.starts_with(store) && refused.contains("copy the files here first"), "{refused}");
    }
    assert!(message(&folder.path().display().to_string()).contains("expected files *.jsonl"));
    assert!(message("/no/such/file.jsonl").contains("/no/such/file.jsonl"));
    let cut = folder.path().join("cut.jsonl");
    std::fs::write(&cut, "{\"schema\":1,\"kin").unwrap();
    assert!(message(&cut.display().to_string()).contains("cut.jsonl:1"));
    std::fs::write(&cut, "\n").unwrap();
    assert!(message(&cut.display().to_string()).contains("the files are empty"));
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
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("run.jsonl");
            std::fs::write(&file, lines).unwrap();
            let merged = merge(&[file.display().to_string()], &Machines::One).unwrap();
            assert!(merged.dropped.is_empty(), "{name} of {commit}: {}", merged.dropped[0]);
        }
    }
    assert!(kinds.len() >= 9, "{kinds:?}");
}
