// Causal softmax attention, forward, on Hopper: the same as attention_forward.cu, by the products of warpgroups.
//
// A block takes 128 queries of one head, a warpgroup 64 of them, and walks over the keys by tiles of 128 (d = 64) or 64
// (d = 128). Queries, keys and values come by the bulk copy engine; keys and values have a ring of stages each. The warp
// that is the last to be done with a stage asks for what comes into it next, so nobody waits for room in a ring, and no
// warp is set apart for copies. With 128 registers a thread, two blocks share a multiprocessor: while one of the four
// warpgroups exponentiates, products of the others keep the tensor cores busy, and one block's start and end hide behind
// the other's work.
#include "attention_hopper.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;

struct AttentionHopperParams {
    TensorMap q, k, v; // (d, H, T, B) in copies of 64 columns and 64 tokens
    AttentionParams attention;
};

#if HOPPER
constexpr int QUERIES = 128, KEYS = HEAD_DIM == 64 ? 128 : 64;
constexpr int KEY_STAGES = 3, VALUE_STAGES = HEAD_DIM == 64 ? 3 : 2;
constexpr u32 QUERY_BYTES = QUERIES * ROW_BYTES, STAGE_BYTES = KEYS * ROW_BYTES;

// Shared memory of a block: what the copy engine fills, then what keeps order.
constexpr u32 KEYS_AT = QUERY_BYTES, VALUES_AT = KEYS_AT + KEY_STAGES * STAGE_BYTES;
constexpr u32 ORDER_AT = VALUES_AT + VALUE_STAGES * STAGE_BYTES;
struct Order {
    Barrier query, keys[KEY_STAGES], values[VALUE_STAGES]; // filled
    u32 done[KEY_STAGES];                                  // warps that are done with a turn
};
static_assert(ORDER_AT + sizeof(Order) + 1024 <= 114 * 1024, "two blocks share a multiprocessor");
static_assert(2 * 16 * WARPS * PITCH <= ORDER_AT, "the output passes through the tiles");

// A ring of stages in shared memory, through which the rows of a tensor come by KEYS at a time.
template <int Stages> struct Ring {
    const TensorMap& from;
    u32 at; // in shared memory
    Barrier* filled;

    __device__ __forceinline__ u32 stage(int turn) const { return at + turn % Stages * STAGE_BYTES; }
    // By one thread of the block.
    __device__ __forceinline__ void fill(const Work& work, int turn, int turns) const {
        if (turn >= turns) return;
        barrier_expect(filled + turn % Stages, STAGE_BYTES);
        copy_rows<KEYS>(stage(turn), from, work, turn * KEYS, filled + turn % Stages);
    }
    __device__ __forceinline__ void wait(int turn) const { barrier_wait(filled + turn % Stages, turn / Stages & 1); }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attention_forward_hopper(const __grid_constant__ AttentionHopperParams params) {
#if HOPPER
    extern __shared__ __align__(1024) u8 shared[];
    const AttentionParams& p = params.attention;
    const Work work = work_of_block(p, (p.tokens + QUERIES - 1) / QUERIES, true);
    const int warp = threadIdx.x / 32, warpgroup = threadIdx.x / 128;
    const int first = work.tile * QUERIES + 16 * warp; // query of the warp
    const int turns = (min((work.tile + 1) * QUERIES, p.tokens) + KEYS - 1) / KEYS;
    // Those with keys that the warpgroup sees.
    const int own_turns = KEYS == QUERIES ? turns : min(turns, work.tile * (QUERIES / KEYS) + 64 * (warpgroup + 1) / KEYS);
    const u32 queries = shared_address(shared);
    Order* const order = (Order*)(shared + ORDER_AT);
    const Ring<KEY_STAGES> keys = {params.k, queries + KEYS_AT, order->keys};
    const Ring<VALUE_STAGES> values = {params.v, queries + VALUES_AT, order->values};

    if (threadIdx.x == 0) {
        barrier_init(&order->query);
        for (int i = 0; i < VALUE_STAGES; ++i) barrier_init(order->values + i);
        for (int i = 0; i < KEY_STAGES; ++i) {
            barrier_init(order->keys + i);
            order->done[i] = 0;
        }
        barrier_expect(&order->query, QUERY_BYTES);
        copy_rows<QUERIES>(queries, params.q, work, work.tile * QUERIES, &order->query);
        for (int turn = 0; turn < KEY_STAGES; ++turn) {
            keys.fill(work, turn, turns);
            if (turn < VALUE_STAGES) values.fill(work, turn, turns);
        }
    }
    __syncthreads();

    Rows16 output;
    clear(output);
    Softmax softmax = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}};
    const float c = p.scale * LOG2_E;
    barrier_wait(&order->query, 0);
#pragma unroll 1
    for (int turn = 0; turn < own_turns; ++turn) {
        float score[KEYS / 8][4];
        keys.wait(turn);
        start_product_nt<QUERIES>(score, queries + warpgroup * 64 * SPAN_BYTES, keys.stage(turn));
        warpgroup_wait<0>();
        hold(score);
        if ((turn + 1) * KEYS > first + 1) hide_later_keys(score, first, turn * KEYS);
        exponentiate<2>(score, softmax, output, c);
        Left probability[KEYS / 16];
        make_lefts(probability, score);
        values.wait(turn);
        start_product_nn(output, probability, values.stage(turn));
        warpgroup_wait<0>();
        hold(output);
        if (threadIdx.x % 32 == 0 && is_last<WARPS>(order->done + turn % KEY_STAGES)) {
            keys.fill(work, turn + KEY_STAGES, turns);
            values.fill(work, turn + VALUE_STAGES, turns);
        }
        __syncwarp();
    }

    float inverse[2];
    finish_softmax(inverse, softmax, p, work, first);
    __syncthreads(); // all are done with the tiles
    operand* const out = (operand*)shared + 16 * warp * PITCH;
    store_rows(head_of(p.o, work, p.tokens), output, inverse[0], inverse[1], out, first, p.tokens);
#endif
}
