// Forward sweeps of the chunk form of GDN and GDN-2 for Hopper: what chunk_forward.cu does, by products of whole warpgroups.
//
//   R = beta v - (beta e^G k) S      U = T R      o = s e^G q S + P U      S <- e^{G_C} S + (e^{G_C - G} k)^T U
//
//   v (T, HV, V), the workspace of chunk_prepare.cu or gdn2_prepare.cu, initial_state  ->  o (T, HV, V), final_state
//
// A block takes one segment of a sequence, one value head and 64 CHAINS columns of V. Its warpgroups have two roles:
//
//   chains    a warpgroup for each 64 columns of V. S^T (64 x K) stays in binary32 accumulators and is the left operand of
//             R^T = beta v^T - (beta e^G k S)^T; then U^T = R^T T^T and S^T <- e^{G_C} S^T + U^T k. Nothing else is on the way
//             from chunk to chunk.
//   output    a warpgroup that follows the chains half a chunk behind: it gets S^T and U^T as operands in shared memory, and
//             makes o^T = s (e^G S^T q + U^T P^T) of them, or keeps them for the backward. One of its threads brings the tiles
//             of the next chunks by the copy engine.
//
// Compiled into the functions of chunk_forward.cu, with the same precision. Scales of f16 operands are those of one warp to a
// group there: one for a warp's 16 columns of V and a whole chunk. Blocks of T and P above the diagonal are zeros.
//
// Compiled in besides what chunk.cuh says: CHAINS, 1 or 2.
#ifndef CHAINS
#define CHAINS 1
#endif
#define SPLIT 1
#define GROUPS (4 * CHAINS)
#define STAGES 1
#include "chunk_hopper.cuh"

struct ChunkSweepParams {
    // Tiles of 64 columns of the workspace, (64, 1, rows, columns / 64), and of v and w, (64, HV, T, V / 64); of w in binary32
    // tiles of 32 columns.
    TensorMap keys, write_keys, queries, inverse, scores, v, w;
    ChunkParams chunk;
    // Blocks along z take the segments first_segment, first_segment + segment_step and so on. In a relay each launch takes one
    // segment of every sequence, and begins where the one before it has left the state.
    int first_segment, segment_step, relay;
};

#if HOPPER
static_assert(MODE == MODE_F16, "operands are f16");

constexpr int CHAIN_THREADS = 128 * CHAINS, ALL_THREADS = CHAIN_THREADS + 128;
constexpr int CHAIN_REGISTERS = 192, OUTPUT_REGISTERS = 120; // of a thread where there are two chains
constexpr int TURNS = 2; // chunks whose tiles are in shared memory at once
constexpr float LARGEST_POWER = 1.7014118e38f; // 2^127
#if CHANNELS
constexpr u32 GATE_TILES = CHAINS * (u32)sizeof(GATE) / 2;
#else
constexpr u32 GATE_TILES = 0;
#endif

// Tiles of one chunk for the chains, then those for the output: in bytes from the first.
constexpr u32 WRITE_KEYS_AT = CHANNELS ? SPANS * TILE_BYTES : 0;
constexpr u32 INVERSE_AT = WRITE_KEYS_AT + SPANS * TILE_BYTES;
constexpr u32 VALUES_AT = INVERSE_AT + TILE_BYTES;
constexpr u32 GATES_AT = VALUES_AT + CHAINS * TILE_BYTES;
constexpr u32 CHAIN_TILES = GATES_AT / TILE_BYTES + GATE_TILES;
constexpr u32 SCORES_AT = SPANS * TILE_BYTES, OUTPUT_TILES = SPANS + 1;

struct Shared {
    Tile chain[TURNS][CHAIN_TILES];
    Tile output[TURNS][OUTPUT_TILES];
    Tile state[CHAINS][SPANS]; // S^T, rows are columns of V
    Tile writes[CHAINS];       // U^T
    Tile turned[CHAINS];       // o or U on their way to memory, rows are tokens
    float coefficients[TURNS][COEFFICIENT_NUMBERS];
    float output_coefficients[TURNS][2 * CHUNK]; // DECAY and QUERY
    float state_unit[CHAINS][4], write_unit[CHAINS][4]; // what turns the operands of a warp's rows back
    Barrier chain_filled[TURNS], chain_free[TURNS];     // by the copies, by the chain
    u32 chain_left[TURNS];                              // where there are two: their warps that have read the tiles
    Barrier output_filled[TURNS], output_free[TURNS];   // by the copies, by the output
    Barrier state_ready[CHAINS], writes_ready[CHAINS];  // by a chain
    Barrier state_free[CHAINS], writes_free[CHAINS];    // by the output
};
static_assert(QUERY == DECAY + 1, "one copy brings both");
static_assert(sizeof(Shared) <= (TURNS * (CHAIN_TILES + OUTPUT_TILES) + CHAINS * (SPANS + 2)) * TILE_BYTES + TURNS * 5120 + 2048,
              "the launch has as much");

