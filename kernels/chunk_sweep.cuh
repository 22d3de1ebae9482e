// What the forward and the backward sweep over the chunks of a sequence share.
//
// A block takes one sequence, one value head and 16 PAIRS columns of V; each pair of warps 16 of these. Columns of the
// state are independent of each other, so a pair runs the whole recurrence for its columns without asking any other. Its
// part of S^T (16 x K) stays in registers as accumulators, whose layout is that of the left operand of the next product;
// each warp of the pair holds one half of K. What is indexed by tokens belongs to the warps by halves of the chunk.
// Sums over K are exchanged, and so are the left operands of the products over tokens: three times a chunk.
// The block shares the tiles of the keys, the queries, T and the scores, copied ahead into shared memory.
#pragma once
#include "chunk.cuh"

constexpr int THREADS = 64 * PAIRS;
constexpr int COLUMNS = 16 * PAIRS;
constexpr int K_HALF = KD / 2, C_HALF = CHUNK / 2;
constexpr int STEPS = C_HALF / 16; // left operands of half a chunk
typedef float OwnTokens[C_HALF / 8][4]; // 16 columns of V, half of the chunk
typedef float AllTokens[CHUNK / 8][4];
typedef float OwnState[K_HALF / 8][4];  // 16 columns of V, half of K
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

// Chunks whose copies are on their way while one is computed.
constexpr int AHEAD = STAGES == 1 ? 1 : STAGES - 1;

// The tiles of the chunks on their way through shared memory, in the order in which the sweep takes them.
template <bool Queries> struct Pipeline {
    const ChunkParams& p;
    const INPUT* source; // v or do
    int first, step, turns; // first chunk, 1 or -1, number of chunks
    int token, tokens;      // of the sequence: first and number
    int head, qk_head, first_column;
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

    // First token and number of tokens of the chunk of this turn.
    __device__ __forceinline__ int token_of(int turn) const {
        return token + (step > 0 ? turn : turns - 1 - turn) * CHUNK;
    }
    __device__ __forceinline__ int length_of(int turn) const { return min(CHUNK, token + tokens - token_of(turn)); }

    // Prepares the barriers and starts the copies of the first chunks; chunk number `turn` is first + turn * step.
    __device__ __forceinline__ void begin() {
#if BULK_COPY
        if (threadIdx.x == 0)
            for (int i = 0; i < STAGES; ++i) barrier_init(arrived + i);
        __syncthreads();
#endif
        for (int turn = 0; turn < AHEAD; ++turn) fill(turn);
    }

    // Starts the copies of the chunk of this turn, if there is one. Its place must be free.
    __device__ __forceinline__ void fill(int turn) const {
        if (turn >= turns) {
            copy_async_commit(); // the count of what is on its way goes on
            return;
        }
        const int chunk = first + turn * step;
        const Stage to = stage(turn);
#if BULK_COPY
        if (threadIdx.x == 0) {
            Barrier* barrier = arrived + (STAGES == 1 ? 0 : turn % STAGES);
            const long long tile = ((long long)chunk * p.qk_heads + qk_head) * ROW_TILE;
            const long long square = (long long)chunk * p.value_heads + head;
            barrier_expect(barrier, (Queries ? 2 : 1) * (ROW_TILE_BYTES + SQUARE_BYTES) + COEFFICIENT_BYTES);
            copy_bulk(to.keys, p.keys + tile, ROW_TILE_BYTES, barrier);
            copy_bulk(to.inverse, p.inverse + square * SQUARE_TILE, SQUARE_BYTES, barrier);
            copy_bulk(to.coefficients, p.coefficients + square * COEFFICIENTS * CHUNK, COEFFICIENT_BYTES, barrier);
            if (Queries) {
                copy_bulk(to.queries, p.queries + tile, ROW_TILE_BYTES, barrier);
                copy_bulk(to.scores, p.scores + square * SQUARE_TILE, SQUARE_BYTES, barrier);
            }
        }
#else
        const long long tile = ((long long)chunk * p.qk_heads + qk_head) * ROW_TILE;
        const long long square = (long long)chunk * p.value_heads + head;
        copy_block<THREADS>(to.keys, p.keys + tile, ROW_TILE_BYTES);
        copy_block<THREADS>(to.inverse, p.inverse + square * SQUARE_TILE, SQUARE_BYTES);
        copy_block<THREADS>(to.coefficients, p.coefficients + square * COEFFICIENTS * CHUNK, COEFFICIENT_BYTES);
        if (Queries) {
            copy_block<THREADS>(to.queries, p.queries + tile, ROW_TILE_BYTES);
            copy_block<THREADS>(to.scores, p.scores + square * SQUARE_TILE, SQUARE_BYTES);
        }
#endif
        // Rows of a tensor that is not ours to arrange.
        const long long pitch = (long long)p.value_heads * VD;
        const INPUT* values = source + token_of(turn) * pitch + head * VD + first_column;
        copy_rows<THREADS>(to.values, VALUE_PITCH, values, pitch * sizeof(INPUT), CHUNK, COLUMNS * (int)sizeof(INPUT),
                           length_of(turn));
        copy_async_commit();
    }

    // To be called when all is read: with a single stage, waits for all warps and fills it again.
    __device__ __forceinline__ void leave(int turn) const {
        if (STAGES > 1) return;
        __syncthreads();
        fill(turn + 1);
    }

    // Waits until the chunk of this turn is there and all warps are done with the one before it, whose place is filled.
    __device__ __forceinline__ void wait(int turn) const {
#if BULK_COPY
        barrier_wait(arrived + (STAGES == 1 ? 0 : turn % STAGES), turn / STAGES & 1);
#endif
        copy_async_wait<AHEAD - 1>();
        __syncthreads();
        if (STAGES > 1) fill(turn + AHEAD);
    }
};

