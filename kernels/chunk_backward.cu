// Backward sweep of the chunk form of GDN, from the last chunk to the first, for 16 columns of V per group
// of warps (chunk_sweep.cuh):
//
//   dU = P^T do + (e^{G_C - G} k) dS     Y = T^T dU     dv = beta Y
//   dS <- e^{G_C} dS + (s e^G q)^T do - (beta e^G k)^T Y
//
//   do (T, HV, V), the workspace of chunk_prepare.cu, d_final_state
//     ->  dv (T, HV, V), dh0, and for chunk_gradient.cu: Y, dS at the end of each chunk, the scales of do
//
// Compiled twice: chunk_backward does that; chunk_segment_starts gives, for a sequence that is cut, the gradient that
// arrives at the start of a segment from its own outputs (chunk_join.cu adds what comes through it from later segments).
//
// The adjoint solve is a product with the T of the forward, so neither dT nor T^T dT T^T is ever formed.
//
// For GDN-2 the decays are part of the rows (chunk.cuh), and gdn2_gradient.cu makes dv and dw of Y.
#include "chunk_sweep.cuh"

// What the two warps of a group tell each other in a chunk; a single warp needs no such memory.
struct Exchange {
    Sums sums[SPLIT];                  // of dS K'^T
    Passed d_output;                   // rq do of the second half, for the scores
    PassedUpdate<false> reads[SPLIT];  // rq e^G do, for the state
    Passed right[2];                   // dU of the second half, and what rounding left of it
    PassedUpdate<false> writes[SPLIT]; // -beta e^G rk Y, for the state
};
constexpr int EXCHANGES = SPLIT == 2 ? GROUPS * (int)sizeof(Exchange) : 0;

