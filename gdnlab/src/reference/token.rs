//! What meets the tokens of a language model in float64: the embedding before it, and the loss behind it.
//!
//! ```text
//! embedding       y_n = W_{token_n}                                 dW_v = sum_{n: token_n = v} dy_n
//! cross-entropy   loss = mean_n (lse_n - z_{n, target_n})           lse_n = log sum_v e^{z_nv}
//!                 dz_nv = (e^{z_nv - lse_n} - [v = target_n]) / N
//! ```

use crate::problem::Tensor;
use crate::{Error, Result};
use gdnlab_deps::rayon::prelude::*;

/// One look-up of embeddings.
#[derive(Clone, Copy, Debug)]
pub struct Embedding<'a> {
    /// Embedding of each token of the vocabulary, `[vocab, D]`.
    pub weight: &'a Tensor,
    /// The tokens, N of them, each below the vocabulary's size.
    pub tokens: &'a [u32],
}

impl Embedding<'_> {
    /// `y`, `[N, D]`.
    ///
    /// # Errors
    /// [`Error::Input`] where the weight is no matrix, a value is not finite, or a token is not in the vocabulary.
    pub fn forward(&self) -> Result<Tensor> {
        let dim = self.validate()?;
        let rows = self.tokens.iter().flat_map(|&token| &self.weight.data[token as usize * dim..][..dim]);
        Tensor::new(&[self.tokens.len(), dim], rows.copied().collect())
    }

    /// The gradient of the weight, given that of `y`, `dy` `[N, D]`, added up in the order of the tokens.
    ///
    /// # Errors
    /// As [`Embedding::forward`], for `dy` too.
    pub fn backward(&self, dy: &Tensor) -> Result<Tensor> {
        let dim = self.validate()?;
        dy.expect("dy", &[self.tokens.len(), dim])?;
        let mut dweight = Tensor::zeros(&self.weight.dims);
        for (&token, dy) in self.tokens.iter().zip(dy.data.chunks_exact(dim)) {
            let row = &mut dweight.data[token as usize * dim..][..dim];
            row.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
        }
        Ok(dweight)
    }

    /// `D`.
    fn validate(&self) -> Result<usize> {
        let dims = &self.weight.dims;
        let &[vocab, dim] = &dims[..] else {
            return Err(Error::input(format!("embedding: expected weight [vocab, D], got {dims:?}")));
        };
        if dim == 0 {
            return Err(Error::input("embedding: D = 0: expected at least 1"));
        }
        self.weight.expect("weight", dims)?;
        in_vocabulary(self.tokens, vocab)?;
        Ok(dim)
    }
}

/// The mean cross-entropy of target tokens.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// Scores of each token of the vocabulary, `[N, vocab]`, N at least 1.
    pub logits: &'a Tensor,
    /// The token that was to come, for each row.
    pub targets: &'a [u32],
}

impl CrossEntropy<'_> {
    /// The loss of each row, `[N]`, in nats: what the mean is taken of.
    ///
    /// # Errors
    /// [`Error::Input`] where shapes do not agree, a value is not finite, or a target is not in the vocabulary.
    pub fn per_token(&self) -> Result<Tensor> {
        let vocab = self.validate()?;
        let losses =
            self.logits.data.chunks_exact(vocab).zip(self.targets).map(|(z, &target)| lse(z) - z[target as usize]);
        Tensor::new(&[self.targets.len()], losses.collect())
    }

    /// The loss, in nats per token.
    ///
    /// # Errors
    /// As [`CrossEntropy::per_token`].
    pub fn forward(&self) -> Result<f64> {
        Ok(self.per_token()?.data.iter().sum::<f64>() / self.targets.len() as f64)
    }

    /// The gradient of the logits, `[N, vocab]`, where the gradient of the loss is 1. Threads over rows.
    ///
    /// # Errors
    /// As [`CrossEntropy::per_token`].
    pub fn backward(&self) -> Result<Tensor> {
        let vocab = self.validate()?;
        let count = self.targets.len() as f64;
        let mut d = self.logits.clone();
        d.data.par_chunks_exact_mut(vocab).zip(self.targets).for_each(|(row, &target)| {
            let lse = lse(row);
            row.iter_mut().for_each(|z| *z = (*z - lse).exp() / count);
            row[target as usize] -= 1.0 / count;
        });
        Ok(d)
    }

    /// The vocabulary's size.
    fn validate(&self) -> Result<usize> {
        let &[rows, vocab] = &self.logits.dims[..] else {
            return Err(Error::input(format!("cross-entropy: expected logits [N, vocab], got {:?}", self.logits.dims)));
        };
        if rows == 0 || rows != self.targets.len() {
            return Err(Error::input(format!(
                "cross-entropy: {} targets for {rows} rows of logits: expected one for each, and at least one",
                self.targets.len()
            )));
        }
        self.logits.expect("logits", &self.logits.dims)?;
        in_vocabulary(self.targets, vocab)?;
        Ok(vocab)
    }
}

