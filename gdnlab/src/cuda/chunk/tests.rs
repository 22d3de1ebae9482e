use super::*;
use crate::Error;
use crate::compare::{TensorClass, tolerance};
use crate::cuda::Gpu;
use crate::inputs::{Regime, generate};
use crate::kernel::{Kernel, kernel};
use crate::problem::{Inputs, Op, Shape};

fn setup() -> Setup {
    Setup {
        shape: Shape { value_heads: 4, ..Shape::new(100, 2, 64, 128) },
        sequences: vec![0..40, 40..40, 40..100],
        mode: Mode::Bf16,
        input: Format::Bf16,
        options: Options::new(64),
        backward: true,
    }
}

fn complaint(setup: &Setup) -> String {
    setup.validate().unwrap_err().to_string()
}

#[test]
fn every_preset_is_listed_and_has_a_tolerance() {
    for chunk in Chunk::presets() {
        let listed = kernel(chunk.name()).unwrap();
        assert!(listed.on_gpu() && listed.needs().contains("GPU"));
        assert_eq!((listed.mode(), listed.input_format()), (chunk.mode(), chunk.input_format()));
        assert!(TensorClass::ALL.into_iter().all(|class| tolerance(listed.mode(), class).is_ok()));
    }
}

#[test]
fn other_problems_are_refused_before_a_gpu_is_asked_for() {
    let shape = Shape::new(3, 1, 64, 64);
    let inputs = generate(Op::Gdn, &shape, Regime::Gaussian, 1).unwrap();
    let gdn2 = generate(Op::Gdn2, &shape, Regime::Gaussian, 1).unwrap();
    let narrow = generate(Op::Gdn, &Shape::new(3, 1, 64, 40), Regime::Gaussian, 1).unwrap();
    for chunk in Chunk::presets() {
        let unsupported = |inputs: &Inputs, words: &str| match chunk.forward(inputs).unwrap_err() {
            Error::Unsupported { kernel, reason } => kernel == chunk.name() && reason.contains(words),
            _ => false,
        };
        assert!(unsupported(&gdn2, "gdn2") && unsupported(&narrow, "V = 40: expected one of 32, 64"));
        let error = chunk.backward(&Inputs { d_o: None, ..inputs.clone() }).unwrap_err();
        assert!(matches!(&error, Error::Input(message) if message.contains("'do'")), "{error}");
        let error = chunk.forward(&Inputs { scale: f64::NAN, ..inputs.clone() }).unwrap_err();
        assert!(matches!(&error, Error::Input(message) if message.contains("scale")), "{error}");
    }
}

#[test]
fn where_there_is_no_gpu_a_kernel_says_so() {
    let inputs = generate(Op::Gdn, &Shape::new(3, 1, 32, 32), Regime::Gaussian, 1).unwrap();
    let ran = Chunk::bf16().forward(&inputs);
    match Gpu::shared() {
        Ok(_) => assert!(ran.is_ok(), "{ran:?}"),
        Err(error) => assert_eq!(ran.unwrap_err().to_string(), error.to_string()),
    }
}

#[test]
fn setups_that_make_no_sense_are_refused() {
    assert!(setup().validate().is_ok());
    let with = |change: fn(&mut Setup)| {
        let mut changed = setup();
        change(&mut changed);
        complaint(&changed)
    };
    assert!(with(|setup| setup.shape.key_dim = 80).contains("K = 80: expected one of"));
    assert!(with(|setup| setup.shape.value_heads = 3).contains("HV = 3"));
    assert!(with(|setup| setup.input = Format::F64).contains("f64"));
    assert!(
        with(|setup| setup.sequences[2] = 41..100)
            .contains("sequence 2 has tokens 41..100: expected them to begin at 40")
    );
    assert!(with(|setup| setup.sequences.truncate(2)).contains("end at token 40: expected B T = 100"));
    assert!(with(|setup| setup.sequences = vec![0..0; 70_000]).contains("end at token 0"));
    assert!(
        with(|setup| {
            setup.shape.tokens = 0;
            setup.sequences = vec![0..0; 70_000];
        })
        .contains("N = 70000: expected 65535 at the most")
    );
    assert!(with(|setup| setup.options.scale = f32::INFINITY).contains("scale = inf"));
    assert!(with(|setup| setup.options.qk_l2norm = Some(-1.0)).contains("qk_l2norm = -1"));
    assert!(with(|setup| setup.options.beta = Beta::Logit { scale: 0.0 }).contains("0 sigmoid(x)"));
}

#[test]
fn tensors_are_those_that_the_options_ask_for() {
    let names = |setup: &Setup| {
        let name = |(name, ..): (&'static str, Vec<usize>, Format)| name;
        let all = |tensors: Vec<_>| tensors.into_iter().map(name).collect::<Vec<_>>().join(" ");
        (all(setup.input_tensors()), all(setup.output_tensors()))
    };
    let mut setup = setup();
    assert_eq!(names(&setup), ("q k v g beta do".into(), "o final_state dq dk dv dg dbeta dh0".into()));
    setup.options = Options {
        gate: Gate::Raw,
        beta: Beta::Logit { scale: 2.0 },
        initial_state: true,
        d_final_state: true,
        ..setup.options
    };
    let (inputs, outputs) = names(&setup);
    assert_eq!(inputs, "q k v a A_log dt_bias beta_logit initial_state do dht");
    assert_eq!(outputs, "o final_state dq dk dv dg dbeta dh0 da dA_log ddt_bias dbeta_logit");
    setup.backward = false;
    assert_eq!(names(&setup).0, "q k v a A_log dt_bias beta_logit initial_state");
    assert_eq!(names(&setup).1, "o final_state");
    setup.options.state_layout = StateLayout::ValueKey;
    assert_eq!(setup.output_tensors()[1].1, [3, 4, 128, 64]);
}

#[test]
fn builds_are_distinct_and_cover_every_mode_input_and_extreme() {
    let builds: Vec<String> = builds().unwrap().iter().map(ToString::to_string).collect();
    let distinct: std::collections::HashSet<&String> = builds.iter().collect();
    assert_eq!(distinct.len(), builds.len(), "{builds:?}");
    for file in ["prepare", "forward", "backward", "gradient"] {
        let of_file =
            |word: &str| builds.iter().any(|name| name.starts_with(&format!("chunk_{file}")) && name.contains(word));
        for word in
            ["MODE=0", "MODE=1", "MODE=2", "MODE=3", "=float", "=bf16", "=f16", "KD=32", "KD=256", "VD=32", "VD=256"]
        {
            assert!(of_file(word), "{file} {word}");
        }
    }
}
