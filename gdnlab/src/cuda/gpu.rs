//! The GPU of this process.

use super::buffer::{Buffer, Element};
use super::build::{Architecture, Build};
use super::cache::Cache;
use super::launch::Limits;
use super::module::Module;
use super::raw::{self, failed};
use super::stream::{Event, Graph, Stream};
use crate::{Error, Result};
use gdnlab_deps::cudarc::driver::{CudaContext, sys::CUdevice_attribute as Attribute};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Oldest compute capability that the kernels run on.
const OLDEST: (u32, u32) = (8, 0);

/// What runs without a GPU, as the end of a message.
const ELSEWHERE: &str = "the kernels of the CPU (cpu-chunk-*) run everywhere";

/// A GPU with its primary stream, on which all that is said without a stream happens in order.
pub struct Gpu {
    /// Name, such as `NVIDIA H200`.
    pub name: String,
    /// Compute capability, such as (9, 0).
    pub capability: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory that a block can have at the most, in bytes.
    pub shared_bytes_per_block: u32,
    /// Size of the level-2 cache in bytes.
    pub l2_bytes: usize,
    /// Memory in bytes.
    pub memory_bytes: usize,
    /// Version of CUDA that the driver implements.
    pub cuda: (u32, u32),
    context: Arc<CudaContext>,
    stream: Stream,
    cache: Cache,
    compiler: OnceLock<String>,
    modules: Mutex<HashMap<String, Slot>>,
}

/// A place for a module. It is held while the module is made, so that two threads do not make one twice.
type Slot = Arc<Mutex<Option<Arc<Module>>>>;

