// Forward of the chunk form of GDN in one sweep, for Hopper: what chunk_prepare.cu and chunk_forward.cu do together, without
// keeping anything between them.
//
//   q, k (T, HK, K), v (T, HV, V), g, beta (T, HV), initial_state  ->  o (T, HV, V), final_state
//
// A block takes one segment of a sequence, one value head and 64 CONSUMERS columns of V. Its warpgroups have two roles:
//
//   consumers  64 columns of V each. S^T (64 x K) stays in binary32 accumulators, and is cast to the left operand of
//              R^T = beta v^T - (beta e^G k S)^T,  U^T = R^T T^T,  o^T = s (e^G S^T q + U^T P^T),  S^T <- e^{G_C} S^T + U^T k
//   preparer   one chunk ahead: brings q, k and v by the copy engine, turns rows of q and k into operands (K', Q', chunk.cuh)
//              where they lie, and makes T = (I + L)^-1, the scores P and the coefficients.
//
// The output of a chunk is finished while the first product of the next one runs. Scales of f16 operands are those of
// chunk_forward.cu with one warp to a group: one for a warp's 16 columns of V and a whole chunk.
//
// Compiled in besides what chunk.cuh says: CONSUMERS, 1 or 2.
#include "chunk_fused_prepare.cuh"

#if HOPPER
// The thread's number in its warpgroup, asked for where it is needed: what follows from it would take registers all the time.
__device__ __forceinline__ u32 thread_of_warpgroup() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % 128;
}
// Where a lane's row of 8 numbers is, of four matrices: 16 tokens times the 16 columns of its warp.
__device__ __forceinline__ u32 matrix_of_lane() {
    const u32 thread = thread_of_warpgroup(), lane = thread % 32;
    return place_in_tile((lane & 7) + (lane >> 4) * 8, thread / 32 * 16 + ((lane >> 3) & 1) * 8);
}

// As weight_tokens, with loads that are not brought forward.
__device__ __forceinline__ void weight_tokens_late(OwnTokens& tiles, const float* weight, float factor, const Place& at) {
    const u32 from = shared_address(weight + 2 * at.quad);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        float2 w;
        asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];" : "=f"(w.x), "=f"(w.y) : "r"(from + 32 * n));
        weight_columns(tiles[n], w, factor);
    }
}

