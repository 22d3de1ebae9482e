//! Somebody's kernel behind the trait of all kernels.

use super::bridge::{About, Answer, Bridge, places};
use super::results::{ResultFile, read_results};
use super::{Destination, write_case};
use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Results};
use crate::{Error, Result};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Libraries that are known by their names.
const LIBRARIES: [&str; 3] = ["fla", "flash_qla", "flashinfer"];
/// The Python that runs peers, where none is named.
const PYTHON: &str = "python3";
/// Variables that name another, and the seconds that an answer may take.
const PYTHON_VARIABLE: &str = "GDNLAB_PYTHON";
const TIMEOUT_VARIABLE: &str = "GDNLAB_PEER_TIMEOUT";
/// Time that an answer may take: libraries compile and tune for minutes before their first one.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Calls one after the other without an answer in time, after which a peer is not asked any more.
const PATIENCE: usize = 2;

/// Where and how peers run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerOptions {
    /// The user's Python.
    pub python: PathBuf,
    /// Time that one answer may take, compilation included.
    pub timeout: Duration,
}

impl PeerOptions {
    /// As the variables `GDNLAB_PYTHON` and `GDNLAB_PEER_TIMEOUT` say, or else `python3` and ten minutes.
    ///
    /// # Errors
    /// [`Error::Input`] where the time is no number of seconds.
    pub fn from_environment() -> Result<Self> {
        let timeout = match std::env::var(TIMEOUT_VARIABLE) {
            Ok(text) => {
                let seconds = text.trim().parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                seconds.filter(|time| !time.is_zero()).ok_or_else(|| {
                    Error::input(format!("{TIMEOUT_VARIABLE} = '{text}': expected seconds, such as 600"))
                })?
            }
            Err(_) => TIMEOUT,
        };
        let python = std::env::var_os(PYTHON_VARIABLE).map_or_else(|| PathBuf::from(PYTHON), PathBuf::from);
        Ok(Self { python, timeout })
    }
}

/// What a peer is asked to time, and how long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeerTiming {
    /// The backward alone, or the forward.
    pub backward: bool,
    /// Time that runs go on before the first sample.
    pub warm_up: Duration,
    /// Samples at the least and at the most.
    pub samples: [usize; 2],
    /// Time after which no sample begins once there are enough.
    pub time: Duration,
    /// Bytes that are written before each sample, so that the L2 cache is cold.
    pub flush_bytes: usize,
}

/// Times that a peer took.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerSamples {
    /// Every sample in milliseconds.
    pub ms: Vec<f64>,
    /// How they were taken: `graph`, `events` or `clock`.
    pub timed_by: String,
}

/// A kernel of somebody else, in a Python process of its own.
///
/// `fla`, `flash_qla`, `flashinfer`, or `module:function`; `bridge.py` says how a function is called. Behind an `@`
/// stands the format of q, k and v: `fla@f32`. Libraries take bf16 without it, a function f32.
pub struct Peer {
    name: String,
    /// The name without the format.
    call: String,
    format: Format,
    mode: &'static str,
    options: PeerOptions,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    bridge: Option<Bridge>,
    /// How many of [`places`] turned out to be too small.
    too_small: usize,
    /// Calls without an answer in time since the last answer.
    late: usize,
    /// Whether the last call that failed had begun, so that a smaller one may go well.
    begun: bool,
    about: Option<About>,
}

impl Peer {
    /// Whether `name` is that of a library, which compiles and tunes in its first calls.
    pub fn is_library(name: &str) -> bool {
        LIBRARIES.contains(&name.split('@').next().unwrap_or_default())
    }

    /// Whether `name` is that of a peer, rather than of a kernel of this build.
    pub fn is_name(name: &str) -> bool {
        let call = name.split('@').next().unwrap_or_default();
        Self::is_library(name) || call.split_once(':').is_some_and(|(module, _)| !module.contains(['/', ' ']))
    }