struct Place {
    int lane, row, quad;
    int pair, half;
    int first_token; // of the warp's half of the chunk
    int first_k;     // of its half of K
};
__device__ __forceinline__ Place place_of_warp() {
    Place at;
    at.lane = threadIdx.x & 31;
    at.row = at.lane / 4;
    at.quad = at.lane % 4;
    at.pair = threadIdx.x / 64;
    at.half = threadIdx.x / 32 % 2;
    at.first_token = at.half * C_HALF;
    at.first_k = at.half * K_HALF;
    return at;
}

// Waits for the other warp of the pair.
__device__ __forceinline__ void pair_sync(const Place& at) {
    asm volatile("bar.sync %0, 64;" ::"r"(at.pair + 1) : "memory");
}

// Left operands of half a chunk as they pass from one warp to the other, each thread's to the thread of the same lane.
struct Operands {
    Left left[STEPS][32];
    float inverse; // of their scale
};
__device__ __forceinline__ void give(Operands& to, const OwnTokens& tiles, float unit, float inverse, const Place& at) {
#pragma unroll
    for (int c = 0; c < STEPS; ++c) to.left[c][at.lane] = make_left(tiles[2 * c], tiles[2 * c + 1], unit);
    if (at.lane == 0) to.inverse = inverse;
}
// One of them, brought to `scale`.
__device__ __forceinline__ Left take(const Operands& from, int c, Scale scale, const Place& at) {
    Left left = from.left[c][at.lane];
    scale_left(left, scale.factor * from.inverse);
    return left;
}
__device__ __forceinline__ Scale scale_of(const Operands& operands) {
    Scale scale;
    scale.inverse = operands.inverse;
    scale.factor = inverse_of(operands.inverse);
    return scale;
}

