//! Where CUDA's libraries lie on this machine, found by looking at folders: nothing is loaded, and nearly always no program
//! is started, since every run asks this.

use crate::{Error, Result};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::UNIX_EPOCH;

/// A library that is looked for.
#[derive(Debug)]
pub(super) struct Wanted {
    /// What it is for and that it is missing, as the beginning of a message.
    missing: &'static str,
    /// How to get it, as the end of a message.
    pub remedy: &'static str,
    /// Variable of the environment that names the file or its folder.
    variable: &'static str,
    /// Names to look for, the preferred first; the last is the one without a version.
    files: &'static [&'static str],
    /// Folders in a Python's packages: that of CUDA 13, and that of CUDA 12.
    in_packages: &'static [&'static str],
    /// Oldest major version that serves.
    oldest: u32,
}

/// NVIDIA's run-time compiler. That of CUDA 12 is the first that knows `sm_90a` and what the kernels use.
pub(super) const NVRTC: Wanted = Wanted {
    missing: "kernels are compiled on their first use, and NVRTC was not found",
    remedy: "`pip install nvidia-cuda-nvrtc` (no GPU needed, 90 MB), or set GDNLAB_NVRTC to the library or its folder",
    variable: "GDNLAB_NVRTC",
    files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    in_packages: &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
    oldest: 12,
};

/// NVIDIA's library of matrix products. That of CUDA 12 is the first with products for Hopper's tensor cores.
pub(super) const CUBLASLT: Wanted = Wanted {
    missing: "matrix products on a GPU need cuBLASLt, which was not found",
    remedy: "`pip install nvidia-cublas` (420 MB; nvidia-cublas-cu12 for a driver of CUDA 12), or set GDNLAB_CUBLAS to the \
             library or its folder",
    variable: "GDNLAB_CUBLAS",
    files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    in_packages: &["nvidia/cu13/lib", "nvidia/cublas/lib"],
    oldest: 12,
};

/// NVIDIA's library of operations on tensors. That of version 9 is the first that loads its parts when they are needed.
pub(super) const CUDNN: Wanted = Wanted {
    missing: "attention by cuDNN needs that library, which was not found",
    remedy: "`pip install nvidia-cudnn-cu13` (370 MB; nvidia-cudnn-cu12 for CUDA 12), or set GDNLAB_CUDNN to the library or \
             its folder",
    variable: "GDNLAB_CUDNN",
    files: &["libcudnn.so.9", "libcudnn.so"],
    in_packages: &["nvidia/cudnn/lib"],
    oldest: 9,
};

/// NVIDIA's library of messages between GPUs.
pub(super) const NCCL: Wanted = Wanted {
    missing: "messages between GPUs need NCCL, which was not found",
    remedy: "`pip install nvidia-nccl-cu13` (300 MB; nvidia-nccl-cu12 for CUDA 12), or set GDNLAB_NCCL to the library or its \
             folder",
    variable: "GDNLAB_NCCL",
    files: &["libnccl.so.2", "libnccl.so"],
    in_packages: &["nvidia/nccl/lib"],
    oldest: 2,
};

impl Wanted {
    /// The first of: what the variable names (file or folder), `LD_LIBRARY_PATH`, the loader's cache, a CUDA toolkit
    /// (`CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda`), this checkout's `.tools/nvrtc`, and the packages of the Python
    /// installations on `PATH`, where PyTorch brings it.
    ///
    /// # Errors
    /// [`Error::Gpu`] where there is none, with the way to get one; and where the variable names something else.
    pub fn find(&self) -> Result<PathBuf> {
        if let Some(given) = std::env::var_os(self.variable).filter(|given| !given.is_empty()) {
            let given = PathBuf::from(given);
            let file = if given.is_dir() { self.in_folder(&given) } else { Some(given.clone()) };
            return file.filter(|file| file.is_file()).ok_or_else(|| {
                Error::gpu(format!(
                    "{}={}: expected {}, or a folder that holds it",
                    self.variable,
                    given.display(),
                    self.files.join(" or ")
                ))
            });
        }
        self.in_library_path()
            .or_else(|| self.in_loader_cache(&std::fs::read("/etc/ld.so.cache").unwrap_or_default()))
            .or_else(|| toolkit_folders().iter().find_map(|folder| self.in_folder(folder)))
            .or_else(|| self.in_python(&checkout_tools().join("nvrtc")))
            .or_else(|| self.in_python_packages())
            .or_else(|| self.in_search_path_of_python())
            .ok_or_else(|| Error::gpu(format!("{}: {}", self.missing, self.remedy)))
    }

