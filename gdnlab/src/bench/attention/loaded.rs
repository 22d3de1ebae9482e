//! A case in the memory of the GPU, and the check of what a backend makes of it.

use super::backend::{Backend, Plan};
use super::{Case, SEED};
use crate::compare::compare;
use crate::cuda::attention::{Backward, Forward, Heads, Rows, Setup};
use crate::cuda::{Buffer, Gpu, Stream};
use crate::inputs::Draw;
use crate::precision::Format;
use crate::problem::Tensor;
use crate::record::Pass;
use crate::reference::attention::Attention as Reference;
use crate::{Error, Result};
use half::bf16;

/// What is wrong with the results of `backend` on `case`, against float64; `None` where nothing is.
pub(super) fn check(case: Case, backend: Backend, gpu: &'static Gpu) -> Result<Option<String>> {
    let loaded = Loaded::new(case, backend, gpu)?;
    // SAFETY: this is the stream in whose order memory is freed, and the downloads wait for it.
    unsafe { loaded.forward(gpu.stream())? };
    if case.pass == Pass::Bwd {
        // SAFETY: as above.
        unsafe { loaded.backward(gpu.stream())? };
    }
    let [q, k, v, d_o] = loaded.inputs.each_ref();
    let reference = Reference { q, k, v, scale: f64::from(case.setup().scale), cu_seqlens: None };
    let outputs = reference.forward()?;
    let mut wrong = Vec::new();
    let limit = backend.rel_rms();
    let mut judge = |name: &str, found: &Buffer<bf16>, truth: &Tensor| -> Result<()> {
        let comparison = compare(name, &loaded.download(gpu, found)?, truth)?;
        if comparison.nonfinite > 0 || comparison.rel_rms > limit {
            let (error, lost) = (comparison.rel_rms, comparison.nonfinite);
            wrong.push(format!("{name}: rel_rms {error:.2e}, {lost} not finite, expected {limit:.0e} at the most"));
        }
        Ok(())
    };
    judge("o", &loaded.o, &outputs.o)?;
    if case.pass == Pass::Bwd {
        let grads = reference.backward(d_o)?;
        for (name, found, truth) in [
            ("dq", &loaded.grads[0], &grads.dq),
            ("dk", &loaded.grads[1], &grads.dk),
            ("dv", &loaded.grads[2], &grads.dv),
        ] {
            judge(name, found, truth)?;
        }
    }
    Ok((!wrong.is_empty()).then(|| format!("on {case}: {}", wrong.join("; "))))
}

/// A case in the memory of the GPU. All sequences have the same values.
pub(super) struct Loaded {
    plan: Plan,
    backend: Backend,
    setup: Setup,
    /// q, k, v and do of all sequences.
    inputs: [Tensor; 4],
    on_gpu: [Buffer<bf16>; 4],
    o: Buffer<bf16>,
    grads: [Buffer<bf16>; 3],
    lse: Buffer<f32>,
    delta: Buffer<f32>,
}