// Sums over one half of K each: a warp keeps its own tokens and gives the other's away.
struct Sums {
    float4 tiles[C_HALF / 8][32];
};
__device__ __forceinline__ void give_sums(Sums& to, const AllTokens& all, float factor, const Place& at) {
#pragma unroll
    for (int n = 0; n < C_HALF / 8; ++n) {
        float other[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) other[e] = (at.half ? all[n][e] : all[n + C_HALF / 8][e]) * factor;
        to.tiles[n][at.lane] = make_float4(other[0], other[1], other[2], other[3]);
    }
}
__device__ __forceinline__ void take_sums(OwnTokens& own, const AllTokens& all, float factor, const Sums& from,
                                          const Place& at) {
#pragma unroll
    for (int n = 0; n < C_HALF / 8; ++n) {
        const float4 other = from.tiles[n][at.lane];
        own[n][0] = (at.half ? all[n + C_HALF / 8][0] : all[n][0]) * factor + other.x;
        own[n][1] = (at.half ? all[n + C_HALF / 8][1] : all[n][1]) * factor + other.y;
        own[n][2] = (at.half ? all[n + C_HALF / 8][2] : all[n][2]) * factor + other.z;
        own[n][3] = (at.half ? all[n + C_HALF / 8][3] : all[n][3]) * factor + other.w;
    }
}

// The pair's columns of the warp's tokens of v or do, transposed: rows are columns of V, columns are tokens.
__device__ __forceinline__ void load_values(OwnTokens& tiles, const u8* values, const Place& at) {
    const u8* from = values + at.first_token * VALUE_PITCH + 16 * at.pair * (int)sizeof(INPUT);
    if constexpr (sizeof(INPUT) == 2) {
        // Two matrices of 8 tokens times 8 columns for each tile, two tiles at once.
        const u32 address =
            shared_address(from) + ((at.lane & 7) + (at.lane >> 4) * 8) * VALUE_PITCH + ((at.lane >> 3) & 1) * 16;
#pragma unroll
        for (int n = 0; n < C_HALF / 8; n += 2) {
            u32 pairs[4];
            load_matrices_transposed(pairs, address + 8 * n * VALUE_PITCH);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                INPUT x;
                *(u16*)&x = (u16)(pairs[e / 2] >> (16 * (e % 2)));
                tiles[n + e / 4][e % 4] = to_float(x);
            }
        }
    } else {
        constexpr int PITCH = VALUE_PITCH / (int)sizeof(INPUT);
#pragma unroll
        for (int n = 0; n < C_HALF / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                tiles[n][e] = to_float(
                    ((const INPUT*)from)[(8 * n + 2 * at.quad + e % 2) * PITCH + at.row + 8 * (e / 2)]);
    }
}

// How an element is rounded on its way out: to the format of the inputs, or to an operand.
__device__ __forceinline__ void round_to(INPUT& to, float x) { to = from_float<INPUT>(x); }
struct Operand {
    operand x;
};
__device__ __forceinline__ void round_to(Operand& to, float x) { to.x = to_operand(x); }

// Writes the pair's 16 columns and the warp's tokens of a (tokens, V) tensor. Row `token` of the chunk begins at
// to + token * pitch. Results are turned around in the place of the values that the warp has read.
template <class T>
__device__ __forceinline__ void store_columns(const OwnTokens& tiles, u8* values, T* to, long long pitch, int valid,
                                              const Place& at) {
    constexpr int SIZE = (int)sizeof(T), LANES = 16 * SIZE / 16;
    u8* turn = values + at.first_token * VALUE_PITCH + TURN_AT + 16 * at.pair * TURN_BYTES;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < C_HALF / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            round_to(*(T*)(turn + (8 * n + 2 * at.quad + e % 2) * VALUE_PITCH + (at.row + 8 * (e / 2)) * SIZE),
                     tiles[n][e]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < C_HALF * LANES / 32; ++i) {
        const int token = (32 * i + at.lane) / LANES, part = (32 * i + at.lane) % LANES;
        const uint4 vector = *(const uint4*)(turn + token * VALUE_PITCH + 16 * part);
        if (at.first_token + token < valid)
            *(uint4*)((u8*)(to + (at.first_token + token) * pitch) + 16 * part) = vector;
    }
    __syncwarp();
}

