//! All kernels of these tests, compiled side by side before the first test runs: the compiler takes one program at a time
//! in each process.

use crate::case::Case;
use crate::{exact, extremes, gates, rfc, special, tolerance};
use gdnlab::cuda::chunk::config::{Card, Config as OfGdn};
use gdnlab::cuda::chunk::gdn2::config::Config;
use gdnlab::cuda::{Build, Gpu};
use std::process::{Command, Stdio};
use std::sync::Once;
use std::time::Instant;

/// What a child does: its number and that of all children, in this variable.
const TASK: &str = "GDNLAB_TEST_TASK";
/// With this variable nothing is compiled before a test asks for it.
const LATER: &str = "GDNLAB_TEST_COMPILE_LATER";

fn cases() -> Vec<Case> {
    [tolerance::cases(), exact::cases(), extremes::cases(), gates::cases(), rfc::cases(), special::cases()].concat()
}

/// Each build once; `hopper` for a GPU that has sweeps of its own.
fn builds(card: &Card, hopper: bool) -> Vec<Build> {
    let mut builds: Vec<Build> = Vec::new();
    let made = cases().into_iter().map(|case| (case, false));
    for (case, raw) in made.chain(gates::cases().into_iter().map(|case| (case, true))) {
        let (variant, work) = case.variant();
        let config = Config::new(variant, case.precision.gates, raw, work, card).unwrap();
        builds.extend(config.builds().unwrap());
        if hopper {
            builds.extend(config.hopper_builds().unwrap());
        }
        if case.heads.0 < case.heads.1 {
            builds.push(config.groups().unwrap());
        }
    }
    for case in special::cases() {
        let (variant, work) = case.variant();
        let config = OfGdn::new(variant, work, card).unwrap();
        builds.extend(config.builds().unwrap());
        if hopper {
            builds.extend(config.hopper_builds().unwrap());
        }
    }
    builds.sort_by_key(ToString::to_string);
    builds.dedup();
    builds
}

/// Fills the cache of compiled kernels, with a process for each processor.
pub fn once() {
    static COMPILED: Once = Once::new();
    COMPILED.call_once(|| {
        if std::env::var_os(TASK).is_some() || std::env::var_os(LATER).is_some() {
            return;
        }
        let start = Instant::now();
        let count = std::thread::available_parallelism().unwrap().get();
        let child = |first: usize| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--ignored", "--exact", "compile::child"])
                .env(TASK, format!("{first} {count}"))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        let children: Vec<_> = (0..count).map(child).collect();
        for child in children {
            let output = child.wait_with_output().unwrap();
            let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
            assert!(output.status.success(), "a process that compiles has failed:\n{said}");
        }
        println!("compiled in {:.1} s", start.elapsed().as_secs_f64());
    });
}

#[test]
#[ignore = "a part of other tests, which start it"]
fn child() {
    let Ok(task) = std::env::var(TASK) else { return };
    let numbers: Vec<usize> = task.split_whitespace().map(|number| number.parse().unwrap()).collect();
    let gpu = Gpu::shared().unwrap();
    for build in builds(&Card::from(gpu), gpu.capability == (9, 0)).iter().skip(numbers[0]).step_by(numbers[1]) {
        gpu.module(build).unwrap();
    }
}

/// Without a GPU: the cases are problems that the kernels take.
#[test]
fn every_case_is_a_problem_that_there_is_a_kernel_for() {
    let card = Card { multiprocessors: 132, shared_bytes_per_block: 227 << 10 };
    println!("{} specialisations of kernels", builds(&card, true).len());
    for case in cases() {
        let short = Case { lengths: case.lengths.iter().map(|&length| length.min(2)).collect(), ..case.clone() };
        let setup = short.setup(&short.inputs());
        setup.validate().unwrap();
        assert_eq!(setup.variant(), short.variant().0, "{case}");
    }
}
