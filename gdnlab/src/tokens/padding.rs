//! The same prompt with and without padding.

use super::{PAD, Prompts, argmax, flips};
use crate::compare::Share;
use crate::kernel::Kernel;
use crate::model::Model;
use crate::model::infer::{Reader, Tokens};
use crate::problem::{Inputs, Tensor};
use crate::record::{Experiment, TokenFlips};
use crate::reference::Reference;
use crate::{Error, Result};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Where padding stands, and whether the model knows that it is padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// None.
    None,
    /// Behind the prompt, whose last token still speaks: a causal model has not seen the padding by then.
    Right,
    /// Before the prompt and marked: decay 1, write strength 0, zeros for the convolutions.
    LeftMarked,
    /// Before the prompt, and read like any text.
    LeftRead,
}

impl Padding {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::None, Self::Right, Self::LeftMarked, Self::LeftRead];

    /// Name in records and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Right => "right",
            Self::LeftMarked => "left-marked",
            Self::LeftRead => "left-read",
        }
    }
}

impl fmt::Display for Padding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Padding {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let names = || Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|padding| padding.name() == text);
        found.ok_or_else(|| Error::input(format!("unknown padding '{text}': expected one of {}", names())))
    }
}

/// A prompt with its padding.
struct Row {
    tokens: Vec<u32>,
    /// Which tokens are marked as padding, where they are.
    marks: Option<Vec<bool>>,
    /// Where the prompt lies.
    prompt: Range<usize>,
}

impl Row {
    fn new(prompt: &[u32], padding: Padding, length: usize) -> Self {
        let fill = if padding == Padding::None { 0 } else { length.saturating_sub(prompt.len()) };
        let pad = vec![PAD; fill];
        let start = if padding == Padding::Right { 0 } else { fill };
        let tokens = if padding == Padding::Right { [prompt, &pad].concat() } else { [&pad, prompt].concat() };
        let marks = (padding == Padding::LeftMarked).then(|| (0..tokens.len()).map(|at| at < fill).collect());
        Self { tokens, marks, prompt: start..start + prompt.len() }
    }

    fn next(&self) -> Tokens<'_> {
        Tokens { tokens: &self.tokens, padding: self.marks.as_deref() }
    }

    /// Logits of the token after the prompt.
    fn logits(&self, model: &Model, kernel: &dyn Kernel) -> Result<Vec<f64>> {
        let mut reader = Reader::new(model, 1)?;
        if self.prompt.end == self.tokens.len() {
            return Ok(reader.read_last(self.next(), kernel)?.data);
        }
        let logits = reader.read(self.next(), kernel)?.data;
        let vocabulary = model.config().vocabulary;
        Ok(logits[(self.prompt.end - 1) * vocabulary..self.prompt.end * vocabulary].to_vec())
    }

    /// Whether `kernel` gives the output of the first layer at the prompt's tokens to the same bits when the padding is cut off
    /// from its inputs.
    fn same_bits(&self, model: &Model, kernel: &dyn Kernel) -> Result<bool> {
        let mut layers = model.recurrence_inputs_of(self.next(), 1)?;
        layers.truncate(1);
        for inputs in layers {
            let inputs = inputs.rounded_to(kernel.input_format());
            let o = kernel.forward(&inputs)?.outputs.o;
            let alone = kernel.forward(&cut(&inputs, self.prompt.clone())?)?.outputs.o;
            let width = inputs.shape.value_heads * inputs.shape.value_dim;
            if o.data[self.prompt.start * width..self.prompt.end * width] != alone.data {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The tokens `range` of inputs of one sequence of GDN.
fn cut(inputs: &Inputs, range: Range<usize>) -> Result<Inputs> {
    let mut part = inputs.clone();
    part.shape.tokens = range.len();
    for (_, tensor) in part.named_mut() {
        let width: usize = tensor.dims[2..].iter().product();
        let data = tensor.data[range.start * width..range.end * width].to_vec();
        let dims = [&[1, range.len()], &tensor.dims[2..]].concat();
        *tensor = Tensor::new(&dims, data)?;
    }
    Ok(part)
}

/// How the token after each prompt depends on padding to `length` tokens under `kernel`. A flip is a prompt after which the
/// most likely token is another than with the exact recurrence and no padding. `shift_max` is the largest change of a logit
/// against that. `same_bits` is the share of prompts at which the kernel's output in the first layer has the same bits when the
/// padding is cut off from its inputs; padding that is read has no such twin.
///
/// # Errors
/// [`Error::Input`] where a prompt is longer than `length`, and what the model or the kernel reports.
pub fn padded(
    model: &Model,
    prompts: &Prompts,
    padding: Padding,
    length: usize,
    kernel: &dyn Kernel,
) -> Result<TokenFlips> {
    if prompts.length() > length {
        return Err(Error::input(format!(
            "prompts of {} tokens padded to {length}: expected a length of at least as many",
            prompts.length()
        )));
    }
    let (mut flipped, mut same, mut shift_max) = (0, 0, 0.0f64);
    for prompt in prompts.iter() {
        let exact = Row::new(prompt, Padding::None, length).logits(model, &Reference)?;
        let row = Row::new(prompt, padding, length);
        let found = row.logits(model, kernel)?;
        flipped += u64::from(argmax(&exact) != argmax(&found));
        shift_max = exact.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(shift_max, f64::max);
        if padding != Padding::LeftRead {
            same += u64::from(row.same_bits(model, kernel)?);
        }
    }
    let of = prompts.rows as u64;
    let same_bits = (padding != Padding::LeftRead).then(|| same as f64 / of.max(1) as f64);
    Ok(TokenFlips {
        padding: Some(padding.name().to_owned()),
        shift_max: Some(shift_max),
        same_bits,
        ..flips(Experiment::Padding, Share { count: flipped, of })
    })
}
