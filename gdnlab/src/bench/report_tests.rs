use super::*;
use crate::bench::roofline::{Copier, CopyBandwidth};
use crate::bench::{Case, Peer, Samples, SeqLens};
use crate::precision::Format;
use crate::record::Pass;

const COPY: CopyBandwidth = CopyBandwidth {
    bytes_per_s: 4e12,
    theoretical: None,
    copier: Copier::Driver,
    copied_bytes: 256 << 20,
    piece_bytes: 256 << 20,
};

fn row(pass: Pass, lengths: &str, label: &str, peers: &[(&'static str, f64)], outcome: Outcome) -> Row {
    let seqlens: SeqLens = lengths.parse().unwrap();
    let peers = peers.iter().map(|&(name, ms)| Peer::published(name, ms)).collect();
    let case = Case::packed(pass, seqlens, "16,64".parse().unwrap()).unwrap();
    Row {
        software: None,
        case: Case { label: label.to_owned(), peers, ..case },
        kernel: "cuda-chunk-bf16".to_owned(),
        mode: "f16-internals",
        input_format: Format::Bf16,
        outcome,
    }
}

fn timed(ms: &[f64]) -> Outcome {
    Outcome::Timed(Samples::new(ms.to_vec()).unwrap())
}

fn text(rows: Vec<Row>, stopped: bool) -> String {
    let finished = Finished { rows, stopped };
    Report { finished: &finished, ceilings: &Ceilings::named("another GPU", COPY, &[]) }.to_string()
}

fn published() -> Vec<Row> {
    let forward = [("flash_qla", 1.521), ("flashinfer", 1.552), ("fla", 3.331)];
    let backward = [("flash_qla", 2.978), ("fla", 5.721)];
    vec![
        row(Pass::Fwd, "1x32768", "397B/122B TP1", &forward, timed(&[2.0])),
        row(Pass::Fwd, "8192x4", "397B/122B TP1", &[("fla", 3.362), ("flashinfer", 0.827)], timed(&[0.8])),
        row(Pass::Bwd, "32k_4seq", "32k_4seq", &backward, timed(&[7.0, 8.0, 10.0])),
    ]
}

#[test]
fn a_line_holds_the_time_the_floor_and_the_peers() {
    let text = text(published(), false);
    let lines: Vec<&str> = text.lines().collect();
    let basis =
        "cuda-chunk-bf16, f16-internals; floor: copy 4000 GB/s measured in this run (cuMemcpyDtoDAsync, 256 MiB)";
    assert!(lines[0].starts_with(basis), "{}", lines[0]);
    assert!(lines[0].ends_with("bf16_matmul unknown, so traffic alone"), "{}", lines[0]);
    let columns: Vec<&str> = lines[1].split_whitespace().collect();
    let cells: Vec<&str> = lines[2].split_whitespace().collect();
    assert_eq!(columns.len(), cells.len(), "{text}");
    // 32,768 tokens with 64 heads of 648 bytes, and 64 states in and out.
    let bytes = 32_768.0 * 64.0 * 648.0 + 64.0 * 8.0 * 16_384.0;
    let floor = format!("{:.4}", 1e3 * bytes / 4e12);
    let gb_s = format!("{:.0}", bytes / 2e6);
    assert_eq!(cells[..7], ["fwd", "16/64", "128/128", "1x32768", "2.0000", "2.0000", "2.0000"]);
    assert_eq!((cells[7], cells[9]), (gb_s.as_str(), floor.as_str()));
    assert_eq!(cells[11..], ["1.521", "1.552", "3.331", "1.67", "0.76"]);
    let cells: Vec<&str> = lines[4].split_whitespace().collect();
    assert_eq!(cells[..4], ["bwd", "16/64", "128/128", "32k_4seq"]);
    assert_eq!(cells[11..], ["2.978", "-", "5.721", "0.72", "0.37"]);
}

#[test]
fn means_and_rows_that_lose_stand_below() {
    let text = text(published(), true);
    let fla = (3.331f64 / 2.0 * (3.362 / 0.8)).sqrt();
    let best = (1.521f64 / 2.0 * (0.827 / 0.8)).sqrt();
    assert!(text.contains(&format!("{fla:.2} times as fast as fla (2)")), "{text}");
    assert!(text.contains(&format!("{best:.2} times as fast as the best peer (2)")), "{text}");
    assert!(text.contains("slower than fla (1): bwd 16/64 32k_4seq (0.72)"), "{text}");
    assert!(text.contains("slower than the best peer (2): fwd 16/64 1x32768 (0.76), bwd"), "{text}");
    assert!(text.contains("unsteady, so repeat while nothing else runs (1): bwd 16/64 32k_4seq (p80/p20 = 1.24)"));
    assert!(text.ends_with("stopped before the end\n"), "{text}");
}

#[test]
fn wrong_and_failed_rows_have_words_and_no_time() {
    let wrong = row(Pass::Fwd, "1x64", "", &[("fla", 1.0)], Outcome::Wrong("o FAIL".to_owned()));
    let failed = row(Pass::Bwd, "1x64", "", &[], Outcome::Failed("GPU: out of memory\nmore".to_owned()));
    let text = text(vec![wrong, failed], false);
    assert!(text.contains("128/128 1x64         WRONG, so not timed; see below"), "{text}");
    assert!(text.contains("WRONG: cuda-chunk-bf16 fwd 16/64 128/128 1x64: o FAIL"), "{text}");
    assert!(text.contains("GPU: out of memory\n") && !text.contains("more"), "{text}");
    assert!(!text.contains("geometric mean") && !text.contains("slower"), "{text}");
}

#[test]
fn geometric_means_are_of_what_there_is() {
    let (mean, count) = geometric_mean([2.0, 8.0].into_iter()).unwrap();
    assert!((mean - 4.0).abs() < 1e-12 && count == 2);
    assert_eq!(geometric_mean(std::iter::empty()), None);
}
