//! What the commands share: printing, and ending early without leaving anything half-written.

use gdnlab::cuda::Gpu;
use gdnlab::numerics::Step;
use gdnlab::peer::{Case, read_case, remove_unfinished};
use gdnlab::record::{self, Held, Record};
use gdnlab::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use std::io::{ErrorKind, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// The GPU, or none where this machine has none that can be used: then the person is told why, and that the CPU does what
/// `doing` says, such as `training`.
pub fn gpu_if_any(doing: &str) -> Result<Option<&'static Gpu>> {
    match Gpu::shared() {
        Ok(gpu) => Ok(Some(gpu)),
        Err(Error::Gpu(why)) => {
            note(format_args!("{doing} on the CPU: {why}"));
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// What is recorded in `data`, to be spared work that was done. What cannot be read is told and left out.
pub fn recorded(data: &Path) -> Result<Vec<Record>> {
    Ok(recorded_files(data)?.into_iter().flat_map(|held| held.records).collect())
}

/// The same by files; none where there is no such folder.
pub fn recorded_files(data: &Path) -> Result<Vec<Held>> {
    if !data.exists() {
        return Ok(Vec::new());
    }
    record::read_what_can_be(data, |what| note(format_args!("warning: {what}")))
}

/// Says each step of long work once, however often it is asked about.
#[derive(Default)]
pub struct Said(Option<usize>);

impl Said {
    /// Says `step` unless it was the last that was said.
    pub fn step(&mut self, step: &Step) {
        if self.0.replace(step.done) != Some(step.done) {
            note(format_args!("[{}/{}] {}", step.done + 1, step.total, step.name));
        }
    }
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

/// Whether the person wants an end. The first Ctrl-C asks for one, and a second one ends the process at once.
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// What the process returns after it was interrupted, as shells report it.
    pub const EXIT_CODE: u8 = 128 + SIGINT as u8;

    /// Listens from now on.
    pub fn new() -> Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            flag::register_conditional_shutdown(signal, 128 + signal, asked.clone())
                .and_then(|_| flag::register(signal, asked.clone()))
                .map_err(|error| Error::io("signals", error))?;
        }
        Ok(Self(asked))
    }

    /// Whether to go on.
    pub fn control(&self) -> ControlFlow<()> {
        if self.0.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}
