//! Records in and out of JSON Lines files.

use super::source::whole_lines;
use super::{Record, SCHEMA, Source};
use crate::file::write_atomic;
use crate::{Error, Result};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Numbers of two records that differ by no more than this, relatively, are the same measurement: what a decimal
/// number may lose on its way through a file, and far below any error metric's meaning.
const SAME_NUMBER: f64 = 1e-12;

/// One line of JSON per record.
///
/// # Errors
/// [`Error::Input`] where a record cannot be written as JSON.
pub fn to_json_lines(records: &[Record]) -> Result<String> {
    let mut text = String::new();
    for record in records {
        text += &serde_json::to_string(record)
            .map_err(|error| Error::input(format!("record cannot be written as JSON: {error}")))?;
        text.push('\n');
    }
    Ok(text)
}

/// The records of `text`, whose name in error messages is `origin`.
///
/// # Errors
/// [`Error::Input`] with the line's number and what was expected: for broken JSON, another schema version, a missing,
/// unknown or mistyped field, and a last line that was cut short.
pub fn parse(text: &str, origin: &Path) -> Result<Vec<Record>> {
    let cut_short = whole_lines(text.as_bytes()) < text.len();
    let last = text.lines().count();
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(index, line)| {
            parse_line(line).map_err(|problem| {
                let number = index + 1;
                let hint = if cut_short && number == last {
                    "; it is the last line and has no newline, so it was probably cut short: remove it or restore the file"
                } else {
                    ""
                };
                Error::input(format!("{}:{number}: {problem}{hint}", origin.display()))
            })
        })
        .collect()
}

/// A record, or what is wrong with the line.
fn parse_line(line: &str) -> Result<Record, String> {
    let value: Value = serde_json::from_str(line).map_err(|error| format!("expected one JSON object, {error}"))?;
    let Value::Object(fields) = &value else {
        return Err(format!("expected a JSON object with the fields of one record, got {value}"));
    };
    match fields.get("schema").map(|schema| (schema, schema.as_u64())) {
        Some((_, Some(version))) if version == u64::from(SCHEMA) => {}
        Some((found, _)) => {
            return Err(format!(
                "this version of gdnlab reads records of schema {SCHEMA}, but the line says {found}: read it with the version that wrote it"
            ));
        }
        None => return Err(format!("expected the field `schema` (now {SCHEMA}): is this a file of records?")),
    }
    let record: Record = serde_json::from_value(value.clone()).map_err(|error| format!("not a record: {error}"))?;
    if let Some(utc) = record.environment.utc.as_deref().filter(|utc| humantime::parse_rfc3339(utc).is_err()) {
        return Err(format!("expected a time such as 2026-11-30T12:34:56Z in `utc`, got '{utc}'"));
    }
    let known = serde_json::to_value(&record).map_err(|error| error.to_string())?;
    match fields.iter().find(|(name, value)| !value.is_null() && known.get(name.as_str()).is_none()) {
        Some((name, _)) => Err(format!("field `{name}` does not belong to a record of this kind")),
        None => Ok(record),
    }
}

/// The records of a file.
///
/// # Errors
/// [`Error::Io`] where it cannot be read, otherwise as [`parse`].
pub fn read(path: impl AsRef<Path>) -> Result<Vec<Record>> {
    let source = Source::read(path)?;
    match &source.torn {
        Some(place) => Err(Error::input(format!("{place}: cut short, as by an interrupted write: remove this line"))),
        None => source.records(),
    }
}

/// The records of every `*.jsonl` of a folder, files in the order of their names.
///
/// # Errors
/// As [`read`].
pub fn read_dir(folder: impl AsRef<Path>) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for path in files(folder, "")? {
        records.append(&mut read(path)?);
    }
    Ok(records)
}

/// A file of records and what it holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    /// The file.
    pub path: PathBuf,
    /// Its records.
    pub records: Vec<Record>,
}

/// The records of every `*.jsonl` of a folder that can be read; `note` is told of each file that cannot, and of each line that
/// was cut short. For those who would only be spared work by what is recorded.
///
/// # Errors
/// [`Error::Io`] where the folder cannot be read.
pub fn read_what_can_be(folder: impl AsRef<Path>, mut note: impl FnMut(&str)) -> Result<Vec<Held>> {
    let mut held = Vec::new();
    for path in files(folder, "")? {
        match Source::read(&path).and_then(|source| Ok((source.records()?, source.torn))) {
            Ok((records, torn)) => {
                if let Some(place) = torn {
                    note(&format!("{place}: cut short, as by an interrupted write; this line is left out"));
                }
                held.push(Held { path, records });
            }
            Err(error) => note(&format!("{error}; what this file holds is left out")),
        }
    }
    Ok(held)
}

/// Writes a new file of records: either all of it is there afterwards, or nothing.
///
/// # Errors
/// [`Error::Input`] where the file exists already (records are never edited: [`append`] to it), [`Error::Io`] where it
/// cannot be written.
pub fn write(path: impl AsRef<Path>, records: &[Record]) -> Result<()> {
    write_new(path.as_ref(), &to_json_lines(records)?)
}

