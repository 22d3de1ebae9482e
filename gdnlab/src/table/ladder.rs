//! The model ladder: what was measured of each model, and what [`cost`](crate::cost) makes of it.

use super::roofline::{PUBLISHED_MACHINE, machine_name, rates};
use super::rows::{numbers, texts};
use super::{OURS, read_csv};
use crate::cost::chinchilla::Run;
use crate::cost::memory::{Keep, TrainingMemory};
use crate::cost::model::{
    Batch, Utilization, flop_crossover_tokens, flop_crossover_tokens_of_width, state_elements_per_layer,
    training_cost_per_token,
};
use crate::cost::{Cost, Rates};
use crate::model::config::{Mixer, ModelConfig, Size};
use crate::record::{Measurement, Record};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::*;
use std::path::Path;

/// What others' models reached.
struct Others {
    file: &'static str,
    machine: &'static str,
    implementation: &'static str,
}

/// The published ladder, and what we measured of PyTorch.
const OTHERS: [Others; 2] = [
    Others { file: "day02_gb10_ladder.csv", machine: PUBLISHED_MACHINE, implementation: "PyTorch + fla, published" },
    Others { file: "day02_h200_pytorch_ladder.csv", machine: "H200", implementation: "PyTorch + fla" },
];

/// The products that MFU is held against.
const PRODUCTS: &str = "bf16_matmul";

/// One model, trained on one machine: all that was measured. Everything else follows.
#[derive(Clone, Debug, PartialEq)]
struct Trained {
    machine: String,
    implementation: String,
    mixer: Mixer,
    size: Size,
    batch: Batch,
    tok_per_s: f64,
    peak_gb: Option<f64>,
}

impl Trained {
    fn config(&self) -> ModelConfig {
        ModelConfig::preset(self.mixer, self.size)
    }

    /// Refuses a row whose `d_model` and `layers` are not those of its size: its costs would be another model's.
    fn expect_sizes(&self, origin: &str, d_model: usize, layers: usize) -> Result<()> {
        let config = self.config();
        if (config.d_model, config.layers) == (d_model, layers) {
            return Ok(());
        }
        Err(Error::input(format!(
            "{origin}: {} {} with {layers} blocks of width {d_model}: expected {} of {}",
            self.mixer, self.size, config.layers, config.d_model
        )))
    }

    fn same_run(&self, other: &Self) -> bool {
        let key = |run: &Self| (run.machine.clone(), run.implementation.clone(), run.mixer, run.size, run.batch);
        key(self) == key(other)
    }
}

/// The ladder: the rows of others in the folder `published`, below them those of `records`, each once (the newest), sorted
/// by size and then by mixer. A record needs its B and T.
///
/// | column | is |
/// |---|---|
/// | machine, implementation, mixer, size, B, T | what was trained on what |
/// | tok_per_s, peak_GB | measured |
/// | d_model, layers, body_Mparams | of the model |
/// | us_per_tok, mfu_pct, impl_GBps, bw_pct | [`Utilization`], at the rates of the machine in `rooflines` |
/// | F_MFLOP_per_tok, B_kB_per_tok, I_FLOP_per_byte, I_over_ridge | [`training_cost_per_token`] |
///
/// Measured columns alone are read, all others computed; those that need a rate are empty where `rooflines`, a table of
/// [`rooflines`](super::rooflines), has none of the machine.
///
/// # Errors
/// As [`read_csv`], and [`Error::Input`] for a row that is no rung of the ladder.
pub fn ladder(records: &[Record], published: impl AsRef<Path>, rooflines: &DataFrame) -> Result<DataFrame> {
    let mut all = Vec::new();
    for others in &OTHERS {
        all.extend(rows_of(others, published.as_ref())?);
    }
    let first_of_ours = all.len();
    for (trained, _) in newest(records)? {
        all.push(trained);
    }
    all[first_of_ours..].sort_by_key(|trained| (trained.size, trained.mixer));
    let mut rows = Vec::with_capacity(all.len());
    for trained in all {
        let rates = rates(rooflines, &trained.machine, PRODUCTS)?;
        rows.push(Row::new(trained, rates));
    }
    frame(&rows)
}