template <bool Output> __device__ __forceinline__ void consume(const Block& block) {
    constexpr bool Rest = !Output; // errors of a segment's end stay in all that follows
    const ChunkParams& p = block.params.chunk;
    Shared& s = block.s;
    const Segment& segment = block.segment;
    const Place at = place_of_warp();
    const int consumer = threadIdx.x / 128, turns = block.turns();
    const int first_column = block.first_column + 16 * at.group;
    const u32 in_values = VALUES_AT + consumer * TILE_BYTES;
    OwnState state;
    const long long of_segment = (long long)segment.number * p.value_heads + block.head;
    const long long of_sequence = (long long)segment.sequence * p.value_heads + block.head;
    const bool turned = p.state_transposed;
    if (!Output && block.identity)
        load_identity(state, first_column, at);
    else if (segment.first)
        load_state(state, p.initial_state, state_place(of_sequence, turned, VD, first_column, at));
    else
        load_state(state, Output ? p.segment_states : nullptr, state_place(of_segment, true, VD, first_column, at));
    float largest_state = largest_of(state);
    Scale held = {1.0f, 1.0f};

    OwnTokens output, right;
    float output_factor = 0.0f; // of the output that is still to be written, besides QUERY
    float output_unit;          // of the product of the state with the queries
    Left rounded[4], rest[4];   // R^T and what rounding left of it
    Scale right_scale;

    // Brings the output of a chunk to memory, and gives its place free.
    auto finish = [&](int turn) {
        if (Output) {
            weight_tokens(output, s.coefficients[turn % READY] + QUERY * CHUNK, output_factor * p.scale_unit, at);
            u8* const tile = (u8*)s.turns[turn % TURNS] + in_values;
            const u32 to = shared_address(tile) + matrix_of_lane();
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                u32 pairs[4];
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const float* x = output[n + m / 2] + m % 2 * 2;
                    pairs[m] = pair_of_inputs(x[0], x[1]);
                }
                store_matrices_transposed(to + 8 * n * SPAN_BYTES, pairs);
            }
            fence_shared_stores(); // the copy engine writes here next
            __syncwarp();
            const u32 thread = thread_of_warpgroup(), part = thread % 2, own_token = thread % 32 / 2;
            INPUT* const o = p.o + ((long long)block.token_of(turn) * p.value_heads + block.head) * VD + block.first_column + consumer * SPAN +
                             thread / 32 * 16 + 8 * part;
#pragma unroll
            for (int i = 0; i < CHUNK / 16; ++i) {
                const int token = 16 * i + own_token;
                const uint4 vector = *(const uint4*)(tile + place_in_tile(token, thread / 32 * 16 + 8 * part));
                if (token < block.length_of(turn)) *(uint4*)(o + (long long)token * p.value_heads * VD) = vector;
            }
        }
        __syncwarp();
        if (at.lane == 0) barrier_arrive(s.used + turn % READY);
    };

    // What a chunk reads from the state: R^T, and the part of the output. `before`: the output of the chunk before is still to be written.
    auto read = [&](int turn, bool before) {
        const u32 tiles = shared_address(s.turns[turn % TURNS]);
        const float* weight = s.coefficients[turn % READY];
        rescale(state, held, scale_for(largest_state));
        Left left[KD / 16];
#pragma unroll
        for (int c = 0; c < KD / 16; ++c) left[c] = make_left(state[2 * c], state[2 * c + 1], 1.0f);
        barrier_wait(s.ready + turn % READY, turn / READY & 1);
        hold(right);
        warpgroup_fence();
        start_left_product(right, left, tiles);
        warpgroup_commit();
        if (before) finish(turn - 1);
        output_unit = held.inverse;
        if (Output) {
            hold(output);
            warpgroup_fence();
            start_left_product(output, left, tiles + QUERIES_AT);
            warpgroup_commit();
        }
        warpgroup_wait<Output ? 1 : 0>();
        hold(right);
        // R^T = beta v^T - (beta e^G k S)^T
        if (!block.identity) barrier_wait(s.filled + turn % TURNS, turn / TURNS & 1);
        const int valid = block.identity ? 0 : block.length_of(turn); // what follows belongs to another sequence
        const u32 from = tiles + in_values + matrix_of_lane();
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            u32 values[4];
            load_matrices_transposed(values, from + 8 * n * SPAN_BYTES);
            if (valid < CHUNK) {
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const int left = valid - 8 * (n + m / 2) - 2 * at.quad;
                    values[m] &= left <= 0 ? 0 : left == 1 ? 0xffffu : 0xffffffffu;
                }
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const float2 beta = *(const float2*)(weight + BETA * CHUNK + 8 * (n + m) + 2 * at.quad);
                float2 read = *(const float2*)(weight + READ * CHUNK + 8 * (n + m) + 2 * at.quad);
                read.x *= held.inverse;
                read.y *= held.inverse;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const u32 pair = values[2 * m + e / 2];
                    const float value = e % 2 ? second_of(pair) : first_of(pair);
                    right[n + m][e] = fmaf(-(e % 2 ? read.y : read.x), right[n + m][e], (e % 2 ? beta.y : beta.x) * value);
                }
            }
        }
        right_scale = scale_for(largest_in_chains(right));
        warpgroup_wait<0>(); // its left operands take the registers that come next
        if (Output) hold(output);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            rounded[c] = make_left(right[2 * c], right[2 * c + 1], right_scale.factor);
            rest[c] = make_left_rest(right[2 * c], right[2 * c + 1], right_scale.factor, rounded[c]);
        }
    };

    if (turns > 0) read(0, false);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        const u32 tiles = shared_address(s.turns[turn % TURNS]), inverse = shared_address(s.inverse + turn % READY);
        const float* weight = s.coefficients[turn % READY];
        // U^T = R^T T^T
        OwnTokens& writes = right;
        hold(writes);
        warpgroup_fence();
        start_left_product(writes, rounded, inverse);
        start_more_product(writes, rest, inverse);
        warpgroup_commit();
        warpgroup_wait<0>();
        hold(writes);
        const float largest_write = largest_of(writes) * right_scale.inverse;
        const Scale plain = scale_for(largest_write);
        Left own[4];
        if (Output) {
#pragma unroll
            for (int c = 0; c < 4; ++c) own[c] = make_left(writes[2 * c], writes[2 * c + 1], ratio(plain, right_scale));
        }
        // The largest of what is left: a decay may have wiped out the largest U.
        weight_tokens_late(writes, weight + WRITE * CHUNK, right_scale.inverse, at);
        const Scale added = scale_for(largest_of(writes));
        const float decay = weight[DECAY * CHUNK + CHUNK - 1], largest_before = largest_state;
        largest_state = fmaf(decay, largest_state, MOST_GROWTH * 32768.0f * added.inverse);
        const Scale next = scale_for(largest_state);

        // S^T <- e^{G_C} S^T + (e^{G_C - G} U)^T K'
        Left weighted[4], weighted_rest[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            weighted[c] = make_left(writes[2 * c], writes[2 * c + 1], added.factor);
            if (Rest) {
                weighted_rest[c] = make_left_rest(writes[2 * c], writes[2 * c + 1], added.factor, weighted[c]);
                scale_left(weighted_rest[c], next.factor * added.inverse);
            }
            scale_left(weighted[c], next.factor * added.inverse);
        }
        multiply(state, decay * ratio(next, held));
        held = next;
        hold(state);
        warpgroup_fence();
        start_state_product(state, weighted, tiles);
        if (Rest) start_state_product(state, weighted_rest, tiles);
        warpgroup_commit();
        if (Output) {
            // o^T = s (e^G (S^T q) + U^T P^T), all in the units of the smaller scale
            const Scale common = smaller(plain, scale_for(largest_before));
#pragma unroll
            for (int c = 0; c < 4; ++c) scale_left(own[c], common.factor * plain.inverse);
            weight_tokens(output, weight + DECAY * CHUNK, common.factor * output_unit, at);
            hold(output);
            warpgroup_fence();
            start_more_product(output, own, shared_address(s.scores + turn % READY));
            warpgroup_commit();
            output_factor = common.inverse;
        }
        warpgroup_wait<0>();
        if (Output) hold(output);
        hold(state);
        if (turn % LOOK_UP_EVERY == LOOK_UP_EVERY - 1) largest_state = largest_of(state) * held.inverse;
        if (turn + 1 < turns)
            read(turn + 1, true);
        else
            finish(turn);
    }

    if (Output && segment.last)
        store_state(state, p.final_state, state_place(of_sequence, turned, VD, first_column, at), held.inverse);
    if (!Output) {
        if (block.identity) {
            store_state(state, p.transitions, state_place(2 * of_segment, true, KD, first_column, at), held.inverse);
            store_state(state, p.transitions, state_place(2 * of_segment + 1, false, KD, first_column, at), held.inverse);
        } else
            store_state(state, p.segment_states, state_place(of_segment + p.value_heads, true, VD, first_column, at),
                        held.inverse);
    }
}

