use super::super::{read_csv, rooflines};
use super::*;
use crate::record::{Environment, Ladder, Machine, Roofline, Workload};

const PUBLISHED_FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published");

fn environment(utc: &str) -> Environment {
    let machine = Machine { gpu: Some("NVIDIA H200".to_owned()), ..Machine::default() };
    Environment { machine, utc: Some(utc.to_owned()), ..Environment::default() }
}

/// A training of the size on an H200, with an MFU that nobody should read.
fn record(utc: &str, mixer: Mixer, size: Size, tok_per_s: f64) -> Record {
    let config = ModelConfig::preset(mixer, size);
    let ladder = Ladder {
        mixer: mixer.name().to_owned(),
        size: size.name().to_owned(),
        d_model: config.d_model,
        layers: config.layers,
        body_params: 1,
        tok_per_s,
        us_per_tok: 1.0,
        peak_gb: Some(20.0),
        mfu: Some(0.99),
        bandwidth_fraction: Some(0.99),
    };
    let workload = Workload { batch: Some(32), tokens: Some(1024), ..Workload::default() };
    Record::new(&environment(utc), &workload, Measurement::Ladder(ladder))
}

fn rates_of_h200() -> Vec<Record> {
    [("bf16_matmul", 800.0, "TFLOP/s"), ("copy_bandwidth", 4000.0, "GB/s")]
        .into_iter()
        .map(|(quantity, value, unit)| {
            let rate = Roofline { quantity: quantity.to_owned(), value, theoretical: None, unit: unit.to_owned() };
            Record::new(&environment("2026-11-02T00:00:00Z"), &Workload::default(), Measurement::Roofline(rate))
        })
        .collect()
}

/// The ladder of the post.
fn published_ladder() -> DataFrame {
    let ladder = ladder(&[], PUBLISHED_FOLDER, &rooflines(&[], PUBLISHED_FOLDER).unwrap()).unwrap();
    ladder.lazy().filter(col("machine").eq(lit("GB10"))).collect().unwrap()
}

/// Every column of the published ladder, to the digits that were printed, though tok/s and GB alone are read.
#[test]
fn the_published_table_comes_out_as_it_was_printed() {
    let columns = [
        "d_model",
        "layers",
        "body_Mparams",
        "tok_per_s",
        "us_per_tok",
        "peak_GB",
        "mfu_pct",
        "impl_GBps",
        "bw_pct",
        "F_MFLOP_per_tok",
        "B_kB_per_tok",
        "I_FLOP_per_byte",
        "I_over_ridge",
    ];
    let types = columns.map(|name| (name, DataType::String));
    let printed = read_csv(Path::new(PUBLISHED_FOLDER).join(OTHERS[0].file), &types).unwrap();
    let ladder = published_ladder();
    assert_eq!(ladder.height(), 8);
    for name in columns {
        let (texts, values) = (texts(&printed, name).unwrap(), numbers(&ladder, name).unwrap());
        for (text, value) in texts.iter().zip(values) {
            let decimals = text.split_once('.').map_or(0, |(_, decimals)| decimals.len());
            assert_eq!(format!("{:.decimals$}", value.unwrap()), *text, "{name}");
        }
    }
}

/// Three rows of attention and one of GDN, whose MFU at 803 TFLOP/s was noted as 24, 17, 31 and 37 %.
#[test]
fn what_pytorch_reaches_on_an_h200_stands_between() {
    let mut rates = rates_of_h200();
    if let Measurement::Roofline(products) = &mut rates[0].measurement {
        products.value = 803.0;
    }
    let table = ladder(&[], PUBLISHED_FOLDER, &rooflines(&rates, PUBLISHED_FOLDER).unwrap()).unwrap();
    let rungs = &rungs(&table).unwrap()[8..];
    assert!(rungs.iter().all(|rung| rung.source() == "H200, PyTorch + fla"));
    let mfu: Vec<f64> = rungs.iter().map(|rung| rung.mfu_pct.unwrap()).collect();
    assert!(mfu.iter().zip([24.0, 17.0, 31.0, 37.0]).all(|(mfu, noted)| (mfu - noted).abs() < 2.0), "{mfu:?}");
}

