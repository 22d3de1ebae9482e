use super::super::HEAD_DIMS;
use super::super::config::{Card, Work};
use super::*;

const H200: Card = Card { multiprocessors: 132, shared_bytes_per_block: 232_448 };
const VARIANT: Variant =
    Variant { mode: Mode::F16Internals, input: Format::Bf16, key_dim: 128, value_dim: 128, value_heads: 16 };

fn config(variant: Variant, cut: bool) -> Config {
    Config::new(variant, Work { heads: 16, cut }, &H200).unwrap()
}

/// Every head dimension that the sweeps take.
fn variants() -> impl Iterator<Item = Variant> {
    HEAD_DIMS
        .into_iter()
        .flat_map(|key_dim| HEAD_DIMS.map(|value_dim| Variant { key_dim, value_dim, ..VARIANT }))
        .filter(HopperSweep::takes)
}

/// All formats of w, and none for GDN.
const GATES: [Option<Format>; 4] = [None, Some(Format::F32), Some(Format::Bf16), Some(Format::F16)];

#[test]
fn models_of_16_bits_and_tiles_of_64_are_taken() {
    let dims: Vec<_> = variants().map(|variant| (variant.key_dim, variant.value_dim)).collect();
    assert_eq!(dims, [64, 128].into_iter().flat_map(|k| [64, 128, 192, 256].map(|v| (k, v))).collect::<Vec<_>>());
    let takes = |mode, input| HopperSweep::takes(&Variant { mode, input, ..VARIANT });
    assert!(takes(Mode::F16Internals, Format::F16) && !takes(Mode::F16Internals, Format::F32));
    assert!([Mode::Bf16, Mode::Tf32, Mode::Fp32].iter().all(|&mode| !takes(mode, Format::Bf16)));
    assert!([1, 8, 64].iter().all(|&value_heads| HopperSweep::takes(&Variant { value_heads, ..VARIANT })));
}

#[test]
fn every_block_fits_into_shared_memory_and_blocks_divide_the_columns() {
    for variant in variants() {
        for (gates, cut) in GATES.into_iter().flat_map(|gates| [(gates, false), (gates, true)]) {
            for sweep in HopperSweep::all(&config(variant, cut), gates) {
                let grid = sweep.grid(1, variant.value_dim, true).unwrap();
                assert!(grid.shared_bytes as usize <= H200.shared_bytes_per_block, "{sweep:?}: {grid:?}");
                assert_eq!(grid.blocks[0] as usize * SPAN * sweep.chains, variant.value_dim, "{sweep:?}");
                let columns = variant.value_dim + variant.key_dim;
                let of_all = sweep.grid(1, columns, false).unwrap();
                assert!(!cut || of_all.blocks[0] as usize * SPAN * sweep.chains == columns, "{sweep:?}");
            }
        }
    }
}

#[test]
fn sizes_are_those_that_the_kernels_count_on() {
    let sweep = |gates, chains| HopperSweep { variant: VARIANT, gates, cut: false, chains };
    let bytes = |gates, chains| [false, true].map(|keeps| sweep(gates, chains).shared_bytes(keeps));
    let (tiles, other) = (|tiles: usize, coefficients: usize| tiles * 8192 + coefficients + 1024, 2 * 4096);
    assert_eq!(
        (bytes(None, 1), bytes(None, 2)),
        ([tiles(22, other), tiles(18, other)], [tiles(26, other), tiles(24, other)])
    );
    let gdn2 = [Format::F32, Format::Bf16].map(|format| bytes(Some(format), 1));
    assert_eq!(gdn2, [tiles(26, 12_288), tiles(24, 12_288)].map(|bytes| [bytes; 2]));
    let grid = sweep(None, 2).grid(7, 256, false).unwrap();
    assert_eq!((grid.blocks, grid.threads), ([2, 16, 7], 384));
    assert_eq!(sweep(None, 1).grid(7, 256, false).unwrap().blocks, [4, 16, 7]);
    assert_eq!(
        size_of::<SweepParams<ChunkParams>>(),
        7 * 128 + (size_of::<ChunkParams>() + 3 * size_of::<i32>()).next_multiple_of(128)
    );
}

#[test]
fn blocks_are_wide_where_the_sweeps_end_sooner() {
    let sweeps = |variant: Variant, chunks: &[usize], of| {
        let ends = chunks.iter().scan(0, |end, n| {
            *end += 64 * n;
            Some(*end - 64 * n..*end)
        });
        let sequences: Vec<_> = ends.collect();
        let table = ChunkTable::new(&sequences, &variant).unwrap();
        HopperSweep::quickest(&config(variant, table.is_cut()), None, &table, of, 132).unwrap().chains
    };
    let many = Variant { value_heads: 64, ..VARIANT };
    assert_eq!([1, 2, 4, 100].map(|n| sweeps(many, &vec![128; n], Pass::Output)), [1, 2, 2, 2]);
    // One long sequence takes as long as all others together.
    assert_eq!([[448, 64], [256, 256], [64, 448]].map(|chunks| sweeps(many, &chunks, Pass::Output)), [1, 2, 1]);
    // 8 segments of 64 chunks: 128 narrow blocks over V at once, and of the ends 8 x 7 x 4 - 16 in two rounds, or half of them in one.
    let few = Variant { value_heads: 8, ..VARIANT };
    assert_eq!([Pass::Output, Pass::Kept, Pass::Ends].map(|of| sweeps(few, &[512], of)), [1, 1, 2]);
    // 4 sequences in 3 segments of 32 chunks: 384 blocks or 192, and of the ends 128 + 256 or half.
    assert_eq!([Pass::Output, Pass::Kept, Pass::Ends].map(|of| sweeps(VARIANT, &[96; 4], of)), [1, 1, 1]);
    assert_eq!(sweeps(Variant { value_dim: 256, ..VARIANT }, &[96; 4], Pass::Output), 2);
    assert_eq!(sweeps(Variant { value_dim: 192, ..VARIANT }, &[1; 1000], Pass::Output), 1);
    // Blocks of 128 columns do not divide an identity of 64.
    let small = Variant { key_dim: 64, ..VARIANT };
    assert_eq!([vec![1; 1000], vec![96; 1000]].map(|chunks| sweeps(small, &chunks, Pass::Output)), [2, 1]);
    let many = ChunkTable::new(&vec![0..64; 1000], &VARIANT).unwrap();
    let gdn2 = HopperSweep::quickest(&config(VARIANT, false), Some(Format::Bf16), &many, Pass::Kept, 132);
    assert_eq!(gdn2.unwrap().chains, 1);
}

#[test]
fn a_specialisation_says_all_that_changes_its_code() {
    let names = |variant, gates, cut| {
        let builds = HopperSweep::all(&config(variant, cut), gates);
        builds.iter().map(|sweep| sweep.build().unwrap().to_string()).collect::<Vec<_>>()
    };
    let common = "chunk_sweep_hopper.cu MODE=0 INPUT=bf16 KD=128 VD=128 CHUNK=64";
    let expected = [1, 2].map(|chains| format!("{common} CUT=1 CHAINS={chains}"));
    assert_eq!(names(VARIANT, None, true), expected);
    let gdn2 = names(VARIANT, Some(Format::F32), false);
    assert_eq!(gdn2, [format!("{common} CHANNELS=1 GATE=float CHAINS=1")]);
    assert!(names(Variant { key_dim: 96, ..VARIANT }, None, false).is_empty());
}
