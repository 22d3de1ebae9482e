//! The code and the machine that a record was measured with.

use crate::cuda::Gpu;
use crate::kernel::Kernel;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

/// Code, time and machine of a measurement. What cannot be found out is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// Git commit of the sources.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Whether the code that computes (the crate, the kernels, the pinned dependencies) differs from that commit.
    /// Notebooks, figures and data are not asked about: a run writes them itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty: Option<bool>,
    /// Time of the measurement in UTC, as RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utc: Option<String>,
    /// Versions and settings of other people's software that computed, in one line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub software: Option<String>,
    /// The machine.
    #[serde(default)]
    pub machine: Machine,
}

/// A machine, in the words of its operating system and its drivers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Name of the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// Compute capability of the GPU, such as `9.0`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<String>,
    /// Version of the GPU driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Version of CUDA that the driver implements.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cuda: Option<String>,
    /// Version of the compiler that made the code for the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvrtc: Option<String>,
    /// Name of the CPU, or of its architecture where it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// Operating system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub os: Option<String>,
    /// Compiler of this crate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rustc: Option<String>,
}

impl Environment {
    /// What can be found out about this process. The GPU belongs to it once something ran there; this starts none.
    pub fn detect() -> Self {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
        Self {
            commit: git(sources, &["rev-parse", "HEAD"]),
            dirty: git(sources, &["status", "--porcelain", "--", ".", "../kernels", "../Cargo.lock"])
                .map(|changes| !changes.is_empty()),
            utc: Self::now(),
            software: None,
            machine: Machine::detect(),
        }
    }

    /// The time now, as [`Environment::utc`] has it.
    pub fn now() -> Option<String> {
        Some(humantime::format_rfc3339_seconds(SystemTime::now()).to_string())
    }

    /// This environment for a measurement of `kernel`, after it ran: with the GPU where the kernel runs on it, and without
    /// where it does not, whatever else this process does.
    pub fn of_kernel(&self, kernel: &dyn Kernel) -> Self {
        // A peer runs on the GPU from a process of its own, so that this one may not have asked for it yet.
        let gpu = if kernel.on_gpu() { Gpu::in_use().or_else(|| Gpu::shared().ok()) } else { None };
        Self { machine: self.machine.clone().with_gpu(gpu), software: kernel.software(), ..self.clone() }
    }

    /// The date of the measurement, `YYYY-MM-DD`.
    pub fn date(&self) -> Option<&str> {
        self.utc.as_deref()?.get(..10)
    }
}

impl Machine {
    /// CPU, operating system, compiler, and the GPU if this process has used it.
    pub fn detect() -> Self {
        let machine = Self {
            cpu: Some(cpu_name()),
            os: Some(os_name()),
            rustc: option_env!("GDNLAB_RUSTC").map(str::to_owned),
            ..Self::default()
        };
        machine.with_gpu(Gpu::in_use())
    }

    /// The same machine with `gpu` as its only one, or without.
    fn with_gpu(self, gpu: Option<&Gpu>) -> Self {
        let version = |(major, minor): (u32, u32)| format!("{major}.{minor}");
        Self {
            gpu: gpu.map(|gpu| gpu.name.clone()),
            compute_capability: gpu.map(|gpu| version(gpu.capability)),
            driver: gpu.and_then(Gpu::driver_version),
            cuda: gpu.map(|gpu| version(gpu.cuda)),
            nvrtc: gpu.and_then(Gpu::compiler_version),
            ..self
        }
    }

    /// The names of the GPU and the CPU: `NVIDIA H200 with AMD EPYC`, or the CPU alone.
    pub fn name(&self) -> String {
        let cpu = self.cpu.as_deref().unwrap_or("unknown CPU");
        self.gpu.as_deref().map_or_else(|| cpu.to_owned(), |gpu| format!("{gpu} with {cpu}"))
    }

    /// The name of the GPU, or else of the CPU, as it can stand in a file name: lower case, words joined by `-`.
    pub fn slug(&self) -> String {
        let name = self.gpu.as_deref().or(self.cpu.as_deref()).unwrap_or("unknown");
        let lower: String =
            name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { ' ' }).collect();
        let words: Vec<&str> =
            lower.split_whitespace().filter(|word| !matches!(*word, "r" | "tm" | "cpu" | "processor")).collect();
        if words.is_empty() { "unknown".to_owned() } else { words.join("-") }
    }
}

/// What `git` prints in `folder`; `None` without git, outside a repository, or where it fails.
fn git(folder: &Path, args: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(folder).args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

/// x86 names its model in /proc/cpuinfo; on aarch64 the firmware names the board instead.
fn cpu_name() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = value_of(&cpuinfo, "model name", ':').or_else(|| {
        ["/sys/firmware/devicetree/base/model", "/sys/class/dmi/id/product_name"]
            .iter()
            .filter_map(|path| std::fs::read_to_string(path).ok())
            .map(|name| name.trim_matches(['\0', '\n', ' ']).to_owned())
            .find(|name| !name.is_empty())
    });
    model.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

fn os_name() -> String {
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = value_of(&release, "PRETTY_NAME", '=').unwrap_or_else(|| std::env::consts::OS.to_owned());
    format!("{}, {}", name.trim_matches('"'), std::env::consts::ARCH)
}

/// The value of the first line `key <separator> value`.
fn value_of(text: &str, key: &str, separator: char) -> Option<String> {
    text.lines()
        .filter_map(|line| line.split_once(separator))
        .find(|(name, _)| name.trim() == key)
        .map(|(_, value)| value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_detected_environment_names_time_and_machine() {
        let environment = Environment::detect();
        let utc = environment.utc.clone().unwrap();
        assert!(humantime::parse_rfc3339(&utc).is_ok(), "{utc}");
        assert_eq!(environment.date().unwrap().len(), 10);
        assert!(environment.machine.cpu.is_some() && environment.machine.os.is_some());
        assert!(environment.machine.rustc.unwrap().starts_with("rustc 1."));
    }

    #[test]
    fn a_kernel_of_the_cpu_was_not_measured_on_a_gpu() {
        let gpu = Some("NVIDIA H200".to_owned());
        let machine = Machine { gpu, compute_capability: Some("9.0".to_owned()), ..Machine::detect() };
        let environment = Environment { machine, ..Environment::default() }.of_kernel(&crate::reference::Reference);
        assert_eq!((environment.machine.gpu, environment.machine.compute_capability), (None, None));
        assert!(environment.machine.cpu.is_some());
    }

    #[test]
    fn a_folder_outside_any_repository_has_no_commit() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(git(folder.path(), &["rev-parse", "HEAD"]), None);
        assert_eq!(git(Path::new("/no/such/folder"), &["rev-parse", "HEAD"]), None);
    }

    #[test]
    fn slugs_are_file_names() {
        let cpu = |name: &str| Machine { cpu: Some(name.to_owned()), ..Machine::default() };
        assert_eq!(cpu("Intel(R) Xeon(R) CPU @ 2.20GHz").slug(), "intel-xeon-2-20ghz");
        assert_eq!(cpu("../../").slug(), "unknown");
        assert_eq!(Machine::default().slug(), "unknown");
        let gpu = Machine { gpu: Some("NVIDIA H200".to_owned()), ..cpu("x") };
        assert_eq!(gpu.slug(), "nvidia-h200");
    }

    #[test]
    fn values_are_found_by_their_key() {
        let text = "processor\t: 0\nmodel name\t: A B: C\n";
        assert_eq!(value_of(text, "model name", ':').as_deref(), Some("A B: C"));
        assert_eq!(value_of(text, "model", ':'), None);
    }
}
