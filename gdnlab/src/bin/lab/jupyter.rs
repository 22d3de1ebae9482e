//! `cargo lab jupyter`: JupyterLab with the Rust kernel ready.

use crate::checkout::Checkout;
use crate::setup;
use gdnlab::{Error, Result};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// Open JupyterLab with the Rust kernel ready; set up first what the machine lacks.
#[derive(clap::Args)]
pub struct Args {
    /// Only print the address instead of opening a browser
    #[arg(long)]
    no_browser: bool,

    /// Options for JupyterLab itself, such as `-- --port 9000`
    #[arg(last = true)]
    jupyter_options: Vec<OsString>,
}

impl Args {
    /// Becomes JupyterLab; returns only if it cannot start.
    pub fn run(self) -> Result<ExitCode> {
        let checkout = Checkout::find()?;
        setup::ensure(&checkout)?;
        let mut jupyter = Command::new(checkout.python());
        jupyter
            .args(["-m", "jupyterlab", "--LabApp.default_url=/lab/tree/notebooks"])
            .arg(flag("--ServerApp.root_dir=", checkout.root()))
            .envs(checkout.jupyter_env())
            .current_dir(checkout.root());
        if self.no_browser {
            jupyter.arg("--no-browser");
        }
        if is_root() {
            jupyter.arg("--allow-root");
        }
        let failure = jupyter.args(self.jupyter_options).exec();
        Err(Error::io(checkout.python(), failure))
    }
}

fn flag(name: &str, path: &std::path::Path) -> OsString {
    let mut flag = OsString::from(name);
    flag.push(path);
    flag
}

/// JupyterLab refuses to run as root unless told; in a container there often is no other user.
fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}
