// Shared by the kernels of causal softmax attention: where tensors lie, which tile a block takes, tiles in shared memory.
//
// Shapes: B sequences, T tokens, H heads of dimension d = HEAD_DIM. Numbers are bf16, sums and exponentials binary32.
#pragma once
#define MODE MODE_BF16
#include "tile.cuh"

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "the kernels are written for heads of 64 and 128");

// A tensor (B, T, H, d), or a slice of one: element (b, t, h, i) is at[(b T + t) row_pitch + h head_pitch + i].
struct Heads {
    bf16* at;
    long long row_pitch;
    long long head_pitch;
};

struct AttentionParams {
    Heads q, k, v, o;
    Heads d_o, dq, dk, dv; // the backward's
    float* lse;            // (B, H, T): natural logarithm of the sum of exponentiated scores
    float* delta;          // (B, H, T): do . o, of the backward
    int batch;
    int tokens;
    int heads;
    int section; // heads whose tiles are worked on together
    float scale; // on the scores, above 0
};

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr int PITCH = HEAD_DIM + PAD; // of a row in shared memory, in operands
constexpr int D_TILES = HEAD_DIM / 16;
typedef float Rows16[HEAD_DIM / 8][4]; // a warp's 16 rows of d accumulators

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// 2^x.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// One tile of tokens of one head of one sequence.
struct Work {
    int tile;
    int head;
    int batch;
};

// What a block works on. Blocks start in the order of their numbers: `section` heads at a time, whose keys and values stay
// in the L2 cache together, and of these the tiles with most to do first, so that the last blocks to end are short ones.
__device__ __forceinline__ Work work_of_block(const AttentionParams& p, int tiles, bool last_tile_first) {
    const int first = (int)blockIdx.x / (p.section * tiles) * p.section; // of the section
    const int width = min(p.section, p.batch * p.heads - first);
    const int place = (int)blockIdx.x - first * tiles;
    const int turn = place / width, head = first + place - turn * width;
    Work work;
    work.tile = last_tile_first ? tiles - 1 - turn : turn;
    work.batch = head / p.heads;
    work.head = head - work.batch * p.heads;
    return work;
}

// One head of one sequence: row t at at[t pitch].
struct Head {
    bf16* at;
    long long pitch;
};
__device__ __forceinline__ Head head_of(const Heads& tensor, const Work& work, int tokens) {
    Head head;
    head.at = tensor.at + (long long)work.batch * tokens * tensor.row_pitch + work.head * tensor.head_pitch;
    head.pitch = tensor.row_pitch;
    return head;
}
// The same of lse and delta.
__device__ __forceinline__ float* head_of(float* rows, const Work& work, const AttentionParams& p) {
    return rows + ((long long)work.batch * p.heads + work.head) * p.tokens;
}

// Starts the copy of `Rows` rows from token `first` on into a tile; rows beyond the sequence become zero.
template <int Rows, int Threads>
__device__ __forceinline__ void fetch_rows(operand* tile, const Head& from, int first, int tokens) {
    constexpr int VECTORS = HEAD_DIM / 8; // of a row
    static_assert(Rows * VECTORS % Threads == 0, "every thread copies as much");
#pragma unroll 1 // an unrolled copy would hold addresses in registers
    for (int i = 0; i < Rows * VECTORS / Threads; ++i) {
        const int vector = i * Threads + threadIdx.x, row = vector / VECTORS, column = vector % VECTORS * 8;
        const bool inside = first + row < tokens;
        copy_async_16(shared_address(tile + row * PITCH + column),
                      from.at + (inside ? first + row : 0) * from.pitch + column, inside);
    }
}

