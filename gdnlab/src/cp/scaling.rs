//! What a call on several ranks takes, beside one on a single rank.

use super::VIRTUAL_TIMEOUT;
use super::chain::width;
use super::cut::{Cut, Part};
use super::device::ChunkKernel;
use super::exchange::{Exchange, Virtual, virtual_ranks};
use super::experiment::Trial;
use super::measure::{RankTimes, collect, floor, link, time};
use super::resident::{Resident, link_of_gpus};
use super::setting::{Scaling, Setting};
use super::trace::{Link, Step, timeline};
use crate::bench::Samples;
use crate::problem::Inputs;
use crate::record::{CpFound, CpScaling, Environment, Measurement, Pass, Record};
use crate::{Error, Result};
use std::sync::Mutex;
use std::time::Instant;

/// Samples of what GPUs time themselves, at the least: they take milliseconds.
const GPU_SAMPLES: usize = 20;
/// How far states at the end of a chain may be from those of a single run, relative RMS, for their time to count. Rounding
/// takes them less far in every mode, and where a state was lost or mistaken they are off by about 1.
const SAME: f64 = 0.05;

/// What is timed.
struct Timed<'a> {
    setting: &'a Setting,
    inputs: &'a Inputs,
    cut: &'a Cut,
    part: &'a Part,
    repeats: usize,
}

/// What was measured at this rank, and at rank 0 alone the time of a single run.
struct Measured {
    times: RankTimes,
    link: Option<Link>,
    single_ms: f64,
}

