//! Sets up, inside the checkout, what notebooks need and the machine lacks.
//!
//! Every step looks first whether its result is there and whole, and marks the result as whole only at its end. So a
//! set-up that was stopped goes on where it was, and one that is complete costs a second.

mod cells;
mod evcxr;
mod jupyter;
mod python;
mod std_source;

use crate::checkout::Checkout;
use gdnlab::{Error, Result};
use std::fs::{File, TryLockError};
use std::path::Path;
use std::process::{Command, Stdio};

pub use std_source::find as find_std_source;

/// Makes everything ready for notebooks. Prints a line for each thing that takes time.
pub fn ensure(checkout: &Checkout) -> Result<()> {
    let tools = checkout.tools();
    std::fs::create_dir_all(&tools).map_err(|source| Error::io(&tools, source))?;
    let _lock = lock(&tools.join("setup.lock"))?;
    python::ensure(checkout)?;
    std_source::ensure(checkout)?;
    evcxr::ensure(checkout)?;
    jupyter::ensure(checkout)?;
    cells::ensure(checkout)
}

/// Holds the lock file at `path`, after waiting for another set-up if there is one.
fn lock(path: &Path) -> Result<File> {
    let file = File::create(path).map_err(|source| Error::io(path, source))?;
    match file.try_lock() {
        Ok(()) => return Ok(file),
        Err(TryLockError::WouldBlock) => announce("waiting for another set-up of this checkout to finish"),
        Err(TryLockError::Error(source)) => return Err(Error::io(path, source)),
    }
    file.lock().map_err(|source| Error::io(path, source))?;
    Ok(file)
}

/// Tells the person what is being done.
fn announce(text: &str) {
    println!("set-up: {text}");
}

/// Runs a step's command with its messages on the terminal.
fn run(what: &str, command: &mut Command) -> Result<()> {
    let status = command.stdin(Stdio::null()).status().map_err(|source| cannot_start(command, &source))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::input(format!("{what} failed (see above); once its reason is gone, the same command goes on from here")))
}

/// Runs a step's command and returns what it prints; its complaint goes into the error.
fn output_of(what: &str, command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().map_err(|source| cannot_start(command, &source))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(Error::input(format!("{what} failed: {}", complaint(&String::from_utf8_lossy(&output.stderr)))))
}

/// The last line that calls itself an error, or else the last line.
fn complaint(messages: &str) -> &str {
    let lines = || messages.lines().map(str::trim).filter(|line| !line.is_empty());
    let is_error = |line: &&str| line.to_lowercase().starts_with("e: ") || line.to_lowercase().starts_with("error");
    lines().rfind(is_error).or_else(|| lines().next_back()).unwrap_or("no message")
}

/// As [`output_of`], for a command that downloads something.
fn fetch(what: &str, command: &mut Command) -> Result<String> {
    output_of(what, command).map_err(|error| Error::input(format!("{error} (is the network reachable?)")))
}

fn cannot_start(command: &Command, source: &std::io::Error) -> Error {
    Error::input(format!("cannot run `{}`: {source}", command.get_program().to_string_lossy()))
}

/// Writes `text` to `path` if it is not there yet, as a whole or not at all.
fn write_if_new(path: &Path, text: &str) -> Result<()> {
    if std::fs::read_to_string(path).is_ok_and(|present| present == text) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|source| Error::io(folder, source))?;
    }
    let partial = path.with_added_extension("partial");
    std::fs::write(&partial, text).map_err(|source| Error::io(&partial, source))?;
    std::fs::rename(&partial, path).map_err(|source| Error::io(path, source))
}

/// Removes a folder that may not exist.
fn remove_folder(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path, source)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::complaint;

    #[test]
    fn a_failed_command_is_quoted_by_its_error_line() {
        assert_eq!(complaint("info: a\nerror: no such host\n  0: <unknown>\n"), "error: no such host");
        assert_eq!(complaint("a\n\nb\n"), "b");
        assert_eq!(complaint(""), "no message");
    }
}
