//! Sizes of a call on the command line.

use gdnlab::problem::Shape;
use gdnlab::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// `T,K,V` on the command line.
#[derive(Clone, Copy)]
pub struct Size {
    pub tokens: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

impl Size {
    /// One sequence of this size with `heads` heads, of which `qk_heads` are of q and k; as many without it.
    pub fn shape(self, heads: usize, qk_heads: Option<usize>) -> Shape {
        let all = Shape::new(self.tokens, heads, self.key_dim, self.value_dim);
        Shape { qk_heads: qk_heads.unwrap_or(heads), ..all }
    }
}

impl FromStr for Size {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let numbers: Vec<Option<usize>> = text.split(',').map(|part| part.trim().parse().ok()).collect();
        match numbers.as_slice() {
            [Some(tokens), Some(key_dim), Some(value_dim)] => {
                Ok(Self { tokens: *tokens, key_dim: *key_dim, value_dim: *value_dim })
            }
            _ => Err(Error::input("expected three numbers T,K,V such as 1024,64,128")),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{},{}", self.tokens, self.key_dim, self.value_dim)
    }
}
