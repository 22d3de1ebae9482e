//! From CUDA C++ to machine code: a kernel file, its macros, and the architecture to compile for.

use super::cache::{Cache, Key};
use super::locate::Compiler;
use super::nvrtc::{Nvrtc, Unit};
use super::report::Report;
use crate::{Error, Result};
use std::borrow::Cow;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// Name and text of each file in `kernels/`, in the order of their names.
const EMBEDDED: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// A kernel file with the headers that it includes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// File name, such as `recurrent.cu`.
    pub name: String,
    /// CUDA C++.
    pub text: String,
    /// Name and text of each header that it includes, directly or through another.
    pub headers: Vec<(String, String)>,
}

/// Names of the kernel files, without `.cu`.
pub fn sources() -> Vec<&'static str> {
    EMBEDDED.iter().filter_map(|(name, _)| name.strip_suffix(".cu")).collect()
}

/// The kernel file `kernels/{name}.cu` as it was when the crate was compiled; with `GDNLAB_KERNELS` set, as it is now in
/// that folder, so that a kernel can be worked on without compiling the crate.
///
/// # Errors
/// [`Error::Input`] where there is no such file, or it includes a header that is not there.
pub fn source(name: &str) -> Result<Source> {
    let file = format!("{name}.cu");
    let text = file_text(&file)?.into_owned();
    Source::with_headers(file, text)
}

/// The text of one of the files in `kernels/`.
fn file_text(file: &str) -> Result<Cow<'static, str>> {
    if let Some(folder) = std::env::var_os("GDNLAB_KERNELS").filter(|folder| !folder.is_empty()) {
        let path = Path::new(&folder).join(file);
        return std::fs::read_to_string(&path).map(Cow::Owned).map_err(|source| Error::io(path, source));
    }
    EMBEDDED.iter().find(|(name, _)| *name == file).map(|(_, text)| Cow::Borrowed(*text)).ok_or_else(|| {
        let names = EMBEDDED.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        Error::input(format!("no kernel file '{file}': expected one of {names}"))
    })
}

impl Source {
    /// A kernel that is not in `kernels/`; it may include the headers that are.
    ///
    /// # Errors
    /// [`Error::Input`] where it includes another.
    pub fn new(name: &str, text: &str) -> Result<Self> {
        Self::with_headers(name.to_owned(), text.to_owned())
    }

    fn with_headers(name: String, text: String) -> Result<Self> {
        let mut headers: Vec<(String, String)> = Vec::new();
        let mut wanted = included(&text);
        while let Some(header) = wanted.pop() {
            if headers.iter().all(|(known, _)| *known != header) {
                let text = file_text(&header)?.into_owned();
                wanted.extend(included(&text));
                headers.push((header, text));
            }
        }
        headers.sort();
        Ok(Self { name, text, headers })
    }
}

/// Names in the lines `#include "name"`.
fn included(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include"))
        .filter_map(|rest| rest.trim_start().strip_prefix('"')?.split_once('"'))
        .map(|(name, _)| name.to_owned())
        .collect()
}

/// One specialisation of a kernel file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Build {
    /// The kernel file.
    pub source: Source,
    /// Macros, each with its value: `("STATE", "double".into())` is `-DSTATE=double`.
    pub defines: Vec<(&'static str, String)>,
}

/// A compiled [`Build`].
#[derive(Clone, Debug, PartialEq)]
pub struct Compiled {
    /// Machine code, an ELF image.
    pub cubin: Vec<u8>,
    /// What the compiler said: warnings, and the report of ptxas.
    pub log: String,
    /// The same, read.
    pub report: Report,
    /// Version of NVRTC, such as `13.0`.
    pub compiler: String,
}

impl Build {
    /// Machine code for `architecture`, from `cache` or by compiling.
    ///
    /// # Errors
    /// [`Error::Gpu`] where there is no compiler, or it refuses the source.
    pub fn compiled(&self, architecture: Architecture, cache: &Cache) -> Result<Compiled> {
        let compiler = Compiler::find()?;
        let key = self.key(architecture, &compiler);
        if let Some(compiled) = cache.read(&key) {
            return Ok(compiled);
        }
        let compiled = self.compile(architecture, &compiler)?;
        cache.write(&key, &compiled);
        Ok(compiled)
    }

    /// Machine code for `architecture`, compiled now.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the compiler cannot be used, or refuses the source.
    pub fn compile(&self, architecture: Architecture, compiler: &Compiler) -> Result<Compiled> {
        let nvrtc = Nvrtc::open(&compiler.path)?;
        let options = self.options(nvrtc.architecture_for(architecture)?);
        let Source { name, text, headers } = &self.source;
        let output = nvrtc.compile(&Unit { name, text, headers, options: &options })?;
        let report = Report::read(&output.log, &output.cubin);
        Ok(Compiled { cubin: output.cubin, log: output.log, report, compiler: nvrtc.version()? })
    }

    /// Everything that the machine code depends on.
    fn key(&self, architecture: Architecture, compiler: &Compiler) -> Key {
        let mut key = self.key_of_source();
        for option in self.options(architecture) {
            key.add(&option);
        }
        key.add(&compiler.identity);
        key
    }

    /// What tells this build from others on one GPU.
    pub(super) fn fingerprint(&self) -> String {
        let mut key = self.key_of_source();
        key.add(&self.to_string());
        key.file_name()
    }

    fn key_of_source(&self) -> Key {
        let mut key = Key::new(&self.source.name);
        key.add(&self.source.text);
        for (name, text) in &self.source.headers {
            key.add(name);
            key.add(text);
        }
        key
    }

    fn options(&self, architecture: Architecture) -> Vec<String> {
        let fixed = ["--std=c++17", "--no-source-include", "--ptxas-options=-v"].map(str::to_owned);
        let defines = self.defines.iter().map(|(name, value)| format!("-D{name}={value}"));
        std::iter::once(format!("--gpu-architecture={architecture}")).chain(fixed).chain(defines).collect()
    }
}

impl fmt::Display for Build {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source.name)?;
        self.defines.iter().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}

/// What machine code is compiled for: `sm_80`, or `sm_90a` with the instructions that only this generation has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Architecture {
    /// First number of the compute capability.
    pub major: u32,
    /// Second number of the compute capability.
    pub minor: u32,
    /// With the instructions of this one architecture; the code then runs on no other.
    pub specific: bool,
}

impl Architecture {
    /// For a GPU of compute capability (`major`, `minor`): `sm_90a` on Hopper, whose matrix and copy instructions only
    /// that target has, and the portable target everywhere else.
    pub fn of((major, minor): (u32, u32)) -> Self {
        Self { major, minor, specific: (major, minor) == (9, 0) }
    }

    /// From a number such as 121.
    pub(super) fn portable(number: u32) -> Self {
        Self { major: number / 10, minor: number % 10, specific: false }
    }

    /// 90 for `sm_90a`.
    pub(super) fn number(self) -> u32 {
        self.major * 10 + self.minor
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.number(), if self.specific { "a" } else { "" })
    }
}

impl FromStr for Architecture {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let read = || {
            let number = text.strip_prefix("sm_")?;
            let specific = number.ends_with('a');
            let number: u32 = number.strip_suffix('a').unwrap_or(number).parse().ok()?;
            (number >= 10).then_some(Self { specific, ..Self::portable(number) })
        };
        read().ok_or_else(|| Error::input(format!("architecture '{text}': expected one such as sm_80 or sm_90a")))
    }
}
