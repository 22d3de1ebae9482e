//! Attention by NVIDIA's library cuDNN, for comparison: its graph of products, mask and softmax, which it compiles into
//! kernels that store no score.
//!
//! ```text
//! forward:   S = scale Q K^T, causal      m = max S      e = exp(S - m)      l = sum e      P = e / l      O = P V
//!            lse = m + log l
//! backward:  delta = sum dO O             P = exp(scale Q K^T - lse), causal                dV = P^T dO
//!            dS = scale P (dO V^T - delta)                                   dK = dS^T Q    dQ = dS K
//! ```
//! cuDNN knows attention by the form of the graph, so operations have to come in this order, with lse, delta and a binary32
//! sum of dQ in memory.

use super::heads::Heads;
use super::setup::{Backward, Forward, Setup};
use crate::cuda::cudnn_graph::{Data, Form, Graph, Mode, Plan, Reduction, Tensor};
use crate::cuda::cudnn_raw::Cudnn;
use crate::cuda::{Buffer, Gpu, Stream};
use crate::{Error, Result};

/// Causal attention by cuDNN, for one problem on one GPU. Tensors lie as `[B, T, H, d]` without gaps ([`Setup::whole`]).
pub struct CudnnAttention {
    setup: Setup,
    plan: Plan,
    tensors: ForwardTensors,
    backward: Option<BackwardPlan>,
}

struct BackwardPlan {
    plan: Plan,
    tensors: BackwardTensors,
    /// The sum of dQ, `[B, H, T, d]`.
    sum: Buffer<f32>,
}

#[derive(Clone, Copy)]
struct ForwardTensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
}

#[derive(Clone, Copy)]
struct BackwardTensors {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    d_o: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    sum: Tensor,
}

/// The forms of a problem's tensors, with the axes `(B, H, ...)`.
#[derive(Clone, Copy)]
struct Forms {
    /// `(B, H, T, d)` of a tensor `[B, T, H, d]`.
    heads: Form,
    /// `(B, H, T, T)` between operations.
    scores: Form,
    /// `(B, H, T, 1)`.
    rows: Form,
    /// `(B, H, T, d)` between operations.
    packed: Form,
}

impl Forms {
    fn new(setup: &Setup) -> Self {
        let Setup { batch, tokens, heads, head_dim, .. } = *setup;
        let packed = |columns: usize| Form {
            dims: [batch, heads, tokens, columns],
            strides: [heads * tokens * columns, tokens * columns, columns, 1],
            data: Data::F32,
        };
        let strides = [tokens * heads * head_dim, head_dim, heads * head_dim, 1];
        let rows = Form { strides: [heads * tokens, tokens, 1, 1], ..packed(1) };
        let packed_heads = packed(head_dim);
        Self {
            heads: Form { strides, data: Data::Bf16, ..packed_heads },
            scores: packed(tokens),
            rows,
            packed: packed_heads,
        }
    }
}

impl CudnnAttention {
    /// Version of cuDNN on this machine, such as `9.19.0`.
    ///
    /// # Errors
    /// [`Error::Gpu`] where there is none, or it cannot be used.
    pub fn library_version(gpu: &Gpu) -> Result<String> {
        Cudnn::shared(gpu).map(Cudnn::version)
    }

    /// Lets cuDNN compile its kernels.
    ///
    /// # Errors
    /// [`Error::Input`] for numbers that our own kernels would not take either, [`Error::Gpu`] where cuDNN is missing or has
    /// no kernel for `setup`.
    pub fn new(gpu: &Gpu, setup: Setup) -> Result<Self> {
        setup.validate()?;
        let cudnn = Cudnn::shared(gpu)?;
        let (graph, tensors) = forward(cudnn, &setup)?;
        let plan = graph.compile(gpu, "cudnn_attention_forward")?;
        let backward = || -> Result<BackwardPlan> {
            let (graph, tensors) = backward(cudnn, &setup)?;
            let sum = gpu.alloc(setup.elements())?;
            Ok(BackwardPlan { plan: graph.compile(gpu, "cudnn_attention_backward")?, tensors, sum })
        };
        Ok(Self { plan, tensors, backward: setup.backward.then(backward).transpose()?, setup })
    }

