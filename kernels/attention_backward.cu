// Causal softmax attention, backward. With p_ij = e^{s_ij - lse_i} as in attention_forward.cu, for j <= i:
//
//   dv_j = sum_i p_ij do_i      dp_ij = do_i . v_j      delta_i = do_i . o_i = sum_j p_ij dp_ij
//   ds_ij = p_ij (dp_ij - delta_i)      dq_i = scale sum_j ds_ij k_j      dk_j = scale sum_i ds_ij q_i
//
// Shapes: q, k, v, o, do, dq, dk, dv (B, T, H, d) with pitches of their own, lse and delta (B, H, T).
//
// Three kernels: `attention_delta`; `attention_backward_queries` gives dq, a warp for 16 queries of a head;
// `attention_backward_keys` gives dk and dv, a warp for 16 keys. Scores are computed in both, seven products
// instead of five, so that no two blocks ever add to the same number: there are no atomics, and two runs give the same bits.
// The second computes S^T and dP^T, so that accumulators are left operands as they are.
#include "attention.cuh"

constexpr int STEP = 32; // columns of scores that are in registers at once

// Scores and dP of a step, before; P and dS, after.
struct Step {
    float p[STEP / 8][4];
    float ds[STEP / 8][4];
};

// acc += X M, X a warp's 16 x STEP numbers and M the STEP rows of a tile from `rows` on.
__device__ __forceinline__ void add_product(Rows16& acc, const float (&x)[STEP / 8][4], const operand* rows) {
#pragma unroll
    for (int k = 0; k < STEP / 16; ++k)
        product_nn(acc, make_left(x[2 * k], x[2 * k + 1], 1.0f), rows + 16 * k * PITCH, PITCH);
}

// ---- delta_i = do_i . o_i

constexpr int DELTA_THREADS = 256;
constexpr int DELTA_LANES = HEAD_DIM / 8; // of a row

extern "C" __global__ void __launch_bounds__(DELTA_THREADS) attention_delta(const __grid_constant__ AttentionParams p) {
    const long long row = ((long long)blockIdx.x * DELTA_THREADS + threadIdx.x) / DELTA_LANES; // (B, T, H)
    const long long token = row / p.heads; // (B, T)
    const int head = (int)(row - token * p.heads), i = threadIdx.x % DELTA_LANES * 8;
    const bool inside = token < (long long)p.batch * p.tokens;
    float sum = 0.0f;
    if (inside) {
        const uint4 o = *(const uint4*)(p.o.at + token * p.o.row_pitch + head * p.o.head_pitch + i);
        const uint4 d_o = *(const uint4*)(p.d_o.at + token * p.d_o.row_pitch + head * p.d_o.head_pitch + i);
        const u32 x[4] = {o.x, o.y, o.z, o.w}, y[4] = {d_o.x, d_o.y, d_o.z, d_o.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sum = fmaf(__uint_as_float(x[e] << 16), __uint_as_float(y[e] << 16), sum);
            sum = fmaf(__uint_as_float(x[e] & 0xffff0000u), __uint_as_float(y[e] & 0xffff0000u), sum);
        }
    }
#pragma unroll
    for (int offset = DELTA_LANES / 2; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (inside && i == 0) {
        const int batch = (int)(token / p.tokens);
        p.delta[((long long)batch * p.heads + head) * p.tokens + token - (long long)batch * p.tokens] = sum;
    }
}

// ---- dq

// More warps of the smaller dimension fit onto a multiprocessor in small blocks.
constexpr int Q_WARPS = HEAD_DIM == 64 ? 4 : 8, Q_THREADS = 32 * Q_WARPS, Q_QUERIES = 16 * Q_WARPS, Q_KEYS = 64;
constexpr int Q_TILE = Q_KEYS * PITCH;
static_assert(16 * Q_WARPS * PITCH <= 4 * Q_TILE, "dq passes through the tiles of keys and values");

extern "C" __global__ void __launch_bounds__(Q_THREADS, HEAD_DIM == 64 ? 3 : 1)
    attention_backward_queries(const __grid_constant__ AttentionParams p) {
    extern __shared__ __align__(128) u8 shared[];
    operand* const tiles = (operand*)shared; // keys and values of this turn, keys and values of the next
    const Work work = work_of_block(p, (p.tokens + Q_QUERIES - 1) / Q_QUERIES, true);
    const Head keys = head_of(p.k, work, p.tokens), values = head_of(p.v, work, p.tokens);
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int first = work.tile * Q_QUERIES + 16 * warp; // query of the warp
    const int turns = (min((work.tile + 1) * Q_QUERIES, p.tokens) + Q_KEYS - 1) / Q_KEYS;
    const float c = p.scale * LOG2_E;

    fetch_rows<Q_KEYS, Q_THREADS>(tiles, keys, 0, p.tokens);
    fetch_rows<Q_KEYS, Q_THREADS>(tiles + Q_TILE, values, 0, p.tokens);
    copy_async_commit();
    Left query[D_TILES], d_output[D_TILES];
    load_rows(query, head_of(p.q, work, p.tokens), first, p.tokens);
    load_rows(d_output, head_of(p.d_o, work, p.tokens), first, p.tokens);
    float shift[2], delta[2]; // of the rows `row` and `row + 8`
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int token = first + lane / 4 + 8 * half;
        shift[half] = token < p.tokens ? LOG2_E * head_of(p.lse, work, p)[token] : 0.0f;
        delta[half] = token < p.tokens ? head_of(p.delta, work, p)[token] : 0.0f;
    }
    Rows16 d_query;
    clear(d_query);

    for (int turn = 0; turn < turns; ++turn) {
        copy_async_wait<0>();
        __syncthreads(); // the tiles are there, and nobody needs those of the turn before
        operand* const key_tile = tiles + turn % 2 * 2 * Q_TILE;
        if (turn + 1 < turns) {
            operand* const next = tiles + (turn + 1) % 2 * 2 * Q_TILE;
            fetch_rows<Q_KEYS, Q_THREADS>(next, keys, (turn + 1) * Q_KEYS, p.tokens);
            fetch_rows<Q_KEYS, Q_THREADS>(next + Q_TILE, values, (turn + 1) * Q_KEYS, p.tokens);
        }
        copy_async_commit();
#pragma unroll 1
        for (int at = 0; at < Q_KEYS; at += STEP) {
            const int first_key = turn * Q_KEYS + at;
            if (first_key > first + 15) break; // nothing that this warp sees
            const operand* const step_keys = key_tile + at * PITCH;
            Step step;
            clear(step.p);
            clear(step.ds);
#pragma unroll
            for (int i = 0; i < D_TILES; ++i) product_nt(step.p, query[i], step_keys + 16 * i, PITCH);
#pragma unroll
            for (int i = 0; i < D_TILES; ++i) product_nt(step.ds, d_output[i], step_keys + Q_TILE + 16 * i, PITCH);
            const int query = first + lane / 4 - (first_key + 2 * (lane % 4)); // from the first key of this lane
#pragma unroll
            for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const bool seen = 8 * n + e % 2 - 8 * (e / 2) <= query;
                    const float probability = seen ? power_of_two(fmaf(c, step.p[n][e], -shift[e / 2])) : 0.0f;
                    step.ds[n][e] = probability * (step.ds[n][e] - delta[e / 2]);
                }
            add_product(d_query, step.ds, step_keys);
        }
    }
    __syncthreads(); // all are done with the tiles
    store_rows(head_of(p.dq, work, p.tokens), d_query, p.scale, p.scale, tiles + 16 * warp * PITCH, first, p.tokens);
}

