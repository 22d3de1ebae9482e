//! cuDNN: the functions of its graph interface, opened from the file that [`locate`](super::locate) found, and every
//! `unsafe` that calls them.
//!
//! What cuDNN computes is said by descriptors: objects with attributes, made, filled and finalized. Numbers and types are
//! those of cudnn_graph.h of version 9, where enumerations are 32-bit numbers.

use super::locate::{CUBLASLT, CUDNN, Compiler};
use super::nvrtc::Nvrtc;
use super::{Gpu, Stream};
use crate::{Error, Result};
use gdnlab_deps::libloading::{self, Library};
use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

/// A status; 0 is success.
type Code = u32;
/// A handle or descriptor of the library.
type Object = *mut c_void;

/// The first version with what is asked for: scratch that it clears itself, and scores of minus infinity.
const OLDEST: usize = 91_000;
/// Characters of the library's last words about an error.
const MESSAGE: usize = 2048;

/// The opened library with its handle for the GPU of this process. It stays open until the process ends.
pub(super) struct Cudnn {
    path: PathBuf,
    handle: Handle,
    functions: Functions,
}

/// One call at a time uses it, since it holds a stream.
struct Handle(Mutex<Object>);

// SAFETY: the library's handle may go from thread to thread; the mutex lets one use it at a time.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

struct Functions {
    version: unsafe extern "C" fn() -> usize,
    runtime: unsafe extern "C" fn() -> usize,
    words: unsafe extern "C" fn(Code) -> *const c_char,
    last_words: unsafe extern "C" fn(*mut c_char, usize),
    create_handle: unsafe extern "C" fn(*mut Object) -> Code,
    set_stream: unsafe extern "C" fn(Object, Object) -> Code,
    create: unsafe extern "C" fn(Kind, *mut Object) -> Code,
    destroy: unsafe extern "C" fn(Object) -> Code,
    set: unsafe extern "C" fn(Object, Attribute, Type, i64, *const c_void) -> Code,
    get: unsafe extern "C" fn(Object, Attribute, Type, i64, *mut i64, *mut c_void) -> Code,
    finalize: unsafe extern "C" fn(Object) -> Code,
    execute: unsafe extern "C" fn(Object, Object, Object) -> Code,
}

impl Functions {
    fn open(path: &Path) -> Result<Self, libloading::Error> {
        // SAFETY: the library's initialisers have no precondition. It is leaked, so the pointers stay valid; each is used
        // with the signature that cudnn_graph.h declares for that name.
        unsafe {
            let library = Library::new(path)?;
            let functions = Self {
                version: *library.get(b"cudnnGetVersion\0")?,
                runtime: *library.get(b"cudnnGetCudartVersion\0")?,
                words: *library.get(b"cudnnGetErrorString\0")?,
                last_words: *library.get(b"cudnnGetLastErrorString\0")?,
                create_handle: *library.get(b"cudnnCreate\0")?,
                set_stream: *library.get(b"cudnnSetStream\0")?,
                create: *library.get(b"cudnnBackendCreateDescriptor\0")?,
                destroy: *library.get(b"cudnnBackendDestroyDescriptor\0")?,
                set: *library.get(b"cudnnBackendSetAttribute\0")?,
                get: *library.get(b"cudnnBackendGetAttribute\0")?,
                finalize: *library.get(b"cudnnBackendFinalize\0")?,
                execute: *library.get(b"cudnnBackendExecute\0")?,
            };
            std::mem::forget(library);
            Ok(functions)
        }
    }
}