impl Trial<'_> {
    /// Times the call on all ranks `repeats` times. A record at rank 0, none elsewhere.
    ///
    /// Virtual ranks compute one after the other, so their time together is that of their steps as they would follow one
    /// another on machines of their own ([`timeline`]); that of other ranks is measured. Ranks with a GPU and a chunk kernel
    /// keep their tensors there, and its clock tells the time, of 20 runs at least.
    ///
    /// # Errors
    /// What the kernel and the exchange report; [`Error::Gpu`] where the states at the ends are not those of a single run.
    pub fn scaling(&self, exchange: &dyn Exchange, scaling: Scaling, repeats: usize) -> Result<Option<Record>> {
        let setting = scaling.setting(self.setting, exchange.ranks());
        let inputs = self.inputs(&setting)?;
        let cut = self.cuts.cut(inputs.shape.tokens, exchange.ranks())?;
        let part = Part::of(&inputs, &cut, exchange.rank())?;
        let side_by_side = !exchange.shares_machine();
        let on_gpus = if side_by_side { ChunkKernel::named(self.kernel.name()) } else { None };
        let timed = Timed { setting: &setting, inputs: &inputs, cut: &cut, part: &part, repeats };
        let (clock, measured) = match (&on_gpus, self.clock) {
            (Some(kernel), _) => ("gpu", self.on_gpus(exchange, kernel, &timed)?),
            (None, _) if side_by_side => ("wall", self.through_host(exchange, &timed)?),
            (None, Some(_)) => ("device", self.through_host(exchange, &timed)?),
            (None, None) => ("host", self.through_host(exchange, &timed)?),
        };
        self.say("waits for the times of all ranks");
        let Measured { times, link, single_ms } = measured;
        let Some(ranks) = collect(exchange, times)? else { return Ok(None) };
        let found = scaling_of(&ranks, link, side_by_side, &Known { scaling, single_ms, clock })?;
        let pass = if setting.backward { Pass::Bwd } else { Pass::Fwd };
        let environment = Environment::detect().of_kernel(self.kernel);
        let workload = setting.workload(self.kernel).pass(pass);
        let cp = self.cp(exchange, &inputs, &cut, CpFound::Scaling(found));
        Ok(Some(Record::new(&environment, &workload, Measurement::Cp(cp))))
    }

    /// [`Trial::scaling`] on each number of virtual ranks.
    ///
    /// # Errors
    /// As there.
    pub fn virtual_scaling(&self, scaling: Scaling, ranks: &[usize], repeats: usize) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        for &count in ranks {
            let all = virtual_ranks(count, VIRTUAL_TIMEOUT, |exchange| self.scaling(exchange, scaling, repeats))?;
            records.extend(all.into_iter().flatten());
        }
        Ok(records)
    }

    /// By [`Rank`](super::Rank): a call begins with its inputs on the host, and ends with its results there.
    fn through_host(&self, exchange: &dyn Exchange, timed: &Timed<'_>) -> Result<Measured> {
        let Timed { setting, inputs, part, repeats, .. } = *timed;
        let rank = self.rank(exchange);
        self.say("waits for all ranks to measure the link");
        let state: usize = inputs.shape.state_dims(1).iter().product();
        let link = link(exchange, state * width(self.kernel.input_format()))?;
        // The GPU's clock has its own samples, and wants no warm machine.
        let (warm_up, repeats) = if self.clock.is_some() { (0, 1) } else { (1, repeats) };
        let times = time(exchange, &rank, part, setting.backward, warm_up..warm_up + repeats)?;
        let single_ms = if exchange.rank() == 0 { self.single_ms(exchange, setting, inputs, repeats)? } else { 0.0 };
        Ok(Measured { times, link, single_ms })
    }

    /// By [`Resident`]: tensors stay on the GPUs.
    fn on_gpus(&self, exchange: &dyn Exchange, kernel: &ChunkKernel, timed: &Timed<'_>) -> Result<Measured> {
        let Timed { setting, inputs, cut, part, repeats } = *timed;
        let samples = repeats.max(GPU_SAMPLES);
        self.say("computes (its tensors are taken to the GPU)");
        let mut resident = Resident::new(kernel, part, &inputs.shape, setting.backward)?;
        self.say("waits for all ranks to measure the link");
        let link = link_of_gpus(exchange, resident.state_bytes())?;
        self.say("waits for all ranks to be timed together");
        let times = resident.time(exchange, samples)?;
        let end = last_state(exchange, cut, &resident)?;
        let Some(last_state) = end else { return Ok(Measured { times, link, single_ms: 0.0 }) };
        self.say("computes (the single run)");
        let turns = Mutex::new(());
        let alone = Virtual::ranks(1, VIRTUAL_TIMEOUT, &turns).swap_remove(0);
        let whole = Part::of(inputs, &Cut::even(inputs.shape.tokens, 1)?, 0)?;
        let mut single = Resident::new(kernel, &whole, &inputs.shape, setting.backward)?;
        let single_ms = Samples::new(single.time(&alone, samples)?.total_ms)?.median();
        expect_same("final state of the last sequence", &last_state, &single.last_state()?)?;
        if setting.backward && !cut.tokens(0).is_empty() {
            let gradient = resident.first_gradient()?;
            expect_same("gradient of the first initial state", &gradient, &single.first_gradient()?)?;
        }
        Ok(Measured { times, link, single_ms })
    }

    /// Median time of the call without ranks.
    fn single_ms(&self, exchange: &dyn Exchange, setting: &Setting, inputs: &Inputs, repeats: usize) -> Result<f64> {
        let _turn = exchange.turn();
        self.say("computes (the single run)");
        if let Some(clock) = self.clock.filter(|_| exchange.shares_machine()) {
            return clock.run_ms(inputs, setting.backward);
        }
        let mut times = Vec::with_capacity(repeats);
        for repeat in 0..=repeats {
            let begin = Instant::now();
            setting.run(self.kernel, inputs)?;
            if repeat > 0 {
                times.push(begin.elapsed().as_secs_f64() * 1e3);
            }
        }
        Ok(Samples::new(times)?.median())
    }
}

