//! Number formats: correct rounding into them, and their unit roundoffs.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A floating-point format that values are rounded to. All of them keep subnormals, overflow to infinity and keep NaN;
/// all but [`Format::Tf32Truncated`] round to nearest, ties to even.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// IEEE binary64.
    F64,
    /// IEEE binary32.
    F32,
    /// NVIDIA's TF32: the exponent range of binary32 with 10 fraction bits.
    Tf32,
    /// TF32 by dropping the last 13 bits of a binary32 number, towards zero: what a tensor core does with an operand that
    /// nobody rounded before. On an H200 the products of fla's triangular solve show it: their errors have the sign of
    /// the result and a mean of half a unit in the last place (`data/day01-peers_h200_2026-11-29.jsonl`).
    Tf32Truncated,
    /// bfloat16: the exponent range of binary32 with 7 fraction bits.
    Bf16,
    /// IEEE binary16: 5 exponent bits, 10 fraction bits, largest value 65,504.
    F16,
}

impl Format {
    /// All formats, widest first.
    pub const ALL: [Self; 6] = [Self::F64, Self::F32, Self::Tf32, Self::Tf32Truncated, Self::Bf16, Self::F16];

    /// Name as used in files, records and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::Tf32Truncated => "tf32-truncated",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// Bits of the fraction, without the implicit one.
    pub fn fraction_bits(self) -> u32 {
        match self {
            Self::F64 => 52,
            Self::F32 => 23,
            Self::Tf32 | Self::Tf32Truncated | Self::F16 => 10,
            Self::Bf16 => 7,
        }
    }

    /// Exponent of the smallest normal number.
    pub fn min_exponent(self) -> i32 {
        match self {
            Self::F64 => -1022,
            Self::F32 | Self::Tf32 | Self::Tf32Truncated | Self::Bf16 => -126,
            Self::F16 => -14,
        }
    }

    /// Exponent of the largest finite number.
    pub fn max_exponent(self) -> i32 {
        1 - self.min_exponent()
    }

    /// Largest finite number.
    pub fn max_finite(self) -> f64 {
        (2.0 - exp2i(-(self.fraction_bits() as i32))) * exp2i(self.max_exponent())
    }

    /// Unit roundoff `u` of rounding to nearest: half the gap at 1, the largest relative error in the normal range.
    /// (Truncation errs by up to twice that; it is counted in the same unit.)
    pub fn unit_roundoff(self) -> f64 {
        exp2i(-(self.fraction_bits() as i32) - 1)
    }

    /// Bytes that one value takes in memory (TF32 is stored as binary32).
    pub fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 | Self::Tf32 | Self::Tf32Truncated => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Whether every value of `other` is a value of `self`.
    pub fn contains(self, other: Self) -> bool {
        self.fraction_bits() >= other.fraction_bits()
            && self.min_exponent() - self.fraction_bits() as i32 <= other.min_exponent() - other.fraction_bits() as i32
            && self.max_exponent() >= other.max_exponent()
    }

    /// `x` rounded once to this format.
    pub fn round(self, x: f64) -> f64 {
        match self {
            Self::F64 => return x,
            Self::Tf32Truncated => return f64::from(truncate_fraction(x as f32)),
            _ => {}
        }
        let dropped = Self::F64.fraction_bits() - self.fraction_bits();
        let rounded = if x.abs() < exp2i(self.min_exponent()) {
            // The spacing is constant below the smallest normal number. Adding 1.5 * 2^52 spacings leaves no room
            // for anything finer, so the addition itself rounds, ties to even.
            let magic = 1.5 * exp2i(52 + self.min_exponent() - self.fraction_bits() as i32);
            ((x + magic) - magic).copysign(x)
        } else if x.is_nan() {
            x
        } else {
            let bits = x.to_bits();
            let half_down = (1u64 << (dropped - 1)) - 1 + ((bits >> dropped) & 1);
            f64::from_bits((bits.wrapping_add(half_down)) & !((1u64 << dropped) - 1))
        };
        if rounded.abs() > self.max_finite() { f64::INFINITY.copysign(x) } else { rounded }
    }

    /// `x` rounded to this format; exact for [`Format::F64`] and [`Format::F32`].
    #[inline]
    pub fn round_f32(self, x: f32) -> f32 {
        match self {
            Self::F64 | Self::F32 => x,
            Self::Tf32 => round_fraction::<13>(x),
            Self::Tf32Truncated => truncate_fraction(x),
            Self::Bf16 => round_fraction::<16>(x),
            Self::F16 => round_f16(x),
        }
    }

