//! What ranks say to each other over a connection: messages, and what tells who hangs.

use crate::{Error, Result};
use std::io::{Error as IoError, ErrorKind, Read, Write};
use std::net::TcpStream;

/// A message that is longer was not sent by a rank.
const LONGEST: u64 = 1 << 36;
/// What stands in the place of a message's length where none follows.
const QUESTION: u64 = u64::MAX;
const ANSWER: u64 = u64::MAX - 1;
const GAVE_UP: u64 = u64::MAX - 2;

/// What a rank does, as far as others are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    /// It waits for nobody.
    Works,
    /// It waits for this rank.
    WaitsFor(usize),
    /// It waits for all others.
    WaitsForAll,
}

impl Doing {
    fn to_number(self) -> u64 {
        match self {
            Self::Works => u64::MAX,
            Self::WaitsForAll => u64::MAX - 1,
            Self::WaitsFor(rank) => rank as u64,
        }
    }

    fn of_number(number: u64) -> Self {
        match number {
            u64::MAX => Self::Works,
            number if number == u64::MAX - 1 => Self::WaitsForAll,
            rank => Self::WaitsFor(rank as usize),
        }
    }
}

/// What comes from another rank.
#[derive(Debug)]
pub(super) enum Frame {
    /// A message.
    Block(Vec<u8>),
    /// It asks what this rank does.
    Question,
    /// It says what it does.
    Answer(Doing),
    /// It ends because of this rank, for this reason.
    GaveUp { rank: usize, reason: String },
}

/// Sends a message with its length.
pub(super) fn write_block(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
    stream.write_all(bytes)
}

/// Asks what a rank does.
pub(super) fn write_question(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(&QUESTION.to_le_bytes())
}

/// Says what this one does.
pub(super) fn write_answer(stream: &mut TcpStream, doing: Doing) -> std::io::Result<()> {
    stream.write_all(&[ANSWER, doing.to_number()].map(u64::to_le_bytes).concat())
}

/// Says that this rank ends because of `rank`.
pub(super) fn write_gave_up(stream: &mut TcpStream, rank: usize, reason: &str) -> std::io::Result<()> {
    let head = [GAVE_UP, rank as u64, reason.len() as u64].map(u64::to_le_bytes).concat();
    stream.write_all(&[&head, reason.as_bytes()].concat())
}

/// What comes next.
pub(super) fn read_frame(stream: &mut impl Read) -> std::io::Result<Frame> {
    match read_number(stream)? {
        QUESTION => Ok(Frame::Question),
        ANSWER => Ok(Frame::Answer(Doing::of_number(read_number(stream)?))),
        GAVE_UP => {
            let rank = read_number(stream)? as usize;
            let length = read_number(stream)?;
            let reason = String::from_utf8_lossy(&read_bytes(stream, length)?).into_owned();
            Ok(Frame::GaveUp { rank, reason })
        }
        length => Ok(Frame::Block(read_bytes(stream, length)?)),
    }
}

/// The next message of `rank`, where nothing but messages is expected.
pub(super) fn read_block(stream: &mut TcpStream, rank: usize) -> Result<Vec<u8>> {
    match read_frame(stream).map_err(|error| broken(rank, &error))? {
        Frame::Block(bytes) => Ok(bytes),
        Frame::GaveUp { rank, reason } => Err(Error::Rank { rank, reason }),
        frame => Err(Error::Rank { rank, reason: format!("said {frame:?} where a message was expected") }),
    }
}

/// That the connection to `rank` does not work.
pub(super) fn broken(rank: usize, error: &IoError) -> Error {
    let reason = match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => "has ended".to_owned(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut => "says nothing".to_owned(),
        _ => format!("cannot be reached: {error}"),
    };
    Error::Rank { rank, reason }
}

fn read_number(stream: &mut impl Read) -> std::io::Result<u64> {
    let mut number = [0; 8];
    stream.read_exact(&mut number)?;
    Ok(u64::from_le_bytes(number))
}

fn read_bytes(stream: &mut impl Read, length: u64) -> std::io::Result<Vec<u8>> {
    if length > LONGEST {
        return Err(IoError::new(ErrorKind::InvalidData, format!("a message of {length} bytes")));
    }
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
