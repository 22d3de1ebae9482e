//! What must agree to the bit: two runs, a sequence alone and packed, a recorded graph, states that were retained.

use crate::case::{AWKWARD, Case, LONG, MANY_HEADS, Precision, run_plan};
use gdnlab::cuda::chunk::gdn2::{Options, Plan, Setup, States};
use gdnlab::inputs::Regime;
use gdnlab::problem::{GateGrads, Inputs, Results, Tensor};
use std::ops::Range;

pub fn cases() -> Vec<Case> {
    let of = |precision| {
        let case = Case::new(precision, (128, 128), AWKWARD, Regime::LongMemory);
        let long = Case { lengths: LONG.to_vec(), ..case.clone() };
        let narrow = Case { dims: (64, 96), heads: MANY_HEADS, lengths: vec![1, 65, 0, 70], ..case.clone() };
        [case, long, narrow]
    };
    Precision::presets().into_iter().flat_map(of).collect()
}

/// The bits of every tensor, so that NaN equals NaN and 0 differs from -0.
fn bits(results: &Results) -> Vec<(&'static str, Vec<u64>)> {
    let tensors = results.named().into_iter();
    tensors.map(|(name, tensor)| (name, tensor.data.iter().map(|x| x.to_bits()).collect())).collect()
}

fn differing(a: &Results, b: &Results) -> Vec<&'static str> {
    bits(a).into_iter().zip(bits(b)).filter(|(a, b)| a != b).map(|((name, _), _)| name).collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn runs_graphs_and_retained_states_agree_to_the_bit() {
    let gpu = crate::gpu();
    for case in cases() {
        let inputs = case.inputs();
        let setup = case.setup(&inputs);
        let mut plan = Plan::new(gpu, setup.clone()).unwrap();
        plan.upload_inputs(&inputs).unwrap();
        let first = run_plan(&mut plan);
        for _ in 0..3 {
            assert_eq!(differing(&first, &run_plan(&mut plan)), [""; 0], "{case}");
        }
        let states = [States::Recomputed, States::Retained];
        for states in states {
            let options = Options { states, ..setup.options };
            let mut plan = Plan::new(gpu, Setup { options, ..setup.clone() }).unwrap();
            plan.upload_inputs(&inputs).unwrap();
            // SAFETY: the plan outlives the graph, whose last replay the download below waits for.
            let graph = gpu.capture(|stream| unsafe {
                plan.forward_on(stream)?;
                plan.backward_after_forward_on(stream)
            });
            let graph = graph.unwrap();
            for _ in 0..2 {
                plan.fill_outputs_with_nan().unwrap();
                graph.replay(gpu.stream()).unwrap();
                assert_eq!(differing(&plan.results(true).unwrap(), &first), [""; 0], "{case} {states:?}");
            }
        }
        let mut plan = Plan::new(gpu, Setup { backward: false, ..setup }).unwrap();
        plan.upload_inputs(&inputs).unwrap();
        plan.fill_outputs_with_nan().unwrap();
        plan.forward().unwrap();
        assert_eq!(plan.results(false).unwrap().outputs, first.outputs, "{case}");
        assert!(plan.backward().unwrap_err().to_string().contains("backward"), "{case}");
        println!("{case} runs, graphs, retained states and the forward alone agree");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_sequence_gives_the_same_bits_alone_and_packed() {
    for case in cases() {
        let inputs = case.inputs();
        let together = case.run(&inputs);
        for (n, tokens) in inputs.sequence_ranges().into_iter().enumerate() {
            let alone = case.run(&sequence(&inputs, n, tokens.clone()));
            let part = part(&together, n, tokens);
            assert_eq!(differing(&alone, &part), [""; 0], "{case}, sequence {n}");
        }
        println!("{case} alone and packed agree");
    }
}

/// Sequence `n`, whose tokens are `tokens`, by itself.
fn sequence(packed: &Inputs, n: usize, tokens: Range<usize>) -> Inputs {
    let mut alone = packed.clone();
    alone.cu_seqlens = None;
    alone.shape.tokens = tokens.len();
    for (name, tensor) in alone.named_mut() {
        let axis = usize::from(!matches!(name, "initial_state" | "dht"));
        cut(tensor, axis, if axis == 0 { n..n + 1 } else { tokens.clone() });
    }
    alone
}

/// The results of sequence `n`.
fn part(together: &Results, n: usize, tokens: Range<usize>) -> Results {
    let mut part = together.clone();
    cut(&mut part.outputs.o, 1, tokens.clone());
    cut(&mut part.outputs.final_state, 0, n..n + 1);
    let grads = part.grads.as_mut().unwrap();
    let GateGrads::Gdn2 { db, dw } = &mut grads.gates else { unreachable!() };
    for tensor in [&mut grads.dq, &mut grads.dk, &mut grads.dv, &mut grads.dg, db, dw] {
        cut(tensor, 1, tokens.clone());
    }
    cut(&mut grads.dh0, 0, n..n + 1);
    part
}

/// Keeps `range` of axis 0, or of axis 1 where axis 0 has one row.
fn cut(tensor: &mut Tensor, axis: usize, range: Range<usize>) {
    let inner: usize = tensor.dims[axis + 1..].iter().product();
    tensor.dims[axis] = range.len();
    tensor.data = tensor.data[range.start * inner..range.end * inner].to_vec();
}