impl Cudnn {
    /// The library, opened at the first call, with a handle for the GPU `gpu`.
    ///
    /// # Errors
    /// [`Error::Gpu`] where there is none on this machine, it is too old, or it does not start.
    pub fn shared(gpu: &Gpu) -> Result<&'static Self> {
        static SHARED: OnceLock<Cudnn> = OnceLock::new();
        static STARTING: Mutex<()> = Mutex::new(());
        let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cudnn) = SHARED.get() {
            return Ok(cudnn);
        }
        let cudnn = Self::open(&CUDNN.find()?)?;
        cudnn.open_what_it_needs()?;
        gpu.stream().bind()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the output lives on this stack frame, and the context of the GPU is current.
        let code = unsafe { (cudnn.functions.create_handle)(&mut handle) };
        cudnn.check(code, || "starting; it has to be one for the CUDA of the driver".to_owned())?;
        Ok(SHARED.get_or_init(|| Self { handle: Handle(Mutex::new(handle)), ..cudnn }))
    }

    /// The library without a handle: enough to describe a graph.
    fn open(path: &Path) -> Result<Self> {
        let functions = Functions::open(path).map_err(|error| {
            Error::gpu(format!(
                "{} is not a cuDNN that can be used here ({error}): expected version 9.10 or newer for {}; {}",
                path.display(),
                std::env::consts::ARCH,
                CUDNN.remedy
            ))
        })?;
        let cudnn = Self { path: path.to_path_buf(), handle: Handle(Mutex::new(ptr::null_mut())), functions };
        if cudnn.number() < OLDEST {
            return Err(Error::gpu(format!("{}: expected version 9.10 or newer; {}", cudnn.name(), CUDNN.remedy)));
        }
        Ok(cudnn)
    }

    /// cuDNN opens cuBLASLt and NVRTC by name alone, and ends the process where the first is missing. A library that is open
    /// already satisfies it, so they are opened here.
    fn open_what_it_needs(&self) -> Result<()> {
        // Its kernels may come without a compiler; where one is needed and missing, it says so.
        let _ = Compiler::find().and_then(|compiler| Nvrtc::open(&compiler.path));
        // SAFETY: the function takes nothing and returns a number.
        let major = unsafe { (self.functions.runtime)() } / 1000;
        let name = format!("libcublasLt.so.{major}");
        let beside = ["../../cu13/lib", "../../cublas/lib"].map(|folder| self.path.with_file_name(folder).join(&name));
        let places = [PathBuf::from(&name)].into_iter().chain(CUBLASLT.find().ok()).chain(beside);
        for place in places.filter(|place| place.file_name().is_some_and(|file| *file == *name)) {
            // SAFETY: the initialisers of cuBLASLt have no precondition.
            if let Ok(library) = unsafe { Library::new(place) } {
                std::mem::forget(library);
                return Ok(());
            }
        }
        Err(Error::gpu(format!("{} needs {name}, which was not found: {}", self.name(), CUBLASLT.remedy)))
    }

    fn number(&self) -> usize {
        // SAFETY: the function takes nothing and returns a number.
        unsafe { (self.functions.version)() }
    }

    /// Its version, such as `9.19.0`.
    pub fn version(&self) -> String {
        let number = self.number();
        format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
    }

    fn name(&self) -> String {
        format!("cuDNN {} ({})", self.version(), self.path.display())
    }

    /// What a call said, with the library's own explanation.
    fn check(&self, code: Code, what: impl FnOnce() -> String) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut message = [0; MESSAGE];
        // SAFETY: the library returns a string of its own for every number, and ends the message within its length.
        let (words, last) = unsafe {
            (self.functions.last_words)(message.as_mut_ptr(), MESSAGE);
            message[MESSAGE - 1] = 0;
            (CStr::from_ptr((self.functions.words)(code)), CStr::from_ptr(message.as_ptr()))
        };
        let (words, last) = (words.to_string_lossy(), last.to_string_lossy());
        Err(Error::gpu(format!("{}, {}: {words} ({code}): {}", self.name(), what(), last.trim())))
    }

    /// Starts the finalized execution plan `plan` on `stream`, with the addresses in `pack`, a finalized variant pack.
    ///
    /// # Safety
    /// The pack names every tensor of the plan that is not virtual, with the address of memory that is as large as the tensor
    /// says, or in this process for a tensor by value, and a workspace of the plan's size. What is on the GPU is neither freed
    /// nor used by another stream until the plan has ended; where it is recorded into a graph, until the last replay has
    /// ended.
    pub unsafe fn execute(&self, stream: &Stream, plan: &Descriptor, pack: &Descriptor) -> Result<()> {
        let handle = self.handle.0.lock().unwrap_or_else(PoisonError::into_inner);
        stream.bind()?;
        // SAFETY: handle and stream are alive and of one context.
        let code = unsafe { (self.functions.set_stream)(*handle, stream.cudarc().cu_stream().cast()) };
        self.check(code, || "choosing a stream".to_owned())?;
        // SAFETY: both descriptors are alive and finalized; the rest is the caller's promise.
        let code = unsafe { (self.functions.execute)(*handle, plan.object, pack.object) };
        self.check(code, || "starting a plan".to_owned())
    }
}

