//! What a rank did, step by step, and how long ranks would take side by side.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What a rank computes in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Work {
    /// A run of the kernel whose results are kept.
    Run,
    /// A run from a zero state, or of a forward alone, whose state another rank waits for.
    Local,
    /// The transition of its part.
    Transition,
    /// The product of a transition and a state.
    Compose,
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Run => "its run",
            Self::Local => "a state that another rank waits for",
            Self::Transition => "the transition",
            Self::Compose => "a product with the transition",
        })
    }
}

/// One step of a rank with its time in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Step {
    /// It computed.
    Compute {
        /// What.
        work: Work,
        /// How long.
        ms: f64,
    },
    /// It handed a state on.
    Send {
        /// Rank that gets it.
        to: usize,
        /// Size of the state.
        bytes: usize,
        /// How long.
        ms: f64,
    },
    /// It took a state, and waited for it.
    Receive {
        /// Rank that hands it on.
        from: usize,
        /// Size of the state.
        bytes: usize,
        /// How long, with the wait.
        ms: f64,
    },
}

/// How long a message of so many bytes takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Time of a message without content, in milliseconds.
    pub latency_ms: f64,
    /// Rate, in gigabytes per second.
    pub gb_s: f64,
}

impl Link {
    /// Time of a message, in milliseconds.
    pub fn ms(&self, bytes: usize) -> f64 {
        self.latency_ms + bytes as f64 / self.gb_s / 1e6
    }
}

/// What became of all ranks together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timeline {
    /// From the beginning of all to the end of the last, in milliseconds.
    pub total_ms: f64,
    /// Time in which the rank that computes most computes.
    pub compute_ms: f64,
    /// Of [`Timeline::total_ms`], what messages take on the longest chain of steps that wait for each other.
    pub communication_ms: f64,
    /// Bytes that all ranks sent.
    pub bytes: usize,
    /// Messages that all ranks sent.
    pub messages: usize,
}

/// The steps of all ranks as they would follow one another if each rank had a machine of its own and messages took what
/// `link` says: a step begins when its rank is ready, and a state is there when its sender had it and the link has carried it.
pub fn timeline(ranks: &[Vec<Step>], link: &Link) -> Timeline {
    // Time at which a rank is ready, and how much of it messages took.
    let mut now = vec![(0.0f64, 0.0f64); ranks.len()];
    let mut next = vec![0; ranks.len()];
    let mut sent: Vec<(usize, usize, (f64, f64))> = Vec::new();
    let mut result = Timeline::default();
    loop {
        let mut moved = false;
        for (rank, steps) in ranks.iter().enumerate() {
            while let Some(step) = steps.get(next[rank]) {
                match *step {
                    Step::Compute { ms, .. } => now[rank].0 += ms,
                    Step::Send { to, bytes, .. } => {
                        let ms = link.ms(bytes);
                        sent.push((rank, to, (now[rank].0 + ms, now[rank].1 + ms)));
                        result.bytes += bytes;
                        result.messages += 1;
                    }
                    Step::Receive { from, .. } => {
                        let Some(at) = sent.iter().position(|&(sender, to, _)| (sender, to) == (from, rank)) else {
                            break;
                        };
                        let (_, _, arrived) = sent.remove(at);
                        if arrived.0 > now[rank].0 {
                            now[rank] = arrived;
                        }
                    }
                }
                next[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let last = now.iter().copied().max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default();
    result.total_ms = last.0;
    result.communication_ms = last.1;
    result.compute_ms = ranks.iter().map(|steps| computing(steps)).fold(0.0, f64::max);
    result
}

/// Time in which a rank computes, in milliseconds.
fn computing(steps: &[Step]) -> f64 {
    steps.iter().map(|step| if let Step::Compute { ms, .. } = step { *ms } else { 0.0 }).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compute(ms: f64) -> Step {
        Step::Compute { work: Work::Run, ms }
    }

    #[test]
    fn ranks_wait_for_what_they_need_and_no_longer() {
        let link = Link { latency_ms: 1.0, gb_s: 1.0 };
        let (bytes, ms) = (2_000_000, 0.0);
        let first = vec![compute(10.0), Step::Send { to: 1, bytes, ms }, compute(1.0)];
        let waits = vec![compute(4.0), Step::Receive { from: 0, bytes, ms }, compute(5.0)];
        let both = timeline(&[first.clone(), waits.clone()], &link);
        // 10 + 3 for the message + 5; the receiver computed 9, the sender 11.
        assert_eq!((both.total_ms, both.communication_ms, both.compute_ms), (18.0, 3.0, 11.0));
        assert_eq!((both.bytes, both.messages), (2_000_000, 1));
        let mut late = waits;
        late[0] = compute(40.0);
        let late = timeline(&[first, late], &link);
        assert_eq!((late.total_ms, late.communication_ms), (45.0, 0.0));
    }

    #[test]
    fn messages_of_one_pair_keep_their_order_and_go_both_ways() {
        let link = Link { latency_ms: 1.0, gb_s: f64::INFINITY };
        let (bytes, ms) = (8, 0.0);
        let zero = vec![Step::Send { to: 1, bytes, ms }, Step::Receive { from: 1, bytes, ms }, compute(1.0)];
        let one = vec![Step::Receive { from: 0, bytes, ms }, compute(5.0), Step::Send { to: 0, bytes, ms }];
        let both = timeline(&[zero, one], &link);
        assert_eq!((both.total_ms, both.communication_ms, both.messages), (8.0, 2.0, 2));
        assert_eq!(timeline(&[], &link), Timeline::default());
    }
}
