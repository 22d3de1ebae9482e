use super::super::tests::check;
use super::super::{arithmetic_intensity, hours_to_chinchilla, throughput_and_mfu};
use crate::Error;
use crate::table::{chinchilla, ladder, rooflines};
use gdnlab_deps::polars::prelude::{DataFrame, IntoLazy, col, lit};

const PUBLISHED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published");

/// The ladder of the post with its rates.
fn published() -> (DataFrame, DataFrame) {
    let rooflines = rooflines(&[], PUBLISHED).unwrap();
    let ladder = ladder(&[], PUBLISHED, &rooflines).unwrap();
    (ladder.lazy().filter(col("machine").eq(lit("GB10"))).collect().unwrap(), rooflines)
}

/// The published ladder, and below it the same at ten times the rate on another machine, where GDN is twice as fast again.
fn two_machines() -> (DataFrame, DataFrame) {
    let (ladder, rooflines) = published();
    let factor = || {
        let gdn = col("mixer").eq(lit("gdn"));
        gdn.cast(gdnlab_deps::polars::prelude::DataType::Float64) * lit(10.0) + lit(10.0)
    };
    let faster = ladder.clone().lazy().with_columns([
        lit("H200").alias("machine"),
        lit("gdnlab").alias("implementation"),
        (col("tok_per_s") * factor()).alias("tok_per_s"),
    ]);
    let renamed = rooflines
        .clone()
        .lazy()
        .with_columns([lit("H200").alias("machine"), (col("measured") * lit(20.0)).alias("measured")]);
    (ladder.vstack(&faster.collect().unwrap()).unwrap(), rooflines.vstack(&renamed.collect().unwrap()).unwrap())
}

#[test]
fn throughput_and_mfu_show_every_model_and_the_factors_between_mixers() {
    let (ladder, _) = published();
    let figure = throughput_and_mfu(&ladder, "the footer").unwrap();
    check(&figure, &["attention", "GB10, PyTorch + fla, published", "250M", "×0.66", "the footer"]);
    // A hollow mark is two circles: 8 models in two panels, the legend, the row of factors.
    assert_eq!(figure.svg().matches("<circle").count(), 2 * (2 * 8 + 2));
    assert!(figure.svg().contains("speed: 62 to 66 % on GB10"), "the title");
    let says = figure.description();
    assert!(says.contains("GDN trains at 62 to 66 % of attention's tokens per second."), "{says}");
    assert!(says.contains("MFU of attention: 27 to 40 %. MFU of GDN: 19 to 28 %."), "{says}");
    assert_eq!(figure, throughput_and_mfu(&ladder, "the footer").unwrap(), "drawn the same every time");
}

#[test]
fn a_second_machine_is_compared_with_the_first() {
    let (ladder, _) = two_machines();
    let figure = throughput_and_mfu(&ladder, "").unwrap();
    check(&figure, &["H200, gdnlab", "62 to 66 % on GB10, 123 to 133 % on H200"]);
    let says = figure.description();
    let expected = "H200, gdnlab trains attention at 10 times the rate of GB10, PyTorch + fla, published.";
    assert!(says.contains(expected), "{says}");
    assert!(says.contains("H200, gdnlab trains GDN at 20 times the rate"), "{says}");

    let here = ladder.lazy().with_column(lit("GB10").alias("machine")).collect().unwrap();
    let same = throughput_and_mfu(&here, "").unwrap();
    check(&same, &["×10.00", "×20.00"]);
}

#[test]
fn without_a_rate_of_products_there_is_throughput_alone() {
    let (ladder, _) = published();
    let without = ladder.lazy().with_column(lit(f64::NAN).alias("mfu_pct")).collect().unwrap();
    let figure = throughput_and_mfu(&without, "").unwrap();
    check(&figure, &["no matmul rate is known"]);
    assert!(matches!(throughput_and_mfu(&without.head(Some(0)), ""), Err(Error::Figure(_))));
    let message = throughput_and_mfu(&without.drop("mixer").unwrap(), "").unwrap_err().to_string();
    assert!(message.contains("expected the column 'mixer'"), "{message}");
}

