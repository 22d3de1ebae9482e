//! GDN and KDA as special cases: gates that are the same in all channels.

use crate::case::{Case, Precision, SHORT, gates};
use crate::expect_none;
use gdnlab::compare::{TensorClass, compare, tolerance};
use gdnlab::cuda::chunk::Chunk;
use gdnlab::inputs::{Regime, generate};
use gdnlab::kernel::Kernel;
use gdnlab::problem::{GateGrads, Gates, Inputs, Op, Results, Tensor};
use gdnlab::reference::Reference;

pub fn cases() -> Vec<Case> {
    let of = |precision| {
        [Regime::Gaussian, Regime::LongMemory, Regime::Correlated]
            .map(|regime| Case::new(precision, (128, 128), SHORT, regime))
    };
    Precision::presets().into_iter().flat_map(of).collect()
}

/// KDA: b and w are one number for each token and head.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn kda_is_within_tolerance() {
    let mut complaints = Vec::new();
    for case in cases() {
        let mut inputs = case.inputs();
        let (key_dim, value_dim) = case.dims;
        let (_, b, w) = gates(&mut inputs);
        for (b, w) in b.data.chunks_exact_mut(key_dim).zip(w.data.chunks_exact_mut(value_dim)) {
            w.fill(b[0]);
            b.fill(b[0]);
        }
        complaints.extend(case.check_inputs(&inputs, "KDA"));
    }
    expect_none(&complaints);
}

/// Each number of a gate as often as there are channels.
fn spread(gate: &Tensor, channels: usize) -> Tensor {
    let dims = [&gate.dims[..], &[channels]].concat();
    Tensor::new(&dims, gate.data.iter().flat_map(|&x| std::iter::repeat_n(x, channels)).collect()).unwrap()
}

/// GDN-2 with the gates of GDN.
fn as_gdn2(inputs: &Inputs) -> Inputs {
    let Gates::Gdn { g, beta } = &inputs.gates else { unreachable!() };
    let (key_dim, value_dim) = (inputs.shape.key_dim, inputs.shape.value_dim);
    let gates = Gates::Gdn2 { g: spread(g, key_dim), b: spread(beta, key_dim), w: spread(beta, value_dim) };
    Inputs { gates, ..inputs.clone() }
}

/// Sums over channels.
fn folded(gate: &Tensor) -> Tensor {
    let (channels, dims) = gate.dims.split_last().unwrap();
    Tensor::new(dims, gate.data.chunks_exact(*channels).map(|row| row.iter().sum()).collect()).unwrap()
}

/// The gradients of GDN's gates from those of GDN-2's.
fn as_gdn(mut results: Results) -> Results {
    let grads = results.grads.as_mut().unwrap();
    let GateGrads::Gdn2 { db, dw } = &grads.gates else { unreachable!() };
    let mut dbeta = folded(db);
    dbeta.data.iter_mut().zip(folded(dw).data).for_each(|(sum, x)| *sum += x);
    grads.dg = folded(&grads.dg);
    grads.gates = GateGrads::Gdn { dbeta };
    results
}

/// GDN: no further from the kernels of GDN than both may be from the recurrence, and within the tolerance of the recurrence.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn gdn_agrees_with_its_own_kernels() {
    let mut complaints = Vec::new();
    for case in cases() {
        let inputs = generate(Op::Gdn, &case.shape(), case.regime, 1).unwrap().with_initial_state(2);
        let inputs = inputs.packed(&case.cu_seqlens(), 3).unwrap().rounded_to(case.precision.input);
        let truth = Reference.backward(&inputs).unwrap();
        let general = as_gdn(case.run(&as_gdn2(&inputs)));
        complaints.extend(case.judge(&inputs, &general, &truth, &format!("GDN {}", case.regime)));
        if case.regime == Regime::Correlated {
            continue; // hard for everyone
        }
        let kernel = Chunk::presets()
            .into_iter()
            .find(|kernel| (kernel.operands(), kernel.input_format()) == (case.precision.mode, case.precision.input));
        let own = kernel.unwrap().backward(&inputs).unwrap();
        for ((name, general), (_, own)) in general.named().into_iter().zip(own.named()) {
            let limit = 2.0 * tolerance(case.precision.tolerance, TensorClass::of(name).unwrap()).unwrap().rel_rms();
            let error = compare(name, general, own).unwrap();
            if error.nonfinite > 0 || error.rel_rms > limit {
                complaints.push(format!(
                    "{case} {}: {name} is {:.1e} from that of GDN, limit {limit:.1e}",
                    case.regime, error.rel_rms
                ));
            }
        }
    }
    expect_none(&complaints);
}