enum Pass { OUTPUT, STATES, ENDS, BOTH };

// What all roles know of a block.
struct Block {
    const ChunkSweepParams& params;
    Shared& s;
    Segment segment;
    int head, qk_head, first_column;
    bool identity; // columns of the identity and v = 0

    __device__ __forceinline__ int turns() const { return segment.end - segment.begin; }
    __device__ __forceinline__ int token_of(int turn) const { return segment.token + turn * CHUNK; }
    __device__ __forceinline__ int length_of(int turn) const { return min(CHUNK, segment.tokens - turn * CHUNK); }
    __device__ __forceinline__ long long square_of(int turn) const {
        return (long long)(segment.begin + turn) * params.chunk.value_heads + head;
    }
    // First row of its tiles of keys and queries.
    __device__ __forceinline__ int row_of(int turn) const {
        return CHANNELS ? (int)square_of(turn) * CHUNK : ((segment.begin + turn) * params.chunk.qk_heads + qk_head) * CHUNK;
    }

    // By one thread: starts the copies of a chunk for the chains, if there is one. The place must be free.
    __device__ __forceinline__ void fill_chain(int turn) const {
        if (turn >= turns()) return;
        const ChunkParams& p = params.chunk;
        const int stage = turn % TURNS;
        const u32 to = shared_address(s.chain[stage]);
        Barrier* barrier = s.chain_filled + stage;
        barrier_expect(barrier, (CHAIN_TILES - (identity ? CHAINS + GATE_TILES : 0)) * TILE_BYTES + COEFFICIENT_BYTES);
        copy_tile(to, params.keys, {0, 0, row_of(turn), 0}, barrier);
        copy_bulk(s.coefficients[stage], p.coefficients + square_of(turn) * COEFFICIENT_NUMBERS, COEFFICIENT_BYTES, barrier);
        if (!identity) {
            copy_tile(to + VALUES_AT, params.v, {0, head, token_of(turn), first_column / SPAN}, barrier);
#if CHANNELS
            copy_tile(to + GATES_AT, params.w, {0, head, token_of(turn), first_column / SPAN * ((int)sizeof(GATE) / 2)}, barrier);
#endif
        }
        copy_tile(to + INVERSE_AT, params.inverse, {0, 0, (int)square_of(turn) * CHUNK, 0}, barrier);
        if (CHANNELS) copy_tile(to + WRITE_KEYS_AT, params.write_keys, {0, 0, row_of(turn), 0}, barrier);
    }
    // The same for the output.
    __device__ __forceinline__ void fill_output(int turn) const {
        if (turn >= turns()) return;
        const int stage = turn % TURNS;
        const u32 to = shared_address(s.output[stage]);
        Barrier* barrier = s.output_filled + stage;
        barrier_expect(barrier, OUTPUT_TILES * TILE_BYTES + 2 * CHUNK * 4);
        copy_tile(to, params.queries, {0, 0, row_of(turn), 0}, barrier);
        copy_tile(to + SCORES_AT, params.scores, {0, 0, (int)square_of(turn) * CHUNK, 0}, barrier);
        copy_bulk(s.output_coefficients[stage], params.chunk.coefficients + square_of(turn) * COEFFICIENT_NUMBERS + DECAY * CHUNK,
                  2 * CHUNK * 4, barrier);
    }
};

// The part of v that a chain takes, times beta or w; zero beyond the last token.
__device__ __forceinline__ void load_writes(OwnTokens& writes, u32 tiles, u32 chain, const float* weight, int valid, const Place& at) {
    const u32 warp = at.group % 4, lane = at.lane;
    const u32 from = tiles + VALUES_AT + chain * TILE_BYTES + turned_place(warp, lane);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        u32 values[4];
        load_matrices_transposed(values, from + 8 * n * SPAN_BYTES);
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 pair = values[2 * m + e / 2];
                writes[n + m][e] = e % 2 ? second_of(pair) : first_of(pair);
            }
    }
