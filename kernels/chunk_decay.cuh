// The decays of a chunk of GDN: the cumulated log decay, decays between tokens, and the coefficients that follow from them.
#pragma once
#include "chunk.cuh"

// A log decay below this gives a decay of exactly 0 in binary32 and binary64; -inf becomes it, so that G_i - G_j is
// never inf - inf.
constexpr float LOWEST_LOG_DECAY = -1000.0f;

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

struct Gates {
    float log_decay[2][CHUNK]; // G in two words
    float beta[CHUNK];
};

// What one lane has of the gates of a chunk: neighbouring tokens, so that a sum over the lanes is needed once.
struct OwnGates {
    float g[CHUNK / 32], beta[CHUNK / 32];
};
__device__ __forceinline__ OwnGates load_gates(const ChunkParams& p, int token, int length, int head) {
    const int lane = threadIdx.x & 31;
    OwnGates own;
#pragma unroll
    for (int i = 0; i < CHUNK / 32; ++i) {
        const int own_token = CHUNK / 32 * lane + i;
        const bool inside = own_token < length;
        const long long at = (long long)(token + own_token) * p.value_heads + head;
        own.g[i] = inside ? p.g[at] : 0.0f;
        own.beta[i] = inside ? p.beta[at] : 0.0f;
    }
    return own;
}

// G, beta of one value head, by one warp.
__device__ __forceinline__ void prepare_gates(const ChunkParams& p, Gates& gates, const OwnGates& own, int length, int head) {
    constexpr int OWN = CHUNK / 32;
    const int lane = threadIdx.x & 31;
    double total[OWN]; // of the lane's tokens up to each, then of all tokens
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const bool inside = OWN * lane + i < length;
        float g = own.g[i], beta = own.beta[i];
        if (p.a_log && inside) g = -expf(p.a_log[head]) * softplus(g + (p.dt_bias ? p.dt_bias[head] : 0.0f));
        if (p.beta_scale != 0.0f && inside) beta = p.beta_scale / (1.0f + expf(-beta));
        total[i] = (double)fmaxf(g, LOWEST_LOG_DECAY) + (i > 0 ? total[i > 0 ? i - 1 : 0] : 0.0);
        gates.beta[OWN * lane + i] = beta;
    }
    double before = total[OWN - 1];
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        const double other = __shfl_up_sync(0xffffffffu, before, offset);
        before += lane >= offset ? other : 0.0;
    }
    before -= total[OWN - 1];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        total[i] += before;
        const float high = (float)total[i];
        gates.log_decay[0][OWN * lane + i] = high;
        gates.log_decay[1][OWN * lane + i] = (float)(total[i] - (double)high);
    }
}

// e^{G_i - G_j}
__device__ __forceinline__ float decay_between(const Gates& gates, int i, int j) {
    return exponential((gates.log_decay[0][i] - gates.log_decay[0][j]) + (gates.log_decay[1][i] - gates.log_decay[1][j]));
}

// The rows up to MOST of the coefficients of token i.
__device__ __forceinline__ void coefficients_of(const ChunkParams& p, const Gates& gates, float key, float query, int i,
                                                float (&values)[MOST]) {
    const float decay = exponential_f32(gates.log_decay[0][i] + gates.log_decay[1][i]);
    values[BETA] = gates.beta[i];
    values[READ] = gates.beta[i] * decay * key;
    values[DECAY] = decay;
    values[QUERY] = query * (p.scale / p.scale_unit);
    values[WRITE] = decay_between(gates, CHUNK - 1, i) * key;
    values[KEY] = key;
    values[LOG_DECAY] = gates.log_decay[0][i];
    values[LOG_DECAY_2] = gates.log_decay[1][i];
}
