//! Reading back what was written, and one clear line for each kind of bad file.

use super::*;
use crate::inputs::{Regime, generate};
use crate::precision::Format;
use crate::problem::{Inputs, Op, Shape, Tensor};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A case as raw tensors, to be damaged before it is written.
#[derive(Clone)]
struct Raw {
    tensors: HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
    metadata: Option<HashMap<String, String>>,
}

impl Raw {
    /// GDN with B = 1, T = 6, HK = 2, HV = 4, K = 3, V = 5, values 0.5 and g = -0.5.
    fn gdn() -> Self {
        let mut raw = Self { tensors: HashMap::new(), metadata: None };
        for (name, shape, value) in [
            ("q", vec![1, 6, 2, 3], 0.5),
            ("k", vec![1, 6, 2, 3], 0.5),
            ("v", vec![1, 6, 4, 5], 0.5),
            ("g", vec![1, 6, 4], -0.5),
            ("beta", vec![1, 6, 4], 0.5),
        ] {
            raw = raw.f32(name, &shape, value);
        }
        raw
    }

    fn f32(self, name: &str, shape: &[usize], value: f32) -> Self {
        let count = shape.iter().product();
        self.bytes(name, Dtype::F32, shape, std::iter::repeat_n(value.to_le_bytes(), count).flatten().collect())
    }

    fn i64(self, name: &str, values: &[i64]) -> Self {
        self.bytes(name, Dtype::I64, &[values.len()], values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    fn bytes(mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        self.tensors.insert(name.to_owned(), (dtype, shape.to_vec(), bytes));
        self
    }

    fn without(mut self, name: &str) -> Self {
        self.tensors.remove(name);
        self
    }

    fn op(mut self, op: &str) -> Self {
        self.metadata = Some(HashMap::from([("op".to_owned(), op.to_owned())]));
        self
    }

    fn encoded(&self) -> Vec<u8> {
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize(views, self.metadata.clone()).unwrap()
    }

    fn read(&self) -> crate::Result<Case> {
        read_encoded(&self.encoded())
    }
}

fn read_encoded(bytes: &[u8]) -> crate::Result<Case> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("case.safetensors");
    std::fs::write(&path, bytes).unwrap();
    read_case(&path)
}

/// Asserts that reading fails in one line that holds every one of `parts`.
fn refused(outcome: crate::Result<Case>, parts: &[&str]) {
    let message = outcome.expect_err(&format!("accepted, but expected a complaint with {parts:?}")).to_string();
    assert!(!message.contains('\n'), "{message}");
    for part in parts {
        assert!(message.contains(part), "'{part}' is missing in: {message}");
    }
}

fn destination(folder: &TempDir, name: &str) -> (Destination, PathBuf) {
    let path = folder.path().join(name);
    (Destination::new(&path, &[]).unwrap(), path)
}

#[test]
fn a_case_comes_back_as_it_was_written() {
    for (op, format) in Op::ALL
        .into_iter()
        .flat_map(|op| [Format::F64, Format::F32, Format::F16, Format::Bf16].map(|format| (op, format)))
    {
        let shape = Shape { batch: 1, tokens: 9, qk_heads: 1, value_heads: 2, key_dim: 3, value_dim: 4 };
        let inputs = generate(op, &shape, Regime::Gaussian, 3).unwrap().with_initial_state(4);
        let inputs = inputs.packed(&[0, 4, 4, 9], 5).unwrap().rounded_to(format);
        let folder = TempDir::new().unwrap();
        let (to, path) = destination(&folder, "case.safetensors");
        write_case(&to, &inputs).unwrap();
        let case = read_case(&path).unwrap();
        assert_eq!(case.inputs, inputs);
        assert_eq!(case.warnings, Vec::<String>::new());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "something was left beside the case");
    }
}

#[test]
fn equal_tensors_and_metadata_make_equal_files() {
    let tensor = Tensor::new(&[2, 3], (0..6).map(f64::from).collect()).unwrap();
    let keys: Vec<String> = (0..8).map(|n| format!("key {n}")).collect();
    let metadata: Vec<(&str, &str)> = keys.iter().map(|key| (key.as_str(), "value")).collect();
    let folder = TempDir::new().unwrap();
    let bytes = ["a", "b", "c"].map(|name| {
        let (to, path) = destination(&folder, name);
        let stored = ["x", "y"].map(|name| Stored::values(name, &tensor, Format::F32));
        to.write(stored.into(), &metadata).unwrap();
        std::fs::read(path).unwrap()
    });
    assert!(bytes[0] == bytes[1] && bytes[1] == bytes[2]);
    let (tensors, read) = file::parse(Path::new("a"), &bytes[0]).unwrap();
    assert_eq!((tensors.len(), read.len(), read["key 7"].as_str()), (2, 8, "value"));
}

