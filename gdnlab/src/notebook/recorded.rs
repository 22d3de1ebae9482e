//! What GPUs measured elsewhere, where nothing has to be measured now.

use super::on_gpu::{is_on_gpu, time};
use crate::record::{self, Record};
use crate::{Result, table};
use std::fmt;
use std::path::{Path, PathBuf};

/// Records that were made on a GPU, or none where none are kept. As text: one line that says where they come from, or what
/// is not there.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// All that the file holds of a GPU.
    pub records: Vec<Record>,
    /// The file, where there is one.
    pub path: Option<PathBuf>,
    /// What was looked for.
    wanted: PathBuf,
}

impl Recorded {
    /// The machine's name in tables, where there are records.
    pub fn machine(&self) -> Option<String> {
        self.records.first().map(|record| table::machine_name(&record.environment.machine))
    }

    /// The footer of a figure that shows these records beside numbers published as `published`: who measured what, when.
    pub fn beside(&self, published: &str) -> String {
        let published = format!("published: {published}");
        let Some(environment) = self.records.first().map(|record| &record.environment) else { return published };
        let gpu = environment.machine.gpu.as_deref().unwrap_or("unknown GPU");
        let date = environment.date().unwrap_or("an unknown day");
        format!("gdnlab on {gpu}, {date} · {published}")
    }
}

impl fmt::Display for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some(path), Some(record)) = (&self.path, self.records.first()) else {
            return write!(f, "not there: {} with rows that a GPU measured", self.wanted.display());
        };
        let gpu = record.environment.machine.gpu.as_deref().unwrap_or("unknown GPU");
        let date = record.environment.date().unwrap_or("an unknown day");
        write!(f, "{gpu}, measured on {date}, read from {}", path.display())
    }
}

/// The rows that a GPU measured in the newest file of `folder` that holds such rows, of those that `cargo lab bench` calls
/// `bench-<suite>_*.jsonl`, or `<suite>_*.jsonl`. Where there is no such file, no records: the text of what is returned
/// says so.
///
/// # Errors
/// As [`record::files`] and [`record::read`].
pub fn records_on_gpu(folder: impl AsRef<Path>, suite: &str) -> Result<Recorded> {
    let folder = folder.as_ref();
    let mut newest: Option<(PathBuf, Vec<Record>)> = None;
    let stems = [format!("bench-{suite}_"), format!("{suite}_")];
    let paths = stems.iter().map(|stem| record::files(folder, stem)).collect::<Result<Vec<_>>>()?;
    for path in paths.concat() {
        let held: Vec<Record> = record::read(&path)?.into_iter().filter(is_on_gpu).collect();
        if !held.is_empty() && newest.as_ref().is_none_or(|(_, known)| time(known) <= time(&held)) {
            newest = Some((path, held));
        }
    }
    let wanted = folder.join(format!("bench-{suite}_*.jsonl"));
    let (path, records) = newest.map_or((None, Vec::new()), |(path, records)| (Some(path), records));
    Ok(Recorded { records, path, wanted })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Environment, Machine, Measurement, Roofline, Workload};

    fn record(gpu: Option<&str>, utc: &str) -> Record {
        let machine = Machine { gpu: gpu.map(str::to_owned), ..Machine::default() };
        let environment = Environment { machine, utc: Some(utc.to_owned()), ..Environment::default() };
        let roofline = Roofline { quantity: "copy".to_owned(), value: 1.0, theoretical: None, unit: "GB/s".to_owned() };
        Record::new(&environment, &Workload::default(), Measurement::Roofline(roofline))
    }

    #[test]
    fn the_newest_file_with_rows_of_a_gpu_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, records: &[Record]| record::write(folder.path().join(name), records).unwrap();
        let old = record(Some("NVIDIA H200"), "2026-11-02T00:00:00Z");
        let new = record(Some("NVIDIA H200"), "2026-11-30T00:00:00Z");
        write("roofline_z.jsonl", &[old]);
        write("bench-roofline_a.jsonl", &[record(None, "2026-12-01T00:00:00Z"), new.clone()]);
        write("roofline_b.jsonl", &[record(None, "2026-12-02T00:00:00Z")]);
        write("ladder_a.jsonl", &[record(Some("NVIDIA B200"), "2026-12-03T00:00:00Z")]);
        let found = records_on_gpu(folder.path(), "roofline").unwrap();
        assert_eq!(found.records, [new]);
        let path = folder.path().join("bench-roofline_a.jsonl");
        assert_eq!(found.to_string(), format!("NVIDIA H200, measured on 2026-11-30, read from {}", path.display()));
    }

    #[test]
    fn where_there_is_none_that_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let none = records_on_gpu(folder.path(), "ladder").unwrap();
        assert!(none.records.is_empty() && none.path.is_none());
        let expected = format!(
            "not there: {} with rows that a GPU measured",
            folder.path().join("bench-ladder_*.jsonl").display()
        );
        assert_eq!(none.to_string(), expected);
        assert_eq!((none.machine(), none.beside("a post")), (None, "published: a post".to_owned()));
        assert!(records_on_gpu(folder.path().join("none"), "ladder").is_err());
    }
}