    fn in_folder(&self, folder: &Path) -> Option<PathBuf> {
        self.files.iter().map(|name| folder.join(name)).find(|path| self.is_usable(path))
    }

    /// Whether there is a file, and its full name (`libnvrtc.so.11.2.152`) says no version that is too old.
    fn is_usable(&self, path: &Path) -> bool {
        let Ok(real) = path.canonicalize() else { return false };
        let name = real.file_name().unwrap_or_default().to_string_lossy();
        let version = self.files.last().and_then(|stem| name.strip_prefix(stem)?.strip_prefix('.'));
        let major = version.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
        real.is_file() && major.is_none_or(|major| major >= self.oldest)
    }

    fn in_library_path(&self) -> Option<PathBuf> {
        let folders = std::env::var_os("LD_LIBRARY_PATH")?;
        std::env::split_paths(&folders).filter(|folder| folder.is_absolute()).find_map(|folder| self.in_folder(&folder))
    }

    /// The loader's cache lists whole paths, each ended by NUL.
    fn in_loader_cache(&self, cache: &[u8]) -> Option<PathBuf> {
        let paths: Vec<&Path> = cache
            .split(|&byte| byte == 0)
            .filter(|text| text.starts_with(b"/"))
            .filter_map(|text| std::str::from_utf8(text).ok().map(Path::new))
            .collect();
        self.files.iter().find_map(|name| {
            let named = paths.iter().filter(|path| path.file_name() == Some(OsStr::new(name)));
            named.copied().find(|path| self.is_usable(path)).map(Path::to_path_buf)
        })
    }

    /// The packages of every Python on `PATH`, and the user's own.
    fn in_python_packages(&self) -> Option<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let prefixes =
            std::env::split_paths(&path).filter(|folder| folder.join("python3").exists()).flat_map(|folder| {
                let linked = folder.parent().map(Path::to_path_buf);
                let real = folder.join("python3").canonicalize().ok();
                [linked, real.and_then(|python| Some(python.parent()?.parent()?.to_path_buf()))]
            });
        let user = std::env::home_dir().map(|home| home.join(".local"));
        prefixes.chain([user]).flatten().find_map(|prefix| {
            let folders = [prefix.join("lib"), prefix.join("local/lib"), prefix.join("lib64")];
            folders.iter().flat_map(|lib| python_folders(lib)).find_map(|packages| self.in_python(&packages))
        })
    }

    /// Where a Python lies in none of the usual folders (behind a shim, say), it is asked itself.
    fn in_search_path_of_python(&self) -> Option<PathBuf> {
        let output = Command::new("python3").args(["-c", "import sys; print(*sys.path, sep='\\n')"]).output().ok()?;
        let folders = String::from_utf8(output.stdout).ok()?;
        folders.lines().filter(|folder| !folder.is_empty()).find_map(|folder| self.in_python(Path::new(folder)))
    }

    /// Where NVIDIA's Python packages put it.
    fn in_python(&self, packages: &Path) -> Option<PathBuf> {
        self.in_packages.iter().find_map(|folder| self.in_folder(&packages.join(folder)))
    }
}

/// NVRTC's library on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiler {
    /// The file.
    pub path: PathBuf,
    /// What tells this file from another version of it without opening it: real path, size and time of last change.
    pub identity: String,
}

impl Compiler {
    /// The first of: `GDNLAB_NVRTC` (file or folder), `LD_LIBRARY_PATH`, the loader's cache, a CUDA toolkit
    /// (`CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda`), this checkout's `.tools/nvrtc`, and the packages of the Python
    /// installations on `PATH`, where PyTorch brings it.
    ///
    /// # Errors
    /// [`Error::Gpu`] where there is none, with the way to get one; and where `GDNLAB_NVRTC` names something else.
    pub fn find() -> Result<Self> {
        let path = NVRTC.find()?;
        Self::at(path).ok_or_else(|| Error::gpu(format!("NVRTC went away while it was looked for: {}", NVRTC.remedy)))
    }

    /// The library at `path`, if there is a file.
    fn at(path: PathBuf) -> Option<Self> {
        let real = path.canonicalize().ok()?;
        let metadata = real.metadata().ok().filter(std::fs::Metadata::is_file)?;
        let changed = metadata.modified().ok()?.duration_since(UNIX_EPOCH).unwrap_or_default();
        let identity = format!("{} {} {}", real.display(), metadata.len(), changed.as_nanos());
        Some(Self { path: real, identity })
    }
}

/// This checkout's folder for what is set up in it.
fn checkout_tools() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tools")
}

