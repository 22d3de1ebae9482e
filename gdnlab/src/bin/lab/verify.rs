//! `cargo lab verify`.

use crate::output::{note, open_case, print, warn};
use crate::peers::Python;
use gdnlab::compare::{Report, check_truth, mode, modes};
use gdnlab::inputs::{Regime, generate};
use gdnlab::kernel::Kernel;
use gdnlab::peer::{Peer, ResultFile, read_results};
use gdnlab::precision::Format;
use gdnlab::problem::{Inputs, Op, Results, Shape};
use gdnlab::reference::Reference;
use gdnlab::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Compare somebody's results with the float64 truth.
///
/// CASE holds the inputs of one call and RESULT what a kernel made of them: some or all of o, final_state, dq, dk, dv,
/// dg, dbeta (GDN) or db and dw (GDN-2), and dh0. The truth is computed here. Every tensor in RESULT must be finite and
/// within the limits of a mode, which are multiples of its unit roundoff u. Exit code: 0 within tolerance, 1 outside,
/// 2 bad input.
///
/// With --peer somebody's kernel runs in your own Python instead of a RESULT: fla, flash_qla, flashinfer, or any callable
/// MODULE:FUNCTION that takes (q, k, v, g, beta, *, scale, initial_state, cu_seqlens) and returns (o, final_state); gradients
/// come by PyTorch's autograd. Without a CASE it gets seeded ones: awkward lengths, packed sequences, grouped heads.
#[derive(clap::Args)]
#[command(after_help = "\
Columns: 'u of' is the format whose unit roundoff u the errors and limits 'in u' are multiples of; bias is the mean error
over the RMS of the truth and p the probability of one that large by chance; 1-cosine is 0 for the same direction; * marks
limits raised because the inputs amplify the roundoff of every kernel. Each head also has a limit of its own.

Examples:
  cargo lab verify case.safetensors result.safetensors --tolerance tf32
  cargo lab verify --peer fla --python ~/venv/bin/python
  cargo lab verify case.safetensors --peer mymodule:my_gdn")]
