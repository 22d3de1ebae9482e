//! Streams, events and graphs: the order of work on the GPU.

use super::buffer::{Buffer, Element};
use super::raw::failed;
use crate::{Error, Result};
use gdnlab_deps::cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use gdnlab_deps::cudarc::driver::{CudaContext, CudaEvent, CudaGraph, CudaStream, result};
use std::sync::{Arc, Mutex, PoisonError};

/// A queue of work on the GPU. What is started on one stream runs in that order; two streams run side by side.
#[derive(Clone, Debug)]
pub struct Stream(Arc<CudaStream>);

impl Stream {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        context.new_stream().map(Self).map_err(|error| failed("creating a stream", error))
    }

    /// Whose blocks are placed before those of other streams.
    pub(super) fn urgent(context: &Arc<CudaContext>) -> Result<Self> {
        let refused = |error| failed("creating a stream", error);
        context.bind_to_thread().map_err(refused)?;
        let (_, greatest) = result::stream::get_priority_range().map_err(refused)?;
        context.new_stream_with_priority(greatest).map(Self).map_err(refused)
    }

    pub(super) fn cudarc(&self) -> &Arc<CudaStream> {
        &self.0
    }

    /// Copies `values` into `buffer`, which has as many elements.
    ///
    /// # Errors
    /// [`Error::Input`] where the lengths differ, [`Error::Gpu`] where the driver refuses.
    pub fn upload<T: Element>(&self, values: &[T], buffer: &mut Buffer<T>) -> Result<()> {
        same_length(values.len(), buffer.len())?;
        // SAFETY: the buffer holds as many elements as `values`.
        unsafe { self.upload_to(values, buffer.address()) }
    }

    /// What `buffer` holds once all that was started before on this stream has ended.
    ///
    /// # Errors
    /// [`Error::Gpu`] where something started before has failed.
    pub fn download<T: Element>(&self, buffer: &Buffer<T>) -> Result<Vec<T>> {
        // SAFETY: the buffer holds as many elements.
        unsafe { self.download_from(buffer.address(), buffer.len()) }
    }

    /// Copies `values` to the memory at `address`, once all that was started before on this stream has ended.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver refuses.
    ///
    /// # Safety
    /// There is memory of this GPU for as many elements, which no other stream uses.
    pub(crate) unsafe fn upload_to<T: Element>(&self, values: &[T], address: u64) -> Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the memory is the caller's promise, and it waits until the copy has read the values.
        unsafe { result::memcpy_htod_async(address, values, self.0.cu_stream()) }
            .map_err(|error| failed("copying to the GPU", error))?;
        self.synchronize()
    }

    /// What the memory at `address` holds, `length` elements, once all that was started before on this stream has ended.
    ///
    /// # Errors
    /// [`Error::Gpu`] where something started before has failed.
    ///
    /// # Safety
    /// There is memory of this GPU with as many elements, to which no other stream writes.
    pub(crate) unsafe fn download_from<T: Element>(&self, address: u64, length: usize) -> Result<Vec<T>> {
        let mut values: Vec<T> = Vec::with_capacity(length);
        if length > 0 {
            self.bind()?;
            // SAFETY: the vector has room for as many elements as the caller promises that there are; the copy has filled
            // it once the stream has been waited for, and every pattern of bits is a value of `T`.
            unsafe {
                let room = std::slice::from_raw_parts_mut(values.as_mut_ptr().cast::<u8>(), length * size_of::<T>());
                result::memcpy_dtoh_async(room, address, self.0.cu_stream())
                    .map_err(|error| failed("copying from the GPU", error))?;
                self.synchronize()?;
                values.set_len(length);
            }
        }
        Ok(values)
    }

    /// Copies `from` to `to`, which has as many elements.
    ///
    /// # Errors
    /// [`Error::Input`] where the lengths differ, [`Error::Gpu`] where the driver refuses.
    pub fn copy<T: Element>(&self, from: &Buffer<T>, to: &mut Buffer<T>) -> Result<()> {
        same_length(from.len(), to.len())?;
        self.bind()?;
        // SAFETY: both buffers are alive, belong to this GPU, and have the same size.
        unsafe { result::memcpy_dtod_async(to.address(), from.address(), from.size_bytes(), self.0.cu_stream()) }
            .map_err(|error| failed("copying on the GPU", error))
    }

    /// Sets every byte of `buffer`; 0xff makes every float format NaN.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver refuses.
    pub fn fill_bytes<T: Element>(&self, buffer: &mut Buffer<T>, byte: u8) -> Result<()> {
        self.bind()?;
        // SAFETY: the buffer is alive and has that size.
        unsafe { result::memset_d8_async(buffer.address(), byte, buffer.size_bytes(), self.0.cu_stream()) }
            .map_err(|error| failed("filling memory of the GPU", error))
    }

    /// Does what takes a moment and nothing else: sets `bytes` bytes at `address` to zero.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver refuses.
    ///
    /// # Safety
    /// There is that much memory of this GPU, which no other stream uses.
    pub(crate) unsafe fn clear_at(&self, address: u64, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: the promise of the caller.
        unsafe { result::memset_d8_async(address, 0, bytes, self.0.cu_stream()) }
            .map_err(|error| failed("filling memory of the GPU", error))
    }

    /// Waits for all that was started on this stream.
    ///
    /// # Errors
    /// [`Error::Gpu`] where some of it failed.
    pub fn synchronize(&self) -> Result<()> {
        self.0.synchronize().map_err(|error| failed("waiting for the GPU", error))
    }

    /// Lets what is started on this stream from now on wait for `event`.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver refuses.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.0.wait(&event.0).map_err(|error| failed("waiting for an event", error))
    }

    pub(super) fn bind(&self) -> Result<()> {
        self.0.context().bind_to_thread().map_err(|error| failed("using the GPU", error))
    }
}

