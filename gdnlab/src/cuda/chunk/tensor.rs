//! Tensors on the GPU whose format is chosen at run time.

use crate::cuda::{Buffer, Element, Gpu};
use crate::precision::Format;
use crate::problem::{PIECE, Tensor};
use crate::{Error, Result};
use gdnlab_deps::rayon::prelude::*;
use half::{bf16, f16};
use std::any::Any;

/// A tensor on the GPU.
pub(super) struct DeviceTensor {
    name: &'static str,
    dims: Vec<usize>,
    numbers: Numbers,
}

enum Numbers {
    F32(Buffer<f32>),
    Bf16(Buffer<bf16>),
    F16(Buffer<f16>),
}

impl DeviceTensor {
    pub fn new(gpu: &Gpu, name: &'static str, dims: &[usize], format: Format) -> Result<Self> {
        let length = dims.iter().product();
        let numbers = match format {
            Format::F32 => Numbers::F32(gpu.alloc(length)?),
            Format::Bf16 => Numbers::Bf16(gpu.alloc(length)?),
            Format::F16 => Numbers::F16(gpu.alloc(length)?),
            other => return Err(Error::input(format!("tensor '{name}' in {other}: expected f32, bf16 or f16"))),
        };
        Ok(Self { name, dims: dims.to_vec(), numbers })
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    pub fn address(&self) -> u64 {
        match &self.numbers {
            Numbers::F32(buffer) => buffer.address(),
            Numbers::Bf16(buffer) => buffer.address(),
            Numbers::F16(buffer) => buffer.address(),
        }
    }

    fn format(&self) -> Format {
        match &self.numbers {
            Numbers::F32(_) => Format::F32,
            Numbers::Bf16(_) => Format::Bf16,
            Numbers::F16(_) => Format::F16,
        }
    }

    pub fn buffer<T: Element>(&self) -> Result<&Buffer<T>> {
        let any: &dyn Any = match &self.numbers {
            Numbers::F32(buffer) => buffer,
            Numbers::Bf16(buffer) => buffer,
            Numbers::F16(buffer) => buffer,
        };
        any.downcast_ref().ok_or_else(|| self.wrong_type::<T>())
    }

    fn buffer_mut<T: Element>(&mut self) -> Result<&mut Buffer<T>> {
        let error = self.wrong_type::<T>();
        let any: &mut dyn Any = match &mut self.numbers {
            Numbers::F32(buffer) => buffer,
            Numbers::Bf16(buffer) => buffer,
            Numbers::F16(buffer) => buffer,
        };
        any.downcast_mut().ok_or(error)
    }

    fn wrong_type<T>(&self) -> Error {
        let (name, format, found) = (self.name, self.format(), std::any::type_name::<T>());
        Error::input(format!("tensor '{name}' is held in {format} here, not in {found}"))
    }

    /// Copies `values`, which are in this tensor's format.
    pub fn upload<T: Element>(&mut self, gpu: &Gpu, values: &[T]) -> Result<()> {
        let (name, expected) = (self.name, self.dims.iter().product::<usize>());
        if values.len() != expected {
            let (dims, found) = (&self.dims, values.len());
            return Err(Error::input(format!(
                "tensor '{name}': shape {dims:?} needs {expected} elements, got {found}"
            )));
        }
        gpu.stream().upload(values, self.buffer_mut()?)
    }

    /// Copies `values`, rounded to this tensor's format.
    pub fn upload_rounded(&mut self, gpu: &Gpu, values: &[f64]) -> Result<()> {
        match self.format() {
            Format::Bf16 => self.upload(gpu, &rounded(values, bf16::from_f64)),
            Format::F16 => self.upload(gpu, &rounded(values, f16::from_f64)),
            _ => self.upload(gpu, &rounded(values, |x| x as f32)),
        }
    }

    pub fn fill_bytes(&mut self, gpu: &Gpu, byte: u8) -> Result<()> {
        match &mut self.numbers {
            Numbers::F32(buffer) => gpu.fill_bytes(buffer, byte),
            Numbers::Bf16(buffer) => gpu.fill_bytes(buffer, byte),
            Numbers::F16(buffer) => gpu.fill_bytes(buffer, byte),
        }
    }

    pub fn download(&self, gpu: &Gpu) -> Result<Tensor> {
        let data = match &self.numbers {
            Numbers::F32(buffer) => widened(gpu.download(buffer)?),
            Numbers::Bf16(buffer) => widened(gpu.download(buffer)?),
            Numbers::F16(buffer) => widened(gpu.download(buffer)?),
        };
        Tensor::new(&self.dims, data)
    }
}

fn rounded<T: Send>(values: &[f64], round: impl Fn(f64) -> T + Sync) -> Vec<T> {
    values.par_iter().with_min_len(PIECE).map(|&x| round(x)).collect()
}

fn widened<T: Element + Into<f64> + Sync>(values: Vec<T>) -> Vec<f64> {
    values.par_iter().with_min_len(PIECE).map(|&x| x.into()).collect()
}
