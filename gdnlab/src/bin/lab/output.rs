//! What the commands share: printing, and ending early without leaving anything half-written.

use gdnlab::peer::{Case, read_case, remove_unfinished};
use gdnlab::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{ErrorKind, Write};
use std::path::Path;

/// Prints `text` to standard output. A reader that has left, such as `head`, is no error.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Error::io("standard output", error)),
        _ => Ok(()),
    }
}

/// Prints a line for the person to standard error.
pub fn note(line: impl std::fmt::Display) {
    // Where nobody reads, nothing is lost.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Reads the case at `path` and says what is odd about it.
pub fn open_case(path: &Path) -> Result<Case> {
    let case = read_case(path)?;
    warn(path, &case.warnings);
    Ok(case)
}

/// Says what is odd about the file at `path`.
pub fn warn(path: &Path, warnings: &[String]) {
    warnings.iter().for_each(|warning| note(format_args!("warning: {}: {warning}", path.display())));
}

/// Makes Ctrl-C and a request to terminate remove what is half-written before they end the process.
pub fn clean_up_when_interrupted() -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(|error| Error::io("signals", error))?;
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            remove_unfinished();
            // As shells report it.
            std::process::exit(128 + signal);
        }
    });
    Ok(())
}
