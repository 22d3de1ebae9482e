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
// state += (left operands) K' for the tokens of the chunk.
__device__ __forceinline__ void start_state_product(OwnState& state, const Left (&left)[4], u32 keys) {
    const u64 b = tile_descriptor_transposed(keys, TILE_BYTES);
#pragma unroll
    for (int c = 0; c < 4; ++c) warpgroup_product_nn(state, left[c], b + (16 * c * SPAN_BYTES >> 4));
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