template <bool Starts> __device__ __forceinline__ void sweep(const ChunkParams& p) {
    extern __shared__ __align__(128) u8 shared[];
    Exchange* exchanges = (Exchange*)shared;
    const int head = blockIdx.y;
    const Segment segment = segment_of_block(p);
    if (Starts) let_next_kernel_start();
    wait_for_kernel_before();
    if (Starts && segment.first) return;
    const int begin = segment.begin, end = segment.end;
    Pipeline<true, false> pipeline = {p, p.d_o, end - 1, -1, end - begin, segment.token, segment.tokens, head,
                               head / (p.value_heads / p.qk_heads), (int)blockIdx.x * COLUMNS,
                               shared + EXCHANGES};
#if BULK_COPY
    __shared__ Barrier arrived[STAGES];
    pipeline.arrived = arrived;
#endif
    const Place at = place_of_warp();
    Exchange& x = exchanges[at.group];
    const int first_column = pipeline.first_column + 16 * at.group;

    // dS^T / unit times held.factor. s is a power of two times `unit`, so what do adds is rounded for its decay alone.
    const float unit = p.scale_unit;
    pipeline.begin();
    OwnState state;
    const long long of_segment = (long long)segment.number * p.value_heads + head;
    const long long of_sequence = (long long)segment.sequence * p.value_heads + head;
    if (segment.last)
        load_state(state, p.d_final_state, state_place(of_sequence, p.state_transposed, VD, first_column, at));
    else
        load_state(state, Starts ? nullptr : p.segment_d_states, state_place(of_segment, true, VD, first_column, at));
    multiply(state, 1.0f / unit);
    float largest_state = largest_of(state);
    Scale held = {1.0f, 1.0f};

    for (int chunk = end - 1; chunk >= begin; --chunk) {
        const int turn = end - 1 - chunk;
        const Stage stage = pipeline.stage(turn);
        pipeline.wait(turn);
        const float* weight = stage.coefficients;
        const long long square = (long long)chunk * p.value_heads + head;
        const long long part = square * (VD / 16) + first_column / 16;

        rescale(state, held, scale_for(largest_state));
        if (!Starts) {
            keep_state(state, p.d_states + square * VD * KD, first_column, at);
            keep_scale(p.d_state_scales, part, held.inverse, at);
        }

        // dU^T = dS^T (weighted k)^T ...
        OwnTokens adjoint, product;
        product_with_tokens(adjoint, x.sums[at.half], state, stage.write_keys, held.inverse * unit, at);
        load_values(product, stage.values, at);
        const float largest_d_output = largest_of(product);
        if (!Starts) keep_scale(p.d_o_scales, part, scale_for(largest_d_output).inverse, at);
        const float largest_weighted = largest_d_output * weight[MOST * CHUNK + QUERY];
        const Scale weighted = scale_for(largest_weighted);
        weight_tokens(product, weight + QUERY * CHUNK, 1.0f, at);
        Operands d_output = operands_of(product, weighted.factor, weighted), d_output_too;
        weight_tokens(product, weight + DECAY * CHUNK, 1.0f, at);
        const Scale read = scale_for(largest_of(product)); // a decay may have wiped out the largest
        Update<false> reads = update_of<false>(product, read), reads_too;
        if (SPLIT == 2) {
            if (at.half == 1) pass(x.d_output, d_output, at);
            pass(x.reads[at.half], reads, at);
            group_sync(at);
            reads_too = take(x.reads[1 - at.half], at);
        }
        const float adjoint_unit = add_sums(adjoint, held.inverse * unit, x.sums[SPLIT - 1 - at.half], at);
        weight_tokens(adjoint, weight + WRITE * CHUNK, adjoint_unit, at);

        // ... + do^T P; tokens of the first half need those of the second
        clear(product);
        if (SPLIT == 2 && at.half == 0) {
            d_output_too = take(x.d_output, at);
            const Scale common = smaller(d_output.scale, d_output_too.scale);
            bring_to(d_output, common);
            bring_to(d_output_too, common);
#pragma unroll
            for (int c = 0; c < STEPS; ++c)
                product_nn(product, d_output_too.left[c], stage.scores + (C_PART + 16 * c) * SQUARE_PITCH, SQUARE_PITCH);
        }
#pragma unroll
        for (int c = 0; c < STEPS; ++c)
            product_nn(product, d_output.left[c],
                       stage.scores + (at.first_token + 16 * c) * SQUARE_PITCH + at.first_token, SQUARE_PITCH, 0, c + 1);
#pragma unroll
        for (int n = 0; n < C_PART / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) adjoint[n][e] = fmaf(product[n][e], d_output.scale.inverse * unit, adjoint[n][e]);
        Scale right_scale = scale_for(largest_of(adjoint));
        if (SPLIT == 2 && at.half == 1) {
            const Operands rounded = operands_of(adjoint, right_scale.factor, right_scale);
            pass(x.right[0], rounded, at);
            if (HAS_REST) pass(x.right[1], rest_of(adjoint, right_scale.factor, rounded), at);
        }

        // dS^T <- e^{G_C} dS^T + (weighted do)^T Q'; what Y adds follows below.
        const float decay = largest_decay(weight);
        Scale next = smaller(scale_for(largest_state), read);
        float added_inverse = read.inverse;
        if (SPLIT == 2) {
            next = smaller(next, reads_too.parts[0].scale);
            added_inverse = fmaxf(added_inverse, reads_too.parts[0].scale.inverse);
        }
        decay_state(state, decay, weight, ratio(next, held), at);
        held = next;
        add_to_state(state, held, reads, reads_too, stage.queries, at);
        group_sync(at);

        // Y^T = dU^T T
        clear(product);
        if (SPLIT == 2 && at.half == 0) {
            right_scale = smaller(right_scale, x.right[0].scale);
#pragma unroll
            for (int part = 0; part < (HAS_REST ? 2 : 1); ++part) {
                Operands after = take(x.right[part], at);
                bring_to(after, right_scale);
#pragma unroll
                for (int c = 0; c < STEPS; ++c)
                    product_nn(product, after.left[c], stage.inverse + (C_PART + 16 * c) * SQUARE_PITCH, SQUARE_PITCH);
            }
        }
#pragma unroll
        for (int c = 0; c < STEPS; ++c) {
            const operand* inverse = stage.inverse + (at.first_token + 16 * c) * SQUARE_PITCH + at.first_token;
            const Left rounded = make_left(adjoint[2 * c], adjoint[2 * c + 1], right_scale.factor);
            product_nn(product, rounded, inverse, SQUARE_PITCH, 0, c + 1);
            if (HAS_REST)
                product_nn(product, make_left_rest(adjoint[2 * c], adjoint[2 * c + 1], right_scale.factor, rounded), inverse,
                           SQUARE_PITCH, 0, c + 1);
        }

        // Y for the state, ...
        const float largest_adjoint = largest_of(product) * right_scale.inverse;
        const Scale kept = scale_for(largest_adjoint);
        multiply(product, ratio(kept, right_scale));
#pragma unroll
        for (int n = 0; n < C_PART / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) adjoint[n][e] = product[n][e];
        weight_tokens(adjoint, weight + READ * CHUNK, -kept.inverse / unit, at);
        const Scale write = scale_for(largest_of(adjoint));
        Update<false> writes = update_of<false>(adjoint, write), writes_too;
        next = smaller(held, write);
        float written_inverse = write.inverse;
        if (SPLIT == 2) {
            pass(x.writes[at.half], writes, at);
            group_sync(at);
            writes_too = take(x.writes[1 - at.half], at);
            next = smaller(next, writes_too.parts[0].scale);
            written_inverse = fmaxf(written_inverse, writes_too.parts[0].scale.inverse);
        }

        // dS^T <- dS^T - (weighted Y)^T K'
        rescale(state, held, next);
        add_to_state(state, held, writes, writes_too, stage.keys, at);
        if (turn % LOOK_UP_EVERY == LOOK_UP_EVERY - 1)
            largest_state = largest_of(state) * held.inverse;
        else // the scales say what the largest of the added operands are, up to a factor of 2
            largest_state = fmaf(decay, largest_state, MOST_GROWTH * 32768.0f * (added_inverse + written_inverse));

        if (!Starts) {
            // ... for the gradient of the keys, and dv = beta Y
            store_columns(product, stage.values, (Operand*)p.adjoints + square * CHUNK * VD + first_column, VD, CHUNK, at);
            keep_scale(p.adjoint_scales, part, kept.inverse, at);
#if !CHANNELS
            weight_tokens(product, weight + BETA * CHUNK, kept.inverse, at);
            INPUT* to = p.dv + ((long long)pipeline.token_of(turn) * p.value_heads + head) * VD + first_column;
            store_columns(product, stage.values, to, (long long)p.value_heads * VD, pipeline.length_of(turn), at);
#endif
        }

        pipeline.leave(turn);
    }
    if (Starts)
        store_state(state, p.segment_d_states, state_place(of_segment - p.value_heads, true, VD, first_column, at),
                    held.inverse * unit);
    else if (segment.first)
        store_state(state, p.dh0, state_place(of_sequence, p.state_transposed, VD, first_column, at), held.inverse * unit);
}

// Grid: V / COLUMNS, HV, segments.
extern "C" __global__ void __launch_bounds__(THREADS, 1) chunk_backward(const __grid_constant__ ChunkParams p) {
    sweep<false>(p);
}

#if CUT
extern "C" __global__ void __launch_bounds__(THREADS, 1) chunk_segment_starts(const __grid_constant__ ChunkParams p) {
    sweep<true>(p);
}
#endif
