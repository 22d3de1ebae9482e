// What the forward and the backward sweep over the chunks of a sequence share.
//
// A block takes one sequence, one value head and 16 GROUPS columns of V; each group of SPLIT warps 16 of these. Columns of
// the state are independent of each other, so a group runs the whole recurrence for its columns without asking any other.
// Its part of S^T (16 x K) stays in registers as accumulators, whose layout is that of the left operand of the next
// product.
//
// SPLIT = 1: one warp does all, which wastes nothing when the card is full.
// SPLIT = 2: a chunk takes less time. Each warp of the pair holds one half of K; what is indexed by tokens belongs to them
// by halves of the chunk. Sums over K are exchanged, and so are the left operands of the products over tokens, three times
// a chunk. The sums then have another order, so SPLIT may depend on sizes of the model, never on the batch.
//
// Products that are added to products are written as fmaf: left to itself, the compiler fuses one of them in one
// specialisation and the other in the next, and the bits would depend on the number of groups.
//
// The block shares the tiles of the keys, the queries, T and the scores, copied ahead into shared memory.
#pragma once
#include "chunk.cuh"

static_assert(SPLIT == 1 || SPLIT == 2, "a group has one or two warps");
constexpr int THREADS = 32 * SPLIT * GROUPS;
constexpr int COLUMNS = 16 * GROUPS;
constexpr int K_PART = KD / SPLIT, C_PART = CHUNK / SPLIT; // of a warp
constexpr int STEPS = C_PART / 16; // left operands of a warp's tokens
typedef float OwnTokens[C_PART / 8][4]; // 16 columns of V, the warp's tokens
typedef float OwnState[K_PART / 8][4];  // 16 columns of V, the warp's part of K
// A warp turns its results around where its values were, or beside all values where an operand is wider than a value.
constexpr int TURN_BYTES = (int)sizeof(INPUT) > OPERAND_BYTES ? (int)sizeof(INPUT) : OPERAND_BYTES; // an element
constexpr int TURN_AT = (int)sizeof(INPUT) < OPERAND_BYTES ? COLUMNS * (int)sizeof(INPUT) : 0;
constexpr int VALUE_PITCH = TURN_AT + COLUMNS * TURN_BYTES + 16; // bytes
static_assert(VD % COLUMNS == 0, "the columns of a block divide V");

struct Stage {
    operand* keys;
    operand* write_keys; // the keys that write into the state; for GDN those that read from it
    operand* queries;
    operand* inverse;
    operand* scores;
    float* coefficients;
    u8* values; // v or do, then the place where a warp turns its results around
    u8* gates;  // w
};

constexpr int ROW_TILE_BYTES = ROW_TILE * OPERAND_BYTES;
constexpr int SQUARE_BYTES = SQUARE_TILE * OPERAND_BYTES;
constexpr int COEFFICIENT_BYTES = COEFFICIENT_NUMBERS * 4;
#if CHANNELS
constexpr int GATE_PITCH = COLUMNS * (int)sizeof(GATE) + 16; // bytes
#else
constexpr int GATE_PITCH = 0;
#endif

template <bool Queries, bool Gates> __device__ constexpr int stage_bytes() {
    return (Queries ? 2 : 1) * (ROW_TILE_BYTES + SQUARE_BYTES) + (CHANNELS ? ROW_TILE_BYTES : 0) + COEFFICIENT_BYTES +
           CHUNK * (VALUE_PITCH + (Gates ? GATE_PITCH : 0));
}

// Chunks whose copies are on their way while one is computed.
constexpr int AHEAD = STAGES == 1 ? 1 : STAGES - 1;

