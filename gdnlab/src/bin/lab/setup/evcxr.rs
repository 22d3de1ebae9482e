//! The notebook kernel, evcxr_jupyter, in one pinned version.

use super::{announce, remove_folder, run};
use crate::checkout::Checkout;
use gdnlab::{Error, Result};
use std::process::Command;

pub const VERSION: &str = "0.22.0";

pub fn ensure(checkout: &Checkout) -> Result<()> {
    if is_installed(checkout) {
        return Ok(());
    }
    announce("compiling the notebook kernel, evcxr_jupyter, into .tools (ten minutes on two cores, once)");
    // In a folder of its own, so that an interrupted compilation is taken up again.
    let build = checkout.tools().join("build");
    let mut cargo = Command::new("cargo");
    cargo
        .args(["install", "--locked", "evcxr_jupyter", "--version", VERSION, "--no-track", "--force", "--root"])
        .arg(checkout.tools())
        .env("CARGO_TARGET_DIR", &build)
        .env_remove("RUSTFLAGS");
    run("cargo install evcxr_jupyter", &mut cargo)?;
    let mark = mark(checkout);
    std::fs::write(&mark, VERSION).map_err(|source| Error::io(&mark, source))?;
    remove_folder(&build)
}

fn is_installed(checkout: &Checkout) -> bool {
    checkout.evcxr().is_file() && std::fs::read_to_string(mark(checkout)).is_ok_and(|version| version == VERSION)
}

/// Holds the version that is installed.
fn mark(checkout: &Checkout) -> std::path::PathBuf {
    checkout.evcxr().with_added_extension("version")
}
