//! Day 7's experiment: is a call on several ranks the one on a single rank, and what does it take?

use super::VIRTUAL_TIMEOUT;
use super::chain::width;
use super::cut::{Cut, Part, gather};
use super::exchange::{Exchange, virtual_ranks};
use super::measure::{RankTimes, collect, collect_results, floor, link, time};
use super::rank::{Clock, Rank};
use super::setting::{Cuts, Scaling, Setting};
use super::trace::{Link, Step, timeline};
use crate::Result;
use crate::bench::Samples;
use crate::compare::{check_truth, compare};
use crate::cuda::Recurrent;
use crate::kernel::Kernel;
use crate::problem::Inputs;
use crate::record::{Cp, CpExactness, CpFound, CpScaling, Environment, Measurement, Pass, Record};
use crate::reference::Reference;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Relative RMS error against float64 within which a call on several ranks has to stay.
pub const LIMIT: f64 = 4e-3;

/// What all ranks take to an experiment; those of one process share it.
pub struct Trial<'a> {
    /// The call.
    setting: &'a Setting,
    /// Where it is cut.
    cuts: &'a Cuts,
    /// The implementation.
    kernel: &'a dyn Kernel,
    /// What tells the time of its runs; the wall without it.
    clock: Option<&'a dyn Clock>,
    /// Told in words what a rank begins.
    report: Option<&'a (dyn Fn(&str) + Sync)>,
    inputs: Mutex<Option<(Setting, Arc<Inputs>)>>,
}

impl<'a> Trial<'a> {
    /// `setting`, cut by `cuts`, under `kernel`.
    pub fn new(setting: &'a Setting, cuts: &'a Cuts, kernel: &'a dyn Kernel) -> Self {
        Self { setting, cuts, kernel, clock: None, report: None, inputs: Mutex::default() }
    }

    /// The same with kernels timed by `clock`, where there is one, rather than by the wall.
    #[must_use]
    pub fn timed_by(self, clock: Option<&'a dyn Clock>) -> Self {
        Self { clock, ..self }
    }

    /// The same, telling `report` what a rank begins.
    #[must_use]
    pub fn reporting(self, report: Option<&'a (dyn Fn(&str) + Sync)>) -> Self {
        Self { report, ..self }
    }

