//! Sums that do not lose what they add.

/// Terms that are added plainly before their sum enters the compensated total.
const BLOCK: usize = 64;

/// Sum of `terms`: blocks of 64 are added plainly, the blocks by Neumaier's compensated sum. The error stays near
/// `64 u` of the sum of magnitudes, for any number of terms.
pub(super) fn sum(terms: impl Iterator<Item = f64>) -> f64 {
    let mut total = Compensated::default();
    let (mut block, mut count) = (0.0, 0);
    for term in terms {
        block += term;
        count += 1;
        if count == BLOCK {
            total.add(block);
            (block, count) = (0.0, 0);
        }
    }
    total.add(block);
    total.value()
}

/// Neumaier's sum: the running total and what its roundings dropped.
#[derive(Default)]
struct Compensated {
    total: f64,
    dropped: f64,
}

impl Compensated {
    fn add(&mut self, term: f64) {
        let next = self.total + term;
        self.dropped +=
            if self.total.abs() >= term.abs() { (self.total - next) + term } else { (term - next) + self.total };
        self.total = next;
    }

    fn value(&self) -> f64 {
        // After an overflow the compensation is NaN and the total says what happened.
        if self.total.is_finite() { self.total + self.dropped } else { self.total }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_small_terms_beside_large_ones() {
        let mut total = Compensated::default();
        [1.0, 1e100, 1.0, -1e100].into_iter().for_each(|x| total.add(x));
        assert_eq!(total.value(), 2.0);
    }

    #[test]
    fn a_million_tenths_are_a_hundred_thousand() {
        let plain: f64 = std::iter::repeat_n(0.1, 1_000_000).sum();
        assert!((plain - 1e5).abs() > 1e-7);
        assert!((sum(std::iter::repeat_n(0.1, 1_000_000)) - 1e5).abs() < 1e-9);
    }

    #[test]
    fn nothing_sums_to_zero_and_overflow_to_infinity() {
        assert_eq!(sum(std::iter::empty()), 0.0);
        assert_eq!(sum([f64::MAX; 3].into_iter()), f64::INFINITY);
    }
}
