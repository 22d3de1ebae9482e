use super::*;
use crate::chunked::Chunked;
use crate::precision::Format;
use crate::reference::Reference;
use std::sync::atomic::{AtomicUsize, Ordering};

fn setting() -> Setting {
    let shape = Shape { qk_heads: 1, ..Shape::new(70, 2, 16, 8) };
    Setting { op: Op::Gdn, shape, regime: Regime::MildDecay, seed: 1, launches: 3 }
}

fn found(setting: &Setting, kernels: &[&dyn Kernel], checks: &[Check]) -> Finished {
    run(setting, kernels, checks, &[], |_| Ok(()), |_| ControlFlow::Continue(())).unwrap()
}

fn determinism(record: &Record) -> &Determinism {
    match &record.measurement {
        Measurement::Determinism(determinism) => determinism,
        other => panic!("{other:?}"),
    }
}

/// The reference, with another result in one way.
struct Fickle {
    launches: AtomicUsize,
    fault: Fault,
}

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// Every third launch has other bits in one element of dk.
    Launch,
    /// The state depends on how many sequences there are.
    Packing,
    /// A zero has the other sign.
    Sign,
}

impl Fickle {
    fn new(fault: Fault) -> Self {
        Self { launches: AtomicUsize::new(0), fault }
    }
}

impl Kernel for Fickle {
    fn name(&self) -> &str {
        "fickle"
    }

    fn summary(&self) -> String {
        String::new()
    }

    fn needs(&self) -> &'static str {
        "a CPU"
    }

    fn ops(&self) -> &'static [Op] {
        &[Op::Gdn]
    }

    fn mode(&self) -> &'static str {
        "fp64"
    }

    fn input_format(&self) -> Format {
        Format::F64
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        Reference.forward(inputs)
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        let mut results = Reference.backward(inputs)?;
        let launch = self.launches.fetch_add(1, Ordering::Relaxed);
        match self.fault {
            Fault::Launch if launch % 3 == 2 => {
                let dk = &mut results.grads.as_mut().unwrap().dk.data[37];
                *dk = dk.next_up();
            }
            Fault::Packing if inputs.sequences() > 1 => results.outputs.final_state.data[5] += 1.0,
            Fault::Sign => results.outputs.o.data[0] = if launch == 0 { 0.0 } else { -0.0 },
            _ => {}
        }
        Ok(results)
    }
}

#[test]
fn kernels_of_the_cpu_give_the_same_bits_whatever_else_happens() {
    let kernels = [Chunked::presets().remove(4), Chunked::presets().remove(1)];
    let kernels: Vec<&dyn Kernel> =
        kernels.iter().map(|kernel| kernel as &dyn Kernel).chain([&Reference as _]).collect();
    let found = found(&setting(), &kernels, &Check::ALL);
    assert_eq!((found.records.len(), found.left.len(), found.stopped), (3 * 5 * 8, 0, false));
    for record in &found.records {
        let determinism = determinism(record);
        assert_eq!((determinism.differing_runs, determinism.differing), (0, 0), "{record:?}");
        let expected = match determinism.check.as_str() {
            "launches" | "load" => 3,
            "threads" | "batch" => 4,
            _ => 6,
        };
        assert_eq!(determinism.runs, expected, "{}", determinism.check);
        assert_eq!(determinism.errors.max_rel, Some(0.0));
    }
}

#[test]
fn one_bit_of_one_launch_is_found() {
    let found = found(&setting(), &[&Fickle::new(Fault::Launch)], &[Check::Launches]);
    let differing: Vec<&Record> =
        found.records.iter().filter(|record| determinism(record).differing_runs > 0).collect();
    assert_eq!(differing.len(), 1);
    let dk = determinism(differing[0]);
    assert_eq!((dk.errors.tensor.as_str(), dk.runs, dk.differing_runs, dk.differing), ("dk", 3, 1, 1));
    // Element 37 of [1, 70, 1, 16].
    assert_eq!((dk.first_run.as_deref(), dk.first_index.as_slice()), (Some("launch 2"), &[0, 2, 0, 5][..]));
    assert_eq!(dk.first_value, dk.first_expected.map(f64::next_up));
    let max_rel = dk.errors.max_rel.unwrap();
    assert!(max_rel > 0.0 && max_rel < 1e-15, "{max_rel}");
}

