//! What a file of records holds, as it was found: whole lines, and perhaps a last one that was cut short.

use super::{Record, files, parse};
use crate::{Error, Result};
use serde_json::Value;
use std::fmt;
use std::path::{Path, PathBuf};

/// What some editors put before a text.
const BYTE_ORDER_MARK: &str = "\u{feff}";

/// Where a record stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// Its line, counted from 1.
    pub line: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.line)
    }
}

/// The text of a file of records, on this disk or from elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Where it lies; an address where that is no disk.
    pub path: PathBuf,
    /// Its whole lines.
    pub text: String,
    /// Its last line, where a write was interrupted there.
    pub torn: Option<Place>,
}

impl Source {
    /// What `bytes`, found at `path`, say.
    ///
    /// # Errors
    /// [`Error::Input`] where they are no UTF-8.
    pub fn new(path: impl Into<PathBuf>, bytes: &[u8]) -> Result<Self> {
        let path = path.into();
        let whole = whole_lines(bytes);
        let lines = |bytes: &[u8]| bytes.iter().filter(|&&byte| byte == b'\n').count();
        let text = std::str::from_utf8(&bytes[..whole]).map_err(|error| {
            let line = lines(&bytes[..error.valid_up_to()]) + 1;
            Error::input(format!("{}:{line}: expected JSON Lines in UTF-8, got other bytes", path.display()))
        })?;
        let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text).to_owned();
        let torn = (whole < bytes.len()).then(|| Place { path: path.clone(), line: lines(bytes) + 1 });
        Ok(Self { path, text, torn })
    }

    /// The file at `path`.
    ///
    /// # Errors
    /// [`Error::Io`] where it cannot be read, otherwise as [`Source::new`].
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::new(path, &std::fs::read(path).map_err(|error| Error::io(path, error))?)
    }

    /// The file at `path`, or those named `*.jsonl` where that is a folder.
    ///
    /// # Errors
    /// [`Error::Input`] for a folder without such files, otherwise as [`Source::read`].
    pub fn read_all(path: impl AsRef<Path>) -> Result<Vec<Self>> {
        let path = path.as_ref();
        if !path.is_dir() {
            return Ok(vec![Self::read(path)?]);
        }
        let found = files(path, "")?;
        if found.is_empty() {
            return Err(Error::input(format!("{}: expected files *.jsonl in this folder, got none", path.display())));
        }
        found.iter().map(Self::read).collect()
    }

    /// The records of its whole lines.
    ///
    /// # Errors
    /// As [`parse`].
    pub fn records(&self) -> Result<Vec<Record>> {
        parse(&self.text, &self.path)
    }
}

/// How many of `bytes` are whole lines: all, unless the last line has no end and is the beginning of an object alone.
pub(super) fn whole_lines(bytes: &[u8]) -> usize {
    let last = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    let cut = serde_json::from_slice::<Value>(&bytes[last..]).is_err_and(|error| error.is_eof());
    if cut && bytes[last..].trim_ascii_start().starts_with(b"{") { last } else { bytes.len() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_object_without_an_end_on_the_last_line_is_an_interrupted_write() {
        for (text, whole, line) in [
            ("{\"a\":1}\n{\"b\":2}\n", "{\"a\":1}\n{\"b\":2}\n", None),
            ("{\"a\":1}\n{\"b\":2}", "{\"a\":1}\n{\"b\":2}", None),
            ("{\"a\":1}\n{\"b\":", "{\"a\":1}\n", Some(2)),
            ("{\"a", "", Some(1)),
            ("{\"a\":1}\n{\"b\":\n", "{\"a\":1}\n{\"b\":\n", None),
            ("{\"a\":1}\nword", "{\"a\":1}\nword", None),
            ("{\"a\":1}\n[1", "{\"a\":1}\n[1", None),
            ("\u{feff}{\"a\":1}\n", "{\"a\":1}\n", None),
            ("", "", None),
        ] {
            let source = Source::new("x.jsonl", text.as_bytes()).unwrap();
            assert_eq!((source.text.as_str(), source.torn.map(|place| place.line)), (whole, line), "{text:?}");
        }
        // Inside of a letter.
        let cut = "{\"a\":1}\n{\"b\":\"ü".as_bytes();
        assert_eq!(Source::new("x.jsonl", &cut[..cut.len() - 1]).unwrap().torn.unwrap().to_string(), "x.jsonl:2");
    }
}