#[test]
fn recorded_trainings_stand_below_with_what_the_machine_s_rates_make_of_them() {
    let records = [
        record("2026-11-02T00:00:00Z", Mixer::Gdn, Size::M125, 100_000.0),
        record("2026-11-03T00:00:00Z", Mixer::Gdn, Size::M125, 200_000.0),
        record("2026-11-01T00:00:00Z", Mixer::Gdn, Size::M125, 300_000.0),
        record("2026-11-01T00:00:00Z", Mixer::Attention, Size::M125, 300_000.0),
        record("2026-11-01T00:00:00Z", Mixer::Gdn, Size::M30, 300_000.0),
    ];
    let rooflines = rooflines(&rates_of_h200(), PUBLISHED_FOLDER).unwrap();
    let table = ladder(&records, PUBLISHED_FOLDER, &rooflines).unwrap();
    let rungs = rungs(&table).unwrap();
    let ours: Vec<(Mixer, Size, f64)> =
        rungs[12..].iter().map(|rung| (rung.mixer, rung.size, rung.tok_per_s)).collect();
    let expected = [
        (Mixer::Gdn, Size::M30, 300_000.0),
        (Mixer::Attention, Size::M125, 300_000.0),
        (Mixer::Gdn, Size::M125, 200_000.0),
    ];
    assert_eq!(ours, expected);
    assert_eq!(
        (rungs[12].source(), rungs[0].source()),
        ("H200, gdnlab".into(), "GB10, PyTorch + fla, published".into())
    );
    let flop = training_cost_per_token(&ModelConfig::preset(Mixer::Gdn, Size::M125), &Batch::LADDER).flop;
    let mfu = rungs[14].mfu_pct.unwrap();
    assert!((mfu - 100.0 * flop * 200_000.0 / 800e12).abs() < 1e-9, "computed, not read: {mfu}");
}

#[test]
fn without_rates_of_the_machine_what_needs_them_is_empty() {
    let records = [record("2026-11-02T00:00:00Z", Mixer::Gdn, Size::M125, 100_000.0)];
    let table = ladder(&records, PUBLISHED_FOLDER, &rooflines(&[], PUBLISHED_FOLDER).unwrap()).unwrap();
    let last = |name: &str| numbers(&table, name).unwrap()[12];
    assert_eq!(["mfu_pct", "bw_pct", "I_over_ridge"].map(last), [None; 3]);
    assert_eq!(last("us_per_tok"), Some(10.0));
    assert!(last("impl_GBps").is_some() && last("I_FLOP_per_byte").is_some());
}

#[test]
fn rows_that_are_no_rung_are_refused() {
    let rooflines = rooflines(&[], PUBLISHED_FOLDER).unwrap();
    let refused = |record: Record| ladder(&[record], PUBLISHED_FOLDER, &rooflines).unwrap_err().to_string();
    let good = || record("2026-11-02T00:00:00Z", Mixer::Gdn, Size::M125, 1.0);
    let mut without_length = good();
    without_length.workload.tokens = None;
    assert!(refused(without_length).contains("gdn 125M names no B or no T"));
    let mut narrow = good();
    if let Measurement::Ladder(ladder) = &mut narrow.measurement {
        ladder.d_model = 512;
    }
    assert!(refused(narrow).contains("18 blocks of width 512: expected 18 of 768"));
}

/// The published hours, to the printed digits; the one exception is explained in [`crate::cost::model`]'s tests.
#[test]
fn hours_are_those_that_were_printed() {
    let columns = ["N_body_M", "tokens_body_B", "hours_body", "N_total_M", "hours_total"];
    let types = columns.map(|name| (name, DataType::String));
    let printed = read_csv(Path::new(PUBLISHED_FOLDER).join("day02_gb10_chinchilla.csv"), &types).unwrap();
    let table = chinchilla(&published_ladder()).unwrap();
    let gdn: Vec<usize> = (0..8).filter(|&row| texts(&table, "mixer").unwrap()[row] == "gdn").collect();
    for name in columns {
        let (texts, values) = (texts(&printed, name).unwrap(), numbers(&table, name).unwrap());
        for (text, &row) in texts.iter().zip(&gdn) {
            let decimals = text.split_once('.').map_or(0, |(_, decimals)| decimals.len());
            assert_eq!(format!("{:.decimals$}", values[row].unwrap()), *text, "{name}");
        }
    }
}

#[test]
fn published_peaks_lie_within_a_twentieth_of_the_estimate() {
    let table = peak_memory(&published_ladder()).unwrap();
    let ratios = numbers(&table, "peak_over_keep_all").unwrap();
    assert!(ratios.iter().all(|ratio| (ratio.unwrap() - 1.0).abs() < 0.05), "{ratios:?}");
    let (all, lean) = (numbers(&table, "keep_all_GB").unwrap(), numbers(&table, "lean_GB").unwrap());
    assert!(all.iter().zip(&lean).all(|(all, lean)| lean < all));
}

#[test]
fn every_rung_has_its_crossovers() {
    let table = crossovers(1024).unwrap();
    let column = |name: &str| -> Vec<f64> { numbers(&table, name).unwrap().into_iter().flatten().collect() };
    // 4 D + 3 V of widths 512, 768, 768 and 1024.
    assert_eq!(column("T_flop_4D_3V"), [2432.0, 3456.0, 3456.0, 4480.0]);
    // H K V = 3/4 D 128 elements against 2 D for each token.
    assert_eq!(column("T_state"), [48.0; 4]);
    let (attention, gdn) = (column("state_attn"), column("state_gdn"));
    assert!(attention.iter().zip(&gdn).all(|(attention, gdn)| (attention / gdn - 1024.0 / 48.0).abs() < 1e-9));
    assert!(column("T_flop").iter().zip(column("T_flop_4D_3V")).all(|(ladder, post)| *ladder < post));
}
