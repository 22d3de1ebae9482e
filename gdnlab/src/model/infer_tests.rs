use super::super::config::{ModelConfig, Size};
use super::*;
use crate::chunked::Chunked;
use crate::precision::Policy;
use crate::reference::token::CrossEntropy;

const SEED: u64 = 5;

fn model() -> Model {
    let mut model = Model::new(ModelConfig::preset(Mixer::Gdn, Size::Tiny), SEED).unwrap();
    // At its start a model hardly depends on what it read.
    for (name, tensor) in model.parameters.iter_mut() {
        if tensor.dims.len() == 2 && !name.contains("conv") {
            tensor.data.iter_mut().for_each(|x| *x *= 6.0);
        }
    }
    model
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|n| (n * n * 7 + n * 31 + 11) % 256).collect()
}

fn exact() -> Chunked {
    Chunked::new("exact", Policy::fp64(), 16).unwrap()
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn reading_gives_the_loss_of_training() {
    let (model, tokens) = (model(), tokens(2 * 21));
    let inputs: Vec<u32> = tokens.chunks(21).flat_map(|row| &row[..20]).copied().collect();
    let targets: Vec<u32> = tokens.chunks(21).flat_map(|row| &row[1..]).copied().collect();
    let logits = Reader::new(&model, 2).unwrap().read(Tokens::new(&inputs), &Reference).unwrap();
    assert_eq!(logits.dims, [2, 20, 256]);
    let loss = CrossEntropy { logits: &join_rows(logits).unwrap(), targets: &targets }.forward().unwrap();
    assert!((loss - model.loss(&tokens, 2, 20).unwrap()).abs() < 1e-12);
}

#[test]
fn a_reader_goes_on_where_it_stopped() {
    let (model, tokens) = (model(), tokens(50));
    let whole = Reader::new(&model, 1).unwrap().read(Tokens::new(&tokens), &Reference).unwrap();
    let mut reader = Reader::new(&model, 1).unwrap();
    let mut parts = reader.read(Tokens::new(&tokens[..33]), &exact()).unwrap().data;
    for token in &tokens[33..49] {
        parts.extend(reader.read(Tokens::new(&[*token]), &Reference).unwrap().data);
    }
    let last = reader.read_last(Tokens::new(&tokens[49..]), &Reference).unwrap();
    assert_eq!(last.dims, [1, 256]);
    parts.extend(last.data);
    assert!(largest_difference(&whole.data, &parts) < 1e-5, "states pass in binary32");
    assert!(largest_difference(&whole.data[..256], &whole.data[256..512]) > 0.1, "logits depend on the token");
}

#[test]
fn marked_padding_leaves_no_trace_and_other_padding_does() {
    let (model, tokens) = (model(), tokens(24));
    let padded = [vec![0; 40], tokens.clone()].concat();
    let mask: Vec<bool> = (0..64).map(|at| at < 40).collect();
    let last = |tokens: Tokens<'_>| Reader::new(&model, 1).unwrap().read_last(tokens, &exact()).unwrap().data;
    let alone = last(Tokens::new(&tokens));
    let masked = last(Tokens { tokens: &padded, padding: Some(&mask) });
    assert!(largest_difference(&alone, &masked) < 1e-9);
    assert!(largest_difference(&alone, &last(Tokens::new(&padded))) > 1e-3);
}

/// Padding that stands in front is not computed unless its own logits are asked for: the other way gives the same.
#[test]
fn padding_in_front_may_be_left_out() {
    let (model, tokens) = (model(), tokens(2 * 24));
    let rows: Vec<u32> = tokens.chunks(24).flat_map(|row| [vec![0; 40], row.to_vec()].concat()).collect();
    let mask: Vec<bool> = (0..2 * 64).map(|at| at % 64 < 40).collect();
    let padded = Tokens { tokens: &rows, padding: Some(&mask) };
    let [mut all, mut last] = [0; 2].map(|_| Reader::new(&model, 2).unwrap());
    let logits = all.read(padded, &exact()).unwrap();
    let at = last.read_at(padded, 50, &exact()).unwrap();
    let of_row = |row: usize| &logits.data[(64 * row + 50) * 256..(64 * row + 51) * 256];
    assert!(largest_difference(&at.data, &[of_row(0), of_row(1)].concat()) < 1e-12);
    // Both go on from the same state.
    let next = Tokens::new(&[7, 9]);
    let [all, last] = [&mut all, &mut last].map(|reader| reader.read_last(next, &exact()).unwrap().data);
    assert!(largest_difference(&all, &last) < 1e-12);
    let mut one_row_more = mask.clone();
    one_row_more[64 + 40] = true;
    assert_eq!(
        [&mask[..], &one_row_more, &[true; 128], &[false; 128]].map(|mask| front(mask, 64)),
        [Some(40), None, None, Some(0)]
    );
}

#[test]
fn the_first_layer_may_be_heard_alone() {
    let (model, tokens) = (model(), tokens(2 * 9));
    let first = model.first_recurrence_inputs(Tokens::new(&tokens), 2).unwrap();
    assert_eq!(first, model.recurrence_inputs(&tokens, 2).unwrap()[0]);
    let marks: Vec<bool> = (0..18).map(|at| at % 9 < 4).collect();
    let padded = model.first_recurrence_inputs(Tokens { tokens: &tokens, padding: Some(&marks) }, 2).unwrap();
    assert_eq!(padded.q.dims, [2, 9, 2, 32]);
    for (name, tensor) in padded.named() {
        let row = tensor.data.len() / 2;
        let zeros = tensor.data.iter().take(row * 4 / 9).all(|&x| x == 0.0);
        assert!(zeros && tensor.data[row - 1] != 0.0, "{name}");
    }
}

#[test]
fn the_inputs_of_each_layer_are_heard() {
    let (model, tokens) = (model(), tokens(2 * 9));
    let inputs = model.recurrence_inputs(&tokens, 2).unwrap();
    assert_eq!(inputs.len(), 2);
    for inputs in &inputs {
        assert_eq!((inputs.q.dims.as_slice(), inputs.v.dims.as_slice()), (&[2, 9, 2, 32][..], &[2, 9, 2, 64][..]));
        let norm = inputs.k.data[..32].iter().map(|x| x * x).sum::<f64>().sqrt();
        assert!((norm - 1.0).abs() < 1e-3, "{norm}");
        assert!(inputs.gates.log_decay().data.iter().all(|&g| g < 0.0));
    }
}

#[test]
fn what_cannot_be_read_is_refused() {
    let attention = Model::new(ModelConfig::preset(Mixer::Attention, Size::Tiny), SEED).unwrap();
    assert!(Reader::new(&attention, 1).unwrap_err().to_string().contains("a model of attn"));
    let model = model();
    let mut reader = Reader::new(&model, 2).unwrap();
    let refused = |reader: &mut Reader<'_>, tokens| reader.read(tokens, &Reference).unwrap_err().to_string();
    assert!(refused(&mut reader, Tokens::new(&[1, 2, 3])).contains("3 tokens for 2 sequences"));
    assert!(refused(&mut reader, Tokens { tokens: &[1, 2], padding: Some(&[true]) }).contains("1 marks"));
    assert!(refused(&mut reader, Tokens::new(&[1, 256])).contains("256"));
    let behind = reader.read_at(Tokens::new(&[1, 2]), 1, &Reference).unwrap_err().to_string();
    assert!(behind.contains("token 1 of rows of 1"), "{behind}");
}
