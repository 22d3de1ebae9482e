//! A choice of formats for what the chunk kernels of GDN-2 keep, and the policy that follows from it.

use crate::cost::gdn2::{Dims, KeptBytes, kept_bytes};
use crate::precision::{Format, Intermediate, Policy, Product, WriteForm};
use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The formats that an intermediate can be kept in, coarsest first.
const FORMATS: [Format; 3] = [Format::Bf16, Format::F16, Format::F32];

/// A place for a format.
pub type Slot = Intermediate;

/// Formats of all that forward and backward keep. Inputs, output and the gradients of inputs are in bf16; gates, running
/// states and sums in fp32.
///
/// Its text names all of them: `residual; inverse f16; write product f16; ...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// How the written values come out of the solve.
    pub form: WriteForm,
    kept: Vec<(Slot, Format)>,
}

impl Choice {
    /// Everything in one format.
    pub fn uniform(form: WriteForm, format: Format) -> Self {
        let slots = Self::forward_slots(form).iter().chain(Self::BACKWARD);
        Self { form, kept: slots.map(|&slot| (slot, format)).collect() }
    }

    /// What the backward keeps.
    pub const BACKWARD: &[Slot] =
        &[Intermediate::DU, Intermediate::Y, Intermediate::DScores, Intermediate::DGram, Intermediate::DState];

    /// What the forward keeps.
    pub fn forward_slots(form: WriteForm) -> &'static [Slot] {
        use Intermediate::{Inverse, Scores, State, U, WriteRhs, Wy};
        match form {
            WriteForm::Residual => &[Inverse, WriteRhs, U, Scores, State],
            WriteForm::Wy => &[Inverse, WriteRhs, Wy, U, Scores, State],
        }
    }

    /// The format of `slot`; `None` where the form has no such slot.
    pub fn format(&self, slot: Slot) -> Option<Format> {
        self.kept.iter().find(|(known, _)| *known == slot).map(|(_, format)| *format)
    }

    /// The same with `slot` in `format`. A slot that the form does not have is left out.
    #[must_use]
    pub fn with(mut self, slot: Slot, format: Format) -> Self {
        self.kept.iter_mut().filter(|(known, _)| *known == slot).for_each(|(_, known)| *known = format);
        self
    }

    /// The formats of `slots`, each once, coarsest first.
    pub fn formats_of(&self, slots: &[Slot]) -> Vec<Format> {
        let used = |format: &Format| slots.iter().any(|&slot| self.format(slot) == Some(*format));
        FORMATS.into_iter().filter(used).collect()
    }

    /// How many of `slots` are not in bf16.
    pub fn changes(&self, slots: &[Slot]) -> usize {
        slots.iter().filter(|&&slot| self.format(slot).is_some_and(|format| format != Format::Bf16)).count()
    }

    /// What `slots` take, and with them the cumulative decays in fp32.
    pub fn bytes(&self, slots: &[Slot], dims: Dims) -> KeptBytes {
        let kept = self.kept.iter().copied().filter(|(slot, _)| slots.contains(slot));
        kept_bytes(kept.chain([(Intermediate::GateCumsum, Format::F32)]), self.form, dims)
    }

    /// The policy.
    ///
    /// A product runs in the widest format of what it reads, and an operand that is made for it (decayed keys and queries) is
    /// rounded to that. So an intermediate in fp32 has products of IEEE operands, which flatters fp32: TF32 would drop what
    /// f16 drops. The products of inputs alone (`(b*k) k^T`, `q k^T`) and those of the solve have TF32 operands.
    pub fn policy(&self) -> Policy {
        use Intermediate::{DU, Inverse, Scores, State, U, WriteRhs, Wy};
        let mut policy = Policy::of_gpu(Format::Bf16, Format::Bf16);
        policy.write_form = self.form;
        for (slot, format) in &self.kept {
            policy = policy.keep(*slot, *format);
        }
        for product in [Product::Gram, Product::Scores, Product::Solve] {
            policy = policy.operands(product, Format::Tf32);
        }
        let all: Vec<Slot> = self.kept.iter().map(|(slot, _)| *slot).collect();
        let read: [(Product, &[Slot]); 5] = [
            (Product::ApplyInverse, &[Inverse, WriteRhs, DU]),
            (Product::StateRead, &[State, Wy]),
            (Product::Output, &[Scores, U]),
            (Product::StateUpdate, &[U]),
            (Product::Adjoint, &all),
        ];
        read.into_iter().fold(policy, |policy, (product, slots)| policy.operands(product, self.widest(slots)))
    }

    fn widest(&self, slots: &[Slot]) -> Format {
        self.formats_of(slots).last().copied().unwrap_or(Format::Bf16)
    }
}

