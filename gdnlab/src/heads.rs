//! The independent pieces of a problem: one sequence and one value head each.
//!
//! Both CPU implementations walk the same pieces in parallel; only what they do with one piece differs. All value
//! heads of a group run in the same task, one after the other, so that the sums dq and dk over the group have a fixed
//! order and results do not depend on the number of threads.

use crate::problem::{GateGrads, Gates, Grads, Inputs, Op, Outputs, PIECE, Results, Tensor};
use crate::{Error, Result};
use gdnlab_deps::rayon::prelude::*;
use std::ops::Range;

/// One sequence and one value head, as its inputs are seen.
pub(crate) struct Head<'a> {
    inputs: &'a Inputs,
    tokens: Range<usize>,
    sequence: usize,
    value_head: usize,
}

impl<'a> Head<'a> {
    /// Tokens of this sequence.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    pub fn key_dim(&self) -> usize {
        self.inputs.shape.key_dim
    }

    pub fn value_dim(&self) -> usize {
        self.inputs.shape.value_dim
    }

    pub fn scale(&self) -> f64 {
        self.inputs.scale
    }

    pub fn op(&self) -> Op {
        self.inputs.op()
    }

    fn row(&self, data: &'a [f64], token: usize, heads: usize, head: usize) -> &'a [f64] {
        let dim = data.len() / (self.inputs.shape.batch * self.inputs.shape.tokens * heads);
        let at = ((self.tokens.start + token) * heads + head) * dim;
        &data[at..at + dim]
    }

    fn qk_row(&self, data: &'a [f64], token: usize) -> &'a [f64] {
        let shape = &self.inputs.shape;
        self.row(data, token, shape.qk_heads, self.value_head / shape.group())
    }

    fn value_row(&self, data: &'a [f64], token: usize) -> &'a [f64] {
        self.row(data, token, self.inputs.shape.value_heads, self.value_head)
    }

    /// Query of a token, `[K]`, not yet scaled.
    pub fn q(&self, token: usize) -> &'a [f64] {
        self.qk_row(&self.inputs.q.data, token)
    }

    /// Key of a token, `[K]`.
    pub fn k(&self, token: usize) -> &'a [f64] {
        self.qk_row(&self.inputs.k.data, token)
    }

    /// Value of a token, `[V]`.
    pub fn v(&self, token: usize) -> &'a [f64] {
        self.value_row(&self.inputs.v.data, token)
    }

    /// Log decay of a token: one value for GDN, `[K]` for GDN-2.
    pub fn log_decay(&self, token: usize) -> &'a [f64] {
        self.value_row(&self.inputs.gates.log_decay().data, token)
    }

    /// Erase gate of a token: one value for GDN, `[K]` for GDN-2.
    pub fn erase(&self, token: usize) -> &'a [f64] {
        match &self.inputs.gates {
            Gates::Gdn { beta, .. } => self.value_row(&beta.data, token),
            Gates::Gdn2 { b, .. } => self.value_row(&b.data, token),
        }
    }

    /// Write gate of a token: one value for GDN, `[V]` for GDN-2.
    pub fn write(&self, token: usize) -> &'a [f64] {
        match &self.inputs.gates {
            Gates::Gdn { beta, .. } => self.value_row(&beta.data, token),
            Gates::Gdn2 { w, .. } => self.value_row(&w.data, token),
        }
    }

    /// Gradient of a token's output, `[V]`.
    pub fn d_o(&self, token: usize) -> Option<&'a [f64]> {
        Some(self.value_row(&self.inputs.d_o.as_ref()?.data, token))
    }

    fn state(&self, data: &'a [f64]) -> &'a [f64] {
        let size = self.key_dim() * self.value_dim();
        let at = (self.sequence * self.inputs.shape.value_heads + self.value_head) * size;
        &data[at..at + size]
    }

    /// State before the first token, `[K, V]`.
    pub fn initial_state(&self) -> Option<&'a [f64]> {
        Some(self.state(&self.inputs.initial_state.as_ref()?.data))
    }

    /// Gradient of the final state, `[K, V]`.
    pub fn d_final_state(&self) -> Option<&'a [f64]> {
        Some(self.state(&self.inputs.d_final_state.as_ref()?.data))
    }
}

/// `[tokens][dim]` rows of one head, scattered over a `[B, T, H, dim]` tensor.
pub(crate) type Rows<'a> = Vec<&'a mut [f64]>;

/// Where one head's forward goes.
pub(crate) struct HeadOutputs<'a> {
    pub o: Rows<'a>,
    /// `[K, V]`.
    pub final_state: &'a mut [f64],
}

/// Where one head's backward goes. `dq` and `dk` are shared by the group's value heads, so they are added to.
pub(crate) struct HeadGrads<'a, 'g> {
    pub dq: &'g mut Rows<'a>,
    pub dk: &'g mut Rows<'a>,
    pub dv: Rows<'a>,
    pub dg: Rows<'a>,
    pub gates: HeadGateGrads<'a>,
    /// `[K, V]`.
    pub dh0: &'a mut [f64],
}

pub(crate) enum HeadGateGrads<'a> {
    Gdn { dbeta: Rows<'a> },
    Gdn2 { db: Rows<'a>, dw: Rows<'a> },
}

struct ValueHeadGrads<'a> {
    dv: Rows<'a>,
    dg: Rows<'a>,
    gates: HeadGateGrads<'a>,
    dh0: &'a mut [f64],
}

struct Task<'a> {
    heads: Vec<(Head<'a>, HeadOutputs<'a>, Option<ValueHeadGrads<'a>>)>,
    dq: Rows<'a>,
    dk: Rows<'a>,
}

