//! The second pass of a sum over tokens (`kernels/part_sums.cu`).

use super::{View, counted, grid};
use crate::Result;
use crate::cuda::{Build, Function, Gpu, Operator, Stream, source};

const NAME: &str = "part_sums";
const THREADS: u32 = 256;
/// Columns of a block.
const COLUMNS: usize = 32;

pub(super) struct PartSums(Function);

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    parts: u64,
    sums: u64,
    count: i32,
    columns: i32,
}

impl PartSums {
    pub fn new(gpu: &Gpu) -> Result<Self> {
        Ok(Self(gpu.module(&build()?)?.function(NAME)?))
    }

    /// `sums` `[columns]`: those of `count` `parts` `[count, columns]`.
    ///
    /// # Safety
    /// As for every layer: see [`super::RmsNorm::forward`].
    pub unsafe fn run(&self, stream: &Stream, parts: View<f32>, sums: View<f32>, count: usize) -> Result<()> {
        parts.expect(NAME, "parts", &[count, sums.len()])?;
        let params = Params {
            parts: parts.address(),
            sums: sums.address(),
            count: counted(NAME, count)?,
            columns: counted(NAME, sums.len())?,
        };
        // SAFETY: the views have the lengths that the kernel takes them to have; the rest is the caller's promise.
        unsafe { self.0.launch(stream, grid(NAME, sums.len(), COLUMNS, THREADS)?, &params) }
    }
}

fn build() -> Result<Build> {
    Ok(Build { source: source(NAME)?, defines: vec![] })
}

pub(in crate::cuda) const OPERATOR: Operator =
    Operator { name: NAME, builds: || Ok(vec![build()?]), parameters: &[(NAME, size_of::<Params>())] };
