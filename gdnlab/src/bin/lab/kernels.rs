//! `cargo lab kernels`.

use gdnlab::Result;
use gdnlab::kernel::kernels;
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        for kernel in kernels() {
            println!("{:<24} {} (needs {})", kernel.name(), kernel.summary(), kernel.needs());
        }
        Ok(ExitCode::SUCCESS)
    }
}
