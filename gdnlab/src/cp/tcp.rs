//! Ranks that are processes, on this machine or several, joined by sockets.

use super::World;
use super::exchange::{Exchange, ended, expect_length};
use super::frame::{Doing, Frame, broken, read_frame, write_answer, write_block, write_gave_up, write_question};
use super::meet::{Meeting, Terms};
use crate::{Error, Result};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a rank that lives may take to say what it does.
const ANSWER_TIME: Duration = Duration::from_secs(5);
/// How long it may take to hear that this one ends.
const FAREWELL: Duration = Duration::from_secs(1);

/// A rank with a socket to each other one.
///
/// A thread for each of them takes what comes, so that nobody who sends waits for one who computes. It also answers what this
/// rank does: who has waited too long asks from rank to rank for whom each waits, and names the one that waits for nobody or
/// does not answer. What it found it tells all others, which then name the same.
pub struct Tcp {
    rank: usize,
    peers: Vec<Option<Peer>>,
    timeout: Duration,
    doing: Arc<Mutex<Doing>>,
}

struct Peer {
    to: Arc<Mutex<TcpStream>>,
    from: Mutex<Receiver<Result<Vec<u8>>>>,
    answers: Mutex<Receiver<Doing>>,
}

/// What a rank does until this is dropped.
pub(super) struct While<'a>(&'a Mutex<Doing>);

impl Drop for While<'_> {
    fn drop(&mut self) {
        *locked(self.0) = Doing::Works;
    }
}

impl Tcp {
    /// Meets all ranks of `world`, which were started with the same `terms`. Here and later, a rank that says nothing for
    /// `timeout` is given up.
    ///
    /// # Errors
    /// [`Error::Rank`] where one does not come, [`Error::Input`] where the place of meeting is none, and at rank 0 where another
    /// has others.
    pub fn join(world: &World, terms: &Terms, timeout: Duration) -> Result<Self> {
        Self::hearing(world, terms, timeout, || Ok(Vec::new())).map(|(tcp, _)| tcp)
    }

    /// The same, with what rank 0 announces to all.
    pub(super) fn hearing(
        world: &World,
        terms: &Terms,
        timeout: Duration,
        announced: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<(Self, Vec<u8>)> {
        let meeting = Meeting::join(world, terms, timeout, announced)?;
        let doing = Arc::new(Mutex::new(Doing::Works));
        let streams = meeting.streams.into_iter().enumerate();
        let peer = |(rank, stream): (usize, Option<TcpStream>)| {
            stream.map(|stream| Peer::new(rank, stream, timeout, &doing)).transpose()
        };
        let peers = streams.map(peer).collect::<Result<_>>()?;
        Ok((Self { rank: world.rank, peers, timeout, doing }, meeting.announced))
    }

    /// Refuses to wait for a rank that has ended; for ranks that send nothing this way.
    pub(super) fn expect_alive(&self, rank: usize) -> Result<()> {
        let heard = locked(&self.peer(rank)?.from).try_recv();
        match heard {
            Ok(Err(error)) => Err(self.giving_up(error)),
            Err(TryRecvError::Disconnected) => Err(self.giving_up(ended(rank))),
            Ok(Ok(_)) | Err(TryRecvError::Empty) => Ok(()),
        }
    }

    /// Says to who asks that this rank does this, until what is returned is dropped.
    pub(super) fn does(&self, doing: Doing) -> While<'_> {
        *locked(&self.doing) = doing;
        While(&self.doing)
    }

    /// That there was nothing of those for whom this rank waits for too long, with the one that keeps them: each is asked for
    /// whom it waits, until one waits for nobody or does not answer.
    pub(super) fn hanging(&self) -> Error {
        let (waits, seconds) = (*locked(&self.doing), self.timeout.as_secs_f64());
        let (mut next, mut asked) = (self.behind(waits), BTreeSet::from([self.rank]));
        while let Some(rank) = next.pop() {
            if !asked.insert(rank) {
                continue;
            }
            match self.ask(rank) {
                Ok(Doing::Works) => {
                    let reason = format!("hangs: it waits for nobody, and others have waited {seconds} s for it");
                    return self.giving_up(Error::Rank { rank, reason });
                }
                Ok(waits) => next.extend(self.behind(waits)),
                Err(error) => return self.giving_up(error),
            }
        }
        let rank = asked.into_iter().find(|rank| *rank != self.rank).unwrap_or(self.rank);
        let reason = format!("has sent nothing for {seconds} s: it waits for ranks that wait for it");
        self.giving_up(Error::Rank { rank, reason })
    }

