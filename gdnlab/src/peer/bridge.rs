//! A Python process that runs somebody's kernel on tensor files in shared memory.

use super::write::has_ended;
use crate::{Error, Result};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;
use tempfile::TempDir;

/// What runs in the user's Python.
const SCRIPT: &str = include_str!("bridge.py");
/// Memory that looks like a folder, where there is one.
const SHARED_MEMORY: &str = "/dev/shm";
/// What stands before the process id in the names of our folders.
const PREFIX: &str = "gdnlab-peer-";
/// Lines of the process's own words that an error repeats.
const LAST_LINES: usize = 3;

/// Where tensor files can lie, the fastest first.
pub(super) fn places() -> Vec<PathBuf> {
    let shared = PathBuf::from(SHARED_MEMORY);
    let mut places: Vec<PathBuf> = if shared.is_dir() { vec![shared] } else { Vec::new() };
    places.push(std::env::temp_dir());
    places
}

/// What results depend on: versions, settings, and what really ran. As text: one line.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct About {
    /// Versions of the packages, by their names.
    #[serde(default)]
    pub versions: BTreeMap<String, String>,
    /// Variables of the environment and options that were in force.
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
    /// What tensors were handed over as: torch, numpy or plain.
    #[serde(default)]
    pub arrays: String,
    /// Name of the GPU, where it ran on one.
    pub gpu: Option<String>,
    /// Which backend the library says that it chose, where it has several.
    pub backend: Option<String>,
    /// Which backends refused, and why.
    #[serde(default)]
    pub refused: BTreeMap<String, String>,
}

impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let join = |of: &BTreeMap<String, String>, between: &str| {
            of.iter().map(|(name, value)| format!("{name}{between}{value}")).collect::<Vec<_>>().join(", ")
        };
        f.write_str(&join(&self.versions, " "))?;
        for words in
            [join(&self.settings, "="), self.backend.as_ref().map_or_else(String::new, |b| format!("backend {b}"))]
        {
            if !words.is_empty() {
                write!(f, "; {words}")?;
            }
        }
        Ok(())
    }
}

/// An answer of the process.
#[derive(Debug, Deserialize)]
pub(super) struct Answer {
    ok: bool,
    /// Why not: missing, raised or unsupported.
    kind: Option<String>,
    error: Option<String>,
    hint: Option<String>,
    #[serde(default)]
    pub about: About,
    /// File with the results.
    pub result: Option<PathBuf>,
    /// Times that it took.
    pub samples_ms: Option<Vec<f64>>,
    /// How: by replays of a graph, by events around calls, or by the clock on the wall.
    pub timed_by: Option<String>,
    /// Whether the process is of no use any more, since the GPU refuses all that it asks for.
    #[serde(default)]
    pub spent: bool,
}

/// Why there is no answer. The process is of no use then.
pub(super) struct Silence {
    pub words: String,
    /// Whether the time was over, rather than the process.
    pub late: bool,
}

impl Answer {
    /// Whether less could have gone well: the call was begun, and raised or was refused.
    pub fn was_begun(&self) -> bool {
        self.kind.as_deref() != Some("missing")
    }

    /// What went wrong, in words.
    pub fn failure(&self) -> Option<String> {
        if self.ok {
            return None;
        }
        let error = self.error.as_deref().unwrap_or("it gave no reason");
        let what = match self.kind.as_deref() {
            Some("missing") => format!("this Python lacks a module ({error})"),
            Some("unsupported") => error.to_owned(),
            _ => format!("it raised {error}"),
        };
        Some(self.hint.as_ref().map_or(what.clone(), |hint| format!("{what}; {hint}")))
    }
}

/// A process that is ready for requests. It ends, with all that it started, and its files vanish, when this is dropped or
/// when this process ends.
pub(super) struct Bridge {
    child: Child,
    requests: ChildStdin,
    answers: Receiver<String>,
    folder: TempDir,
}

impl Bridge {
    /// Starts `python` for the peer that the script knows as `call`, with its files in a new folder in `place`.
    pub fn start(python: &Path, call: &str, place: &Path) -> Result<Self> {
        remove_abandoned(place);
        let folder = tempfile::Builder::new()
            .prefix(&format!("{PREFIX}{}-", std::process::id()))
            .tempdir_in(place)
            .map_err(|error| Error::io(place, error))?;
        let script = folder.path().join("bridge.py");
        fs::write(&script, SCRIPT).map_err(|error| Error::io(&script, error))?;
        let words = folder.path().join("stderr.txt");
        let stderr = File::create(&words).map_err(|error| Error::io(&words, error))?;
        let mut child = Command::new(python)
            .arg(&script)
            .arg(call)
            .arg(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .process_group(0)
            .spawn()
            .map_err(|error| not_started(python, &error))?;
        let (Some(requests), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Error::input(format!("{}: no pipes to the process", python.display())));
        };
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || {
            // The process ends, or nobody waits for it any more.
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            lines.take_while(|line| sender.send(line.clone()).is_ok()).for_each(drop);
        });
        Ok(Self { child, requests, answers, folder })
    }

    /// A file of this name in the folder of the process.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Sends `request` and waits for the answer.
    pub fn ask(&mut self, request: &Value, timeout: Duration) -> Result<Answer, Silence> {
        // A process that has ended is told apart below.
        let _ = writeln!(self.requests, "{request}").and_then(|()| self.requests.flush());
        let silence = |words| Silence { words, late: false };
        match self.answers.recv_timeout(timeout) {
            Ok(line) => {
                serde_json::from_str(&line).map_err(|error| silence(format!("its answer makes no sense ({error})")))
            }
            Err(RecvTimeoutError::Timeout) => {
                let words = format!(
                    "it gave no answer within {} s, so it was stopped{}; GDNLAB_PEER_TIMEOUT sets the time in seconds",
                    timeout.as_secs_f64(),
                    self.last_words()
                );
                Err(Silence { words, late: true })
            }
            Err(RecvTimeoutError::Disconnected) => {
                let ended = self.child.wait().map_or_else(|error| error.to_string(), describe);
                Err(silence(format!("its process ended ({ended}){}", self.last_words())))
            }
        }
    }

    /// The last lines that the process wrote to standard error.
    fn last_words(&self) -> String {
        let text = fs::read(self.file("stderr.txt")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let last = &lines[lines.len().saturating_sub(LAST_LINES)..];
        if last.is_empty() { String::new() } else { format!(", its last words: {}", last.join(" / ")) }
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        const KILL: i32 = 9;
        // SAFETY: no memory is involved. The group is that of our child, which has not been waited for, so its number is
        // still its own.
        unsafe { kill(-(self.child.id() as i32), KILL) };
        let _ = self.child.wait();
    }
}

unsafe extern "C" {
    /// Of the C library, which the standard library links: sends a signal to a process, or to a group by its negative number.
    fn kill(pid: i32, signal: i32) -> i32;
}

fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match status.signal() {
        Some(signal) => format!("signal {signal}"),
        None => status.to_string(),
    }
}

fn not_started(python: &Path, error: &std::io::Error) -> Error {
    let python = python.display();
    match error.kind() {
        ErrorKind::NotFound => Error::input(format!(
            "no Python called '{python}': name one with --python or GDNLAB_PYTHON, such as that of a virtual environment"
        )),
        _ => Error::input(format!("Python '{python}' cannot be started: {error}")),
    }
}

/// Removes folders of processes that were ended before they could.
fn remove_abandoned(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok());
        if owner.is_some_and(has_ended) {
            // Somebody else's folder stays.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
