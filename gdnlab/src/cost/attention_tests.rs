use super::super::model::{Batch, training_cost_per_token};
use super::super::published::{Table, gb10_rates, published};
use super::*;
use crate::model::config::{Mixer, ModelConfig, Size};

fn call(heads: usize) -> Call {
    Call { batch: 32, tokens: 1024, heads, head_dim: 64, element_bytes: 2 }
}

#[test]
fn the_forward_and_four_products_of_the_backward_are_the_flops_of_the_model() {
    for size in Size::LADDER {
        let config = ModelConfig::preset(Mixer::Attention, size);
        let call = call(config.heads);
        let per_token = (call.forward().flop + 0.8 * call.backward().flop) / Batch::LADDER.total_tokens() as f64;
        let count = config.parameters();
        let products = 6.0 * (count.total() - count.vectors - count.embedding) as f64;
        let mixing = training_cost_per_token(&config, &Batch::LADDER).flop - products;
        assert!((per_token * config.layers as f64 / mixing - 1.0).abs() < 1e-9, "{size}");
    }
}

/// Sums over the tokens, and over the visible scores of each, written out.
#[test]
fn traffic_and_visible_scores_are_counted() {
    let call = Call { batch: 2, tokens: 5, heads: 3, head_dim: 32, element_bytes: 4 };
    let visible: f64 = (0..5).map(|query| query as f64 + 0.5).sum();
    assert_eq!(call.forward().flop, 2.0 * 6.0 * visible * 2.0 * 32.0);
    assert_eq!(call.backward().flop, 5.0 * 6.0 * visible * 2.0 * 32.0);
    assert_eq!(call.forward().bytes, 2.0 * 5.0 * 3.0 * (4.0 * 32.0 * 4.0 + 4.0));
    assert_eq!(call.backward().bytes, 2.0 * 5.0 * 3.0 * (8.0 * 32.0 * 4.0 + 4.0));
    let scores = 6.0 * 25.0 * 4.0;
    assert_eq!(call.materialised_forward().bytes, 4.0 * scores + 2.0 * 5.0 * 3.0 * 4.0 * 32.0 * 4.0);
    assert_eq!(call.materialised_forward().flop, 2.0 * call.forward().flop);
}

/// No published time lies below the floor of the machine; the best backend of the post is more than 8 times above it.
#[test]
fn the_published_times_lie_above_the_floor() {
    let (table, rates) = (published(Table::AttentionBackends), gb10_rates());
    for row in 0..table.height() {
        let heads: usize = table.text(row, "H").parse().unwrap();
        let cost = call(heads).forward();
        let latency_ms = table.number(row, "ms");
        let times = latency_ms / cost.floor_ms(&rates);
        assert!((8.0..11.0).contains(&times), "H = {heads}: {latency_ms} ms is {times} times the floor");
        assert!(latency_ms < call(heads).materialised_forward().floor_ms(&rates), "H = {heads}");
    }
    assert_eq!(table.height(), 9);
}
