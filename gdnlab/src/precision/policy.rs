//! Which intermediate of the chunk form is kept in which format, and with which operands each product runs.

use super::Format;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

macro_rules! named_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident => $text:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum $name { $($(#[$doc])* $variant),+ }

        impl $name {
            /// All of them, in the order of the computation.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Name as used in records and tables.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }
    };
}

named_enum! {
    /// A quantity of the chunk form that a kernel stores or feeds to a product.
    Intermediate {
        /// `G`, the cumulative sum of the log decay within a chunk.
        GateCumsum => "gate cumsum",
        /// `L`, the strictly lower triangular matrix of decayed (b*k) k^T products.
        Gram => "K K^T",
        /// `T = (I + L)^-1`.
        Inverse => "inverse",
        /// The right-hand side of the solve: `R`, or the WY factors' `w*v` and `(b*k) e^G`.
        WriteRhs => "write product",
        /// The WY factors `w` and `u` themselves (only in [`WriteForm::Wy`]).
        Wy => "w, u",
        /// `U`, the values that are written into the state.
        U => "U",
        /// `P`, the causal matrix of decayed q k^T products.
        Scores => "scores",
        /// `S` where a product reads it; the running state itself stays in the accumulator.
        State => "state operand",
        /// `o`.
        Output => "output",
        /// `final_state`.
        FinalState => "final state",
        /// `dU`, the adjoint of U.
        DU => "dU",
        /// `Y = T^T dU`.
        Y => "Y",
        /// `dP`, the adjoint of the scores.
        DScores => "dP",
        /// `dL`, the adjoint of K K^T.
        DGram => "dL",
        /// `dS` where a product reads it.
        DState => "dS operand",
        /// dq, dk and dv, and db and dw.
        InputGrads => "dq, dk, dv",
        /// dg and dbeta.
        GateGrads => "dg, dbeta",
        /// dh0.
        StateGrad => "dh0",
    }
}

named_enum! {
    /// A matrix product of the chunk form.
    Product {
        /// `(b*k) k^T`, which gives L.
        Gram => "K K^T",
        /// `q k^T`, which gives P.
        Scores => "Q K^T",
        /// Products that merge the 16x16 blocks of the inverse.
        Solve => "solve",
        /// `T` times its right-hand side, and `T^T dU` in the backward.
        ApplyInverse => "T R",
        /// `((b*k) e^G) S` and `(q e^G) S`.
        StateRead => "K S, Q S",
        /// `P U`.
        Output => "P U",
        /// `(k e^(G_C - G))^T U`.
        StateUpdate => "K^T U",
        /// Every product of the backward but the solve's.
        Adjoint => "backward",
    }
}

/// Format in which a product sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accumulate {
    /// binary32, as tensor cores do.
    F32,
    /// binary64.
    F64,
}

/// How one product runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProductFormat {
    /// Both operands are rounded to this.
    pub operands: Format,
    /// The sum is kept in this.
    pub accumulate: Accumulate,
}

/// How the written values come out of the solve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WriteForm {
    /// `U = T (w*v - ((b*k) e^G) S)`: two roundings fewer, and what this project's kernels do.
    Residual,
    /// `u = T (w*v)`, `w = T ((b*k) e^G)`, `U = u - w S`: the WY factors are stored, as fla does.
    Wy,
}

/// Which intermediate is kept in which format, and how each product runs.
///
/// Start from a preset and change one thing at a time:
///
/// ```
/// use gdnlab::precision::{Format, Intermediate, Policy};
/// let only_scores = Policy::fp64().keep(Intermediate::Scores, Format::Bf16);
/// assert_eq!(only_scores.format(Intermediate::Scores), Format::Bf16);
/// assert_eq!(only_scores.format(Intermediate::U), Format::F64);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Format of q, k, v and do.
    pub inputs: Format,
    /// How the written values come out of the solve.
    pub write_form: WriteForm,
    kept: Vec<Format>,
    products: Vec<ProductFormat>,
}

impl Policy {
    fn uniform(inputs: Format, kept: Format, operands: Format, accumulate: Accumulate) -> Self {
        Self {
            inputs,
            write_form: WriteForm::Residual,
            kept: vec![kept; Intermediate::ALL.len()],
            products: vec![ProductFormat { operands, accumulate }; Product::ALL.len()],
        }
    }

    /// Everything in binary64: the chunk form as algebra.
    pub fn fp64() -> Self {
        Self::uniform(Format::F64, Format::F64, Format::F64, Accumulate::F64)
    }

    /// IEEE binary32 everywhere, the triangular solve too.
    pub fn fp32() -> Self {
        Self::uniform(Format::F32, Format::F32, Format::F32, Accumulate::F32)
    }

    /// binary32 storage with TF32 operands in every product, truncated as tensor cores do: what "fp32" means there.
    pub fn tf32() -> Self {
        let uniform = Self::uniform(Format::F32, Format::F32, Format::Tf32Truncated, Accumulate::F32);
        Self { write_form: WriteForm::Wy, ..uniform }
    }

    /// [`Policy::fp32`] in fla's order of operations, with truncated TF32 operands in the solve's products alone: what
    /// fla runs when it is asked for IEEE products.
    pub fn fp32_tf32_solve() -> Self {
        Self { write_form: WriteForm::Wy, ..Self::fp32() }.operands(Product::Solve, Format::Tf32Truncated)
    }

