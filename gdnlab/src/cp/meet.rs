//! How ranks in processes of their own find each other: rank 0 listens, the others come to it.

use super::World;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// What a rank says first, so that nobody else's connection is taken for one.
const GREETING: &[u8; 8] = b"gdnlabcp";
/// A message that is longer was not sent by a rank.
const LONGEST: u64 = 1 << 36;
/// Between two looks for who came.
const PAUSE: Duration = Duration::from_millis(5);
/// How long one that came may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(5);

/// The connections of one rank to all others.
pub(super) struct Meeting {
    /// By rank; none to itself.
    pub streams: Vec<Option<TcpStream>>,
    /// What rank 0 had to say to all.
    pub announced: Vec<u8>,
}

impl Meeting {
    /// Meets all ranks of `world`, and hears what rank 0 announces.
    ///
    /// # Errors
    /// [`Error::Rank`] where one does not come within `timeout`, [`Error::Input`] where the place of meeting is none.
    pub fn join(world: &World, timeout: Duration, announced: impl FnOnce() -> Result<Vec<u8>>) -> Result<Self> {
        let deadline = Instant::now() + timeout;
        let mut streams: Vec<Option<TcpStream>> = (0..world.ranks).map(|_| None).collect();
        if world.rank == 0 {
            let announced = announced()?;
            let mut guests = receive_all(world, &listen(world)?, 1, deadline, timeout)?;
            let table: Vec<u8> = guests.values().flat_map(|guest| guest.place().into_bytes()).collect();
            for (rank, guest) in &mut guests {
                let sent =
                    write_block(&mut guest.stream, &announced).and_then(|()| write_block(&mut guest.stream, &table));
                sent.map_err(|error| broken(*rank, &error))?;
            }
            guests.into_iter().for_each(|(rank, guest)| streams[rank] = Some(guest.stream));
            return Ok(Self { streams, announced });
        }
        let any = if is_loopback(&world.meeting.0) { "127.0.0.1:0" } else { "0.0.0.0:0" };
        let own = TcpListener::bind(any).map_err(|error| Error::io(any, error))?;
        let port = own.local_addr().map_err(|error| Error::io(any, error))?.port();
        let mut host = connect(&world.meeting, 0, deadline, timeout)?;
        greet(&mut host, world, port).map_err(|error| broken(0, &error))?;
        host.set_read_timeout(Some(timeout)).map_err(|error| broken(0, &error))?;
        let announced = read_block(&mut host).map_err(|error| broken(0, &error))?;
        let table = read_block(&mut host).map_err(|error| broken(0, &error))?;
        host.set_read_timeout(None).map_err(|error| broken(0, &error))?;
        streams[0] = Some(host);
        for (rank, place) in
            places(&table)?.into_iter().enumerate().map(|(at, place)| (at + 1, place)).take(world.rank - 1)
        {
            let mut stream = connect(&place, rank, deadline, timeout)?;
            greet(&mut stream, world, port).map_err(|error| broken(rank, &error))?;
            streams[rank] = Some(stream);
        }
        for (rank, guest) in receive_all(world, &own, world.rank + 1, deadline, timeout)? {
            streams[rank] = Some(guest.stream);
        }
        Ok(Self { streams, announced })
    }
}

/// One that came.
struct Guest {
    stream: TcpStream,
    ip: IpAddr,
    port: u16,
}

impl Guest {
    /// Where it listens itself, as a line of the table.
    fn place(&self) -> String {
        format!("{}\n", SocketAddr::new(self.ip, self.port))
    }
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

/// Waits until all ranks from `first` on have come.
fn receive_all(
    world: &World,
    listener: &TcpListener,
    first: usize,
    deadline: Instant,
    timeout: Duration,
) -> Result<BTreeMap<usize, Guest>> {
    let io = |error| Error::io("a socket", error);
    listener.set_nonblocking(true).map_err(io)?;
    let mut guests = BTreeMap::new();
    while guests.len() < world.ranks - first {
        match listener.accept() {
            Ok((stream, address)) => {
                let Some((rank, guest)) = welcome(world, stream, address)? else { continue };
                if rank < first || guests.insert(rank, guest).is_some() {
                    return Err(Error::Rank {
                        rank,
                        reason: "came twice: expected one process for each rank".to_owned(),
                    });
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(PAUSE)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let rank = (first..world.ranks).find(|rank| !guests.contains_key(rank)).unwrap_or(first);
                let missing = world.ranks - first - guests.len();
                return Err(Error::Rank {
                    rank,
                    reason: format!(
                        "has not come to rank {} within {} s ({missing} missing)",
                        world.rank,
                        timeout.as_secs_f64()
                    ),
                });
            }
            Err(error) => return Err(io(error)),
        }
    }
    Ok(guests)
}

/// Hears who came; none where it is no rank.
fn welcome(world: &World, mut stream: TcpStream, address: SocketAddr) -> Result<Option<(usize, Guest)>> {
    let heard = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(PATIENCE)))
        .and_then(|()| stream.set_nodelay(true))
        .and_then(|()| {
            let mut said = [0; 26];
            stream.read_exact(&mut said).map(|()| said)
        });
    let Ok(said) = heard else { return Ok(None) };
    let number =
        |at: usize| said[at..at + 8].iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte)) as usize;
    if said[..8] != GREETING[..] {
        return Ok(None);
    }
    let (ranks, rank, port) = (number(8), number(16), u16::from_le_bytes([said[24], said[25]]));
    if ranks != world.ranks || rank >= ranks {
        return Err(Error::Rank {
            rank,
            reason: format!("says that there are {ranks} ranks, expected {}", world.ranks),
        });
    }
    stream.set_read_timeout(None).map_err(|error| broken(rank, &error))?;
    Ok(Some((rank, Guest { stream, ip: address.ip(), port })))
}

fn greet(stream: &mut TcpStream, world: &World, port: u16) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let numbers = [world.ranks as u64, world.rank as u64].map(u64::to_le_bytes).concat();
    stream.write_all(&[&GREETING[..], &numbers, &port.to_le_bytes()].concat())
}

/// Knocks until `rank` is there.
fn connect(place: &(String, u16), rank: usize, deadline: Instant, timeout: Duration) -> Result<TcpStream> {
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

/// That the connection to `rank` does not work.
pub(super) fn broken(rank: usize, error: &std::io::Error) -> Error {
    let reason = match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => "has ended".to_owned(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut => "says nothing".to_owned(),
        _ => format!("cannot be reached: {error}"),
    };
    Error::Rank { rank, reason }
}

/// Sends a message with its length.
pub(super) fn write_block(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
    stream.write_all(bytes)
}

/// Takes the next message.
pub(super) fn read_block(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 8];
    stream.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST {
        return Err(std::io::Error::new(ErrorKind::InvalidData, format!("a message of {length} bytes")));
    }
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
