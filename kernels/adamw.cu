// AdamW on all parameters at once, after clipping by the norm of the whole gradient:
//
//   g <- g min(1, clip / |g|)      m <- beta1 m + (1 - beta1) g      v <- beta2 v + (1 - beta2) g^2
//   w <- w - rate (m c1 / (sqrt(v c2) + eps) + decay w)      c = 1 / (1 - beta^t)
//
//   w, m, v, g (count) in binary32; the copy of w that products take, in bf16
//
// The parameters lie one after the other, those with weight decay first. All numbers that change from step to step are in
// memory (OptimizerStep), so that a recorded step can be replayed. The norm is summed in a fixed order: a thread in binary32
// over its own elements, all else in binary64. Where it is not finite, nothing is changed.
#include "layer.cuh"

struct OptimizerStep {
    float rate;        // learning rate
    float decay;       // rate * weight decay
    float correction1; // c1
    float correction2; // c2
    float beta1, rest1; // beta1, 1 - beta1
    float beta2, rest2;
    float eps;
    float clip;
};

// What gradient_norm leaves.
struct GradientNorm {
    double norm;
    float factor; // min(1, clip / norm); NaN where the norm is not finite
    float unused;
};

struct AdamW {
    float* weights;            // (count)
    float* m;                  // (count)
    float* v;                  // (count)
    const float* gradient;     // (count)
    bf16* rounded;             // (count)
    const OptimizerStep* step; // one
    GradientNorm* norm;        // one
    double* parts;             // (blocks of gradient_norm_parts)
    u64 count;                 // elements, a multiple of 8
    u64 decayed;               // how many of them have weight decay, a multiple of 8
    int blocks;                // of gradient_norm_parts
    int unused;
};

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int TURNS = 8; // accesses of a thread to the gradient

__device__ __forceinline__ double block_sum(double x) {
    __shared__ double of_warp[WARPS];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0;
    for (int w = 0; w < WARPS; ++w) x += of_warp[w];
    return x;
}

// Grid: count / (8 THREADS TURNS) rounded up.
extern "C" __global__ void __launch_bounds__(THREADS) gradient_norm_parts(const __grid_constant__ AdamW p) {
    wait_for_kernel_before();
    float squares = 0.0f;
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const u64 at = WIDE * (((u64)blockIdx.x * TURNS + turn) * THREADS + threadIdx.x);
        if (at >= p.count) break;
        float g[WIDE];
        load_eight(p.gradient + at, g);
#pragma unroll
        for (int e = 0; e < WIDE; ++e) squares += g[e] * g[e];
    }
    const double sum = block_sum((double)squares);
    if (threadIdx.x == 0) p.parts[blockIdx.x] = sum;
}

// One block.
extern "C" __global__ void __launch_bounds__(THREADS) gradient_norm(const __grid_constant__ AdamW p) {
    wait_for_kernel_before();
    double sum = 0.0;
    for (int i = threadIdx.x; i < p.blocks; i += THREADS) sum += p.parts[i];
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    const double norm = sqrt(sum);
    const bool finite = sum - sum == 0.0;
    p.norm->norm = norm;
    p.norm->factor = finite ? (float)fmin(1.0, (double)p.step->clip / norm) : __uint_as_float(0x7fc00000u);
}

// Grid: count / (8 THREADS) rounded up.
extern "C" __global__ void __launch_bounds__(THREADS) adamw(const __grid_constant__ AdamW p) {
    const u64 at = WIDE * ((u64)blockIdx.x * THREADS + threadIdx.x);
    wait_for_kernel_before();
    const float factor = p.norm->factor;
    if (at >= p.count || factor != factor) return;
    const OptimizerStep step = *p.step;
    const float decay = at < p.decayed ? step.decay : 0.0f;
    float w[WIDE], m[WIDE], v[WIDE], g[WIDE];
    load_eight(p.weights + at, w);
    load_eight(p.m + at, m);
    load_eight(p.v + at, v);
    load_eight(p.gradient + at, g);
#pragma unroll
    for (int e = 0; e < WIDE; ++e) {
        g[e] *= factor;
        m[e] = step.beta1 * m[e] + step.rest1 * g[e];
        v[e] = step.beta2 * v[e] + step.rest2 * g[e] * g[e];
        const float direction = m[e] * step.correction1 / (sqrtf(v[e] * step.correction2) + step.eps);
        w[e] -= step.rate * direction + decay * w[e];
    }
    store_eight(p.weights + at, w);
    store_eight(p.m + at, m);
    store_eight(p.v + at, v);
    store_eight(p.rounded + at, w);
}
