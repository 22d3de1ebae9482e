//! Speed of the CPU kernels, each beside what the same core reaches in the same run.
//!
//! `cargo bench --profile dev --bench cpu [-- --save] [--python PATH]`, in the profile that `cargo lab` and the notebooks
//! run in. Everything runs on one thread and ratios compare medians. `--save` adds the rows to `data/`. What a row is
//! held against:
//!
//! - the chunked forward: the GEMM library's own f32 rate at 64x128x128 products;
//! - the reference: a numpy loop over the tokens (`numpy_loop.py`; left out, with a word, where there is no numpy), and
//!   its own bound, the longest of its multiply-adds and its cache traffic ([`rates::Cost`]);
//! - a longer sequence: its share of the time of a shorter one.

mod numpy;
mod rates;
mod report;
mod timing;

use gdnlab::chunked::Chunked;
use gdnlab::inputs::{self, Regime};
use gdnlab::kernel::Kernel;
use gdnlab::precision::{Format, Policy};
use gdnlab::problem::{Inputs, Op, Shape};
use gdnlab::record::{Pass, Timing, Workload};
use gdnlab::reference::Reference;
use gdnlab_deps::gemm::{self, Parallelism};
use gdnlab_deps::rayon::ThreadPoolBuilder;
use rates::{Cost, Rates, bound};
use report::{Report, per};
use std::error::Error;
use std::hint::black_box;
use timing::Timer;

const SAMPLES: usize = 20;
/// Samples of each length of the sweep, whose longest takes a second.
const SWEEP_SAMPLES: usize = 10;
const SWEEP: [usize; 4] = [1024, 4096, 16_384, 65_536];
/// Tokens of the rows outside the sweep.
const TOKENS: usize = 1024;
const SEED: u64 = 1;
/// `K` and `V`.
const HEAD_DIM: usize = 128;
const CHUNK: usize = 64;
/// FLOP per token and head of the chunked forward with chunks of 64 and K = V = 128.
const CHUNKED_FORWARD_FLOP: f64 = 163.8e3;
/// Products in one timed call.
const PRODUCTS: usize = 100;

fn main() -> Result<(), Box<dyn Error>> {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            println!("nothing is timed outside `cargo bench`");
            return Ok(());
        }
        Err(message) => return Err(message.into()),
    };
    let report = ThreadPoolBuilder::new().num_threads(1).build()?.install(|| run(&options.python))?;
    report.print();
    if options.save {
        println!("records: {}", report.save()?.display());
    }
    Ok(())
}

struct Options {
    save: bool,
    python: String,
}

impl Options {
    /// `None` where cargo runs this as a test, without `--bench`.
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Self>, String> {
        let (mut options, mut bench) = (Self { save: false, python: "python3".into() }, false);
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--bench" => bench = true,
                "--save" => options.save = true,
                "--python" => options.python = arguments.next().ok_or("--python: expected a path after it")?,
                other => return Err(format!("'{other}': expected --save or --python PATH")),
            }
        }
        Ok(bench.then_some(options))
    }
}

fn run(python: &str) -> gdnlab::Result<Report> {
    let mut timer = Timer::new(SAMPLES);
    let mut report = Report::default();
    chunked(&mut timer, &mut report)?;
    reference(&mut timer, &mut report, python)?;
    sweep(&mut report)?;
    Ok(report)
}

/// The chunked forward in f32, against the products that it is made of.
fn chunked(timer: &mut Timer, report: &mut Report) -> gdnlab::Result<()> {
    let name = "GEMM f32 64x128x128";
    let gemm = timer.time(name, || products(PRODUCTS));
    let gemm_rate = (PRODUCTS * 2 * CHUNK * HEAD_DIM * HEAD_DIM) as f64 / gemm.median();
    report.rate(name, per(&gemm, PRODUCTS, "product"), gemm_rate, "FLOP");

    let kernel = Chunked::new("cpu-chunk-fp32", Policy::fp32(), CHUNK)?;
    let inputs = one_head(TOKENS)?.rounded_to(Format::F32);
    kernel.forward(&inputs)?;
    let time = timer.time("chunked f32 forward", || drop(black_box(kernel.forward(&inputs))));
    let flop = CHUNKED_FORWARD_FLOP * TOKENS as f64;
    let rate = flop / time.median();
    let timing = Timing { tflop_s: Some(rate / 1e12), floor_ms: Some(1e3 * flop / gemm_rate), ..Timing::default() };
    let share = format!("{:.0} % of the GEMM rate (wanted: at least 40 %)", 100.0 * rate / gemm_rate);
    report.workload("chunked f32 forward", &time, workload(&inputs, &kernel, Pass::Fwd), timing, share);
    Ok(())
}

