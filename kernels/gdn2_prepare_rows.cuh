// Rows of four tokens over a warp, for gdn2_prepare_f16.cuh: their places, inputs, decays, and how they are stored.
#pragma once
#include "gdn2.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int FOUR = 4; // tokens, and channels of a lane
static_assert(CHUNK == 2 * FOUR * WARPS && KD == 32 * FOUR, "a warp has 8 tokens, a lane 4 channels");
typedef float Quad[FOUR]; // the channels of a lane
typedef Quad Rows[FOUR];  // of four tokens

// Powers of two that rows are multiplied with: rows of k, q and b k, and those of K', B' and Q' once more.
enum Factor { OF_KEY, OF_QUERY, OF_ERASE, OF_WRITE, OF_READ, OF_READ_QUERY, FACTORS };

struct Shared {
    union {
        struct {
            float own[WARPS][KD];  // over a warp's tokens
            float half[WARPS][KD]; // from there to where the chunk is split
            float sums[WARPS][KD]; // of log decays
        } decays; // until the products of the levels
        operand lower[SQUARE_TILE];
    };
    float factors[FACTORS][CHUNK];
    float whole[KD]; // e^{G_C}
};

// Rows of the levels: those of k on the right of a split, then those of q and of b k on its left, `warps` warps on each side.
constexpr int LEVEL_ROWS = 3 * CHUNK / 2 * ROW_PITCH; // operands of a level
constexpr int PAIR_ROWS = 3 * FOUR * ROW_PITCH;       // more for each two warps, for their own fours
enum Level { OF_CHUNK, OF_HALF, OF_BLOCK, LEVELS_SHARED };
__device__ __forceinline__ constexpr int warps_of(Level level) { return WARPS / 2 >> level; }
__device__ __forceinline__ operand* rows_of_split(operand* levels, Level level, int split) {
    return levels + level * LEVEL_ROWS + split * 24 * warps_of(level) * ROW_PITCH;
}

__device__ __forceinline__ void store_quad(float* to, const Quad& x) { *(float4*)to = make_float4(x[0], x[1], x[2], x[3]); }
__device__ __forceinline__ void load_quad(Quad& x, const float* from) {
    const float4 y = *(const float4*)from;
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}
__device__ __forceinline__ void multiply_quad(Quad& x, const Quad& by) {
#pragma unroll
    for (int c = 0; c < FOUR; ++c) x[c] *= by[c];
}
__device__ __forceinline__ void multiply_rows(Rows& x, const Quad& by) {
#pragma unroll
    for (int i = 0; i < FOUR; ++i) multiply_quad(x[i], by);
}
__device__ __forceinline__ void set_quad(Quad& x, float y) {
#pragma unroll
    for (int c = 0; c < FOUR; ++c) x[c] = y;
}
__device__ __forceinline__ void product_of(Quad& product, const Rows& x) {
#pragma unroll
    for (int c = 0; c < FOUR; ++c) product[c] = x[0][c] * x[1][c] * (x[2][c] * x[3][c]);
}
template <class T> __device__ __forceinline__ void widen_quad(Quad& x, const Words<T>& words) {
#pragma unroll
    for (int c = 0; c < FOUR; ++c) x[c] = element_of(words, c);
}
__device__ __forceinline__ float dot(const Quad& x, const Quad& y) {
    float sum = x[0] * y[0];
#pragma unroll
    for (int c = 1; c < FOUR; ++c) sum = fmaf(x[c], y[c], sum);
    return sum;
}
__device__ __forceinline__ float largest_of_quad(const Quad& x) {
    return fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
}

// A warp's place.
struct Place {
    int chunk, head, warp, lane;
    int length; // of the chunk
    u32 token;  // the warp's first
    long long square;
};
__device__ __forceinline__ Place place_of_warp(const ChunkParams& p) {
    const int block = blockIdx.x + gridDim.x * blockIdx.y;
    Place at;
    at.chunk = block / p.value_heads, at.head = block % p.value_heads;
    at.warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), at.lane = threadIdx.x & 31;
    at.length = p.chunk_length[at.chunk], at.token = p.chunk_token[at.chunk] + 2 * FOUR * at.warp;
    at.square = (long long)at.chunk * p.value_heads + at.head;
    return at;
}

// What is read of four tokens; zeros beyond the last. 32 bits hold every place in the tensors, and spare instructions.
struct Inputs {
    Words<INPUT> q[FOUR], k[FOUR];
    Words<GATE> b[FOUR];
};
__device__ __forceinline__ void fetch_inputs(Inputs& x, const ChunkParams& p, const Place& at, int four) {
    const int left = at.length - 2 * FOUR * at.warp - FOUR * four;
    const u32 token = at.token + FOUR * four, pitch = p.qk_heads * KD, gate_pitch = p.value_heads * KD;
    const u32 qk_head = p.qk_heads == p.value_heads ? at.head : at.head / (p.value_heads / p.qk_heads);
    const u32 row = token * pitch + qk_head * KD + FOUR * at.lane, gate_row = token * gate_pitch + at.head * KD + FOUR * at.lane;
#pragma unroll
    for (int i = 0; i < FOUR; ++i) {
        x.k[i] = {}, x.b[i] = {}, x.q[i] = {};
        if (i < left) x.k[i] = *(const Words<INPUT>*)(p.k + (row + i * pitch));
        if (i < left) x.b[i] = *(const Words<GATE>*)(p.channels.b + (gate_row + i * gate_pitch));
        if (i < left) x.q[i] = *(const Words<INPUT>*)(p.q + (row + i * pitch));
    }
}

