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
        recorded: None,
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
    // Where the rate of products is unknown, traffic is the floor.
    let over_floor = format!("{:.2}", 2.0 / (1e3 * bytes / 4e12));
    assert_eq!(cells[10..12], [over_floor.as_str(); 2]);
    assert_eq!(cells[12..], ["1.521", "1.552", "3.331", "1.67", "0.76"]);
    let cells: Vec<&str> = lines[4].split_whitespace().collect();
    assert_eq!(cells[..4], ["bwd", "16/64", "128/128", "32k_4seq"]);
    assert_eq!(cells[12..], ["2.978", "-", "5.721", "0.72", "0.37"]);
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
fn each_model_has_means_of_its_own_once_models_have_several_rows() {
    let forward = |lengths: &str, model: &str, ms: f64| {
        row(Pass::Fwd, lengths, model, &[("fla", 4.0), ("flash_qla", 3.0)], timed(&[ms]))
    };
    let rows = vec![
        forward("1x64", "a", 1.0),
        forward("1x128", "a", 4.0),
        forward("1x64", "bcd", 1.5),
        forward("1x128", "bcd", 1.5),
    ];
    let all = text(rows.clone(), false);
    let line = |start: &str| all.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{all}"));
    assert!(
        line("  fwd a, 16/64      2: ")
            .ends_with("2.00 times as fast as fla (2), 1.50 times as fast as the best peer (2)")
    );
    assert!(
        line("  fwd bcd, 16/64    2: ")
            .ends_with("2.67 times as fast as fla (2), 2.00 times as fast as the best peer (2)")
    );
    assert!(!text(rows[1..3].to_vec(), false).contains("  fwd a"), "one row each says all");
}

#[test]
fn both_passes_of_a_call_are_added() {
    let mut rows = vec![
        row(Pass::Fwd, "1x64", "", &[("fla", 2.0)], timed(&[0.5])),
        row(Pass::Bwd, "1x64", "", &[("fla", 4.0)], timed(&[1.5])),
        row(Pass::Bwd, "1x65", "", &[], timed(&[1.5])),
    ];
    let both = text(rows.clone(), false);
    let line = both.lines().find(|line| line.starts_with("fwd + bwd 16/64 1x64: 2.0000 ms, "));
    assert!(line.is_some_and(|line| line.ends_with(" times the floor, 3.00 times as fast as fla")), "{both}");
    assert_eq!(both.matches("fwd + bwd").count(), 1);
    rows[0].case.peers.clear();
    assert!(!text(rows, false).contains("3.00 times as fast"));
}

#[test]
fn rows_that_were_recorded_are_counted() {
    let mut rows = published();
    assert!(!text(rows.clone(), false).contains("recorded before"));
    let workload = crate::record::Workload::default();
    let measurement = crate::record::Measurement::Bench(crate::record::Timing::default());
    let environment = crate::record::Environment::default();
    rows[1].recorded = Some(crate::record::Record::new(&environment, &workload, measurement));
    assert!(text(rows, false).contains("1 of 3 rows recorded before for this commit and machine"));
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
