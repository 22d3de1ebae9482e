//! `cargo lab bias`.

use crate::checkout::Checkout;
use crate::output::{Interrupt, note, print};
use crate::size::Size;
use gdnlab::bias::{Setting, emulated, run};
use gdnlab::cuda::Gpu;
use gdnlab::inputs::Regime;
use gdnlab::kernel::{Kernel, kernel};
use gdnlab::memory::require;
use gdnlab::notebook::text_of_tables;
use gdnlab::problem::{Op, Shape};
use gdnlab::{Result, record, table};
use std::process::ExitCode;

/// Name of the records' file in `data/`.
const SUITE: &str = "day05_bias";

/// Find out whether the errors of kernels have a direction: t-tests and sign tests with Holm's correction.
///
/// Signed errors are looked at in two directions, up (x - r) and outward (sign(r) (x - r)), by tensor, head, position in the
/// chunk and in the sequence, and magnitude of the truth. A test has one value for each sequence and head, since the elements
/// of one depend on each other. Its null hypothesis: the mean error of a sequence and head is 0 in expectation (t), or as
/// likely above as below 0 (sign). Biases are in units of the unit roundoff u of the kernel's mode.
#[derive(clap::Args)]
#[command(after_help = "\
Columns: bias_u is the mean over all elements, low_u and high_u its 95 % interval; t_holm and sign_holm the corrected p values;
t_biased and sign_biased count the groups (of tests) with one below 0.05; largest_u is the largest mean of a group.

Examples:
  cargo lab bias                                   TF32 truncated and rounded, bf16, fp16 internals and fp32, emulated
  cargo lab bias cuda-chunk-tf32 cuda-chunk-bf16 --save")]
pub struct Args {
    /// Kernels by their names in `cargo lab kernels`. Without any, emulations of five ways to round.
    #[arg(value_name = "KERNEL")]
    kernel: Vec<String>,
    /// Operator: gdn or gdn2.
    #[arg(long, default_value_t = Op::Gdn)]
    op: Op,
    /// Tokens, key and value dimension of a head.
    #[arg(long, value_name = "T,K,V", default_value_t = Size { tokens: 256, key_dim: 64, value_dim: 64 })]
    shape: Size,
    /// Number of heads.
    #[arg(long, value_name = "H", default_value_t = 4)]
    heads: usize,
    /// Number of sequences, 14 at least.
    #[arg(long, value_name = "B", default_value_t = 32)]
    batch: usize,
    /// Input regime.
    #[arg(long, default_value_t = Regime::MildDecay)]
    regime: Regime,
    /// Seed of the inputs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print one JSON record per tensor and direction instead of the table.
    #[arg(long)]
    json: bool,
    /// Add the records to those in `data/`.
    #[arg(long)]
    save: bool,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        let kernels: Vec<Box<dyn Kernel>> = if self.kernel.is_empty() {
            emulated()?.into_iter().map(|kernel| Box::new(kernel) as Box<dyn Kernel>).collect()
        } else {
            self.kernel.iter().map(|name| kernel(name)).collect::<Result<_>>()?
        };
        let kernels: Vec<&dyn Kernel> = kernels.iter().map(AsRef::as_ref).collect();
        if kernels.iter().any(|kernel| kernel.on_gpu()) {
            Gpu::shared()?;
        }
        let shape = Shape { batch: self.batch, ..self.shape.shape(self.heads, None) };
        shape.validate()?;
        // Inputs as drawn and rounded, truth and results.
        require(shape.bytes(self.op, self.batch, true).saturating_mul(3))?;
        let interrupt = Interrupt::new()?;
        let setting = Setting { op: self.op, shape, regime: self.regime, seed: self.seed };
        let finished = run(&setting, &kernels, |step| {
            note(format_args!("[{}/{}] {}", step.done + 1, step.total, step.name));
            interrupt.control()
        })?;
        for (kernel, why) in &finished.failures {
            note(format_args!("failed: {kernel}: {why}"));
        }
        if !finished.records.is_empty() {
            print(&if self.json {
                record::to_json_lines(&finished.records)?
            } else {
                text_of_tables(&[("", &table::recorded_biases(&finished.records)?)])
            })?;
        }
        if self.save && !finished.records.is_empty() {
            let checkout = Checkout::find()?;
            let path = record::keep(checkout.root().join("data"), SUITE, &finished.records)?;
            note(format_args!("records: {}", checkout.relative(&path)));
        }
        Ok(ExitCode::from(u8::from(!finished.failures.is_empty())))
    }
}
