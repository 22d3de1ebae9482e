use super::*;
use crate::bench::gdn::Outcome;
use crate::bench::{Case, Heads, SeqLens};
use crate::peer::read_case;

fn case(pass: Pass) -> Case {
    let heads = Heads { qk_heads: 1, value_heads: 2, key_dim: 8, value_dim: 4 };
    Case::packed(pass, SeqLens::new(vec![3, 0, 4]), heads).unwrap()
}

fn row(kernel: &str, ms: f64) -> Row {
    let mut case = case(Pass::Fwd);
    case.peers = vec![PeerTime::published("fla", 9.0), PeerTime::published("flash_qla", 8.0)];
    let outcome = Outcome::Timed(Samples::new(vec![ms]).unwrap());
    Row {
        case,
        kernel: kernel.to_owned(),
        mode: "bf16",
        input_format: Format::Bf16,
        software: None,
        outcome,
        recorded: None,
    }
}

#[test]
fn a_peer_gets_the_very_tensors_that_ours_get() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("case.safetensors");
    let case = Case { seqlens: None, ..case(Pass::Bwd) };
    for case in [self::case(Pass::Bwd), Case { shape: Shape { batch: 2, ..case.shape }, ..case }] {
        let tensors = Tensors::generate(&case, Format::Bf16, 1).unwrap();
        write(&tensors, &Destination::new(&path, &[]).unwrap()).unwrap();
        let inputs = read_case(&path).unwrap().inputs;
        assert_eq!((inputs.shape, inputs.dtype), (tensors.shape, Format::Bf16));
        assert_eq!(inputs.sequence_ranges(), tensors.sequences);
        let again = Tensors::of_inputs(&inputs).unwrap();
        assert_eq!((again.q, again.v, again.g), (tensors.q, tensors.v, tensors.g));
        let gradients = (again.gradients.unwrap(), tensors.gradients.unwrap());
        assert_eq!((gradients.0.d_o, gradients.0.d_final_state), (gradients.1.d_o, gradients.1.d_final_state));
    }
}

#[test]
fn results_are_read_in_the_format_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("results.safetensors");
    let tensors = Tensors::generate(&case(Pass::Fwd), Format::Bf16, 1).unwrap();
    let o: Vec<bf16> = (0..7 * 2 * 4).map(|n| bf16::from_f32(n as f32)).collect();
    let stored = Stored::numbers("o", vec![1, 7, 2, 4], Numbers::Bf16(&o));
    Destination::new(&path, &[]).unwrap().write(vec![stored], &[]).unwrap();
    assert_eq!(read(&path, Pass::Fwd, &tensors).unwrap(), [("o", Values::Bf16(o.clone()))]);
    let stored = Stored::numbers("o", vec![7], Numbers::Bf16(&o[..7]));
    Destination::new(&path, &[]).unwrap().write(vec![stored], &[]).unwrap();
    let refused = read(&path, Pass::Fwd, &tensors).unwrap_err().to_string();
    assert!(refused.contains("'o' has 7 elements, expected 56"), "{refused}");
}

#[test]
fn times_of_the_same_run_take_the_place_of_published_ones() {
    let mut rows = vec![row("cuda-chunk-bf16", 1.0), row("fla", 3.0)];
    set_beside(&mut rows, &["fla", "mine:gdn"]);
    let case = &rows[0].case;
    assert_eq!(case.peer("fla").map(|peer| (peer.ms, peer.source)), Some((3.0, SAME_RUN)));
    assert_eq!(case.peer("flash_qla").map(|peer| (peer.ms, peer.source)), Some((8.0, "published")));
    assert_eq!(case.best_peer().map(|peer| peer.name.as_str()), Some("fla"));
    assert!(rows[1].case.peers.is_empty(), "a peer is compared with nobody");
}
