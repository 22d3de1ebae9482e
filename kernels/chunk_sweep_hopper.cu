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
//   mover     a warp that brings the tiles of the next chunks by the copy engine, and three that take o to memory, where a chain
//             makes o^T = s (e^G S^T q + U^T P^T) by itself
//   output    in place of the mover where operands are kept for the backward, and for GDN-2, whose tiles leave no room for more
//             than two chunks: it follows the chains half a chunk behind, gets S^T and U^T as operands in shared memory, and makes
//             o^T of them or keeps them. One of its threads brings the tiles.
//
// Compiled into the functions of chunk_forward.cu, with the same precision. Scales of f16 operands are those of one warp to a
// group there: one for a warp's 16 columns of V and a whole chunk. Blocks of T and P above the diagonal are zeros.
//
// Compiled in besides what chunk.cuh says: CHAINS, 1 or 2, which changes no bit.
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
enum Pass { OUTPUT, STATES, ENDS, BOTH };
template <Pass Of> constexpr bool IS_ALONE = !CHANNELS && (Of == OUTPUT || Of == ENDS); // with a mover
// Of a thread where there are two chains: of the chains, and of the output or the mover.
template <Pass Of> constexpr int CHAIN_REGISTERS = IS_ALONE<Of> ? 232 : 192;
template <Pass Of> constexpr int OTHER_REGISTERS = IS_ALONE<Of> ? 40 : 120;
constexpr float LARGEST_POWER = 1.7014118e38f; // 2^127
constexpr float LEAST_PART = 8.2718061e-25f;   // 2^-80
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

// What a chain hands to the output.
template <bool Alone> struct Handed {
    Tile state[CHAINS][SPANS]; // S^T, rows are columns of V
    Tile writes[CHAINS];       // U^T
    float state_unit[CHAINS][4], write_unit[CHAINS][4]; // what turns the operands of a warp's rows back
    Barrier state_ready[CHAINS], writes_ready[CHAINS];  // by a chain
    Barrier state_free[CHAINS], writes_free[CHAINS];    // by the output
};
// Or o to the mover, warp by warp.
template <> struct Handed<true> {
    Barrier o_ready[4 * CHAINS], o_free[4 * CHAINS];
};
template <bool Alone> struct Shared {
    static constexpr int TURNS = Alone ? 3 : 2; // chunks whose tiles are in shared memory at once
    Tile chain[TURNS][CHAIN_TILES];
    Tile output[TURNS][OUTPUT_TILES];
    Tile turned[CHAINS]; // o or U on their way to memory, rows are tokens
    Handed<Alone> handed;
    float coefficients[TURNS][COEFFICIENT_NUMBERS];
    float output_coefficients[Alone ? 1 : TURNS][2 * CHUNK]; // DECAY and QUERY, where an output reads them
    Barrier chain_filled[TURNS], chain_free[TURNS];   // by the copies, by the chains
    u32 chain_left[TURNS];                            // where there are two and an output: their warps that have read the tiles
    Barrier output_filled[TURNS], output_free[TURNS]; // by the copies, by the output
};
static_assert(QUERY == DECAY + 1, "one copy brings both");
template <bool Alone> constexpr u32 TILES_AT_ONCE =
    Shared<Alone>::TURNS * (CHAIN_TILES + OUTPUT_TILES) + CHAINS * (Alone ? 1 : SPANS + 2);
constexpr u32 OTHER_BYTES = (CHANNELS ? 3 : 2) * 4096; // no less than what is in shared memory besides tiles
static_assert(sizeof(Shared<false>) <= TILES_AT_ONCE<false> * TILE_BYTES + OTHER_BYTES, "the launch has as much");
static_assert(CHANNELS || sizeof(Shared<true>) <= TILES_AT_ONCE<true> * TILE_BYTES + OTHER_BYTES, "the launch has as much");

__device__ __forceinline__ int number_of_block(const ChunkSweepParams& params) {
    return params.first_segment + params.segment_step * (int)blockIdx.z;
}

