//! cuBLASLt: its functions, opened from the file that [`locate`](super::locate) found, and every `unsafe` that calls them.
//!
//! cudarc gives the constants. Its functions would open whatever the loader finds first, and panic where it finds nothing;
//! these open one file, and say what is missing. Status codes are taken as numbers, because a newer library may have more
//! of them than cudarc's enumeration.

use super::Stream;
use super::locate::CUBLASLT;
use crate::{Error, Result};
use gdnlab_deps::cudarc::cublaslt::sys;
use gdnlab_deps::libloading::{self, Library};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

/// A status; 0 is success.
type Code = u32;
/// A handle or descriptor of the library.
type Object = *mut c_void;

const NOT_SUPPORTED: Code = sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as Code;
/// Candidates that the heuristics are asked for, the best first.
const MAX_CANDIDATES: usize = 32;

type Destroy = unsafe extern "C" fn(Object) -> Code;
type SetAttribute = unsafe extern "C" fn(Object, u32, *const c_void, usize) -> Code;
type Heuristics = unsafe extern "C" fn(
    Object,
    Object,
    Object,
    Object,
    Object,
    Object,
    Object,
    c_int,
    *mut Candidate,
    *mut c_int,
) -> Code;
type Multiply = unsafe extern "C" fn(
    Object,
    Object,
    *const c_void,
    *const c_void,
    Object,
    *const c_void,
    Object,
    *const c_void,
    *const c_void,
    Object,
    *mut c_void,
    Object,
    *const [u64; 8],
    *mut c_void,
    usize,
    Object,
) -> Code;

/// The opened library with its handle for the GPU of this process. It stays open until the process ends.
pub(super) struct Blas {
    path: PathBuf,
    handle: Object,
    functions: Functions,
}

// SAFETY: the library's functions may be called from several threads with one handle, by its documentation.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

struct Functions {
    version: unsafe extern "C" fn() -> usize,
    words: unsafe extern "C" fn(Code) -> *const c_char,
    create: unsafe extern "C" fn(*mut Object) -> Code,
    create_operation: unsafe extern "C" fn(*mut Object, u32, u32) -> Code,
    set_operation: SetAttribute,
    destroy_operation: Destroy,
    create_layout: unsafe extern "C" fn(*mut Object, u32, u64, u64, i64) -> Code,
    set_layout: SetAttribute,
    destroy_layout: Destroy,
    create_preference: unsafe extern "C" fn(*mut Object) -> Code,
    set_preference: SetAttribute,
    destroy_preference: Destroy,
    heuristics: Heuristics,
    multiply: Multiply,
}

impl Functions {
    fn open(path: &Path) -> Result<Self, libloading::Error> {
        // SAFETY: the library's initialisers have no precondition. It is leaked, so the pointers stay valid; each is used
        // with the signature that cublasLt.h declares for that name, where enumerations are 32-bit numbers.
        unsafe {
            let library = Library::new(path)?;
            let functions = Self {
                version: *library.get(b"cublasLtGetVersion\0")?,
                words: *library.get(b"cublasLtGetStatusString\0")?,
                create: *library.get(b"cublasLtCreate\0")?,
                create_operation: *library.get(b"cublasLtMatmulDescCreate\0")?,
                set_operation: *library.get(b"cublasLtMatmulDescSetAttribute\0")?,
                destroy_operation: *library.get(b"cublasLtMatmulDescDestroy\0")?,
                create_layout: *library.get(b"cublasLtMatrixLayoutCreate\0")?,
                set_layout: *library.get(b"cublasLtMatrixLayoutSetAttribute\0")?,
                destroy_layout: *library.get(b"cublasLtMatrixLayoutDestroy\0")?,
                create_preference: *library.get(b"cublasLtMatmulPreferenceCreate\0")?,
                set_preference: *library.get(b"cublasLtMatmulPreferenceSetAttribute\0")?,
                destroy_preference: *library.get(b"cublasLtMatmulPreferenceDestroy\0")?,
                heuristics: *library.get(b"cublasLtMatmulAlgoGetHeuristic\0")?,
                multiply: *library.get(b"cublasLtMatmul\0")?,
            };
            std::mem::forget(library);
            Ok(functions)
        }
    }
}

