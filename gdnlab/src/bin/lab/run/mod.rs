//! `cargo lab run`: executes notebooks and writes them back with their outputs.

mod executor;
mod notebook;
mod verdict;

use crate::checkout::Checkout;
use crate::setup;
use executor::Executor;
use gdnlab::{Error, Result};
use notebook::Notebook;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Name of the kernel in notebooks and in Jupyter's list.
pub const KERNEL: &str = "rust";

/// Exit code of a command that the user interrupted, as shells have it.
const INTERRUPTED: u8 = 130;

/// Execute notebooks and write them back with their outputs; set up first what the machine lacks.
#[derive(clap::Args)]
pub struct Args {
    /// Notebooks to run, as paths or as names in the folder notebooks/ [default: all of that folder]
    notebooks: Vec<PathBuf>,

    /// Seconds that one cell may take
    #[arg(long, value_name = "SECONDS", default_value_t = 900, env = "GDNLAB_CELL_TIMEOUT",
          value_parser = clap::value_parser!(u64).range(1..))]
    cell_timeout: u64,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        let checkout = Checkout::find()?;
        let notebooks = self.load(&checkout)?;
        setup::ensure(&checkout)?;
        let interrupted = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::clone(&interrupted))
            .map_err(|source| Error::input(format!("cannot listen for Ctrl-C: {source}")))?;
        let mut failed = 0;
        for mut notebook in notebooks {
            let outcome = execute(&checkout, &mut notebook, Duration::from_secs(self.cell_timeout));
            if interrupted.load(Ordering::Relaxed) {
                eprintln!("\nstopped; {} is as it was", checkout.relative(notebook.path()));
                return Ok(ExitCode::from(INTERRUPTED));
            }
            if let Some(fault) = outcome? {
                eprintln!("error: {}: {fault}", checkout.relative(notebook.path()));
                failed += 1;
            }
        }
        Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn load(&self, checkout: &Checkout) -> Result<Vec<Notebook>> {
        let folder = checkout.notebooks();
        let paths = if self.notebooks.is_empty() { notebooks_in(&folder)? } else { self.notebooks.clone() };
        paths.iter().map(|path| Notebook::load(&locate(path, &folder)?)).collect()
    }
}

fn notebooks_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).map_err(|source| Error::io(folder, source))?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<Vec<_>>>();
    let mut paths = paths.map_err(|source| Error::io(folder, source))?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "ipynb"));
    paths.sort();
    if paths.is_empty() {
        return Err(Error::input(format!("{}: no notebook (.ipynb) in this folder", folder.display())));
    }
    Ok(paths)
}

/// The file that `name` means: a path, or a notebook of `folder`, with or without its ending.
fn locate(name: &Path, folder: &Path) -> Result<PathBuf> {
    let mut ended = name.as_os_str().to_owned();
    ended.push(".ipynb");
    let choices = [name.to_path_buf(), PathBuf::from(&ended), folder.join(name), folder.join(&ended)];
    let found = choices.iter().find(|path| path.is_file()).or_else(|| choices.iter().find(|path| path.exists()));
    found.cloned().ok_or_else(|| {
        Error::input(format!("{}: no such notebook, neither here nor in {}", name.display(), folder.display()))
    })
}

/// Runs all cells and saves the notebook. What is wrong with the notebook, if a cell failed.
fn execute(checkout: &Checkout, notebook: &mut Notebook, cell_timeout: Duration) -> Result<Option<String>> {
    let start = Instant::now();
    let cells = notebook.code_cells();
    println!("{}: {} code cells", checkout.relative(notebook.path()), cells.len());
    progress("  starting the kernel");
    let folder = notebook.path().parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (mut executor, reply) = Executor::start(checkout, folder, cell_timeout)?;
    println!(" {:.1} s", reply.seconds);
    if let Some(problem) = reply.problem {
        return Ok(Some(format!("the kernel did not start: {problem}\n{}", executor.last_words())));
    }
    for (position, &cell) in cells.iter().enumerate() {
        let source = notebook.source(cell);
        let label = format!("cell {} of {}", position + 1, cells.len());
        progress(&format!("  {label}: {}", headline(&source)));
        let mut reply = executor.run(&verdict::with_end_mark(&source))?;
        println!(" {:.1} s", reply.seconds);
        let reached_end = verdict::take_end_mark(&mut reply.outputs);
        let outcome = verdict::Outcome {
            source: &source,
            outputs: &reply.outputs,
            reached_end,
            showed_before: verdict::shows_something(notebook.outputs(cell)),
        };
        let fault = match reply.problem {
            Some(problem) => Some(format!("{problem}\n{}", executor.last_words())),
            None => verdict::fault(&outcome).filter(|_| !notebook.may_fail(cell)),
        };
        if let Some(fault) = fault {
            return Ok(Some(format!("{label} failed\n{}\n{fault}", indented(&source))));
        }
        notebook.set_outputs(cell, reply.outputs);
    }
    notebook.save()?;
    println!("  written, {:.1} s in all", start.elapsed().as_secs_f64());
    Ok(None)
}

/// Prints without ending the line, at once.
fn progress(text: &str) {
    print!("{text} ...");
    let _ = std::io::stdout().flush();
}

/// The first line of code of a cell, cut to fit a terminal.
fn headline(source: &str) -> String {
    const WIDTH: usize = 56;
    let line = source.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with("//"));
    let line = line.unwrap_or_default();
    if line.chars().count() <= WIDTH { line.to_owned() } else { line.chars().take(WIDTH).collect::<String>() + "..." }
}

fn indented(source: &str) -> String {
    source.lines().map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n")
}
