//! Causal attention on a GPU against float64: `cargo test --test attention -- --ignored --nocapture` where there is one.
//! Each case prints the relative RMS error of each tensor, and `times_of_the_forward` the times of both passes.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use gdnlab::compare::compare;
use gdnlab::cuda::attention::{Attention, Backward, Forward, HEAD_DIMS, Heads, Path, Rows, Setup};
use gdnlab::cuda::{Buffer, Gpu, Stream};
use gdnlab::problem::Tensor;
use gdnlab::reference::attention::{Attention as Reference, AttentionGrads, AttentionOutputs};
use half::bf16;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use std::fmt;

/// Lengths below, at and above the sizes of tiles.
const LENGTHS: [usize; 9] = [1, 17, 64, 127, 128, 129, 192, 500, 1024];
/// Limit of `rel_rms`. P, dS, o and delta's o are rounded to bf16, which errs by 1.7e-3 of RMS each time: 2.4e-3 for o, and
/// 3.4e-3 for gradients with four roundings.
const REL_RMS: f64 = 4e-3;
/// The same for dq and dk where a softmax is almost one-hot: `dp - delta` cancels there, and delta has the rounding of o.
const REL_RMS_SHARP: f64 = 8e-3;
/// log-sum-exp is computed in binary32 throughout.
const REL_RMS_LSE: f64 = 1e-6;

/// How the tensors of a case lie in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    /// Each `[B, T, H, d]`.
    Whole,
    /// q, k and v in one `[B, T, 3, H, d]`, and likewise their gradients.
    Fused,
    /// Each `[H, B, T, d]`.
    HeadsFirst,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    setup: Setup,
    layout: Layout,
    /// Factor on q, so that a softmax may be almost one-hot.
    sharpness: f64,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Setup { batch, tokens, heads, head_dim, .. } = self.setup;
        write!(f, "B={batch} T={tokens} H={heads} d={head_dim} {:?}", self.layout)?;
        if self.sharpness == 1.0 { Ok(()) } else { write!(f, " q times {}", self.sharpness) }
    }
}

fn case(batch: usize, tokens: usize, heads: usize, head_dim: usize, layout: Layout) -> Case {
    let scale = (head_dim as f32).powf(-0.5);
    Case { setup: Setup { batch, tokens, heads, head_dim, scale, backward: true }, layout, sharpness: 1.0 }
}

fn cases() -> Vec<Case> {
    let of = |head_dim| {
        let lengths = LENGTHS.into_iter().flat_map(move |tokens| {
            let (batch, heads) = if tokens > 200 { (1, 2) } else { (2, 3) };
            [Layout::Whole, Layout::Fused].map(|layout| case(batch, tokens, heads, head_dim, layout))
        });
        let sharp = Case { sharpness: 8.0, ..case(2, 257, 2, head_dim, Layout::Whole) };
        let scaled = case(1, 300, 2, head_dim, Layout::HeadsFirst);
        let scaled = Case { setup: Setup { scale: 0.3, ..scaled.setup }, ..scaled };
        lengths.chain([sharp, scaled, case(3, 40, 1, head_dim, Layout::HeadsFirst)])
    };
    HEAD_DIMS.into_iter().flat_map(of).collect()
}

/// q, k, v and do, `[B, T, H, d]`.
struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
}

impl Case {
    fn dims(&self) -> [usize; 4] {
        [self.setup.batch, self.setup.tokens, self.setup.heads, self.setup.head_dim]
    }

    fn inputs(&self) -> Inputs {
        let seed = self.dims().iter().fold(1, |seed, &size| seed * 1009 + size as u64);
        let [q, k, v, d_o] = [0, 1, 2, 3].map(|part| {
            let factor = if part == 0 { self.sharpness } else { 1.0 };
            let mut rng = ChaCha8Rng::seed_from_u64(seed + part);
            let draw = |_| bf16::from_f64(factor * normal(&mut rng)).to_f64();
            Tensor::new(&self.dims(), (0..self.setup.elements()).map(draw).collect()).unwrap()
        });
        Inputs { q, k, v, d_o }
    }

    /// Number of the element `(b, t, h, i)` that is number `at` of a tensor `[B, T, H, d]`.
    fn place(&self, heads: &Heads, at: usize) -> usize {
        let Setup { heads: count, head_dim, .. } = self.setup;
        let (row, head, i) = (at / head_dim / count, at / head_dim % count, at % head_dim);
        row * heads.row_pitch + head * heads.head_pitch + i
    }
}

/// Those that this GPU has.
fn paths() -> Vec<Path> {
    let hopper = Gpu::shared().unwrap().capability == (9, 0);
    if hopper { vec![Path::Portable, Path::Hopper] } else { vec![Path::Portable] }
}

