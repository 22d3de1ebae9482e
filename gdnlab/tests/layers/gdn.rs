//! What stands around GDN: the short convolution, the raw gates, the gated norm.

use crate::device::*;
use gdnlab::cuda::Buffer;
use gdnlab::cuda::layers::{
    Columns, GatedNorm, GatedNormBackward, GatedNormForward, Qkv, RawGates, ShortConv, ShortConvBackward,
    ShortConvForward, ShortConvSizes, Widen,
};
use gdnlab::problem::Tensor;
use gdnlab::reference::{conv, norm};
use half::bf16;

const EPS: f64 = 1e-6;

/// `B, T`, the width of q and k, that of v: less than the taps, one run and a bit, whole runs, more channels than a block
/// takes.
const CONVOLUTIONS: [(usize, usize, usize, usize); 5] =
    [(1, 1, 32, 64), (3, 3, 32, 32), (2, 65, 96, 192), (2, 128, 64, 128), (1, 100, 768, 1536)];

struct Conv {
    sizes: ShortConvSizes,
    /// q | k | v and eight columns more, `[B T, pitch]`.
    x: Tensor,
    taps: Tensor,
    layer: ShortConv,
}

impl Conv {
    fn new((batch, tokens, qk_width, value_width): (usize, usize, usize, usize)) -> Self {
        let sizes = ShortConvSizes { batch, tokens, qk_width, value_width };
        let channels = sizes.channels();
        Self {
            sizes,
            x: gaussian(1, &[batch * tokens, channels + 8]),
            taps: vector(2, &[channels, 4], 0.0, 0.5),
            layer: ShortConv::new(gpu(), sizes).unwrap(),
        }
    }

    fn rows(&self) -> usize {
        self.sizes.batch * self.sizes.tokens
    }

    fn pitch(&self) -> usize {
        self.sizes.channels() + 8
    }

    fn widths(&self) -> [usize; 3] {
        [self.sizes.qk_width, self.sizes.qk_width, self.sizes.value_width]
    }

    fn place(&self, matrix: &Buffer<bf16>) -> Columns<bf16> {
        Columns { matrix: view(matrix), pitch: self.pitch(), first: 0 }
    }

    /// The truth over all channels: y, and the gradients where dy is given, `[B, T, channels]`.
    fn truth(&self, dy: Option<&Tensor>) -> (Tensor, Option<conv::ConvGrads>) {
        let ShortConvSizes { batch, tokens, .. } = self.sizes;
        let x = columns(&self.x, 0, &[batch, tokens, self.sizes.channels()]);
        let call = conv::ShortConv {
            x: &x,
            weight: &self.taps,
            bias: None,
            initial_state: None,
            silu: true,
            cu_seqlens: None,
        };
        (call.forward().unwrap().y, dy.map(|dy| call.backward(dy, None).unwrap()))
    }

    /// Columns of a tensor over all channels that belong to q, k and v.
    fn split(&self, y: &Tensor) -> [Tensor; 3] {
        let matrix = Tensor::new(&[self.rows(), self.sizes.channels()], y.data.clone()).unwrap();
        let [q, k, v] = self.widths();
        [(0, q), (q, k), (q + k, v)].map(|(first, width)| columns(&matrix, first, &[self.rows(), width]))
    }
}

