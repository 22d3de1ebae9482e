//! `cargo lab tokens`.

use crate::checkout::Checkout;
use crate::output::{Interrupt, Said, note, print, recorded};
use crate::peers::Python;
use gdnlab::Result;
use gdnlab::cuda::Gpu;
use gdnlab::kernel::Kernel;
use gdnlab::model::text::Text;
use gdnlab::model::train::Training;
use gdnlab::record::{self, Experiment, Measurement, Record, TokenFlips};
use gdnlab::tokens::{Noisy, Subject, Suite, Taught, Tolerance, trained};
use std::path::PathBuf;
use std::process::ExitCode;

/// Name of the records' file in `data/`.
const SUITE: &str = "tokens";
/// Kernels where none is named: the chunked form in the modes of Day 1, and what the GPU kernels do, emulated.
const KERNELS: [&str; 4] = ["cpu-chunk-bf16", "cpu-chunk-f16-internals", "cpu-chunk-tf32", "cpu-chunk-fp32"];

/// Ask when a kernel's error flips a token.
///
/// A small language model of GDN reads text that it was not trained on, once with the exact recurrence and once with each
/// kernel, all else in float64. Three experiments: how often the most likely next token is another, position by position,
/// beside noise of known sizes; how far texts agree that are decoded greedily; and how the token after a prompt depends on
/// padding. Without --model the tiny model is trained first.
///
/// Exit code: 0 when all was measured, 130 when it was stopped, 2 for bad input.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab tokens                                        the chunked form on the CPU
  cargo lab tokens --kernel cuda-chunk-bf16 fla --padded 20468 --save
  cargo lab train --mixer gdn --size 30M --checkpoint gdn.safetensors && cargo lab tokens --model gdn.safetensors")]
pub struct Args {
    /// Kernels of `cargo lab kernels`, or peers: fla, flash_qla, flashinfer, MODULE:FUNCTION.
    #[arg(long, value_name = "NAME", num_args = 1.., default_values_t = KERNELS.map(str::to_owned))]
    kernel: Vec<String>,
    /// A checkpoint of `cargo lab train --mixer gdn`, instead of training the tiny model.
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Steps to train the tiny model.
    #[arg(long, value_name = "N", default_value_t = 300)]
    steps: u64,
    /// A file, or a folder of files, in UTF-8. Without it, a text of this system.
    #[arg(long, value_name = "PATH")]
    text: Option<PathBuf>,
    /// Rows of text that are read position by position.
    #[arg(long, value_name = "B", default_value_t = Suite::default().rows)]
    rows: usize,
    /// Tokens of each.
    #[arg(long, value_name = "T", default_value_t = Suite::default().length)]
    length: usize,
    /// Sizes of noise between 1e-4 and 1e-1; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 7)]
    noises: usize,
    /// Prompts to decode and to pad.
    #[arg(long, value_name = "N", default_value_t = Suite::default().prompts)]
    prompts: usize,
    /// Tokens of a prompt.
    #[arg(long, value_name = "T", default_value_t = Suite::default().prompt_length)]
    prompt_length: usize,
    /// Tokens to decode after each.
    #[arg(long, value_name = "T", default_value_t = Suite::default().decoded)]
    decoded: usize,
    /// Length that prompts are padded to; 20468 is that of the report.
    #[arg(long, value_name = "T", default_value_t = Suite::default().padded)]
    padded: usize,
    /// Seed of training and noise.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    python: Python,
    /// Print one JSON record per row instead of the tables.
    #[arg(long)]
    json: bool,
    /// Add each kernel's rows to the records in `data/` as soon as they are measured.
    #[arg(long)]
    save: bool,
    /// Measure again what is recorded already.
    #[arg(long)]
    again: bool,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        let kernels: Vec<Box<dyn Kernel>> =
            self.kernel.iter().map(|name| self.python.kernel(name)).collect::<Result<_>>()?;
        if kernels.iter().any(|kernel| kernel.on_gpu()) {
            // Before a model is trained in vain.
            Gpu::shared()?;
        }
        let noises = if self.noises == 0 { Vec::new() } else { Noisy::sweep(1e-4, 1e-1, self.noises, self.seed)? };
        let data = if self.save { Some(Checkout::find()?.root().join("data")) } else { None };
        let interrupt = Interrupt::new()?;
        let text = self.text.as_ref().map_or_else(Text::of_system, Text::from_path)?;
        let training = self.trained(&text, &interrupt)?;
        let taught = Taught::new(&training, &text);
        note(format_args!("{}, text of {:.1} MB", taught.name, text.bytes() as f64 / 1e6));

