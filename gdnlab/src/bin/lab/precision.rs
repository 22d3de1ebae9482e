//! `cargo lab precision`.

use crate::checkout::Checkout;
use crate::output::{Interrupt, note, print, recorded};
use gdnlab::memory::require;
use gdnlab::notebook::text_of_tables;
use gdnlab::numerics::Step;
use gdnlab::precision::Format;
use gdnlab::problem::{Op, Shape};
use gdnlab::record::{self, Record};
use gdnlab::rounding::{
    Judged, Setting, THRESHOLD, Trial, judge, proposal, proposals, run, search, trials_of_diagnosis, trials_of_steps,
};
use gdnlab::{Error, Result, table};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Name of the records' file in `data/`.
const SUITE: &str = "day03_precision";
/// Least time between two lines of progress.
const BETWEEN_LINES: Duration = Duration::from_secs(1);

/// Find out which intermediate of GDN-2's chunk form may be rounded, and what a wider one costs.
///
/// Inputs are those of the request for comments on GDN-2's intermediate precision: almost collinear keys in bf16. Four parts:
/// `steps` rounds one intermediate at a time in an otherwise float64 chunk algebra, to bf16, fp16, TF32 and fp32; `diagnosis`
/// emulates what was tried on a GPU, such as normalising q and k in bf16; `forward` and `backward` search for the cheapest
/// policy of formats whose error is at most 0.8 %. Everything is emulated on the CPU and the same for the same seed. Rows that
/// are recorded in `data/` for this commit and this machine are not measured again, unless the code was changed since the
/// commit. Ctrl-C ends early; with --save, what was measured is kept, and the next call goes on from there.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab precision                          every part
  cargo lab precision steps --seed 1 2 3       the rounding table for three seeds
  cargo lab precision forward --tokens 1024    the search on longer sequences
  cargo lab precision --save                   every part, each row kept in data/ as soon as it is measured")]
pub struct Args {
    /// Parts, all four without any.
    #[arg(value_enum)]
    part: Vec<Part>,
    /// Seeds of the inputs.
    #[arg(long, value_name = "N", num_args = 1.., default_values_t = [1])]
    seed: Vec<u64>,
    /// Tokens. Without it, 64 for steps, 5120 for diagnosis, and 128 for forward and backward.
    #[arg(long, value_name = "T")]
    tokens: Option<usize>,
    /// Number of heads.
    #[arg(long, value_name = "H", default_value_t = 12)]
    heads: usize,
    /// Dimension of keys and of values.
    #[arg(long, value_name = "K", default_value_t = 128)]
    dim: usize,
    /// Measure again what is recorded already.
    #[arg(long)]
    again: bool,
    /// Add each row to the records in `data/` as soon as it is measured.
    #[arg(long)]
    save: bool,
    /// Print records, one JSON object a line, instead of the tables.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Steps,
    Diagnosis,
    Forward,
    Backward,
}

impl Part {
    const ALL: [Self; 4] = [Self::Steps, Self::Diagnosis, Self::Forward, Self::Backward];

    fn tokens(self) -> usize {
        match self {
            Self::Steps => 64,
            Self::Diagnosis => 5120,
            Self::Forward | Self::Backward => 128,
        }
    }
}

/// What the parts need while they run.
struct Session {
    data: PathBuf,
    known: Vec<Record>,
    interrupt: Interrupt,
    save: bool,
    kept: Option<PathBuf>,
    records: Vec<Record>,
    said: Option<Instant>,
}

