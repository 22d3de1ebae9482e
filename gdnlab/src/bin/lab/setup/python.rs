//! A virtual environment with JupyterLab and the notebook client, in pinned versions.

use super::{announce, fetch, output_of, remove_folder, write_if_new};
use crate::checkout::Checkout;
use gdnlab::{Error, Result};
use std::process::Command;

/// What is installed. A copy in the environment, written last, says that it is complete.
const REQUIREMENTS: &str = include_str!("requirements.txt");

/// Oldest Python that the pinned packages support.
const OLDEST: (u32, u32) = (3, 10);

/// Prints the version, or fails at the import if `python3 -m venv` would fail.
const PROBE: &str = "import sys, venv, ensurepip; print(*sys.version_info[:2])";

pub fn ensure(checkout: &Checkout) -> Result<()> {
    let mark = checkout.venv().join("requirements.txt");
    let complete = std::fs::read_to_string(&mark).is_ok_and(|present| present == REQUIREMENTS);
    if complete && checkout.python().exists() {
        return Ok(());
    }
    check_python()?;
    announce("installing JupyterLab and the notebook client into .tools/venv (about a minute)");
    remove_folder(&checkout.venv())?;
    output_of("python3 -m venv", Command::new("python3").args(["-m", "venv"]).arg(checkout.venv()))?;
    let wanted = checkout.tools().join("requirements.txt");
    write_if_new(&wanted, REQUIREMENTS)?;
    let mut pip = Command::new(checkout.python());
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "-r"]).arg(&wanted);
    fetch("pip install", &mut pip)?;
    write_if_new(&mark, REQUIREMENTS)
}

fn check_python() -> Result<()> {
    let output = Command::new("python3").args(["-c", PROBE]).output();
    let output =
        output.map_err(|_| Error::input("python3 not found: Jupyter needs Python 3.10 or newer on the PATH"))?;
    if !output.status.success() {
        return Err(Error::input(
            "python3 cannot make virtual environments: install its `venv` module \
             (Debian and Ubuntu: apt-get install python3-venv)",
        ));
    }
    match version(&String::from_utf8_lossy(&output.stdout)) {
        Some(version) if version >= OLDEST => Ok(()),
        Some((major, minor)) => Err(Error::input(format!(
            "python3 is Python {major}.{minor}: Jupyter needs {}.{} or newer on the PATH",
            OLDEST.0, OLDEST.1
        ))),
        None => Err(Error::input("python3 did not tell its version")),
    }
}

fn version(probe: &str) -> Option<(u32, u32)> {
    let (major, minor) = probe.trim().split_once(' ')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_version_that_the_probe_prints() {
        assert_eq!(version("3 11\n"), Some((3, 11)));
        assert_eq!(version("Python"), None);
        assert!((3, 9) < OLDEST && (3, 10) >= OLDEST);
    }
}
