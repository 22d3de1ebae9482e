//! `cargo lab kernels`.

use crate::output::print;
use gdnlab::Result;
use gdnlab::kernel::{Kernel, kernels};
use std::process::ExitCode;

/// List every kernel: what it computes, what it takes, what it needs.
///
/// The tolerance is the mode whose limits its results are held to, a name for `cargo lab verify --tolerance`.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  cargo lab kernels")]
pub struct Args {
    /// Print one JSON object per line.
    #[arg(long)]
    json: bool,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        let all = kernels();
        if self.json {
            print(&all.iter().map(|kernel| json(kernel.as_ref())).collect::<String>())?;
        } else {
            print(&table(&all))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn ops(kernel: &dyn Kernel) -> Vec<&'static str> {
    kernel.ops().iter().map(|op| op.name()).collect()
}

fn json(kernel: &dyn Kernel) -> String {
    let object = serde_json::json!({
        "name": kernel.name(),
        "ops": ops(kernel),
        "input_format": kernel.input_format().name(),
        "tolerance": kernel.mode(),
        "needs": kernel.needs(),
        "summary": kernel.summary(),
    });
    format!("{object}\n")
}

fn table(all: &[Box<dyn Kernel>]) -> String {
    let row = |name: &str, ops: &str, input: &str, mode: &str, needs: &str, summary: &str| {
        format!("{name:<26} {ops:<10} {input:<6} {mode:<15} {needs:<30} {summary}\n")
    };
    let header = row("kernel", "operators", "input", "tolerance", "needs", "computes");
    let rows = all.iter().map(|kernel| {
        row(
            kernel.name(),
            &ops(kernel.as_ref()).join(", "),
            kernel.input_format().name(),
            kernel.mode(),
            kernel.needs(),
            &kernel.summary(),
        )
    });
    std::iter::once(header).chain(rows).collect()
}
