//! Time on a GPU, beside the time that the hardware allows and the times of others.
//!
//! [`Case`]s, from the published ones or made up, are given to each [`Subject`] in turn: its results are checked
//! ([`check`]), and then timed ([`timer`]). [`gdn::run`] does all of that for GDN and hands each case over as soon as it is
//! measured; [`report`] prints it.

pub mod attention;
pub mod case;
pub mod check;
mod chunk;
pub mod gdn;
pub mod gdn2;
pub mod ladder;
pub mod peers;
pub mod report;
pub mod roofline;
pub mod seqlens;
pub mod suite;
pub mod tensors;
pub mod timer;
pub mod values;

pub use case::{Case, Heads, Peer};
pub use roofline::Ceilings;
pub use seqlens::SeqLens;
pub use suite::Suite;
pub use tensors::{Gradients, Tensors};
pub use timer::{Budget, Samples, Timer, Window};
pub use values::Values;

use crate::cuda::Stream;
use crate::cuda::chunk::Chunk;
use crate::kernel::Kernel;
use crate::problem::Shape;
use crate::record::Pass;
use crate::{Error, Result};
use std::ops::ControlFlow;

/// A kernel that can be timed: it takes a call into the memory of the device once, and then starts with launches alone.
pub trait Subject: Kernel {
    /// Whether it is somebody else's, to be compared with rather than to be compared.
    fn is_peer(&self) -> bool {
        false
    }

    /// Refuses sizes that it has no kernel for, before anything is measured.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] with the sizes that it takes.
    fn supports(&self, shape: &Shape) -> Result<()>;

    /// Compiles what `pass` needs for such a call, and puts `tensors` and room for the results and for intermediates into
    /// the memory of the device. All that is not launches happens here.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`] where it cannot run such a call, [`crate::Error::Gpu`] where the GPU cannot.
    fn load(&self, pass: Pass, tensors: &Tensors) -> Result<Box<dyn Loaded>>;
}

/// A [`Subject`] with one call in the memory of the device.
pub trait Loaded {
    /// Fills every result with NaN.
    ///
    /// # Errors
    /// What the GPU reports.
    fn spoil(&mut self) -> Result<()>;

    /// Starts the pass on `stream`: launches alone, without a wait or an allocation, so that they can be recorded into a
    /// graph.
    ///
    /// # Errors
    /// What the GPU reports.
    ///
    /// # Safety
    /// Until the kernels have ended, or the last replay of a graph that holds them, this is neither dropped nor used on
    /// another stream.
    unsafe fn launch(&self, stream: &Stream) -> Result<()>;

    /// The result `tensor`, one of [`results_of`] the pass, as the last run left it: row-major, `o` `[B, T, HV, V]` and so
    /// on, in the format in which it is stored.
    ///
    /// # Errors
    /// What the GPU reports.
    fn read(&self, tensor: &str) -> Result<Values>;

    /// Times that it takes by itself, where it runs in a process of its own; `None` where its launches are timed.
    /// `flush_bytes` are written before each sample, so that the L2 cache is cold.
    fn own_times(&self, _budget: &Budget, _flush_bytes: usize) -> Option<Result<Samples>> {
        None
    }
}

/// The tensors that a pass gives, by their names in tensor files.
pub fn results_of(pass: Pass) -> &'static [&'static str] {
    if pass == Pass::Bwd { &["dq", "dk", "dv", "dg", "dbeta", "dh0"] } else { &["o", "final_state"] }
}

/// Every subject of this build, the default first.
pub fn all_subjects() -> Vec<Box<dyn Subject>> {
    Chunk::presets().into_iter().chain([Chunk::fused()]).map(|kernel| Box::new(kernel) as Box<dyn Subject>).collect()
}

/// The subjects called `names`, or the default where there are none.
///
/// # Errors
/// [`Error::Input`] for a name that is not on the list.
pub fn subjects(names: &[String]) -> Result<Vec<Box<dyn Subject>>> {
    let mut all = all_subjects();
    if names.is_empty() {
        all.truncate(1);
        return Ok(all);
    }
    let known = all.iter().map(|subject| subject.name().to_owned()).collect::<Vec<_>>().join(", ");
    let mut chosen = Vec::new();
    for name in names {
        match all.iter().position(|subject| subject.name() == name) {
            Some(at) => chosen.push(all.swap_remove(at)),
            None => {
                return Err(Error::input(format!("no kernel '{name}' to time: expected some of {known}, each once")));
            }
        }
    }
    Ok(chosen)
}

/// Runs and times what is loaded: a [`Timer`], or what stands for it where there is no GPU.
pub trait Stopwatch {
    /// Runs it once and waits for its end.
    ///
    /// # Errors
    /// What the GPU reports.
    fn once(&mut self, loaded: &dyn Loaded) -> Result<()>;

    /// Takes samples; `go_on` is asked before each.
    ///
    /// # Errors
    /// [`crate::Error::Stopped`] where `go_on` said so too early, and what the GPU reports.
    fn time(&mut self, loaded: &dyn Loaded, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Samples>;
}

impl Stopwatch for Timer {
    fn once(&mut self, loaded: &dyn Loaded) -> Result<()> {
        let stream = self.gpu().stream();
        // SAFETY: this is the stream in whose order memory is freed, and it is waited for.
        unsafe { loaded.launch(stream)? };
        stream.synchronize()
    }

    fn time(&mut self, loaded: &dyn Loaded, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Samples> {
        if let Some(samples) = loaded.own_times(self.budget(), self.flush_bytes()) {
            return samples;
        }
        // SAFETY: the graph lives as long as this call, and its replays run on the stream in whose order memory is freed.
        Self::time(self, |stream| unsafe { loaded.launch(stream) }, go_on)
    }
}