    /// Rounds every element in place.
    pub fn round_slice(self, values: &mut [f64]) {
        match self {
            Self::F64 => {}
            Self::F32 => values.iter_mut().for_each(|x| *x = f64::from(*x as f32)),
            _ => values.iter_mut().for_each(|x| *x = self.round(*x)),
        }
    }

    /// Rounds every element in place.
    pub fn round_slice_f32(self, values: &mut [f32]) {
        match self {
            Self::F64 | Self::F32 => {}
            Self::Tf32 => values.iter_mut().for_each(|x| *x = round_fraction::<13>(*x)),
            Self::Tf32Truncated => values.iter_mut().for_each(|x| *x = truncate_fraction(*x)),
            Self::Bf16 => values.iter_mut().for_each(|x| *x = round_fraction::<16>(*x)),
            Self::F16 => values.iter_mut().for_each(|x| *x = round_f16(*x)),
        }
    }
}

/// `2^e` for exponents of normal numbers.
fn exp2i(e: i32) -> f64 {
    f64::from_bits(((1023 + e) as u64) << 52)
}

/// Drops the last `DROPPED` fraction bits, to nearest even. The exponent range is that of binary32, so subnormals and
/// overflow need no care: both are what the integer addition does.
#[inline]
fn round_fraction<const DROPPED: u32>(x: f32) -> f32 {
    let bits = x.to_bits();
    let half_down = (1u32 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1);
    let rounded = f32::from_bits(bits.wrapping_add(half_down) & !((1u32 << DROPPED) - 1));
    if x.is_nan() { x } else { rounded }
}

/// Drops the last 13 fraction bits.
#[inline]
fn truncate_fraction(x: f32) -> f32 {
    if x.is_nan() { x } else { f32::from_bits(x.to_bits() & !0x1fff) }
}