// The tiles of the chunks on their way through shared memory, in the order in which the sweep takes them.
template <bool Queries, bool Gates> struct Pipeline {
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
        u8* at = shared + (STAGES == 1 ? 0 : turn % STAGES) * stage_bytes<Queries, Gates>();
        Stage stage;
        stage.keys = stage.write_keys = (operand*)at;
        at += ROW_TILE_BYTES;
        if (CHANNELS) {
            stage.write_keys = (operand*)at;
            at += ROW_TILE_BYTES;
        }
        stage.inverse = (operand*)at;
        at += SQUARE_BYTES;
        stage.coefficients = (float*)at;
        at += COEFFICIENT_BYTES;
        stage.values = at;
        at += CHUNK * VALUE_PITCH;
        stage.gates = at;
        if (Gates) at += CHUNK * GATE_PITCH;
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
            const long long square = (long long)chunk * p.value_heads + head;
            const long long tile = (CHANNELS ? square : (long long)chunk * p.qk_heads + qk_head) * ROW_TILE;
            barrier_expect(barrier, (Queries ? 2 : 1) * (ROW_TILE_BYTES + SQUARE_BYTES) + COEFFICIENT_BYTES +
                                        (CHANNELS ? ROW_TILE_BYTES : 0));
            copy_bulk(to.keys, p.keys + tile, ROW_TILE_BYTES, barrier);
#if CHANNELS
            copy_bulk(to.write_keys, p.channels.write_keys + tile, ROW_TILE_BYTES, barrier);
#endif
            copy_bulk(to.inverse, p.inverse + square * SQUARE_TILE, SQUARE_BYTES, barrier);
            copy_bulk(to.coefficients, p.coefficients + square * COEFFICIENT_NUMBERS, COEFFICIENT_BYTES, barrier);
            if (Queries) {
                copy_bulk(to.queries, p.queries + tile, ROW_TILE_BYTES, barrier);
                copy_bulk(to.scores, p.scores + square * SQUARE_TILE, SQUARE_BYTES, barrier);
            }
        }
#else
        const long long square = (long long)chunk * p.value_heads + head;
        const long long tile = (CHANNELS ? square : (long long)chunk * p.qk_heads + qk_head) * ROW_TILE;
        copy_block<THREADS>(to.keys, p.keys + tile, ROW_TILE_BYTES);
#if CHANNELS
        copy_block<THREADS>(to.write_keys, p.channels.write_keys + tile, ROW_TILE_BYTES);
#endif
        copy_block<THREADS>(to.inverse, p.inverse + square * SQUARE_TILE, SQUARE_BYTES);
        copy_block<THREADS>(to.coefficients, p.coefficients + square * COEFFICIENT_NUMBERS, COEFFICIENT_BYTES);
        if (Queries) {
            copy_block<THREADS>(to.queries, p.queries + tile, ROW_TILE_BYTES);
            copy_block<THREADS>(to.scores, p.scores + square * SQUARE_TILE, SQUARE_BYTES);
        }
#endif
        // Rows of a tensor that is not ours to arrange.
        const int pitch = p.value_heads * VD;
        const INPUT* values = source + (long long)token_of(turn) * pitch + head * VD + first_column;
        copy_rows<THREADS>(to.values, VALUE_PITCH, values, pitch * (int)sizeof(INPUT), CHUNK, COLUMNS * (int)sizeof(INPUT),
                           length_of(turn));
#if CHANNELS
        if (Gates)
            copy_rows<THREADS>(to.gates, GATE_PITCH, p.channels.w + (values - source), pitch * (int)sizeof(GATE), CHUNK,
                               COLUMNS * (int)sizeof(GATE), length_of(turn));
#endif
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
    int group, half; // half 0 where a group has one warp
    int first_token; // of the warp's part of the chunk
    int first_k;     // of its part of K
};
__device__ __forceinline__ Place place_of_warp() {
    Place at;
    at.lane = threadIdx.x & 31;
    at.row = at.lane / 4;
    at.quad = at.lane % 4;
    at.group = threadIdx.x / (32 * SPLIT);
    at.half = threadIdx.x / 32 % SPLIT;
    at.first_token = at.half * C_PART;
    at.first_k = at.half * K_PART;
    return at;
}

