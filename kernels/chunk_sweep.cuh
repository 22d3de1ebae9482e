// What the forward and the backward sweep over the chunks of a sequence share.
//
// A block takes one sequence, one value head and 16 WARPS columns of V; each of its warps 16 of these. Columns of the
// state are independent of each other, so a warp runs the whole recurrence for its columns without asking any other:
// its part of S^T (16 x K) stays in registers as accumulators, whose layout is that of the left operand of the next
// product. The block shares the tiles of the keys, the queries, T and the scores, copied ahead into shared memory.
#pragma once
#include "chunk.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int COLUMNS = 16 * WARPS;
// A warp turns its results around where its values were, or beside all values where an operand is wider than a value.
constexpr int TURN_BYTES = (int)sizeof(INPUT) > OPERAND_BYTES ? (int)sizeof(INPUT) : OPERAND_BYTES; // an element
constexpr int TURN_AT = (int)sizeof(INPUT) < OPERAND_BYTES ? COLUMNS * (int)sizeof(INPUT) : 0;
constexpr int VALUE_PITCH = TURN_AT + COLUMNS * TURN_BYTES + 16; // bytes
static_assert(VD % COLUMNS == 0, "the columns of a block divide V");

struct Stage {
    operand* keys;
    operand* queries;
    operand* inverse;
    operand* scores;
    float* coefficients;
    u8* values; // v or do, then the place where a warp turns its results around
};

constexpr int ROW_TILE_BYTES = ROW_TILE * OPERAND_BYTES;
constexpr int SQUARE_BYTES = SQUARE_TILE * OPERAND_BYTES;
constexpr int COEFFICIENT_BYTES = COEFFICIENTS * CHUNK * 4;

template <bool Queries> __device__ constexpr int stage_bytes() {
    return (Queries ? 2 : 1) * (ROW_TILE_BYTES + SQUARE_BYTES) + COEFFICIENT_BYTES + CHUNK * VALUE_PITCH;
}

// The tiles of a chunk on their way through shared memory: STAGES of them, filled ahead.
template <bool Queries> struct Pipeline {
    const ChunkParams& p;
    const INPUT* source; // v or do
    int head, first_column;
    u8* shared;
#if BULK_COPY
    Barrier* arrived; // one for each stage
#endif

    __device__ __forceinline__ Stage stage(int turn) const {
        u8* at = shared + (STAGES == 1 ? 0 : turn % STAGES) * stage_bytes<Queries>();
        Stage stage;
        stage.keys = (operand*)at;
        at += ROW_TILE_BYTES;
        stage.inverse = (operand*)at;
        at += SQUARE_BYTES;
        stage.coefficients = (float*)at;
        at += COEFFICIENT_BYTES;
        stage.values = at;
        at += CHUNK * VALUE_PITCH;
        stage.queries = (operand*)at;
        at += ROW_TILE_BYTES;
        stage.scores = (operand*)at;
        return stage;
    }

    __device__ __forceinline__ void begin() {
#if BULK_COPY
        if (threadIdx.x == 0)
            for (int i = 0; i < STAGES; ++i) barrier_init(arrived + i);
        __syncthreads();
#endif
    }

    // Starts the copies of `chunk`, the one that takes turn `turn`. The place must be free.
    __device__ __forceinline__ void fill(int turn, int chunk) const {
        const Stage to = stage(turn);
        const long long tile = ((long long)chunk * p.qk_heads + head / (p.value_heads / p.qk_heads)) * ROW_TILE;
        const long long square = (long long)chunk * p.value_heads + head;
        const operand* keys = p.keys + tile;
        const operand* queries = p.queries + tile;
        const operand* inverse = p.inverse + square * SQUARE_TILE;
        const operand* scores = p.scores + square * SQUARE_TILE;
        const float* coefficients = p.coefficients + square * COEFFICIENTS * CHUNK;
        const int length = p.chunk_length[chunk];
        const INPUT* values = source + ((long long)p.chunk_token[chunk] * p.value_heads + head) * VD + first_column;
        const long long pitch = (long long)p.value_heads * VD;
        constexpr int ROW_BYTES = COLUMNS * (int)sizeof(INPUT);
#if BULK_COPY
        Barrier* barrier = arrived + (STAGES == 1 ? 0 : turn % STAGES);
        if (threadIdx.x == 0) {
            barrier_expect(barrier, (Queries ? 2 : 1) * (ROW_TILE_BYTES + SQUARE_BYTES) + COEFFICIENT_BYTES);
            copy_bulk(to.keys, keys, ROW_TILE_BYTES, barrier);
            copy_bulk(to.inverse, inverse, SQUARE_BYTES, barrier);
            copy_bulk(to.coefficients, coefficients, COEFFICIENT_BYTES, barrier);
            if (Queries) {
                copy_bulk(to.queries, queries, ROW_TILE_BYTES, barrier);
                copy_bulk(to.scores, scores, SQUARE_BYTES, barrier);
            }
        }
#else
        copy_block<THREADS>(to.keys, keys, ROW_TILE_BYTES);
        copy_block<THREADS>(to.inverse, inverse, SQUARE_BYTES);
        copy_block<THREADS>(to.coefficients, coefficients, COEFFICIENT_BYTES);
        if (Queries) {
            copy_block<THREADS>(to.queries, queries, ROW_TILE_BYTES);
            copy_block<THREADS>(to.scores, scores, SQUARE_BYTES);
        }
#endif
        // Rows of a tensor that is not ours to arrange.
        copy_rows<THREADS>(to.values, VALUE_PITCH, values, pitch * sizeof(INPUT), CHUNK, ROW_BYTES, length);
        copy_async_commit();
    }

    // Waits until all warps are done with a stage, where the only one is filled again.
    __device__ __forceinline__ void free() const { __syncthreads(); }

    // Waits until the chunk of turn `turn` is there and all warps are done with the one before it.
    __device__ __forceinline__ void wait(int turn) const {
#if BULK_COPY
        barrier_wait(arrived + (STAGES == 1 ? 0 : turn % STAGES), turn / STAGES & 1);
#endif
        copy_async_wait<0>();
        __syncthreads();
    }
};

