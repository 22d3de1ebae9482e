//! Text to train on, as bytes: each byte is a token, so the vocabulary is 256 and nothing has to be learnt beforehand.
//!
//! The last tenth of every file is for validation and never trained on. Batches are drawn from the seed and the number of
//! the step alone, so that a training that is resumed sees what it would have seen.

use crate::inputs::Draw;
use crate::{Error, Result};
use rand::RngExt;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Different tokens of a text.
pub const VOCABULARY: usize = 256;

/// One byte in so many is for validation.
const VALIDATION_SHARE: usize = 10;

/// What a text of the system must have at least; less is learnt by heart at once.
const SMALLEST_BYTES: usize = 100_000;

/// What a file may have at most: a pipe may have no end.
const MOST_BYTES: u64 = 4 << 30;

/// A text in two parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    name: String,
    train: Vec<u8>,
    validation: Vec<u8>,
}

impl Text {
    /// The text of `documents`, called `name`.
    pub fn new<'a>(name: &str, documents: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut text = Self { name: name.to_owned(), train: Vec::new(), validation: Vec::new() };
        for document in documents {
            let (train, validation) = document.split_at(document.len() - document.len() / VALIDATION_SHARE);
            text.train.extend_from_slice(train);
            text.validation.extend_from_slice(validation);
        }
        text
    }

    /// The file at `path`, or all files in the folder at `path`, in the order of their names, that are text.
    ///
    /// # Errors
    /// [`Error::Io`] where it cannot be read, [`Error::Input`] where it holds no text.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let kind = std::fs::metadata(path).map_err(|error| Error::io(path, error))?.file_type();
        if kind.is_dir() {
            Self::from_folder(path, |_| true)
        } else if kind.is_file() || kind.is_fifo() {
            Self::from_files(path, &[path.to_path_buf()])
        } else {
            Err(Error::input(format!("{}: expected a file, a pipe or a folder of files", path.display())))
        }
    }

    /// A text that ships with the system: Python's library, or else the licences that Debian installs.
    ///
    /// # Errors
    /// [`Error::Input`] where there is neither.
    pub fn of_system() -> Result<Self> {
        let is_python = |path: &Path| path.extension() == Some(OsStr::new("py"));
        let python = python_libraries().into_iter().map(|folder| Self::from_folder(&folder, is_python));
        let licences = std::iter::once_with(|| Self::from_path(LICENCES));
        // A folder that cannot be read, or holds no text, is not the one that is looked for.
        python.chain(licences).flatten().find(|text| text.bytes() >= SMALLEST_BYTES).ok_or_else(|| {
            Error::input(format!(
                "no text of this system was found: expected *.py in the library of the python3 in PATH, or licences in {LICENCES}; name a file or folder of your own with Text::from_path"
            ))
        })
    }

    fn from_folder(folder: &Path, wanted: impl Fn(&Path) -> bool) -> Result<Self> {
        let io = |error| Error::io(folder, error);
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(io)? {
            let entry = entry.map_err(io)?;
            // Links are other names of files that count once.
            if entry.file_type().map_err(io)?.is_file() && wanted(&entry.path()) {
                files.push(entry.path());
            }
        }
        files.sort();
        Self::from_files(folder, &files)
    }

    fn from_files(path: &Path, files: &[PathBuf]) -> Result<Self> {
        let documents: Vec<Vec<u8>> = files.iter().map(|file| read(file, MOST_BYTES)).collect::<Result<_>>()?;
        let text = Self::new(
            &path.display().to_string(),
            documents.iter().map(Vec::as_slice).filter(|document| is_text(document)),
        );
        if text.validation.is_empty() {
            return Err(Error::input(format!("{}: expected text in UTF-8, at least 10 bytes", path.display())));
        }
        Ok(text)
    }

    /// Where it comes from.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of both parts.
    pub fn bytes(&self) -> usize {
        self.train.len() + self.validation.len()
    }

    /// What is trained on.
    pub fn train(&self) -> &[u8] {
        &self.train
    }

    /// What is not.
    pub fn validation(&self) -> &[u8] {
        &self.validation
    }

    /// Nats per byte of the part for validation for one who knows how often each byte comes in the rest, counted from 1, and
    /// nothing more: what a model has to beat that looks at what came before.
    pub fn loss_without_context(&self) -> f64 {
        let mut counts = [1u64; VOCABULARY];
        self.train.iter().for_each(|&byte| counts[usize::from(byte)] += 1);
        let total = counts.iter().sum::<u64>() as f64;
        let losses = self.validation.iter().map(|&byte| -(counts[usize::from(byte)] as f64 / total).ln());
        losses.sum::<f64>() / self.validation.len() as f64
    }

    /// A hash of both parts: it tells two texts apart, whatever their names.
    pub fn fingerprint(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(self.train.len() as u64).to_le_bytes()).update(&self.train).update(&self.validation);
        hasher.finalize().to_hex()[..32].to_owned()
    }

    /// The batch of step `step`: `rows` windows of `length + 1` tokens, each of which begins anywhere.
    ///
    /// # Errors
    /// [`Error::Input`] where the text is shorter than a window.
    pub fn batch(&self, seed: u64, step: u64, rows: usize, length: usize) -> Result<Vec<u32>> {
        let last = last_start("training", &self.train, length)?;
        let mut rng = Draw::new(seed).stream(&format!("batch.{step}"));
        let starts = (0..rows).map(|_| rng.random_range(0..=last));
        Ok(starts.flat_map(|start| window(&self.train, start, length)).collect())
    }

    /// `rows` windows of `length + 1` tokens, spread evenly over the part for validation: the same each time.
    ///
    /// # Errors
    /// [`Error::Input`] where that part is shorter than a window.
    pub fn validation_batch(&self, rows: usize, length: usize) -> Result<Vec<u32>> {
        let last = last_start("validation", &self.validation, length)?;
        let starts = (0..rows).map(|row| (last as u128 * row as u128 / rows.saturating_sub(1).max(1) as u128) as usize);
        Ok(starts.flat_map(|start| window(&self.validation, start, length)).collect())
    }
}

