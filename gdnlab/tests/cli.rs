//! The `lab` binary from outside: what it prints, its exit codes, and the files that it leaves or does not leave.
#![allow(clippy::unwrap_used, reason = "a helper that cannot do its part has failed the test")]

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

const CASES: [&str; 4] = ["gdn", "gdn2", "gdn-fast-decay", "gdn-grouped-packed"];

fn fixture(case: &str, kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/cases/{case}.{kind}.safetensors"))
}

fn lab<A: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = A>) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lab")).args(arguments).output().unwrap()
}

fn path_arguments<'a>(command: &'a str, paths: &[&'a Path]) -> Vec<&'a std::ffi::OsStr> {
    std::iter::once(command.as_ref()).chain(paths.iter().map(|path| path.as_os_str())).collect()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn assert_code(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "{}\n{}", text(&output.stdout), text(&output.stderr));
}

/// Exit 2, one line on standard error that holds `parts`, nothing on standard output.
fn assert_refused(output: &Output, parts: &[&str]) {
    assert_code(output, 2);
    let stderr = text(&output.stderr);
    assert_eq!((stderr.lines().count(), text(&output.stdout)), (1, ""), "{stderr}");
    assert!(parts.iter().all(|part| stderr.contains(part)), "{parts:?} is missing in: {stderr}");
}

#[derive(Clone)]
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// The tensors of a file, to be changed and written again.
#[derive(Clone)]
struct Tensors(BTreeMap<String, Stored>);

impl Tensors {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let stored = tensors.iter().map(|(name, view)| {
            let (dtype, shape) = (view.dtype(), view.shape().to_vec());
            (name.to_owned(), Stored { dtype, shape, bytes: view.data().to_vec() })
        });
        Self(stored.collect())
    }

    fn write(&self, folder: &TempDir, name: &str) -> PathBuf {
        let path = folder.path().join(name);
        let views = self
            .0
            .iter()
            .map(|(name, stored)| (name, TensorView::new(stored.dtype, stored.shape.clone(), &stored.bytes).unwrap()));
        std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
        path
    }

    /// Values of an f64 or f32 tensor.
    fn values(&self, name: &str) -> Vec<f64> {
        let stored = &self.0[name];
        match stored.dtype {
            Dtype::F64 => stored.bytes.as_chunks().0.iter().map(|word| f64::from_le_bytes(*word)).collect(),
            Dtype::F32 => stored.bytes.as_chunks().0.iter().map(|word| f64::from(f32::from_le_bytes(*word))).collect(),
            other => panic!("{name} is {other:?}"),
        }
    }

    /// Replaces the values of a tensor, stored as f64.
    fn with(mut self, name: &str, change: impl FnOnce(&mut Vec<f64>)) -> Self {
        let mut values = self.values(name);
        change(&mut values);
        let stored = self.0.get_mut(name).unwrap();
        stored.dtype = Dtype::F64;
        stored.bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self
    }

    fn with_raw(mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        self.0.insert(name.to_owned(), Stored { dtype, shape: shape.to_vec(), bytes });
        self
    }

    fn without(mut self, names: &[&str]) -> Self {
        self.0.retain(|name, _| !names.contains(&name.as_str()));
        self
    }
}

fn case(name: &str) -> Tensors {
    Tensors::read(&fixture(name, "case"))
}

fn truth(name: &str) -> Tensors {
    Tensors::read(&fixture(name, "truth"))
}

#[test]
fn the_reference_agrees_with_an_independent_truth() {
    let folder = TempDir::new().unwrap();
    for name in CASES {
        let out = folder.path().join(name);
        let output = lab(path_arguments("reference", &[&fixture(name, "case"), Path::new("-o"), &out]));
        assert_code(&output, 0);
        let (found, expected) = (Tensors::read(&out), truth(name));
        assert_eq!(found.0.keys().collect::<Vec<_>>(), expected.0.keys().collect::<Vec<_>>());
        for (tensor, stored) in &expected.0 {
            assert_eq!((found.0[tensor].dtype, &found.0[tensor].shape), (Dtype::F64, &stored.shape), "{name} {tensor}");
            let (x, r) = (found.values(tensor), expected.values(tensor));
            let largest = r.iter().fold(0.0f64, |m, r| m.max(r.abs()));
            let error = x.iter().zip(&r).fold(0.0f64, |m, (x, r)| m.max((x - r).abs()));
            assert!(error <= 1e-14 * largest, "{name} {tensor}: {error:e} of {largest:e}");
        }
    }
}