impl Loaded {
    pub fn new(case: Case, backend: Backend, gpu: &'static Gpu) -> Result<Self> {
        let setup = case.setup();
        let plan = backend.plan(gpu, setup)?;
        let one = [1, case.tokens, case.heads, case.head_dim];
        let draw = Draw::new(SEED);
        let inputs = ["q", "k", "v", "do"].map(|name| {
            let mut tensor = draw.normal(name, &one);
            tensor.data.iter_mut().for_each(|x| *x = Format::Bf16.round(*x));
            tensor.data = tensor.data.repeat(case.batch);
            tensor.dims[0] = case.batch;
            tensor
        });
        let upload = |tensor: &Tensor| -> Result<Buffer<bf16>> {
            let mut buffer = gpu.alloc(setup.elements())?;
            let heads = backend.heads(&setup, &buffer);
            let mut values = vec![bf16::ZERO; setup.elements()];
            for (number, row) in tensor.data.chunks(setup.head_dim).enumerate() {
                let to = values[place(&setup, &heads, number)..].iter_mut();
                to.zip(row).for_each(|(to, &x)| *to = bf16::from_f64(x));
            }
            gpu.stream().upload(&values, &mut buffer)?;
            Ok(buffer)
        };
        let [q, k, v, d_o] = inputs.each_ref().map(upload);
        let nan = |length: usize| {
            let mut buffer = gpu.alloc(length)?;
            gpu.stream().fill_bytes(&mut buffer, 0xff)?;
            Ok::<Buffer<bf16>, Error>(buffer)
        };
        let length = setup.elements();
        Ok(Self {
            plan,
            backend,
            setup,
            on_gpu: [q?, k?, v?, d_o?],
            inputs,
            o: nan(length)?,
            grads: [nan(length)?, nan(length)?, nan(length)?],
            lse: gpu.alloc(setup.rows())?,
            delta: gpu.alloc(setup.rows())?,
        })
    }

    fn heads(&self, buffer: &Buffer<bf16>) -> Heads {
        self.backend.heads(&self.setup, buffer)
    }

    /// A result as `[B, T, H, d]`.
    fn download(&self, gpu: &Gpu, buffer: &Buffer<bf16>) -> Result<Tensor> {
        let (values, heads) = (gpu.download(buffer)?, self.heads(buffer));
        let row = |number| {
            let first = place(&self.setup, &heads, number);
            values[first..first + self.setup.head_dim].iter().map(|x| x.to_f64())
        };
        let rows = self.setup.rows();
        Tensor::new(&self.inputs[0].dims, (0..rows).flat_map(row).collect())
    }

    /// # Safety
    /// As for the forward of the backend.
    pub unsafe fn forward(&self, stream: &Stream) -> Result<()> {
        let [q, k, v, _] = self.on_gpu.each_ref().map(|buffer| self.heads(buffer));
        let call = Forward { q, k, v, o: self.heads(&self.o), lse: Rows::of(&self.lse) };
        // SAFETY: the promise of the caller.
        unsafe { self.plan.forward(stream, &call) }
    }

    /// # Safety
    /// As for the backward of the backend.
    pub unsafe fn backward(&self, stream: &Stream) -> Result<()> {
        let [q, k, v, d_o] = self.on_gpu.each_ref().map(|buffer| self.heads(buffer));
        let [dq, dk, dv] = self.grads.each_ref().map(|buffer| self.heads(buffer));
        let (o, lse, delta) = (self.heads(&self.o), Rows::of(&self.lse), Rows::of(&self.delta));
        // SAFETY: the promise of the caller.
        unsafe { self.plan.backward(stream, &Backward { q, k, v, o, lse, d_o, delta, dq, dk, dv }) }
    }
}

/// Where head `number % H` of token `number / H` begins.
fn place(setup: &Setup, heads: &Heads, number: usize) -> usize {
    number / setup.heads * heads.row_pitch + number % setup.heads * heads.head_pitch
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_head_of_a_token_has_a_place_of_its_own_in_either_layout() {
        let setup = Setup { batch: 2, tokens: 3, heads: 4, head_dim: 64, scale: 1.0, backward: false };
        let heads = |row_pitch, head_pitch| Heads { address: 0, length: setup.elements(), row_pitch, head_pitch };
        let places = |heads: &Heads| (0..setup.rows()).map(|number| place(&setup, heads, number)).collect::<Vec<_>>();
        let whole = places(&heads(256, 64));
        assert!(whole.iter().enumerate().all(|(number, &place)| number * 64 == place));
        let mut first = places(&heads(64, 384));
        // Sequence 1, token 2, head 3.
        assert_eq!(first[(3 + 2) * 4 + 3], 3 * 384 + (3 + 2) * 64);
        first.sort_unstable();
        assert!(first == whole);
    }
}