// What all roles know of a block.
template <bool Alone> struct Block {
    static constexpr int TURNS = Shared<Alone>::TURNS;
    const ChunkSweepParams& params;
    Shared<Alone>& s;
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
        barrier_expect(barrier, OUTPUT_TILES * TILE_BYTES + (Alone ? 0 : 2 * CHUNK * 4));
        copy_tile(to, params.queries, {0, 0, row_of(turn), 0}, barrier);
        copy_tile(to + SCORES_AT, params.scores, {0, 0, (int)square_of(turn) * CHUNK, 0}, barrier);
        if constexpr (!Alone)
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

// o^T = s (e^G S^T q + U^T P^T), in two steps: S^T q in units of U, then, with U^T P^T added to it, its elements.
// Units of U are no less than 2^-80 of those of S (clamp_unit), so the first stays finite.
__device__ __forceinline__ void weigh_read(OwnTokens& read, const float* decays, float state_unit, float write_unit, u32 quad) {
    const float unit = state_unit * inverse_of(write_unit);
#pragma unroll
    for (int n = 0; n < 8; ++n) weight_columns(read[n], *(const float2*)(decays + 8 * n + 2 * quad), unit);
}
__device__ __forceinline__ float clamp_unit(float write_unit, float state_unit) { return fmaxf(write_unit, state_unit * LEAST_PART); }
__device__ __forceinline__ void turn_output(u32 to, const OwnTokens& sum, const float* queries, float scale_unit, float write_unit,
                                            u32 quad) {
    const float unit = __fmul_rz(scale_unit, write_unit); // never infinite, since the sum may be zero; likewise below
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        u32 pairs[4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float2 query = *(const float2*)(queries + 8 * (n + m) + 2 * quad);
            query.x = __fmul_rz(query.x, unit);
            query.y = __fmul_rz(query.y, unit);
            pairs[2 * m] = pair_of_inputs(sum[n + m][0] * query.x, sum[n + m][1] * query.y);
            pairs[2 * m + 1] = pair_of_inputs(sum[n + m][2] * query.x, sum[n + m][3] * query.y);
        }
        store_matrices_transposed(to + 8 * n * SPAN_BYTES, pairs);
    }
}

// Brings a state to the wanted scale where the one that it is held in is too large, or 8 times too small.
__device__ __forceinline__ void keep_in_range(OwnState& state, Scale& held, Scale wanted) {
    if (wanted.factor < held.factor || wanted.factor > 8.0f * held.factor) rescale(state, held, wanted);
}

