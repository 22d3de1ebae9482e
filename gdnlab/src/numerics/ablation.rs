//! One step of a policy changed after the other.

use super::{Calls, Problems, Step, Subject, Sweep, measure};
use crate::Result;
use crate::chunked::Chunked;
use crate::precision::{Format, Policy, Product};
use crate::record::{Measurement, Precision, Record};
use std::ops::ControlFlow;

/// A policy with one step changed.
#[derive(Clone, Debug)]
pub struct Variant {
    /// Name of the policy that the change starts from.
    pub base: String,
    /// The step that was changed.
    pub step: String,
    /// The format that its operands were given, or `None` where nothing was changed.
    pub format: Option<Format>,
    /// The policy that results.
    pub policy: Policy,
}

impl Variant {
    /// `base` as it is, then with the operands of one product after the other in `format`, then with all of them.
    ///
    /// # Errors
    /// [`crate::Error::Input`] where `base` is no preset.
    pub fn products(base: &str, format: Format) -> Result<Vec<Self>> {
        let start = Policy::preset(base)?;
        let variant =
            |step: &str, format, policy| Self { base: base.to_owned(), step: step.to_owned(), format, policy };
        let mut all = vec![variant("none", None, start.clone())];
        for &product in Product::ALL {
            all.push(variant(product.name(), Some(format), start.clone().operands(product, format)));
        }
        let every = Product::ALL.iter().fold(start, |policy, &product| policy.operands(product, format));
        all.push(variant("every product", Some(format), every));
        Ok(all)
    }

    fn title(&self) -> String {
        match self.format {
            Some(format) => format!("{} with {} in {format}", self.base, self.step),
            None => format!("{} unchanged", self.base),
        }
    }
}

/// Errors of each variant on each problem: the ablation, one step at a time. Chunks have 64 tokens.
///
/// # Errors
/// As [`run`](super::run).
pub fn ablation(
    problems: &Problems,
    variants: &[Variant],
    progress: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Vec<Record>> {
    let kernels: Vec<Chunked> =
        variants.iter().map(|variant| Chunked::new("cpu-chunk", variant.policy.clone(), 64)).collect::<Result<_>>()?;
    let subjects: Vec<Subject<'_>> = variants
        .iter()
        .zip(&kernels)
        .map(|(variant, kernel)| Subject {
            kernel,
            title: variant.title(),
            mode: &variant.base,
            measurement: Box::new(|errors| {
                Measurement::Precision(Precision {
                    base: variant.base.clone(),
                    step: variant.step.clone(),
                    format: variant.format.map(|format| format.name().to_owned()),
                    errors,
                })
            }),
        })
        .collect();
    measure(Calls::Problems(problems), &subjects, Sweep::whole(), progress)
}
