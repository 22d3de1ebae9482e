use super::*;
use crate::chunked::Chunked;
use crate::kernel::Kernel;
use crate::model::Model;
use crate::model::config::{Mixer, ModelConfig, Size};
use crate::model::text::Text;
use crate::model::train::{Settings, Training};
use crate::numerics::Step;
use crate::precision::Policy;
use crate::reference::Reference;
use std::ops::ControlFlow;
use std::sync::LazyLock;

fn text() -> Text {
    let words: Vec<String> = (0..4000).map(|n| format!("{} squared is {}\n", n % 97, (n % 97) * (n % 97))).collect();
    Text::new("squares", [words.concat().as_bytes()])
}

/// The tiny model after a few steps: it knows which bytes there are, and little more.
static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let (config, text) = (ModelConfig::preset(Mixer::Gdn, Size::Tiny), text());
    let mut training = Training::new(config, Settings::tiny(12, 1), &text).unwrap();
    while !training.is_finished() {
        training.step(&text).unwrap();
    }
    training.model
});

fn go_on(_: &Step) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn bf16() -> Chunked {
    Chunked::new("bf16", Policy::bf16(), 64).unwrap()
}

#[test]
fn more_noise_flips_more_tokens_and_none_flips_none() {
    let prompts = Prompts::of_text(&text(), 4, 128).unwrap();
    let noises = Noisy::sweep(1e-3, 0.1, 3, 1).unwrap();
    let kernels: Vec<&dyn Kernel> =
        noises.iter().map(|noise| noise as &dyn Kernel).chain([&Reference as &dyn Kernel]).collect();
    let found = forced(&MODEL, &prompts, &kernels, go_on).unwrap();
    let [few, more, most, none] = [0, 1, 2, 3].map(|at| &found[at].summary);
    assert_eq!((none.flips, none.positions, none.shift_max, none.rel_rms), (0, 512, Some(0.0), Some(0.0)));
    assert!(few.flips <= more.flips && more.flips < most.flips, "{few:?} {most:?}");
    for (noise, found) in noises.iter().zip(&found) {
        let (wanted, measured) = (noise.rel_rms(), found.summary.rel_rms.unwrap());
        assert!((measured / wanted - 1.0).abs() < 0.1, "{wanted} {measured}");
        let flips = found.positions.iter().filter(|position| position.flipped).count() as u64;
        assert_eq!(flips, found.summary.flips);
    }
    // Shifts grow with the noise in proportion.
    let ratio = most.shift_rms.unwrap() / more.shift_rms.unwrap();
    assert!((8.0..12.5).contains(&ratio), "{ratio}");
    assert!((most.flip_rate_low..=most.flip_rate_high).contains(&most.flip_rate));
}

#[test]
fn a_rate_of_flips_stands_for_a_tolerance() {
    let row = |rel_rms: f64, count: u64| TokenFlips {
        rel_rms: Some(rel_rms),
        ..flips(Experiment::Forced, Share { count, of: 10_000 })
    };
    // Half a flip per position and unit of error; the last row is beyond where that holds.
    let rows = [row(1e-3, 5), row(1e-2, 50), row(0.5, 900)];
    let tolerance = Tolerance::of(&rows).unwrap();
    assert!((tolerance.slope - 0.5).abs() < 1e-9, "{tolerance:?}");
    let (error, (low, high)) = tolerance.error_at(1e-4);
    assert!((error - 2e-4).abs() < 1e-9 && low < error && error < high && high < 1.4 * error);
    assert_eq!(Tolerance::of(&[row(1e-3, 0)]), None);
}

#[test]
fn the_first_largest_logit_wins() {
    assert_eq!(argmax(&[1.0, 3.0, 3.0, 2.0]), 1);
    assert_eq!(argmax(&[f64::NAN, -1.0]), 1);
}

#[test]
fn decoding_repeats_what_the_exact_model_says() {
    let prompts = Prompts::of_text(&text(), 3, 40).unwrap();
    let exact = decode(&MODEL, &prompts, 6, &Reference).unwrap();
    // Token by token is what reading the prompt and its continuation at once gives.
    let row = [prompts.iter().next().unwrap(), &exact.tokens[0][..5]].concat();
    let again = decode(&MODEL, &Prompts { tokens: row, rows: 1 }, 1, &Reference).unwrap();
    assert_eq!(again.tokens[0][0], exact.tokens[0][5]);
    let same = greedy(&MODEL, &prompts, &exact, &Reference).unwrap();
    assert_eq!((same.flips, same.positions, same.same_tokens), (0, 3, Some(6.0)));
    let other = Decoded { tokens: exact.tokens.iter().map(|row| [&row[..2], &[300; 4]].concat()).collect() };
    assert_eq!(exact.agreeing(&other), [2, 2, 2]);
}

#[test]
fn padding_behind_changes_no_bit_and_marked_padding_little() {
    let prompts = Prompts::of_text(&text(), 3, 40).unwrap();
    let kernel = bf16();
    let unpadded = Unpadded::new(&MODEL, &prompts).unwrap();
    let mut asked = || ControlFlow::Continue(());
    let mut of = |padding, length| unpadded.under(padding, length, &kernel, &mut asked);
    let [none, right, marked, read] = Padding::ALL.map(|padding| of(padding, 100).unwrap());
    assert_eq!((none.same_bits, read.same_bits), (Some(1.0), None));
    assert!((right.shift_max.unwrap() - none.shift_max.unwrap()).abs() < 1e-6, "{right:?} {none:?}");
    // 60 tokens of padding put the prompt across the end of a chunk.
    let sixty_four = of(Padding::LeftMarked, 104).unwrap();
    assert_eq!((right.same_bits, marked.same_bits, sixty_four.same_bits), (Some(1.0), Some(0.0), Some(1.0)));
    assert!(marked.shift_max.unwrap() < 0.1 && read.shift_max > marked.shift_max, "{marked:?} {read:?}");
    assert_eq!(read.padding.as_deref(), Some("left-read"));
    assert!(of(Padding::Right, 39).is_err());
    assert_eq!("right".parse::<Padding>().unwrap(), Padding::Right);
    assert!("top".parse::<Padding>().is_err());
}
