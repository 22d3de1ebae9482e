//! Directions of errors.

use crate::bias::{Biases, Direction, GroupTest, LEVEL, holm};
use crate::record::{self, Measurement, Record};
use crate::{Error, Result};
use gdnlab_deps::polars::prelude::*;

/// Every test of `all`, a row each: the columns kernel, mode, tensor, group (its kind), part (which one of its kind), direction,
/// units, bias_u, low_u and high_u (the mean in unit roundoffs and its 95 % interval), t_p, sign_p, t_holm, sign_holm and
/// naive_p.
///
/// # Errors
/// [`Error::Input`] without any test.
pub fn bias_tests(all: &[Biases]) -> Result<DataFrame> {
    let rows: Vec<(&Biases, &GroupTest)> =
        all.iter().flat_map(|biases| biases.tests.iter().map(move |test| (biases, test))).collect();
    if rows.is_empty() {
        return Err(Error::input("no test of a bias: expected those of one kernel at least"));
    }
    let number = |of: fn(&GroupTest) -> f64| rows.iter().map(|(_, test)| of(test)).collect::<Vec<_>>();
    let count = |of: fn(&GroupTest) -> usize| rows.iter().map(|(_, test)| of(test) as u32).collect::<Vec<_>>();
    Ok(df!(
        "kernel" => rows.iter().map(|(biases, _)| biases.kernel.as_str()).collect::<Vec<_>>(),
        "mode" => rows.iter().map(|(biases, _)| biases.mode.as_str()).collect::<Vec<_>>(),
        "tensor" => rows.iter().map(|(_, test)| test.tensor.as_str()).collect::<Vec<_>>(),
        "group" => rows.iter().map(|(_, test)| test.group.kind()).collect::<Vec<_>>(),
        "part" => count(|test| test.group.index()),
        "direction" => rows.iter().map(|(_, test)| test.direction.name()).collect::<Vec<_>>(),
        "units" => count(|test| test.mean.units),
        "bias_u" => number(|test| test.mean.mean),
        "low_u" => number(|test| test.mean.low),
        "high_u" => number(|test| test.mean.high),
        "t_p" => number(|test| test.mean.t_p),
        "sign_p" => number(|test| test.mean.sign_p),
        "t_holm" => number(|test| test.t_holm),
        "sign_holm" => number(|test| test.sign_holm),
        "naive_p" => number(|test| test.naive_p),
    )?)
}

/// How many tests of each kernel and direction find something: the columns kernel, direction, tests; by_chance, how many would
/// have a p below 0.05 without correction if no kernel had a bias; naive (t-tests that take elements for independent, without
/// correction), t and sign (without correction), t_holm and sign_holm (with it); and largest_u, the largest bias in unit
/// roundoffs, with its place.
///
/// # Errors
/// [`Error::Table`] where polars cannot build the table.
pub fn bias_counts(all: &[Biases]) -> Result<DataFrame> {
    let rows: Vec<(&Biases, Direction)> =
        all.iter().flat_map(|biases| Direction::ALL.map(|direction| (biases, direction))).collect();
    let mut tests: Vec<Vec<&GroupTest>> = Vec::new();
    for (biases, direction) in &rows {
        tests.push(biases.tests.iter().filter(|test| test.direction == *direction).collect());
    }
    let below = |of: fn(&GroupTest) -> f64| {
        let count = |tests: &Vec<&GroupTest>| tests.iter().filter(|test| of(test) < LEVEL).count() as u32;
        tests.iter().map(count).collect::<Vec<_>>()
    };
    let largest: Vec<Option<&GroupTest>> = tests
        .iter()
        .map(|tests| tests.iter().copied().max_by(|a, b| a.mean.mean.abs().total_cmp(&b.mean.mean.abs())))
        .collect();
    let place = |test: &GroupTest| format!("{}, {}", test.tensor, test.group);
    Ok(df!(
        "kernel" => rows.iter().map(|(biases, _)| biases.kernel.as_str()).collect::<Vec<_>>(),
        "direction" => rows.iter().map(|(_, direction)| direction.name()).collect::<Vec<_>>(),
        "tests" => tests.iter().map(|tests| tests.len() as u32).collect::<Vec<_>>(),
        "by_chance" => tests.iter().map(|tests| tests.len() as f64 * LEVEL).collect::<Vec<_>>(),
        "naive" => below(|test| test.naive_p),
        "t" => below(|test| test.mean.t_p),
        "sign" => below(|test| test.mean.sign_p),
        "t_holm" => below(|test| test.t_holm),
        "sign_holm" => below(|test| test.sign_holm),
        "largest_u" => largest.iter().map(|test| test.map(|test| test.mean.mean)).collect::<Vec<_>>(),
        "largest_at" => largest.iter().map(|test| test.map(place)).collect::<Vec<_>>(),
    )?)
}

