// Shared by the kernels of attention on Hopper: rows of a head in tiles of shared memory, and products with them.
#pragma once
#include "attention.cuh"
#include "hopper.cuh"

#if HOPPER
constexpr int SPANS = HEAD_DIM / SPAN; // tiles side by side
constexpr int BOX = 64;                // rows of one copy
constexpr u32 ROW_BYTES = 2 * HEAD_DIM;

// Starts the copy of Rows rows from token `first` on: tiles of SPAN columns, one after the other. Rows beyond the sequence
// become zero.
template <int Rows>
__device__ __forceinline__ void copy_rows(u32 to, const TensorMap& from, const Work& work, int first, Barrier* barrier) {
#pragma unroll
    for (int span = 0; span < SPANS; ++span)
#pragma unroll
        for (int row = 0; row < Rows; row += BOX) {
            const Corner corner = {span * SPAN, work.head, first + row, work.batch};
            copy_tile(to + (span * Rows + row) * SPAN_BYTES, from, corner, barrier);
        }
}

// Starts acc = A B^T with all d columns of 64 rows of A and 8 N rows of B. `Rows` are those of the tiles that A's belong to.
template <int Rows, int N> __device__ __forceinline__ void start_product_nt(float (&acc)[N][4], u32 left, u32 right) {
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM; k += 16) {
        const u64 a = tile_descriptor(left + k / SPAN * Rows * SPAN_BYTES + 2 * (k % SPAN));
        const u64 b = tile_descriptor(right + k / SPAN * 8 * N * SPAN_BYTES + 2 * (k % SPAN));
        if (k == 0) warpgroup_product_nt<0>(acc, a, b);
        else warpgroup_product_nt<1>(acc, a, b);
    }
    warpgroup_commit();
}

// Accumulators as left operands.
template <int N> __device__ __forceinline__ void make_lefts(Left (&left)[N / 2], const float (&x)[N][4]) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) left[k] = make_left(x[2 * k], x[2 * k + 1], 1.0f);
}

// Starts acc += A B with all d columns of 16 N rows of B.
template <int N> __device__ __forceinline__ void start_product_nn(Rows16& acc, const Left (&left)[N], u32 right) {
    hold(acc);
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < N; ++k)
        warpgroup_product_nn(acc, left[k], tile_descriptor_transposed(right + 16 * k * SPAN_BYTES, 16 * N * SPAN_BYTES));
    warpgroup_commit();
}
#endif