/// `log sum e^z`, the maximum taken off first.
fn lse(z: &[f64]) -> f64 {
    let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + z.iter().map(|z| (z - max).exp()).sum::<f64>().ln()
}

fn in_vocabulary(tokens: &[u32], vocab: usize) -> Result<()> {
    match tokens.iter().position(|&token| token as usize >= vocab) {
        None => Ok(()),
        Some(at) => Err(Error::input(format!(
            "token {at} is {}: expected tokens below {vocab}, the size of the vocabulary",
            tokens[at]
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Loss, check_gradient, gaussian, on_one_and_three_threads};
    use super::*;

    #[test]
    fn an_embedding_is_a_row_and_its_gradient_a_sum() {
        let (weight, tokens) = (gaussian(1, &[5, 3]), [4, 0, 4, 2]);
        let call = Embedding { weight: &weight, tokens: &tokens };
        let y = call.forward().unwrap();
        assert_eq!(y.dims, [4, 3]);
        assert_eq!(y.data[6..9], weight.data[12..15]);
        let dy = gaussian(2, &[4, 3]);
        let loss = |weight: &Tensor| Loss::new(&Embedding { weight, ..call }.forward().unwrap(), &dy);
        check_gradient("dweight", &weight, &call.backward(&dy).unwrap(), loss);
    }

    #[test]
    fn cross_entropy_equals_the_formula() {
        let (logits, targets) = (gaussian(1, &[3, 4]), [2, 0, 3]);
        let probability = |row: usize| {
            let z = &logits.data[row * 4..][..4];
            z[targets[row] as usize].exp() / z.iter().map(|z| z.exp()).sum::<f64>()
        };
        let expected = -(0..3).map(|row| probability(row).ln()).sum::<f64>() / 3.0;
        let found = CrossEntropy { logits: &logits, targets: &targets }.forward().unwrap();
        assert!((found - expected).abs() < 1e-15, "{found} {expected}");
        let certain = Tensor::new(&[1, 3], vec![0.0, 1e300, -1e300]).unwrap();
        assert_eq!(CrossEntropy { logits: &certain, targets: &[1] }.forward().unwrap(), 0.0);
    }

    #[test]
    fn gradients_equal_differences() {
        for (rows, vocab) in [(1, 1), (4, 6), (1, 2)] {
            let targets: Vec<u32> = (0..rows as u32).map(|n| n * 5 % vocab as u32).collect();
            let logits = gaussian(1, &[rows, vocab]);
            let call = CrossEntropy { logits: &logits, targets: &targets };
            let d = call.backward().unwrap();
            if vocab == 1 {
                assert_eq!(d.data, [0.0]);
                continue;
            }
            let mean = Tensor::filled(&[rows], 1.0 / rows as f64);
            let loss = |logits: &Tensor| Loss::new(&CrossEntropy { logits, ..call }.per_token().unwrap(), &mean);
            check_gradient("dlogits", &logits, &d, loss);
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let (logits, targets) = (gaussian(1, &[67, 9]), [3; 67]);
        let call = CrossEntropy { logits: &logits, targets: &targets };
        let [one, three] = on_one_and_three_threads(|| call.backward().unwrap());
        assert_eq!(one, three);
    }

    #[test]
    fn bad_input_is_refused() {
        let weight = gaussian(1, &[5, 3]);
        let refused = |weight, tokens: &[u32]| Embedding { weight, tokens }.forward().unwrap_err().to_string();
        assert!(refused(&weight, &[0, 5]).contains("token 1 is 5: expected tokens below 5"));
        assert!(refused(&gaussian(1, &[5]), &[0]).contains("[vocab, D]"));
        let refused = |targets: &[u32]| CrossEntropy { logits: &weight, targets }.forward().unwrap_err().to_string();
        assert!(refused(&[0]).contains("1 targets for 5 rows"));
        assert!(refused(&[0, 1, 2, 3, 0]).contains("token 3 is 3"));
    }
}