    /// The inputs of `setting`, made by the first rank of this process that asks.
    fn inputs(&self, setting: &Setting) -> Result<Arc<Inputs>> {
        let mut made = self.inputs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, inputs)) = made.as_ref().filter(|(of, _)| of == setting) {
            return Ok(inputs.clone());
        }
        let inputs = Arc::new(setting.inputs(self.kernel.input_format())?);
        *made = Some((setting.clone(), inputs.clone()));
        Ok(inputs)
    }

    fn rank<'b>(&'b self, exchange: &'b dyn Exchange) -> Rank<'b> {
        let rank = Rank::new(self.kernel, exchange);
        let rank = match self.report {
            Some(report) => rank.reporting(report),
            None => rank,
        };
        match self.clock {
            Some(clock) => rank.timed_by(clock),
            None => rank,
        }
    }

    fn cp(&self, exchange: &dyn Exchange, inputs: &Inputs, cut: &Cut, found: CpFound) -> Cp {
        Cp {
            ranks: exchange.ranks(),
            transport: exchange.transport().to_owned(),
            cut: cut.to_string(),
            crossings: cut.crossings(inputs),
            found,
        }
    }

    /// Runs the call on all ranks, and at rank 0 compares every tensor with a single run, bit by bit, and both with the
    /// float64 recurrence. One record for each tensor at rank 0, none elsewhere.
    ///
    /// # Errors
    /// What the kernel and the exchange report; [`crate::Error::Input`] where the truth is not finite.
    pub fn exactness(&self, exchange: &dyn Exchange) -> Result<Vec<Record>> {
        let inputs = self.inputs(self.setting)?;
        let cut = self.cuts.cut(inputs.shape.tokens, exchange.ranks())?;
        let part = Part::of(&inputs, &cut, exchange.rank())?;
        let rank = self.rank(exchange);
        let own = if self.setting.backward { rank.backward(&part)? } else { rank.forward(&part)? };
        self.say("waits for the results of all ranks");
        let Some(parts) = collect_results(exchange, own, &inputs, &cut)? else { return Ok(Vec::new()) };
        let parallel = gather(&inputs, &cut, &parts)?;
        let _turn = exchange.turn();
        self.say("computes (the single run and the truth)");
        let single = self.setting.run(self.kernel, &inputs)?;
        let truth: &dyn Kernel = if self.kernel.on_gpu() { &Recurrent::fp64() } else { &Reference };
        let truth = self.setting.run(truth, &inputs)?;
        check_truth(&truth)?;
        let environment = Environment::detect().of_kernel(self.kernel);
        let named = parallel.named().into_iter().zip(single.named()).zip(truth.named());
        named
            .map(|(((name, x), (_, y)), (_, truth))| {
                let differing = x.data.iter().zip(&y.data).filter(|(x, y)| x.to_bits() != y.to_bits()).count();
                let found = CpFound::Exactness(CpExactness {
                    tensor: name.to_owned(),
                    elements: x.data.len(),
                    differing,
                    apart: compare(name, x, y)?.max_rel,
                    rel_rms: compare(name, x, truth)?.rel_rms,
                    single_rel_rms: compare(name, y, truth)?.rel_rms,
                });
                let workload = self.setting.workload(self.kernel).pass(Pass::of_tensor(name));
                Ok(Record::new(&environment, &workload, Measurement::Cp(self.cp(exchange, &inputs, &cut, found))))
            })
            .collect()
    }

    /// Times the call on all ranks `repeats` times. A record at rank 0, none elsewhere.
    ///
    /// Virtual ranks compute one after the other, so their time together is that of their steps as they would follow one
    /// another on machines of their own ([`timeline`]); that of other ranks is measured.
    ///
    /// # Errors
    /// What the kernel and the exchange report.
    pub fn scaling(&self, exchange: &dyn Exchange, scaling: Scaling, repeats: usize) -> Result<Option<Record>> {
        let setting = scaling.setting(self.setting, exchange.ranks());
        let inputs = self.inputs(&setting)?;
        let cut = self.cuts.cut(inputs.shape.tokens, exchange.ranks())?;
        let part = Part::of(&inputs, &cut, exchange.rank())?;
        let rank = self.rank(exchange);
        self.say("waits for all ranks to measure the link");
        let state: usize = inputs.shape.state_dims(1).iter().product();
        let link = link(exchange, state * width(self.kernel.input_format()))?;
        // The GPU's clock has its own samples, and wants no warm machine.
        let (warm_up, repeats) = if self.clock.is_some() { (0, 1) } else { (1, repeats) };
        let times = time(exchange, &rank, &part, setting.backward, warm_up..warm_up + repeats)?;
        self.say("waits for the times of all ranks");
        let single_ms = if exchange.rank() == 0 { self.single_ms(exchange, &setting, &inputs, repeats)? } else { 0.0 };
        let Some(ranks) = collect(exchange, times)? else { return Ok(None) };
        let side_by_side = !exchange.shares_machine();
        let found = scaling_of(
            &ranks,
            link,
            side_by_side,
            &Known { scaling, single_ms, clock: self.clock_name(side_by_side) },
        )?;
        let pass = if setting.backward { Pass::Bwd } else { Pass::Fwd };
        let environment = Environment::detect().of_kernel(self.kernel);
        let workload = setting.workload(self.kernel).pass(pass);
        let cp = self.cp(exchange, &inputs, &cut, CpFound::Scaling(found));
        Ok(Some(Record::new(&environment, &workload, Measurement::Cp(cp))))
    }

    /// [`Trial::exactness`] on `ranks` virtual ranks.
    ///
    /// # Errors
    /// As there.
    pub fn virtual_exactness(&self, ranks: usize) -> Result<Vec<Record>> {
        let all = virtual_ranks(ranks, VIRTUAL_TIMEOUT, |exchange| self.exactness(exchange))?;
        Ok(all.into_iter().flatten().collect())
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

    fn say(&self, words: &str) {
        if let Some(report) = self.report {
            report(words);
        }
    }

    fn clock_name(&self, side_by_side: bool) -> &'static str {
        match (side_by_side, self.clock) {
            (true, _) => "wall",
            (false, Some(_)) => "device",
            (false, None) => "host",
        }
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
        true => (0..repeats).map(|repeat| slowest(&|rank| rank.wall_ms[repeat])).collect(),
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

/// Whether records of exactness say what has to hold: every bit is that of a single run where no sequence crosses, and the
/// error stays within [`LIMIT`] where one does. In words where they do not.
pub fn complaints(records: &[Record]) -> Vec<String> {
    let of = |record: &Record| {
        let Measurement::Cp(cp) = &record.measurement else { return None };
        let CpFound::Exactness(found) = &cp.found else { return None };
        if cp.crossings == 0 && found.differing > 0 {
            return Some(format!(
                "{}: {} of {} elements have other bits than a single run, and no sequence crosses a border",
                found.tensor, found.differing, found.elements
            ));
        }
        let beyond = found.rel_rms >= LIMIT || found.rel_rms.is_nan();
        (cp.crossings > 0 && beyond)
            .then(|| format!("{}: relative RMS error {:.2e}, expected below {LIMIT:.1e}", found.tensor, found.rel_rms))
    };
    records.iter().filter_map(of).collect()
}
