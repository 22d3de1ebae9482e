// Forward sweep of the chunk form of GDN, for 16 columns of V per group of warps
// (chunk_sweep.cuh):
//
//   R = beta v - (beta e^G k) S      U = T R      o = s e^G q S + P U      S <- e^{G_C} S + (e^{G_C - G} k)^T U
//
//   v (T, HV, V), the workspace of chunk_prepare.cu, initial_state  ->  o (T, HV, V), final_state
//
// Everything is computed transposed, with S^T as the left operand. Compiled three times: chunk_forward gives o and the
// final state; chunk_states gives the backward what it needs, the state at the start of each chunk and U, and no output;
// chunk_segment_ends gives, for a sequence that is cut, what a segment makes of a zero state and of each unit vector
// (chunk_join.cu makes of these the state at the start of each segment). For GDN-2 chunk_retain is chunk_forward and
// chunk_states at once, with the bits of both.
//
// For GDN-2 the decays are part of the rows, so R = w v - B' S, o = Q' S + P U and S <- Diag(e^{G_C}) S + K'^T U, up to the
// powers of two that READ, WRITE, QUERY and DECAY are then.
//
// f16 operands: S is held times a power of two that follows its largest element, and R and U get their own.
#include "chunk_sweep.cuh"

// What the two warps of a group tell each other in a chunk; a single warp needs no such memory.
template <bool Rest> struct Exchange {
    Sums sums[SPLIT];       // of K' S, then of Q' S
    Passed right[2];        // R of the first half, and what rounding left of it
    Passed plain;           // U of the first half, for the scores
    PassedUpdate<Rest> weighted[SPLIT]; // e^{G_C - G} rk U, for the state
    float largest_state[SPLIT];
};

enum Pass { OUTPUT, STATES, ENDS, BOTH };

