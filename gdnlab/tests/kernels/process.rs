//! Work in processes of their own: the compiler takes one program at a time in each, and environment variables are one's
//! own there.

use crate::compile::{ARCHITECTURES, instances};
use crate::scale;
use gdnlab::cuda::{Build, Cache};
use std::process::{Child, Command, Stdio};

/// What a child does, in `GDNLAB_TEST_TASK`.
pub const TASK: &str = "GDNLAB_TEST_TASK";

/// Starts this test program once more to do `task` alone.
pub fn start(task: &str, variables: &[(&str, &std::path::Path)]) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "process::child", "--nocapture"])
        .env(TASK, task)
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// What a child printed, and whether it succeeded.
pub fn finish(child: Child) -> (bool, String) {
    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
#[ignore = "a part of other tests, which start it"]
fn child() {
    let Ok(task) = std::env::var(TASK) else { return };
    match task.split_whitespace().collect::<Vec<_>>()[..] {
        // Compiles every `of`-th instance from `first` on into the cache; what fails will fail in the parent again.
        ["share", first, of] => {
            let (first, of) = (first.parse().unwrap(), of.parse().unwrap());
            for (build, architecture) in instances(ARCHITECTURES).into_iter().skip(first).step_by(of) {
                let _ = build.compiled(architecture, &Cache::of_user());
            }
        }
        // Compiles into one cache at the same time as another process.
        ["many", count] => {
            for factor in 0..count.parse().unwrap() {
                let build = Build { source: scale(), defines: vec![("FACTOR", format!("{factor}"))] };
                let compiled = build.compiled("sm_80".parse().unwrap(), &Cache::of_user()).unwrap();
                assert!(compiled.report.function("scale").is_some());
            }
        }
        ["fail"] => {
            let build = Build { source: scale(), defines: vec![] };
            println!("said: {}", build.compiled("sm_80".parse().unwrap(), &Cache::of_user()).unwrap_err());
        }
        _ => panic!("no such task: {task}"),
    }
}
