use super::*;
use crate::bench::roofline::{Copier, CopyBandwidth};
use crate::bench::tensors::Part;
use crate::bench::{Heads, Loaded, Peer, SeqLens, Values, results_of};
use crate::chunked::Chunked;
use crate::cuda::Stream;
use crate::kernel::Kernel;
use crate::precision::Policy;
use crate::problem::{Inputs, Op};
use crate::record::{Pass, to_json_lines};

/// The chunk form on the CPU in the place of a kernel, all of whose results are multiplied by `factor`.
struct Emulated {
    kernel: Chunked,
    factor: f64,
    fails_beyond_tokens: usize,
}

impl Emulated {
    fn new(factor: f64) -> Self {
        let kernel = Chunked::new("emulated", Policy::fp32(), 64).unwrap();
        Self { kernel, factor, fails_beyond_tokens: usize::MAX }
    }
}

struct Results {
    of: Vec<(&'static str, Vec<f32>)>,
    spoilt: bool,
}

impl Kernel for Emulated {
    fn name(&self) -> &str {
        self.kernel.name()
    }

    fn summary(&self) -> String {
        self.kernel.summary()
    }

    fn needs(&self) -> &'static str {
        self.kernel.needs()
    }

    fn ops(&self) -> &'static [Op] {
        self.kernel.ops()
    }

    fn mode(&self) -> &'static str {
        "fp32"
    }

    fn input_format(&self) -> Format {
        Format::F32
    }

    fn forward(&self, inputs: &Inputs) -> Result<crate::problem::Results> {
        self.kernel.forward(inputs)
    }

    fn backward(&self, inputs: &Inputs) -> Result<crate::problem::Results> {
        self.kernel.backward(inputs)
    }
}

impl Subject for Emulated {
    fn supports(&self, _: &crate::problem::Shape) -> Result<()> {
        Ok(())
    }

    fn load(&self, pass: Pass, tensors: &Tensors) -> Result<Box<dyn Loaded>> {
        if tensors.shape.tokens > self.fails_beyond_tokens {
            return Err(Error::Unsupported { kernel: "emulated".to_owned(), reason: "too long".to_owned() });
        }
        let mut of: Vec<_> = results_of(pass)
            .iter()
            .map(|&name| (name, vec![f32::NAN; tensors.dims(name).unwrap().iter().product()]))
            .collect();
        for sequence in 0..tensors.sequences.len() {
            for qk_head in 0..tensors.shape.qk_heads {
                let part = Part { sequence, qk_head };
                let inputs = tensors.part(part)?;
                let results = match pass {
                    Pass::Bwd => self.kernel.backward(&inputs)?,
                    _ => self.kernel.forward(&inputs)?,
                };
                for (name, values) in &mut of {
                    let (_, tensor) = results.named().into_iter().find(|(known, _)| known == name).unwrap();
                    // Where the numbers of this part lie, by cutting the indices out.
                    let indices = Values::F32((0..values.len()).map(|i| i as f32).collect());
                    let places = part.cut(super::super::tensors::Source::Values(&indices), name, tensors)?;
                    for (place, x) in places.data.iter().zip(&tensor.data) {
                        values[*place as usize] = (x * self.factor) as f32;
                    }
                }
            }
        }
        Ok(Box::new(Results { of, spoilt: false }))
    }
}

impl Loaded for Results {
    fn spoil(&mut self) -> Result<()> {
        self.spoilt = true;
        Ok(())
    }

    unsafe fn launch(&self, _: &Stream) -> Result<()> {
        Ok(())
    }

    fn read(&self, tensor: &str) -> Result<Values> {
        assert!(self.spoilt, "not filled with NaN before the run");
        let (_, values) = self.of.iter().find(|(name, _)| *name == tensor).unwrap();
        Ok(Values::F32(values.clone()))
    }
}

/// Says that everything takes a millisecond.
#[derive(Default)]
struct Fake {
    timed: usize,
}

impl Stopwatch for Fake {
    fn once(&mut self, _: &dyn Loaded) -> Result<()> {
        Ok(())
    }