// A warp's 16 rows from token `first` on as left operands, from memory; rows beyond the sequence are zero.
__device__ __forceinline__ void load_rows(Left (&rows)[D_TILES], const Head& from, int first, int tokens) {
    const int lane = threadIdx.x & 31, token = first + lane / 4;
    const bf16* at = from.at + token * from.pitch + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < D_TILES; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const bool inside = token + 8 * (e % 2) < tokens;
            rows[i].r[e] = inside ? *(const u32*)(at + 8 * (e % 2) * from.pitch + 16 * i + 8 * (e / 2)) : 0;
        }
}

// Writes a warp's 16 rows, times a factor for the upper and one for the lower eight, from token `first` on; rows beyond the
// sequence are left out. They pass through a part of shared memory that is the warp's own, so that accesses are wide.
__device__ __forceinline__ void store_rows(const Head& to, const Rows16& rows, float upper, float lower, operand* own,
                                           int first, int tokens) {
    const int lane = threadIdx.x & 31;
    operand* at = own + lane / 4 * PITCH + 2 * (lane % 4);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
        store_pair(at + 8 * n, rows[n][0] * upper, rows[n][1] * upper);
        store_pair(at + 8 * PITCH + 8 * n, rows[n][2] * lower, rows[n][3] * lower);
    }
    __syncwarp();
    constexpr int VECTORS = HEAD_DIM / 8;
#pragma unroll
    for (int i = 0; i < 16 * VECTORS / 32; ++i) {
        const int vector = 32 * i + lane, row = vector / VECTORS, column = vector % VECTORS * 8;
        if (first + row < tokens)
            *(uint4*)(to.at + (first + row) * to.pitch + column) = *(const uint4*)(own + row * PITCH + column);
    }
}

// Over the four lanes that share a row of an accumulator tile.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// What a warp keeps of its rows `row` and `row + 8`.
struct Softmax {
    float largest[2]; // score so far, not scaled
    float sum[2];     // of this lane's columns
};

// Turns scores into e^{s - m}, and corrects what was summed with an older m. c is the factor on scores, times log2(e).
// Terms are added in one or two partial sums.
template <int Sums, int N>
__device__ __forceinline__ void exponentiate(float (&score)[N][4], Softmax& softmax, Rows16& output, float c) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = softmax.largest[half];
#pragma unroll
        for (int n = 0; n < N; ++n) largest = fmaxf(largest, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
        largest = quad_max(largest);
        const float shift = c * fmaxf(largest, -1e36f); // finite, even where all scores are -infinity
        const float correction = power_of_two(fmaf(c, softmax.largest[half], -shift));
        softmax.largest[half] = largest;
        float sum[Sums] = {};
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
                score[n][e] = power_of_two(fmaf(c, score[n][e], -shift));
                sum[e % Sums] += score[n][e];
            }
        softmax.sum[half] = fmaf(softmax.sum[half], correction, Sums == 1 ? sum[0] : sum[0] + sum[Sums - 1]);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
            output[n][2 * half] *= correction;
            output[n][2 * half + 1] *= correction;
        }
    }
}

// Hides keys after their queries: `query` is the warp's first, `key` that of the first column.
template <int N> __device__ __forceinline__ void hide_later_keys(float (&score)[N][4], int query, int key) {
    const int lane = threadIdx.x & 31, distance = query + lane / 4 - (key + 2 * (lane % 4)); // of the lane's first element
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (8 * n + e % 2 - 8 * (e / 2) > distance) score[n][e] = minus_infinity();
}

// Ends a forward: writes the log-sum-exp of the warp's rows from query `first` on, and gives what their outputs lack.
__device__ __forceinline__ void finish_softmax(float (&inverse)[2], const Softmax& softmax, const AttentionParams& p,
                                               const Work& work, int first) {
    const int lane = threadIdx.x & 31;
    float* lse = head_of(p.lse, work, p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(softmax.sum[half]);
        inverse[half] = 1.0f / sum;
        const int token = first + lane / 4 + 8 * half;
        if (lane % 4 == 0 && token < p.tokens) lse[token] = fmaf(p.scale, softmax.largest[half], logf(sum));
    }
}
