//! What the chunk form of GDN-2 keeps between its steps: numbers per token and value head, and their bytes, in the notation
//! of [`chunked`](crate::chunked).
//!
//! | kept | numbers | where |
//! |---|---|---|
//! | `G`, always in fp32 | `K` | memory |
//! | `T`, `P` | `C` each | memory |
//! | the WY factors `w`, `u` (in [`WriteForm::Wy`] alone) | `K + V` | memory |
//! | `U`, `Y` | `V` each | memory |
//! | `S` and `dS` at the start of each chunk | `K V / C` each | memory |
//! | the write product: `R`, or `w*v` and `(b*k) e^G` in [`WriteForm::Wy`] | `V`, or `K + V` | on chip |
//! | `dU` | `V` | on chip |
//! | `dP`, `dL` | `C` each | on chip |
//!
//! Memory is what one launch leaves to another: it is written once and read at least once. What stays on the chip is an
//! operand in shared memory or registers. Both grow with the format, so both count as the price of a wider one.

use crate::precision::{Format, Intermediate, WriteForm};

/// Sizes that the numbers depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// `C`, tokens of a chunk.
    pub chunk: usize,
    /// `K` = d_k.
    pub key_dim: usize,
    /// `V` = d_v.
    pub value_dim: usize,
}

/// Bytes per token and value head.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KeptBytes {
    /// Between launches.
    pub memory: f64,
    /// As operands within one launch.
    pub on_chip: f64,
}

impl KeptBytes {
    /// Both together.
    pub fn total(&self) -> f64 {
        self.memory + self.on_chip
    }
}

/// Whether one launch leaves `kept` to another in memory.
pub fn is_in_memory(kept: Intermediate) -> bool {
    use Intermediate::{DState, GateCumsum, Inverse, Scores, State, U, Wy, Y};
    matches!(kept, GateCumsum | Inverse | Scores | Wy | U | State | DState | Y)
}

/// Numbers of `kept` per token and value head; 0 for what is no intermediate of the table above.
pub fn numbers(kept: Intermediate, form: WriteForm, dims: Dims) -> f64 {
    let [c, k, v] = [dims.chunk, dims.key_dim, dims.value_dim].map(|size| size as f64);
    match (kept, form) {
        (Intermediate::GateCumsum, _) => k,
        (Intermediate::Inverse | Intermediate::Scores | Intermediate::DScores | Intermediate::DGram, _) => c,
        (Intermediate::Wy | Intermediate::WriteRhs, WriteForm::Wy) => k + v,
        (Intermediate::WriteRhs | Intermediate::U | Intermediate::Y | Intermediate::DU, _) => v,
        (Intermediate::State | Intermediate::DState, _) => k * v / c,
        _ => 0.0,
    }
}

/// Bytes of `kept`, each with the format that it is in, per token and value head.
pub fn kept_bytes(kept: impl IntoIterator<Item = (Intermediate, Format)>, form: WriteForm, dims: Dims) -> KeptBytes {
    let mut sum = KeptBytes::default();
    for (kept, format) in kept {
        let bytes = numbers(kept, form, dims) * format.bytes() as f64;
        let part = if is_in_memory(kept) { &mut sum.memory } else { &mut sum.on_chip };
        *part += bytes;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: Dims = Dims { chunk: 64, key_dim: 128, value_dim: 128 };

    /// G 512, T and P 128 each, U 256, S 512 bytes, and R 256 on the chip; the WY form keeps w and u, 512 bytes, and has
    /// an operand of K more.
    #[test]
    fn a_forward_in_16_bits_keeps_what_the_table_says() {
        use Intermediate::{GateCumsum, Inverse, Scores, State, U, WriteRhs, Wy};
        let narrow = [Inverse, WriteRhs, Wy, U, Scores, State].map(|kept| (kept, Format::F16));
        let kept = || narrow.into_iter().chain([(GateCumsum, Format::F32)]);
        let residual = kept_bytes(kept(), WriteForm::Residual, DIMS);
        assert_eq!((residual.memory, residual.on_chip, residual.total()), (1536.0, 256.0, 1792.0));
        let wy = kept_bytes(kept(), WriteForm::Wy, DIMS);
        assert_eq!((wy.memory, wy.on_chip), (1536.0 + 512.0, 512.0));
    }

    #[test]
    fn fp32_doubles_what_a_backward_keeps_in_16_bits() {
        use Intermediate::{DGram, DScores, DState, DU, Y};
        let bytes =
            |format| kept_bytes([DState, DU, Y, DScores, DGram].map(|kept| (kept, format)), WriteForm::Wy, DIMS);
        let (narrow, wide) = (bytes(Format::Bf16), bytes(Format::F32));
        assert_eq!((narrow.memory, narrow.on_chip), (768.0, 512.0));
        assert_eq!((wide.memory, wide.on_chip), (2.0 * narrow.memory, 2.0 * narrow.on_chip));
        assert_eq!(numbers(Intermediate::Output, WriteForm::Wy, DIMS), 0.0);
    }
}