const LICENCES: &str = "/usr/share/common-licenses";

/// Where the modules of each Python 3 in PATH lie, the newest version of a folder first.
fn python_libraries() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join("python3")).filter(|python| python.exists());
    // A virtual environment links to the Python that has the modules.
    let with_target = found.flat_map(|python| [python.canonicalize().ok(), Some(python)]).flatten();
    with_target
        .filter_map(|python| Some(python.parent()?.parent()?.join("lib")))
        .flat_map(|lib| versions_in(&lib))
        .collect()
}

/// `python3.N` in `lib`, the largest N first.
fn versions_in(lib: &Path) -> Vec<PathBuf> {
    // A folder that is not there holds none.
    let entries = std::fs::read_dir(lib).into_iter().flatten().flatten();
    let mut versions: Vec<(u32, PathBuf)> = entries
        .filter_map(|entry| {
            let minor = entry.file_name().to_str()?.strip_prefix("python3.")?.parse().ok()?;
            Some((minor, entry.path()))
        })
        .collect();
    versions.sort_by_key(|(minor, _)| std::cmp::Reverse(*minor));
    versions.into_iter().map(|(_, path)| path).collect()
}

/// The bytes of `file`, `most` of them at the most.
fn read(file: &Path, most: u64) -> Result<Vec<u8>> {
    let io = |error| Error::io(file, error);
    let mut bytes = Vec::new();
    File::open(file).map_err(io)?.take(most.saturating_add(1)).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > most {
        return Err(Error::input(format!("{}: more than {most} bytes: expected a text that ends", file.display())));
    }
    Ok(bytes)
}

fn is_text(document: &[u8]) -> bool {
    !document.contains(&0) && std::str::from_utf8(document).is_ok()
}

/// The last place where a window of `length + 1` tokens can begin.
fn last_start(part: &str, bytes: &[u8], length: usize) -> Result<usize> {
    bytes.len().checked_sub(length.saturating_add(1)).ok_or_else(|| {
        Error::input(format!(
            "the part of the text for {part} has {} bytes: expected at least {length} + 1; take a longer text or shorter sequences",
            bytes.len()
        ))
    })
}

