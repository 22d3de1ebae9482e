//! The errors of kernels on a GPU: measured now where there is one, else those that were measured before and kept.

use crate::cuda::Gpu;
use crate::kernel::{Kernel, kernel};
use crate::numerics::{Problems, Step, run};
use crate::record::{self, Measurement, Record, Workload};
use crate::{Error, Result};
use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Errors of kernels on a GPU. As text: one line that says where they come from.
#[derive(Clone, Debug, PartialEq)]
pub struct OnGpu {
    /// One record for each kernel, problem and tensor.
    pub records: Vec<Record>,
    /// Where they come from.
    pub origin: Origin,
}

/// Where measurements come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The GPU of this machine, now.
    Measured {
        /// The file that holds them now.
        kept: PathBuf,
    },
    /// A file, since this machine has no GPU that could measure.
    Read {
        /// The file.
        path: PathBuf,
        /// What this machine lacks.
        reason: String,
    },
}

impl OnGpu {
    /// Name of the GPU that they were measured on, such as `NVIDIA H200`.
    pub fn gpu(&self) -> &str {
        self.records.first().and_then(|record| record.environment.machine.gpu.as_deref()).unwrap_or("unknown GPU")
    }
}

impl fmt::Display for OnGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gpu = self.gpu();
        match &self.origin {
            Origin::Measured { kept } => write!(f, "{gpu}, measured now, kept in {}", kept.display()),
            Origin::Read { path, reason } => {
                let date =
                    self.records.first().and_then(|record| record.environment.date()).unwrap_or("an unknown day");
                write!(f, "{gpu}, measured on {date}, read from {}; not measured now: {reason}", path.display())
            }
        }
    }
}

