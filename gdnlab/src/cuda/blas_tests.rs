use super::*;

/// What the library computes for a [`Form`], element by element, on column-major matrices: alpha 1, beta 0.
fn by_columns(form: &Form, first: &[f64], second: &[f64], result: &mut [f64]) {
    let at = |layout: &Layout, transposed: bool, batch: usize, row: usize, column: usize| {
        let (row, column) = if transposed { (column, row) } else { (row, column) };
        assert!(row < layout.rows as usize && column < layout.columns as usize);
        batch * layout.stride as usize + column * layout.pitch as usize + row
    };
    let sum = if form.first_transposed { form.first.rows } else { form.first.columns } as usize;
    for batch in 0..form.batch as usize {
        for row in 0..form.result.rows as usize {
            for column in 0..form.result.columns as usize {
                let term = |i| {
                    first[at(&form.first, form.first_transposed, batch, row, i)]
                        * second[at(&form.second, form.second_transposed, batch, i, column)]
                };
                result[at(&form.result, false, batch, row, column)] = (0..sum).map(term).sum();
            }
        }
    }
}

/// C of `product` by its definition, row-major; elements between the rows stay 0.
fn by_rows(product: &Product, a: &[f64], b: &[f64]) -> Vec<f64> {
    let Product { m, n, k, batch, .. } = *product;
    let mut c = vec![0.0; product.c_elements()];
    let at = |operand: &Operand, row: usize, column: usize| {
        let (row, column) = if operand.transposed { (column, row) } else { (row, column) };
        row * operand.pitch + column
    };
    for which in 0..batch.count {
        for row in 0..m {
            for column in 0..n {
                let term =
                    |i| a[which * batch.a + at(&product.a, row, i)] * b[which * batch.b + at(&product.b, i, column)];
                c[which * batch.c + row * product.c_pitch + column] = (0..k).map(term).sum();
            }
        }
    }
    c
}

fn numbers(count: usize, seed: usize) -> Vec<f64> {
    (0..count).map(|i| ((i * 37 + seed * 11) % 23) as f64 - 11.0).collect()
}

#[test]
fn the_library_is_asked_for_the_transposed_product() {
    let plain = Product::new(3, 5, 4, Format::F64);
    let pitched =
        Product { c_pitch: 7, a: Operand { pitch: 6, ..plain.a }, b: Operand { pitch: 9, ..plain.b }, ..plain };
    let batched = Product { batch: Batch { count: 3, a: 40, b: 0, c: 30 }, ..pitched };
    for product in [plain, pitched, batched] {
        for (a_transposed, b_transposed) in [(false, false), (true, false), (false, true), (true, true)] {
            let product = Product {
                a: Operand { transposed: a_transposed, ..product.a },
                b: Operand { transposed: b_transposed, ..product.b },
                ..product
            };
            // Transposed, rows of A in memory have m = 3 elements and those of B k = 4: the pitches are large enough.
            product.validate().unwrap();
            let (a, b) = (numbers(product.a_elements(), 1), numbers(product.b_elements(), 2));
            let mut c = vec![0.0; product.c_elements()];
            by_columns(&product.form(), &b, &a, &mut c);
            assert_eq!(c, by_rows(&product, &a, &b), "{product:?}");
        }
    }
}

#[test]
fn transposing_keeps_matrices_contiguous() {
    let product = Product::new(3, 5, 4, Format::Bf16);
    assert_eq!((product.a.pitch, product.b.pitch, product.c_pitch), (4, 5, 5));
    let product = product.a_transposed().b_transposed().into_format(Format::F32);
    assert_eq!((product.a.pitch, product.b.pitch, product.c_pitch), (3, 4, 5));
    assert_eq!([product.a_elements(), product.b_elements(), product.c_elements()], [12, 20, 15]);
    assert_eq!(product.bytes(), 2 * 32 + 4 * 15);
    assert_eq!(product.flop(), 120.0);
    assert_eq!(product.to_string(), "3x5x4 bf16 TT into f32");
    let batch = Batch { count: 6, a: 12, b: 20, c: 15 };
    let product = Product { batch, ..Product::new(3, 5, 4, Format::Tf32) };
    assert_eq!([product.a_elements(), product.b_elements(), product.c_elements()], [72, 120, 90]);
    assert_eq!(product.to_string(), "3x5x4 tf32, 6 times");
    assert_eq!((product.flop(), product.a.format), (720.0, Format::F32));
}

#[test]
fn what_the_library_has_no_product_for_is_refused_in_words() {
    let product = Product::new(3, 5, 4, Format::Bf16);
    let f64 = Product::new(3, 5, 4, Format::F64);
    let refused = |product: Product, words: &str| {
        let error = product.validate().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    for format in [Format::F64, Format::F32, Format::Tf32, Format::F16, Format::Bf16] {
        Product::new(3, 5, 4, format).validate().unwrap();
    }
    product.into_format(Format::F32).validate().unwrap();
    refused(Product::new(3, 0, 4, Format::Bf16), "sizes and pitches of 1 to 2147483647");
    refused(Product::new(1 << 31, 1, 4, Format::Bf16), "sizes and pitches of 1 to 2147483647");
    refused(Product::new(3, 5, 4, Format::Tf32Truncated), "TF32 is no format of memory");
    refused(Product { a: Operand { format: Format::F16, ..product.a }, ..product }, "A in f16 and B in bf16");
    refused(Product { compute: Compute::Tf32, ..product }, "Tf32 of bf16, expected one of [F32]");
    refused(f64.into_format(Format::F32), "C in f32, expected f64");
    refused(product.into_format(Format::F16), "C in f16, expected bf16, or f32");
    refused(
        Product { a: Operand { pitch: 3, ..product.a }, ..product },
        "rows of A have 4 elements in memory and lie 3",
    );
    refused(Product { b: Operand { transposed: true, pitch: 3, ..product.b }, ..product }, "rows of B have 4 elements");
    refused(Product { c_pitch: 4, ..product }, "rows of C have 5 elements");
    refused(Product { batch: Batch { count: 2, a: 0, b: 0, c: 14 }, ..product }, "have 15 elements and lie 14 apart");
}
