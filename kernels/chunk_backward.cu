// Backward sweep of the chunk form of GDN, from the last chunk to the first, for 16 columns of V per group
// of warps (chunk_sweep.cuh):
//
//   dU = P^T do + (e^{G_C - G} k) dS     Y = T^T dU     dv = beta Y
//   dS <- e^{G_C} dS + (s e^G q)^T do - (beta e^G k)^T Y
//
//   do (T, HV, V), the workspace of chunk_prepare.cu, d_final_state
//     ->  dv (T, HV, V), dh0, and for chunk_gradient.cu: Y, dS at the end of each chunk, the scales of do
//
// The adjoint solve is a product with the T of the forward, so neither dT nor T^T dT T^T is ever formed.
#include "chunk_sweep.cuh"

// What the two warps of a group tell each other in a chunk; a single warp needs no such memory.
struct Exchange {
    Sums sums[SPLIT];       // of dS K'^T
    Passed d_output[SPLIT]; // rq do, for the scores
    Passed reads[SPLIT];    // rq e^G do, for the state
    Passed right[2];        // dU of the second half, and what rounding left of it
    Passed writes[SPLIT];   // -beta e^G rk Y, for the state
};
constexpr int EXCHANGES = SPLIT == 2 ? GROUPS * (int)sizeof(Exchange) : 0;

// Grid: V / COLUMNS, HV, N.
extern "C" __global__ void __launch_bounds__(THREADS, 1) chunk_backward(const __grid_constant__ ChunkParams p) {
    extern __shared__ __align__(128) u8 shared[];
    Exchange* exchanges = (Exchange*)shared;
    const int head = blockIdx.y, sequence = blockIdx.z;
    const int begin = p.sequence_chunk[sequence], end = p.sequence_chunk[sequence + 1];
    const int token = begin < end ? p.chunk_token[begin] : 0;
    const int tokens = begin < end ? p.chunk_token[end - 1] + p.chunk_length[end - 1] - token : 0;
    Pipeline<true> pipeline = {p, p.d_o, end - 1, -1, end - begin, token, tokens, head,
                               head / (p.value_heads / p.qk_heads), (int)blockIdx.x * COLUMNS,
                               shared + EXCHANGES};
#if BULK_COPY
    __shared__ Barrier arrived[STAGES];
    pipeline.arrived = arrived;
#endif
    const Place at = place_of_warp();
    Exchange& x = exchanges[at.group];
    const int first_column = pipeline.first_column + 16 * at.group;

    OwnState state; // dS^T times held.factor
    load_state(state, p.d_final_state, state_place(p, sequence, head, first_column, at));
    float largest_state = largest_of(state);
    Scale held = {1.0f, 1.0f};

    pipeline.begin();
    for (int chunk = end - 1; chunk >= begin; --chunk) {
        const int turn = end - 1 - chunk;
        const Stage stage = pipeline.stage(turn);
        pipeline.wait(turn);
        const float* weight = stage.coefficients;
        const long long square = (long long)chunk * p.value_heads + head;
        const long long part = square * (VD / 16) + first_column / 16;

        rescale(state, held, scale_for(largest_state));
        keep_state(state, p.d_states + square * VD * KD, first_column, at);
        keep_scale(p.d_state_scales, part, held.inverse, at);

        // dU^T = dS^T (weighted k)^T ...
        OwnTokens adjoint, product;
        product_with_tokens(adjoint, x.sums[at.half], state, stage.keys, held.inverse, at);
        load_values(product, stage.values, at);
        const float largest_d_output = largest_of(product);
        keep_scale(p.d_o_scales, part, scale_for(largest_d_output).inverse, at);
        const float largest_weighted = largest_d_output * weight[MOST * CHUNK + QUERY];
        const Scale weighted = scale_for(largest_weighted);
        weight_tokens(product, weight + QUERY * CHUNK, 1.0f, at);
        Operands d_output = operands_of(product, weighted.factor, weighted), d_output_too;
        weight_tokens(product, weight + DECAY * CHUNK, 1.0f, at);
        const Scale read = scale_for(largest_of(product)); // a decay may have wiped out the largest
        Operands reads = operands_of(product, read.factor, read), reads_too;
        if (SPLIT == 2) {
            if (at.half == 1) pass(x.d_output[1], d_output, at);
            pass(x.reads[at.half], reads, at);
            group_sync(at);
            reads_too = take(x.reads[1 - at.half], at);
        }
        const float adjoint_unit = add_sums(adjoint, held.inverse, x.sums[SPLIT - 1 - at.half], at);
        weight_tokens(adjoint, weight + WRITE * CHUNK, adjoint_unit, at);

        // ... + do^T P; tokens of the first half need those of the second
        clear(product);
        if (SPLIT == 2 && at.half == 0) {
            d_output_too = take(x.d_output[1], at);
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
            for (int e = 0; e < 4; ++e) adjoint[n][e] += product[n][e] * d_output.scale.inverse;
        Scale right_scale = scale_for(largest_of(adjoint));
        if (SPLIT == 2 && at.half == 1) {
            const Operands rounded = operands_of(adjoint, right_scale.factor, right_scale);
            pass(x.right[0], rounded, at);
            if (HAS_REST) pass(x.right[1], rest_of(adjoint, right_scale.factor, rounded), at);
        }

        // dS^T <- e^{G_C} dS^T + (weighted do)^T Q'; what Y adds follows below.
        const float decay = weight[DECAY * CHUNK + CHUNK - 1];
        Scale next = smaller(scale_for(largest_state), reads.scale);
        float added_inverse = reads.scale.inverse;
        if (SPLIT == 2) {
            next = smaller(next, reads_too.scale);
            added_inverse = fmaxf(added_inverse, reads_too.scale.inverse);
        }
        multiply(state, decay * ratio(next, held));
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
        weight_tokens(adjoint, weight + READ * CHUNK, -kept.inverse, at);
        const Scale write = scale_for(largest_of(adjoint));
        Operands writes = operands_of(adjoint, write.factor, write), writes_too;
        next = smaller(held, write);
        float written_inverse = write.inverse;
        if (SPLIT == 2) {
            pass(x.writes[at.half], writes, at);
            group_sync(at);
            writes_too = take(x.writes[1 - at.half], at);
            next = smaller(next, writes_too.scale);
            written_inverse = fmaxf(written_inverse, writes_too.scale.inverse);
        }

        // dS^T <- dS^T - (weighted Y)^T K'
        rescale(state, held, next);
        add_to_state(state, held, writes, writes_too, stage.keys, at);
        if (turn % LOOK_UP_EVERY == LOOK_UP_EVERY - 1)
            largest_state = largest_of(state) * held.inverse;
        else // the scales say what the largest of the added operands are, up to a factor of 2
            largest_state = decay * largest_state + MOST_GROWTH * 32768.0f * (added_inverse + written_inverse);

        // ... for the gradient of the keys, and dv = beta Y
        store_columns(product, stage.values, (Operand*)p.adjoints + square * CHUNK * VD + first_column, VD, CHUNK, at);
        keep_scale(p.adjoint_scales, part, kept.inverse, at);
        weight_tokens(product, weight + BETA * CHUNK, kept.inverse, at);
        INPUT* to = p.dv + ((long long)pipeline.token_of(turn) * p.value_heads + head) * VD + first_column;
        store_columns(product, stage.values, to, (long long)p.value_heads * VD, pipeline.length_of(turn), at);

        pipeline.leave(turn);
    }
    store_state(state, p.dh0, state_place(p, sequence, head, first_column, at), held.inverse);
}