fn same_length(from: usize, to: usize) -> Result<()> {
    if from == to { Ok(()) } else { Err(Error::input(format!("a copy of {from} elements into a buffer of {to}"))) }
}

/// A point in a stream's work, and the time when it was reached.
#[derive(Debug)]
pub struct Event(CudaEvent);

impl Event {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self> {
        let timed = CUevent_flags::CU_EVENT_DEFAULT;
        context.new_event(Some(timed)).map(Self).map_err(|error| failed("creating an event", error))
    }

    /// Marks the point after all that was started on `stream`.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver refuses.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.0.record(&stream.0).map_err(|error| failed("recording an event", error))
    }

    /// Whether the point is reached; does not wait.
    ///
    /// # Errors
    /// [`Error::Gpu`] where work before it failed.
    pub fn is_reached(&self) -> Result<bool> {
        self.0.try_is_complete().map_err(|error| failed("asking for an event", error))
    }

    /// Time from this point to `end` in milliseconds, once both are reached.
    ///
    /// # Errors
    /// [`Error::Gpu`] where one was never recorded, or work before it failed.
    pub fn elapsed_ms(&self, end: &Self) -> Result<f32> {
        self.0.elapsed_ms(&end.0).map_err(|error| failed("reading the time between events", error))
    }
}

/// Work that was recorded once and is started as one.
pub struct Graph {
    graph: Mutex<CudaGraph>,
}

// SAFETY: the driver asks that calls on one graph come one at a time; the mutex sees to that.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    pub(super) fn capture(stream: Stream, work: impl FnOnce(&Stream) -> Result<()>) -> Result<Self> {
        let capturing = |error| failed("recording a graph", error);
        stream.0.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(capturing)?;
        let worked = work(&stream);
        // Ended in any case: a stream that goes on recording could not be used or destroyed.
        let graph = stream.0.end_capture(CUgraphInstantiate_flags(0));
        worked?;
        let graph = graph.map_err(capturing)?.ok_or_else(|| Error::gpu("recording a graph: nothing was started"))?;
        Ok(Self { graph: Mutex::new(graph) })
    }

    /// Starts the recorded work on `stream`.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the driver refuses.
    pub fn replay(&self, stream: &Stream) -> Result<()> {
        let graph = self.graph.lock().unwrap_or_else(PoisonError::into_inner);
        stream.bind()?;
        // SAFETY: graph and stream are alive and of one context; the addresses in the graph are valid by the promise that
        // was made for each launch in it.
        unsafe { result::graph::launch(graph.cu_graph_exec(), stream.0.cu_stream()) }
            .map_err(|error| failed("replaying a graph", error))
    }
}