/// Name of a form in records and tables.
fn form_name(form: WriteForm) -> &'static str {
    match form {
        WriteForm::Residual => "residual",
        WriteForm::Wy => "WY",
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(form_name(self.form))?;
        self.kept.iter().try_for_each(|(slot, format)| write!(f, "; {} {format}", slot.name()))
    }
}

impl FromStr for Choice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let complain = || {
            Error::input(format!(
                "'{text}' names no choice of formats: expected such as 'residual; inverse f16; write product f16; ...' \
                 with every intermediate of the form"
            ))
        };
        let mut parts = text.split("; ");
        let form = parts.next().unwrap_or_default();
        let form = [WriteForm::Residual, WriteForm::Wy]
            .into_iter()
            .find(|known| form_name(*known) == form)
            .ok_or_else(complain)?;
        let mut choice = Self::uniform(form, Format::Bf16);
        for (slot, format) in &mut choice.kept {
            let named = parts.next().and_then(|part| part.strip_prefix(slot.name())?.strip_prefix(' '));
            *format = named.ok_or_else(complain)?.parse()?;
        }
        if parts.next().is_some() { Err(complain()) } else { Ok(choice) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_read_as_it_is_written() {
        for form in [WriteForm::Residual, WriteForm::Wy] {
            let choice = Choice::uniform(form, Format::Bf16)
                .with(Intermediate::U, Format::F16)
                .with(Intermediate::DGram, Format::F32);
            assert_eq!(choice.to_string().parse::<Choice>().unwrap(), choice, "{choice}");
        }
        for text in ["", "residual", "WY; inverse f16", "residual; inverse f16; U f16"] {
            assert!(text.parse::<Choice>().unwrap_err().to_string().contains("names no choice"), "{text}");
        }
        let long = format!("{}; U f16", Choice::uniform(WriteForm::Wy, Format::F16));
        assert!(long.parse::<Choice>().is_err());
        assert!(long.replace("inverse f16", "inverse fp8").parse::<Choice>().unwrap_err().to_string().contains("fp8"));
    }

    #[test]
    fn products_run_in_the_widest_format_that_they_read() {
        let choice = Choice::uniform(WriteForm::Residual, Format::Bf16)
            .with(Intermediate::U, Format::F16)
            .with(Intermediate::Inverse, Format::F32)
            .with(Intermediate::Wy, Format::F32);
        let policy = choice.policy();
        let operands = |product| policy.product(product).operands;
        assert_eq!(operands(Product::ApplyInverse), Format::F32);
        assert_eq!((operands(Product::Output), operands(Product::StateUpdate)), (Format::F16, Format::F16));
        assert_eq!(operands(Product::StateRead), Format::Bf16, "the residual form has no w");
        assert_eq!(operands(Product::Gram), Format::Tf32);
        assert_eq!(policy.format(Intermediate::FinalState), Format::F32);
        assert_eq!((policy.inputs, policy.format(Intermediate::Output)), (Format::Bf16, Format::Bf16));
    }

    #[test]
    fn sixteen_bits_cost_the_same_in_both_formats_and_each_change_to_fp32_more() {
        let dims = Dims { chunk: 64, key_dim: 128, value_dim: 128 };
        let slots = Choice::forward_slots(WriteForm::Wy);
        let bytes = |choice: &Choice| choice.bytes(slots, dims).total();
        let bf16 = Choice::uniform(WriteForm::Wy, Format::Bf16);
        assert_eq!(bytes(&bf16), bytes(&Choice::uniform(WriteForm::Wy, Format::F16)));
        for &slot in slots {
            assert!(bytes(&bf16.clone().with(slot, Format::F32)) > bytes(&bf16), "{}", slot.name());
        }
        assert_eq!(bf16.changes(slots), 0);
        let one = bf16.with(Intermediate::Scores, Format::F16);
        assert_eq!(one.changes(slots), 1);
        assert_eq!(one.formats_of(slots), [Format::Bf16, Format::F16]);
    }
}