fn rows_of(others: &Others, folder: &Path) -> Result<Vec<Trained>> {
    let (text, number) = (DataType::String, DataType::Float64);
    let columns = [
        ("mixer", text.clone()),
        ("size", text),
        ("d_model", number.clone()),
        ("layers", number.clone()),
        ("tok_per_s", number.clone()),
        ("peak_GB", number),
    ];
    let table = read_csv(folder.join(others.file), &columns)?;
    let (mixers, sizes) = (texts(&table, "mixer")?, texts(&table, "size")?);
    let [d_model, layers, rate, peak] = ["d_model", "layers", "tok_per_s", "peak_GB"].map(|name| numbers(&table, name));
    let (d_model, layers, rate, peak) = (d_model?, layers?, rate?, peak?);
    let row = |row: usize| {
        let trained = Trained {
            machine: others.machine.to_owned(),
            implementation: others.implementation.to_owned(),
            mixer: mixers[row].parse()?,
            size: sizes[row].parse()?,
            batch: Batch::LADDER,
            // No field is empty, see read_csv.
            tok_per_s: rate[row].unwrap_or(f64::NAN),
            peak_gb: peak[row],
        };
        let whole = |value: Option<f64>| value.unwrap_or_default() as usize;
        trained.expect_sizes(others.file, whole(d_model[row]), whole(layers[row]))?;
        Ok(trained)
    };
    (0..table.height()).map(row).collect()
}

/// The newest row of each run in `records`, with its time.
fn newest(records: &[Record]) -> Result<Vec<(Trained, Option<&str>)>> {
    let mut newest: Vec<(Trained, Option<&str>)> = Vec::new();
    for record in records {
        let Measurement::Ladder(measured) = &record.measurement else { continue };
        let (Some(sequences), Some(tokens)) = (record.workload.batch, record.workload.tokens) else {
            return Err(Error::input(format!(
                "a record of {} {} names no B or no T: expected both, since the cost of a token depends on them",
                measured.mixer, measured.size
            )));
        };
        let trained = Trained {
            machine: machine_name(&record.environment.machine),
            implementation: record.workload.kernel.clone().unwrap_or_else(|| OURS.to_owned()),
            mixer: measured.mixer.parse()?,
            size: measured.size.parse()?,
            batch: Batch { sequences, tokens },
            tok_per_s: measured.tok_per_s,
            peak_gb: measured.peak_gb,
        };
        trained.expect_sizes("a record", measured.d_model, measured.layers)?;
        let utc = record.environment.utc.as_deref();
        match newest.iter_mut().find(|(known, _)| known.same_run(&trained)) {
            Some((known, at)) if utc >= *at => (*known, *at) = (trained, utc),
            Some(_) => {}
            None => newest.push((trained, utc)),
        }
    }
    Ok(newest)
}

/// A row of the table.
struct Row {
    trained: Trained,
    body_params: u64,
    d_model: u32,
    layers: u32,
    cost: Cost,
    used: Option<Utilization>,
    over_ridge: Option<f64>,
}

impl Row {
    fn new(trained: Trained, rates: Option<Rates>) -> Self {
        let config = trained.config();
        let cost = training_cost_per_token(&config, &trained.batch);
        Self {
            body_params: config.parameters().body(),
            d_model: config.d_model as u32,
            layers: config.layers as u32,
            used: rates.map(|rates| Utilization::new(&cost, trained.tok_per_s, &rates)),
            over_ridge: rates.and_then(|rates| cost.intensity_over_ridge(&rates)),
            cost,
            trained,
        }
    }
}

fn frame(rows: &[Row]) -> Result<DataFrame> {
    let text = |name: &str, of: fn(&Row) -> &str| Column::new(name.into(), rows.iter().map(of).collect::<Vec<_>>());
    let whole = |name: &str, of: fn(&Row) -> u32| Column::new(name.into(), rows.iter().map(of).collect::<Vec<_>>());
    let number =
        |name: &str, of: fn(&Row) -> Option<f64>| Column::new(name.into(), rows.iter().map(of).collect::<Vec<_>>());
    let columns = vec![
        text("machine", |row| &row.trained.machine),
        text("implementation", |row| &row.trained.implementation),
        text("mixer", |row| row.trained.mixer.name()),
        text("size", |row| row.trained.size.name()),
        whole("B", |row| row.trained.batch.sequences as u32),
        whole("T", |row| row.trained.batch.tokens as u32),
        whole("d_model", |row| row.d_model),
        whole("layers", |row| row.layers),
        number("body_Mparams", |row| Some(row.body_params as f64 / 1e6)),
        number("tok_per_s", |row| Some(row.trained.tok_per_s)),
        number("us_per_tok", |row| Some(1e6 / row.trained.tok_per_s)),
        number("peak_GB", |row| row.trained.peak_gb),
        number("mfu_pct", |row| Some(100.0 * row.used?.mfu?)),
        number("impl_GBps", |row| Some(row.cost.bytes * row.trained.tok_per_s / 1e9)),
        number("bw_pct", |row| Some(100.0 * row.used?.bandwidth_fraction)),
        number("F_MFLOP_per_tok", |row| Some(row.cost.flop / 1e6)),
        number("B_kB_per_tok", |row| Some(row.cost.bytes / 1e3)),
        number("I_FLOP_per_byte", |row| Some(row.cost.intensity_flop_per_byte())),
        number("I_over_ridge", |row| row.over_ridge),
    ];
    Ok(DataFrame::new(rows.len(), columns)?)
}