// ---- dk and dv

// Registers suffice to keep a warp's keys and values only for the smaller dimension, and shared memory for its tiles.
constexpr bool KEPT = HEAD_DIM == 64;
constexpr int K_WARPS = KEPT ? 8 : 4, K_THREADS = 32 * K_WARPS, K_KEYS = 16 * K_WARPS, K_QUERIES = KEPT ? 64 : 32;
constexpr int K_TILE = K_KEYS * PITCH, QUERY_TILE = K_QUERIES * PITCH;

// A warp's 16 rows of a tile as left operands.
struct OwnRows {
    const operand* rows;
    Left kept[KEPT ? D_TILES : 1];

    __device__ __forceinline__ explicit OwnRows(const operand* from) : rows(from) {
        if (KEPT)
#pragma unroll
            for (int i = 0; i < (KEPT ? D_TILES : 1); ++i) kept[i] = load_left(rows + 16 * i, PITCH);
    }
    __device__ __forceinline__ Left operand_at(int i) const {
        return KEPT ? kept[KEPT ? i : 0] : load_left(rows + 16 * i, PITCH);
    }
};

// Queries on their way through shared memory, with do, lse and delta.
struct QueryStage {
    operand* queries;
    operand* d_outputs;
    float* lse;
    float* delta;
};
constexpr int QUERY_STAGE_BYTES = 2 * QUERY_TILE * OPERAND_BYTES + 2 * K_QUERIES * 4;
__device__ __forceinline__ QueryStage query_stage(u8* stages, int turn) {
    u8* const at = stages + (turn & 1) * QUERY_STAGE_BYTES;
    QueryStage stage;
    stage.queries = (operand*)at;
    stage.d_outputs = stage.queries + QUERY_TILE;
    stage.lse = (float*)(stage.d_outputs + QUERY_TILE);
    stage.delta = stage.lse + K_QUERIES;
    return stage;
}

// 4 bytes from global to shared memory; zero where `valid` is false.
__device__ __forceinline__ void copy_async_4(float* to, const float* from, bool valid) {
    int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}

