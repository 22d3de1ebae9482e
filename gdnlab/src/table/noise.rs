//! Distributions of real inputs, and distances between trainings.

use crate::Result;
use crate::distribution::{SHARES, distribution};
use crate::noise::{Apart, Trained};
use crate::problem::Inputs;
use gdnlab_deps::polars::prelude::*;

/// The distributions of `calls` beside each other: a row for each quantity and call, with the columns quantity, inputs (the
/// call's name), and one for each of [`SHARES`]: the value below which that share lies.
///
/// # Errors
/// As [`distribution`].
pub fn distributions(calls: &[(&str, &Inputs)]) -> Result<DataFrame> {
    let spreads = calls.iter().map(|(name, inputs)| Ok((*name, distribution(inputs)?))).collect::<Result<Vec<_>>>()?;
    let quantities = spreads.first().map_or(0, |(_, spreads)| spreads.len());
    let rows: Vec<_> =
        (0..quantities).flat_map(|at| spreads.iter().map(move |(name, spreads)| (*name, &spreads[at]))).collect();
    let mut columns = vec![
        Column::new("quantity".into(), rows.iter().map(|(_, spread)| spread.quantity).collect::<Vec<_>>()),
        Column::new("inputs".into(), rows.iter().map(|(name, _)| *name).collect::<Vec<_>>()),
    ];
    for (index, share) in SHARES.iter().enumerate() {
        let values: Vec<f64> = rows.iter().map(|(_, spread)| spread.quantiles[index]).collect();
        columns.push(Column::new(format!("{:.0}_pct", 100.0 * share).into(), values));
    }
    Ok(DataFrame::new(rows.len(), columns)?)
}

/// How far each of `trainings` is from the first, at every probe: the columns training, kernel, step, loss, loss_apart (both in
/// nats per token), log_probability, divergence (both in nats), top_1_pct and parameters (relative). See [`Apart`].
///
/// # Errors
/// As [`Trained::apart_from`].
pub fn apart(trainings: &[Trained]) -> Result<DataFrame> {
    let mut rows: Vec<(&Trained, f64, Apart)> = Vec::new();
    if let Some((first, others)) = trainings.split_first() {
        for other in others {
            let losses = other.probes.iter().map(|probe| probe.loss);
            rows.extend(losses.zip(other.apart_from(first)?).map(|(loss, apart)| (other, loss, apart)));
        }
    }
    let number = |of: fn(&Apart) -> f64| rows.iter().map(|(_, _, apart)| of(apart)).collect::<Vec<_>>();
    Ok(df!(
        "training" => rows.iter().map(|(trained, ..)| trained.name.as_str()).collect::<Vec<_>>(),
        "kernel" => rows.iter().map(|(trained, ..)| trained.kernel.as_str()).collect::<Vec<_>>(),
        "step" => rows.iter().map(|(_, _, apart)| apart.step as u32).collect::<Vec<_>>(),
        "loss" => rows.iter().map(|(_, loss, _)| *loss).collect::<Vec<_>>(),
        "loss_apart" => number(|apart| apart.loss),
        "log_probability" => number(|apart| apart.log_probability),
        "divergence" => number(|apart| apart.divergence),
        "top_1_pct" => number(|apart| 100.0 * apart.top_1),
        "parameters" => number(|apart| apart.parameters),
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::{Regime, generate};
    use crate::problem::{Op, Shape};

    #[test]
    fn distributions_stand_beside_each_other() {
        let inputs = |regime| generate(Op::Gdn, &Shape::new(70, 1, 16, 8), regime, 1).unwrap();
        let (mild, correlated) = (inputs(Regime::MildDecay), inputs(Regime::Correlated));
        let table = distributions(&[("mild", &mild), ("correlated", &correlated)]).unwrap();
        let names: Vec<&str> = table.get_column_names().into_iter().map(|name| name.as_str()).collect();
        assert_eq!(names, ["quantity", "inputs", "1_pct", "25_pct", "50_pct", "75_pct", "99_pct"]);
        assert_eq!(table.height(), 2 * 7);
        let column =
            |name: &str| table.column(name).unwrap().str().unwrap().iter().flatten().take(2).collect::<Vec<_>>();
        assert_eq!((column("quantity")[0], column("inputs")), (column("quantity")[1], vec!["mild", "correlated"]));
    }

    #[test]
    fn without_a_second_training_there_is_nothing_apart() {
        assert_eq!(apart(&[]).unwrap().height(), 0);
    }
}
