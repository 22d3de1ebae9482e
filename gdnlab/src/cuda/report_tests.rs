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
fn spills_stand_with_the_kernel_that_they_belong_to() {
    assert_eq!(spills(LOG, "spills"), Some(Spills { store_bytes: 336, load_bytes: 348 }));
    assert_eq!(spills(LOG, "fits"), Some(Spills::default()));
    assert_eq!(spills(LOG, "fit"), None);
    assert_eq!(spills("", "fits"), None);
}

#[test]
fn warnings_of_both_compilers_are_kept_and_nothing_else() {
    let warnings = Report::read(LOG, b"").warnings;
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].contains("#177-D"), "{warnings:?}");
    assert!(warnings[1].contains("C7510"), "{warnings:?}");
}
