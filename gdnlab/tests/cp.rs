//! `cargo lab cp`: ranks that are threads, and ranks that are processes.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// A small call that crosses borders inside chunks.
const SMALL: [&str; 12] = [
    "--seqlens",
    "150+40",
    "--heads",
    "2",
    "--qk-heads",
    "1",
    "--dims",
    "32,64",
    "--kernel",
    "cpu-chunk-fp32",
    "--cut",
    "even",
];
/// One that takes seconds.
const LONG: [&str; 10] =
    ["--seqlens", "1x30000", "--heads", "4", "--dims", "64,64", "--kernel", "reference", "--op", "gdn"];

/// The command without the variables of whatever started this test.
fn lab(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
    command.arg("cp").args(arguments);
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK"] {
        command.env_remove(name);
    }
    command.env_remove("SLURM_PROCID").env_remove("SLURM_NTASKS");
    command
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

/// What the records say but for when and where.
fn found(json: &str) -> Vec<Value> {
    let record = |line: &str| {
        let mut record: Value = serde_json::from_str(line).unwrap();
        ["utc", "commit", "dirty", "machine", "transport"].iter().for_each(|name| {
            record.as_object_mut().unwrap().remove(*name);
        });
        record
    };
    json.lines().map(record).collect()
}

#[test]
fn ranks_that_are_threads_and_ranks_that_are_processes_give_the_same_bits() {
    for more in [&["--op", "gdn"][..], &["--op", "gdn2", "--qk-heads", "2"]] {
        let arguments = |transport| {
            let small = if more.len() > 2 { [&SMALL[..4], &SMALL[6..]].concat() } else { SMALL.to_vec() };
            [&["--ranks", "3", "--json", "--transport", transport][..], &small, more].concat()
        };
        let threads = lab(&arguments("virtual")).output().unwrap();
        let (of_threads, said) = texts(&threads);
        assert!(threads.status.success() && said.contains("3 virtual ranks, threads"), "{said}");
        assert!(said.contains("holds: ") && said.contains("expected below 4.0e-3"), "{said}");
        let processes = lab(&arguments("tcp")).output().unwrap();
        let (of_processes, said) = texts(&processes);
        assert!(processes.status.success() && said.contains("3 ranks, processes joined by sockets"), "{said}");
        assert_eq!(found(&of_threads), found(&of_processes));
        assert_eq!(found(&of_threads).len(), if more[1] == "gdn" { 8 } else { 9 });
        assert!(of_processes.contains("\"transport\":\"tcp\"") && of_processes.contains("\"crossings\":2"));
    }
}

#[test]
fn times_of_one_two_and_more_ranks_are_recorded() {
    for transport in ["virtual", "tcp"] {
        let scaling =
            ["--ranks", "3", "--json", "--repeats", "2", "--transport", transport, "--scaling", "strong", "weak"];
        let output = lab(&[&scaling[..], &SMALL].concat()).output().unwrap();
        let (json, said) = texts(&output);
        assert!(output.status.success(), "{said}");
        let number = |record: &Value, name: &str| record[name].as_f64().unwrap_or(f64::NAN);
        let all = found(&json);
        assert_eq!(all.len(), 6, "{json}");
        for record in all {
            assert!(number(&record, "latency_ms") > 0.0 && number(&record, "single_ms") > 0.0, "{record}");
            let several = record["ranks"].as_u64().unwrap() > 1;
            assert_eq!(number(&record, "link_gb_s") > 0.0, several, "{record}");
            assert_eq!(number(&record, "communication_ms") > 0.0, several, "{record}");
            let weak = if record["scaling"] == "weak" { record["ranks"].as_u64().unwrap() } else { 1 };
            assert_eq!(record["T"].as_u64().unwrap(), 190 * weak, "{record}");
        }
    }
}

