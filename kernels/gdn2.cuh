// What the kernels of GDN-2 share: log decays, and the products of pairs of tokens by levels.
//
// Within a chunk e^{G_i - G_j} is a product over the channels' own decays, so it cannot be taken out of q_i . k_j. It is split
// at a token between j and i: e^{G_i - r} e^{r - G_j} with r = G before that token, and neither factor exceeds 1 however strong
// the decay is. At level h (in blocks of 16 tokens: half a chunk first, then a quarter, down to one block) the second h blocks
// of each 2 h are `left`: they meet the keys of the first h, which are `right`, and r is G where the first h end. What no level
// holds are pairs within one block of 16; they are summed channel by channel in binary32.
//
// Sums of g are only ever added up, over one block or over several, never subtracted: nothing is lost where a decay is
// strong, and -inf is a log decay like others.
//
// Compiled in besides what chunk.cuh says: RAW, whether g is made of a raw gate.
#pragma once
#include "chunk_inverse.cuh"

#ifndef RAW
#define RAW 0
#endif

// Blocks that share the shared memory of a multiprocessor, where that is as large as on Hopper.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int SHARING = 2;
#else
constexpr int SHARING = 1;
#endif

static_assert(CHANNELS, "kernels of GDN-2 have a gate for each channel");

constexpr int LEVELS = TILES == 4 ? 2 : 1;
static_assert(TILES == 2 || TILES == 4, "a chunk has two or four blocks");
constexpr int HALF = TILES / 2; // blocks of the first level
__device__ __forceinline__ constexpr int blocks_of_level(int level) { return HALF >> level; }
__device__ __forceinline__ constexpr bool is_left(int block, int h) { return (block / h) % 2 == 1; }

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// The log decay of the raw gate x = a + dt_bias: -rate softplus(x), or lower_bound sigmoid(rate x) where there is a bound.
__device__ __forceinline__ float log_decay_of(float x, float rate, float lower_bound) {
    if (lower_bound == 0.0f) return -rate * softplus(x);
    const float e = expf(-fabsf(rate * x));
    return lower_bound * ((x >= 0.0f ? 1.0f : e) / (1.0f + e));
}

// Nothing is loaded earlier than this: what is loaded long before its use takes registers.
__device__ __forceinline__ void keep_loads_behind() { __syncwarp(); }

// Log decays of one channel for the 16 tokens of a block; 0 beyond the last token of the chunk.
__device__ __forceinline__ void load_log_decays(float (&g)[16], const ChunkParams& p, int chunk, int head, int block,
                                                int channel) {
    const int last = p.chunk_length[chunk] - 16 * block - 1; // of the block, or below 0 where that is beyond the chunk
    // 32 bits hold every place in the tensor, and spare instructions.
    const u32 pitch = p.value_heads * KD, at = (u32)(p.chunk_token[chunk] + 16 * block) * pitch + head * KD + channel;
#pragma unroll
    for (int i = 0; i < 16; ++i) g[i] = p.g[at + (u32)min(i, last) * pitch];
#pragma unroll
    for (int i = 0; i < 16; ++i) g[i] = i <= last ? g[i] : 0.0f;
#if RAW
    const float rate = expf(p.a_log[head]), bias = p.dt_bias[head * KD + channel];
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (i <= last) g[i] = log_decay_of(g[i] + bias, rate, p.channels.lower_bound);
#endif
}

// Decays of a chunk by blocks of tokens, for the channels that a block of threads takes. Each is an exponential of a sum,
// since a decay of many chunks keeps what each errs.
struct __align__(16) BlockDecays {
    float own[TILES][K_BLOCK];    // over the block; the sum of g at first
    float before[TILES][K_BLOCK]; // over all blocks before it
    float after[TILES][K_BLOCK];  // over all blocks after it
};
// Sums of g; to be followed by a barrier.
template <int Threads>
__device__ __forceinline__ void sum_log_decays(BlockDecays& decays, const ChunkParams& p, int chunk, int head, int first_k) {
#pragma unroll 1
    for (int task = threadIdx.x; task < TILES * K_BLOCK; task += Threads) {
        float g[16], sum = 0.0f;
        load_log_decays(g, p, chunk, head, task / K_BLOCK, first_k + task % K_BLOCK);
#pragma unroll
        for (int i = 0; i < 16; ++i) sum += g[i];
        decays.own[task / K_BLOCK][task % K_BLOCK] = sum;
    }
}
// The decays, in place; to be followed by a barrier. e^{G_C} goes to `whole`.
template <int Threads> __device__ __forceinline__ void make_block_decays(BlockDecays& decays, float* whole) {
#pragma unroll 1
    for (int channel = threadIdx.x; channel < K_BLOCK; channel += Threads) {
        float sums[TILES], before = 0.0f, after = 0.0f;
#pragma unroll
        for (int block = 0; block < TILES; ++block) {
            sums[block] = decays.own[block][channel];
            decays.own[block][channel] = exponential_f32(sums[block]);
            decays.before[block][channel] = exponential_f32(before);
            before += sums[block];
        }
        whole[channel] = exponential_f32(before);
#pragma unroll
        for (int block = TILES - 1; block >= 0; --block) {
            decays.after[block][channel] = exponential_f32(after);
            after += sums[block];
        }
    }
}