#[test]
fn the_truth_verifies_and_says_by_which_tolerance() {
    for name in CASES {
        let files = [fixture(name, "case"), fixture(name, "truth")];
        let output = lab(path_arguments("verify", &[&files[0], &files[1]]));
        assert_code(&output, 0);
        let stdout = text(&output.stdout);
        for part in ["tolerance fp32 because of that dtype", "--tolerance (fp64, fp32", "within tolerance fp32"] {
            assert!(stdout.contains(part), "'{part}' is missing in:\n{stdout}");
        }
        assert_code(&lab(path_arguments("verify", &[&files[0], &files[1], Path::new("-tfp64")])), 0);
    }
}

#[test]
fn every_kernel_verifies_in_its_own_mode() {
    let folder = TempDir::new().unwrap();
    let listed = lab(["kernels", "--json"]);
    assert_code(&listed, 0);
    for line in text(&listed.stdout).lines() {
        let kernel: serde_json::Value = serde_json::from_str(line).unwrap();
        let field = |key: &str| kernel[key].as_str().unwrap().to_owned();
        if field("needs").contains("GPU") && gdnlab::cuda::Gpu::shared().is_err() {
            continue;
        }
        for name in CASES {
            // The kernel must get values that its input format holds, or their rounding counts as its error.
            let mut rounded = case(name);
            for tensor in ["q", "k", "v", "do"] {
                let narrow = matches!(field("input_format").as_str(), "bf16" | "f16");
                rounded = rounded.with(tensor, |x| {
                    if narrow {
                        x.iter_mut().for_each(|x| *x = to_bf16(*x))
                    }
                });
            }
            let input = rounded.write(&folder, "case");
            let out = folder.path().join("out");
            let kernel_flag = format!("--kernel={}", field("name"));
            let computed = lab(path_arguments("compute", &[&input, Path::new(&kernel_flag), Path::new("-o"), &out]));
            assert_code(&computed, 0);
            let mode = format!("--tolerance={}", field("tolerance"));
            assert_code(&lab(path_arguments("verify", &[&input, &out, Path::new(&mode)])), 0);
        }
    }
}

/// `x` cut to 8 significant bits: a value of bf16.
fn to_bf16(x: f64) -> f64 {
    f64::from_bits(x.to_bits() & !((1 << 45) - 1))
}

#[test]
fn perturbed_results_do_not_verify() {
    let folder = TempDir::new().unwrap();
    for name in CASES {
        let input = fixture(name, "case");
        let verify = |results: Tensors| lab(path_arguments("verify", &[&input, &results.write(&folder, "result")]));
        for tensor in ["o", "final_state", "dq", "dk", "dv"] {
            let one_off = truth(name).with(tensor, |x| x[7] += x.iter().fold(0.0f64, |m, x| m.max(x.abs())) * 1e-4);
            let output = verify(one_off);
            assert_code(&output, 1);
            let stdout = text(&output.stdout);
            assert!(stdout.contains(&format!("OUTSIDE tolerance fp32 ({tensor})")), "{stdout}");
            assert!(stdout.contains("worst at ("), "{stdout}");
        }
        assert_code(&verify(truth(name).with("o", |x| x[3] = f64::NAN)), 1);
        assert_code(&verify(truth(name).with("dv", |x| x[0] = f64::INFINITY)), 1);
        let as_bf16 = verify(truth(name).with("o", |x| x.iter_mut().for_each(|x| *x = to_bf16(*x))));
        assert_code(&as_bf16, 1);
        assert!(text(&as_bf16.stdout).contains("the values have only the digits of bf16"));
        assert!(text(&as_bf16.stdout).contains("but within that of bf16"));
        assert_code(&verify(truth(name).with("dq", |x| x.fill(0.0))), 1);
    }
}

#[test]
fn swapped_tensors_do_not_verify() {
    let folder = TempDir::new().unwrap();
    let results = truth("gdn");
    let (dg, dbeta) = (results.0["dg"].clone(), results.0["dbeta"].clone());
    let mut swapped = results;
    swapped.0.insert("dg".into(), dbeta);
    swapped.0.insert("dbeta".into(), dg);
    let result = swapped.write(&folder, "result");
    assert_code(&lab(path_arguments("verify", &[&fixture("gdn", "case"), &result, Path::new("-tbf16")])), 1);
}

