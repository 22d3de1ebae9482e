//! Context parallelism: a sequence that is cut over ranks, computed exactly.
//!
//! The state of GDN and GDN-2 is linear in the one that it begins from. Over the tokens of rank `r`,
//!
//! ```text
//! S_out(r) = M(r) S_in(r) + S_loc(r)          S_in(r) = S_out(r-1)
//! dS_in(r) = M(r)^T dS_out(r) + D_loc(r)      dS_out(r) = dS_in(r+1)
//! ```
//!
//! with `S_loc` the final state from a zero state, `D_loc` the gradient of the initial state from a zero gradient of the final
//! one, and the transition `M = A_T ... A_1`, `A_t = (I - k_t (b_t*k_t)^T) Diag(e^{g_t})`, which the same kernel gives from the
//! identity with `v = 0`. All ranks make their own at once; then states go from rank to rank, against the tokens in the
//! backward; then each rank runs its part with its true initial state and its true gradient of the final state. At the first
//! token of a sequence the chain begins anew.
//!
//! Only what needs it is computed more than once:
//!
//! | a sequence on a rank | forward | with gradients |
//! |---|---|---|
//! | is there as a whole | its run | its run |
//! | begins there and goes on | its run gives the state that is handed on | a forward for the state, then its run |
//! | began before and ends there | its run | its run gives the gradient that is handed back |
//! | fills the rank, on both sides | `M`, `S_loc`, then its run | `M`, `S_loc`, `D_loc`, then its run |
//!
//! So where no sequence crosses a border nothing is handed on, and every bit is that of a single run. A message is one state,
//! `HV K V` numbers, whatever the number of tokens.
//!
//! Ranks whose tensors stay on a GPU each, as in training, are what [`Trial::scaling`] times. They do the same, and have less to
//! compute: the forward for the state is that of the run, and one forward gives both `S_loc` and what `D_loc` needs.
//!
//! A [`Cut`] says where the ranks' borders are, a [`Part`] is what one [`Rank`] has, and [`gather`] puts results together.
//! Ranks reach each other through an [`Exchange`]: threads of one process ([`virtual_ranks`]), or processes on
//! sockets ([`Tcp`]) or with a GPU each ([`Nccl`]), which find each other by the variables of torchrun, Open MPI or SLURM
//! ([`World`]).
//!
//! ```
//! use gdnlab::cp::{Cut, together};
//! use gdnlab::{inputs::{self, Regime}, kernel::Kernel, problem::{Op, Shape}, reference::Reference};
//! let inputs = inputs::generate(Op::Gdn, &Shape::new(300, 2, 16, 32), Regime::LongMemory, 1)?;
//! let cut = Cut::even(300, 4)?;
//! let parallel = together(&Reference, &inputs, &cut, true)?.results;
//! let single = Reference.backward(&inputs)?;
//! let apart = parallel.outputs.o.data.iter().zip(&single.outputs.o.data).map(|(a, b)| (a - b).abs());
//! assert!(apart.fold(0.0, f64::max) < 1e-12);
//! # Ok::<(), gdnlab::Error>(())
//! ```

mod calls;
mod chain;
mod clock;
mod cut;
mod device;
mod exchange;
mod experiment;
mod frame;
mod measure;
mod meet;
mod nccl;
mod rank;
mod resident;
mod scaling;
mod script;
mod setting;
mod slice;
mod tcp;
mod trace;
mod world;

pub use clock::DeviceClock;
pub use cut::{Cut, Part, gather};
pub use exchange::{DeviceBytes, Exchange, Virtual, virtual_ranks};
pub use experiment::{LIMIT, Trial, complaints, verdict};
pub use measure::{RankTimes, barrier, collect, collect_results, link};
pub use meet::Terms;
pub use nccl::Nccl;
pub use rank::{Clock, Rank};
pub use setting::{Cuts, Scaling, Setting};
pub use tcp::Tcp;
pub use trace::{Link, Step, Timeline, Work, timeline};
pub use world::World;

use crate::Result;
use crate::kernel::Kernel;
use crate::problem::{Inputs, Results};
use std::time::Duration;

/// How long a virtual rank waits for another.
const VIRTUAL_TIMEOUT: Duration = Duration::from_secs(3600);

/// What virtual ranks gave together.
#[derive(Clone, Debug)]
pub struct Together {
    /// In the shape of the whole call.
    pub results: Results,
    /// What each rank did.
    pub steps: Vec<Vec<Step>>,
}

/// Runs `inputs` on virtual ranks, one for each part of `cut`: forward, or with `backward` all gradients too.
///
/// # Errors
/// [`crate::Error::Input`] where the inputs do not validate or the cut does not fit, and what the kernel reports.
pub fn together(kernel: &dyn Kernel, inputs: &Inputs, cut: &Cut, backward: bool) -> Result<Together> {
    inputs.validate()?;
    let parts = (0..cut.ranks()).map(|rank| Part::of(inputs, cut, rank)).collect::<Result<Vec<_>>>()?;
    let ran = virtual_ranks(cut.ranks(), VIRTUAL_TIMEOUT, |exchange| {
        let rank = Rank::new(kernel, exchange);
        let part = &parts[exchange.rank()];
        let results = if backward { rank.backward(part)? } else { rank.forward(part)? };
        Ok((results, rank.take_steps()))
    })?;
    let (results, steps): (Vec<_>, Vec<_>) = ran.into_iter().unzip();
    Ok(Together { results: gather(inputs, cut, &results)?, steps })
}

#[cfg(test)]
mod tests;
