//! The checkout that this program works in, and where it keeps what it sets up.

use gdnlab::{Error, Result};
use std::path::{Path, PathBuf};

/// Root folder of a gdnlab checkout. Everything that the program installs lies in its folder `.tools`.
#[derive(Clone, Debug)]
pub struct Checkout {
    root: PathBuf,
}

impl Checkout {
    /// The checkout around the crate that cargo runs, or else around the working directory.
    pub fn find() -> Result<Self> {
        let start = match std::env::var_os("CARGO_MANIFEST_DIR") {
            Some(manifest_dir) => PathBuf::from(manifest_dir),
            None => std::env::current_dir().map_err(|source| Error::io(".", source))?,
        };
        start.ancestors().find_map(Self::at).ok_or_else(|| {
            Error::input(format!(
                "{} is not inside a gdnlab checkout: run this in a clone of the repository",
                start.display()
            ))
        })
    }

    /// The checkout whose root is `folder`, if it is one.
    pub fn at(folder: &Path) -> Option<Self> {
        let is_root = folder.join("gdnlab/Cargo.toml").is_file() && folder.join("Cargo.lock").is_file();
        is_root.then(|| Self { root: folder.to_path_buf() })
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn notebooks(&self) -> PathBuf {
        self.root.join("notebooks")
    }

    pub fn lock_file(&self) -> PathBuf {
        self.root.join("Cargo.lock")
    }

    pub fn tools(&self) -> PathBuf {
        self.root.join(".tools")
    }

    pub fn venv(&self) -> PathBuf {
        self.tools().join("venv")
    }

    pub fn python(&self) -> PathBuf {
        self.venv().join("bin/python")
    }

    /// The notebook kernel, evcxr_jupyter.
    pub fn evcxr(&self) -> PathBuf {
        self.tools().join("bin/evcxr_jupyter")
    }

    /// Jupyter's data, configuration and run-time files, kept apart from the user's own.
    pub fn jupyter(&self) -> PathBuf {
        self.tools().join("jupyter")
    }

    /// Where the crates that evcxr builds for cells live.
    pub fn cells(&self) -> PathBuf {
        self.tools().join("cells")
    }

    /// A path as a person in the root folder would write it.
    pub fn relative<'a>(&self, path: &'a Path) -> std::path::Display<'a> {
        path.strip_prefix(&self.root).unwrap_or(path).display()
    }

    /// Variables that keep Jupyter inside the checkout.
    pub fn jupyter_env(&self) -> [(&'static str, PathBuf); 5] {
        let jupyter = self.jupyter();
        [
            ("JUPYTER_PATH", jupyter.clone()),
            ("JUPYTER_DATA_DIR", jupyter.join("data")),
            ("JUPYTER_CONFIG_DIR", jupyter.join("config")),
            ("JUPYTER_RUNTIME_DIR", jupyter.join("runtime")),
            ("IPYTHONDIR", jupyter.join("ipython")),
        ]
    }
}

/// Path of this program. Linux adds a word where the file has been built anew since the start.
pub fn own_path() -> Result<PathBuf> {
    let path = std::env::current_exe().map_err(|source| Error::io("the running program", source))?;
    Ok(path.to_str().and_then(|text| text.strip_suffix(" (deleted)")).map(PathBuf::from).unwrap_or(path))
}
