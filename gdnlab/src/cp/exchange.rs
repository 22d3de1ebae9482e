//! How ranks hand states to each other: the one trait of all transports, and ranks that are threads of one process.

use super::measure::barrier;
use crate::cuda::Gpu;
use crate::{Error, Result};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Memory of the GPU of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceBytes {
    /// Where it begins, on the GPU.
    pub address: u64,
    /// Its size.
    pub bytes: usize,
}

/// The ranks as one of them sees them. Messages from one rank to another arrive in their order.
pub trait Exchange: Send + Sync {
    /// Name of the transport in records: `virtual`, `tcp` or `nccl`.
    fn transport(&self) -> &'static str;

    /// Which rank this is, from 0.
    fn rank(&self) -> usize;

    /// How many there are.
    fn ranks(&self) -> usize;

    /// Hands `bytes` to the rank `to`.
    ///
    /// # Errors
    /// [`Error::Rank`] where that rank has ended, otherwise what the transport reports.
    fn send(&self, to: usize, bytes: &[u8]) -> Result<()>;

    /// The next message of the rank `from`, which has `length` bytes.
    ///
    /// # Errors
    /// [`Error::Rank`] where that rank has ended, or sends nothing for too long.
    fn receive(&self, from: usize, length: usize) -> Result<Vec<u8>>;

    /// Whether ranks share what they compute on, and so compute one after the other.
    fn shares_machine(&self) -> bool {
        false
    }

    /// What a rank holds while it computes where ranks share a machine: so each has all of it, and its time is its own.
    fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        None
    }

    /// Hands what is in `memory` to the rank `to`, once all that was started before on the GPU's stream has ended.
    ///
    /// # Errors
    /// As [`Exchange::send`].
    ///
    /// # Safety
    /// The memory is there, and is neither freed nor written to but in the order of the GPU's stream.
    unsafe fn send_from_gpu(&self, to: usize, memory: DeviceBytes) -> Result<()> {
        // SAFETY: the promise of the caller.
        let bytes: Vec<u8> = unsafe { Gpu::shared()?.stream().download_from(memory.address, memory.bytes)? };
        self.send(to, &bytes)
    }

    /// Fills `memory` with the next message of the rank `from`. What is started afterwards on the GPU's stream finds it there.
    ///
    /// # Errors
    /// As [`Exchange::receive`].
    ///
    /// # Safety
    /// The memory is there, and is neither freed nor used but in the order of the GPU's stream.
    unsafe fn receive_on_gpu(&self, from: usize, memory: DeviceBytes) -> Result<()> {
        let bytes = self.receive(from, memory.bytes)?;
        // SAFETY: the promise of the caller.
        unsafe { Gpu::shared()?.stream().upload_to(&bytes, memory.address) }
    }

    /// Lets what is started afterwards on the GPU's stream begin when every rank has come here, and its GPU has done what was
    /// started before.
    ///
    /// # Errors
    /// [`Error::Rank`] where one does not come.
    fn meet_on_gpu(&self) -> Result<()> {
        self.wait_for_gpu()?;
        barrier(self)
    }

    /// Waits until all that was started on the GPU's stream has ended.
    ///
    /// # Errors
    /// [`Error::Gpu`] where some of it failed, [`Error::Rank`] where it waits in vain for another rank.
    fn wait_for_gpu(&self) -> Result<()> {
        Gpu::shared()?.synchronize()
    }
}

/// A message of unexpected length, as an error.
pub(super) fn expect_length(from: usize, bytes: Vec<u8>, length: usize) -> Result<Vec<u8>> {
    if bytes.len() == length {
        return Ok(bytes);
    }
    Err(Error::Rank {
        rank: from,
        reason: format!(
            "sent {} bytes where {length} were expected: was it started with other arguments?",
            bytes.len()
        ),
    })
}

/// That `from` has ended before it sent what another rank waits for.
pub(super) fn ended(from: usize) -> Error {
    Error::Rank { rank: from, reason: "ended before it had sent what others wait for".to_owned() }
}

/// That `from` has sent nothing for `timeout`.
pub(super) fn silent(from: usize, timeout: Duration) -> Error {
    Error::Rank { rank: from, reason: format!("has sent nothing for {} s", timeout.as_secs_f64()) }
}

/// A rank that is a thread of this process.
pub struct Virtual<'a> {
    rank: usize,
    to: Vec<Sender<Vec<u8>>>,
    from: Vec<Mutex<Receiver<Vec<u8>>>>,
    timeout: Duration,
    turns: &'a Mutex<()>,
}

impl<'a> Virtual<'a> {
    /// `ranks` ranks that compute one after the other, each holding `turns` meanwhile, and give each other up after
    /// `timeout`.
    pub fn ranks(ranks: usize, timeout: Duration, turns: &'a Mutex<()>) -> Vec<Self> {
        let mut all: Vec<Self> =
            (0..ranks).map(|rank| Self { rank, to: Vec::new(), from: Vec::new(), timeout, turns }).collect();
        for to in 0..ranks {
            for from in 0..ranks {
                let (sender, receiver) = channel();
                all[from].to.push(sender);
                all[to].from.push(Mutex::new(receiver));
            }
        }
        all
    }
}

impl Exchange for Virtual<'_> {
    fn transport(&self) -> &'static str {
        "virtual"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.to.len()
    }

    fn send(&self, to: usize, bytes: &[u8]) -> Result<()> {
        self.to[to].send(bytes.to_vec()).map_err(|_| ended(to))
    }

    fn receive(&self, from: usize, length: usize) -> Result<Vec<u8>> {
        let receiver = self.from[from].lock().unwrap_or_else(PoisonError::into_inner);
        match receiver.recv_timeout(self.timeout) {
            Ok(bytes) => expect_length(from, bytes, length),
            Err(RecvTimeoutError::Disconnected) => Err(ended(from)),
            Err(RecvTimeoutError::Timeout) => Err(silent(from, self.timeout)),
        }
    }

    fn shares_machine(&self) -> bool {
        true
    }

    fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        Some(self.turns.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Runs `work` for each of `ranks` ranks in a thread of its own. Its results in the order of the ranks.
///
/// # Errors
/// The error of the rank that failed first, rather than of one that waited for it in vain.
pub fn virtual_ranks<T: Send>(
    ranks: usize,
    timeout: Duration,
    work: impl Fn(&dyn Exchange) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let turns = Mutex::new(());
    let outcomes: Vec<Result<T>> = std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = Virtual::ranks(ranks, timeout, &turns)
            .into_iter()
            .map(|exchange| scope.spawn(move || work(&exchange)))
            .collect();
        let joined = threads.into_iter().enumerate().map(|(rank, thread)| {
            thread.join().unwrap_or_else(|_| Err(Error::Rank { rank, reason: "panicked".to_owned() }))
        });
        joined.collect()
    });
    let mut all = Vec::with_capacity(ranks);
    let mut in_vain = None;
    for outcome in outcomes {
        match outcome {
            Ok(value) => all.push(value),
            Err(error @ Error::Rank { .. }) => in_vain = Some(error),
            Err(error) => return Err(error),
        }
    }
    in_vain.map_or(Ok(all), Err)
}
