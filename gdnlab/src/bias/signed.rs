//! Signed errors of the elements of a group, summed within each unit.

use super::group::Groups;
use super::statistics::t_test;
use super::{Direction, Group};
use crate::Result;
use crate::problem::Tensor;

/// Sums over one group, and over each unit in it.
#[derive(Clone, Debug)]
pub(super) struct Signed {
    /// Sum of the errors and number of elements, for each sequence and head.
    units: Vec<(f64, usize)>,
    /// Sum of squared errors.
    squares: f64,
    /// Sum of squares of the truth.
    truth: f64,
}

impl Signed {
    /// The groups of the tensor `name`, each in both directions.
    pub fn of_groups(name: &str, found: &Tensor, truth: &Tensor) -> Vec<(Group, Direction, Self)> {
        let dims = &truth.dims;
        let is_state = matches!(name, "final_state" | "dh0");
        let (heads, tokens) = if is_state { (dims[1], None) } else { (dims[2], Some(dims[1])) };
        let inner = dims.iter().skip(if is_state { 2 } else { 3 }).product::<usize>().max(1);
        let groups = Groups::new(heads, tokens, &truth.data);
        let all = groups.all();
        let empty = Self { units: vec![(0.0, 0); dims[0] * heads], squares: 0.0, truth: 0.0 };
        let mut sums = vec![[empty.clone(), empty]; all.len()];
        let tokens = tokens.unwrap_or(1);
        for (row, (x, r)) in found.data.chunks(inner).zip(truth.data.chunks(inner)).enumerate() {
            let (head, token, sequence) = (row % heads, row / heads % tokens, row / heads / tokens);
            let unit = sequence * heads + head;
            for (x, r) in x.iter().zip(r) {
                let up = x - r;
                let outward = if *r == 0.0 { 0.0 } else { up * r.signum() };
                for group in groups.of(head, token, *r) {
                    sums[group][0].add(unit, up, *r);
                    sums[group][1].add(unit, outward, *r);
                }
            }
        }
        let both = all.into_iter().zip(sums);
        both.flat_map(|(group, sums)| Direction::ALL.into_iter().zip(sums).map(move |(to, sums)| (group, to, sums)))
            .filter(|(_, _, sums)| sums.filled_units() >= 2)
            .collect()
    }

    fn add(&mut self, unit: usize, error: f64, r: f64) {
        let (sum, count) = &mut self.units[unit];
        *sum += error;
        *count += 1;
        self.squares += error * error;
        self.truth += r * r;
    }

    fn filled_units(&self) -> usize {
        self.units.iter().filter(|(_, count)| *count > 0).count()
    }

    fn elements(&self) -> f64 {
        self.units.iter().map(|(_, count)| count).sum::<usize>() as f64
    }

    /// RMS of the truth in the group; 1 where that is zero throughout.
    fn scale(&self) -> f64 {
        let rms = (self.truth / self.elements()).sqrt();
        if rms > 0.0 { rms } else { 1.0 }
    }

    /// Mean error of each unit that has elements in the group, over the RMS of the truth in the group.
    pub fn unit_means(&self) -> Vec<f64> {
        let scale = self.scale();
        self.units.iter().filter(|(_, count)| *count > 0).map(|(sum, count)| sum / *count as f64 / scale).collect()
    }

    /// p of the t-test on all elements, as if their errors were independent.
    pub fn naive_p(&self) -> Result<f64> {
        let n = self.elements();
        let mean = self.units.iter().map(|(sum, _)| sum).sum::<f64>() / n;
        t_test(mean, (self.squares - n * mean * mean).max(0.0), n)
    }
}