/// The same with lines that are records already, as they are.
///
/// # Errors
/// As [`write`](write()).
pub fn write_lines(path: impl AsRef<Path>, lines: &[String]) -> Result<()> {
    write_new(path.as_ref(), &lines.iter().map(|line| format!("{line}\n")).collect::<String>())
}

fn write_new(path: &Path, text: &str) -> Result<()> {
    if path.exists() {
        return Err(Error::input(format!(
            "{}: exists already, and records are never edited afterwards: append to it, or choose another name",
            path.display()
        )));
    }
    write_atomic(path, text.as_bytes())
}

/// Adds records to a file, which is created where it does not exist. The rows that it holds are never touched, other
/// processes that append at the same time are waited for, and a write that fails is undone. What an interrupted write left of
/// a line gives way.
///
/// # Errors
/// [`Error::Input`] where what the file holds is not a list of whole records, [`Error::Io`] where it cannot be written.
pub fn append(path: impl AsRef<Path>, records: &[Record]) -> Result<()> {
    let path = path.as_ref();
    let mut lines = to_json_lines(records)?;
    let io = |error| Error::io(path, error);
    let mut file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(io)?;
    file.lock().map_err(io)?;
    let mut held = Vec::new();
    file.read_to_end(&mut held).map_err(io)?;
    let held = &held[..whole_lines(&held)];
    Source::new(path, held)?.records()?;
    if !held.is_empty() && !held.ends_with(b"\n") {
        lines.insert(0, '\n');
    }
    file.set_len(held.len() as u64).map_err(io)?;
    add_bytes(&mut file, lines.as_bytes()).map_err(io)
}

/// Appends all of `bytes`, or none of them.
fn add_bytes(file: &mut File, bytes: &[u8]) -> std::io::Result<()> {
    let length = file.seek(SeekFrom::End(0))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).inspect_err(|_| {
        // The first error is the one to report, whether or not the undo succeeds.
        let _ = file.set_len(length);
    })
}

/// `text` as the name of an experiment, which begins that of its file: letters, digits, `-`, `_` and `.`, the first no `.`.
///
/// # Errors
/// [`Error::Input`] for any other, so that no name leads out of the folder.
pub fn experiment_name(text: &str) -> Result<String> {
    let fits = |letter: char| letter.is_alphanumeric() || matches!(letter, '-' | '_' | '.');
    if text.is_empty() || text.starts_with('.') || !text.chars().all(fits) {
        return Err(Error::input(format!(
            "'{text}': expected the name of an experiment, of letters, digits, '-', '_' and '.', such as day05_numerics"
        )));
    }
    Ok(text.to_owned())
}

/// Puts `records` into `folder` as `<suite>_<machine>_<date>.jsonl` and returns the file that holds them.
///
/// A repeated measurement that gave the same numbers adds nothing: the file that holds it already is returned.
///
/// # Errors
/// [`Error::Input`] where there are no records or they name no time, and as [`experiment_name`] and [`append`].
pub fn keep(folder: impl AsRef<Path>, suite: &str, records: &[Record]) -> Result<PathBuf> {
    let (folder, suite) = (folder.as_ref(), experiment_name(suite)?);
    let Some(environment) = records.first().map(|record| &record.environment) else {
        return Err(Error::input(format!("no records to keep for '{suite}'")));
    };
    let Some(date) = environment.date() else {
        return Err(Error::input(format!("records of '{suite}' have no `utc`, which names their file")));
    };
    std::fs::create_dir_all(folder).map_err(|error| Error::io(folder, error))?;
    let stem = format!("{suite}_{}_", environment.machine.slug());
    for path in files(folder, &stem)? {
        let held = Source::read(&path)?.records()?;
        if held.windows(records.len()).any(|window| window.iter().zip(records).all(|(a, b)| same_measurement(a, b))) {
            return Ok(path);
        }
    }
    let path = folder.join(format!("{stem}{date}.jsonl"));
    append(&path, records)?;
    Ok(path)
}

/// Whether both records say the same but for when and from which commit.
fn same_measurement(a: &Record, b: &Record) -> bool {
    let content = |record: &Record| {
        let mut record = record.clone();
        let machine = record.environment.machine;
        record.environment = super::Environment { machine, ..Default::default() };
        serde_json::to_value(record).ok()
    };
    content(a).zip(content(b)).is_some_and(|(a, b)| same_value(&a, &b))
}

fn same_value(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => {
            a == b || {
                let (a, b) = (a.as_f64().unwrap_or(f64::NAN), b.as_f64().unwrap_or(f64::NAN));
                (a - b).abs() <= SAME_NUMBER * a.abs().max(b.abs())
            }
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, value)| b.get(key).is_some_and(|other| same_value(value, other)))
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_value(a, b)),
        _ => a == b,
    }
}

/// The `*.jsonl` files of `folder` whose names begin with `stem`, sorted.
///
/// # Errors
/// [`Error::Io`] where the folder cannot be read.
pub fn files(folder: impl AsRef<Path>, stem: &str) -> Result<Vec<PathBuf>> {
    let folder = folder.as_ref();
    let entries = std::fs::read_dir(folder).map_err(|error| Error::io(folder, error))?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| Error::io(folder, error))?.path();
        let named = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(stem));
        if named && path.extension().is_some_and(|extension| extension == "jsonl") && path.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
