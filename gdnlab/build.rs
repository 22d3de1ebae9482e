//! Tells the crate which compiler built it, for the `machine` field of records, and embeds the CUDA sources.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    if let Ok(output) = Command::new(rustc).arg("--version").output()
        && let Ok(version) = String::from_utf8(output.stdout)
    {
        println!("cargo:rustc-env=GDNLAB_RUSTC={}", version.trim());
    }
    embed_kernels();
}

/// Writes the table that `cuda::source` reads: the name and the text of each file in `kernels/`.
fn embed_kernels() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
    println!("cargo:rerun-if-changed={}", folder.display());
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu" || extension == "cuh"))
        .collect();
    files.sort();
    let mut table = "&[\n".to_owned();
    for path in files {
        println!("cargo:rerun-if-changed={}", path.display());
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        writeln!(table, "    ({name:?}, include_str!({path:?})),").expect("a string takes any text");
    }
    table.push_str("]\n");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("kernels.rs");
    std::fs::write(&out, table).unwrap_or_else(|error| panic!("{}: {error}", out.display()));
}