/// A row of a table of [`ladder`], as figures and the tables below read it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rung {
    pub machine: String,
    pub implementation: String,
    pub mixer: Mixer,
    pub size: Size,
    pub batch: Batch,
    pub tok_per_s: f64,
    pub peak_gb: Option<f64>,
    pub mfu_pct: Option<f64>,
    pub cost: Cost,
}

impl Rung {
    /// Who trained, for a legend: `GB10, PyTorch + fla, published`.
    pub fn source(&self) -> String {
        format!("{}, {}", self.machine, self.implementation)
    }
}

/// The rows of a table of [`ladder`].
pub(crate) fn rungs(ladder: &DataFrame) -> Result<Vec<Rung>> {
    let [machines, implementations, mixers, sizes] =
        ["machine", "implementation", "mixer", "size"].map(|name| texts(ladder, name));
    let (machines, implementations, mixers, sizes) = (machines?, implementations?, mixers?, sizes?);
    let number = |name: &str| numbers(ladder, name);
    let (sequences, tokens, rate) = (number("B")?, number("T")?, number("tok_per_s")?);
    let (peak, mfu) = (number("peak_GB")?, number("mfu_pct")?);
    let rung = |row: usize| {
        let (mixer, size): (Mixer, Size) = (mixers[row].parse()?, sizes[row].parse()?);
        let whole = |value: Option<f64>| value.unwrap_or_default() as usize;
        let batch = Batch { sequences: whole(sequences[row]), tokens: whole(tokens[row]) };
        batch.validate()?;
        let expected = || Error::Table(format!("column 'tok_per_s': expected a rate in row {row}"));
        Ok(Rung {
            machine: machines[row].clone(),
            implementation: implementations[row].clone(),
            mixer,
            size,
            batch,
            tok_per_s: rate[row].filter(|rate| *rate > 0.0).ok_or_else(expected)?,
            peak_gb: peak[row],
            mfu_pct: mfu[row],
            cost: training_cost_per_token(&ModelConfig::preset(mixer, size), &batch),
        })
    };
    (0..ladder.height()).map(rung).collect()
}

/// Hours to 20 tokens per parameter at the rates of a table of [`ladder`], counting the parameters of the body or all of
/// them: the columns machine, implementation, mixer, size, N_body_M, tokens_body_B, hours_body, N_total_M, tokens_total_B
/// and hours_total.
///
/// # Errors
/// [`Error::Table`] where a column is missing.
pub fn chinchilla(ladder: &DataFrame) -> Result<DataFrame> {
    let rungs = rungs(ladder)?;
    let counts: Vec<_> = rungs.iter().map(|rung| ModelConfig::preset(rung.mixer, rung.size).parameters()).collect();
    let runs = |of: fn(&crate::model::config::ParameterCount) -> u64| {
        let run = rungs.iter().zip(&counts).map(|(rung, count)| Run::new(of(count), rung.tok_per_s));
        (counts.iter().map(|count| of(count) as f64 / 1e6).collect::<Vec<_>>(), run.collect::<Vec<_>>())
    };
    let mut columns = names(&rungs);
    for (part, (millions, runs)) in [("body", runs(|count| count.body())), ("total", runs(|count| count.total()))] {
        let tokens: Vec<f64> = runs.iter().map(|run| run.tokens / 1e9).collect();
        let hours: Vec<f64> = runs.iter().map(|run| run.hours).collect();
        columns.push(Column::new(format!("N_{part}_M").into(), millions));
        columns.push(Column::new(format!("tokens_{part}_B").into(), tokens));
        columns.push(Column::new(format!("hours_{part}").into(), hours));
    }
    Ok(DataFrame::new(rungs.len(), columns)?)
}