#[test]
fn a_truth_that_overflows_blames_no_kernel() {
    let folder = TempDir::new().unwrap();
    let same = |_: &mut Vec<f64>| ();
    let long_keys = case("gdn").with("q", same).with("v", same).with("do", same);
    let long_keys = long_keys.with("k", |x| x.iter_mut().for_each(|k| *k *= 1e6)).write(&folder, "case");
    let output = lab(path_arguments("verify", &[&long_keys, &fixture("gdn", "truth")]));
    assert_refused(&output, &["truth itself is not finite from t=", "are q and k normalised and g <= 0?"]);
}

#[test]
fn missing_gradients_are_allowed_and_said() {
    let folder = TempDir::new().unwrap();
    let forward = truth("gdn").without(&["dq", "dk", "dv", "dg", "dbeta", "dh0"]).write(&folder, "forward");
    let output = lab(path_arguments("verify", &[&fixture("gdn", "case"), &forward]));
    assert_code(&output, 0);
    assert!(text(&output.stdout).contains("not compared: dq, dk, dv, dg, dbeta, dh0"), "{}", text(&output.stdout));
    let no_do = case("gdn").without(&["do", "dht"]).write(&folder, "no_do");
    assert_code(&lab(path_arguments("verify", &[&no_do, &forward])), 0);
    let output = lab(path_arguments("verify", &[&no_do, &fixture("gdn", "truth")]));
    assert_refused(&output, &["results hold gradients, so the case needs 'do'"]);
    let out = folder.path().join("out");
    let output = lab(path_arguments("reference", &[&no_do, Path::new("-o"), &out]));
    assert_code(&output, 0);
    assert!(text(&output.stderr).contains("no gradients"));
    assert_eq!(Tensors::read(&out).0.into_keys().collect::<Vec<_>>(), ["final_state", "o"]);
}

#[test]
fn the_json_report_holds_every_metric() {
    let arguments = [fixture("gdn", "case"), fixture("gdn", "truth")];
    let output = lab(path_arguments("verify", &[&arguments[0], &arguments[1], Path::new("--json")]));
    assert_code(&output, 0);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((report["pass"].as_bool(), report["mode"].as_str()), (Some(true), Some("fp32")));
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 8);
    for metric in ["max_rel", "rel_rms", "max_abs", "mean_abs", "cosine", "bias", "bias_p", "nonfinite"] {
        assert!(tensors.iter().all(|tensor| tensor[metric].is_number()), "{metric}: {report}");
    }
}

/// Every command that reads the file at `path` refuses it, and `reference` leaves nothing behind.
fn assert_bad_case(folder: &TempDir, path: &Path, parts: &[&str]) {
    let out = folder.path().join("never");
    assert_refused(&lab(path_arguments("reference", &[path, Path::new("-o"), &out])), parts);
    assert_refused(
        &lab(path_arguments("compute", &[path, Path::new("--kernel=cpu-chunk-fp32"), Path::new("-o"), &out])),
        parts,
    );
    assert_refused(&lab(path_arguments("verify", &[path, &fixture("gdn", "truth")])), parts);
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name == "bad" || name == "folder"), "{left:?}");
}

#[test]
fn cases_that_make_no_sense_are_refused() {
    let good = || case("gdn");
    let i64s = |values: &[i64]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let packed = |values: &[i64]| {
        good().without(&["dht", "initial_state"]).with_raw("cu_seqlens", Dtype::I64, &[values.len()], i64s(values))
    };
    let zeros = |count: usize| vec![0; 4 * count];
    for (bad, part) in [
        (good().without(&["q"]), "tensor 'q' is missing"),
        (good().without(&["beta"]), "no 'beta' (GDN)"),
        (good().with_raw("v", Dtype::F32, &[1, 70, 48], zeros(70 * 48)), "'v': expected 4 axes"),
        (good().with_raw("k", Dtype::F32, &[1, 70, 2, 8], zeros(70 * 16)), "'k': expected shape [1, 70, 2, 16]"),
        (good().with_raw("v", Dtype::F32, &[1, 70, 3, 16], zeros(70 * 48)), "HV = 3 is not a multiple of HK = 2"),
        (
            good().with_raw("g", Dtype::I32, &[1, 70, 2], zeros(140)),
            "'g' has dtype I32: expected f64, f32, f16 or bf16",
        ),
        (good().with_raw("scale", Dtype::F32, &[2], zeros(2)), "'scale' has 2 values"),
        (good().with_raw("w", Dtype::F32, &[1, 70, 2, 24], zeros(70 * 48)), "'beta' (GDN) beside"),
        (good().with("k", |x| x[5] = 0.0), "one dtype"),
        (good().with("g", |x| x[5] = f64::NAN), "tensor 'g' has 1 non-finite values, the first at [0, 2, 1]"),
        (packed(&[0, 40, 30, 70]), "not monotone"),
        (packed(&[0, 40]), "expected 0 to T = 70"),
        (packed(&[0, -1, 70]), "entry 1 is -1"),
        (good().with_raw("cu_seqlens", Dtype::F32, &[2], zeros(2)), "expected i32 or i64"),
    ] {
        let folder = TempDir::new().unwrap();
        let path = bad.write(&folder, "bad");
        assert_bad_case(&folder, &path, &[part, "error: ", "bad"]);
    }
}

