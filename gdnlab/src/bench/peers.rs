//! Kernels of others, timed by their own process on the same tensors in the same run.

use super::case::Peer as PeerTime;
use super::gdn::Row;
use super::{Budget, Gradients, Loaded, Samples, Subject, Tensors, Values, results_of};
use crate::cuda::Stream;
use crate::kernel::Kernel;
use crate::peer::{self, Destination, Numbers, Peer, PeerOptions, PeerTiming, Stored};
use crate::precision::Format;
use crate::problem::{Inputs, Op, Results, Shape};
use crate::record::Pass;
use crate::{Error, Result};
use half::{bf16, f16};
use safetensors::Dtype;
use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

/// What records call a time that was taken beside ours.
pub const SAME_RUN: &str = "same run";

/// A [`Peer`] among the subjects of a benchmark.
#[derive(Clone)]
pub struct TimedPeer(Arc<Peer>);

impl TimedPeer {
    /// The peer called `name`.
    ///
    /// # Errors
    /// As [`Peer::new`].
    pub fn new(name: &str, options: PeerOptions) -> Result<Self> {
        Ok(Self(Arc::new(Peer::new(name, options)?)))
    }
}

/// Sets the times of `peers` among the `rows` of one case beside those of the other kernels; where there are any, published
/// times of the same library are left out. A peer itself is compared with nobody.
pub fn set_beside(rows: &mut [Row], peers: &[&str]) {
    let is_peer = |row: &Row| peers.contains(&row.kernel.as_str());
    let time = |row: &Row| Some((row.kernel.clone(), row.samples()?.median()));
    let times: Vec<_> = rows.iter().filter(|row| is_peer(row)).filter_map(time).collect();
    for row in rows.iter_mut() {
        if is_peer(row) {
            row.case.peers.clear();
            continue;
        }
        for (name, ms) in &times {
            row.case.peers.retain(|peer| peer.name != *name);
            row.case.peers.push(PeerTime { name: name.clone(), ms: *ms, source: SAME_RUN });
        }
    }
}

impl Kernel for TimedPeer {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn summary(&self) -> String {
        self.0.summary()
    }

    fn needs(&self) -> &'static str {
        self.0.needs()
    }

    fn on_gpu(&self) -> bool {
        self.0.on_gpu()
    }

    fn software(&self) -> Option<String> {
        self.0.software()
    }

    fn has_backward(&self) -> bool {
        self.0.has_backward()
    }

    fn ops(&self) -> &'static [Op] {
        self.0.ops()
    }

    fn mode(&self) -> &'static str {
        self.0.mode()
    }

    fn input_format(&self) -> Format {
        self.0.input_format()
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        self.0.forward(inputs)
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        self.0.backward(inputs)
    }
}

impl Subject for TimedPeer {
    fn is_peer(&self) -> bool {
        true
    }

    fn supports(&self, _: &Shape) -> Result<()> {
        // Only the peer knows, and says so case by case.
        Ok(())
    }

    fn load(&self, pass: Pass, tensors: &Tensors) -> Result<Box<dyn Loaded>> {
        if pass == Pass::Bwd && !self.has_backward() {
            return Err(Error::Unsupported { kernel: self.name().to_owned(), reason: "it has no backward".to_owned() });
        }
        let results = RefCell::default();
        Ok(Box::new(LoadedPeer { peer: self.0.clone(), pass, tensors: tensors.clone(), results }))
    }
}

/// A call that goes to the peer's process each time.
struct LoadedPeer {
    peer: Arc<Peer>,
    pass: Pass,
    tensors: Tensors,
    /// Of the last run.
    results: RefCell<Vec<(&'static str, Values)>>,
}

impl LoadedPeer {
    fn backward(&self) -> bool {
        self.pass == Pass::Bwd
    }
}

impl Loaded for LoadedPeer {
    fn spoil(&mut self) -> Result<()> {
        self.results.borrow_mut().clear();
        Ok(())
    }

    unsafe fn launch(&self, _: &Stream) -> Result<()> {
        let write = |case: &Destination| write(&self.tensors, case);
        *self.results.borrow_mut() =
            self.peer.call_case(&write, self.backward(), |path| read(path, self.pass, &self.tensors))?;
        Ok(())
    }

