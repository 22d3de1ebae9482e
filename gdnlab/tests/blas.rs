//! Matrix products on a GPU against the GEMM of the CPU in float64: `cargo test --test blas -- --ignored` where there is
//! a GPU and cuBLASLt.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use gdnlab::bench::roofline::DataSheet;
use gdnlab::cuda::{Batch, Compute, Gpu, Matmul, Operand, Product};
use gdnlab::precision::Format;
use gdnlab_deps::gemm::{self, Parallelism};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::Range;

const FORMATS: [Format; 5] = [Format::F64, Format::F32, Format::Tf32, Format::F16, Format::Bf16];
/// What lies between the rows of C, and must still lie there afterwards.
const UNTOUCHED: f64 = -7.0;

/// Numbers in a format in memory, as bytes and back.
fn to_bytes(format: Format, values: &[f64]) -> Vec<u8> {
    let bytes = |x: &f64| match format {
        Format::F64 => x.to_le_bytes().to_vec(),
        Format::F16 => half::f16::from_f64(*x).to_le_bytes().to_vec(),
        Format::Bf16 => half::bf16::from_f64(*x).to_le_bytes().to_vec(),
        _ => (*x as f32).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

fn from_bytes(format: Format, bytes: &[u8]) -> Vec<f64> {
    let number = |x: &[u8]| match format {
        Format::F64 => f64::from_le_bytes(x.try_into().unwrap()),
        Format::F16 => half::f16::from_le_bytes(x.try_into().unwrap()).to_f64(),
        Format::Bf16 => half::bf16::from_le_bytes(x.try_into().unwrap()).to_f64(),
        _ => f64::from(f32::from_le_bytes(x.try_into().unwrap())),
    };
    bytes.chunks_exact(format.bytes()).map(number).collect()
}

/// A matrix of a batch of `count` inside a buffer: its rows and columns in memory.
struct Place {
    rows: usize,
    columns: usize,
    pitch: usize,
    stride: usize,
    count: usize,
    elements: usize,
}

impl Place {
    fn of(product: &Product) -> [Self; 3] {
        let Product { m, n, k, a, b, c_pitch, batch, .. } = *product;
        let factor = |operand: Operand, rows, columns, stride, elements| {
            let (rows, columns) = if operand.transposed { (columns, rows) } else { (rows, columns) };
            Self { rows, columns, pitch: operand.pitch, stride, count: batch.count, elements }
        };
        let c = Self {
            rows: m,
            columns: n,
            pitch: c_pitch,
            stride: batch.c,
            count: batch.count,
            elements: product.c_elements(),
        };
        [factor(a, m, k, batch.a, product.a_elements()), factor(b, k, n, batch.b, product.b_elements()), c]
    }

    /// The rows of every matrix, as they lie in the buffer.
    fn rows(&self) -> impl Iterator<Item = Range<usize>> {
        let (pitch, stride, columns, rows) = (self.pitch, self.stride, self.columns, self.rows);
        (0..self.count).flat_map(move |which| {
            (0..rows).map(move |row| which * stride + row * pitch..which * stride + row * pitch + columns)
        })
    }

    /// Random numbers of `format` in the rows, `between` in between.
    fn random(&self, format: Format, between: f64, seed: u64) -> Vec<f64> {
        let mut generator = ChaCha8Rng::seed_from_u64(seed);
        let mut values = vec![between; self.elements];
        for row in self.rows() {
            values[row].fill_with(|| format.round(generator.random_range(-1.0..1.0)));
        }
        values
    }
}

/// `alpha op(A) op(B) + beta C` by the GEMM of the CPU, and the same of absolute values, which bounds the error.
fn on_the_cpu(product: &Product, a: &[f64], b: &[f64], c: &[f64], [alpha, beta]: [f64; 2]) -> (Vec<f64>, Vec<f64>) {
    let strides = |operand: &Operand| {
        let pitch = operand.pitch as isize;
        if operand.transposed { (pitch, 1) } else { (1, pitch) }
    };
    let ((a_column, a_row), (b_column, b_row)) = (strides(&product.a), strides(&product.b));
    let compute = |a: &[f64], b: &[f64], c: &[f64], alpha: f64, beta: f64| {
        let mut out = c.to_vec();
        let Product { m, n, k, batch, c_pitch, .. } = *product;
        for which in 0..batch.count {
            let (a, b, out) = (&a[which * batch.a..], &b[which * batch.b..], &mut out[which * batch.c..]);
            // SAFETY: `Place` has laid the matrices out with these sizes, pitches and distances.
            unsafe {
                gemm::gemm(
                    m,
                    n,
                    k,
                    out.as_mut_ptr(),
                    1,
                    c_pitch as isize,
                    beta != 0.0,
                    a.as_ptr(),
                    a_column,
                    a_row,
                    b.as_ptr(),
                    b_column,
                    b_row,
                    beta,
                    alpha,
                    false,
                    false,
                    false,
                    Parallelism::None,
                );
            }
        }
        out
    };
    let absolute = |values: &[f64]| values.iter().map(|x| x.abs()).collect::<Vec<_>>();
    let bound = compute(&absolute(a), &absolute(b), &absolute(c), alpha.abs(), beta.abs());
    (compute(a, b, c, alpha, beta), bound)
}

/// By how much a result may differ, relative to the product of absolute values and to the result.
///
/// A sum of `k` products in a format with unit roundoff `u` is off by `k u` at most. Operands of TF32 are rounded or, by some
/// algorithms, cut off: `2 u` each at the most. The result is rounded once more when it is stored.
fn tolerance(product: &Product) -> (f64, f64) {
    let sum = match product.compute {
        Compute::F64 => Format::F64,
        Compute::F32 | Compute::Tf32 => Format::F32,
    };
    let operands = if product.compute == Compute::Tf32 { 4.0 * Format::Tf32.unit_roundoff() } else { 0.0 };
    ((product.k + 4) as f64 * sum.unit_roundoff() + operands, product.c_format.unit_roundoff())
}

/// Runs `matmul` on random matrices, with NaN between the rows of A and B, and in C where nothing may be read from it, and
/// compares every element; what lies between the rows of C must not change.
fn check(gpu: &Gpu, matmul: &Matmul, [alpha, beta]: [f32; 2], seed: u64) {
    let product = matmul.product();
    let [in_a, in_b, in_c] = Place::of(product);
    let a = in_a.random(product.a.format, f64::NAN, seed);
    let b = in_b.random(product.b.format, f64::NAN, seed + 1);
    let mut c = in_c.random(product.c_format, UNTOUCHED, seed + 2);
    if beta == 0.0 {
        in_c.rows().for_each(|row| c[row].fill(f64::NAN));
    }
    let on_gpu = [(product.a.format, &a), (product.b.format, &b), (product.c_format, &c)]
        .map(|(format, values)| gpu.upload(&to_bytes(format, values)).unwrap());
    let [a_at, b_at, c_at] = [0, 1, 2].map(|which| on_gpu[which].address());
    // SAFETY: the buffers have the product's sizes, and the download waits for it.
    unsafe { matmul.run_on(gpu.stream(), a_at, b_at, c_at, alpha, beta).unwrap() };
    let got = from_bytes(product.c_format, &gpu.download(&on_gpu[2]).unwrap());

    if beta == 0.0 {
        in_c.rows().for_each(|row| c[row].fill(0.0));
    }
    let (want, bound) = on_the_cpu(product, &a, &b, &c, [f64::from(alpha), f64::from(beta)]);
    let (of_bound, of_result) = tolerance(product);
    let mut inside = vec![false; c.len()];
    for at in in_c.rows().flatten() {
        inside[at] = true;
        // What is added to a C of 16 bits may be rounded before, as `Matmul::run_on` says.
        let added = if beta == 0.0 { 0.0 } else { (want[at] - f64::from(beta) * c[at]).abs() };
        let allowed = of_bound * bound[at] + of_result * (want[at].abs() + added);
        let error = (got[at] - want[at]).abs();
        assert!(
            error <= allowed,
            "{product:?}, seed {seed}: element {at} is {} for {}, {error} off",
            got[at],
            want[at]
        );
    }
    let touched = (0..c.len()).find(|&at| !inside[at] && got[at] != UNTOUCHED);
    assert_eq!(touched, None, "{product:?}: an element between the rows of C was written");
}

/// All four ways to have the factors in memory.
fn transposed(product: Product) -> [Product; 4] {
    [product, product.a_transposed(), product.b_transposed(), product.a_transposed().b_transposed()]
}

/// Every pitch `more` elements longer than the row.
fn with_pitch(product: Product, more: usize) -> Product {
    Product {
        a: Operand { pitch: product.a.pitch + more, ..product.a },
        b: Operand { pitch: product.b.pitch + more, ..product.b },
        c_pitch: product.c_pitch + more,
        ..product
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_format_and_transpose_agrees_with_the_cpu() {
    let gpu = Gpu::shared().unwrap();
    for format in FORMATS {
        for (m, n, k) in [(64, 96, 136), (1, 8, 512), (200, 24, 40), (384, 640, 1000)] {
            for product in transposed(Product::new(m, n, k, format)) {
                check(gpu, &Matmul::new(gpu, &product).unwrap(), [1.0, 0.0], 1);
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn pitches_leave_alone_what_lies_between_the_rows() {
    let gpu = Gpu::shared().unwrap();
    for format in FORMATS {
        for more in [8, 24] {
            for product in transposed(Product::new(72, 48, 80, format)) {
                check(gpu, &Matmul::new(gpu, &with_pitch(product, more)).unwrap(), [1.0, 0.0], 2);
            }
        }
    }
}

/// Sizes and pitches that are no multiple of anything: no fast kernel, but a right one.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn odd_sizes_and_pitches_are_right_too() {
    let gpu = Gpu::shared().unwrap();
    for format in FORMATS {
        for product in transposed(Product::new(37, 53, 71, format)) {
            for more in [0, 1] {
                check(gpu, &Matmul::new(gpu, &with_pitch(product, more)).unwrap(), [1.0, 0.0], 3);
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn factors_scale_and_accumulate() {
    let gpu = Gpu::shared().unwrap();
    let into_f32 = [Format::F16, Format::Bf16].map(|format| Product::new(96, 64, 256, format).into_format(Format::F32));
    let same = FORMATS.map(|format| Product::new(96, 64, 256, format));
    for product in into_f32.into_iter().chain(same).flat_map(transposed) {
        let matmul = Matmul::new(gpu, &product).unwrap();
        for factors in [[1.0, 1.0], [0.5, 0.0], [-0.25, 2.0]] {
            check(gpu, &matmul, factors, 4);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_batch_multiplies_each_of_its_matrices() {
    let gpu = Gpu::shared().unwrap();
    for format in FORMATS {
        let one = with_pitch(Product::new(32, 64, 48, format), 16);
        for product in transposed(one) {
            let [a, b, c] = [product.a_elements(), product.b_elements(), product.c_elements()];
            let apart = |elements: usize| elements.next_multiple_of(16) + 16;
            for b_apart in [apart(b), 0] {
                let batch = Batch { count: 5, a: apart(a), b: b_apart, c: apart(c) };
                check(gpu, &Matmul::new(gpu, &Product { batch, ..product }).unwrap(), [1.0, 0.0], 5);
            }
        }
    }
    // Scores of attention: heads of 64 side by side in the rows of q and k [T, H, 64], scores [H, T, T].
    let (tokens, heads) = (128, 6);
    let q = Operand { format: Format::Bf16, transposed: false, pitch: heads * 64 };
    let scores = Product {
        a: q,
        b: Operand { transposed: true, ..q },
        batch: Batch { count: heads, a: 64, b: 64, c: tokens * tokens },
        ..Product::new(tokens, tokens, 64, Format::Bf16).into_format(Format::F32)
    };
    check_interleaved(gpu, &scores);
}

/// As [`check`] for heads that lie side by side in a row: the rows of one matrix lie between those of another.
fn check_interleaved(gpu: &Gpu, product: &Product) {
    let mut generator = ChaCha8Rng::seed_from_u64(6);
    let mut random =
        |count| -> Vec<f64> { (0..count).map(|_| product.a.format.round(generator.random_range(-1.0..1.0))).collect() };
    let (a, b) = (random(product.a_elements()), random(product.b_elements()));
    let c = vec![0.0; product.c_elements()];
    let [a_on_gpu, b_on_gpu] = [&a, &b].map(|values| gpu.upload(&to_bytes(product.a.format, values)).unwrap());
    let c_on_gpu = gpu.alloc::<f32>(c.len()).unwrap();
    let matmul = Matmul::new(gpu, product).unwrap();
    // SAFETY: the buffers have the product's sizes, and the download waits for it.
    unsafe {
        matmul.run_on(gpu.stream(), a_on_gpu.address(), b_on_gpu.address(), c_on_gpu.address(), 0.125, 0.0).unwrap();
    }
    let got = gpu.download(&c_on_gpu).unwrap();
    let (want, bound) = on_the_cpu(product, &a, &b, &c, [0.125, 0.0]);
    let (of_bound, of_result) = tolerance(product);
    for at in 0..c.len() {
        let allowed = of_bound * bound[at] + of_result * want[at].abs();
        assert!((f64::from(got[at]) - want[at]).abs() <= allowed, "element {at}: {} for {}", got[at], want[at]);
    }
}

/// Operands whose sums overflow or vanish unless they are formed in binary32.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn sums_of_short_formats_are_formed_in_binary32() {
    let gpu = Gpu::shared().unwrap();
    for format in [Format::F16, Format::Bf16] {
        for k in [512, 65_536] {
            let product = Product::new(16, 16, k, format).b_transposed().into_format(Format::F32);
            let (ones, c) = (to_bytes(format, &vec![1.0; 16 * k]), gpu.alloc::<f32>(256).unwrap());
            let (a, b) = (gpu.upload(&ones).unwrap(), gpu.upload(&ones).unwrap());
            for matmul in [Matmul::new(gpu, &product), Matmul::tuned(gpu, &product)] {
                // SAFETY: the buffers have the product's sizes, and the download waits for it.
                unsafe {
                    matmul.unwrap().run_on(gpu.stream(), a.address(), b.address(), c.address(), 1.0, 0.0).unwrap()
                };
                assert_eq!(gpu.download(&c).unwrap(), vec![k as f32; 256], "{format}");
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_graph_repeats_products_to_the_bit_on_any_stream() {
    let gpu = Gpu::shared().unwrap();
    // So long a sum is split, which takes workspace.
    let product = Product::new(128, 128, 32_768, Format::Bf16).a_transposed().into_format(Format::F32);
    let matmul = Matmul::tuned(gpu, &product).unwrap();
    println!("{matmul:?}, workspace {} bytes", matmul.workspace_bytes());
    let [in_a, in_b, _] = Place::of(&product);
    let [a, b] =
        [in_a, in_b].map(|place| gpu.upload(&to_bytes(Format::Bf16, &place.random(Format::Bf16, 0.0, 7))).unwrap());
    let c = gpu.upload(&vec![0f32; product.c_elements()]).unwrap();
    // SAFETY: the buffers have the product's sizes, and the downloads wait for it.
    let run = |stream: &gdnlab::cuda::Stream, beta| unsafe {
        matmul.run_on(stream, a.address(), b.address(), c.address(), 1.0, beta)
    };
    run(gpu.stream(), 0.0).unwrap();
    let once = gpu.download(&c).unwrap();
    let graph = gpu.capture(|stream| run(stream, 0.0)).unwrap();
    let other = gpu.new_stream().unwrap();
    for stream in [gpu.stream(), &other, gpu.stream()] {
        gpu.fill_bytes(&mut gpu.alloc::<u8>(1 << 20).unwrap(), 0xff).unwrap();
        gpu.synchronize().unwrap();
        graph.replay(stream).unwrap();
        stream.synchronize().unwrap();
        assert!(gpu.download(&c).unwrap() == once);
    }
    let graph = gpu.capture(|stream| (0..3).try_for_each(|_| run(stream, 1.0))).unwrap();
    graph.replay(gpu.stream()).unwrap();
    let four_times = gpu.download(&c).unwrap();
    for (four, one) in four_times.iter().zip(&once) {
        assert!((four - 4.0 * one).abs() <= 1e-3 * one.abs().max(1.0), "{four} for four times {one}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_proposed_algorithm_is_right_and_repeatable_by_its_rank() {
    let gpu = Gpu::shared().unwrap();
    for format in FORMATS {
        let product = Product::new(256, 320, 512, format).b_transposed();
        let tuned = Matmul::tuned(gpu, &product).unwrap();
        println!("{tuned:?}");
        check(gpu, &tuned, [1.0, 0.0], 8);
        for rank in 0..tuned.candidates() {
            check(gpu, &Matmul::ranked(gpu, &product, rank).unwrap(), [1.0, 0.0], 8);
        }
        let error = Matmul::ranked(gpu, &product, tuned.candidates()).unwrap_err().to_string();
        assert!(error.contains("expected a number below"), "{error}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_cannot_be_multiplied_is_refused_in_words() {
    let gpu = Gpu::shared().unwrap();
    let product = Product::new(64, 64, 64, Format::Bf16);
    let matmul = Matmul::new(gpu, &product).unwrap();
    let x = gpu.upload(&vec![0u8; 3 * 64 * 64 * 2]).unwrap();
    // SAFETY: nothing is started.
    let error = unsafe { matmul.run_on(gpu.stream(), x.address() + 2, x.address(), x.address(), 1.0, 0.0) };
    let error = error.unwrap_err().to_string();
    assert!(error.contains("expected a multiple of 16"), "{error}");
    let huge = Product::new(1 << 19, 1 << 19, 64, Format::Bf16);
    let error = Matmul::tuned(gpu, &huge).unwrap_err().to_string();
    assert!(error.contains("GB of the GPU's memory are free"), "{error}");
}

/// The tuned algorithm is as fast as the first one that the heuristics propose, and reaches half the data sheet.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_tuned_algorithm_is_fast() {
    let gpu = Gpu::shared().unwrap();
    let product = Product::new(8192, 8192, 8192, Format::Bf16);
    let x = [1, 2].map(|seed| {
        let place = &Place::of(&Product::new(1024, 8192, 8, Format::Bf16))[2];
        gpu.upload(&to_bytes(Format::Bf16, &place.random(Format::Bf16, 0.0, seed)).repeat(8)).unwrap()
    });
    let c = gpu.alloc::<half::bf16>(product.c_elements()).unwrap();
    let mut rates = Vec::new();
    for matmul in [Matmul::new(gpu, &product).unwrap(), Matmul::tuned(gpu, &product).unwrap()] {
        // SAFETY: the buffers have the product's sizes, and the stream is waited for.
        let run = || unsafe {
            matmul.run_on(gpu.stream(), x[0].address(), x[1].address(), c.address(), 1.0, 0.0).unwrap();
        };
        (0..20).for_each(|_| run());
        let (start, end) = (gpu.event().unwrap(), gpu.event().unwrap());
        start.record(gpu.stream()).unwrap();
        (0..50).for_each(|_| run());
        end.record(gpu.stream()).unwrap();
        gpu.synchronize().unwrap();
        let ms = f64::from(start.elapsed_ms(&end).unwrap()) / 50.0;
        let tflop_s = product.flop() / ms / 1e9;
        println!("{matmul:?}: {ms:.3} ms, {tflop_s:.0} TFLOP/s, cuBLASLt {}", matmul.library_version());
        rates.push(tflop_s);
    }
    assert!(rates[1] > 0.95 * rates[0], "{rates:?}");
    if let Some(sheet) = DataSheet::of(&gpu.name) {
        assert!((0.5..1.0).contains(&(rates[1] / sheet.bf16_tflop_s)), "{rates:?}");
    }
}
