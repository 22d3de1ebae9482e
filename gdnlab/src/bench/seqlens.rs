//! Lengths of packed sequences, as text and as the published benchmark draws them.

use crate::{Error, Result};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Tokens of each of the sequences that are packed into one row.
///
/// As text: `1x32768` is one sequence, `8192x4` are four of one length, `28672+4096` are two, and terms can be mixed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeqLens(Vec<usize>);

/// Sequences at the most; a slip of the pen such as `32768x32768` is no benchmark.
const MAX_SEQUENCES: usize = 1 << 16;
/// Seed of the published random splits.
const SPLIT_SEED: u32 = 42;

impl SeqLens {
    /// Sequences of these lengths.
    pub fn new(lengths: Vec<usize>) -> Self {
        Self(lengths)
    }

    /// `tokens` cut into `sequences` at random places, each piece with one token at least: the splits of the published
    /// backward times, named `32k_4seq` there.
    ///
    /// They are drawn as `torch.randperm(tokens - 1)` does on the CPU from seed 42: the first `sequences - 1` entries,
    /// sorted, each plus 1, are the cuts. The permutation is the Fisher-Yates shuffle
    /// `swap(r[i], r[i + x_i mod (n - i)])` with the numbers `x_i` of the Mersenne Twister MT19937.
    ///
    /// # Errors
    /// [`Error::Input`] where there are more sequences than tokens, or none.
    pub fn published_split(tokens: usize, sequences: usize) -> Result<Self> {
        if sequences == 0 || sequences > tokens || tokens > u32::MAX as usize / 20 {
            return Err(Error::input(format!("{tokens} tokens cannot be split into {sequences} sequences")));
        }
        let mut cuts: Vec<usize> = shuffled(tokens - 1, SPLIT_SEED).into_iter().take(sequences - 1).collect();
        cuts.iter_mut().for_each(|cut| *cut += 1);
        cuts.extend([0, tokens]);
        cuts.sort_unstable();
        Ok(Self(cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()))
    }

    /// Tokens of each sequence.
    pub fn lengths(&self) -> &[usize] {
        &self.0
    }

    /// Tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.0.iter().sum()
    }

    /// Where each sequence lies in the row.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        let ends = self.0.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        });
        ends.zip(&self.0).map(|(end, length)| end - length..end).collect()
    }
}

impl fmt::Display for SeqLens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [one] => write!(f, "1x{one}"),
            // `1x4` would be one sequence.
            [first, rest @ ..] if *first != 1 && rest.len() > 1 && rest.iter().all(|length| length == first) => {
                write!(f, "{first}x{}", self.0.len())
            }
            lengths => f.write_str(&lengths.iter().map(usize::to_string).collect::<Vec<_>>().join("+")),
        }
    }
}

impl FromStr for SeqLens {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Some((tokens, sequences)) = split_name(text) {
            return Self::published_split(tokens, sequences);
        }
        let terms: Option<Vec<(usize, usize)>> = text.split('+').map(|term| self::term(term.trim())).collect();
        let terms =
            terms.filter(|terms| terms.iter().map(|(_, count)| *count).fold(0, usize::saturating_add) <= MAX_SEQUENCES);
        let lengths: Option<Vec<usize>> =
            terms.map(|terms| terms.iter().flat_map(|&(length, count)| std::iter::repeat_n(length, count)).collect());
        match lengths {
            Some(lengths) if lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length)).is_some() => {
                Ok(Self(lengths))
            }
            _ => Err(Error::input(format!(
                "sequence lengths '{text}': expected such as 1x32768 (one sequence), 8192x4 (four), 28672+4096 (two), \
                 or 32k_4seq (a published random split), with {MAX_SEQUENCES} sequences at the most"
            ))),
        }
    }
}

/// Length and number of sequences of `1x32768`, `8192x4` or `4096`.
fn term(text: &str) -> Option<(usize, usize)> {
    match text.split_once('x') {
        Some(("1", length)) => Some((length.parse().ok()?, 1)),
        Some((length, count)) => Some((length.parse().ok()?, count.parse().ok().filter(|count| *count > 0)?)),
        None => Some((text.parse().ok()?, 1)),
    }
}

/// Tokens and number of sequences of `32k_4seq`.
fn split_name(text: &str) -> Option<(usize, usize)> {
    let (thousands, sequences) = text.strip_suffix("seq")?.split_once("k_")?;
    Some((thousands.parse::<usize>().ok()?.checked_mul(1024)?, sequences.parse().ok()?))
}

/// The numbers below `n` in the order of `torch.randperm`.
fn shuffled(n: usize, seed: u32) -> Vec<usize> {
    let mut twister = MersenneTwister::new(seed);
    let mut order: Vec<usize> = (0..n).collect();
    for i in 0..n.saturating_sub(1) {
        order.swap(i, i + twister.next() as usize % (n - i));
    }
    order
}

