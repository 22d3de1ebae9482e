//! A sweep in parts, and its records merged, through the command line.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use gdnlab::record::{Record, parse, read};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// A folder that passes for a checkout, so that records stay in it.
fn checkout() -> TempDir {
    let folder = TempDir::new().unwrap();
    std::fs::create_dir(folder.path().join("gdnlab")).unwrap();
    for name in ["gdnlab/Cargo.toml", "Cargo.lock"] {
        std::fs::write(folder.path().join(name), "").unwrap();
    }
    folder
}

fn lab(checkout: &TempDir, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lab"))
        .args(arguments)
        .env("CARGO_MANIFEST_DIR", checkout.path().join("gdnlab"))
        .output()
        .unwrap()
}

const SWEEP: [&str; 10] =
    ["numerics", "--shape", "20,4,4", "9,4,8", "33,8,4", "--mode", "bf16", "fp32", "--regime", "mild-decay"];

fn sweep(checkout: &TempDir, more: &[&str]) -> Output {
    lab(checkout, &[&SWEEP[..], more].concat())
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn files_in(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// What does not depend on when it was measured.
fn content(records: &[Record]) -> Vec<String> {
    let mut content: Vec<String> =
        records.iter().map(|record| format!("{:?} {:?}", record.workload, record.measurement)).collect();
    content.sort();
    content
}

#[test]
fn the_merged_parts_of_a_sweep_are_the_sweep() {
    let here = checkout();
    let whole = sweep(&here, &["--json"]);
    assert_eq!(whole.status.code(), Some(0), "{}", text(&whole.stderr));
    let whole = parse(text(&whole.stdout), Path::new("standard output")).unwrap();
    for part in ["1/2", "2/2"] {
        let done = sweep(&here, &["--save", "errors", "--shard", part]);
        assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
        assert!(text(&done.stderr).contains("records: data/errors-part"), "{}", text(&done.stderr));
    }
    let data = here.path().join("data");
    let parts = files_in(&data);
    assert_eq!(parts.len(), 2, "{parts:?}");
    assert_eq!([read(&parts[0]).unwrap().len(), read(&parts[1]).unwrap().len()], [2 * 2 * 8, 2 * 8]);

    // What is there already is not there twice after another try.
    let before = std::fs::read(&parts[0]).unwrap();
    assert_eq!(sweep(&here, &["--save", "errors", "--shard", "1/2"]).status.code(), Some(0));
    assert_eq!((std::fs::read(&parts[0]).unwrap(), files_in(&data)), (before, parts.clone()));

    let one = here.path().join("one.jsonl");
    let arguments = ["merge", data.to_str().unwrap(), parts[1].to_str().unwrap(), "-o", one.to_str().unwrap()];
    let merged = lab(&here, &arguments);
    assert_eq!(merged.status.code(), Some(0), "{}", text(&merged.stderr));
    assert_eq!(content(&read(&one).unwrap()), content(&whole));
    let said = text(&merged.stdout);
    assert_eq!(said.matches("dropped /").count(), 2 * 8, "{said}");
    assert!(said.contains("numerics op=gdn kernel=cpu-chunk-") && said.contains("the same line as"), "{said}");
    assert!(said.contains("one.jsonl: 48 records, 16 dropped"), "{said}");
    let again = lab(&here, &arguments);
    assert_eq!(again.status.code(), Some(2));
    assert!(text(&again.stderr).contains("exists already"), "{}", text(&again.stderr));
}

#[test]
fn a_part_without_cases_is_no_failure_but_one_that_does_not_exist_is() {
    let here = checkout();
    let empty = sweep(&here, &["--save", "errors", "--shard", "5/8"]);
    assert_eq!(empty.status.code(), Some(0), "{}", text(&empty.stderr));
    assert!(text(&empty.stderr).contains("nothing was missing"), "{}", text(&empty.stderr));
    for part in ["0/2", "3/2", "2", "a/b"] {
        let refused = sweep(&here, &["--shard", part]);
        assert_eq!(refused.status.code(), Some(2), "{part}");
        assert!(text(&refused.stderr).contains("expected"), "{}", text(&refused.stderr));
    }
    // Forward and backward of one shape: the third part needs no GPU.
    std::fs::create_dir_all(here.path().join("data")).unwrap();
    let bench = lab(&here, &["bench", "gdn", "--shape", "1x64:1,1", "--shard", "3/3"]);
    assert_eq!(bench.status.code(), Some(0), "{}", text(&bench.stderr));
    assert_eq!(text(&bench.stderr), "part 3/3: 0 of 2 cases\n");
    let store = lab(&here, &["merge", "s3://bucket/errors.jsonl", "-o", "one.jsonl"]);
    assert_eq!(store.status.code(), Some(2));
    assert!(text(&store.stderr).contains("copy the files here first"), "{}", text(&store.stderr));
    let to_store = lab(&here, &["merge", "data", "-o", "s3://bucket/one.jsonl"]);
    assert_eq!(to_store.status.code(), Some(2));
    assert!(text(&to_store.stderr).contains("expected a path"), "{}", text(&to_store.stderr));
    assert!(!here.path().join("s3:").exists());
}
