use super::*;
use crate::table::{self, Mode};
use gdnlab_deps::plotters::prelude::*;
use gdnlab_deps::plotters::style::text_anchor::{HPos, VPos};
use gdnlab_deps::polars::prelude::{DataFrame, IntoLazy, col, df, lit};
use std::path::Path;

fn published() -> DataFrame {
    table::day1_published(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published"))).unwrap()
}

/// Checks that the SVG parses, that the PNG shows something of the right size, and that the labels stand in the SVG.
pub(super) fn check(figure: &Figure, labels: &[&str]) {
    let tree = usvg::Tree::from_str(figure.svg(), &usvg::Options::default()).unwrap();
    for label in labels {
        assert!(figure.svg().contains(label), "label {label}");
    }
    let pixels = tiny_skia::Pixmap::decode_png(&figure.png().unwrap()).unwrap();
    let expected = tree.size().to_int_size();
    assert_eq!(pixels.width(), expected.width() * DENSITY);
    assert_eq!(pixels.height(), expected.height() * DENSITY);
    let inked = pixels.pixels().iter().filter(|pixel| pixel.red() != 255 || pixel.green() != 255).count();
    let share = inked as f64 / pixels.pixels().len() as f64;
    assert!((0.005..0.9).contains(&share), "{share} of the pixels carry ink");
}

fn variants() -> DataFrame {
    df!(
        "panel" => ["fp32", "fp32", "fp32", "fp32", "tf32", "tf32"],
        "step" => ["none", "none", "K K^T", "solve", "none", "solve"],
        "tensor" => ["o", "dh0", "o", "o", "o", "o"],
        "max_rel" => [4e-7, 5e-7, 3e-4, 1e-4, 2e-3, 1.5e-3],
    )
    .unwrap()
}

#[test]
fn errors_per_tensor_show_both_series_and_every_roundoff() {
    let table = published();
    let series = [("ours & here", &table), ("published", &table)];
    let figure = max_rel_per_tensor(&series, "the source").unwrap();
    check(
        &figure,
        &[
            "final_state",
            "dbeta",
            "10⁻³",
            "u(bf16) = 2⁻⁸",
            "u(TF32) = 2⁻¹¹",
            "u(fp32) = 2⁻²⁴",
            "ours &amp; here",
            "the source",
        ],
    );
    assert_eq!(figure.svg().matches("<circle").count(), 2 * 189 + 3 + 2);
    assert!(figure.description().contains("TF32 3."), "{}", figure.description());
    assert_eq!(figure, max_rel_per_tensor(&series, "the source").unwrap(), "drawn the same every time");
}

#[test]
fn errors_by_length_show_a_panel_and_a_heatmap_per_mode() {
    let table = published();
    let figure = error_by_length(&[("published", &table)], "the source").unwrap();
    check(&figure, &["fp32 with a TF32 solve", "4096, 128/128", "T, tokens", "in u(bf16) = 2⁻⁸", "unit roundoffs"]);
}

#[test]
fn the_closest_variant_is_the_title() {
    let target = df!("tensor" => ["o", "o", "o", "dq"], "max_rel" => [1e-4, 9e-5, 9e-3, 2e-4]).unwrap();
    let rows = Rows { panel: "panel", row: "step" };
    let figure = error_by_row(&variants(), rows, ("the target", &target), "the source").unwrap();
    check(&figure, &["K Kᵀ", "range of the target", "factor off", "×3.0", "10⁻⁶", "the source"]);
    // The median of the target's o is 1e-4, exactly that of the third variant.
    assert!(figure.svg().contains("fp32: solve comes closest to the target, ×1.0 off"), "{}", figure.description());
    assert_eq!(figure.svg().matches("<circle").count(), 5 + 1, "a dot per tensor that the target has too");

    let other = df!("tensor" => ["dv"], "max_rel" => [1e-4]).unwrap();
    assert!(matches!(error_by_row(&variants(), rows, ("x", &other), ""), Err(Error::Figure(_))));
    let missing = Rows { panel: "base", row: "step" };
    assert!(error_by_row(&variants(), missing, ("x", &target), "").unwrap_err().to_string().contains("'base'"));
}

#[test]
fn every_coloured_mode_has_a_colour_of_its_own() {
    let colors = ["bf16", "f16-internals", "tf32", "fp32-tf32-solve", "fp32", "mine"]
        .map(|mode| style::color_of(&Mode::of(mode)));
    for (i, color) in colors.iter().enumerate() {
        assert!(!colors[..i].contains(color), "{color:?}");
    }
}

#[test]
fn tables_that_cannot_be_drawn_are_refused() {
    let table = published();
    let without = table.drop("d_k").unwrap();
    let message = max_rel_per_tensor(&[("x", &without)], "").unwrap_err().to_string();
    assert!(message.contains("expected the column 'd_k'"), "{message}");
    let words = table.clone().lazy().with_column(lit("many").alias("T")).collect().unwrap();
    assert!(error_by_length(&[("x", &words)], "").unwrap_err().to_string().contains("'T'"));
    let exact = table.lazy().with_column(lit(0.0).alias("max_rel")).collect().unwrap();
    assert!(matches!(max_rel_per_tensor(&[("x", &exact)], ""), Err(Error::Figure(_))));
    assert!(matches!(error_by_length(&[("x", &exact)], ""), Err(Error::Figure(_))));
    assert!(matches!(max_rel_per_tensor(&[], ""), Err(Error::Figure(_))));
    assert!(matches!(error_by_length(&[], ""), Err(Error::Figure(_))));
}

#[test]
fn a_figure_is_saved_as_svg_and_png() {
    let figure =
        Figure::draw((40, 30), "a <dot>", |canvas| canvas.draw(&Circle::new((40, 30), 20, BLACK.filled()))).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let paths = figure.save(folder.path().join("figures"), "dot").unwrap();
    assert!(paths[0].ends_with("figures/dot.svg") && paths[1].ends_with("figures/dot.png"));
    let svg = std::fs::read_to_string(&paths[0]).unwrap();
    assert!(
        svg.starts_with("<svg width=\"40\" height=\"30\"") && svg.contains("<title>a &lt;dot&gt;</title>"),
        "{svg}"
    );
    let png = std::fs::read(&paths[1]).unwrap();
    assert!(png.starts_with(b"\x89PNG"));
    assert_eq!(std::fs::read_dir(folder.path().join("figures")).unwrap().count(), 2);
}

#[test]
fn text_is_rendered_with_the_bundled_font() {
    let write = |text: &'static str| {
        let style = style::text(40, style::INK, HPos::Left, VPos::Center);
        Figure::draw((300, 40), "text", move |canvas| canvas.draw_text(text, &style, (10, 40))).unwrap()
    };
    let ink = |figure: &Figure| {
        let pixels = tiny_skia::Pixmap::decode_png(&figure.png().unwrap()).unwrap();
        pixels.pixels().iter().filter(|pixel| pixel.red() < 128).count()
    };
    // A glyph that the font lacks would leave less ink than these have.
    for text in ["10⁻³", "max |x − r|", "u = 2⁻²⁴ · ≈ ≥ → ΔΣ"] {
        assert!(ink(&write(text)) > 20 * text.chars().filter(|c| !c.is_whitespace()).count(), "{text}");
    }
}

