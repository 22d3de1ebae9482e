//! A computation that cuDNN compiles as one: tensors, and operations between them.
//!
//! Tensors have four axes. Those between operations are *virtual*: they never exist in memory, and their strides only name an
//! order. [`Graph::compile`] makes a [`Plan`], which runs at any addresses.

use super::cudnn_raw::{Attribute, Cudnn, Descriptor, Kind, Type};
use super::{Buffer, Gpu, Stream, profile};
use crate::{Error, Result};

/// From `cudnnBackendHeurMode_t`: engines in the order of their expected times.
const BY_EXPECTED_TIME: u32 = 3;
/// What addresses of tensors are multiples of, in bytes.
const ALIGNMENT_BYTES: i64 = 16;

/// Formats of numbers (`cudnnDataType_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Data {
    F32 = 0,
    I32 = 4,
    Bf16 = 9,
    Boolean = 11,
}

/// Operations on elements (`cudnnPointwiseMode_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Mode {
    Add = 0,
    Multiply = 1,
    Divide = 6,
    Subtract = 9,
    Exp = 13,
    Log = 15,
    Identity = 21,
    AtLeast = 303,
    /// The number of an element along an axis.
    Index = 501,
    /// x where t holds, b elsewhere.
    Select = 601,
}

/// Operations along an axis (`cudnnReduceTensorOp_t`); the axes are those on which the result has one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Reduction {
    Sum = 0,
    Maximum = 3,
}

/// Sizes, distances in elements and format of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub dims: [usize; 4],
    pub strides: [usize; 4],
    pub data: Data,
}

impl Form {
    /// The same with the last two axes exchanged.
    pub fn transposed(self) -> Self {
        let Self { dims: [a, b, c, d], strides: [e, f, g, h], data } = self;
        Self { dims: [a, b, d, c], strides: [e, f, h, g], data }
    }

    /// The same in another format.
    pub fn of(self, data: Data) -> Self {
        Self { data, ..self }
    }
}

/// A tensor of a [`Graph`], by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tensor(usize);

/// An operation on elements, with what it takes besides x.
#[derive(Clone, Copy, Debug, Default)]
struct Besides {
    b: Option<Tensor>,
    t: Option<Tensor>,
    axis: Option<i64>,
}

/// A graph under construction.
pub(super) struct Graph {
    cudnn: &'static Cudnn,
    tensors: Vec<Descriptor>,
    operations: Vec<Descriptor>,
    /// What operations refer to.
    kinds: Vec<Descriptor>,
    values: Vec<(Tensor, f32)>,
}

impl Graph {
    pub fn new(cudnn: &'static Cudnn) -> Self {
        Self { cudnn, tensors: Vec::new(), operations: Vec::new(), kinds: Vec::new(), values: Vec::new() }
    }

    fn descriptor(&self, kind: Kind) -> Result<Descriptor> {
        Descriptor::new(self.cudnn, kind)
    }

    /// A tensor whose address every run gives.
    pub fn memory(&mut self, form: Form) -> Result<Tensor> {
        self.tensor(form, Ok)
    }

    /// A binary32 number.
    pub fn value(&mut self, value: f32) -> Result<Tensor> {
        let form = Form { dims: [1; 4], strides: [1; 4], data: Data::F32 };
        let tensor = self.tensor(form, |tensor| tensor.flag(Attribute::TensorIsByValue, true))?;
        self.values.push((tensor, value));
        Ok(tensor)
    }

    fn between(&mut self, form: Form) -> Result<Tensor> {
        self.tensor(form, |tensor| tensor.flag(Attribute::TensorIsVirtual, true))
    }

    fn tensor(&mut self, form: Form, place: impl FnOnce(Descriptor) -> Result<Descriptor>) -> Result<Tensor> {
        let number = self.tensors.len();
        let descriptor = self
            .descriptor(Kind::Tensor)?
            .choice(Attribute::TensorDataType, Type::Numbers, form.data as u32)?
            .int64(Attribute::TensorDimensions, &form.dims.map(|size| size as i64))?
            .int64(Attribute::TensorStrides, &form.strides.map(|stride| stride as i64))?
            .int64(Attribute::TensorUniqueId, &[unique_id(Tensor(number))])?
            .int64(Attribute::TensorByteAlignment, &[ALIGNMENT_BYTES])?;
        self.tensors.push(place(descriptor)?.finalized()?);
        Ok(Tensor(number))
    }

    /// `mode(x)`, as a virtual tensor.
    pub fn map(&mut self, mode: Mode, x: Tensor, form: Form) -> Result<Tensor> {
        let y = self.between(form)?;
        self.pointwise(mode, x, y, Besides::default())?;
        Ok(y)
    }

    /// `mode(x, b)`, as a virtual tensor; an axis of b with one element goes for all of x.
    pub fn zip(&mut self, mode: Mode, x: Tensor, b: Tensor, form: Form) -> Result<Tensor> {
        let y = self.between(form)?;
        self.zip_into(mode, x, b, y)?;
        Ok(y)
    }

