// Forward sweep of the chunk form of GDN, for 16 columns of V per pair of warps (chunk_sweep.cuh):
//
//   R = beta v - (beta e^G k) S      U = T R      o = s e^G q S + P U      S <- e^{G_C} S + (e^{G_C - G} k)^T U
//
//   v (T, HV, V), the workspace of chunk_prepare.cu, initial_state  ->  o (T, HV, V), final_state
//
// Everything is computed transposed, with S^T as the left operand. Compiled twice: chunk_forward gives o and the final
// state; chunk_states gives the backward what it needs, the state at the start of each chunk and U, and no output.
//
// f16 operands: S is held times a power of two that follows its largest element, and R and U get their own.
#include "chunk_sweep.cuh"

// What the two warps of a pair tell each other in a chunk.
struct Exchange {
    Sums sums[2];         // of K' S, then of Q' S
    Operands right;       // R of the first half
    Operands plain;       // U of the first half, for the scores
    Operands weighted[2]; // e^{G_C - G} rk U, for the state
    float largest_state[2];
};

template <bool Output> __device__ __forceinline__ void sweep(const ChunkParams& p) {
    extern __shared__ __align__(128) u8 shared[];
    Exchange* exchanges = (Exchange*)shared;
    const int head = blockIdx.y, sequence = blockIdx.z;
    const int begin = p.sequence_chunk[sequence], end = p.sequence_chunk[sequence + 1];
    const int token = begin < end ? p.chunk_token[begin] : 0;
    const int tokens = begin < end ? p.chunk_token[end - 1] + p.chunk_length[end - 1] - token : 0;
    Pipeline<Output> pipeline = {p, p.v, begin, 1, end - begin, token, tokens, head,
                               head / (p.value_heads / p.qk_heads), (int)blockIdx.x * COLUMNS,
                               shared + PAIRS * sizeof(Exchange)};
#if BULK_COPY
    __shared__ Barrier arrived[STAGES];
    pipeline.arrived = arrived;
#endif
    const Place at = place_of_warp();
    Exchange& x = exchanges[at.pair];
    const int first_column = pipeline.first_column + 16 * at.pair;

    OwnState state;
    load_state(state, p.initial_state, state_place(p, sequence, head, first_column, at));
    float largest_state = largest_of(state);
    Scale held = {1.0f, 1.0f}; // `state` is S times held.factor

    pipeline.begin();
    for (int chunk = begin; chunk < end; ++chunk) {
        const int turn = chunk - begin;
        const Stage stage = pipeline.stage(turn);
        pipeline.wait(turn);
        const float* weight = stage.coefficients;
        const long long square = (long long)chunk * p.value_heads + head;
        const long long part = (square * (VD / 16) + first_column / 16) * 2 + at.half;

        rescale(state, held, scale_for(largest_state));
        if (!Output) {
            keep_state(state, p.states + square * VD * KD, first_column, at);
            if (at.lane == 0) p.state_scales[part] = held.inverse;
        }

        // S^T K'^T over this half of K
        AllTokens all;
        clear(all);
#pragma unroll
        for (int c = 0; c < K_HALF / 16; ++c)
            product_nt(all, make_left(state[2 * c], state[2 * c + 1], 1.0f), stage.keys + at.first_k + 16 * c, ROW_PITCH);
        give_sums(x.sums[at.half], all, held.inverse, at);
        OwnTokens right, writes;
        load_values(writes, stage.values, at);
        pair_sync(at);
        take_sums(right, all, held.inverse, x.sums[1 - at.half], at);
#pragma unroll
        for (int n = 0; n < C_HALF / 8; ++n) {
            const float2 beta = *(const float2*)(weight + BETA * CHUNK + at.first_token + 8 * n + 2 * at.quad);
            const float2 read = *(const float2*)(weight + READ * CHUNK + at.first_token + 8 * n + 2 * at.quad);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                right[n][e] = (e % 2 ? beta.y : beta.x) * writes[n][e] - (e % 2 ? read.y : read.x) * right[n][e];
        }
        Scale right_scale = scale_for(largest_of(right));
        if (at.half == 0) give(x.right, right, right_scale.factor, right_scale.inverse, at);
        if (Output) {
            clear(all);
#pragma unroll
            for (int c = 0; c < K_HALF / 16; ++c)
                product_nt(all, make_left(state[2 * c], state[2 * c + 1], 1.0f), stage.queries + at.first_k + 16 * c,
                           ROW_PITCH);
        }
        pair_sync(at);
        if (Output) give_sums(x.sums[at.half], all, held.inverse, at);

        // U^T = R^T T^T; tokens of the second half need those of the first
        clear(writes);
        const operand* inverse = stage.inverse + at.first_token * SQUARE_PITCH;
        if (at.half == 1) {
            right_scale = smaller(right_scale, scale_of(x.right));
#pragma unroll
            for (int c = 0; c < STEPS; ++c)
                product_nt(writes, take(x.right, c, right_scale, at), inverse + 16 * c, SQUARE_PITCH);
        }
#pragma unroll
        for (int c = 0; c < STEPS; ++c)
            product_nt(writes, make_left(right[2 * c], right[2 * c + 1], right_scale.factor),
                       inverse + at.first_token + 16 * c, SQUARE_PITCH, c);
        const float largest_write = largest_of(writes) * right_scale.inverse;
        const Scale plain = scale_for(largest_write);
        const float unit = right_scale.inverse * plain.factor;
        if (!Output) {
            multiply(writes, unit);
            store_columns(writes, stage.values, (Operand*)p.writes + square * CHUNK * VD + first_column, VD, CHUNK, at);
            if (at.lane == 0) p.write_scales[part] = plain.inverse;
        }
        Left own[STEPS];
        if (Output) {
#pragma unroll
            for (int c = 0; c < STEPS; ++c) own[c] = make_left(writes[2 * c], writes[2 * c + 1], unit);
            if (at.half == 0) {
#pragma unroll
                for (int c = 0; c < STEPS; ++c) x.plain.left[c][at.lane] = own[c];
                if (at.lane == 0) x.plain.inverse = plain.inverse;
            }
        }
        const float largest_added = largest_write * largest_weight(weight + WRITE * CHUNK);
        const Scale added = scale_for(largest_added);
        weight_tokens(writes, weight + WRITE * CHUNK, (Output ? right_scale.inverse : plain.inverse) * added.factor, at);
        give(x.weighted[at.half], writes, 1.0f, added.inverse, at);
        if (at.lane == 0) x.largest_state[at.half] = largest_state;
        pair_sync(at);

        if (Output) {
            // o^T = s (e^G (S^T q) + U^T P^T), all in the units of the smallest scale
            OwnTokens output;
            take_sums(output, all, held.inverse, x.sums[1 - at.half], at);
            Scale common = smaller(plain, scale_for(fmaxf(x.largest_state[0], x.largest_state[1])));
            if (at.half == 1) common = smaller(common, scale_of(x.plain));
            weight_tokens(output, weight + DECAY * CHUNK, common.factor, at);
            const operand* scores = stage.scores + at.first_token * SQUARE_PITCH;
            if (at.half == 1) {
#pragma unroll
                for (int c = 0; c < STEPS; ++c)
                    product_nt(output, take(x.plain, c, common, at), scores + 16 * c, SQUARE_PITCH);
            }
#pragma unroll
            for (int c = 0; c < STEPS; ++c) {
                scale_left(own[c], common.factor * plain.inverse);
                product_nt(output, own[c], scores + at.first_token + 16 * c, SQUARE_PITCH, c);
            }
            weight_tokens(output, weight + QUERY * CHUNK, common.inverse, at);
            INPUT* to = p.o + ((long long)pipeline.token_of(turn) * p.value_heads + head) * VD + first_column;
            store_columns(output, stage.values, to, (long long)p.value_heads * VD, pipeline.length_of(turn), at);
        }

        // S^T <- e^{G_C} S^T + (weighted U)^T K'
        const float decay = weight[DECAY * CHUNK + CHUNK - 1];
        const Scale next = smaller(scale_for(largest_state), smaller(scale_of(x.weighted[0]), scale_of(x.weighted[1])));
        multiply(state, decay * (next.factor * held.inverse));
        held = next;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int c = 0; c < STEPS; ++c)
                product_nn(state, take(x.weighted[h], c, held, at),
                           stage.keys + (h * C_HALF + 16 * c) * ROW_PITCH + at.first_k, ROW_PITCH);
        if (turn % LOOK_UP_EVERY == LOOK_UP_EVERY - 1)
            largest_state = largest_of(state) * held.inverse;
        else // the scales say what the largest of the added operands are, up to a factor of 2
            largest_state = decay * largest_state +
                            MOST_GROWTH * 32768.0f * fmaxf(x.weighted[0].inverse, x.weighted[1].inverse);

        pipeline.leave(turn);
    }
    if (Output) store_state(state, p.final_state, state_place(p, sequence, head, first_column, at), held.inverse);
}

// Grid: V / COLUMNS, HV, N.
extern "C" __global__ void __launch_bounds__(THREADS, 1) chunk_forward(const __grid_constant__ ChunkParams p) {
    sweep<true>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) chunk_states(const __grid_constant__ ChunkParams p) {
    sweep<false>(p);
}
