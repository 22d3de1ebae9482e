//! The driver's calls that cudarc has no safe form for: looking for the driver without a panic, loading CUBIN images,
//! launching with a cluster, tensor maps, the memory pool.
//!
//! Every `unsafe` of [`cuda`](super) that names a driver function stands here, so that it can be read in one sitting.

use super::tensor_map::{MAX_AXES, Swizzle, TileFormat, Tiles};
use crate::{Error, Result};
use gdnlab_deps::cudarc::driver::result::{self, DriverError};
use gdnlab_deps::cudarc::driver::{CudaContext, CudaStream, sys};
use std::ffi::{CString, c_void};
use std::sync::Arc;

/// Turns the driver's refusal into words: what was tried, what came, and what to do where that is known.
pub(super) fn failed(what: &str, error: DriverError) -> Error {
    Error::gpu(words(what, error))
}

/// The message of [`failed`].
pub(super) fn words(what: &str, error: DriverError) -> String {
    let name = error.error_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let words = error.error_string().map(|words| words.to_string_lossy().into_owned()).unwrap_or_default();
    format!("{what}: {words} ({name}){}", remedy(error.0))
}

/// What to do about an error of the driver, as the end of a sentence; empty where there is nothing to say.
fn remedy(code: sys::CUresult) -> &'static str {
    match code {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => "; use a smaller problem, or end what else uses this GPU",
        sys::CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES => {
            "; a block wants more registers or shared memory than a multiprocessor has"
        }
        sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | sys::CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | sys::CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | sys::CUresult::CUDA_ERROR_LAUNCH_FAILED => {
            "; a kernel failed, and this process cannot use the GPU any more: start it anew, \
             and run it under compute-sanitizer to see which access it was"
        }
        sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
        | sys::CUresult::CUDA_ERROR_INVALID_IMAGE
        | sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            "; the compiler is newer than the driver: update the driver, or point GDNLAB_NVRTC to an older NVRTC"
        }
        _ => "",
    }
}

/// Whether the driver's library can be opened. It then stays open: opening it again costs nothing.
///
/// cudarc panics without it, so this is asked first.
pub(super) fn driver_present() -> bool {
    // SAFETY: NVIDIA's driver may be loaded into any process; its initialisers have no precondition.
    match unsafe { gdnlab_deps::libloading::Library::new("libcuda.so.1") } {
        Ok(library) => {
            std::mem::forget(library);
            true
        }
        // SAFETY: as above, under the names that cudarc would try.
        Err(_) => unsafe { sys::is_culib_present() },
    }
}

/// Whether this process already works on GPU `ordinal`, be it through another copy of this crate (each cell of a
/// notebook has its own). Starts nothing.
pub(super) fn in_use(ordinal: usize) -> bool {
    if !driver_loaded() {
        return false;
    }
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the library is loaded, both outputs live on this stack frame, and the call fails cleanly before cuInit.
    let state = unsafe {
        let mut device = 0;
        sys::cuDeviceGet(&mut device, ordinal as i32)
            .result()
            .and_then(|()| sys::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active).result())
    };
    state.is_ok() && active != 0
}

/// Whether the driver's library is in this process, without loading it.
#[cfg(unix)]
fn driver_loaded() -> bool {
    use gdnlab_deps::libloading::os::unix::{Library, RTLD_LAZY};
    /// From dlfcn.h of glibc and musl: succeed only where the library is loaded already.
    const RTLD_NOLOAD: i32 = 4;
    // SAFETY: nothing is loaded, so nothing is initialised; dropping the handle takes back its own count alone.
    unsafe { Library::open(Some("libcuda.so.1"), RTLD_LAZY | RTLD_NOLOAD) }.is_ok()
}

#[cfg(not(unix))]
fn driver_loaded() -> bool {
    false
}

/// The version of CUDA that the driver implements, as (major, minor).
pub(super) fn cuda_version() -> Result<(u32, u32), DriverError> {
    let mut version = 0;
    // SAFETY: the output lives on this stack frame.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
    Ok((version as u32 / 1000, version as u32 % 1000 / 10))
}

/// Lets the device's memory pool keep what is freed: an allocation then costs microseconds instead of a call into the
/// operating system.
pub(super) fn keep_freed_memory(context: &CudaContext) -> Result<(), DriverError> {
    let mut threshold = u64::MAX;
    // SAFETY: the device belongs to a live context, and the attribute is a 64-bit number that the call reads at once.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast())
    }
}

/// Bytes that the device's memory pool holds and nobody uses: the next allocations take them first.
pub(super) fn pooled_bytes(context: &CudaContext) -> Result<u64, DriverError> {
    // SAFETY: the device belongs to a live context, and both attributes are 64-bit numbers that the call writes at once.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())?;
        let attribute = |attribute| {
            let mut bytes = 0u64;
            sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()).result().map(|()| bytes)
        };
        let held = attribute(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        let used = attribute(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        Ok(held.saturating_sub(used))
    }
}

