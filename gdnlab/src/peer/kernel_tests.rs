//! The bridge with a Python that has nothing but its standard library.

use super::*;
use crate::bench::Samples;
use crate::compare::compare_results;
use crate::inputs::{Regime, generate};
use crate::problem::Shape;
use crate::reference::Reference;
use tempfile::TempDir;

/// A module of peers: the recurrence on lists of numbers, and what peers do wrong.
const MODULE: &str = include_str!("../../tests/peers/loop.py");

/// A Python that finds the module, started by a script in the folder.
struct Python {
    folder: TempDir,
}

/// As much of PyTorch as the bridge touches, on a GPU that breaks.
const FAKE_TORCH: &str = r#"
float64, float32, float16, bfloat16, int64, int32 = "f64", "f32", "f16", "bf16", "i64", "i32"
broken = False


class Tensor:
    shape = ()

    def reshape(self, *shape):
        self.shape = shape[0] if isinstance(shape[0], list) else shape
        return self

    def to(self, device):
        return self

    def __getitem__(self, index):
        return 1.0


class cuda:
    is_available = staticmethod(lambda: True)
    get_device_name = staticmethod(lambda: "a GPU")

    @staticmethod
    def synchronize():
        if broken:
            raise RuntimeError("device-side assert triggered")


def frombuffer(raw, dtype):
    return Tensor()


def get_float32_matmul_precision():
    return "highest"
"#;
/// Breaks the GPU of the first process, and tells which process it is.
const BREAKS: &str = r#"
import os, torch


def gdn(q, k, v, g, beta, **keywords):
    marker = __file__ + ".broken"
    if not os.path.exists(marker):
        open(marker, "w").close()
        torch.broken = True
    raise RuntimeError(f"process {os.getpid()}")
"#;

impl Python {
    fn new() -> Self {
        Self::with_arrays("plain")
    }

    fn with_arrays(arrays: &str) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let folder = TempDir::new().unwrap();
        let path = folder.path();
        std::fs::write(path.join("gdnlab_loop.py"), MODULE).unwrap();
        let script =
            format!("#!/bin/sh\nPYTHONPATH='{}' GDNLAB_PEER_ARRAYS={arrays} exec python3 -B \"$@\"\n", path.display());
        std::fs::write(path.join("python"), script).unwrap();
        std::fs::set_permissions(path.join("python"), std::fs::Permissions::from_mode(0o755)).unwrap();
        Self { folder }
    }

    fn peer(&self, function: &str) -> Peer {
        self.patient(function, Duration::from_secs(60))
    }

    fn patient(&self, function: &str, timeout: Duration) -> Peer {
        let options = PeerOptions { python: self.folder.path().join("python"), timeout };
        Peer::new(&format!("gdnlab_loop:{function}"), options).unwrap()
    }
}

fn inputs() -> Inputs {
    let shape = Shape { batch: 2, qk_heads: 1, ..Shape::new(5, 2, 4, 3) };
    generate(Op::Gdn, &shape, Regime::Gaussian, 1).unwrap().with_initial_state(1).rounded_to(Format::F32)
}

fn folders_of_this_process() -> Vec<PathBuf> {
    let prefix = format!("gdnlab-peer-{}-", std::process::id());
    let entries = places().into_iter().flat_map(|place| std::fs::read_dir(place).into_iter().flatten().flatten());
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)).map(|entry| entry.path()).collect()
}