// Step 1: decays of the warp's tokens, one by one; those over all of them go to shared memory.
__device__ __forceinline__ void decays_of_tokens(Rows (&steps)[2], Shared& s, const ChunkParams& p, const Place& at) {
    const int left = at.length - 2 * FOUR * at.warp, column = FOUR * at.lane;
    const u32 pitch = p.value_heads * KD, row = at.token * pitch + at.head * KD + column;
    Rows g[2];
#pragma unroll
    for (int i = 0; i < 2 * FOUR; ++i) {
        set_quad(g[i / FOUR][i % FOUR], 0.0f);
        if (i < left) load_quad(g[i / FOUR][i % FOUR], p.g + (row + i * pitch));
    }
#if RAW
    const float rate = expf(p.a_log[at.head]);
    Quad bias;
    load_quad(bias, p.dt_bias + at.head * KD + column);
#endif
    Quad sums, product;
    set_quad(sums, 0.0f);
    set_quad(product, 1.0f);
#pragma unroll
    for (int i = 0; i < 2 * FOUR; ++i)
#pragma unroll
        for (int c = 0; c < FOUR; ++c) {
            float x = g[i / FOUR][i % FOUR][c];
#if RAW
            if (i < left) x = log_decay_of(x + bias[c], rate, p.channels.lower_bound);
#endif
            sums[c] += x;
            product[c] *= steps[i / FOUR][i % FOUR][c] = exponential(x);
        }
    store_quad(s.decays.sums[at.warp] + column, sums);
    store_quad(s.decays.own[at.warp] + column, product);
}

// Decays from the warp's tokens to the start and to the end of the chunk; that to the split of the chunk goes to shared memory.
struct Reaches {
    Quad before, after;
};
__device__ __forceinline__ void find_reaches(Reaches& reach, Shared& s, const Place& at) {
    const int base = at.warp & 4, place = at.warp & 3, other = base ^ 4, column = FOUR * at.lane;
    Quad x, rest;
    set_quad(reach.before, 1.0f);
    set_quad(reach.after, 1.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        load_quad(x, s.decays.own[base + i] + column);
        if (i < place) multiply_quad(reach.before, x);
        if (i > place) multiply_quad(reach.after, x);
    }
    load_quad(rest, s.decays.own[other] + column);
#pragma unroll
    for (int i = 1; i < 4; ++i) {
        load_quad(x, s.decays.own[other + i] + column);
        multiply_quad(rest, x);
    }
    if (base) {
        store_quad(s.decays.half[at.warp] + column, reach.before);
        multiply_quad(reach.before, rest);
    } else {
        store_quad(s.decays.half[at.warp] + column, reach.after);
        multiply_quad(reach.after, rest);
    }
}
// The decay to the split of a level; there is at most one warp between in the second, and none in the third.
__device__ __forceinline__ void load_reach(Quad& x, const Shared& s, const Place& at, Level level) {
    const bool far = (at.warp & 3) == 0 || (at.warp & 3) == 3;
    set_quad(x, 1.0f);
    if (level == OF_CHUNK) load_quad(x, s.decays.half[at.warp] + FOUR * at.lane);
    if (level == OF_HALF && far) load_quad(x, s.decays.own[at.warp ^ 1] + FOUR * at.lane);
}

// As row_factor for four rows, in fewer instructions: the largest element comes into [1, 2), and 1 is for a row of zeros.
template <bool Bounded> __device__ __forceinline__ void factors_of(Quad& factors, const Rows& x) {
    u32 largest[FOUR];
#pragma unroll
    for (int i = 0; i < FOUR; ++i) {
        float most = largest_of_quad(x[i]);
        if (!Bounded) most = fminf(most, __uint_as_float(0x7effffffu)); // below 2^127
        largest[i] = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
    }
#pragma unroll
    for (int i = 0; i < FOUR; ++i) {
        const u32 power = largest[i] & 0x7f800000u;
        factors[i] = __uint_as_float(power == 0 ? 0x3f800000u : 0x7f000000u - power);
    }
}
__device__ __forceinline__ void keep_factors(Shared& s, Factor which, const Quad& factors, const Place& at, int four) {
    if (at.lane == 0) store_quad(s.factors[which] + 2 * FOUR * at.warp + FOUR * four, factors);
}

__device__ __forceinline__ void store_rows(operand* to, const Rows& x, const Place& at) {
#pragma unroll
    for (int i = 0; i < FOUR; ++i) store_four(to + i * ROW_PITCH + FOUR * at.lane, x[i]);
}
__device__ __forceinline__ void store_rows(operand* to, const Rows& x, const Quad& reach, const Place& at) {
#pragma unroll
    for (int i = 0; i < FOUR; ++i) {
        Quad y;
#pragma unroll
        for (int c = 0; c < FOUR; ++c) y[c] = x[i][c] * reach[c];
        store_four(to + i * ROW_PITCH + FOUR * at.lane, y);
    }
}
// Rows for the sweeps, each times a power of two.
__device__ __forceinline__ void store_scaled(operand* to, Quad& factors, const Rows& x, const Place& at) {
    factors_of<true>(factors, x);
#pragma unroll
    for (int i = 0; i < FOUR; ++i) {
        Quad y;
#pragma unroll
        for (int c = 0; c < FOUR; ++c) y[c] = x[i][c] * factors[i];
        store_four(to + i * ROW_PITCH + FOUR * at.lane, y);
    }
    static_assert(PAD * OPERAND_BYTES == 16, "the padding of a row is one store");
    if (at.lane < FOUR) *(uint4*)(to + at.lane * ROW_PITCH + KD) = uint4{0, 0, 0, 0};
}