fn toolkit_folders() -> Vec<PathBuf> {
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).filter(|home| !home.is_empty());
    let homes = homes.map(PathBuf::from).chain([PathBuf::from("/usr/local/cuda"), PathBuf::from("/opt/cuda")]);
    homes
        .flat_map(|home| {
            ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"].map(|lib| home.join(lib))
        })
        .collect()
}

/// `python3.*/site-packages` and `dist-packages` in `lib`.
fn python_folders(lib: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(lib).into_iter().flatten().flatten();
    let versions = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"));
    versions.flat_map(|entry| ["site-packages", "dist-packages"].map(|name| entry.path().join(name))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An empty file `path` below `folder`, with its folders.
    fn touch(folder: &Path, path: &str) -> PathBuf {
        let path = folder.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "").unwrap();
        path
    }

    #[test]
    fn the_newest_name_in_a_folder_wins_and_an_old_version_never_does() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(NVRTC.in_folder(folder.path()), None);
        let old = touch(folder.path(), "libnvrtc.so.11.2.152");
        std::os::unix::fs::symlink(old, folder.path().join("libnvrtc.so")).unwrap();
        assert_eq!(NVRTC.in_folder(folder.path()), None);
        let twelve = touch(folder.path(), "libnvrtc.so.12");
        assert_eq!(NVRTC.in_folder(folder.path()), Some(twelve));
        let thirteen = touch(folder.path(), "libnvrtc.so.13");
        assert_eq!(NVRTC.in_folder(folder.path()), Some(thirteen));
    }

    #[test]
    fn the_loaders_cache_is_read_for_paths_that_exist() {
        let folder = tempfile::tempdir().unwrap();
        let path = touch(folder.path(), "lib64/libnvrtc.so.12");
        let text = |path: &Path| format!("glibc-ld.so.cache1.1\0libnvrtc.so.12\0{}\0", path.display()).into_bytes();
        assert_eq!(NVRTC.in_loader_cache(&text(&path)), Some(path));
        assert_eq!(NVRTC.in_loader_cache(&text(Path::new("/no/such/libnvrtc.so.12"))), None);
        assert_eq!(NVRTC.in_loader_cache(&[0xff, 0, b'/', 0xfe, 0]), None);
    }

    #[test]
    fn packages_of_both_generations_are_found_in_a_python() {
        let prefix = tempfile::tempdir().unwrap();
        let lib = prefix.path().join("lib");
        assert!(python_folders(&lib).is_empty());
        let twelve = touch(&lib, "python3.11/dist-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
        let thirteen = touch(&lib, "python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
        let mut found: Vec<_> = python_folders(&lib).iter().filter_map(|packages| NVRTC.in_python(packages)).collect();
        found.sort();
        assert_eq!(found, [twelve, thirteen]);
    }

    #[test]
    fn each_library_has_its_own_names_and_packages() {
        let packages = tempfile::tempdir().unwrap();
        let nvrtc = touch(packages.path(), "nvidia/cu13/lib/libnvrtc.so.13");
        assert_eq!(CUBLASLT.in_python(packages.path()), None);
        let twelve = touch(packages.path(), "nvidia/cublas/lib/libcublasLt.so.12");
        assert_eq!(CUBLASLT.in_python(packages.path()), Some(twelve));
        let thirteen = touch(packages.path(), "nvidia/cu13/lib/libcublasLt.so.13");
        assert_eq!(CUBLASLT.in_python(packages.path()), Some(thirteen));
        assert_eq!(NVRTC.in_python(packages.path()), Some(nvrtc));
        assert_eq!(CUDNN.in_python(packages.path()), None);
        let nine = touch(packages.path(), "nvidia/cudnn/lib/libcudnn.so.9");
        assert_eq!(CUDNN.in_python(packages.path()), Some(nine));
        let two = touch(packages.path(), "nvidia/nccl/lib/libnccl.so.2");
        assert_eq!(NCCL.in_python(packages.path()), Some(two));
        let old = touch(packages.path(), "libcublasLt.so.11.5.1");
        std::os::unix::fs::symlink(old, packages.path().join("libcublasLt.so")).unwrap();
        assert_eq!(CUBLASLT.in_folder(packages.path()), None);
    }

    #[test]
    fn another_file_in_the_same_place_is_another_compiler() {
        let folder = tempfile::tempdir().unwrap();
        let path = touch(folder.path(), "libnvrtc.so.13");
        let first = Compiler::at(path.clone()).unwrap();
        assert_eq!(Compiler::at(path.clone()).unwrap(), first);
        std::fs::write(&path, "longer").unwrap();
        assert_ne!(Compiler::at(path.clone()).unwrap().identity, first.identity);
        assert_eq!(Compiler::at(folder.path().to_path_buf()), None);
    }
}
