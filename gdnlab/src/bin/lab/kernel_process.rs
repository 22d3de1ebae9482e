//! `lab kernel-process`: what Jupyter starts as the Rust kernel.
//!
//! It finds a build folder that no other kernel uses, sets evcxr's environment, and becomes evcxr.

use crate::cells;
use crate::checkout::Checkout;
use crate::setup;
use gdnlab::{Error, Result};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// What Jupyter starts as the Rust kernel.
#[derive(clap::Args)]
pub struct Args {
    /// Root folder of the checkout
    #[arg(long)]
    checkout: PathBuf,

    /// File in which Jupyter names its ports
    connection_file: PathBuf,
}

impl Args {
    /// Returns only if the kernel cannot start.
    pub fn run(self) -> Result<ExitCode> {
        let checkout = Checkout::at(&self.checkout)
            .ok_or_else(|| Error::input(format!("{}: not a gdnlab checkout", self.checkout.display())))?;
        let missing = "the notebook kernel is not set up: run `cargo lab jupyter` or `cargo lab run`";
        let std_source = setup::find_std_source(&checkout)?.ok_or_else(|| Error::input(missing))?;
        let slot = cells::slot::acquire(&checkout.cells())?;
        slot.update(&checkout)?;
        // The lock lives as long as the kernel does.
        rustix::io::fcntl_setfd(&slot.lock, rustix::io::FdFlags::empty())
            .map_err(|source| Error::io(&slot.folder, source.into()))?;
        let failure = Command::new(checkout.evcxr())
            .arg("--control_file")
            .arg(&self.connection_file)
            // Paths in cells and in evcxr.toml start here, wherever the notebook lies.
            .current_dir(checkout.notebooks())
            .envs(cells::build_env(&checkout))
            .env("EVCXR_TMPDIR", &slot.folder)
            .env("RUST_SRC_PATH", std_source)
            // If a source were missing after all, evcxr would have rustup fetch it and wait: let that fail at once.
            .env("RUSTUP_DIST_SERVER", "http://127.0.0.1:9")
            .exec();
        Err(Error::io(checkout.evcxr(), failure))
    }
}