/// MT19937 (Matsumoto and Nishimura, 1998).
struct MersenneTwister {
    state: [u32; Self::SIZE],
    used: usize,
}

impl MersenneTwister {
    const SIZE: usize = 624;
    const MIDDLE: usize = 397;

    fn new(seed: u32) -> Self {
        let mut state = [seed; Self::SIZE];
        for i in 1..Self::SIZE {
            let before = state[i - 1] ^ (state[i - 1] >> 30);
            state[i] = before.wrapping_mul(1_812_433_253).wrapping_add(i as u32);
        }
        Self { state, used: Self::SIZE }
    }

    fn twist(&mut self) {
        for i in 0..Self::SIZE {
            let mixed = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % Self::SIZE] & 0x7fff_ffff);
            let twisted = (mixed >> 1) ^ if mixed & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + Self::MIDDLE) % Self::SIZE] ^ twisted;
        }
        self.used = 0;
    }

    fn next(&mut self) -> u32 {
        if self.used == Self::SIZE {
            self.twist();
        }
        let mut x = self.state[self.used];
        self.used += 1;
        x ^= x >> 11;
        x ^= (x << 7) & 0x9d2c_5680;
        x ^= (x << 15) & 0xefc6_0000;
        x ^ (x >> 18)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(text: &str) -> Vec<usize> {
        text.parse::<SeqLens>().unwrap().0
    }

    #[test]
    fn lengths_are_read_as_they_are_published() {
        assert_eq!(lengths("1x32768"), [32768]);
        assert_eq!(lengths("8192x4"), [8192; 4]);
        assert_eq!(lengths("28672+4096"), [28672, 4096]);
        assert_eq!(lengths("1000"), [1000]);
        assert_eq!(lengths("64x2 + 0 + 1x5"), [64, 64, 0, 5]);
    }

    #[test]
    fn what_is_no_length_is_refused_with_examples() {
        for text in ["", "x", "8192x", "x4", "8192x0", "-1", "1+", "a+b", "4.5", "8192x4x2", "1x99999999999999999999"] {
            let message = text.parse::<SeqLens>().unwrap_err().to_string();
            assert!(message.contains("28672+4096"), "{text}: {message}");
        }
        assert!("2x18446744073709551615".parse::<SeqLens>().is_err());
        assert!("18446744073709551615+1".parse::<SeqLens>().is_err());
        assert!("4k_5000seq".parse::<SeqLens>().is_err() && "4k_0seq".parse::<SeqLens>().is_err());
    }

    #[test]
    fn the_text_of_lengths_gives_them_back() {
        for text in ["1x32768", "8192x4", "28672+4096", "4096+4096", "1+1", "7+7+8"] {
            assert_eq!(text.parse::<SeqLens>().unwrap().to_string(), text);
        }
        assert_eq!("1x1".parse::<SeqLens>().unwrap().to_string(), "1x1");
        // One token each: the text must not say one sequence.
        let ones = SeqLens::new(vec![1; 4]);
        assert_eq!(ones.to_string().parse::<SeqLens>().unwrap(), ones);
    }

    #[test]
    fn ranges_cover_the_row() {
        assert_eq!("5+0+3".parse::<SeqLens>().unwrap().ranges(), [0..5, 5..5, 5..8]);
    }

    #[test]
    fn the_twister_is_the_standard_one() {
        let mut twister = MersenneTwister::new(5489);
        assert_eq!([twister.next(), twister.next(), twister.next()], [3_499_211_612, 581_869_302, 3_890_346_734]);
        // The C++ standard gives the 10,000th number of the default seed.
        let mut twister = MersenneTwister::new(5489);
        let mut last = 0;
        (0..10_000).for_each(|_| last = twister.next());
        assert_eq!(last, 4_123_659_995);
    }

    #[test]
    fn permutations_are_those_of_torch() {
        assert_eq!(shuffled(10, 42), [2, 6, 1, 8, 4, 5, 0, 9, 3, 7]);
        assert_eq!(shuffled(10, 0), [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]);
    }

    #[test]
    fn the_published_splits_cut_at_the_first_entries_of_the_permutation() {
        assert_eq!(lengths("8k_1seq"), [8192]);
        assert_eq!(lengths("8k_4seq"), [5809, 1244, 406, 733]);
        assert_eq!(lengths("32k_4seq"), [7212, 7072, 13725, 4759]);
        for sequences in [1, 2, 4, 8, 32768] {
            let split = SeqLens::published_split(32768, sequences).unwrap();
            assert_eq!((split.lengths().len(), split.tokens()), (sequences, 32768));
            assert!(split.lengths().iter().all(|length| *length > 0));
        }
    }
}
