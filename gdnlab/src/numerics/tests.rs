use super::*;
use crate::chunked::Chunked;
use crate::precision::{Format, Policy};
use crate::sweep::Shard;

fn go_on(_: &Step) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn small() -> Problems {
    Problems { shapes: vec![Shape::new(80, 1, 16, 8)], ..Problems::day1(&[Regime::MildDecay], 1) }
}

fn max_rel(records: &[Record], step: &str) -> f64 {
    let of_step = |record: &&Record| record.precision().is_some_and(|precision| precision.step == step);
    records.iter().filter(of_step).filter_map(|record| record.errors()?.max_rel).fold(0.0, f64::max)
}

#[test]
fn every_kernel_and_tensor_gives_a_record() {
    let kernels = [Chunked::presets().remove(0), Chunked::presets().remove(4)];
    let kernels: Vec<&dyn Kernel> = kernels.iter().map(|kernel| kernel as &dyn Kernel).collect();
    let mut steps = Vec::new();
    let records = run(&small(), &kernels, |step| {
        steps.push(step.done);
        ControlFlow::Continue(())
    })
    .expect("valid");
    assert_eq!((records.len(), steps), (2 * 8, vec![0, 1]));
    assert!(records.iter().all(|record| record.errors().is_some_and(|errors| errors.nonfinite == 0)));
}

#[test]
fn packed_sequences_and_grouped_heads_are_measured_as_such() {
    let shape = Shape { qk_heads: 1, ..Shape::new(80, 2, 16, 8) };
    let packing = Some(SeqLens::new(vec![1, 0, 15, 64]));
    let problems = Problems { shapes: vec![shape], packing, ..small() };
    let kernel = Chunked::presets().remove(0);
    let records = run(&problems, &[&kernel], go_on).expect("valid");
    let workload = &records[0].workload;
    assert_eq!(
        (workload.seqlens.as_deref(), workload.qk_heads, workload.value_heads),
        (Some("1+0+15+64"), Some(1), Some(2))
    );
    let wrong = Problems { packing: Some(SeqLens::new(vec![1, 2])), ..problems };
    assert!(run(&wrong, &[&kernel], go_on).unwrap_err().to_string().contains("cu_seqlens"));
}

#[test]
fn calls_from_elsewhere_are_measured_as_they_are() {
    let shape = Shape { batch: 2, ..Shape::new(80, 1, 16, 8) };
    let inputs = generate(Op::Gdn, &shape, Regime::MildDecay, 1).expect("valid");
    let kernel = Chunked::presets().remove(4);
    let of_regime = run(&Problems { shapes: vec![shape], ..small() }, &[&kernel], go_on).expect("valid");
    let given = [Given { inputs: inputs.clone(), name: "layer 1".to_owned() }];
    let of_given = run_given(&given, &[&kernel], go_on).expect("valid");
    let errors = |records: &[Record]| records.iter().filter_map(Record::errors).cloned().collect::<Vec<_>>();
    assert_eq!((errors(&of_given), of_given.len()), (errors(&of_regime), 8));
    assert_eq!(
        (of_given[0].workload.regime.as_deref(), of_given[0].workload.batch, of_given[0].workload.seed),
        (Some("layer 1"), Some(2), None)
    );
    let forward = [Given { inputs: Inputs { d_o: None, ..inputs.clone() }, name: "no gradient".to_owned() }];
    assert_eq!(run_given(&forward, &[&kernel], go_on).expect("valid").len(), 2);
    let gdn2 = generate(Op::Gdn2, &shape, Regime::MildDecay, 1).expect("valid");
    let refused =
        run_given(&[Given { inputs: gdn2, name: "x".to_owned() }], &[&crate::cuda::chunk::Chunk::bf16()], go_on);
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
}

#[test]
fn a_step_in_tf32_costs_accuracy_and_none_does_not() {
    let variants = Variant::products("fp32", Format::Tf32Truncated).expect("a preset");
    let records = ablation(&small(), &variants, go_on).expect("valid");
    let (none, solve, every) =
        (max_rel(&records, "none"), max_rel(&records, "solve"), max_rel(&records, "every product"));
    assert!(none < 1e-5 && none < solve / 3.0 && solve < every, "{none:e} {solve:e} {every:e}");
}

#[test]
fn rounded_results_leave_the_rounding_alone() {
    let exact_but_rounded = Chunked::new("rounded", Policy::rounded_results(Format::Bf16), 64).expect("a chunk size");
    let records = run(&small(), &[&exact_but_rounded], go_on).expect("valid");
    for errors in records.iter().filter_map(Record::errors) {
        let rel_rms = errors.rel_rms.unwrap_or(f64::NAN) / Format::Bf16.unit_roundoff();
        let in_bf16 = ["o", "dq", "dk", "dv"].contains(&errors.tensor.as_str());
        // Rounding to nearest errs by 1/sqrt(3) of half a spacing, which is 0.5u to 1u of a value.
        let expected = if in_bf16 { 0.3..0.5 } else { 0.0..1e-4 };
        assert!(expected.contains(&rel_rms), "{}: {rel_rms} u", errors.tensor);
    }
}

