use super::*;
use crate::chunked::Chunked;
use crate::precision::Policy;
use crate::table;

fn case() -> Case {
    let shape = Shape { qk_heads: 1, ..Shape::new(100, 2, 16, 8) };
    Case::generate(Op::Gdn, &shape, Regime::LongMemory, Format::Bf16, 1).unwrap()
}

fn kernels() -> [Chunked; 2] {
    [Policy::bf16(), Policy::fp64()].map(|policy| Chunked::new("", policy, 64).unwrap())
}

fn go_on(_: &Step) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

struct Broken;

impl Kernel for Broken {
    fn name(&self) -> &str {
        "broken"
    }

    fn summary(&self) -> String {
        String::new()
    }

    fn needs(&self) -> &'static str {
        "luck"
    }

    fn ops(&self) -> &'static [Op] {
        &Op::ALL
    }

    fn mode(&self) -> &'static str {
        "bf16"
    }

    fn input_format(&self) -> Format {
        Format::Bf16
    }

    fn forward(&self, _: &Inputs) -> Result<Results> {
        Err(Error::input("no luck"))
    }

    fn backward(&self, inputs: &Inputs) -> Result<Results> {
        self.forward(inputs)
    }
}

#[test]
fn inputs_are_those_of_the_report() {
    let Case { inputs, regime, .. } = case();
    assert_eq!(regime, "long-memory-unit-q");
    for row in inputs.q.data.chunks(16).chain(inputs.k.data.chunks(16)) {
        let norm = row.iter().map(|x| x * x).sum::<f64>().sqrt();
        assert!((norm - 1.0).abs() < 4e-3, "{norm}");
    }
    assert!(inputs.initial_state.is_none() && inputs.q.data.iter().all(|&x| Format::Bf16.round(x) == x));
    let shape = report_shape(512);
    assert_eq!((shape.qk_heads, shape.value_heads, shape.key_dim), (4, 8, 128));
}

#[test]
fn the_truth_judges_between_two() {
    let [rounded, exact] = kernels();
    let bf16 = kernel_named(&rounded, "bf16");
    let finished = run(&[case()], &[&bf16, &exact, &Broken], &[], |_| Ok(()), go_on).unwrap();
    assert_eq!(finished.records.len(), 2, "one pair, two tensors");
    assert_eq!((finished.failures.len(), finished.failures[0].why.as_str()), (1, "no luck"));
    for record in &finished.records {
        let Measurement::Backends(pair) = &record.measurement else { panic!("{record:?}") };
        let (error, of_exact) = (pair.truth_rel_rms.unwrap(), pair.against_truth_rel_rms.unwrap());
        assert!((1e-3..1e-2).contains(&error) && of_exact < 1e-12, "{}: {error} {of_exact}", pair.errors.tensor);
        assert_eq!((pair.nearer, pair.against_nearer), (Some(0.0), Some(1.0)));
        assert!((pair.errors.rel_rms.unwrap() - error).abs() < 1e-9, "the other is the truth");
        let apart = (pair.worst_value.unwrap() - pair.worst_against.unwrap()).abs();
        assert_eq!(Some(apart), pair.errors.max_abs);
        assert!((pair.worst_against.unwrap() - pair.worst_truth.unwrap()).abs() < 1e-12);
        assert_eq!(pair.worst.len(), 4);
    }
    let table = table::backends(&finished.records).unwrap();
    assert_eq!(table.height(), 2);
}

fn kernel_named(kernel: &Chunked, name: &str) -> Chunked {
    Chunked::new(name, kernel.policy().clone(), kernel.chunk()).unwrap()
}

#[test]
fn equal_sides_differ_nowhere() {
    let [_, exact] = kernels();
    let finished = run(&[case()], &[&exact, &exact], &[], |_| Ok(()), go_on).unwrap();
    let Measurement::Backends(pair) = &finished.records[0].measurement else { panic!("a pair") };
    assert_eq!((pair.differing, pair.nearer, pair.errors.max_abs), (0.0, None, Some(0.0)));
    assert!(pair.worst.is_empty());
}

#[test]
fn recorded_results_are_a_side() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("theirs.safetensors");
    let case = Case::recorded(case().inputs);
    let destination = crate::peer::Destination::new(&path, &[]).unwrap();
    crate::peer::write_results(&destination, Op::Gdn, "theirs", &Reference.forward(&case.inputs).unwrap()).unwrap();
    let recorded = RecordedResults::new(&path, Format::Bf16);
    let finished = run(&[case], &[&recorded, &Reference], &[], |_| Ok(()), go_on).unwrap();
    let Measurement::Backends(pair) = &finished.records[0].measurement else { panic!("a pair") };
    assert_eq!((finished.records[0].workload.kernel.as_deref(), pair.differing), (Some("theirs.safetensors"), 0.0));
}

#[test]
fn what_was_measured_by_the_same_code_is_skipped_and_a_stop_keeps_the_rest() {
    let [rounded, exact] = kernels();
    let environment = Environment { commit: Some("a".to_owned()), dirty: Some(false), ..Environment::detect() };
    let mut records = run(&[case()], &[&rounded, &exact], &[], |_| Ok(()), go_on).unwrap().records;
    for record in &mut records {
        record.environment.commit.clone_from(&environment.commit);
        record.environment.dirty = Some(false);
    }
    let kernels: [&dyn Kernel; 2] = [&rounded, &exact];
    assert!(is_known(&case(), &kernels, &records, &environment));
    assert!(!is_known(
        &case(),
        &[&exact, &rounded],
        &records[..1],
        &Environment { dirty: Some(true), ..environment.clone() }
    ));
    assert!(!is_known(&Case { seed: Some(2), ..case() }, &kernels, &records, &environment));
    let stopped = run(&[case()], &kernels, &[], |_| Ok(()), |_| ControlFlow::Break(())).unwrap();
    assert!(stopped.stopped && stopped.records.is_empty());
    assert!(run(&[case()], &kernels[..1], &[], |_| Ok(()), go_on).is_err());
}