impl Blas {
    /// The library, opened at the first call, with a handle for the GPU to which `stream` belongs.
    ///
    /// # Errors
    /// [`Error::Gpu`] where there is none on this machine, or it does not start.
    pub fn shared(stream: &Stream) -> Result<&'static Self> {
        static SHARED: OnceLock<Blas> = OnceLock::new();
        static STARTING: Mutex<()> = Mutex::new(());
        let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(blas) = SHARED.get() {
            return Ok(blas);
        }
        let mut blas = Self::open(&CUBLASLT.find()?)?;
        stream.bind()?;
        // SAFETY: the output lives in the structure, and the context of the GPU is current.
        let code = unsafe { (blas.functions.create)(&mut blas.handle) };
        if code != 0 {
            return Err(Error::gpu(format!(
                "cuBLASLt {} ({}) does not start: {}; it has to be one for the CUDA of the driver: {}",
                blas.version(),
                blas.path.display(),
                blas.words(code),
                CUBLASLT.remedy
            )));
        }
        Ok(SHARED.get_or_init(|| blas))
    }

    /// The library without a handle: enough to describe a product.
    fn open(path: &Path) -> Result<Self> {
        let functions = Functions::open(path).map_err(|error| {
            Error::gpu(format!(
                "{} is not a cuBLASLt that can be used here ({error}): expected that of CUDA 12 or newer for {}; {}",
                path.display(),
                std::env::consts::ARCH,
                CUBLASLT.remedy
            ))
        })?;
        Ok(Self { path: path.to_path_buf(), handle: ptr::null_mut(), functions })
    }

    /// Its version, such as `13.0.2`.
    pub fn version(&self) -> String {
        // SAFETY: the function takes nothing and returns a number.
        let version = unsafe { (self.functions.version)() };
        format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
    }

    fn check(&self, what: &str, code: Code) -> Result<()> {
        match code {
            0 => Ok(()),
            _ => Err(Error::gpu(format!("cuBLASLt ({}), {what}: {}", self.path.display(), self.words(code)))),
        }
    }

    fn words(&self, code: Code) -> String {
        // SAFETY: the library returns a string of its own for every number.
        unsafe { CStr::from_ptr((self.functions.words)(code)) }.to_string_lossy().into_owned()
    }
}

/// A matrix as the library is told of it: column-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub format: sys::cudaDataType,
    pub rows: u64,
    pub columns: u64,
    /// Elements from one column to the next.
    pub pitch: i64,
    /// Elements from one matrix of the batch to the next.
    pub stride: i64,
}

/// `result = alpha op(first) op(second) + beta result` as the library is told of it, for each of `batch` matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub first: Layout,
    pub first_transposed: bool,
    pub second: Layout,
    pub second_transposed: bool,
    pub result: Layout,
    pub compute: sys::cublasComputeType_t,
    /// Format of alpha and beta.
    pub scale: sys::cudaDataType,
    pub batch: i32,
}

/// What the heuristics may choose from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Preference {
    /// Workspace at the most, in bytes.
    pub workspace_bytes: u64,
    /// What every address is a multiple of, in bytes.
    pub alignment_bytes: u32,
}

/// An algorithm that the heuristics propose, as the library writes it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub(super) struct Candidate {
    algorithm: [u64; 8],
    /// Workspace that it needs, in bytes.
    pub workspace_bytes: usize,
    state: Code,
    waves: f32,
    reserved: [c_int; 4],
}

/// An object of the library, destroyed when it is no longer needed.
struct Owned {
    object: Object,
    destroy: Destroy,
}

// SAFETY: descriptors are plain memory of the library, which only reads them once they are set up.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the object was created by the library and is nobody else's.
        unsafe { (self.destroy)(self.object) };
    }
}

impl Owned {
    /// What `create` makes.
    fn new(blas: &Blas, destroy: Destroy, create: impl FnOnce(*mut Object) -> Code) -> Result<Self> {
        let mut object = ptr::null_mut();
        blas.check("describing a product", create(&mut object))?;
        Ok(Self { object, destroy })
    }

