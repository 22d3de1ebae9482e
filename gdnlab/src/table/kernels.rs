//! Where the time of a training step goes.

use super::roofline::machine_name;
use super::rows::distinct;
use crate::Result;
use crate::record::{Measurement, Record, StepKernel};
use gdnlab_deps::polars::prelude::*;

/// What a kernel does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    /// Products of matrices by the library: projections, SwiGLU and the head.
    Products,
    /// Attention over the tokens, or the recurrence of GDN.
    Mixer,
    /// What goes element by element or row by row: norms, convolution, rotation, gates, SwiGLU.
    Elementwise,
    /// The embedding and the cross-entropy.
    Vocabulary,
    /// The optimizer, the norm of the gradient, and casts of weights.
    Optimizer,
}

impl Part {
    /// All of them.
    pub(crate) const ALL: [Self; 5] =
        [Self::Products, Self::Mixer, Self::Elementwise, Self::Vocabulary, Self::Optimizer];

    /// Name in tables and figures.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Products => "products",
            Self::Mixer => "attention or GDN",
            Self::Elementwise => "norms, conv, gates, SwiGLU",
            Self::Vocabulary => "embedding, cross-entropy",
            Self::Optimizer => "optimizer",
        }
    }

    /// Of the kernel called `name`; a product is called by its sizes, such as `32768x768x2048 bf16`.
    pub(crate) fn of(name: &str) -> Self {
        let begins = |starts: &[&str]| starts.iter().any(|start| name.starts_with(start));
        match name {
            _ if begins(&["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]) => Self::Products,
            "chunk_gates" => Self::Elementwise,
            _ if begins(&["attention", "chunk"]) => Self::Mixer,
            _ if begins(&["embedding", "cross_entropy"]) => Self::Vocabulary,
            _ if begins(&["adamw", "part_sums", "widen"]) => Self::Optimizer,
            _ => Self::Elementwise,
        }
    }
}

/// The newest times of each model's kernels among `records` of kind `kernels`, the models in the order of the records, the
/// kernel that takes longest first. Columns: machine, mixer, size, kernel, part, launches, ms and share_pct, the share of
/// all kernels of that step.
///
/// The kernels were launched one by one, with the gaps between them; replayed as one graph a step is a few percent shorter.
///
/// # Errors
/// [`crate::Error::Table`] where polars cannot build the table.
pub fn step_kernels(records: &[Record]) -> Result<DataFrame> {
    let all: Vec<Row<'_>> = records.iter().filter_map(Row::of).collect();
    let mut newest: Vec<&Row<'_>> = Vec::new();
    for model in distinct(all.iter().map(Row::model)) {
        let of_model = || all.iter().filter(|row| row.model() == model);
        let utc = of_model().map(|row| row.utc).max();
        let mut rows: Vec<&Row<'_>> = of_model().filter(|row| Some(row.utc) == utc).collect();
        rows.sort_by(|a, b| b.kernel.latency_ms.total_cmp(&a.kernel.latency_ms));
        newest.extend(rows);
    }
    let total = |row: &Row<'_>| {
        let same = newest.iter().filter(|other| other.model() == row.model());
        same.map(|other| other.kernel.latency_ms).sum::<f64>()
    };
    let text = |name: &str, of: &dyn Fn(&Row<'_>) -> String| {
        Column::new(name.into(), newest.iter().map(|row| of(row)).collect::<Vec<_>>())
    };
    let number = |name: &str, of: &dyn Fn(&Row<'_>) -> f64| {
        Column::new(name.into(), newest.iter().map(|row| of(row)).collect::<Vec<_>>())
    };
    let columns = vec![
        text("machine", &|row| row.machine.clone()),
        text("mixer", &|row| row.kernel.mixer.clone()),
        text("size", &|row| row.kernel.size.clone()),
        text("kernel", &|row| row.name.to_owned()),
        text("part", &|row| Part::of(row.name).name().to_owned()),
        Column::new("launches".into(), newest.iter().map(|row| row.kernel.launches as u32).collect::<Vec<_>>()),
        number("ms", &|row| row.kernel.latency_ms),
        number("share_pct", &|row| 100.0 * row.kernel.latency_ms / total(row)),
    ];
    Ok(DataFrame::new(newest.len(), columns)?)
}

struct Row<'a> {
    machine: String,
    utc: &'a str,
    name: &'a str,
    kernel: &'a StepKernel,
}

impl<'a> Row<'a> {
    fn of(record: &'a Record) -> Option<Self> {
        let Measurement::Kernels(kernel) = &record.measurement else { return None };
        Some(Self {
            machine: machine_name(&record.environment.machine),
            utc: record.environment.utc.as_deref().unwrap_or_default(),
            name: record.workload.kernel.as_deref().unwrap_or_default(),
            kernel,
        })
    }

    fn model(&self) -> (String, String, String) {
        (self.machine.clone(), self.kernel.mixer.clone(), self.kernel.size.clone())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::record::{Environment, Machine, Workload};
    use crate::table::rows::{numbers, texts};

    /// A record of the kernel `name` in the step of a model.
    pub(crate) fn kernel(mixer: &str, utc: &str, name: &str, latency_ms: f64) -> Record {
        let machine = Machine { gpu: Some("NVIDIA H200".to_owned()), ..Machine::default() };
        let environment = Environment { machine, utc: Some(utc.to_owned()), ..Environment::default() };
        let workload = Workload { kernel: Some(name.to_owned()), ..Workload::default() };
        let kernel = StepKernel { mixer: mixer.to_owned(), size: "30M".to_owned(), launches: 3, latency_ms };
        Record::new(&environment, &workload, Measurement::Kernels(kernel))
    }

    #[test]
    fn the_newest_step_of_each_model_counts_with_the_longest_kernel_first() {
        let records = [
            kernel("attn", "2026-11-01", "adamw", 100.0),
            kernel("attn", "2026-11-02", "adamw", 1.0),
            kernel("attn", "2026-11-02", "32768x512x512 bf16", 3.0),
            kernel("gdn", "2026-11-01", "chunk_states", 5.0),
        ];
        let table = step_kernels(&records).unwrap();
        assert_eq!(texts(&table, "kernel").unwrap(), ["32768x512x512 bf16", "adamw", "chunk_states"]);
        assert_eq!(texts(&table, "part").unwrap(), ["products", "optimizer", "attention or GDN"]);
        assert_eq!(numbers(&table, "share_pct").unwrap(), [Some(75.0), Some(25.0), Some(100.0)]);
        assert_eq!(step_kernels(&[]).unwrap().height(), 0);
    }

    #[test]
    fn every_kernel_file_has_its_part() {
        let part_of = |name| Part::of(name);
        assert_eq!(part_of("attention_backward_keys_hopper"), Part::Mixer);
        assert_eq!(part_of("chunk_gates"), Part::Elementwise);
        assert_eq!(part_of("embedding_backward"), Part::Vocabulary);
        for elementwise in ["rms_norm_forward", "rope", "short_conv_forward", "gated_norm_backward", "swiglu_forward"] {
            assert_eq!(part_of(elementwise), Part::Elementwise, "{elementwise}");
        }
    }
}