pub struct Args {
    /// Tensor file with the inputs.
    #[arg(required_unless_present = "peer")]
    case: Option<PathBuf>,
    /// Tensor file with the results.
    #[arg(required_unless_present = "peer", conflicts_with = "peer")]
    result: Option<PathBuf>,
    /// Kernel of somebody else: fla, flash_qla, flashinfer or MODULE:FUNCTION, with @f32, @bf16 or @f16 behind it for the
    /// format of its inputs.
    #[arg(long, value_name = "NAME")]
    peer: Option<String>,
    #[command(flatten)]
    python: Python,
    /// Operator of the seeded cases of a peer: gdn or gdn2.
    #[arg(long, default_value_t = Op::Gdn, requires = "peer", conflicts_with = "case")]
    op: Op,
    /// Mode whose limits apply: fp64, fp32, fp32-tf32-solve, tf32, bf16, fp16 or f16-internals. Without it, the mode of
    /// the dtype of q, k and v.
    #[arg(short, long, value_name = "MODE")]
    tolerance: Option<String>,
    /// Print one JSON object instead of the report.
    #[arg(long)]
    json: bool,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        self.tolerance.as_deref().map(mode).transpose()?;
        if let Some(name) = &self.peer {
            return self.run_peer(&Peer::new(name, self.python.options_for(name)?)?);
        }
        let (Some(case), Some(result)) = (&self.case, &self.result) else {
            return Err(Error::input("expected CASE and RESULT, or --peer"));
        };
        let inputs = open_case(case)?.inputs;
        let found = read_results(result, &inputs)?;
        warn(result, &found.warnings);
        let pass = self.check(&inputs, &found, mode_of(inputs.dtype), [case, result])?;
        Ok(if pass { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }

    /// Prints the report on `found`, with the limits of `usual` unless the person chose others; tells whether it passes.
    fn check(
        &self,
        inputs: &Inputs,
        found: &ResultFile,
        usual: &'static str,
        [case, result]: [&Path; 2],
    ) -> Result<bool> {
        let truth = truth_for(found, inputs, case)?;
        check_truth(&truth).map_err(|error| Error::input(format!("{}: {error}", case.display())))?;
        let mode_name = self.tolerance.as_deref().map(mode).transpose()?.map_or(usual, |mode| mode.name);
        let judge = |mode_name| Report::of_call(inputs, &found.named(), &truth, mode_name);
        let checked = Checked {
            report: judge(mode_name)?,
            passes: passing_modes(judge)?,
            found,
            inputs,
            chosen: self.tolerance.is_some(),
        };
        print(&if self.json { checked.json(case, result) } else { checked.text() })?;
        Ok(checked.report.pass)
    }

    /// A peer on the case, or on seeded ones. One that fails on a case is tried on the others.
    fn run_peer(&self, peer: &Peer) -> Result<ExitCode> {
        let cases = match &self.case {
            Some(path) => vec![(path.display().to_string(), open_case(path)?.inputs.rounded_to(peer.input_format()))],
            None => seeded(self.op, peer.input_format())?,
        };
        let mut all_pass = true;
        for (name, inputs) in &cases {
            note(format_args!("{} on {name}", peer.name()));
            let found = match peer.call_as_far_as_it_goes(inputs) {
                Ok((found, None)) => found,
                Ok((found, Some(error))) => {
                    note(format_args!("no gradients: {error}"));
                    found
                }
                Err(error @ Error::Unsupported { .. }) => {
                    print(&self.failure(name, peer, &error))?;
                    all_pass = false;
                    continue;
                }
                Err(error) => return Err(error),
            };
            if !self.json {
                print(&format!("{name}\n"))?;
            }
            all_pass &= self.check(inputs, &found, peer.mode(), [Path::new(name), Path::new(peer.name())])?;
        }
        if let Some(about) = peer.about() {
            note(format_args!("with {about}"));
            about.refused.iter().for_each(|(backend, why)| note(format_args!("not {backend}: {why}")));
        }
        Ok(if all_pass { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }

    /// That `peer` gave no results for the case called `name`, as text or as JSON.
    fn failure(&self, name: &str, peer: &Peer, error: &Error) -> String {
        if !self.json {
            return format!("FAILED: {error}\n");
        }
        let object =
            serde_json::json!({"case": name, "result": peer.name(), "pass": false, "error": error.to_string()});
        format!("{object}\n")
    }
}

/// Cases for a kernel that nobody chose one for, with gradients.
fn seeded(op: Op, format: Format) -> Result<Vec<(String, Inputs)>> {
    let grouped = if op == Op::Gdn { 2 } else { 1 };
    let shape = Shape { qk_heads: 4 / grouped, ..Shape::new(1000, 4, 128, 128) };
    let whole = generate(op, &shape, Regime::Gaussian, 1)?;
    let cuts = [0, 1, 64, 127, 640, 1000];
    let packed = generate(op, &shape, Regime::LongMemory, 2)?.with_initial_state(2).packed(&cuts, 2)?;
    let named = |name: &str, inputs: Inputs| (format!("{name}, {}", inputs.shape), inputs.rounded_to(format));
    Ok(vec![named("gaussian", whole), named("long memory, packed, from a state", packed)])
}

/// The truth, with gradients where the results have some.
fn truth_for(found: &ResultFile, inputs: &Inputs, case: &Path) -> Result<Results> {
    if !found.has_gradients() {
        return Reference.forward(inputs);
    }
    if inputs.d_o.is_none() {
        return Err(Error::input(format!(
            "{}: the results hold gradients, so the case needs 'do', the gradient of o they were computed for",
            case.display()
        )));
    }
    Reference.backward(inputs)
}

/// The mode that a kernel with inputs of this dtype is expected to keep.
fn mode_of(dtype: Format) -> &'static str {
    match dtype {
        Format::F64 => "fp64",
        Format::F32 => "fp32",
        Format::Bf16 => "bf16",
        Format::F16 => "fp16",
        _ => "tf32",
    }
}

/// The format of q, k and v that a kernel of the mode takes, where that is narrower than binary32.
fn meant_for(mode: &str) -> Option<Format> {
    match mode {
        "bf16" | "f16-internals" => Some(Format::Bf16),
        "fp16" => Some(Format::F16),
        _ => None,
    }
}

/// Every mode whose limits all tensors keep.
fn passing_modes(judge: impl Fn(&'static str) -> Result<Report>) -> Result<Vec<&'static str>> {
    let mut passing = Vec::new();
    for mode in modes() {
        if judge(mode.name)?.pass {
            passing.push(mode.name);
        }
    }
    Ok(passing)
}

struct Checked<'a> {
    report: Report,
    passes: Vec<&'static str>,
    found: &'a ResultFile,
    inputs: &'a Inputs,
    /// Whether the mode was asked for.
    chosen: bool,
}

impl Checked<'_> {
    fn text(&self) -> String {
        let Self { report, found, inputs, .. } = self;
        let mut text = format!("{} {}, q, k and v in {}\n", inputs.op(), inputs.shape, inputs.dtype);
        if !self.chosen {
            let names: Vec<&str> = modes().iter().map(|mode| mode.name).collect();
            text += &format!(
                "tolerance {} because of that dtype; choose another with --tolerance ({})\n",
                report.mode.name,
                names.join(", ")
            );
        }
        if let Some(format) = meant_for(report.mode.name).filter(|format| !format.contains(inputs.dtype)) {
            text += &format!(
                "{} is meant for inputs in {format}; these are {}, so rounding them to {format} counts as error\n",
                report.mode.name, inputs.dtype
            );
        }
        text += &format!("\n{report}\n");
        if !found.missing.is_empty() {
            text += &format!("not in the results, so not compared: {}\n", found.missing.join(", "));
        }
        text + &self.conclusion()
    }

    fn conclusion(&self) -> String {
        let mode = self.report.mode.name;
        if self.report.pass {
            return format!("within tolerance {mode}\n");
        }
        let failed: Vec<&str> = self
            .report
            .verdicts
            .iter()
            .filter(|verdict| !verdict.pass)
            .map(|verdict| verdict.comparison.tensor.as_str())
            .collect();
        let elsewhere = match self.passes.as_slice() {
            [] => "and outside that of every other mode".to_owned(),
            others => format!("but within that of {}", others.join(", ")),
        };
        format!("OUTSIDE tolerance {mode} ({}), {elsewhere}\n", failed.join(", "))
    }

    fn json(&self, case: &Path, result: &Path) -> String {
        let stored: Vec<_> =
            self.found.tensors.iter().map(|(name, _, format)| ((*name).to_owned(), format.name().into())).collect();
        let object = serde_json::json!({
            "case": case.to_string_lossy(),
            "result": result.to_string_lossy(),
            "op": self.inputs.op(),
            "shape": self.inputs.shape,
            "dtype": self.inputs.dtype,
            "mode": self.report.mode.name,
            "pass": self.report.pass,
            "passes_as": self.passes,
            "tensors": self.report.verdicts,
            "stored_as": serde_json::Map::from_iter(stored),
            "missing": self.found.missing,
        });
        format!("{object}\n")
    }
}