#[test]
fn files_that_are_no_case_are_refused() {
    let good = std::fs::read(fixture("gdn", "case")).unwrap();
    for (bytes, part) in [
        (&[][..], "is empty"),
        (&good[..good.len() / 2], "truncated"),
        (&good[..20], "ends within its header"),
        (&[0xff; 64], "header of more than 100 MB"),
        (b"not tensors at all, but a text", "safetensors"),
    ] {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("bad");
        std::fs::write(&path, bytes).unwrap();
        assert_bad_case(&folder, &path, &[part]);
    }
    let folder = TempDir::new().unwrap();
    let inner = folder.path().join("folder");
    std::fs::create_dir(&inner).unwrap();
    assert_bad_case(&folder, &inner, &["is a directory"]);
    assert_bad_case(&folder, &folder.path().join("none"), &["No such file"]);
}

#[test]
fn results_that_do_not_fit_are_refused() {
    let folder = TempDir::new().unwrap();
    let input = fixture("gdn", "case");
    let verify = |result: &Path, more: &[&str]| {
        let mut arguments = path_arguments("verify", &[&input, result]);
        arguments.extend(more.iter().map(std::ffi::OsStr::new));
        lab(arguments)
    };
    let wrong_shape = truth("gdn").with_raw("o", Dtype::F32, &[1, 2, 70, 24], vec![0; 4 * 70 * 48]);
    assert_refused(&verify(&wrong_shape.write(&folder, "a"), &[]), &["'o': expected shape [1, 70, 2, 24]"]);
    let renamed = Tensors(BTreeMap::from([("out".to_owned(), truth("gdn").0["o"].clone())]));
    assert_refused(&verify(&renamed.write(&folder, "b"), &[]), &["holds no result of gdn", "got out"]);
    assert_refused(&verify(&fixture("gdn-fast-decay", "truth"), &[]), &["expected shape"]);
    assert_refused(&verify(&folder.path().join("none"), &[]), &["No such file"]);
    assert_refused(&verify(&fixture("gdn", "truth"), &["-t", "fp8"]), &["unknown mode 'fp8'", "fp64, fp32"]);
}

#[test]
fn outputs_that_cannot_be_written_are_refused_before_computing() {
    let folder = TempDir::new().unwrap();
    let input = case("gdn").write(&folder, "case");
    let before = std::fs::read(&input).unwrap();
    let reference = |out: &Path| lab(path_arguments("reference", &[&input, Path::new("-o"), out]));
    assert_refused(&reference(&folder.path().join("no/out")), &["does not exist: create it first"]);
    assert_refused(&reference(folder.path()), &["not a regular file"]);
    assert_refused(&reference(&input), &["is also an input"]);
    let unknown = lab(path_arguments("compute", &[&input, Path::new("--kernel=fast"), Path::new("-ox")]));
    assert_refused(&unknown, &["unknown kernel 'fast': expected one of reference, cpu-chunk-fp64"]);
    assert_eq!(std::fs::read(&input).unwrap(), before);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn odd_but_computable_cases_are_computed_with_a_warning() {
    let folder = TempDir::new().unwrap();
    let odd = case("gdn").with("g", |x| x[0] = 0.5).with_raw("mask", Dtype::U8, &[1], vec![1]).write(&folder, "odd");
    let out = folder.path().join("out");
    let output = lab(path_arguments("reference", &[&odd, Path::new("-o"), &out]));
    assert_code(&output, 0);
    let stderr = text(&output.stderr);
    assert!(stderr.contains("'mask' is not used") && stderr.contains("1 positive values"), "{stderr}");
    assert!(out.exists());
}

#[test]
fn no_tokens_give_the_initial_state_back() {
    let folder = TempDir::new().unwrap();
    let mut empty = case("gdn");
    for (name, shape) in [
        ("q", vec![1, 0, 2, 16]),
        ("k", vec![1, 0, 2, 16]),
        ("v", vec![1, 0, 2, 24]),
        ("do", vec![1, 0, 2, 24]),
        ("g", vec![1, 0, 2]),
        ("beta", vec![1, 0, 2]),
    ] {
        empty = empty.with_raw(name, Dtype::F32, &shape, Vec::new());
    }
    let initial = empty.values("initial_state");
    let input = empty.write(&folder, "empty");
    let out = folder.path().join("out");
    assert_code(&lab(path_arguments("reference", &[&input, Path::new("-o"), &out])), 0);
    assert_eq!(Tensors::read(&out).values("final_state"), initial);
    assert_code(&lab(path_arguments("verify", &[&input, &out])), 0);
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    for arguments in [&["kernels"][..], &["--help"], &["kernels", "--json"]] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_lab"))
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert!(!text(&output.stderr).contains("panicked"), "{}", text(&output.stderr));
    }
}