#[inline]
fn round_f16(x: f32) -> f32 {
    const MIN_NORMAL: f32 = 6.103_515_6e-5; // 2^-14
    const MAGIC: f32 = 0.75; // 1.5 * 2^23 spacings of 2^-24
    let normal = round_fraction::<13>(x);
    let subnormal = ((x + MAGIC) - MAGIC).copysign(x);
    let rounded = if x.abs() < MIN_NORMAL { subnormal } else { normal };
    if rounded.abs() > 65_504.0 { f32::INFINITY.copysign(x) } else { rounded }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Format {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|format| format.name() == text).ok_or_else(|| {
            Error::input(format!(
                "unknown number format '{text}': expected f64, f32, tf32, tf32-truncated, bf16 or f16"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// The neighbours of a value of a 16-bit format, from the format's own bit patterns.
    fn check_16_bit(format: Format, decode: impl Fn(u16) -> f64) {
        for bits in 0..=u16::MAX {
            let value = decode(bits);
            if value.is_nan() {
                assert!(format.round(value).is_nan() && format.round_f32(value as f32).is_nan());
                continue;
            }
            let same = |x: f64, expected: f64| {
                assert_eq!(format.round(x).to_bits(), expected.to_bits(), "{format} of {x:e} from {bits:#06x}");
                if f64::from(x as f32) == x {
                    let got = f64::from(format.round_f32(x as f32));
                    assert_eq!(got.to_bits(), expected.to_bits(), "{format} of f32 {x:e} from {bits:#06x}");
                }
            };
            same(value, value);
            // The next value away from zero; past the largest finite one stands the power of two that it would be.
            let finite = value.is_finite();
            let next_bits = bits.wrapping_add(1);
            if !finite || decode(next_bits).is_nan() {
                continue;
            }
            let next = decode(next_bits);
            let reach = if next.is_finite() { next } else { exp2i(format.max_exponent() + 1).copysign(value) };
            let middle = value + (reach - value) / 2.0;
            same(middle, if bits % 2 == 0 { value } else { next });
            let below = f64::from_bits(middle.to_bits() - 1);
            let above = f64::from_bits(middle.to_bits() + 1);
            same(below, value);
            same(above, next);
            same(value + (reach - value) * 0.25, value);
            same(value + (reach - value) * 0.75, next);
        }
    }

    #[test]
    fn bf16_rounds_to_nearest_even_around_every_value() {
        check_16_bit(Format::Bf16, |bits| bf16::from_bits(bits).to_f64());
    }

    #[test]
    fn f16_rounds_to_nearest_even_around_every_value() {
        check_16_bit(Format::F16, |bits| f16::from_bits(bits).to_f64());
    }

    #[test]
    fn tf32_rounds_to_nearest_even_around_every_pattern_of_its_top_bits() {
        // TF32 has 19 bits, so its values are not enumerated by u16: take all 2^19.
        for top in 0..(1u32 << 19) {
            let value = f64::from(f32::from_bits(top << 13));
            if value.is_nan() {
                assert!(Format::Tf32.round(value).is_nan());
                continue;
            }
            assert_eq!(Format::Tf32.round(value).to_bits(), value.to_bits());
            if !value.is_finite() {
                continue;
            }
            let next = f64::from(f32::from_bits((top + 1) << 13));
            let reach = if next.is_finite() { next } else { exp2i(128).copysign(value) };
            let middle = value + (reach - value) / 2.0;
            let even = if top % 2 == 0 { value } else { next };
            assert_eq!(Format::Tf32.round(middle), even);
            assert_eq!(f64::from(Format::Tf32.round_f32(f32::from_bits((top << 13) + (1 << 12)))), even);
            assert_eq!(Format::Tf32.round(f64::from_bits(middle.to_bits() + 1)), next);
            assert_eq!(Format::Tf32.round(f64::from_bits(middle.to_bits() - 1)), value);
        }
    }

    #[test]
    fn truncation_drops_what_tf32_has_no_bits_for() {
        let ulp = 2f64.powi(-10);
        for (x, expected) in [(1.0 + 0.99 * ulp, 1.0), (-1.0 - 0.99 * ulp, -1.0), (1.0 + ulp, 1.0 + ulp), (0.0, 0.0)] {
            assert_eq!(Format::Tf32Truncated.round(x), expected);
            assert_eq!(f64::from(Format::Tf32Truncated.round_f32(x as f32)), expected);
        }
    }

    #[test]
    fn f32_rounding_is_the_conversion_of_the_language() {
        for x in [1.0 + 2f64.powi(-24), 1e-45, 1e-46, 3.4e38, 3.5e38, -0.0, f64::MIN_POSITIVE, 0.1] {
            assert_eq!(Format::F32.round(x).to_bits(), f64::from(x as f32).to_bits(), "{x:e}");
        }
    }

    #[test]
    fn rounding_from_f64_happens_once() {
        // Just above a tie of bf16: rounding to f32 first would land on the tie and then go to even.
        let x = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
        assert_eq!(Format::Bf16.round(x), 1.0 + 2f64.powi(-7));
        assert_eq!(Format::F16.round(1.0 + 2f64.powi(-11) + 2f64.powi(-40)), 1.0 + 2f64.powi(-10));
    }

    #[test]
    fn unit_roundoffs_and_ranges_are_those_of_the_formats() {
        assert_eq!(Format::Bf16.unit_roundoff(), 2f64.powi(-8));
        assert_eq!(Format::Tf32.unit_roundoff(), 2f64.powi(-11));
        assert_eq!(Format::F32.unit_roundoff(), f64::from(f32::EPSILON) / 2.0);
        assert_eq!(Format::F64.unit_roundoff(), f64::EPSILON / 2.0);
        assert_eq!(Format::F16.max_finite(), f16::MAX.to_f64());
        assert_eq!(Format::Bf16.max_finite(), bf16::MAX.to_f64());
        assert_eq!(Format::F32.max_finite(), f64::from(f32::MAX));
        assert!(Format::Tf32.contains(Format::Bf16) && Format::Tf32.contains(Format::F16));
        assert!(!Format::Bf16.contains(Format::F16) && !Format::F16.contains(Format::Bf16));
    }

    #[test]
    fn infinities_and_nan_pass() {
        for format in Format::ALL {
            assert_eq!(format.round(f64::NEG_INFINITY), f64::NEG_INFINITY);
            assert_eq!(format.round_f32(f32::INFINITY), f32::INFINITY);
            assert!(format.round(f64::NAN).is_nan() && format.round_f32(f32::NAN).is_nan());
            assert!(format.round_f32(f32::from_bits(0x7fff_ffff)).is_nan());
        }
    }
}
