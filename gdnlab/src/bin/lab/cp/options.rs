//! Options of `cargo lab cp` that are more than a number.

use gdnlab::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// `K,V` on the command line.
#[derive(Clone, Copy)]
pub struct Dims(pub usize, pub usize);

impl FromStr for Dims {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let numbers: Vec<Option<usize>> = text.split(',').map(|part| part.trim().parse().ok()).collect();
        match numbers.as_slice() {
            [Some(key_dim), Some(value_dim)] => Ok(Self(*key_dim, *value_dim)),
            _ => Err(Error::input("expected two numbers K,V such as 128,128")),
        }
    }
}

impl fmt::Display for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.0, self.1)
    }
}

/// How ranks exchange states.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Auto,
    Virtual,
    Tcp,
    Nccl,
}

impl Transport {
    const ALL: [Self; 4] = [Self::Auto, Self::Virtual, Self::Tcp, Self::Nccl];
}

impl FromStr for Transport {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let known = Self::ALL.into_iter().find(|transport| transport.to_string() == text);
        known.ok_or_else(|| Error::input(format!("unknown transport '{text}': expected auto, virtual, tcp or nccl")))
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Virtual => "virtual",
            Self::Tcp => "tcp",
            Self::Nccl => "nccl",
        })
    }
}
