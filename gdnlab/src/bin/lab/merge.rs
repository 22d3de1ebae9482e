//! `cargo lab merge`.

use crate::output::print;
use gdnlab::record::{Machines, Merged, merge, write_lines};
use gdnlab::{Error, Result};
use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Make one file of records of many: those that the parts of a sweep left, or several tries of one that failed.
///
/// A measurement that is there several times stays once, the newest by its time in UTC, with every digit as it was
/// written; what is left out is printed. Which measurement it is follows from the workload, the kind and its tensor or
/// quantity, other people's software, and the machine, not from the commit. Records of several machines are refused unless
/// you choose.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab merge data/bench-gdn-part*.jsonl -o data/bench-gdn_nvidia-h200_2026-12-01.jsonl
  cargo lab merge node1/ node2/ --machine H200 -o all.jsonl
  cargo lab merge node1/ node2/ --mixed -o all.jsonl")]
pub struct Args {
    /// Files of records, or folders of *.jsonl.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<String>,
    /// The file that is written; it must not exist.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Only records of machines whose name, such as `NVIDIA H200 with AMD EPYC`, contains this text.
    #[arg(long, value_name = "TEXT", conflicts_with = "mixed")]
    machine: Option<String>,
    /// Take records of several machines into one file.
    #[arg(long)]
    mixed: bool,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        let machines = match self.machine {
            Some(name) => Machines::Named(name),
            None if self.mixed => Machines::All,
            None => Machines::One,
        };
        let output = self.output.display().to_string();
        if output.contains("://") {
            return Err(Error::input(format!(
                "{output}: expected a path: records are written to a disk, not to a store"
            )));
        }
        let merged = merge(&self.files, &machines)?;
        write_lines(&self.output, &merged.lines)?;
        print(&summary(&merged, &output))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn summary(merged: &Merged, output: &str) -> String {
    let mut text = String::new();
    for dropped in &merged.dropped {
        let _ = writeln!(text, "dropped {dropped}");
    }
    let (kept, dropped) = (merged.lines.len(), merged.dropped.len());
    let _ = writeln!(text, "{output}: {kept} records, {dropped} dropped");
    for (machine, count) in &merged.machines {
        let _ = writeln!(text, "  {count} of {machine}");
    }
    if merged.commits.len() > 1 {
        for (commit, count) in &merged.commits {
            let name = if commit.is_empty() { "unknown" } else { &commit[..commit.len().min(12)] };
            let _ = writeln!(text, "  {count} of commit {name}");
        }
    }
    text
}
