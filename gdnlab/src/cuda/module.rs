//! Compiled kernels on the GPU.

use super::build::Compiled;
use super::launch::{Grid, Limits};
use super::profile;
use super::raw::{Entry, Image, Launch, failed};
use super::report::{FunctionReport, Report};
use super::stream::Stream;
use crate::{Error, Result};
use gdnlab_deps::cudarc::driver::CudaContext;
use std::sync::Arc;

/// One specialisation of a kernel file on the GPU.
pub struct Module {
    name: String,
    image: Arc<Image>,
    report: Report,
    compiler: String,
    limits: Limits,
}

impl Module {
    pub(super) fn load(context: &Arc<CudaContext>, name: String, compiled: Compiled, limits: Limits) -> Result<Self> {
        let image = Image::load(context, &compiled.cubin).map_err(|error| failed(&format!("loading {name}"), error))?;
        let Compiled { report, compiler, .. } = compiled;
        Ok(Self { name, image: Arc::new(image), report, compiler, limits })
    }

    /// What is known about it.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Version of the compiler that made it, such as `13.0`.
    pub fn compiler(&self) -> &str {
        &self.compiler
    }

    /// The kernel `name`.
    ///
    /// # Errors
    /// [`Error::Gpu`] where there is none of that name.
    pub fn function(&self, name: &str) -> Result<Function> {
        let report = find(&self.report, &self.name, name)?.clone();
        let looking_up = |error| failed(&format!("looking up {name} in {}", self.name), error);
        let entry = self.image.entry(name).map_err(looking_up)?;
        // Without this a block gets 48 KiB at the most. What a launch does not ask for, it does not take.
        let dynamic_bytes = self.limits.shared_bytes_per_block.saturating_sub(report.shared_bytes);
        entry.allow_shared_bytes(dynamic_bytes).map_err(looking_up)?;
        Ok(Function { entry, report, limits: self.limits })
    }
}

fn find<'a>(report: &'a Report, module: &str, name: &str) -> Result<&'a FunctionReport> {
    report.function(name).ok_or_else(|| {
        let names = report.functions.iter().map(|function| function.name.as_str()).collect::<Vec<_>>().join(", ");
        Error::gpu(format!("{module} has no kernel '{name}': expected one of {names}"))
    })
}

/// A kernel that can be launched.
pub struct Function {
    entry: Entry,
    report: FunctionReport,
    limits: Limits,
}

impl Function {
    /// What is known about it.
    pub fn report(&self) -> &FunctionReport {
        &self.report
    }

    /// Starts the kernel on `stream` with one structure for all its parameters. A grid without blocks starts nothing.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the GPU or the kernel does not allow this shape, the structure has another size than the
    /// kernel's, or the driver refuses. An error of the kernel itself comes with a later call, when it has run.
    ///
    /// # Safety
    /// `P` is `repr(C)` with the fields of the kernel's structure. Every address in it is that of memory which is as large
    /// as the kernel takes it to be, and which is neither freed nor used by another stream until the kernel has ended;
    /// where the launch is recorded into a graph, until its last replay has ended.
    pub unsafe fn launch<P: Copy>(&self, stream: &Stream, grid: Grid, parameters: &P) -> Result<()> {
        grid.check(&self.report, size_of::<P>(), &self.limits)?;
        if grid.is_empty() {
            return Ok(());
        }
        let Grid { blocks, threads, shared_bytes, cluster, early } = grid;
        let early = early && self.limits.capability.0 >= 9;
        let launch = Launch { blocks, threads, shared_bytes, cluster, early };
        let parameter = std::ptr::from_ref(parameters).cast();
        // SAFETY: the structure has the kernel's size, and the rest is the caller's promise.
        let start = || unsafe { self.entry.launch(stream.cudarc(), &launch, parameter) };
        let failed = |error| failed(&format!("launching {} with {grid:?}", self.report.name), error);
        profile::around(stream, || self.report.name.clone(), || start().map_err(failed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_kernel_is_named_with_those_there_are() {
        let function = |name: &str| FunctionReport { name: name.to_owned(), ..FunctionReport::default() };
        let report = Report { functions: vec![function("forward"), function("backward")], warnings: vec![] };
        let error = find(&report, "recurrent.cu STATE=double", "foward").unwrap_err().to_string();
        assert!(error.contains("recurrent.cu STATE=double has no kernel 'foward'"), "{error}");
        assert!(error.contains("forward, backward"), "{error}");
        assert_eq!(find(&report, "recurrent.cu", "backward").unwrap().name, "backward");
    }
}
