//! Tells the crate which compiler built it, for the `machine` field of records.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    if let Ok(output) = Command::new(rustc).arg("--version").output()
        && let Ok(version) = String::from_utf8(output.stdout)
    {
        println!("cargo:rustc-env=GDNLAB_RUSTC={}", version.trim());
    }
}
