//! Where the time of work on the GPU goes: events around each kernel and each product.

use super::stream::{Event, Stream};
use crate::{Error, Result};
use std::cell::RefCell;

/// The time that one kernel took.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// Its name, or sizes and formats of a product.
    pub name: String,
    /// Time in milliseconds, with the gap to the kernel before.
    pub ms: f32,
}

struct Launched {
    name: String,
    begin: Event,
    end: Event,
}

thread_local! {
    /// What was launched while this thread looks on.
    static LOOKING: RefCell<Option<Vec<Launched>>> = const { RefCell::new(None) };
}

/// Stops looking on, whatever happens.
struct Looking;

impl Looking {
    fn start() -> Result<Self> {
        LOOKING.with_borrow_mut(|looking| match looking {
            Some(_) => Err(Error::input("times of kernels are being taken already")),
            None => {
                *looking = Some(Vec::new());
                Ok(Self)
            }
        })
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        LOOKING.set(None);
    }
}

/// Runs `work`, which launches kernels on `stream` from this thread, and returns the time of each in their order.
///
/// A kernel of microseconds is timed well only where the GPU is busy when its launch arrives: what is launched on `stream`
/// before, without waiting for it, gives the CPU its lead. Work cannot be recorded into a graph meanwhile.
///
/// # Errors
/// What `work` returns, and [`Error::Gpu`] where a kernel fails.
pub fn kernel_times(stream: &Stream, work: impl FnOnce() -> Result<()>) -> Result<Vec<KernelTime>> {
    let looking = Looking::start()?;
    work()?;
    stream.synchronize()?;
    let launched = LOOKING.take().unwrap_or_default();
    drop(looking);
    let time = |Launched { name, begin, end }| Ok(KernelTime { name, ms: begin.elapsed_ms(&end)? });
    launched.into_iter().map(time).collect()
}

/// Launches something called `name`, between two events where somebody looks on.
pub(super) fn around(
    stream: &Stream,
    name: impl FnOnce() -> String,
    launch: impl FnOnce() -> Result<()>,
) -> Result<()> {
    if LOOKING.with_borrow(Option::is_none) {
        return launch();
    }
    let event = || Event::new(stream.cudarc().context());
    let (begin, end) = (event()?, event()?);
    begin.record(stream)?;
    launch()?;
    end.record(stream)?;
    LOOKING.with_borrow_mut(|looking| {
        if let Some(all) = looking {
            all.push(Launched { name: name(), begin, end });
        }
    });
    Ok(())
}
