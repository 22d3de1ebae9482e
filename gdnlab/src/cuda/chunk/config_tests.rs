use super::*;

const H200: Card = Card { multiprocessors: 132, shared_bytes_per_block: 227 << 10 };
const A100: Card = Card { multiprocessors: 108, shared_bytes_per_block: 163 << 10 };
const GB10: Card = Card { multiprocessors: 48, shared_bytes_per_block: 99 << 10 };
const MANY: Work = Work { heads: 1 << 20, cut: false };

fn work(heads: usize) -> Work {
    Work { heads, cut: false }
}

fn variant(mode: Mode, input: Format, key_dim: usize, value_dim: usize) -> Variant {
    Variant { mode, input, key_dim, value_dim, value_heads: 8 }
}

/// Every variant that there is.
fn variants() -> impl Iterator<Item = Variant> {
    let inputs = [Format::F32, Format::Bf16, Format::F16];
    let dims = || HEAD_DIMS.into_iter().flat_map(|key_dim| HEAD_DIMS.map(|value_dim| (key_dim, value_dim)));
    Mode::ALL.into_iter().flat_map(move |mode| {
        inputs
            .into_iter()
            .flat_map(move |input| dims().map(move |(key_dim, value_dim)| variant(mode, input, key_dim, value_dim)))
            .flat_map(|variant| [8, 64].map(|value_heads| Variant { value_heads, ..variant }))
    })
}

#[test]
fn chunk_sizes_follow_from_mode_and_key_dim() {
    for variant in variants() {
        let long = matches!(variant.mode, Mode::F16Internals | Mode::Bf16) && variant.key_dim <= 128;
        for card in [H200, A100, GB10] {
            for work in [work(1), MANY] {
                assert_eq!(Config::new(variant, work, &card).unwrap().chunk, if long { 64 } else { 32 }, "{variant:?}");
            }
        }
    }
}

#[test]
fn every_variant_fits_every_card_and_divides_into_blocks() {
    for variant in variants() {
        for card in [H200, A100, GB10] {
            for work in [work(0), work(1), MANY, Work { heads: 40, cut: true }] {
                let config = Config::new(variant, work, &card).unwrap();
                assert_eq!(variant.value_dim, config.sweep_blocks() * GROUP_COLUMNS * config.groups, "{config:?}");
                let of_all = variant.value_dim + variant.key_dim;
                assert!(!work.cut || config.blocks_of(of_all) * GROUP_COLUMNS * config.groups == of_all, "{config:?}");
                let fits = |bytes: usize, what: &str| {
                    assert!(bytes <= card.shared_bytes_per_block, "{what}: {config:?} on {card:?}: {bytes}");
                };
                fits(config.sweep_bytes(true) + SWEEP_STATIC_BYTES, "sweep");
                assert!(config.sweep_bytes(false) < config.sweep_bytes(true));
                fits(config.prepare_bytes(), "prepare");
                if let Some(tile) = config.gradient {
                    assert!(variant.value_dim.is_multiple_of(tile.v_block));
                    fits(config.gradient_bytes(tile) + config.gradient_static_bytes(), "gradient");
                }
                assert!(config.gradient_threads() <= 1024 && config.sweep_threads() <= 256 && config.stages <= 4);
            }
        }
    }
}

/// The backward of the widest heads in 32 bits is the one thing that a small card has no room for.
#[test]
fn the_backward_is_missing_only_where_it_does_not_fit() {
    for variant in variants() {
        for card in [H200, A100] {
            assert!(Config::new(variant, work(1), &card).unwrap().gradient(&card).is_ok(), "{variant:?} on {card:?}");
        }
        let wide = matches!(variant.mode, Mode::Tf32 | Mode::Fp32) && variant.key_dim == 256;
        let gradient = Config::new(variant, work(1), &GB10).unwrap().gradient(&GB10);
        assert_eq!(gradient.is_err(), wide, "{variant:?}");
        if let Err(error) = gradient {
            let message = error.to_string();
            assert!(message.contains("K = 256") && message.contains("101376"), "{message}");
        }
    }
}

#[test]
fn few_heads_are_spread_over_more_blocks() {
    let variant = variant(Mode::F16Internals, Format::Bf16, 128, 128);
    let groups = |heads| Config::new(variant, work(heads), &H200).unwrap().groups;
    assert_eq!([1, 16, 17, 32, 33, MANY.heads].map(groups), [1, 1, 2, 2, 4, 4]);
    let many = Variant { value_heads: 64, ..variant };
    let groups = |heads| Config::new(many, work(heads), &H200).unwrap().groups;
    assert_eq!([1, 16, 17, 32, 33, 65, 66, MANY.heads].map(groups), [1, 1, 2, 2, 4, 4, 8, 8]);
    let groups = |value_dim, heads| Config::new(Variant { value_dim, ..variant }, work(heads), &H200).unwrap().groups;
    assert_eq!(HEAD_DIMS.map(|dim| groups(dim, MANY.heads)), [2, 4, 3, 4, 4, 4]);
    assert_eq!(HEAD_DIMS.map(|dim| groups(dim, 1)), [1; 6]);
}

