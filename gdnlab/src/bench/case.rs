//! What is timed: one pass of one call, and the times of others for it.

use super::seqlens::SeqLens;
use crate::cost::Cost;
use crate::cost::Rates;
use crate::cost::gdn::{Call, ChunkStates};
use crate::problem::{Op, Shape};
use crate::record::{Pass, Workload};
use crate::table::read_csv;
use crate::table::rows::column;
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::{DataFrame, DataType};
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::str::FromStr;

/// File of the published times, in `data/published`.
const PUBLISHED: &str = "gdn_h200_peers_ms.csv";
/// The GPU of the published times, as its driver names it.
pub(crate) const PUBLISHED_GPU: &str = "NVIDIA H200";
/// Columns of that file with a peer's times, and the peer's name.
const PEERS: [(&str, &str); 3] = [("flash_qla_ms", "flash_qla"), ("flashinfer_ms", "flashinfer"), ("fla_ms", "fla")];
/// `K` and `V` of the published times.
const PUBLISHED_HEAD_DIM: usize = 128;
/// Tokens of a chunk in the cost model.
const CHUNK: usize = 64;

/// Somebody else's time.
#[derive(Clone, Debug, PartialEq)]
pub struct Peer {
    /// Name of the library.
    pub name: String,
    /// Its time in milliseconds.
    pub ms: f64,
    /// Where the time comes from: `published` or `same run`.
    pub source: &'static str,
}

impl Peer {
    /// A time that somebody published.
    pub fn published(name: &str, ms: f64) -> Self {
        Self { name: name.to_owned(), ms, source: "published" }
    }
}

/// One pass of one call.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Forward or backward. The backward is timed alone.
    pub pass: Pass,
    /// Sizes.
    pub shape: Shape,
    /// Lengths of the packed sequences; `None` where the `B` rows are the sequences.
    pub seqlens: Option<SeqLens>,
    /// Where the case comes from, such as the model that has such heads; may be empty.
    pub label: String,
    /// Times of others for it.
    pub peers: Vec<Peer>,
}

impl Case {
    /// A case of packed sequences that nobody published.
    ///
    /// # Errors
    /// [`Error::Input`] where the sizes are not valid.
    pub fn packed(pass: Pass, seqlens: SeqLens, heads: Heads) -> Result<Self> {
        let Heads { qk_heads, value_heads, key_dim, value_dim } = heads;
        let shape = Shape { batch: 1, tokens: seqlens.tokens(), qk_heads, value_heads, key_dim, value_dim };
        shape.validate()?;
        if shape.tokens == 0 {
            return Err(Error::input(format!("{seqlens}: expected at least one token")));
        }
        Ok(Self { pass, shape, seqlens: Some(seqlens), label: String::new(), peers: Vec::new() })
    }

    /// Where each sequence lies on the flattened token axis.
    pub fn sequences(&self) -> Vec<Range<usize>> {
        let Shape { batch, tokens, .. } = self.shape;
        match &self.seqlens {
            Some(seqlens) => seqlens.ranges(),
            None => (0..batch).map(|row| row * tokens..(row + 1) * tokens).collect(),
        }
    }

    /// Useful arithmetic and traffic of a kernel whose inputs have `element_bytes` per number. Of the two ways to do the
    /// backward it is the one with the lower floor at `rates`.
    pub fn cost(&self, element_bytes: usize, rates: &Rates) -> Cost {
        let lengths: Vec<usize> = self.sequences().iter().map(ExactSizeIterator::len).collect();
        let call = Call { shape: self.shape, lengths: &lengths, chunk: CHUNK, element_bytes };
        if self.pass == Pass::Fwd {
            return call.forward();
        }
        let ways = [ChunkStates::Kept, ChunkStates::Recomputed].map(|states| call.backward(states));
        if ways[1].floor_ms(rates) < ways[0].floor_ms(rates) { ways[1] } else { ways[0] }
    }

    /// The same case on `gpu`: published times are of another machine where it is not an NVIDIA H200, and are left out.
    #[must_use]
    pub fn on(self, gpu: &str) -> Self {
        if gpu == PUBLISHED_GPU { self } else { Self { peers: Vec::new(), ..self } }
    }

    /// The peer called `name`.
    pub fn peer(&self, name: &str) -> Option<&Peer> {
        self.peers.iter().find(|peer| peer.name == name)
    }

    /// The fastest peer.
    pub fn best_peer(&self) -> Option<&Peer> {
        self.peers.iter().min_by(|a, b| a.ms.total_cmp(&b.ms))
    }

    /// As records name it.
    pub fn workload(&self) -> Workload {
        let seqlens = self.seqlens.as_ref().map(SeqLens::to_string);
        Workload { seqlens, ..Workload::new(Op::Gdn, &self.shape).pass(self.pass) }
    }

