//! The part of a rank on its GPU, for times that are those of the GPU.

use super::calls::Calls;
use super::chain::{Way, transition_call};
use super::cut::Part;
use super::device::{ChunkKernel, DeviceCall, composition};
use super::exchange::{DeviceBytes, Exchange};
use super::measure::{RankTimes, link_by};
use super::script::{Act, Call, Passes, State, script};
use super::trace::{Link, Step, Work};
use crate::cuda::{Buffer, Event, Gpu, Matmul};
use crate::problem::{Inputs, Shape, Tensor};
use crate::{Error, Result};

/// Bytes that are written before each run: the caches are cold then, and what the run starts is queued meanwhile.
const FLUSH_BYTES: usize = 512 << 20;
/// Runs that do not count.
const WARM_UP: usize = 5;
/// Bytes of the messages that a link's rate is measured with.
const LINK_BYTES: usize = 32 << 20;

/// The calls of a rank's part with all their tensors on the GPU of this process, made and uploaded once.
///
/// It does what [`Rank`](super::Rank) does, but a forward is not run again where the GPU still has what it left. Everything is
/// started on the GPU's stream, messages too where the exchange can do that: the host waits for the end alone.
pub(super) struct Resident {
    gpu: &'static Gpu,
    script: Vec<Act>,
    calls: Vec<(Call, DeviceCall)>,
    shape: Shape,
    /// Sequences of each call, in their order.
    sequences: Vec<usize>,
    /// For the ways in which states go.
    products: Vec<(Way, Matmul)>,
    flush: Buffer<u8>,
}

impl Resident {
    /// `part` under `kernel`, forward, or with `backward` all of it.
    ///
    /// # Errors
    /// What the kernel refuses, and [`Error::Gpu`] where the GPU has no memory left.
    pub fn new(kernel: &ChunkKernel, part: &Part, shape: &Shape, backward: bool) -> Result<Self> {
        let gpu = Gpu::shared()?;
        let script = script(part, backward);
        let mut calls: Vec<(Call, DeviceCall)> = Vec::new();
        let mut sequences = Vec::new();
        let mut products = Vec::new();
        if let Some(inputs) = &part.inputs {
            let mut of_part = Calls::of(part, inputs);
            let mut own = if backward { None } else { of_part.take_own(part, inputs) };
            for act in &script {
                match *act {
                    Act::Run { call, .. } if calls.iter().all(|(made, _)| *made != call) => {
                        let inputs = inputs_of(call, &mut of_part, &mut own)?;
                        sequences.push(inputs.sequences());
                        let backward = backward && call != Call::Transition;
                        calls.push((call, kernel.call(gpu, &inputs, backward)?));
                    }
                    Act::Compose(way) => products.push((way, Matmul::new(gpu, &composition(shape, way))?)),
                    _ => {}
                }
            }
        }
        Ok(Self { gpu, script, calls, shape: *shape, sequences, products, flush: gpu.alloc(FLUSH_BYTES)? })
    }

    /// Times of so many runs, each together with all other ranks, and of as many in which only messages go.
    ///
    /// # Errors
    /// What the GPU and the exchange report.
    pub fn time(&mut self, exchange: &dyn Exchange, samples: usize) -> Result<RankTimes> {
        for _ in 0..WARM_UP {
            self.run(exchange, |_| true)?;
        }
        let mut times = RankTimes::default();
        for _ in 0..samples {
            let (total_ms, steps) = self.run(exchange, |_| true)?;
            times.total_ms.push(total_ms);
            times.steps.push(steps);
        }
        let is_message = |act: &Act| matches!(act, Act::Send { .. } | Act::Receive { .. });
        for _ in 0..samples {
            times.messages_ms.push(self.run(exchange, is_message)?.0);
        }
        Ok(times)
    }

