//! Day 7's experiment: is a call on several ranks the one on a single rank?

use super::VIRTUAL_TIMEOUT;
use super::cut::{Cut, Part, gather};
use super::exchange::{Exchange, virtual_ranks};
use super::measure::collect_results;
use super::rank::{Clock, Rank};
use super::setting::{Cuts, Setting};
use crate::Result;
use crate::compare::{check_truth, compare, compare_results};
use crate::cuda::Recurrent;
use crate::kernel::Kernel;
use crate::problem::{Inputs, Results};
use crate::record::{Cp, CpExactness, CpFound, Environment, Measurement, Pass, Record};
use crate::reference::Reference;
use std::sync::{Arc, Mutex, PoisonError};

/// Relative RMS error against float64 within which a call on several ranks has to stay.
pub const LIMIT: f64 = 4e-3;

/// What all ranks take to an experiment; those of one process share it.
pub struct Trial<'a> {
    /// The call.
    pub(super) setting: &'a Setting,
    /// Where it is cut.
    pub(super) cuts: &'a Cuts,
    /// The implementation.
    pub(super) kernel: &'a dyn Kernel,
    /// What tells the time of its runs; the wall without it.
    pub(super) clock: Option<&'a dyn Clock>,
    /// Told in words what a rank begins.
    report: Option<&'a (dyn Fn(&str) + Sync)>,
    inputs: Mutex<Option<(Setting, Arc<Inputs>)>>,
    baseline: Mutex<Option<Arc<Baseline>>>,
}

/// What a call on several ranks is compared with.
struct Baseline {
    single: Results,
    /// In float64.
    truth: Results,
    /// Of each tensor of the single run.
    rel_rms: Vec<f64>,
}

impl<'a> Trial<'a> {
    /// `setting`, cut by `cuts`, under `kernel`.
    pub fn new(setting: &'a Setting, cuts: &'a Cuts, kernel: &'a dyn Kernel) -> Self {
        Self { setting, cuts, kernel, clock: None, report: None, inputs: Mutex::default(), baseline: Mutex::default() }
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

    /// The same cut by `cuts`: what was computed to compare with is not computed again.
    #[must_use]
    pub fn cut_by(self, cuts: &'a Cuts) -> Self {
        Self { cuts, ..self }
    }

    /// The inputs of `setting`, made by the first rank of this process that asks.
    pub(super) fn inputs(&self, setting: &Setting) -> Result<Arc<Inputs>> {
        let mut made = self.inputs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, inputs)) = made.as_ref().filter(|(of, _)| of == setting) {
            return Ok(inputs.clone());
        }
        let inputs = Arc::new(setting.inputs(self.kernel.input_format())?);
        *made = Some((setting.clone(), inputs.clone()));
        Ok(inputs)
    }

    pub(super) fn rank<'b>(&'b self, exchange: &'b dyn Exchange) -> Rank<'b> {
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

    pub(super) fn cp(&self, exchange: &dyn Exchange, inputs: &Inputs, cut: &Cut, found: CpFound) -> Cp {
        Cp {
            ranks: exchange.ranks(),
            transport: exchange.transport().to_owned(),
            cut: cut.to_string(),
            crossings: cut.crossings(inputs),
            found,
        }
    }

    /// The single run and the truth, computed once.
    fn baseline(&self, inputs: &Inputs) -> Result<Arc<Baseline>> {
        let mut made = self.baseline.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(baseline) = made.as_ref() {
            return Ok(baseline.clone());
        }
        self.say("computes (the single run and the truth)");
        let single = self.setting.run(self.kernel, inputs)?;
        let truth: &dyn Kernel = if self.kernel.on_gpu() { &Recurrent::fp64() } else { &Reference };
        let truth = self.setting.run(truth, inputs)?;
        check_truth(&truth)?;
        let rel_rms = compare_results(&single, &truth)?.iter().map(|tensor| tensor.rel_rms).collect();
        let baseline = Arc::new(Baseline { single, truth, rel_rms });
        *made = Some(baseline.clone());
        Ok(baseline)
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
        let baseline = self.baseline(&inputs)?;
        let Baseline { single, truth, rel_rms } = baseline.as_ref();
        let environment = Environment::detect().of_kernel(self.kernel);
        let named = parallel.named().into_iter().zip(single.named()).zip(truth.named()).zip(rel_rms);
        named
            .map(|((((name, x), (_, y)), (_, truth)), single_rel_rms)| {
                let differing = x.data.iter().zip(&y.data).filter(|(x, y)| x.to_bits() != y.to_bits()).count();
                let found = CpFound::Exactness(CpExactness {
                    tensor: name.to_owned(),
                    elements: x.data.len(),
                    differing,
                    apart: compare(name, x, y)?.max_rel,
                    rel_rms: compare(name, x, truth)?.rel_rms,
                    single_rel_rms: *single_rel_rms,
                });
                let workload = self.setting.workload(self.kernel).pass(Pass::of_tensor(name));
                Ok(Record::new(&environment, &workload, Measurement::Cp(self.cp(exchange, &inputs, &cut, found))))
            })
            .collect()
    }

    /// [`Trial::exactness`] on `ranks` virtual ranks.
    ///
    /// # Errors
    /// As there.
    pub fn virtual_exactness(&self, ranks: usize) -> Result<Vec<Record>> {
        let all = virtual_ranks(ranks, VIRTUAL_TIMEOUT, |exchange| self.exactness(exchange))?;
        Ok(all.into_iter().flatten().collect())
    }

    pub(super) fn say(&self, words: &str) {
        if let Some(report) = self.report {
            report(words);
        }
    }
}

