//! Ranks that are processes, on this machine or several, joined by sockets.

use super::World;
use super::exchange::{Exchange, ended, expect_length, silent};
use super::meet::{Meeting, broken, read_block, write_block};
use crate::Result;
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A rank with a socket to each other one.
///
/// A thread for each of them takes what comes, so that nobody who sends waits for one who computes.
pub struct Tcp {
    rank: usize,
    peers: Vec<Option<Peer>>,
    timeout: Duration,
}

struct Peer {
    to: Mutex<TcpStream>,
    from: Mutex<Receiver<std::io::Result<Vec<u8>>>>,
}

impl Tcp {
    /// Meets all ranks of `world`. Here and later, a rank that says nothing for `timeout` is given up.
    ///
    /// # Errors
    /// [`crate::Error::Rank`] where one does not come, [`crate::Error::Input`] where the place of meeting is none.
    pub fn join(world: &World, timeout: Duration) -> Result<Self> {
        Self::hearing(world, timeout, || Ok(Vec::new())).map(|(tcp, _)| tcp)
    }

    /// The same, with what rank 0 announces to all.
    pub(super) fn hearing(
        world: &World,
        timeout: Duration,
        announced: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<(Self, Vec<u8>)> {
        let meeting = Meeting::join(world, timeout, announced)?;
        let streams = meeting.streams.into_iter().enumerate();
        let peers = streams.map(|(rank, stream)| stream.map(|stream| Peer::new(rank, stream)).transpose());
        Ok((Self { rank: world.rank, peers: peers.collect::<Result<_>>()?, timeout }, meeting.announced))
    }

    /// Refuses to wait for a rank that has ended; for ranks that send nothing this way.
    pub(super) fn expect_alive(&self, rank: usize) -> Result<()> {
        let receiver = self.peer(rank)?.from.lock().unwrap_or_else(PoisonError::into_inner);
        match receiver.try_recv() {
            Ok(Err(error)) => Err(broken(rank, &error)),
            Err(TryRecvError::Disconnected) => Err(ended(rank)),
            Ok(Ok(_)) | Err(TryRecvError::Empty) => Ok(()),
        }
    }

    fn peer(&self, rank: usize) -> Result<&Peer> {
        self.peers[rank].as_ref().ok_or_else(|| ended(rank))
    }
}

impl Peer {
    fn new(rank: usize, stream: TcpStream) -> Result<Self> {
        let mut reader = stream.try_clone().map_err(|error| broken(rank, &error))?;
        let (sender, from) = channel();
        std::thread::spawn(move || {
            loop {
                let block = read_block(&mut reader);
                let is_last = block.is_err();
                if sender.send(block).is_err() || is_last {
                    break;
                }
            }
        });
        Ok(Self { to: Mutex::new(stream), from: Mutex::new(from) })
    }
}

impl Exchange for Tcp {
    fn transport(&self) -> &'static str {
        "tcp"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.peers.len()
    }

    fn send(&self, to: usize, bytes: &[u8]) -> Result<()> {
        let mut stream = self.peer(to)?.to.lock().unwrap_or_else(PoisonError::into_inner);
        write_block(&mut stream, bytes).map_err(|error| broken(to, &error))
    }

    fn receive(&self, from: usize, length: usize) -> Result<Vec<u8>> {
        let receiver = self.peer(from)?.from.lock().unwrap_or_else(PoisonError::into_inner);
        match receiver.recv_timeout(self.timeout) {
            Ok(Ok(bytes)) => expect_length(from, bytes, length),
            Ok(Err(error)) => Err(broken(from, &error)),
            Err(RecvTimeoutError::Disconnected) => Err(ended(from)),
            Err(RecvTimeoutError::Timeout) => Err(silent(from, self.timeout)),
        }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        for peer in self.peers.iter().flatten() {
            // Those that still listen learn that nothing more comes; whether it reaches them makes no difference here.
            let _ = peer.to.lock().unwrap_or_else(PoisonError::into_inner).shutdown(std::net::Shutdown::Write);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use std::net::TcpListener;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn world(rank: usize, ranks: usize, port: u16) -> World {
        World { rank, ranks, local_rank: rank, meeting: ("127.0.0.1".to_owned(), port), launcher: "a test" }
    }

    fn free_port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    /// Each rank in a thread of its own.
    fn ranks<T: Send>(count: usize, work: impl Fn(Tcp) -> T + Sync) -> Vec<T> {
        let (port, work) = (free_port(), &work);
        std::thread::scope(|scope| {
            let start = |rank| scope.spawn(move || work(Tcp::join(&world(rank, count, port), TIMEOUT).unwrap()));
            let threads: Vec<_> = (0..count).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_reaches_every_other_and_messages_keep_their_order() {
        let sums = ranks(5, |tcp| {
            let long = vec![tcp.rank() as u8; 3_000_000];
            for to in (0..5).filter(|to| *to != tcp.rank()) {
                tcp.send(to, &long).unwrap();
                tcp.send(to, &[tcp.rank() as u8 + 100]).unwrap();
            }
            let from = (0..5).filter(|from| *from != tcp.rank());
            from.map(|from| {
                assert_eq!(tcp.receive(from, long.len()).unwrap(), vec![from as u8; long.len()]);
                usize::from(tcp.receive(from, 1).unwrap()[0])
            })
            .sum::<usize>()
        });
        assert_eq!(sums, [410, 409, 408, 407, 406]);
    }

    #[test]
    fn a_rank_that_ended_or_says_nothing_is_named() {
        let messages = ranks(3, |tcp| match tcp.rank() {
            1 => String::new(),
            _ => tcp.receive(1, 8).unwrap_err().to_string(),
        });
        assert_eq!(messages, ["rank 1 has ended", "", "rank 1 has ended"]);
        let port = free_port();
        let alone = Tcp::join(&world(0, 3, port), Duration::from_millis(100)).map(|_| ()).unwrap_err();
        assert!(matches!(alone, Error::Rank { rank: 1, .. }), "{alone}");
        let nobody = Tcp::join(&world(2, 3, port), Duration::from_millis(100)).map(|_| ()).unwrap_err();
        assert!(matches!(nobody, Error::Rank { rank: 0, .. }), "{nobody}");
    }

    #[test]
    fn strangers_and_ranks_of_another_world_are_not_let_in() {
        let port = free_port();
        std::thread::scope(|scope| {
            let first = scope.spawn(move || Tcp::join(&world(0, 2, port), TIMEOUT).map(|_| ()));
            std::thread::sleep(Duration::from_millis(50));
            let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
            write_block(&mut stranger, b"GET / HTTP/1.1 and so on").unwrap();
            let other = scope.spawn(move || Tcp::join(&world(1, 3, port), Duration::from_secs(1)).map(|_| ()));
            let message = first.join().unwrap().unwrap_err().to_string();
            assert_eq!(message, "rank 1 says that there are 3 ranks, expected 2");
            assert!(other.join().unwrap().is_err());
        });
    }
}
