// What the four kernels of the chunk form share: their parameters, the workspace, the sizes that are compiled in.
//
// Compiled in (by -D): MODE (tile.cuh), INPUT (float, bf16 or f16: the format of q, k, v, do, o, dq, dk, dv), KD and VD
// (d_k, d_v), CHUNK (tokens of a chunk, C), and for each kernel its own numbers of warps and of pipeline stages. With
// CHANNELS, gates are those of GDN-2, one for each channel, and GATE is the format of b, w, db and dw.
//
// Notation of README.md. Chunks are numbered through all sequences; a sequence starts a chunk of its own, so a chunk
// never holds tokens of two sequences, and what lies beyond its last token is padding: k = q = v = do = beta = g = 0.
#pragma once
#include "tile.cuh"
#include "exponential.cuh"

#ifndef CHANNELS
#define CHANNELS 0
#endif
#ifndef K_BLOCK
#define K_BLOCK KD // columns of K that a block takes
#endif

// Row i of the keys in the workspace is K'_i = 2^-e k_i with |K'_i| in [1, 2), and rk_i turns it into the key that the
// recurrence sees: rk_i K'_i = k_i, or k_i / |k_i| where keys are normalised in the kernel. Likewise rq_i Q'_i = s q_i.
// A power of two for each row, so that f16 operands hold whatever the input format holds, without rounding twice.
enum Coefficient {
    BETA,        // beta_i
    READ,        // beta_i e^{G_i} rk_i: weight of K'_i S in the right-hand side R_i
    DECAY,       // e^{G_i}
    QUERY,       // rq_i / scale_unit
    WRITE,       // e^{G_C - G_i} rk_i: weight of K'_i U_i in the next state
    KEY,         // rk_i
    LOG_DECAY,   // G_i, rounded to binary32,
    LOG_DECAY_2, // and what that rounding left
    MOST,        // not by tokens: the largest magnitude in each row up to WRITE
    COEFFICIENTS
};

#if CHANNELS
// GDN-2 decays each channel by itself, so a decay is part of the rows that states are multiplied with (gdn2_prepare.cu):
// Q'_i, K'_i and B'_i for q_i e^{G_i}, k_i e^{G_C - G_i} and b_i k_i e^{G_i}, each times a power of two of its own. READ, WRITE
// and QUERY DECAY turn these rows back as they do for GDN. In the place of BETA stands what turns b_i k_i back, so BETA,
// QUERY and KEY are for rows without a decay, and MOST has the largest element of e^{G_C} in the column KEY.
struct ChannelTensors {
    const GATE* b;       // (T, HV, K): erase gate
    const GATE* w;       // (T, HV, V): write gate
    GATE* db;            // (T, HV, K)
    GATE* dw;            // (T, HV, V)
    operand* write_keys; // (chunk, HV, C, K+): K'; `keys` is B' and (chunk, HV, C, K+), and so is `queries`
    float* d_queries;    // (T, HV, K): dq of each value head where several share a q/k head, else null
    float* d_keys;       // (T, HV, K): dk likewise
    float lower_bound;   // of the log decay where it is made of a raw gate; 0 where there is none
};
#endif