#[test]
fn sixteen_bit_values_are_read_exactly() {
    for (dtype, format) in [(Dtype::F16, Format::F16), (Dtype::BF16, Format::Bf16)] {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        let bytes = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let encoded = Raw { tensors: HashMap::new(), metadata: None }.bytes("x", dtype, &[1 << 16], bytes).encoded();
        let path = Path::new("x.safetensors");
        let (tensors, _) = file::parse(path, &encoded).unwrap();
        let decoded = file::decode(path, "x", &tensors.tensor("x").unwrap()).unwrap();
        for (&bits, &value) in bits.iter().zip(&decoded.data) {
            let (sign, fraction_bits) = (if bits >> 15 == 1 { -1.0 } else { 1.0 }, format.fraction_bits());
            let exponent = i32::from(bits & 0x7fff) >> fraction_bits;
            let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1u32 << fraction_bits);
            let expected = match exponent {
                0 => sign * fraction * 2f64.powi(format.min_exponent()),
                e if e > format.max_exponent() - format.min_exponent() + 1 && fraction != 0.0 => f64::NAN,
                e if e > format.max_exponent() - format.min_exponent() + 1 => sign * f64::INFINITY,
                e => sign * (1.0 + fraction) * 2f64.powi(format.min_exponent() + e - 1),
            };
            assert!(value == expected || value.is_nan() && expected.is_nan(), "{format} {bits:#06x}: {value}");
        }
    }
}

#[test]
fn optional_tensors_have_their_defaults() {
    let case = Raw::gdn().read().unwrap();
    assert_eq!(case.inputs.scale, Inputs::default_scale(3));
    assert_eq!((case.inputs.dtype, case.inputs.op()), (Format::F32, Op::Gdn));
    assert!(case.inputs.initial_state.is_none() && case.inputs.d_o.is_none() && case.inputs.cu_seqlens.is_none());
    let scaled = Raw::gdn().f32("scale", &[1], 0.25).read().unwrap();
    assert_eq!(scaled.inputs.scale, 0.25);
    let packed = Raw::gdn().i64("cu_seqlens", &[0, 2, 2, 6]).read().unwrap();
    assert_eq!(packed.inputs.cu_seqlens, Some(vec![0, 2, 2, 6]));
    let i32s = [0i32, 6].iter().flat_map(|x| x.to_le_bytes()).collect();
    let narrow = Raw::gdn().bytes("cu_seqlens", Dtype::I32, &[2], i32s).read().unwrap();
    assert_eq!(narrow.inputs.cu_seqlens, Some(vec![0, 6]));
}

#[test]
fn no_tokens_are_a_case_too() {
    let raw = Raw::gdn().f32("q", &[1, 0, 2, 3], 0.0).f32("k", &[1, 0, 2, 3], 0.0).f32("v", &[1, 0, 4, 5], 0.0);
    let case = raw.f32("g", &[1, 0, 4], 0.0).f32("beta", &[1, 0, 4], 0.0).read().unwrap();
    assert_eq!(case.inputs.shape.tokens, 0);
}

#[test]
fn what_is_odd_but_computable_is_warned_about() {
    let case = Raw::gdn().f32("g", &[1, 6, 4], 0.5).f32("mask", &[2], 1.0).read().unwrap();
    assert_eq!(case.warnings.len(), 2, "{:?}", case.warnings);
    assert!(case.warnings[0].contains("'mask' is not used") && case.warnings[1].contains("24 positive values"));
    let swapped = Raw::gdn().f32("q", &[1, 2, 4, 3], 0.5).f32("k", &[1, 2, 4, 3], 0.5).f32("v", &[1, 2, 4, 5], 0.5);
    let case = swapped.f32("g", &[1, 2, 4], -0.5).f32("beta", &[1, 2, 4], 0.5).read().unwrap();
    assert!(case.warnings[0].contains("[B, T, H, D]"), "{:?}", case.warnings);
}

#[test]
fn missing_tensors_are_named() {
    for name in ["q", "k", "v", "g"] {
        refused(Raw::gdn().without(name).read(), &[&format!("tensor '{name}' is missing"), "beta"]);
    }
    refused(Raw::gdn().without("beta").read(), &["no 'beta' (GDN) and no 'b' and 'w' (GDN-2)", "holds g, k, q, v"]);
    let gdn2 = Raw::gdn().without("beta").f32("g", &[1, 6, 4, 3], -0.5).f32("b", &[1, 6, 4, 3], 0.5);
    refused(gdn2.read(), &["tensor 'w' is missing"]);
    refused(Raw { tensors: HashMap::new(), metadata: None }.read(), &["it holds no tensors"]);
}

