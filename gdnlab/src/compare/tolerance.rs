//! The one table of limits that results are held to.
//!
//! A limit is a multiple of a unit roundoff `u`. For a mode whose operands are rounded with `u` at every stage, the
//! chain K K^T, solve, T R, S read, P U, output rounds two operands about six times. Each rounding has an RMS of at
//! most `u/sqrt(3)`, so independent errors come to `sqrt(6 * 2 / 3) u = 2u` of relative RMS. Truncated operands, as
//! tensor cores make them of binary32 in TF32, err by up to `2u`, all in one direction, which adds up to four times
//! that. The worst of a million errors is about five times their RMS, but `max|r|` is four times the RMS of `r` too, so
//! `max_rel` is somewhat larger than `rel_rms`.
//!
//! The limits hold for every input regime but almost collinear keys and extreme decays, which amplify the errors of any
//! kernel by a factor that depends on the inputs. A report on one call ([`Report::of_call`](super::Report::of_call))
//! allows for that.

use crate::precision::Format;
use crate::{Error, Result};
use serde::Serialize;

/// Tensors that one row of the table holds for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorClass {
    /// o.
    Output,
    /// final_state and dh0.
    State,
    /// dq, dk, dv, db and dw.
    InputGrad,
    /// dg and dbeta.
    GateGrad,
}

impl TensorClass {
    /// All classes.
    pub const ALL: [Self; 4] = [Self::Output, Self::State, Self::InputGrad, Self::GateGrad];

    /// The class of the result tensor `name`.
    pub fn of(name: &str) -> Result<Self> {
        match name {
            "o" => Ok(Self::Output),
            "final_state" | "dh0" => Ok(Self::State),
            "dq" | "dk" | "dv" | "db" | "dw" => Ok(Self::InputGrad),
            "dg" | "dbeta" => Ok(Self::GateGrad),
            _ => Err(Error::input(format!(
                "'{name}' is no result of GDN or GDN-2: expected o, final_state, dq, dk, dv, dg, dbeta, db, dw or dh0"
            ))),
        }
    }
}

/// Limits for one mode and class of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Tolerance {
    /// Name of the mode.
    pub mode: &'static str,
    /// Tensors that it holds for.
    pub class: TensorClass,
    /// Format whose unit roundoff is the unit of the limits.
    pub unit: Format,
    /// Largest `rel_rms`, in units of [`Tolerance::unit_roundoff`].
    pub rel_rms_u: f64,
    /// Largest `max_rel`, in units of [`Tolerance::unit_roundoff`].
    pub max_rel_u: f64,
    /// Why these limits.
    pub reason: &'static str,
}

impl Tolerance {
    /// `u`, the unit of the limits.
    pub fn unit_roundoff(&self) -> f64 {
        self.unit.unit_roundoff()
    }

    /// Largest `rel_rms` that passes.
    pub fn rel_rms(&self) -> f64 {
        self.rel_rms_u * self.unit_roundoff()
    }

    /// Largest `max_rel` that passes.
    pub fn max_rel(&self) -> f64 {
        self.max_rel_u * self.unit_roundoff()
    }

    /// Magnitude below which the mode cannot tell a value from 0, so that a tensor smaller than this is measured
    /// against it: the smallest normal number of the format that results are stored in.
    pub fn smallest_scale(&self) -> f64 {
        let stored = if self.unit == Format::F64 || self.mode == "fp16" { self.unit } else { Format::F32 };
        2f64.powi(stored.min_exponent())
    }
}

/// A mode that results can be held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Mode {
    /// Name on the command line and in records.
    pub name: &'static str,
    /// What a kernel of this mode does.
    pub summary: &'static str,
}

