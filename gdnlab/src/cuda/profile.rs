//! Where the time of work on the GPU goes: events around each kernel and each product.

use super::stream::{Event, Stream};
use crate::{Error, Result};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// The time that one kernel took.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// Its name, or sizes and formats of a product.
    pub name: String,
    /// Time in milliseconds, with the gap to the kernel before.
    pub ms: f32,
}

/// All launches of one name together.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelSum {
    /// Name of the kernel or product.
    pub name: String,
    /// How often it was launched.
    pub launches: usize,
    /// Sum of their times in milliseconds.
    pub ms: f64,
}

impl KernelSum {
    /// The sums of `times` by name, the largest first.
    pub fn of(times: &[KernelTime]) -> Vec<Self> {
        let mut sums: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
        for time in times {
            let (launches, ms) = sums.entry(&time.name).or_default();
            *launches += 1;
            *ms += f64::from(time.ms);
        }
        let sum = |(name, (launches, ms)): (&str, _)| Self { name: name.to_owned(), launches, ms };
        let mut sums: Vec<Self> = sums.into_iter().map(sum).collect();
        sums.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        sums
    }
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