#[test]
fn every_command_has_help_with_an_example() {
    for command in ["verify", "reference", "compute", "kernels", "numerics", "precision"] {
        let output = lab([command, "--help"]);
        assert_code(&output, 0);
        assert!(text(&output.stdout).contains(&format!(":\n  cargo lab {command}")), "{}", text(&output.stdout));
    }
}

#[test]
fn an_interrupt_leaves_a_whole_file_or_none() {
    let folder = TempDir::new().unwrap();
    let tokens = 20_000;
    let ones = |count: usize| 1f32.to_le_bytes().repeat(count);
    let wide = [1, tokens, 1, 32];
    let mut long = Tensors(BTreeMap::new());
    for name in ["q", "k", "v", "do"] {
        long = long.with_raw(name, Dtype::F32, &wide, ones(tokens * 32));
    }
    for name in ["g", "beta"] {
        long = long.with_raw(name, Dtype::F32, &wide[..3], vec![0; 4 * tokens]);
    }
    let input = long.write(&folder, "case");
    let out = folder.path().join("out");
    for wait_ms in [10, 40, 80, 120, 160, 200] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_lab"))
            .args(path_arguments("reference", &[&input, Path::new("-o"), &out]))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(wait_ms));
        assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().is_ok());
        child.wait().unwrap();
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            let name = entry.unwrap().file_name();
            assert!(name == "case" || name == "out", "{name:?} was left after {wait_ms} ms");
        }
        if out.exists() {
            assert_eq!(Tensors::read(&out).0.len(), 8);
        }
    }
}

const NUMERICS: [&str; 10] =
    ["numerics", "--shape", "70,8,16", "20,4,4", "--mode", "bf16", "fp32", "--regime", "mild-decay", "correlated"];

#[test]
fn numerics_prints_a_table_per_kernel_and_regime() {
    let output = lab(NUMERICS);
    assert_code(&output, 0);
    let stdout = text(&output.stdout);
    assert_eq!(stdout.matches("largest, in u").count(), 4, "{stdout}");
    assert_eq!(stdout.matches("    70    8   16").count(), 4, "{stdout}");
    assert!(stdout.starts_with("cpu-chunk-bf16, max_rel of gdn with H = 2, inputs mild-decay from seed 1\n"));
    assert!(text(&output.stderr).contains("[8/8] cpu-chunk-fp32"), "{}", text(&output.stderr));
}

#[test]
fn numerics_gives_records_of_every_tensor_as_json_lines() {
    let output = lab(NUMERICS.into_iter().chain(["--json", "--op", "gdn2", "--heads", "3"]));
    assert_code(&output, 0);
    let records: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // Two shapes, modes and regimes; o, final_state, dq, dk, dv, dg, db, dw and dh0.
    assert_eq!(records.len(), 2 * 2 * 2 * 9);
    for record in &records {
        assert_eq!((record["op"].as_str(), record["HV"].as_u64()), (Some("gdn2"), Some(3)));
        let limit = if record["mode"] == "bf16" { 0.1 } else { 1e-4 };
        assert!(record["max_rel"].as_f64().unwrap() < limit, "{record}");
    }
    assert_eq!(lab(NUMERICS).stdout, lab(NUMERICS).stdout);
}

#[test]
fn numerics_refuses_what_it_cannot_run() {
    assert_refused(&lab(["numerics", "--shape", "10,300,4"]), &["K = 300: expected 1 to 256"]);
    assert_refused(&lab(["numerics", "--mode", "fp8"]), &["unknown mode 'fp8': expected one of fp64"]);
    assert_refused(&lab(["numerics", "--kernel", "mine"]), &["unknown kernel 'mine'", "MODULE:FUNCTION"]);
    assert_refused(&lab(["numerics", "--chunk", "48"]), &["expected one of 16, 32, 64, 128"]);
    assert_code(&lab(["numerics", "--shape", "10,4"]), 2);
    assert_code(&lab(["numerics", "--regime", "easy"]), 2);
}

