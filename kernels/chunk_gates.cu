// Gradients of the raw gates of GDN, where chunk_prepare.cu made the gates of them:
//
//   g = -e^{A_log} softplus(a + dt_bias)     da = -dg e^{A_log} sigmoid(a + dt_bias)
//                                            dA_log = sum_t dg g      ddt_bias = sum_t da
//   beta = c sigmoid(x)                      dx = dbeta c sigmoid(x) sigmoid(-x)
//
//   a, x, dg, dbeta (T, HV), A_log, dt_bias (HV)  ->  da, dx (T, HV), dA_log, ddt_bias (HV)
//
// The two sums over all tokens are taken in binary64 and in two steps, without atomics: gate_gradients sums parts of PART
// tokens, and gate_sums adds the parts up, each always in the same order.
#include "common.cuh"

struct GateParams {
    const float* a;       // (T, HV), or null: the log decay was given
    const float* a_log;   // (HV)
    const float* dt_bias; // (HV)
    const float* logit;   // (T, HV), or null: beta was given
    const float* dg;      // (T, HV)
    const float* dbeta;   // (T, HV)
    float* da;            // (T, HV)
    float* d_a_log;       // (HV)
    float* d_dt_bias;     // (HV)
    float* d_logit;       // (T, HV)
    double* partial;      // (parts, 2, HV): sums of dg g and of da
    long long tokens;
    int parts; // T / PART, rounded up
    int heads;
    float beta_scale; // c
};

constexpr int PART = 256; // tokens
constexpr int HEADS = 32; // heads of a block, one for each lane
constexpr int WARPS = 8;

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

__device__ __forceinline__ float sigmoid(float x) {
    const float e = expf(-fabsf(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

// Adds up a number of each warp for each lane, in the order of the warps; the sum is in the first warp.
__device__ __forceinline__ double sum_of_warps(double x, double (&shared)[WARPS][HEADS]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();
    shared[warp][lane] = x;
    __syncthreads();
    double sum = 0.0;
    if (warp == 0)
        for (int w = 0; w < WARPS; ++w) sum += shared[w][lane];
    return sum;
}

// Grid: parts, HV / HEADS rounded up.
extern "C" __global__ void __launch_bounds__(32 * WARPS) gate_gradients(const __grid_constant__ GateParams p) {
    __shared__ double shared[WARPS][HEADS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y * HEADS + lane;
    const long long first = (long long)blockIdx.x * PART;
    const long long end = first + PART < p.tokens ? first + PART : p.tokens;
    double rate_sum = 0.0, bias_sum = 0.0;
    if (head < p.heads) {
        const float rate = p.a ? expf(p.a_log[head]) : 0.0f, bias = p.a ? p.dt_bias[head] : 0.0f;
        for (long long t = first + warp; t < end; t += WARPS) {
            const long long at = t * p.heads + head;
            if (p.a) {
                const float u = p.a[at] + bias, dg = p.dg[at], da = -dg * rate * sigmoid(u);
                p.da[at] = da;
                bias_sum += da;
                // Where the decay is -inf it has no gradient, and the product is none.
                if (dg != 0.0f) rate_sum += (double)dg * -(rate * softplus(u));
            }
            if (p.logit) {
                const float x = p.logit[at];
                p.d_logit[at] = p.dbeta[at] * p.beta_scale * (sigmoid(x) * sigmoid(-x));
            }
        }
    }
    if (p.a == nullptr) return;
    rate_sum = sum_of_warps(rate_sum, shared);
    bias_sum = sum_of_warps(bias_sum, shared);
    if (warp == 0 && head < p.heads) {
        double* to = p.partial + (long long)blockIdx.x * 2 * p.heads + head;
        to[0] = rate_sum;
        to[p.heads] = bias_sum;
    }
}

// Grid: HV / HEADS rounded up.
extern "C" __global__ void __launch_bounds__(32 * WARPS) gate_sums(const __grid_constant__ GateParams p) {
    __shared__ double shared[WARPS][HEADS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x * HEADS + lane;
    double rate_sum = 0.0, bias_sum = 0.0;
    if (head < p.heads)
        for (int part = warp; part < p.parts; part += WARPS) {
            const double* from = p.partial + (long long)part * 2 * p.heads + head;
            rate_sum += from[0];
            bias_sum += from[p.heads];
        }
    rate_sum = sum_of_warps(rate_sum, shared);
    bias_sum = sum_of_warps(bias_sum, shared);
    if (warp == 0 && head < p.heads) {
        p.d_a_log[head] = (float)rate_sum;
        p.d_dt_bias[head] = (float)bias_sum;
    }
}
