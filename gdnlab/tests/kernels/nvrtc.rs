//! A compiler for the tests: the one of this machine, or else the Python package, fetched into the checkout.

use gdnlab::cuda::Compiler;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Once;

/// NVRTC, fetched where there is none.
pub fn compiler() -> Compiler {
    static FETCHED: Once = Once::new();
    if std::env::var_os("GDNLAB_NVRTC").is_none() {
        FETCHED.call_once(|| {
            if Compiler::find().is_err() {
                fetch();
            }
        });
    }
    Compiler::find().unwrap()
}

fn fetch() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let tools = root.join(".tools");
    std::fs::create_dir_all(&tools).unwrap();
    // Tests of another process may be at the same.
    let lock = std::fs::File::create(tools.join("nvrtc.lock")).unwrap();
    lock.lock().unwrap();
    if Compiler::find().is_ok() {
        return;
    }
    let partial = tools.join("nvrtc.partial");
    if partial.exists() {
        std::fs::remove_dir_all(&partial).unwrap();
    }
    let mut pip = Command::new(python_with_pip(&tools));
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"])
        .args(["--only-binary=:all:", "--require-hashes", "-r"])
        .arg(root.join("kernels/requirements.txt"))
        .arg("--target")
        .arg(&partial);
    run("fetching NVRTC from PyPI (is the network reachable? else set GDNLAB_NVRTC)", &mut pip);
    let place = tools.join("nvrtc");
    if place.exists() {
        std::fs::remove_dir_all(&place).unwrap();
    }
    std::fs::rename(&partial, place).unwrap();
}

/// The Python on the path, that of the notebooks, or else a new environment.
fn python_with_pip(tools: &Path) -> PathBuf {
    let has_pip = |python: &PathBuf| {
        Command::new(python).args(["-m", "pip", "--version"]).output().is_ok_and(|output| output.status.success())
    };
    let known = [PathBuf::from("python3"), tools.join("venv/bin/python")];
    known.into_iter().find(has_pip).unwrap_or_else(|| {
        let place = tools.join("nvrtc-venv");
        let what = "making a Python environment to fetch NVRTC with (Debian and Ubuntu: apt-get install python3-venv)";
        run(what, Command::new("python3").args(["-m", "venv", "--clear"]).arg(&place));
        place.join("bin/python")
    })
}

fn run(what: &str, command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{what}: {error}"));
    assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    output
}