        let suite = Suite {
            rows: self.rows,
            length: self.length,
            prompts: self.prompts,
            prompt_length: self.prompt_length,
            decoded: self.decoded,
            padded: self.padded,
        };
        let known = match &data {
            Some(data) if !self.again => recorded(data)?,
            _ => Vec::new(),
        };
        let subjects: Vec<Subject<'_>> = noises
            .iter()
            .map(|noise| Subject { kernel: noise, forced_alone: true })
            .chain(kernels.iter().map(|kernel| Subject { kernel: kernel.as_ref(), forced_alone: false }))
            .collect();
        let mut said = Said::default();
        let keep = |records: &[Record]| match &data {
            Some(data) => record::keep(data, SUITE, records).map(drop),
            None => Ok(()),
        };
        let finished = suite.run(&taught, &subjects, &known, keep, |step| {
            said.step(step);
            interrupt.control()
        })?;
        print(&if self.json { record::to_json_lines(&finished.records)? } else { tables(&finished.records) })?;
        finished.failures.iter().for_each(|(kernel, why)| note(format_args!("failed: {kernel}: {why}")));
        if finished.known > 0 {
            note(format_args!("{} kernels were recorded before, by this very code", finished.known));
        }
        Ok(match (finished.stopped, finished.failures.is_empty()) {
            (true, _) => Interrupt::EXIT_CODE.into(),
            (false, true) => ExitCode::SUCCESS,
            (false, false) => ExitCode::from(1),
        })
    }

    fn trained(&self, text: &Text, interrupt: &Interrupt) -> Result<Training> {
        if let Some(path) = &self.model {
            return Training::load(path);
        }
        note(format_args!("training the tiny model for {} steps", self.steps));
        trained(text, self.steps, self.seed, |_| interrupt.control())
    }
}

fn rows(records: &[Record], experiment: Experiment) -> impl Iterator<Item = (&Record, &TokenFlips)> {
    records.iter().filter_map(move |record| match &record.measurement {
        Measurement::Tokens(flips) if flips.experiment == experiment => Some((record, flips)),
        _ => None,
    })
}

fn word(value: Option<f64>, write: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), write)
}

fn tables(records: &[Record]) -> String {
    let name = |record: &Record| record.workload.kernel.clone().unwrap_or_default();
    let scientific = |value| word(value, |x| format!("{x:.2e}"));
    let rate = |flips: &TokenFlips| {
        let [rate, low, high] =
            [flips.flip_rate, flips.flip_rate_low, flips.flip_rate_high].map(|x| format!("{:.3}", 100.0 * x));
        format!("{rate:>8} {:>18}", format!("{low} to {high}"))
    };
    let mut text = format!(
        "most likely next token, position by position\n{:<28} {:>9} {:>9} {:>7} {:>8} {:>18} {:>9} {:>9}\n",
        "kernel", "error", "positions", "flips", "%", "95 % interval", "expected", "shift"
    );
    for (record, flips) in rows(records, Experiment::Forced) {
        text += &format!(
            "{:<28} {:>9} {:>9} {:>7} {} {:>9} {:>9}\n",
            name(record),
            scientific(flips.rel_rms),
            flips.positions,
            flips.flips,
            rate(flips),
            word(flips.expected_rate, |x| format!("{:.3}", 100.0 * x)),
            scientific(flips.shift_rms)
        );
    }
    if let Some(tolerance) = Tolerance::of(rows(records, Experiment::Forced).map(|(_, flips)| flips)) {
        for rate in [1e-2, 1e-3, 1e-4] {
            let (error, (low, high)) = tolerance.error_at(rate);
            text +=
                &format!("{} % of tokens flip at an error of {error:.1e} ({low:.1e} to {high:.1e})\n", 100.0 * rate);
        }
    }
    text += &format!(
        "\ngreedy decoding\n{:<28} {:>8} {:>7} {:>7} {:>8} {:>18} {:>12}\n",
        "kernel", "prompts", "tokens", "differ", "%", "95 % interval", "same tokens"
    );
    for (record, flips) in rows(records, Experiment::Greedy) {
        text += &format!(
            "{:<28} {:>8} {:>7} {:>7} {} {:>12}\n",
            name(record),
            flips.positions,
            flips.decoded.unwrap_or_default(),
            flips.flips,
            rate(flips),
            word(flips.same_tokens, |x| format!("{x:.1}"))
        );
    }
    text += &format!(
        "\npadding\n{:<28} {:>7} {:<12} {:>8} {:>6} {:>12} {:>10}\n",
        "kernel", "T", "padding", "prompts", "flips", "max change", "same bits"
    );
    for (record, flips) in rows(records, Experiment::Padding) {
        text += &format!(
            "{:<28} {:>7} {:<12} {:>8} {:>6} {:>12} {:>10}\n",
            name(record),
            record.workload.tokens.unwrap_or_default(),
            flips.padding.as_deref().unwrap_or_default(),
            flips.positions,
            flips.flips,
            scientific(flips.shift_max),
            word(flips.same_bits, |x| format!("{:.0} %", 100.0 * x))
        );
    }
    text
}