/// Which findings of `first` repeat in `second`, the same tests on other inputs: the columns kernel, found (t-tests below 0.05 after
/// Holm's correction), repeated (those of them with the same sign and below 0.05 in the second, corrected for as many tests as
/// were found), and largest_u, the largest bias that was found.
///
/// # Errors
/// [`Error::Input`] where the two are not of the same kernels and tests.
pub fn repeated_biases(first: &[Biases], second: &[Biases]) -> Result<DataFrame> {
    let same = |a: &Biases, b: &Biases| {
        let key = |test: &GroupTest| (test.tensor.clone(), test.group, test.direction);
        a.kernel == b.kernel && a.tests.iter().map(key).eq(b.tests.iter().map(key))
    };
    if first.len() != second.len() || !first.iter().zip(second).all(|(a, b)| same(a, b)) {
        return Err(Error::input(
            "the two runs are not of the same kernels and tests: expected one setting, two seeds",
        ));
    }
    let counts = first.iter().zip(second).map(|(a, b)| {
        let found: Vec<(&GroupTest, &GroupTest)> =
            a.tests.iter().zip(&b.tests).filter(|(test, _)| test.is_biased()).collect();
        let again = holm(&found.iter().map(|(_, test)| test.mean.t_p).collect::<Vec<_>>());
        let repeats = |((one, two), p): &(&(&GroupTest, &GroupTest), f64)| {
            *p < LEVEL && one.mean.mean.signum() == two.mean.mean.signum()
        };
        let repeated = found.iter().zip(again).filter(repeats).count();
        let largest = found.iter().map(|(test, _)| test.mean.mean).max_by(|a, b| a.abs().total_cmp(&b.abs()));
        (found.len() as u32, repeated as u32, largest)
    });
    let counts: Vec<(u32, u32, Option<f64>)> = counts.collect();
    Ok(df!(
        "kernel" => first.iter().map(|biases| biases.kernel.as_str()).collect::<Vec<_>>(),
        "found" => counts.iter().map(|(found, ..)| *found).collect::<Vec<_>>(),
        "repeated" => counts.iter().map(|(_, repeated, _)| *repeated).collect::<Vec<_>>(),
        "largest_u" => counts.iter().map(|(.., largest)| *largest).collect::<Vec<_>>(),
    )?)
}

