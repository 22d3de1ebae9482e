// Gradients of the raw gates of GDN-2 where gdn2_prepare.cu made the log decay of them, with x = a + dt_bias by channels:
//
//   g = -r softplus(x)            da = -dg r sigmoid(x)                              r = e^{A_log}
//   g = lb sigmoid(r x)           da = dg lb r sigmoid(r x) sigmoid(-r x)
//   dA_log = sum dg g, or sum da x                    ddt_bias = sum_t da
//
//   a, dg (T, HV, K), A_log (HV), dt_bias (HV, K)  ->  da (T, HV, K), dA_log (HV), ddt_bias (HV, K)
//
// Sums are taken in binary64 and in two steps, without atomics: gdn2_gate_gradients sums parts of PART tokens, and
// gdn2_gate_sums adds the parts up, each always in the same order.
#include "common.cuh"

struct ChannelGateParams {
    const float* a;       // (T, HV, K)
    const float* a_log;   // (HV)
    const float* dt_bias; // (HV, K)
    const float* dg;      // (T, HV, K)
    float* da;            // (T, HV, K)
    float* d_a_log;       // (HV)
    float* d_dt_bias;     // (HV, K)
    double* partial;      // (parts, HV, 2, K): what dA_log and ddt_bias sum
    long long tokens;
    int parts; // T / PART, rounded up
    int heads;
    float lower_bound; // 0: none
};

constexpr int PART = 64; // tokens

__device__ __forceinline__ float sigmoid(float x) {
    const float e = expf(-fabsf(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// Grid: parts, HV; a thread each channel.
extern "C" __global__ void __launch_bounds__(KD) gdn2_gate_gradients(const __grid_constant__ ChannelGateParams p) {
    const int channel = threadIdx.x, head = blockIdx.y;
    const float rate = expf(p.a_log[head]), bias = p.dt_bias[head * KD + channel];
    const long long first = (long long)blockIdx.x * PART, end = first + PART < p.tokens ? first + PART : p.tokens;
    double rate_sum = 0.0, bias_sum = 0.0;
#pragma unroll 4
    for (long long t = first; t < end; ++t) {
        const long long at = (t * p.heads + head) * KD + channel;
        const float x = p.a[at] + bias, dg = p.dg[at];
        float da, of_rate;
        if (p.lower_bound == 0.0f) {
            da = -dg * rate * sigmoid(x);
            of_rate = dg != 0.0f ? dg * -(rate * softplus(x)) : 0.0f; // a decay of -inf has no gradient
        } else {
            da = dg * p.lower_bound * rate * (sigmoid(rate * x) * sigmoid(-rate * x));
            of_rate = da != 0.0f ? da * x : 0.0f; // where x is infinite
        }
        p.da[at] = da;
        bias_sum += da;
        rate_sum += of_rate;
    }
    double* to = p.partial + ((long long)blockIdx.x * p.heads + head) * 2 * KD + channel;
    to[0] = rate_sum;
    to[KD] = bias_sum;
}

// Grid: HV; a thread each channel.
extern "C" __global__ void __launch_bounds__(KD) gdn2_gate_sums(const __grid_constant__ ChannelGateParams p) {
    __shared__ double rates[KD];
    const int channel = threadIdx.x, head = blockIdx.x;
    double rate_sum = 0.0, bias_sum = 0.0;
#pragma unroll 8
    for (int part = 0; part < p.parts; ++part) {
        const double* from = p.partial + ((long long)part * p.heads + head) * 2 * KD + channel;
        rate_sum += from[0];
        bias_sum += from[KD];
    }
    p.d_dt_bias[head * KD + channel] = (float)bias_sum;
    rates[channel] = rate_sum;
    __syncthreads();
    if (channel != 0) return;
    double sum = 0.0;
    for (int c = 0; c < KD; ++c) sum += rates[c];
    p.d_a_log[head] = (float)sum;
}