/// The driver's description of a tensor in memory, for Hopper's copy engine. A kernel takes it by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(128))]
pub struct TensorMap([u64; 16]);

/// Asks the driver for a tensor map. Its checks are the driver's; those of [`Tiles`] come before.
pub(super) fn tensor_map(tiles: &Tiles) -> Result<TensorMap, DriverError> {
    let format = match tiles.format {
        TileFormat::F32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        TileFormat::Tf32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
        TileFormat::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        TileFormat::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    };
    let swizzle = match tiles.swizzle {
        Swizzle::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::Bytes32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::Bytes64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::Bytes128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let every_element = [1u32; MAX_AXES];
    // SAFETY: the arrays hold as many numbers as the rank says, which `Tiles::map` has checked, and the call copies them.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            format,
            tiles.shape.len() as u32,
            tiles.address as *mut c_void,
            tiles.shape.as_ptr(),
            tiles.strides_bytes.as_ptr(),
            tiles.tile.as_ptr(),
            every_element.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()?;
    Ok(TensorMap(map.opaque))
}

/// A CUBIN image in the driver.
pub(super) struct Image {
    module: sys::CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: a module handle may be used from any thread in which its context is current; every use below binds it.
unsafe impl Send for Image {}
// SAFETY: the driver's module functions are thread safe.
unsafe impl Sync for Image {}

impl Image {
    pub fn load(context: &Arc<CudaContext>, cubin: &[u8]) -> Result<Self, DriverError> {
        context.bind_to_thread()?;
        // SAFETY: an ELF image says itself how long it is, and the caller hands over one that NVRTC or the verified
        // cache produced; the driver copies it.
        let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) }?;
        Ok(Self { module, context: context.clone() })
    }

    pub fn entry(self: &Arc<Self>, name: &str) -> Result<Entry, DriverError> {
        self.context.bind_to_thread()?;
        let name = CString::new(name).map_err(|_| DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND))?;
        // SAFETY: the module is loaded as long as `self` lives, and the entry holds `self`.
        let function = unsafe { result::module::get_function(self.module, name) }?;
        Ok(Entry { function, image: self.clone() })
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        self.context.record_err(self.context.bind_to_thread());
        // SAFETY: nobody else holds the module: entries share ownership of `self`.
        self.context.record_err(unsafe { result::module::unload(self.module) });
    }
}

/// A kernel of an [`Image`].
#[derive(Clone)]
pub(super) struct Entry {
    function: sys::CUfunction,
    image: Arc<Image>,
}

// SAFETY: as for the image that it belongs to.
unsafe impl Send for Entry {}
// SAFETY: as for the image that it belongs to.
unsafe impl Sync for Entry {}

/// The shape of a launch as the driver takes it.
pub(super) struct Launch {
    pub blocks: [u32; 3],
    pub threads: u32,
    pub shared_bytes: u32,
    pub cluster: Option<[u32; 3]>,
    pub early: bool,
}

impl Entry {
    /// Allows this kernel `bytes` of dynamic shared memory per block.
    pub fn allow_shared_bytes(&self, bytes: u32) -> Result<(), DriverError> {
        self.image.context.bind_to_thread()?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to an image that is loaded.
        unsafe { result::function::set_function_attribute(self.function, attribute, bytes as i32) }
    }

    /// Starts the kernel with one parameter.
    ///
    /// # Safety
    /// `parameter` points to the kernel's parameter, in the layout that the kernel was compiled with, and every address
    /// in it stays valid until the kernel has ended.
    pub unsafe fn launch(
        &self,
        stream: &CudaStream,
        launch: &Launch,
        parameter: *const c_void,
    ) -> Result<(), DriverError> {
        self.image.context.bind_to_thread()?;
        let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let cluster = launch.cluster.map(|[x, y, z]| {
            let cluster_dim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            attribute(
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                sys::CUlaunchAttributeValue { clusterDim: cluster_dim },
            )
        });
        let early = launch.early.then(|| {
            attribute(
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
            )
        });
        let mut attributes: Vec<sys::CUlaunchAttribute> = cluster.into_iter().chain(early).collect();
        let config = sys::CUlaunchConfig {
            gridDimX: launch.blocks[0],
            gridDimY: launch.blocks[1],
            gridDimZ: launch.blocks[2],
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: stream.cu_stream(),
            numAttrs: attributes.len() as u32,
            attrs: attributes.as_mut_ptr(),
        };
        let mut parameters = [parameter.cast_mut()];
        // SAFETY: config, attributes and parameter live until the call returns, which has copied them by then; what the
        // kernel does with the addresses is the caller's promise.
        unsafe { sys::cuLaunchKernelEx(&config, self.function, parameters.as_mut_ptr(), std::ptr::null_mut()) }.result()
    }
}