    /// Sets the attribute `name` to a number of the type that cublasLt.h gives it.
    fn set<T: Copy>(&self, blas: &Blas, set: SetAttribute, name: u32, value: T) -> Result<()> {
        // SAFETY: the object is alive, and the call copies as many bytes as the value has.
        let code = unsafe { set(self.object, name, (&raw const value).cast(), size_of::<T>()) };
        blas.check("describing a product", code)
    }
}

/// A product that the library knows.
pub(super) struct Plan {
    blas: &'static Blas,
    operation: Owned,
    first: Owned,
    second: Owned,
    result: Owned,
}

/// Addresses and factors of one run of a [`Plan`].
pub(super) struct Run {
    pub first: u64,
    pub second: u64,
    pub result: u64,
    pub alpha: f32,
    pub beta: f32,
    /// Whether the library reads the factors as binary64.
    pub wide_factors: bool,
    pub workspace: u64,
}

impl Plan {
    pub fn new(blas: &'static Blas, form: &Form) -> Result<Self> {
        Ok(Self {
            blas,
            operation: operation(blas, form)?,
            first: layout(blas, &form.first, form.batch)?,
            second: layout(blas, &form.second, form.batch)?,
            result: layout(blas, &form.result, form.batch)?,
        })
    }

    /// The library's version.
    pub fn version(&self) -> String {
        self.blas.version()
    }

    /// What the heuristics propose, the best first; empty where the library has nothing for this product.
    pub fn candidates(&self, preference: &Preference) -> Result<Vec<Candidate>> {
        let wanted = self::preference(self.blas, preference)?;
        let mut candidates = [Candidate::default(); MAX_CANDIDATES];
        let mut count = 0;
        // SAFETY: all descriptors are alive, and the array has room for as many as are asked for.
        let code = unsafe {
            (self.blas.functions.heuristics)(
                self.blas.handle,
                self.operation.object,
                self.first.object,
                self.second.object,
                self.result.object,
                self.result.object,
                wanted.object,
                MAX_CANDIDATES as c_int,
                candidates.as_mut_ptr(),
                &mut count,
            )
        };
        if code == NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        self.blas.check("choosing an algorithm", code)?;
        let found = candidates.iter().take(count.max(0) as usize);
        Ok(found.filter(|candidate| candidate.state == 0).copied().collect())
    }

    /// Starts the product on `stream` by `candidate`.
    ///
    /// # Safety
    /// The candidate is one of this plan's. The addresses are those of matrices of the plan's layouts on this GPU, and
    /// the workspace of memory that is as large as the candidate needs; none of it is freed or used by another stream
    /// until the product has ended; where it is recorded into a graph, until the last replay has ended.
    pub unsafe fn run(&self, stream: &Stream, candidate: &Candidate, run: &Run) -> Result<()> {
        stream.bind()?;
        let wide = [f64::from(run.alpha), f64::from(run.beta)];
        let factor = |narrow: &f32, wide: &f64| -> *const c_void {
            if run.wide_factors { ptr::from_ref(wide).cast() } else { ptr::from_ref(narrow).cast() }
        };
        let address = |address: u64| address as *mut c_void;
        // SAFETY: descriptors, factors and algorithm live until the call returns, which has read them by then; the rest is
        // the caller's promise.
        let code = unsafe {
            (self.blas.functions.multiply)(
                self.blas.handle,
                self.operation.object,
                factor(&run.alpha, &wide[0]),
                address(run.first),
                self.first.object,
                address(run.second),
                self.second.object,
                factor(&run.beta, &wide[1]),
                address(run.result),
                self.result.object,
                address(run.result),
                self.result.object,
                &candidate.algorithm,
                address(run.workspace),
                candidate.workspace_bytes,
                stream.cudarc().cu_stream().cast(),
            )
        };
        self.blas.check("starting a product", code)
    }
}

