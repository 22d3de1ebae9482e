use super::*;

const HOPPER: Limits = Limits { capability: (9, 0), shared_bytes_per_block: 232_448 };
const AMPERE: Limits = Limits { capability: (8, 0), shared_bytes_per_block: 166_912 };

fn kernel() -> FunctionReport {
    FunctionReport {
        name: "forward".to_owned(),
        parameter_bytes: 24,
        max_threads: Some(256),
        shared_bytes: 1024,
        ..FunctionReport::default()
    }
}

/// What is said about `grid`.
fn complaint(grid: Grid, parameter_bytes: usize, limits: &Limits) -> String {
    grid.check(&kernel(), parameter_bytes, limits).unwrap_err().to_string()
}

#[test]
fn what_the_gpu_allows_is_no_error() {
    let grid =
        Grid { blocks: [8, 65_535, 1], threads: 256, shared_bytes: 231_424, cluster: Some([2, 1, 1]), early: false };
    grid.check(&kernel(), 24, &HOPPER).unwrap();
    assert!(!grid.is_empty() && Grid { blocks: [8, 0, 1], ..grid }.is_empty());
}

#[test]
fn a_structure_of_another_size_is_refused_with_both_sizes() {
    for bytes in [16, 25, 32, 40_000] {
        let message = complaint(Grid::default(), bytes, &HOPPER);
        assert!(message.contains("24 bytes in CUDA") && message.contains(&format!("{bytes} in Rust")), "{message}");
    }
}

#[test]
fn shared_memory_beyond_the_limit_is_refused() {
    let grid = Grid { shared_bytes: 231_425, ..Grid::default() };
    let message = complaint(grid, 24, &HOPPER);
    assert!(message.contains("232449 bytes of shared memory") && message.contains("232448"), "{message}");
    // The two together do not fit 32 bits.
    complaint(Grid { shared_bytes: u32::MAX, ..Grid::default() }, 24, &HOPPER);
}

#[test]
fn blocks_beyond_the_limit_are_refused() {
    let message = complaint(Grid { threads: 257, ..Grid::default() }, 24, &HOPPER);
    assert!(message.contains("257 threads") && message.contains("1 to 256"), "{message}");
    complaint(Grid { threads: 0, ..Grid::default() }, 24, &HOPPER);
    let message = complaint(Grid { blocks: [1, 65_536, 1], ..Grid::default() }, 24, &HOPPER);
    assert!(message.contains("65536 blocks along y"), "{message}");
    complaint(Grid { blocks: [1 << 31, 1, 1], ..Grid::default() }, 24, &HOPPER);
}

#[test]
fn clusters_that_cannot_be_are_refused() {
    let grid = |blocks, cluster| Grid { blocks, cluster: Some(cluster), ..Grid::default() };
    let message = complaint(grid([8, 1, 1], [2, 1, 1]), 24, &AMPERE);
    assert!(message.contains("compute capability 9.0") && message.contains("8.0"), "{message}");
    let message = complaint(grid([9, 1, 1], [2, 1, 1]), 24, &HOPPER);
    assert!(message.contains("not a multiple"), "{message}");
    for cluster in [[16, 1, 1], [0, 1, 1], [u32::MAX, u32::MAX, 2]] {
        let message = complaint(grid([16, 1, 1], cluster), 24, &HOPPER);
        assert!(message.contains("1 to 8"), "{message}");
    }
}
