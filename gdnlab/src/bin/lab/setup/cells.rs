//! Compiles what cells build on, once: the kernels' own build folders start as copies of this one.

use super::{announce, run, write_if_new};
use crate::cells::{self, mirror};
use crate::checkout::{Checkout, own_path};
use gdnlab::{Error, Result};
use std::path::PathBuf;
use std::process::Command;

/// Adds to `.cargo/config.toml` of the checkout for cells alone; `cargo test` keeps its checks.
const CONFIG: &str = "\
[profile.dev.package.gdnlab]
debug-assertions = false
overflow-checks = false
";

/// Cells load the heavy dependencies from one dynamic library. evcxr asks for that with a flag on every crate, which
/// would make them other crates than those that `cargo lab` compiled; so the flag is given to the cells alone.
const WRAPPER: &str = "\
#!/bin/sh
case \" $* \" in
    *' --crate-name ctx '*) exec \"$@\" -Cprefer-dynamic ;;
    *) exec \"$@\" ;;
esac
";

pub fn ensure(checkout: &Checkout) -> Result<()> {
    let place = checkout.cells();
    write_if_new(&place.join(".cargo/config.toml"), CONFIG)?;
    write_if_new(&cells::wrapper(checkout), WRAPPER)?;
    make_executable(&cells::wrapper(checkout))?;
    let base = cells::base(checkout);
    let manifest = format!(
        "[package]\nname = \"base\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[lib]\npath = \"lib.rs\"\n\n\
         [dependencies]\ngdnlab = {{ path = {:?} }}\n\n[workspace]\n",
        checkout.root().join("gdnlab")
    );
    write_if_new(&base.join("lib.rs"), "")?;
    write_if_new(&base.join("Cargo.toml"), &manifest)?;
    let _lock = cells::lock_base(checkout)?;
    let lock_file = base.join("Cargo.lock");
    std::fs::copy(checkout.lock_file(), &lock_file).map_err(|source| Error::io(&lock_file, source))?;
    if !base.join("target").exists() {
        announce("compiling what notebook cells build on");
    }
    if let Some(target) = own_target() {
        mirror::add_missing(&target, &base.join("target"))?;
    }
    let mut build = Command::new("cargo");
    build.arg("build").current_dir(&base).envs(cells::build_env(checkout)).env("CARGO_TARGET_DIR", "target");
    run("compiling gdnlab for notebook cells", &mut build)
}

/// The target folder that this program was built in, if it was built for development: `target/<triple>/debug/lab`.
fn own_target() -> Option<PathBuf> {
    let program = own_path().ok()?;
    let profile = program.parent().filter(|folder| folder.ends_with("debug"))?;
    profile.ancestors().nth(2).map(PathBuf::from)
}

fn make_executable(path: &std::path::Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).map_err(|source| Error::io(path, source))
}