fn operation(blas: &Blas, form: &Form) -> Result<Owned> {
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    let functions = &blas.functions;
    // SAFETY: the output is a place for one object.
    let create = |to| unsafe { (functions.create_operation)(to, form.compute as u32, form.scale as u32) };
    let operation = Owned::new(blas, functions.destroy_operation, create)?;
    /// From cublas_api.h: CUBLAS_OP_N and CUBLAS_OP_T.
    const AS_IT_IS_OR_TRANSPOSED: [i32; 2] = [0, 1];
    for (name, transposed) in [
        (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, form.first_transposed),
        (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, form.second_transposed),
    ] {
        let value = AS_IT_IS_OR_TRANSPOSED[usize::from(transposed)];
        operation.set(blas, functions.set_operation, name as u32, value)?;
    }
    Ok(operation)
}

fn layout(blas: &Blas, layout: &Layout, batch: i32) -> Result<Owned> {
    use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
    let functions = &blas.functions;
    // SAFETY: the output is a place for one object.
    let create =
        |to| unsafe { (functions.create_layout)(to, layout.format as u32, layout.rows, layout.columns, layout.pitch) };
    let owned = Owned::new(blas, functions.destroy_layout, create)?;
    if batch > 1 {
        owned.set(blas, functions.set_layout, Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT as u32, batch)?;
        let stride = Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET as u32;
        owned.set(blas, functions.set_layout, stride, layout.stride)?;
    }
    Ok(owned)
}

fn preference(blas: &Blas, preference: &Preference) -> Result<Owned> {
    use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
    let functions = &blas.functions;
    // SAFETY: the output is a place for one object.
    let create = |to| unsafe { (functions.create_preference)(to) };
    let owned = Owned::new(blas, functions.destroy_preference, create)?;
    let workspace = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as u32;
    owned.set(blas, functions.set_preference, workspace, preference.workspace_bytes)?;
    // Where the sum over k is split, its parts are added in the format of the computation, not in that of C.
    let parts = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
    let reduction = Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK as u32;
    owned.set(blas, functions.set_preference, reduction, parts)?;
    for name in [
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
    ] {
        owned.set(blas, functions.set_preference, name as u32, preference.alignment_bytes)?;
    }
    Ok(owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn a_candidate_lies_as_the_library_writes_it() {
        type Theirs = sys::cublasLtMatmulHeuristicResult_t;
        assert_eq!(size_of::<Candidate>(), size_of::<Theirs>());
        assert_eq!(offset_of!(Candidate, workspace_bytes), offset_of!(Theirs, workspaceSize));
        assert_eq!(offset_of!(Candidate, state), offset_of!(Theirs, state));
        assert_eq!(size_of::<sys::cublasLtMatmulAlgo_t>(), size_of::<[u64; 8]>());
    }

    #[test]
    #[ignore = "needs cuBLASLt, though no GPU"]
    fn products_are_described_without_a_gpu() {
        let blas: &'static Blas = Box::leak(Box::new(Blas::open(&CUBLASLT.find().unwrap()).unwrap()));
        println!("cuBLASLt {} at {}", blas.version(), blas.path.display());
        let layout = Layout { format: sys::cudaDataType::CUDA_R_16BF, rows: 5, columns: 4, pitch: 8, stride: 64 };
        let form = Form {
            first: layout,
            first_transposed: true,
            second: layout,
            second_transposed: false,
            result: Layout { rows: 4, ..layout },
            compute: sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            scale: sys::cudaDataType::CUDA_R_32F,
            batch: 3,
        };
        let plan = Plan::new(blas, &form).unwrap();
        let limits = Preference { workspace_bytes: 32 << 20, alignment_bytes: 16 };
        preference(blas, &limits).unwrap();
        // Without a handle there is nothing to choose with, which the library says.
        let error = plan.candidates(&limits).unwrap_err().to_string();
        assert!(error.contains("choosing an algorithm"), "{error}");
        println!("{error}");
    }

    #[test]
    fn what_is_no_library_is_refused_in_words() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libcublasLt.so.13");
        std::fs::write(&path, "no library").unwrap();
        let error = Blas::open(&path).err().unwrap().to_string();
        assert!(error.contains("is not a cuBLASLt") && error.contains("pip install nvidia-cublas"), "{error}");
    }
}
