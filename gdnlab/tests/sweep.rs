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
    command(checkout, arguments).output().unwrap()
}

fn command(checkout: &TempDir, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
    command.args(arguments).env("CARGO_MANIFEST_DIR", checkout.path().join("gdnlab"));
    command
}

/// The same where git says that nothing was changed since a commit, whatever it is.
fn sweep_of_a_commit(checkout: &TempDir, more: &[&str]) -> Output {
    use std::os::unix::fs::PermissionsExt;
    let git = checkout.path().join("git");
    if !git.exists() {
        std::fs::write(&git, "#!/bin/sh\ncase \"$*\" in *rev-parse*) echo 0123456789abcdef ;; esac\n").unwrap();
        std::fs::set_permissions(&git, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", checkout.path().display(), std::env::var("PATH").unwrap());
    let output = command(checkout, &[&SWEEP[..], more].concat()).env("PATH", path).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    output
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
    let folder = format!("file://{}", data.display());
    let arguments = ["merge", &folder, parts[1].to_str().unwrap(), "-o", one.to_str().unwrap()];
    let merged = lab(&here, &arguments);
    assert_eq!(merged.status.code(), Some(0), "{}", text(&merged.stderr));
    assert_eq!(content(&read(&one).unwrap()), content(&whole));
    let said = text(&merged.stdout);
    assert!(said.starts_with("dropped 16 whose line is there once more:\n  /"), "{said}");
    assert_eq!(said.matches("numerics op=gdn kernel=cpu-chunk-").count(), 3, "{said}");
    assert!(said.contains("the same line as") && said.contains("\n  and 13 more\n"), "{said}");
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
    let said = "part 5/8: 0 of 3 cases, so there is nothing to do: there are more parts than cases\n";
    assert!(text(&empty.stderr).starts_with(said), "{}", text(&empty.stderr));
    assert!(!text(&empty.stderr).contains("missing"), "{}", text(&empty.stderr));
    for part in ["0/2", "3/2", "2", "a/b"] {
        let refused = sweep(&here, &["--shard", part]);
        assert_eq!(refused.status.code(), Some(2), "{part}");
        assert!(text(&refused.stderr).contains("expected"), "{}", text(&refused.stderr));
    }
    // Forward and backward of one shape: the third part needs no GPU.
    std::fs::create_dir_all(here.path().join("data")).unwrap();
    let bench = lab(&here, &["bench", "gdn", "--shape", "1x64:1,1", "--shard", "3/3"]);
    assert_eq!(bench.status.code(), Some(0), "{}", text(&bench.stderr));
    assert!(text(&bench.stderr).starts_with("part 3/3: 0 of 2 cases, so"), "{}", text(&bench.stderr));
    for name in ["", "../evil", "a/b"] {
        let refused = sweep(&here, &["--save", name]);
        assert_eq!(refused.status.code(), Some(2), "{name}");
        assert!(text(&refused.stderr).contains("expected the name of an experiment"), "{}", text(&refused.stderr));
    }
}

/// What another experiment holds of the same commit is not taken for a part's.
#[test]
fn the_merged_parts_are_the_sweep_whatever_else_is_recorded_and_wherever_one_stopped() {
    let here = checkout();
    let other = sweep_of_a_commit(&here, &["--save", "other", "--json"]);
    let whole = parse(text(&other.stdout), Path::new("standard output")).unwrap();
    for part in ["1/2", "2/2"] {
        let done = sweep_of_a_commit(&here, &["--save", "errors", "--shard", part]);
        assert!(!text(&done.stderr).contains("data/other"), "{}", text(&done.stderr));
    }
    // An interrupted write, and another try in other parts.
    let data = here.path().join("data");
    let first = files_in(&data).remove(0);
    let lines = std::fs::read(&first).unwrap();
    std::fs::write(&first, &lines[..lines.len() - 30]).unwrap();
    for part in ["1/3", "2/3", "3/3"] {
        let resumed = sweep_of_a_commit(&here, &["--save", "errors", "--shard", part]);
        let said = text(&resumed.stderr);
        assert!(said.contains("warning: ") && said.contains(":32: cut short"), "{said}");
        assert!(said.contains("not measured again: what data/errors-part1of2_") && said.contains("(31)"), "{said}");
        assert!(!said.contains("data/other"), "{said}");
        assert_eq!(said.contains("records: data/errors-part"), part == "3/3", "{said}");
    }
    let files = files_in(&data);
    let parts: Vec<&str> =
        files.iter().filter_map(|path| path.to_str()).filter(|path| path.contains("-part")).collect();
    let one = here.path().join("one.jsonl");
    let merged = lab(&here, &[&["merge", "-o", one.to_str().unwrap()][..], &parts].concat());
    assert_eq!(merged.status.code(), Some(0), "{}", text(&merged.stderr));
    assert_eq!(content(&read(&one).unwrap()), content(&whole));
    // The own part goes on behind what was cut short.
    let own = sweep_of_a_commit(&here, &["--save", "errors", "--shard", "1/2", "--again"]);
    assert!(text(&own.stderr).contains("records: data/errors-part1of2"), "{}", text(&own.stderr));
    assert!(read(&first).is_ok());
}