// Everything that a call needs. Tensors are dense and row-major; (T, ...) is the flattened token axis B * T.
struct ChunkParams {
    // Inputs.
    const INPUT* q;             // (T, HK, K)
    const INPUT* k;             // (T, HK, K)
    const INPUT* v;             // (T, HV, V)
    const float* g;             // (T, HV): log decay, or the raw gate a where a_log is given
    const float* beta;          // (T, HV): write strength, or its logit where beta_scale is not 0
    const float* a_log;         // (HV) or null
    const float* dt_bias;       // (HV) or null
    const float* initial_state; // (N, HV, K, V) or (N, HV, V, K), or null
    const INPUT* d_o;           // (T, HV, V)
    const float* d_final_state; // as the initial state, or null
    // Outputs.
    INPUT* o;           // (T, HV, V)
    float* final_state; // as the initial state, or null
    INPUT* dq;          // (T, HK, K)
    INPUT* dk;          // (T, HK, K)
    INPUT* dv;          // (T, HV, V)
    float* dg;          // (T, HV): gradient of the log decay g, also where g was computed from a
    float* dbeta;       // (T, HV): gradient of beta, also where beta was computed from its logit
    float* dh0;         // as the initial state, or null
    // Workspace. Tiles with a + lie as they will lie in shared memory, each row PAD operands longer, so that one copy
    // of contiguous memory brings a tile.
    operand* queries;      // (chunk, HK, C, K+): Q'
    operand* keys;         // (chunk, HK, C, K+): K'
    float* norms;          // (chunk, HK, 2, C): 1 / |q_i|, 1 / |k_i|; 1 where rows are not normalised
    operand* inverse;      // (chunk, HV, C, C+): T = (I + L)^-1
    operand* scores;       // (chunk, HV, C, C+): (Q'_i K'_j) rk_j e^{G_i - G_j} for i >= j
    operand* overlaps;     // (chunk, HV, C, C+): L_ij / beta_i = (k_i k_j) e^{G_i - G_j} for i > j; null without backward
    float* coefficients;   // (chunk, HV, COEFFICIENTS, C)
    operand* states;       // (chunk, HV, V, K): S at the start of the chunk,
    float* state_scales; // (chunk, HV, V / 16, 2): times this, for each half of K
    operand* writes;       // (chunk, HV, C, V): U
    float* write_scales; // (chunk, HV, V / 16, 2): for each half of the chunk
    operand* adjoints;     // (chunk, HV, C, V): Y
    float* adjoint_scales; // (chunk, HV, V / 16, 2): for each half of the chunk
    operand* d_states;     // (chunk, HV, V, K): gradient of S at the end of the chunk,
    float* d_state_scales; // (chunk, HV, V / 16, 2): times this and scale_unit, for each half of K
    float* d_o_scales; // (chunk, HV, V / 16, 2): for each half of the chunk
    // Chunks and sequences.
    const int* chunk_token;    // (chunks): first token
    const int* chunk_length;   // (chunks): tokens, 1 to C
    const int* sequence_chunk; // (N + 1): first chunk of each sequence
    // Segments: a long sequence of a model with few heads is cut, and its segments run side by side.
    const int* segment_chunk;    // (M + 1): first chunk of each segment
    const int* segment_sequence; // (M): sequence of each segment
    const int* sequence_segment; // (N + 1): first segment of each sequence
    float* segment_states;       // (M, HV, V, K): S at the start of each segment but a sequence's first; null without cuts
    float* segment_d_states;     // (M, HV, V, K): gradient of S at the end of each segment but a sequence's last
    float* transitions;          // (M, HV, 2, K, K): what S is multiplied by over a segment, and that transposed
    int chunks;
    int qk_heads;
    int value_heads;
    int heads_per_block; // value heads that one block of the preparation takes, a divisor of HV / HK
    float scale;         // s = scale_unit times a power of two
    float scale_unit;    // from 1 to 2
    float norm_epsilon;  // below 0: q and k are not normalised
    float beta_scale;    // 0: beta is given; else beta = beta_scale * sigmoid(logit)
    int state_transposed; // states outside the workspace are (V, K) instead of (K, V)
#if CHANNELS
    // g is (T, HV, K), so is dg; beta and dbeta are null; dt_bias is (HV, K).
    ChannelTensors channels;
#endif
};

constexpr int ROW_PITCH = KD + PAD;      // of K' and Q' in shared memory
constexpr int SQUARE_PITCH = CHUNK + PAD; // of T and the scores
constexpr int ROW_TILE = CHUNK * ROW_PITCH;       // operands of a tile of K' or Q'
constexpr int SQUARE_TILE = CHUNK * SQUARE_PITCH; // operands of T or the scores of a chunk
constexpr int TILES = CHUNK / 16;
// Numbers of a chunk and value head in `coefficients`: rows by tokens, then e^{G_C} by channels.
constexpr int COEFFICIENT_NUMBERS = COEFFICIENTS * CHUNK + (CHANNELS ? KD : 0);

static_assert(CHUNK == 32 || CHUNK == 64, "a chunk has 32 or 64 tokens");
static_assert(KD % 32 == 0 && VD % 32 == 0 && KD <= 256 && VD <= 256, "head dimensions are multiples of 32 up to 256");

// e^x, to what the operands can tell.
__device__ __forceinline__ float exponential(float x) {
#if MODE == MODE_F16 || MODE == MODE_BF16
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
#else
    return exponential_f32(x);
#endif
}

// `bytes` contiguous bytes, from global to shared memory, by all threads of the block.
template <int Threads> __device__ __forceinline__ void copy_block(void* to, const void* from, int bytes) {
    const u32 base = shared_address(to);
#pragma unroll 4
    for (int i = 16 * threadIdx.x; i < bytes; i += 16 * Threads) copy_async_16(base + i, (const u8*)from + i, true);
}

// `rows` rows of `bytes` bytes each, from global to shared memory, by all threads of the block; rows at and beyond
// `valid` become zero. Pitches in bytes.
template <int Threads>
__device__ __forceinline__ void copy_rows(void* to, int to_pitch, const void* from, int from_pitch, int rows,
                                          int bytes, int valid) {
    int vectors = bytes / 16;
    u32 base = shared_address(to);
#pragma unroll 1 // an unrolled copy would hold an address in registers
    for (int i = threadIdx.x; i < rows * vectors; i += Threads) {
        int row = i / vectors, column = (i - row * vectors) * 16;
        bool inside = row < valid;
        const u8* source = (const u8*)from + (u32)((inside ? row : 0) * from_pitch + column);
        copy_async_16(base + row * to_pitch + column, source, inside);
    }
}