/// The order of sums depends on it, so the batch must not decide.
#[test]
fn the_split_follows_from_the_model_alone() {
    let split = |value_heads, key_dim| {
        Variant { value_heads, ..variant(Mode::F16Internals, Format::Bf16, key_dim, 128) }.split()
    };
    assert_eq!([1, 16, 24, 64].map(|heads| split(heads, 128)), [2, 2, 1, 1]);
    assert_eq!([96, 128, 192, 256].map(|key_dim| split(64, key_dim)), [1, 1, 2, 2]);
}

/// A cut is worth its second reading where a sequence is long and heads are few; a batch has no say here either.
#[test]
fn long_sequences_of_few_heads_are_cut() {
    let segments = |value_heads, chunks| {
        Variant { value_heads, ..variant(Mode::F16Internals, Format::Bf16, 128, 128) }.segments(chunks)
    };
    assert_eq!([0, 1, 95, 96, 128, 160, 512, 16_384].map(|chunks| segments(8, chunks)), [1, 1, 5, 6, 8, 8, 8, 8]);
    assert_eq!([95, 96, 128, 512].map(|chunks| segments(16, chunks)), [1, 3, 3, 3]);
    assert_eq!([1, 2, 4, 8, 16, 17, 64].map(|heads| segments(heads, 16_384)), [64, 32, 16, 8, 3, 1, 1]);
}

#[test]
fn sizes_are_those_that_ran_on_an_h200() {
    let bytes = |mode, input, key_dim, value_dim| {
        let config = Config::new(variant(mode, input, key_dim, value_dim), MANY, &H200).unwrap();
        let tile = config.gradient.unwrap();
        (config.groups, config.stages, config.sweep_bytes(true), tile, config.gradient_bytes(tile))
    };
    let tile = |v_block, stages| GradientTile { v_block, stages };
    assert_eq!(bytes(Mode::F16Internals, Format::Bf16, 128, 128), (4, 2, 175_104, tile(128, 2), 192_512));
    assert_eq!(bytes(Mode::Fp32, Format::F32, 128, 128), (4, 3, 202_112, tile(128, 2), 219_136));
    assert_eq!(bytes(Mode::Fp32, Format::F32, 256, 256), (4, 2, 212_736, tile(32, 3), 194_560));
    assert_eq!(bytes(Mode::Tf32, Format::F32, 192, 192), (4, 2, 179_968, tile(64, 2), 182_272));
}

#[test]
fn value_heads_share_a_block_where_there_are_enough() {
    let config = Config::new(variant(Mode::Fp32, Format::F32, 64, 64), work(1), &H200).unwrap();
    let heads = |chunks, group| config.heads_per_block(chunks, 2, group, &H200);
    assert_eq!((heads(1000, 1), heads(1000, 4), heads(1000, 6), heads(1000, 8), heads(1000, 7)), (1, 4, 3, 4, 1));
    assert_eq!((heads(66, 4), heads(65, 4), heads(10, 4), heads(0, 4)), (4, 2, 1, 1));
}

#[test]
fn what_there_is_no_kernel_for_is_refused() {
    let complaint = |variant| Config::new(variant, work(1), &H200).unwrap_err().to_string();
    assert!(complaint(variant(Mode::Fp32, Format::F32, 48, 64)).contains("K = 48: expected one of 32, 64, 96"));
    assert!(complaint(variant(Mode::Fp32, Format::F32, 64, 512)).contains("V = 512"));
    assert!(complaint(variant(Mode::Fp32, Format::F64, 64, 64)).contains("f64: expected f32, bf16 or f16"));
    let tiny = Card { shared_bytes_per_block: 48 << 10, ..GB10 };
    let error = Config::new(variant(Mode::Tf32, Format::F32, 256, 256), work(1), &tiny).unwrap_err().to_string();
    assert!(error.contains("the sweep") && error.contains("49152"), "{error}");
}

#[test]
fn a_specialisation_says_all_that_changes_its_code() {
    let config = Config::new(variant(Mode::Tf32, Format::F32, 96, 64), MANY, &H200).unwrap();
    let names: Vec<String> = config.builds().unwrap().iter().map(ToString::to_string).collect();
    let common = "MODE=2 INPUT=float KD=96 VD=64 CHUNK=32";
    assert_eq!(names[0], format!("chunk_prepare.cu {common}"));
    assert_eq!(names[1], format!("chunk_forward.cu {common} SPLIT=2 GROUPS=4 STAGES=4"));
    assert_eq!(names[2], format!("chunk_backward.cu {common} SPLIT=2 GROUPS=4 STAGES=4"));
    assert_eq!(names[3], format!("chunk_gradient.cu {common} V_BLOCK=64 STAGES=2"));
}
