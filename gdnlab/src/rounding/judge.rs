//! What a search says: the price and the error of each policy, the cheapest ones, and the front.

use super::trial::CHUNK;
use super::{Choice, Slot};
use crate::cost::gdn2::{Dims, KeptBytes};
use crate::precision::{Format, WriteForm};
use crate::record::{Pass, Record};
use crate::{Error, Result};

/// A policy with its price and its error.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// The policy.
    pub choice: Choice,
    /// The pass whose tensors it is judged by.
    pub pass: Pass,
    /// What this pass keeps, per token and head.
    pub bytes: KeptBytes,
    /// The tensor with the largest error.
    pub tensor: String,
    /// Its relative RMS error; infinite where it is not finite.
    pub rel_rms: f64,
}

impl Judged {
    /// What this pass keeps.
    pub fn slots(&self) -> &'static [Slot] {
        match self.pass {
            Pass::Bwd => Choice::BACKWARD,
            _ => Choice::forward_slots(self.choice.form),
        }
    }

    /// The formats that it is kept in, coarsest first.
    pub fn formats(&self) -> Vec<Format> {
        self.choice.formats_of(self.slots())
    }

    /// The mode of this project's kernels for a GPU that keep the same: they have the residual form, and all in one 16-bit
    /// format.
    pub fn mode(&self) -> Option<&'static str> {
        match (self.choice.form, self.formats().as_slice()) {
            (WriteForm::Residual, [Format::Bf16]) => Some("bf16"),
            (WriteForm::Residual, [Format::F16]) => Some("f16-internals"),
            _ => None,
        }
    }

    /// How much is not in bf16.
    pub fn changes(&self) -> usize {
        self.choice.changes(self.slots())
    }

    fn is_within(&self, formats: &[Format]) -> bool {
        self.formats().iter().all(|format| formats.contains(format))
    }
}

/// The policies in `records` of one pass of a search, in their order, each with its worst tensor.
///
/// # Errors
/// [`Error::Input`] where there are none, where they are of several problems or both passes, or where one names no policy.
pub fn judge(records: &[Record]) -> Result<Vec<Judged>> {
    let mut all: Vec<Judged> = Vec::new();
    let mut steps: Vec<&str> = Vec::new();
    for record in records {
        let Some(precision) = record.precision() else { continue };
        let workload = &record.workload;
        let (Some(key_dim), Some(value_dim), Some(pass)) = (workload.key_dim, workload.value_dim, workload.pass) else {
            return Err(Error::input(format!("a record of {} names no K, no V or no pass", precision.step)));
        };
        let rel_rms = precision.errors.rel_rms.filter(|_| precision.errors.nonfinite == 0).unwrap_or(f64::INFINITY);
        let first =
            records.first().map(|record| (&record.workload.tokens, &record.workload.seed, record.workload.pass));
        if first != Some((&workload.tokens, &workload.seed, Some(pass))) {
            return Err(Error::input("records of several problems or of both passes: expected those of one search"));
        }
        let tensor = &precision.errors.tensor;
        if let Some(at) = steps.iter().rposition(|step| *step == precision.step) {
            if all[at].rel_rms < rel_rms {
                (all[at].rel_rms, all[at].tensor) = (rel_rms, tensor.clone());
            }
            continue;
        }
        let choice: Choice = precision.step.parse()?;
        let mut judged = Judged { choice, pass, bytes: KeptBytes::default(), tensor: tensor.clone(), rel_rms };
        judged.bytes = judged.choice.bytes(judged.slots(), Dims { chunk: CHUNK, key_dim, value_dim });
        steps.push(&precision.step);
        all.push(judged);
    }
    if all.is_empty() {
        Err(Error::input(format!("none of {} records is of a policy", records.len())))
    } else {
        Ok(all)
    }
}