    /// The same into a tensor that there is.
    pub fn zip_into(&mut self, mode: Mode, x: Tensor, b: Tensor, y: Tensor) -> Result<()> {
        self.pointwise(mode, x, y, Besides { b: Some(b), ..Besides::default() })
    }

    /// A copy of x in the format of y.
    pub fn copy_into(&mut self, x: Tensor, y: Tensor) -> Result<()> {
        self.pointwise(Mode::Identity, x, y, Besides::default())
    }

    /// x where the number of its row (axis 2) is at least that of its column (axis 3), minus infinity elsewhere.
    pub fn causal(&mut self, x: Tensor, form: Form) -> Result<Tensor> {
        let [row, column] = [2, 3].map(|axis| {
            let index = self.between(form.of(Data::I32))?;
            self.pointwise(Mode::Index, x, index, Besides { axis: Some(axis), ..Besides::default() })?;
            Ok::<Tensor, Error>(index)
        });
        let visible = self.between(form.of(Data::Boolean))?;
        let (row, column) = (row?, column?);
        self.operate(Mode::AtLeast, Data::Boolean, row, visible, Besides { b: Some(column), ..Besides::default() })?;
        let hidden = self.value(f32::NEG_INFINITY)?;
        let y = self.between(form)?;
        self.pointwise(Mode::Select, x, y, Besides { b: Some(hidden), t: Some(visible), axis: None })?;
        Ok(y)
    }

    fn pointwise(&mut self, mode: Mode, x: Tensor, y: Tensor, besides: Besides) -> Result<()> {
        self.operate(mode, Data::F32, x, y, besides)
    }

    fn operate(&mut self, mode: Mode, precision: Data, x: Tensor, y: Tensor, besides: Besides) -> Result<()> {
        let mut kind = self
            .descriptor(Kind::Pointwise)?
            .choice(Attribute::PointwiseMode, Type::PointwiseMode, mode as u32)?
            .choice(Attribute::PointwisePrecision, Type::Numbers, precision as u32)?;
        if let Some(axis) = besides.axis {
            kind = kind.int64(Attribute::PointwiseAxis, &[axis])?;
        }
        let kind = kind.finalized()?;
        let mut operation = self
            .descriptor(Kind::OperationPointwise)?
            .descriptors(Attribute::OperationPointwise, &[&kind])?
            .descriptors(Attribute::OperationPointwiseX, &[&self.tensors[x.0]])?
            .descriptors(Attribute::OperationPointwiseY, &[&self.tensors[y.0]])?;
        let (b, t) = (Attribute::OperationPointwiseB, Attribute::OperationPointwiseT);
        for (attribute, tensor) in [(b, besides.b), (t, besides.t)] {
            if let Some(tensor) = tensor {
                operation = operation.descriptors(attribute, &[&self.tensors[tensor.0]])?;
            }
        }
        self.keep(operation, Some(kind))
    }

    /// The products of the last two axes, summed in binary32, as a virtual tensor.
    pub fn product(&mut self, a: Tensor, b: Tensor, form: Form) -> Result<Tensor> {
        let c = self.between(form)?;
        self.product_into(a, b, c)?;
        Ok(c)
    }