    /// For whom a rank that does this waits.
    fn behind(&self, doing: Doing) -> Vec<usize> {
        match doing {
            Doing::Works => Vec::new(),
            Doing::WaitsFor(rank) => vec![rank],
            Doing::WaitsForAll => (0..self.peers.len()).rev().collect(),
        }
    }

    /// What `rank` does.
    fn ask(&self, rank: usize) -> Result<Doing> {
        let peer = self.peer(rank)?;
        let answers = locked(&peer.answers);
        while answers.try_recv().is_ok() {}
        let asked = write_question(&mut locked(&peer.to));
        if let Ok(doing) = answers.recv_timeout(ANSWER_TIME) {
            return Ok(doing);
        }
        // It may have said why it ended.
        let heard = locked(&peer.from).try_iter().find_map(Result::err);
        let reason =
            format!("hangs: it does not answer, and others have waited {} s for it", self.timeout.as_secs_f64());
        Err(heard.or_else(|| Some(broken(rank, &asked.err()?))).unwrap_or(Error::Rank { rank, reason }))
    }

    /// Tells all others for whose sake this rank ends.
    fn giving_up(&self, error: Error) -> Error {
        if let Error::Rank { rank, reason } = &error {
            for (_, peer) in self.peers.iter().enumerate().filter(|(other, _)| other != rank) {
                let Some(peer) = peer else { continue };
                let mut stream = locked(&peer.to);
                // One that has ended needs no words.
                let _ =
                    stream.set_write_timeout(Some(FAREWELL)).and_then(|()| write_gave_up(&mut stream, *rank, reason));
            }
        }
        error
    }

    fn peer(&self, rank: usize) -> Result<&Peer> {
        self.peers.get(rank).and_then(Option::as_ref).ok_or_else(|| ended(rank))
    }
}

impl Peer {
    fn new(rank: usize, stream: TcpStream, timeout: Duration, doing: &Arc<Mutex<Doing>>) -> Result<Self> {
        let mut reader = stream
            .try_clone()
            .and_then(|reader| stream.set_write_timeout(Some(timeout)).map(|()| reader))
            .map_err(|error| broken(rank, &error))?;
        let to = Arc::new(Mutex::new(stream));
        let ((sender, from), (answer, answers)) = (channel(), channel());
        let (own, doing) = (to.clone(), doing.clone());
        std::thread::Builder::new()
            .spawn(move || while heard(rank, &mut reader, &own, &doing, (&sender, &answer)) {})
            .map_err(|error| Error::io("a thread for each other rank", error))?;
        Ok(Self { to, from: Mutex::new(from), answers: Mutex::new(answers) })
    }
}

