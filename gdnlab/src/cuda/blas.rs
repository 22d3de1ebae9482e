//! Matrix products on a GPU, by NVIDIA's library cuBLASLt:
//!
//! ```text
//! C <- alpha op(A) op(B) + beta C        op(A) [m, k], op(B) [k, n], C [m, n], all row-major
//! ```
//!
//! A [`Product`] says what is multiplied, a [`Matmul`] is a product with an algorithm, and runs any number of times at any
//! addresses. What a layer `y = x W^T` of a model needs, with x `[tokens, in]`, W `[out, in]` and y `[tokens, out]` in
//! bf16 and the gradient of W in f32:
//!
//! ```no_run
//! use gdnlab::cuda::{Gpu, Matmul, Product};
//! use gdnlab::precision::Format;
//!
//! # fn main() -> gdnlab::Result<()> {
//! let gpu = Gpu::shared()?;
//! let (tokens, input, output) = (32_768, 768, 2048);
//! let forward = Product::new(tokens, output, input, Format::Bf16).b_transposed();
//! let of_x = Product::new(tokens, input, output, Format::Bf16);
//! let of_w = Product::new(output, input, tokens, Format::Bf16).a_transposed().into_format(Format::F32);
//!
//! let of_w = Matmul::tuned(gpu, &of_w)?;
//! let dy = gpu.alloc::<half::bf16>(tokens * output)?;
//! let x = gpu.alloc::<half::bf16>(tokens * input)?;
//! let dw = gpu.alloc::<f32>(output * input)?;
//! // SAFETY: the buffers have the sizes of the product, and live until the stream has been waited for. beta = 1 adds.
//! unsafe { of_w.run_on(gpu.stream(), dy.address(), x.address(), dw.address(), 1.0, 1.0)? };
//! gpu.synchronize()?;
//! # Ok(())
//! # }
//! ```
//!
//! The library counts matrices column by column. A row-major matrix is the transpose of a column-major one, so it is asked
//! for `C^T = op(B)^T op(A)^T`, and nothing is moved.

use super::blas_raw::{Blas, Candidate, Form, Layout, Plan, Preference, Run};
use super::{Buffer, Gpu, Stream, profile};
use crate::precision::Format;
use crate::{Error, Result};
use gdnlab_deps::cudarc::cublaslt::sys::{cublasComputeType_t, cudaDataType};
use std::fmt;

/// Workspace that an algorithm may have, in bytes.
const WORKSPACE_BYTES: u64 = 32 << 20;
/// What addresses have to be a multiple of, in bytes: the widest access of a kernel.
const ALIGNMENT_BYTES: u64 = 16;

/// A factor of a product as it lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Format of its elements: [`Format::F64`], [`Format::F32`], [`Format::F16`] or [`Format::Bf16`].
    pub format: Format,
    /// Whether the transpose lies in memory: A as `[k, m]`, B as `[n, k]`.
    pub transposed: bool,
    /// Elements from the start of a row in memory to the start of the next one; the length of a row, or more.
    pub pitch: usize,
}

/// The arithmetic of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compute {
    /// Sums in binary32. Products of operands with 16 bits are exact, those of binary32 are IEEE's.
    F32,
    /// Operands of binary32 are rounded to TF32 for the tensor cores, sums are in binary32.
    Tf32,
    /// Binary64.
    F64,
}

/// Several products of one form, whose matrices lie at equal distances: elements from one matrix to the next, 0 for a
/// factor that all of them share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Number of products.
    pub count: usize,
    /// From one A to the next.
    pub a: usize,
    /// From one B to the next.
    pub b: usize,
    /// From one C to the next.
    pub c: usize,
}

impl Batch {
    /// One product.
    pub const ONE: Self = Self { count: 1, a: 0, b: 0, c: 0 };
}

/// What is multiplied: `C [m, n] <- alpha op(A) [m, k] op(B) [k, n] + beta C`, row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A, rows of B: what is summed over.
    pub k: usize,
    /// The first factor.
    pub a: Operand,
    /// The second factor, in the format of the first.
    pub b: Operand,
    /// Format of C: that of the factors, or binary32 where they have 16 bits.
    pub c_format: Format,
    /// Elements from a row of C to the next.
    pub c_pitch: usize,
    /// The arithmetic.
    pub compute: Compute,
    /// How many of them.
    pub batch: Batch,
}