#[test]
fn what_depends_on_the_neighbours_is_found_and_a_sign_of_zero_counts() {
    let of_fault = |fault| {
        let found = found(&setting(), &[&Fickle::new(fault)], &[Check::Launches, Check::Packing, Check::Batch]);
        let differing = found.records.iter().map(determinism).filter(|found| found.differing > 0);
        differing
            .map(|found| (found.check.clone(), found.errors.tensor.clone(), found.differing_runs))
            .collect::<Vec<_>>()
    };
    let entry = |check: &str, tensor: &str, runs| (check.to_owned(), tensor.to_owned(), runs);
    // The state of the first sequence: it is first in 2 of 6 packings, and the first row of 2 of 4 batches.
    assert_eq!(of_fault(Fault::Packing), [entry("packing", "final_state", 2), entry("batch", "final_state", 2)]);
    assert_eq!(of_fault(Fault::Sign)[0], entry("launches", "o", 3));
}

#[test]
fn a_sequence_among_others_keeps_its_inputs_and_its_truth() {
    let setting = setting();
    let alone = setting.inputs(1, 70).unwrap();
    let truth = named(Reference.backward(&alone).unwrap());
    for check in [Check::Packing, Check::Batch] {
        for arrangement in arrangements(check) {
            let (together, at) =
                arrangement.around(&alone, |index, tokens| setting.inputs(9 + index as u64, tokens)).unwrap();
            let range = together.sequence_ranges()[at].clone();
            assert_eq!(range.len(), 70, "{arrangement}");
            assert_eq!(together.q.data[range.start * 16..range.end * 16], alone.q.data, "{arrangement}");
            let found = packing::cut(&Reference.backward(&together).unwrap(), &together, at).unwrap();
            for ((name, found), (_, truth)) in found.iter().zip(&truth) {
                assert_eq!(found.dims, truth.dims);
                assert_eq!(found.data, truth.data, "{arrangement} {name}");
            }
        }
    }
}

#[test]
fn it_stops_and_goes_on_and_says_what_it_leaves_out() {
    let setting = setting();
    let kernel = Chunked::presets().remove(1);
    let mut runs = 0;
    let stopped = run(
        &setting,
        &[&kernel],
        &[Check::Launches, Check::Packing],
        &[],
        |_| Ok(()),
        |step| {
            runs += 1;
            if step.done == 1 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        },
    )
    .unwrap();
    assert!(stopped.stopped && runs == 5, "4 runs of the first check, and one question before the second: {runs}");
    assert_eq!(stopped.records.len(), 8);
    // As the same code would find it in a clean checkout.
    let environment = Environment { commit: Some("abc".to_owned()), dirty: Some(false), ..Environment::detect() };
    let clean: Vec<Record> =
        stopped.records.iter().map(|record| Record { environment: environment.clone(), ..record.clone() }).collect();
    assert_eq!(known_records(&setting, &kernel, Check::Launches, &clean, &environment), Some(clean.clone()));
    assert_eq!(known_records(&setting, &kernel, Check::Packing, &clean, &environment), None);
    let more = Setting { launches: 4, ..setting };
    assert_eq!(known_records(&more, &kernel, Check::Launches, &clean, &environment), None);
    let dirty = Environment { dirty: Some(true), ..environment };
    assert_eq!(known_records(&setting, &kernel, Check::Launches, &clean, &dirty), None);

    let gdn2 = Setting { op: Op::Gdn2, shape: Shape::new(20, 1, 16, 8), ..setting };
    let found = found(&gdn2, &[&Fickle::new(Fault::Launch)], &[Check::Launches]);
    assert!(found.records.is_empty() && found.left[0].why.contains("gdn2"), "{:?}", found.left);
    let none = Setting { launches: 0, ..setting };
    let refused = run(&none, &[], &[], &[], |_| Ok(()), |_| ControlFlow::Continue(())).unwrap_err().to_string();
    assert!(refused.contains("0 launches"), "{refused}");
    assert!("lunches".parse::<Check>().unwrap_err().to_string().contains("expected one of launches"));
}