// Waits for the other warp of the group.
__device__ __forceinline__ void group_sync(const Place& at) {
    if (SPLIT == 2) asm volatile("bar.sync %0, 64;" ::"r"(at.group + 1) : "memory");
}

// Left operands of a warp's tokens, all with one scale.
struct Operands {
    Left left[STEPS];
    Scale scale;
};
__device__ __forceinline__ Operands operands_of(const OwnTokens& tiles, float unit, Scale scale) {
    Operands operands;
#pragma unroll
    for (int c = 0; c < STEPS; ++c) operands.left[c] = make_left(tiles[2 * c], tiles[2 * c + 1], unit);
    operands.scale = scale;
    return operands;
}
// What was lost on the way there.
__device__ __forceinline__ Operands rest_of(const OwnTokens& tiles, float unit, const Operands& rounded) {
    Operands rest;
#pragma unroll
    for (int c = 0; c < STEPS; ++c)
        rest.left[c] = make_left_rest(tiles[2 * c], tiles[2 * c + 1], unit, rounded.left[c]);
    rest.scale = rounded.scale;
    return rest;
}
__device__ __forceinline__ void bring_to(Operands& operands, Scale scale) {
#pragma unroll
    for (int c = 0; c < STEPS; ++c) scale_left(operands.left[c], scale.factor * operands.scale.inverse);
    operands.scale = scale;
}

// The same on their way to the other warp, each thread's to the thread of the same lane.
struct Passed {
    Left left[STEPS][32];
    Scale scale;
};
__device__ __forceinline__ void pass(Passed& to, const Operands& operands, const Place& at) {
#pragma unroll
    for (int c = 0; c < STEPS; ++c) to.left[c][at.lane] = operands.left[c];
    if (at.lane == 0) to.scale = operands.scale;
}
__device__ __forceinline__ Operands take(const Passed& from, const Place& at) {
    Operands operands;
#pragma unroll
    for (int c = 0; c < STEPS; ++c) operands.left[c] = from.left[c][at.lane];
    operands.scale = from.scale;
    return operands;
}

// Products of the state with the tokens' rows of a tile, over the warp's part of K: for its own tokens, and for those of
// the other warp, which get them.
struct Sums {
    float4 tiles[C_PART / 8][32];
};
__device__ __forceinline__ void product_with_tokens(OwnTokens& own, Sums& others, const OwnState& state,
                                                    const operand* tile, float factor, const Place& at) {
    OwnTokens other;
    clear(own);
    clear(other);
    const operand* from = tile + at.first_k;
#pragma unroll
    for (int c = 0; c < K_PART / 16; ++c) {
        const Left left = make_left(state[2 * c], state[2 * c + 1], 1.0f);
        product_nt(own, left, from + at.first_token * ROW_PITCH + 16 * c, ROW_PITCH);
        if (SPLIT == 2) product_nt(other, left, from + (C_PART - at.first_token) * ROW_PITCH + 16 * c, ROW_PITCH);
    }
    if (SPLIT == 2) {
#pragma unroll
        for (int n = 0; n < C_PART / 8; ++n)
            others.tiles[n][at.lane] =
                make_float4(other[n][0] * factor, other[n][1] * factor, other[n][2] * factor, other[n][3] * factor);
    }
}
// Returns the units that the sums are in afterwards: those of the state where nothing was added.
__device__ __forceinline__ float add_sums(OwnTokens& own, float factor, const Sums& from, const Place& at) {
#pragma unroll
    for (int n = 0; n < (SPLIT == 2 ? C_PART / 8 : 0); ++n) {
        const float4 other = from.tiles[n][at.lane];
        own[n][0] = fmaf(own[n][0], factor, other.x);
        own[n][1] = fmaf(own[n][1], factor, other.y);
        own[n][2] = fmaf(own[n][2], factor, other.z);
        own[n][3] = fmaf(own[n][3], factor, other.w);
    }
    return SPLIT == 2 ? 1.0f : factor;
}