#[test]
fn a_stop_is_reported() {
    let stopped = run(&small(), &[&Reference], |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(Error::Stopped)));
}

/// Two kernels on two shapes in two regimes.
fn kernels() -> [Chunked; 2] {
    [Chunked::presets().remove(0), Chunked::presets().remove(4)]
}

fn four() -> Problems {
    let shapes = vec![Shape::new(20, 1, 16, 8), Shape::new(7, 2, 8, 8)];
    Problems { shapes, ..Problems::day1(&[Regime::MildDecay, Regime::NoDecay], 1) }
}

#[test]
fn the_parts_of_a_sweep_give_the_records_of_the_whole() {
    let kernels = kernels();
    let kernels: Vec<&dyn Kernel> = kernels.iter().map(|kernel| kernel as &dyn Kernel).collect();
    let content = |record: &Record| (record.workload.clone(), record.errors().cloned());
    let whole: Vec<_> = run(&four(), &kernels, go_on).expect("valid").iter().map(content).collect();
    let mut parts = Vec::new();
    for number in 1..=3 {
        let part = Sweep { shard: Shard::new(number, 3).expect("valid"), ..Sweep::whole() };
        let records = sweep(Calls::Problems(&four()), &kernels, part, go_on).expect("valid");
        assert_eq!(records.len(), if number == 1 { 2 * 16 } else { 16 });
        parts.extend(records.iter().map(content));
    }
    assert_eq!(parts.len(), whole.len());
    assert!(whole.iter().all(|record| parts.contains(record)));
}

/// Takes heads of 16 columns of K alone.
struct Narrow(Chunked);

impl Kernel for Narrow {
    fn name(&self) -> &str {
        "narrow"
    }

    fn summary(&self) -> String {
        self.0.summary()
    }

    fn needs(&self) -> &'static str {
        self.0.needs()
    }

    fn ops(&self) -> &'static [Op] {
        self.0.ops()
    }

    fn mode(&self) -> &'static str {
        self.0.mode()
    }

    fn input_format(&self) -> Format {
        self.0.input_format()
    }

    fn forward(&self, inputs: &Inputs) -> Result<Results> {
        self.0.forward(inputs)
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        if inputs.shape.key_dim == 16 {
            return self.0.backward(inputs);
        }
        Err(Error::Unsupported { kernel: self.name().to_owned(), reason: "K is not 16".to_owned() })
    }
}

#[test]
fn what_fails_is_told_and_the_others_go_on() {
    let [first, second] = kernels();
    let narrow = Narrow(first);
    let kernels: [&dyn Kernel; 2] = [&narrow, &second];
    let mut failed = Vec::new();
    let fail = |step: &Step, why: Error| {
        failed.push((step.done, why.to_string()));
        Ok(())
    };
    let part = Sweep { fail: Box::new(fail), ..Sweep::whole() };
    let records = sweep(Calls::Problems(&four()), &kernels, part, go_on).expect("valid");
    assert_eq!(records.len(), 6 * 8);
    assert_eq!(failed.len(), 2);
}

#[test]
fn a_sweep_goes_on_with_what_is_missing_and_keeps_each_step() {
    let kernels = kernels();
    let kernels: Vec<&dyn Kernel> = kernels.iter().map(|kernel| kernel as &dyn Kernel).collect();
    let mut kept: Vec<Record> = Vec::new();
    let stop = |step: &Step| if step.done == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let keep = |records: &[Record]| {
        kept.extend_from_slice(records);
        Ok(())
    };
    let first = Sweep { keep: Box::new(keep), ..Sweep::whole() };
    let stopped = sweep(Calls::Problems(&four()), &kernels, first, stop);
    assert!(matches!(stopped, Err(Error::Stopped)));
    assert_eq!(kept.len(), 3 * 8);
    // The same code on this machine, without changes.
    let clean = |mut record: Record| {
        record.environment.dirty = Some(false);
        record.environment.commit = Some("1".to_owned());
        record
    };
    let kept: Vec<Record> = kept.into_iter().map(clean).collect();
    let now = Environment { commit: Some("1".to_owned()), dirty: Some(false), ..Environment::detect() };
    let (problems, mut steps) = (four(), Vec::new());
    let subjects = subjects(Op::Gdn, &kernels).expect("valid");
    let missing = Sweep { records: &kept, ..Sweep::whole() };
    let records = measure_at(&now, Calls::Problems(&problems), &subjects, missing, |step| {
        steps.push(step.done);
        ControlFlow::Continue(())
    })
    .expect("valid");
    assert_eq!((records.len(), steps), (8 * 8, vec![3, 4, 5, 6, 7]));
    assert_eq!(records[..24], kept[..24]);
    let other = Problems { seed: 2, ..four() };
    let again = Sweep { records: &kept, ..Sweep::whole() };
    let mut steps = 0;
    measure_at(&now, Calls::Problems(&other), &subjects, again, |_| {
        steps += 1;
        ControlFlow::Continue(())
    })
    .expect("valid");
    assert_eq!(steps, 8, "another seed is another measurement");
}
