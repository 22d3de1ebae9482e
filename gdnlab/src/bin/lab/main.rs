//! `cargo lab`: the command line of gdnlab.
//!
//! Exit codes: 0 success, 1 the answer is no (outside tolerance, a notebook failed), 2 bad input.

mod kernels;

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
    /// List every implementation, what it computes and what it needs.
    Kernels(kernels::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Kernels(args) => args.run(),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::from(2)
    })
}
