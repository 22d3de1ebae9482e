// Causal softmax attention, backward, on Hopper: dq, dk and dv as in attention_backward.cu, by the products of a warpgroup.
//
// A block is a warpgroup. It takes 64 queries for dq, or 64 keys for dk and dv, and walks by 64 over what they meet. The rows
// of the other side come by the bulk copy engine, through stages; the warp that is the last to be done with a stage has it
// filled for a later turn. Accumulators are left operands as they are, so P and dS never pass through shared memory.
#include "attention_hopper.cuh"

struct AttentionBackwardHopperParams {
    TensorMap q, k, v, d_o; // (d, H, T, B) in copies of 64 columns and 64 tokens
    AttentionParams attention;
};

constexpr int WARPGROUP = 128; // threads of a block

#if HOPPER
constexpr int STEP = 64; // rows of a warpgroup, and of a turn
constexpr u32 TILE_BYTES = STEP * ROW_BYTES;
typedef float Scores[STEP / 8][4];

// Shared memory of a block: rows of two tensors that stay, stages of rows of two tensors that pass, and what keeps order.
template <int Stages> struct Shared {
    u8 own[2][TILE_BYTES];
    u8 passing[Stages][2][TILE_BYTES];
    Barrier own_filled, filled[Stages];
    u32 done[Stages];                   // warps that are done with a turn
    float lse[2][STEP], delta[2][STEP]; // for dk and dv: of the queries of a turn, and of the next
    static_assert(STEP * PITCH * 2 <= 2 * TILE_BYTES, "results pass through the rows that stay");
};

// Two tensors whose rows belong together.
struct Pair {
    const TensorMap &first, &second;
};

// Starts the copy of rows of both. By one thread.
__device__ __forceinline__ void copy_pair(u8 (&to)[2][TILE_BYTES], const Pair& from, const Work& work, int token,
                                          Barrier* barrier) {
    barrier_expect(barrier, 2 * TILE_BYTES);
    copy_rows<STEP>(shared_address(to[0]), from.first, work, token, barrier);
    copy_rows<STEP>(shared_address(to[1]), from.second, work, token, barrier);
}

// A block's walk over the turns from `begin` to `end`.
template <int Stages> struct Walk {
    Shared<Stages>* shared;
    const Pair passing;
    const Work work;
    int begin, end;

    __device__ __forceinline__ int stage(int turn) const { return (turn - begin) % Stages; }
    __device__ __forceinline__ void fill(int turn) const {
        if (turn < end) copy_pair(shared->passing[stage(turn)], passing, work, turn * STEP, shared->filled + stage(turn));
    }
    // Starts the copies of what stays and of the first turns. A barrier of the block comes next.
    __device__ __forceinline__ void start(const Pair& own) const {
        if (threadIdx.x != 0) return;
        barrier_init(&shared->own_filled);
        for (int i = 0; i < Stages; ++i) {
            barrier_init(shared->filled + i);
            shared->done[i] = 0;
        }
        copy_pair(shared->own, own, work, work.tile * STEP, &shared->own_filled);
        for (int i = 0; i < Stages; ++i) fill(begin + i);
    }
    __device__ __forceinline__ void wait(int turn) const {
        barrier_wait(shared->filled + stage(turn), (turn - begin) / Stages & 1);
    }
    // By every warp, when it is done with a turn.
    __device__ __forceinline__ void release(int turn) const {
        if (threadIdx.x % 32 == 0 && is_last<WARPGROUP / 32>(shared->done + stage(turn))) fill(turn + Stages);
        __syncwarp();
    }
};
#endif

extern "C" __global__ void __launch_bounds__(WARPGROUP, 2)
    attention_backward_queries_hopper(const __grid_constant__ AttentionBackwardHopperParams params) {
#if HOPPER
    constexpr int STAGES = HEAD_DIM == 64 ? 3 : 2;
    typedef Shared<STAGES> Memory;
    extern __shared__ __align__(1024) u8 memory[];
    Memory* const shared = (Memory*)memory;
    const AttentionParams& p = params.attention;
    const Work work = work_of_block(p, (p.tokens + STEP - 1) / STEP, true);
    const int turns = work.tile + 1;
    const Walk<STAGES> walk = {shared, {params.k, params.v}, work, 0, turns};
    walk.start({params.q, params.d_o});

    const int lane = threadIdx.x & 31, row = 16 * (threadIdx.x / 32), first = work.tile * STEP + row; // query of the warp
    const float c = p.scale * LOG2_E;
    float shift[2], delta[2]; // of the rows `row` and `row + 8` of this lane
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int token = first + lane / 4 + 8 * half;
        shift[half] = token < p.tokens ? LOG2_E * head_of(p.lse, work, p)[token] : 0.0f;
        delta[half] = token < p.tokens ? head_of(p.delta, work, p)[token] : 0.0f;
    }
    Rows16 d_query;
    clear(d_query);
    __syncthreads();
    barrier_wait(&shared->own_filled, 0);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        const u32 keys = shared_address(shared->passing[walk.stage(turn)][0]), values = keys + TILE_BYTES;
        Scores score, ds;
        walk.wait(turn);
        start_product_nt<STEP>(score, shared_address(shared->own[0]), keys);
        start_product_nt<STEP>(ds, shared_address(shared->own[1]), values);
        warpgroup_wait<1>();
        hold(score);
        if (turn == work.tile) hide_later_keys(score, first, turn * STEP);
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) score[n][e] = power_of_two(fmaf(c, score[n][e], -shift[e / 2]));
        warpgroup_wait<0>();
        hold(ds);
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) ds[n][e] = score[n][e] * (ds[n][e] - delta[e / 2]);
        Left left[STEP / 16];
        make_lefts(left, ds);
        start_product_nn(d_query, left, keys);
        warpgroup_wait<0>();
        hold(d_query);
        walk.release(turn);
    }
    __syncthreads(); // all are done with the rows that stay
    store_rows(head_of(p.dq, work, p.tokens), d_query, p.scale, p.scale, (operand*)shared->own + row * PITCH, first, p.tokens);
