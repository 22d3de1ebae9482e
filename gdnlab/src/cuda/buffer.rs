//! Memory of the GPU.

use super::raw::failed;
use super::stream::Stream;
use crate::{Error, Result};
use gdnlab_deps::cudarc::driver::{CudaSlice, DevicePtr};
use std::fmt;
use std::marker::PhantomData;

/// A number that kernels share with Rust.
///
/// # Safety
/// The type has no padding, every pattern of bits is a value of it, and it holds no address of the host.
pub unsafe trait Element: Copy + Send + Sync + 'static {}

macro_rules! elements {
    ($($number:ty),*) => {
        $(
            // SAFETY: a plain number.
            unsafe impl Element for $number {}
        )*
    };
}
elements!(u8, u16, u32, u64, i8, i16, i32, i64, f32, f64, half::f16, half::bf16);

/// Contiguous memory of the GPU for elements of type `T`.
///
/// It belongs to the stream of the [`Gpu`](super::Gpu): it is allocated and, when dropped, freed in the order of that
/// stream, so work that was started there before may still use it. Work on another stream must be waited for first.
pub struct Buffer<T> {
    bytes: CudaSlice<u8>,
    address: u64,
    length: usize,
    element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    pub(super) fn new(stream: &Stream, length: usize) -> Result<Self> {
        let bytes = length.checked_mul(size_of::<T>()).ok_or_else(|| {
            Error::gpu(format!("{length} elements of {} bytes are more than memory can be", size_of::<T>()))
        })?;
        let what = || format!("allocating {bytes} bytes on the GPU");
        // SAFETY: the content is whatever it was; every pattern of bits is a value of `T`. The driver has no buffer of
        // length 0.
        let memory = unsafe { stream.cudarc().alloc::<u8>(bytes.max(1)) }.map_err(|error| failed(&what(), error))?;
        let address = memory.device_ptr(stream.cudarc()).0;
        Ok(Self { bytes: memory, address, length, element: PhantomData })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Size of the elements together, in bytes.
    pub fn size_bytes(&self) -> usize {
        self.length * size_of::<T>()
    }

    /// Address of the first element on the GPU, a multiple of 256; it means nothing to the host.
    pub fn address(&self) -> u64 {
        debug_assert_eq!(self.bytes.len(), self.size_bytes().max(1));
        self.address
    }
}

impl<T: Element> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} at {:#x}", self.length, std::any::type_name::<T>(), self.address)
    }
}
