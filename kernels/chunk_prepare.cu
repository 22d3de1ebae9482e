// First step of the chunk form of GDN: all that needs only the keys, the queries and the gates of one chunk.
//
//   q, k (T, HK, K), g, beta (T, HV)  ->  K', Q', T = (I + L)^-1, scores, coefficients (chunk.cuh)
//
// with L_ij = beta_i (k_i . k_j) e^{G_i - G_j} for i > j. One block a chunk, a q/k head and some of its value heads; one
// warp for 16 rows. K K^T and Q K^T are products of the mode's operands. The inverse is binary32 in every mode: 16 x 16
// blocks by forward substitution, then merged, [A 0; B D]^-1 = [A' 0; -D' B A'  D'].
//
// G is summed in binary64 and kept in two binary32 words: e^{G_i - G_j} then loses nothing however large G is.
#include "chunk.cuh"

constexpr int WARPS = TILES;
constexpr int THREADS = 32 * WARPS;
constexpr int FLOAT_PITCH = CHUNK + 4;

// A log decay below this gives a decay of exactly 0 in binary32 and binary64; -inf becomes it, so that G_i - G_j is
// never inf - inf.
constexpr float LOWEST_LOG_DECAY = -1000.0f;

// The largest of |x| over the warp as a power of two 2^-e that brings it into [1, 2).
__device__ __forceinline__ float row_factor(float largest) {
#if MODE == MODE_F16
    int exponent = (int)(__float_as_uint(warp_max(largest)) >> 23);
    int wanted = exponent == 0 ? 127 : min(max(254 - exponent, 1), 253);
    return __uint_as_float((u32)wanted << 23);
#else
    return 1.0f;
#endif
}

// One row of q or k by one warp: to shared memory and to the workspace as operands. Returns the factor that turns it back
// (rk_i or rq_i / s) in `coefficient` and 1 / |row| in `norm`.
__device__ __forceinline__ void prepare_row(const INPUT* from, bool inside, operand* shared, operand* global,
                                            float epsilon, float& coefficient, float& norm) {
    constexpr int PAIRS = KD / 64 + (KD % 64 != 0);
    int lane = threadIdx.x & 31;
    float x[PAIRS][2];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        int column = 64 * i + 2 * lane;
        bool load = inside && column < KD;
        x[i][0] = load ? to_float(from[column]) : 0.0f;
        x[i][1] = load ? to_float(from[column + 1]) : 0.0f;
        largest = fmaxf(largest, fmaxf(fabsf(x[i][0]), fabsf(x[i][1])));
    }
    float factor = row_factor(largest);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        int column = 64 * i + 2 * lane;
        x[i][0] *= factor;
        x[i][1] *= factor;
        squares += x[i][0] * x[i][0] + x[i][1] * x[i][1];
        if (column < KD) {
            store_pair(shared + column, x[i][0], x[i][1]);
            if (global) store_pair(global + column, x[i][0], x[i][1]);
        }
    }
    norm = 1.0f;
    coefficient = 1.0f / factor;
    if (epsilon >= 0.0f) {
        // 1 / sqrt(|x|^2 + epsilon), in the units of the scaled row.
        float scaled = rsqrtf(warp_sum(squares) + epsilon * factor * factor);
        coefficient = inside ? scaled : 0.0f;
        norm = inside ? scaled * factor : 0.0f;
    }
}

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

struct Gates {
    float log_decay[2][CHUNK]; // G in two words
    float beta[CHUNK];
    float key[CHUNK];
    float query[CHUNK];
};

// G, beta of one value head, by the first warp.
__device__ void prepare_gates(const ChunkParams& p, Gates& gates, int token, int length, int head) {
    int lane = threadIdx.x & 31;
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < CHUNK; i += 32) {
        bool inside = i + lane < length;
        long long at = (long long)(token + i + lane) * p.value_heads + head;
        float g = inside ? p.g[at] : 0.0f;
        float beta = inside ? p.beta[at] : 0.0f;
        if (p.a_log && inside) g = -expf(p.a_log[head]) * softplus(g + (p.dt_bias ? p.dt_bias[head] : 0.0f));
        if (p.beta_scale != 0.0f && inside) beta = p.beta_scale / (1.0f + expf(-beta));
        double total = (double)fmaxf(g, LOWEST_LOG_DECAY);
#pragma unroll
        for (int offset = 1; offset < 32; offset <<= 1) {
            double other = __shfl_up_sync(0xffffffffu, total, offset);
            if (lane >= offset) total += other;
        }
        total += sum;
        sum = __shfl_sync(0xffffffffu, total, 31);
        float high = (float)total;
        gates.log_decay[0][i + lane] = high;
        gates.log_decay[1][i + lane] = (float)(total - (double)high);
        gates.beta[i + lane] = beta;
    }
}

