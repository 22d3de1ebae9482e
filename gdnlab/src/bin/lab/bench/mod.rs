//! `cargo lab bench`.

mod gdn;

use clap::Subcommand;
use gdnlab::Result;
use std::process::ExitCode;

/// Time kernels on the GPU, beside what the hardware allows and what others reach.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Gdn(gdn::Args),
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        match self.what {
            What::Gdn(args) => args.run(),
        }
    }
}
