//! What was tried on a GPU, emulated: how the reference normalises, an IEEE solve, and the recurrent operator.

use super::{Normalisation, Setting, Tensors, Trial};
use crate::precision::{Format, Intermediate, Policy, Product};

/// The base of these trials: what fla's chunk operator stores and multiplies, emulated.
const BASE: &str = "fla's chunk form";

/// Each step, and the case that was published for it.
pub const DIAGNOSIS: [(&str, &str); 5] = [
    ("reference normalises q and k in bf16", "Original CP2 boundary-aligned test"),
    ("reference normalises in fp32, then casts", "Reference Q/K normalized in FP32 then cast back"),
    ("the same, IEEE triangular solve", "Chunk with IEEE triangular-solve products"),
    ("the same, IEEE products of fp32 operands", "Chunk with IEEE solve and default FP32 dot products"),
    ("recurrence, q and k not cast", "Fused recurrent operator - same inputs/reference"),
];

/// One trial for each row of [`DIAGNOSIS`].
///
/// The chunk operator is [`Policy::bf16`] with TF32 products where its operands are in fp32: the solve, `q k^T` and
/// `(b*k) k^T` with decays. The recurrence has no rounding but that of its output; it normalises q and k itself and does not
/// cast them, while the reference does.
pub fn trials_of_diagnosis(setting: Setting) -> Vec<Trial> {
    let in_format = |policy: Policy, products: &[Product], format: Format| {
        products.iter().fold(policy, |policy, &product| policy.operands(product, format))
    };
    let of_fp32 = [Product::Gram, Product::Scores];
    let chunk = in_format(Policy::bf16(), &of_fp32, Format::Tf32Truncated);
    let ieee_solve = chunk.clone().operands(Product::Solve, Format::F32);
    let ieee = in_format(ieee_solve.clone(), &of_fp32, Format::F32);
    let recurrence = Policy::fp64().keep(Intermediate::Output, Format::Bf16);
    use Normalisation::{Bf16, Fp32, Fp32ThenCast};
    let rows = [
        (chunk.clone(), Fp32ThenCast, Bf16),
        (chunk, Fp32ThenCast, Fp32ThenCast),
        (ieee_solve, Fp32ThenCast, Fp32ThenCast),
        (ieee, Fp32ThenCast, Fp32ThenCast),
        (recurrence, Fp32, Fp32ThenCast),
    ];
    let trial = |((step, _), (policy, normalisation, truth)): (&(&str, &str), _)| Trial {
        setting,
        base: BASE.to_owned(),
        step: (*step).to_owned(),
        format: None,
        policy,
        normalisation,
        truth,
        tensors: Tensors::Output,
    };
    DIAGNOSIS.iter().zip(rows).map(trial).collect()
}
