use super::*;

#[test]
fn the_drivers_version_is_read_from_either_kernel_module() {
    let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@host)  Sun\n\
                GCC version:  gcc version 12.3.0\n";
    assert_eq!(driver_version(open).as_deref(), Some("580.65.06"));
    let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129  Thu Oct 19 18:56:32 UTC 2023\n";
    assert_eq!(driver_version(closed).as_deref(), Some("535.129"));
    assert_eq!(driver_version(""), None);
}

/// Runs everywhere: a machine has a GPU, or its absence is an error that says what to do.
#[test]
fn without_a_gpu_there_is_a_message_and_no_panic() {
    match Gpu::shared() {
        Ok(gpu) => assert!(gpu.capability.0 >= 5 && !gpu.name.is_empty(), "{gpu:?}"),
        Err(error) => {
            let message = error.to_string();
            assert!(message.contains("NVIDIA driver") && message.contains("cpu-chunk-*"), "{message}");
            assert!(Gpu::in_use().is_none());
        }
    }
}
