//! `cargo lab run` and what lets notebook cells start from what `cargo lab` has compiled.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lab")).arg("run").args(arguments).output().unwrap()
}

/// Exit code 2 and one line on standard error that says `expected`.
fn assert_refused(arguments: &[&str], expected: &str) {
    let output = run(arguments);
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.starts_with("error: ") && message.contains(expected), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
}

#[test]
fn what_is_not_a_notebook_is_refused_before_anything_is_set_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.ipynb");
    std::fs::write(&path, "{\"cells\": [").unwrap();
    assert_refused(&[path.to_str().unwrap()], "not JSON");
    assert_refused(&[folder.path().to_str().unwrap()], "this is a folder");
    assert_refused(&["no_such_notebook"], "no such notebook");
    let output = run(&["--cell-timeout", "0"]);
    assert_eq!(output.status.code(), Some(2));
}

/// Cells take over the compiled dependencies of `cargo lab` only if both ask for the same features of each.
#[test]
fn the_command_line_asks_for_no_feature_of_a_shared_dependency() {
    let alone = features("normal,build", &[]);
    let with_cli = features("normal,build", &["--features", "cli"]);
    let with_tests = features("normal,build,dev", &["--features", "cli"]);
    for more in [with_cli, with_tests] {
        let different: Vec<&String> =
            alone.difference(&more).filter(|package| !package.starts_with("gdnlab ")).collect();
        assert!(
            different.is_empty(),
            "other features in the command line than in the library alone: {different:?}; \
             choose a dependency that does not change them, or ask for them in gdnlab-deps too"
        );
    }
}

/// Each dependency with its version and its features, one a line.
fn features(edges: &str, arguments: &[&str]) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--package", "gdnlab", "--prefix", "none", "--no-dedupe", "--format", "{p} [{f}]"])
        .args(["--edges", edges])
        .args(arguments)
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}
