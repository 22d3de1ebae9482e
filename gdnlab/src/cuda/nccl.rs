//! NCCL: its functions, opened from the file that was found on this machine, and every `unsafe` that calls them.
//!
//! Messages are bytes, so that what they mean is nobody's business here.

use super::locate::NCCL;
use super::{Buffer, Event, Gpu};
use crate::{Error, Result};
use gdnlab_deps::libloading::{self, Library};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A result; 0 is success.
type Code = c_int;
type Handle = *mut c_void;

const IN_PROGRESS: Code = 7;
/// `ncclUint8`.
const BYTES: c_int = 1;
/// The first version with messages between two ranks.
const OLDEST: c_int = 2_700;
/// So long a message is looked after all the time; after that, a look is taken now and then.
const ATTENTION: Duration = Duration::from_millis(5);
/// Between two looks.
const PAUSE: Duration = Duration::from_micros(100);
/// How long a message may take after the rank that sent it has ended.
const LATE: Duration = Duration::from_secs(1);

/// What all ranks have to name to find each other: rank 0 makes it, and tells the others.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// As it is told.
    pub fn to_bytes(self) -> Vec<u8> {
        self.0.to_vec()
    }

    /// As it was told.
    ///
    /// # Errors
    /// [`Error::Gpu`] for another number of bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let array = bytes.try_into();
        array.map(Self).map_err(|_| Error::gpu(format!("NCCL's id has 128 bytes, {} came from rank 0", bytes.len())))
    }
}

struct Functions {
    version: unsafe extern "C" fn(*mut c_int) -> Code,
    words: unsafe extern "C" fn(Code) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> Code,
    join: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> Code,
    state: unsafe extern "C" fn(Handle, *mut Code) -> Code,
    destroy: unsafe extern "C" fn(Handle) -> Code,
    abort: unsafe extern "C" fn(Handle) -> Code,
    begin_group: unsafe extern "C" fn() -> Code,
    end_group: unsafe extern "C" fn() -> Code,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, *mut c_void) -> Code,
    receive: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> Code,
}

impl Functions {
    fn open(path: &Path) -> Result<Self, libloading::Error> {
        // SAFETY: the library's initialisers have no precondition. It is leaked, so the pointers stay valid; each is used
        // with the signature that nccl.h declares for that name, where enumerations are 32-bit numbers.
        unsafe {
            let library = Library::new(path)?;
            let functions = Self {
                version: *library.get(b"ncclGetVersion\0")?,
                words: *library.get(b"ncclGetErrorString\0")?,
                unique_id: *library.get(b"ncclGetUniqueId\0")?,
                join: *library.get(b"ncclCommInitRank\0")?,
                state: *library.get(b"ncclCommGetAsyncError\0")?,
                destroy: *library.get(b"ncclCommDestroy\0")?,
                abort: *library.get(b"ncclCommAbort\0")?,
                begin_group: *library.get(b"ncclGroupStart\0")?,
                end_group: *library.get(b"ncclGroupEnd\0")?,
                send: *library.get(b"ncclSend\0")?,
                receive: *library.get(b"ncclRecv\0")?,
            };
            std::mem::forget(library);
            Ok(functions)
        }
    }
}

/// The opened library. It stays open until the process ends.
pub struct Nccl {
    path: PathBuf,
    functions: Functions,
}

impl Nccl {
    /// The library of this machine.
    ///
    /// # Errors
    /// [`Error::Gpu`] where there is none, or none that can be used.
    pub fn open() -> Result<Self> {
        let path = NCCL.find()?;
        let functions = Functions::open(&path).map_err(|error| {
            Error::gpu(format!("{} is not an NCCL that can be used here ({error}); {}", path.display(), NCCL.remedy))
        })?;
        let nccl = Self { path, functions };
        let number = nccl.version_number()?;
        if number < OLDEST {
            return Err(Error::gpu(format!("{} is version {number}, and 2.7 or newer is needed", nccl.path.display())));
        }
        Ok(nccl)
    }

    /// Its version, such as `2.27.5`.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the library does not say.
    pub fn version(&self) -> Result<String> {
        let number = self.version_number()?;
        // Until 2.8 the number was 1000 major + 100 minor + patch.
        let (major, minor) =
            if number < 10_000 { (number / 1000, number / 100 % 10) } else { (number / 10_000, number / 100 % 100) };
        Ok(format!("{major}.{minor}.{}", number % 100))
    }