// Multiplies each column (token) of the tiles by weight[token] * factor.
__device__ __forceinline__ void weight_tokens(OwnTokens& tiles, const float* weight, float factor, const Place& at) {
#pragma unroll
    for (int n = 0; n < C_HALF / 8; ++n) {
        float2 w = *(const float2*)(weight + at.first_token + 8 * n + 2 * at.quad);
        w.x *= factor;
        w.y *= factor;
        tiles[n][0] *= w.x;
        tiles[n][1] *= w.y;
        tiles[n][2] *= w.x;
        tiles[n][3] *= w.y;
    }
}

// The largest of a chunk's coefficients of one kind.
__device__ __forceinline__ float largest_weight(const float* weight) {
#if MODE == MODE_F16
    float largest = fabsf(weight[threadIdx.x & 31]);
    if (CHUNK > 32) largest = fmaxf(largest, fabsf(weight[32 + (threadIdx.x & 31)]));
    return warp_max(largest);
#else
    return 0.0f;
#endif
}

// What an update can add to the largest element of a state, over the largest of the left operand: the elements of K' and
// Q' are below 2. So the largest element is bounded from chunk to chunk, and looked up only now and then; in between the
// bound outgrows it by less than the range of f16 bears.
constexpr float MOST_GROWTH = 2.0f * CHUNK;
constexpr int LOOK_UP_EVERY = 8; // chunks

// Where a thread finds the elements of its part of a state outside the workspace, (K, V) or (V, K).
struct StatePlace {
    long long first;
    int next_k, next_v;
};
__device__ __forceinline__ StatePlace state_place(const ChunkParams& p, int sequence, int head, int first_column,
                                                  const Place& at) {
    StatePlace place;
    place.next_k = p.state_transposed ? 1 : VD;
    place.next_v = p.state_transposed ? KD : 1;
    place.first = ((long long)sequence * p.value_heads + head) * KD * VD +
                  (at.first_k + 2 * at.quad) * place.next_k + (first_column + at.row) * place.next_v;
    return place;
}

// Zero where there is no state.
__device__ __forceinline__ void load_state(OwnState& state, const float* from, const StatePlace& place) {
    clear(state);
    if (from == nullptr) return;
    from += place.first;
#pragma unroll
    for (int n = 0; n < K_HALF / 8; ++n, from += 8 * place.next_k)
#pragma unroll
        for (int e = 0; e < 4; ++e) state[n][e] = from[e % 2 * place.next_k + 8 * (e / 2) * place.next_v];
}

__device__ __forceinline__ void store_state(const OwnState& state, float* to, const StatePlace& place, float factor) {
    if (to == nullptr) return;
    to += place.first;
#pragma unroll
    for (int n = 0; n < K_HALF / 8; ++n, to += 8 * place.next_k)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e % 2 * place.next_k + 8 * (e / 2) * place.next_v] = state[n][e] * factor;
}

// The warp's part of a state into the workspace, (V, K) operands.
__device__ __forceinline__ void keep_state(const OwnState& state, operand* to, int first_column, const Place& at) {
#pragma unroll
    for (int n = 0; n < K_HALF / 8; ++n) {
        operand* first = to + (first_column + at.row) * KD + at.first_k + 8 * n + 2 * at.quad;
        store_pair(first, state[n][0], state[n][1]);
        store_pair(first + 8 * KD, state[n][2], state[n][3]);
    }
}

// Brings a state into the range of its format.
__device__ __forceinline__ void rescale(OwnState& state, Scale& held, Scale wanted) {
    if (wanted.factor == held.factor) return;
    multiply(state, wanted.factor * held.inverse);
    held = wanted;
}
