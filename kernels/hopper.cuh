// What only Hopper has (sm_90a): products of a warpgroup, four warps together, whose right operand is in shared memory, and
// tiles that the bulk copy engine brings there.
//
// A tile in shared memory has rows of 128 bytes, 64 operands, that follow each other, from an address on that is a multiple of
// 1,024. Its pieces of 16 bytes are swizzled: piece c of row r lies at place c ^ (r % 8) of the row. So the copy engine writes
// it and the tensor cores read it. What is wider than 64 operands is several tiles.
//
// Accumulators: warp w of the warpgroup has rows 16 w to 16 w + 15, as in tile.cuh.
#pragma once
#include "tile.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER 1
#else
#define HOPPER 0
#endif

constexpr int SPAN = 64; // operands of a row of a tile
constexpr int SPAN_BYTES = 128;

// What the copy engine knows of a tensor.
struct __align__(128) TensorMap {
    u64 words[16];
};

#if HOPPER
// A tile whose first axis in memory is the contracted one: (row, k).
__device__ __forceinline__ u64 tile_descriptor(u32 address) {
    const u64 eight_rows = 8 * SPAN_BYTES, swizzle_128 = 1;
    return (address & 0x3ffff) >> 4 | (u64)1 << 16 | eight_rows >> 4 << 32 | swizzle_128 << 62;
}
// A tile whose rows are the contracted index: (k, column). `next_bytes` from a tile to the one of the next 64 columns.
__device__ __forceinline__ u64 tile_descriptor_transposed(u32 address, u32 next_bytes) {
    const u64 eight_rows = 8 * SPAN_BYTES, swizzle_128 = 1;
    return (address & 0x3ffff) >> 4 | (u64)(next_bytes >> 4) << 16 | eight_rows >> 4 << 32 | swizzle_128 << 62;
}

#if MODE == MODE_F16
#define WGMMA_FORMATS "f16.f16"
#else
#define WGMMA_FORMATS "bf16.bf16"
#endif
#define TILE_OF(n) "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3])
#define TILES_OF(n) \
    TILE_OF(n), TILE_OF(n + 1), TILE_OF(n + 2), TILE_OF(n + 3), TILE_OF(n + 4), TILE_OF(n + 5), TILE_OF(n + 6), TILE_OF(n + 7)
#define NAMES_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Keeps the compiler from moving what touches these registers across this line.
template <int N> __device__ __forceinline__ void hold(float (&tiles)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(tiles[n][e]));
}

// Before the first product after registers of an operand or an accumulator were written.
__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the last `Pending` committed groups of products have ended.
template <int Pending> __device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Starts acc = A B^T, or acc += A B^T where Add is 1, for 16 of the contracted index: A (64, 16) and B (8 N, 16) in tiles.
template <int Add> __device__ __forceinline__ void warpgroup_product_nt(float (&acc)[8][4], u64 left, u64 right) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_FORMATS " {" NAMES_32 "}, %32, %33, add, 1, 1, 0, 0;\n}"
                 : TILES_OF(0)
                 : "l"(left), "l"(right), "n"(Add));
}
template <int Add> __device__ __forceinline__ void warpgroup_product_nt(float (&acc)[16][4], u64 left, u64 right) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_FORMATS " {" NAMES_64 "}, %64, %65, add, 1, 1, 0, 0;\n}"
                 : TILES_OF(0), TILES_OF(8)
                 : "l"(left), "l"(right), "n"(Add));
}

// The same with A (64, 16) in registers.
template <int Add> __device__ __forceinline__ void warpgroup_product_nt(float (&acc)[8][4], const Left& left, u64 right) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_FORMATS " {" NAMES_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"
                 : TILES_OF(0)
                 : "r"(left.r[0]), "r"(left.r[1]), "r"(left.r[2]), "r"(left.r[3]), "l"(right), "n"(Add));
}

// Starts acc = A B, or acc += A B, for 16 of the contracted index: A (64, 16) in registers, B (16, 8 N) in tiles, transposed.
template <int Add = 1> __device__ __forceinline__ void warpgroup_product_nn(float (&acc)[8][4], const Left& left, u64 right) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_FORMATS " {" NAMES_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}"
                 : TILES_OF(0)
                 : "r"(left.r[0]), "r"(left.r[1]), "r"(left.r[2]), "r"(left.r[3]), "l"(right), "n"(Add));
}
template <int Add = 1> __device__ __forceinline__ void warpgroup_product_nn(float (&acc)[16][4], const Left& left, u64 right) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_FORMATS " {" NAMES_64 "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"
                 : TILES_OF(0), TILES_OF(8)
                 : "r"(left.r[0]), "r"(left.r[1]), "r"(left.r[2]), "r"(left.r[3]), "l"(right), "n"(Add));
}

// Where a tile starts in a tensor, from the contiguous axis on.
struct Corner {
    int column, head, token, batch;
};

// Starts the copy of a tile; its bytes count at the barrier.
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap& from, Corner corner, Barrier* barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 ::"r"(to), "l"(&from), "r"(corner.column), "r"(corner.head), "r"(corner.token), "r"(corner.batch),
                 "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// After stores to shared memory that the tensor cores or the copy engine come to next, and before a barrier.
__device__ __forceinline__ void fence_shared_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Of the calling warpgroup only; `Number` from 1 to 15.
template <int Number> __device__ __forceinline__ void warpgroup_barrier() {
    asm volatile("bar.sync %0, 128;" ::"n"(Number) : "memory");
}
// Registers of each thread of the warpgroup from here on.
template <int Registers> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Element (row, column) of a tile of 16-bit operands, in bytes from its begin.
__device__ __forceinline__ u32 place_in_tile(u32 row, u32 column) {
    return row * SPAN_BYTES + ((column / 8 ^ row % 8) * 16 | column % 8 * 2);
}
// Four matrices of 8 x 8 operands from registers to shared memory,
__device__ __forceinline__ void store_matrices(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
}
// and transposed; the inverse of load_matrices_transposed.
__device__ __forceinline__ void store_matrices_transposed(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Counts calls at a place in shared memory; true for the last of `Calls`, after which counting starts again. What the others
// did before their calls comes before what the last does after its own.
template <u32 Calls> __device__ __forceinline__ bool is_last(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(shared_address(counter)), "n"(Calls - 1)
                 : "memory");
    return before == Calls - 1;
}
#endif