/// The errors of the GPU kernels called `names` on `problems`.
///
/// Where this machine has a GPU they are measured on it, now, and kept in `folder` as [`record::keep`] does under the name
/// `suite`. Where it has none, they come from the newest `<suite>_*.jsonl` of `folder` that holds all of them. To read even
/// though there is a GPU, hide it: `CUDA_VISIBLE_DEVICES=`.
///
/// # Errors
/// [`Error::Input`] where a name is not that of a kernel for a GPU, or where there is neither a GPU nor a file; otherwise
/// as [`run`] and [`record::keep`].
pub fn numerics_on_gpu(
    folder: impl AsRef<Path>,
    suite: &str,
    problems: &Problems,
    names: &[&str],
    progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<OnGpu> {
    let folder = folder.as_ref();
    let kernels = names.iter().map(|name| kernel(name)).collect::<Result<Vec<_>>>()?;
    let kernels: Vec<&dyn Kernel> = kernels.iter().map(AsRef::as_ref).collect();
    if let Some(other) = kernels.iter().find(|kernel| !kernel.on_gpu()) {
        return Err(Error::input(format!("{} runs on a CPU: expected kernels for a GPU", other.name())));
    }
    if let Some(reason) = what_is_missing()? {
        let (path, records) = newest(folder, suite, &wanted(problems, &kernels), &reason)?;
        return Ok(OnGpu { records, origin: Origin::Read { path, reason } });
    }
    let records = run(problems, &kernels, progress)?;
    let kept = record::keep(folder, suite, &records)?;
    Ok(OnGpu { records, origin: Origin::Measured { kept } })
}

/// All that the newest `<suite>_*.jsonl` of `folder` with GPU records of `kernel` holds of that kernel on a GPU, whatever
/// the problem, and the path of that file.
///
/// # Errors
/// [`Error::Input`] where no file holds any.
pub fn recorded_on_gpu(folder: impl AsRef<Path>, suite: &str, kernel: &str) -> Result<(PathBuf, Vec<Record>)> {
    let folder = folder.as_ref();
    let mut all = Vec::new();
    for path in record::files(folder, &format!("{suite}_"))? {
        let of_kernel = |record: &Record| is_on_gpu(record) && record.workload.kernel.as_deref() == Some(kernel);
        let held: Vec<Record> = record::read(&path)?.into_iter().filter(of_kernel).collect();
        if !held.is_empty() {
            all.push((path, held));
        }
    }
    all.into_iter().max_by_key(|(_, records)| time(records)).ok_or_else(|| {
        Error::input(format!(
            "no measurements of {kernel} on a GPU: expected some in {}",
            folder.join(format!("{suite}_*.jsonl")).display()
        ))
    })
}

/// When the last of `records` was measured.
pub(super) fn time(records: &[Record]) -> Option<String> {
    records.iter().filter_map(|record| record.environment.utc.clone()).max()
}

/// What this machine lacks to measure, in a few words; `None` where it has all.
fn what_is_missing() -> Result<Option<String>> {
    match Gpu::shared() {
        Ok(_) => Ok(None),
        // What follows the first clause tells how to get a GPU going.
        Err(Error::Gpu(message)) => Ok(message.split([':', ';']).next().map(str::to_owned)),
        Err(other) => Err(other),
    }
}

/// What each kernel is to be measured on: one workload for each problem and kernel.
fn wanted(problems: &Problems, kernels: &[&dyn Kernel]) -> Vec<Workload> {
    let of_shape = problems.shapes.iter().map(|shape| problems.workload(shape));
    let of_problem =
        of_shape.flat_map(|shape| problems.regimes.iter().map(move |r| shape.clone().inputs(r.name(), problems.seed)));
    of_problem
        .flat_map(|problem| kernels.iter().map(move |kernel| problem.clone().kernel(kernel.name(), kernel.mode())))
        .collect()
}

/// The newest file that holds errors of every workload of `wanted`, and those errors.
fn newest(folder: &Path, suite: &str, wanted: &[Workload], reason: &str) -> Result<(PathBuf, Vec<Record>)> {
    let mut complete: Vec<(PathBuf, Vec<Record>)> = Vec::new();
    let mut incomplete = Vec::new();
    for path in record::files(folder, &format!("{suite}_"))? {
        let held = record::read(&path)?;
        if !held.iter().any(is_on_gpu) {
            continue;
        }
        match wanted.iter().map(|workload| latest(&held, workload)).collect::<Result<Vec<_>, _>>() {
            Ok(found) => complete.push((path, found.concat())),
            Err(missing) => incomplete.push(format!("{} has none of {missing}", path.display())),
        }
    }
    complete.into_iter().max_by_key(|(_, records)| time(records)).ok_or_else(|| {
        let seen = if incomplete.is_empty() { "there is no such file".to_owned() } else { incomplete.join("; ") };
        Error::input(format!(
            "{reason}, and no measurements to read instead: expected {} holding {} measurements made on a GPU, but {seen}. \
             Run this where there is a GPU, or take the file from the repository",
            folder.join(format!("{suite}_*.jsonl")).display(),
            wanted.len()
        ))
    })
}

/// Whether a GPU made it.
pub(super) fn is_on_gpu(record: &Record) -> bool {
    record.environment.machine.gpu.is_some()
}

/// The errors of each tensor for `workload`, the last where it was measured several times. The workload in words where
/// there are none.
fn latest(held: &[Record], workload: &Workload) -> Result<Vec<Record>, String> {
    let mut found: Vec<&Record> = Vec::new();
    for record in held.iter().filter(|record| is_on_gpu(record)) {
        let Measurement::Numerics(errors) = &record.measurement else { continue };
        if (Workload { pass: None, ..record.workload.clone() }) != *workload {
            continue;
        }
        found.retain(|earlier| earlier.errors().is_some_and(|earlier| earlier.tensor != errors.tensor));
        found.push(record);
    }
    if found.is_empty() { Err(words(workload)) } else { Ok(found.into_iter().cloned().collect()) }
}

fn words(workload: &Workload) -> String {
    let size = |size: Option<usize>| size.map_or_else(String::new, |size| size.to_string());
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    format!(
        "{} in mode {} at T={} K={} V={}, {} inputs from seed {}",
        text(&workload.kernel),
        text(&workload.mode),
        size(workload.tokens),
        size(workload.key_dim),
        size(workload.value_dim),
        text(&workload.regime),
        workload.seed.unwrap_or_default()
    )
}

#[cfg(test)]
#[path = "on_gpu_tests.rs"]
mod tests;