template <bool Output> __device__ __forceinline__ void run(const ChunkFusedParams& params) {
    extern __shared__ __align__(1024) u8 shared[];
    const ChunkParams& p = params.chunk;
    if (!Output) let_next_kernel_start();
    wait_for_kernel_before();
    const Segment segment = segment_of_block(p);
    const bool identity = !Output && blockIdx.x >= VD / COLUMNS;
    if (!Output && (segment.last || (identity && segment.first))) return;
    Shared& s = *(Shared*)shared;
    const int first_column = ((int)blockIdx.x - (identity ? VD / COLUMNS : 0)) * COLUMNS, head = blockIdx.y;
    const Block block = {params, s, segment, head, head / (p.value_heads / p.qk_heads), first_column, identity, Output};

    if (threadIdx.x == CONSUMER_THREADS) {
        for (int i = 0; i < TURNS; ++i) barrier_init(s.filled + i);
        for (int i = 0; i < READY; ++i) {
            barrier_init(s.ready + i, 4);
            barrier_init(s.used + i, 4 * CONSUMERS);
        }
        block.fill(0);
        block.fill(1);
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMER_THREADS) {
        if (CONSUMERS == 2) give_registers<104>();
        prepare(block);
    } else {
        if (CONSUMERS == 2) take_registers<200>();
        consume<Output>(block);
    }
}
#endif

// Grid: V / COLUMNS, HV, segments.
extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    chunk_fused_forward(const __grid_constant__ ChunkFusedParams params) {
#if HOPPER
    run<true>(params);
#endif
}

#if CUT
// Grid: (V + K) / COLUMNS, HV, segments.
extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    chunk_fused_segment_ends(const __grid_constant__ ChunkFusedParams params) {
#if HOPPER
    static_assert(KD % COLUMNS == 0, "the columns of a block divide K where sequences are cut");
    run<false>(params);
#endif
}
#endif
