// First step of the chunk form of GDN: all that needs only the keys, the queries and the gates of one chunk.
//
//   q, k (T, HK, K), g, beta (T, HV)  ->  K', Q', T = (I + L)^-1, scores, coefficients (chunk.cuh)
//
// with L_ij = beta_i (k_i . k_j) e^{G_i - G_j} for i > j. One block a chunk, a q/k head and some of its value heads; one
// warp for 16 rows. K K^T, Q K^T and the off-diagonal blocks of T are products of the mode's operands.
//
// T: each warp inverts a diagonal block of 16 x 16 by forward substitution in binary32, then computes a column of blocks
// from the top down, T_ij = -T_ii sum_{j <= m < i} L_im T_mj. It does so transposed, since the transpose of a result is
// the left operand of the products with it.
//
// G is summed in binary64 and kept in two binary32 words: e^{G_i - G_j} then loses nothing however large G is.
#include "chunk.cuh"

constexpr int WARPS = TILES;
constexpr int THREADS = 32 * WARPS;
constexpr int MOST_HEADS = 4;    // of heads_per_block
constexpr int BLOCK_PITCH = 20;  // floats, of a diagonal block

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
        const float2 pair = load ? load_two(from + column) : make_float2(0.0f, 0.0f);
        x[i][0] = pair.x;
        x[i][1] = pair.y;
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
};

struct Shared {
    float key[CHUNK];   // rk
    float query[CHUNK]; // rq
    Gates gates[MOST_HEADS];
    float diagonal[WARPS][16 * BLOCK_PITCH]; // of L
};

// G, beta of one value head, by one warp.
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
    return exponential((gates.log_decay[0][i] - gates.log_decay[0][j]) + (gates.log_decay[1][i] - gates.log_decay[1][j]));
}

// Column `lane` of (I + block)^-1 for a strictly lower triangular block.
__device__ __forceinline__ void invert_diagonal(const float* block, float (&x)[16]) {
    const int lane = threadIdx.x & 15;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float sum = i == lane ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; ++j) sum = fmaf(-block[i * BLOCK_PITCH + j], x[j], sum);
        x[i] = sum;
    }
}

// The blocks below the diagonal of T in block column `column`; `inverse` has the diagonal blocks.
__device__ __forceinline__ void invert_column(const operand* lower, operand* inverse, int column) {
    const int lane = threadIdx.x & 31, row = lane / 4, quad = lane % 4;
    Left above[TILES]; // T_mj^T for m = j, j + 1, ...
    above[0] = load_left_transposed(inverse + 16 * column * SQUARE_PITCH + 16 * column, SQUARE_PITCH);
#pragma unroll
    for (int d = 1; d < TILES; ++d) {
        const int i = column + d;
        if (i >= TILES) break;
        float sum[2][4], block[2][4];
        clear(sum);
        clear(block);
#pragma unroll
        for (int m = 0; m < d; ++m)
            product_nt(sum, above[m], lower + 16 * i * SQUARE_PITCH + 16 * (column + m), SQUARE_PITCH);
        product_nt(block, make_left(sum[0], sum[1], -1.0f), inverse + 16 * i * SQUARE_PITCH + 16 * i, SQUARE_PITCH);
        above[d] = make_left(block[0], block[1], 1.0f);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                inverse[(16 * i + 8 * n + 2 * quad + e % 2) * SQUARE_PITCH + 16 * column + row + 8 * (e / 2)] =
                    to_operand(block[n][e]);
    }
}

// A tile of a square from shared to global memory, padding and all.
__device__ __forceinline__ void write_square(operand* to, const operand* from) {
    constexpr int BYTES = SQUARE_TILE * OPERAND_BYTES;
#pragma unroll 2
    for (int i = 16 * threadIdx.x; i < BYTES; i += 16 * THREADS) *(uint4*)((u8*)to + i) = *(const uint4*)((const u8*)from + i);
}