/// The biases among `records`, a row for each kernel, tensor and direction, the last where several are of the same call: the columns kernel, mode, tensor, direction, units,
/// bias_u, low_u, high_u, t_holm, sign_holm, tests, t_biased, sign_biased, largest_u and largest_at.
///
/// # Errors
/// [`Error::Input`] where no record is about a bias.
pub fn recorded_biases(records: &[Record]) -> Result<DataFrame> {
    let rows: Vec<(&Record, &record::Bias)> = records
        .iter()
        .filter_map(|record| match &record.measurement {
            Measurement::Bias(bias) => Some((record, bias)),
            _ => None,
        })
        .collect();
    let key = |(record, bias): &(&Record, &record::Bias)| {
        (record.workload.clone(), bias.tensor.clone(), bias.direction.clone())
    };
    let is_last = |at: &usize| rows[at + 1..].iter().all(|later| key(later) != key(&rows[*at]));
    let rows: Vec<(&Record, &record::Bias)> = (0..rows.len()).filter(is_last).map(|at| rows[at]).collect();
    if rows.is_empty() {
        return Err(Error::input("no record of a bias: expected those of `cargo lab bias`"));
    }
    let number = |of: fn(&record::Bias) -> f64| rows.iter().map(|(_, bias)| of(bias)).collect::<Vec<_>>();
    let count = |of: fn(&record::Bias) -> usize| rows.iter().map(|(_, bias)| of(bias) as u32).collect::<Vec<_>>();
    let text = |of: fn(&record::Bias) -> &str| rows.iter().map(|(_, bias)| of(bias)).collect::<Vec<_>>();
    Ok(df!(
        "kernel" => rows.iter().map(|(record, _)| record.workload.kernel.as_deref()).collect::<Vec<_>>(),
        "mode" => rows.iter().map(|(record, _)| record.workload.mode.as_deref()).collect::<Vec<_>>(),
        "tensor" => text(|bias| &bias.tensor),
        "direction" => text(|bias| &bias.direction),
        "units" => count(|bias| bias.units),
        "bias_u" => number(|bias| bias.bias_u),
        "low_u" => number(|bias| bias.low_u),
        "high_u" => number(|bias| bias.high_u),
        "t_holm" => number(|bias| bias.t_holm),
        "sign_holm" => number(|bias| bias.sign_holm),
        "tests" => count(|bias| bias.tests),
        "t_biased" => count(|bias| bias.t_biased),
        "sign_biased" => count(|bias| bias.sign_biased),
        "largest_u" => number(|bias| bias.largest_u),
        "largest_at" => text(|bias| &bias.largest_at),
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bias::{Group, MeanTest};
    use crate::record::{Environment, Workload};

    fn test(tensor: &str, direction: Direction, mean: f64, t_holm: f64) -> GroupTest {
        GroupTest {
            tensor: tensor.to_owned(),
            group: Group::InChunk(3),
            direction,
            mean: MeanTest { units: 32, mean, low: mean - 0.1, high: mean + 0.1, t_p: t_holm / 10.0, sign_p: 0.2 },
            unit_roundoff: 0.5,
            t_holm,
            sign_holm: 1.0,
            naive_p: 0.0,
        }
    }

    #[test]
    fn tests_are_counted_by_kernel_and_direction() {
        let tests = vec![
            test("o", Direction::Outward, -2.0, 1e-3),
            test("dq", Direction::Outward, 1.0, 0.4),
            test("o", Direction::Up, 0.1, 1.0),
        ];
        let all = [Biases { kernel: "a".to_owned(), mode: "tf32".to_owned(), tests }];
        let counts = bias_counts(&all).unwrap();
        assert_eq!(counts.height(), 2, "up and outward");
        let number = |name: &str| counts.column(name).unwrap().u32().unwrap().iter().flatten().collect::<Vec<_>>();
        assert_eq!((number("tests"), number("naive")), (vec![1, 2], vec![1, 2]));
        assert_eq!((number("t"), number("t_holm"), number("sign")), (vec![0, 2], vec![0, 1], vec![0, 0]));
        let largest = counts.column("largest_at").unwrap().str().unwrap().get(1).unwrap().to_owned();
        assert_eq!(largest, "o, tokens 24 to 31 of a chunk");
        let rows = bias_tests(&all).unwrap();
        assert_eq!(rows.height(), 3);
        assert_eq!(rows.column("part").unwrap().u32().unwrap().get(0), Some(3));
        assert!(bias_tests(&[]).is_err());
    }

    #[test]
    fn what_repeats_has_the_same_sign_on_other_inputs() {
        let of = |tests: Vec<GroupTest>| [Biases { kernel: "a".to_owned(), mode: "tf32".to_owned(), tests }];
        let outward = |tensor: &str, mean, t_holm| test(tensor, Direction::Outward, mean, t_holm);
        let first = of(vec![outward("o", -2.0, 1e-3), outward("dq", 1.0, 1e-3), outward("dk", 0.1, 0.5)]);
        let second = of(vec![outward("o", -2.1, 1e-3), outward("dq", -1.0, 1e-3), outward("dk", 0.1, 1e-3)]);
        let table = repeated_biases(&first, &second).unwrap();
        let number = |name: &str| table.column(name).unwrap().u32().unwrap().get(0).unwrap();
        assert_eq!((number("found"), number("repeated")), (2, 1), "dq turns round, and dk was not found");
        assert_eq!(table.column("largest_u").unwrap().f64().unwrap().get(0), Some(-2.0));
        assert!(repeated_biases(&first, &of(vec![outward("o", -2.0, 1e-3)])).is_err());
    }

    #[test]
    fn recorded_biases_have_a_row_each_and_the_last_counts() {
        let record = |tensor: &str, bias_u: f64| {
            let bias = record::Bias { tensor: tensor.to_owned(), bias_u, tests: 27, ..record::Bias::default() };
            Record::new(&Environment::default(), &Workload::default(), Measurement::Bias(bias))
        };
        let table = recorded_biases(&[record("o", 3.0), record("dq", 2.0), record("o", -1.5)]).unwrap();
        let biases = table.column("bias_u").unwrap().f64().unwrap();
        assert_eq!(biases.iter().collect::<Vec<_>>(), [Some(2.0), Some(-1.5)]);
        assert!(recorded_biases(&[]).is_err());
    }
}