/// One row of the table: mode, classes, unit, `rel_rms` and `max_rel` in units of `u`, reason.
type Row = (&'static str, &'static [TensorClass], Format, f64, f64, &'static str);

const MODES: &[Mode] = &[
    Mode { name: "fp64", summary: "binary64 throughout" },
    Mode { name: "fp32", summary: "IEEE binary32 throughout, the triangular solve too" },
    Mode { name: "fp32-tf32-solve", summary: "binary32 with TF32 operands in the triangular solve alone" },
    Mode { name: "tf32", summary: "binary32 storage, TF32 operands in every product" },
    Mode { name: "bf16", summary: "bf16 inputs and operands, fp32 accumulation" },
    Mode { name: "fp16", summary: "fp16 inputs and operands, fp32 accumulation" },
    Mode { name: "f16-internals", summary: "bf16 inputs and outputs, fp16 operands inside, fp32 accumulation" },
];

use TensorClass::{GateGrad, InputGrad, Output, State};
const ALL: &[TensorClass] = &TensorClass::ALL;

#[rustfmt::skip]
const TABLE: &[Row] = &[
    ("fp64", ALL, Format::F64, 9007.0, 9007.0,
     "1e-12: the chunk form and the recurrence are the same algebra; sums of up to 256 + 128 terms and a triangular \
      solve of 128 unknowns leave a few thousand u"),
    ("fp32", ALL, Format::F32, 128.0, 256.0,
     "IEEE products leave 5u to 60u of rel_rms; the library fla measures 13u (chunk 32) and 54u (chunk 64) with an IEEE \
      solve, and 480u with TF32 in the solve alone, which must not pass"),
    ("fp32-tf32-solve", ALL, Format::Tf32, 2.0, 3.0,
     "only the solve rounds to TF32, and the more the longer the memory: 0.05u to 1.3u of rel_rms; published maxima \
      0.08u to 0.42u"),
    ("tf32", &[Output, State], Format::Tf32, 5.0, 8.0,
     "truncated operands at every stage leave 2.3u to 3.9u of rel_rms, published maxima are 1.6u to 3.7u; bf16 operands \
      leave 6u to 10u in o"),
    ("tf32", &[InputGrad, GateGrad], Format::Tf32, 8.0, 10.0,
     "twice the stages of the forward: 4u to 6.5u of rel_rms; published maxima 2.8u to 4.6u"),
    ("bf16", ALL, Format::Bf16, 3.0, 5.0,
     "operands and stored intermediates rounded at every stage: 0.7u to 2.3u of rel_rms; published maxima 0.7u to 2.2u"),
    ("fp16", ALL, Format::F16, 3.0, 6.0,
     "as bf16, with the roundoff of fp16; an exact result that went through bf16 has 3.1u of rel_rms or more"),
    ("f16-internals", &[Output, InputGrad], Format::Bf16, 0.7, 2.0,
     "the bf16 rounding of the result alone is 0.44u of rel_rms, fp16 operands bring it to 0.5u; bf16 internals begin \
      at 0.75u"),
    ("f16-internals", &[State, GateGrad], Format::F16, 3.0, 5.0,
     "stored in binary32, so only the fp16 operands count: 0.5u to 2.5u of rel_rms; bf16 internals begin at 4.2u"),
];

/// All modes.
pub fn modes() -> &'static [Mode] {
    MODES
}

/// The mode called `name`.
///
/// # Errors
/// [`Error::Input`] with the known names where there is none.
pub fn mode(name: &str) -> Result<Mode> {
    MODES.iter().find(|mode| mode.name == name).copied().ok_or_else(|| {
        let names: Vec<&str> = MODES.iter().map(|mode| mode.name).collect();
        Error::input(format!("unknown mode '{name}': expected one of {}", names.join(", ")))
    })
}

/// The limits of `mode` for tensors of `class`.
///
/// # Errors
/// [`Error::Input`] with the known names where there is no such mode.
pub fn tolerance(mode_name: &str, class: TensorClass) -> Result<Tolerance> {
    let mode = mode(mode_name)?.name;
    TABLE
        .iter()
        .find(|(name, classes, ..)| *name == mode && classes.contains(&class))
        .map(|&(_, _, unit, rel_rms_u, max_rel_u, reason)| Tolerance {
            mode,
            class,
            unit,
            rel_rms_u,
            max_rel_u,
            reason,
        })
        .ok_or_else(|| Error::input(format!("mode '{mode}' has no limits for {class:?} tensors")))
}
