// What the preparations of a chunk share: reading rows of q and k, and the inverse of I + L.
//
// T = (I + L)^-1 for a strictly lower triangular L: each warp inverts a diagonal block of 16 x 16 by forward substitution in
// binary32, then computes a column of blocks from the top down, T_ij = -T_ii sum_{j <= m < i} L_im T_mj. It does so
// transposed, since the transpose of a result is the left operand of the products with it.
#pragma once
#include "chunk.cuh"

constexpr int BLOCK_PITCH = 20; // floats, of a diagonal block

// A row is read by 8 lanes, so a warp has four rows at once; a lane has 4 neighbouring elements of every 32.
constexpr int ROW_LANES = 8, ROWS_AT_ONCE = 32 / ROW_LANES, PIECES = K_BLOCK / (4 * ROW_LANES);
struct __align__(4 * sizeof(INPUT)) Piece {
    INPUT x[4];
};
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
    for (int offset = 1; offset < ROW_LANES; offset <<= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int offset = 1; offset < ROW_LANES; offset <<= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// The power of two 2^-e that brings `largest` into [1, 2).
__device__ __forceinline__ float row_factor(float largest) {
#if MODE == MODE_F16
    int exponent = (int)(__float_as_uint(largest) >> 23);
    int wanted = exponent == 0 ? 127 : min(max(254 - exponent, 1), 253);
    return __uint_as_float((u32)wanted << 23);
#else
    return 1.0f;
#endif
}

// Column `lane` of (I + block)^-1 for a strictly lower triangular block. Volatile: loaded all at once, it would not fit into
// the registers.
__device__ __forceinline__ void invert_diagonal(const volatile float* block, float (&x)[16]) {
    const int lane = threadIdx.x & 15;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float sum = i == lane ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; ++j) sum = fmaf(-block[i * BLOCK_PITCH + j], x[j], sum);
        x[i] = sum;
    }
}

// The blocks below the diagonal of T in block column `column`; `inverse` has the diagonal blocks.
__device__ __forceinline__ void invert_column(const operand* lower, operand* inverse, int column) {
    const int lane = threadIdx.x & 31, row = lane / 4, quad = lane % 4;
    Left above[TILES]; // T_mj^T for m = j, j + 1, ...
    above[0] = load_left_transposed(inverse + 16 * column * SQUARE_PITCH + 16 * column, SQUARE_PITCH);
#pragma unroll
    for (int d = 1; d < TILES; ++d) {
        const int i = column + d;
        if (i >= TILES) break;
        float sum[2][4], block[2][4];
        clear(sum);
        clear(block);
#pragma unroll
        for (int m = 0; m < d; ++m)
            product_nt(sum, above[m], lower + 16 * i * SQUARE_PITCH + 16 * (column + m), SQUARE_PITCH);
        product_nt(block, make_left(sum[0], sum[1], -1.0f), inverse + 16 * i * SQUARE_PITCH + 16 * i, SQUARE_PITCH);
        above[d] = make_left(block[0], block[1], 1.0f);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                inverse[(16 * i + 8 * n + 2 * quad + e % 2) * SQUARE_PITCH + 16 * column + row + 8 * (e / 2)] =
                    to_operand(block[n][e]);
    }
}

// Zeros in the blocks of a square above the diagonal: products of warpgroups take a square as a whole.
template <int Threads> __device__ __forceinline__ void clear_above_diagonal(operand* square) {
    constexpr int PIECES_OF_ROW = CHUNK * OPERAND_BYTES / 16;
#pragma unroll 1 // an unrolled loop takes registers that the callers lack
    for (int i = threadIdx.x; i < CHUNK * PIECES_OF_ROW; i += Threads) {
        const int row = i / PIECES_OF_ROW, piece = i % PIECES_OF_ROW;
        if (piece * (16 / OPERAND_BYTES) / 16 > row / 16) *(uint4*)((u8*)(square + row * SQUARE_PITCH) + 16 * piece) = uint4{};
    }
}

// A tile of a square from shared to global memory, padding and all, by `Threads` threads from `first` on.
template <int Threads> __device__ __forceinline__ void write_square(operand* to, const operand* from, int first) {
    constexpr int BYTES = SQUARE_TILE * OPERAND_BYTES;
#pragma unroll 2
    for (int i = 16 * ((int)threadIdx.x - first); i < BYTES; i += 16 * Threads) *(uint4*)((u8*)to + i) = *(const uint4*)((const u8*)from + i);
}