impl Session {
    /// The records of `trials`; an error that says so where the person stopped.
    fn measure(&mut self, trials: &[Trial]) -> Result<Vec<Record>> {
        let Self { data, known, interrupt, save, kept, said, .. } = self;
        let mut keep = |records: &[Record]| {
            if *save {
                *kept = Some(record::keep(&data, SUITE, records)?);
            }
            Ok(())
        };
        let finished = run(trials, known, &mut keep, |step: &Step| {
            if said.is_none_or(|at| at.elapsed() >= BETWEEN_LINES) {
                *said = Some(Instant::now());
                note(format_args!("[{}/{}] {}", step.done + 1, step.total, step.name));
            }
            interrupt.control()
        })?;
        self.records.extend_from_slice(&finished.records);
        if finished.stopped { Err(Error::Stopped) } else { Ok(finished.records) }
    }
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        let parts: Vec<Part> =
            Part::ALL.into_iter().filter(|part| self.part.is_empty() || self.part.contains(part)).collect();
        for part in &parts {
            self.check(*part)?;
        }
        let data = Checkout::find()?.root().join("data");
        let known = if self.again { Vec::new() } else { recorded(&data)? };
        let interrupt = Interrupt::new()?;
        let mut session =
            Session { data, known, interrupt, save: self.save, kept: None, records: Vec::new(), said: None };
        let mut stopped = false;
        for &seed in &self.seed {
            for &part in &parts {
                match self.part(part, seed, &mut session) {
                    Ok(text) if !self.json => print(&text)?,
                    Ok(_) => {}
                    Err(Error::Stopped) => stopped = true,
                    Err(error) => return Err(error),
                }
                if stopped {
                    break;
                }
            }
        }
        if self.json {
            print(&record::to_json_lines(&session.records)?)?;
        }
        if let Some(path) = session.kept {
            note(format_args!("records: {}", Checkout::find()?.relative(&path)));
        }
        Ok(if stopped { Interrupt::EXIT_CODE.into() } else { ExitCode::SUCCESS })
    }

    fn setting(&self, part: Part, seed: u64) -> Setting {
        let tokens = self.tokens.unwrap_or_else(|| part.tokens());
        Setting { shape: Shape::new(tokens, self.heads, self.dim, self.dim), seed }
    }

    /// Refuses what cannot run before anything does: sizes, and inputs, truth and results that do not fit into memory.
    fn check(&self, part: Part) -> Result<()> {
        let shape = self.setting(part, 0).shape;
        shape.validate()?;
        if shape.tokens == 0 {
            return Err(Error::input("--tokens 0: expected at least 1"));
        }
        if part == Part::Steps && shape.tokens > 64 {
            let tokens = shape.tokens;
            return Err(Error::input(format!("steps of {tokens} tokens: expected one chunk, at most 64 tokens")));
        }
        let bytes = shape.bytes(Op::Gdn2, 1, part != Part::Diagnosis && part != Part::Forward).saturating_mul(2);
        require(bytes).map_err(|error| Error::input(format!("{shape}: {error}")))
    }

    /// Measures a part; its tables as text.
    fn part(&self, part: Part, seed: u64, session: &mut Session) -> Result<String> {
        let setting = self.setting(part, seed);
        let published = session.data.join("published");
        let words = format!("T = {}, H = {}, seed {seed}", setting.shape.tokens, setting.shape.value_heads);
        let percent = 100.0 * THRESHOLD;
        match part {
            Part::Steps => {
                let records = session.measure(&trials_of_steps(setting))?;
                let output = table::rounding(&records, published)?;
                let [bf16, fp16] =
                    [Format::Bf16, Format::F16].map(|format| table::rounding_per_tensor(&records, format));
                Ok(text_of_tables(&[
                    (&format!("one step rounded, relative RMS error of o in %, {words}"), &output),
                    ("every tensor, the step in bf16, %", &bf16?),
                    ("every tensor, the step in fp16, %", &fp16?),
                ]) + "\n")
            }
            Part::Diagnosis => {
                let records = session.measure(&trials_of_diagnosis(setting))?;
                let table = table::diagnosis(&records, published)?;
                Ok(text_of_tables(&[(&format!("relative RMS error of o in %, {words}"), &table)]) + "\n")
            }
            Part::Forward => {
                let judged = judge(&session.measure(&search::forward(setting))?)?;
                let title = format!("{} forward policies, error of o at most {percent} %, {words}", judged.len());
                proposed(&title, &judged)
            }
            Part::Backward => {
                let forward = judge(&session.measure(&search::forward(setting))?)?;
                let start = proposal(&forward, THRESHOLD).ok_or_else(|| {
                    Error::input(format!(
                        "no forward policy errs by at most {percent} %: there is nothing to go on from"
                    ))
                })?;
                let judged = judge(&session.measure(&search::backward(setting, &start.choice))?)?;
                let title =
                    format!("{} backward policies, error of every gradient at most {percent} %, {words}", judged.len());
                proposed(&title, &judged)
            }
        }
    }
}

/// The table of what a search proposes.
fn proposed(title: &str, judged: &[Judged]) -> Result<String> {
    Ok(text_of_tables(&[(title, &table::proposals(&proposals(judged, THRESHOLD)?, &[])?)]) + "\n")
}
