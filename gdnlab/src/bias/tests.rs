use super::*;
use crate::inputs::Draw;
use crate::problem::Tensor;
use rand::RngExt;

fn setting() -> Setting {
    let shape = Shape { batch: 16, ..Shape::new(96, 2, 16, 16) };
    Setting { op: Op::Gdn, shape, regime: Regime::MildDecay, seed: 1 }
}

fn whole<'a>(biases: &'a Biases, tensor: &str, direction: Direction) -> &'a GroupTest {
    let found = biases
        .tests
        .iter()
        .find(|test| (test.tensor.as_str(), test.group, test.direction) == (tensor, Group::All, direction));
    found.unwrap()
}

#[test]
fn truncated_operands_pull_results_to_zero_and_rounded_ones_do_not() {
    let kernels = emulated().unwrap();
    let found = run(&setting(), &[&kernels[0], &kernels[1]], |_| ControlFlow::Continue(())).unwrap();
    let [truncated, nearest] = found.biases.as_slice() else { panic!("two kernels") };
    let o = whole(truncated, "o", Direction::Outward);
    assert!(o.is_biased() && o.sign_holm < LEVEL && o.mean.high < -0.5, "{o:?}");
    assert!(o.mean.mean > -10.0, "{o:?}");
    assert!(!whole(truncated, "o", Direction::Up).is_biased(), "values of both signs lose alike");
    let biased: Vec<&GroupTest> = nearest.tests.iter().filter(|test| test.is_biased()).collect();
    assert!(biased.is_empty(), "{biased:?}");
    assert!(whole(nearest, "o", Direction::Outward).mean.mean.abs() < o.mean.mean.abs() / 20.0);

    // One record for each tensor and direction.
    assert_eq!(found.records.len(), 2 * 8 * 2);
    let Measurement::Bias(record) = &found.records[1].measurement else { panic!("a bias") };
    assert_eq!((record.tensor.as_str(), record.direction.as_str(), record.units), ("o", "outward", 32));
    assert_eq!(record.tests, 1 + 2 + 3 * 8);
    assert!(record.t_biased > 20 && record.sign_biased > 10 && record.largest_u <= record.bias_u, "{record:?}");
}

#[test]
fn decays_that_are_too_large_push_results_outward_in_proportion() {
    let kernels = [0.15, -0.3].map(|roundoffs| LargeDecays::new(roundoffs).unwrap());
    let found = run(&setting(), &[&kernels[0], &kernels[1]], |_| ControlFlow::Continue(())).unwrap();
    for tensor in ["o", "final_state", "dq", "dk", "dv", "dh0"] {
        let [large, small] = [0, 1].map(|at| whole(&found.biases[at], tensor, Direction::Outward));
        // Three chunks: results have met up to three exponentials.
        assert!(large.is_biased() && (0.05..0.3).contains(&large.mean.mean), "{tensor}: {large:?}");
        assert!((small.mean.mean / large.mean.mean + 2.0).abs() < 1e-3, "{tensor}: {small:?}");
        assert!(!whole(&found.biases[0], tensor, Direction::Up).is_biased());
    }
}

#[test]
fn a_shift_is_up_and_not_outward() {
    let draw = Draw::new(3);
    let truth = draw.normal("truth", &[16, 64, 2, 4]);
    let noise = draw.normal("noise", &[16, 64, 2, 4]);
    let data = truth.data.iter().zip(&noise.data).map(|(r, e)| r + 1e-3 * (e + 0.5)).collect();
    let found = Tensor::new(&truth.dims, data).unwrap();
    let groups = Signed::of_groups("o", &found, &truth);
    assert_eq!(groups.len(), 2 * (1 + 2 + 3 * 8));
    for (group, direction, signed) in groups {
        let mean = MeanTest::of(&signed.unit_means()).unwrap();
        match direction {
            // Relative to the RMS of the group, which small magnitudes have less of.
            Direction::Up => assert!(mean.t_p < 1e-3 && mean.mean > 1e-4, "{group}: {mean:?}"),
            Direction::Outward if group == Group::All => assert!(mean.t_p > 1e-3, "{mean:?}"),
            Direction::Outward => {}
        }
    }
}

#[test]
fn errors_that_units_share_are_not_taken_for_a_direction() {
    // Every unit has an error of its own, the same in all of its elements: 32 independent numbers, not 4,096.
    let mut alarms = [0, 0];
    for seed in 0..40 {
        let draw = Draw::new(seed);
        let truth = draw.normal("truth", &[16, 64, 2, 2]);
        let mut rng = draw.stream("unit");
        let shifts: Vec<f64> = (0..32).map(|_| rng.random_range(-1e-3..1e-3)).collect();
        let shift = |at: usize| shifts[at / (64 * 2 * 2) * 2 + at / 2 % 2];
        let data = truth.data.iter().enumerate().map(|(at, r)| r + shift(at)).collect();
        let found = Tensor::new(&truth.dims, data).unwrap();
        let (_, _, signed) = Signed::of_groups("o", &found, &truth).into_iter().next().unwrap();
        let p = [signed.naive_p().unwrap(), MeanTest::of(&signed.unit_means()).unwrap().t_p];
        alarms.iter_mut().zip(p).for_each(|(alarms, p)| *alarms += usize::from(p < 0.05));
    }
    // 2 of 40 are expected of a test that is right; 7 or more come with a probability below 0.5 %.
    assert!(alarms[0] > 20 && alarms[1] < 7, "{alarms:?}");
}

#[test]
fn states_have_groups_by_head_and_magnitude_and_too_few_sequences_are_refused() {
    let state = Draw::new(1).normal("state", &[16, 2, 4, 4]);
    let groups = Signed::of_groups("final_state", &state, &state);
    assert_eq!(groups.len(), 2 * (1 + 2 + 8));
    assert!(groups.iter().all(|(_, _, signed)| signed.unit_means().iter().all(|mean| *mean == 0.0)));
    let few = Setting { shape: Shape { batch: 4, ..setting().shape }, ..setting() };
    assert!(run(&few, &[], |_| ControlFlow::Continue(())).unwrap_err().to_string().contains("B = 4"));
    let stopped = run(&setting(), &[&Reference], |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(Error::Stopped)));
}
