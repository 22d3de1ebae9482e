//! What ranks measure together: the link between them, the time of a call, and their results in one place.

use super::cut::{Cut, Part};
use super::exchange::Exchange;
use super::rank::Rank;
use super::slice::named_mut;
use super::trace::{Link, Step, Timeline, timeline};
use crate::problem::{Grads, Inputs, Outputs, Results};
use crate::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::time::Instant;

/// Bytes of the messages that a link's rate is measured with, and how many there are.
const LINK_BYTES: usize = 8 << 20;
const LINK_MESSAGES: usize = 21;
/// Messages of one byte that its latency is measured with.
const LATENCY_MESSAGES: usize = 101;

/// How often the messages of a call are sent alone.
const ROUNDS: usize = 9;

/// Waits until every rank is here.
///
/// # Errors
/// [`Error::Rank`] where one does not come.
pub fn barrier(exchange: &(impl Exchange + ?Sized)) -> Result<()> {
    if exchange.rank() > 0 {
        exchange.send(0, &[1])?;
        return exchange.receive(0, 1).map(drop);
    }
    (1..exchange.ranks()).try_for_each(|rank| exchange.receive(rank, 1).map(drop))?;
    (1..exchange.ranks()).try_for_each(|rank| exchange.send(rank, &[1]))
}

/// Measures the link between the first two ranks, by messages that go there and back; the others wait. Its rate is the better
/// one of long messages and of those with `bytes`, which may stay in a cache. None for one rank.
///
/// # Errors
/// What the exchange reports.
pub fn link(exchange: &dyn Exchange, bytes: usize) -> Result<Option<Link>> {
    link_by(exchange, [LINK_BYTES, bytes.max(1)], |bytes, count| one_way_ms(exchange, bytes, count))
}

/// The same with messages of these sizes, which take as long as `one_way_ms` of a size and a number of messages says.
pub(super) fn link_by(
    exchange: &dyn Exchange,
    sizes: [usize; 2],
    one_way_ms: impl Fn(usize, usize) -> Result<f64>,
) -> Result<Option<Link>> {
    if exchange.ranks() < 2 {
        return Ok(None);
    }
    barrier(exchange)?;
    let latency_ms = one_way_ms(1, LATENCY_MESSAGES)?;
    let mut gb_s = 0.0f64;
    for bytes in sizes {
        let ms = one_way_ms(bytes, LINK_MESSAGES)?;
        // Of a short message, latency may be all that is seen.
        gb_s = gb_s.max(bytes as f64 / (ms - latency_ms).max(ms / 4.0) / 1e6);
    }
    barrier(exchange)?;
    Ok(Some(Link { latency_ms, gb_s }))
}

/// Time of the fastest message in one direction, as ranks 0 and 1 see it: what the link can do.
fn one_way_ms(exchange: &dyn Exchange, bytes: usize, count: usize) -> Result<f64> {
    let message = vec![0x5a; bytes];
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let begin = Instant::now();
        match exchange.rank() {
            0 => {
                exchange.send(1, &message)?;
                exchange.receive(1, bytes)?;
            }
            1 => {
                let received = exchange.receive(0, bytes)?;
                exchange.send(0, &received)?;
            }
            _ => return Ok(1.0),
        }
        times.push(begin.elapsed().as_secs_f64() * 1e3 / 2.0);
    }
    Ok(times.into_iter().fold(f64::INFINITY, f64::min))
}

/// Times of one rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankTimes {
    /// What it did, in each repetition.
    pub steps: Vec<Vec<Step>>,
    /// From the moment when all ranks were ready to its own end, in milliseconds, in each repetition.
    pub total_ms: Vec<f64>,
    /// The same with the messages alone and nothing computed, several times in each repetition.
    pub messages_ms: Vec<f64>,
}

