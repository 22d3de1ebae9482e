//! One rank's part of a call.

use super::chain::{Way, compose, from_bytes, to_bytes, transition, width};
use super::cut::Shard;
use super::exchange::Exchange;
use super::slice::{Piece, join, select};
use super::trace::{Step, Work};
use crate::kernel::Kernel;
use crate::problem::{Inputs, Results, Tensor};
use crate::{Error, Result};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A rank: a kernel, and the way to the other ranks.
pub struct Rank<'a> {
    kernel: &'a dyn Kernel,
    exchange: &'a dyn Exchange,
    steps: Mutex<Vec<Step>>,
    report: Option<&'a (dyn Fn(&str) + Sync)>,
}

impl<'a> Rank<'a> {
    /// A rank that runs `kernel`.
    pub fn new(kernel: &'a dyn Kernel, exchange: &'a dyn Exchange) -> Self {
        Self { kernel, exchange, steps: Mutex::default(), report: None }
    }

    /// The same, telling `report` in words what it begins: to compute, or to wait for another rank.
    #[must_use]
    pub fn reporting(self, report: &'a (dyn Fn(&str) + Sync)) -> Self {
        Self { report: Some(report), ..self }
    }

    /// What it has done since this was asked last.
    pub fn take_steps(&self) -> Vec<Step> {
        std::mem::take(&mut *self.steps.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Output and final states of its part; none for an empty rank.
    ///
    /// # Errors
    /// What the kernel reports, and [`Error::Rank`] where another rank fails.
    pub fn forward(&self, shard: &Shard) -> Result<Option<Results>> {
        let Some(inputs) = &shard.inputs else { return Ok(None) };
        let parts = Parts::of(shard, inputs);
        if let Some(spanned) = &parts.spanned {
            let (state, _) = self.hand_through(shard, spanned)?;
            return Ok(Some(self.run(&with_initial_state(spanned, &state))?));
        }
        // What leaves begins here, so that all but what enters can run at once.
        let own = join_calls(parts.free, parts.leaving, inputs, &shard.pieces);
        let own = own.map(|own| self.run(&own)).transpose()?;
        if let (Some(to), Some(own)) = (shard.to, &own) {
            self.send(to, &last_state(&own.outputs.final_state))?;
        }
        let entered = match (shard.from, &parts.entering) {
            (Some(from), Some(entering)) => {
                let state = self.receive(from, entering)?;
                Some(self.run(&with_initial_state(entering, &state))?)
            }
            _ => None,
        };
        joined(&[entered, own])
    }

    /// The same with all gradients.
    ///
    /// # Errors
    /// As [`Rank::forward`], and [`Error::Input`] where the gradient of the output is missing.
    pub fn backward(&self, shard: &Shard) -> Result<Option<Results>> {
        let Some(inputs) = &shard.inputs else { return Ok(None) };
        if inputs.d_o.is_none() {
            return Err(Error::input("the backward needs 'do', the gradient of the output, shape [B, T, HV, V]"));
        }
        let parts = Parts::of(shard, inputs);
        if let Some(spanned) = &parts.spanned {
            return Ok(Some(self.backward_through(shard, spanned)?));
        }
        if let (Some(to), Some(leaving)) = (shard.to, &parts.leaving) {
            let found = self.compute(Work::Local, || self.kernel.forward(leaving))?;
            self.send(to, &found.outputs.final_state)?;
        }
        let entered = match (shard.from, &parts.entering) {
            (Some(from), Some(entering)) => {
                let state = self.receive(from, entering)?;
                let found = self.run_backward(&with_initial_state(entering, &state))?;
                self.send(from, gradient_of_initial_state(&found)?)?;
                Some(found)
            }
            _ => None,
        };
        let free = parts.free.as_ref().map(|free| self.run_backward(free)).transpose()?;
        let left = match (shard.to, &parts.leaving) {
            (Some(to), Some(leaving)) => {
                let gradient = self.receive(to, leaving)?;
                Some(self.run_backward(&with_final_gradient(leaving, &gradient))?)
            }
            _ => None,
        };
        joined(&[entered, free, left])
    }

    /// A part that one sequence fills, forward: hands on `M S + S_loc` as soon as `S` is there. Gives `S` and `M`.
    fn hand_through(&self, shard: &Shard, spanned: &Inputs) -> Result<(Tensor, Tensor)> {
        let (from, to) = both_sides(shard)?;
        let transition = self.compute(Work::Transition, || transition(self.kernel, spanned))?;
        let local = self.compute(Work::Local, || self.kernel.forward(&without_states(spanned)))?;
        let state = self.receive(from, spanned)?;
        let next =
            self.compute(Work::Compose, || Ok(compose(&transition, &state, &local.outputs.final_state, Way::Forward)))?;
        self.send(to, &next)?;
        Ok((state, transition))
    }

    /// The same with gradients: hands `M^T dS + D_loc` back as soon as `dS` is there.
    fn backward_through(&self, shard: &Shard, spanned: &Inputs) -> Result<Results> {
        let (from, to) = both_sides(shard)?;
        let (state, transition) = self.hand_through(shard, spanned)?;
        let local = self.compute(Work::Local, || self.kernel.backward(&without_states(spanned)))?;
        let gradient = self.receive(to, spanned)?;
        let before = self.compute(Work::Compose, || {
            Ok(compose(&transition, &gradient, gradient_of_initial_state(&local)?, Way::Backward))
        })?;
        self.send(from, &before)?;
        self.run_backward(&with_final_gradient(&with_initial_state(spanned, &state), &gradient))
    }

    fn run(&self, inputs: &Inputs) -> Result<Results> {
        self.compute(Work::Run, || self.kernel.forward(inputs))
    }

    fn run_backward(&self, inputs: &Inputs) -> Result<Results> {
        self.compute(Work::Run, || self.kernel.backward(inputs))
    }

    fn compute<T>(&self, work: Work, body: impl FnOnce() -> Result<T>) -> Result<T> {
        let _turn = self.exchange.turn();
        self.say(&format!("computes ({})", format!("{work:?}").to_lowercase()));
        let begin = Instant::now();
        let value = body()?;
        self.note(Step::Compute { work, ms: milliseconds(begin) });
        Ok(value)
    }

    fn send(&self, to: usize, state: &Tensor) -> Result<()> {
        self.say(&format!("waits for rank {to} to take a state"));
        let bytes = to_bytes(state, self.kernel.input_format());
        let begin = Instant::now();
        self.exchange.send(to, &bytes)?;
        self.note(Step::Send { to, bytes: bytes.len(), ms: milliseconds(begin) });
        Ok(())
    }

    /// The state of the one sequence of `call`, from another rank.
    fn receive(&self, from: usize, call: &Inputs) -> Result<Tensor> {
        self.say(&format!("waits for a state from rank {from}"));
        let dims = call.shape.state_dims(1);
        let bytes = dims.iter().product::<usize>() * width(self.kernel.input_format());
        let begin = Instant::now();
        let received = self.exchange.receive(from, bytes)?;
        self.note(Step::Receive { from, bytes, ms: milliseconds(begin) });
        Tensor::new(&dims, from_bytes(&received, self.kernel.input_format()))
    }

    fn say(&self, words: &str) {
        if let Some(report) = self.report {
            report(words);
        }
    }

    fn note(&self, step: Step) {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).push(step);
    }
}

/// The calls that a part falls into, by what they wait for.
struct Parts {
    /// The first piece, where it began at another rank and ends here.
    entering: Option<Inputs>,
    /// Sequences that are here as a whole.
    free: Option<Inputs>,
    /// The last piece, where it begins here and goes on at another rank.
    leaving: Option<Inputs>,
    /// The only piece, where it does neither.
    spanned: Option<Inputs>,
}

impl Parts {
    fn of(shard: &Shard, inputs: &Inputs) -> Self {
        if shard.is_spanned() {
            return Self { entering: None, free: None, leaving: None, spanned: Some(inputs.clone()) };
        }
        let pieces = local_pieces(&shard.pieces);
        let first = usize::from(shard.from.is_some());
        let last = pieces.len() - usize::from(shard.to.is_some());
        let call = |pieces: &[Piece]| (!pieces.is_empty()).then(|| select(inputs, pieces));
        Self {
            entering: call(&pieces[..first]),
            free: call(&pieces[first..last]),
            leaving: call(&pieces[last..]),
            spanned: None,
        }
    }
}

/// The pieces of a rank, counted in its own sequences and tokens.
fn local_pieces(pieces: &[Piece]) -> Vec<Piece> {
    let start = pieces.first().map_or(0, |piece| piece.tokens.start);
    let local = |(sequence, piece): (usize, &Piece)| Piece {
        sequence,
        tokens: piece.tokens.start - start..piece.tokens.end - start,
        ..piece.clone()
    };
    pieces.iter().enumerate().map(local).collect()
}

/// What is free and what leaves, as one call.
fn join_calls(free: Option<Inputs>, leaving: Option<Inputs>, inputs: &Inputs, pieces: &[Piece]) -> Option<Inputs> {
    match (free, leaving) {
        (Some(_), Some(_)) => {
            let local = local_pieces(pieces);
            let first = local.iter().position(|piece| piece.begins).unwrap_or_default();
            Some(select(inputs, &local[first..]))
        }
        (free, leaving) => free.or(leaving),
    }
}

fn joined(parts: &[Option<Results>]) -> Result<Option<Results>> {
    join(&parts.iter().flatten().collect::<Vec<_>>()).map(Some)
}

fn both_sides(shard: &Shard) -> Result<(usize, usize)> {
    shard.from.zip(shard.to).ok_or_else(|| Error::input("a part with a neighbour on both sides was expected"))
}

fn gradient_of_initial_state(results: &Results) -> Result<&Tensor> {
    results
        .grads
        .as_ref()
        .map(|grads| &grads.dh0)
        .ok_or_else(|| Error::input("the kernel's backward gave no gradients"))
}

/// The last of the states.
fn last_state(states: &Tensor) -> Tensor {
    let size: usize = states.dims[1..].iter().product();
    let dims = [&[1], &states.dims[1..]].concat();
    Tensor { dims, data: states.data[states.data.len() - size..].to_vec() }
}

fn with_initial_state(call: &Inputs, state: &Tensor) -> Inputs {
    Inputs { initial_state: Some(state.clone()), ..call.clone() }
}

fn with_final_gradient(call: &Inputs, gradient: &Tensor) -> Inputs {
    Inputs { d_final_state: Some(gradient.clone()), ..call.clone() }
}

/// From a zero state and with a zero gradient of the final one.
fn without_states(call: &Inputs) -> Inputs {
    Inputs { initial_state: None, d_final_state: None, ..call.clone() }
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}