template <Pass Of> __device__ __forceinline__ void sweep(const ChunkParams& p) {
    constexpr bool Output = Of == OUTPUT || Of == BOTH, Keep = Of == STATES || Of == BOTH;
    // The rows of GDN-2 are rounded for their decay, so the rest of the other operand alone would not help.
    constexpr bool Rest = HAS_REST && !CHANNELS && Of != OUTPUT;
    extern __shared__ __align__(128) u8 shared[];
    constexpr int EXCHANGES = SPLIT == 2 ? GROUPS * (int)sizeof(Exchange<Rest>) : 0;
    const int head = blockIdx.y;
    Segment segment = segment_of_block(p);
    if (Of == ENDS) let_next_kernel_start();
    wait_for_kernel_before();
    // Blocks beyond the columns of V take those of the identity.
    const bool identity = Of == ENDS && blockIdx.x >= VD / COLUMNS;
    if (Of == ENDS && (segment.last || (identity && segment.first))) return;
    const int begin = segment.begin, end = segment.end;
    if (identity) segment.tokens = 0; // v = 0
    const int first_of_block = ((int)blockIdx.x - (identity ? VD / COLUMNS : 0)) * COLUMNS;
    Pipeline<Output, CHANNELS> pipeline = {p, p.v, begin, 1, end - begin, segment.token, segment.tokens, head,
                               head / (p.value_heads / p.qk_heads), identity ? 0 : first_of_block,
                               shared + EXCHANGES};
#if BULK_COPY
    __shared__ Barrier arrived[STAGES];
    pipeline.arrived = arrived;
#endif
    const Place at = place_of_warp();
    Exchange<Rest>& x = ((Exchange<Rest>*)shared)[at.group];
    const int first_column = first_of_block + 16 * at.group;

    pipeline.begin();
    OwnState state;
    const long long of_segment = (long long)segment.number * p.value_heads + head;
    const long long of_sequence = (long long)segment.sequence * p.value_heads + head;
    const bool turned = p.state_transposed;
    if (identity)
        load_identity(state, first_column, at);
    else if (segment.first)
        load_state(state, p.initial_state, state_place(of_sequence, turned, VD, first_column, at));
    else
        load_state(state, Of == ENDS ? nullptr : p.segment_states, state_place(of_segment, true, VD, first_column, at));
    float largest_state = largest_of(state);
    Scale held = {1.0f, 1.0f}; // `state` is S times held.factor

    for (int chunk = begin; chunk < end; ++chunk) {
        const int turn = chunk - begin;
        const Stage stage = pipeline.stage(turn);
        pipeline.wait(turn);
        const float* weight = stage.coefficients;
        const long long square = (long long)chunk * p.value_heads + head;
        const long long part = square * (VD / 16) + first_column / 16;

        rescale(state, held, scale_for(largest_state));
        if (Keep) {
            keep_state(state, p.states + square * VD * KD, first_column, at);
            keep_scale(p.state_scales, part, held.inverse, at);
        }

        // R^T = beta v^T - (beta e^G k S)^T
        OwnTokens right, writes, output;
        product_with_tokens(right, x.sums[at.half], state, stage.keys, held.inverse, at);
        load_values(writes, stage.values, at);
#if CHANNELS
        {
            OwnTokens gates;
            load_columns<GATE, GATE_PITCH>(gates, stage.gates, at);
#pragma unroll
            for (int n = 0; n < C_PART / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) writes[n][e] *= gates[n][e];
        }
#endif
        group_sync(at);
        const float read_unit = add_sums(right, held.inverse, x.sums[SPLIT - 1 - at.half], at);
#pragma unroll
        for (int n = 0; n < C_PART / 8; ++n) {
            float2 beta = make_float2(1.0f, 1.0f);
            if (!CHANNELS) beta = *(const float2*)(weight + BETA * CHUNK + at.first_token + 8 * n + 2 * at.quad);
            float2 read = *(const float2*)(weight + READ * CHUNK + at.first_token + 8 * n + 2 * at.quad);
            read.x *= read_unit;
            read.y *= read_unit;
#pragma unroll
            for (int e = 0; e < 4; ++e)
                right[n][e] = fmaf(-(e % 2 ? read.y : read.x), right[n][e], (e % 2 ? beta.y : beta.x) * writes[n][e]);
        }
        Scale right_scale = scale_for(largest_of(right));
        if (SPLIT == 2 && at.half == 0) {
            const Operands rounded = operands_of(right, right_scale.factor, right_scale);
            pass(x.right[0], rounded, at);
            if (HAS_REST) pass(x.right[1], rest_of(right, right_scale.factor, rounded), at);
        }
        group_sync(at);
        if (Output) product_with_tokens(output, x.sums[at.half], state, stage.queries, held.inverse, at);

        // U^T = R^T T^T; tokens of the second half need those of the first. What rounding leaves of R is multiplied too: it
        // is the cheapest of the roundings between S and U to avoid.
        clear(writes);
        const operand* inverse = stage.inverse + at.first_token * SQUARE_PITCH;
        if (SPLIT == 2 && at.half == 1) {
            right_scale = smaller(right_scale, x.right[0].scale);
#pragma unroll
            for (int part = 0; part < (HAS_REST ? 2 : 1); ++part) {
                Operands before = take(x.right[part], at);
                bring_to(before, right_scale);
#pragma unroll
                for (int c = 0; c < STEPS; ++c) product_nt(writes, before.left[c], inverse + 16 * c, SQUARE_PITCH);
            }
        }
#pragma unroll
        for (int c = 0; c < STEPS; ++c) {
            const Left rounded = make_left(right[2 * c], right[2 * c + 1], right_scale.factor);
            product_nt(writes, rounded, inverse + at.first_token + 16 * c, SQUARE_PITCH, c);
            if (HAS_REST)
                product_nt(writes, make_left_rest(right[2 * c], right[2 * c + 1], right_scale.factor, rounded),
                           inverse + at.first_token + 16 * c, SQUARE_PITCH, c);
        }
        const float largest_write = largest_of(writes) * right_scale.inverse;
        const Scale plain = scale_for(largest_write);
        const float unit = ratio(plain, right_scale);
        Operands own;
        if (Output) {
            own = operands_of(writes, unit, plain);
            if (SPLIT == 2 && at.half == 0) pass(x.plain, own, at);
        }
        if (Keep) {
            multiply(writes, unit);
            store_columns(writes, stage.values, (Operand*)p.writes + square * CHUNK * VD + first_column, VD, CHUNK, at);
            keep_scale(p.write_scales, part, plain.inverse, at);
        }
        // The largest of what is left: a decay may have wiped out the largest U.
        weight_tokens(writes, weight + WRITE * CHUNK, Keep ? plain.inverse : right_scale.inverse, at);
        const Scale added = scale_for(largest_of(writes));
        Update<Rest> weighted = update_of<Rest>(writes, added), weighted_too;
        float largest_before = largest_state;
        if (SPLIT == 2) {
            pass(x.weighted[at.half], weighted, at);
            if (at.lane == 0) x.largest_state[at.half] = largest_state;
            group_sync(at);
            weighted_too = take(x.weighted[1 - at.half], at);
            largest_before = fmaxf(largest_before, x.largest_state[1 - at.half]);
        }

        if (Output) {
            // o^T = s (e^G (S^T q) + U^T P^T), all in the units of the smallest scale
            const float output_unit = add_sums(output, held.inverse, x.sums[SPLIT - 1 - at.half], at);
            Scale common = smaller(plain, scale_for(largest_before));
            Operands before;
            if (SPLIT == 2 && at.half == 1) {
                before = take(x.plain, at);
                common = smaller(common, before.scale);
                bring_to(before, common);
            }
            bring_to(own, common);
            weight_tokens(output, weight + DECAY * CHUNK, common.factor * output_unit, at);
            const operand* scores = stage.scores + at.first_token * SQUARE_PITCH;
            if (SPLIT == 2 && at.half == 1) {
#pragma unroll
                for (int c = 0; c < STEPS; ++c) product_nt(output, before.left[c], scores + 16 * c, SQUARE_PITCH);
            }
#pragma unroll
            for (int c = 0; c < STEPS; ++c)
                product_nt(output, own.left[c], scores + at.first_token + 16 * c, SQUARE_PITCH, c);
            weight_tokens(output, weight + QUERY * CHUNK, common.inverse * p.scale_unit, at);
            INPUT* to = p.o + ((long long)pipeline.token_of(turn) * p.value_heads + head) * VD + first_column;
            store_columns(output, stage.values, to, (long long)p.value_heads * VD, pipeline.length_of(turn), at);
        }

        // S^T <- e^{G_C} S^T + (weighted U)^T K'
        const float decay = largest_decay(weight);
        Scale next = smaller(scale_for(largest_state), added);
        float added_inverse = added.inverse;
        if (SPLIT == 2) {
            next = smaller(next, weighted_too.parts[0].scale);
            added_inverse = fmaxf(added_inverse, weighted_too.parts[0].scale.inverse);
        }
        decay_state(state, decay, weight, ratio(next, held), at);
        held = next;
        add_to_state(state, held, weighted, weighted_too, stage.write_keys, at);
        if (turn % LOOK_UP_EVERY == LOOK_UP_EVERY - 1)
            largest_state = largest_of(state) * held.inverse;
        else // the scales say what the largest of the added operands are, up to a factor of 2
            largest_state = fmaf(decay, largest_state, MOST_GROWTH * 32768.0f * added_inverse);

        pipeline.leave(turn);
    }
    if (Output && segment.last)
        store_state(state, p.final_state, state_place(of_sequence, turned, VD, first_column, at), held.inverse);
    if (Of == ENDS) {
        if (identity) {
            store_state(state, p.transitions, state_place(2 * of_segment, true, KD, first_column, at), held.inverse);
            store_state(state, p.transitions, state_place(2 * of_segment + 1, false, KD, first_column, at), held.inverse);
        } else
            store_state(state, p.segment_states, state_place(of_segment + p.value_heads, true, VD, first_column, at),
                        held.inverse);
    }
}

// Grid: V / COLUMNS, HV, segments.
extern "C" __global__ void __launch_bounds__(THREADS, 1) chunk_forward(const __grid_constant__ ChunkParams p) {
    sweep<OUTPUT>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) chunk_states(const __grid_constant__ ChunkParams p) {
    sweep<STATES>(p);
}

#if CHANNELS
extern "C" __global__ void __launch_bounds__(THREADS, 1) chunk_retain(const __grid_constant__ ChunkParams p) {
    sweep<BOTH>(p);
}
#endif

#if CUT
// Grid: (V + K) / COLUMNS, HV, segments.
extern "C" __global__ void __launch_bounds__(THREADS, 1) chunk_segment_ends(const __grid_constant__ ChunkParams p) {
    static_assert(KD % COLUMNS == 0, "the columns of a block divide K where sequences are cut");
    sweep<ENDS>(p);
}
#endif
