//! `cargo lab`: the command line of gdnlab.
//!
//! Exit codes: 0 success, 1 the answer is no (outside tolerance, a notebook failed), 2 bad input.

mod backends;
mod bench;
mod bias;
mod capture;
mod cells;
mod checkout;
mod compute;
mod cp;
mod determinism;
mod jupyter;
mod kernel_process;
mod kernels;
mod merge;
mod numerics;
mod output;
mod peers;
mod precision;
mod reference;
mod run;
mod setup;
mod sharding;
mod size;
mod store;
mod tokens;
mod train;
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
    Run(run::Args),
    Jupyter(jupyter::Args),
    Verify(verify::Args),
    Reference(reference::Args),
    Compute(compute::Args),
    Kernels(kernels::Args),
    Numerics(numerics::Args),
    Precision(precision::Args),
    Backends(backends::Args),
    Tokens(tokens::Args),
    Determinism(determinism::Args),
    Bias(bias::Args),
    Capture(capture::Args),
    Cp(cp::Args),
    Bench(bench::Args),
    Merge(merge::Args),
    Train(train::Args),
    #[command(hide = true)]
    KernelProcess(kernel_process::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Verify(args) => args.run(),
        Command::Reference(args) => args.run(),
        Command::Compute(args) => args.run(),
        Command::Kernels(args) => args.run(),
        Command::Numerics(args) => args.run(),
        Command::Precision(args) => args.run(),
        Command::Backends(args) => args.run(),
        Command::Tokens(args) => args.run(),
        Command::Determinism(args) => args.run(),
        Command::Bias(args) => args.run(),
        Command::Capture(args) => args.run(),
        Command::Cp(args) => args.run(),
        Command::Bench(args) => args.run(),
        Command::Merge(args) => args.run(),
        Command::Train(args) => args.run(),
        Command::Run(args) => args.run(),
        Command::Jupyter(args) => args.run(),
        Command::KernelProcess(args) => args.run(),
    };
    outcome.unwrap_or_else(|error| {
        output::note(format_args!("error: {error}"));
        ExitCode::from(2)
    })
}