/// The cheapest policy of `all` whose error is at most `threshold`, of those that keep everything in some of `formats`: the
/// fewest bytes; among those the fewest changes from bf16; among those the smallest error.
pub fn cheapest<'a>(
    all: impl IntoIterator<Item = &'a Judged>,
    formats: &[Format],
    threshold: f64,
) -> Option<&'a Judged> {
    let meets = all.into_iter().filter(|judged| judged.rel_rms <= threshold && judged.is_within(formats));
    let price = |judged: &Judged| (judged.bytes.total(), judged.changes() as f64, judged.rel_rms);
    meets.min_by(|a, b| price(a).partial_cmp(&price(b)).unwrap_or(std::cmp::Ordering::Equal))
}

/// The policy with the smallest error of those that take at most `bytes` per token and head.
pub fn most_accurate<'a>(all: impl IntoIterator<Item = &'a Judged>, bytes: f64) -> Option<&'a Judged> {
    let affordable = all.into_iter().filter(|judged| judged.bytes.total() <= bytes);
    affordable.min_by(|a, b| a.rel_rms.total_cmp(&b.rel_rms))
}

/// What a search proposes: of the policies whose error is at most `threshold` the fewest bytes, and of all that take no more
/// than these the most accurate one.
pub fn proposal(all: &[Judged], threshold: f64) -> Option<&Judged> {
    let meets = all.iter().filter(|judged| judged.rel_rms <= threshold);
    let bytes = meets.map(|judged| judged.bytes.total()).min_by(f64::total_cmp)?;
    most_accurate(all, bytes)
}

/// What a search proposes for one write form, under a name.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    /// The write form.
    pub form: WriteForm,
    /// What is proposed, such as `cheapest with fp16`.
    pub name: String,
    /// The policy; `None` where none is like that.
    pub found: Option<Judged>,
    /// Bytes per token and head of the policy with everything in bf16.
    pub bf16_bytes: f64,
}

/// For each write form among `all`: everything in bf16; the [`cheapest`] policy with fp32 beside bf16, and with fp16 beside
/// bf16; and the [`most_accurate`] one that takes no more bytes than bf16.
///
/// # Errors
/// [`Error::Input`] where a form lacks the policy with everything in bf16.
pub fn proposals(all: &[Judged], threshold: f64) -> Result<Vec<Proposal>> {
    let mut proposals = Vec::new();
    for form in [WriteForm::Wy, WriteForm::Residual] {
        let of_form = || all.iter().filter(move |judged| judged.choice.form == form);
        if of_form().next().is_none() {
            continue;
        }
        let narrow = of_form().find(|judged| judged.changes() == 0).ok_or_else(|| {
            Error::input("the policies lack the one with everything in bf16, which prices are compared with")
        })?;
        let bf16_bytes = narrow.bytes.total();
        let mut propose = |name: &str, found: Option<&Judged>| {
            proposals.push(Proposal { form, name: name.to_owned(), found: found.cloned(), bf16_bytes });
        };
        propose("everything in bf16", Some(narrow));
        propose("cheapest with fp32", cheapest(of_form(), &[Format::Bf16, Format::F32], threshold));
        propose("cheapest with fp16", cheapest(of_form(), &[Format::Bf16, Format::F16], threshold));
        propose("most accurate in 16 bits", most_accurate(of_form(), bf16_bytes));
    }
    Ok(proposals)
}

/// The policies that `proposals` name, each once.
pub fn choices_of(proposals: &[Proposal]) -> Vec<Choice> {
    let mut choices: Vec<Choice> = Vec::new();
    for found in proposals.iter().filter_map(|proposal| proposal.found.as_ref()) {
        if !choices.contains(&found.choice) {
            choices.push(found.choice.clone());
        }
    }
    choices
}

/// The front: the policies than which none is both as cheap and more accurate, cheapest first.
pub fn front(all: &[Judged]) -> Vec<&Judged> {
    let mut sorted: Vec<&Judged> = all.iter().collect();
    sorted.sort_by(|a, b| a.bytes.total().total_cmp(&b.bytes.total()).then(a.rel_rms.total_cmp(&b.rel_rms)));
    let mut front: Vec<&Judged> = Vec::new();
    for judged in sorted {
        if front.last().is_none_or(|last| judged.rel_rms < last.rel_rms) {
            front.push(judged);
        }
    }
    front
}
