//! `cargo lab capture`.

use crate::output::{clean_up_when_interrupted, note, print};
use gdnlab::distribution::{SHARES, distribution};
use gdnlab::model::capture::with_unit_gradient;
use gdnlab::model::text::Text;
use gdnlab::model::train::Training;
use gdnlab::peer::{Destination, write_case};
use gdnlab::precision::Format;
use gdnlab::{Error, Result};
use std::path::PathBuf;
use std::process::ExitCode;

/// Write what the recurrence of a trained model is really called with, as a tensor file.
///
/// The model in the checkpoint takes one step, in float64 on the CPU, on windows of the text that it was not trained on. What
/// a layer's recurrence takes in it (q, k, v, g, beta, and do, the gradient of the loss) is the case. Any kernel can then be
/// tried on it: `cargo lab numerics --case`, `cargo lab compute` and `cargo lab verify`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab train --mixer gdn --checkpoint tiny.safetensors
  cargo lab capture --checkpoint tiny.safetensors --layer 1 --length 1024 --out case.safetensors
  cargo lab numerics --case case.safetensors --mode bf16 fp32")]
pub struct Args {
    /// A checkpoint of `cargo lab train`, of a model of gdn.
    #[arg(long, value_name = "FILE")]
    checkpoint: PathBuf,
    /// Layer, counted from 0.
    #[arg(long, value_name = "L")]
    layer: usize,
    /// Number of sequences.
    #[arg(long, value_name = "B", default_value_t = 1)]
    batch: usize,
    /// Tokens of a sequence.
    #[arg(long, value_name = "T", default_value_t = 1024)]
    length: usize,
    /// A file, or a folder of files, in UTF-8. Without it, a text of this system.
    #[arg(long, value_name = "PATH")]
    text: Option<PathBuf>,
    /// Format of q, k, v and do in the file: f64, f32, bf16 or f16.
    #[arg(long, default_value_t = Format::Bf16)]
    format: Format,
    /// Leave do as it is. Without this it is multiplied by a power of two, so that its RMS is between 1 and 2.
    #[arg(long)]
    unscaled: bool,
    /// Tensor file to write; one that exists is replaced.
    #[arg(short, long, value_name = "CASE")]
    out: PathBuf,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        clean_up_when_interrupted()?;
        let destination = Destination::new(&self.out, &[&self.checkpoint])?;
        let training = Training::load(&self.checkpoint)?;
        let config = *training.model.config();
        if self.layer >= config.layers {
            return Err(Error::input(format!("--layer {}: expected below {} of {config}", self.layer, config.layers)));
        }
        let text = self.text.as_ref().map_or_else(Text::of_system, Text::from_path)?;
        if text.fingerprint() != training.text() {
            note(format_args!("note: {} is not the text that the model was trained on", text.name()));
        }
        let tokens = text.validation_batch(self.batch, self.length)?;
        note(format_args!("{config}, step {}, reading {} x {} tokens", training.steps(), self.batch, self.length));
        let inputs = training.model.training_inputs(&tokens, self.batch, self.length)?.swap_remove(self.layer);
        let inputs = if self.unscaled { inputs } else { with_unit_gradient(inputs) };
        let inputs = inputs.rounded_to(self.format);
        write_case(&destination, &inputs)?;
        let mut said =
            format!("{}: {} {}, layer {} of {config}\n", self.out.display(), inputs.op(), inputs.shape, self.layer);
        let shares: String = SHARES.iter().map(|share| format!(" {:>9}", format!("{:.0} %", 100.0 * share))).collect();
        said += &format!("{:<32}{shares}\n", "below this lies");
        for spread in distribution(&inputs)? {
            let quantiles: String = spread.quantiles.iter().map(|x| format!(" {x:>9.3}")).collect();
            said += &format!("{:<32}{quantiles}\n", spread.quantity);
        }
        print(&said)?;
        Ok(ExitCode::SUCCESS)
    }
}