#if CHANNELS
    if constexpr (sizeof(GATE) == 4) {
        u32 gates[4];
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            const u32 token = 2 * at.quad + e % 2, column = 16 * warp + at.row + 8 * (e / 2);
            gates[e] = tiles + GATES_AT + (2 * chain + column / 32) * TILE_BYTES + token * SPAN_BYTES +
                       ((column % 32 / 4 ^ token) * 16 | column % 4 * 4);
        }
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float gate;
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(gate) : "r"(gates[e] + 8 * n * SPAN_BYTES));
                writes[n][e] *= gate;
            }
    } else {
        const u32 gates = tiles + GATES_AT + chain * TILE_BYTES + turned_place(warp, lane);
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            u32 pairs[4];
            load_matrices_transposed(pairs, gates + 8 * n * SPAN_BYTES);
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    GATE gate;
                    *(u16*)&gate = (u16)(pairs[2 * m + e / 2] >> (16 * (e % 2)));
                    writes[n + m][e] *= to_float(gate);
                }
        }
    }
#else
#pragma unroll
    for (int n = 0; n < 8; ++n)
        weight_columns(writes[n], *(const float2*)(weight + BETA * CHUNK + 8 * n + 2 * at.quad), 1.0f);
#endif
    if (valid < CHUNK) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (8 * n + 2 * at.quad + e % 2 >= valid) writes[n][e] = 0.0f;
    }
}

template <Pass Of> __device__ __forceinline__ void run_chain(const Block& block) {
    constexpr bool Output = Of == OUTPUT || Of == BOTH, Keep = Of == STATES || Of == BOTH;
    // The rows of GDN-2 are rounded for their decay, so the rest of the other operand alone would not help.
    constexpr bool Rest = !CHANNELS && Of != OUTPUT;
    const ChunkParams& p = block.params.chunk;
    Shared& s = block.s;
    const Segment& segment = block.segment;
    const Place at = place_of_warp();
    const u32 chain = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
    const int first_column = block.first_column + 16 * at.group, turns = block.turns();
    const LeftPlace place(warp, at.lane);
    const u32 state_tile = shared_address(s.state[chain]), writes_tile = shared_address(s.writes + chain);
    OwnState state;
    const long long of_segment = (long long)segment.number * p.value_heads + block.head;
    const long long of_sequence = (long long)segment.sequence * p.value_heads + block.head;
    const bool turned = p.state_transposed;
    if (Of == ENDS && block.identity)
        load_identity(state, first_column, at);
    else if (segment.first)
        load_state(state, p.initial_state, state_place(of_sequence, turned, VD, first_column, at));
    else
        load_state(state, Of == ENDS ? nullptr : p.segment_states, state_place(of_segment, true, VD, first_column, at));
    float largest_state = largest_of(state);
    Scale held = {1.0f, 1.0f}; // `state` is S times held.factor

#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        const int stage = turn % TURNS;
        const u32 tiles = shared_address(s.chain[stage]);
        const float* weight = s.coefficients[stage];
        const long long part = block.square_of(turn) * (VD / 16) + first_column / 16;

        rescale(state, held, scale_for(largest_state));
        Left left[KD / 16];
#pragma unroll
        for (int c = 0; c < KD / 16; ++c) left[c] = make_left(state[2 * c], state[2 * c + 1], 1.0f);
        barrier_wait(s.chain_filled + stage, turn / TURNS & 1);
        OwnTokens right;
        hold(right);
        warpgroup_fence();
        start_left_product(right, left, tiles);
        warpgroup_commit();
        auto hand_state = [&] {
            if (!Output && !Keep) return;
            if (turn > 0) barrier_wait(s.state_free + chain, turn - 1 & 1);
#pragma unroll
            for (int c = 0; c < KD / 16; ++c) store_matrices(state_tile + c / 4 * TILE_BYTES + place(c % 4), left[c].r);
            if (at.lane == 0) s.state_unit[chain][warp] = held.inverse;
            warp_arrive(s.state_ready + chain, at.lane);
            if (Keep) keep_scale(p.state_scales, part, held.inverse, at);
        };
        OwnTokens values;
        load_writes(values, tiles, chain, weight, block.identity ? 0 : block.length_of(turn), at);
        if (CHAINS == 2) hand_state(); // two chains have no registers to hold it longer
        warpgroup_wait<0>();
        hold(right);

        // R^T = beta v^T - (beta e^G k S)^T
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float2 read = *(const float2*)(weight + READ * CHUNK + 8 * n + 2 * at.quad);
            read.x *= held.inverse;
            read.y *= held.inverse;
#pragma unroll
            for (int e = 0; e < 4; ++e) right[n][e] = fmaf(-(e % 2 ? read.y : read.x), right[n][e], values[n][e]);
        }
        const Scale right_scale = scale_for(largest_in_chains(right));
        Left rounded[4], rest[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) rounded[c] = make_left(right[2 * c], right[2 * c + 1], right_scale.factor);

        // U^T = R^T T^T. What rounding leaves of R is multiplied too: it is the cheapest of the roundings between S and U to avoid.
        OwnTokens writes;
        hold(writes);
        warpgroup_fence();
        start_left_product(writes, rounded, tiles + INVERSE_AT);
        warpgroup_commit();
        hold(right);