#[test]
fn wrong_shapes_are_named_with_what_was_expected() {
    refused(
        Raw::gdn().f32("q", &[6, 2, 3], 0.5).read(),
        &["'q'", "expected 4 axes [B, T, HK, K]", "got shape [6, 2, 3]"],
    );
    refused(Raw::gdn().f32("v", &[6, 4, 5, 1, 1], 0.5).read(), &["'v'", "expected 4 axes [B, T, HV, V]"]);
    refused(
        Raw::gdn().f32("k", &[1, 6, 2, 4], 0.5).read(),
        &["'k'", "expected shape [1, 6, 2, 3]", "got [1, 6, 2, 4]"],
    );
    refused(Raw::gdn().f32("v", &[1, 7, 4, 5], 0.5).read(), &["'v'", "expected shape [1, 6, 4, 5]"]);
    refused(Raw::gdn().f32("v", &[1, 6, 3, 5], 0.5).read(), &["HV = 3 is not a multiple of HK = 2"]);
    refused(Raw::gdn().f32("g", &[1, 6, 2], -0.5).read(), &["'g'", "expected shape [1, 6, 4]", "got [1, 6, 2]"]);
    refused(Raw::gdn().f32("beta", &[1, 6, 4, 3], 0.5).read(), &["'beta'", "expected shape [1, 6, 4]"]);
    refused(Raw::gdn().f32("do", &[1, 6, 4, 3], 0.5).read(), &["'do'", "expected shape [1, 6, 4, 5]"]);
    refused(Raw::gdn().f32("initial_state", &[1, 4, 5, 3], 0.5).read(), &["'initial_state'", "[1, 4, 3, 5]"]);
    refused(Raw::gdn().f32("dht", &[2, 4, 3, 5], 0.5).read(), &["'dht'", "expected shape [1, 4, 3, 5]"]);
    refused(Raw::gdn().f32("scale", &[2], 0.5).read(), &["'scale' has 2 values: expected 1"]);
    refused(Raw::gdn().f32("q", &[1, 6, 2, 257], 0.5).read(), &["K = 257: expected 1 to 256"]);
    refused(Raw::gdn().f32("v", &[1, 6, 4, 0], 0.5).read(), &["V = 0: expected 1 to 256"]);
    refused(Raw::gdn().f32("q", &[0, 6, 2, 3], 0.5).read(), &["B = 0", "expected at least 1"]);
}

#[test]
fn wrong_dtypes_are_named_with_what_was_expected() {
    let integers = vec![0; 8 * 36];
    refused(Raw::gdn().bytes("q", Dtype::I64, &[1, 6, 2, 3], integers).read(), &["'q' has dtype I64", "bf16"]);
    refused(Raw::gdn().bytes("beta", Dtype::U8, &[1, 6, 4], vec![1; 24]).read(), &["'beta' has dtype U8"]);
    refused(
        Raw::gdn().bytes("k", Dtype::F16, &[1, 6, 2, 3], vec![0; 72]).read(),
        &["q is f32 and k is f16", "one dtype"],
    );
    refused(Raw::gdn().f32("cu_seqlens", &[2], 0.0).read(), &["'cu_seqlens' has dtype F32: expected i32 or i64"]);
}

#[test]
fn bad_cu_seqlens_are_refused() {
    for (entries, parts) in [
        (&[0, 4, 2, 6][..], ["not monotone", "entry 1 is 4"]),
        (&[0, 4], ["from 0 to 4", "expected 0 to T = 6"]),
        (&[1, 6], ["from 1 to 6", "expected 0 to T = 6"]),
        (&[0, -2, 6], ["entry 1 is -2", "expected token positions"]),
        (&[0], ["1 entries", "at least 2"]),
        (&[], ["0 entries", "at least 2"]),
    ] {
        refused(Raw::gdn().i64("cu_seqlens", entries).read(), &parts);
    }
    let square = vec![0; 32];
    refused(Raw::gdn().bytes("cu_seqlens", Dtype::I64, &[2, 2], square).read(), &["expected 1 axes [N + 1]"]);
    let rows = Raw::gdn().f32("q", &[2, 3, 2, 3], 0.5).f32("k", &[2, 3, 2, 3], 0.5).f32("v", &[2, 3, 4, 5], 0.5);
    let rows = rows.f32("g", &[2, 3, 4], -0.5).f32("beta", &[2, 3, 4], 0.5).i64("cu_seqlens", &[0, 3]);
    refused(rows.read(), &["expected B = 1, got 2"]);
}

