//! Writing files so that a reader sees the old content or the new, never a part.

use crate::{Error, Result};
use std::io::Write;
use std::path::Path;

/// Writes `bytes` to `path`, creating its folder: into a temporary file beside it that is then renamed.
///
/// # Errors
/// [`Error::Io`] where a folder or file cannot be written; what was there before is then still there.
pub(crate) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let io = |error| Error::io(path, error);
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(folder).map_err(|error| Error::io(folder, error))?;
    let mut builder = tempfile::Builder::new();
    // Readable like any file of the user; temporary files are private by default.
    #[cfg(unix)]
    let builder = {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666))
    };
    let mut file = builder.suffix(".partial").tempfile_in(folder).map_err(io)?;
    file.write_all(bytes).map_err(io)?;
    file.as_file().sync_all().map_err(io)?;
    file.persist(path).map_err(|error| io(error.error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_whole_files_and_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/folder/file.txt");
        write_atomic(&path, b"first, longer").unwrap();
        write_atomic(&path, b"second").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"second");
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_refused_write_names_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let error = write_atomic(folder.path(), b"x").unwrap_err().to_string();
        assert!(error.contains(&folder.path().display().to_string()), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