/// The final state of the last sequence, at rank 0; none elsewhere.
fn last_state(exchange: &dyn Exchange, cut: &Cut, resident: &Resident) -> Result<Option<Vec<f32>>> {
    let last = (0..cut.ranks()).rev().find(|rank| !cut.tokens(*rank).is_empty()).unwrap_or(0);
    let bytes = resident.state_bytes();
    match exchange.rank() {
        0 if last == 0 => Ok(Some(resident.last_state()?)),
        0 => {
            let state = exchange.receive(last, bytes)?;
            Ok(Some(state.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()))
        }
        rank if rank == last => {
            let state: Vec<u8> = resident.last_state()?.iter().flat_map(|x| x.to_le_bytes()).collect();
            exchange.send(0, &state)?;
            Ok(None)
        }
        _ => Ok(None),
    }
}

/// Refuses times of ranks whose states are not those of a single run.
fn expect_same(what: &str, ranks: &[f32], single: &[f32]) -> Result<()> {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let apart: f64 = ranks.iter().zip(single).map(|(x, y)| square(x - y)).sum();
    let all: f64 = single.iter().map(|y| square(*y)).sum();
    let error = (apart / all).sqrt();
    if ranks.len() == single.len() && error < SAME {
        return Ok(());
    }
    Err(Error::gpu(format!(
        "the {what} on several ranks is {error:.1e} from that of a single run (relative RMS, expected below {SAME}): \
         nothing is recorded; see what `cargo lab cp` without --scaling finds"
    )))
}

/// What is known of a measurement besides the times of its ranks.
struct Known {
    scaling: Scaling,
    single_ms: f64,
    clock: &'static str,
}

/// What the times of all ranks say together.
fn scaling_of(ranks: &[RankTimes], link: Option<Link>, side_by_side: bool, known: &Known) -> Result<CpScaling> {
    let of_link = link.unwrap_or(Link { latency_ms: 0.0, gb_s: f64::INFINITY });
    let repeats = ranks.iter().map(|rank| rank.steps.len()).min().unwrap_or_default();
    let steps = |repeat: usize| ranks.iter().map(|rank| rank.steps[repeat].clone()).collect::<Vec<Vec<Step>>>();
    let lines: Vec<_> = (0..repeats).map(|repeat| timeline(&steps(repeat), &of_link)).collect();
    let slowest = |of: &dyn Fn(&RankTimes) -> f64| ranks.iter().map(of).fold(0.0, f64::max);
    let samples: Vec<f64> = match side_by_side {
        true => (0..repeats).map(|repeat| slowest(&|rank| rank.total_ms[repeat])).collect(),
        false => lines.iter().map(|line| line.total_ms).collect(),
    };
    let rounds = ranks.iter().map(|rank| rank.messages_ms.len()).min().unwrap_or_default();
    let messages: Vec<f64> = (0..rounds).map(|round| slowest(&|rank| rank.messages_ms[round])).collect();
    let compute: Vec<f64> = lines.iter().map(|line| line.compute_ms).collect();
    let samples = Samples::new(samples)?;
    let floor = floor(&steps(0), &of_link);
    Ok(CpScaling {
        scaling: known.scaling.name().to_owned(),
        clock: known.clock.to_owned(),
        latency_ms: samples.median(),
        samples_ms: samples.ms().to_vec(),
        single_ms: known.single_ms,
        compute_ms: Samples::new(compute)?.median(),
        communication_ms: if floor.messages == 0 { 0.0 } else { Samples::new(messages)?.median() },
        floor_ms: floor.total_ms,
        bytes: floor.bytes,
        messages: floor.messages,
        link_gb_s: link.map(|link| link.gb_s),
        link_latency_ms: link.map(|link| link.latency_ms),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_other_states_than_the_single_run_has_are_refused() {
        let single = [1.0f32, -2.0, 3.0];
        assert!(expect_same("state", &single, &single).is_ok());
        assert!(expect_same("state", &single.map(|x| x * 1.001), &single).is_ok());
        let refused = |ranks: &[f32]| expect_same("state", ranks, &single).unwrap_err().to_string();
        assert!(refused(&[0.0; 3]).contains("the state on several ranks is 1.0e0 from"));
        assert!(refused(&[1.0, f32::NAN, 3.0]).contains("nothing is recorded"));
        assert!(refused(&single[..2]).contains("nothing is recorded"));
    }
}