/// Starts three ranks and gives the process of rank 1, once it has begun.
fn started(more: &[&str]) -> (Child, BufReader<std::process::ChildStderr>, String) {
    let mut lab = lab(&[&["--ranks", "3", "--transport", "tcp"][..], more, &LONG].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(lab.stderr.take().unwrap());
    let mut process = None;
    for _ in 0..4 {
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        process = process.or_else(|| line.trim().strip_prefix("rank 1 is process ").map(str::to_owned));
    }
    std::thread::sleep(Duration::from_millis(500));
    (lab, said, process.unwrap())
}

fn signal(name: &str, process: &str) {
    assert!(Command::new("kill").args([name, process]).status().unwrap().success());
}

#[test]
fn a_rank_that_dies_is_named_and_the_others_are_stopped() {
    let (mut lab, mut said, process) = started(&[]);
    signal("-KILL", &process);
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert_eq!(lab.wait().unwrap().code(), Some(1), "{rest}");
    assert!(rest.contains("rank 1 was ended by signal 9"), "{rest}");
    assert!(rest.contains("others were stopped"), "{rest}");
}

#[test]
fn a_rank_that_hangs_is_named_and_stopped_too() {
    let (mut lab, mut said, process) = started(&["--timeout", "2"]);
    signal("-STOP", &process);
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert_eq!(lab.wait().unwrap().code(), Some(1), "{rest}");
    assert!(rest.contains("rank 1 hangs: no progress for 2 s"), "{rest}");
    // It is gone: there is no process to be sent a signal.
    assert!(!Command::new("kill").args(["-0", &process]).stderr(Stdio::null()).status().unwrap().success());
}

#[test]
fn ranks_of_another_launcher_find_each_other() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let start = |rank: &str| {
        let mut command = lab(&SMALL);
        command.envs([
            ("OMPI_COMM_WORLD_RANK", rank),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank),
            ("OMPI_COMM_WORLD_SIZE", "2"),
        ]);
        command.envs([("OMPI_COMM_WORLD_LOCAL_SIZE", "2"), ("MASTER_PORT", &port)]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let [first, second] = ["0", "1"].map(start).map(|rank| rank.wait_with_output().unwrap());
    let ((table, said), (nothing, silent)) = (texts(&first), texts(&second));
    assert!(first.status.success() && second.status.success(), "{said} {silent}");
    assert!(table.contains("final_state") && nothing.is_empty(), "{table} {nothing}");
}

#[test]
fn both_operators_are_tested_unless_one_is_asked_for() {
    let small = ["--ranks", "2", "--seqlens", "65+65", "--heads", "1", "--dims", "16,16", "--json"];
    let output = lab(&[&small[..], &["--kernel", "cpu-chunk-f16-internals"]].concat()).output().unwrap();
    let (json, said) = texts(&output);
    assert!(output.status.success(), "{said}");
    let ops: Vec<Value> = found(&json).iter().map(|record| record["op"].clone()).collect();
    assert_eq!((ops.len(), &ops[0], &ops[16]), (17, &"gdn".into(), &"gdn2".into()), "{ops:?}");
    assert!(
        said.ends_with("holds: 17 tensors have every bit of a single run, as no sequence crosses a border\n"),
        "{said}"
    );
}

/// Rank 0 waits for rank 1, and rank 1 for rank 2: both name rank 2, wherever it stopped.
#[test]
fn a_rank_that_hangs_under_another_launcher_is_named_by_all_others() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let start = |rank: &str| {
        let mut command = lab(&[&["--timeout", "8"][..], &LONG].concat());
        command.envs([("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "3")]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let [first, second, mut third] = ["0", "1", "2"].map(start);
    std::thread::sleep(Duration::from_millis(500));
    signal("-STOP", &third.id().to_string());
    let others = [first, second].map(|rank| rank.wait_with_output().unwrap());
    third.kill().unwrap();
    third.wait().unwrap();
    for output in others {
        let (_, said) = texts(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.starts_with("error: rank 2 ha"), "{said}");
    }
}

#[test]
fn variables_that_do_not_fit_are_refused_in_words() {
    let refused = |variables: &[(&str, &str)], arguments: &[&str], expected: &str| {
        let output = lab(arguments).envs(variables.iter().copied()).output().unwrap();
        let (_, said) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.starts_with("error: ") && said.contains(expected), "{said}");
    };
    refused(&[("RANK", "0")], &[], "WORLD_SIZE is not");
    let two = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")];
    refused(&two, &["--ranks", "3"], "--ranks 3, but torchrun started 2");
    refused(&two, &["--transport", "virtual", "--kernel", "cpu-chunk-fp32"], "expected auto, tcp or nccl");
    refused(&[], &["--cut", "5+6", "--ranks", "2"], "10240 tokens");
    refused(&[], &["--seqlens", "0"], "expected at least one token");
    refused(&[], &["--timeout", "10000000000"], "seconds of 30 days at most");
    refused(&[], &["--ranks", "5000", "--kernel", "cpu-chunk-fp32"], "at most 256 virtual ranks");
    refused(&[], &["--ranks", "300", "--transport", "tcp", "--kernel", "cpu-chunk-fp32"], "at most 64 processes");
    refused(&[], &["--transport", "nccl", "--kernel", "cpu-chunk-fp32"], "a GPU for each rank");
    refused(&[], &["--kernel", "cuda-chunk-bf16", "--op", "gdn2"], "does not implement gdn2");
}

/// The RFC's test in full, with virtual ranks on one GPU.
mod on_a_gpu {
    use gdnlab::bench::SeqLens;
    use gdnlab::cp::{Cuts, DeviceClock, LIMIT, Scaling, Setting, Trial, complaints};
    use gdnlab::kernel::kernel;
    use gdnlab::problem::Op;
    use gdnlab::record::{CpExactness, CpFound, Measurement, Record};

    fn exactness(records: &[Record]) -> Vec<&CpExactness> {
        records
            .iter()
            .filter_map(|record| match &record.measurement {
                Measurement::Cp(cp) => match &cp.found {
                    CpFound::Exactness(found) => Some(found),
                    CpFound::Scaling(_) => None,
                },
                _ => None,
            })
            .collect()
    }

    fn kernels(op: Op) -> [String; 4] {
        let prefix = if op == Op::Gdn { "cuda-chunk" } else { "cuda-gdn2" };
        ["bf16", "f16", "tf32", "fp32"].map(|mode| format!("{prefix}-{mode}"))
    }

    /// Does `work` with all of `calls` at once: most of the time goes to compiling, copies and comparisons on the CPU.
    fn side_by_side(calls: &[(Setting, String)], work: impl Fn(&Setting, &str) + Sync) {
        std::thread::scope(|scope| {
            let work = &work;
            calls.iter().for_each(|(setting, name)| {
                scope.spawn(move || work(setting, name));
            });
        });
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn two_sequences_on_two_ranks_have_the_bits_of_a_single_run() {
        for op in Op::ALL {
            side_by_side(&kernels(op).map(|name| (Setting::rfc(op, 12), name)), |setting, name| {
                let kernel = kernel(name).unwrap();
                let records = Trial::new(setting, &Cuts::Even, kernel.as_ref()).virtual_exactness(2).unwrap();
                let found = exactness(&records);
                let worst = found.iter().map(|found| found.rel_rms).fold(0.0, f64::max);
                println!("{name}: {} tensors, largest rel_rms {worst:.2e}", found.len());
                assert!(found.iter().all(|found| found.differing == 0), "{found:?}");
                assert_eq!(found.len(), if op == Op::Gdn { 8 } else { 9 });
                assert_eq!(complaints(&records), Vec::<String>::new(), "{name}");
            });
        }
    }

    /// All twelve heads in the mode of training. Of the others four: a head knows nothing of the rest.
    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn sequences_that_cross_ranks_stay_within_the_limit() {
        let cuts = [(3, "even"), (4, "3000+1+7000+239"), (8, "aligned")];
        let cuts = cuts.map(|(ranks, cuts)| (ranks, cuts.parse::<Cuts>().unwrap()));
        let of = |op| kernels(op).map(|name| (Setting::rfc(op, if name.ends_with("bf16") { 12 } else { 4 }), name));
        side_by_side(&Op::ALL.map(of).concat(), |setting, name| {
            let kernel = kernel(name).unwrap();
            let mut trial = Trial::new(setting, &cuts[0].1, kernel.as_ref());
            for (ranks, cuts) in &cuts {
                trial = trial.cut_by(cuts);
                let records = trial.virtual_exactness(*ranks).unwrap();
                let found = exactness(&records);
                assert_eq!(found.len(), if setting.op == Op::Gdn { 8 } else { 9 });
                for found in found {
                    println!(
                        "{name} {ranks} ranks {cuts} {}: rel_rms {:.2e}, single {:.2e}, apart {:.2e}, {} of {} differ",
                        found.tensor, found.rel_rms, found.single_rel_rms, found.apart, found.differing, found.elements
                    );
                    assert!(found.rel_rms < LIMIT, "{name}: {found:?}");
                }
            }
        });
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn steps_are_timed_by_the_gpus_clock() {
        for (op, name) in [(Op::Gdn, "cuda-chunk-bf16"), (Op::Gdn2, "cuda-gdn2-bf16")] {
            let kernel = kernel(name).unwrap();
            let clock = DeviceClock::of(name).unwrap().unwrap();
            for backward in [false, true] {
                let seqlens = SeqLens::new(vec![1024]);
                let setting = Setting { seqlens, backward, ..Setting::rfc(op, 2) };
                let trial = Trial::new(&setting, &Cuts::Aligned, kernel.as_ref()).timed_by(Some(&clock));
                for record in trial.virtual_scaling(Scaling::Strong, &[1, 4], 1).unwrap() {
                    let Measurement::Cp(cp) = &record.measurement else { panic!("{record:?}") };
                    let CpFound::Scaling(found) = &cp.found else { panic!("{record:?}") };
                    println!("{name} {} ranks, backward {backward}: {found:?}", cp.ranks);
                    assert_eq!(found.clock, "device");
                    assert!(found.latency_ms > 0.0 && found.single_ms > 0.0 && found.compute_ms <= found.latency_ms);
                    assert_eq!(found.messages, (cp.ranks - 1) * if backward { 2 } else { 1 });
                }
            }
        }
        assert!(DeviceClock::of("cpu-chunk-bf16").unwrap().is_none());
    }

    /// Times of ranks side by side, by the clock of their GPUs.
    fn times(arguments: &[&str], records: usize) -> Vec<super::Value> {
        let output = super::lab(&[&["--json", "--scaling", "strong", "weak"], arguments].concat()).output().unwrap();
        let (json, said) = super::texts(&output);
        assert!(output.status.success(), "{said}");
        let all = super::found(&json);
        assert_eq!(all.len(), records, "{json}");
        for record in &all {
            println!("{record}");
            let number = |name: &str| record[name].as_f64().unwrap_or(f64::NAN);
            assert!(record["clock"] == "gpu" && record["samples_ms"].as_array().unwrap().len() == 20, "{record}");
            assert!(number("latency_ms") > 0.0 && number("single_ms") > 0.0 && number("compute_ms") > 0.0, "{record}");
            let several = number("ranks") > 1.0;
            assert_eq!(number("communication_ms") > 0.0 && number("link_latency_ms") > 0.0, several, "{record}");
        }
        all
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn tensors_of_ranks_side_by_side_stay_on_the_gpu() {
        for (op, kernel, passes) in [("gdn", "cuda-chunk-bf16", "--forward"), ("gdn2", "cuda-gdn2-bf16", "")] {
            let call = ["--ranks", "3", "--transport", "tcp", "--seqlens", "70+400", "--heads", "2", "--dims", "64,32"];
            let kernel = ["--op", op, "--kernel", kernel, passes];
            let kernel = &kernel[..if passes.is_empty() { 4 } else { 5 }];
            let all = times(&[&call[..], kernel].concat(), 6);
            let messages: Vec<u64> = all.iter().map(|record| record["messages"].as_u64().unwrap()).collect();
            let each = if passes.is_empty() { 2 } else { 1 };
            assert_eq!(messages, [0, 0, 1, 1, 2, 2].map(|crossings| crossings * each));
        }
    }

    #[test]
    #[ignore = "needs two NVIDIA GPUs and NCCL"]
    fn states_go_from_gpu_to_gpu() {
        let call = ["--ranks", "2", "--transport", "nccl", "--kernel", "cuda-chunk-bf16", "--seqlens", "1x8192"];
        let all = times(&call, 4);
        let of_two = all.iter().find(|record| record["ranks"] == 2).unwrap();
        // PCIe of two machines would not reach it through their hosts.
        assert!(of_two["link_gb_s"].as_f64().unwrap() > 20.0, "{of_two}");
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU and NCCL"]
    fn one_rank_is_a_process_with_nccl() {
        let arguments =
            ["--ranks", "1", "--transport", "nccl", "--kernel", "cuda-chunk-bf16", "--seqlens", "300x2", "--json"];
        let output = super::lab(&arguments).output().unwrap();
        let (json, said) = super::texts(&output);
        assert!(output.status.success(), "{said}");
        assert!(json.contains("\"transport\":\"nccl\"") && json.lines().count() == 8, "{json}");
    }
}
