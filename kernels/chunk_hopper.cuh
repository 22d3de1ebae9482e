// What the kernels share that sweep over the chunks of a sequence by products of warpgroups, on Hopper: tiles of 64 tokens, and the
// products of S^T, R^T and U^T, which are left operands in registers, with them.
#pragma once
#include "hopper.cuh"

#include "chunk_sweep.cuh"

#if HOPPER
static_assert(CHUNK == 64 && KD % SPAN == 0 && KD <= 128 && sizeof(INPUT) == 2, "tiles of 64 tokens, of 16-bit numbers");
static_assert(VD % COLUMNS == 0, "the columns of a block divide V");

constexpr int SPANS = KD / SPAN;
constexpr u32 TILE_BYTES = CHUNK * SPAN_BYTES;

struct __align__(1024) Tile {
    u8 bytes[TILE_BYTES];
};

template <class T> constexpr bool IS_BF16 = false;
template <> constexpr bool IS_BF16<bf16> = true;
constexpr bool INPUT_IS_BF16 = IS_BF16<INPUT>;

// The two inputs of a word.
__device__ __forceinline__ float first_of(u32 pair) {
    if constexpr (INPUT_IS_BF16) return __uint_as_float(pair << 16);
    return to_float(f16{(u16)pair});
}
__device__ __forceinline__ float second_of(u32 pair) {
    if constexpr (INPUT_IS_BF16) return __uint_as_float(pair & 0xffff0000u);
    return to_float(f16{(u16)(pair >> 16)});
}
__device__ __forceinline__ u32 pair_of_inputs(float first, float second) {
    if constexpr (!INPUT_IS_BF16) return pack_16(first, second);
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// A lane's row of 8 numbers in a tile, of the four matrices that make the left operand number c of four: the warp's 16 rows, and
// the place is that of piece 2 c.
struct LeftPlace {
    u32 row, piece; // bytes; what the piece of the row is exchanged with
    __device__ __forceinline__ explicit LeftPlace(u32 warp, u32 lane)
        : row((16 * warp + (lane / 8 % 2) * 8 + lane % 8) * SPAN_BYTES), piece((lane / 16 ^ lane % 8) * 16) {}
    __device__ __forceinline__ u32 operator()(int c) const { return row + (piece ^ 32 * (u32)c); }
};
// Where a lane's row of 8 numbers is, of four matrices: 16 rows times the 16 columns of its warp.
__device__ __forceinline__ u32 turned_place(u32 warp, u32 lane) {
    return place_in_tile((lane & 7) + (lane >> 4) * 8, 16 * warp + ((lane >> 3) & 1) * 8);
}

// Waits for the lanes of the warp, and says that it is done.
__device__ __forceinline__ void warp_arrive(Barrier* barrier, int lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
}

// From a warp's 16 columns of a tile of tokens to rows of memory, V columns each; rows at and beyond `valid` are left alone.
template <class T>
__device__ __forceinline__ void store_turned(T* to, long long pitch, const Tile& tile, u32 warp, u32 lane, int valid) {
    const u32 column = 16 * warp + lane % 2 * 8, own = lane / 2;
#pragma unroll
    for (int i = 0; i < CHUNK / 16; ++i) {
        const int token = 16 * i + own;
        const uint4 vector = *(const uint4*)(tile.bytes + place_in_tile(token, column));
        if (token < valid) *(uint4*)(to + token * pitch + column) = vector;
    }
}

// A warp's 16 rows of tiles of K columns to rows of memory that follow each other.
__device__ __forceinline__ void store_rows(operand* to, const Tile (&tiles)[SPANS], u32 warp, u32 lane) {
    constexpr int PIECES_OF_ROW = KD / 8;
#pragma unroll
    for (int i = 0; i < 16 * PIECES_OF_ROW / 32; ++i) {
        const u32 row = 16 * warp + (32 * i + lane) / PIECES_OF_ROW, column = (32 * i + lane) % PIECES_OF_ROW * 8;
        *(uint4*)(to + row * KD + column) = *(const uint4*)(tiles[column / SPAN].bytes + place_in_tile(row, column % SPAN));
    }
}

// acc = (left operands) B^T with B (tokens, 16 N) in tiles of rows.
template <int N> __device__ __forceinline__ void start_left_product(OwnTokens& acc, const Left (&left)[N], u32 right) {
    const u64 b = tile_descriptor(right);
#pragma unroll
    for (int c = 0; c < N; ++c) {
        const u64 next = (c / 4 * TILE_BYTES + c % 4 * 32) >> 4;
        if (c == 0) warpgroup_product_nt<0>(acc, left[c], b);
        else warpgroup_product_nt<1>(acc, left[c], b + next);
    }
}
// acc += the same.
__device__ __forceinline__ void start_more_product(OwnTokens& acc, const Left (&left)[4], u32 right) {
    const u64 b = tile_descriptor(right);
#pragma unroll
    for (int c = 0; c < 4; ++c) warpgroup_product_nt<1>(acc, left[c], b + (c * 32 >> 4));
}
// acc = (left operands) B, or acc += that where Add is 1, with B a tile of rows and columns of tokens.
template <int Add> __device__ __forceinline__ void start_square_product(OwnTokens& acc, const Left (&left)[4], u32 right) {
    const u64 b = tile_descriptor_transposed(right, TILE_BYTES);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        if (c == 0) warpgroup_product_nn<Add>(acc, left[c], b);
        else warpgroup_product_nn<1>(acc, left[c], b + (16 * c * SPAN_BYTES >> 4));
    }
}
// state += (left operands) K' for the tokens of the chunk.
__device__ __forceinline__ void start_state_product(OwnState& state, const Left (&left)[4], u32 keys) {
    const u64 b = tile_descriptor_transposed(keys, TILE_BYTES);
#pragma unroll
    for (int c = 0; c < 4; ++c) warpgroup_product_nn<1>(state, left[c], b + (16 * c * SPAN_BYTES >> 4));
}

// largest_of in four chains.
template <int N> __device__ __forceinline__ float largest_in_chains(const float (&tiles)[N][4]) {
    float most[4] = {};
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) most[e] = fmaxf(most[e], fabsf(tiles[n][e]));
    return warp_max(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])));
}
#endif