// state += (left operands)^T times the rows of a tile, over the warp's part of K: those of the warp's own tokens, and those
// of the other warp's. The operands are brought to the scale that the state is held in. With `Rest`, what rounding left of
// them is added too: errors of what goes into the state stay there.
template <bool Rest> struct Update {
    Operands parts[Rest ? 2 : 1];
};
template <bool Rest> __device__ __forceinline__ Update<Rest> update_of(const OwnTokens& tiles, Scale scale) {
    Update<Rest> update;
    update.parts[0] = operands_of(tiles, scale.factor, scale);
    if constexpr (Rest) update.parts[1] = rest_of(tiles, scale.factor, update.parts[0]);
    return update;
}
template <bool Rest> struct PassedUpdate {
    Passed parts[Rest ? 2 : 1];
};
template <bool Rest> __device__ __forceinline__ void pass(PassedUpdate<Rest>& to, const Update<Rest>& update, const Place& at) {
#pragma unroll
    for (int i = 0; i < (Rest ? 2 : 1); ++i) pass(to.parts[i], update.parts[i], at);
}
template <bool Rest> __device__ __forceinline__ Update<Rest> take(const PassedUpdate<Rest>& from, const Place& at) {
    Update<Rest> update;
#pragma unroll
    for (int i = 0; i < (Rest ? 2 : 1); ++i) update.parts[i] = take(from.parts[i], at);
    return update;
}
template <bool Rest>
__device__ __forceinline__ void add_to_state(OwnState& state, Scale held, Update<Rest>& own, Update<Rest>& other,
                                             const operand* tile, const Place& at) {
#pragma unroll
    for (int warp = 0; warp < SPLIT; ++warp) {
        Operands* parts = warp == 0 ? own.parts : other.parts;
        const operand* rows = tile + (warp == 0 ? at.first_token : C_PART - at.first_token) * ROW_PITCH + at.first_k;
#pragma unroll
        for (int i = 0; i < (Rest ? 2 : 1); ++i) bring_to(parts[i], held);
#pragma unroll
        for (int c = 0; c < STEPS; ++c) {
#if MODE == MODE_F32
            // The sum over the tokens first: each addition to the large state rounds.
#pragma unroll
            for (int n = 0; n < K_PART / 16; ++n) {
                float sum[2][4];
                clear(sum);
                product_nn(sum, parts[0].left[c], rows + 16 * c * ROW_PITCH + 16 * n, ROW_PITCH);
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    state[2 * n + e / 4][e % 4] = __fadd_rn(state[2 * n + e / 4][e % 4], sum[e / 4][e % 4]);
            }
#else
            product_nn(state, parts[0].left[c], rows + 16 * c * ROW_PITCH, ROW_PITCH, 0, K_PART / 16,
                       Rest ? &parts[Rest].left[c] : nullptr);
#endif
        }
    }
}

// A scale for each half where there is one warp for both.
__device__ __forceinline__ void keep_scale(float* to, long long part, float inverse, const Place& at) {
    if (at.lane < 2 / SPLIT) to[2 * part + at.half + at.lane] = inverse;
}

