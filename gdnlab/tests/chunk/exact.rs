//! What must agree to the bit: two runs, a sequence alone and packed, both layouts of states, a recorded graph.

use crate::case::{AWKWARD, Case, LAYOUTS, LONG, Precision, run, run_forward, run_plan};
use gdnlab::cuda::chunk::{Options, Plan, Setup};
use gdnlab::inputs::Regime;
use gdnlab::problem::{Inputs, Results};
use std::ops::Range;

pub fn cases() -> Vec<Case> {
    let lonely = |case: &Case| Case { lengths: vec![1000], ..case.clone() };
    spread().into_iter().flat_map(|case| [crowded(&case), lonely(&case), case]).collect()
}

fn spread() -> Vec<Case> {
    let of = |precision| {
        let case = |dims| Case::new(precision, dims, AWKWARD, Regime::LongMemory);
        let long = Case { lengths: LONG.to_vec(), ..case((96, 64)) };
        [case((128, 128)), case((192, 64)), case((64, 96)).with_many_heads(), long]
    };
    Precision::presets().into_iter().flat_map(of).collect()
}

/// Sequences enough for blocks of many warps on every GPU.
fn crowded(case: &Case) -> Case {
    Case { lengths: [&[3, 64, 97, 0, 33][..], &[40; 80]].concat(), ..case.clone() }
}

/// The bits of every tensor, so that NaN equals NaN and 0 differs from -0.
fn bits(results: &Results) -> Vec<(&'static str, Vec<u64>)> {
    let tensors = results.named().into_iter();
    tensors.map(|(name, tensor)| (name, tensor.data.iter().map(|x| x.to_bits()).collect())).collect()
}

pub fn differing(a: &Results, b: &Results) -> Vec<&'static str> {
    bits(a).into_iter().zip(bits(b)).filter(|(a, b)| a != b).map(|((name, _), _)| name).collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn two_runs_agree_to_the_bit() {
    for case in spread() {
        let inputs = case.inputs();
        let mut plan = Plan::new(crate::gpu(), case.setup(&inputs)).unwrap();
        plan.upload_inputs(&inputs).unwrap();
        let first = run_plan(&mut plan);
        for _ in 0..3 {
            assert_eq!(differing(&first, &run_plan(&mut plan)), [""; 0], "{case}");
        }
        println!("{case} two runs agree");
    }
}