impl Product {
    /// The product of contiguous matrices in `format`, none transposed. [`Format::Tf32`] stands for binary32 in memory with
    /// [`Compute::Tf32`]; [`Format::F32`] computes in IEEE's binary32.
    pub fn new(m: usize, n: usize, k: usize, format: Format) -> Self {
        let (stored, compute) = match format {
            Format::F64 => (Format::F64, Compute::F64),
            Format::Tf32 => (Format::F32, Compute::Tf32),
            _ => (format, Compute::F32),
        };
        let operand = |pitch| Operand { format: stored, transposed: false, pitch };
        let (a, b) = (operand(k), operand(n));
        Self { m, n, k, a, b, c_format: stored, c_pitch: n, compute, batch: Batch::ONE }
    }

    /// The same with A contiguous as `[k, m]` in memory.
    #[must_use]
    pub fn a_transposed(self) -> Self {
        Self { a: Operand { transposed: true, pitch: self.m, ..self.a }, ..self }
    }

    /// The same with B contiguous as `[n, k]` in memory.
    #[must_use]
    pub fn b_transposed(self) -> Self {
        Self { b: Operand { transposed: true, pitch: self.k, ..self.b }, ..self }
    }

    /// The same with C in `format`.
    #[must_use]
    pub fn into_format(self, format: Format) -> Self {
        Self { c_format: format, ..self }
    }

    /// Floating-point operations of all products of the batch: 2 m n k each.
    pub fn flop(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64 * self.batch.count as f64
    }

    /// Elements from the first of A to the last: how long a buffer has to be.
    pub fn a_elements(&self) -> usize {
        let (rows, columns) = in_memory(&self.a, self.m, self.k);
        self.elements(rows, columns, self.a.pitch, self.batch.a)
    }

    /// The same of B.
    pub fn b_elements(&self) -> usize {
        let (rows, columns) = in_memory(&self.b, self.k, self.n);
        self.elements(rows, columns, self.b.pitch, self.batch.b)
    }

    /// The same of C.
    pub fn c_elements(&self) -> usize {
        self.elements(self.m, self.n, self.c_pitch, self.batch.c)
    }

    /// Bytes of the buffers of A, B and C together.
    pub fn bytes(&self) -> usize {
        let factors = (self.a_elements().saturating_add(self.b_elements())).saturating_mul(self.a.format.bytes());
        factors.saturating_add(self.c_elements().saturating_mul(self.c_format.bytes()))
    }

    fn elements(&self, rows: usize, columns: usize, pitch: usize, stride: usize) -> usize {
        let before = stride.saturating_mul(self.batch.count.saturating_sub(1));
        before.saturating_add(pitch.saturating_mul(rows.saturating_sub(1))).saturating_add(columns)
    }

    /// Checks that the library can be asked for this.
    ///
    /// # Errors
    /// [`Error::Input`] with what was expected.
    pub fn validate(&self) -> Result<()> {
        match self.complaint() {
            None => Ok(()),
            Some(complaint) => Err(Error::input(format!("product {self}: {complaint}"))),
        }
    }

    fn complaint(&self) -> Option<String> {
        let Self { m, n, k, a, b, c_format, c_pitch, compute, batch } = *self;
        let most = i32::MAX as usize;
        let sizes = [m, n, k, batch.count];
        if sizes.iter().any(|size| !(1..=most).contains(size)) || [a.pitch, b.pitch, c_pitch].iter().any(|&p| p > most)
        {
            return Some(format!("sizes and pitches of 1 to {most} expected, batch of {} too", batch.count));
        }
        if a.format != b.format {
            return Some(format!("A in {} and B in {}, expected one format", a.format, b.format));
        }
        let arithmetic: &[Compute] = match a.format {
            Format::F64 => &[Compute::F64],
            Format::F32 => &[Compute::F32, Compute::Tf32],
            Format::F16 | Format::Bf16 => &[Compute::F32],
            Format::Tf32 | Format::Tf32Truncated => {
                return Some("TF32 is no format of memory: expected f32 there, and Compute::Tf32".to_owned());
            }
        };
        if !arithmetic.contains(&compute) {
            return Some(format!("{compute:?} of {}, expected one of {arithmetic:?}", a.format));
        }
        if c_format != a.format && !(a.format.bytes() == 2 && c_format == Format::F32) {
            return Some(format!("C in {c_format}, expected {}, or f32 for factors of 16 bits", a.format));
        }
        let rows = [("A", in_memory(&a, m, k).1, a.pitch), ("B", in_memory(&b, k, n).1, b.pitch), ("C", n, c_pitch)];
        if let Some((name, length, pitch)) = rows.into_iter().find(|(_, length, pitch)| pitch < length) {
            return Some(format!("rows of {name} have {length} elements in memory and lie {pitch} apart"));
        }
        let c_length = (m - 1) * c_pitch + n;
        (batch.count > 1 && batch.c < c_length)
            .then(|| format!("the C of a batch have {c_length} elements and lie {} apart", batch.c))
    }