/// The columns that name the rows of a ladder.
fn names(rungs: &[Rung]) -> Vec<Column> {
    let text = |name: &str, of: fn(&Rung) -> &str| Column::new(name.into(), rungs.iter().map(of).collect::<Vec<_>>());
    vec![
        text("machine", |rung| &rung.machine),
        text("implementation", |rung| &rung.implementation),
        text("mixer", |rung| rung.mixer.name()),
        text("size", |rung| rung.size.name()),
    ]
}

/// Measured peaks of memory beside what [`TrainingMemory`] foretells, for a step that keeps everything between forward and
/// backward and for one that keeps nothing that follows element by element: the columns machine, implementation, mixer,
/// size, peak_GB, keep_all_GB, lean_GB and peak_over_keep_all.
///
/// # Errors
/// [`Error::Table`] where a column is missing.
pub fn peak_memory(ladder: &DataFrame) -> Result<DataFrame> {
    let rungs = rungs(ladder)?;
    let estimate = |keep: Keep| -> Vec<f64> {
        let bytes = |rung: &Rung| {
            TrainingMemory::new(&ModelConfig::preset(rung.mixer, rung.size), &rung.batch, keep).total_bytes()
        };
        rungs.iter().map(|rung| bytes(rung) as f64 / 1e9).collect()
    };
    let all = estimate(Keep::ALL);
    let ratio: Vec<Option<f64>> = rungs.iter().zip(&all).map(|(rung, all)| Some(rung.peak_gb? / all)).collect();
    let mut columns = names(&rungs);
    columns.push(Column::new("peak_GB".into(), rungs.iter().map(|rung| rung.peak_gb).collect::<Vec<_>>()));
    columns.push(Column::new("keep_all_GB".into(), all));
    columns.push(Column::new("lean_GB".into(), estimate(Keep::LEAN)));
    columns.push(Column::new("peak_over_keep_all".into(), ratio));
    Ok(DataFrame::new(rungs.len(), columns)?)
}

/// Where attention and GDN cross, for each rung of the ladder. The columns:
///
/// | column | is |
/// |---|---|
/// | size, d_model | the rung |
/// | state_attn, state_gdn | elements that a block keeps of `tokens` tokens |
/// | T_state | length beyond which GDN keeps less |
/// | T_flop_4D_3V | length beyond which a token of GDN needs fewer FLOPs, with `H K = D` and `H V = 2 D` |
/// | T_flop | the same for the models of the ladder as they are |
///
/// # Errors
/// None at present; the result leaves room for sizes that have no crossover.
pub fn crossovers(tokens: usize) -> Result<DataFrame> {
    let pairs = Size::LADDER.map(|size| Mixer::ALL.map(|mixer| ModelConfig::preset(mixer, size)));
    let number = |name: &str, of: &dyn Fn(&[ModelConfig; 2]) -> f64| {
        Column::new(name.into(), pairs.iter().map(of).collect::<Vec<_>>())
    };
    let flop =
        pairs.iter().map(|[attention, gdn]| flop_crossover_tokens(attention, gdn)).collect::<Result<Vec<_>>>()?;
    let columns = vec![
        Column::new("size".into(), Size::LADDER.map(Size::name).to_vec()),
        Column::new("d_model".into(), pairs.iter().map(|[attention, _]| attention.d_model as u32).collect::<Vec<_>>()),
        number("state_attn", &|[attention, _]| state_elements_per_layer(attention, tokens) as f64),
        number("state_gdn", &|[_, gdn]| state_elements_per_layer(gdn, tokens) as f64),
        number("T_state", &|[attention, gdn]| {
            state_elements_per_layer(gdn, 1) as f64 / state_elements_per_layer(attention, 1) as f64
        }),
        number("T_flop_4D_3V", &|[_, gdn]| flop_crossover_tokens_of_width(gdn.d_model, gdn.value_dim)),
        Column::new("T_flop".into(), flop),
    ];
    Ok(DataFrame::new(pairs.len(), columns)?)
}

#[cfg(test)]
#[path = "ladder_tests.rs"]
mod tests;