    /// The peer called `name`; nothing is started yet.
    ///
    /// # Errors
    /// [`Error::Input`] where `name` is neither a known library nor `module:function`, or its format is none of f32, bf16
    /// and f16.
    pub fn new(name: &str, options: PeerOptions) -> Result<Self> {
        let (call, format) = name.split_once('@').map_or((name, None), |(call, format)| (call, Some(format)));
        let is_function =
            call.split_once(':').is_some_and(|(module, function)| !module.is_empty() && !function.is_empty());
        if !LIBRARIES.contains(&call) && !is_function {
            return Err(Error::input(format!(
                "peer '{name}': expected {} or MODULE:FUNCTION, a callable that Python can import",
                LIBRARIES.join(", ")
            )));
        }
        let (format, mode) = match (format, is_function) {
            (None | Some("f32"), true) => (Format::F32, "fp32"),
            // Triton multiplies f32 in TF32 unless it is told otherwise.
            (Some("f32"), false) => (Format::F32, "tf32"),
            (None, false) | (Some("bf16"), _) => (Format::Bf16, "bf16"),
            (Some("f16"), _) => (Format::F16, "fp16"),
            (Some(other), _) => {
                return Err(Error::input(format!("peer '{name}': format '{other}', expected f32, bf16 or f16")));
            }
        };
        Ok(Self {
            name: name.to_owned(),
            call: call.to_owned(),
            format,
            mode,
            options,
            state: Mutex::new(State::default()),
        })
    }

    /// Versions and settings of the last answer.
    pub fn about(&self) -> Option<About> {
        self.state().about.clone()
    }

    /// What the peer makes of `inputs`, as far as it gave results. The backward is asked for where `backward` says so.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the peer is missing, raised, has no such call, hung or died, in words;
    /// [`Error::Input`] where there is no Python, or results have other shapes than `inputs` ask for.
    pub fn call(&self, inputs: &Inputs, backward: bool) -> Result<ResultFile> {
        if backward && inputs.d_o.is_none() {
            return Err(Error::input("the backward needs 'do', the gradient of the output, shape [B, T, HV, V]"));
        }
        let answer = self.ask(&|case| write_case(case, inputs), backward, None)?;
        self.results(&answer, |path| read_results(path, inputs))
    }

    /// Forward and backward, as far as `inputs` and the peer allow: the forward alone, and why, where the backward raised. One
    /// that is missing, hung or died is not asked for less.
    ///
    /// # Errors
    /// As [`Peer::call`].
    pub fn call_as_far_as_it_goes(&self, inputs: &Inputs) -> Result<(ResultFile, Option<Error>)> {
        if inputs.d_o.is_none() || !self.has_backward() {
            return Ok((self.call(inputs, false)?, None));
        }
        match self.call(inputs, true) {
            Ok(found) => Ok((found, None)),
            Err(why @ Error::Unsupported { .. }) if self.state().begun => Ok((self.call(inputs, false)?, Some(why))),
            Err(error) => Err(error),
        }
    }

    /// Times the peer on `inputs`.
    ///
    /// # Errors
    /// As [`Peer::call`].
    pub fn time(&self, inputs: &Inputs, timing: &PeerTiming) -> Result<PeerSamples> {
        self.time_case(&|case| write_case(case, inputs), timing)
    }

    /// The same on the case that `write` writes.
    pub(crate) fn time_case(
        &self,
        write: &dyn Fn(&Destination) -> Result<()>,
        timing: &PeerTiming,
    ) -> Result<PeerSamples> {
        let answer = self.ask(write, timing.backward, Some(timing))?;
        match (answer.samples_ms, answer.timed_by) {
            (Some(ms), Some(timed_by)) if !ms.is_empty() => Ok(PeerSamples { ms, timed_by }),
            _ => Err(self.unsupported("it gave no times")),
        }
    }

    /// What `read` finds in the file of results of the case that `write` writes.
    pub(crate) fn call_case<T>(
        &self,
        write: &dyn Fn(&Destination) -> Result<()>,
        backward: bool,
        read: impl FnOnce(&Path) -> Result<T>,
    ) -> Result<T> {
        let answer = self.ask(write, backward, None)?;
        self.results(&answer, read)
    }

