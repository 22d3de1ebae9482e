//! `cargo lab numerics`.

use crate::checkout::Checkout;
use crate::output::{note, open_case, print};
use crate::sharding::{Done, Sharding};
use crate::size::Size;
use gdnlab::bench::SeqLens;
use gdnlab::chunked::Chunked;
use gdnlab::cuda::Gpu;
use gdnlab::inputs::Regime;
use gdnlab::kernel::{Kernel, kernel};
use gdnlab::memory::require;
use gdnlab::numerics::{self, Calls, DAY1_HEADS, DAY1_SHAPES, Given, Problems, Step, Sweep};
use gdnlab::precision::Policy;
use gdnlab::problem::{Op, Shape};
use gdnlab::record::{Environment, Errors, Measurement, Record, experiment_name, keep, to_json_lines};
use gdnlab::{Error, Result};
use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Measure the errors of kernels against the float64 recurrence: the table of Day 1 for any shapes.
///
/// For each shape and input regime, seeded random inputs are rounded to the kernel's input format, and its output,
/// final state and every gradient are compared with the float64 truth for those same inputs. One table per kernel and
/// regime; its last lines give the largest error of each tensor, also in units of the mode's unit roundoff u.
///
/// With --case the inputs are those of tensor files, such as `cargo lab capture` writes.
///
/// With --save the records of each kernel on each call are kept as soon as they are there, and what the files of this
/// experiment in `data/` hold of this commit and this machine is not measured again, unless the code was changed since the
/// commit.
///
/// Exit code: 0 when every kernel gave results, 1 when one failed, which is named at the end, 2 for bad input.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab numerics                                    the nine shapes of Day 1 in four modes
  cargo lab numerics --shape 1000,128,128 --mode bf16   one shape, one mode
  cargo lab numerics --shape 1066,64,128 --heads 4 --qk-heads 2 --seqlens 65+0+1000+1
  cargo lab numerics --op gdn2 --regime correlated --shape 512,64,64 --json
  cargo lab numerics --batch 32 --heads 6 --shape 1024,64,128 8192,64,128 --kernel cuda-chunk-bf16 --save day05_numerics
  cargo lab numerics --case captured.safetensors --mode bf16 fp32
  cargo lab numerics --shape 1024,64,128 8192,64,128 --save sweep --shard 2/4    a part of a sweep, from where it stopped")]
pub struct Args {
    /// Operator: gdn or gdn2.
    #[arg(long, default_value_t = Op::Gdn)]
    op: Op,
    /// Shapes, each as T,K,V: tokens, key and value dimension of a head. Without it, the nine shapes of Day 1.
    #[arg(long, value_name = "T,K,V", num_args = 1..)]
    shape: Vec<Size>,
    /// Number of sequences of equal length.
    #[arg(long, value_name = "B", default_value_t = 1)]
    batch: usize,
    /// Number of heads.
    #[arg(long, value_name = "H", default_value_t = DAY1_HEADS)]
    heads: usize,
    /// Number of q/k heads, which groups of value heads share; as many as heads without it.
    #[arg(long, value_name = "HK")]
    qk_heads: Option<usize>,
    /// Lengths of sequences that are packed into one row and begin from a state: 65+0+1000, or 40x8 for eight of 40
    /// tokens. Their sum is T of every shape.
    #[arg(long, value_name = "LENGTHS", conflicts_with = "batch")]
    seqlens: Option<SeqLens>,
    /// Tensor files with one call each, instead of seeded inputs.
    #[arg(long, value_name = "CASE", num_args = 1.., conflicts_with_all = ["op", "shape", "batch", "heads", "qk_heads", "seqlens", "regime", "seed"])]
    case: Vec<PathBuf>,
    /// Precision modes of the chunked form: fp64, fp32, fp32-tf32-solve, tf32, bf16, f16-internals. Without it, bf16,
    /// tf32, fp32-tf32-solve and fp32, unless kernels are named.
    #[arg(long, num_args = 1..)]
    mode: Vec<String>,
    /// Chunk size of the chunked form in every mode: 16, 32, 64 or 128. Without it, 64.
    #[arg(long, value_name = "C")]
    chunk: Option<usize>,
    /// Kernels by their names in `cargo lab kernels`.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    kernel: Vec<String>,
    /// Input regimes: gaussian, mild-decay, long-memory, no-decay, fast-decay, correlated, gate-in-kernel, beta-one,
    /// beta-two.
    #[arg(long, num_args = 1.., default_values_t = [Regime::MildDecay])]
    regime: Vec<Regime>,
    /// Seed of the inputs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Error metric in the tables.
    #[arg(long, value_enum, default_value_t = Metric::MaxRel)]
    metric: Metric,
    /// Print one JSON record per tensor, with every metric, instead of the tables.
    #[arg(long)]
    json: bool,
    /// Add the records to those in `data/`, in the file of this experiment.
    #[arg(long, value_name = "EXPERIMENT", value_parser = experiment_name)]
    save: Option<String>,
    #[command(flatten)]
    sharding: Sharding,
    /// Measure again what is recorded already.
    #[arg(long)]
    again: bool,
}

