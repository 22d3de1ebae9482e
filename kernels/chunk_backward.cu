// Backward sweep of the chunk form of GDN, from the last chunk to the first, for 16 columns of V per pair of
// warps (chunk_sweep.cuh):
//
//   dU = P^T do + (e^{G_C - G} k) dS     Y = T^T dU     dv = beta Y
//   dS <- e^{G_C} dS + (s e^G q)^T do - (beta e^G k)^T Y
//
//   do (T, HV, V), the workspace of chunk_prepare.cu, d_final_state
//     ->  dv (T, HV, V), dh0, and for chunk_gradient.cu: Y, dS at the end of each chunk, the scales of do
//
// The adjoint solve is a product with the T of the forward, so neither dT nor T^T dT T^T is ever formed.
#include "chunk_sweep.cuh"

// What the two warps of a pair tell each other in a chunk.
struct Exchange {
    Sums sums[2];         // of dS K'^T
    Operands d_output[2]; // rq do, for the scores
    Operands reads[2];    // rq e^G do, for the state
    Operands right;       // dU of the second half
    Operands writes[2];   // -beta e^G rk Y, for the state
};

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
                               shared + PAIRS * sizeof(Exchange)};
#if BULK_COPY
    __shared__ Barrier arrived[STAGES];
    pipeline.arrived = arrived;
#endif
    const Place at = place_of_warp();
    Exchange& x = exchanges[at.pair];
    const int first_column = pipeline.first_column + 16 * at.pair;

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
        const long long part = (square * (VD / 16) + first_column / 16) * 2 + at.half;

        rescale(state, held, scale_for(largest_state));
        keep_state(state, p.d_states + square * VD * KD, first_column, at);
        if (at.lane == 0) p.d_state_scales[part] = held.inverse;

        // dU^T = dS^T (weighted k)^T, over this half of K ...
        AllTokens all;
        clear(all);
#pragma unroll
        for (int c = 0; c < K_HALF / 16; ++c)
            product_nt(all, make_left(state[2 * c], state[2 * c + 1], 1.0f), stage.keys + at.first_k + 16 * c, ROW_PITCH);
        give_sums(x.sums[at.half], all, held.inverse, at);

        OwnTokens product, adjoint;
        load_values(product, stage.values, at);
        const float largest_d_output = largest_of(product);
        if (at.lane == 0) p.d_o_scales[part] = scale_for(largest_d_output).inverse;
        const float largest_weighted = largest_d_output * largest_weight(weight + QUERY * CHUNK);
        const float largest_read = largest_weighted * largest_weight(weight + DECAY * CHUNK);
        const Scale weighted = scale_for(largest_weighted), read = scale_for(largest_read);
        weight_tokens(product, weight + QUERY * CHUNK, 1.0f, at);
        give(x.d_output[at.half], product, weighted.factor, weighted.inverse, at);
        weight_tokens(product, weight + DECAY * CHUNK, 1.0f, at);
        give(x.reads[at.half], product, read.factor, read.inverse, at);
        pair_sync(at);
        take_sums(adjoint, all, held.inverse, x.sums[1 - at.half], at);
        weight_tokens(adjoint, weight + WRITE * CHUNK, 1.0f, at);

        // ... + do^T P; tokens of the first half need those of the second
        Scale common = scale_of(x.d_output[1]);
        if (at.half == 0) common = smaller(common, scale_of(x.d_output[0]));
        clear(product);
        if (at.half == 0) {
#pragma unroll
            for (int c = 0; c < STEPS; ++c)
                product_nn(product, take(x.d_output[1], c, common, at), stage.scores + (C_HALF + 16 * c) * SQUARE_PITCH,
                           SQUARE_PITCH);
        }
#pragma unroll
        for (int c = 0; c < STEPS; ++c)
            product_nn(product, take(x.d_output[at.half], c, common, at),
                       stage.scores + (at.first_token + 16 * c) * SQUARE_PITCH + at.first_token, SQUARE_PITCH, 0, c + 1);