template <Pass Of> __device__ __forceinline__ void run_chain(const Block<IS_ALONE<Of>>& block) {
    constexpr bool Output = Of == OUTPUT || Of == BOTH, Keep = Of == STATES || Of == BOTH, Alone = IS_ALONE<Of>;
    constexpr int TURNS = Shared<Alone>::TURNS;
    // The rows of GDN-2 are rounded for their decay, so the rest of the other operand alone would not help.
    constexpr bool Rest = !CHANNELS && Of != OUTPUT;
    const ChunkParams& p = block.params.chunk;
    Shared<Alone>& s = block.s;
    const Segment& segment = block.segment;
    const Place at = place_of_warp();
    const u32 chain = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
    const int first_column = block.first_column + 16 * at.group, turns = block.turns();
    const LeftPlace place(warp, at.lane);
    OwnState state;
    const bool turned = p.state_transposed;
    {
        const long long of_segment = (long long)segment.number * p.value_heads + block.head;
        const long long of_sequence = (long long)segment.sequence * p.value_heads + block.head;
        if (Of == ENDS && block.identity)
            load_identity(state, first_column, at);
        else if (segment.first)
            load_state(state, p.initial_state, state_place(of_sequence, turned, VD, first_column, at));
        else
            load_state(state, Of == ENDS ? nullptr : p.segment_states, state_place(of_segment, true, VD, first_column, at));
    }
    float largest_state = largest_of(state);
    Scale held = {1.0f, 1.0f}; // `state` is S times held.factor

#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        const int stage = turn % TURNS;
        const u32 tiles = shared_address(s.chain[stage]);
        const float* weight = s.coefficients[stage];
        const long long part = block.square_of(turn) * (VD / 16) + first_column / 16;

        // Exactly where the largest element was looked up: a launch may begin there with the state of the one before it.
        if (turn % LOOK_UP_EVERY == 0) rescale(state, held, scale_for(largest_state));
        else keep_in_range(state, held, scale_for(largest_state));
        const float state_unit = held.inverse;
        Left left[KD / 16];
#pragma unroll
        for (int c = 0; c < KD / 16; ++c) left[c] = make_left(state[2 * c], state[2 * c + 1], 1.0f);
        barrier_wait(s.chain_filled + stage, turn / TURNS & 1);
        OwnTokens right;
        hold(right);
        warpgroup_fence();
        start_left_product(right, left, tiles);
        warpgroup_commit();
        OwnTokens read; // S^T q, then o^T
        if constexpr (Alone && Output) {
            barrier_wait(s.output_filled + stage, turn / TURNS & 1);
            hold(read);
            warpgroup_fence();
            start_left_product(read, left, shared_address(s.output[stage]));
            warpgroup_commit();
        }
        auto hand_state = [&] {
            if constexpr (!Alone && (Output || Keep)) {
                if (turn > 0) barrier_wait(s.handed.state_free + chain, turn - 1 & 1);
                const u32 to = shared_address(s.handed.state[chain]);
#pragma unroll
                for (int c = 0; c < KD / 16; ++c) store_matrices(to + c / 4 * TILE_BYTES + place(c % 4), left[c].r);
                if (at.lane == 0) s.handed.state_unit[chain][warp] = state_unit;
                warp_arrive(s.handed.state_ready + chain, at.lane);
                if (Keep) keep_scale(p.state_scales, part, state_unit, at);
            }
        };
        // What has to come from shared memory is asked for before a product is waited for.
        const float decay = largest_decay(weight);
        float2 reads[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            reads[n] = *(const float2*)(weight + READ * CHUNK + 8 * n + 2 * at.quad);
            reads[n].x *= state_unit;
            reads[n].y *= state_unit;
        }
        OwnTokens values;
        load_writes(values, tiles, chain, weight, block.identity ? 0 : block.length_of(turn), at);
        if (CHAINS == 2) hand_state(); // two chains have no registers to hold it longer
        warpgroup_wait<Alone && Output ? 1 : 0>();
        hold(right);

        // R^T = beta v^T - (beta e^G k S)^T
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) right[n][e] = fmaf(-(e % 2 ? reads[n].y : reads[n].x), right[n][e], values[n][e]);
        const Scale right_scale = scale_for(largest_in_chains(right));
        Left rounded[4], rest[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) rounded[c] = make_left(right[2 * c], right[2 * c + 1], right_scale.factor);
        // One of the rests at once where registers are few: it takes the place of what it is made of.
        constexpr int AtOnce = Alone && Output && CHAINS == 2 ? 1 : 0;
        auto make_rest = [&](int c) { rest[c] = make_left_rest(right[2 * c], right[2 * c + 1], right_scale.factor, rounded[c]); };
        if (AtOnce) make_rest(0);

        // U^T = R^T T^T. What rounding leaves of R is multiplied too: it is the cheapest of the roundings between S and U to avoid.
        OwnTokens writes;
        hold(writes);
        warpgroup_fence();
        start_left_product(writes, rounded, tiles + INVERSE_AT);
        warpgroup_commit();
        hold(right);