/// Kinds of descriptors (`cudnnBackendDescriptorType_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Kind {
    Pointwise = 0,
    EngineConfig = 3,
    EngineHeuristics = 4,
    ExecutionPlan = 5,
    OperationPointwise = 13,
    OperationGraph = 15,
    VariantPack = 16,
    Tensor = 17,
    Matmul = 18,
    OperationMatmul = 19,
    Reduction = 21,
    OperationReduction = 22,
    OperationReshape = 31,
}

/// Attributes (`cudnnBackendAttributeName_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Attribute {
    PointwiseMode = 0,
    PointwisePrecision = 1,
    PointwiseAxis = 9,
    HeuristicsMode = 200,
    HeuristicsGraph = 201,
    HeuristicsResults = 202,
    PlanHandle = 400,
    PlanEngineConfig = 401,
    PlanWorkspaceSize = 402,
    OperationPointwise = 750,
    OperationPointwiseX = 751,
    OperationPointwiseB = 752,
    OperationPointwiseY = 753,
    OperationPointwiseT = 758,
    GraphHandle = 800,
    GraphOperations = 801,
    TensorByteAlignment = 900,
    TensorDataType = 901,
    TensorDimensions = 902,
    TensorStrides = 903,
    TensorUniqueId = 906,
    TensorIsVirtual = 907,
    TensorIsByValue = 908,
    PackUniqueIds = 1000,
    PackDataPointers = 1001,
    PackWorkspace = 1003,
    MatmulPrecision = 1500,
    OperationMatmulA = 1520,
    OperationMatmulB = 1521,
    OperationMatmulC = 1522,
    OperationMatmul = 1523,
    ReductionOperator = 1600,
    ReductionPrecision = 1601,
    OperationReductionX = 1610,
    OperationReductionY = 1611,
    OperationReduction = 1612,
    OperationReshapeX = 2200,
    OperationReshapeY = 2201,
}

/// Types of attributes (`cudnnBackendAttributeType_t`).
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum Type {
    Handle = 0,
    Numbers = 1,
    Boolean = 2,
    Int64 = 3,
    Address = 6,
    HeuristicsMode = 8,
    PointwiseMode = 14,
    Descriptor = 15,
    ReductionOperator = 18,
}

/// A descriptor, destroyed when it is no longer needed.
pub(super) struct Descriptor {
    cudnn: &'static Cudnn,
    kind: Kind,
    object: Object,
}

// SAFETY: descriptors are plain memory of the library, which only reads them once they are finalized.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the object was created by the library and is nobody else's.
        unsafe { (self.cudnn.functions.destroy)(self.object) };
    }
}

impl Descriptor {
    pub fn new(cudnn: &'static Cudnn, kind: Kind) -> Result<Self> {
        let mut object = ptr::null_mut();
        // SAFETY: the output lives on this stack frame.
        let code = unsafe { (cudnn.functions.create)(kind, &mut object) };
        cudnn.check(code, || format!("creating a descriptor {kind:?}"))?;
        Ok(Self { cudnn, kind, object })
    }

    /// Finalizes it: the library checks what was set.
    pub fn finalized(self) -> Result<Self> {
        // SAFETY: the object is alive.
        let code = unsafe { (self.cudnn.functions.finalize)(self.object) };
        self.cudnn.check(code, || format!("finalizing {:?}", self.kind))?;
        Ok(self)
    }

    pub fn int64(self, attribute: Attribute, values: &[i64]) -> Result<Self> {
        self.set(attribute, Type::Int64, values)
    }

    pub fn flag(self, attribute: Attribute, value: bool) -> Result<Self> {
        self.set(attribute, Type::Boolean, &[value])
    }

    /// Sets it to a number of the enumeration `of`.
    pub fn choice(self, attribute: Attribute, of: Type, value: u32) -> Result<Self> {
        self.set(attribute, of, &[value])
    }

    /// Addresses on the GPU, or in this process for tensors by value.
    pub fn addresses(self, attribute: Attribute, values: &[u64]) -> Result<Self> {
        self.set(attribute, Type::Address, values)
    }