    fn version_number(&self) -> Result<c_int> {
        let mut number = 0;
        // SAFETY: the output lives on this stack frame.
        self.check("asking for the version", unsafe { (self.functions.version)(&mut number) })?;
        Ok(number)
    }

    /// A new id, for as many ranks as join with it.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the library finds no network to be reached by.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the output lives on this stack frame and has the size that the library writes.
        self.check("making an id", unsafe { (self.functions.unique_id)(&mut id) })?;
        Ok(id)
    }

    /// Joins the ranks of `id` with the GPU of this process. Waits for all of them.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the library refuses; two ranks with one GPU are such a case.
    pub fn join(self, gpu: &'static Gpu, id: UniqueId, rank: usize, ranks: usize) -> Result<Communicator> {
        let number =
            |number: usize| c_int::try_from(number).map_err(|_| Error::input(format!("{number} ranks: too many")));
        gpu.stream().bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the GPU's context is current in this thread, and the output lives on this stack frame.
        let code = unsafe { (self.functions.join)(&mut handle, number(ranks)?, id, number(rank)?) };
        self.check("joining the ranks", code)?;
        Ok(Communicator { nccl: self, gpu, handle, broken: Mutex::new(false) })
    }

    fn check(&self, what: &str, code: Code) -> Result<()> {
        match code {
            0 | IN_PROGRESS => Ok(()),
            _ => {
                // SAFETY: the library returns a string of its own for every number.
                let words = unsafe { CStr::from_ptr((self.functions.words)(code)) }.to_string_lossy().into_owned();
                Err(Error::gpu(format!(
                    "NCCL ({}), {what}: {words}; NCCL_DEBUG=WARN in the environment says more",
                    self.path.display()
                )))
            }
        }
    }
}

/// One rank among those that joined. Its messages go in the order of the GPU's stream.
pub struct Communicator {
    nccl: Nccl,
    gpu: &'static Gpu,
    handle: Handle,
    /// Whether a message got stuck: then the library must not be waited for.
    broken: Mutex<bool>,
}