/// Takes the next frame of `rank`. Whether more may come.
fn heard(
    rank: usize,
    reader: &mut TcpStream,
    own: &Mutex<TcpStream>,
    doing: &Mutex<Doing>,
    (messages, answers): (&Sender<Result<Vec<u8>>>, &Sender<Doing>),
) -> bool {
    match read_frame(reader) {
        Ok(Frame::Block(bytes)) => messages.send(Ok(bytes)).is_ok(),
        Ok(Frame::Question) => {
            let does = *locked(doing);
            write_answer(&mut locked(own), does).is_ok()
        }
        Ok(Frame::Answer(does)) => answers.send(does).is_ok(),
        Ok(Frame::GaveUp { rank, reason }) => {
            // Nobody may listen any more.
            let _ = messages.send(Err(Error::Rank { rank, reason }));
            false
        }
        Err(error) => {
            let _ = messages.send(Err(broken(rank, &error)));
            false
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        let _waits = self.does(Doing::WaitsFor(to));
        let sent = write_block(&mut locked(&self.peer(to)?.to), bytes);
        sent.map_err(|error| {
            let stuck = matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
            let reason = format!("hangs: it has taken nothing for {} s", self.timeout.as_secs_f64());
            self.giving_up(if stuck { Error::Rank { rank: to, reason } } else { broken(to, &error) })
        })
    }

    fn receive(&self, from: usize, length: usize) -> Result<Vec<u8>> {
        let _waits = self.does(Doing::WaitsFor(from));
        let heard = locked(&self.peer(from)?.from).recv_timeout(self.timeout);
        match heard {
            Ok(Ok(bytes)) => expect_length(from, bytes, length),
            Ok(Err(error)) => Err(self.giving_up(error)),
            Err(RecvTimeoutError::Disconnected) => Err(self.giving_up(ended(from))),
            Err(RecvTimeoutError::Timeout) => Err(self.hanging()),
        }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        for peer in self.peers.iter().flatten() {
            // Those that still listen learn that nothing more comes; whether it reaches them makes no difference here.
            let _ = locked(&peer.to).shutdown(std::net::Shutdown::Write);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
            let start = |rank| {
                scope.spawn(move || work(Tcp::join(&world(rank, count, port), &Terms::default(), TIMEOUT).unwrap()))
            };
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
        let alone =
            Tcp::join(&world(0, 3, port), &Terms::default(), Duration::from_millis(100)).map(|_| ()).unwrap_err();
        assert!(matches!(alone, Error::Rank { rank: 1, .. }), "{alone}");
        let nobody =
            Tcp::join(&world(2, 3, port), &Terms::default(), Duration::from_millis(100)).map(|_| ()).unwrap_err();
        assert!(matches!(nobody, Error::Rank { rank: 0, .. }), "{nobody}");
    }

    #[test]
    fn strangers_and_ranks_of_another_world_are_not_let_in() {
        let port = free_port();
        std::thread::scope(|scope| {
            let first = scope.spawn(move || Tcp::join(&world(0, 2, port), &Terms::default(), TIMEOUT).map(|_| ()));
            std::thread::sleep(Duration::from_millis(50));
            let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
            write_block(&mut stranger, b"GET / HTTP/1.1 and so on").unwrap();
            let other = scope
                .spawn(move || Tcp::join(&world(1, 3, port), &Terms::default(), Duration::from_secs(1)).map(|_| ()));
            let message = first.join().unwrap().unwrap_err().to_string();
            assert_eq!(message, "rank 1 says that there are 3 ranks, expected 2");
            assert!(other.join().unwrap().is_err());
        });
    }

    /// Rank 3 waits for 0, which waits for 1, which waits for 2, which is busy with something else.
    #[test]
    fn the_rank_that_waits_for_nobody_is_named_by_all_others() {
        let port = free_port();
        let (done, busy) = channel::<()>();
        let busy = Mutex::new(busy);
        let messages: Vec<String> = std::thread::scope(|scope| {
            let busy = &busy;
            let start = |rank: usize| {
                scope.spawn(move || {
                    let timeout = Duration::from_millis(500);
                    let mut tcp = Tcp::join(&world(rank, 4, port), &Terms::default(), TIMEOUT).unwrap();
                    tcp.timeout = timeout;
                    if rank == 2 {
                        // Ends when the others have.
                        let _ = busy.lock().unwrap().recv();
                        return String::new();
                    }
                    tcp.receive([1, 2, 2, 0][rank], 8).unwrap_err().to_string()
                })
            };
            let threads: Vec<_> = (0..4).map(start).collect();
            let mut threads = threads.into_iter();
            let [first, second, third, fourth] = std::array::from_fn(|_| threads.next().unwrap());
            let mut messages: Vec<_> =
                [first, second, fourth].into_iter().map(|thread| thread.join().unwrap()).collect();
            drop(done);
            messages.push(third.join().unwrap());
            messages
        });
        let expected = "rank 2 hangs: it waits for nobody, and others have waited 0.5 s for it";
        assert_eq!(messages, [expected, expected, expected, ""]);
    }

    #[test]
    fn ranks_that_were_started_with_other_terms_are_told_apart() {
        let port = free_port();
        let terms = |seed: usize| Terms::new([("--op", "gdn".to_owned()), ("--seed", seed.to_string())]);
        let messages: Vec<String> = std::thread::scope(|scope| {
            let start = |rank: usize| {
                scope.spawn(move || {
                    let joined = Tcp::join(&world(rank, 3, port), &terms(if rank == 1 { 7 } else { 1 }), TIMEOUT);
                    joined.map(|_| ()).unwrap_err().to_string()
                })
            };
            let threads: Vec<_> = (0..3).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let expected = "rank 1 was started with --seed 7, and rank 0 with --seed 1: expected the same of all ranks";
        assert_eq!(messages, [expected; 3]);
    }
}