#endif
}

#if HOPPER
// The lse (by the first 64 threads) or delta (by the others) of the queries of a turn; zero beyond the sequence.
__device__ __forceinline__ float load_row(const AttentionParams& p, const Work& work, int turn) {
    const int token = turn * STEP + threadIdx.x % STEP;
    const float* rows = head_of(threadIdx.x < STEP ? p.lse : p.delta, work, p);
    return token < p.tokens ? (threadIdx.x < STEP ? LOG2_E : 1.0f) * rows[token] : 0.0f;
}
template <class Memory> __device__ __forceinline__ void store_row(Memory* shared, int turn, float x) {
    (threadIdx.x < STEP ? shared->lse : shared->delta)[turn % 2][threadIdx.x % STEP] = x;
}
#endif

extern "C" __global__ void __launch_bounds__(WARPGROUP, HEAD_DIM == 64 ? 3 : 2)
    attention_backward_keys_hopper(const __grid_constant__ AttentionBackwardHopperParams params) {
#if HOPPER
    typedef Shared<2> Memory;
    extern __shared__ __align__(1024) u8 memory[];
    Memory* const shared = (Memory*)memory;
    const AttentionParams& p = params.attention;
    const int end = (p.tokens + STEP - 1) / STEP;
    const Work work = work_of_block(p, end, false);
    const Walk<2> walk = {shared, {params.q, params.d_o}, work, work.tile, end};
    walk.start({params.k, params.v});

    const int lane = threadIdx.x & 31, row = 16 * (threadIdx.x / 32), first = work.tile * STEP + row; // key of the warp
    const float c = p.scale * LOG2_E;
    Rows16 d_key, d_value;
    clear(d_key);
    clear(d_value);
    store_row(shared, work.tile, load_row(p, work, work.tile));
    __syncthreads();
    barrier_wait(&shared->own_filled, 0);
#pragma unroll 1
    for (int turn = work.tile; turn < end; ++turn) {
        const u32 queries = shared_address(shared->passing[walk.stage(turn)][0]), d_outputs = queries + TILE_BYTES;
        const float next_row = load_row(p, work, turn + 1);
        Scores score, ds; // transposed
        walk.wait(turn);
        start_product_nt<STEP>(score, shared_address(shared->own[0]), queries);
        start_product_nt<STEP>(ds, shared_address(shared->own[1]), d_outputs);
        warpgroup_wait<1>();
        hold(score);
        const float* lse = shared->lse[turn % 2] + 2 * (lane % 4);
        const float* delta = shared->delta[turn % 2] + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            const float2 shift = *(const float2*)(lse + 8 * n);
#pragma unroll
            for (int e = 0; e < 4; ++e) score[n][e] = power_of_two(fmaf(c, score[n][e], -(e % 2 ? shift.y : shift.x)));
        }
        if (turn == work.tile) {
            const int key = row + lane / 4 - 2 * (lane % 4); // from the first query of this lane
#pragma unroll
            for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (8 * n + e % 2 - 8 * (e / 2) < key) score[n][e] = 0.0f;
        }
        warpgroup_wait<0>();
        hold(ds);
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            const float2 mean = *(const float2*)(delta + 8 * n);
#pragma unroll
            for (int e = 0; e < 4; ++e) ds[n][e] = score[n][e] * (ds[n][e] - (e % 2 ? mean.y : mean.x));
        }
        Left left[STEP / 16], d_left[STEP / 16];
        make_lefts(left, score);
        make_lefts(d_left, ds);
        start_product_nn(d_value, left, d_outputs);
        start_product_nn(d_key, d_left, queries);
        store_row(shared, turn + 1, next_row);
        warpgroup_wait<0>();
        hold(d_value);
        hold(d_key);
        walk.release(turn);
        __syncthreads(); // lse and delta of the next turn are there, and nobody needs those of this one
    }
    operand* const out = (operand*)shared->own + row * PITCH;
    store_rows(head_of(p.dk, work, p.tokens), d_key, p.scale, p.scale, out, first, p.tokens);
    store_rows(head_of(p.dv, work, p.tokens), d_value, 1.0f, 1.0f, out, first, p.tokens);
#endif
}