// SAFETY: the library lets one thread at a time use a communicator; `call` holds the mutex meanwhile.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// The GPU of this rank.
    pub fn gpu(&self) -> &'static Gpu {
        self.gpu
    }

    /// Version of the library.
    ///
    /// # Errors
    /// As [`Nccl::version`].
    pub fn version(&self) -> Result<String> {
        self.nccl.version()
    }

    /// Sends what `buffer` holds to the rank `to`, in the stream's order.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the library refuses.
    pub fn send(&self, buffer: &Buffer<u8>, to: usize) -> Result<()> {
        // SAFETY: the buffer is alive, has that many bytes, and goes back to the pool in the stream's order.
        unsafe { self.send_from(buffer.address(), buffer.len(), to) }
    }

    /// Sends `bytes` bytes at `address` to the rank `to`, in the stream's order.
    ///
    /// # Errors
    /// As [`Communicator::send`].
    ///
    /// # Safety
    /// There is memory of this GPU with so many bytes, which is neither freed nor written to but in the stream's order.
    pub unsafe fn send_from(&self, address: u64, bytes: usize, to: usize) -> Result<()> {
        let stream = self.gpu.stream().cudarc().cu_stream().cast();
        self.call(|| {
            // SAFETY: the memory is the promise of the caller; communicator and stream are alive.
            let code = unsafe {
                (self.nccl.functions.send)(address as *const c_void, bytes, BYTES, to as c_int, self.handle, stream)
            };
            self.nccl.check("sending", code)
        })
    }

    /// Fills `buffer` with what the rank `from` sends, in the stream's order.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the library refuses.
    pub fn receive(&self, buffer: &mut Buffer<u8>, from: usize) -> Result<()> {
        // SAFETY: as in `send`; nothing else uses the buffer, which is borrowed mutably.
        unsafe { self.receive_at(buffer.address(), buffer.len(), from) }
    }

    /// Fills `bytes` bytes at `address` with what the rank `from` sends, in the stream's order.
    ///
    /// # Errors
    /// As [`Communicator::receive`].
    ///
    /// # Safety
    /// There is memory of this GPU with so many bytes, which is neither freed nor used but in the stream's order.
    pub unsafe fn receive_at(&self, address: u64, bytes: usize, from: usize) -> Result<()> {
        let stream = self.gpu.stream().cudarc().cu_stream().cast();
        self.call(|| {
            // SAFETY: as in `send_from`.
            let code = unsafe {
                (self.nccl.functions.receive)(address as *mut c_void, bytes, BYTES, from as c_int, self.handle, stream)
            };
            self.nccl.check("receiving", code)
        })
    }

    /// What `messages` starts goes at once, so that a rank may send to itself, or two to each other.
    ///
    /// # Errors
    /// What `messages` reports, and [`Error::Gpu`] where the library refuses.
    pub fn group(&self, messages: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: the function takes nothing; groups belong to the thread.
        self.nccl.check("beginning a group", unsafe { (self.nccl.functions.begin_group)() })?;
        let started = messages();
        // SAFETY: as above. Ended in any case.
        let ended = self.nccl.check("ending a group", unsafe { (self.nccl.functions.end_group)() });
        started.and(ended)
    }

    /// Waits until all that was started before is through. `go_on` is asked meanwhile.
    ///
    /// # Errors
    /// What `go_on` reports; [`Error::Gpu`] where something failed. The communicator is of no use then.
    pub fn wait(&self, mut go_on: impl FnMut(Duration) -> Result<()>) -> Result<()> {
        let (event, begin) = (self.gpu.event()?, Instant::now());
        event.record(self.gpu.stream())?;
        let waited = loop {
            match self.progress(&event) {
                Ok(true) => break Ok(()),
                Ok(false) => {}
                Err(error) => break Err(error),
            }
            if let Err(error) = go_on(begin.elapsed()) {
                break self.late(&event, error);
            }
            if begin.elapsed() > ATTENTION {
                std::thread::sleep(PAUSE);
            }
        };
        waited.inspect_err(|_| *self.broken.lock().unwrap_or_else(PoisonError::into_inner) = true)
    }

    /// What a rank sent before it ended may still be on its way: `error` only where it does not come.
    fn late(&self, event: &Event, error: Error) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < LATE {
            match self.progress(event) {
                Ok(true) => return Ok(()),
                Ok(false) => std::thread::sleep(PAUSE),
                Err(_) => break,
            }
        }
        Err(error)
    }

    fn progress(&self, event: &Event) -> Result<bool> {
        self.call(|| {
            let mut state = 0;
            // SAFETY: the communicator is alive, and the output lives on this stack frame.
            let code = unsafe { (self.nccl.functions.state)(self.handle, &mut state) };
            self.nccl.check("asking for errors", code)?;
            self.nccl.check("a message", state)
        })?;
        event.is_reached()
    }

    fn call<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        let _one_at_a_time = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        self.gpu.stream().bind()?;
        body()
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let broken = *self.broken.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the communicator is alive and not used again. One with a stuck message is aborted, which waits for nobody.
        // There is nobody to hear of a failure here.
        let _ = unsafe {
            if broken { (self.nccl.functions.abort)(self.handle) } else { (self.nccl.functions.destroy)(self.handle) }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_told_in_bytes() {
        let id = UniqueId(std::array::from_fn(|at| at as u8));
        assert!(UniqueId::from_bytes(&id.to_bytes()).unwrap() == id);
        assert!(UniqueId::from_bytes(&[0; 4]).map(|_| ()).unwrap_err().to_string().contains("128 bytes, 4 came"));
    }

    #[test]
    fn the_library_makes_ids_without_a_gpu_or_is_said_to_be_missing() {
        match Nccl::open() {
            Ok(nccl) => {
                assert!(nccl.version().unwrap().starts_with("2."), "{}", nccl.version().unwrap());
                assert!(nccl.unique_id().unwrap() != nccl.unique_id().unwrap());
                assert!(nccl.check("trying", 4).unwrap_err().to_string().contains("invalid argument"));
            }
            Err(error) => assert!(error.to_string().contains("NCCL"), "{error}"),
        }
    }
}