#pragma unroll
        for (int c = 0; c < 4; ++c) rest[c] = make_left_rest(right[2 * c], right[2 * c + 1], right_scale.factor, rounded[c]);
        warpgroup_fence();
        start_more_product(writes, rest, tiles + INVERSE_AT);
        warpgroup_commit();
        // What others wait for, and what the state needs anyway, while the tensor cores are busy.
        if (CHAINS == 1) hand_state();
        decay_state(state, largest_decay(weight), weight, 1.0f, at);
        hold(state);
        warpgroup_wait<0>();
        hold(writes);

        // S^T <- e^{G_C} S^T + (e^{G_C - G} U)^T K'. The largest of what is left: a decay may have wiped out the largest U.
        float most[4] = {};
        float2 kept[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            kept[n] = *(const float2*)(weight + WRITE * CHUNK + 8 * n + 2 * at.quad);
            kept[n].x *= right_scale.inverse;
            kept[n].y *= right_scale.inverse;
#pragma unroll
            for (int e = 0; e < 4; ++e) most[e] = fmaxf(most[e], fabsf(writes[n][e] * (e % 2 ? kept[n].y : kept[n].x)));
        }
        const Scale added = scale_for(warp_max(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]))));
        // The scale says what the largest of the added operands is, up to a factor of 2.
        largest_state = fmaf(largest_decay(weight), largest_state, MOST_GROWTH * 32768.0f * added.inverse);
        const Scale next = scale_for(largest_state);
        rescale(state, held, next);
        Left weighted[4], weighted_rest[4];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            kept[n].x = fminf(kept[n].x * next.factor, LARGEST_POWER);
            kept[n].y = fminf(kept[n].y * next.factor, LARGEST_POWER);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            float kept_writes[2][4];
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) kept_writes[m][e] = writes[2 * c + m][e] * (e % 2 ? kept[2 * c + m].y : kept[2 * c + m].x);
            weighted[c] = make_left(kept_writes[0], kept_writes[1], 1.0f);
            if (Rest) weighted_rest[c] = make_left_rest(kept_writes[0], kept_writes[1], 1.0f, weighted[c]);
        }
        hold(state);
        warpgroup_fence();
        start_state_product(state, weighted, tiles + WRITE_KEYS_AT);
        if (Rest) start_state_product(state, weighted_rest, tiles + WRITE_KEYS_AT);
        warpgroup_commit();
        if (Output || Keep) {
            const Scale plain = scale_for(largest_in_chains(writes) * right_scale.inverse);
            const float unit = ratio(plain, right_scale);
            if (turn > 0) barrier_wait(s.writes_free + chain, turn - 1 & 1);
#pragma unroll
            for (int c = 0; c < 4; ++c) store_matrices(writes_tile + place(c), make_left(writes[2 * c], writes[2 * c + 1], unit).r);
            if (at.lane == 0) s.write_unit[chain][warp] = plain.inverse;
            warp_arrive(s.writes_ready + chain, at.lane);
            if (Keep) keep_scale(p.write_scales, part, plain.inverse, at);
        }
        warpgroup_wait<0>();
        hold(state);
        if (CHAINS == 2) {
            __syncwarp();
            if (at.lane == 0 && is_last<4 * CHAINS>(s.chain_left + stage)) block.fill_chain(turn + TURNS);
            __syncwarp();
        } else {
            warp_arrive(s.chain_free + stage, at.lane);
        }
        if (turn % LOOK_UP_EVERY == LOOK_UP_EVERY - 1) largest_state = largest_in_chains(state) * held.inverse;
    }

    if (Output && segment.last)
        store_state(state, p.final_state, state_place(of_sequence, turned, VD, first_column, at), held.inverse);
    if (Output && block.params.relay && !segment.last)
        store_state(state, p.segment_states, state_place(of_segment + p.value_heads, true, VD, first_column, at), held.inverse);
    if (Of == ENDS) {
        if (block.identity) {
            store_state(state, p.transitions, state_place(2 * of_segment, true, KD, first_column, at), held.inverse);
            store_state(state, p.transitions, state_place(2 * of_segment + 1, false, KD, first_column, at), held.inverse);
        } else
            store_state(state, p.segment_states, state_place(of_segment + p.value_heads, true, VD, first_column, at),
                        held.inverse);
    }
}

