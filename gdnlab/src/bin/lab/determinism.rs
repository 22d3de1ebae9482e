//! `cargo lab determinism`.

use crate::checkout::Checkout;
use crate::output::{Interrupt, Said, note, print, recorded};
use crate::size::Size;
use gdnlab::cuda::Gpu;
use gdnlab::determinism::{Check, Setting, run};
use gdnlab::inputs::Regime;
use gdnlab::kernel::{Kernel, kernel, kernels};
use gdnlab::notebook::text_of_tables;
use gdnlab::problem::Op;
use gdnlab::{Error, Result, record, table};
use std::process::ExitCode;

/// Name of the records' file in `data/`.
const SUITE: &str = "day05_determinism";

/// Run kernels again and again where the same bits must come out, and compare every bit with those of the first run.
///
/// `launches` repeats the call; `load` does so while the machine is busy (copies on other streams of the GPU, or a thread of
/// work for each of the CPU's); `threads` changes the number of threads of a kernel of the CPU; `packing` puts the sequence
/// first, in the middle and last among others of other lengths in one row; `batch` makes it one of several rows. Ctrl-C ends
/// early; with --save, what was measured is kept, and the next call goes on from there.
///
/// Exit code: 0 when every bit was the same, 1 when one was not or a kernel could not be checked at all, 2 for bad input, 130
/// when it was stopped.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab determinism cpu-chunk-bf16
  cargo lab determinism cuda-chunk-bf16 cuda-chunk-tf32 --launches 1000 --save
  cargo lab determinism cuda-chunk-fp32 --check launches load --shape 4096,128,128 --heads 16")]
pub struct Args {
    /// Kernels by their names in `cargo lab kernels`. Without any, all that this machine can run.
    #[arg(value_name = "KERNEL")]
    kernel: Vec<String>,
    /// Checks: launches, load, threads, packing, batch.
    #[arg(long, num_args = 1.., default_values_t = Check::ALL)]
    check: Vec<Check>,
    /// How often the call is repeated, both alone and under load.
    #[arg(long, value_name = "N", default_value_t = 100)]
    launches: usize,
    /// Operator: gdn or gdn2.
    #[arg(long, default_value_t = Op::Gdn)]
    op: Op,
    /// Tokens, key and value dimension of a head.
    #[arg(long, value_name = "T,K,V", default_value_t = Size { tokens: 1000, key_dim: 64, value_dim: 64 })]
    shape: Size,
    /// Number of heads.
    #[arg(long, value_name = "H", default_value_t = 4)]
    heads: usize,
    /// Number of q/k heads, which groups of value heads share; as many as heads without it.
    #[arg(long, value_name = "HK")]
    qk_heads: Option<usize>,
    /// Input regime.
    #[arg(long, default_value_t = Regime::MildDecay)]
    regime: Regime,
    /// Seed of the inputs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print one JSON record per check and tensor instead of the table.
    #[arg(long)]
    json: bool,
    /// Measure again what is recorded already.
    #[arg(long)]
    again: bool,
    /// Add each check to the records in `data/` as soon as it is made.
    #[arg(long)]
    save: bool,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        let kernels = self.kernels()?;
        let kernels: Vec<&dyn Kernel> = kernels.iter().map(AsRef::as_ref).collect();
        if kernels.iter().any(|kernel| kernel.on_gpu()) {
            // Before the first kernel has used a minute in vain.
            Gpu::shared()?;
        }
        let setting = Setting {
            op: self.op,
            shape: self.shape.shape(self.heads, self.qk_heads),
            regime: self.regime,
            seed: self.seed,
            launches: self.launches,
        };
        let interrupt = Interrupt::new()?;
        let data = if self.save { Some(Checkout::find()?.root().join("data")) } else { None };
        let known = match &data {
            Some(data) if !self.again => recorded(data)?,
            _ => Vec::new(),
        };
        let keep = |records: &[record::Record]| match &data {
            Some(data) => record::keep(data, SUITE, records).map(drop),
            None => Ok(()),
        };
        let mut said = Said::default();
        let finished = run(&setting, &kernels, &self.check, &known, keep, |step| {
            said.step(step);
            interrupt.control()
        })?;
        if self.json {
            print(&record::to_json_lines(&finished.records)?)?;
        } else if !finished.records.is_empty() {
            print(&text_of_tables(&[("", &table::determinism(&finished.records)?)]))?;
        }
        for left in &finished.left {
            note(format_args!("{} {}: not done: {}", left.kernel, left.check, left.why));
        }
        if finished.known > 0 {
            note(format_args!("{} checks were recorded before, by this very code", finished.known));
        }
        Ok(match finished.stopped {
            true => Interrupt::EXIT_CODE.into(),
            false => ExitCode::from(u8::from(finished.differs() || finished.untested(&kernels))),
        })
    }

    /// The kernels that were named, or all that implement the operator and that this machine can run.
    fn kernels(&self) -> Result<Vec<Box<dyn Kernel>>> {
        if !self.kernel.is_empty() {
            return self.kernel.iter().map(|name| kernel(name)).collect();
        }
        let has_gpu = match Gpu::shared() {
            Ok(_) => true,
            Err(Error::Gpu(why)) => {
                note(format_args!("kernels of the CPU alone: {why}"));
                false
            }
            Err(error) => return Err(error),
        };
        let mut all = kernels();
        all.retain(|kernel| kernel.ops().contains(&self.op) && (has_gpu || !kernel.on_gpu()));
        Ok(all)
    }
}