#[test]
fn non_finite_inputs_and_contradictions_are_refused() {
    refused(Raw::gdn().f32("k", &[1, 6, 2, 3], f32::NAN).read(), &["'k'", "36 non-finite values", "[0, 0, 0, 0]"]);
    refused(Raw::gdn().f32("g", &[1, 6, 4], f32::NEG_INFINITY).read(), &["'g'", "-inf"]);
    refused(Raw::gdn().f32("scale", &[1], f32::NAN).read(), &["scale = NaN"]);
    refused(Raw::gdn().f32("w", &[1, 6, 4, 5], 0.5).read(), &["'beta' (GDN) beside 'b' or 'w' (GDN-2)"]);
    refused(Raw::gdn().op("gdn2").read(), &["metadata op is 'gdn2'", "those of gdn"]);
    refused(Raw::gdn().op("mamba").read(), &["metadata op: unknown operator 'mamba'"]);
    assert!(Raw::gdn().op("gdn").read().is_ok());
}

#[test]
fn files_that_are_no_safetensors_are_refused() {
    let good = Raw::gdn().encoded();
    refused(read_encoded(&[]), &["is empty"]);
    refused(read_encoded(&good[..5]), &["has 5 bytes"]);
    refused(read_encoded(&good[..40]), &["ends within its header"]);
    refused(read_encoded(&good[..good.len() - 1]), &["truncated"]);
    refused(read_encoded(&[&good[..], &[0]].concat()), &["not the size that its header announces"]);
    refused(read_encoded(&[&u64::MAX.to_le_bytes()[..], &[b'{'; 100]].concat()), &["header of more than 100 MB"]);
    refused(read_encoded(&[&4u64.to_le_bytes()[..], b"nope"].concat()), &["not that of a safetensors file"]);
    refused(read_encoded(b"PK\x03\x04 a zip archive, not tensors"), &["expected a safetensors file"]);
    let folder = TempDir::new().unwrap();
    refused(read_case(folder.path()), &["is a directory"]);
    refused(read_case(folder.path().join("none")), &["none", "No such file"]);
    refused(read_case("/dev/null"), &["not a regular file"]);
}

#[test]
fn results_may_be_partial_but_never_of_another_shape() {
    let inputs = Raw::gdn().read().unwrap().inputs;
    let read = |raw: Raw| {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("result.safetensors");
        std::fs::write(&path, raw.encoded()).unwrap();
        read_results(&path, &inputs)
    };
    let none = Raw { tensors: HashMap::new(), metadata: None };
    let partial = read(none.clone().f32("o", &[1, 6, 4, 5], f32::NAN).f32("ht", &[1], 0.0)).unwrap();
    assert_eq!(partial.named().len(), 1);
    assert_eq!(partial.missing, ["final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0"]);
    assert!(!partial.has_gradients() && partial.warnings[0].contains("'ht' is not compared"));
    let refused = |raw: Raw, parts: [&str; 2]| {
        let message = read(raw).unwrap_err().to_string();
        assert!(parts.iter().all(|part| message.contains(part)) && !message.contains('\n'), "{message}");
    };
    refused(none.clone().f32("o", &[1, 4, 6, 5], 0.0), ["'o': expected shape [1, 6, 4, 5]", "got [1, 4, 6, 5]"]);
    refused(none.clone().f32("out", &[1], 0.0), ["holds no result of gdn: expected some of o, final_state", "got out"]);
    refused(none.clone(), ["holds no result", "got no tensors"]);
    refused(none.f32("o", &[1, 6, 4, 5], 0.0).op("gdn2"), ["metadata op is 'gdn2'", "the case is gdn"]);
}

#[test]
fn destinations_are_checked_before_the_work() {
    let folder = TempDir::new().unwrap();
    let case = folder.path().join("case");
    std::fs::write(&case, "x").unwrap();
    let message = |path: &Path| Destination::new(path, &[&case]).unwrap_err().to_string();
    assert!(message(&folder.path().join("no/such/out")).contains("does not exist: create it first"));
    assert!(message(folder.path()).contains("not a regular file"));
    assert!(message(&case).contains("is also an input"));
    assert!(message(&folder.path().join("./case")).contains("is also an input"));
    std::os::unix::fs::symlink(&case, folder.path().join("link")).unwrap();
    assert!(message(&folder.path().join("link")).contains("is also an input"));
    assert!(message(Path::new("/")).contains("not the name of a file"));
    assert!(Destination::new(folder.path().join("out"), &[&case]).is_ok());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "the check left something behind");
}