fn qkv(buffers: &[Buffer<bf16>; 3]) -> Qkv {
    Qkv { q: view(&buffers[0]), k: view(&buffers[1]), v: view(&buffers[2]) }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn short_conv_forward() {
    for case in CONVOLUTIONS {
        let conv = Conv::new(case);
        let (x, taps) = (narrow(&conv.x), wide(&conv.taps));
        let y = conv.widths().map(|width| empty(conv.rows() * width));
        let call = ShortConvForward { x: conv.place(&x), taps: view(&taps), y: qkv(&y) };
        // SAFETY: the buffers outlive the downloads, which wait for the kernels; likewise in all tests here.
        unsafe { conv.layer.forward(gpu().stream(), &call).unwrap() };
        let expected = conv.split(&conv.truth(None).0);
        for ((name, y), expected) in ["q", "k", "v"].iter().zip(&y).zip(&expected) {
            check_bf16(&format!("{name} {case:?}"), y, expected);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn short_conv_backward() {
    for case in CONVOLUTIONS {
        let conv = Conv::new(case);
        let ShortConvSizes { batch, tokens, .. } = conv.sizes;
        let channels = conv.sizes.channels();
        let dy = gaussian(3, &[batch, tokens, channels]);
        let grads = conv.truth(Some(&dy)).1.unwrap();
        let (x, taps) = (narrow(&conv.x), wide(&conv.taps));
        let dy = conv.split(&dy).each_ref().map(narrow);
        let scratch = empty(conv.layer.scratch_elements());
        let run = || {
            let (dx, dtaps) = (empty(conv.rows() * conv.pitch()), empty(channels * 4));
            let call = ShortConvBackward {
                x: conv.place(&x),
                taps: view(&taps),
                dy: qkv(&dy),
                dx: conv.place(&dx),
                scratch: view(&scratch),
                dtaps: view(&dtaps),
            };
            // SAFETY: as above.
            unsafe { conv.layer.backward(gpu().stream(), &call).unwrap() };
            (dx, dtaps)
        };
        let (dx, dtaps) = run();
        let found = download(&dx, &[conv.rows(), conv.pitch()]);
        let expected = Tensor::new(&[conv.rows(), channels], grads.dx.data).unwrap();
        check_columns(&format!("dx {case:?}"), &found, 0, &expected);
        let beside = columns(&found, channels, &[conv.rows(), 8]);
        assert!(beside.data.iter().all(|x| x.is_nan()), "the columns beside are left alone");
        check_f32(&format!("dtaps {case:?}"), &dtaps, &grads.dweight);
        let again = run();
        same_bits("dx", &dx, &again.0);
        same_bits("dtaps", &dtaps, &again.1);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn raw_gates_go_there_and_back() {
    for (rows, heads) in [(1, 1), (100, 6), (1000, 32)] {
        let (first, pitch) = (16, 16 + (2 * heads + 3usize).next_multiple_of(8));
        let matrix = gaussian(1, &[rows, pitch]);
        let layer = Widen::new(gpu(), heads).unwrap();
        let on_gpu = narrow(&matrix);
        let (a, b) = (empty(rows * heads), empty(rows * heads));
        let gates = RawGates { a: view(&a), b: view(&b) };
        let place = |matrix: &Buffer<bf16>| Columns { matrix: view(matrix), pitch, first };
        // SAFETY: as above.
        unsafe { layer.forward(gpu().stream(), place(&on_gpu), gates).unwrap() };
        let dims = [rows, heads];
        assert!(download(&a, &dims) == columns(&matrix, first, &dims));
        assert!(download(&b, &dims) == columns(&matrix, first + heads, &dims));

        let back = empty(rows * pitch);
        // SAFETY: as above.
        unsafe { layer.backward(gpu().stream(), gates, place(&back)).unwrap() };
        let back = download(&back, &[rows, pitch]);
        let gates = [rows, 2 * heads];
        assert!(columns(&back, first, &gates) == columns(&matrix, first, &gates));
        let behind = [rows, pitch - first - 2 * heads];
        assert!(columns(&back, first + 2 * heads, &behind) == Tensor::zeros(&behind));
        assert!(columns(&back, 0, &[rows, first]).data.iter().all(|x| x.is_nan()));
    }
}

/// Tokens, heads, and V: every number of lanes, whole and with idle ones, and ragged ends of blocks.
const NORMS: [(usize, usize, usize); 6] =
    [(1, 1, 32), (65, 3, 64), (50, 2, 96), (300, 6, 128), (33, 5, 192), (20, 2, 256)];

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gated_norm_forward_and_backward() {
    for (tokens, heads, dim) in NORMS {
        let dims = [tokens, heads, dim];
        let (width, pitch, first) = (heads * dim, heads * dim + 24, 16);
        let (o, gates, dy) = (gaussian(1, &dims), gaussian(2, &[tokens, pitch]), gaussian(3, &dims));
        let weight = vector(4, &[dim], 1.0, 0.3);
        let z = columns(&gates, first, &dims);
        let reference = norm::GatedRmsNorm { o: &o, z: &z, weight: &weight, eps: EPS };
        let (expected, grads) = (reference.forward().unwrap(), reference.backward(&dy).unwrap());

        let layer = GatedNorm::new(gpu(), heads, dim, EPS as f32).unwrap();
        let (o_gpu, gates_gpu, scale) = (narrow(&o), narrow(&gates), wide(&weight));
        let place = |matrix: &Buffer<bf16>| Columns { matrix: view(matrix), pitch, first };
        let y = empty(tokens * width);
        let call = GatedNormForward { o: view(&o_gpu), z: place(&gates_gpu), weight: view(&scale), y: view(&y) };
        // SAFETY: as above.
        unsafe { layer.forward(gpu().stream(), &call).unwrap() };
        check_bf16(&format!("y {dims:?}"), &y, &expected);

        let scratch = empty(layer.scratch_elements(tokens));
        let run = || {
            // y lies where dy lies, do where o lies.
            let (y, d_o) = (narrow(&dy), narrow(&o));
            let (dz, dweight) = (empty(tokens * pitch), empty(dim));
            let call = GatedNormBackward {
                o: view(&d_o),
                z: place(&gates_gpu),
                weight: view(&scale),
                dy: view(&y),
                y: view(&y),
                d_o: view(&d_o),
                dz: place(&dz),
                scratch: view(&scratch),
                dweight: view(&dweight),
            };
            // SAFETY: as above; the call says that these may be the same memory.
            unsafe { layer.backward(gpu().stream(), &call).unwrap() };
            (y, d_o, dz, dweight)
        };
        let (y, d_o, dz, dweight) = run();
        check_bf16(&format!("y {dims:?} once more"), &y, &expected);
        check_bf16(&format!("do {dims:?}"), &d_o, &grads.d_o);
        let found = download(&dz, &[tokens, pitch]);
        check_columns(&format!("dz {dims:?}"), &found, first, &Tensor::new(&[tokens, width], grads.dz.data).unwrap());
        assert!(columns(&found, 0, &[tokens, first]).data.iter().all(|x| x.is_nan()));
        check_f32(&format!("dweight {dims:?}"), &dweight, &grads.dweight);
        let again = run();
        same_bits("do", &d_o, &again.1);
        same_bits("dweight", &dweight, &again.3);
    }
}
