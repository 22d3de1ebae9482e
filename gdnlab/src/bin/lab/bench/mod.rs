//! `cargo lab bench`.

mod attention;
mod gdn;
mod gdn2;
mod ladder;
mod roofline;

use clap::Subcommand;
use gdnlab::Result;
use std::process::ExitCode;

/// Time kernels on the GPU, beside what the hardware allows and what others reach; and measure what it allows.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Attention(attention::Args),
    Gdn(gdn::Args),
    Gdn2(gdn2::Args),
    Ladder(ladder::Args),
    Roofline(roofline::Args),
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        match self.what {
            What::Attention(args) => args.run(),
            What::Gdn(args) => args.run(),
            What::Gdn2(args) => args.run(),
            What::Ladder(args) => args.run(),
            What::Roofline(args) => args.run(),
        }
    }
}
