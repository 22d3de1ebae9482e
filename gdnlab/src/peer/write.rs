//! Writing a tensor file so that it is there in full or not at all.

use super::file::complaint;
use crate::precision::Format;
use crate::problem::Tensor;
use crate::{Error, Result};
use half::{bf16, f16};
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensorError};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Ending of half-written files.
const SUFFIX: &str = ".partial";

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
        destination.remove_abandoned(folder);
        Ok(destination)
    }

    /// Removes half-written files for this name whose process was ended before it could.
    fn remove_abandoned(&self, folder: &Path) {
        // A folder that can be written to but not listed keeps them.
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if writer_of(&entry.file_name(), &self.path).is_some_and(has_ended) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// The path that was asked for.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes `tensors` and `metadata`, and puts the file in its place when it is complete and on disk.
    pub(crate) fn write(&self, mut tensors: Vec<Stored<'_>>, metadata: &[(&str, &str)]) -> Result<()> {
        let metadata: HashMap<String, String> =
            metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        // The widest first, so that each is aligned to its own elements.
        tensors.sort_by_key(|tensor| (Reverse(tensor.dtype()), tensor.name));
        let header =
            header(&tensors, metadata).map_err(|error| complaint(&self.path, format!("cannot be written: {error}")))?;
        self.partial()?.finish(&header, &tensors)
    }

    fn partial(&self) -> Result<Partial<'_>> {
        let mut name = prefix(&self.path);
        name.push(format!("{}{SUFFIX}", std::process::id()));
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

/// What stands before the process id in the name of a half-written `target`.
fn prefix(target: &Path) -> OsString {
    let mut prefix = OsString::from(".");
    prefix.push(target.file_name().unwrap_or_default());
    prefix.push(".");
    prefix
}

/// The process that writes `target` under the name `file`.
fn writer_of(file: &OsStr, target: &Path) -> Option<u32> {
    let id =
        file.as_encoded_bytes().strip_prefix(prefix(target).as_encoded_bytes())?.strip_suffix(SUFFIX.as_bytes())?;
    std::str::from_utf8(id).ok()?.parse().ok()
}

/// Whether the process `id` is known to be no more.
pub(super) fn has_ended(id: u32) -> bool {
    let processes = Path::new("/proc");
    processes.join("self").exists() && !processes.join(id.to_string()).exists()
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
    fn finish(self, header: &[u8], tensors: &[Stored<'_>]) -> Result<()> {
        self.fill(header, tensors)
            .and_then(|()| fs::rename(&self.partial, self.target))
            .map_err(|source| Error::io(self.target, source))
    }

    fn fill(&self, header: &[u8], tensors: &[Stored<'_>]) -> io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, &self.file);
        out.write_all(header)?;
        tensors.iter().try_for_each(|tensor| tensor.write_to(&mut out))?;
        out.flush()?;
        self.file.sync_all()
    }
}

impl Drop for Partial<'_> {
    fn drop(&mut self) {
        // After a rename there is nothing left under this name.
        let _ = fs::remove_file(&self.partial);
        list(|unfinished| unfinished.retain(|path| *path != self.partial));
    }
}

/// A tensor as it goes into a file, where it is encoded piece by piece.
pub(crate) struct Stored<'a> {
    name: &'a str,
    dims: Vec<usize>,
    content: Content<'a>,
}

/// Numbers that are already in the format of the file.
#[derive(Clone, Copy)]
pub(crate) enum Numbers<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

enum Content<'a> {
    Values(&'a [f64], Format),
    Numbers(Numbers<'a>),
    Positions(&'a [usize]),
}

impl<'a> Stored<'a> {
    /// `tensor` in `format`; TF32 is stored as f32.
    pub(crate) fn values(name: &'a str, tensor: &'a Tensor, format: Format) -> Self {
        Self { name, dims: tensor.dims.clone(), content: Content::Values(&tensor.data, format) }
    }

    /// Numbers of `dims` in the format in which they are.
    pub(crate) fn numbers(name: &'a str, dims: Vec<usize>, numbers: Numbers<'a>) -> Self {
        Self { name, dims, content: Content::Numbers(numbers) }
    }

    /// Token positions, as i64.
    pub(crate) fn positions(name: &'a str, positions: &'a [usize]) -> Self {
        Self { name, dims: vec![positions.len()], content: Content::Positions(positions) }
    }

    fn dtype(&self) -> Dtype {
        match self.content {
            Content::Values(_, Format::F64) => Dtype::F64,
            Content::Values(_, Format::F32 | Format::Tf32 | Format::Tf32Truncated) => Dtype::F32,
            Content::Values(_, Format::F16) => Dtype::F16,
            Content::Values(_, Format::Bf16) => Dtype::BF16,
            Content::Numbers(Numbers::F32(_)) => Dtype::F32,
            Content::Numbers(Numbers::F16(_)) => Dtype::F16,
            Content::Numbers(Numbers::Bf16(_)) => Dtype::BF16,
            Content::Positions(_) => Dtype::I64,
        }
    }

    fn size(&self) -> usize {
        self.dims.iter().product::<usize>() * self.dtype().bitsize() / 8
    }

    fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        match self.content {
            Content::Positions(positions) => encode(out, positions, |at| (at as i64).to_le_bytes()),
            Content::Numbers(Numbers::F32(data)) => encode(out, data, f32::to_le_bytes),
            Content::Numbers(Numbers::F16(data)) => encode(out, data, f16::to_le_bytes),
            Content::Numbers(Numbers::Bf16(data)) => encode(out, data, bf16::to_le_bytes),
            Content::Values(data, format) => match format {
                Format::F64 => encode(out, data, f64::to_le_bytes),
                Format::F32 | Format::Tf32 | Format::Tf32Truncated => {
                    encode(out, data, |x| (format.round(x) as f32).to_le_bytes())
                }
                Format::F16 => encode(out, data, |x| f16::from_f64(format.round(x)).to_le_bytes()),
                Format::Bf16 => encode(out, data, |x| bf16::from_f64(format.round(x)).to_le_bytes()),
            },
        }
    }
}

fn encode<V: Copy, const BYTES: usize>(
    out: &mut impl Write,
    values: &[V],
    word: impl Fn(V) -> [u8; BYTES],
) -> io::Result<()> {
    values.iter().try_for_each(|&value| out.write_all(&word(value)))
}

/// What stands before the tensors: the length of the description, and the description padded to 8 bytes.
fn header(tensors: &[Stored<'_>], metadata: HashMap<String, String>) -> Result<Vec<u8>, SafeTensorError> {
    let mut end = 0;
    let infos = tensors.iter().map(|tensor| {
        let start = end;
        end += tensor.size();
        (
            tensor.name.to_owned(),
            TensorInfo { dtype: tensor.dtype(), shape: tensor.dims.clone(), data_offsets: (start, end) },
        )
    });
    let infos = infos.collect();
    let mut description = serde_json::to_value(Metadata::new(Some(metadata), infos)?)?;
    // Entries of metadata come in any order, and equal tensors shall make equal files.
    description.sort_all_objects();
    let mut description = serde_json::to_vec(&description)?;
    description.resize(description.len().next_multiple_of(8), b' ');
    Ok([&(description.len() as u64).to_le_bytes()[..], &description].concat())
}
