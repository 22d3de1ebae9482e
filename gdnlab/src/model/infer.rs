//! Reading text with a trained model under any kernel of the recurrence, all else in float64.
//!
//! What differs between two readings with different kernels is then what the kernels differ by, and nothing else.

use super::block;
use super::config::Mixer;
use super::gdn::{self, GdnState, Mixing, Padding};
use super::layer::{Layer, join_rows};
use super::step::Model;
use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Results, Tensor};
use crate::reference::Reference;
use crate::reference::token::Embedding;
use crate::{Error, Result, memory};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// What a model reads next: `B` rows of `T` tokens, and which of them are padding.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Row by row, `B T` of them.
    pub tokens: &'a [u32],
    /// One for each token: `true` where it is padding that leaves no trace. Its decay is 1, its write strength 0, and the
    /// convolutions see zeros in its place, as before the first token. Without it every token is read.
    pub padding: Option<&'a [bool]>,
}

impl<'a> Tokens<'a> {
    /// Tokens without padding.
    pub fn new(tokens: &'a [u32]) -> Self {
        Self { tokens, padding: None }
    }
}

/// A model that has read some tokens of `B` sequences and goes on from there.
///
/// ```
/// use gdnlab::model::{Model, infer::{Reader, Tokens}, config::{Mixer, ModelConfig, Size}};
/// use gdnlab::reference::Reference;
/// let model = Model::new(ModelConfig::preset(Mixer::Gdn, Size::Tiny), 1)?;
/// let text: Vec<u32> = "the capital of".bytes().map(u32::from).collect();
/// let logits = Reader::new(&model, 1)?.read(Tokens::new(&text), &Reference)?;
/// assert_eq!(logits.dims, [1, text.len(), 256]);
/// # Ok::<(), gdnlab::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    model: &'a Model,
    batch: usize,
    /// What each layer keeps of the tokens so far; `None` before the first.
    layers: Vec<Option<GdnState>>,
}

impl<'a> Reader<'a> {
    /// Before the first token of `batch` sequences.
    ///
    /// # Errors
    /// [`Error::Input`] for a model of attention, which has no recurrence, for parameters that are not finite, and for
    /// no sequence.
    pub fn new(model: &'a Model, batch: usize) -> Result<Self> {
        let config = model.config();
        if config.mixer != Mixer::Gdn || batch == 0 {
            return Err(Error::input(format!(
                "a batch of {batch} for a model of {}: expected at least one sequence, and a model of gdn, whose recurrence a kernel computes",
                config.mixer
            )));
        }
        model.parameters.validate(config)?;
        Ok(Self { model, batch, layers: vec![None; config.layers] })
    }

    /// Reads `next`, and gives the logits of the token after each of its tokens, `[B, T, vocabulary]`.
    ///
    /// The recurrence runs in `kernel`, on inputs rounded to its input format, from the state that the tokens before
    /// left.
    ///
    /// # Errors
    /// [`Error::Input`] where the tokens are not `B` rows of the vocabulary or memory does not suffice, and what the
    /// kernel reports.
    pub fn read(&mut self, next: Tokens<'_>, kernel: &dyn Kernel) -> Result<Tensor> {
        let length = next.tokens.len() / self.batch;
        let n = self.hidden(next, 0..length, kernel)?;
        let dims = [n.dims[0], n.dims[1], self.model.config().vocabulary];
        Tensor::new(&dims, self.head(&join_rows(n)?)?.data)
    }

    /// The same for the last token of each row alone, `[B, vocabulary]`.
    ///
    /// # Errors
    /// As [`Reader::read`].
    pub fn read_last(&mut self, next: Tokens<'_>, kernel: &dyn Kernel) -> Result<Tensor> {
        let length = next.tokens.len() / self.batch;
        self.read_at(next, length.saturating_sub(1), kernel)
    }

    /// The same for the token `at` of each row alone, `[B, vocabulary]`; the tokens behind it are read too.
    ///
    /// # Errors
    /// As [`Reader::read`], and [`Error::Input`] where there is no such token.
    pub fn read_at(&mut self, next: Tokens<'_>, at: usize, kernel: &dyn Kernel) -> Result<Tensor> {
        let n = self.hidden(next, at..at + 1, kernel)?;
        self.head(&join_rows(n)?)
    }

    fn head(&self, n: &Tensor) -> Result<Tensor> {
        let rows = Tensor::new(&[1, n.dims[0], n.dims[1]], n.data.clone())?;
        join_rows(self.outer().project("head", &rows)?)
    }

