//! The memory that a long sequence takes, in a process of its own.

use gdnlab::inputs::{Regime, generate};
use gdnlab::kernel::Kernel;
use gdnlab::problem::{Op, Shape};
use gdnlab::reference::Reference;

/// Peak resident memory of this process in bytes, where the operating system tells.
fn peak_bytes() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<usize>().ok().map(|kib| kib * 1024)
}

#[test]
fn forward_and_backward_of_65536_tokens_fit_in_one_gib() {
    let inputs = generate(Op::Gdn, &Shape::new(65_536, 1, 128, 128), Regime::LongMemory, 1).expect("valid");
    let results = Reference.backward(&inputs).expect("valid");
    assert!(results.named().iter().all(|(_, tensor)| tensor.data.iter().all(|x| x.is_finite())));
    if let Some(peak) = peak_bytes() {
        assert!(peak < 1 << 30, "peak memory {peak} bytes");
    }
}
