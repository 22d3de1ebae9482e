use super::super::chinchilla::Run;
use super::super::published::{Published, Table, as_printed, gb10_rates, published};
use super::*;
use crate::model::config::Size;

/// Compares `value` with what was printed; returns what differs, in words.
fn differs(table: &Published, row: usize, column: &str, value: f64) -> Option<String> {
    let text = table.text(row, column);
    (as_printed(value, text) != text)
        .then(|| format!("{} {column}: {text} was printed, the formula gives {value}", table.text(row, "size")))
}

/// All 8 rows and every analytic column, to the printed digits.
///
/// The body counts every parameter, norms too: without theirs, 39.4 instead of the 39.5 million of the smallest GDN would
/// have been printed. F and B count no vectors: with the weights of the norms, 2042 MFLOP and 2465 kB would have been.
#[test]
fn every_analytic_column_of_the_ladder_is_reproduced_to_the_printed_digits() {
    let (ladder, rates) = (published(Table::Ladder), gb10_rates());
    let mut wrong = Vec::new();
    for row in 0..ladder.height() {
        let (mixer, size) = ladder.model(row);
        let config = ModelConfig::preset(mixer, size);
        let cost = training_cost_per_token(&config, &Batch::LADDER);
        let used = Utilization::new(&cost, ladder.number(row, "tok_per_s"), &rates);
        let columns = [
            ("d_model", config.d_model as f64),
            ("layers", config.layers as f64),
            ("body_Mparams", config.parameters().body() as f64 / 1e6),
            ("us_per_tok", used.us_per_tok),
            ("mfu_pct", 100.0 * used.mfu.unwrap()),
            ("impl_GBps", used.gb_s),
            ("bw_pct", 100.0 * used.bandwidth_fraction),
            ("F_MFLOP_per_tok", cost.flop / 1e6),
            ("B_kB_per_tok", cost.bytes / 1e3),
            ("I_FLOP_per_byte", cost.intensity_flop_per_byte()),
            ("I_over_ridge", cost.intensity_over_ridge(&rates).unwrap()),
        ];
        wrong.extend(columns.into_iter().filter_map(|(column, value)| differs(&ladder, row, column, value)));
    }
    assert_eq!(ladder.height(), 8);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Every number is reproduced but one: 3.97 billion tokens were printed for all parameters of the 125M model, and `20 N` is
/// 3.9647. Rounded to three decimals that is 3.965, and once more 3.97; the other rows come out the same either way.
#[test]
fn the_hours_to_20_tokens_per_parameter_are_reproduced_to_the_printed_digits() {
    let (chinchilla, ladder) = (published(Table::Chinchilla), published(Table::Ladder));
    let mut wrong = Vec::new();
    for row in 0..chinchilla.height() {
        let size: Size = chinchilla.text(row, "size").parse().unwrap();
        let of_ladder = (0..ladder.height()).find(|&row| ladder.model(row) == (Mixer::Gdn, size)).unwrap();
        let tok_per_s = ladder.number(of_ladder, "tok_per_s");
        let count = ModelConfig::preset(Mixer::Gdn, size).parameters();
        let (body, total) = (Run::new(count.body(), tok_per_s), Run::new(count.total(), tok_per_s));
        let columns = [
            ("N_body_M", count.body() as f64 / 1e6),
            ("tokens_body_B", body.tokens / 1e9),
            ("hours_body", body.hours),
            ("N_total_M", count.total() as f64 / 1e6),
            ("tokens_total_B", total.tokens / 1e9),
            ("hours_total", total.hours),
        ];
        for (column, value) in columns {
            if let Some(difference) = differs(&chinchilla, row, column, value) {
                wrong.push((size, column, difference));
            }
            if column.starts_with("tokens") {
                let half_up =
                    |value: f64, decimals: i32| (value * 10f64.powi(decimals) + 0.5).floor() / 10f64.powi(decimals);
                let twice = half_up(half_up(value, 3) + 1e-9, 2);
                assert_eq!(differs(&chinchilla, row, column, twice), None);
            }
        }
    }
    assert_eq!(chinchilla.height(), 4);
    let which: Vec<_> = wrong.iter().map(|(size, column, _)| (*size, *column)).collect();
    assert_eq!(which, [(Size::M125, "tokens_total_B")], "{wrong:#?}");
}

/// The ridge point that was printed, 429.25, comes from rates of more digits than the two decimals that were printed: those
/// give 429.24, and anything that rounds to them between 429.21 and 429.27. The fractions of the peak are in the post alone.
#[test]
fn the_roofline_is_reproduced_as_far_as_its_printed_inputs_allow() {
    let table = published(Table::Roofline);
    let [matmul, copy, ridge] =
        ["bf16_matmul", "copy_bandwidth", "ridge_point"].map(|quantity| table.row("quantity", quantity));
    let rates = |column: &str, half_digit: f64| Rates {
        copy_bytes_per_s: 1e9 * (table.number(copy, column) - half_digit),
        matmul_flop_per_s: Some(1e12 * (table.number(matmul, column) + half_digit)),
    };
    let theoretical = rates("theoretical", 0.0).ridge_flop_per_byte().unwrap();
    assert_eq!(as_printed(theoretical, table.text(ridge, "theoretical")), table.text(ridge, "theoretical"));
    let [low, middle, high] = [-0.005, 0.0, 0.005].map(|half| rates("measured", half).ridge_flop_per_byte().unwrap());
    assert_eq!(format!("{low:.2} {middle:.2} {high:.2}"), "429.21 429.24 429.27");
    assert!((low..high).contains(&table.number(ridge, "measured")));
    for (row, percent) in [(matmul, "80.3"), (copy, "81.5"), (ridge, "98.6")] {
        let fraction = table.number(row, "measured") / table.number(row, "theoretical");
        assert_eq!(as_printed(100.0 * fraction, percent), percent);
    }
}

/// Bytes per parameter and per D and block that were not published: no other whole numbers give the printed B of the
/// four sizes.
#[test]
fn the_constants_of_the_traffic_are_the_only_whole_ones_that_fit() {
    let ladder = published(Table::Ladder);
    for (mixer, expected) in [(Mixer::Attention, (34, 104)), (Mixer::Gdn, (34, 78))] {
        let rows: Vec<usize> = (0..ladder.height()).filter(|&row| ladder.model(row).0 == mixer).collect();
        let fits = |per_parameter: i32, per_width: i32| {
            rows.iter().all(|&row| {
                let config = ModelConfig::preset(mixer, ladder.model(row).1);
                let count = config.parameters();
                let parameters = (count.total() - count.vectors) as f64;
                let bytes = f64::from(per_parameter) * parameters / Batch::LADDER.total_tokens() as f64
                    + f64::from(per_width) * (config.d_model * config.layers) as f64;
                differs(&ladder, row, "B_kB_per_tok", bytes / 1e3).is_none()
            })
        };
        let pairs = (0..100).flat_map(|a| (0..300).map(move |b| (a, b)));
        let fitting: Vec<(i32, i32)> = pairs.filter(|&(a, b)| fits(a, b)).collect();
        assert_eq!(fitting, [expected]);
    }
}

#[test]
fn the_state_of_gdn_is_smaller_beyond_the_crossover() {
    let crossover = state_crossover_tokens(64, 128);
    assert!((crossover - 128.0 / 3.0).abs() < 1e-12);
    let gdn = ModelConfig::preset(Mixer::Gdn, Size::M125);
    assert_eq!(state_elements_per_layer(&gdn, 1), 9 * 64 * 128);
    assert_eq!(state_elements_per_layer(&gdn, 1 << 20), 9 * 64 * 128);
    // Attention with the same heads, which no preset has.
    let attention = ModelConfig { mixer: Mixer::Attention, ..gdn };
    for tokens in [1, 42, 43, 1024] {
        let (kept, state) = (state_elements_per_layer(&attention, tokens), state_elements_per_layer(&gdn, tokens));
        assert_eq!(kept, tokens as u128 * 9 * (64 + 128));
        assert_eq!(kept > state, tokens as f64 > crossover);
        assert!((kept as f64 / state as f64 - tokens as f64 / crossover).abs() < 1e-9);
    }
}

/// Both sides of the post's equation, and then the ladder's, where GDN's projections are smaller.
#[test]
fn gdn_needs_fewer_flops_beyond_the_crossover() {
    for (d, v) in [(512.0, 128.0), (1024.0, 128.0), (2048.0, 256.0)] {
        let tokens = flop_crossover_tokens_of_width(d as usize, v as usize);
        assert_eq!(24.0 * d * d + 6.0 * tokens * d, 48.0 * d * d + 18.0 * d * v);
    }
    for size in Size::LADDER {
        let (attention, gdn) = (ModelConfig::preset(Mixer::Attention, size), ModelConfig::preset(Mixer::Gdn, size));
        let crossover = flop_crossover_tokens(&attention, &gdn).unwrap();
        let flop = |config, tokens: f64| {
            training_cost_per_token(config, &Batch { sequences: 1, tokens: tokens as usize }).flop
        };
        assert!(flop(&attention, crossover.floor()) <= flop(&gdn, 1.0), "{size}: {crossover}");
        assert!(flop(&attention, crossover.ceil()) >= flop(&gdn, 1.0), "{size}: {crossover}");
        // Convolutions, a and b stand beside 2 D + 3 V.
        let about = (2 * gdn.d_model + 3 * gdn.value_dim) as f64;
        assert!((1.0..1.04).contains(&(crossover / about)), "{size}: {crossover} beside {about}");
        assert!(flop_crossover_tokens(&gdn, &attention).is_err());
    }
}

#[test]
fn without_a_rate_of_products_there_is_no_mfu() {
    let rates = Rates { copy_bytes_per_s: 4e12, matmul_flop_per_s: None };
    let used = Utilization::new(&Cost { flop: 2e9, bytes: 1e6 }, 500_000.0, &rates);
    let expected = Utilization { us_per_tok: 2.0, tflop_s: 1000.0, gb_s: 500.0, mfu: None, bandwidth_fraction: 0.125 };
    assert_eq!(used, expected);
}
