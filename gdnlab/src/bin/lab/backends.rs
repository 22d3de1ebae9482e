//! `cargo lab backends`.

use crate::checkout::Checkout;
use crate::output::{Interrupt, Said, note, open_case, print, recorded};
use crate::peers::Python;
use gdnlab::backends::{Case, Finished, LENGTHS, RecordedResults, report_shape, run};
use gdnlab::inputs::Regime;
use gdnlab::kernel::Kernel;
use gdnlab::memory::require;
use gdnlab::precision::Format;
use gdnlab::problem::{Op, Shape};
use gdnlab::record::{self, Backends, Measurement, Record};
use gdnlab::{Error, Result};
use std::path::PathBuf;
use std::process::ExitCode;

/// Name of the records' file in `data/`.
const SUITE: &str = "backends";

/// Compare implementations with each other, and say which of two is right where they differ.
///
/// Each pair gets the same inputs: q and k of unit norm, v Gaussian, a zero initial state, rounded to one format. The one
/// that is named later is what the other is compared with. The float64 recurrence on those inputs is the judge. An
/// implementation that fails is left out and named at the end.
///
/// IMPLEMENTATION is a kernel of `cargo lab kernels`; a peer, that is fla, flash_qla, flashinfer or MODULE:FUNCTION of your
/// own Python; or with --case a tensor file with results that somebody recorded for it.
///
/// Exit code: 0 when all gave results, 1 when one failed or is not finite, 2 for bad input.
#[derive(clap::Args)]
#[command(after_help = "\
Columns: max_diff, mean_diff, cos_sim and max_ref as reports have them; rel_rms is the difference of the two, A/truth and
B/truth the error of each; differ is the share of elements that differ, A nearer and B nearer the shares of those in which
one is nearer to the truth; the last two are the errors of both where they are furthest apart.

Examples:
  cargo lab backends cpu-chunk-f16-internals cpu-chunk-bf16
  cargo lab backends cuda-chunk-bf16 fla flash_qla --save
  cargo lab backends theirs.safetensors reference --case case.safetensors")]
pub struct Args {
    /// Two or more implementations.
    #[arg(value_name = "IMPLEMENTATION", num_args = 2.., required = true)]
    kernels: Vec<String>,
    /// Operator: gdn or gdn2.
    #[arg(long, default_value_t = Op::Gdn)]
    op: Op,
    /// Lengths in tokens.
    #[arg(long, value_name = "T", num_args = 1.., default_values_t = LENGTHS)]
    tokens: Vec<usize>,
    /// Heads of q and k.
    #[arg(long, value_name = "HK", default_value_t = report_shape(1).qk_heads)]
    qk_heads: usize,
    /// Heads of v.
    #[arg(long, value_name = "HV", default_value_t = report_shape(1).value_heads)]
    heads: usize,
    /// Key and value dimension of a head, as K,V.
    #[arg(long, value_name = "K,V", value_delimiter = ',', num_args = 1, default_value = "128,128")]
    dims: Vec<usize>,
    /// Input regimes, which differ in their gates here.
    #[arg(long, num_args = 1.., default_values_t = [Regime::LongMemory])]
    regime: Vec<Regime>,
    /// Format of the inputs: bf16, f16 or f32.
    #[arg(long, default_value_t = Format::Bf16)]
    format: Format,
    /// Seed of the inputs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Tensor file with one call, instead of seeded inputs.
    #[arg(long, value_name = "CASE")]
    case: Option<PathBuf>,
    #[command(flatten)]
    python: Python,
    /// Print one JSON record per pair and tensor instead of the table.
    #[arg(long)]
    json: bool,
    /// Measure again what is recorded already.
    #[arg(long)]
    again: bool,
    /// Add each case to the records in `data/` as soon as it is measured; a run that was stopped goes on where it was.
    #[arg(long)]
    save: bool,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        let cases = self.cases()?;
        let format = cases.first().map_or(self.format, |case| case.inputs.dtype);
        let kernels: Vec<Box<dyn Kernel>> =
            self.kernels.iter().map(|name| self.implementation(name, format)).collect::<Result<_>>()?;
        let kernels: Vec<&dyn Kernel> = kernels.iter().map(AsRef::as_ref).collect();
        let interrupt = Interrupt::new()?;
        let data = if self.save { Some(Checkout::find()?.root().join("data")) } else { None };
        let known = match &data {
            Some(data) if !self.again => recorded(data)?,
            _ => Vec::new(),
        };
        let mut said = Said::default();
        let keep = |records: &[Record]| match &data {
            Some(data) if !records.is_empty() => record::keep(data, SUITE, records).map(drop),
            _ => Ok(()),
        };
        let finished = run(&cases, &kernels, &known, keep, |step| {
            said.step(step);
            interrupt.control()
        })?;
        print(&if self.json { record::to_json_lines(&finished.records)? } else { table(&finished) })?;
        for failure in &finished.failures {
            note(format_args!("failed: {} on {}: {}", failure.kernel, failure.case, failure.why));
        }
        if finished.known > 0 {
            note(format_args!("{} cases were recorded before, by this very code", finished.known));
        }
        let pairs = || finished.records.iter().filter_map(pair);
        let not_finite = pairs().filter(|(_, pair)| pair.errors.nonfinite > 0).count();
        if not_finite > 0 {
            note(format_args!("failed: in {not_finite} comparisons one of the two has values that are not finite"));
        }
        Ok(if finished.stopped {
            Interrupt::EXIT_CODE.into()
        } else {
            ExitCode::from(u8::from(!finished.failures.is_empty() || not_finite > 0))
        })
    }

    fn cases(&self) -> Result<Vec<Case>> {
        if let Some(path) = &self.case {
            return Ok(vec![Case::recorded(open_case(path)?.inputs)]);
        }
        let [key_dim, value_dim] = *self.dims.as_slice() else {
            return Err(Error::input(format!("--dims has {} numbers: expected K,V such as 128,128", self.dims.len())));
        };
        let mut cases = Vec::new();
        for &tokens in &self.tokens {
            let shape = Shape { qk_heads: self.qk_heads, ..Shape::new(tokens, self.heads, key_dim, value_dim) };
            shape.validate()?;
            // Inputs, truth, and what every implementation gives.
            require(shape.bytes(self.op, 1, false).saturating_mul(self.kernels.len() as u128 + 2))?;
            for &regime in &self.regime {
                cases.push(Case::generate(self.op, &shape, regime, self.format, self.seed)?);
            }
        }
        Ok(cases)
    }

    fn implementation(&self, name: &str, format: Format) -> Result<Box<dyn Kernel>> {
        if !name.ends_with(".safetensors") {
            return self.python.kernel(name);
        }
        if self.case.is_none() {
            return Err(Error::input(format!("{name} holds results of one call: name its inputs with --case")));
        }
        Ok(Box::new(RecordedResults::new(name, format)))
    }
}

