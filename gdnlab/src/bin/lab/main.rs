//! `cargo lab`: the command line of gdnlab.
//!
//! Exit codes: 0 success, 1 the answer is no (outside tolerance, a notebook failed), 2 bad input.

mod compute;
mod kernels;
mod output;
mod reference;
mod verify;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// A laboratory for the numerics and the performance of Gated DeltaNet.
#[derive(Parser)]
#[command(name = "lab", bin_name = "cargo lab", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Verify(verify::Args),
    Reference(reference::Args),
    Compute(compute::Args),
    Kernels(kernels::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Verify(args) => args.run(),
        Command::Reference(args) => args.run(),
        Command::Compute(args) => args.run(),
        Command::Kernels(args) => args.run(),
    };
    outcome.unwrap_or_else(|error| {
        output::note(format_args!("error: {error}"));
        ExitCode::from(2)
    })
}