/// Splits a `[B, T, H, dim]` buffer into the rows of each (sequence, head), sequences outermost.
fn split_rows<'a>(data: &'a mut [f64], inputs: &Inputs, heads: usize) -> Vec<Rows<'a>> {
    let tokens = inputs.shape.batch * inputs.shape.tokens;
    let dim = data.len().checked_div(tokens * heads).unwrap_or(1);
    let mut rows = data.chunks_exact_mut(dim.max(1));
    let mut all = Vec::with_capacity(inputs.sequences() * heads);
    for range in inputs.sequence_ranges() {
        let first = all.len();
        all.extend((0..heads).map(|_| Vec::with_capacity(range.len())));
        for _ in range {
            for (head, row) in rows.by_ref().take(heads).enumerate() {
                all[first + head].push(row);
            }
        }
    }
    all
}

/// What results hold before they are computed: NaN where checks are on, so that an element that nobody writes shows;
/// otherwise zeros, which cost no pass over memory.
const UNWRITTEN: f64 = if cfg!(debug_assertions) { f64::NAN } else { 0.0 };

/// Runs `body` for every sequence and value head in parallel, and returns the filled results.
pub(crate) fn run(
    inputs: &Inputs,
    backward: bool,
    body: impl Fn(&Head<'_>, HeadOutputs<'_>, Option<HeadGrads<'_, '_>>) + Sync,
) -> Result<Results> {
    inputs.validate()?;
    if backward && inputs.d_o.is_none() {
        return Err(Error::input("the backward needs 'do', the gradient of the output, shape [B, T, HV, V]"));
    }
    let mut outputs = Outputs::filled(inputs, UNWRITTEN);
    let mut grads = backward.then(|| {
        // They are added to. A page of zeros that is read before it is written is mapped twice, and every thread told.
        let zeros = |tensor: &Tensor| {
            let mut zeros = Tensor::zeros(&tensor.dims);
            zeros.data.par_chunks_mut(PIECE).for_each(|piece| piece.fill(0.0));
            zeros
        };
        Grads { dq: zeros(&inputs.q), dk: zeros(&inputs.k), ..Grads::filled(inputs, UNWRITTEN) }
    });
    tasks(inputs, &mut outputs, grads.as_mut()).into_par_iter().for_each(|task| {
        let Task { heads, mut dq, mut dk } = task;
        for (head, out, grads) in heads {
            let grads = grads.map(|ValueHeadGrads { dv, dg, gates, dh0 }| HeadGrads {
                dq: &mut dq,
                dk: &mut dk,
                dv,
                dg,
                gates,
                dh0,
            });
            body(&head, out, grads);
        }
    });
    Ok(Results { outputs, grads })
}

fn tasks<'a>(inputs: &'a Inputs, outputs: &'a mut Outputs, grads: Option<&'a mut Grads>) -> Vec<Task<'a>> {
    let shape = &inputs.shape;
    let state_size = shape.key_dim * shape.value_dim;
    let mut states = outputs.final_state.data.chunks_exact_mut(state_size);
    let mut o = split_rows(&mut outputs.o.data, inputs, shape.value_heads).into_iter();
    let mut grads = grads.map(|grads| split_grads(grads, inputs));
    let mut all = Vec::new();
    for (sequence, tokens) in inputs.sequence_ranges().into_iter().enumerate() {
        for qk_head in 0..shape.qk_heads {
            let (dq, dk) = grads.as_mut().map_or_else(Default::default, |(qk, _)| qk.next().unwrap_or_default());
            let value_heads = qk_head * shape.group()..(qk_head + 1) * shape.group();
            let heads = value_heads
                .filter_map(|value_head| {
                    let head = Head { inputs, tokens: tokens.clone(), sequence, value_head };
                    let out = HeadOutputs { o: o.next()?, final_state: states.next()? };
                    Some((head, out, grads.as_mut().and_then(|(_, values)| values.next())))
                })
                .collect();
            all.push(Task { heads, dq, dk });
        }
    }
    all
}

type QkRows<'a> = std::vec::IntoIter<(Rows<'a>, Rows<'a>)>;
type ValueRows<'a> = std::vec::IntoIter<ValueHeadGrads<'a>>;

fn split_grads<'a>(grads: &'a mut Grads, inputs: &Inputs) -> (QkRows<'a>, ValueRows<'a>) {
    let shape = &inputs.shape;
    let value_rows = |data: &'a mut [f64]| split_rows(data, inputs, shape.value_heads);
    let dq = split_rows(&mut grads.dq.data, inputs, shape.qk_heads);
    let dk = split_rows(&mut grads.dk.data, inputs, shape.qk_heads);
    let gates: Vec<HeadGateGrads<'a>> = match &mut grads.gates {
        GateGrads::Gdn { dbeta } => {
            value_rows(&mut dbeta.data).into_iter().map(|dbeta| HeadGateGrads::Gdn { dbeta }).collect()
        }
        GateGrads::Gdn2 { db, dw } => {
            let dw = value_rows(&mut dw.data);
            value_rows(&mut db.data).into_iter().zip(dw).map(|(db, dw)| HeadGateGrads::Gdn2 { db, dw }).collect()
        }
    };
    let values: Vec<ValueHeadGrads<'a>> = value_rows(&mut grads.dv.data)
        .into_iter()
        .zip(value_rows(&mut grads.dg.data))
        .zip(gates)
        .zip(grads.dh0.data.chunks_exact_mut(shape.key_dim * shape.value_dim))
        .map(|(((dv, dg), gates), dh0)| ValueHeadGrads { dv, dg, gates, dh0 })
        .collect();
    (dq.into_iter().zip(dk).collect::<Vec<_>>().into_iter(), values.into_iter())
}