// Grid: chunks, then HK times the groups of heads_per_block value heads.
extern "C" __global__ void __launch_bounds__(THREADS, 3) chunk_prepare(const __grid_constant__ ChunkParams p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Shared s;
    operand* keys = (operand*)shared;
    operand* queries = keys + ROW_TILE;
    // The squares take the place of K' and Q' once the products with those are in registers.
    operand* lower = (operand*)shared;
    operand* inverse = lower + SQUARE_TILE;
    operand* scores = inverse + SQUARE_TILE;
    operand* overlaps = scores + SQUARE_TILE;

    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, row = lane / 4, quad = lane % 4;
    const int chunk = blockIdx.x, token = p.chunk_token[chunk], length = p.chunk_length[chunk];
    const int group = p.value_heads / p.qk_heads, parts = group / p.heads_per_block;
    const int qk_head = blockIdx.y / parts, part = blockIdx.y % parts;
    const int first_head = qk_head * group + part * p.heads_per_block;
    const long long tile = (long long)chunk * p.qk_heads + qk_head;

#pragma unroll 8
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
                s.key[i] = coefficient;
            else
                s.query[i] = coefficient * p.scale;
            if (part == 0) p.norms[(tile * 2 + is_key) * CHUNK + i] = norm;
        }
    }
    for (int h = warp; h < p.heads_per_block; h += WARPS) prepare_gates(p, s.gates[h], token, length, first_head + h);
    __syncthreads();

    float kk[CHUNK / 8][4], qk[CHUNK / 8][4];
    clear(kk);
    clear(qk);
#pragma unroll 2
    for (int c = 0; c < KD; c += 16) {
        product_nt(kk, load_left(keys + 16 * warp * ROW_PITCH + c, ROW_PITCH), keys + c, ROW_PITCH, 0, warp + 1);
        product_nt(qk, load_left(queries + 16 * warp * ROW_PITCH + c, ROW_PITCH), keys + c, ROW_PITCH, 0, warp + 1);
    }

    for (int h = 0; h < p.heads_per_block; ++h) {
        const Gates& gates = s.gates[h];
        const long long square = (long long)chunk * p.value_heads + first_head + h;
        __syncthreads();
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n) {
            if (n / 2 > warp) break; // nobody reads the blocks above the diagonal
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = 16 * warp + row + 8 * half, j = 8 * n + 2 * quad;
                float overlap[2], score[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float decayed = i >= j + e ? decay_between(gates, i, j + e) * s.key[j + e] : 0.0f;
                    overlap[e] = i > j + e ? kk[n][2 * half + e] * (decayed * s.key[i]) : 0.0f;
                    score[e] = qk[n][2 * half + e] * decayed;
                }
                const int at = i * SQUARE_PITCH + j;
                store_pair(scores + at, score[0], score[1]);
                store_pair(overlaps + at, overlap[0], overlap[1]);
                overlap[0] *= gates.beta[i];
                overlap[1] *= gates.beta[i];
                store_pair(lower + at, overlap[0], overlap[1]);
                if (n / 2 == warp)
                    *(float2*)(s.diagonal[warp] + (i % 16) * BLOCK_PITCH + j % 16) = make_float2(overlap[0], overlap[1]);
            }
        }
        __syncwarp();
        float x[16];
        invert_diagonal(s.diagonal[warp], x);
        if (lane < 16) {
#pragma unroll
            for (int i = 0; i < 16; ++i)
                inverse[(16 * warp + i) * SQUARE_PITCH + 16 * warp + lane] = to_operand(x[i]);
        }
        if (warp == 0) {
            float* to = p.coefficients + square * COEFFICIENTS * CHUNK;
            float most[WRITE + 1] = {};
#pragma unroll
            for (int i = lane; i < CHUNK; i += 32) {
                const float decay = expf(gates.log_decay[0][i] + gates.log_decay[1][i]);
                const float values[MOST] = {gates.beta[i],
                                            gates.beta[i] * decay * s.key[i],
                                            decay,
                                            s.query[i],
                                            decay_between(gates, CHUNK - 1, i) * s.key[i],
                                            s.key[i],
                                            gates.log_decay[0][i],
                                            gates.log_decay[1][i]};
#pragma unroll
                for (int row = 0; row < MOST; ++row) to[row * CHUNK + i] = values[row];
#pragma unroll
                for (int row = 0; row <= WRITE; ++row) most[row] = fmaxf(most[row], fabsf(values[row]));
            }
#pragma unroll
            for (int row = 0; row <= WRITE; ++row) {
                const float largest = warp_max(most[row]);
                if (lane == 0) to[MOST * CHUNK + row] = largest;
            }
        }
        __syncthreads();
        invert_column(lower, inverse, warp);
        write_square(p.scores + square * SQUARE_TILE, scores);
        if (p.overlaps) write_square(p.overlaps + square * SQUARE_TILE, overlaps);
        __syncthreads();
        write_square(p.inverse + square * SQUARE_TILE, inverse);
    }
}