/// Runs the part of this rank up to the end of `counted`, forward, or with `backward` all of it, each time together with all
/// other ranks. Runs before the begin of `counted` only warm up.
///
/// # Errors
/// What the kernel and the exchange report.
pub fn time(
    exchange: &dyn Exchange,
    rank: &Rank<'_>,
    part: &Part,
    backward: bool,
    counted: Range<usize>,
) -> Result<RankTimes> {
    let mut times = RankTimes::default();
    for repeat in 0..counted.end {
        barrier(exchange)?;
        let begin = Instant::now();
        if backward {
            rank.backward(part)?
        } else {
            rank.forward(part)?
        };
        let total_ms = begin.elapsed().as_secs_f64() * 1e3;
        let steps = rank.take_steps();
        let mut messages_ms = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            barrier(exchange)?;
            let begin = Instant::now();
            messages_alone(exchange, &steps)?;
            messages_ms.push(begin.elapsed().as_secs_f64() * 1e3);
        }
        if counted.contains(&repeat) {
            times.total_ms.push(total_ms);
            times.messages_ms.extend(messages_ms);
            times.steps.push(steps);
        }
    }
    Ok(times)
}

/// Sends and takes messages of the same sizes in the same order, with nothing computed between.
fn messages_alone(exchange: &dyn Exchange, steps: &[Step]) -> Result<()> {
    steps.iter().try_for_each(|step| match *step {
        Step::Compute { .. } => Ok(()),
        Step::Send { to, bytes, .. } => exchange.send(to, &vec![0; bytes]),
        Step::Receive { from, bytes, .. } => exchange.receive(from, bytes).map(drop),
    })
}

/// The values that each rank has, at rank 0 in their order; none elsewhere.
///
/// # Errors
/// What the exchange reports.
pub fn collect<T: Serialize + DeserializeOwned>(exchange: &dyn Exchange, own: T) -> Result<Option<Vec<T>>> {
    let unreadable =
        |error: serde_json::Error| Error::input(format!("what a rank reports cannot be passed on: {error}"));
    if exchange.rank() > 0 {
        let text = serde_json::to_vec(&own).map_err(unreadable)?;
        exchange.send(0, &(text.len() as u64).to_le_bytes())?;
        exchange.send(0, &text)?;
        return Ok(None);
    }
    let mut all = vec![own];
    for rank in 1..exchange.ranks() {
        let length = exchange.receive(rank, size_of::<u64>())?;
        let length = u64::from_le_bytes(length.try_into().unwrap_or_default()) as usize;
        all.push(serde_json::from_slice(&exchange.receive(rank, length)?).map_err(unreadable)?);
    }
    Ok(Some(all))
}

/// The results of each rank, at rank 0 in their order, where `cut` cuts `inputs`; none elsewhere.
///
/// # Errors
/// What the exchange reports.
pub fn collect_results(
    exchange: &dyn Exchange,
    own: Option<Results>,
    inputs: &Inputs,
    cut: &Cut,
) -> Result<Option<Vec<Option<Results>>>> {
    let backward = own.as_ref().map(|own| own.grads.is_some());
    let bytes = |data: &[f64]| data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    if exchange.rank() > 0 {
        exchange.send(0, &[u8::from(backward == Some(true))])?;
        own.iter().flat_map(Results::named).try_for_each(|(_, tensor)| exchange.send(0, &bytes(&tensor.data)))?;
        return Ok(None);
    }
    let mut all = vec![own];
    for rank in 1..exchange.ranks() {
        let with_grads = exchange.receive(rank, 1)? == [1];
        let part = Part::of(inputs, cut, rank)?;
        let Some(part) = &part.inputs else {
            all.push(None);
            continue;
        };
        let mut results =
            Results { outputs: Outputs::filled(part, 0.0), grads: with_grads.then(|| Grads::filled(part, 0.0)) };
        for (_, tensor) in named_mut(&mut results) {
            let received = exchange.receive(rank, tensor.data.len() * size_of::<f64>())?;
            tensor.data.iter_mut().zip(received.as_chunks().0).for_each(|(x, bytes)| *x = f64::from_le_bytes(*bytes));
        }
        all.push(Some(results));
    }
    Ok(Some(all))
}

/// What the link's rate alone allows for the messages of `steps`, one waiting for the other as they do.
pub fn floor(steps: &[Vec<Step>], link: &Link) -> Timeline {
    let is_message = |step: &&Step| !matches!(step, Step::Compute { .. });
    let messages: Vec<Vec<Step>> =
        steps.iter().map(|steps| steps.iter().filter(is_message).copied().collect()).collect();
    timeline(&messages, &Link { latency_ms: 0.0, ..*link })
}
