// The rows of K' and Q' of a chunk of GDN, in shared memory: 8 lanes each row, two warps each 16 rows of both.
#pragma once
#include "chunk_inverse.cuh"

// What a lane reads of a row of q or k at once.
constexpr int VECTOR = sizeof(INPUT) == 2 && KD % (8 * ROW_LANES) == 0 ? 8 : 4;
constexpr int VECTORS = KD / (VECTOR * ROW_LANES);
struct __align__(VECTOR * sizeof(INPUT)) Vector {
    INPUT x[VECTOR];
};
// A warp has this many rows of q and of k, four at once. A load takes longer than all work on a row, so that as many as fit into
// the registers come before the first is looked at.
constexpr int OWN_ROWS = 8, ROUNDS = OWN_ROWS / ROWS_AT_ONCE;
constexpr int ROUND_BYTES = VECTORS * (int)sizeof(Vector);
constexpr int ROUNDS_AT_ONCE = ROUND_BYTES <= 64 ? ROUNDS : 1; // of q and k together

// What a lane has of a row, times the power of two that brings the row's largest element into [1, 2).
struct Scaled {
    float x[VECTORS][VECTOR];
    float factor;
};
template <class T> constexpr bool IS_BF16 = false;
template <> constexpr bool IS_BF16<bf16> = true;
#if BULK_COPY && MODE == MODE_F16 // and these instructions with it
constexpr bool IN_PAIRS = IS_BF16<INPUT>;
// Two bf16 at once: the larger magnitudes (the sign is any), and products with a power of two.
__device__ __forceinline__ u32 larger_magnitudes(u32 a, u32 b) {
    u32 y;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ u32 times_pair(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
#else
constexpr bool IN_PAIRS = false;
__device__ __forceinline__ u32 larger_magnitudes(u32 a, u32) { return a; }
__device__ __forceinline__ u32 times_pair(u32 a, u32) { return a; }
#endif
__device__ __forceinline__ Scaled scale_row(const Vector (&vectors)[VECTORS]) {
    Scaled row;
    if constexpr (IN_PAIRS) {
        constexpr int PAIRS = VECTOR / 2;
        const u32(&pairs)[VECTORS][PAIRS] = (const u32(&)[VECTORS][PAIRS])vectors;
        u32 most = 0;
#pragma unroll
        for (int c = 0; c < VECTORS; ++c)
#pragma unroll
            for (int e = 0; e < PAIRS; ++e) most = larger_magnitudes(most, pairs[c][e]);
        const float largest = fmaxf(fabsf(__uint_as_float(most << 16)), fabsf(__uint_as_float(most & 0xffff0000u)));
        row.factor = row_factor(row_max(largest));
        const u32 factors = __float_as_uint(row.factor) | __float_as_uint(row.factor) >> 16;
#pragma unroll
        for (int c = 0; c < VECTORS; ++c)
#pragma unroll
            for (int e = 0; e < PAIRS; ++e) {
                const u32 scaled = times_pair(pairs[c][e], factors);
                row.x[c][2 * e] = __uint_as_float(scaled << 16);
                row.x[c][2 * e + 1] = __uint_as_float(scaled & 0xffff0000u);
            }
    } else {
        float largest = 0.0f;
#pragma unroll
        for (int c = 0; c < VECTORS; ++c)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                row.x[c][e] = to_float(vectors[c].x[e]);
                largest = fmaxf(largest, fabsf(row.x[c][e]));
            }
        row.factor = row_factor(MODE == MODE_F16 ? row_max(largest) : 1.0f);
#pragma unroll
        for (int c = 0; c < VECTORS; ++c)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) row.x[c][e] *= row.factor;
    }
    return row;
}

__device__ __forceinline__ void store_vector(operand* to, const float (&x)[VECTOR]) {
    if constexpr (VECTOR == 8 && OPERAND_BYTES == 2) {
        *(uint4*)to = make_uint4(pack_16(x[0], x[1]), pack_16(x[2], x[3]), pack_16(x[4], x[5]), pack_16(x[6], x[7]));
    } else {
#pragma unroll
        for (int e = 0; e < VECTOR; e += 4) store_four(to + e, {x[e], x[e + 1], x[e + 2], x[e + 3]});
    }
}
__device__ __forceinline__ void clear_padding(operand* to) {
#pragma unroll
    for (int i = 0; i < PAD; i += 16 / OPERAND_BYTES) *(uint4*)(to + i) = uint4{};
}

// Where the rows of a block are.
struct Rows {
    const INPUT* from[2];   // q, then k: row 0 of the chunk
    float* norms;           // 1 / |q_i|, then 1 / |k_i|; null where another block writes them
    operand* shared;        // K', then Q'
    float* coefficients[2]; // rq / s, then rk: what turns a row back
    long long pitch;        // elements from a row to the next
    int length;             // the chunk's tokens
    float epsilon;
};
// The rows of this warp.
__device__ __forceinline__ void prepare_rows(const Rows& rows, int warp, int lane) {
    const int piece = lane % ROW_LANES, column = VECTOR * piece, first_row = OWN_ROWS * warp + lane / ROW_LANES;
#pragma unroll
    for (int first = 0; first < 2 * ROUNDS; first += ROUNDS_AT_ONCE) {
        Vector vectors[ROUNDS_AT_ONCE][VECTORS];
#pragma unroll
        for (int round = 0; round < ROUNDS_AT_ONCE; ++round) {
            const int kind = (first + round) / ROUNDS, i = first_row + ROWS_AT_ONCE * ((first + round) % ROUNDS);
            const INPUT* from = rows.from[kind] + i * rows.pitch + column;
#pragma unroll
            for (int c = 0; c < VECTORS; ++c) {
                vectors[round][c] = Vector{};
                if (i < rows.length) vectors[round][c] = *(const Vector*)(from + VECTOR * ROW_LANES * c);
            }
        }
#pragma unroll
        for (int round = 0; round < ROUNDS_AT_ONCE; ++round) {
            const int kind = (first + round) / ROUNDS, i = first_row + ROWS_AT_ONCE * ((first + round) % ROUNDS);
            const Scaled row = scale_row(vectors[round]);
            operand* const shared = rows.shared + (kind == 0 ? ROW_TILE : 0) + i * ROW_PITCH;
#pragma unroll
            for (int c = 0; c < VECTORS; ++c) store_vector(shared + VECTOR * ROW_LANES * c + column, row.x[c]);
            float norm = 1.0f, coefficient = inverse_of(row.factor);
            if (rows.epsilon >= 0.0f) {
                // 1 / sqrt(|x|^2 + epsilon), in the units of the scaled row.
                float squares = 0.0f;
#pragma unroll
                for (int c = 0; c < VECTORS; ++c)
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) squares += row.x[c][e] * row.x[c][e];
                const float scaled = rsqrtf(row_sum(squares) + rows.epsilon * row.factor * row.factor);
                coefficient = i < rows.length ? scaled : 0.0f;
                norm = coefficient * row.factor;
            }
            if (piece == 0) {
                rows.coefficients[kind][i] = coefficient;
                if (rows.norms) rows.norms[kind * CHUNK + i] = norm;
                clear_padding(shared + KD);
            }
        }
    }
}