fn message<T>(outcome: Result<T>) -> String {
    outcome.err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn a_function_of_the_user_is_a_kernel_forward_and_backward() {
    let python = Python::new();
    let peer = python.peer("gdn");
    for inputs in [inputs(), Inputs { initial_state: None, scale: 0.7, ..inputs() }] {
        let (found, truth) = (peer.backward(&inputs).unwrap(), Reference.backward(&inputs).unwrap());
        for comparison in compare_results(&found, &truth).unwrap() {
            assert!(comparison.rel_rms < 1e-6, "{}: {:e}", comparison.tensor, comparison.rel_rms);
        }
        assert_eq!(peer.forward(&inputs).unwrap().outputs, found.outputs);
    }
    let about = peer.about().unwrap();
    assert_eq!((about.arrays.as_str(), about.gpu), ("plain", None));
    assert!(peer.software().unwrap().contains("python 3."), "{:?}", peer.software());
    assert!(!peer.on_gpu());
    let timing =
        PeerTiming { backward: false, warm_up: Duration::ZERO, samples: [3, 3], time: Duration::ZERO, flush_bytes: 0 };
    let samples = peer.time(&inputs(), &timing).unwrap();
    assert_eq!((samples.ms.len(), samples.timed_by.as_str()), (3, "clock"));
    assert!(Samples::new(samples.ms).unwrap().median() > 0.0);
}

#[test]
fn what_goes_wrong_is_told_apart_and_the_next_call_works() {
    let python = Python::new();
    let refused = |function: &str| message(python.peer(function).forward(&inputs()));
    let raised = refused("raises");
    assert!(raised.contains("gdnlab_loop:raises cannot run this: it raised ValueError: no luck"), "{raised}");
    assert!(refused("none_such").contains("no attribute 'none_such'"));
    assert!(refused("exits").contains("its process ended (exit status: 3), its last words: good-bye"));
    assert!(refused("no_state").contains("it gave no 'final_state'"));
    assert!(refused("wrong_shape").contains("tensor 'o': expected shape"));
    assert!(refused("stateless").contains("takes no 'initial_state'"));
    let hung = message(python.patient("hangs", Duration::from_millis(1500)).forward(&inputs()));
    assert!(hung.contains("no answer within 1.5 s"), "{hung}");
    let fla = Peer::new("fla", python.peer("gdn").options).unwrap();
    let missing = message(fla.forward(&inputs()));
    assert!(missing.contains("lacks a module") && missing.contains("pip install flash-linear-attention"), "{missing}");
    let tilelang = refused("like_fla_on_hopper");
    assert!(tilelang.contains("pip install tilelang, or Triton 3.7.1"), "{tilelang}");
    let nowhere = PeerOptions { python: PathBuf::from("no-such-python"), timeout: TIMEOUT };
    assert!(
        message(Peer::new("fla", nowhere).unwrap().forward(&inputs())).contains("no Python called 'no-such-python'")
    );

    let flaky = python.peer("dies_once");
    assert!(message(flaky.forward(&inputs())).contains("its process ended"));
    assert!(flaky.forward(&inputs()).is_ok());
    let results = python.peer("gives_nan").forward(&inputs()).unwrap();
    let truth = Reference.forward(&inputs()).unwrap();
    assert_eq!(compare_results(&results, &truth).unwrap()[0].nonfinite, 1);
}

#[test]
fn an_error_is_one_line_and_a_missing_module_of_the_user_is_no_package() {
    let python = Python::new();
    let raised = message(python.peer("raises_at_length").forward(&inputs()));
    assert!(
        raised.ends_with("it raised RuntimeError: CUDA error: device-side assert triggered / 1 / 2 / ..."),
        "{raised}"
    );
    let other = message(python.peer("needs_another_module").forward(&inputs()));
    assert!(other.contains("pip install gdnlab_no_such_module"), "{other}");
    let own = message(Peer::new("no_such_module:gdn", python.peer("gdn").options).unwrap().forward(&inputs()));
    assert!(own.contains("start this in the folder that holds no_such_module.py") && !own.contains("pip"), "{own}");
}

#[test]
fn the_forward_alone_is_asked_for_where_that_may_help() {
    let python = Python::new();
    let inputs = inputs();
    let (found, why) = python.peer("without_backward").call_as_far_as_it_goes(&inputs).unwrap();
    assert!(!found.has_gradients() && why.unwrap().to_string().contains("no backward here"));
    let (found, why) = python.peer("gdn").call_as_far_as_it_goes(&inputs).unwrap();
    assert!(found.has_gradients() && why.is_none());
    let hanging = python.patient("hangs", Duration::from_millis(700));
    let hung = message(hanging.call_as_far_as_it_goes(&inputs).map(drop));
    assert!(hung.contains("no answer within 0.7 s"), "{hung}");
    assert_eq!(hanging.state().late, 1, "the forward was asked for, too");
    let missing =
        message(Peer::new("fla", python.peer("gdn").options).unwrap().call_as_far_as_it_goes(&inputs).map(drop));
    assert!(missing.contains("lacks a module"), "{missing}");
}

#[test]
fn a_peer_that_hangs_twice_running_is_not_asked_again() {
    let python = Python::new();
    let hangs = python.patient("hangs", Duration::from_millis(700));
    for _ in 0..PATIENCE {
        assert!(message(hangs.forward(&inputs())).contains("no answer within 0.7 s"));
    }
    let begun = std::time::Instant::now();
    let refused = message(hangs.forward(&inputs()));
    assert!(refused.contains("2 times one after the other, so it is not asked any more"), "{refused}");
    assert!(begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());

    let sometimes = python.patient("hangs_for_once", Duration::from_secs(4));
    for _ in 0..2 {
        assert!(message(sometimes.forward(&inputs())).contains("no answer within 4 s"));
        assert!(sometimes.forward(&inputs()).is_ok());
    }
}

#[test]
fn a_process_whose_gpu_refuses_everything_is_replaced() {
    let python = Python::with_arrays("torch");
    for (name, text) in [("torch.py", FAKE_TORCH), ("breaks.py", BREAKS)] {
        std::fs::write(python.folder.path().join(name), text).unwrap();
    }
    let peer = Peer::new("breaks:gdn", python.peer("gdn").options).unwrap();
    let [first, second, third] = [(); 3].map(|()| message(peer.forward(&inputs())));
    assert!([&first, &second].iter().all(|words| words.contains("RuntimeError: process ")), "{first}\n{second}");
    assert_ne!(first, second, "the process of the broken GPU was asked again");
    assert_eq!(second, third, "a sound process was replaced");
}

#[test]
fn nothing_is_left_behind() {
    let python = Python::new();
    let peer = python.peer("gdn");
    peer.forward(&inputs()).unwrap();
    let mine = peer.state().bridge.as_ref().map(|bridge| bridge.file("")).unwrap();
    assert!(folders_of_this_process().iter().any(|folder| mine.starts_with(folder)));
    drop(peer);
    assert!(!mine.exists());
}

#[test]
fn names_tell_library_function_and_format() {
    let options = PeerOptions { python: PathBuf::from("python3"), timeout: TIMEOUT };
    let peer = |name: &str| Peer::new(name, options.clone());
    for (name, format, mode) in [
        ("fla", Format::Bf16, "bf16"),
        ("fla@f32", Format::F32, "tf32"),
        ("flash_qla@f16", Format::F16, "fp16"),
        ("mine.kernels:gdn", Format::F32, "fp32"),
        ("mine.kernels:gdn@bf16", Format::Bf16, "bf16"),
    ] {
        let peer = peer(name).unwrap();
        assert!(Peer::is_name(name), "{name}");
        assert_eq!((peer.name(), peer.input_format(), peer.mode()), (name, format, mode));
    }
    assert!(!Peer::is_name("cpu-chunk-bf16") && !Peer::is_name("reference"));
    assert!(message(peer("torch")).contains("MODULE:FUNCTION"));
    assert!(message(peer("fla@f8")).contains("expected f32, bf16 or f16"));
    assert!(!peer("flashinfer").unwrap().has_backward());
}
