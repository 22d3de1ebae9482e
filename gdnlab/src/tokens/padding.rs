//! The same prompt with and without padding.

use super::parallel::{OneAtATime, side_by_side};
use super::{PAD, Prompts, argmax, flips};
use crate::compare::Share;
use crate::kernel::Kernel;
use crate::model::Model;
use crate::model::infer::{Reader, Tokens};
use crate::problem::Inputs;
use crate::record::{Experiment, TokenFlips};
use crate::reference::Reference;
use crate::{Error, Result, memory};
use std::fmt;
use std::ops::{ControlFlow, Range};
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
        Ok(Reader::new(model, 1)?.read_at(self.next(), self.prompt.end - 1, kernel)?.data)
    }

    /// Whether `kernel` gives the output of the first layer at the prompt's tokens to the same bits when the padding is cut off
    /// from its inputs.
    fn same_bits(&self, model: &Model, kernel: &dyn Kernel) -> Result<bool> {
        let inputs = model.first_recurrence_inputs(self.next(), 1)?.rounded_to(kernel.input_format());
        let o = kernel.forward(&inputs)?.outputs.o;
        let alone = kernel.forward(&cut(&inputs, self.prompt.clone()))?.outputs.o;
        Ok(o.tokens(self.prompt.clone()).data == alone.data)
    }
}

/// The tokens `range` of inputs of GDN without a state.
fn cut(inputs: &Inputs, range: Range<usize>) -> Inputs {
    let mut part = inputs.clone();
    part.shape.tokens = range.len();
    part.named_mut().into_iter().for_each(|(_, tensor)| *tensor = tensor.tokens(range.clone()));
    part
}

/// Prompts of equal length, and what the exact recurrence says after each without padding.
pub struct Unpadded<'a> {
    model: &'a Model,
    prompts: &'a Prompts,
    exact: Vec<Vec<f64>>,
}

/// What one prompt with padding gives.
struct Found {
    logits: Vec<f64>,
    same_bits: Option<bool>,
}

impl<'a> Unpadded<'a> {
    /// Reads `prompts` with the exact recurrence.
    ///
    /// # Errors
    /// What the model reports.
    pub fn new(model: &'a Model, prompts: &'a Prompts) -> Result<Self> {
        let exact = |prompt| Row::new(prompt, Padding::None, 0).logits(model, &Reference);
        Ok(Self { model, prompts, exact: prompts.iter().map(exact).collect::<Result<_>>()? })
    }

    /// How the token after each prompt depends on padding to `length` tokens under `kernel`. A flip is a prompt after which the
    /// most likely token is another than with the exact recurrence and no padding. `shift_max` is the largest change of a
    /// logit against that. `same_bits` is the share of prompts at which the kernel's output in the first layer has the same
    /// bits when the padding is cut off from its inputs; padding that is read has no such twin.
    ///
    /// Prompts are read side by side by the threads of this machine; a kernel on a GPU is called by one of them at a time.
    /// `go_on` is asked before each prompt.
    ///
    /// # Errors
    /// [`Error::Input`] where a prompt is longer than `length`, [`Error::Stopped`] where `go_on` said so, and what the model
    /// or the kernel reports.
    pub fn under(
        &self,
        padding: Padding,
        length: usize,
        kernel: &dyn Kernel,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<TokenFlips> {
        if self.prompts.length() > length {
            return Err(Error::input(format!(
                "prompts of {} tokens padded to {length}: expected a length of at least as many",
                self.prompts.length()
            )));
        }
        let bytes = Model::step_bytes(self.model.config(), 1, length);
        let prompts: Vec<&[u32]> = self.prompts.iter().collect();
        let one_at_a_time = OneAtATime::new(kernel);
        let found = side_by_side(&prompts, memory::times(bytes), go_on, |prompt| {
            let row = Row::new(prompt, padding, length);
            let logits = row.logits(self.model, &one_at_a_time)?;
            let has_twin = padding != Padding::LeftRead;
            let same_bits = has_twin.then(|| row.same_bits(self.model, &one_at_a_time)).transpose()?;
            Ok(Found { logits, same_bits })
        })?;
        Ok(self.summary(padding, &found))
    }

    fn summary(&self, padding: Padding, found: &[Found]) -> TokenFlips {
        let pairs = || self.exact.iter().zip(found.iter().map(|found| &found.logits));
        let flipped = pairs().filter(|(exact, found)| argmax(exact) != argmax(found)).count() as u64;
        let shifts = pairs().flat_map(|(exact, found)| exact.iter().zip(found).map(|(a, b)| (a - b).abs()));
        let shift_max = shifts.fold(0.0, f64::max);
        let twins: Vec<bool> = found.iter().filter_map(|found| found.same_bits).collect();
        let same = twins.iter().filter(|same| **same).count();
        TokenFlips {
            padding: Some(padding.name().to_owned()),
            shift_max: Some(shift_max),
            same_bits: (!twins.is_empty()).then(|| same as f64 / twins.len() as f64),
            ..flips(Experiment::Padding, Share { count: flipped, of: found.len() as u64 })
        }
    }
}
