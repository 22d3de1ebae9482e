use super::*;
use crate::compare::{Comparison, TensorClass, compare_results, tolerance};
use crate::inputs::{Regime, generate};
use crate::kernel::kernel;
use crate::reference::Reference;
use std::collections::HashSet;

fn kernels() -> [Recurrent; 2] {
    [Recurrent::fp64(), Recurrent::fp32()]
}

#[test]
fn both_precisions_are_listed_and_say_what_they_are() {
    for recurrent in kernels() {
        let listed = kernel(recurrent.name()).unwrap();
        assert!(listed.on_gpu() && listed.needs().contains("GPU"));
        assert_eq!((listed.mode(), listed.input_format()), (recurrent.mode(), recurrent.input_format()));
        assert!(TensorClass::ALL.into_iter().all(|class| tolerance(listed.mode(), class).is_ok()));
    }
}

#[test]
fn bad_inputs_are_refused_before_a_gpu_is_asked_for() {
    let inputs = generate(Op::Gdn, &Shape::new(3, 1, 2, 2), Regime::Gaussian, 1).unwrap();
    for recurrent in kernels() {
        let error = recurrent.backward(&Inputs { d_o: None, ..inputs.clone() }).unwrap_err();
        assert!(matches!(&error, Error::Input(message) if message.contains("'do'")), "{error}");
        let error = recurrent.forward(&Inputs { scale: f64::NAN, ..inputs.clone() }).unwrap_err();
        assert!(matches!(&error, Error::Input(message) if message.contains("scale")), "{error}");
    }
}

#[test]
fn where_there_is_no_gpu_a_kernel_says_so() {
    let inputs = generate(Op::Gdn, &Shape::new(3, 1, 2, 2), Regime::Gaussian, 1).unwrap();
    let ran = Recurrent::fp32().forward(&inputs);
    match Gpu::shared() {
        Ok(_) => assert!(ran.is_ok(), "{ran:?}"),
        Err(error) => assert_eq!(ran.unwrap_err().to_string(), error.to_string()),
    }
}

#[test]
fn each_specialisation_is_on_the_list_once() {
    let builds: Vec<String> = builds().unwrap().iter().map(Build::to_string).collect();
    let distinct: HashSet<&String> = builds.iter().collect();
    assert_eq!((builds.len(), distinct.len()), (32, 32));
    for (op, key_dim) in [(Op::Gdn, 1), (Op::Gdn2, 100), (Op::Gdn, 256), (Op::Gdn2, 225)] {
        let layout = Layout::new(&Shape::new(9, 2, key_dim, 40), op, size_of::<f64>());
        assert!(distinct.contains(&build::<f64>(op, &layout).unwrap().to_string()), "{op} K={key_dim}");
    }
}

/// A sequence of each awkward length, grouped heads, an initial state.
fn awkward(op: Op, key_dim: usize, value_dim: usize, regime: Regime) -> Inputs {
    let shape = Shape { qk_heads: 2, value_heads: 4, ..Shape::new(195, 2, key_dim, value_dim) };
    let inputs = generate(op, &shape, regime, 1).unwrap();
    inputs.packed(&[0, 1, 1, 33, 97, 195], 2).unwrap().with_initial_state(3)
}

fn within_tolerance(recurrent: &Recurrent, comparison: &Comparison) -> bool {
    let limit = tolerance(recurrent.mode(), TensorClass::of(&comparison.tensor).unwrap()).unwrap();
    comparison.nonfinite == 0 && comparison.max_rel <= limit.max_rel()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn results_are_those_of_the_reference() {
    let regimes = [Regime::Gaussian, Regime::LongMemory, Regime::FastDecay, Regime::BetaTwo];
    for (op, (key_dim, value_dim)) in
        Op::ALL.into_iter().flat_map(|op| [(5, 6), (64, 64), (100, 41), (128, 128), (256, 33)].map(|dims| (op, dims)))
    {
        for regime in regimes {
            for recurrent in kernels() {
                let inputs = awkward(op, key_dim, value_dim, regime).rounded_to(recurrent.input_format());
                let truth = Reference.backward(&inputs).unwrap();
                let found = recurrent.backward(&inputs).unwrap();
                for comparison in compare_results(&found, &truth).unwrap() {
                    assert!(
                        within_tolerance(&recurrent, &comparison),
                        "{} {op} {} {regime}: {comparison:?}",
                        recurrent.name(),
                        inputs.shape
                    );
                }
                assert_eq!(recurrent.forward(&inputs).unwrap().outputs, found.outputs);
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn results_do_not_depend_on_the_workspace_or_on_what_a_sequence_is_packed_with() {
    for op in Op::ALL {
        let packed = awkward(op, 64, 48, Regime::Gaussian);
        for recurrent in kernels() {
            let together = recurrent.backward(&packed).unwrap();
            let apart = recurrent.clone().with_workspace(0).backward(&packed).unwrap();
            assert_eq!(together, apart, "{} {op}", recurrent.name());
            let alone = recurrent.backward(&last_sequence(&packed)).unwrap();
            for ((name, whole), (_, part)) in together.named().into_iter().zip(alone.named()) {
                let end = &whole.data[whole.data.len() - part.data.len()..];
                assert_eq!(end, part.data, "{} {op}: {name}", recurrent.name());
            }
        }
    }
}

/// The last of the packed sequences by itself: the end of every tensor.
fn last_sequence(packed: &Inputs) -> Inputs {
    let cu_seqlens = packed.cu_seqlens.as_ref().unwrap();
    let tokens = packed.shape.tokens - cu_seqlens[cu_seqlens.len() - 2];
    let mut alone = packed.clone();
    alone.cu_seqlens = None;
    alone.shape.tokens = tokens;
    for (name, tensor) in alone.named_mut() {
        match name {
            "initial_state" | "dht" => tensor.dims[0] = 1,
            _ => tensor.dims[1] = tokens,
        }
        let length: usize = tensor.dims.iter().product();
        tensor.data = tensor.data.split_off(tensor.data.len() - length);
    }
    alone
}