// e^{G_i - G_j}
__device__ __forceinline__ float decay_between(const Gates& gates, int i, int j) {
    return expf((gates.log_decay[0][i] - gates.log_decay[0][j]) + (gates.log_decay[1][i] - gates.log_decay[1][j]));
}

// inverse = (I + lower)^-1 for the strictly lower triangular `lower`; what lies above the diagonal blocks is scratch.
__device__ __forceinline__ void invert(const float* lower, float* inverse) {
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    {
        // Column `lane` of the inverse of the warp's diagonal block.
        const float* block = lower + 16 * warp * FLOAT_PITCH + 16 * warp;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float sum = i == (lane & 15) ? 1.0f : 0.0f;
#pragma unroll
            for (int j = 0; j < i; ++j) sum = fmaf(-block[i * FLOAT_PITCH + j], x[j], sum);
            x[i] = sum;
        }
        if (lane < 16) {
#pragma unroll
            for (int i = 0; i < 16; ++i) inverse[(16 * warp + i) * FLOAT_PITCH + 16 * warp + lane] = x[i];
        }
    }
    __syncthreads();
#pragma unroll
    for (int half = 16; half < CHUNK; half *= 2) {
        // Each thread: one row of D' B A', and `half / 4` of its columns.
        const int columns = 16 * half / 64;
        int row = threadIdx.x / 4, first = (threadIdx.x % 4) * columns;
        int top = row / half * 2 * half, bottom = top + half;
        row %= half;
        float sum[CHUNK / 8];
#pragma unroll
        for (int c = 0; c < columns; ++c) sum[c] = 0.0f;
#pragma unroll 4
        for (int m = 0; m < half; ++m) {
            float b = lower[(bottom + row) * FLOAT_PITCH + top + m];
#pragma unroll
            for (int c = 0; c < columns; c += 4) {
                float4 a = *(const float4*)(inverse + (top + m) * FLOAT_PITCH + top + first + c);
                // The blocks of A' above its diagonal hold scratch.
                bool inside = (top + first + c) / 16 <= (top + m) / 16;
                sum[c] = fmaf(b, inside ? a.x : 0.0f, sum[c]);
                sum[c + 1] = fmaf(b, inside ? a.y : 0.0f, sum[c + 1]);
                sum[c + 2] = fmaf(b, inside ? a.z : 0.0f, sum[c + 2]);
                sum[c + 3] = fmaf(b, inside ? a.w : 0.0f, sum[c + 3]);
            }
        }
        // B A' waits in the unused block above the diagonal.
#pragma unroll
        for (int c = 0; c < columns; ++c) inverse[(top + row) * FLOAT_PITCH + bottom + first + c] = sum[c];
        __syncthreads();
#pragma unroll
        for (int c = 0; c < columns; ++c) sum[c] = 0.0f;
#pragma unroll 4
        for (int m = 0; m < half; ++m) {
            bool inside = m / 16 <= row / 16;
            float d = inside ? inverse[(bottom + row) * FLOAT_PITCH + bottom + m] : 0.0f;
#pragma unroll
            for (int c = 0; c < columns; c += 4) {
                float4 a = *(const float4*)(inverse + (top + m) * FLOAT_PITCH + bottom + first + c);
                sum[c] = fmaf(-d, a.x, sum[c]);
                sum[c + 1] = fmaf(-d, a.y, sum[c + 1]);
                sum[c + 2] = fmaf(-d, a.z, sum[c + 2]);
                sum[c + 3] = fmaf(-d, a.w, sum[c + 3]);
            }
        }
#pragma unroll
        for (int c = 0; c < columns; ++c) inverse[(bottom + row) * FLOAT_PITCH + top + first + c] = sum[c];
        __syncthreads();
    }
}