fn normal(rng: &mut ChaCha8Rng) -> f64 {
    StandardNormal.sample(rng)
}

/// Three tensors, in one buffer or in three.
struct Triple {
    buffers: Vec<Buffer<bf16>>,
    heads: [Heads; 3],
}

impl Triple {
    fn nan(case: &Case) -> Self {
        let gpu = Gpu::shared().unwrap();
        let Case { setup, layout, .. } = case;
        let nan = |length| gpu.upload(&vec![bf16::NAN; length]).unwrap();
        if *layout == Layout::Fused {
            let buffer = nan(3 * setup.elements());
            return Self { heads: setup.fused(&buffer), buffers: vec![buffer] };
        }
        let buffers: Vec<_> = (0..3).map(|_| nan(setup.elements())).collect();
        let heads = [0, 1, 2].map(|i| match layout {
            Layout::HeadsFirst => {
                let head_pitch = setup.batch * setup.tokens * setup.head_dim;
                Heads::of(&buffers[i], 0, setup.head_dim, head_pitch)
            }
            _ => setup.whole(&buffers[i]),
        });
        Self { buffers, heads }
    }

    /// Buffer and first element of each.
    fn part(&self, i: usize) -> (usize, usize) {
        let buffer = if self.buffers.len() == 1 { 0 } else { i };
        (buffer, self.buffers[buffer].len() - self.heads[i].length)
    }

    fn upload(&mut self, case: &Case, tensors: [&Tensor; 3]) {
        let gpu = Gpu::shared().unwrap();
        let mut values: Vec<Vec<bf16>> = self.buffers.iter().map(|buffer| vec![bf16::NAN; buffer.len()]).collect();
        for (i, tensor) in tensors.into_iter().enumerate() {
            let (buffer, first) = self.part(i);
            for (at, &x) in tensor.data.iter().enumerate() {
                values[buffer][first + case.place(&self.heads[i], at)] = bf16::from_f64(x);
            }
        }
        for (buffer, values) in self.buffers.iter_mut().zip(values) {
            gpu.stream().upload(&values, buffer).unwrap();
        }
    }

    fn download(&self, case: &Case) -> [Tensor; 3] {
        let gpu = Gpu::shared().unwrap();
        let values: Vec<Vec<bf16>> = self.buffers.iter().map(|buffer| gpu.download(buffer).unwrap()).collect();
        [0, 1, 2].map(|i| {
            let (buffer, first) = self.part(i);
            let value = |at| values[buffer][first + case.place(&self.heads[i], at)].to_f64();
            Tensor::new(&case.dims(), (0..case.setup.elements()).map(value).collect()).unwrap()
        })
    }
}

/// Everything on the GPU that a case needs.
struct Run {
    case: Case,
    plan: Attention,
    qkv: Triple,
    gradients: Triple,
    o: Buffer<bf16>,
    d_o: Buffer<bf16>,
    lse: Buffer<f32>,
    delta: Buffer<f32>,
}

/// What a run gave.
#[derive(Clone)]
struct Results {
    o: Tensor,
    lse: Vec<f32>,
    gradients: [Tensor; 3],
}

impl Run {
    fn new(case: Case, path: Path, inputs: &Inputs) -> Self {
        let gpu = Gpu::shared().unwrap();
        let setup = case.setup;
        let mut qkv = Triple::nan(&case);
        qkv.upload(&case, [&inputs.q, &inputs.k, &inputs.v]);
        let d_o: Vec<bf16> = inputs.d_o.data.iter().map(|&x| bf16::from_f64(x)).collect();
        Self {
            case,
            plan: Attention::with_path(gpu, setup, path).unwrap(),
            qkv,
            gradients: Triple::nan(&case),
            o: gpu.alloc(setup.elements()).unwrap(),
            d_o: gpu.upload(&d_o).unwrap(),
            lse: gpu.alloc(setup.rows()).unwrap(),
            delta: gpu.alloc(setup.rows()).unwrap(),
        }
    }

    fn forward(&self) -> Forward {
        let [q, k, v] = self.qkv.heads;
        Forward { q, k, v, o: self.case.setup.whole(&self.o), lse: Rows::of(&self.lse) }
    }

    fn backward(&self) -> Backward {
        let Forward { q, k, v, o, lse } = self.forward();
        let [dq, dk, dv] = self.gradients.heads;
        Backward { q, k, v, o, lse, d_o: self.case.setup.whole(&self.d_o), delta: Rows::of(&self.delta), dq, dk, dv }
    }

    fn fill_with_nan(&mut self) {
        let gpu = Gpu::shared().unwrap();
        gpu.fill_bytes(&mut self.o, 0xff).unwrap();
        for rows in [&mut self.lse, &mut self.delta] {
            gpu.fill_bytes(rows, 0xff).unwrap();
        }
        for buffer in &mut self.gradients.buffers {
            gpu.fill_bytes(buffer, 0xff).unwrap();
        }
    }

