use super::config::{Tiles, validate};
use super::*;
use crate::Error;
use crate::compare::{TensorClass, tolerance};
use crate::inputs::{Regime, generate};
use crate::kernel::{Kernel, kernel};
use crate::problem::{Inputs, Op, Shape};

#[test]
fn every_preset_is_listed_and_has_a_tolerance() {
    for gdn2 in Gdn2::presets() {
        let listed = kernel(gdn2.name()).unwrap();
        assert_eq!((listed.mode(), listed.ops()), (gdn2.mode(), &[Op::Gdn2][..]));
        assert!(TensorClass::ALL.into_iter().all(|class| tolerance(listed.mode(), class).is_ok()));
    }
}

#[test]
fn other_problems_are_refused_before_a_gpu_is_asked_for() {
    let inputs = generate(Op::Gdn2, &Shape::new(3, 1, 64, 64), Regime::Gaussian, 1).unwrap();
    let gdn = generate(Op::Gdn, &Shape::new(3, 1, 64, 64), Regime::Gaussian, 1).unwrap();
    let wide = generate(Op::Gdn2, &Shape::new(3, 1, 192, 64), Regime::Gaussian, 1).unwrap();
    for gdn2 in Gdn2::presets() {
        let unsupported = |inputs: &Inputs, words: &str| match gdn2.forward(inputs).unwrap_err() {
            Error::Unsupported { kernel, reason } => kernel == gdn2.name() && reason.contains(words),
            _ => false,
        };
        assert!(unsupported(&gdn, "gdn: expected gdn2") && unsupported(&wide, "K = 192: expected 128 at the most"));
        let error = gdn2.backward(&Inputs { d_o: None, ..inputs.clone() }).unwrap_err();
        assert!(matches!(&error, Error::Input(message) if message.contains("'do'")), "{error}");
    }
}

#[test]
fn setups_that_make_no_sense_are_refused() {
    let inputs = generate(Op::Gdn2, &Shape::new(100, 2, 64, 64), Regime::Gaussian, 1).unwrap();
    let setup = Setup::of_inputs(&inputs, Mode::Bf16, Format::Bf16, true).unwrap();
    let with = |change: fn(&mut Setup)| {
        let mut changed = setup.clone();
        change(&mut changed);
        changed.validate().unwrap_err().to_string()
    };
    assert!(setup.validate().is_ok());
    assert!(
        with(|setup| setup.options.decay = Decay::Bounded { lower_bound: -6.0 }).contains("-6: expected one from -5")
    );
    assert!(with(|setup| setup.options.scale = f32::NAN).contains("scale = NaN"));
    assert!(with(|setup| setup.sequences = vec![0..40, 40..41]).contains("end at token 41"));
    assert!(with(|setup| setup.options.gates = Format::F64).contains("f64"));
    let names = |setup: &Setup| {
        let name = |(name, ..): (&'static str, Vec<usize>, Format)| name;
        let all = |tensors: Vec<_>| tensors.into_iter().map(name).collect::<Vec<_>>().join(" ");
        (all(setup.input_tensors()), all(setup.output_tensors()))
    };
    assert_eq!(names(&setup).0, "q k v g b w do dht");
    let raw = Setup { options: Options { decay: Decay::Softplus, ..setup.options }, ..setup };
    let expected = "o final_state dq dk dv dg db dw dh0 da dA_log ddt_bias";
    assert_eq!(names(&raw), ("q k v a A_log dt_bias b w do dht".to_owned(), expected.to_owned()));
}

/// Head dimensions that have kernels, on each card: blocks fit, and divide what they share.
#[test]
fn every_variant_fits_the_cards_that_it_is_meant_for() {
    let [ampere, hopper, small] = CARDS;
    for mode in Mode::ALL {
        for (key_dim, value_dim) in [32, 64, 96, 128].into_iter().flat_map(|k| [32, 64, 96, 128, 256].map(|v| (k, v))) {
            for (value_heads, work) in [(12, Work { heads: 24, cut: false }), (64, Work { heads: 1 << 16, cut: true })]
            {
                let input = if mode.operand_bytes() == 2 { Format::Bf16 } else { Format::F32 };
                let variant = Variant { mode, input, key_dim, value_dim, value_heads };
                assert!(validate(&variant, Format::F32).is_ok());
                for card in [hopper, ampere, small] {
                    let config = Config::new(variant, Format::F32, false, work, &card).unwrap();
                    let backward = [config.d_states, config.d_states_alone].map(|sweep| (sweep, Tiles::Backward));
                    let others = [(config.sweep, Tiles::Forward), (config.states, Tiles::States)];
                    for (sweep, tiles) in others.into_iter().chain(backward) {
                        assert!(config.sweep_bytes(&sweep, tiles) <= card.shared_bytes_per_block, "{config:?}");
                    }
                    let wide = card == ampere && value_dim > 128;
                    assert!(config.gradient.is_some() || card == small || wide, "{config:?}");
                    assert!(config.gradient_threads() <= 512 && config.prepare_threads() <= 256);
                }
            }
        }
    }
}

#[test]
fn builds_are_distinct_and_cover_every_mode_and_extreme() {
    let builds: Vec<String> = builds().unwrap().iter().map(ToString::to_string).collect();
    let distinct: std::collections::HashSet<&String> = builds.iter().collect();
    assert_eq!(distinct.len(), builds.len(), "{builds:?}");
    for file in ["gdn2_prepare", "chunk_forward", "chunk_backward", "gdn2_gradient"] {
        for word in
            ["MODE=0", "MODE=1", "MODE=2", "MODE=3", "=float", "=bf16", "=f16", "KD=32", "KD=128", "VD=32", "VD=256"]
        {
            let found = builds.iter().any(|name| name.starts_with(file) && name.contains(word));
            assert!(found, "{file} {word}");
        }
    }
}
