//! One rank's part of a call.

use super::calls::Calls;
use super::chain::{Way, compose, from_bytes, to_bytes, transition_call, width};
use super::cut::Part;
use super::exchange::Exchange;
use super::slice::join;
use super::trace::{Step, Work};
use crate::kernel::Kernel;
use crate::problem::{Inputs, Results, Shape, Tensor};
use crate::{Error, Result};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// What tells how long runs of a kernel take, other than a look at the wall: the GPU's clock, for kernels whose calls begin
/// and end with copies that a model would not make.
pub trait Clock: Send + Sync {
    /// Time of a call, forward, or with `backward` all of it, in milliseconds.
    ///
    /// # Errors
    /// What the device reports.
    fn run_ms(&self, call: &Inputs, backward: bool) -> Result<f64>;

    /// Time of a transition times a state of these heads, in milliseconds.
    ///
    /// # Errors
    /// What the device reports.
    fn compose_ms(&self, shape: &Shape) -> Result<f64>;
}

/// A rank: a kernel, and the way to the other ranks.
pub struct Rank<'a> {
    kernel: &'a dyn Kernel,
    exchange: &'a dyn Exchange,
    steps: Mutex<Vec<Step>>,
    report: Option<&'a (dyn Fn(&str) + Sync)>,
    clock: Option<&'a dyn Clock>,
}

impl<'a> Rank<'a> {
    /// A rank that runs `kernel`.
    pub fn new(kernel: &'a dyn Kernel, exchange: &'a dyn Exchange) -> Self {
        Self { kernel, exchange, steps: Mutex::default(), report: None, clock: None }
    }

    /// The same, telling `report` in words what it begins: to compute, or to wait for another rank.
    #[must_use]
    pub fn reporting(self, report: &'a (dyn Fn(&str) + Sync)) -> Self {
        Self { report: Some(report), ..self }
    }

    /// The same with steps that take as long as `clock` says.
    #[must_use]
    pub fn timed_by(self, clock: &'a dyn Clock) -> Self {
        Self { clock: Some(clock), ..self }
    }

    /// What it has done since this was asked last.
    pub fn take_steps(&self) -> Vec<Step> {
        std::mem::take(&mut *self.steps.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Output and final states of its part; none for an empty rank.
    ///
    /// # Errors
    /// What the kernel reports, and [`Error::Rank`] where another rank fails.
    pub fn forward(&self, part: &Part) -> Result<Option<Results>> {
        let Some(inputs) = &part.inputs else { return Ok(None) };
        let mut calls = Calls::of(part, inputs);
        if let Some(spanned) = &calls.spanned {
            let (state, _) = self.hand_through(part, spanned)?;
            return Ok(Some(self.run(&with_initial_state(spanned, &state))?));
        }
        let own = calls.take_own(part, inputs).map(|own| self.run(&own)).transpose()?;
        if let (Some(to), Some(own)) = (part.to, &own) {
            self.send(to, &last_state(&own.outputs.final_state))?;
        }
        let entered = match (part.from, &calls.entering) {
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
    pub fn backward(&self, part: &Part) -> Result<Option<Results>> {
        let Some(inputs) = &part.inputs else { return Ok(None) };
        if inputs.d_o.is_none() {
            return Err(Error::input("the backward needs 'do', the gradient of the output, shape [B, T, HV, V]"));
        }
        let calls = Calls::of(part, inputs);
        if let Some(spanned) = &calls.spanned {
            return Ok(Some(self.backward_through(part, spanned)?));
        }
        if let (Some(to), Some(leaving)) = (part.to, &calls.leaving) {
            let found = self.call(Work::Local, leaving, false)?;
            self.send(to, &found.outputs.final_state)?;
        }
        let entered = match (part.from, &calls.entering) {
            (Some(from), Some(entering)) => {
                let state = self.receive(from, entering)?;
                let found = self.run_backward(&with_initial_state(entering, &state))?;
                self.send(from, gradient_of_initial_state(&found)?)?;
                Some(found)
            }
            _ => None,
        };
        let free = calls.free.as_ref().map(|free| self.run_backward(free)).transpose()?;
        let left = match (part.to, &calls.leaving) {
            (Some(to), Some(leaving)) => {
                let gradient = self.receive(to, leaving)?;
                Some(self.run_backward(&with_final_gradient(leaving, &gradient))?)
            }
            _ => None,
        };
        joined(&[entered, free, left])
    }

    /// A part that one sequence fills, forward: hands on `M S + S_loc` as soon as `S` is there. Gives `S` and `M`.
    fn hand_through(&self, part: &Part, spanned: &Inputs) -> Result<(Tensor, Tensor)> {
        let (from, to) = both_sides(part)?;
        let transition = self.call(Work::Transition, &transition_call(spanned), false)?.outputs.final_state;
        let local = self.call(Work::Local, &without_states(spanned), false)?;
        let state = self.receive(from, spanned)?;
        let next = self.compose(&transition, &state, &local.outputs.final_state, Way::Forward)?;
        self.send(to, &next)?;
        Ok((state, transition))
    }

    /// The same with gradients: hands `M^T dS + D_loc` back as soon as `dS` is there.
    fn backward_through(&self, part: &Part, spanned: &Inputs) -> Result<Results> {
        let (from, to) = both_sides(part)?;
        let (state, transition) = self.hand_through(part, spanned)?;
        let local = self.call(Work::Local, &without_states(spanned), true)?;
        let gradient = self.receive(to, spanned)?;
        let before = self.compose(&transition, &gradient, gradient_of_initial_state(&local)?, Way::Backward)?;
        self.send(from, &before)?;
        self.run_backward(&with_final_gradient(&with_initial_state(spanned, &state), &gradient))
    }

    fn run(&self, inputs: &Inputs) -> Result<Results> {
        self.call(Work::Run, inputs, false)
    }

    fn run_backward(&self, inputs: &Inputs) -> Result<Results> {
        self.call(Work::Run, inputs, true)
    }

    fn call(&self, work: Work, inputs: &Inputs, backward: bool) -> Result<Results> {
        let body = || if backward { self.kernel.backward(inputs) } else { self.kernel.forward(inputs) };
        self.compute(work, body, |clock| clock.run_ms(inputs, backward))
    }

    fn compose(&self, transition: &Tensor, state: &Tensor, local: &Tensor, way: Way) -> Result<Tensor> {
        let [value_heads, key_dim, value_dim] = [1, 2, 3].map(|axis| state.dims[axis]);
        let shape = Shape::new(0, value_heads, key_dim, value_dim);
        self.compute(Work::Compose, || Ok(compose(transition, state, local, way)), |clock| clock.compose_ms(&shape))
    }

    fn compute<T>(
        &self,
        work: Work,
        body: impl FnOnce() -> Result<T>,
        ms: impl FnOnce(&dyn Clock) -> Result<f64>,
    ) -> Result<T> {
        let _turn = self.exchange.turn();
        self.say(&format!("computes ({work})"));
        let begin = Instant::now();
        let value = body()?;
        let wall_ms = milliseconds(begin);
        self.note(Step::Compute { work, ms: self.clock.map_or(Ok(wall_ms), ms)? });
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

fn joined(calls: &[Option<Results>]) -> Result<Option<Results>> {
    join(&calls.iter().flatten().collect::<Vec<_>>()).map(Some)
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

/// The ranks before and after a part that one sequence fills.
///
/// # Errors
/// [`Error::Input`] where there are none.
fn both_sides(part: &Part) -> Result<(usize, usize)> {
    part.from.zip(part.to).ok_or_else(|| Error::input("a part with a neighbour on both sides was expected"))
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