#[test]
fn the_intensity_of_every_model_stands_against_the_ridges() {
    let (ladder, rooflines) = published();
    let figure = arithmetic_intensity(&ladder, &rooflines, "the footer").unwrap();
    check(&figure, &["ridge of GB10, 429", "1033", "555", "GB10: 95.5 TFLOP/s, 222 GB/s", "the footer"]);
    assert!(figure.svg().contains("Every model lies above the ridge of GB10; training reaches 19 to 40 % of the roof"));
    let says = figure.description();
    assert!(says.contains("8 of 8 trainings there lie above it. They reach 19 to 40 %"), "{says}");
    let unknown = ladder.clone().lazy().with_column(lit("unknown").alias("machine")).collect().unwrap();
    let both = arithmetic_intensity(&ladder.vstack(&unknown).unwrap(), &rooflines, "the footer").unwrap();
    assert_eq!(both.svg(), figure.svg(), "a machine without rates has no roof to lie below");
    let elsewhere = rooflines.clone().lazy().with_column(lit("elsewhere").alias("machine")).collect().unwrap();
    assert!(matches!(arithmetic_intensity(&ladder, &elsewhere, ""), Err(Error::Figure(_))));
    let (ladder, rooflines) = two_machines();
    let both = arithmetic_intensity(&ladder, &rooflines, "").unwrap();
    check(&both, &["ridge of H200, 429", "Every model lies above the ridge of GB10 and of H200"]);
}

/// With a ridge at 700 FLOP per byte, two of the four attention models and none of GDN's lie below.
#[test]
fn a_ridge_between_the_models_is_said_to_be_between_them() {
    let (ladder, rooflines) = published();
    let products = col("quantity").eq(lit("bf16_matmul"));
    let between = gdnlab_deps::polars::prelude::when(products).then(lit(0.7 * 222.37)).otherwise(col("measured"));
    let rooflines = rooflines.lazy().with_column(between.alias("measured")).collect().unwrap();
    let figure = arithmetic_intensity(&ladder, &rooflines, "").unwrap();
    assert!(figure.svg().contains("5 of 8 trainings lie above the ridge of GB10"), "{}", figure.description());
}

#[test]
fn hours_stand_in_rows_with_their_words() {
    let (ladder, _) = two_machines();
    let figure = hours_to_chinchilla(&chinchilla(&ladder).unwrap(), "the footer").unwrap();
    check(&figure, &["5.3 days to 6.5 days", "4.3 h to 7.8 h", "1 week", "125M", "the footer"]);
    assert!(figure.svg().contains("20 tokens per parameter of the body, GDN 250M: 5.3 days on GB10, 6.4 h on H200"));
    let fewer = ladder.head(Some(11)).lazy().filter(col("size").neq(lit("60M"))).collect().unwrap();
    let common = hours_to_chinchilla(&chinchilla(&fewer).unwrap(), "").unwrap();
    assert!(common.svg().contains("of the body, GDN 30M: 4.3 h on GB10, 13 min on H200"), "what both trained");
    let says = figure.description();
    assert!(
        says.contains("GB10, PyTorch + fla, published: GDN from 30M 4.3 h or 7.8 h to 250M 5.3 days or 6.5 days."),
        "{says}"
    );
    // Two hollow marks in each of 8 rows, two filled ones in 8 more, and the legend.
    assert_eq!(figure.svg().matches("<circle").count(), 2 * (2 * 8 + 1) + 2 * 8 + 1);
    let empty = chinchilla(&ladder).unwrap().head(Some(0));
    assert!(matches!(hours_to_chinchilla(&empty, ""), Err(Error::Figure(_))));
}