fn window(bytes: &[u8], start: usize, length: usize) -> impl Iterator<Item = u32> {
    bytes[start..=start + length].iter().map(|&byte| u32::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_tenth_of_each_document_is_for_validation() {
        let text = Text::new("two", [&b"abcdefghijABCDEFGHIJ"[..], b"0123456789"]);
        assert_eq!(text.train(), b"abcdefghijABCDEFGH012345678");
        assert_eq!(text.validation(), b"IJ9");
        assert_eq!((text.name(), text.bytes()), ("two", 30));
        let other = Text::new("two", [&b"abcdefghijABCDEFGHIJ"[..], b"0123456798"]);
        assert_ne!(text.fingerprint(), other.fingerprint());
        assert_eq!(text.fingerprint(), Text { name: String::new(), ..text.clone() }.fingerprint());
    }

    #[test]
    fn batches_depend_on_seed_and_step_and_follow_the_text() {
        let bytes: Vec<u8> = (0..=255).collect();
        let text = Text::new("bytes", [&bytes[..]]);
        let batch = text.batch(1, 5, 50, 16).unwrap();
        assert_eq!(batch, text.batch(1, 5, 50, 16).unwrap());
        assert_ne!(batch, text.batch(1, 6, 50, 16).unwrap());
        assert_ne!(batch, text.batch(2, 5, 50, 16).unwrap());
        assert_eq!(batch.len(), 50 * 17);
        let train = text.train().len() as u32;
        for row in batch.chunks_exact(17) {
            assert!(row.windows(2).all(|pair| pair[1] == pair[0] + 1) && row[16] < train);
        }
        let whole = text.batch(1, 0, 1, train as usize - 1).unwrap();
        assert_eq!(whole, (0..train).collect::<Vec<_>>());
    }

    #[test]
    fn validation_covers_its_part() {
        let bytes: Vec<u8> = (0..=255).cycle().take(1000).collect();
        let text = Text::new("bytes", [&bytes[..]]);
        let rows = text.validation_batch(4, 9).unwrap();
        let part: Vec<u32> = text.validation().iter().map(|&byte| u32::from(byte)).collect();
        assert_eq!((&rows[..10], &rows[10..20], &rows[30..]), (&part[..10], &part[30..40], &part[90..]));
        assert_eq!(text.validation_batch(1, 9).unwrap(), part[..10]);
    }

    /// 18 times `a` to count and one `b` and one `a` to foretell: counted from 1, that is 1 and 19 of 274.
    #[test]
    fn the_loss_without_context_follows_from_the_counts() {
        let text = Text::new("a and b", [&b"aaaaaaaaab"[..], b"aaaaaaaaaa"]);
        let of = |count: f64| -(count / (256.0 + 18.0)).ln();
        assert!((text.loss_without_context() - f64::midpoint(of(1.0), of(19.0))).abs() < 1e-12);
    }

    #[test]
    fn short_texts_are_refused() {
        let text = Text::new("short", [&[b'x'; 100][..]]);
        assert!(
            text.batch(1, 0, 1, 90)
                .unwrap_err()
                .to_string()
                .contains("training has 90 bytes: expected at least 90 + 1")
        );
        assert!(text.batch(1, 0, 1, usize::MAX).is_err());
        assert!(text.validation_batch(1, 10).unwrap_err().to_string().contains("validation has 10 bytes"));
    }

    #[test]
    fn what_has_no_end_is_refused() {
        for device in ["/dev/zero", "/dev/null", "/dev/urandom"] {
            let refused = Text::from_path(device).unwrap_err().to_string();
            assert!(refused.contains("expected a file, a pipe or a folder"), "{refused}");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [b'a'; 100]).unwrap();
        assert_eq!(read(file.path(), 100).unwrap().len(), 100);
        let refused = read(file.path(), 99).unwrap_err().to_string();
        assert!(refused.contains("more than 99 bytes"), "{refused}");
    }

    #[test]
    fn files_and_folders_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, content: &[u8]| std::fs::write(folder.path().join(name), content).unwrap();
        write("b", b"second file");
        write("a", "first file, in UTF-8: é".as_bytes());
        write("binary", b"bytes\0and more of them");
        write("latin", b"not UTF-8: \xe9\xe9\xe9\xe9");
        std::fs::create_dir(folder.path().join("c")).unwrap();
        let text = Text::from_path(folder.path()).unwrap();
        assert_eq!(text.name(), folder.path().display().to_string());
        assert!(text.train().starts_with(b"first file") && text.train().ends_with(b"second fil"));
        assert_eq!(text.bytes(), 24 + 11);
        assert_eq!(Text::from_path(folder.path().join("b")).unwrap().bytes(), 11);
        let refused = |name: &str| Text::from_path(folder.path().join(name)).unwrap_err().to_string();
        assert!(refused("latin").contains("expected text in UTF-8"));
        assert!(refused("c").contains("expected text in UTF-8"));
        assert!(matches!(Text::from_path(folder.path().join("none")), Err(Error::Io { .. })));
    }

    #[test]
    fn the_newest_python_comes_first() {
        let lib = tempfile::tempdir().unwrap();
        for name in ["python3.9", "python3.12", "python3", "python2.7", "python3.11"] {
            std::fs::create_dir(lib.path().join(name)).unwrap();
        }
        let found = versions_in(lib.path());
        assert_eq!(found, ["python3.12", "python3.11", "python3.9"].map(|name| lib.path().join(name)));
        assert!(versions_in(&lib.path().join("none")).is_empty());
    }

    #[test]
    fn this_system_has_a_text() {
        let text = Text::of_system().unwrap();
        assert!(text.bytes() >= SMALLEST_BYTES && text.validation().len() >= SMALLEST_BYTES / 11);
    }
}
