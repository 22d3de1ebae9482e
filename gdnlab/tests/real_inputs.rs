//! From a training to errors on what its recurrence is called with; and what `lab` says of bits and directions.
#![allow(clippy::unwrap_used, reason = "a helper that cannot do its part has failed the test")]

use std::path::Path;
use std::process::{Command, Output};

fn lab(folder: &Path, arguments: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lab")).args(arguments.split_whitespace()).current_dir(folder).output().unwrap()
}

/// Standard output of a command that ends with `code`.
fn said(output: &Output, code: i32) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{out}\n{err}");
    out.into_owned()
}

#[test]
fn any_kernel_can_be_tried_on_what_a_trained_layer_is_called_with() {
    let folder = tempfile::tempdir().unwrap();
    let words: Vec<String> = (0..500).map(|n| format!("{n} and {} are {}\n", n + 1, 2 * n + 1)).collect();
    std::fs::write(folder.path().join("text.txt"), words.concat()).unwrap();
    let run = |arguments: &str| lab(folder.path(), arguments);
    let train = "train --mixer gdn --cpu --steps 3 --batch 2 --length 32 --text text.txt --checkpoint tiny.safetensors";
    assert!(said(&run(train), 0).contains("step 3 of 3"));

    let captured = said(
        &run("capture --checkpoint tiny.safetensors --layer 1 --length 70 --text text.txt -o case.safetensors"),
        0,
    );
    assert!(captured.contains("gdn B=1 T=70 HK=2 HV=2 K=32 V=64, layer 1"), "{captured}");
    assert!(captured.contains("decay of a token") && captured.contains("cosine of two keys"), "{captured}");
    let refused = run("capture --checkpoint tiny.safetensors --layer 2 --text text.txt -o case.safetensors");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--layer 2: expected below 2"));

    let errors = said(&run("numerics --case case.safetensors --mode bf16 fp32"), 0);
    assert!(errors.contains("cpu-chunk-fp32, max_rel of gdn inputs of case") && errors.contains("dbeta"), "{errors}");
    said(&run("compute case.safetensors --kernel cpu-chunk-bf16 -o result.safetensors"), 0);
    assert!(said(&run("verify case.safetensors result.safetensors"), 0).contains("within tolerance bf16"));
    said(&run("numerics --case case.safetensors --seed 2"), 2);
}

#[test]
fn bits_and_directions_are_told_by_the_exit_code_and_the_table() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &str| lab(folder.path(), arguments);
    let small = "determinism cpu-chunk-bf16 --launches 2 --shape 40,16,16 --heads 2";
    let table = said(&run(small), 0);
    assert!(["launches", "load", "threads", "packing", "batch"].iter().all(|check| table.contains(check)), "{table}");
    let records = said(&run(&format!("{small} --check packing --json")), 0);
    assert_eq!(records.lines().count(), 8);
    assert!(records.lines().all(|line| line.contains("\"kind\":\"determinism\"") && line.contains("\"differing\":0")));
    assert!(
        String::from_utf8_lossy(&run(&format!("{small} --check lunches")).stderr).contains("expected one of launches")
    );

    let biases = said(&run("bias cpu-chunk-tf32 --shape 64,16,16 --heads 2 --batch 14"), 0);
    assert!(biases.contains("outward") && biases.contains("t_holm"), "{biases}");
    let few = run("bias cpu-chunk-tf32 --shape 64,16,16 --batch 2");
    assert!(String::from_utf8_lossy(&few.stderr).contains("B = 2: expected at least 14"));
}
