//! Ranks that are processes with a GPU each, joined by NCCL.

use super::World;
use super::exchange::{DeviceBytes, Exchange};
use super::frame::Doing;
use super::meet::Terms;
use super::tcp::Tcp;
use crate::Result;
use crate::cuda::nccl::{self, Communicator, UniqueId};
use crate::cuda::{Buffer, Gpu};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Bytes between the places of two ranks in the memory that they meet with: messages begin at multiples of it.
const PLACE: usize = 16;

/// A rank whose messages go from GPU to GPU.
pub struct Nccl {
    /// Through which ranks have met, and notice that one has ended.
    ranks: Tcp,
    communicator: Communicator,
    /// A byte for each rank, to meet with.
    places: Mutex<Buffer<u8>>,
    timeout: Duration,
}

impl Nccl {
    /// Meets all ranks of `world`, which were started with the same `terms`, each with a GPU of its own: that of its process.
    /// Here and later, a rank that says nothing for `timeout` is given up.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`] where there is no GPU or no NCCL, otherwise as [`Tcp::join`].
    pub fn join(world: &World, terms: &Terms, timeout: Duration) -> Result<Self> {
        let gpu = Gpu::shared()?;
        let library = nccl::Nccl::open()?;
        let (ranks, announced) = Tcp::hearing(world, terms, timeout, || Ok(library.unique_id()?.to_bytes()))?;
        let id = UniqueId::from_bytes(&announced)?;
        let communicator = library.join(gpu, id, world.rank, world.ranks)?;
        let mut places = gpu.alloc(PLACE * world.ranks)?;
        gpu.fill_bytes(&mut places, 0)?;
        Ok(Self { ranks, communicator, places: Mutex::new(places), timeout })
    }

    /// Version of the library, such as `2.27.5`.
    ///
    /// # Errors
    /// [`crate::Error::Gpu`] where the library does not say.
    pub fn version(&self) -> Result<String> {
        self.communicator.version()
    }

    fn wait(&self, peer: usize) -> Result<()> {
        let _waits = self.ranks.does(Doing::WaitsFor(peer));
        self.communicator.wait(|elapsed| {
            self.ranks.expect_alive(peer)?;
            if elapsed > self.timeout { Err(self.ranks.hanging()) } else { Ok(()) }
        })
    }
}

impl Exchange for Nccl {
    fn transport(&self) -> &'static str {
        "nccl"
    }

    fn rank(&self) -> usize {
        self.ranks.rank()
    }

    fn ranks(&self) -> usize {
        self.ranks.ranks()
    }

    fn send(&self, to: usize, bytes: &[u8]) -> Result<()> {
        let buffer = self.communicator.gpu().upload(bytes)?;
        self.communicator.send(&buffer, to)?;
        self.wait(to)
    }

    fn receive(&self, from: usize, length: usize) -> Result<Vec<u8>> {
        let gpu = self.communicator.gpu();
        let mut buffer = gpu.alloc::<u8>(length)?;
        self.communicator.receive(&mut buffer, from)?;
        self.wait(from)?;
        gpu.download(&buffer)
    }

    unsafe fn send_from_gpu(&self, to: usize, memory: DeviceBytes) -> Result<()> {
        // SAFETY: the promise of the caller.
        unsafe { self.communicator.send_from(memory.address, memory.bytes, to) }
    }

    unsafe fn receive_on_gpu(&self, from: usize, memory: DeviceBytes) -> Result<()> {
        // SAFETY: the promise of the caller.
        unsafe { self.communicator.receive_at(memory.address, memory.bytes, from) }
    }

    /// Each takes a byte from each: the stream goes on when all have come, and the host does not wait.
    fn meet_on_gpu(&self) -> Result<()> {
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let place = |rank: usize| places.address() + (PLACE * rank) as u64;
        let others = (0..self.ranks()).filter(|peer| *peer != self.rank());
        self.communicator.group(|| {
            others.into_iter().try_for_each(|peer| {
                // SAFETY: each rank has a place in the buffer, which lives as long as this and is used in the stream's order.
                unsafe {
                    self.communicator.send_from(place(self.rank()), 1, peer)?;
                    self.communicator.receive_at(place(peer), 1, peer)
                }
            })
        })
    }

    fn wait_for_gpu(&self) -> Result<()> {
        let mut others = (0..self.ranks()).filter(|peer| *peer != self.rank());
        let _waits = self.ranks.does(Doing::WaitsForAll);
        self.communicator.wait(|elapsed| {
            others.clone().try_for_each(|peer| self.ranks.expect_alive(peer))?;
            if elapsed > self.timeout && others.next().is_some() { Err(self.ranks.hanging()) } else { Ok(()) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn one_rank_joins_and_sends_to_itself() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let meeting = ("127.0.0.1".to_owned(), port);
        let world = World { rank: 0, ranks: 1, local_rank: 0, meeting, launcher: "a test" };
        let nccl = Nccl::join(&world, &Terms::default(), Duration::from_secs(60)).unwrap();
        println!("NCCL {} on {}", nccl.version().unwrap(), nccl.communicator.gpu().name);
        assert_eq!((nccl.rank(), nccl.ranks(), nccl.transport()), (0, 1, "nccl"));
        let gpu = nccl.communicator.gpu();
        for length in [1usize, 4096, 12 * 128 * 128 * 4, 3_000_001] {
            let sent: Vec<u8> = (0..length).map(|at| (at * 7 % 251) as u8).collect();
            let from = gpu.upload(&sent).unwrap();
            let mut to = gpu.alloc::<u8>(length).unwrap();
            gpu.fill_bytes(&mut to, 0xff).unwrap();
            nccl.communicator
                .group(|| {
                    nccl.communicator.send(&from, 0)?;
                    nccl.communicator.receive(&mut to, 0)
                })
                .unwrap();
            nccl.wait_for_tests().unwrap();
            assert_eq!(gpu.download(&to).unwrap(), sent, "{length} bytes");
        }
    }

    impl Nccl {
        /// There is no peer that could end.
        fn wait_for_tests(&self) -> Result<()> {
            self.communicator.wait(|elapsed| if elapsed > self.timeout { Err(self.ranks.hanging()) } else { Ok(()) })
        }
    }
}
