// Forward sweep of the chunk form of GDN, for 16 columns of V per warp (chunk_sweep.cuh):
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

// With a large state, Q' S waits until the registers of R are free again.
constexpr bool SPARE_REGISTERS = KD >= 192;

template <bool Output> __device__ __forceinline__ void sweep(const ChunkParams& p) {
    extern __shared__ __align__(128) u8 shared[];
#if BULK_COPY
    __shared__ Barrier arrived[STAGES];
    Pipeline<Output> pipeline = {p, p.v, (int)blockIdx.y, (int)blockIdx.x * COLUMNS, shared, arrived};
#else
    Pipeline<Output> pipeline = {p, p.v, (int)blockIdx.y, (int)blockIdx.x * COLUMNS, shared};
#endif
    const int warp = threadIdx.x / 32, quad = threadIdx.x & 3;
    const int head = blockIdx.y, sequence = blockIdx.z;
    const int first_column = pipeline.first_column + 16 * warp;
    const int begin = p.sequence_chunk[sequence], end = p.sequence_chunk[sequence + 1];

    float state[KD / 8][4];
    load_state(state, p.initial_state, state_place(p, sequence, head, first_column));
    float largest_state = largest_of(state);
    Scale held = {1.0f, 1.0f}; // `state` is S times held.factor

    pipeline.begin();
    if (begin < end) pipeline.fill(0, begin);
    for (int chunk = begin; chunk < end; ++chunk) {
        const int turn = chunk - begin;
        const Stage stage = pipeline.stage(turn);
        pipeline.wait(turn);
        if (STAGES > 1 && chunk + 1 < end) pipeline.fill(turn + 1, chunk + 1);
        const float* weight = stage.coefficients;
        const int length = p.chunk_length[chunk];
        const long long square = (long long)chunk * p.value_heads + head;
        const long long part = square * (VD / 16) + first_column / 16;

        // Bring the state into the range of its format.
        const Scale wanted = scale_for(largest_state);
        if (wanted.factor != held.factor) {
            multiply(state, wanted.factor * held.inverse);
            held = wanted;
        }
        if (!Output) {
            keep_state(state, p.states + square * VD * KD, first_column);
            if ((threadIdx.x & 31) == 0) p.state_scales[part] = held.inverse;
        }

        float right[CHUNK / 8][4], output[CHUNK / 8][4];
        clear(right);
        clear(output);
#pragma unroll
        for (int c = 0; c < KD / 16; ++c) {
            const Left left = make_left(state[2 * c], state[2 * c + 1], 1.0f);
            product_nt(right, left, stage.keys + 16 * c, ROW_PITCH);
            if (Output && !SPARE_REGISTERS) product_nt(output, left, stage.queries + 16 * c, ROW_PITCH);
        }

        float writes[CHUNK / 8][4];
        load_values(writes, stage.values, warp);
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n) {
            const float2 beta = *(const float2*)(weight + BETA * CHUNK + 8 * n + 2 * quad);
            const float2 read = *(const float2*)(weight + READ * CHUNK + 8 * n + 2 * quad);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                right[n][e] = (e % 2 ? beta.y : beta.x) * writes[n][e] -
                              (e % 2 ? read.y : read.x) * (right[n][e] * held.inverse);
        }

        // U^T = R^T T^T
        const Scale right_scale = scale_for(largest_of(right));
        clear(writes);
#pragma unroll
        for (int c = 0; c < TILES; ++c) {
            const Left left = make_left(right[2 * c], right[2 * c + 1], right_scale.factor);
            product_nt(writes, left, stage.inverse + 16 * c, SQUARE_PITCH, c);
        }
        multiply(writes, right_scale.inverse);

        // One scale for U and the old state, so that the products of both meet in the same accumulators.
        const Scale next = scale_for(fmaxf(largest_of(writes), largest_state));
        const float change = next.factor * held.inverse;
        if (Output) {
            if (SPARE_REGISTERS)
#pragma unroll
                for (int c = 0; c < KD / 16; ++c)
                    product_nt(output, make_left(state[2 * c], state[2 * c + 1], 1.0f), stage.queries + 16 * c, ROW_PITCH);
            weight_tokens(output, weight + DECAY * CHUNK, change);
#pragma unroll
            for (int c = 0; c < TILES; ++c) {
                const Left left = make_left(writes[2 * c], writes[2 * c + 1], next.factor);
                product_nt(output, left, stage.scores + 16 * c, SQUARE_PITCH, c);
            }
            weight_tokens(output, weight + QUERY * CHUNK, next.inverse);
            INPUT* to = p.o + ((long long)p.chunk_token[chunk] * p.value_heads + head) * VD + first_column;
            store_columns(output, stage.values, warp, to, (long long)p.value_heads * VD, length);
        } else {
            multiply(writes, next.factor);
            round_operands(writes);
            store_columns(writes, stage.values, warp, p.writes + square * CHUNK * VD + first_column, VD, CHUNK);
            multiply(writes, next.inverse);
            if ((threadIdx.x & 31) == 0) p.write_scales[part] = next.inverse;
        }

        // S^T <- e^{G_C} S^T + (weighted U)^T K'
        weight_tokens(writes, weight + WRITE * CHUNK, next.factor);
        multiply(state, weight[DECAY * CHUNK + CHUNK - 1] * change);
#pragma unroll
        for (int c = 0; c < TILES; ++c) {
            const Left left = make_left(writes[2 * c], writes[2 * c + 1], 1.0f);
            product_nn(state, left, stage.keys + 16 * c * ROW_PITCH, ROW_PITCH);
        }
        held = next;
        largest_state = largest_of(state) * held.inverse;

        if (STAGES == 1 && chunk + 1 < end) {
            pipeline.free();
            pipeline.fill(turn + 1, chunk + 1);
        }
    }
    if (Output) store_state(state, p.final_state, state_place(p, sequence, head, first_column), held.inverse);
}

// Grid: V / COLUMNS, HV, N.
extern "C" __global__ void __launch_bounds__(THREADS) chunk_forward(const __grid_constant__ ChunkParams p) {
    sweep<true>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS) chunk_states(const __grid_constant__ ChunkParams p) {
    sweep<false>(p);
}