    /// What fla stores with bf16 inputs: bf16 for T, w, u, U, P, S and dS as operands and every gradient of an input;
    /// fp32 for gates and running states; TF32 in the solve.
    pub fn bf16() -> Self {
        let mut policy = Self::uniform(Format::Bf16, Format::Bf16, Format::Bf16, Accumulate::F32);
        policy.write_form = WriteForm::Wy;
        policy.wide_gates_and_states().operands(Product::Solve, Format::Tf32Truncated)
    }

    /// Ours for bf16 inputs: every stored operand in f16, gates and states in fp32, the solve in TF32, the output and
    /// the gradients of the inputs in bf16.
    pub fn f16_internals() -> Self {
        let mut policy = Self::bf16().operands(Product::Solve, Format::Tf32);
        policy.write_form = WriteForm::Residual;
        for kept in Intermediate::ALL.iter().copied() {
            if policy.format(kept) == Format::Bf16 && !matches!(kept, Intermediate::Output | Intermediate::InputGrads) {
                policy = policy.keep(kept, Format::F16);
            }
        }
        for product in Product::ALL.iter().copied().filter(|&product| product != Product::Solve) {
            policy = policy.operands(product, Format::F16);
        }
        policy
    }

    /// What the chunk kernels for a GPU do: [`WriteForm::Residual`], operands of every product in `operands`, the solve's
    /// too, and what they store between in the same where it has 16 bits; gates, states and sums in binary32; the output and
    /// the gradients of inputs in the format of the inputs. With binary32 for both it is [`Policy::fp32`].
    pub fn of_gpu(inputs: Format, operands: Format) -> Self {
        let stored = if operands == Format::Tf32 { Format::F32 } else { operands };
        let mut policy = Self::uniform(inputs, stored, operands, Accumulate::F32);
        for narrow in [Intermediate::Output, Intermediate::InputGrads] {
            policy = policy.keep(narrow, inputs);
        }
        policy.wide_gates_and_states()
    }

    fn wide_gates_and_states(mut self) -> Self {
        for wide in [
            Intermediate::GateCumsum,
            Intermediate::Gram,
            Intermediate::FinalState,
            Intermediate::DGram,
            Intermediate::GateGrads,
            Intermediate::StateGrad,
        ] {
            self = self.keep(wide, Format::F32);
        }
        self
    }

    /// Exact but for what goes in and comes out: inputs, output and the gradients of inputs in `format`, states and the
    /// gradients of gates in binary32, and all between in binary64. No kernel with such results can have smaller errors.
    pub fn rounded_results(format: Format) -> Self {
        let mut policy = Self::fp64().keep(Intermediate::Output, format).keep(Intermediate::InputGrads, format);
        for wide in [Intermediate::FinalState, Intermediate::StateGrad, Intermediate::GateGrads] {
            policy = policy.keep(wide, Format::F32);
        }
        policy.inputs = format;
        policy
    }

    /// The presets with the names they have as kernels and modes.
    pub fn presets() -> Vec<(&'static str, Self)> {
        vec![
            ("fp64", Self::fp64()),
            ("fp32", Self::fp32()),
            ("fp32-tf32-solve", Self::fp32_tf32_solve()),
            ("tf32", Self::tf32()),
            ("bf16", Self::bf16()),
            ("f16-internals", Self::f16_internals()),
        ]
    }

    /// The preset called `name`.
    pub fn preset(name: &str) -> Result<Self> {
        let presets = Self::presets();
        let names: Vec<&str> = presets.iter().map(|(name, _)| *name).collect();
        presets
            .iter()
            .find(|(preset, _)| *preset == name)
            .map(|(_, policy)| policy.clone())
            .ok_or_else(|| Error::input(format!("unknown mode '{name}': expected one of {}", names.join(", "))))
    }

    /// The format that `intermediate` is kept in.
    pub fn format(&self, intermediate: Intermediate) -> Format {
        self.kept[intermediate as usize]
    }

    /// How `product` runs.
    pub fn product(&self, product: Product) -> ProductFormat {
        self.products[product as usize]
    }

    /// The same policy with `intermediate` kept in `format`.
    #[must_use]
    pub fn keep(mut self, intermediate: Intermediate, format: Format) -> Self {
        self.kept[intermediate as usize] = format;
        self
    }

    /// The same policy with the operands of `product` rounded to `format`.
    #[must_use]
    pub fn operands(mut self, product: Product, format: Format) -> Self {
        self.products[product as usize].operands = format;
        self
    }

    /// The same policy with `product` summed in `accumulate`.
    #[must_use]
    pub fn accumulate(mut self, product: Product, accumulate: Accumulate) -> Self {
        self.products[product as usize].accumulate = accumulate;
        self
    }

    /// Whether binary32 holds all that this policy keeps, so that the arithmetic can run in it.
    pub fn fits_f32(&self) -> bool {
        self.inputs != Format::F64
            && self.kept.iter().all(|&format| format != Format::F64)
            && self.products.iter().all(|p| p.operands != Format::F64 && p.accumulate == Accumulate::F32)
    }
}
