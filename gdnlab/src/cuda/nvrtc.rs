//! NVIDIA's run-time compiler NVRTC: its eight functions, opened from the file that [`locate`](super::locate) found.
//!
//! cudarc would open whatever the loader finds first and panics where it finds nothing; this opens one file, and says
//! what is missing.

use super::build::Architecture;
use crate::{Error, Result};
use gdnlab_deps::libloading::{self, Library};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};

/// The first version that keeps what it compiles: in the driver's cache on disk, in a process in which the driver runs. What
/// it finds there comes without a log, so it must not look. Older versions do not know the option.
const FIRST_WITH_CACHE: (c_int, c_int) = (12, 9);
const NO_CACHE: &CStr = c"--no-cache";

type Program = *mut c_void;
type Code = c_int;

/// An opened NVRTC. It stays open until the process ends.
pub(super) struct Nvrtc {
    path: PathBuf,
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Code,
    error_string: unsafe extern "C" fn(Code) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Code,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Code,
    destroy: unsafe extern "C" fn(*mut Program) -> Code,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Code,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    supported_count: unsafe extern "C" fn(*mut c_int) -> Code,
    supported: unsafe extern "C" fn(*mut c_int) -> Code,
}

/// A translation unit for the compiler.
pub(super) struct Unit<'a> {
    /// File name that messages mention.
    pub name: &'a str,
    pub text: &'a str,
    /// Name and text of each header that `#include "..."` may name.
    pub headers: &'a [(String, String)],
    pub options: &'a [String],
}

/// What the compiler made of a [`Unit`].
pub(super) struct Output {
    pub cubin: Vec<u8>,
    /// Warnings, and the report of ptxas.
    pub log: String,
}

impl Nvrtc {
    /// Opens the library `path`; a second call for the same path returns the first one's.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the file is no NVRTC that this process can load.
    pub fn open(path: &Path) -> Result<&'static Self> {
        static OPENED: LazyLock<Mutex<HashMap<PathBuf, &'static Nvrtc>>> = LazyLock::new(Mutex::default);
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(nvrtc) = opened.get(path) {
            return Ok(nvrtc);
        }
        open_builtins_beside(path);
        let nvrtc = Self::load(path).map_err(|error| {
            Error::gpu(format!(
                "{} is not an NVRTC that can be used here ({error}): expected that of CUDA 12 or newer for {}; {}",
                path.display(),
                std::env::consts::ARCH,
                super::locate::NVRTC.remedy
            ))
        })?;
        let nvrtc: &'static Self = Box::leak(Box::new(nvrtc));
        opened.insert(path.to_path_buf(), nvrtc);
        Ok(nvrtc)
    }

    fn load(path: &Path) -> Result<Self, libloading::Error> {
        // SAFETY: NVRTC's initialisers have no precondition. The library is leaked, so the pointers stay valid; each is
        // used with the signature that nvrtc.h declares for that name.
        unsafe {
            let library = Library::new(path)?;
            let nvrtc = Self {
                path: path.to_path_buf(),
                version: *library.get(b"nvrtcVersion\0")?,
                error_string: *library.get(b"nvrtcGetErrorString\0")?,
                create: *library.get(b"nvrtcCreateProgram\0")?,
                compile: *library.get(b"nvrtcCompileProgram\0")?,
                destroy: *library.get(b"nvrtcDestroyProgram\0")?,
                log_size: *library.get(b"nvrtcGetProgramLogSize\0")?,
                log: *library.get(b"nvrtcGetProgramLog\0")?,
                cubin_size: *library.get(b"nvrtcGetCUBINSize\0")?,
                cubin: *library.get(b"nvrtcGetCUBIN\0")?,
                supported_count: *library.get(b"nvrtcGetNumSupportedArchs\0")?,
                supported: *library.get(b"nvrtcGetSupportedArchs\0")?,
            };
            std::mem::forget(library);
            Ok(nvrtc)
        }
    }

    /// Its version, such as `13.0`.
    pub fn version(&self) -> Result<String> {
        self.release().map(|(major, minor)| format!("{major}.{minor}"))
    }

    fn release(&self) -> Result<(c_int, c_int)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both outputs live on this stack frame.
        self.check("nvrtcVersion", unsafe { (self.version)(&mut major, &mut minor) })?;
        Ok((major, minor))
    }

    /// The architecture to compile for so that the code runs on `wanted`: itself, or the newest older one of the same
    /// generation, whose code runs there too.
    pub fn architecture_for(&self, wanted: Architecture) -> Result<Architecture> {
        let known = self.supported_architectures()?;
        if known.contains(&wanted.number()) {
            return Ok(wanted);
        }
        let compatible =
            known.iter().copied().filter(|&number| number / 10 == wanted.major && number < wanted.number());
        compatible.max().map(Architecture::portable).ok_or_else(|| {
            let known = known.iter().map(|number| format!("sm_{number}")).collect::<Vec<_>>().join(", ");
            Error::gpu(format!(
                "the compiler {} knows {known}, not {wanted}: point GDNLAB_NVRTC to another version of NVRTC",
                self.path.display()
            ))
        })
    }

    fn supported_architectures(&self) -> Result<Vec<u32>> {
        let mut count = 0;
        // SAFETY: the output lives on this stack frame.
        self.check("nvrtcGetNumSupportedArchs", unsafe { (self.supported_count)(&mut count) })?;
        let mut numbers = vec![0; count.max(0) as usize];
        // SAFETY: the array has the length that the library just asked for.
        self.check("nvrtcGetSupportedArchs", unsafe { (self.supported)(numbers.as_mut_ptr()) })?;
        Ok(numbers.into_iter().map(|number| number as u32).collect())
    }

    /// Compiles to a CUBIN.
    ///
    /// # Errors
    /// [`Error::Gpu`] with the compiler's messages.
    pub fn compile(&self, unit: &Unit) -> Result<Output> {
        let name = c_string(unit.name)?;
        let text = c_string(unit.text)?;
        let header_names = unit.headers.iter().map(|(name, _)| c_string(name)).collect::<Result<Vec<_>>>()?;
        let header_texts = unit.headers.iter().map(|(_, text)| c_string(text)).collect::<Result<Vec<_>>>()?;
        let mut options = unit.options.iter().map(|option| c_string(option)).collect::<Result<Vec<_>>>()?;
        if self.release()? >= FIRST_WITH_CACHE {
            options.push(NO_CACHE.to_owned());
        }
        let (names, texts, options) = (pointers(&header_names), pointers(&header_texts), pointers(&options));

        let mut program = std::ptr::null_mut();
        // SAFETY: all strings end in NUL and outlive the call, and both arrays hold as many as their count says.
        let code = unsafe {
            let count = names.len() as c_int;
            (self.create)(&mut program, text.as_ptr(), name.as_ptr(), count, texts.as_ptr(), names.as_ptr())
        };
        self.check("nvrtcCreateProgram", code)?;
        let program = Owned { nvrtc: self, program };
        // SAFETY: the program is alive, and the array holds as many strings as its count says.
        let code = unsafe { (self.compile)(program.program, options.len() as c_int, options.as_ptr()) };
        let log = without_times(&String::from_utf8_lossy(&program.bytes(self.log_size, self.log)?));
        if code != 0 {
            let reason = self.words(code);
            return Err(Error::gpu(format!("compiling {}: {reason}\n{}", unit.name, log.trim_end())));
        }
        Ok(Output { cubin: program.bytes(self.cubin_size, self.cubin)?, log })
    }

    fn check(&self, call: &str, code: Code) -> Result<()> {
        match code {
            0 => Ok(()),
            _ => Err(Error::gpu(format!("{call} of {}: {}", self.path.display(), self.words(code)))),
        }
    }

    fn words(&self, code: Code) -> String {
        // SAFETY: the library returns a string of its own for every number.
        unsafe { CStr::from_ptr((self.error_string)(code)) }.to_string_lossy().into_owned()
    }
}