#pragma unroll
        for (int n = 0; n < C_HALF / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) adjoint[n][e] += product[n][e] * common.inverse;
        Scale right_scale = scale_for(largest_of(adjoint));
        if (at.half == 1) give(x.right, adjoint, right_scale.factor, right_scale.inverse, at);

        // dS^T <- e^{G_C} dS^T + (weighted do)^T Q'; what Y adds follows below.
        const float decay = weight[DECAY * CHUNK + CHUNK - 1];
        Scale next = smaller(scale_for(largest_state), smaller(scale_of(x.reads[0]), scale_of(x.reads[1])));
        multiply(state, decay * (next.factor * held.inverse));
        held = next;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int c = 0; c < STEPS; ++c)
                product_nn(state, take(x.reads[h], c, held, at),
                           stage.queries + (h * C_HALF + 16 * c) * ROW_PITCH + at.first_k, ROW_PITCH);
        const float reads_inverse = fmaxf(x.reads[0].inverse, x.reads[1].inverse);
        pair_sync(at);

        // Y^T = dU^T T
        clear(product);
        if (at.half == 0) {
            right_scale = smaller(right_scale, scale_of(x.right));
#pragma unroll
            for (int c = 0; c < STEPS; ++c)
                product_nn(product, take(x.right, c, right_scale, at), stage.inverse + (C_HALF + 16 * c) * SQUARE_PITCH,
                           SQUARE_PITCH);
        }
#pragma unroll
        for (int c = 0; c < STEPS; ++c)
            product_nn(product, make_left(adjoint[2 * c], adjoint[2 * c + 1], right_scale.factor),
                       stage.inverse + (at.first_token + 16 * c) * SQUARE_PITCH + at.first_token, SQUARE_PITCH, 0, c + 1);

        // Y for the state, ...
        const float largest_adjoint = largest_of(product) * right_scale.inverse;
        const Scale kept = scale_for(largest_adjoint);
        multiply(product, right_scale.inverse * kept.factor);
        const Scale write = scale_for(largest_adjoint * largest_weight(weight + READ * CHUNK));
#pragma unroll
        for (int n = 0; n < C_HALF / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) adjoint[n][e] = product[n][e];
        weight_tokens(adjoint, weight + READ * CHUNK, -(kept.inverse * write.factor), at);
        give(x.writes[at.half], adjoint, 1.0f, write.inverse, at);
        pair_sync(at);

        // dS^T <- dS^T - (weighted Y)^T K'
        next = smaller(held, smaller(scale_of(x.writes[0]), scale_of(x.writes[1])));
        rescale(state, held, next);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int c = 0; c < STEPS; ++c)
                product_nn(state, take(x.writes[h], c, held, at),
                           stage.keys + (h * C_HALF + 16 * c) * ROW_PITCH + at.first_k, ROW_PITCH);
        if (turn % LOOK_UP_EVERY == LOOK_UP_EVERY - 1)
            largest_state = largest_of(state) * held.inverse;
        else // the scales say what the largest of the added operands are, up to a factor of 2
            largest_state = decay * largest_state +
                            MOST_GROWTH * 32768.0f * (reads_inverse + fmaxf(x.writes[0].inverse, x.writes[1].inverse));

        // ... for the gradient of the keys, and dv = beta Y
        store_columns(product, stage.values, (Operand*)p.adjoints + square * CHUNK * VD + first_column, VD, CHUNK, at);
        if (at.lane == 0) p.adjoint_scales[part] = kept.inverse;
        weight_tokens(product, weight + BETA * CHUNK, kept.inverse, at);
        INPUT* to = p.dv + ((long long)pipeline.token_of(turn) * p.value_heads + head) * VD + first_column;
        store_columns(product, stage.values, to, (long long)p.value_heads * VD, pipeline.length_of(turn), at);

        pipeline.leave(turn);
    }
    store_state(state, p.dh0, state_place(p, sequence, head, first_column, at), held.inverse);
}
