//! `cargo lab run`.

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