// Decays of the tokens of one block and channel: `rise` from before the block to token i, `fall` from there to its end.
__device__ __forceinline__ void token_decays(const float (&g)[16], float* rise, float* fall, int pitch) {
    float product = 1.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        product *= exponential(g[i]);
        rise[i * pitch] = product;
    }
    product = 1.0f;
#pragma unroll
    for (int i = 15; i >= 0; --i) {
        fall[i * pitch] = product;
        product *= exponential(g[i]);
    }
}

// A lane's part of a row of K_BLOCK channels, read by 8 lanes.
typedef float RowPart[PIECES][4];
// The same as it lies in memory: four neighbours are as many words as one of them has bytes.
template <class T> struct __align__(4 * sizeof(T)) Words {
    u32 x[sizeof(T)];
};
template <class T> struct Fetched {
    Words<T> x[PIECES];
};
template <class T> __device__ __forceinline__ float element_of(const Words<T>& words, int e) {
    if constexpr (sizeof(T) == 4) return __uint_as_float(words.x[e]);
    T x;
    *(u16*)&x = (u16)(words.x[e / 2] >> (16 * (e % 2)));
    return to_float(x);
}
template <class T> __device__ __forceinline__ void fetch_row(Fetched<T>& row, const T* from, bool inside) {
    const int column = 4 * (threadIdx.x % ROW_LANES);
#pragma unroll
    for (int c = 0; c < PIECES; ++c) {
        row.x[c] = {};
        if (inside) row.x[c] = *(const Words<T>*)(from + column + 4 * ROW_LANES * c);
    }
}
template <class T> __device__ __forceinline__ void widen_row(RowPart& x, const Fetched<T>& row) {
#pragma unroll
    for (int c = 0; c < PIECES; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[c][e] = element_of(row.x[c], e);
}
template <class T> __device__ __forceinline__ void load_row(RowPart& x, const T* from, bool inside) {
    Fetched<T> row;
    fetch_row(row, from, inside);
    widen_row(x, row);
}
__device__ __forceinline__ float largest_of_row(const RowPart& x) {
    float largest = 0.0f;
#if MODE == MODE_F16 // the others scale nothing
#pragma unroll
    for (int c = 0; c < PIECES; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) largest = fmaxf(largest, fabsf(x[c][e]));
    largest = row_max(largest);
#endif
    return largest;
}
// A row of operands: x * factor * by.
__device__ __forceinline__ void store_row(operand* to, const RowPart& x, float factor, const RowPart& by) {
    const int column = 4 * (threadIdx.x % ROW_LANES);
#pragma unroll
    for (int c = 0; c < PIECES; ++c) {
        float y[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) y[e] = x[c][e] * factor * by[c][e];
        store_four(to + column + 4 * ROW_LANES * c, y);
    }
}
// The same times the power of two that brings its largest element into [1, 2), which it returns.
__device__ __forceinline__ float store_scaled_row(operand* to, const RowPart& x, float factor, const RowPart& by) {
    const int column = 4 * (threadIdx.x % ROW_LANES);
    RowPart y;
#pragma unroll
    for (int c = 0; c < PIECES; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) y[c][e] = x[c][e] * factor * by[c][e];
    const float power = row_factor(largest_of_row(y));
#pragma unroll
    for (int c = 0; c < PIECES; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) y[c][e] *= power;
        store_four(to + column + 4 * ROW_LANES * c, y[c]);
    }
    return power;
}
__device__ __forceinline__ void multiply_row(RowPart& x, const RowPart& by) {
#pragma unroll
    for (int c = 0; c < PIECES; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[c][e] *= by[c][e];
}

// The decay of a token up to where its level splits, from that up to the edge of its block: there is at most one block
// between.
__device__ __forceinline__ void reach_split(RowPart& decay, const BlockDecays& decays, int block, int h) {
    const bool left = is_left(block, h);
    if (left ? block % h == 0 : block % h == h - 1) return;
    RowPart between;
    load_row(between, decays.own[left ? block - 1 : block + 1], true);
    multiply_row(decay, between);
}

// The three tiles of a level: rows of q and b k of the left blocks, rows of k of the right ones.
struct LevelRows {
    operand* queries;
    operand* erase;
    operand* keys;
};
