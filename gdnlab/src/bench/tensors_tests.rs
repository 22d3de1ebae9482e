use super::*;
use crate::bench::case::Heads;
use crate::bench::seqlens::SeqLens;

fn case(pass: Pass, lengths: &[usize]) -> Case {
    let heads = Heads { qk_heads: 2, value_heads: 8, key_dim: 16, value_dim: 32 };
    Case::packed(pass, SeqLens::new(lengths.to_vec()), heads).unwrap()
}

fn numbers(values: &Values) -> Vec<f64> {
    (0..values.len()).map(|i| values.get(i).unwrap()).collect()
}

#[test]
fn inputs_have_the_published_distribution() {
    let tensors = Tensors::generate(&case(Pass::Bwd, &[3000, 0, 1000]), Format::Bf16, 1).unwrap();
    for rows in [&tensors.q, &tensors.k] {
        let norms =
            numbers(rows).chunks(16).map(|row| row.iter().map(|x| x * x).sum::<f64>().sqrt()).collect::<Vec<_>>();
        assert_eq!(norms.len(), 8000);
        assert!(norms.iter().all(|norm| (norm - 1.0).abs() < 4e-3));
    }
    let gradients = tensors.gradients.as_ref().unwrap();
    for (values, deviation) in [
        (numbers(&tensors.v), 1.0),
        (numbers(&gradients.d_o), 1.0),
        (tensors.initial_state.iter().map(|&x| f64::from(x)).collect(), 1.0),
        (gradients.d_final_state.iter().map(|&x| f64::from(x)).collect(), 0.125),
    ] {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let found = (values.iter().map(|x| x * x).sum::<f64>() / count).sqrt();
        assert!(mean.abs() < 5.0 * deviation / count.sqrt(), "mean {mean}");
        assert!((found / deviation - 1.0).abs() < 5.0 / count.sqrt(), "deviation {found}");
    }
    assert_eq!(tensors.initial_state.len(), 3 * 8 * 16 * 32);
    let of_head = |head: usize| tensors.g.iter().skip(head).step_by(8);
    assert!(of_head(0).chain(of_head(4)).all(|&g| g == 0.0));
    assert!(of_head(1).chain(of_head(7)).all(|&g| g < 0.0 && g > -1.0));
    assert!(tensors.beta.iter().all(|&beta| beta > 0.0 && beta < 1.0));
}

#[test]
fn no_two_tokens_of_a_head_are_the_same() {
    // 40,000 tokens of 8 heads go five times through the tile.
    let tensors = Tensors::generate(&case(Pass::Fwd, &[40_000]), Format::F32, 1).unwrap();
    let first_of_row = |token: usize| tensors.v.get((token * 8 + 3) * 32).unwrap().to_bits();
    let mut firsts: Vec<u64> = (0..40_000).map(first_of_row).collect();
    firsts.sort_unstable();
    firsts.dedup();
    // Binary32 numbers coincide by chance now and then; rows do not.
    assert!(firsts.len() > 39_800, "{}", firsts.len());
    assert!(tensors.gradients.is_none());
}

#[test]
fn the_same_seed_gives_the_same_numbers_and_another_gives_others() {
    let of_seed = |seed| Tensors::generate(&case(Pass::Fwd, &[100]), Format::Bf16, seed).unwrap();
    let (one, same, other) = (of_seed(1), of_seed(1), of_seed(2));
    assert_eq!((&one.q, &one.g, &one.initial_state), (&same.q, &same.g, &same.initial_state));
    assert_ne!(one.q, other.q);
    assert_ne!(one.q, one.k);
}

