use super::*;
use crate::cuda::Element;

fn view<T: Element>(length: usize) -> View<T> {
    View::at(256, length)
}

#[test]
fn a_part_of_memory_is_inside_of_it() {
    let four = view::<f32>(4);
    let part = four.part(1..3).unwrap();
    assert_eq!((part.address(), part.len()), (260, 2));
    assert!(four.part(4..4).unwrap().is_empty());
    assert!(four.part(2..5).unwrap_err().to_string().contains("2..5 of memory with 4"));
}

#[test]
fn memory_of_another_size_or_place_is_refused() {
    let message = |result: Result<()>| result.unwrap_err().to_string();
    assert!(view::<f32>(6).expect("op", "x", &[2, 3]).is_ok());
    assert!(message(view::<f32>(6).expect("op", "x", &[2, 4])).contains("op: x has 6 elements: expected [2, 4]"));
    assert!(message(view::<f32>(6).expect("op", "x", &[usize::MAX, 2])).contains("6 elements"));
    let odd = view::<f32>(6).part(1..6).unwrap();
    assert!(message(odd.expect("op", "x", &[5])).contains("0x104: expected a multiple of 16"));
}

#[test]
fn columns_lie_inside_of_their_matrix() {
    let columns = |pitch, first| Columns { matrix: view::<half::bf16>(3 * pitch), pitch, first };
    assert!(columns(24, 8).expect("op", "x", 3, 16).is_ok());
    assert_eq!(columns(24, 8).address(), 256 + 16);
    let refused =
        |columns: Columns<half::bf16>, rows, width| columns.expect("op", "x", rows, width).unwrap_err().to_string();
    assert!(refused(columns(24, 16), 3, 16).contains("24 columns: expected 16 of them from column 16 on"));
    assert!(refused(columns(20, 0), 3, 16).contains("rows of x lie at multiples of 40 bytes"));
    assert!(refused(columns(24, 4), 3, 16).contains("the first column of x lie"));
    assert!(refused(columns(24, 8), 2, 16).contains("72 elements"));
}

#[test]
fn launches_have_a_block_for_all_work() {
    assert_eq!(grid("op", 257, 256, 256).unwrap().blocks, [2, 1, 1]);
    assert!(grid("op", 0, 256, 256).unwrap().is_empty());
    assert!(grid("op", 1 << 40, 8, 32).unwrap_err().to_string().contains("op: a size of"));
}