// Grid: chunks, then HK times the groups of heads_per_block value heads.
extern "C" __global__ void __launch_bounds__(THREADS) chunk_prepare(const __grid_constant__ ChunkParams p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Gates gates;
    operand* keys = (operand*)shared;
    operand* queries = keys + CHUNK * ROW_PITCH;
    // The squares take the place of K' and Q' once the products with those are in registers.
    float* lower = (float*)shared;
    float* inverse = lower + CHUNK * FLOAT_PITCH;

    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, row = lane / 4, quad = lane % 4;
    const int chunk = blockIdx.x, token = p.chunk_token[chunk], length = p.chunk_length[chunk];
    const int group = p.value_heads / p.qk_heads, parts = group / p.heads_per_block;
    const int qk_head = blockIdx.y / parts, part = blockIdx.y % parts;
    const long long tile = (long long)chunk * p.qk_heads + qk_head;

#pragma unroll 4
    for (int r = 0; r < 32; ++r) {
        const bool is_key = r >= 16;
        const int i = 16 * warp + r % 16;
        const INPUT* from = (is_key ? p.k : p.q) + ((long long)(token + i) * p.qk_heads + qk_head) * KD;
        operand* global = part == 0 ? (is_key ? p.keys : p.queries) + (tile * CHUNK + i) * ROW_PITCH : nullptr;
        float coefficient, norm;
        prepare_row(from, i < length, (is_key ? keys : queries) + i * ROW_PITCH, global, p.norm_epsilon, coefficient,
                    norm);
        if (lane == 0) {
            if (is_key)
                gates.key[i] = coefficient;
            else
                gates.query[i] = coefficient * p.scale;
            if (part == 0) p.norms[(tile * 2 + is_key) * CHUNK + i] = norm;
        }
    }
    __syncthreads();

    float kk[CHUNK / 8][4], qk[CHUNK / 8][4];
    clear(kk);
    clear(qk);
#pragma unroll 2
    for (int c = 0; c < KD; c += 16) {
        Left key = load_left(keys + 16 * warp * ROW_PITCH + c, ROW_PITCH);
        product_nt(kk, key, keys + c, ROW_PITCH);
        Left query = load_left(queries + 16 * warp * ROW_PITCH + c, ROW_PITCH);
        product_nt(qk, query, keys + c, ROW_PITCH);
    }

    for (int h = 0; h < p.heads_per_block; ++h) {
        const int head = qk_head * group + part * p.heads_per_block + h;
        const long long square = (long long)chunk * p.value_heads + head;
        __syncthreads();
        if (warp == 0) prepare_gates(p, gates, token, length, head);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = 16 * warp + row + 8 * half, j = 8 * n + 2 * quad;
                float overlap[2], score[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float decayed = i >= j + e ? decay_between(gates, i, j + e) * gates.key[j + e] : 0.0f;
                    overlap[e] = i > j + e ? kk[n][2 * half + e] * (decayed * gates.key[i]) : 0.0f;
                    score[e] = qk[n][2 * half + e] * decayed;
                }
                *(float2*)(lower + i * FLOAT_PITCH + j) =
                    make_float2(overlap[0] * gates.beta[i], overlap[1] * gates.beta[i]);
                if (p.overlaps) store_pair(p.overlaps + (square * CHUNK + i) * CHUNK + j, overlap[0], overlap[1]);
                store_pair(p.scores + (square * CHUNK + i) * SQUARE_PITCH + j, score[0], score[1]);
            }
        }
        for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
            float* to = p.coefficients + square * COEFFICIENTS * CHUNK + i;
            float decay = expf(gates.log_decay[0][i] + gates.log_decay[1][i]);
            to[BETA * CHUNK] = gates.beta[i];
            to[READ * CHUNK] = gates.beta[i] * decay * gates.key[i];
            to[DECAY * CHUNK] = decay;
            to[QUERY * CHUNK] = gates.query[i];
            to[WRITE * CHUNK] = decay_between(gates, CHUNK - 1, i) * gates.key[i];
            to[KEY * CHUNK] = gates.key[i];
            to[LOG_DECAY * CHUNK] = gates.log_decay[0][i];
            to[LOG_DECAY_2 * CHUNK] = gates.log_decay[1][i];
        }
        __syncthreads();
        invert(lower, inverse);
        for (int i = 2 * threadIdx.x; i < CHUNK * CHUNK; i += 2 * THREADS) {
            int r = i / CHUNK, c = i % CHUNK;
            float first = c <= r ? inverse[r * FLOAT_PITCH + c] : 0.0f;
            float second = c + 1 <= r ? inverse[r * FLOAT_PITCH + c + 1] : 0.0f;
            store_pair(p.inverse + (square * CHUNK + r) * SQUARE_PITCH + c, first, second);
        }
    }
}
