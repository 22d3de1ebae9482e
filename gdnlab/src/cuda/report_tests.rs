use super::*;

const LOG: &str = "\
recurrent.cu(7): warning #177-D: variable \"unused\" was declared but never referenced
      float unused;
            ^

ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'spills' for 'sm_90a'
ptxas info    : Function properties for spills
ptxas         .     264 bytes stack frame, 328 bytes spill stores, 344 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 264 bytes cumulative stack size
ptxas info    : Function properties for _Z6helperPfi
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Compiling entry function 'fits' for 'sm_90a'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient \
register resources for the wgmma pipeline in the function 'fits'
ptxas info    : Function properties for fits
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 1 barriers, 128 bytes smem, 368 bytes cmem[0]
";

#[test]
fn numbers_stand_with_the_kernel_that_they_belong_to() {
    let report = Report::of_log(LOG);
    let names: Vec<_> = report.functions.iter().map(|function| function.name.as_str()).collect();
    assert_eq!(names, ["fits", "spills"]);
    let spills = report.function("spills").unwrap();
    assert_eq!((spills.registers, spills.stack_bytes), (32, 264));
    assert_eq!((spills.spill_store_bytes, spills.spill_load_bytes), (336, 348));
    let fits = report.function("fits").unwrap();
    assert_eq!((fits.registers, fits.stack_bytes, fits.shared_bytes), (30, 0, 128));
}

#[test]
fn warnings_of_both_compilers_are_kept_and_nothing_else() {
    let warnings = Report::of_log(LOG).warnings;
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].contains("#177-D"), "{warnings:?}");
    assert!(warnings[1].contains("C7510"), "{warnings:?}");
}

#[test]
fn an_image_that_is_none_has_no_facts() {
    for image in [&b""[..], b"\x7fELF", &[0xff; 256]] {
        assert_eq!(cubin::facts(image, "fits"), cubin::Facts::default());
    }
}