    /// Both passes, on memory full of NaN.
    fn results(&mut self) -> Results {
        let gpu = Gpu::shared().unwrap();
        self.fill_with_nan();
        // SAFETY: every buffer lives in `self`, and this is the GPU's own stream, which the downloads wait for.
        unsafe {
            self.plan.forward(gpu.stream(), &self.forward()).unwrap();
            self.plan.backward(gpu.stream(), &self.backward()).unwrap();
        }
        self.download()
    }

    fn download(&self) -> Results {
        let gpu = Gpu::shared().unwrap();
        let o: Vec<f64> = gpu.download(&self.o).unwrap().into_iter().map(bf16::to_f64).collect();
        Results {
            o: Tensor::new(&self.case.dims(), o).unwrap(),
            lse: gpu.download(&self.lse).unwrap(),
            gradients: self.gradients.download(&self.case),
        }
    }
}

/// What is wrong with each path on a case.
fn check(case: Case) -> Vec<String> {
    let inputs = case.inputs();
    let Inputs { q, k, v, d_o } = &inputs;
    let reference = Reference { q, k, v, scale: f64::from(case.setup.scale), cu_seqlens: None };
    let truth = (reference.forward().unwrap(), reference.backward(d_o).unwrap());
    let of_path = |path| complaints(&case, path, &truth, &Run::new(case, path, &inputs).results());
    paths().into_iter().flat_map(of_path).collect()
}

/// Prints a line with the errors of a case.
fn complaints(case: &Case, path: Path, truth: &(AttentionOutputs, AttentionGrads), results: &Results) -> Vec<String> {
    let (truth, gradients) = truth;
    let [batch, tokens, heads, _] = case.dims();
    let lse = (0..batch * tokens * heads).map(|at| {
        let (row, head) = (at / heads, at % heads);
        f64::from(results.lse[(row / tokens * heads + head) * tokens + row % tokens])
    });
    let lse = Tensor::new(&[batch, tokens, heads], lse.collect()).unwrap();
    let [dq, dk, dv] = &results.gradients;
    let of_scores = if case.sharpness > 1.0 { REL_RMS_SHARP } else { REL_RMS };
    let pairs = [
        ("o", &results.o, &truth.o, REL_RMS),
        ("lse", &lse, &truth.lse, REL_RMS_LSE),
        ("dq", dq, &gradients.dq, of_scores),
        ("dk", dk, &gradients.dk, of_scores),
        ("dv", dv, &gradients.dv, REL_RMS),
    ];
    let mut line = format!("{case} {path:?}:");
    let mut complaints = Vec::new();
    for (name, got, expected, limit) in pairs {
        let comparison = compare(name, got, expected).unwrap();
        // With one token p = 1, and dq and dk vanish: what remains are roundings of binary32 sums of d terms.
        let (error, limit) =
            if comparison.max_expected == 0.0 { (comparison.max_abs, 1e-5) } else { (comparison.rel_rms, limit) };
        line += &format!(" {name} {error:.2e}");
        if comparison.nonfinite > 0 || error.is_nan() || error > limit {
            complaints.push(format!(
                "{case} {path:?}: {name} {error:.2e} > {limit:.0e}, {} not finite, worst {:?}",
                comparison.nonfinite, comparison.worst
            ));
        }
    }
    println!("{line}");
    complaints
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn both_passes_agree_with_float64() {
    let complaints: Vec<String> = cases().into_iter().flat_map(check).collect();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

fn paths_and_dims() -> impl Iterator<Item = (Path, usize)> {
    paths().into_iter().flat_map(|path| HEAD_DIMS.map(|dim| (path, dim)))
}

fn bits(results: &Results) -> Vec<u64> {
    let tensors = std::iter::once(&results.o).chain(&results.gradients);
    let tensors = tensors.flat_map(|tensor| tensor.data.iter().map(|x| x.to_bits()));
    tensors.chain(results.lse.iter().map(|x| u64::from(x.to_bits()))).collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn two_runs_and_a_recorded_graph_agree_to_the_bit() {
    for (path, head_dim) in paths_and_dims() {
        let case = case(4, 777, 12, head_dim, Layout::Fused);
        let mut run = Run::new(case, path, &case.inputs());
        let first = bits(&run.results());
        for _ in 0..5 {
            assert!(first == bits(&run.results()), "{case} {path:?}");
        }
        // SAFETY: the buffers outlive the graph, whose replay the downloads wait for.
        let record = |stream: &Stream| unsafe {
            run.plan.forward(stream, &run.forward())?;
            run.plan.backward(stream, &run.backward())
        };
        let gpu = Gpu::shared().unwrap();
        let graph = gpu.capture(record).unwrap();
        run.fill_with_nan();
        graph.replay(gpu.stream()).unwrap();
        assert!(first == bits(&run.download()), "{case} {path:?}: graph");
        println!("{case} {path:?}: six runs and a graph agree");
    }
}

/// Heads and sequences are independent: the same inputs give the same bits at another place, in another layout.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn layouts_agree_to_the_bit() {
    for (path, head_dim) in paths_and_dims() {
        let of = |layout| {
            let case = case(2, 333, 3, head_dim, layout);
            bits(&Run::new(case, path, &case.inputs()).results())
        };
        let whole = of(Layout::Whole);
        assert!(whole == of(Layout::Fused) && whole == of(Layout::HeadsFirst), "d = {head_dim} {path:?}");
    }
}

/// Nothing after a token changes what comes out for it.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn later_tokens_change_nothing_earlier() {
    for (path, head_dim) in paths_and_dims() {
        let case = case(1, 300, 1, head_dim, Layout::Whole);
        let inputs = case.inputs();
        let mut changed = case.inputs();
        const FIRST: usize = 200;
        for tensor in [&mut changed.q, &mut changed.k, &mut changed.v] {
            tensor.data[FIRST * head_dim..].fill(1e4);
        }
        let early = |inputs: &Inputs| {
            let Results { o, lse, .. } = Run::new(case, path, inputs).results();
            (o.data[..FIRST * head_dim].to_vec(), lse[..FIRST].to_vec())
        };
        assert_eq!(early(&inputs), early(&changed));
    }
}

/// Median milliseconds of 20 replays of what `work` records.
fn milliseconds(work: impl FnOnce(&Stream) -> gdnlab::Result<()>) -> f64 {
    let gpu = Gpu::shared().unwrap();
    let graph = gpu.capture(work).unwrap();
    let (start, end) = (gpu.event().unwrap(), gpu.event().unwrap());
    let mut times: Vec<f32> = (0..30)
        .map(|_| {
            start.record(gpu.stream()).unwrap();
            graph.replay(gpu.stream()).unwrap();
            end.record(gpu.stream()).unwrap();
            gpu.synchronize().unwrap();
            start.elapsed_ms(&end).unwrap()
        })
        .skip(10)
        .collect();
    times.sort_by(f32::total_cmp);
    f64::from(times[times.len() / 2])
}

/// Random numbers, a million of them over and over.
fn noise(seed: u64, length: usize) -> Vec<bf16> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let block: Vec<bf16> = (0..1 << 20).map(|_| bf16::from_f64(normal(&mut rng))).collect();
    block.into_iter().cycle().take(length).collect()
}

