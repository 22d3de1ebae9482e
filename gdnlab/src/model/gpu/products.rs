//! The products of a step, each with an algorithm.

use super::sizes::Sizes;
use crate::cuda::layers::View;
use crate::cuda::{Gpu, Matmul, Product, Stream};
use crate::precision::Format;
use crate::{Error, Result};
use half::bf16;

/// How the algorithm of a product is chosen.
#[derive(Clone, Copy, Debug)]
pub(super) enum Choice<'a> {
    /// What the library thinks best: the same in every process.
    Heuristics,
    /// The fastest of several trials.
    Tuned,
    /// Those of a training before, by [`Products::ranks`].
    Ranks(&'a [usize]),
}

/// `y = x W^T` for one number of rows, with both gradients.
pub(super) struct Linear {
    forward: Matmul,
    of_x: Matmul,
    of_w: Matmul,
}

/// All products of a step.
pub(super) struct Products {
    /// To the input of a mixer.
    pub input: Linear,
    /// From its output.
    pub output: Linear,
    pub gate_up: Linear,
    pub down: Linear,
    /// To logits, for a whole slice of the rows.
    head: Linear,
    /// The same for a last slice with fewer rows, if there is one.
    last_head: Option<Linear>,
}

struct Maker<'a> {
    gpu: &'a Gpu,
    choice: Choice<'a>,
    made: usize,
}

impl Maker<'_> {
    fn matmul(&mut self, product: &Product) -> Result<Matmul> {
        let number = self.made;
        self.made += 1;
        match self.choice {
            Choice::Heuristics => Matmul::new(self.gpu, product),
            Choice::Tuned => Matmul::tuned(self.gpu, product),
            Choice::Ranks(ranks) => {
                let rank = ranks.get(number).copied().ok_or_else(|| {
                    Error::input(format!("{} algorithms of products: expected more than {number}", ranks.len()))
                })?;
                Matmul::ranked(self.gpu, product, rank)
            }
        }
    }

    fn linear(&mut self, rows: usize, input: usize, output: usize) -> Result<Linear> {
        let of_w = Product::new(output, input, rows, Format::Bf16).a_transposed().into_format(Format::F32);
        Ok(Linear {
            forward: self.matmul(&Product::new(rows, output, input, Format::Bf16).b_transposed())?,
            of_x: self.matmul(&Product::new(rows, input, output, Format::Bf16))?,
            of_w: self.matmul(&of_w)?,
        })
    }
}

impl Products {
    /// Chooses algorithms for a step of `sizes`.
    ///
    /// # Errors
    /// [`Error::Gpu`] where cuBLASLt is missing or has no algorithm; [`Error::Input`] where the ranks are not of such a step.
    pub fn new(gpu: &Gpu, sizes: &Sizes, choice: Choice<'_>) -> Result<Self> {
        let config = &sizes.config;
        let (rows, d, values, hidden) = (sizes.rows(), config.d_model, config.value_width(), config.hidden);
        let slices = sizes.slices();
        let lengths = (slices[0].len(), slices[slices.len() - 1].len());
        let mut make = Maker { gpu, choice, made: 0 };
        Ok(Self {
            input: make.linear(rows, d, sizes.input_width())?,
            output: make.linear(rows, values, d)?,
            gate_up: make.linear(rows, d, 2 * hidden)?,
            down: make.linear(rows, hidden, d)?,
            head: make.linear(lengths.0, d, config.vocabulary)?,
            last_head: match lengths {
                (first, last) if first == last => None,
                (_, last) => Some(make.linear(last, d, config.vocabulary)?),
            },
        })
    }

    /// The projection to the logits of `rows` rows, one slice.
    pub fn head(&self, rows: usize) -> &Linear {
        self.last_head.as_ref().filter(|head| head.forward.product().m == rows).unwrap_or(&self.head)
    }

    fn all(&self) -> impl Iterator<Item = &Matmul> {
        let Self { input, output, gate_up, down, head, last_head } = self;
        let linears = [input, output, gate_up, down, head].into_iter().chain(last_head);
        linears.flat_map(|linear| [&linear.forward, &linear.of_x, &linear.of_w])
    }

    /// Which algorithm each product has, among those that the library proposes for it.
    pub fn ranks(&self) -> Vec<usize> {
        self.all().map(Matmul::rank).collect()
    }

    /// Version of the library.
    pub fn library_version(&self) -> String {
        self.head.forward.library_version()
    }

    /// Memory that the algorithms hold, in bytes.
    pub fn workspace_bytes(&self) -> usize {
        self.all().map(Matmul::workspace_bytes).sum()
    }
}

impl Linear {
    /// Starts `y = x W^T`.
    ///
    /// # Safety
    /// As for [`Matmul::run_on`].
    pub unsafe fn forward(&self, stream: &Stream, x: View<bf16>, w: View<bf16>, y: View<bf16>) -> Result<()> {
        // SAFETY: the promise of the caller; the lengths are checked.
        unsafe { run(&self.forward, stream, x, w, y, 0.0) }
    }

    /// Starts `dx = dy W`.
    ///
    /// # Safety
    /// As for [`Matmul::run_on`].
    pub unsafe fn of_x(&self, stream: &Stream, dy: View<bf16>, w: View<bf16>, dx: View<bf16>) -> Result<()> {
        // SAFETY: as in `forward`.
        unsafe { run(&self.of_x, stream, dy, w, dx, 0.0) }
    }

    /// Starts `dW = dy^T x`, or `dW += dy^T x`.
    ///
    /// # Safety
    /// As for [`Matmul::run_on`].
    pub unsafe fn of_w(
        &self,
        stream: &Stream,
        dy: View<bf16>,
        x: View<bf16>,
        dw: View<f32>,
        write: Write,
    ) -> Result<()> {
        let beta = if write == Write::Add { 1.0 } else { 0.0 };
        // SAFETY: as in `forward`.
        unsafe { run(&self.of_w, stream, dy, x, dw, beta) }
    }
}

/// What a product does to what its destination holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Write {
    Set,
    Add,
}

/// # Safety
/// As for [`Matmul::run_on`].
unsafe fn run<T: crate::cuda::Element>(
    matmul: &Matmul,
    stream: &Stream,
    a: View<bf16>,
    b: View<bf16>,
    c: View<T>,
    beta: f32,
) -> Result<()> {
    let product = matmul.product();
    let expected = [product.a_elements(), product.b_elements(), product.c_elements()];
    if [a.len(), b.len(), c.len()] != expected {
        return Err(Error::input(format!(
            "product {product} of memory with {}, {} and {} elements: expected {expected:?}",
            a.len(),
            b.len(),
            c.len()
        )));
    }
    // SAFETY: the matrices have the product's sizes; the rest is the promise of the caller.
    unsafe { matmul.run_on(stream, a.address(), b.address(), c.address(), 1.0, beta) }
}
