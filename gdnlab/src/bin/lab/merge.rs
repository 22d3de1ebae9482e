//! `cargo lab merge`.

use crate::output::{note, print};
use crate::store;
use gdnlab::Result;
use gdnlab::record::{Dropped, Machines, Merged, Source, Why, merge, write_lines};
use gdnlab::sweep::missing_parts;
use std::fmt::Write;
use std::process::ExitCode;

/// Why records were left out.
const REPEATED: &str = "whose line is there once more";
const OLDER: &str = "measured again later";
const DIFFERS: &str = "with another result of the same second, read later: one of the two was edited or mixed up";
const OTHER_MACHINE: &str = "of another machine";
/// Of the records that were left out for one reason, so many are shown.
const EXAMPLES: usize = 3;

/// Make one file of records of many: those that the parts of a sweep left, or several tries of one that failed.
///
/// A measurement that is there several times stays once, the newest by its time in UTC, with every digit as it was
/// written; how many are left out is said, with examples. Which measurement it is follows from the workload, the kind and its
/// tensor or quantity, other people's software, and the machine, not from the commit. Records of several machines are refused
/// unless you choose. A last line that an interrupted write left is skipped, and parts of a sweep that are not there are named.
///
/// Files of an object store are read with the credentials that the environment holds, by the names that the store's own tools
/// use: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL (with AWS_ALLOW_HTTP=true for http),
/// AWS_SKIP_SIGNATURE=true for a public bucket; GOOGLE_SERVICE_ACCOUNT; AZURE_STORAGE_ACCOUNT_NAME and so on; or with those of
/// the machine's role.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab merge data/bench-gdn-part*.jsonl -o data/bench-gdn_nvidia-h200_2026-12-01.jsonl
  cargo lab merge node1/ node2/ --machine H200 -o all.jsonl
  cargo lab merge node1/ node2/ --mixed -o all.jsonl
  cargo lab merge 's3://bucket/sweep/bench-gdn-part*.jsonl' gs://bucket/sweep/ https://host/more.jsonl -o all.jsonl")]
pub struct Args {
    /// Files of records, or folders of *.jsonl. Also at s3://, gs://, az:// (there a `*` in the last part, in quotes, or a `/`
    /// at the end stands for several), and https://.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<String>,
    /// The file that is written, here or in a store; it must not exist.
    #[arg(short, long, value_name = "FILE")]
    output: String,
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
        let mut sources = Vec::new();
        for file in &self.files {
            sources.append(&mut match store::is_address(file) {
                true => store::sources(file)?,
                false => Source::read_all(file.strip_prefix("file://").unwrap_or(file))?,
            });
        }
        let merged = merge(&sources, &machines)?;
        for place in &merged.torn {
            note(format_args!("warning: {place}: skipped, as it was cut short by an interrupted write"));
        }
        let names = sources.iter().filter_map(|source| source.path.file_name()?.to_str());
        for missing in missing_parts(names) {
            note(format_args!("warning: {missing}: has it failed, or has it no cases?"));
        }
        match store::is_address(&self.output) {
            true => store::write(&self.output, merged.lines.iter().map(|line| format!("{line}\n")).collect())?,
            false => write_lines(self.output.strip_prefix("file://").unwrap_or(&self.output), &merged.lines)?,
        }
        print(&summary(&merged, &self.output))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn summary(merged: &Merged, output: &str) -> String {
    let mut text = String::new();
    for reason in [REPEATED, OLDER, DIFFERS, OTHER_MACHINE] {
        let dropped: Vec<&Dropped> = merged.dropped.iter().filter(|dropped| in_words(&dropped.why) == reason).collect();
        if dropped.is_empty() {
            continue;
        }
        let _ = writeln!(text, "dropped {} {reason}:", dropped.len());
        for dropped in dropped.iter().take(EXAMPLES) {
            let _ = writeln!(text, "  {dropped}");
        }
        if dropped.len() > EXAMPLES {
            let _ = writeln!(text, "  and {} more", dropped.len() - EXAMPLES);
        }
    }
    let (kept, dropped) = (merged.lines.len(), merged.dropped.len());
    let _ = writeln!(text, "{output}: {kept} records, {dropped} dropped");
    for (machine, count) in &merged.machines {
        let _ = writeln!(text, "  {count} of {machine}");
    }
    if merged.commits.len() > 1 {
        for (commit, count) in &merged.commits {
            let name: String = commit.chars().take(12).collect();
            let name = if name.is_empty() { "unknown".to_owned() } else { name };
            let _ = writeln!(text, "  {count} of commit {name}");
        }
    }
    text
}

fn in_words(why: &Why) -> &'static str {
    match why {
        Why::Repeated(_) => REPEATED,
        Why::Older(_) => OLDER,
        Why::Differs(_) => DIFFERS,
        Why::OtherMachine(_) => OTHER_MACHINE,
    }
}