#[test]
fn a_chunk_size_that_nothing_would_use_is_refused() {
    let kernel = ["numerics", "--shape", "16,4,4", "--kernel", "cpu-chunk-bf16", "--chunk", "16"];
    assert_refused(&lab(kernel), &["--chunk", "--mode", "--kernel"]);
    assert_code(&lab(kernel.into_iter().chain(["--mode", "bf16"])), 0);
}

#[test]
fn the_largest_error_is_infinite_where_one_is() {
    let output = lab(["numerics", "--shape", "1,1,1", "--mode", "tf32"]);
    assert_code(&output, 0);
    let row = |head: &str| text(&output.stdout).lines().find(|line| line.starts_with(head)).unwrap().to_owned();
    let infinite = |line: String| line.matches("infinite").count();
    assert_eq!((infinite(row("largest  ")), infinite(row("largest, in u"))), (1, 1), "{}", text(&output.stdout));
}

#[test]
fn a_gradient_of_the_final_state_alone_is_said_to_be_unused() {
    let folder = TempDir::new().unwrap();
    let zeros = |shape: &[usize]| vec![0; 4 * shape.iter().product::<usize>()];
    let mut tensors = case("gdn").without(&["do", "dht"]);
    let (q, v) = (tensors.0["q"].shape.clone(), tensors.0["v"].shape.clone());
    let state = [v[0], v[2], q[3], v[3]];
    tensors = tensors.with_raw("dht", Dtype::F32, &state, zeros(&state));
    let output = lab(path_arguments(
        "reference",
        &[&tensors.write(&folder, "case"), Path::new("-o"), &folder.path().join("out")],
    ));
    assert_code(&output, 0);
    assert!(text(&output.stderr).contains("no gradients, and 'dht' is not used"), "{}", text(&output.stderr));
}

#[test]
fn what_the_memory_does_not_hold_is_refused_before_the_work() {
    let numerics = |arguments: &[&str]| lab(["numerics"].iter().chain(arguments));
    assert_refused(&numerics(&["--shape", "1000000000,128,128"]), &["T=1000000000", "needs about", "GB"]);
    assert_refused(&numerics(&["--heads", "4294967296"]), &["HV=4294967296", "needs about", "GB"]);
    let folder = TempDir::new().unwrap();
    let mut tensors = Tensors(BTreeMap::new());
    for (name, shape) in [("q", &[1, 0, 4, 256][..]), ("k", &[1, 0, 4, 256]), ("v", &[1, 0, 4, 256])] {
        tensors = tensors.with_raw(name, Dtype::F32, shape, Vec::new());
    }
    tensors = tensors.with_raw("g", Dtype::F32, &[1, 0, 4], Vec::new());
    tensors = tensors.with_raw("beta", Dtype::F32, &[1, 0, 4], Vec::new());
    tensors = tensors.with_raw("do", Dtype::F32, &[1, 0, 4, 256], Vec::new());
    tensors = tensors.with_raw("cu_seqlens", Dtype::I32, &[1_000_001], vec![0; 4 * 1_000_001]);
    let (case, out) = (tensors.write(&folder, "many-sequences"), folder.path().join("out"));
    assert_refused(
        &lab(path_arguments("reference", &[&case, Path::new("-o"), &out])),
        &["many-sequences", "needs about"],
    );
}

#[test]
fn a_truth_that_overflows_is_refused_and_not_written() {
    let folder = TempDir::new().unwrap();
    let huge = case("gdn").with("v", |values| values.fill(1e308)).with("q", |_| ()).with("k", |_| ());
    let (huge, out) = (huge.with("q", |q| q.fill(1e10)).write(&folder, "huge"), folder.path().join("out"));
    let output = lab(path_arguments("reference", &[&huge, Path::new("-o"), &out]));
    assert_refused(&output, &["huge"]);
    assert!(!out.exists());
}

#[cfg(target_os = "linux")]
#[test]
fn half_written_files_of_killed_processes_are_removed() {
    let folder = TempDir::new().unwrap();
    let mut ended = Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    let partial = |id: u32, name: &str| {
        let path = folder.path().join(format!(".{name}.{id}.partial"));
        std::fs::write(&path, "half").unwrap();
        path
    };
    let (gone, other) = (partial(ended.id(), "out"), partial(ended.id(), "other"));
    let running = partial(std::process::id(), "out");
    let out = folder.path().join("out");
    assert_code(&lab(path_arguments("reference", &[&fixture("gdn", "case"), Path::new("-o"), &out])), 0);
    assert_eq!([&gone, &other, &running, &out].map(|path| path.exists()), [false, true, true, true]);
}

