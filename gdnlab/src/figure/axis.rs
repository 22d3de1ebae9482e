//! Logarithmic axes: their ranges, ticks and labels.

/// A logarithmic scale from `low` at position `from` to `high` at position `to`, in canvas units.
#[derive(Clone, Copy, Debug)]
pub struct Log {
    pub low: f64,
    pub high: f64,
    pub from: i32,
    pub to: i32,
}

impl Log {
    /// Where `value` stands.
    pub fn at(&self, value: f64) -> i32 {
        let along = (value / self.low).ln() / (self.high / self.low).ln();
        self.from + (along * f64::from(self.to - self.from)).round() as i32
    }

    /// The powers of ten on the scale, as exponents.
    pub fn decades(&self) -> impl Iterator<Item = i32> {
        self.low.log10().ceil() as i32..=self.high.log10().floor() as i32
    }
}

/// `10^exponent` as it is printed: `10⁻³`.
pub fn power_of_ten(exponent: i32) -> String {
    format!("10{}", superscript(exponent))
}

/// `n` in raised digits.
pub fn superscript(n: i32) -> String {
    n.to_string()
        .chars()
        .map(|c| match c {
            '-' => '⁻',
            '1' => '¹',
            '2' => '²',
            '3' => '³',
            digit => char::from_u32('⁰' as u32 + digit.to_digit(10).unwrap_or(0)).unwrap_or(digit),
        })
        .collect()
}

/// A positive number with two digits: `3.9·10⁻³`; plain between 0.01 and 10,000.
pub fn short(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    let exponent = format!("{value:.1e}").split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
    let unit = 10f64.powi(exponent - 1);
    let digits = (value / unit).round();
    if (-2..4).contains(&exponent) {
        format!("{:.*}", (1 - exponent).max(0) as usize, digits * unit)
    } else {
        format!("{:.1}·{}", digits / 10.0, power_of_ten(exponent))
    }
}

/// The smallest and the largest of `values` that are positive and finite.
pub fn extent(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.filter(|value| *value > 0.0 && value.is_finite()).fold(None, |range, value| match range {
        None => Some((value, value)),
        Some((low, high)) => Some((f64::min(low, value), f64::max(high, value))),
    })
}

/// The ticks of a short logarithmic axis: 1, 2 and 5 times the powers of ten within `low..=high`.
pub fn ticks_125(low: f64, high: f64) -> Vec<f64> {
    let first = low.log10().floor() as i32;
    let last = high.log10().ceil() as i32;
    (first..=last)
        .flat_map(|exponent| [1.0, 2.0, 5.0].map(|mantissa| mantissa * 10f64.powi(exponent)))
        .filter(|tick| (low * 0.999..=high * 1.001).contains(tick))
        .collect()
}

/// Label of a tick of [`ticks_125`]: the power of ten alone, or with its factor.
pub fn tick_125(value: f64) -> String {
    let exponent = (value.log10() + 1e-9).floor() as i32;
    match (value / 10f64.powi(exponent)).round() as u32 {
        1 => power_of_ten(exponent),
        mantissa => format!("{mantissa}·{}", power_of_ten(exponent)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_printed_with_raised_exponents() {
        assert_eq!(power_of_ten(-3), "10⁻³");
        assert_eq!(power_of_ten(12), "10¹²");
        assert_eq!(superscript(-4567890), "⁻⁴⁵⁶⁷⁸⁹⁰");
    }

    #[test]
    fn short_numbers_keep_two_digits() {
        for (value, text) in [
            (3.906e-3, "3.9·10⁻³"),
            (0.0399, "0.040"),
            (0.0999, "0.10"),
            (1.234, "1.2"),
            (12.34, "12"),
            (1834.6, "1800"),
            (18_346.0, "1.8·10⁴"),
            (9.99e-8, "1.0·10⁻⁷"),
            (0.0, "0"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(short(value), text);
        }
    }

    #[test]
    fn extents_skip_what_no_logarithm_has() {
        assert_eq!(extent([3e-3, 0.0, f64::NAN, 2e-7].into_iter()), Some((2e-7, 3e-3)));
        assert_eq!(extent([0.0, f64::INFINITY, -1.0].into_iter()), None);
    }

    #[test]
    fn positions_run_from_the_low_end_to_the_high_end() {
        let scale = Log { low: 1e-4, high: 1e-2, from: 500, to: 100 };
        assert_eq!([1e-4, 1e-3, 1e-2].map(|value| scale.at(value)), [500, 300, 100]);
    }

    #[test]
    fn ticks_are_one_two_and_five() {
        let ticks = ticks_125(9e-5, 6e-4);
        assert_eq!(ticks.iter().map(|&tick| tick_125(tick)).collect::<Vec<_>>(), ["10⁻⁴", "2·10⁻⁴", "5·10⁻⁴"]);
        assert_eq!(tick_125(1e-3), "10⁻³");
    }
}
