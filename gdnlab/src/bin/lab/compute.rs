//! `cargo lab compute`.

use crate::output::{clean_up_when_interrupted, note, open_case, print};
use gdnlab::compare::check_truth;
use gdnlab::kernel::{Kernel, kernel};
use gdnlab::peer::{Destination, write_results};
use gdnlab::problem::{Inputs, Results};
use gdnlab::reference::Reference;
use gdnlab::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Run one of the kernels on a tensor file.
///
/// CASE and OUT are as in `cargo lab reference`; `cargo lab kernels` lists the names. q, k, v and do are rounded to the
/// kernel's input format first.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  cargo lab compute case.safetensors --kernel cpu-chunk-bf16 -o result.safetensors")]
pub struct Args {
    /// Tensor file with the inputs.
    case: PathBuf,
    /// Name of the kernel.
    #[arg(short, long, value_name = "NAME")]
    kernel: String,
    /// Tensor file to write; one that exists is replaced.
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        compute_into(&self.case, kernel(&self.kernel)?.as_ref(), &self.output)
    }
}

/// Runs `kernel` on the case at `case` and writes its results to `output`.
pub fn compute_into(case: &Path, kernel: &dyn Kernel, output: &Path) -> Result<ExitCode> {
    clean_up_when_interrupted()?;
    let mut inputs = open_case(case)?.inputs;
    if !kernel.ops().contains(&inputs.op()) {
        let reason = format!("the case is {}", inputs.op());
        return Err(Error::Unsupported { kernel: kernel.name().to_owned(), reason });
    }
    let destination = Destination::new(output, &[case])?;
    if inputs.round_to(kernel.input_format()) {
        note(format_args!(
            "note: {} takes q, k, v and do in {}, so the inputs of this case were rounded",
            kernel.name(),
            kernel.input_format()
        ));
    }
    let start = Instant::now();
    let results = run(kernel, &inputs)?;
    let seconds = start.elapsed().as_secs_f64();
    if kernel.name() == Reference.name() {
        check_truth(&results).map_err(|error| Error::input(format!("{}: {error}", case.display())))?;
    }
    write_results(&destination, inputs.op(), kernel.name(), &results)?;
    let names: Vec<&str> = results.named().into_iter().map(|(name, _)| name).collect();
    print(&format!(
        "{}: {} of {} {} by {} in {seconds:.2} s\n",
        output.display(),
        names.join(", "),
        inputs.op(),
        inputs.shape,
        kernel.name()
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Forward and backward, or the forward alone where the case gives no gradient of the output.
fn run(kernel: &dyn Kernel, inputs: &Inputs) -> Result<Results> {
    if inputs.d_o.is_some() && kernel.has_backward() {
        return kernel.backward(inputs);
    }
    if inputs.d_o.is_some() {
        note(format_args!("note: {} has no backward, so 'do' is not used and there are no gradients", kernel.name()));
        return kernel.forward(inputs);
    }
    let unused = if inputs.d_final_state.is_some() { ", and 'dht' is not used" } else { "" };
    note(format_args!("note: the case has no 'do', so there are no gradients{unused}"));
    kernel.forward(inputs)
}