impl Gpu {
    /// The GPU that this process uses, started at the first call: GPU 0, or the one that `GDNLAB_GPU` says, of those that
    /// `CUDA_VISIBLE_DEVICES` leaves visible.
    ///
    /// # Errors
    /// [`Error::Gpu`] where there is no driver, no GPU, or the driver refuses; [`Error::Input`] where `GDNLAB_GPU` names
    /// none.
    pub fn shared() -> Result<&'static Self> {
        static SHARED: OnceLock<Gpu> = OnceLock::new();
        static STARTING: Mutex<()> = Mutex::new(());
        let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = SHARED.get() {
            return Ok(gpu);
        }
        let gpu = Self::start(ordinal()?)?;
        Ok(SHARED.get_or_init(|| gpu))
    }

    /// How many GPUs there are for `GDNLAB_GPU` to choose from. Starts none.
    ///
    /// # Errors
    /// [`Error::Gpu`] where there is no driver, or it shows no GPU.
    pub fn visible() -> Result<usize> {
        count()
    }

    /// The GPU of this process if it was used already; starts nothing.
    pub fn in_use() -> Option<&'static Self> {
        if raw::in_use(ordinal().ok()?) { Self::shared().ok() } else { None }
    }

    fn start(ordinal: usize) -> Result<Self> {
        let count = count()?;
        if ordinal >= count {
            return Err(Error::input(format!(
                "GDNLAB_GPU={ordinal}: expected a number below {count}, the number of GPUs that the driver shows"
            )));
        }
        let start = |error| failed("starting the GPU", error);
        let cuda = raw::cuda_version().map_err(start)?;
        if cuda < (12, 0) {
            let (major, minor) = cuda;
            return Err(Error::gpu(format!(
                "the driver implements CUDA {major}.{minor}, and 12.0 or newer is needed: update the driver; {ELSEWHERE}"
            )));
        }
        let context = CudaContext::new(ordinal).map_err(start)?;
        // SAFETY: no buffer exists yet, and what this module lets callers do with several streams is ordered by streams and
        // events alone (see `Stream`). With tracking on, buffers could not be used in a captured graph.
        unsafe { context.disable_event_tracking() };
        raw::keep_freed_memory(&context).map_err(start)?;
        let attribute = |attribute| context.attribute(attribute).map(|value| value as u32).map_err(start);
        let name = context.name().map_err(start)?;
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if capability < OLDEST {
            let ((major, minor), (oldest, _)) = (capability, OLDEST);
            return Err(Error::gpu(format!(
                "the {name} has compute capability {major}.{minor}, and the kernels need {oldest}.0 or newer: choose \
                 another GPU by GDNLAB_GPU; {ELSEWHERE}"
            )));
        }
        Ok(Self {
            name,
            capability,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
            memory_bytes: context.total_mem().map_err(start)?,
            cuda,
            stream: Stream::new(&context)?,
            context,
            cache: Cache::of_user(),
            compiler: OnceLock::new(),
            modules: Mutex::default(),
        })
    }

    /// The stream on which all that is said without a stream happens in order.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// What kernels are compiled for here.
    pub fn architecture(&self) -> Architecture {
        Architecture::of(self.capability)
    }

    /// What launches are checked against.
    pub fn limits(&self) -> Limits {
        Limits { capability: self.capability, shared_bytes_per_block: self.shared_bytes_per_block }
    }

    /// Version of the GPU's driver, such as `580.65.06`, where the system tells it.
    pub fn driver_version(&self) -> Option<String> {
        driver_version(&std::fs::read_to_string("/proc/driver/nvidia/version").ok()?)
    }

    /// Version of the compiler that made the kernels used so far, such as `13.0`; `None` before the first.
    pub fn compiler_version(&self) -> Option<String> {
        self.compiler.get().cloned()
    }

    /// Memory that is free now, in bytes: what no process has, and what this one has freed and keeps for its next
    /// allocations.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver does not say.
    pub fn free_bytes(&self) -> Result<usize> {
        let asking = |error| failed("asking for free memory", error);
        let (free, _) = self.context.mem_get_info().map_err(asking)?;
        Ok(free + raw::pooled_bytes(&self.context).map_err(asking)? as usize)
    }

    /// `build` on this GPU: from this process, from the cache on disk, or compiled now.
    ///
    /// To be kept by who launches often: even one that was made before is looked up by the whole of its source.
    ///
    /// # Errors
    /// [`Error::Gpu`] where it has to be compiled and there is no compiler, or where compiler or driver refuse it.
    pub fn module(&self, build: &Build) -> Result<Arc<Module>> {
        let name = build.fingerprint();
        let slot = self.modules.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default().clone();
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = &*slot {
            return Ok(module.clone());
        }
        let compiled = build.compiled(self.architecture(), &self.cache)?;
        self.compiler.get_or_init(|| compiled.compiler.clone());
        let module = Arc::new(Module::load(&self.context, build.to_string(), compiled, self.limits())?);
        *slot = Some(module.clone());
        Ok(module)
    }

    /// Memory for `length` elements, with whatever was in it before.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the GPU has not that much.
    pub fn alloc<T: Element>(&self, length: usize) -> Result<Buffer<T>> {
        Buffer::new(&self.stream, length)
    }

    /// A copy of `values` on the GPU.
    ///
    /// # Errors
    /// As [`Gpu::alloc`].
    pub fn upload<T: Element>(&self, values: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.alloc(values.len())?;
        self.stream.upload(values, &mut buffer)?;
        Ok(buffer)
    }

    /// What `buffer` holds once all that was started before on [`Gpu::stream`] has ended.
    ///
    /// # Errors
    /// [`Error::Gpu`] where something started before has failed.
    pub fn download<T: Element>(&self, buffer: &Buffer<T>) -> Result<Vec<T>> {
        self.stream.download(buffer)
    }

    /// Sets every byte of `buffer`; 0xff makes every float format NaN.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver refuses.
    pub fn fill_bytes<T: Element>(&self, buffer: &mut Buffer<T>, byte: u8) -> Result<()> {
        self.stream.fill_bytes(buffer, byte)
    }

    /// Waits for all that was started on [`Gpu::stream`].
    ///
    /// # Errors
    /// [`Error::Gpu`] where some of it failed.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }

    /// A stream beside [`Gpu::stream`]. Nothing orders the two but events ([`Stream::wait`]).
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver refuses.
    pub fn new_stream(&self) -> Result<Stream> {
        Stream::new(&self.context)
    }

    /// Another stream, whose blocks are placed before those of other streams where both wait for a multiprocessor.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver refuses.
    pub fn new_urgent_stream(&self) -> Result<Stream> {
        Stream::urgent(&self.context)
    }

    /// An event that can be timed.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver refuses.
    pub fn event(&self) -> Result<Event> {
        Event::new(&self.context)
    }

    /// Records what `work` starts on the stream that it is given, without running it, to be replayed as one.
    ///
    /// Buffers are allocated before and must outlive the graph: it holds their addresses.
    ///
    /// # Errors
    /// What `work` returns, and [`Error::Gpu`] where it did something that cannot be recorded, or nothing.
    pub fn capture(&self, work: impl FnOnce(&Stream) -> Result<()>) -> Result<Graph> {
        Graph::capture(self.new_stream()?, work)
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.capability;
        write!(f, "{} (compute capability {major}.{minor})", self.name)
    }
}

fn ordinal() -> Result<usize> {
    match std::env::var("GDNLAB_GPU") {
        Ok(text) if !text.is_empty() => text
            .parse()
            .map_err(|_| Error::input(format!("GDNLAB_GPU={text}: expected the number of a GPU, counted from 0"))),
        _ => Ok(0),
    }
}

/// How many GPUs the driver shows; one at least.
fn count() -> Result<usize> {
    if !raw::driver_present() {
        return Err(Error::gpu(format!(
            "no NVIDIA driver on this machine (libcuda.so.1 was not found): install the driver of the GPU; {ELSEWHERE}"
        )));
    }
    let visible = match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => format!(" (CUDA_VISIBLE_DEVICES={list})"),
        Err(_) => String::new(),
    };
    match CudaContext::device_count() {
        Ok(0) => Err(Error::gpu(format!("the NVIDIA driver shows no GPU{visible}; {ELSEWHERE}"))),
        Ok(count) => Ok(count as usize),
        Err(error) => {
            let reason = raw::words("the NVIDIA driver does not start", error);
            Err(Error::gpu(format!("{reason}{visible}; {ELSEWHERE}")))
        }
    }
}

/// The version in the first line of `/proc/driver/nvidia/version`: its first word of numbers with two dots or one.
fn driver_version(text: &str) -> Option<String> {
    let is_version = |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

#[cfg(test)]
#[path = "gpu_tests.rs"]
mod tests;