template <Pass Of> __device__ __forceinline__ void run_output(const Block& block) {
    constexpr bool Output = Of == OUTPUT || Of == BOTH, Keep = Of == STATES || Of == BOTH;
    const ChunkParams& p = block.params.chunk;
    Shared& s = block.s;
    const u32 thread = threadIdx.x - CHAIN_THREADS, warp = thread / 32, lane = thread % 32, quad = lane % 4;
    const int turns = block.turns();
    const LeftPlace place(warp, lane);
    const u32 turned = turned_place(warp, lane);
    if (thread == 0) {
        for (int turn = 0; turn < TURNS; ++turn) {
            block.fill_chain(turn);
            if (Output) block.fill_output(turn);
        }
    }
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        const int stage = turn % TURNS;
        const u32 tiles = shared_address(s.output[stage]);
        const float* weight = s.output_coefficients[stage];
        if (Output) barrier_wait(s.output_filled + stage, turn / TURNS & 1);
#pragma unroll 1
        for (int chain = 0; chain < (Of == ENDS ? 0 : CHAINS); ++chain) {
            Tile& tile = s.turned[chain];
            const u32 to_tile = shared_address(&tile) + turned;
            const int first_column = block.first_column + SPAN * chain;
            OwnTokens read, written;
            barrier_wait(s.state_ready + chain, turn & 1);
            Left left[KD / 16];
            if (Output) {
#pragma unroll
                for (int c = 0; c < KD / 16; ++c) load_matrices(left[c].r, shared_address(s.state[chain] + c / 4) + place(c % 4));
                hold(read);
                warpgroup_fence();
                start_left_product(read, left, tiles);
                warpgroup_commit();
            }
            const float state_unit = s.state_unit[chain][warp];
            if (Keep) store_rows(p.states + (block.square_of(turn) * VD + first_column) * KD, s.state[chain], warp, lane);
            warp_arrive(s.state_free + chain, lane);
            if (Output) {
                warpgroup_wait<0>();
                hold(read);
            }

            barrier_wait(s.writes_ready + chain, turn & 1);
            Left own[4];
            if (Output) {
#pragma unroll
                for (int c = 0; c < 4; ++c) load_matrices(own[c].r, shared_address(s.writes + chain) + place(c));
                hold(written);
                warpgroup_fence();
                start_left_product(written, own, tiles + SCORES_AT);
                warpgroup_commit();
            }
            const float write_unit = s.write_unit[chain][warp];
            if (Keep) {
                // Turned around: rows become tokens.
                const u32 from = shared_address(s.writes + chain);
                __syncwarp();
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    u32 matrices[4];
                    load_matrices_transposed(matrices, from + place(c));
                    store_matrices(to_tile + 16 * c * SPAN_BYTES, matrices);
                }
                __syncwarp();
                store_turned(p.writes + block.square_of(turn) * CHUNK * VD + first_column, VD, tile, warp, lane, CHUNK);
            }
            warp_arrive(s.writes_free + chain, lane);
            if (Output) {
                warpgroup_wait<0>();
                // o^T = s (e^G S^T q + U^T P^T)
                hold(written);
#pragma unroll
                for (int n = 0; n < 8; n += 2) {
                    u32 pairs[4];
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        const int i = 8 * (n + m) + 2 * quad;
                        float2 decay = *(const float2*)(weight + i), query = *(const float2*)(weight + CHUNK + i);
                        decay.x *= state_unit;
                        decay.y *= state_unit;
                        query.x *= p.scale_unit;
                        query.y *= p.scale_unit;
                        float o[4];
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            o[e] = fmaf(read[n + m][e], e % 2 ? decay.y : decay.x, written[n + m][e] * write_unit) *
                                   (e % 2 ? query.y : query.x);
                        pairs[2 * m] = pair_of_inputs(o[0], o[1]);
                        pairs[2 * m + 1] = pair_of_inputs(o[2], o[3]);
                    }
                    store_matrices_transposed(to_tile + 8 * n * SPAN_BYTES, pairs);
                }
                __syncwarp();
                INPUT* const o = p.o + ((long long)block.token_of(turn) * p.value_heads + block.head) * VD + first_column;
                store_turned(o, (long long)p.value_heads * VD, tile, warp, lane, block.length_of(turn));
                __syncwarp();
            }
        }
        if (Output) warp_arrive(s.output_free + stage, lane);
        if (thread == 0) {
            if (CHAINS == 1) {
                barrier_wait(s.chain_free + stage, turn / TURNS & 1);
                block.fill_chain(turn + TURNS);
            }
            if (Output) {
                barrier_wait(s.output_free + stage, turn / TURNS & 1);
                block.fill_output(turn + TURNS);
            }
        }
        __syncwarp();
    }
}