// The group's columns of the warp's tokens of v, do or w, transposed: rows are columns of V, columns are tokens.
template <class T, int PitchBytes>
__device__ __forceinline__ void load_columns(OwnTokens& tiles, const u8* values, const Place& at) {
    const u8* from = values + at.first_token * PitchBytes + 16 * at.group * (int)sizeof(T);
    if constexpr (sizeof(T) == 2) {
        // Two matrices of 8 tokens times 8 columns for each tile, two tiles at once.
        const u32 address =
            shared_address(from) + ((at.lane & 7) + (at.lane >> 4) * 8) * PitchBytes + ((at.lane >> 3) & 1) * 16;
#pragma unroll
        for (int n = 0; n < C_PART / 8; n += 2) {
            u32 pairs[4];
            load_matrices_transposed(pairs, address + 8 * n * PitchBytes);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                T x;
                *(u16*)&x = (u16)(pairs[e / 2] >> (16 * (e % 2)));
                tiles[n + e / 4][e % 4] = to_float(x);
            }
        }
    } else {
        constexpr int PITCH = PitchBytes / (int)sizeof(T);
#pragma unroll
        for (int n = 0; n < C_PART / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                tiles[n][e] = to_float(
                    ((const T*)from)[(8 * n + 2 * at.quad + e % 2) * PITCH + at.row + 8 * (e / 2)]);
    }
}
__device__ __forceinline__ void load_values(OwnTokens& tiles, const u8* values, const Place& at) {
    load_columns<INPUT, VALUE_PITCH>(tiles, values, at);
}

// How an element is rounded on its way out: to the format of the inputs, or to an operand.
__device__ __forceinline__ void round_to(INPUT& to, float x) { to = from_float<INPUT>(x); }
struct Operand {
    operand x;
};
__device__ __forceinline__ void round_to(Operand& to, float x) { to.x = to_operand(x); }

// Writes the group's 16 columns and the warp's tokens of a (tokens, V) tensor. Row `token` of the chunk begins at
// to + token * pitch. Results are turned around in the place of the values that the warp has read.
template <class T>
__device__ __forceinline__ void store_columns(const OwnTokens& tiles, u8* values, T* to, long long pitch, int valid,
                                              const Place& at) {
    constexpr int SIZE = (int)sizeof(T), LANES = 16 * SIZE / 16;
    u8* turn = values + at.first_token * VALUE_PITCH + TURN_AT + 16 * at.group * TURN_BYTES;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < C_PART / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            round_to(*(T*)(turn + (8 * n + 2 * at.quad + e % 2) * VALUE_PITCH + (at.row + 8 * (e / 2)) * SIZE),
                     tiles[n][e]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < C_PART * LANES / 32; ++i) {
        const int token = (32 * i + at.lane) / LANES, part = (32 * i + at.lane) % LANES;
        const uint4 vector = *(const uint4*)(turn + token * VALUE_PITCH + 16 * part);
        if (at.first_token + token < valid)
            *(uint4*)((u8*)(to + (at.first_token + token) * pitch) + 16 * part) = vector;
    }
    __syncwarp();
}

// Multiplies the two pairs of columns of a tile by `weights` and `factor`.
__device__ __forceinline__ void weight_columns(float (&tile)[4], float2 weights, float factor) {
    weights.x *= factor;
    weights.y *= factor;
    tile[0] *= weights.x;
    tile[1] *= weights.y;
    tile[2] *= weights.x;
    tile[3] *= weights.y;
}

// Multiplies each column (token) of the tiles by weight[token] * factor.
__device__ __forceinline__ void weight_tokens(OwnTokens& tiles, const float* weight, float factor, const Place& at) {
#pragma unroll
    for (int n = 0; n < C_PART / 8; ++n)
        weight_columns(tiles[n], *(const float2*)(weight + at.first_token + 8 * n + 2 * at.quad), factor);
}

// What an update can add to the largest element of a state, over the largest of the left operand: the elements of K' and
// Q' are below 2. So the largest element is bounded from chunk to chunk, and looked up only now and then; in between the
// bound outgrows it by less than the range of f16 bears.
constexpr float MOST_GROWTH = 2.0f * CHUNK;
constexpr int LOOK_UP_EVERY = 8; // chunks