/// A plan for the forward alone, and a graph of both passes, give what a plan for both gives.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_forward_alone_and_a_recorded_graph_agree_to_the_bit() {
    let gpu = crate::gpu();
    for case in spread() {
        let inputs = case.inputs();
        let both = case.run(&inputs);
        let setup = case.setup(&inputs);
        let mut plan = Plan::new(gpu, Setup { backward: false, ..setup.clone() }).unwrap();
        plan.upload_inputs(&inputs).unwrap();
        plan.fill_outputs_with_nan().unwrap();
        plan.forward().unwrap();
        let alone = plan.results(false).unwrap();
        assert_eq!(alone.outputs, both.outputs, "{case}");
        assert!(plan.backward().unwrap_err().to_string().contains("backward"), "{case}");
        assert!(plan.download::<f32>("dg").unwrap_err().to_string().contains("no tensor 'dg'"), "{case}");

        let mut plan = Plan::new(gpu, setup).unwrap();
        plan.upload_inputs(&inputs).unwrap();
        // SAFETY: the plan outlives the graph, whose last replay the download below waits for.
        let graph = gpu.capture(|stream| unsafe {
            plan.forward_on(stream)?;
            plan.backward_on(stream)
        });
        let graph = graph.unwrap();
        plan.fill_outputs_with_nan().unwrap();
        graph.replay(gpu.stream()).unwrap();
        assert_eq!(differing(&plan.results(true).unwrap(), &both), [""; 0], "{case}");
        plan.fill_outputs_with_nan().unwrap();
        plan.forward().unwrap();
        // SAFETY: this is the GPU's own stream, in whose order everything else of the plan happens.
        unsafe { plan.backward_after_forward_on(gpu.stream()).unwrap() };
        assert_eq!(differing(&plan.results(true).unwrap(), &both), [""; 0], "{case}");
        println!("{case} forward alone, graph, and backward after forward agree");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn layouts_of_states_agree_to_the_bit() {
    for case in spread() {
        let inputs = case.inputs();
        let with = |layout| {
            let setup = case.setup(&inputs);
            run(Setup { options: Options { state_layout: layout, ..setup.options }, ..setup }, &inputs)
        };
        let [a, b] = LAYOUTS.map(with);
        assert_eq!(differing(&a, &b), [""; 0], "{case}");
        println!("{case} layouts agree");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_sequence_gives_the_same_bits_alone_and_packed() {
    for case in cases().into_iter().filter(|case| case.lengths.len() > 1) {
        let inputs = case.inputs();
        let together = case.run(&inputs);
        for (n, tokens) in inputs.sequence_ranges().into_iter().enumerate().take(AWKWARD.len()) {
            let alone = case.run(&sequence(&inputs, n, tokens.clone()));
            let part = part(&together, n, tokens);
            assert_eq!(differing(&alone, &part), [""; 0], "{case}, sequence {n}");
        }
        println!("{case} alone and packed agree");
    }
}

/// On Hopper a few long sequences of many heads are swept while later chunks are still being prepared, and more sequences are not.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_sweep_in_parts_gives_the_bits_of_one_launch() {
    let forward = |case: &Case, inputs: &Inputs| {
        let Precision { mode, input, .. } = case.precision;
        run_forward(Setup::of_inputs(inputs, mode, input, false).unwrap(), inputs)
    };
    for (precision, dims) in Precision::presets().into_iter().zip([(64, 64), (64, 64), (128, 128)]) {
        for regime in [Regime::LongMemory, Regime::FastDecay] {
            let lengths = [&[if dims == (64, 64) { 400 } else { 100 } * 64 + 5, 70 * 64][..], &[40; 7]].concat();
            let case = Case::new(precision, dims, &lengths, regime).with_many_heads();
            let inputs = Inputs { d_o: None, d_final_state: None, ..case.inputs() };
            let together = forward(&case, &inputs);
            for (n, tokens) in inputs.sequence_ranges().into_iter().enumerate().take(2) {
                let alone = forward(&case, &sequence(&inputs, n, tokens.clone()));
                assert_eq!(differing(&alone, &part(&together, n, tokens)), [""; 0], "{case}, sequence {n}");
            }
            println!("{case} in parts and at once agree");
        }
    }
}

/// Sequence `n`, whose tokens are `tokens`, by itself.
pub fn sequence(packed: &Inputs, n: usize, tokens: Range<usize>) -> Inputs {
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
pub fn part(together: &Results, n: usize, tokens: Range<usize>) -> Results {
    let mut part = together.clone();
    cut(&mut part.outputs.o, 1, tokens.clone());
    cut(&mut part.outputs.final_state, 0, n..n + 1);
    let Some(grads) = part.grads.as_mut() else { return part };
    let gdnlab::problem::GateGrads::Gdn { dbeta } = &mut grads.gates else { unreachable!() };
    for tensor in [&mut grads.dq, &mut grads.dk, &mut grads.dv, &mut grads.dg, dbeta] {
        cut(tensor, 1, tokens.clone());
    }
    cut(&mut grads.dh0, 0, n..n + 1);
    part
}

/// Keeps `range` of axis 0, or of axis 1 where axis 0 has one row.
fn cut(tensor: &mut gdnlab::problem::Tensor, axis: usize, range: Range<usize>) {
    let inner: usize = tensor.dims[axis + 1..].iter().product();
    tensor.dims[axis] = range.len();
    tensor.data = tensor.data[range.start * inner..range.end * inner].to_vec();
}
