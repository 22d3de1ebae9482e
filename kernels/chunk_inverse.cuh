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

// Stores the transpose of a 16 x 16 left operand.
__device__ __forceinline__ void store_transposed(operand* to, const Left& left, int pitch) {
    const int lane = threadIdx.x & 31;
    to += lane / 4 + 2 * (lane % 4) * pitch;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
#if MODE == MODE_F16 || MODE == MODE_BF16
        const operand x = (operand)(left.r[e / 2] >> 16 * (e % 2));
#elif MODE == MODE_TF32
        const operand x = __uint_as_float(left.r[e / 4 * 4 + e % 2 * 2 + e / 2 % 2]);
#else
        const operand x = (e < 4 ? left.a : left.b)[e % 4];
#endif
        to[(8 * (e / 4) + e % 2) * pitch + 8 * (e / 2 % 2)] = x;
    }
}

// Where block column `column` is: T and L from their block on the diagonal on, as invert_below wants them.
struct BlockColumn {
    operand* inverse;
    const operand* lower;
    int column;
#if MODE == MODE_F16 || MODE == MODE_BF16
    u32 own, right; // those for ldmatrix: rows of right operands; their transposes are left operands
#endif
};

// The blocks of T from the D-th below the diagonal on; `above` has the transposed ones above. Rows of L are `LowerPitch` apart and
// begin with row `LowerFrom`. Recursive: a loop that may end early would not be unrolled, and `above` be in memory.
template <int LowerPitch, int LowerFrom, int D>
__device__ __forceinline__ void invert_below(Left (&above)[TILES], const BlockColumn& at) {
    if (at.column >= TILES - D) return;
    float sum[2][4], block[2][4];
    clear(sum);
    clear(block);
#if MODE == MODE_F16 || MODE == MODE_BF16
    const u32 own = at.own + 16 * D * SQUARE_PITCH * OPERAND_BYTES;
    u32 right[4];
#pragma unroll
    for (int m = 0; m < D; ++m) {
        load_matrices(right, at.right + ((16 * D - LowerFrom) * LowerPitch + 16 * m) * OPERAND_BYTES);
        mma_16816(sum[0], above[m].r, right[0], right[1]);
        mma_16816(sum[1], above[m].r, right[2], right[3]);
    }
    const Left left = make_left(sum[0], sum[1], -1.0f);
    load_matrices(right, own + 16 * D * OPERAND_BYTES);
    mma_16816(block[0], left.r, right[0], right[1]);
    mma_16816(block[1], left.r, right[2], right[3]);
    above[D] = make_left(block[0], block[1], 1.0f);
#if BULK_COPY // and stmatrix with it
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(own), "r"(above[D].r[0]),
                 "r"(above[D].r[1]), "r"(above[D].r[2]), "r"(above[D].r[3])
                 : "memory");
#else
    store_transposed(at.inverse + 16 * D * SQUARE_PITCH, above[D], SQUARE_PITCH);
#endif
#else
#pragma unroll
    for (int m = 0; m < D; ++m)
        product_nt(sum, above[m], at.lower + (16 * D - LowerFrom) * LowerPitch + 16 * m, LowerPitch);
    product_nt(block, make_left(sum[0], sum[1], -1.0f), at.inverse + 16 * D * (SQUARE_PITCH + 1), SQUARE_PITCH);
    above[D] = make_left(block[0], block[1], 1.0f);
    store_transposed(at.inverse + 16 * D * SQUARE_PITCH, above[D], SQUARE_PITCH);
#endif
    if constexpr (D + 1 < TILES) invert_below<LowerPitch, LowerFrom, D + 1>(above, at);
}

// The blocks below the diagonal of T in block column `column`; `inverse` has the diagonal blocks.
template <int LowerPitch = SQUARE_PITCH, int LowerFrom = 0>
__device__ __forceinline__ void invert_column(const operand* lower, operand* inverse, int column, int lane) {
    BlockColumn at;
    at.inverse = inverse + 16 * column * (SQUARE_PITCH + 1);
    at.lower = lower + 16 * column * (LowerPitch + 1);
    at.column = column;
    Left above[TILES];
#if MODE == MODE_F16 || MODE == MODE_BF16
    const int row = lane % 8 + lane / 16 * 8, of_row = lane / 8 % 2 * 8;
    at.own = shared_address(at.inverse) + (row * SQUARE_PITCH + of_row) * OPERAND_BYTES;
    at.right = shared_address(at.lower) + (row * LowerPitch + of_row) * OPERAND_BYTES;
    load_matrices_transposed(above[0].r, at.own);
#else
    above[0] = load_left_transposed(at.inverse, SQUARE_PITCH);
#endif
    invert_below<LowerPitch, LowerFrom, 1>(above, at);
}
__device__ __forceinline__ void invert_column(const operand* lower, operand* inverse, int column) {
    invert_column<>(lower, inverse, column, (int)(threadIdx.x & 31));
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