    /// Does what is `wanted`, beginning together with all other ranks. The GPU's time of all of it and of each step, in
    /// milliseconds.
    fn run(&mut self, exchange: &dyn Exchange, wanted: impl Fn(&Act) -> bool) -> Result<(f64, Vec<Step>)> {
        let acts: Vec<Act> = self.script.iter().filter(|act| wanted(act)).copied().collect();
        let marks = (0..=acts.len()).map(|_| self.gpu.event()).collect::<Result<Vec<Event>>>()?;
        exchange.meet_on_gpu()?;
        self.gpu.fill_bytes(&mut self.flush, 0)?;
        marks[0].record(self.gpu.stream())?;
        for (act, mark) in acts.iter().zip(&marks[1..]) {
            self.start(act, exchange)?;
            mark.record(self.gpu.stream())?;
        }
        exchange.wait_for_gpu()?;
        let between = |begin: &Event, end: &Event| begin.elapsed_ms(end).map(f64::from);
        let step = |(act, ends): (&Act, &[Event])| Ok(self.step(act, between(&ends[0], &ends[1])?));
        let steps = acts.iter().zip(marks.windows(2)).map(step).collect::<Result<_>>()?;
        Ok((between(&marks[0], &marks[acts.len()])?, steps))
    }

    fn step(&self, act: &Act, ms: f64) -> Step {
        let bytes = self.state_bytes();
        match *act {
            Act::Run { work, .. } => Step::Compute { work, ms },
            Act::Compose(_) => Step::Compute { work: Work::Compose, ms },
            Act::Send { to, .. } => Step::Send { to, bytes, ms },
            Act::Receive { from, .. } => Step::Receive { from, bytes, ms },
        }
    }

    fn start(&self, act: &Act, exchange: &dyn Exchange) -> Result<()> {
        let stream = self.gpu.stream();
        // SAFETY, of all blocks below: whatever is started here runs in the order of the GPU's stream, in which buffers are
        // freed too; every address is that of a state of a call of this, which lives as long.
        match *act {
            Act::Run { call, passes, .. } => {
                let call = self.call(call)?;
                if passes != Passes::Backward {
                    // SAFETY: as above.
                    unsafe { call.forward_on(stream)? };
                }
                if passes != Passes::Forward {
                    // SAFETY: as above.
                    unsafe { call.backward_after_forward_on(stream)? };
                }
                Ok(())
            }
            Act::Compose(way) => {
                let product = self.products.iter().find(|(of, _)| *of == way).map(|(_, product)| product);
                let product = product.ok_or_else(|| Error::input("a rank that composes states without a product"))?;
                let (state, local) = match way {
                    Way::Forward => ("initial_state", "final_state"),
                    Way::Backward => ("dht", "dh0"),
                };
                let transition = self.call(Call::Transition)?.address("final_state")?;
                let state = self.call(Call::Spanned)?.address(state)?;
                let local = self.call(Call::Local)?.address(local)?;
                // SAFETY: as above; transition, state and what it is added to are tensors of three calls.
                unsafe { product.run_on(stream, transition, state, local, 1.0, 1.0) }
            }
            // SAFETY: as above.
            Act::Send { to, state } => unsafe { exchange.send_from_gpu(to, self.memory(state)?) },
            // SAFETY: as above.
            Act::Receive { from, state } => unsafe { exchange.receive_on_gpu(from, self.memory(state)?) },
        }
    }

    fn call(&self, wanted: Call) -> Result<&DeviceCall> {
        let found = self.calls.iter().find(|(call, _)| *call == wanted);
        found.map(|(_, call)| call).ok_or_else(|| Error::input(format!("a rank without its call {wanted:?}")))
    }

    fn memory(&self, State { call, tensor }: State) -> Result<DeviceBytes> {
        let at = self.calls.iter().position(|(of, _)| *of == call);
        let before = at.map_or(0, |at| self.sequences[at].saturating_sub(1));
        let bytes = self.state_bytes();
        Ok(DeviceBytes { address: self.call(call)?.address(tensor)? + (before * bytes) as u64, bytes })
    }

    /// Size of one state.
    pub fn state_bytes(&self) -> usize {
        self.shape.state_dims(1).iter().product::<usize>() * size_of::<f32>()
    }

    /// The final state of the last of this rank's sequences, which ends there, after a run.
    ///
    /// # Errors
    /// [`Error::Input`] where none does, and what the GPU reports.
    pub fn last_state(&self) -> Result<Vec<f32>> {
        let call = self.first_of([Call::Own, Call::Free, Call::Entering])?;
        self.download(self.memory(State { call, tensor: "final_state" })?)
    }

