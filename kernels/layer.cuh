// What the kernels of a model's layers share: rows of bf16 in accesses of 16 bytes, SiLU, sums over rows.
//
// All arithmetic is in binary32. A sum over tokens is taken in two passes without atomics: each block leaves the sum over
// its own rows, a *part*, and part_sums.cu adds the parts up in their order. Which rows a block takes follows from the sizes
// alone, so two runs give the same bits, on any GPU.
#pragma once
#include "common.cuh"

constexpr int WIDE = 8; // elements of an access to bf16

__device__ __forceinline__ uint4 load_packed(const bf16* from) { return *(const uint4*)from; }

__device__ __forceinline__ void unpack(const uint4& packed, float (&x)[WIDE]) {
    const u32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = __uint_as_float(pairs[i] << 16);
        x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ u32 packed_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ uint4 packed(const float (&x)[WIDE]) {
    return make_uint4(packed_pair(x[0], x[1]), packed_pair(x[2], x[3]), packed_pair(x[4], x[5]), packed_pair(x[6], x[7]));
}

__device__ __forceinline__ void load_eight(const bf16* from, float (&x)[WIDE]) { unpack(load_packed(from), x); }

__device__ __forceinline__ void load_eight(const float* from, float (&x)[WIDE]) {
    const float4 low = *(const float4*)from, high = *(const float4*)(from + 4);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

__device__ __forceinline__ void store_eight(bf16* to, const float (&x)[WIDE]) { *(uint4*)to = packed(x); }

__device__ __forceinline__ void store_eight(float* to, const float (&x)[WIDE]) {
    *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
    *(float4*)(to + 4) = make_float4(x[4], x[5], x[6], x[7]);
}

__device__ __forceinline__ void clear(float (&x)[WIDE]) {
#pragma unroll
    for (int i = 0; i < WIDE; ++i) x[i] = 0.0f;
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// silu and its derivative, s (1 + x (1 - s)) with s = sigmoid(x).
__device__ __forceinline__ float2 silu_with_slope(float x) {
    const float s = sigmoid(x);
    return make_float2(x * s, s * (1.0f + x * (1.0f - s)));
}

// The sum over `Lanes` neighbouring lanes, a power of two, in each of them.
template <int Lanes> __device__ __forceinline__ float lane_sum(float x) {
#pragma unroll
    for (int offset = Lanes / 2; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}
