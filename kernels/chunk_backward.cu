// Backward sweep of the chunk form of GDN, from the last chunk to the first, for 16 columns of V per warp:
//
//   dU = P^T do + (e^{G_C - G} k) dS     Y = T^T dU     dv = beta Y
//   dS <- e^{G_C} dS + (s e^G q)^T do - (beta e^G k)^T Y
//
//   do (T, HV, V), the workspace of chunk_prepare.cu, d_final_state
//     ->  dv (T, HV, V), dh0, and for chunk_gradient.cu: Y, dS at the end of each chunk, the scales of do
//
// The adjoint solve is a product with the T of the forward, so neither dT nor T^T dT T^T is ever formed.
#include "chunk_sweep.cuh"

// Grid: V / COLUMNS, HV, N.
extern "C" __global__ void __launch_bounds__(THREADS) chunk_backward(const __grid_constant__ ChunkParams p) {
    extern __shared__ __align__(128) u8 shared[];
#if BULK_COPY
    __shared__ Barrier arrived[STAGES];
    Pipeline<true> pipeline = {p, p.d_o, (int)blockIdx.y, (int)blockIdx.x * COLUMNS, shared, arrived};
#else
    Pipeline<true> pipeline = {p, p.d_o, (int)blockIdx.y, (int)blockIdx.x * COLUMNS, shared};
#endif
    const int warp = threadIdx.x / 32;
    const bool first_lane = (threadIdx.x & 31) == 0;
    const int head = blockIdx.y, sequence = blockIdx.z;
    const int first_column = pipeline.first_column + 16 * warp;
    const int begin = p.sequence_chunk[sequence], end = p.sequence_chunk[sequence + 1];

    float state[KD / 8][4]; // dS^T times held.factor
    load_state(state, p.d_final_state, state_place(p, sequence, head, first_column));
    float largest_state = largest_of(state);
    Scale held = {1.0f, 1.0f};

    pipeline.begin();
    if (begin < end) pipeline.fill(0, end - 1);
    for (int chunk = end - 1; chunk >= begin; --chunk) {
        const int turn = end - 1 - chunk;
        const Stage stage = pipeline.stage(turn);
        pipeline.wait(turn);
        if (STAGES > 1 && chunk > begin) pipeline.fill(turn + 1, chunk - 1);
        const float* weight = stage.coefficients;
        const long long square = (long long)chunk * p.value_heads + head;
        const long long part = square * (VD / 16) + first_column / 16;

        const Scale wanted = scale_for(largest_state);
        if (wanted.factor != held.factor) {
            multiply(state, wanted.factor * held.inverse);
            held = wanted;
        }
        keep_state(state, p.d_states + square * VD * KD, first_column);
        if (first_lane) p.d_state_scales[part] = held.inverse;

        // dU^T = dS^T (weighted k)^T ...
        float adjoint[CHUNK / 8][4];
        clear(adjoint);
#pragma unroll
        for (int c = 0; c < KD / 16; ++c) {
            const Left left = make_left(state[2 * c], state[2 * c + 1], 1.0f);
            product_nt(adjoint, left, stage.keys + 16 * c, ROW_PITCH);
        }
        weight_tokens(adjoint, weight + WRITE * CHUNK, held.inverse);

        // ... + do^T P, with rq of the scores on do.
        float d_output[CHUNK / 8][4], product[CHUNK / 8][4];
        load_values(d_output, stage.values, warp);
        const Scale plain = scale_for(largest_of(d_output));
        weight_tokens(d_output, weight + QUERY * CHUNK, 1.0f);
        const Scale weighted = scale_for(largest_of(d_output));
        clear(product);
#pragma unroll
        for (int c = 0; c < TILES; ++c) {
            const Left left = make_left(d_output[2 * c], d_output[2 * c + 1], weighted.factor);
            product_nn(product, left, stage.scores + 16 * c * SQUARE_PITCH, SQUARE_PITCH, 0, c + 1);
        }
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) adjoint[n][e] += product[n][e] * weighted.inverse;

        // dS^T <- e^{G_C} dS^T + (weighted do)^T Q'; what Y adds follows below.
        weight_tokens(d_output, weight + DECAY * CHUNK, 1.0f);
        Scale next = scale_for(fmaxf(largest_of(d_output), largest_state));
        multiply(state, weight[DECAY * CHUNK + CHUNK - 1] * (next.factor * held.inverse));
        held = next;
#pragma unroll
        for (int c = 0; c < TILES; ++c) {
            const Left left = make_left(d_output[2 * c], d_output[2 * c + 1], held.factor);
            product_nn(state, left, stage.queries + 16 * c * ROW_PITCH, ROW_PITCH);
        }

        // Y^T = dU^T T
        const Scale solve = scale_for(largest_of(adjoint));
        clear(product);
#pragma unroll
        for (int c = 0; c < TILES; ++c) {
            const Left left = make_left(adjoint[2 * c], adjoint[2 * c + 1], solve.factor);
            product_nn(product, left, stage.inverse + 16 * c * SQUARE_PITCH, SQUARE_PITCH, 0, c + 1);
        }
        multiply(product, solve.inverse);

        // Y for the gradient of the keys, then dv = beta Y.
        const Scale kept = scale_for(largest_of(product));
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) adjoint[n][e] = product[n][e] * kept.factor;
        round_operands(adjoint);
        store_columns(adjoint, stage.values, warp, p.adjoints + square * CHUNK * VD + first_column, VD, CHUNK);
        if (first_lane) {
            p.d_o_scales[part] = plain.inverse;
            p.adjoint_scales[part] = kept.inverse;
        }
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) adjoint[n][e] = product[n][e];
        weight_tokens(adjoint, weight + BETA * CHUNK, 1.0f);
        INPUT* to = p.dv + ((long long)p.chunk_token[chunk] * p.value_heads + head) * VD + first_column;
        store_columns(adjoint, stage.values, warp, to, (long long)p.value_heads * VD, p.chunk_length[chunk]);

        // dS^T <- dS^T - (weighted Y)^T K'
        weight_tokens(product, weight + READ * CHUNK, -1.0f);
        next = scale_for(largest_of(product));
        if (next.factor < held.factor) {
            multiply(state, next.factor * held.inverse);
            held = next;
        }
#pragma unroll
        for (int c = 0; c < TILES; ++c) {
            const Left left = make_left(product[2 * c], product[2 * c + 1], held.factor);
            product_nn(state, left, stage.keys + 16 * c * ROW_PITCH, ROW_PITCH);
        }
        largest_state = largest_of(state) * held.inverse;

        if (STAGES == 1 && chunk > begin) {
            pipeline.free();
            pipeline.fill(turn + 1, chunk - 1);
        }
    }
    store_state(state, p.dh0, state_place(p, sequence, head, first_column), held.inverse);
}