template <Pass Of> __device__ __forceinline__ void sweep(const ChunkSweepParams& params) {
    extern __shared__ __align__(1024) u8 shared[];
    const ChunkParams& p = params.chunk;
    if (Of == ENDS) let_next_kernel_start();
    wait_for_kernel_before();
    const Segment segment = segment_of_number(p, params.first_segment + params.segment_step * (int)blockIdx.z);
    const bool identity = Of == ENDS && blockIdx.x >= VD / COLUMNS; // blocks beyond the columns of V take those of the identity
    if (Of == ENDS && (segment.last || (identity && segment.first))) return;
    Shared& s = *(Shared*)shared;
    const int first_column = ((int)blockIdx.x - (identity ? VD / COLUMNS : 0)) * COLUMNS, head = blockIdx.y;
    const Block block = {params, s, segment, head, head / (p.value_heads / p.qk_heads), first_column, identity};
    if (threadIdx.x == 0) {
        for (int i = 0; i < TURNS; ++i) {
            barrier_init(s.chain_filled + i);
            barrier_init(s.chain_free + i, 4);
            s.chain_left[i] = 0;
            barrier_init(s.output_filled + i);
            barrier_init(s.output_free + i, 4);
        }
        for (int i = 0; i < CHAINS; ++i) {
            barrier_init(s.state_ready + i, 4);
            barrier_init(s.writes_ready + i, 4);
            barrier_init(s.state_free + i, 4);
            barrier_init(s.writes_free + i, 4);
        }
    }
    __syncthreads();
    if (threadIdx.x < CHAIN_THREADS) {
        if (CHAINS == 2) take_registers<CHAIN_REGISTERS>();
        run_chain<Of>(block);
    } else {
        if (CHAINS == 2) give_registers<OUTPUT_REGISTERS>();
        run_output<Of>(block);
    }
}
#define SWEEP(name, of)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) name(const __grid_constant__ ChunkSweepParams params) { \
        sweep<of>(params);                                                                                               \
    }
#else
#define SWEEP(name, of) \
    extern "C" __global__ void name(const __grid_constant__ ChunkSweepParams params) {}
#endif

// Grid: V / COLUMNS, HV, segments.
SWEEP(chunk_forward, OUTPUT)
SWEEP(chunk_states, STATES)
#if CHANNELS
SWEEP(chunk_retain, BOTH)
#endif
#if CUT
// Grid: (V + K) / COLUMNS, HV, segments.
static_assert(KD % COLUMNS == 0, "the columns of a block divide K where sequences are cut");
SWEEP(chunk_segment_ends, ENDS)
#endif