/// A program of the library, destroyed when it is no longer needed.
struct Owned<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Owned<'_> {
    /// What a pair of functions says about this program: how many bytes, and the bytes.
    fn bytes(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> Code,
        fill: unsafe extern "C" fn(Program, *mut c_char) -> Code,
    ) -> Result<Vec<u8>> {
        let mut length = 0;
        // SAFETY: the program is alive and the output lives on this stack frame.
        self.nvrtc.check("asking for a size", unsafe { size(self.program, &mut length) })?;
        let mut bytes = vec![0u8; length];
        // SAFETY: the buffer has the length that the library just asked for.
        self.nvrtc.check("asking for the result", unsafe { fill(self.program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is alive, and nobody uses it after this.
        unsafe { (self.nvrtc.destroy)(&mut self.program) };
    }
}

/// NVRTC opens its library of built-in functions by name alone, which the loader does not find in the folder of a Python
/// package; it is satisfied by one that is open already.
fn open_builtins_beside(path: &Path) {
    let entries = path.parent().and_then(|folder| std::fs::read_dir(folder).ok());
    for entry in entries.into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so") {
            // SAFETY: the library holds data and has no initialiser of its own. Where it does not fit, NVRTC says so.
            if let Ok(library) = unsafe { Library::new(entry.path()) } {
                std::mem::forget(library);
            }
        }
    }
}

/// The log as it is every time: without the end mark, and without how long each kernel took.
fn without_times(log: &str) -> String {
    let lines = log.trim_end_matches('\0').lines().filter(|line| !line.contains("Compile time ="));
    lines.fold(String::new(), |text, line| text + line + "\n")
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::input("a kernel's source, name or option holds a NUL character"))
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).collect()
}
