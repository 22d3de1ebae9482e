//! What meets the tokens: the embedding and the cross-entropy.

use crate::device::*;
use gdnlab::cuda::layers::{ByToken, CrossEntropy, CrossEntropyCall, Embedding, EmbeddingBackward, EmbeddingForward};
use gdnlab::problem::Tensor;
use gdnlab::reference::token;
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn numbers(tokens: &[u32]) -> Vec<i32> {
    tokens.iter().map(|&token| token as i32).collect()
}

/// Tokens of which some come often and some never, in an order that mixes them.
fn tokens(count: usize, vocabulary: usize, often: f64) -> Vec<u32> {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let mut draw = || if rng.random_bool(often) { 3 } else { rng.random_range(0..vocabulary as u32 / 2) };
    (0..count).map(|_| draw()).collect()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn embedding_forward_and_backward() {
    // A single token; less than a piece; a token over many pieces; all rows one token; rare tokens of a wide model.
    for (count, vocabulary, dim, often) in
        [(1, 8, 8, 0.0), (20, 64, 32, 0.5), (1000, 256, 264, 0.4), (64, 8, 128, 1.0), (333, 2000, 768, 0.01)]
    {
        let label = format!("{count} tokens of {vocabulary}, D = {dim}");
        let (weight, dy) = (gaussian(1, &[vocabulary, dim]), gaussian(2, &[count, dim]));
        let tokens = tokens(count, vocabulary, often);
        let reference = token::Embedding { weight: &weight, tokens: &tokens };
        let layer = Embedding::new(gpu(), vocabulary, dim).unwrap();
        let (table, on_gpu, y) = (narrow(&weight), gpu().upload(&numbers(&tokens)).unwrap(), empty(count * dim));
        let call = EmbeddingForward { weight: view(&table), tokens: view(&on_gpu), y: view(&y) };
        // SAFETY: the buffers outlive the downloads, which wait for the kernels, and all tokens are in the vocabulary;
        // likewise in all tests here.
        unsafe { layer.forward(gpu().stream(), &call).unwrap() };
        assert!(download::<bf16>(&y, &[count, dim]) == reference.forward().unwrap(), "{label}");

        let sorted = ByToken::new(&tokens, vocabulary).unwrap();
        let (order, starts) = (gpu().upload(&sorted.order).unwrap(), gpu().upload(&sorted.starts).unwrap());
        let (dy_gpu, scratch) = (narrow(&dy), empty(layer.scratch_elements(count)));
        let run = || {
            let dweight = empty(vocabulary * dim);
            let call = EmbeddingBackward {
                dy: view(&dy_gpu),
                tokens: view(&on_gpu),
                order: view(&order),
                starts: view(&starts),
                scratch: view(&scratch),
                dweight: view(&dweight),
            };
            // SAFETY: as above.
            unsafe { layer.backward(gpu().stream(), &call).unwrap() };
            dweight
        };
        let dweight = run();
        check_f32(&format!("dweight, {label}"), &dweight, &reference.backward(&dy).unwrap());
        same_bits("dweight", &dweight, &run());
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cross_entropy_and_its_gradient() {
    // Fewer accesses than threads, a ragged end, and more than one round.
    for (rows, vocabulary, spread) in [(1, 8, 1.0), (5, 256, 3.0), (7, 1000, 20.0), (3, 32_000, 1.0)] {
        let label = format!("{rows} rows of {vocabulary}");
        let mut logits = gaussian(1, &[rows, vocabulary]);
        logits.data.iter_mut().for_each(|z| *z = f64::from(bf16::from_f64(spread * *z)));
        // One far above all others, and one far below.
        (logits.data[1], logits.data[2]) = (9984.0, -9984.0);
        let mut rng = ChaCha8Rng::seed_from_u64(6);
        let targets: Vec<u32> = (0..rows).map(|_| rng.random_range(0..vocabulary as u32)).collect();
        let reference = token::CrossEntropy { logits: &logits, targets: &targets };
        let (losses, gradient) = (reference.per_token().unwrap(), reference.backward().unwrap());

        let layer = CrossEntropy::new(gpu(), vocabulary).unwrap();
        let (wanted, mean) = (gpu().upload(&numbers(&targets)).unwrap(), empty(1));
        let run = |scale| {
            let (z, found) = (narrow(&logits), empty(rows));
            let call = CrossEntropyCall { logits: view(&z), targets: view(&wanted), losses: view(&found), scale };
            // SAFETY: as above.
            unsafe { layer.run(gpu().stream(), &call).unwrap() };
            (z, found)
        };
        let (z, found) = run(None);
        assert!(download(&z, &logits.dims) == logits, "{label}: the logits are left alone");
        check_f32(&format!("losses, {label}"), &found, &losses);
        // SAFETY: as above.
        unsafe { layer.mean(gpu().stream(), view(&found), view(&mean)).unwrap() };
        let expected = Tensor::new(&[1], vec![reference.forward().unwrap()]).unwrap();
        check_f32(&format!("mean, {label}"), &mean, &expected);

        let (dz, again) = run(Some(1.0 / rows as f32));
        same_bits("losses", &found, &again);
        check_bf16(&format!("dz, {label}"), &dz, &gradient);
    }
}
