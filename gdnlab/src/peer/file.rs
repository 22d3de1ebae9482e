//! Opening a safetensors file and decoding its tensors.

use crate::memory;
use crate::precision::Format;
use crate::problem::Tensor;
use crate::{Error, Result};
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::Path;

/// What the messages ask for where the file is something else.
const EXPECTED: &str = "expected a safetensors file";

/// The bytes of the regular file at `path`.
pub(crate) fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let kind = match std::fs::metadata(path) {
        Err(missing) if missing.kind() == ErrorKind::NotFound => {
            return Err(complaint(path, format!("{missing}: {EXPECTED}")));
        }
        other => other.map_err(|source| Error::io(path, source))?,
    };
    if kind.is_dir() {
        return Err(complaint(path, format!("is a directory: {EXPECTED}")));
    }
    if !kind.is_file() {
        return Err(complaint(path, format!("is not a regular file: {EXPECTED}")));
    }
    memory::require(kind.len().into()).map_err(|error| complaint(path, error))?;
    let bytes = std::fs::read(path).map_err(|source| Error::io(path, source))?;
    if bytes.is_empty() {
        return Err(complaint(path, format!("is empty: {EXPECTED}")));
    }
    Ok(bytes)
}

/// The tensors in `bytes`, and the metadata.
pub(crate) fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<(SafeTensors<'a>, HashMap<String, String>)> {
    let header = SafeTensors::read_metadata(bytes).map_err(|error| describe(path, bytes.len(), &error))?.1;
    let tensors = SafeTensors::deserialize(bytes).map_err(|error| describe(path, bytes.len(), &error))?;
    Ok((tensors, header.metadata().clone().unwrap_or_default()))
}

/// An error about the file at `path`.
pub(crate) fn complaint(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::input(format!("{}: {what}", path.display()))
}

fn describe(path: &Path, size: usize, error: &SafeTensorError) -> Error {
    use SafeTensorError as E;
    let what = match error {
        E::HeaderTooSmall => format!("has {size} bytes, too few for a header: {EXPECTED}"),
        E::HeaderTooLarge => format!("announces a header of more than 100 MB: {EXPECTED}, is this one?"),
        E::InvalidHeaderLength => {
            format!("ends within its header ({size} bytes): {EXPECTED}; is it truncated, or another format?")
        }
        E::MetadataIncompleteBuffer => {
            format!("its {size} bytes are not the size that its header announces: truncated, or still being written?")
        }
        E::InvalidHeader(_) | E::InvalidHeaderDeserialization(_) | E::JsonError(_) => {
            format!("its header is not that of a safetensors file ({error})")
        }
        other => format!("damaged safetensors header: {other}"),
    };
    complaint(path, what.replace('\n', " "))
}

/// The number format of a tensor's values.
pub(super) fn format_of(path: &Path, name: &str, dtype: Dtype) -> Result<Format> {
    match dtype {
        Dtype::F64 => Ok(Format::F64),
        Dtype::F32 => Ok(Format::F32),
        Dtype::F16 => Ok(Format::F16),
        Dtype::BF16 => Ok(Format::Bf16),
        other => Err(complaint(path, format!("tensor '{name}' has dtype {other:?}: expected f64, f32, f16 or bf16"))),
    }
}

/// The values of `view`, each exactly.
pub(crate) fn decode(path: &Path, name: &str, view: &TensorView<'_>) -> Result<Tensor> {
    let bytes = view.data();
    let data = match format_of(path, name, view.dtype())? {
        Format::F64 => values(bytes, f64::from_le_bytes),
        Format::F32 | Format::Tf32 | Format::Tf32Truncated => values(bytes, |word| f64::from(f32::from_le_bytes(word))),
        Format::F16 => values(bytes, |word| f16::from_le_bytes(word).to_f64()),
        Format::Bf16 => values(bytes, |word| bf16::from_le_bytes(word).to_f64()),
    };
    Tensor::new(view.shape(), data)
}

/// The values of a tensor of integers.
pub(super) fn decode_integers(path: &Path, name: &str, view: &TensorView<'_>) -> Result<Vec<i64>> {
    match view.dtype() {
        Dtype::I64 => Ok(values(view.data(), i64::from_le_bytes)),
        Dtype::I32 => Ok(values(view.data(), |word| i64::from(i32::from_le_bytes(word)))),
        other => Err(complaint(path, format!("tensor '{name}' has dtype {other:?}: expected i32 or i64"))),
    }
}

pub(crate) fn values<const BYTES: usize, V>(bytes: &[u8], decode: impl Fn([u8; BYTES]) -> V) -> Vec<V> {
    let (words, _) = bytes.as_chunks::<BYTES>();
    words.iter().map(|word| decode(*word)).collect()
}

/// The extents of the axes called `axes`, such as `["B", "T", "HK", "K"]`.
pub(super) fn dims<const RANK: usize>(
    path: &Path,
    name: &str,
    shape: &[usize],
    axes: [&str; RANK],
) -> Result<[usize; RANK]> {
    shape.try_into().map_err(|_| {
        complaint(path, format!("tensor '{name}': expected {RANK} axes [{}], got shape {shape:?}", axes.join(", ")))
    })
}