/// Whether records of exactness say what has to hold: every bit is that of a single run where no sequence crosses, and the
/// error stays within [`LIMIT`] where one does. In words where they do not.
pub fn complaints(records: &[Record]) -> Vec<String> {
    let of = |record: &Record| {
        let (cp, found) = exactness_of(record)?;
        let op = record.workload.op.as_deref().unwrap_or_default();
        if cp.crossings == 0 && found.differing > 0 {
            return Some(format!(
                "{op} {}: {} of {} elements have other bits than a single run, and no sequence crosses a border",
                found.tensor, found.differing, found.elements
            ));
        }
        let beyond = found.rel_rms >= LIMIT || found.rel_rms.is_nan();
        (cp.crossings > 0 && beyond).then(|| {
            format!("{op} {}: relative RMS error {:.2e}, expected below {LIMIT:.1e}", found.tensor, found.rel_rms)
        })
    };
    records.iter().filter_map(of).collect()
}

/// What holds of records of exactness that have no [`complaints`], in words; none where there are no such records.
pub fn verdict(records: &[Record]) -> Option<String> {
    let (crossed, whole): (Vec<_>, Vec<_>) =
        records.iter().filter_map(exactness_of).partition(|(cp, _)| cp.crossings > 0);
    let largest = crossed.iter().map(|(_, found)| found.rel_rms).fold(0.0, f64::max);
    let of_crossed = format!(
        "{} tensors of sequences that cross borders have relative RMS errors of at most {largest:.2e}, expected below {LIMIT:.1e}",
        crossed.len()
    );
    let of_whole = format!("{} tensors have every bit of a single run, as no sequence crosses a border", whole.len());
    let parts = [(whole.is_empty(), of_whole), (crossed.is_empty(), of_crossed)];
    let parts: Vec<String> = parts.into_iter().filter(|(is_empty, _)| !is_empty).map(|(_, words)| words).collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn exactness_of(record: &Record) -> Option<(&Cp, &CpExactness)> {
    let Measurement::Cp(cp) = &record.measurement else { return None };
    let CpFound::Exactness(found) = &cp.found else { return None };
    Some((cp, found))
}
