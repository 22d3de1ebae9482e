//! What works row by row: RMSNorm, SwiGLU, RoPE.

use crate::device::*;
use gdnlab::cuda::layers::{Addition, Columns, RmsNorm, RmsNormBackward, RmsNormForward, Rope, SwiGlu, SwiGluBackward};
use gdnlab::problem::Tensor;
use gdnlab::reference::{norm, rope, swiglu};
use half::bf16;

const EPS: f64 = 1e-6;
/// Rows and widths: a part of a block, one warp for a row, two, four, and eight; a ragged end of the backward's blocks.
const SIZES: [(usize, usize); 6] = [(1, 32), (65, 128), (200, 768), (67, 1024), (33, 2048), (9, 6144)];

fn added(x: &Tensor, y: &Tensor) -> Tensor {
    let mut sum = x.clone();
    sum.data.iter_mut().zip(&y.data).for_each(|(x, y)| *x = f64::from(bf16::from_f64(*x + y)));
    sum
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rms_norm_forward() {
    for (rows, dim) in SIZES {
        let dims = [rows, dim];
        let (stream, branch, weight) = (gaussian(1, &dims), gaussian(2, &dims), vector(3, &[dim], 1.0, 0.3));
        let layer = RmsNorm::new(gpu(), dim, EPS as f32).unwrap();
        let (on_gpu, beside, scale) = (narrow(&stream), narrow(&branch), wide(&weight));
        let (x, y) = (empty(rows * dim), empty(rows * dim));
        let call = RmsNormForward {
            stream: view(&on_gpu),
            addition: Some(Addition { branch: view(&beside), x: view(&x) }),
            weight: view(&scale),
            y: view(&y),
        };
        // SAFETY: the buffers outlive the downloads, which wait for the kernels; likewise in all tests here.
        unsafe { layer.forward(gpu().stream(), &call).unwrap() };
        let sum = added(&stream, &branch);
        assert!(download(&x, &dims) == sum, "{dims:?}: the sum is the rounded one");
        let expected = norm::RmsNorm { x: &sum, weight: &weight, eps: EPS }.forward().unwrap();
        check_bf16(&format!("y {dims:?}"), &y, &expected);

        // SAFETY: as above.
        unsafe { layer.forward(gpu().stream(), &RmsNormForward { addition: None, ..call }).unwrap() };
        let expected = norm::RmsNorm { x: &stream, weight: &weight, eps: EPS }.forward().unwrap();
        check_bf16(&format!("y {dims:?}, nothing added"), &y, &expected);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rms_norm_backward() {
    for (rows, dim) in SIZES {
        let dims = [rows, dim];
        let (x, dy, d_stream) = (gaussian(1, &dims), gaussian(2, &dims), gaussian(3, &dims));
        let weight = vector(4, &[dim], 1.0, 0.3);
        let layer = RmsNorm::new(gpu(), dim, EPS as f32).unwrap();
        let (x_gpu, dy_gpu, scale) = (narrow(&x), narrow(&dy), wide(&weight));
        let reference = norm::RmsNorm { x: &x, weight: &weight, eps: EPS };
        let grads = reference.backward(&dy).unwrap();
        let scratch = empty(layer.scratch_elements(rows));
        let run = |d_stream: Option<&Tensor>| {
            // dx lies where d_stream lies.
            let (dx, y, dweight) = (d_stream.map_or_else(|| empty(rows * dim), narrow), empty(rows * dim), empty(dim));
            let call = RmsNormBackward {
                x: view(&x_gpu),
                dy: view(&dy_gpu),
                d_stream: d_stream.map(|_| view(&dx)),
                weight: view(&scale),
                dx: view(&dx),
                y: Some(view(&y)),
                scratch: view(&scratch),
                dweight: view(&dweight),
            };
            // SAFETY: as above.
            unsafe { layer.backward(gpu().stream(), &call).unwrap() };
            (dx, y, dweight)
        };
        let (dx, y, dweight) = run(Some(&d_stream));
        let mut expected = grads.dx.clone();
        expected.data.iter_mut().zip(&d_stream.data).for_each(|(dx, d)| *dx += d);
        check_bf16(&format!("dx {dims:?}"), &dx, &expected);
        check_bf16(&format!("y {dims:?}"), &y, &reference.forward().unwrap());
        check_f32(&format!("dweight {dims:?}"), &dweight, &grads.dweight);
        let again = run(Some(&d_stream));
        same_bits("dx", &dx, &again.0);
        same_bits("dweight", &dweight, &again.2);
        check_bf16(&format!("dx {dims:?} alone"), &run(None).0, &grads.dx);
    }
}

/// gate | up, row by row.
fn beside(gate: &Tensor, up: &Tensor) -> Tensor {
    let [rows, hidden] = gate.dims[..] else { panic!() };
    let rows_of = |tensor: &Tensor, row: usize| tensor.data[row * hidden..(row + 1) * hidden].to_vec();
    let data = (0..rows).flat_map(|row| [rows_of(gate, row), rows_of(up, row)].concat()).collect();
    Tensor::new(&[rows, 2 * hidden], data).unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn swiglu_forward_and_backward() {
    for (rows, hidden) in [(1, 8), (65, 384), (100, 2048)] {
        let dims = [rows, hidden];
        let (gate, up, dh) = (gaussian(1, &dims), gaussian(2, &dims), gaussian(3, &dims));
        let reference = swiglu::SwiGlu { gate: &gate, up: &up };
        let (expected, grads) = (reference.forward().unwrap(), reference.backward(&dh).unwrap());
        let layer = SwiGlu::new(gpu(), hidden).unwrap();
        let (gate_up, h) = (narrow(&beside(&gate, &up)), empty(rows * hidden));
        // SAFETY: as above.
        unsafe { layer.forward(gpu().stream(), view(&gate_up), view(&h)).unwrap() };
        check_bf16(&format!("h {dims:?}"), &h, &expected);

        // In place: h where dh lies, the gradients where gate and up lie.
        let h = narrow(&dh);
        let call = SwiGluBackward { gate_up: view(&gate_up), dh: view(&h), h: view(&h), d_gate_up: view(&gate_up) };
        // SAFETY: as above; the call says that these may be the same memory.
        unsafe { layer.backward(gpu().stream(), &call).unwrap() };
        check_bf16(&format!("h {dims:?} once more"), &h, &expected);
        let found = download(&gate_up, &[rows, 2 * hidden]);
        check_columns(&format!("dgate {dims:?}"), &found, 0, &grads.dgate);
        check_columns(&format!("dup {dims:?}"), &found, hidden, &grads.dup);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn extreme_gates_of_swiglu_stay_finite() {
    let values =
        |values: [f64; 8]| Tensor { dims: vec![1, 8], data: values.map(|x| f64::from(bf16::from_f64(x))).into() };
    let gate = values([-1e30, -1e4, -90.0, 0.0, 1e-30, 90.0, 1e4, 1e30]);
    let (up, dh) = (values([2.0; 8]), values([-1.0; 8]));
    let layer = SwiGlu::new(gpu(), 8).unwrap();
    let (gate_up, h) = (narrow(&beside(&gate, &up)), narrow(&dh));
    let call = SwiGluBackward { gate_up: view(&gate_up), dh: view(&h), h: view(&h), d_gate_up: view(&gate_up) };
    // SAFETY: as above; the call says that these may be the same memory.
    unsafe { layer.backward(gpu().stream(), &call).unwrap() };
    let reference = swiglu::SwiGlu { gate: &gate, up: &up };
    let grads = reference.backward(&dh).unwrap();
    let found = download(&gate_up, &[1, 16]);
    for (name, found, expected) in [
        ("h", download(&h, &[8]).data, reference.forward().unwrap().data),
        ("dgate", found.data[..8].to_vec(), grads.dgate.data),
        ("dup", found.data[8..].to_vec(), grads.dup.data),
    ] {
        for (x, r) in found.into_iter().zip(expected) {
            // Below 1e-37 the fast exponential gives 0.
            assert!((x - r).abs() <= 5e-3 * r.abs() + 1e-35, "{name}: {x:e} for {r:e}");
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rope_turns_q_and_k_and_nothing_else() {
    for (batch, tokens, heads, dim) in [(1, 1, 1, 32), (2, 63, 2, 64), (3, 100, 3, 128)] {
        let (rows, width) = (batch * tokens, heads * dim);
        let qkv = gaussian(1, &[rows, 3 * width]);
        let layer = Rope::new(gpu(), tokens, dim, rope::DEFAULT_BASE).unwrap();
        let on_gpu = narrow(&qkv);
        let place = Columns { matrix: view(&on_gpu), pitch: 3 * width, first: 0 };
        let reference = rope::Rope::default();
        // SAFETY: as above.
        unsafe { layer.forward(gpu().stream(), place, 2 * heads).unwrap() };
        let turned = download(&on_gpu, &[rows, 3 * width]);
        let of = |matrix: &Tensor, part: usize| columns(matrix, part * width, &[batch, tokens, heads, dim]);
        for (name, part) in [("q", 0), ("k", 1)] {
            let expected = reference.forward(&of(&qkv, part)).unwrap();
            check_columns(name, &turned, part * width, &Tensor::new(&[rows, width], expected.data).unwrap());
        }
        assert!(of(&turned, 2) == of(&qkv, 2), "v is left alone");

        // SAFETY: as above.
        unsafe { layer.backward(gpu().stream(), place, 2 * heads).unwrap() };
        let back = download(&on_gpu, &[rows, 3 * width]);
        for (name, part) in [("dq", 0), ("dk", 1)] {
            let expected = reference.backward(&of(&turned, part)).unwrap();
            check_columns(name, &back, part * width, &Tensor::new(&[rows, width], expected.data).unwrap());
        }
        assert!(of(&back, 2) == of(&qkv, 2), "dv is left alone");
    }
}