// The warp's columns of v or do, transposed: rows are columns of V, columns are tokens.
__device__ __forceinline__ void load_values(float (&tiles)[CHUNK / 8][4], const u8* values, int warp) {
    int lane = threadIdx.x & 31, row = lane / 4, quad = lane % 4;
    const INPUT* from = (const INPUT*)(values) + 16 * warp + row;
    constexpr int PITCH = VALUE_PITCH / (int)sizeof(INPUT);
#pragma unroll
    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int token = 8 * n + 2 * quad + e % 2;
            tiles[n][e] = to_float(from[token * PITCH + 8 * (e / 2)]);
        }
}

template <class T> __device__ __forceinline__ T convert(float x) { return from_float<T>(x); }
template <> __device__ __forceinline__ u16 convert<u16>(float x) { return (u16)to_operand(x); }
// Operands of 32 bits are rounded by the caller.

// Writes the warp's 16 columns of a (tokens, V) tensor; `turn` is the warp's own part of the values in shared memory.
// Row `token` of the tensor begins at to + token * pitch.
template <class T>
__device__ __forceinline__ void store_columns(const float (&tiles)[CHUNK / 8][4], u8* values, int warp, T* to,
                                              long long pitch, int valid) {
    int lane = threadIdx.x & 31, row = lane / 4, quad = lane % 4;
    constexpr int SIZE = (int)sizeof(T), LANES = 16 * SIZE / 16;
    u8* turn = values + TURN_AT + 16 * warp * TURN_BYTES;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            *(T*)(turn + (8 * n + 2 * quad + e % 2) * VALUE_PITCH + (row + 8 * (e / 2)) * SIZE) =
                convert<T>(tiles[n][e]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK * LANES / 32; ++i) {
        int token = (32 * i + lane) / LANES, part = (32 * i + lane) % LANES;
        uint4 vector = *(const uint4*)(turn + token * VALUE_PITCH + 16 * part);
        if (token < valid) *(uint4*)((u8*)(to + token * pitch) + 16 * part) = vector;
    }
    __syncwarp();
}

// Rounds to what an operand can hold, where the operand has 32 bits.
__device__ __forceinline__ void round_operands(float (&tiles)[CHUNK / 8][4]) {
#if MODE == MODE_TF32
#pragma unroll
    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) tiles[n][e] = round_tf32(tiles[n][e]);
#endif
}

// Multiplies each column (token) of the tiles by weight[token] * factor.
__device__ __forceinline__ void weight_tokens(float (&tiles)[CHUNK / 8][4], const float* weight, float factor) {
    int quad = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < CHUNK / 8; ++n) {
        float2 w = *(const float2*)(weight + 8 * n + 2 * quad);
        w.x *= factor;
        w.y *= factor;
        tiles[n][0] *= w.x;
        tiles[n][1] *= w.y;
        tiles[n][2] *= w.x;
        tiles[n][3] *= w.y;
    }
}

// Where a thread finds the elements of its part of a state outside the workspace, (K, V) or (V, K).
struct StatePlace {
    long long first;
    int next_k, next_v;
};
__device__ __forceinline__ StatePlace state_place(const ChunkParams& p, int sequence, int head, int first_column) {
    const int lane = threadIdx.x & 31, row = lane / 4, quad = lane % 4;
    StatePlace place;
    place.next_k = p.state_transposed ? 1 : VD;
    place.next_v = p.state_transposed ? KD : 1;
    place.first = ((long long)sequence * p.value_heads + head) * KD * VD + 2 * quad * place.next_k +
                  (first_column + row) * place.next_v;
    return place;
}

// Zero where there is no state.
__device__ __forceinline__ void load_state(float (&state)[KD / 8][4], const float* from, const StatePlace& place) {
    clear(state);
    if (from == nullptr) return;
    from += place.first;
#pragma unroll
    for (int n = 0; n < KD / 8; ++n, from += 8 * place.next_k)
#pragma unroll
        for (int e = 0; e < 4; ++e) state[n][e] = from[e % 2 * place.next_k + 8 * (e / 2) * place.next_v];
}

__device__ __forceinline__ void store_state(const float (&state)[KD / 8][4], float* to, const StatePlace& place,
                                            float factor) {
    if (to == nullptr) return;
    to += place.first;
#pragma unroll
    for (int n = 0; n < KD / 8; ++n, to += 8 * place.next_k)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e % 2 * place.next_k + 8 * (e / 2) * place.next_v] = state[n][e] * factor;
}

// The warp's part of a state into the workspace, (V, K) operands.
__device__ __forceinline__ void keep_state(const float (&state)[KD / 8][4], operand* to, int first_column) {
    int lane = threadIdx.x & 31, row = lane / 4, quad = lane % 4;
#pragma unroll
    for (int n = 0; n < KD / 8; ++n) {
        operand* at = to + (first_column + row) * KD + 8 * n + 2 * quad;
        store_pair(at, state[n][0], state[n][1]);
        store_pair(at + 8 * KD, state[n][2], state[n][3]);
    }
}