/// Tokens of a chunk where the person did not choose.
const DEFAULT_CHUNK: usize = 64;

#[derive(Clone, Copy, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
enum Metric {
    /// Largest error over the largest true value.
    MaxRel,
    /// RMS error over the RMS of the true values.
    RelRms,
}

impl Metric {
    fn name(self) -> &'static str {
        match self {
            Self::MaxRel => "max_rel",
            Self::RelRms => "rel_rms",
        }
    }

    fn of(self, errors: &Errors) -> Option<f64> {
        match self {
            Self::MaxRel => errors.max_rel,
            Self::RelRms => errors.rel_rms,
        }
    }
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        let kernels = self.kernels()?;
        let kernels: Vec<&dyn Kernel> = kernels.iter().map(AsRef::as_ref).collect();
        let given = self.case.iter().map(|path| given(path.as_path())).collect::<Result<Vec<_>>>()?;
        let op = given.first().map_or(self.op, |given| given.inputs.op());
        if let Some(kernel) = kernels.iter().find(|kernel| !kernel.ops().contains(&op)) {
            let reason = format!("it does not implement {op}");
            return Err(Error::Unsupported { kernel: kernel.name().to_owned(), reason });
        }
        if kernels.iter().any(|kernel| kernel.on_gpu()) {
            // Before the first kernel has used a minute in vain.
            Gpu::shared()?;
        }
        let progress = |step: &Step| {
            note(format_args!("[{}/{}] {}", step.done + 1, step.total, step.name));
            ControlFlow::Continue(())
        };
        let problems = Problems {
            op: self.op,
            shapes: if given.is_empty() { self.shapes(&kernels)? } else { Vec::new() },
            regimes: self.regime.clone(),
            seed: self.seed,
            packing: self.seqlens.clone(),
        };
        let calls = if given.is_empty() { Calls::Problems(&problems) } else { Calls::Given(&given) };
        let mut failures = Vec::new();
        let fail = |step: &Step, why: Error| {
            failures.push(format!("{}: {why}", step.name));
            Ok(())
        };
        let records = self.measure(calls, &kernels, progress, fail)?;
        print(&if self.json { to_json_lines(&records)? } else { self.tables(&records) })?;
        for failure in &failures {
            note(format_args!("failed: {failure}"));
        }
        Ok(ExitCode::from(u8::from(!failures.is_empty())))
    }

    /// Measures this part of `calls`, keeps what is measured where that is asked for, and says in which file.
    fn measure(
        &self,
        calls: Calls<'_>,
        kernels: &[&dyn Kernel],
        progress: impl FnMut(&Step) -> ControlFlow<()>,
        fail: impl FnMut(&Step, Error) -> Result<()>,
    ) -> Result<Vec<Record>> {
        let fail = Box::new(fail);
        let shard = self.sharding.part();
        let total = calls.count();
        self.sharding.say_cases(shard.of(0..total).count(), total);
        let Some(experiment) = &self.save else {
            let sweep = Sweep { shard, fail, ..Sweep::whole() };
            return numerics::sweep(calls, kernels, sweep, progress);
        };
        let checkout = Checkout::find()?;
        let data = checkout.root().join("data");
        let is_it = |measurement: &Measurement| matches!(measurement, Measurement::Numerics(_));
        let count = Done { experiment, anywhere: false, is_it };
        let known = self.sharding.recorded(&data, &count, self.again, &Environment::detect())?.done;
        let mut path = None;
        let keep_one = |records: &[Record]| {
            path = Some(keep(&data, &shard.experiment(experiment), records)?);
            Ok(())
        };
        let records = numerics::sweep(
            calls,
            kernels,
            Sweep { shard, records: &known, keep: Box::new(keep_one), fail },
            progress,
        )?;
        match path {
            Some(path) => note(format_args!("records: {}", checkout.relative(&path))),
            None if records.is_empty() => {}
            None => note("nothing was missing in data/"),
        }
        Ok(records)
    }

    /// The shapes, once it is known that `kernels` can run on each: for every input format the rounded inputs and their
    /// truth are kept, beside the inputs as they were and the results of one kernel.
    fn shapes(&self, kernels: &[&dyn Kernel]) -> Result<Vec<Shape>> {
        let formats = distinct(kernels.iter().map(|kernel| kernel.input_format())).len() as u128;
        let day1 = DAY1_SHAPES.map(|(tokens, key_dim, value_dim)| Size { tokens, key_dim, value_dim });
        let sizes = if self.shape.is_empty() { &day1[..] } else { &self.shape };
        let shape = |size: &Size| Shape { batch: self.batch, ..size.shape(self.heads, self.qk_heads) };
        let checked = |shape: Shape| {
            shape.validate()?;
            if let Some(packing) = self.seqlens.as_ref().filter(|packing| packing.tokens() != shape.tokens) {
                let tokens = packing.tokens();
                return Err(Error::input(format!("--seqlens {packing} has {tokens} tokens: expected T of {shape}")));
            }
            let sequences = self.seqlens.as_ref().map_or(shape.batch, |packing| packing.lengths().len());
            let bytes = shape.bytes(self.op, sequences, true).saturating_mul(formats + 1);
            require(bytes).map_err(|error| Error::input(format!("{shape}: {error}")))?;
            Ok(shape)
        };
        sizes.iter().map(shape).map(checked).collect()
    }

    /// What the title of a table says of the inputs: heads, sequences, distribution and seed.
    fn inputs(&self, regime: &str) -> String {
        if !self.case.is_empty() {
            return format!("inputs of {regime}");
        }
        let batch = if self.batch == 1 { String::new() } else { format!(", B = {}", self.batch) };
        format!("with H = {}{}{batch}, inputs {regime} from seed {}", self.heads, self.grouping(), self.seed)
    }

    fn grouping(&self) -> String {
        let heads = self.qk_heads.map(|heads| format!(", {heads} of q and k")).unwrap_or_default();
        let packing = self.seqlens.as_ref().map(|lengths| match lengths.lengths().len() {
            // A line that a person can read.
            many @ 33.. => format!(", {many} sequences"),
            _ => format!(", sequences {lengths}"),
        });
        heads + &packing.unwrap_or_default()
    }

    fn kernels(&self) -> Result<Vec<Box<dyn Kernel>>> {
        let day1 = ["bf16", "tf32", "fp32-tf32-solve", "fp32"].map(str::to_owned);
        let modes = if self.mode.is_empty() && self.kernel.is_empty() { &day1[..] } else { &self.mode };
        if self.chunk.is_some() && modes.is_empty() {
            return Err(Error::input(
                "--chunk changes the modes of --mode, and there are none: a kernel of --kernel has its own chunk size",
            ));
        }
        let chunk = self.chunk.unwrap_or(DEFAULT_CHUNK);
        let mut all: Vec<Box<dyn Kernel>> = Vec::new();
        for mode in modes {
            let name = match chunk {
                DEFAULT_CHUNK => format!("cpu-chunk-{mode}"),
                chunk => format!("cpu-chunk-{mode}-c{chunk}"),
            };
            all.push(Box::new(Chunked::new(&name, Policy::preset(mode)?, chunk)?));
        }
        for name in &self.kernel {
            all.push(kernel(name)?);
        }
        Ok(all)
    }

    /// One table for each kernel and regime, in the order of their first records.
    fn tables(&self, records: &[Record]) -> String {
        let group = |record: &Record| (record.workload.kernel.clone(), record.workload.regime.clone());
        let tables = distinct(records.iter().map(group)).into_iter().map(|(kernel, regime)| {
            let key = (kernel.clone(), regime.clone());
            let rows = || records.iter().filter(|record| group(record) == key);
            let table = Table {
                metric: self.metric,
                rows: rows().filter_map(|record| Some((size_columns(record), record.errors()?))).collect(),
            };
            let op = rows().find_map(|record| record.workload.op.clone()).unwrap_or_default();
            format!(
                "{}, {} of {op} {}\n{table}",
                kernel.unwrap_or_default(),
                self.metric.name(),
                self.inputs(&regime.unwrap_or_default())
            )
        });
        tables.collect::<Vec<_>>().join("\n")
    }
}