// The part of a sequence that a block takes: its chunks, and what comes before and after it.
struct Segment {
    int number, sequence;
    int begin, end;   // chunks
    int token, tokens; // the first, and how many
    bool first, last; // of the sequence
};
__device__ __forceinline__ Segment segment_of_number(const ChunkParams& p, int number) {
    Segment segment;
    segment.number = number;
    segment.sequence = p.segment_sequence[segment.number];
    segment.begin = p.segment_chunk[segment.number];
    segment.end = p.segment_chunk[segment.number + 1];
    segment.first = segment.begin == p.sequence_chunk[segment.sequence];
    segment.last = segment.end == p.sequence_chunk[segment.sequence + 1];
    const bool any = segment.begin < segment.end;
    segment.token = any ? p.chunk_token[segment.begin] : 0;
    segment.tokens = any ? p.chunk_token[segment.end - 1] + p.chunk_length[segment.end - 1] - segment.token : 0;
    return segment;
}
__device__ __forceinline__ Segment segment_of_block(const ChunkParams& p) { return segment_of_number(p, blockIdx.z); }

// Where a thread finds the elements of its part of a state outside the workspace, (K, V) or (V, K), or of a segment's.
struct StatePlace {
    long long first;
    int next_k, next_v;
};
__device__ __forceinline__ StatePlace state_place(long long state, bool transposed, int columns, int first_column,
                                                  const Place& at) {
    StatePlace place;
    place.next_k = transposed ? 1 : columns;
    place.next_v = transposed ? KD : 1;
    place.first = state * KD * columns + (at.first_k + 2 * at.quad) * place.next_k +
                  (first_column + at.row) * place.next_v;
    return place;
}

// Zero where there is no state.
__device__ __forceinline__ void load_state(OwnState& state, const float* from, const StatePlace& place) {
    clear(state);
    if (from == nullptr) return;
    from += place.first;
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n, from += 8 * place.next_k)
#pragma unroll
        for (int e = 0; e < 4; ++e) state[n][e] = from[e % 2 * place.next_k + 8 * (e / 2) * place.next_v];
}

// The warp's part of 16 columns of the K x K identity.
__device__ __forceinline__ void load_identity(OwnState& state, int first_column, const Place& at) {
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int k = at.first_k + 8 * n + 2 * at.quad + e % 2, column = first_column + at.row + 8 * (e / 2);
            state[n][e] = k == column ? 1.0f : 0.0f;
        }
}

__device__ __forceinline__ void store_state(const OwnState& state, float* to, const StatePlace& place, float factor) {
    if (to == nullptr) return;
    to += place.first;
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n, to += 8 * place.next_k)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e % 2 * place.next_k + 8 * (e / 2) * place.next_v] = state[n][e] * factor;
}

// The warp's part of a state into the workspace, (V, K) operands.
__device__ __forceinline__ void keep_state(const OwnState& state, operand* to, int first_column, const Place& at) {
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n) {
        operand* first = to + (first_column + at.row) * KD + at.first_k + 8 * n + 2 * at.quad;
        store_pair(first, state[n][0], state[n][1]);
        store_pair(first + 8 * KD, state[n][2], state[n][3]);
    }
}

// The decay of a chunk, or the largest of its channels; `weight` are the coefficients of the chunk.
__device__ __forceinline__ float largest_decay(const float* weight) {
    return CHANNELS ? weight[MOST * CHUNK + KEY] : weight[DECAY * CHUNK + CHUNK - 1];
}
// Multiplies a state by the decay of its chunk and by `factor`.
__device__ __forceinline__ void decay_state(OwnState& state, float largest, const float* weight, float factor, const Place& at) {
#if CHANNELS
    const float* decays = weight + COEFFICIENTS * CHUNK + at.first_k + 2 * at.quad;
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n) weight_columns(state[n], *(const float2*)(decays + 8 * n), factor);
#else
    multiply(state, largest * factor);
#endif
}

// Brings a state into the range of its format.
__device__ __forceinline__ void rescale(OwnState& state, Scale& held, Scale wanted) {
    if (wanted.factor == held.factor) return;
    multiply(state, ratio(wanted, held));
    held = wanted;
}
