//! The chunk kernels on the GPU, to be timed.

use super::{Gradients, Loaded, Subject, Tensors, Values};
use crate::cuda::chunk::{Chunk, Options, Plan, Setup};
use crate::cuda::{Gpu, Stream};
use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::Shape;
use crate::record::Pass;
use crate::{Error, Result};

impl Subject for Chunk {
    fn supports(&self, shape: &Shape) -> Result<()> {
        self.supports_shape(shape)
    }

    fn load(&self, pass: Pass, tensors: &Tensors) -> Result<Box<dyn Loaded>> {
        let backward = pass == Pass::Bwd;
        let options = Options {
            scale: tensors.scale as f32,
            initial_state: true,
            d_final_state: backward,
            fused: self.is_fused(),
            ..Options::new(tensors.shape.key_dim)
        };
        let setup = Setup {
            shape: tensors.shape,
            sequences: tensors.sequences.clone(),
            mode: self.operands(),
            input: self.input_format(),
            options,
            backward,
        };
        let mut plan = Plan::new(Gpu::shared()?, setup)?;
        for (name, values) in [("q", &tensors.q), ("k", &tensors.k), ("v", &tensors.v)] {
            upload(&mut plan, name, values)?;
        }
        plan.upload("g", &tensors.g)?;
        plan.upload("beta", &tensors.beta)?;
        plan.upload("initial_state", &tensors.initial_state)?;
        if backward {
            let Gradients { d_o, d_final_state } = tensors
                .gradients
                .as_ref()
                .ok_or_else(|| Error::input("the backward needs 'do', the gradient of the output"))?;
            upload(&mut plan, "do", d_o)?;
            plan.upload("dht", d_final_state)?;
        }
        Ok(Box::new(LoadedPlan { plan, pass }))
    }
}

struct LoadedPlan {
    plan: Plan,
    pass: Pass,
}

impl Loaded for LoadedPlan {
    fn spoil(&mut self) -> Result<()> {
        self.plan.fill_outputs_with_nan()?;
        // As that of the peers, the backward begins with what a forward keeps, and computes the states again.
        if self.pass == Pass::Bwd { self.plan.forward() } else { Ok(()) }
    }

    unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: the caller's promise is the one that the plan asks for.
        unsafe {
            match self.pass {
                Pass::Bwd => self.plan.backward_after_forward_on(stream),
                _ => self.plan.forward_on(stream),
            }
        }
    }

    fn read(&self, tensor: &str) -> Result<Values> {
        let narrow = matches!(tensor, "o" | "dq" | "dk" | "dv");
        match self.plan.setup().input {
            Format::Bf16 if narrow => self.plan.download(tensor).map(Values::Bf16),
            Format::F16 if narrow => self.plan.download(tensor).map(Values::F16),
            _ => self.plan.download(tensor).map(Values::F32),
        }
    }
}

fn upload(plan: &mut Plan, name: &str, values: &Values) -> Result<()> {
    match values {
        Values::F32(values) => plan.upload(name, values),
        Values::F16(values) => plan.upload(name, values),
        Values::Bf16(values) => plan.upload(name, values),
    }
}