#[test]
fn what_was_measured_stands_on_what_was_emulated() {
    let table = published();
    let twice = table.clone().lazy().with_column((col("max_rel") * lit(2.0)).alias("max_rel")).collect().unwrap();
    let only_bf16 = table.clone().lazy().filter(col("mode").eq(lit("bf16"))).collect().unwrap();
    let pairs = [
        Emulation { name: "ours on a GPU", emulated: &table, measured: &twice },
        Emulation { name: "theirs", emulated: &table, measured: &only_bf16 },
    ];
    let figure = emulations(&pairs, "the footer").unwrap();
    check(
        &figure,
        &["theirs", "final_state", "TF32", "fp32 with a TF32 solve", "×2.0", "×1.0", "u(bf16)", "the footer"],
    );
    // A dot per mode and tensor that was measured, and three in the legend.
    assert_eq!(figure.svg().matches("<circle").count(), 3 * 7 + 7 + 3);
    let says = figure.description();
    assert!(says.contains("ours on a GPU is off its emulation by a typical factor: bf16 ×2.0, TF32 ×2.0,"), "{says}");
    assert!(says.contains("theirs is off its emulation by a typical factor: bf16 ×1.0."), "{says}");
    let exact = table.clone().lazy().with_column(lit(0.0).alias("max_rel")).collect().unwrap();
    let nothing = Emulation { name: "x", emulated: &table, measured: &exact };
    assert!(matches!(emulations(&[nothing], ""), Err(Error::Figure(_))));
    assert!(matches!(emulations(&[], ""), Err(Error::Figure(_))));
}
