//! The Jupyter client: a Python process that holds one kernel and runs one cell at a time.

use crate::checkout::Checkout;
use gdnlab::{Error, Result};
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// Nearly all of a kernel's start is compilation; longer than this, and it hangs.
const START_TIMEOUT: Duration = Duration::from_secs(1800);

pub struct Executor {
    python: Child,
    requests: Option<ChildStdin>,
    replies: BufReader<ChildStdout>,
    log: PathBuf,
}

/// What came back for a cell.
#[derive(Deserialize)]
pub struct Reply {
    pub outputs: Vec<Value>,
    pub seconds: f64,
    /// What kept the cell from running to its end, where Jupyter knows.
    pub problem: Option<String>,
}

impl Executor {
    /// Starts a kernel and waits until it is ready for cells.
    pub fn start(checkout: &Checkout, folder: &Path, cell_timeout: Duration) -> Result<(Self, Reply)> {
        let log = checkout.tools().join("kernel.log");
        let mut python = Command::new(checkout.python())
            .args(["-c", include_str!("execute.py")])
            .envs(checkout.jupyter_env())
            .env("PYDEVD_DISABLE_FILE_VALIDATION", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|source| Error::io(checkout.python(), source))?;
        let (Some(requests), Some(replies)) = (python.stdin.take(), python.stdout.take()) else {
            return Err(Error::input("the notebook client has no pipes"));
        };
        let mut executor = Self { python, requests: Some(requests), replies: BufReader::new(replies), log };
        let reply = executor.ask(&json!({
            "kernel": super::KERNEL,
            "folder": folder,
            "log": executor.log,
            "cell_timeout_s": cell_timeout.as_secs(),
            "start_timeout_s": START_TIMEOUT.as_secs(),
        }))?;
        Ok((executor, reply))
    }

    pub fn run(&mut self, source: &str) -> Result<Reply> {
        self.ask(&json!({ "source": source }))
    }

    /// The last lines that the kernel printed on its own account.
    pub fn last_words(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    fn ask(&mut self, request: &Value) -> Result<Reply> {
        let gone = || Error::input("the notebook client ended without an answer");
        if let Some(requests) = &mut self.requests {
            writeln!(requests, "{request}").map_err(|_| gone())?;
        }
        let mut line = String::new();
        self.replies.read_line(&mut line).map_err(|_| gone())?;
        serde_json::from_str(&line).map_err(|_| gone())
    }
}

impl Drop for Executor {
    /// Closes the pipe, which makes the client shut its kernel down, and waits for that.
    fn drop(&mut self) {
        self.requests = None;
        let _ = self.python.wait();
    }
}