    pub fn descriptors(self, attribute: Attribute, values: &[&Self]) -> Result<Self> {
        let objects: Vec<Object> = values.iter().map(|descriptor| descriptor.object).collect();
        self.set(attribute, Type::Descriptor, &objects)
    }

    /// Sets it to the handle of the library.
    pub fn handle(self, attribute: Attribute) -> Result<Self> {
        let handle = *self.cudnn.handle.0.lock().unwrap_or_else(PoisonError::into_inner);
        self.set(attribute, Type::Handle, &[handle])
    }

    /// `T` is what the type of the attribute stands for.
    fn set<T: Copy>(self, attribute: Attribute, of: Type, values: &[T]) -> Result<Self> {
        // SAFETY: the object is alive, and the call copies as many values as there are.
        let code = unsafe {
            (self.cudnn.functions.set)(self.object, attribute, of, values.len() as i64, values.as_ptr().cast())
        };
        let what = || format!("setting {attribute:?} ({} of {of:?}) of {:?}", values.len(), self.kind);
        self.cudnn.check(code, what)?;
        Ok(self)
    }

    /// A number that the library computed.
    pub fn get_int64(&self, attribute: Attribute) -> Result<i64> {
        let (mut value, mut count) = (0i64, 0);
        // SAFETY: the object is alive, and there is room for the one value that is asked for.
        let code = unsafe {
            let room = (&raw mut value).cast();
            (self.cudnn.functions.get)(self.object, attribute, Type::Int64, 1, &mut count, room)
        };
        self.cudnn.check(code, || format!("reading {attribute:?} of {:?}", self.kind))?;
        Ok(value)
    }

    /// The descriptors of `kind` that the library made.
    pub fn get_descriptors(&self, attribute: Attribute, kind: Kind) -> Result<Vec<Self>> {
        let mut count = 0;
        let get = |wanted: i64, count: &mut i64, room: *mut c_void| {
            // SAFETY: the object is alive, and there is room for as many descriptors as are wanted, each of them created.
            let code =
                unsafe { (self.cudnn.functions.get)(self.object, attribute, Type::Descriptor, wanted, count, room) };
            self.cudnn.check(code, || format!("reading {attribute:?} of {:?}", self.kind))
        };
        get(0, &mut count, ptr::null_mut())?;
        let mut made = (0..count).map(|_| Self::new(self.cudnn, kind)).collect::<Result<Vec<_>>>()?;
        let mut objects: Vec<Object> = made.iter().map(|descriptor| descriptor.object).collect();
        let wanted = count;
        get(wanted, &mut count, objects.as_mut_ptr().cast())?;
        made.truncate(count.max(0) as usize);
        Ok(made)
    }
}

/// The library on this machine without a GPU, for tests.
#[cfg(test)]
pub(super) fn without_a_gpu() -> &'static Cudnn {
    let cudnn = Cudnn::open(&CUDNN.find().unwrap()).unwrap();
    cudnn.open_what_it_needs().unwrap();
    println!("{}", cudnn.name());
    Box::leak(Box::new(cudnn))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_library_is_refused_in_words() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcudnn.so.9");
        std::fs::write(&path, "no library").unwrap();
        let error = Cudnn::open(&path).err().unwrap().to_string();
        assert!(error.contains("is not a cuDNN") && error.contains("pip install nvidia-cudnn-cu13"), "{error}");
    }

    #[test]
    #[ignore = "needs cuDNN, though no GPU"]
    fn a_refusal_names_the_descriptor_the_attribute_and_the_reason() {
        let cudnn = without_a_gpu();
        let tensor = Descriptor::new(cudnn, Kind::Tensor).unwrap();
        let error = tensor.choice(Attribute::PointwiseMode, Type::PointwiseMode, 0).err().unwrap().to_string();
        println!("{error}");
        assert!(error.contains("setting PointwiseMode (1 of PointwiseMode) of Tensor: CUDNN_STATUS_"), "{error}");
        let error = Descriptor::new(cudnn, Kind::OperationMatmul).unwrap().finalized().err().unwrap().to_string();
        println!("{error}");
        assert!(error.contains("finalizing OperationMatmul: CUDNN_STATUS_"), "{error}");
    }
}