    /// The product as the library is told of it: `C^T = op(B)^T op(A)^T`, column-major.
    fn form(&self) -> Form {
        let factor = |operand: &Operand, rows: usize, columns: usize, stride: usize| {
            let (rows, columns) = in_memory(operand, rows, columns);
            layout(operand.format, rows, columns, operand.pitch, stride)
        };
        let (compute, scale) = match self.compute {
            Compute::F32 => (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F),
            Compute::Tf32 => (cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32, cudaDataType::CUDA_R_32F),
            Compute::F64 => (cublasComputeType_t::CUBLAS_COMPUTE_64F, cudaDataType::CUDA_R_64F),
        };
        Form {
            first: factor(&self.b, self.k, self.n, self.batch.b),
            first_transposed: self.b.transposed,
            second: factor(&self.a, self.m, self.k, self.batch.a),
            second_transposed: self.a.transposed,
            result: layout(self.c_format, self.m, self.n, self.c_pitch, self.batch.c),
            compute,
            scale,
            batch: self.batch.count as i32,
        }
    }
}

/// Rows and columns of a factor of these sizes as it lies in memory.
fn in_memory(operand: &Operand, rows: usize, columns: usize) -> (usize, usize) {
    if operand.transposed { (columns, rows) } else { (rows, columns) }
}

/// A row-major matrix, which is column-major with its rows for columns.
fn layout(format: Format, rows: usize, columns: usize, pitch: usize, stride: usize) -> Layout {
    let format = match format {
        Format::F64 => cudaDataType::CUDA_R_64F,
        Format::F16 => cudaDataType::CUDA_R_16F,
        Format::Bf16 => cudaDataType::CUDA_R_16BF,
        Format::F32 | Format::Tf32 | Format::Tf32Truncated => cudaDataType::CUDA_R_32F,
    };
    Layout { format, rows: columns as u64, columns: rows as u64, pitch: pitch as i64, stride: stride as i64 }
}

/// Sizes and formats, such as `8192x8192x8192 bf16` for `m x n x k`.
impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { m, n, k, a, b, c_format, compute, batch, .. } = self;
        write!(f, "{m}x{n}x{k} {}", if *compute == Compute::Tf32 { "tf32" } else { a.format.name() })?;
        if a.transposed || b.transposed {
            let letter = |operand: &Operand| if operand.transposed { "T" } else { "N" };
            write!(f, " {}{}", letter(a), letter(b))?;
        }
        if *c_format != a.format {
            write!(f, " into {c_format}")?;
        }
        if batch.count == 1 { Ok(()) } else { write!(f, ", {} times", batch.count) }
    }
}

/// A product with an algorithm for it.
pub struct Matmul {
    product: Product,
    plan: Plan,
    candidates: Vec<Candidate>,
    rank: usize,
    workspace: Option<Buffer<u8>>,
}

impl Matmul {
    /// `product` by the algorithm that the library's heuristics think best, which is the same in every process with the
    /// same library and GPU.
    ///
    /// # Errors
    /// As [`Product::validate`], and [`Error::Gpu`] where cuBLASLt is missing or has no algorithm for this.
    pub fn new(gpu: &Gpu, product: &Product) -> Result<Self> {
        Self::ranked(gpu, product, 0)
    }

