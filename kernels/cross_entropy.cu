// The loss of the next token, and its gradient in the place of the logits:
//
//   lse_n = log sum_v e^{z_nv}      loss_n = lse_n - z_{n, target_n}      dz_nv = scale (e^{z_nv - lse_n} - [v = target_n])
//
//   z, dz (rows, vocabulary) in bf16; targets, losses (rows)
//
// A block takes a row and reads it twice, the second time from the level-2 cache: first for the maximum and the sum of the
// exponentials, both at once, then to write the gradient. So no logit is ever stored in binary32, and a step can hand over
// the logits of a few rows at a time.
#include "layer.cuh"

struct CrossEntropy {
    bf16* logits;       // (rows, vocabulary); become the gradient where `scale` is not 0
    const int* targets; // (rows)
    float* losses;      // (rows)
    int vocabulary;
    float scale; // 1 / all rows of the step
};

struct LossMean {
    const float* losses; // (rows)
    float* mean;         // one number
    int rows;
};

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr float LOWEST = -3.402823466e38f;

// Maximum and sum of e^{z - maximum} of numbers that were seen.
struct Seen {
    float most, sum;
};

__device__ __forceinline__ Seen together(Seen a, Seen b) {
    const float most = fmaxf(a.most, b.most);
    return {most, a.sum * __expf(a.most - most) + b.sum * __expf(b.most - most)};
}

// Grid: rows.
extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy(const __grid_constant__ CrossEntropy p) {
    __shared__ Seen of_warp[WARPS];
    __shared__ float target_logit;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, vectors = p.vocabulary / WIDE;
    wait_for_kernel_before();
    bf16* row = p.logits + (long long)blockIdx.x * p.vocabulary;
    const int target = p.targets[blockIdx.x];
    // Before anything is overwritten.
    if (threadIdx.x == 0) target_logit = to_float(row[target]);
    Seen seen = {LOWEST, 0.0f};
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += THREADS) {
        float z[WIDE];
        load_eight(row + WIDE * i, z);
        float most = z[0], sum = 0.0f;
#pragma unroll
        for (int e = 1; e < WIDE; ++e) most = fmaxf(most, z[e]);
        most = fmaxf(most, seen.most);
#pragma unroll
        for (int e = 0; e < WIDE; ++e) sum += __expf(z[e] - most);
        seen = {most, seen.sum * __expf(seen.most - most) + sum};
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        const Seen other = {__shfl_xor_sync(0xffffffffu, seen.most, offset), __shfl_xor_sync(0xffffffffu, seen.sum, offset)};
        seen = together(seen, other);
    }
    if (lane == 0) of_warp[warp] = seen;
    __syncthreads();
    seen = of_warp[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) seen = together(seen, of_warp[w]);
    const float lse = seen.most + logf(seen.sum);
    if (threadIdx.x == 0) p.losses[blockIdx.x] = lse - target_logit;
    if (p.scale == 0.0f) return;
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += THREADS) {
        float z[WIDE];
        load_eight(row + WIDE * i, z);
#pragma unroll
        for (int e = 0; e < WIDE; ++e) z[e] = p.scale * (__expf(z[e] - lse) - (WIDE * i + e == target ? 1.0f : 0.0f));
        store_eight(row + WIDE * i, z);
    }
}

// One block. The losses are added up in binary64.
extern "C" __global__ void __launch_bounds__(THREADS) loss_mean(const __grid_constant__ LossMean p) {
    __shared__ double of_warp[WARPS];
    wait_for_kernel_before();
    double sum = 0.0;
    for (int i = threadIdx.x; i < p.rows; i += THREADS) sum += (double)p.losses[i];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = 0.0;
    for (int w = 0; w < WARPS; ++w) sum += of_warp[w];
    *p.mean = (float)(sum / p.rows);
}
