//! A build folder for one running kernel. Two kernels in one folder would load each other's cells.

use super::{base, lock_base, mirror};
use crate::checkout::Checkout;
use gdnlab::{Error, Result};
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

/// A folder that no other kernel uses while `lock` is open.
pub struct Slot {
    pub folder: PathBuf,
    pub lock: File,
}

/// The first free folder, made if there is none.
pub fn acquire(place: &Path) -> Result<Slot> {
    std::fs::create_dir_all(place).map_err(|source| Error::io(place, source))?;
    for number in 0.. {
        let folder = place.join(format!("slot-{number}"));
        let path = folder.with_extension("lock");
        let lock = File::create(&path).map_err(|source| Error::io(&path, source))?;
        match lock.try_lock() {
            Ok(()) => return Ok(Slot { folder, lock }),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(source)) => return Err(Error::io(&path, source)),
        }
    }
    Err(Error::input(format!("{}: no free build folder for a notebook", place.display())))
}

impl Slot {
    /// Gives the folder what the set-up has compiled since the last time.
    pub fn update(&self, checkout: &Checkout) -> Result<()> {
        std::fs::create_dir_all(&self.folder).map_err(|source| Error::io(&self.folder, source))?;
        let _lock = lock_base(checkout)?;
        let base = base(checkout);
        if base.join("target").is_dir() {
            mirror::update(&base.join("target"), &self.folder.join("target"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_at_the_same_time_get_different_folders() {
        let place = tempfile::tempdir().unwrap();
        let first = acquire(place.path()).unwrap();
        let second = acquire(place.path()).unwrap();
        assert_eq!(first.folder, place.path().join("slot-0"));
        assert_eq!(second.folder, place.path().join("slot-1"));
        drop(first);
        assert_eq!(acquire(place.path()).unwrap().folder, place.path().join("slot-0"));
        drop(second);
    }
}