    fn time(&mut self, _: &dyn Loaded, go_on: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Samples> {
        if go_on().is_break() {
            return Err(Error::Stopped);
        }
        self.timed += 1;
        Samples::new(vec![1.0, 1.1, 0.9])
    }
}

fn cases() -> Vec<Case> {
    let heads = Heads { qk_heads: 1, value_heads: 2, key_dim: 16, value_dim: 8 };
    let case = |pass, lengths: &[usize]| Case::packed(pass, SeqLens::new(lengths.to_vec()), heads).unwrap();
    let batch = Case {
        shape: crate::problem::Shape { batch: 2, tokens: 50, ..case(Pass::Fwd, &[1]).shape },
        seqlens: None,
        ..case(Pass::Fwd, &[1])
    };
    vec![case(Pass::Fwd, &[100, 30]), case(Pass::Bwd, &[70]), batch]
}

fn go_on(_: &Step) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// [`super::run`] where nothing is recorded and nothing kept.
fn run(
    cases: &[Case],
    subjects: &[&dyn Subject],
    stopwatch: &mut dyn Stopwatch,
    watch: impl FnMut(&Step) -> ControlFlow<()>,
) -> Result<Finished> {
    super::run(cases, subjects, stopwatch, &Known::default(), &mut |_| Ok(()), watch)
}

#[test]
fn a_right_kernel_is_timed_on_every_case() {
    let (right, mut stopwatch) = (Emulated::new(1.0), Fake::default());
    let mut names = Vec::new();
    let finished = run(&cases(), &[&right], &mut stopwatch, |step| {
        names.push(step.name.clone());
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!((finished.rows.len(), finished.stopped, stopwatch.timed), (3, false, 3));
    for row in &finished.rows {
        assert!(row.samples().is_some(), "{}: {:?}", row.case, row.outcome);
    }
    names.dedup();
    assert_eq!(names[0], "emulated fwd 1/2 16/8 100+30");
    assert_eq!(names.len(), 3);
}

#[test]
fn there_is_no_time_without_a_green_check() {
    let (wrong, mut stopwatch) = (Emulated::new(1.001), Fake::default());
    let finished = run(&cases(), &[&wrong], &mut stopwatch, go_on).unwrap();
    assert_eq!((finished.rows.len(), stopwatch.timed), (3, 0));
    for row in finished.rows {
        let Outcome::Wrong(why) = row.outcome else { panic!("{}: {:?}", row.case, row.outcome) };
        assert!(why.starts_with("on a small case") && why.contains("FAIL"), "{why}");
    }
}

#[test]
fn a_wrong_result_of_the_timed_case_is_found() {
    let case = &cases()[0];
    let tensors = Tensors::generate(case, Format::F32, SEED).unwrap();
    let verdict = |change: &dyn Fn(&mut Results)| {
        let mut results = Results { of: Vec::new(), spoilt: true };
        let mut right = Emulated::new(1.0).load(case.pass, &tensors).unwrap();
        right.spoil().unwrap();
        for &name in results_of(case.pass) {
            let Values::F32(values) = right.read(name).unwrap() else { panic!("binary32") };
            results.of.push((name, values));
        }
        change(&mut results);
        check::timed(&Emulated::new(1.0), case.pass, &tensors, &results).unwrap()
    };
    assert_eq!(verdict(&|_| ()), Verdict::Right);
    // The first sequence is not compared, but every element must be written.
    let Verdict::Wrong(why) = verdict(&|results| results.of[0].1[3] = f32::NAN) else { panic!("not written") };
    assert!(why.contains("o: 1 of 2080 elements"), "{why}");
    let Verdict::Wrong(why) = verdict(&|results| results.of[0].1[2079] *= 2.0) else { panic!("wrong") };
    assert!(why.contains("T=30") && why.contains("FAIL"), "{why}");
    assert!(matches!(verdict(&|results| results.of[1].1.fill(0.0)), Verdict::Wrong(_)));
}

#[test]
fn a_case_that_fails_does_not_end_the_others() {
    let short = Emulated { fails_beyond_tokens: 264, ..Emulated::new(1.0) };
    let mut all = cases();
    all.insert(0, Case::packed(Pass::Fwd, SeqLens::new(vec![300]), "1,2,16,8".parse().unwrap()).unwrap());
    let finished = run(&all, &[&short], &mut Fake::default(), go_on).unwrap();
    let Outcome::Failed(why) = &finished.rows[0].outcome else { panic!("{:?}", finished.rows[0].outcome) };
    assert!(why.contains("too long"), "{why}");
    assert_eq!(finished.rows.iter().filter(|row| row.samples().is_some()).count(), 3);
}

#[test]
fn an_interrupt_keeps_what_was_measured() {
    let right = Emulated::new(1.0);
    let stop_at = |at: usize| {
        let stop = |step: &Step| if step.done == at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        run(&cases(), &[&right], &mut Fake::default(), stop).unwrap()
    };
    for at in 0..3 {
        let finished = stop_at(at);
        assert_eq!((finished.rows.len(), finished.stopped), (at, true));
    }
    // During the samples of the second case: the first question comes before the check.
    let mut asked = 0;
    let finished = run(&cases(), &[&right], &mut Fake::default(), |_| {
        asked += 1;
        if asked == 4 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .unwrap();
    assert_eq!((finished.rows.len(), finished.stopped), (1, true));
}

#[test]
fn records_hold_the_samples_the_floor_and_the_best_peer() {
    let mut case = cases().remove(0);
    case.peers = vec![Peer::published("flash_qla", 0.7), Peer::published("fla", 1.5)];
    let finished = run(&[case, cases().remove(1)], &[&Emulated::new(1.0)], &mut Fake::default(), go_on).unwrap();
    let copy = CopyBandwidth {
        bytes_per_s: 4e12,
        theoretical: Some(4.8e12),
        copier: Copier::Kernel,
        copied_bytes: 256 << 20,
        piece_bytes: 256 << 20,
    };
    let ceilings = Ceilings::named("NVIDIA H200", copy, &[]);
    let environment = Environment::default();
    let copy = Record::new(&environment, &ceilings.copy().workload(), ceilings.copy().measurement());
    let rows = finished.rows.iter().filter_map(|row| row.record(&ceilings, &environment));
    let records: Vec<Record> = std::iter::once(copy).chain(rows).collect();
    assert_eq!(records.len(), 3);
    let text = to_json_lines(&records).unwrap();
    assert_eq!(crate::record::parse(&text, std::path::Path::new("x")).unwrap().len(), 3);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].contains(r#""quantity":"copy_bandwidth","value":4000.0,"theoretical":4800.0"#), "{}", lines[0]);
    assert!(lines[0].contains(r#""kernel":"copy.cu, 256 MiB""#), "{}", lines[0]);
    for field in [
        r#""kind":"bench""#,
        r#""latency_ms":1.0"#,
        r#""samples_ms":[1.0,1.1,0.9]"#,
        r#""peer":"flash_qla","peer_ms":0.7,"peer_source":"published""#,
        r#""kernel":"emulated","mode":"fp32","regime":"long-memory-unit-qk","seed":1,"pass":"fwd""#,
        r#""seqlens":"100+30""#,
        "fp32_matmul 67 TFLOP/s of the NVIDIA H200 data sheet",
    ] {
        assert!(lines[1].contains(field), "{field} in {}", lines[1]);
    }
    let Measurement::Bench(timing) = &records[1].measurement else { panic!("a time") };
    // 130 tokens: q and k of one head, v and o of two, their gates, and two states of two heads in and out.
    let bytes = 130.0 * (4.0 * (2.0 * 16.0 + 4.0 * 8.0) + 16.0) + 2.0 * 2.0 * 8.0 * 16.0 * 8.0;
    assert!((timing.gb_s.unwrap() - bytes / 1e6).abs() < 1e-9);
    // Chunks of 64, 36 and 30 tokens; products in binary32 take longer than the traffic.
    let pairs = 64.0f64.powi(2) + 36.0f64.powi(2) + 30.0f64.powi(2);
    let flop = 4.0 * pairs * 16.0 + 2.0 * (4.0 * pairs * 8.0 + 6.0 * 130.0 * 16.0 * 8.0);
    assert!((timing.floor_ms.unwrap() / (1e3 * flop / 67e12) - 1.0).abs() < 1e-12);
    assert!(!lines[2].contains("peer"), "{}", lines[2]);
}

/// A peer, which says that everything takes the time that [`Fake`] says.
struct Other(Emulated);

impl Kernel for Other {
    fn name(&self) -> &str {
        "other"
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

    fn forward(&self, inputs: &Inputs) -> Result<crate::problem::Results> {
        self.0.forward(inputs)
    }

    fn backward(&self, inputs: &Inputs) -> Result<crate::problem::Results> {
        self.0.backward(inputs)
    }
}

impl Subject for Other {
    fn is_peer(&self) -> bool {
        true
    }

    fn supports(&self, shape: &crate::problem::Shape) -> Result<()> {
        self.0.supports(shape)
    }

    fn load(&self, pass: Pass, tensors: &Tensors) -> Result<Box<dyn Loaded>> {
        self.0.load(pass, tensors)
    }
}

#[test]
fn a_run_that_was_stopped_goes_on_with_what_is_missing() {
    let (ours, other) = (Emulated::new(1.0), Other(Emulated::new(1.0)));
    let both: [&dyn Subject; 2] = [&ours, &other];
    let copy = CopyBandwidth {
        bytes_per_s: 4e12,
        theoretical: None,
        copier: Copier::Kernel,
        copied_bytes: 256 << 20,
        piece_bytes: 256 << 20,
    };
    let ceilings = Ceilings::named("NVIDIA H200", copy, &[]);
    let now = Environment {
        commit: Some("1".to_owned()),
        dirty: Some(false),
        utc: Some("1".to_owned()),
        ..Environment::default()
    };
    let mut kept: Vec<Record> = Vec::new();
    // Stopped at the peer of the second case: the first is whole, of the second ours is there.
    let stop = |step: &Step| if step.done == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    let mut keep = |rows: &[Row]| {
        kept.extend(rows.iter().filter_map(|row| row.record(&ceilings, &now)));
        Ok(())
    };
    let finished = super::run(&cases(), &both, &mut Fake::default(), &Known::default(), &mut keep, stop).unwrap();
    assert_eq!((finished.rows.len(), finished.stopped, kept.len()), (3, true, 3));
    let peer = |record: &Record| match &record.measurement {
        Measurement::Bench(timing) => timing.peer.clone().zip(timing.peer_source.clone()),
        other => panic!("a time, not {other:?}"),
    };
    assert_eq!(peer(&kept[0]), Some(("other".to_owned(), "same run".to_owned())));
    assert_eq!((peer(&kept[1]), peer(&kept[2])), (None, None), "a peer itself, and one that was not compared");

    let mut stopwatch = Fake::default();
    let mut names = Vec::new();
    let mut again = Vec::new();
    let mut keep = |rows: &[Row]| {
        again.extend(rows.iter().filter_map(|row| row.record(&ceilings, &now)));
        Ok(())
    };
    let known = Known::new(&kept, &now);
    let watch = |step: &Step| {
        names.push(step.name.clone());
        ControlFlow::Continue(())
    };
    let finished = super::run(&cases(), &both, &mut stopwatch, &known, &mut keep, watch).unwrap();
    // A peer and what it is compared with run together.
    assert_eq!((finished.rows.len(), stopwatch.timed, again.len()), (6, 4, 4));
    assert!(names.iter().all(|name| !name.contains("100+30")), "{names:?}");
    assert_eq!(finished.rows.iter().filter(|row| row.recorded.is_some()).count(), 2);
    let first = &finished.rows[0];
    assert_eq!((first.samples().unwrap().ms(), first.case.peers.len()), (&[1.0, 1.1, 0.9][..], 1));
    assert_eq!(first.record(&ceilings, &Environment::default()).as_ref(), Some(&kept[0]), "as it was recorded");

    let other_code = Environment { commit: Some("2".to_owned()), ..now.clone() };
    let known = Known::new(&kept, &other_code);
    let mut stopwatch = Fake::default();
    super::run(&cases(), &both, &mut stopwatch, &known, &mut |_| Ok(()), go_on).unwrap();
    assert_eq!(stopwatch.timed, 6);
}

/// FlashQLA refuses them.
#[test]
fn peers_are_checked_without_empty_sequences_and_our_kernels_with_one() {
    let case = Case::packed(Pass::Fwd, SeqLens::new(vec![100, 28]), "2,4,64,64".parse().unwrap()).unwrap();
    let empty = |peer| {
        let inputs = check::small_inputs(&case, peer).unwrap();
        inputs.sequence_ranges().iter().filter(|range| range.is_empty()).count()
    };
    assert_eq!((empty(false), empty(true)), (1, 0));
}

#[test]
fn subjects_are_found_by_name_and_the_first_is_the_default() {
    let names = |asked: &[&str]| -> Result<Vec<String>> {
        let asked: Vec<String> = asked.iter().map(|name| (*name).to_owned()).collect();
        Ok(crate::bench::subjects(&asked)?.iter().map(|subject| subject.name().to_owned()).collect())
    };
    assert_eq!(names(&[]).unwrap(), ["cuda-chunk-bf16"]);
    assert_eq!(names(&["cuda-chunk-tf32", "cuda-chunk-bf16"]).unwrap(), ["cuda-chunk-tf32", "cuda-chunk-bf16"]);
    for asked in [&["fla"][..], &["cuda-chunk-tf32", "cuda-chunk-tf32"]] {
        assert!(names(asked).unwrap_err().to_string().contains("expected some of cuda-chunk-bf16"));
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_kernel_is_right_and_timed_on_a_gpu() {
    use crate::bench::{Budget, Timer};
    let gpu = crate::cuda::Gpu::shared().unwrap();
    let mut timer = Timer::new(gpu, Budget::of_samples(5).unwrap()).unwrap();
    let all = crate::bench::all_subjects();
    let subjects: Vec<&dyn Subject> = all.iter().map(AsRef::as_ref).collect();
    assert!(!subjects.is_empty());
    let heads: Heads = "2,4,64,128".parse().unwrap();
    let case = |pass| Case::packed(pass, SeqLens::new(vec![1000, 65, 3000]), heads).unwrap();
    let finished = run(&[case(Pass::Fwd), case(Pass::Bwd)], &subjects, &mut timer, go_on).unwrap();
    for row in &finished.rows {
        let samples = row.samples().unwrap_or_else(|| panic!("{} {}: {:?}", row.kernel, row.case, row.outcome));
        println!("{} {}: {:.4} ms", row.kernel, row.case, samples.median());
        assert!(samples.median() > 0.0);
    }
}
