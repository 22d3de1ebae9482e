use super::super::published::{Table, published};
use super::*;
use crate::model::config::Size;

#[test]
fn the_activations_of_a_tiny_attention_are_counted_by_hand() {
    let config = ModelConfig::preset(Mixer::Attention, Size::Tiny);
    let batch = Batch { sequences: 3, tokens: 10 };
    // Per token: two halves with residual (64), 1/RMS and norm (64); q, k, v, o (4 x 64), 2 logarithms; gate, up (2 x 256)
    // and their product.
    let (mixer, mlp) = (2 * 64 + 4 + 2 * 64 + 2 * 256 + 4 * 2, 2 * 64 + 4 + 2 * 64 + 2 * 512 + 2 * 256);
    let all = TrainingMemory::new(&config, &batch, Keep::ALL);
    assert_eq!(all.activation_bytes, 30 * (2 * (mixer + mlp) + 3 * 2 * 64 + 8));
    assert_eq!(all.backward_bytes, 30 * mlp);
    assert_eq!(all.logit_bytes, 30 * 2 * 256);
    let parameters = 2 * 256 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64) + 64;
    assert_eq!(all.parameter_bytes, 16 * parameters);
    let lean = TrainingMemory::new(&config, &batch, Keep::LEAN);
    let elementwise = 2 * 64 + (2 * 64 + 2 * 256);
    assert_eq!(lean.activation_bytes, all.activation_bytes - 30 * 2 * elementwise);
    assert_eq!(lean.backward_bytes, 30 * (mlp + 2 * 64 + 2 * 256));
}

#[test]
fn the_activations_of_a_tiny_gdn_are_counted_by_hand() {
    let config = ModelConfig::preset(Mixer::Gdn, Size::Tiny);
    // 65 tokens have two chunks.
    let batch = Batch { sequences: 3, tokens: 65 };
    let (tokens, chunks) = (195u128, 6u128);
    // 2 heads of 32/64: q and k 64 wide each, v 128.
    let kept =
        tokens * (2 * 64 + 4 + 2 * 256 + 2 * 4 + 4 * 4 + 2 * 128 + 2 * 128) + chunks * 2 * 2 * (64 * 64 + 32 * 64);
    let follows = tokens * (2 * 64 + 2 * 256 + 2 * 128 + 4 * 4 + 4 * 2 + 2 * 128);
    let sum = |elementwise: bool| -> u128 {
        let all = block_activations(&config, &batch);
        all.iter().filter(|a| a.half == HalfBlock::Mixer && a.elementwise == elementwise).map(|a| a.bytes).sum()
    };
    assert_eq!((sum(false), sum(true)), (kept, follows));
    assert_eq!(TrainingMemory::new(&config, &batch, Keep::LEAN).backward_bytes, kept + 2 * follows);
}

/// The formula stands for a step that nobody has written yet; PyTorch's peaks on a GB10 show that it has the right size.
#[test]
fn pytorch_needs_what_the_formula_says_where_everything_is_kept() {
    let ladder = published(Table::Ladder);
    for row in 0..ladder.height() {
        let (mixer, size) = ladder.model(row);
        let config = ModelConfig::preset(mixer, size);
        let memory = TrainingMemory::new(&config, &Batch::LADDER, Keep::ALL).total_bytes() as f64 / 1e9;
        let ratio = memory / ladder.number(row, "peak_GB");
        assert!((0.95..1.05).contains(&ratio), "{mixer} {size}: {memory:.1} GB, {ratio:.3} of PyTorch's");
        let lean = TrainingMemory::new(&config, &Batch::LADDER, Keep::LEAN).total_bytes() as f64 / 1e9;
        assert!(lean < 0.9 * memory, "{mixer} {size}: {lean:.1} GB of {memory:.1}");
    }
}

#[test]
fn logits_of_part_of_the_step_take_part_of_the_memory() {
    let config = ModelConfig::preset(Mixer::Gdn, Size::M30);
    let held =
        |logit_tokens| TrainingMemory::new(&config, &Batch::LADDER, Keep { logit_tokens, ..Keep::LEAN }).logit_bytes;
    assert_eq!(held(Some(1024)), 1024 * 2 * 32_000);
    assert_eq!(held(None), 32 * held(Some(1024)));
    assert_eq!(held(Some(1 << 40)), held(None));
}

#[test]
fn a_step_that_does_not_fit_is_refused_with_the_batch_that_does() {
    let config = ModelConfig::preset(Mixer::Attention, Size::M250);
    let free_bytes = 20_000_000_000;
    let message = require(&config, &Batch::LADDER, Keep::ALL, free_bytes).unwrap_err().to_string();
    assert!(message.starts_with("a step of attn, 20 blocks of width 1024, 16 heads 64/64 on B = 32, T = 1024 needs"));
    assert!(message.contains("20.0 GB are free: use B = "), "{message}");
    let (_, remedy) = message.rsplit_once("use B = ").unwrap();
    let sequences: usize = remedy.strip_suffix(" or less").unwrap().parse().unwrap();
    let needs = |sequences| require(&config, &Batch { sequences, tokens: 1024 }, Keep::ALL, free_bytes);
    assert!(needs(sequences).is_ok() && needs(sequences + 1).is_err(), "{sequences}");

    let message = require(&config, &Batch::LADDER, Keep::ALL, 1 << 30).unwrap_err().to_string();
    assert!(message.ends_with("use shorter sequences, a smaller model or a larger GPU"), "{message}");
    let endless = Batch { sequences: usize::MAX, tokens: usize::MAX };
    assert!(require(&config, &endless, Keep::LEAN, usize::MAX).is_err());
    for batch in [Batch { sequences: 0, tokens: 8 }, Batch { sequences: 8, tokens: 0 }] {
        assert!(require(&config, &batch, Keep::LEAN, usize::MAX).unwrap_err().to_string().contains("at least 1"));
    }
    let invalid = ModelConfig { heads: 3, ..config };
    assert!(require(&invalid, &Batch::LADDER, Keep::LEAN, usize::MAX).is_err());
}