/// The call in the file at `path`, under the file's name.
fn given(path: &Path) -> Result<Given> {
    let inputs = open_case(path)?.inputs;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    Ok(Given { inputs, name: name.trim_end_matches(".safetensors").to_owned() })
}

/// The different ones of `items`, in their order.
fn distinct<T: PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for item in items {
        if !seen.contains(&item) {
            seen.push(item);
        }
    }
    seen
}

/// Errors of one kernel on one regime: a row per shape, a column per tensor.
struct Table<'a> {
    metric: Metric,
    /// The columns T, K and V, and the errors of one tensor.
    rows: Vec<(String, &'a Errors)>,
}

impl Table<'_> {
    fn cell(&self, size: &str, tensor: &str) -> String {
        let errors = self.rows.iter().find(|(at, errors)| at == size && errors.tensor == tensor);
        errors.map_or_else(String::new, |(_, errors)| word(self.value(errors), |error| format!("{error:.2e}")))
    }

    /// The error in this table's metric: NaN where the tensor is not finite, infinite where the metric divides by 0.
    fn value(&self, errors: &Errors) -> f64 {
        if errors.nonfinite > 0 { f64::NAN } else { self.metric.of(errors).unwrap_or(f64::INFINITY) }
    }

    /// The largest error of `tensor`, each over what `unit` gives; NaN where one is.
    fn largest(&self, tensor: &str, unit: impl Fn(&Errors) -> Option<f64>) -> f64 {
        let of_tensor = self.rows.iter().filter(|(_, errors)| errors.tensor == tensor);
        let values = of_tensor.filter_map(|(_, errors)| Some(self.value(errors) / unit(errors)?));
        values.fold(0.0, |largest: f64, value| if largest.is_nan() || value <= largest { largest } else { value })
    }
}

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensors = distinct(self.rows.iter().map(|(_, errors)| errors.tensor.as_str()));
        let line = |head: &str, cell: &dyn Fn(&str) -> String| {
            let cells: String = tensors.iter().map(|tensor| format!(" {:>11}", cell(tensor))).collect();
            format!("{head:<16}{cells}\n")
        };
        f.write_str(&line(&format!("{:>6} {:>4} {:>4}", "T", "K", "V"), &str::to_owned))?;
        for size in distinct(self.rows.iter().map(|(size, _)| size.as_str())) {
            f.write_str(&line(size, &|tensor| self.cell(size, tensor)))?;
        }
        let scientific = |error| format!("{error:.2e}");
        let plain = |error| format!("{error:.2}");
        f.write_str(&line("largest", &|tensor| word(self.largest(tensor, |_| Some(1.0)), scientific)))?;
        f.write_str(&line("largest, in u", &|tensor| word(self.largest(tensor, |e| e.unit_roundoff), plain)))
    }
}

/// A number by `format`, and a word for what is none.
fn word(error: f64, format: impl Fn(f64) -> String) -> String {
    match error {
        nan if nan.is_nan() => "not finite".to_owned(),
        f64::INFINITY => "infinite".to_owned(),
        finite => format(finite),
    }
}

/// The columns T, K and V of a row.
fn size_columns(record: &Record) -> String {
    let text = |size: Option<usize>| size.map_or_else(String::new, |size| size.to_string());
    let workload = &record.workload;
    format!("{:>6} {:>4} {:>4}", text(workload.tokens), text(workload.key_dim), text(workload.value_dim))
}
