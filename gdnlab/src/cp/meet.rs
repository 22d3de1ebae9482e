//! How ranks in processes of their own find each other: rank 0 listens, the others come to it.

use super::World;
use super::frame::{broken, read_block, write_block, write_gave_up};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// What a rank says first, so that nobody else's connection is taken for one.
const GREETING: &[u8; 8] = b"gdnlabcp";
/// Between two looks for who came.
const PAUSE: Duration = Duration::from_millis(5);
/// How long one that came may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(5);
/// By how much longer the others wait, so that they hear of rank 0 who has not come.
const LONGER: Duration = Duration::from_secs(2);
/// Bytes that the terms of a rank may take.
const LONGEST_TERMS: usize = 1 << 20;

/// What all ranks have to be started with alike: options of the command line and their values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms(Vec<(String, String)>);

impl Terms {
    /// These options with these values.
    pub fn new<'a>(terms: impl IntoIterator<Item = (&'a str, String)>) -> Self {
        Self(terms.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }

    fn to_bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|(name, value)| format!("{name} {value}\n").into_bytes()).collect()
    }

    /// In which of its terms `rank` differs, as an error; none where it does not.
    fn expect_of(&self, rank: usize, bytes: &[u8]) -> Result<()> {
        let own = self.to_bytes();
        if own == bytes {
            return Ok(());
        }
        let (own, other) = (String::from_utf8_lossy(&own), String::from_utf8_lossy(bytes));
        let differing = other.lines().zip(own.lines()).find(|(other, own)| other != own);
        let (other, own) = differing.unwrap_or(("other options", "more or fewer"));
        Err(Error::Rank {
            rank,
            reason: format!("was started with {other}, and rank 0 with {own}: expected the same of all ranks"),
        })
    }
}

/// The connections of one rank to all others.
pub(super) struct Meeting {
    /// By rank; none to itself.
    pub streams: Vec<Option<TcpStream>>,
    /// What rank 0 had to say to all.
    pub announced: Vec<u8>,
}