    /// `fwd` or `bwd`.
    pub fn pass_name(&self) -> &'static str {
        if self.pass == Pass::Fwd { "fwd" } else { "bwd" }
    }

    /// The sequences in a few words: `1x32768`, or `32 x 1024` for the rows of a batch.
    pub fn sequences_name(&self) -> String {
        match &self.seqlens {
            Some(seqlens) => seqlens.to_string(),
            None => format!("B{} T{}", self.shape.batch, self.shape.tokens),
        }
    }

    /// `16/64` q/k and value heads.
    pub fn heads_name(&self) -> String {
        format!("{}/{}", self.shape.qk_heads, self.shape.value_heads)
    }

    /// The name of a published random split, such as `32k_4seq`, where the case has one.
    pub fn split_name(&self) -> Option<&str> {
        Some(self.label.as_str()).filter(|label| label.ends_with("seq"))
    }

    /// The model that has such heads, such as `27B TP2, 8/24`, or the heads alone.
    pub fn model(&self) -> String {
        match self.label.as_str() {
            "" => self.heads_name(),
            _ if self.split_name().is_some() => self.heads_name(),
            label => format!("{label}, {}", self.heads_name()),
        }
    }

    /// Whether both are the same call, whatever the pass.
    pub fn is_same_call(&self, other: &Self) -> bool {
        (self.shape, &self.seqlens) == (other.shape, &other.seqlens)
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { key_dim, value_dim, .. } = self.shape;
        let heads = self.heads_name();
        write!(f, "{} {heads} {key_dim}/{value_dim} {}", self.pass_name(), self.sequences_name())?;
        if self.label.is_empty() { Ok(()) } else { write!(f, " ({})", self.label) }
    }
}

/// Numbers of heads and their dimensions: `HK,HV,K,V` on the command line, or `HK,HV` for K = V = 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// `HK`.
    pub qk_heads: usize,
    /// `HV`.
    pub value_heads: usize,
    /// `K`.
    pub key_dim: usize,
    /// `V`.
    pub value_dim: usize,
}

impl FromStr for Heads {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let numbers: Vec<Option<usize>> = text.split(',').map(|part| part.trim().parse().ok()).collect();
        match *numbers.as_slice() {
            [Some(qk_heads), Some(value_heads)] => {
                Ok(Self { qk_heads, value_heads, key_dim: PUBLISHED_HEAD_DIM, value_dim: PUBLISHED_HEAD_DIM })
            }
            [Some(qk_heads), Some(value_heads), Some(key_dim), Some(value_dim)] => {
                Ok(Self { qk_heads, value_heads, key_dim, value_dim })
            }
            _ => Err(Error::input(format!("heads '{text}': expected HK,HV or HK,HV,K,V such as 16,64,128,128"))),
        }
    }
}

/// Every published case with the times of its peers, from the folder `data/published`.
///
/// The peers' backward has the inverse of each chunk and the cumulated gates from the forward, and recomputes the states.
///
/// # Errors
/// As [`read_csv`], and [`Error::Input`] for a pass, heads or lengths that make no sense.
pub fn published(folder: impl AsRef<Path>) -> Result<Vec<Case>> {
    let path = folder.as_ref().join(PUBLISHED);
    let text = ["pass", "model", "seqlens"].map(|name| (name, DataType::String));
    let heads = ["H_qk", "H_v"].map(|name| (name, DataType::UInt32));
    let table = read_csv(&path, &[text.as_slice(), &heads].concat())?;
    let row = |row: usize| {
        published_row(&table, row)
            .map_err(|error| Error::input(format!("{}: data row {}: {error}", path.display(), row + 1)))
    };
    (0..table.height()).map(row).collect()
}

fn published_row(table: &DataFrame, row: usize) -> Result<Case> {
    let text = |name: &str| -> Result<String> {
        Ok(column(table, name, &DataType::String)?.str()?.get(row).unwrap_or_default().to_owned())
    };
    let count = |name: &str| -> Result<usize> {
        Ok(column(table, name, &DataType::UInt32)?.u32()?.get(row).unwrap_or_default() as usize)
    };
    let pass = match text("pass")?.as_str() {
        "fwd" => Pass::Fwd,
        "bwd" => Pass::Bwd,
        other => return Err(Error::input(format!("pass '{other}': expected fwd or bwd"))),
    };
    let heads = Heads {
        qk_heads: count("H_qk")?,
        value_heads: count("H_v")?,
        key_dim: PUBLISHED_HEAD_DIM,
        value_dim: PUBLISHED_HEAD_DIM,
    };
    let (model, lengths) = (text("model")?, text("seqlens")?);
    // The name of a random split says more than its lengths, which stand in the case itself.
    let label = if pass == Pass::Bwd { lengths.clone() } else { model };
    let mut peers = Vec::new();
    for (name, peer) in PEERS {
        if let Some(ms) = column(table, name, &DataType::Float64)?.f64()?.get(row) {
            peers.push(Peer::published(peer, ms));
        }
    }
    Ok(Case { label, peers, ..Case::packed(pass, lengths.parse()?, heads)? })
}

#[cfg(test)]
#[path = "case_tests.rs"]
mod tests;