    /// Starts a forward on `stream`, and does not wait for it. It can be recorded into a graph once it has run.
    ///
    /// # Errors
    /// As [`Attention::forward`](super::Attention::forward), and [`Error::Input`] where a tensor does not lie as
    /// [`Setup::whole`].
    ///
    /// # Safety
    /// As for [`Attention::forward`](super::Attention::forward), and until then neither is this dropped or used on another
    /// stream.
    pub unsafe fn forward(&self, stream: &Stream, call: &Forward) -> Result<()> {
        self.setup.check_forward(call)?;
        let Forward { q, k, v, o, lse } = call;
        self.check_layout(&[("q", q), ("k", k), ("v", v), ("o", o)])?;
        let t = &self.tensors;
        let addresses = [(t.q, q), (t.k, k), (t.v, v), (t.o, o)].map(|(tensor, heads)| (tensor, heads.address));
        let [q, k, v, o] = addresses;
        // SAFETY: every tensor of the graph is there, and has its size; the rest is the caller's promise.
        unsafe { self.plan.run(stream, &[q, k, v, o, (t.lse, lse.address)]) }
    }

    /// Starts a backward on `stream`, and does not wait for it. It can be recorded into a graph once it has run. Sums are
    /// taken in no fixed order.
    ///
    /// # Errors
    /// As [`CudnnAttention::forward`].
    ///
    /// # Safety
    /// As for [`CudnnAttention::forward`].
    pub unsafe fn backward(&self, stream: &Stream, call: &Backward) -> Result<()> {
        self.setup.check_backward(call)?;
        let Backward { q, k, v, o, lse, d_o, delta, dq, dk, dv } = call;
        let all = [("q", q), ("k", k), ("v", v), ("o", o), ("do", d_o), ("dq", dq), ("dk", dk), ("dv", dv)];
        self.check_layout(&all)?;
        let Some(BackwardPlan { plan, tensors: t, sum }) = &self.backward else {
            return Err(Error::gpu("attention: this plan has no kernels for a backward"));
        };
        let heads = [t.q, t.k, t.v, t.o, t.d_o, t.dq, t.dk, t.dv].into_iter().zip(all);
        let heads = heads.map(|(tensor, (_, heads))| (tensor, heads.address));
        let rows = [(t.lse, lse.address), (t.delta, delta.address), (t.sum, sum.address())];
        let addresses: Vec<(Tensor, u64)> = heads.chain(rows).collect();
        // SAFETY: as in the forward.
        unsafe { plan.run(stream, &addresses) }
    }

    fn check_layout(&self, tensors: &[(&str, &Heads)]) -> Result<()> {
        tensors.iter().try_for_each(|(name, heads)| check_layout(&self.setup, name, heads))
    }
}

fn check_layout(setup: &Setup, name: &str, heads: &Heads) -> Result<()> {
    let width = setup.heads * setup.head_dim;
    if heads.row_pitch == width && (setup.heads == 1 || heads.head_pitch == setup.head_dim) {
        return Ok(());
    }
    Err(Error::input(format!(
        "attention by cuDNN: {name} with {} elements from token to token and {} from head to head: expected {width} and {}, a \
         tensor [B, T, H, d] without gaps",
        heads.row_pitch, heads.head_pitch, setup.head_dim
    )))
}

/// `scale Q K^T`, K given as its transpose.
fn scores(graph: &mut Graph, forms: &Forms, q: Tensor, k: Tensor, scale: Tensor) -> Result<Tensor> {
    let products = graph.product(q, k, forms.scores)?;
    graph.zip(Mode::Multiply, products, scale, forms.scores)
}

fn forward(cudnn: &'static Cudnn, setup: &Setup) -> Result<(Graph, ForwardTensors)> {
    let forms = Forms::new(setup);
    let Forms { heads, scores: of_scores, rows, .. } = forms;
    let mut graph = Graph::new(cudnn);
    let (q, k, v) = (graph.memory(heads)?, graph.memory(heads.transposed())?, graph.memory(heads)?);
    let (o, lse) = (graph.memory(heads)?, graph.memory(rows)?);
    let scale = graph.value(setup.scale)?;
    let s = scores(&mut graph, &forms, q, k, scale)?;
    let s = graph.causal(s, of_scores)?;
    let most = graph.reduce(Reduction::Maximum, s, rows)?;
    let below = graph.zip(Mode::Subtract, s, most, of_scores)?;
    let e = graph.map(Mode::Exp, below, of_scores)?;
    let sum = graph.reduce(Reduction::Sum, e, rows)?;
    let log = graph.map(Mode::Log, sum, rows)?;
    graph.zip_into(Mode::Add, most, log, lse)?;
    let p = graph.zip(Mode::Divide, e, sum, of_scores.of(Data::Bf16))?;
    graph.product_into(p, v, o)?;
    Ok((graph, ForwardTensors { q, k, v, o, lse }))
}

