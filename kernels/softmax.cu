// The causal softmax of attention whose scores lie in memory, and its gradient:
//
//   p_ij = e^{s_ij - lse_i} for j <= i, 0 beyond      lse_i = log sum_{j <= i} e^{s_ij}
//   ds_ij = p_ij (dp_ij - sum_{l <= i} p_il dp_il)
//
//   s, p, dp, ds (H, B, T, pitch) in bf16, where p takes the place of s, and ds that of dp; lse (B, H, T)
//
// A warp takes a row and reads its visible part twice, the second time from a cache. Arithmetic is in binary32. Every element
// of a row is written, the padding behind the last token too, so that products can take whole matrices.
#include "layer.cuh"

struct Softmax {
    bf16* scores;   // (H, B, T, pitch): s, which becomes p; for the gradient p, which is read
    bf16* gradient; // (H, B, T, pitch): dp, which becomes ds; for the gradient alone
    float* lse;     // (B, H, T); without it in the gradient
    int batch, tokens, heads;
    int pitch; // elements from row to row, a multiple of 8
};

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr float LOWEST = -3.402823466e38f;

// What a warp works on: number of its row among all, and how many tokens the row sees.
struct Row {
    int number, visible;
};

__device__ __forceinline__ Row row_of_warp(const Softmax& p) {
    const int number = blockIdx.x * WARPS + threadIdx.x / 32;
    return {number, number % p.tokens + 1};
}

// Grid: rows H B T over 8.
extern "C" __global__ void __launch_bounds__(THREADS) softmax(const __grid_constant__ Softmax p) {
    const int lane = threadIdx.x % 32, vectors = p.pitch / WIDE;
    const Row row = row_of_warp(p);
    if (row.number >= p.batch * p.heads * p.tokens) return;
    bf16* const s = p.scores + (long long)row.number * p.pitch;
    const int seen = (row.visible + WIDE - 1) / WIDE;
    float most = LOWEST, sum = 0.0f;
#pragma unroll 4
    for (int i = lane; i < seen; i += 32) {
        float z[WIDE], here = LOWEST, part = 0.0f;
        load_eight(s + WIDE * i, z);
#pragma unroll
        for (int e = 0; e < WIDE; ++e) {
            if (WIDE * i + e >= row.visible) z[e] = LOWEST;
            here = fmaxf(here, z[e]);
        }
        here = fmaxf(here, most);
#pragma unroll
        for (int e = 0; e < WIDE; ++e) part += __expf(z[e] - here);
        sum = sum * __expf(most - here) + part;
        most = here;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        const float other_most = __shfl_xor_sync(0xffffffffu, most, offset);
        const float other_sum = __shfl_xor_sync(0xffffffffu, sum, offset);
        const float both = fmaxf(most, other_most);
        sum = sum * __expf(most - both) + other_sum * __expf(other_most - both);
        most = both;
    }
    if (lane == 0) {
        const int matrix = row.number / p.tokens, head = matrix / p.batch, sequence = matrix % p.batch;
        p.lse[((long long)sequence * p.heads + head) * p.tokens + row.visible - 1] = most + logf(sum);
    }
    const float factor = 1.0f / sum;
#pragma unroll 4
    for (int i = lane; i < vectors; i += 32) {
        float z[WIDE];
        clear(z);
        if (i < seen) {
            load_eight(s + WIDE * i, z);
#pragma unroll
            for (int e = 0; e < WIDE; ++e) z[e] = WIDE * i + e < row.visible ? factor * __expf(z[e] - most) : 0.0f;
        }
        store_eight(s + WIDE * i, z);
    }
}

// Grid: rows H B T over 8.
extern "C" __global__ void __launch_bounds__(THREADS) softmax_gradient(const __grid_constant__ Softmax p) {
    const int lane = threadIdx.x % 32, vectors = p.pitch / WIDE;
    const Row row = row_of_warp(p);
    if (row.number >= p.batch * p.heads * p.tokens) return;
    const bf16* const weights = p.scores + (long long)row.number * p.pitch;
    bf16* const gradient = p.gradient + (long long)row.number * p.pitch;
    const int seen = (row.visible + WIDE - 1) / WIDE;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = lane; i < seen; i += 32) {
        float w[WIDE], g[WIDE];
        load_eight(weights + WIDE * i, w);
        load_eight(gradient + WIDE * i, g);
#pragma unroll
        for (int e = 0; e < WIDE; ++e) sum += WIDE * i + e < row.visible ? w[e] * g[e] : 0.0f;
    }
    sum = warp_sum(sum);
#pragma unroll 4
    for (int i = lane; i < vectors; i += 32) {
        float w[WIDE], g[WIDE];
        clear(g);
        if (i < seen) {
            load_eight(weights + WIDE * i, w);
            load_eight(gradient + WIDE * i, g);
#pragma unroll
            for (int e = 0; e < WIDE; ++e) g[e] = WIDE * i + e < row.visible ? w[e] * (g[e] - sum) : 0.0f;
        }
        store_eight(gradient + WIDE * i, g);
    }
}