#[test]
fn bench_says_that_there_is_no_gpu() {
    let bench = Command::new(env!("CARGO_BIN_EXE_lab"))
        .args(["bench", "gdn", "--shape", "1x64:1,1", "--samples", "1"])
        .env("CUDA_VISIBLE_DEVICES", "")
        .output()
        .unwrap();
    assert_refused(&bench, &["GPU: ", "NVIDIA driver", "cpu-chunk-*"]);
}

/// The CPU is measured everywhere, so that the command works without a GPU.
#[test]
fn the_roofline_of_the_cpu_is_four_records() {
    let output = lab(["bench", "roofline", "--cpu", "--size", "96", "--samples", "1", "--json", "--again"]);
    assert_code(&output, 0);
    let records = gdnlab::record::parse(text(&output.stdout), Path::new("standard output")).unwrap();
    let quantities = records.iter().map(|record| match &record.measurement {
        gdnlab::record::Measurement::Roofline(rate) => (rate.quantity.as_str(), rate.unit.as_str(), rate.value > 0.0),
        other => panic!("expected a roofline, got {other:?}"),
    });
    let expected = [
        ("copy_bandwidth", "GB/s", true),
        ("fp32_matmul", "TFLOP/s", true),
        ("fp64_matmul", "TFLOP/s", true),
        ("ridge_point", "FLOP/byte", true),
    ];
    assert_eq!(quantities.collect::<Vec<_>>(), expected);
    assert!(records.iter().all(|record| record.environment.machine.gpu.is_none()));
    assert!(text(&output.stderr).contains("[2/4] fp32_matmul 96x96x96"), "{}", text(&output.stderr));
}

#[test]
fn the_roofline_of_no_matrix_is_refused() {
    assert_refused(&lab(["bench", "roofline", "--cpu", "--size", "0"]), &["--size 0: expected 1 to"]);
    assert_refused(&lab(["bench", "roofline", "--cpu", "--size", "2000000"]), &["--size 2000000: expected 1 to"]);
    assert_refused(&lab(["bench", "roofline", "--cpu", "--samples", "0"]), &["0 samples"]);
}

#[test]
fn bench_refuses_what_it_cannot_time_before_it_asks_for_a_gpu() {
    let bench = |arguments: &[&str]| lab(["bench", "gdn"].iter().chain(arguments));
    assert_refused(&bench(&["--kernel", "reference"]), &["no kernel 'reference' to time", "cuda-chunk-bf16"]);
    assert_refused(&bench(&["--shape", "1x100:2,2,50,70"]), &["cuda-chunk-bf16", "K = 50: expected one of 32, 64"]);
    assert_refused(&bench(&["--pass", "bwd", "--filter", "zzz"]), &["--filter 'zzz' and --pass bwd"]);
    assert_refused(&bench(&["--shape", "1x64:2,3"]), &["HV = 3 is not a multiple of HK = 2"]);
    assert_refused(&bench(&["--filter", "7/7"]), &["none of the 18 cases", "fwd 2/8 128/128 1x32768 (397B/122B TP8)"]);
    assert_refused(&bench(&["--samples", "0"]), &["0 samples"]);
    for (arguments, expected) in [
        (["--suite", "all"], "sample, h200, day2"),
        (["--shape", "1x64"], "SEQLENS:HK,HV"),
        (["--shape", "64y:1,1"], "28672+4096"),
        (["--pass", "decode"], "fwd, bwd"),
    ] {
        let output = bench(&arguments);
        assert_code(&output, 2);
        assert!(text(&output.stderr).contains(expected), "{}", text(&output.stderr));
    }
}

