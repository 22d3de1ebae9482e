use super::super::suite::Suite;
use super::*;
use crate::cost::Rates;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/published");
const RATES: Rates = Rates { copy_bytes_per_s: 4254e9, matmul_flop_per_s: Some(803e12) };

fn all() -> Vec<Case> {
    published(FOLDER).unwrap()
}

fn peers(case: &Case) -> Vec<(&str, f64)> {
    case.peers.iter().map(|peer| (peer.name.as_str(), peer.ms)).collect()
}

#[test]
fn every_published_row_is_a_case() {
    let all = all();
    let of_pass = |pass| all.iter().filter(|case| case.pass == pass).count();
    assert_eq!((of_pass(Pass::Fwd), of_pass(Pass::Bwd)), (171, 32));
    let first = &all[0];
    assert_eq!(first.to_string(), "fwd 2/8 128/128 1x32768 (397B/122B TP8)");
    assert_eq!(peers(first), [("flash_qla", 0.32), ("flashinfer", 1.655), ("fla", 0.902)]);
    assert_eq!(first.sequences(), vec![0..32768; 1]);
    let split = all.iter().find(|case| case.label == "8k_4seq").unwrap();
    assert_eq!(split.to_string(), "bwd 16/32 128/128 5809+1244+406+733 (8k_4seq)");
    assert_eq!(peers(split), [("flash_qla", 1.259), ("fla", 1.467)]);
    assert_eq!((split.best_peer().unwrap().name.as_str(), split.peer("fla").unwrap().ms), ("flash_qla", 1.467));
}

#[test]
fn every_case_has_the_peers_that_were_timed_for_it() {
    for case in all() {
        let expected = if case.pass == Pass::Fwd { 3 } else { 2 };
        assert_eq!(case.peers.len(), expected, "{case}");
        assert!(case.peers.iter().all(|peer| peer.ms > 0.0) && case.shape.validate().is_ok());
        assert_eq!(case.sequences().last().unwrap().end, case.shape.tokens);
    }
}

#[test]
fn nobody_is_faster_than_the_floor() {
    for case in all() {
        let floor = case.cost(2, &RATES).floor_ms(&RATES);
        assert!(case.best_peer().unwrap().ms > floor, "{case}: floor {floor} ms");
    }
}

#[test]
fn the_sample_is_spread_over_heads_and_lengths() {
    let sample = Suite::Sample.cases(Path::new(FOLDER)).unwrap();
    let of_pass = |pass| sample.iter().filter(move |case| case.pass == pass);
    assert_eq!((of_pass(Pass::Fwd).count(), of_pass(Pass::Bwd).count()), (10, 8));
    let distinct =
        |pass, of: fn(&Case) -> String| of_pass(pass).map(of).collect::<std::collections::BTreeSet<_>>().len();
    assert_eq!((distinct(Pass::Fwd, Case::heads_name), distinct(Pass::Bwd, Case::heads_name)), (9, 4));
    assert_eq!(distinct(Pass::Bwd, |case| case.label.clone()), 8);
    assert!(sample.iter().all(|case| case.peer("fla").is_some()));
}

#[test]
fn suites_have_names_and_cases() {
    for suite in Suite::ALL {
        assert_eq!(suite.name().parse::<Suite>().unwrap(), suite);
        assert!(!suite.cases(Path::new(FOLDER)).unwrap().is_empty());
    }
    assert!("all".parse::<Suite>().unwrap_err().to_string().contains("sample, h200, day2"));
    let (h200, day2) =
        (Suite::H200.cases(Path::new(FOLDER)).unwrap(), Suite::Day2.cases(Path::new("/nowhere")).unwrap());
    assert_eq!((h200.len(), &h200[..203], &h200[203..]), (209, &all()[..], &day2[..]));
    assert_eq!(day2.len(), 6);
    assert_eq!(day2[0].to_string(), "fwd 6/6 64/128 B32 T1024 (training)");
    let sequences = day2[0].sequences();
    assert_eq!((sequences.len(), sequences[31].clone()), (32, 31 * 1024..32 * 1024));
}