    /// `product` by the algorithm that is the heuristics' number `rank`, counted from 0: that of another [`Matmul::rank`],
    /// so that results are the same to the bit.
    ///
    /// # Errors
    /// As [`Matmul::new`], and [`Error::Input`] where the heuristics have fewer.
    pub fn ranked(gpu: &Gpu, product: &Product, rank: usize) -> Result<Self> {
        let mut matmul = Self::without_workspace(gpu, product)?;
        if rank >= matmul.candidates.len() {
            return Err(Error::input(format!(
                "algorithm {rank} of the product {product}: expected a number below {}",
                matmul.candidates.len()
            )));
        }
        matmul.choose(gpu, rank)?;
        Ok(matmul)
    }

    fn without_workspace(gpu: &Gpu, product: &Product) -> Result<Self> {
        product.validate()?;
        let plan = Plan::new(Blas::shared(gpu.stream())?, &product.form())?;
        let preference = Preference { workspace_bytes: WORKSPACE_BYTES, alignment_bytes: ALIGNMENT_BYTES as u32 };
        let candidates = plan.candidates(&preference)?;
        if candidates.is_empty() {
            return Err(Error::gpu(format!(
                "cuBLASLt {} has no algorithm for the product {product} on this GPU: try pitches and distances \
                 that are multiples of 16 bytes",
                plan.version()
            )));
        }
        Ok(Self { product: *product, plan, candidates, rank: 0, workspace: None })
    }

    /// Takes the candidate `rank`, with memory for what it needs.
    pub(super) fn choose(&mut self, gpu: &Gpu, rank: usize) -> Result<()> {
        self.rank = rank;
        self.workspace = match self.candidates[rank].workspace_bytes {
            0 => None,
            bytes => {
                let workspace = gpu.alloc(bytes)?;
                // Then other streams may use it, too.
                gpu.synchronize()?;
                Some(workspace)
            }
        };
        Ok(())
    }

    /// What is multiplied.
    pub fn product(&self) -> &Product {
        &self.product
    }

    /// The place of the algorithm among those that the heuristics propose, counted from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many algorithms the heuristics propose.
    pub fn candidates(&self) -> usize {
        self.candidates.len()
    }

    /// Memory that this holds on the GPU, in bytes.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.as_ref().map_or(0, Buffer::size_bytes)
    }

    /// Version of cuBLASLt, such as `13.0.2`.
    pub fn library_version(&self) -> String {
        self.plan.version()
    }

    /// Starts `C <- alpha op(A) op(B) + beta C` on `stream`, with the matrices at the addresses `a`, `b` and `c`. With
    /// `beta` 0 nothing is read from C; with another one and a C of 16 bits the library may round the product to C's format
    /// before it adds (seen in cuBLASLt 13.1 for fp16), and a C of binary32 keeps it.
    ///
    /// It can be recorded into a graph once it has run: at the first run of an algorithm the library may load its kernel,
    /// which cannot be recorded.
    ///
    /// # Errors
    /// [`Error::Input`] for an address that is no multiple of 16, [`Error::Gpu`] where the library refuses.
    ///
    /// # Safety
    /// The addresses are those of memory on this GPU with [`Product::a_elements`], [`Product::b_elements`] and
    /// [`Product::c_elements`] elements, and C overlaps neither A nor B. Neither this nor the memory is freed or used on
    /// another stream until the product has ended; where it is recorded into a graph, until the last replay has ended.
    pub unsafe fn run_on(&self, stream: &Stream, a: u64, b: u64, c: u64, alpha: f32, beta: f32) -> Result<()> {
        if let Some(address) = [a, b, c].into_iter().find(|address| !address.is_multiple_of(ALIGNMENT_BYTES)) {
            return Err(Error::input(format!(
                "product {}: a matrix at the address {address:#x}, expected a multiple of {ALIGNMENT_BYTES}",
                self.product
            )));
        }
        let workspace = self.workspace.as_ref().map_or(0, Buffer::address);
        let wide_factors = self.product.compute == Compute::F64;
        let run = Run { first: b, second: a, result: c, alpha, beta, wide_factors, workspace };
        // SAFETY: the candidate is the plan's, and has a workspace of its size; the matrices are the caller's promise.
        let start = || unsafe { self.plan.run(stream, &self.candidates[self.rank], &run) };
        profile::around(stream, || self.product.to_string(), start)
    }
}

impl fmt::Debug for Matmul {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by algorithm {} of {}", self.product, self.rank, self.candidates.len())
    }
}

#[cfg(test)]
#[path = "blas_tests.rs"]
mod tests;
