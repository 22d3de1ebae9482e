//! The source of Rust's standard library, from which the kernel learns the types of variables.
//!
//! Without it every `let` would need a type, and evcxr would try to have rustup fetch it, silently, at each start.

use super::{announce, fetch, output_of, remove_folder};
use crate::checkout::Checkout;
use gdnlab::{Error, Result};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names where a missing source comes from: `rustup` (if unset) or `debian`, whose package of it needs no rustup.
const ORIGIN: &str = "GDNLAB_STD_SOURCE";

/// The kernel hangs on a source that is much older than the compiler: 1.63 with 1.95. A newer one works.
const OLDEST_BEHIND: u32 = 10;
/// The kernel looks for `vec!` and its like in the prelude of the standard library, and cannot tell the type of what they give
/// where they are not there: in 1.85, but not in 1.96.
const PRELUDE: &str = "std/src/prelude/v1.rs";
const MACRO_OF_PRELUDE: &str = "matches";

/// The folder `library` of a source that fits, if there is one: `RUST_SRC_PATH`, the toolchain's own, or our copy.
///
/// # Errors
/// [`Error::Input`] where `RUST_SRC_PATH` is set to something else.
pub fn find(checkout: &Checkout) -> Result<Option<PathBuf>> {
    let compiler = compiler_minor()?;
    if let Some(given) = std::env::var_os("RUST_SRC_PATH") {
        let given = PathBuf::from(given);
        return match unfit(&given, compiler) {
            None => Ok(Some(given)),
            Some(reason) => Err(Error::input(format!(
                "RUST_SRC_PATH={}: {reason}; expected the folder `library` of Rust's source, or leave it unset",
                given.display()
            ))),
        };
    }
    let choices = [in_sysroot()?, copy(checkout)];
    Ok(choices.into_iter().find(|library| unfit(library, compiler).is_none()))
}

/// Fetches the source where none is found.
pub fn ensure(checkout: &Checkout) -> Result<()> {
    if find(checkout)?.is_some() {
        return Ok(());
    }
    match std::env::var(ORIGIN).as_deref() {
        Ok("debian") => from_debian(checkout)?,
        Ok("rustup") | Err(_) => from_rustup()?,
        Ok(other) => return Err(Error::input(format!("{ORIGIN}={other}: expected `rustup` or `debian`"))),
    }
    if find(checkout)?.is_some() {
        return Ok(());
    }
    let reason = unfit(&copy(checkout), compiler_minor()?).unwrap_or_else(|| "it is not there".to_owned());
    Err(Error::input(format!(
        "the source of the standard library was fetched, but does not serve: {reason}. Where it came from Debian, `apt-get \
         update` may bring a newer one; or set RUST_SRC_PATH to the folder `library` of the source of your compiler"
    )))
}

fn from_rustup() -> Result<()> {
    announce("fetching the source of the standard library (rustup component add rust-src)");
    let mut rustup = Command::new("rustup");
    fetch("rustup component add rust-src", rustup.args(["component", "add", "rust-src"])).map(drop).map_err(|error| {
        Error::input(format!(
            "{error}. Without rustup, set RUST_SRC_PATH to the folder `library` of Rust's source, \
                 or {ORIGIN}=debian to take it from Debian's package rust-web-src"
        ))
    })
}

fn from_debian(checkout: &Checkout) -> Result<()> {
    announce("fetching the source of the standard library (Debian's package rust-web-src)");
    let partial = checkout.tools().join("rust-src.partial");
    remove_folder(&partial)?;
    std::fs::create_dir_all(&partial).map_err(|source| Error::io(&partial, source))?;
    fetch("apt-get download", Command::new("apt-get").args(["download", "rust-web-src"]).current_dir(&partial))?;
    let package = entry(&partial, |name| name.as_encoded_bytes().ends_with(b".deb"))?;
    output_of("dpkg-deb --extract", Command::new("dpkg-deb").arg("--extract").args([&package, &partial]))?;
    let unpacked = entry(&partial.join("usr/src"), |name| name.as_encoded_bytes().starts_with(b"rustc"))?;
    let library = copy(checkout);
    remove_folder(&library)?;
    if let Some(folder) = library.parent() {
        std::fs::create_dir_all(folder).map_err(|source| Error::io(folder, source))?;
    }
    std::fs::rename(unpacked.join("library"), &library).map_err(|source| Error::io(&library, source))?;
    remove_folder(&partial)
}

/// The entry of `folder` whose name fits.
fn entry(folder: &Path, fits: impl Fn(&OsStr) -> bool) -> Result<PathBuf> {
    let entries = std::fs::read_dir(folder).map_err(|source| Error::io(folder, source))?;
    let found = entries.flatten().find(|entry| fits(&entry.file_name()));
    found.map(|entry| entry.path()).ok_or_else(|| {
        Error::input(format!("{}: the package rust-web-src does not hold what was expected", folder.display()))
    })
}

fn copy(checkout: &Checkout) -> PathBuf {
    checkout.tools().join("rust-src/library")
}

fn in_sysroot() -> Result<PathBuf> {
    let sysroot = output_of("rustc --print sysroot", Command::new("rustc").args(["--print", "sysroot"]))?;
    Ok(Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library"))
}

fn compiler_minor() -> Result<u32> {
    let text = output_of("rustc --version", Command::new("rustc").arg("--version"))?;
    let minor = text.strip_prefix("rustc 1.").and_then(|rest| rest.split('.').next()).and_then(|n| n.parse().ok());
    minor.ok_or_else(|| Error::input(format!("cannot read the version of rustc from `{}`", text.trim())))
}

/// Why `library` cannot serve a compiler of version 1.`compiler`, if it cannot.
fn unfit(library: &Path, compiler: u32) -> Option<String> {
    if let Some(missing) = ["core", "alloc", "std"].iter().find(|name| !library.join(name).join("src/lib.rs").is_file())
    {
        return Some(format!("no {missing}/src/lib.rs in it"));
    }
    let prelude = std::fs::read_to_string(library.join(PRELUDE)).unwrap_or_default();
    match newest_feature(&library.join("core/src")) {
        Some(version) if version + OLDEST_BEHIND >= compiler && !prelude.contains(MACRO_OF_PRELUDE) => {
            Some(format!("it is the source of Rust 1.{version}, whose prelude has no `{MACRO_OF_PRELUDE}!`"))
        }
        Some(version) if version + OLDEST_BEHIND >= compiler => None,
        Some(version) => Some(format!("it is the source of Rust 1.{version}, too old for 1.{compiler}")),
        None => Some("it does not tell which version of Rust it is".to_owned()),
    }
}

/// The newest version 1.x since which anything in these files is stable: there is no other note of the version.
fn newest_feature(folder: &Path) -> Option<u32> {
    let entries = std::fs::read_dir(folder).ok()?;
    let paths = entries.flatten().map(|entry| entry.path());
    let of_path = |path: PathBuf| {
        if path.is_dir() { newest_feature(&path) } else { newest_in(&std::fs::read_to_string(path).ok()?) }
    };
    paths.filter_map(of_path).max()
}

fn newest_in(text: &str) -> Option<u32> {
    let versions = text.split("stable(feature = ").skip(1).filter_map(|rest| {
        let (_, since) = rest.split(')').next()?.split_once("since = \"1.")?;
        since.split('.').next()?.parse().ok()
    });
    versions.max()
}

#[cfg(test)]
#[path = "std_source_tests.rs"]
mod tests;
