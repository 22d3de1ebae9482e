//! Jupyter's settings inside the checkout: the entry in its list of kernels, and a quiet first start.

use super::{evcxr, output_of, write_if_new};
use crate::checkout::{Checkout, own_path};
use gdnlab::Result;
use serde_json::json;
use std::process::Command;

/// JupyterLab asks at its first start whether it may fetch news from its makers: it need not ask here.
const PAGE_CONFIG: &str = "{\"disabledExtensions\": {\"@jupyterlab/apputils-extension:announcements\": true}}\n";

pub fn ensure(checkout: &Checkout) -> Result<()> {
    write_if_new(&checkout.jupyter().join("config/labconfig/page_config.json"), PAGE_CONFIG)?;
    let folder = checkout.jupyter().join("kernels").join(crate::run::KERNEL);
    let installed = std::fs::read_to_string(folder.join("version.txt")).is_ok_and(|text| text.trim() == evcxr::VERSION);
    if !installed {
        let mut install = Command::new(checkout.evcxr());
        output_of("evcxr_jupyter --install", install.arg("--install").env("JUPYTER_PATH", checkout.jupyter()))?;
    }
    // Not evcxr itself: this program chooses a place for the cells first (`lab kernel-process`).
    let spec = json!({
        "argv": [own_path()?, "kernel-process", "--checkout", checkout.root(), "{connection_file}"],
        "display_name": "Rust",
        "language": "rust",
        "interrupt_mode": "message",
    });
    write_if_new(&folder.join("kernel.json"), &format!("{spec:#}\n"))
}
