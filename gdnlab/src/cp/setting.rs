//! What is cut, where, and how it grows with the number of ranks.

use super::cut::Cut;
use crate::bench::SeqLens;
use crate::inputs::{Regime, generate};
use crate::kernel::Kernel;
use crate::precision::Format;
use crate::problem::{Inputs, Op, Results, Shape};
use crate::record::Workload;
use crate::{Error, Result, memory};

/// The call that is cut.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Operator.
    pub op: Op,
    /// Heads and head dimensions; `B` is 1, and the tokens are those of `seqlens`.
    pub shape: Shape,
    /// Lengths of its sequences. They begin from a state.
    pub seqlens: SeqLens,
    /// How the inputs are distributed.
    pub regime: Regime,
    /// Their seed.
    pub seed: u64,
    /// Whether gradients are computed too.
    pub backward: bool,
}

impl Setting {
    /// The test of the GDN-2 precision RFC: two sequences of 5,120 tokens with almost collinear keys, 12 heads,
    /// K = V = 128, forward and all gradients.
    pub fn rfc(op: Op, heads: usize) -> Self {
        Self {
            op,
            shape: Shape::new(10_240, heads, 128, 128),
            seqlens: SeqLens::new(vec![5120, 5120]),
            regime: Regime::Correlated,
            seed: 1,
            backward: true,
        }
    }

    /// The same with sequences `factor` times as long.
    #[must_use]
    pub fn longer(&self, factor: usize) -> Self {
        let lengths = self.seqlens.lengths().iter().map(|length| length * factor).collect();
        Self { seqlens: SeqLens::new(lengths), ..self.clone() }
    }

    /// Its inputs, rounded for a kernel that takes `format`.
    ///
    /// # Errors
    /// [`Error::Input`] where the sizes are none, or this machine has no memory for them.
    pub fn inputs(&self, format: Format) -> Result<Inputs> {
        let shape = Shape { batch: 1, tokens: self.seqlens.tokens(), ..self.shape };
        // The call, the parts that ranks have of it, and their results.
        memory::require(shape.bytes(self.op, self.seqlens.lengths().len(), self.backward).saturating_mul(2))?;
        let ends = self.seqlens.ranges().into_iter().map(|tokens| tokens.end);
        let cu_seqlens: Vec<usize> = std::iter::once(0).chain(ends).collect();
        let inputs = generate(self.op, &shape, self.regime, self.seed)?.with_initial_state(self.seed);
        Ok(inputs.packed(&cu_seqlens, self.seed)?.rounded_to(format))
    }

    pub(super) fn workload(&self, kernel: &dyn Kernel) -> Workload {
        let shape = Shape { batch: 1, tokens: self.seqlens.tokens(), ..self.shape };
        let workload = Workload::new(self.op, &shape).inputs(self.regime.name(), self.seed);
        Workload { seqlens: Some(self.seqlens.to_string()), ..workload.kernel(kernel.name(), kernel.mode()) }
    }

    pub(super) fn run(&self, kernel: &dyn Kernel, inputs: &Inputs) -> Result<Results> {
        if self.backward { kernel.backward(inputs) } else { kernel.forward(inputs) }
    }
}

/// Where a call is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cuts {
    /// In parts of equal length.
    Even,
    /// The same at multiples of 64 tokens, those of a chunk.
    Aligned,
    /// In parts of these lengths.
    Lengths(SeqLens),
}

impl Cuts {
    /// The cut of `tokens` for `ranks`.
    ///
    /// # Errors
    /// [`Error::Input`] where lengths are given that do not fit.
    pub fn cut(&self, tokens: usize, ranks: usize) -> Result<Cut> {
        match self {
            Self::Even => Cut::even(tokens, ranks),
            Self::Aligned => Cut::aligned(tokens, ranks, 64),
            Self::Lengths(lengths) if lengths.lengths().len() == ranks && lengths.tokens() == tokens => {
                Cut::at(std::iter::once(0).chain(lengths.ranges().into_iter().map(|part| part.end)).collect())
            }
            Self::Lengths(lengths) => Err(Error::input(format!(
                "a cut into {lengths}: expected {ranks} lengths, one of each rank, that are {tokens} tokens together"
            ))),
        }
    }
}

impl std::str::FromStr for Cuts {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "even" => Ok(Self::Even),
            "aligned" => Ok(Self::Aligned),
            lengths => lengths.parse().map(Self::Lengths).map_err(|_| {
                Error::input(format!(
                    "unknown cut '{text}': expected even, aligned, or the tokens of each rank such as 3000+7240"
                ))
            }),
        }
    }
}

impl std::fmt::Display for Cuts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Even => f.write_str("even"),
            Self::Aligned => f.write_str("aligned"),
            Self::Lengths(lengths) => lengths.fmt(f),
        }
    }
}

/// How work grows with the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaling {
    /// It does not.
    Strong,
    /// With it.
    Weak,
}

impl Scaling {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Strong, Self::Weak];

    /// Name as used on the command line and in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Strong => "strong",
            Self::Weak => "weak",
        }
    }

    /// What `ranks` ranks compute where one computes `setting`.
    pub fn setting(self, setting: &Setting, ranks: usize) -> Setting {
        if self == Self::Weak { setting.longer(ranks) } else { setting.clone() }
    }
}

impl std::fmt::Display for Scaling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Scaling {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = Self::ALL.into_iter().find(|scaling| scaling.name() == text);
        all.ok_or_else(|| Error::input(format!("unknown scaling '{text}': expected strong or weak")))
    }
}
