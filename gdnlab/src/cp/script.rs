//! What a rank does, in order: known before anything runs, for ranks whose tensors stay on their GPU.

use super::chain::Way;
use super::cut::Part;
use super::trace::Work;

/// A call of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// That which gives `M`.
    Transition,
    /// That which gives `S_loc` and `D_loc`.
    Local,
    /// The piece that fills the rank.
    Spanned,
    /// The first piece, which began before.
    Entering,
    /// Sequences that are here as a whole.
    Free,
    /// The last piece, which goes on.
    Leaving,
    /// What is free and what leaves, in a forward.
    Own,
}

/// Which passes of a call run. A backward uses what the forward before it has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passes {
    Forward,
    Backward,
    Both,
}

/// Where a state is on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    /// The call whose tensor holds it.
    pub call: Call,
    /// `initial_state`, `final_state`, `dht` or `dh0`, the last state in it.
    pub tensor: &'static str,
}

/// One thing that a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Runs a call.
    Run { work: Work, call: Call, passes: Passes },
    /// Makes `S_loc` to `M S_in + S_loc`, or `D_loc` to `M^T dS_out + D_loc`.
    Compose(Way),
    /// Hands a state to another rank.
    Send { to: usize, state: State },
    /// Takes one from another rank.
    Receive { from: usize, state: State },
}

/// What the rank of `part` does, forward, or with `backward` all of it: the steps of [`Rank`](super::Rank), which a test
/// compares, but nothing is computed again that a forward has left.
pub(super) fn script(part: &Part, backward: bool) -> Vec<Act> {
    if part.inputs.is_none() {
        return Vec::new();
    }
    match part.from.zip(part.to).filter(|_| part.is_spanned()) {
        Some((from, to)) => through(from, to, backward),
        None if backward => with_gradients(part),
        None => forward(part),
    }
}

fn forward(part: &Part) -> Vec<Act> {
    let mut acts = Vec::new();
    if part.pieces.len() > usize::from(part.from.is_some()) {
        acts.push(run(Call::Own, Passes::Forward));
    }
    acts.extend(part.to.map(|to| send(to, Call::Own, "final_state")));
    if let Some(from) = part.from {
        acts.extend([receive(from, Call::Entering, "initial_state"), run(Call::Entering, Passes::Forward)]);
    }
    acts
}

fn with_gradients(part: &Part) -> Vec<Act> {
    let mut acts = Vec::new();
    if let Some(to) = part.to {
        acts.push(Act::Run { work: Work::Local, call: Call::Leaving, passes: Passes::Forward });
        acts.push(send(to, Call::Leaving, "final_state"));
    }
    if let Some(from) = part.from {
        acts.push(receive(from, Call::Entering, "initial_state"));
        acts.push(run(Call::Entering, Passes::Both));
        acts.push(send(from, Call::Entering, "dh0"));
    }
    if part.pieces.len() > usize::from(part.from.is_some()) + usize::from(part.to.is_some()) {
        acts.push(run(Call::Free, Passes::Both));
    }
    if let Some(to) = part.to {
        acts.extend([receive(to, Call::Leaving, "dht"), run(Call::Leaving, Passes::Backward)]);
    }
    acts
}

/// Of a part that one sequence fills.
fn through(from: usize, to: usize, backward: bool) -> Vec<Act> {
    let local = |passes| Act::Run { work: Work::Local, call: Call::Local, passes };
    let mut acts = vec![
        Act::Run { work: Work::Transition, call: Call::Transition, passes: Passes::Forward },
        local(Passes::Forward),
        receive(from, Call::Spanned, "initial_state"),
        Act::Compose(Way::Forward),
        send(to, Call::Local, "final_state"),
    ];
    if backward {
        acts.extend([
            local(Passes::Backward),
            receive(to, Call::Spanned, "dht"),
            Act::Compose(Way::Backward),
            send(from, Call::Local, "dh0"),
        ]);
    }
    acts.push(run(Call::Spanned, if backward { Passes::Both } else { Passes::Forward }));
    acts
}

fn run(call: Call, passes: Passes) -> Act {
    Act::Run { work: Work::Run, call, passes }
}

fn send(to: usize, call: Call, tensor: &'static str) -> Act {
    Act::Send { to, state: State { call, tensor } }
}

fn receive(from: usize, call: Call, tensor: &'static str) -> Act {
    Act::Receive { from, state: State { call, tensor } }
}

#[cfg(test)]
mod tests {
    use super::super::trace::Step;
    use super::super::{Cut, together};
    use super::*;
    use crate::inputs::{Regime, generate};
    use crate::problem::{Op, Shape};
    use crate::reference::Reference;

    /// What it is, and with whom.
    fn in_words(act: &Act) -> String {
        match act {
            Act::Run { work, .. } => work.to_string(),
            Act::Compose(_) => Work::Compose.to_string(),
            Act::Send { to, .. } => format!("to {to}"),
            Act::Receive { from, .. } => format!("from {from}"),
        }
    }

    fn done(step: &Step) -> String {
        match step {
            Step::Compute { work, .. } => work.to_string(),
            Step::Send { to, .. } => format!("to {to}"),
            Step::Receive { from, .. } => format!("from {from}"),
        }
    }

    #[test]
    fn ranks_do_what_their_scripts_say() {
        let inputs = generate(Op::Gdn, &Shape::new(60, 1, 8, 8), Regime::MildDecay, 2).unwrap();
        let inputs = inputs.packed(&[0, 10, 10, 45, 60], 2).unwrap();
        let cuts = [
            vec![0, 60],
            vec![0, 10, 45, 60],
            vec![0, 5, 20, 30, 60],
            vec![0, 0, 12, 13, 40, 40, 58, 60, 60],
            vec![0, 3, 6, 9, 50, 55, 60],
        ];
        for cut in cuts.map(|borders| Cut::at(borders).unwrap()) {
            for backward in [false, true] {
                let steps = together(&Reference, &inputs, &cut, backward).unwrap().steps;
                for (rank, steps) in steps.iter().enumerate() {
                    let script = script(&Part::of(&inputs, &cut, rank).unwrap(), backward);
                    let expected: Vec<String> = steps.iter().map(done).collect();
                    assert_eq!(script.iter().map(in_words).collect::<Vec<_>>(), expected, "{cut} rank {rank}");
                }
            }
        }
    }

    #[test]
    fn a_backward_runs_after_the_forward_that_it_needs() {
        let inputs = generate(Op::Gdn, &Shape::new(40, 1, 8, 8), Regime::MildDecay, 2).unwrap();
        let cut = Cut::even(40, 4).unwrap();
        for rank in 0..4 {
            let mut left = Vec::new();
            for act in script(&Part::of(&inputs, &cut, rank).unwrap(), true) {
                match act {
                    Act::Run { call, passes: Passes::Backward, .. } => assert!(left.contains(&call), "{rank}: {act:?}"),
                    Act::Run { call, .. } => {
                        assert!(!left.contains(&call), "{rank}: {act:?}");
                        left.push(call);
                    }
                    _ => {}
                }
            }
        }
    }
}
