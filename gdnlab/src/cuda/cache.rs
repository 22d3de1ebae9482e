//! Compiled kernels on disk, so that each is compiled once per machine.
//!
//! An entry is one file: a line with the checksum of what follows, then the compiler's version, its log, and the CUBIN,
//! each behind its length. It is written beside its place and renamed, so that several processes may work on one cache:
//! a reader sees a whole entry or none. An entry that is damaged is made anew. Entries that were not used for longest go
//! when the cache outgrows its bound.

use super::build::Compiled;
use super::report::Report;
use crate::file::write_atomic;
use crate::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

/// First line of an entry; another number where the form of an entry changes.
const FORM: &str = "gdnlab compiled kernel 2";
/// Bytes that a cache holds at the most: some thousand kernels.
const BOUND_BYTES: u64 = 256 << 20;
/// An entry's time of last use is kept to this precision.
const USE_PRECISION: Duration = Duration::from_secs(3600);
/// A temporary file of this age belongs to a process that was killed.
const ABANDONED: Duration = Duration::from_secs(3600);

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
    bound_bytes: u64,
}

/// The name of an entry: a hash over all that the machine code depends on.
pub(super) struct Key {
    kernel: String,
    hash: blake3::Hasher,
}

impl Key {
    /// A key for the kernel file `name`, which also begins the entry's file name.
    pub fn new(name: &str) -> Self {
        let mut key = Self { kernel: name.trim_end_matches(".cu").to_owned(), hash: blake3::Hasher::new() };
        key.add(FORM);
        key.add(name);
        key
    }

    /// Adds one text. Its length goes first: two lists of texts with the same concatenation are different keys.
    pub fn add(&mut self, text: &str) {
        self.hash.update(&(text.len() as u64).to_le_bytes());
        self.hash.update(text.as_bytes());
    }

    /// The name of the entry.
    pub fn file_name(&self) -> String {
        let hash = self.hash.finalize().to_hex();
        format!("{}-{}.cubin", self.kernel, &hash[..32])
    }
}

impl Cache {
    /// `GDNLAB_CACHE`, or else `gdnlab/kernels` in `XDG_CACHE_HOME`, or else in `~/.cache`.
    pub fn of_user() -> Self {
        let set = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| !path.as_os_str().is_empty());
        let folder = set("GDNLAB_CACHE").unwrap_or_else(|| {
            let xdg = set("XDG_CACHE_HOME").filter(|path| path.is_absolute());
            let home = || std::env::home_dir().map(|home| home.join(".cache"));
            xdg.or_else(home).unwrap_or_else(std::env::temp_dir).join("gdnlab/kernels")
        });
        Self::at(folder)
    }

    /// The cache in `folder`, which need not exist.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), bound_bytes: BOUND_BYTES }
    }

    /// The same with another bound on what it holds, in bytes.
    pub fn with_bound(self, bound_bytes: u64) -> Self {
        Self { bound_bytes, ..self }
    }

    /// Where it lies.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The entry of `key`, if there is one and it is whole.
    pub(super) fn read(&self, key: &Key) -> Option<Compiled> {
        let path = self.folder.join(key.file_name());
        let compiled = decode(&std::fs::read(&path).ok()?)?;
        note_use(&path);
        Some(compiled)
    }

    /// Keeps `compiled`. A cache that cannot be written costs time at the next start and nothing else, so it is said once
    /// on standard error and is no error.
    pub(super) fn write(&self, key: &Key, compiled: &Compiled) {
        static SAID: AtomicBool = AtomicBool::new(false);
        let path = self.folder.join(key.file_name());
        let written = write_atomic(&path, &encode(compiled)).and_then(|()| self.shrink(&path));
        if let Err(error) = written
            && !SAID.swap(true, Ordering::Relaxed)
        {
            eprintln!("compiled kernels are not kept ({error}): set GDNLAB_CACHE to a folder that can be written");
        }
    }

    /// Removes what was not used for longest until the rest fits, but not `newest`.
    fn shrink(&self, newest: &Path) -> Result<()> {
        let io = |source| Error::io(&self.folder, source);
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(&self.folder).map_err(io)?.flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            let path = entry.path();
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("cubin") if is_entry(&path) => entries.push((used, metadata.len(), path)),
                Some("partial") if used.elapsed().is_ok_and(|age| age > ABANDONED) => remove(&path)?,
                _ => {}
            }
        }
        entries.sort();
        let mut total: u64 = entries.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in entries.iter().filter(|(_, _, path)| path != newest) {
            if total <= self.bound_bytes {
                break;
            }
            remove(path)?;
            total -= bytes;
        }
        Ok(())
    }
}

/// Whether a file has a name as [`Key::file_name`] gives it: what else lies in the folder is not ours to remove.
fn is_entry(path: &Path) -> bool {
    let hash = path.file_stem().and_then(|stem| stem.to_str()?.rsplit_once('-').map(|(_, hash)| hash.as_bytes()));
    hash.is_some_and(|hash| hash.len() == 32 && hash.iter().all(u8::is_ascii_hexdigit))
}

/// Removes a file that another process may have removed first.
fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path, error)),
        _ => Ok(()),
    }
}

/// Sets the time of last use, at most once an hour; where that is refused the entry only looks older than it is.
fn note_use(path: &Path) {
    let Ok(file) = std::fs::File::open(path) else { return };
    let used = file.metadata().and_then(|metadata| metadata.modified());
    if used.is_ok_and(|used| used.elapsed().is_ok_and(|age| age > USE_PRECISION)) {
        let _ = file.set_modified(SystemTime::now());
    }
}

fn encode(compiled: &Compiled) -> Vec<u8> {
    let mut body = Vec::new();
    for part in [compiled.compiler.as_bytes(), compiled.log.as_bytes(), &compiled.cubin] {
        body.extend((part.len() as u64).to_le_bytes());
        body.extend(part);
    }
    let mut entry = format!("{FORM} {}\n", blake3::hash(&body).to_hex()).into_bytes();
    entry.append(&mut body);
    entry
}

fn decode(entry: &[u8]) -> Option<Compiled> {
    let end_of_line = entry.iter().position(|&byte| byte == b'\n')?;
    let checksum = std::str::from_utf8(&entry[..end_of_line]).ok()?.strip_prefix(FORM)?.trim();
    let mut body = &entry[end_of_line + 1..];
    if blake3::hash(body).to_hex().as_str() != checksum {
        return None;
    }
    let mut part = || {
        let (length, rest) = body.split_first_chunk::<8>()?;
        let (part, rest) = rest.split_at_checked(u64::from_le_bytes(*length) as usize)?;
        body = rest;
        Some(part)
    };
    let text = |bytes: &[u8]| Some(std::str::from_utf8(bytes).ok()?.to_owned());
    let (compiler, log, cubin) = (text(part()?)?, text(part()?)?, part()?.to_vec());
    let report = Report::read(&log, &cubin);
    Some(Compiled { cubin, log, report, compiler })
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