fn backward(cudnn: &'static Cudnn, setup: &Setup) -> Result<(Graph, BackwardTensors)> {
    let forms = Forms::new(setup);
    let Forms { heads, scores: of_scores, rows, packed } = forms;
    let of_transpose = of_scores.transposed().of(Data::Bf16);
    let mut graph = Graph::new(cudnn);
    let (q, k, v) = (graph.memory(heads)?, graph.memory(heads.transposed())?, graph.memory(heads.transposed())?);
    let (o, d_o, lse) = (graph.memory(heads)?, graph.memory(heads)?, graph.memory(rows)?);
    let (dq, dk, dv) = (graph.memory(heads)?, graph.memory(heads)?, graph.memory(heads)?);
    let (delta, sum) = (graph.memory(rows)?, graph.memory(packed)?);
    let (scale, one) = (graph.value(setup.scale)?, graph.value(1.0)?);

    let products = graph.zip(Mode::Multiply, d_o, o, packed)?;
    let of_rows = graph.reduce(Reduction::Sum, products, rows)?;
    // The place of a factor for dropout.
    graph.zip_into(Mode::Multiply, of_rows, one, delta)?;

    let s = scores(&mut graph, &forms, q, k, scale)?;
    let below = graph.zip(Mode::Subtract, s, lse, of_scores)?;
    let below = graph.causal(below, of_scores)?;
    let p = graph.map(Mode::Exp, below, of_scores)?;
    let transpose = graph.reshape(p, of_transpose)?;
    graph.product_into(transpose, d_o, dv)?;

    let dp = graph.product(d_o, v, of_scores)?;
    let dp = graph.zip(Mode::Subtract, dp, delta, of_scores)?;
    let ds = graph.zip(Mode::Multiply, dp, p, of_scores)?;
    let ds = graph.zip(Mode::Multiply, ds, scale, of_scores)?;
    let transpose = graph.reshape(ds, of_transpose)?;
    graph.product_into(transpose, q, dk)?;

    let keys = graph.reshape(k, heads)?;
    graph.product_into(ds, keys, sum)?;
    graph.copy_into(sum, dq)?;
    Ok((graph, BackwardTensors { q, k, v, o, lse, d_o, delta, dq, dk, dv, sum }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::cudnn_raw::without_a_gpu;

    const SETUP: Setup = Setup { batch: 2, tokens: 100, heads: 3, head_dim: 64, scale: 0.125, backward: true };

    #[test]
    fn forms_are_those_of_the_tensors_in_memory() {
        let Forms { heads, scores, rows, packed } = Forms::new(&SETUP);
        assert_eq!((heads.dims, heads.strides), ([2, 3, 100, 64], [19_200, 64, 192, 1]));
        assert_eq!((scores.dims, scores.strides), ([2, 3, 100, 100], [30_000, 10_000, 100, 1]));
        assert_eq!((rows.dims, rows.strides), ([2, 3, 100, 1], [300, 100, 1, 1]));
        assert_eq!((packed.dims, packed.strides), (heads.dims, [19_200, 6400, 64, 1]));
        let transposed = heads.transposed();
        assert_eq!((transposed.dims, transposed.strides), ([2, 3, 64, 100], [19_200, 64, 1, 192]));
    }

    #[test]
    fn other_layouts_are_refused() {
        let heads = Heads { address: 256, length: 38_400, row_pitch: 192, head_pitch: 64 };
        check_layout(&SETUP, "q", &heads).unwrap();
        let error = check_layout(&SETUP, "o", &Heads { row_pitch: 576, ..heads }).unwrap_err().to_string();
        assert!(error.contains("o with 576") && error.contains("expected 192 and 64"), "{error}");
    }

    #[test]
    #[ignore = "needs cuDNN, though no GPU"]
    fn cudnn_accepts_the_graphs() {
        let cudnn = without_a_gpu();
        for setup in [SETUP, Setup { tokens: 1024, head_dim: 128, ..SETUP }] {
            forward(cudnn, &setup).unwrap().0.check().unwrap();
            backward(cudnn, &setup).unwrap().0.check().unwrap();
        }
    }
}