#[test]
fn backends_are_compared_and_one_that_fails_is_named() {
    let small = ["--tokens", "70", "--heads", "2", "--qk-heads", "1", "--dims", "16,8"];
    let output = lab(["backends", "cpu-chunk-bf16", "reference", "--json"].into_iter().chain(small));
    assert_code(&output, 0);
    let records: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(records.len(), 2);
    assert_eq!((&records[1]["tensor"], &records[1]["against"]), (&"final_state".into(), &"reference".into()));
    assert_eq!(records[0]["against_nearer"], 1.0, "the other is the truth");

    let output = lab(["backends", "cpu-chunk-bf16", "no_such_module:gdn", "reference"].into_iter().chain(small));
    assert_code(&output, 1);
    assert!(text(&output.stdout).starts_with("cpu-chunk-bf16 = A, reference = B"), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("failed: no_such_module:gdn on"), "{}", text(&output.stderr));
    assert_refused(&lab(["backends", "theirs.safetensors", "reference"]), &["name its inputs with --case"]);
    let output = lab(["backends", "reference"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_peer_is_verified_without_files() {
    let peers = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers");
    let verify = |function: &str, more: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_lab"))
            .args(["verify", "--peer", &format!("loop:{function}")])
            .arg(fixture("gdn", "case"))
            .args(more)
            .env("PYTHONPATH", &peers)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("GDNLAB_PEER_ARRAYS", "plain")
            .output()
            .unwrap()
    };
    let output = verify("gdn", &[]);
    assert_code(&output, 0);
    assert!(text(&output.stdout).contains("within tolerance fp32"), "{}", text(&output.stdout));
    let output = verify("raises", &[]);
    assert_code(&output, 1);
    assert!(text(&output.stdout).contains("FAILED: loop:raises cannot run this: it raised ValueError: no luck"));
    let output = verify("raises", &["--json"]);
    assert_code(&output, 1);
    let object: serde_json::Value = serde_json::from_str(text(&output.stdout)).unwrap();
    assert_eq!(object["pass"], false);
    assert!(object["error"].as_str().unwrap().contains("no luck"), "{object}");
    assert_refused(&lab(["verify", "--peer", "torch"]), &["MODULE:FUNCTION"]);
}

const PRECISION: [&str; 8] = ["precision", "--heads", "1", "--dim", "16", "--tokens", "20", "--again"];

#[test]
fn precision_prints_a_table_for_each_part() {
    let output = lab(PRECISION.into_iter().chain(["steps", "forward", "--seed", "1", "2"]));
    assert_code(&output, 0);
    let stdout = text(&output.stdout);
    assert_eq!(stdout.matches("one step rounded, relative RMS error of o in %, T = 20, H = 1, seed").count(), 2);
    assert_eq!(stdout.matches("282 forward policies, error of o at most 0.8 %").count(), 2, "{stdout}");
    assert!(stdout.contains("all intermediates, bf16 output") && stdout.contains("cheapest with fp16"), "{stdout}");
    assert!(text(&output.stderr).starts_with("[1/49] fp64 chunk algebra: none"), "{}", text(&output.stderr));
}

#[test]
fn precision_gives_records_as_json_lines() {
    let output = lab(PRECISION.into_iter().chain(["steps", "diagnosis", "--json"]));
    assert_code(&output, 0);
    let records = gdnlab::record::parse(text(&output.stdout), Path::new("standard output")).unwrap();
    assert_eq!(records.len(), 49 * 9 + 5);
    assert!(records.iter().all(|record| record.precision().is_some_and(|found| found.errors.nonfinite == 0)));
    assert!(records.iter().all(|record| record.workload.op.as_deref() == Some("gdn2")));
}

#[test]
fn precision_refuses_what_it_cannot_run() {
    assert_refused(&lab(["precision", "--heads", "0"]), &["HV = 0"]);
    assert_refused(&lab(["precision", "--dim", "1000"]), &["K = 1000: expected 1 to 256"]);
    assert_refused(&lab(["precision", "steps", "--tokens", "65"]), &["65 tokens", "at most 64"]);
    assert_refused(&lab(["precision", "diagnosis", "--tokens", "1000000000"]), &["needs about", "GB"]);
    assert_code(&lab(["precision", "search"]), 2);
}

#[test]
fn a_training_goes_on_from_its_checkpoint_and_from_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.safetensors");
    let train = |more: &[&str]| {
        let own =
            ["train", "--cpu", "--mixer", "gdn", "--steps", "3", "--batch", "1", "--length", "16", "--checkpoint"];
        lab(own.into_iter().chain([file.to_str().unwrap()]).chain(more.iter().copied()))
    };
    let output = train(&[]);
    assert_code(&output, 0);
    assert!(text(&output.stdout).starts_with("step 3 of 3: loss "), "{}", text(&output.stdout));
    let output = train(&[]);
    assert_code(&output, 0);
    assert_eq!(text(&output.stdout), "all 3 steps were taken before\n");
    assert_refused(&train(&["--seed", "2"]), &["other options: --seed is 1 there and 2 here;"]);
    std::fs::write(&file, b"no checkpoint").unwrap();
    assert_code(&train(&[]), 2);
    assert_code(&lab(["train", "--mixer", "gdn", "--size", "1T"]), 2);
}
