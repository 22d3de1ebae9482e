//! The shape of a launch, and what it is checked against before the driver sees it.

use super::report::FunctionReport;
use crate::{Error, Result};

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of blocks along x, y and z. With a 0 among them nothing is started.
    pub blocks: [u32; 3],
    /// Threads of a block, along x.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Blocks of a cluster along x, y and z, from compute capability 9.0 on.
    pub cluster: Option<[u32; 3]>,
    /// Whether the kernel may be launched before the one before it on its stream has ended, from compute capability 9.0
    /// on. It has to wait by itself (`griddepcontrol.wait`) before it touches what kernels before it wrote.
    pub early: bool,
}

impl Default for Grid {
    /// One block of one warp.
    fn default() -> Self {
        Self { blocks: [1; 3], threads: 32, shared_bytes: 0, cluster: None, early: false }
    }
}

/// What a GPU allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Compute capability.
    pub capability: (u32, u32),
    /// Shared memory that a block can have at the most, in bytes.
    pub shared_bytes_per_block: u32,
}

/// Threads of a block on every GPU.
const MAX_THREADS: u32 = 1024;
/// Blocks along x, y and z on every GPU.
const MAX_BLOCKS: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// Blocks of a cluster on every GPU that has clusters.
const MAX_CLUSTER: u32 = 8;

impl Grid {
    /// Whether there is nothing to start.
    pub fn is_empty(&self) -> bool {
        self.blocks.contains(&0)
    }

    /// Checks this launch of `function` with a parameter of `parameter_bytes`.
    ///
    /// # Errors
    /// [`Error::Gpu`] where the GPU or the kernel does not allow it, saying what would be allowed.
    pub fn check(&self, function: &FunctionReport, parameter_bytes: usize, limits: &Limits) -> Result<()> {
        match self.complaint(function, parameter_bytes, limits) {
            None => Ok(()),
            Some(complaint) => Err(Error::gpu(format!("kernel {}: {complaint}", function.name))),
        }
    }

    fn complaint(&self, function: &FunctionReport, parameter_bytes: usize, limits: &Limits) -> Option<String> {
        let expected = function.parameter_bytes;
        if parameter_bytes != expected as usize {
            return Some(format!(
                "its parameter has {expected} bytes in CUDA and {parameter_bytes} in Rust: \
                 the two structures must have the same fields"
            ));
        }
        let max_threads = function.max_threads.unwrap_or(MAX_THREADS);
        if self.threads == 0 || self.threads > max_threads {
            return Some(format!("{} threads in a block, expected 1 to {max_threads}", self.threads));
        }
        let shared = u64::from(function.shared_bytes) + u64::from(self.shared_bytes);
        if shared > u64::from(limits.shared_bytes_per_block) {
            return Some(format!(
                "{shared} bytes of shared memory in a block, and this GPU has {}: use a smaller tile",
                limits.shared_bytes_per_block
            ));
        }
        let axes = self.blocks.iter().zip(MAX_BLOCKS).zip(["x", "y", "z"]);
        if let Some(((blocks, most), axis)) = axes.into_iter().find(|((blocks, most), _)| **blocks > *most) {
            return Some(format!("{blocks} blocks along {axis}, expected {most} at the most"));
        }
        self.cluster.and_then(|cluster| self.cluster_complaint(cluster, limits))
    }

    fn cluster_complaint(&self, cluster: [u32; 3], limits: &Limits) -> Option<String> {
        let (major, minor) = limits.capability;
        if major < 9 {
            return Some(format!("clusters need compute capability 9.0, and this GPU has {major}.{minor}"));
        }
        let blocks = cluster.iter().try_fold(1u32, |product, &size| product.checked_mul(size)).unwrap_or(u32::MAX);
        if blocks == 0 || blocks > MAX_CLUSTER {
            return Some(format!("a cluster of {cluster:?} blocks, expected 1 to {MAX_CLUSTER} together"));
        }
        let divides = self.blocks.iter().zip(cluster).all(|(blocks, size)| blocks.is_multiple_of(size));
        (!divides).then(|| format!("{:?} blocks are not a multiple of the cluster's {cluster:?}", self.blocks))
    }
}

#[cfg(test)]
#[path = "launch_tests.rs"]
mod tests;
