//! Copies what cargo has compiled from one target folder to another, so that it is not compiled again.
//!
//! Cargo names every compiled crate by a hash of all that went into it, and looks at times, never at folders. Large
//! files are hard links: compilers replace them and never write into them. Cargo's own notes are written in place, so
//! they are copied. The notes come last: where they are, the rest is.

use gdnlab::{Error, Result};
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Parts of a profile's folder, in the order in which they are copied.
const PARTS: [&str; 3] = ["deps", "build", ".fingerprint"];

/// What to do about a file that both folders have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Present {
    Keep,
    Update,
}

/// Brings to target folder `to` what `from` has and `to` lacks.
pub fn add_missing(from: &Path, to: &Path) -> Result<()> {
    copy_profiles(from, to, Present::Keep)
}

/// Makes the compiled crates of target folder `to` those of `from`.
pub fn update(from: &Path, to: &Path) -> Result<()> {
    copy_profiles(from, to, Present::Update)
}

fn copy_profiles(from: &Path, to: &Path, present: Present) -> Result<()> {
    for profile in profiles(from)? {
        for part in PARTS {
            let source = from.join(&profile).join(part);
            if source.is_dir() {
                copy_folder(&source, &to.join(&profile).join(part), present)?;
            }
        }
    }
    Ok(())
}

/// The folders of the development profile: of the host's own crates, and of each named target.
fn profiles(target: &Path) -> Result<Vec<PathBuf>> {
    let mut found = vec![PathBuf::from("debug")];
    for entry in entries(target)? {
        let profile = PathBuf::from(entry.file_name()).join("debug");
        if target.join(&profile).is_dir() {
            found.push(profile);
        }
    }
    Ok(found)
}

fn copy_folder(from: &Path, to: &Path, present: Present) -> Result<()> {
    std::fs::create_dir_all(to).map_err(|source| Error::io(to, source))?;
    for entry in entries(from)? {
        let (source, copy) = (entry.path(), to.join(entry.file_name()));
        let metadata = entry.metadata().map_err(|error| Error::io(&source, error))?;
        if metadata.is_dir() {
            copy_folder(&source, &copy, present)?;
        } else if metadata.is_file() && !is_current(&copy, &metadata, present) {
            copy_file(&source, &copy, &metadata)?;
        }
    }
    Ok(())
}

fn is_current(copy: &Path, original: &Metadata, present: Present) -> bool {
    let same = |copy: Metadata| copy.len() == original.len() && copy.modified().ok() == original.modified().ok();
    copy.metadata().is_ok_and(|copy| present == Present::Keep || same(copy))
}

fn copy_file(from: &Path, to: &Path, metadata: &Metadata) -> Result<()> {
    let partial = to.with_added_extension("partial");
    let _ = std::fs::remove_file(&partial);
    let is_compiled = from.extension().is_some_and(|extension| ["rlib", "rmeta", "so"].iter().any(|e| extension == *e));
    if !is_compiled || std::fs::hard_link(from, &partial).is_err() {
        let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        std::fs::copy(from, &partial).map_err(|source| Error::io(from, source))?;
        let copied = std::fs::File::options().append(true).open(&partial);
        copied.and_then(|file| file.set_modified(modified)).map_err(|source| Error::io(&partial, source))?;
    }
    std::fs::rename(&partial, to).map_err(|source| Error::io(to, source))
}

fn entries(folder: &Path) -> Result<Vec<std::fs::DirEntry>> {
    let entries = std::fs::read_dir(folder).and_then(Iterator::collect);
    entries.map_err(|source| Error::io(folder, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, text: &str) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn copies_compiled_crates_with_their_times_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        for profile in ["debug", "x86_64-unknown-linux-gnu/debug"] {
            write(&from.join(profile).join("deps/libpolars-1.rlib"), "compiled");
            write(&from.join(profile).join(".fingerprint/polars-1/lib"), "note");
            write(&from.join(profile).join("incremental/lab"), "not wanted");
        }
        add_missing(&from, &to).unwrap();
        for profile in ["debug", "x86_64-unknown-linux-gnu/debug"] {
            for part in ["deps/libpolars-1.rlib", ".fingerprint/polars-1/lib"] {
                let (original, copy) = (from.join(profile).join(part), to.join(profile).join(part));
                assert_eq!(
                    original.metadata().unwrap().modified().unwrap(),
                    copy.metadata().unwrap().modified().unwrap()
                );
            }
            assert!(!to.join(profile).join("incremental").exists());
        }
    }

    #[test]
    fn notes_are_copies_that_can_change_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        let note = "debug/.fingerprint/polars-1/lib";
        write(&from.join(note), "note");
        add_missing(&from, &to).unwrap();
        write(&to.join(note), "changed");
        assert_eq!(std::fs::read_to_string(from.join(note)).unwrap(), "note");
        add_missing(&from, &to).unwrap();
        assert_eq!(std::fs::read_to_string(to.join(note)).unwrap(), "changed");
        update(&from, &to).unwrap();
        assert_eq!(std::fs::read_to_string(to.join(note)).unwrap(), "note");
    }
}