#[test]
fn the_workload_of_a_record_says_what_ran() {
    let case = all().into_iter().find(|case| case.label == "32k_2seq").unwrap();
    let workload = case.workload();
    assert_eq!(workload.seqlens.as_deref(), Some("7212+25556"));
    assert_eq!((workload.tokens, workload.qk_heads, workload.value_heads), (Some(32768), Some(16), Some(32)));
    assert_eq!((workload.pass, workload.batch, workload.key_dim), (Some(Pass::Bwd), Some(1), Some(128)));
}

#[test]
fn the_backward_counts_the_way_with_the_lower_floor() {
    let case = all().into_iter().find(|case| case.label == "32k_1seq").unwrap();
    let traffic_alone = Rates { matmul_flop_per_s: None, ..RATES };
    let kept = case.cost(2, &traffic_alone);
    let slow_products = Rates { matmul_flop_per_s: Some(1e12), ..RATES };
    assert_eq!(case.cost(2, &slow_products), kept);
    assert!(case.cost(4, &RATES).bytes > kept.bytes);
}

#[test]
fn a_case_is_grouped_by_its_model_or_else_its_heads() {
    let name = |label: &str| all().into_iter().find(|case| case.label == label).unwrap().model();
    assert_eq!((name("27B TP2"), name("32k_8seq")), ("27B TP2, 8/24".to_owned(), "16/32".to_owned()));
    assert_eq!(Suite::Day2.cases(Path::new("")).unwrap()[1].model(), "training, 9/9");
}

#[test]
fn heads_and_shapes_are_checked() {
    assert_eq!("16,64".parse::<Heads>().unwrap().value_dim, 128);
    assert_eq!("1,2,64,96".parse::<Heads>().unwrap().value_dim, 96);
    for text in ["", "16", "16,64,128", "a,b", "1,2,3,4,5"] {
        assert!(text.parse::<Heads>().unwrap_err().to_string().contains("16,64,128,128"), "{text}");
    }
    let packed = |lengths: &str, heads: &str| {
        Case::packed(Pass::Fwd, lengths.parse().unwrap(), heads.parse().unwrap()).map_err(|error| error.to_string())
    };
    assert!(packed("100", "2,3").unwrap_err().contains("not a multiple"));
    assert!(packed("100", "1,1,300,64").unwrap_err().contains("K = 300"));
    assert!(packed("0", "1,1").unwrap_err().contains("at least one token"));
}

#[test]
fn damaged_published_rows_are_refused_with_their_number() {
    let folder = tempfile::tempdir().unwrap();
    let header = "pass,model,seqlens,H_qk,H_v,flash_qla_ms,flashinfer_ms,fla_ms\n";
    for (row, expected) in [
        ("fwd,m,1x64,2,8,1.0,2.0,3.0\nstep,m,1x64,2,8,1.0,2.0,3.0\n", "data row 2: pass 'step'"),
        ("fwd,m,64y,2,8,1.0,2.0,3.0\n", "sequence lengths '64y'"),
        ("fwd,m,1x64,3,8,1.0,2.0,3.0\n", "HV = 8 is not a multiple"),
        ("fwd,m,1x64,2,8,fast,2.0,3.0\n", "column 'flash_qla_ms'"),
    ] {
        std::fs::write(folder.path().join(PUBLISHED), format!("# source\n{header}{row}")).unwrap();
        let message = published(folder.path()).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn on_another_gpu_the_published_times_say_nothing() {
    let case = all().remove(0);
    assert_eq!(case.clone().on("NVIDIA H200"), case);
    assert!(case.clone().on("NVIDIA H200 NVL").peers.is_empty() && case.on("NVIDIA GB10").peers.is_empty());
}