    fn own_times(&self, budget: &Budget, flush_bytes: usize) -> Option<Result<Samples>> {
        let timing = PeerTiming {
            backward: self.backward(),
            warm_up: budget.warm_up,
            samples: [budget.min_samples, budget.max_samples],
            time: budget.time,
            flush_bytes,
        };
        let samples = self.peer.time_case(&|case| write(&self.tensors, case), &timing);
        Some(samples.and_then(|samples| Samples::new(samples.ms)))
    }

    fn read(&self, tensor: &str) -> Result<Values> {
        let results = self.results.borrow();
        let found = results.iter().find(|(name, _)| *name == tensor);
        found.map(|(_, values)| values.clone()).ok_or_else(|| Error::Unsupported {
            kernel: self.peer.name().to_owned(),
            reason: format!("it gave no '{tensor}'"),
        })
    }
}

fn numbers(values: &Values) -> Numbers<'_> {
    match values {
        Values::F32(values) => Numbers::F32(values),
        Values::F16(values) => Numbers::F16(values),
        Values::Bf16(values) => Numbers::Bf16(values),
    }
}

/// Writes the call as a case.
fn write(tensors: &Tensors, case: &Destination) -> Result<()> {
    let Shape { batch, tokens, .. } = tensors.shape;
    // In a `Tensors` both axes of tokens are one.
    let dims = |name: &str| -> Result<Vec<usize>> {
        let dims = tensors.dims(name)?;
        let is_state = matches!(name, "initial_state" | "dht");
        Ok(if is_state { dims } else { [&[batch, tokens], &dims[1..]].concat() })
    };
    let mut stored = Vec::new();
    for (name, values) in [("q", &tensors.q), ("k", &tensors.k), ("v", &tensors.v)] {
        stored.push(Stored::numbers(name, dims(name)?, numbers(values)));
    }
    for (name, values) in [("g", &tensors.g), ("beta", &tensors.beta), ("initial_state", &tensors.initial_state)] {
        stored.push(Stored::numbers(name, dims(name)?, Numbers::F32(values)));
    }
    if let Some(Gradients { d_o, d_final_state }) = &tensors.gradients {
        stored.push(Stored::numbers("do", dims("do")?, numbers(d_o)));
        stored.push(Stored::numbers("dht", dims("dht")?, Numbers::F32(d_final_state)));
    }
    let scale = [tensors.scale as f32];
    stored.push(Stored::numbers("scale", vec![1], Numbers::F32(&scale)));
    let offsets: Vec<usize> = std::iter::once(0).chain(tensors.sequences.iter().map(|range| range.end)).collect();
    // Rows of a batch are sequences without being packed.
    if batch == 1 {
        stored.push(Stored::positions("cu_seqlens", &offsets));
    }
    case.write(stored, &[("op", Op::Gdn.name())])
}

/// The results of `pass` in the file at `path`.
fn read(path: &Path, pass: Pass, tensors: &Tensors) -> Result<Vec<(&'static str, Values)>> {
    let bytes = peer::file::read_bytes(path)?;
    let (held, _) = peer::file::parse(path, &bytes)?;
    let mut found = Vec::new();
    for &name in results_of(pass) {
        let Ok(view) = held.tensor(name) else { continue };
        let values = match view.dtype() {
            Dtype::F32 => Values::F32(peer::file::values(view.data(), f32::from_le_bytes)),
            Dtype::F16 => Values::F16(peer::file::values(view.data(), f16::from_le_bytes)),
            Dtype::BF16 => Values::Bf16(peer::file::values(view.data(), bf16::from_le_bytes)),
            Dtype::F64 => Values::F32(peer::file::values(view.data(), |word| f64::from_le_bytes(word) as f32)),
            other => return Err(Error::input(format!("'{name}' has dtype {other:?}: expected f64, f32, f16 or bf16"))),
        };
        let expected: usize = tensors.dims(name)?.iter().product();
        if values.len() != expected {
            return Err(Error::input(format!("'{name}' has {} elements, expected {expected}", values.len())));
        }
        found.push((name, values));
    }
    Ok(found)
}

#[cfg(test)]
#[path = "peers_tests.rs"]
mod tests;
