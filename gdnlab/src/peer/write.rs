//! Writing a tensor file so that it is there in full or not at all.

use super::file::complaint;
use crate::precision::Format;
use crate::problem::Tensor;
use crate::{Error, Result};
use half::{bf16, f16};
use safetensors::{Dtype, View};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Files that are being written at this moment.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Removes every half-written file of this process: for a handler that is about to end it.
pub fn remove_unfinished() {
    // A poisoned list is still a list of files to remove.
    let unfinished = UNFINISHED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for path in unfinished.iter() {
        // Nobody is left to tell if this fails.
        let _ = fs::remove_file(path);
    }
}

/// Where a file will be written, checked before the work that fills it.
#[derive(Clone, Debug)]
pub struct Destination {
    path: PathBuf,
}

impl Destination {
    /// Checks that `path` can be written and is none of `inputs`.
    ///
    /// # Errors
    /// [`Error::Input`] where the folder does not exist, `path` is a folder or something else that is no regular file,
    /// or one of `inputs`; [`Error::Io`] where the folder cannot be written to.
    pub fn new(path: impl AsRef<Path>, inputs: &[&Path]) -> Result<Self> {
        let path = path.as_ref();
        let Some(name) = path.file_name() else {
            return Err(complaint(path, "is not the name of a file: expected where to write one"));
        };
        let folder = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        if !folder.is_dir() {
            return Err(complaint(path, format!("its folder {} does not exist: create it first", folder.display())));
        }
        if fs::metadata(path).is_ok_and(|existing| !existing.is_file()) {
            return Err(complaint(path, "exists and is not a regular file: expected where to write one"));
        }
        let resolve = |path: &Path| fs::canonicalize(path).ok();
        let own = resolve(path).or_else(|| resolve(folder).map(|folder| folder.join(name)));
        if inputs.iter().any(|input| own.is_some() && resolve(input) == own) {
            return Err(complaint(path, "is also an input, which would be overwritten: choose another name"));
        }
        let destination = Self { path: path.to_path_buf() };
        drop(destination.partial()?);
        Ok(destination)
    }

    /// The path that was asked for.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes `tensors` and `metadata`, and puts the file in its place when it is complete and on disk.
    pub(super) fn write(&self, tensors: Vec<Stored>, metadata: &[(&str, &str)]) -> Result<()> {
        let metadata: HashMap<String, String> =
            metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let bytes = safetensors::serialize(tensors.iter().map(|tensor| (tensor.name, tensor)), Some(metadata))
            .map_err(|error| complaint(&self.path, format!("cannot be written: {error}")))?;
        self.partial()?.finish(&bytes)
    }

    fn partial(&self) -> Result<Partial<'_>> {
        let mut name = std::ffi::OsString::from(".");
        name.push(self.path.file_name().unwrap_or_default());
        name.push(format!(".{}.partial", std::process::id()));
        let partial = self.path.with_file_name(name);
        list(|unfinished| unfinished.push(partial.clone()));
        match OpenOptions::new().write(true).create(true).truncate(true).open(&partial) {
            Ok(file) => Ok(Partial { file, partial, target: &self.path }),
            Err(source) => {
                list(|unfinished| unfinished.retain(|path| *path != partial));
                Err(Error::io(&self.path, source))
            }
        }
    }
}

fn list(change: impl FnOnce(&mut Vec<PathBuf>)) {
    change(&mut UNFINISHED.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
}

/// A file beside the target that becomes the target, or vanishes when dropped.
struct Partial<'a> {
    file: File,
    partial: PathBuf,
    target: &'a Path,
}

impl Partial<'_> {
    fn finish(mut self, bytes: &[u8]) -> Result<()> {
        self.file
            .write_all(bytes)
            .and_then(|()| self.file.sync_all())
            .and_then(|()| fs::rename(&self.partial, self.target))
            .map_err(|source| Error::io(self.target, source))
    }
}

impl Drop for Partial<'_> {
    fn drop(&mut self) {
        // After a rename there is nothing left under this name.
        let _ = fs::remove_file(&self.partial);
        list(|unfinished| unfinished.retain(|path| *path != self.partial));
    }
}

/// A tensor as it goes into a file.
pub(super) struct Stored {
    name: &'static str,
    dtype: Dtype,
    dims: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    /// `tensor` in `format`; TF32 is stored as f32.
    pub(super) fn values(name: &'static str, tensor: &Tensor, format: Format) -> Self {
        let data = tensor.data.iter();
        let (dtype, bytes) = match format {
            Format::F64 => (Dtype::F64, data.flat_map(|x| x.to_le_bytes()).collect()),
            Format::F32 | Format::Tf32 | Format::Tf32Truncated => {
                (Dtype::F32, data.flat_map(|x| (format.round(*x) as f32).to_le_bytes()).collect())
            }
            Format::F16 => (Dtype::F16, data.flat_map(|x| f16::from_f64(format.round(*x)).to_le_bytes()).collect()),
            Format::Bf16 => (Dtype::BF16, data.flat_map(|x| bf16::from_f64(format.round(*x)).to_le_bytes()).collect()),
        };
        Self { name, dtype, dims: tensor.dims.clone(), bytes }
    }

    /// Token positions, as i64.
    pub(super) fn positions(name: &'static str, positions: &[usize]) -> Self {
        let bytes = positions.iter().flat_map(|&at| (at as i64).to_le_bytes()).collect();
        Self { name, dtype: Dtype::I64, dims: vec![positions.len()], bytes }
    }
}

impl View for &Stored {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.dims
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}