    fn outer(&self) -> Layer<'a> {
        Layer::outer(self.model.config(), &self.model.parameters)
    }

    fn block(&self, index: usize) -> Layer<'a> {
        Layer::block(self.model.config(), &self.model.parameters, index)
    }

    /// What the head takes at the tokens `needed` of each row, `[B, needed.len(), D]`.
    fn hidden(&mut self, next: Tokens<'_>, needed: Range<usize>, kernel: &dyn Kernel) -> Result<Tensor> {
        let (mut x, padding) = self.embed(next, &needed)?;
        let (front, last) = (next.tokens.len() / self.batch - x.dims[1], self.layers.len() - 1);
        let needed = needed.start - front..needed.end - front;
        for index in 0..=last {
            let layer = self.block(index);
            let needed = if index == last { needed.clone() } else { 0..x.dims[1] };
            x = block::infer(&layer, x, &mut Mixing { kernel, padding, state: &mut self.layers[index] }, needed)?;
        }
        self.outer().norm("final_norm", &x)
    }

    /// What the first layer takes, `[B, T, D]`, and which of it is padding. Padding in front of the first token is left out where
    /// it is not `needed`.
    fn embed<'t>(&self, next: Tokens<'t>, needed: &Range<usize>) -> Result<(Tensor, Padding<'t>)> {
        let (config, batch) = (self.model.config(), self.batch);
        let Tokens { tokens, padding } = next;
        let length = tokens.len() / batch;
        if length == 0 || tokens.len() != batch * length || padding.is_some_and(|mask| mask.len() != tokens.len()) {
            return Err(Error::input(format!(
                "{} tokens{} for {batch} sequences: expected as many for each, at least one, and a mark for each token",
                tokens.len(),
                padding.map_or_else(String::new, |mask| format!(" and {} marks of padding", mask.len()))
            )));
        }
        if needed.end > length {
            return Err(Error::input(format!("token {} of rows of {length}: expected one of them", needed.end - 1)));
        }
        memory::require(Model::step_bytes(config, batch, length))?;
        let x = Embedding { weight: self.model.parameters.get("embedding")?, tokens }.forward()?;
        let x = Tensor::new(&[batch, length, config.d_model], x.data)?;
        let Some(marks) = padding else { return Ok((x, Padding::None)) };
        let first = self.layers.iter().all(Option::is_none);
        Ok(match front(marks, length) {
            Some(front) if first && front <= needed.start => (x.tokens(front..length), Padding::Front(front)),
            _ => (x, Padding::Marked(marks)),
        })
    }
}

/// How many tokens of each row are padding, where these are the first ones of all rows alike, and others follow.
fn front(marks: &[bool], length: usize) -> Option<usize> {
    let count = marks.iter().take_while(|mark| **mark).count();
    let in_front = |row: &[bool]| row.iter().enumerate().all(|(at, mark)| *mark == (at < count));
    (count < length && marks.chunks_exact(length).all(in_front)).then_some(count)
}

impl Model {
    /// What the recurrence of each layer takes when the model reads `tokens`, `batch` rows: queries, keys, values and gates
    /// as training has made them, in float64.
    ///
    /// # Errors
    /// As [`Reader::new`] and [`Reader::read`].
    pub fn recurrence_inputs(&self, tokens: &[u32], batch: usize) -> Result<Vec<Inputs>> {
        let kernel = Listener::default();
        let last = (tokens.len() / batch.max(1)).saturating_sub(1);
        Reader::new(self, batch)?.hidden(Tokens::new(tokens), last..last + 1, &kernel)?;
        Ok(kernel.heard.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// The same for the first layer alone, which no kernel has been in, where some of the tokens may be padding.
    ///
    /// # Errors
    /// As [`Reader::new`] and [`Reader::read`].
    pub fn first_recurrence_inputs(&self, next: Tokens<'_>, batch: usize) -> Result<Inputs> {
        let reader = Reader::new(self, batch)?;
        let last = (next.tokens.len() / batch).saturating_sub(1);
        let (x, padding) = reader.embed(next, &(last..last + 1))?;
        let layer = reader.block(0);
        Ok(gdn::recurrence_inputs(&layer, &layer.norm("mixer_norm", &x)?, padding, None)?.0)
    }
}

/// The reference, which keeps what it was called with.
#[derive(Default)]
struct Listener {
    heard: Mutex<Vec<Inputs>>,
}

impl Kernel for Listener {
    fn name(&self) -> &str {
        Reference.name()
    }

    fn summary(&self) -> String {
        Reference.summary()
    }

    fn needs(&self) -> &'static str {
        Reference.needs()
    }

    fn ops(&self) -> &'static [Op] {
        Reference.ops()
    }

    fn mode(&self) -> &'static str {
        Reference.mode()
    }

    fn input_format(&self) -> Format {
        Reference.input_format()
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).push(inputs.clone());
        Reference.forward(inputs)
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        Reference.backward(inputs)
    }
}

#[cfg(test)]
#[path = "infer_tests.rs"]
mod tests;