/// The reference against numpy and against its bound.
fn reference(timer: &mut Timer, report: &mut Report, python: &str) -> gdnlab::Result<()> {
    let inputs = one_head(TOKENS)?;
    let truth = Reference.backward(&inputs)?;
    let rates = Rates::measure(timer, report);
    let forward = timer.time("reference forward", || drop(black_box(Reference.forward(&inputs))));
    let both = timer.time("reference forward and backward", || drop(black_box(Reference.backward(&inputs))));
    let peer = numpy::measure(python, &inputs, &truth);
    let passes = [
        ("reference forward", Pass::Fwd, &forward, Cost::FORWARD, peer.as_ref().map(|times| &times.forward)),
        ("reference forward + backward", Pass::Bwd, &both, Cost::BOTH, peer.as_ref().map(|times| &times.both)),
    ];
    for (name, pass, time, cost, numpy) in passes {
        let (floor, what) = bound(cost, rates, HEAD_DIM * HEAD_DIM);
        let measured = time.median() / TOKENS as f64;
        let ratio = format!("{:.2}x the {:.2} us of its {what} (wanted: at most 2.5x)", measured / floor, 1e6 * floor);
        let mut timing = Timing { floor_ms: Some(1e3 * floor * TOKENS as f64), ..Timing::default() };
        if let Ok(numpy) = numpy {
            timing.peer = Some("numpy".into());
            timing.peer_ms = Some(1e3 * numpy.median());
            timing.peer_source = Some("same run".into());
        }
        report.workload(name, time, workload(&inputs, &Reference, pass), timing, ratio);
        if let Ok(numpy) = numpy {
            let ratio = format!("{:.1}x the time of {name} (wanted: at least 10x)", numpy.median() / time.median());
            report.line("  numpy", per(numpy, TOKENS, "token"), ratio);
        }
    }
    report.note(match peer {
        Ok(times) => format!("numpy {}, one thread", times.version),
        Err(reason) => format!("no comparison with numpy: {reason}"),
    });
    Ok(())
}

/// Forward and backward of the reference over lengths.
fn sweep(report: &mut Report) -> gdnlab::Result<()> {
    let mut timer = Timer::new(SWEEP_SAMPLES);
    let mut first = None;
    for tokens in SWEEP {
        let inputs = one_head(tokens)?;
        let name = format!("reference T = {tokens}");
        let time = timer.time(&name, || drop(black_box(Reference.backward(&inputs))));
        let per_token = time.median() / tokens as f64;
        let share = format!("{:.2}x per token of T = {}", per_token / *first.get_or_insert(per_token), SWEEP[0]);
        report.workload(&name, &time, workload(&inputs, &Reference, Pass::Bwd), Timing::default(), share);
    }
    Ok(())
}

fn workload(inputs: &Inputs, kernel: &dyn Kernel, pass: Pass) -> Workload {
    let workload = Workload::new(inputs.op(), &inputs.shape).kernel(kernel.name(), kernel.mode());
    workload.inputs(Regime::Gaussian.name(), SEED).pass(pass)
}

/// One head of GDN without a gradient of the final state, which the loop in numpy does not take.
fn one_head(tokens: usize) -> gdnlab::Result<Inputs> {
    let mut inputs = inputs::generate(Op::Gdn, &Shape::new(tokens, 1, HEAD_DIM, HEAD_DIM), Regime::Gaussian, SEED)?;
    inputs.d_final_state = None;
    Ok(inputs)
}

/// `count` products of 64x128 by 128x128 matrices, row-major, operands in the cache.
fn products(count: usize) {
    let (m, n, k) = (CHUNK, HEAD_DIM, HEAD_DIM);
    let (a, b, mut c) = (vec![1.0f32; m * k], vec![1.0f32; k * n], vec![0.0f32; m * n]);
    let (a, b, c) = (black_box(&a), black_box(&b), black_box(&mut c));
    for _ in 0..count {
        // SAFETY: each matrix is row-major in a vector of exactly its size, and `c` is borrowed mutably.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                c.as_mut_ptr(),
                1,
                n as isize,
                false,
                a.as_ptr(),
                1,
                k as isize,
                b.as_ptr(),
                1,
                n as isize,
                0.0,
                1.0,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}