    /// The gradient of the initial state of the first of this rank's sequences, which begins there, after a run with
    /// gradients.
    ///
    /// # Errors
    /// As [`Resident::last_state`].
    pub fn first_gradient(&self) -> Result<Vec<f32>> {
        let call = self.first_of([Call::Free, Call::Leaving])?;
        self.download(DeviceBytes { address: self.call(call)?.address("dh0")?, bytes: self.state_bytes() })
    }

    fn first_of<const N: usize>(&self, wanted: [Call; N]) -> Result<Call> {
        let found = wanted.into_iter().find(|call| self.call(*call).is_ok());
        found.ok_or_else(|| Error::input(format!("a rank without any of the calls {wanted:?}")))
    }

    fn download(&self, memory: DeviceBytes) -> Result<Vec<f32>> {
        // SAFETY: a state of a call of this, which lives as long, in binary32.
        unsafe { self.gpu.stream().download_from(memory.address, memory.bytes / size_of::<f32>()) }
    }
}

/// Inputs of a call, taken from those of the part; states that come from other ranks are zero.
fn inputs_of(call: Call, calls: &mut Calls, own: &mut Option<Inputs>) -> Result<Inputs> {
    let of = match call {
        Call::Transition | Call::Local | Call::Spanned => calls.spanned.clone(),
        Call::Entering => calls.entering.take(),
        Call::Free => calls.free.take(),
        Call::Leaving => calls.leaving.take(),
        Call::Own => own.take(),
    };
    let of = of.ok_or_else(|| Error::input(format!("a rank whose part has no call {call:?}")))?;
    let zero = Some(Tensor::zeros(&of.shape.state_dims(1)));
    Ok(match call {
        Call::Transition => transition_call(&of),
        Call::Local => Inputs { initial_state: None, d_final_state: None, ..of },
        Call::Spanned => Inputs { initial_state: zero.clone(), d_final_state: zero, ..of },
        Call::Entering => Inputs { initial_state: zero, ..of },
        Call::Leaving => Inputs { d_final_state: zero, ..of },
        Call::Free | Call::Own => of,
    })
}

/// Measures the link between the GPUs of the first two ranks, by messages from memory of the one to memory of the other and
/// back, by the clock of the GPU; the other ranks wait. Its rate is the better one of long messages and of those with
/// `bytes`. None for one rank.
///
/// # Errors
/// What the exchange reports.
pub(super) fn link_of_gpus(exchange: &dyn Exchange, bytes: usize) -> Result<Option<Link>> {
    link_by(exchange, [LINK_BYTES, bytes.max(1)], |bytes, count| one_way_ms(exchange, bytes, count))
}

/// Time of the fastest message in one direction, in milliseconds.
fn one_way_ms(exchange: &dyn Exchange, bytes: usize, count: usize) -> Result<f64> {
    let peer = match exchange.rank() {
        rank @ (0 | 1) => 1 - rank,
        _ => return Ok(1.0),
    };
    let gpu = Gpu::shared()?;
    let mut buffer = gpu.alloc::<u8>(bytes)?;
    gpu.fill_bytes(&mut buffer, 0x5a)?;
    let memory = DeviceBytes { address: buffer.address(), bytes };
    let marks = (0..=count).map(|_| gpu.event()).collect::<Result<Vec<Event>>>()?;
    marks[0].record(gpu.stream())?;
    for mark in &marks[1..] {
        // SAFETY: the buffer has that size, and is freed in the order of the GPU's stream.
        unsafe {
            if exchange.rank() == 0 {
                exchange.send_from_gpu(peer, memory)?;
                exchange.receive_on_gpu(peer, memory)?;
            } else {
                exchange.receive_on_gpu(peer, memory)?;
                exchange.send_from_gpu(peer, memory)?;
            }
        }
        mark.record(gpu.stream())?;
    }
    exchange.wait_for_gpu()?;
    let there_and_back = marks.windows(2).map(|ends| ends[0].elapsed_ms(&ends[1]).map(f64::from));
    Ok(there_and_back.collect::<Result<Vec<f64>>>()?.into_iter().fold(f64::INFINITY, f64::min) / 2.0)
}

#[cfg(test)]
#[path = "resident_tests.rs"]
mod tests;