/// Prints, does not check: milliseconds and TFLOP/s, with `4 T^2 d / 2` operations per head for the forward and 2.5 times
/// as many for the backward.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn times_of_the_forward() {
    let gpu = Gpu::shared().unwrap();
    for (batch, tokens, heads, head_dim) in [
        (32, 1024, 8, 64),
        (32, 1024, 12, 64),
        (32, 1024, 16, 64),
        (4, 8192, 16, 64),
        (32, 1024, 8, 128),
        (4, 8192, 16, 128),
    ] {
        let Case { setup, .. } = case(batch, tokens, heads, head_dim, Layout::Whole);
        let inputs = [1, 2, 3, 4].map(|seed| gpu.upload(&noise(seed, setup.elements())).unwrap());
        let outputs = [(); 4].map(|()| gpu.alloc::<bf16>(setup.elements()).unwrap());
        let rows = [(); 2].map(|()| gpu.alloc::<f32>(setup.rows()).unwrap());
        let [q, k, v, d_o] = [0, 1, 2, 3].map(|i| setup.whole(&inputs[i]));
        let [o, dq, dk, dv] = [0, 1, 2, 3].map(|i| setup.whole(&outputs[i]));
        let [lse, delta] = [Rows::of(&rows[0]), Rows::of(&rows[1])];
        let call = Backward { q, k, v, o, lse, d_o, delta, dq, dk, dv };
        let tflop = 2e-12 * (tokens * tokens * head_dim) as f64 * (batch * heads) as f64;
        for path in paths() {
            let plan = Attention::with_path(gpu, setup, path).unwrap();
            // SAFETY: the buffers live until the times are taken.
            let forward = milliseconds(|stream| unsafe { plan.forward(stream, &Forward { q, k, v, o, lse }) });
            // SAFETY: as above.
            let backward = milliseconds(|stream| unsafe { plan.backward(stream, &call) });
            println!(
                "B={batch} T={tokens} H={heads} d={head_dim} {path:?}: forward {forward:.4} ms {:.0} TFLOP/s, backward \
                 {backward:.4} ms {:.0} TFLOP/s",
                tflop / forward * 1e3,
                2.5 * tflop / backward * 1e3
            );
        }
    }
}