#pragma unroll
        for (int c = AtOnce; c < 4; ++c) make_rest(c);
        warpgroup_fence();
        start_more_product(writes, rest, tiles + INVERSE_AT);
        warpgroup_commit();
        // What others wait for, and what the state needs anyway, while the tensor cores are busy.
        if (CHAINS == 1) hand_state();
        decay_state(state, decay, weight, 1.0f, at);
        hold(state);
        float2 kept[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            kept[n] = *(const float2*)(weight + WRITE * CHUNK + 8 * n + 2 * at.quad);
            kept[n].x *= right_scale.inverse;
            kept[n].y *= right_scale.inverse;
        }
        warpgroup_wait<0>();
        hold(writes);
        if constexpr (Alone && Output) hold(read);

        // S^T <- e^{G_C} S^T + (e^{G_C - G} U)^T K'. The largest of what is left: a decay may have wiped out the largest U.
        float most[4] = {}, plain_most[4] = {};
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float of_both = fmaxf(fabsf(writes[n][e]), fabsf(writes[n][e + 2]));
                const int chain = 2 * (n % 2) + e;
                plain_most[chain] = fmaxf(plain_most[chain], of_both);
                most[chain] = fmaxf(most[chain], fabsf(of_both * (e ? kept[n].y : kept[n].x)));
            }
        const Scale added = scale_for(warp_max(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]))));
        // The scale says what the largest of the added operands is, up to a factor of 2.
        largest_state = fmaf(decay, largest_state, MOST_GROWTH * 32768.0f * added.inverse);
        keep_in_range(state, held, scale_for(largest_state));
        Left weighted[4], weighted_rest[4];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            kept[n].x = fminf(kept[n].x * held.factor, LARGEST_POWER);
            kept[n].y = fminf(kept[n].y * held.factor, LARGEST_POWER);
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
        if constexpr (Output || Keep) {
            const float largest = warp_max(fmaxf(fmaxf(plain_most[0], plain_most[1]), fmaxf(plain_most[2], plain_most[3])));
            const float plain = clamp_unit(scale_for(largest * right_scale.inverse).inverse, state_unit);
            const float unit = ratio({inverse_of(plain), plain}, right_scale);
            Left own[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) own[c] = make_left(writes[2 * c], writes[2 * c + 1], unit);
            if constexpr (Alone) {
                weigh_read(read, weight + DECAY * CHUNK, state_unit, plain, at.quad);
                hold(read);
                warpgroup_fence();
                start_more_product(read, own, shared_address(s.output[stage]) + SCORES_AT);
                warpgroup_commit();
                if (turn > 0) barrier_wait(s.handed.o_free + at.group, turn - 1 & 1);
                warpgroup_wait<0>();
                hold(read);
                turn_output(shared_address(s.turned + chain) + turned_place(warp, at.lane), read, weight + QUERY * CHUNK, p.scale_unit,
                            plain, at.quad);
                warp_arrive(s.handed.o_ready + at.group, at.lane);
            } else {
                if (turn > 0) barrier_wait(s.handed.writes_free + chain, turn - 1 & 1);
#pragma unroll
                for (int c = 0; c < 4; ++c) store_matrices(shared_address(s.handed.writes + chain) + place(c), own[c].r);
                if (at.lane == 0) s.handed.write_unit[chain][warp] = plain;
                warp_arrive(s.handed.writes_ready + chain, at.lane);
                if (Keep) keep_scale(p.write_scales, part, plain, at);
            }
        }
        warpgroup_wait<0>();
        hold(state);
        if (CHAINS == 2 && !Alone) {
            __syncwarp();
            if (at.lane == 0 && is_last<4 * CHAINS>(s.chain_left + stage)) block.fill_chain(turn + TURNS);
            __syncwarp();
        } else {
            warp_arrive(s.chain_free + stage, at.lane);
        }
        if (turn % LOOK_UP_EVERY == LOOK_UP_EVERY - 1) largest_state = largest_in_chains(state) * held.inverse;
    }

    // Once more, so that none of it is in registers all the time.
    const Segment after = segment_of_number(p, number_of_block(block.params));
    const long long of_segment = (long long)after.number * p.value_heads + block.head;
    const long long of_sequence = (long long)after.sequence * p.value_heads + block.head;
    if (Output && after.last)
        store_state(state, p.final_state, state_place(of_sequence, turned, VD, first_column, at), held.inverse);
    if (Output && block.params.relay && !after.last)
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

