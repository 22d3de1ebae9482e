//! Where the kernel compiles cells: one folder for each running notebook, all on the same compiled dependencies.

pub mod mirror;
pub mod slot;

use crate::checkout::Checkout;
use gdnlab::{Error, Result};
use std::ffi::OsString;
use std::fs::File;
use std::path::PathBuf;

/// The folder in which the set-up compiles the dependencies. No kernel works in it.
pub fn base(checkout: &Checkout) -> PathBuf {
    checkout.cells().join("base")
}

/// The compiler wrapper that links cells dynamically.
pub fn wrapper(checkout: &Checkout) -> PathBuf {
    checkout.cells().join("rustc-for-cells")
}

/// Holds the base folder against a set-up and against slots that copy from it.
pub fn lock_base(checkout: &Checkout) -> Result<File> {
    let path = checkout.cells().join("base.lock");
    let file = File::create(&path).map_err(|source| Error::io(&path, source))?;
    file.lock().map_err(|source| Error::io(&path, source))?;
    Ok(file)
}

/// What cargo must find in its environment, so that base and slots build the same crates.
pub fn build_env(checkout: &Checkout) -> [(&'static str, OsString); 2] {
    [
        // Goes before RUSTFLAGS, which evcxr sets to a flag that would make every dependency another crate.
        ("CARGO_ENCODED_RUSTFLAGS", OsString::new()),
        ("RUSTC_WRAPPER", wrapper(checkout).into_os_string()),
    ]
}