// The tensors that are read query by query.
struct QueryRows {
    Head queries, d_outputs;
    const float* lse;
    const float* delta;
    int tokens;

    __device__ __forceinline__ void fetch(const QueryStage& to, int first) const {
        fetch_rows<K_QUERIES, K_THREADS>(to.queries, queries, first, tokens);
        fetch_rows<K_QUERIES, K_THREADS>(to.d_outputs, d_outputs, first, tokens);
        const int row = threadIdx.x % K_QUERIES;
        const bool inside = first + row < tokens;
        if (threadIdx.x < K_QUERIES) copy_async_4(to.lse + row, lse + (inside ? first + row : 0), inside);
        else if (threadIdx.x < 2 * K_QUERIES) copy_async_4(to.delta + row, delta + (inside ? first + row : 0), inside);
    }
};
static_assert(2 * K_QUERIES <= K_THREADS, "a thread copies one number of lse or delta");

extern "C" __global__ void __launch_bounds__(K_THREADS)
    attention_backward_keys(const __grid_constant__ AttentionParams p) {
    extern __shared__ __align__(128) u8 shared[];
    operand* const key_tile = (operand*)shared;
    operand* const value_tile = key_tile + K_TILE;
    u8* const stages = (u8*)(value_tile + K_TILE);
    const Work work = work_of_block(p, (p.tokens + K_KEYS - 1) / K_KEYS, false);
    const QueryRows rows = {head_of(p.q, work, p.tokens), head_of(p.d_o, work, p.tokens), head_of(p.lse, work, p),
                            head_of(p.delta, work, p), p.tokens};
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int first = work.tile * K_KEYS + 16 * warp; // key of the warp
    const int begin = work.tile * K_KEYS / K_QUERIES, end = (p.tokens + K_QUERIES - 1) / K_QUERIES;
    const float c = p.scale * LOG2_E;

    fetch_rows<K_KEYS, K_THREADS>(key_tile, head_of(p.k, work, p.tokens), work.tile * K_KEYS, p.tokens);
    fetch_rows<K_KEYS, K_THREADS>(value_tile, head_of(p.v, work, p.tokens), work.tile * K_KEYS, p.tokens);
    copy_async_commit();
    rows.fetch(query_stage(stages, begin), begin * K_QUERIES);
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    const OwnRows keys(key_tile + 16 * warp * PITCH), values(value_tile + 16 * warp * PITCH);
    Rows16 d_key, d_value;
    clear(d_key);
    clear(d_value);

    for (int turn = begin; turn < end; ++turn) {
        copy_async_wait<0>();
        __syncthreads(); // the queries are there, and nobody needs those of the turn before
        if (turn + 1 < end) rows.fetch(query_stage(stages, turn + 1), (turn + 1) * K_QUERIES);
        copy_async_commit();
        const QueryStage stage = query_stage(stages, turn);
#pragma unroll 1
        for (int at = 0; at < K_QUERIES; at += STEP) {
            const int first_query = turn * K_QUERIES + at;
            if (first_query + STEP <= first) continue; // before all keys of this warp
            Step step;
            clear(step.p);
            clear(step.ds);
#pragma unroll
            for (int i = 0; i < D_TILES; ++i)
                product_nt(step.p, keys.operand_at(i), stage.queries + at * PITCH + 16 * i, PITCH);
#pragma unroll
            for (int i = 0; i < D_TILES; ++i)
                product_nt(step.ds, values.operand_at(i), stage.d_outputs + at * PITCH + 16 * i, PITCH);
            const int key = first + lane / 4 - (first_query + 2 * (lane % 4)); // from the first query of this lane
#pragma unroll
            for (int n = 0; n < STEP / 8; ++n) {
                const int column = at + 8 * n + 2 * (lane % 4);
                const float2 lse = *(const float2*)(stage.lse + column), delta = *(const float2*)(stage.delta + column);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const bool seen = 8 * n + e % 2 - 8 * (e / 2) >= key;
                    const float shift = LOG2_E * (e % 2 ? lse.y : lse.x);
                    step.p[n][e] = seen ? power_of_two(fmaf(c, step.p[n][e], -shift)) : 0.0f;
                    step.ds[n][e] = step.p[n][e] * (step.ds[n][e] - (e % 2 ? delta.y : delta.x));
                }
            }
            add_product(d_value, step.p, stage.d_outputs + at * PITCH);
            add_product(d_key, step.ds, stage.queries + at * PITCH);
        }
    }
    // Nobody else reads the warp's own keys and values.
    store_rows(head_of(p.dk, work, p.tokens), d_key, p.scale, p.scale, key_tile + 16 * warp * PITCH, first, p.tokens);
    store_rows(head_of(p.dv, work, p.tokens), d_value, 1.0f, 1.0f, value_tile + 16 * warp * PITCH, first, p.tokens);
}