fn table(finished: &Finished) -> String {
    let mut text = String::new();
    let mut title = String::new();
    for (record, pair) in finished.records.iter().filter_map(pair) {
        let workload = &record.workload;
        let now = format!(
            "{} = A, {} = B, {} of {}",
            workload.kernel.as_deref().unwrap_or_default(),
            pair.against,
            workload.regime.as_deref().unwrap_or_default(),
            workload.op.as_deref().unwrap_or_default(),
        );
        if now != title {
            text += &format!(
                "{}{now}\n{:>6} {:<11} {:>9} {:>9} {:>10} {:>8} {:>9} {:>9} {:>9} {:>7} {:>8} {:>8} {:>9} {:>9}\n",
                if title.is_empty() { "" } else { "\n" },
                "T",
                "tensor",
                "max_diff",
                "mean_diff",
                "cos_sim",
                "max_ref",
                "rel_rms",
                "A/truth",
                "B/truth",
                "differ",
                "A nearer",
                "B nearer",
                "A worst",
                "B worst"
            );
            title = now;
        }
        text += &row(workload.tokens.unwrap_or_default(), pair);
    }
    text
}

fn pair(record: &Record) -> Option<(&Record, &Backends)> {
    match &record.measurement {
        Measurement::Backends(pair) => Some((record, pair)),
        _ => None,
    }
}

fn row(tokens: usize, pair: &Backends) -> String {
    let errors = &pair.errors;
    if errors.nonfinite > 0 {
        return format!("{tokens:>6} {:<11} {} elements are not finite\n", errors.tensor, errors.nonfinite);
    }
    let word = |value: Option<f64>, digits: fn(f64) -> String| value.map_or_else(|| "-".to_owned(), digits);
    let small = |value| word(value, |x| format!("{x:.2e}"));
    let percent = |value| word(value, |x| format!("{:.1} %", 100.0 * x));
    let off = |value: Option<f64>| small(value.zip(pair.worst_truth).map(|(x, truth)| (x - truth).abs()));
    format!(
        "{tokens:>6} {:<11} {:>9} {:>9} {:>10} {:>8} {:>9} {:>9} {:>9} {:>7} {:>8} {:>8} {:>9} {:>9}\n",
        errors.tensor,
        small(errors.max_abs),
        small(errors.mean_abs),
        word(errors.cosine, |x| format!("{x:.8}")),
        word(pair.max_ref, |x| format!("{x:.4}")),
        small(errors.rel_rms),
        small(pair.truth_rel_rms),
        small(pair.against_truth_rel_rms),
        percent(Some(pair.differing)),
        percent(pair.nearer),
        percent(pair.against_nearer),
        off(pair.worst_value),
        off(pair.worst_against)
    )
}