template <Pass Of> __device__ __forceinline__ void run_output(const Block<false>& block) {
    constexpr bool Output = Of == OUTPUT || Of == BOTH, Keep = Of == STATES || Of == BOTH;
    constexpr int TURNS = Shared<false>::TURNS;
    const ChunkParams& p = block.params.chunk;
    Shared<false>& s = block.s;
    Handed<false>& handed = s.handed;
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
            OwnTokens read;
            barrier_wait(handed.state_ready + chain, turn & 1);
            Left left[KD / 16];
            if (Output) {
#pragma unroll
                for (int c = 0; c < KD / 16; ++c) load_matrices(left[c].r, shared_address(handed.state[chain] + c / 4) + place(c % 4));
                hold(read);
                warpgroup_fence();
                start_left_product(read, left, tiles);
                warpgroup_commit();
            }
            const float state_unit = handed.state_unit[chain][warp];
            if (Keep) store_rows(p.states + (block.square_of(turn) * VD + first_column) * KD, handed.state[chain], warp, lane);
            warp_arrive(handed.state_free + chain, lane);
            if (Output) {
                warpgroup_wait<0>();
                hold(read);
            }

            barrier_wait(handed.writes_ready + chain, turn & 1);
            const float write_unit = handed.write_unit[chain][warp];
            Left own[4];
            if (Output) {
#pragma unroll
                for (int c = 0; c < 4; ++c) load_matrices(own[c].r, shared_address(handed.writes + chain) + place(c));
                weigh_read(read, weight, state_unit, write_unit, quad);
                hold(read);
                warpgroup_fence();
                start_more_product(read, own, tiles + SCORES_AT);
                warpgroup_commit();
            }
            if (Keep) {
                // Turned around: rows become tokens.
                const u32 from = shared_address(handed.writes + chain);
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
            warp_arrive(handed.writes_free + chain, lane);
            if (Output) {
                warpgroup_wait<0>();
                hold(read);
                turn_output(to_tile, read, weight + CHUNK, p.scale_unit, write_unit, quad);
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

// Brings the tiles of all chunks, and takes o to memory.
template <Pass Of> __device__ __forceinline__ void run_mover(const Block<true>& block) {
    constexpr int TURNS = Shared<true>::TURNS;
    const ChunkParams& p = block.params.chunk;
    Shared<true>& s = block.s;
    const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int turns = block.turns();
    if (warp == 3) {
        if (lane != 0) return;
#pragma unroll 1
        for (int turn = 0; turn < turns; ++turn) {
            if (turn >= TURNS) barrier_wait(s.chain_free + turn % TURNS, turn / TURNS - 1 & 1);
            block.fill_chain(turn);
            if (Of == OUTPUT) block.fill_output(turn);
        }
        return;
    }
#pragma unroll 1
    for (int turn = 0; turn < (Of == OUTPUT ? turns : 0); ++turn) {
        INPUT* const o = p.o + ((long long)block.token_of(turn) * p.value_heads + block.head) * VD + block.first_column;
#pragma unroll 1
        for (u32 of = warp; of < 4 * CHAINS; of += 3) {
            barrier_wait(s.handed.o_ready + of, turn & 1);
            store_turned(o + of / 4 * SPAN, (long long)p.value_heads * VD, s.turned[of / 4], of % 4, lane, block.length_of(turn));
            warp_arrive(s.handed.o_free + of, lane);
        }
    }
}

template <Pass Of> __device__ __forceinline__ void sweep(const ChunkSweepParams& params) {
    extern __shared__ __align__(1024) u8 shared[];
    const ChunkParams& p = params.chunk;
    constexpr bool Alone = IS_ALONE<Of>;
    if (Of == ENDS) let_next_kernel_start();
    wait_for_kernel_before();
    const Segment segment = segment_of_number(p, number_of_block(params));
    const bool identity = Of == ENDS && blockIdx.x >= VD / COLUMNS; // blocks beyond the columns of V take those of the identity
    if (Of == ENDS && (segment.last || (identity && segment.first))) return;
    constexpr int TURNS = Shared<Alone>::TURNS;
    Shared<Alone>& s = *(Shared<Alone>*)shared;
    const int first_column = ((int)blockIdx.x - (identity ? VD / COLUMNS : 0)) * COLUMNS, head = blockIdx.y;
    const Block<Alone> block = {params, s, segment, head, head / (p.value_heads / p.qk_heads), first_column, identity};
    if (threadIdx.x == 0) {
        for (int i = 0; i < TURNS; ++i) {
            barrier_init(s.chain_filled + i);
            barrier_init(s.chain_free + i, Alone ? 4 * CHAINS : 4);
            s.chain_left[i] = 0;
            barrier_init(s.output_filled + i);
            barrier_init(s.output_free + i, 4);
        }
        if constexpr (Alone) {
            for (int i = 0; i < 4 * CHAINS; ++i) {
                barrier_init(s.handed.o_ready + i);
                barrier_init(s.handed.o_free + i);
            }
        } else {
            for (int i = 0; i < CHAINS; ++i) {
                barrier_init(s.handed.state_ready + i, 4);
                barrier_init(s.handed.writes_ready + i, 4);
                barrier_init(s.handed.state_free + i, 4);
                barrier_init(s.handed.writes_free + i, 4);
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < CHAIN_THREADS) {
        if (CHAINS == 2) take_registers<CHAIN_REGISTERS<Of>>();
        run_chain<Of>(block);
    } else {
        if (CHAINS == 2) give_registers<OTHER_REGISTERS<Of>>();
        if constexpr (Alone) run_mover<Of>(block);
        else run_output<Of>(block);
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