#[test]
fn inputs_in_the_memory_of_others_are_those_that_a_fresh_start_gives() {
    // More rows than the tile has, fewer, more again with other heads, and a backward.
    let heads = Heads { qk_heads: 1, value_heads: 4, key_dim: 16, value_dim: 32 };
    let other_heads = Case::packed(Pass::Fwd, SeqLens::new(vec![35_000]), heads).unwrap();
    let cases = [
        case(Pass::Fwd, &[40_000]),
        case(Pass::Fwd, &[60, 40]),
        other_heads,
        case(Pass::Bwd, &[9000]),
        case(Pass::Bwd, &[5]),
    ];
    let mut before = None;
    for case in &cases {
        let got = Tensors::generate_in(before.take(), case, Format::Bf16, 1).unwrap();
        let fresh = Tensors::generate(case, Format::Bf16, 1).unwrap();
        assert!(got.q == fresh.q && got.k == fresh.k && got.v == fresh.v, "{case}");
        assert!(got.g == fresh.g && got.beta == fresh.beta && got.initial_state == fresh.initial_state, "{case}");
        assert_eq!((got.shape, &got.sequences), (fresh.shape, &fresh.sequences));
        let gradients = |tensors: &Tensors| tensors.gradients.as_ref().map(|gradients| gradients.d_o.clone());
        assert!(gradients(&got) == gradients(&fresh), "{case}");
        before = Some(got);
    }
    let narrow = Tensors::generate_in(before, &cases[1], Format::F16, 1).unwrap();
    assert_eq!(narrow.q, Tensors::generate(&cases[1], Format::F16, 1).unwrap().q);
}

#[test]
fn a_part_is_cut_out_of_every_tensor() {
    let tensors = Tensors::generate(&case(Pass::Bwd, &[5, 7]), Format::F32, 1).unwrap();
    let part = tensors.part(Part { sequence: 1, qk_head: 1 }).unwrap();
    part.validate().unwrap();
    assert_eq!(part.shape, Shape { batch: 1, tokens: 7, qk_heads: 1, value_heads: 4, key_dim: 16, value_dim: 32 });
    // Token 5 + 2 of all, q/k head 1, value heads 4 to 7.
    assert_eq!(part.k.data[2 * 16 + 3], tensors.k.get((7 * 2 + 1) * 16 + 3).unwrap());
    assert_eq!(part.v.data[(2 * 4 + 1) * 32 + 9], tensors.v.get((7 * 8 + 5) * 32 + 9).unwrap());
    assert_eq!(part.gates.log_decay().data[2 * 4 + 1], f64::from(tensors.g[7 * 8 + 5]));
    let state = part.initial_state.unwrap();
    assert_eq!(state.dims, [1, 4, 16, 32]);
    assert_eq!(state.data[16 * 32 + 5], f64::from(tensors.initial_state[(8 + 5) * 16 * 32 + 5]));
    assert!(tensors.part(Part { sequence: 2, qk_head: 0 }).is_err());
    assert!(tensors.part(Part { sequence: 0, qk_head: 2 }).is_err());
}

#[test]
fn a_result_of_another_length_is_refused() {
    let tensors = Tensors::generate(&case(Pass::Fwd, &[5, 7]), Format::F32, 1).unwrap();
    let part = Part { sequence: 0, qk_head: 0 };
    let cut = |length: usize, name: &str| part.cut(Source::Values(&Values::F32(vec![0.0; length])), name, &tensors);
    assert_eq!(cut(12 * 8 * 32, "o").unwrap().dims, [1, 5, 4, 32]);
    assert!(cut(12 * 8 * 32 - 1, "o").unwrap_err().to_string().contains("expected 3072"));
    assert!(cut(1, "dw").is_err());
}

#[test]
fn a_call_is_taken_over_as_it_is() {
    let shape = Shape { batch: 1, tokens: 12, qk_heads: 2, value_heads: 4, key_dim: 8, value_dim: 8 };
    let inputs = crate::inputs::generate(crate::problem::Op::Gdn, &shape, crate::inputs::Regime::LongMemory, 1)
        .and_then(|inputs| inputs.with_initial_state(1).packed(&[0, 5, 12], 1))
        .unwrap()
        .rounded_to(Format::Bf16);
    let tensors = Tensors::of_inputs(&inputs).unwrap();
    assert_eq!((&tensors.sequences, tensors.format), (&vec![0..5, 5..12], Format::Bf16));
    let part = tensors.part(Part { sequence: 1, qk_head: 1 }).unwrap();
    assert_eq!(part.q.data[..8], inputs.q.data[(5 * 2 + 1) * 8..][..8]);
    assert_eq!(part.d_final_state.unwrap().data[..8], inputs.d_final_state.unwrap().data[(4 + 2) * 64..][..8]);
    assert_eq!(part.scale, inputs.scale);
}