    /// The same into a tensor that there is.
    pub fn product_into(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result<()> {
        let kind = self.descriptor(Kind::Matmul)?;
        let kind = kind.choice(Attribute::MatmulPrecision, Type::Numbers, Data::F32 as u32)?.finalized()?;
        let operation = self
            .descriptor(Kind::OperationMatmul)?
            .descriptors(Attribute::OperationMatmulA, &[&self.tensors[a.0]])?
            .descriptors(Attribute::OperationMatmulB, &[&self.tensors[b.0]])?
            .descriptors(Attribute::OperationMatmulC, &[&self.tensors[c.0]])?
            .descriptors(Attribute::OperationMatmul, &[&kind])?;
        self.keep(operation, Some(kind))
    }

    /// The sum or maximum of x in binary32, as a virtual tensor.
    pub fn reduce(&mut self, reduction: Reduction, x: Tensor, form: Form) -> Result<Tensor> {
        let y = self.between(form)?;
        let kind = self
            .descriptor(Kind::Reduction)?
            .choice(Attribute::ReductionPrecision, Type::Numbers, Data::F32 as u32)?
            .choice(Attribute::ReductionOperator, Type::ReductionOperator, reduction as u32)?
            .finalized()?;
        let operation = self
            .descriptor(Kind::OperationReduction)?
            .descriptors(Attribute::OperationReductionX, &[&self.tensors[x.0]])?
            .descriptors(Attribute::OperationReductionY, &[&self.tensors[y.0]])?
            .descriptors(Attribute::OperationReduction, &[&kind])?;
        self.keep(operation, Some(kind))?;
        Ok(y)
    }

    /// x with the axes of `form`, as a virtual tensor; a transpose where those are exchanged.
    pub fn reshape(&mut self, x: Tensor, form: Form) -> Result<Tensor> {
        let y = self.between(form)?;
        let operation = self
            .descriptor(Kind::OperationReshape)?
            .descriptors(Attribute::OperationReshapeX, &[&self.tensors[x.0]])?
            .descriptors(Attribute::OperationReshapeY, &[&self.tensors[y.0]])?;
        self.keep(operation, None)?;
        Ok(y)
    }

    fn keep(&mut self, operation: Descriptor, kind: Option<Descriptor>) -> Result<()> {
        self.operations.push(operation.finalized()?);
        self.kinds.extend(kind);
        Ok(())
    }

    fn described(&self, descriptor: Descriptor) -> Result<Descriptor> {
        let operations: Vec<&Descriptor> = self.operations.iter().collect();
        descriptor.descriptors(Attribute::GraphOperations, &operations)?.finalized()
    }

    /// Compiles it for `gpu`, by the first of the engines that cuDNN's heuristics propose which takes it, and allocates what
    /// that engine wants for itself. `name` is what profiles and messages call it.
    ///
    /// # Errors
    /// [`Error::Gpu`] where none takes it, with the reason of each.
    pub fn compile(self, gpu: &Gpu, name: &'static str) -> Result<Plan> {
        let graph = self.described(self.descriptor(Kind::OperationGraph)?.handle(Attribute::GraphHandle)?)?;
        let heuristics = self
            .descriptor(Kind::EngineHeuristics)?
            .descriptors(Attribute::HeuristicsGraph, &[&graph])?
            .choice(Attribute::HeuristicsMode, Type::HeuristicsMode, BY_EXPECTED_TIME)?
            .finalized()?;
        let mut reasons = Vec::new();
        for config in heuristics.get_descriptors(Attribute::HeuristicsResults, Kind::EngineConfig)? {
            let plan = self.descriptor(Kind::ExecutionPlan)?.handle(Attribute::PlanHandle)?;
            match plan.descriptors(Attribute::PlanEngineConfig, &[&config])?.finalized() {
                Ok(plan) => return Plan::new(gpu, name, self, plan, vec![config, heuristics, graph]),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        let reasons = if reasons.is_empty() { "none was proposed".to_owned() } else { reasons.join("; ") };
        Err(Error::gpu(format!(
            "cuDNN {} has no engine for {name} on this GPU: {reasons}; CUDNN_LOGLEVEL_DBG=2 and CUDNN_LOGDEST_DBG=stderr in \
             the environment make it say more",
            self.cudnn.version()
        )))
    }
}

fn unique_id(tensor: Tensor) -> i64 {
    tensor.0 as i64 + 1
}

/// A compiled [`Graph`].
pub(super) struct Plan {
    name: &'static str,
    graph: Graph,
    plan: Descriptor,
    workspace: Option<Buffer<u8>>,
    /// What the plan was made from.
    _kept: Vec<Descriptor>,
}

impl Plan {
    fn new(gpu: &Gpu, name: &'static str, graph: Graph, plan: Descriptor, kept: Vec<Descriptor>) -> Result<Self> {
        let workspace = match plan.get_int64(Attribute::PlanWorkspaceSize)?.max(0) as usize {
            0 => None,
            bytes => Some(gpu.alloc(bytes)?),
        };
        // Then other streams may use it, too.
        gpu.synchronize()?;
        Ok(Self { name, graph, plan, workspace, _kept: kept })
    }

    /// Starts it on `stream` with the tensors in memory at these addresses, each of them once.
    ///
    /// It can be recorded into a graph once it has run.
    ///
    /// # Errors
    /// [`Error::Gpu`] where cuDNN refuses.
    ///
    /// # Safety
    /// Every tensor in memory of the graph is among `addresses`, with memory on this GPU that is as large as its form says.
    /// Neither this nor the memory is freed or used on another stream until the plan has ended; where it is recorded into a
    /// graph, until the last replay has ended.
    pub unsafe fn run(&self, stream: &Stream, addresses: &[(Tensor, u64)]) -> Result<()> {
        let values = self.graph.values.iter().map(|(tensor, value)| (*tensor, std::ptr::from_ref(value) as u64));
        let (ids, addresses): (Vec<i64>, Vec<u64>) =
            addresses.iter().copied().chain(values).map(|(tensor, address)| (unique_id(tensor), address)).unzip();
        let workspace = self.workspace.as_ref().map_or(0, Buffer::address);
        let pack = self
            .graph
            .descriptor(Kind::VariantPack)?
            .int64(Attribute::PackUniqueIds, &ids)?
            .addresses(Attribute::PackDataPointers, &addresses)?
            .addresses(Attribute::PackWorkspace, &[workspace])?
            .finalized()?;
        // SAFETY: the pack has the values, a workspace of the plan's size, and what the caller promises.
        let start = || unsafe { self.graph.cudnn.execute(stream, &self.plan, &pack) };
        profile::around(stream, || self.name.to_owned(), start)
    }
}

#[cfg(test)]
impl Graph {
    /// Lets the library check the graph, which needs no GPU.
    pub fn check(&self) -> Result<()> {
        self.described(self.descriptor(Kind::OperationGraph)?).map(drop)
    }
}
