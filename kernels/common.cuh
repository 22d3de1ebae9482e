// Shared by every kernel: number formats, conversions, warp reductions, asynchronous copies.
//
// No CUDA header is included anywhere in this folder: parsing cuda_bf16.h alone would take a third of a kernel's
// compilation. A 16-bit value is an unsigned short whose meaning its wrapper type carries.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(double x) { return (float)x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Round to nearest, ties to even; beyond the range of the format the result is infinite.
template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ double from_float<double>(float x) { return (double)x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

template <class T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// Address of shared memory as the instructions on it want it.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

// 16 bytes from global to shared memory without passing through registers; zeros where `valid` is false.
__device__ __forceinline__ void copy_async_16(u32 to, const void* from, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending> __device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Hopper and later have the bulk copy engine; -DPORTABLE compiles what older cards run.
#if __CUDA_ARCH__ >= 900 && !defined(PORTABLE)
#define BULK_COPY 1
#else
#define BULK_COPY 0
#endif

// A kernel may be launched before the one before it on its stream has ended, to prepare itself (Hopper and later). It calls
// the first before it touches what that one wrote, and every kernel of a pass calls it: then all before have ended. The
// second lets the next kernel be launched once every block has called it or ended.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#if BULK_COPY
// The bulk copy engine: one thread asks for a whole block of memory, and a barrier in shared memory counts its bytes.
typedef u64 Barrier;
// It passes on after `arrivals` calls of barrier_expect or of barrier_arrive (hopper.cuh), and all bytes that are expected.
__device__ __forceinline__ void barrier_init(Barrier* barrier, u32 arrivals = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(Barrier* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void barrier_wait(Barrier* barrier, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}
// `bytes` is a multiple of 16.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, u32 bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
#endif

// Two neighbouring values in one load or store.
template <class T> __device__ __forceinline__ float2 load_two(const T* from) {
    struct __align__(2 * sizeof(T)) Pair { T first, second; };
    const Pair pair = *(const Pair*)from;
    return make_float2(to_float(pair.first), to_float(pair.second));
}
template <class T> __device__ __forceinline__ void store_two(T* to, float first, float second) {
    struct __align__(2 * sizeof(T)) Pair { T first, second; };
    Pair pair = {from_float<T>(first), from_float<T>(second)};
    *(Pair*)to = pair;
}
