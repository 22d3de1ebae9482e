//! One tensor of many runs against that of the first, bit by bit.

use super::Check;
use crate::compare::{Comparison, TensorClass, compare, tolerance};
use crate::problem::Tensor;
use crate::record::{Determinism, Errors};
use crate::{Error, Result};

/// What became of one tensor over the runs.
#[derive(Clone, Debug)]
pub struct Sameness {
    name: &'static str,
    first: Tensor,
    runs: usize,
    differing_runs: usize,
    /// The first run with other bits, and the first of those.
    difference: Option<Difference>,
    /// Elements with other bits in the run that has most of them, and how far it is from the first run.
    most: Option<(usize, Comparison)>,
}

#[derive(Clone, Debug)]
struct Difference {
    run: String,
    index: Vec<usize>,
    got: f64,
    expected: f64,
}

impl Sameness {
    /// The tensor `name` of the first run.
    pub fn with(name: &'static str, first: Tensor) -> Self {
        Self { name, first, runs: 0, differing_runs: 0, difference: None, most: None }
    }

    /// Name of the tensor.
    pub fn tensor(&self) -> &'static str {
        self.name
    }

    /// Compares the tensor of another run, `run` in words.
    ///
    /// # Errors
    /// [`Error::Input`] where its shape is another.
    pub fn add(&mut self, run: &str, found: &Tensor) -> Result<()> {
        if found.dims != self.first.dims {
            return Err(Error::input(format!(
                "{run}: tensor '{}' has shape {:?}, expected {:?} as in the first run",
                self.name, found.dims, self.first.dims
            )));
        }
        self.runs += 1;
        let pairs = || found.data.iter().zip(&self.first.data);
        let differs = |(got, expected): (&f64, &f64)| got.to_bits() != expected.to_bits();
        let Some(at) = pairs().position(differs) else { return Ok(()) };
        self.differing_runs += 1;
        let differing = pairs().filter(|pair| differs(*pair)).count();
        self.difference.get_or_insert_with(|| Difference {
            run: run.to_owned(),
            index: self.first.index_of(at),
            got: found.data[at],
            expected: self.first.data[at],
        });
        if self.most.as_ref().is_none_or(|(most, _)| differing > *most) {
            self.most = Some((differing, compare(self.name, found, &self.first)?));
        }
        Ok(())
    }

    /// What is kept of it, for a kernel of `mode`.
    ///
    /// # Errors
    /// [`Error::Input`] for an unknown mode or tensor.
    pub fn record(&self, check: Check, mode: &str) -> Result<Determinism> {
        let unit = tolerance(mode, TensorClass::of(self.name)?)?.unit_roundoff();
        let finite = |value: f64| value.is_finite().then_some(value);
        let difference = self.difference.as_ref();
        let errors = match &self.most {
            Some((_, comparison)) => Errors::new(comparison, unit),
            None => Errors::new(&compare(self.name, &self.first, &self.first)?, unit),
        };
        Ok(Determinism {
            check: check.name().to_owned(),
            runs: self.runs,
            differing_runs: self.differing_runs,
            elements: self.first.data.len(),
            differing: self.most.as_ref().map_or(0, |(differing, _)| *differing),
            first_run: difference.map(|difference| difference.run.clone()),
            first_index: difference.map(|difference| difference.index.clone()).unwrap_or_default(),
            first_value: difference.and_then(|difference| finite(difference.got)),
            first_expected: difference.and_then(|difference| finite(difference.expected)),
            errors,
        })
    }
}