impl Meeting {
    /// Meets all ranks of `world`, which have the same `terms`, and hears what rank 0 announces.
    ///
    /// # Errors
    /// [`Error::Rank`] where one does not come within `timeout` or has other terms, [`Error::Input`] where the place of meeting
    /// is none.
    pub fn join(
        world: &World,
        terms: &Terms,
        timeout: Duration,
        announced: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Self> {
        let mut streams: Vec<Option<TcpStream>> = (0..world.ranks).map(|_| None).collect();
        let until = (Instant::now() + timeout, timeout);
        let met = match world.rank {
            0 => announced().and_then(|announced| host(world, terms, until, announced, &mut streams)),
            _ => visit(world, terms, until, &mut streams),
        };
        let announced = met.inspect_err(|error| send_away(&mut streams, error))?;
        Ok(Self { streams, announced })
    }
}

/// Rank 0: waits for all others, and tells them where each is.
fn host(
    world: &World,
    terms: &Terms,
    until: (Instant, Duration),
    announced: Vec<u8>,
    streams: &mut [Option<TcpStream>],
) -> Result<Vec<u8>> {
    let places = receive_all(world, terms, &listen(world)?, 1, until, streams)?;
    let table: Vec<u8> = places.iter().flat_map(|place| format!("{place}\n").into_bytes()).collect();
    for (rank, stream) in streams.iter_mut().enumerate() {
        let Some(stream) = stream else { continue };
        write_block(stream, &announced)
            .and_then(|()| write_block(stream, &table))
            .map_err(|error| broken(rank, &error))?;
    }
    Ok(announced)
}

/// Any other rank: comes to rank 0 and to all below it, and waits for those above.
fn visit(
    world: &World,
    terms: &Terms,
    until: (Instant, Duration),
    streams: &mut [Option<TcpStream>],
) -> Result<Vec<u8>> {
    let any = if is_loopback(&world.meeting.0) { "127.0.0.1:0" } else { "0.0.0.0:0" };
    let own = TcpListener::bind(any).map_err(|error| Error::io(any, error))?;
    let port = own.local_addr().map_err(|error| Error::io(any, error))?.port();
    let mut host = connect(&world.meeting, 0, until)?;
    greet(&mut host, world, terms, port).map_err(|error| broken(0, &error))?;
    host.set_read_timeout(Some(until.1 + LONGER)).map_err(|error| broken(0, &error))?;
    let announced = read_block(&mut host, 0)?;
    let table = read_block(&mut host, 0)?;
    host.set_read_timeout(None).map_err(|error| broken(0, &error))?;
    streams[0] = Some(host);
    for (rank, place) in (1..world.rank).zip(places(&table)?) {
        let mut stream = connect(&place, rank, until)?;
        greet(&mut stream, world, terms, port).map_err(|error| broken(rank, &error))?;
        streams[rank] = Some(stream);
    }
    receive_all(world, terms, &own, world.rank + 1, until, streams)?;
    Ok(announced)
}

/// One that came: which rank, its connection, where it listens itself, and the terms that it was started with.
struct Guest {
    rank: usize,
    stream: TcpStream,
    place: SocketAddr,
    terms: Vec<u8>,
}

fn listen(world: &World) -> Result<TcpListener> {
    let (host, port) = &world.meeting;
    let ip = if is_loopback(host) { "127.0.0.1" } else { "0.0.0.0" };
    TcpListener::bind((ip, *port)).map_err(|error| {
        Error::input(format!("MASTER_PORT={port}: rank 0 cannot listen there ({error}): choose a free port"))
    })
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Tells those that have been met why there is no meeting.
fn send_away(streams: &mut [Option<TcpStream>], error: &Error) {
    let Error::Rank { rank, reason } = error else { return };
    for stream in streams.iter_mut().flatten() {
        // One that has left needs no words.
        let _ = write_gave_up(stream, *rank, reason);
    }
}

/// Waits until all ranks from `first` on have come, each to its place in `streams`. Gives where they listen, in their order.
fn receive_all(
    world: &World,
    terms: &Terms,
    listener: &TcpListener,
    first: usize,
    (deadline, timeout): (Instant, Duration),
    streams: &mut [Option<TcpStream>],
) -> Result<Vec<SocketAddr>> {
    let io = |error| Error::io("a socket", error);
    let named = |rank: usize, reason: String| Err(Error::Rank { rank, reason });
    listener.set_nonblocking(true).map_err(io)?;
    let (mut places, mut differs) = (BTreeMap::new(), None);
    while places.len() < world.ranks - first {
        match listener.accept() {
            Ok((stream, address)) => {
                let Some(guest) = welcome(world, stream, address)? else { continue };
                let rank = guest.rank;
                // Who differs is told when all are there, so that every rank hears of it.
                differs = differs.or_else(|| terms.expect_of(rank, &guest.terms).err());
                if rank < first || places.insert(rank, guest.place).is_some() {
                    return named(rank, "came twice: expected one process for each rank".to_owned());
                }
                streams[rank] = Some(guest.stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(PAUSE)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let rank = (first..world.ranks).find(|rank| !places.contains_key(rank)).unwrap_or(first);
                let (missing, seconds) = (world.ranks - first - places.len(), timeout.as_secs_f64());
                let to = world.rank;
                return named(rank, format!("has not come to rank {to} within {seconds} s ({missing} missing)"));
            }
            Err(error) => return Err(io(error)),
        }
    }
    differs.map_or(Ok(places.into_values().collect()), Err)
}

/// Hears who came, and with which terms; none where it is no rank.
fn welcome(world: &World, mut stream: TcpStream, address: SocketAddr) -> Result<Option<Guest>> {
    let heard = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(PATIENCE)))
        .and_then(|()| stream.set_nodelay(true))
        .and_then(|()| {
            let mut greeting = [0; 8];
            stream.read_exact(&mut greeting)?;
            if greeting != *GREETING {
                return Err(ErrorKind::InvalidData.into());
            }
            let mut said = [0; 26];
            stream.read_exact(&mut said).map(|()| said)
        });
    let Ok(said) = heard else { return Ok(None) };
    let number =
        |at: usize| said[at..at + 8].iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte)) as usize;
    let (ranks, rank, port) = (number(0), number(8), u16::from_le_bytes([said[24], said[25]]));
    if ranks != world.ranks || rank >= ranks {
        return Err(Error::Rank {
            rank,
            reason: format!("says that there are {ranks} ranks, expected {}", world.ranks),
        });
    }
    let mut terms = vec![0; number(16).min(LONGEST_TERMS)];
    stream.read_exact(&mut terms).and_then(|()| stream.set_read_timeout(None)).map_err(|error| broken(rank, &error))?;
    Ok(Some(Guest { rank, stream, place: SocketAddr::new(address.ip(), port), terms }))
}

fn greet(stream: &mut TcpStream, world: &World, terms: &Terms, port: u16) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut terms = terms.to_bytes();
    terms.truncate(LONGEST_TERMS);
    let numbers = [world.ranks as u64, world.rank as u64, terms.len() as u64].map(u64::to_le_bytes).concat();
    stream.write_all(&[&GREETING[..], &numbers, &port.to_le_bytes(), &terms].concat())
}

/// Knocks until `rank` is there.
fn connect(place: &(String, u16), rank: usize, (deadline, timeout): (Instant, Duration)) -> Result<TcpStream> {
    let (host, port) = place;
    loop {
        let addresses = (host.as_str(), *port).to_socket_addrs().map_err(|error| {
            Error::input(format!("MASTER_ADDR={host}: {error}: expected a host that can be reached from here"))
        })?;
        let reached = addresses.into_iter().find_map(|address| TcpStream::connect_timeout(&address, PATIENCE).ok());
        match reached {
            Some(stream) => return Ok(stream),
            None if Instant::now() < deadline => std::thread::sleep(PAUSE),
            None => {
                let reason = format!("does not answer at {host}:{port} within {} s", timeout.as_secs_f64());
                return Err(Error::Rank { rank, reason });
            }
        }
    }
}

/// The lines of the table, those of ranks 1 and on.
fn places(table: &[u8]) -> Result<Vec<(String, u16)>> {
    let text = String::from_utf8_lossy(table);
    let place = |line: &str| line.parse::<SocketAddr>().map(|address| (address.ip().to_string(), address.port()));
    let parsed: Result<Vec<_>, _> = text.lines().map(place).collect();
    parsed.map_err(|_| Error::Rank { rank: 0, reason: "sent a list of ranks that cannot be read".to_owned() })
}
