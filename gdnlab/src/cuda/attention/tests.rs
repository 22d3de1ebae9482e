//! What is refused before anything is launched, and the shapes of launches.

use super::plan::{Tile, section};
use super::*;

const SETUP: Setup = Setup { batch: 2, tokens: 100, heads: 3, head_dim: 64, scale: 0.125, backward: true };
const WIDTH: usize = 3 * 64;
const WHOLE: Heads = Heads { address: 0x7000_0000_0100, length: 200 * WIDTH, row_pitch: WIDTH, head_pitch: 64 };
const ROWS: Rows = Rows { address: 0x7000_0000_0004, length: 600 };
const FORWARD: Forward = Forward { q: WHOLE, k: WHOLE, v: WHOLE, o: WHOLE, lse: ROWS };
const BACKWARD: Backward = Backward {
    q: WHOLE,
    k: WHOLE,
    v: WHOLE,
    o: WHOLE,
    lse: ROWS,
    d_o: WHOLE,
    delta: ROWS,
    dq: WHOLE,
    dk: WHOLE,
    dv: WHOLE,
};

#[test]
fn problems_without_kernels_are_refused() {
    SETUP.validate().unwrap();
    for (setup, expected) in [
        (Setup { batch: 0, ..SETUP }, "at least 1 of each"),
        (Setup { tokens: 0, ..SETUP }, "at least 1 of each"),
        (Setup { batch: 1 << 20, tokens: 1 << 12, ..SETUP }, "B T H at most"),
        (Setup { batch: usize::MAX, ..SETUP }, "B T H at most"),
        (Setup { head_dim: 96, ..SETUP }, "expected 64 or 128"),
        (Setup { scale: 0.0, ..SETUP }, "above 0"),
        (Setup { scale: -1.0, ..SETUP }, "above 0"),
        (Setup { scale: f32::NAN, ..SETUP }, "above 0"),
        (Setup { scale: f32::INFINITY, ..SETUP }, "above 0"),
    ] {
        let error = setup.validate().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_name() {
    SETUP.check_forward(&FORWARD).unwrap();
    SETUP.check_backward(&BACKWARD).unwrap();
    let short = Heads { length: WHOLE.length - 1, ..WHOLE };
    let odd = Heads { address: WHOLE.address + 8, ..WHOLE };
    for (forward, expected) in [
        (Forward { q: short, ..FORWARD }, "q has 38399 elements"),
        (Forward { k: odd, ..FORWARD }, "k at 0x700000000108"),
        (Forward { v: Heads { row_pitch: WIDTH + 4, ..WHOLE }, ..FORWARD }, "multiples of 8"),
        (Forward { o: Heads { row_pitch: WIDTH - 8, ..WHOLE }, ..FORWARD }, "o with 184 elements"),
        (Forward { o: Heads { head_pitch: 56, ..WHOLE }, ..FORWARD }, "would overlap"),
        (Forward { lse: Rows { length: 599, ..ROWS }, ..FORWARD }, "lse of 599 numbers"),
        (Forward { lse: Rows { address: 2, ..ROWS }, ..FORWARD }, "multiple of 4"),
    ] {
        let error = SETUP.check_forward(&forward).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    for (backward, expected) in [
        (Backward { d_o: short, ..BACKWARD }, "do has"),
        (Backward { dv: odd, ..BACKWARD }, "dv at"),
        (Backward { delta: Rows { length: 0, ..ROWS }, ..BACKWARD }, "delta of 0"),
    ] {
        let error = SETUP.check_backward(&backward).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = Setup { backward: false, ..SETUP }.check_backward(&BACKWARD).unwrap_err().to_string();
    assert!(error.contains("set `backward`"), "{error}");
}

/// `[B, T, H, d]`, a slice of `[B, T, 3, H, d]`, `[H, B, T, d]`, a single head between others.
#[test]
fn layouts_of_one_memory_are_accepted() {
    let accepts = |setup: &Setup, q| setup.check_forward(&Forward { q, ..FORWARD });
    let fused = |length| Heads { length, row_pitch: 3 * WIDTH, ..WHOLE };
    accepts(&SETUP, fused(199 * 3 * WIDTH + WIDTH)).unwrap();
    assert!(accepts(&SETUP, fused(199 * 3 * WIDTH + WIDTH - 1)).is_err());
    accepts(&SETUP, Heads { row_pitch: 64, head_pitch: 200 * 64, ..WHOLE }).unwrap();
    assert!(accepts(&SETUP, Heads { row_pitch: 64, head_pitch: 199 * 64, ..WHOLE }).is_err());
    let one = Setup { heads: 1, ..SETUP };
    accepts(&one, Heads { head_pitch: 0, ..WHOLE }).unwrap();
    assert!(accepts(&one, Heads { row_pitch: 56, ..WHOLE }).is_err());
}

#[test]
fn tiles_fit_into_the_shared_memory_of_every_gpu() {
    for dim in HEAD_DIMS {
        for tile in [Tile::forward(dim), Tile::queries(dim), Tile::keys(dim)] {
            assert!(tile.shared_bytes <= 99 << 10, "{dim} {tile:?}");
            assert_eq!(tile.tokens, tile.threads / 2, "a warp takes 16 tokens: {dim} {tile:?}");
        }
    }
}

/// 228 KiB of a multiprocessor, of which the system takes one for each block.
#[test]
fn tiles_on_hopper_leave_room_for_the_blocks_that_registers_suffice_for() {
    let blocks = |tile: Tile| (228 << 10) / (tile.shared_bytes + (1 << 10));
    assert_eq!(blocks(Tile::forward_hopper()), 2);
    assert_eq!(HEAD_DIMS.map(|dim| blocks(Tile::queries_hopper(dim))), [3, 2]);
    assert_eq!(HEAD_DIMS.map(|dim| blocks(Tile::keys_hopper(dim))), [4, 2]);
}

#[test]
fn a_section_holds_the_keys_and_values_of_half_the_cache() {
    let of = |batch, tokens| section(&Setup { batch, tokens, ..SETUP }, 50 << 20);
    assert_eq!((of(32, 1024), of(2, 1024), of(32, 1 << 20)), (96, 6, 1));
    assert_eq!(of(64, 1024), 100);
}

/// No stride of a map is 0, and all but those of an only head are those of the tensor.
#[test]
fn maps_have_the_strides_of_the_tensor() {
    assert_eq!(hopper::strides_bytes(&SETUP, &WHOLE), [128, 384, 38_400]);
    let heads_first = Heads { row_pitch: 64, head_pitch: 200 * 64, ..WHOLE };
    assert_eq!(hopper::strides_bytes(&SETUP, &heads_first), [25_600, 128, 12_800]);
    let one = Setup { heads: 1, ..SETUP };
    assert_eq!(hopper::strides_bytes(&one, &Heads { head_pitch: 0, ..WHOLE }), [384, 384, 38_400]);
}