    fn results<T>(&self, answer: &Answer, read: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        let Some(path) = &answer.result else { return Err(self.unsupported("it gave no results")) };
        let results = read(path).map_err(|error| self.unsupported(error.to_string()));
        // It is of no use to anybody else.
        let _ = std::fs::remove_file(path);
        results
    }

    /// Writes a case and asks for what is made of it.
    fn ask(
        &self,
        write: &dyn Fn(&Destination) -> Result<()>,
        backward: bool,
        timing: Option<&PeerTiming>,
    ) -> Result<Answer> {
        let mut state = self.state();
        state.begun = false;
        if state.late >= PATIENCE {
            return Err(self.unsupported(format!(
                "it gave no answer in time {PATIENCE} times one after the other, so it is not asked any more"
            )));
        }
        let (mut bridge, case) = self.bridge_with_case(&mut state, write)?;
        let request = json!({
            "case": case,
            "result": bridge.file("result.safetensors"),
            "backward": backward,
            "timing": timing.map(|timing| json!({
                "warm_up_ms": 1e3 * timing.warm_up.as_secs_f64(),
                "min_samples": timing.samples[0],
                "max_samples": timing.samples[1],
                "time_ms": 1e3 * timing.time.as_secs_f64(),
                "flush_bytes": timing.flush_bytes,
            })),
        });
        // A bridge without an answer is dropped, and the next call starts a new one.
        let answer = bridge.ask(&request, self.options.timeout).map_err(|silence| {
            state.late = if silence.late { state.late + 1 } else { 0 };
            self.unsupported(silence.words)
        })?;
        state.late = 0;
        let _ = std::fs::remove_file(&case);
        if !answer.spent {
            state.bridge = Some(bridge);
        }
        state.about = Some(answer.about.clone());
        match answer.failure() {
            Some(why) => {
                state.begun = answer.was_begun();
                Err(self.unsupported(why))
            }
            None => Ok(answer),
        }
    }

    /// A bridge with the case in its folder, which goes to the next place where it does not fit.
    fn bridge_with_case(
        &self,
        state: &mut State,
        write: &dyn Fn(&Destination) -> Result<()>,
    ) -> Result<(Bridge, PathBuf)> {
        let places = places();
        loop {
            let place = &places[state.too_small.min(places.len() - 1)];
            let bridge = match state.bridge.take() {
                Some(bridge) => bridge,
                None => Bridge::start(&self.options.python, &self.call, place)?,
            };
            let case = bridge.file("case.safetensors");
            match Destination::new(&case, &[]).and_then(|destination| write(&destination)) {
                Ok(()) => return Ok((bridge, case)),
                Err(Error::Io { .. }) if state.too_small + 1 < places.len() => state.too_small += 1,
                Err(error) => return Err(error),
            }
        }
    }

    fn unsupported(&self, reason: impl Into<String>) -> Error {
        Error::Unsupported { kernel: self.name.clone(), reason: reason.into() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kernel for Peer {
    fn name(&self) -> &str {
        &self.name
    }

    fn summary(&self) -> String {
        format!("{} in {}", self.call, self.options.python.display())
    }

    fn needs(&self) -> &'static str {
        "a Python that can import it"
    }

    fn on_gpu(&self) -> bool {
        self.state().about.as_ref().is_some_and(|about| about.gpu.is_some())
    }

    fn software(&self) -> Option<String> {
        self.about().map(|about| about.to_string())
    }

    fn has_backward(&self) -> bool {
        self.call != "flashinfer"
    }

    fn ops(&self) -> &'static [Op] {
        if matches!(self.call.as_str(), "flash_qla" | "flashinfer") { &[Op::Gdn] } else { &Op::ALL }
    }

    fn mode(&self) -> &'static str {
        self.mode
    }

    fn input_format(&self) -> Format {
        self.format
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        inputs.validate()?;
        self.call(inputs, false)?.into_results(false).map_err(|why| self.unsupported(why))
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        inputs.validate()?;
        self.call(inputs, true)?.into_results(true).map_err(|why| self.unsupported(why))
    }
}

#[cfg(test)]
#[path = "kernel_tests.rs"]
mod tests;
