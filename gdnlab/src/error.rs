//! The one error type of the crate.

use std::path::{Path, PathBuf};

/// What went wrong, in words for the person who called.
///
/// Messages say what was expected, what came, and where it helps what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument, a tensor or a file from outside does not fit.
    #[error("{0}")]
    Input(String),
    /// An implementation exists, but not for this problem or this machine.
    #[error("{kernel} cannot run this: {reason}")]
    Unsupported {
        /// Name of the implementation.
        kernel: String,
        /// What it lacks or needs.
        reason: String,
    },
    /// No usable GPU, no CUDA compiler, or a call to either that failed.
    #[error("GPU: {0}")]
    Gpu(String),
    /// The file system refused.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// File or folder that was read or written.
        path: PathBuf,
        /// Reason given by the operating system.
        source: std::io::Error,
    },
    /// A table operation of polars failed.
    #[error("table: {0}")]
    Table(String),
    /// A figure could not be drawn.
    #[error("figure: {0}")]
    Figure(String),
    /// A rank of several that compute together has failed, or is not there.
    #[error("rank {rank} {reason}")]
    Rank {
        /// Which one, from 0.
        rank: usize,
        /// What it did, or did not do.
        reason: String,
    },
    /// The computation was asked to stop before its end.
    #[error("stopped before the end; what was finished is kept")]
    Stopped,
}

/// Result with the crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A complaint about something that came from outside.
    pub fn input(message: impl Into<String>) -> Self {
        Self::Input(message.into())
    }

    /// What the GPU, its driver or its compiler lacks, or refused to do.
    pub fn gpu(message: impl Into<String>) -> Self {
        Self::Gpu(message.into())
    }

    /// An I/O error with the path it concerns.
    pub fn io(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io { path: path.as_ref().to_path_buf(), source }
    }
}
