// Backward sweep of the chunk form of GDN and GDN-2 for Hopper: what chunk_backward.cu does, by products of whole warpgroups.
//
//   dU = P^T do + (e^{G_C - G} k) dS     Y = T^T dU     dv = beta Y
//   dS <- e^{G_C} dS + (s e^G q)^T do - (beta e^G k)^T Y
//
//   do (T, HV, V), the workspace of chunk_prepare.cu or gdn2_prepare.cu, d_final_state
//     ->  dv (T, HV, V), dh0, and for the gradient: Y, dS at the end of each chunk, the scales of do
//
// A block takes one segment of a sequence, one value head and 64 columns of V. Its three warpgroups have three roles:
//
//   chain     dS^T (64 x K) stays in binary32 accumulators and is the left operand of dU^T; then Y^T = dU^T T, and dS^T gets
//             what do and Y add. Nothing else is on the way from chunk to chunk.
//   ahead     what does not depend on dS, a chunk ahead: (P^T do)^T, and do^T as the left operand for the state.
//   outputs   dS, Y and dv on their way to memory.
//
// Compiled into the functions of chunk_backward.cu, with the same precision. Scales of f16 operands are those of one warp to a
// group there. Blocks of T and P above the diagonal are zeros.
#define SPLIT 1
#define GROUPS 4
#define STAGES 1
#include "chunk_hopper.cuh"

struct ChunkBackwardParams {
    // Tiles of 64 columns of the workspace, (64, 1, rows, columns / 64), and of do, (64, HV, T, V / 64).
    TensorMap keys, write_keys, queries, inverse, scores, d_o;
    ChunkParams chunk;
};

#if HOPPER
static_assert(MODE == MODE_F16, "operands are f16");

constexpr int ALL_THREADS = 3 * 128;
constexpr int CHAIN_REGISTERS = 216, OTHER_REGISTERS = 144; // of a thread
// Chunks whose tiles are in shared memory at once, for the first two roles.
constexpr int CHAIN_TURNS = CHANNELS && KD == 128 ? 2 : 3, AHEAD_TURNS = 2;
constexpr float LARGEST_POWER = 1.7014118e38f; // 2^127

// Tiles of one chunk for the chain, then those for the role ahead of it: in bytes from the first.
constexpr u32 WRITE_KEYS_AT = CHANNELS ? SPANS * TILE_BYTES : 0;
constexpr u32 QUERIES_AT = WRITE_KEYS_AT + SPANS * TILE_BYTES;
constexpr u32 INVERSE_AT = QUERIES_AT + SPANS * TILE_BYTES;
constexpr u32 CHAIN_TILES = INVERSE_AT / TILE_BYTES + 1;
constexpr u32 D_OUTPUT_AT = TILE_BYTES, AHEAD_TILES = 2; // after the scores

// What do makes of a chunk without dS, each thread's for the thread of its number.
struct Prepared {
    float4 product[8][128]; // (P^T do)^T
    uint4 reads[4][128];    // left operands of do^T, times the decay and s q's power of two,
    float read_inverse[4];  // and what turns those of a warp back
};
struct Shared {
    Tile chain[CHAIN_TURNS][CHAIN_TILES];
    Tile ahead[AHEAD_TURNS][AHEAD_TILES];
    Tile state[SPANS]; // dS^T, rows are columns of V
    Tile adjoints;     // Y^T
    Tile turned;       // Y, then dv on their way to memory, rows are tokens
    Prepared prepared;
    float coefficients[CHAIN_TURNS][COEFFICIENT_NUMBERS], ahead_coefficients[AHEAD_TURNS][COEFFICIENT_NUMBERS];
    float adjoint_unit[4]; // what turns the operands of a warp's rows back
    Barrier chain_filled[CHAIN_TURNS], chain_free[CHAIN_TURNS];     // by the copies, by all that read the tiles
    Barrier ahead_filled[AHEAD_TURNS], ahead_free[AHEAD_TURNS];     // the same
    Barrier prepared_ready, prepared_free;                          // by the role ahead, by the chain
    Barrier state_ready, adjoints_ready;                            // by the chain
    Barrier state_free, adjoints_free;                              // by the outputs
};
static_assert(sizeof(Shared) + 1024 <=
                  (CHAIN_TURNS * CHAIN_TILES + AHEAD_TURNS * AHEAD_TILES + SPANS + 2) * TILE_BYTES + 38 * 1024,
              "the launch has as much");

// What both roles know of a block. Turn 0 is the last chunk.
struct Block {
    const ChunkBackwardParams& params;
    Shared& s;
    Segment segment;
    int head, qk_head, first_column;

    __device__ __forceinline__ int turns() const { return segment.end - segment.begin; }
    __device__ __forceinline__ int chunk_of(int turn) const { return segment.end - 1 - turn; }
    __device__ __forceinline__ int token_of(int turn) const { return segment.token + (turns() - 1 - turn) * CHUNK; }
    __device__ __forceinline__ int length_of(int turn) const {
        return min(CHUNK, segment.tokens - (turns() - 1 - turn) * CHUNK);
    }
    __device__ __forceinline__ long long square_of(int turn) const {
        return (long long)chunk_of(turn) * params.chunk.value_heads + head;
    }
    // First row of its tiles of keys and queries.
    __device__ __forceinline__ int row_of(int turn) const {
        return CHANNELS ? (int)square_of(turn) * CHUNK : (chunk_of(turn) * params.chunk.qk_heads + qk_head) * CHUNK;
    }
    // What a warp's 16 columns are among those of all chunks.
    __device__ __forceinline__ long long part_of(int turn, int group) const {
        return square_of(turn) * (VD / 16) + first_column / 16 + group;
    }

    // By one thread: starts the copies of a chunk for the chain, if there is one. The place must be free.
    __device__ __forceinline__ void fill_chain(int turn) const {
        if (turn >= turns()) return;
        const int stage = turn % CHAIN_TURNS, row = row_of(turn);
        const u32 to = shared_address(s.chain[stage]);
        Barrier* barrier = s.chain_filled + stage;
        barrier_expect(barrier, CHAIN_TILES * TILE_BYTES + COEFFICIENT_BYTES);
        copy_tile(to + WRITE_KEYS_AT, params.write_keys, {0, 0, row, 0}, barrier);
        copy_bulk(s.coefficients[stage], params.chunk.coefficients + square_of(turn) * COEFFICIENT_NUMBERS, COEFFICIENT_BYTES, barrier);
        copy_tile(to + INVERSE_AT, params.inverse, {0, 0, (int)square_of(turn) * CHUNK, 0}, barrier);
        copy_tile(to + QUERIES_AT, params.queries, {0, 0, row, 0}, barrier);
        if (CHANNELS) copy_tile(to, params.keys, {0, 0, row, 0}, barrier);
    }
    // The same for the role ahead of it.
    __device__ __forceinline__ void fill_ahead(int turn) const {
        if (turn >= turns()) return;
        const int stage = turn % AHEAD_TURNS;
        const u32 to = shared_address(s.ahead[stage]);
        Barrier* barrier = s.ahead_filled + stage;
        barrier_expect(barrier, AHEAD_TILES * TILE_BYTES + COEFFICIENT_BYTES);
        copy_tile(to + D_OUTPUT_AT, params.d_o, {0, head, token_of(turn), first_column / SPAN}, barrier);
        copy_tile(to, params.scores, {0, 0, (int)square_of(turn) * CHUNK, 0}, barrier);
        copy_bulk(s.ahead_coefficients[stage], params.chunk.coefficients + square_of(turn) * COEFFICIENT_NUMBERS, COEFFICIENT_BYTES,
                  barrier);
    }
};

template <bool Starts> __device__ __forceinline__ void run_chain(const Block& block) {
    const ChunkParams& p = block.params.chunk;
    Shared& s = block.s;
    const Segment& segment = block.segment;
    const Place at = place_of_warp();
    const u32 warp = threadIdx.x / 32;
    const int first_column = block.first_column + 16 * at.group, turns = block.turns();
    const LeftPlace place(warp, at.lane);
    const long long of_segment = (long long)segment.number * p.value_heads + block.head;
    const long long of_sequence = (long long)segment.sequence * p.value_heads + block.head;

    // dS^T / unit times held.factor. s is a power of two times `unit`, so what do adds is rounded for its decay alone.
    const float unit = p.scale_unit;
    OwnState state;
    if (segment.last)
        load_state(state, p.d_final_state, state_place(of_sequence, p.state_transposed, VD, first_column, at));
    else
        load_state(state, Starts ? nullptr : p.segment_d_states, state_place(of_segment, true, VD, first_column, at));
    multiply(state, 1.0f / unit);
    float largest_state = largest_of(state);
    Scale held = {1.0f, 1.0f};

#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        const int stage = turn % CHAIN_TURNS;
        const u32 tiles = shared_address(s.chain[stage]);
        const float* weight = s.coefficients[stage];

        rescale(state, held, scale_for(largest_state));
        Left left[KD / 16];
#pragma unroll
        for (int c = 0; c < KD / 16; ++c) left[c] = make_left(state[2 * c], state[2 * c + 1], 1.0f);
        barrier_wait(s.chain_filled + stage, turn / CHAIN_TURNS & 1);
        // dU^T = dS^T (weighted k)^T + do^T P
        OwnTokens right;
        hold(right);
        warpgroup_fence();
        start_left_product(right, left, tiles + WRITE_KEYS_AT);
        warpgroup_commit();
        if (!Starts) {
            if (turn > 0) barrier_wait(&s.state_free, turn - 1 & 1);
#pragma unroll
            for (int c = 0; c < KD / 16; ++c) store_matrices(shared_address(s.state + c / 4) + place(c % 4), left[c].r);
            warp_arrive(&s.state_ready, at.lane);
            keep_scale(p.d_state_scales, block.part_of(turn, at.group), held.inverse, at);
        }
        barrier_wait(&s.prepared_ready, turn & 1);
        warpgroup_wait<0>();
        hold(right);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            float2 write = *(const float2*)(weight + WRITE * CHUNK + 8 * n + 2 * at.quad);
            write.x *= held.inverse * unit;
            write.y *= held.inverse * unit;
            const float4 product = s.prepared.product[n][threadIdx.x];
            right[n][0] = fmaf(right[n][0], write.x, product.x);
            right[n][1] = fmaf(right[n][1], write.y, product.y);
            right[n][2] = fmaf(right[n][2], write.x, product.z);
            right[n][3] = fmaf(right[n][3], write.y, product.w);
        }
        const Scale right_scale = scale_for(largest_in_chains(right));
        Left rounded[4], rest[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) rounded[c] = make_left(right[2 * c], right[2 * c + 1], right_scale.factor);

        // Y^T = dU^T T. What rounding leaves of dU is multiplied too.
        OwnTokens adjoints;
        hold(adjoints);
        warpgroup_fence();
        start_square_product<0>(adjoints, rounded, tiles + INVERSE_AT);
        warpgroup_commit();
        hold(right);
#pragma unroll
        for (int c = 0; c < 4; ++c) rest[c] = make_left_rest(right[2 * c], right[2 * c + 1], right_scale.factor, rounded[c]);
        warpgroup_fence();
        start_square_product<1>(adjoints, rest, tiles + INVERSE_AT);
        warpgroup_commit();

        // dS^T <- e^{G_C} dS^T + (weighted do)^T Q'; what Y adds follows below.
        const float decay = largest_decay(weight), read_inverse = s.prepared.read_inverse[warp];
        Scale next = smaller(scale_for(largest_state), {inverse_of(read_inverse), read_inverse});
        decay_state(state, decay, weight, ratio(next, held), at);
        held = next;
        Left reads[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const uint4 operands = s.prepared.reads[c][threadIdx.x];
            reads[c] = {operands.x, operands.y, operands.z, operands.w};
            scale_left(reads[c], held.factor * read_inverse);
        }
        warp_arrive(&s.prepared_free, at.lane);
        hold(state);
        warpgroup_fence();
        start_state_product(state, reads, tiles + QUERIES_AT);
        warpgroup_commit();
        warpgroup_wait<1>();
        hold(adjoints);

        // dS^T <- dS^T - (weighted Y)^T K'
        const float back = -right_scale.inverse / unit;
        float most[4] = {};
        float2 kept[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            kept[n] = *(const float2*)(weight + READ * CHUNK + 8 * n + 2 * at.quad);
            kept[n].x *= back;
            kept[n].y *= back;
#pragma unroll
            for (int e = 0; e < 4; ++e) most[e] = fmaxf(most[e], fabsf(adjoints[n][e] * (e % 2 ? kept[n].y : kept[n].x)));
        }
        const Scale write = scale_for(warp_max(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]))));
        next = smaller(held, write);
        Left weighted[4];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            kept[n].x = fmaxf(kept[n].x * next.factor, -LARGEST_POWER);
            kept[n].y = fmaxf(kept[n].y * next.factor, -LARGEST_POWER);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            float kept_adjoints[2][4];
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    kept_adjoints[m][e] = adjoints[2 * c + m][e] * (e % 2 ? kept[2 * c + m].y : kept[2 * c + m].x);
            weighted[c] = make_left(kept_adjoints[0], kept_adjoints[1], 1.0f);
        }
        warpgroup_wait<0>();
        hold(state);
        rescale(state, held, next);
        hold(state);
        warpgroup_fence();
        start_state_product(state, weighted, tiles);
        warpgroup_commit();
        if (!Starts) {
            const Scale plain = scale_for(largest_in_chains(adjoints) * right_scale.inverse);
            const float to_plain = ratio(plain, right_scale);
            if (turn > 0) barrier_wait(&s.adjoints_free, turn - 1 & 1);
#pragma unroll
            for (int c = 0; c < 4; ++c)
                store_matrices(shared_address(&s.adjoints) + place(c), make_left(adjoints[2 * c], adjoints[2 * c + 1], to_plain).r);
            if (at.lane == 0) s.adjoint_unit[warp] = plain.inverse;
            warp_arrive(&s.adjoints_ready, at.lane);
            keep_scale(p.adjoint_scales, block.part_of(turn, at.group), plain.inverse, at);
        }
        warpgroup_wait<0>();
        hold(state);
        warp_arrive(s.chain_free + stage, at.lane);
        if (turn % LOOK_UP_EVERY == LOOK_UP_EVERY - 1)
            largest_state = largest_in_chains(state) * held.inverse;
        else // the scales say what the largest of the added operands are, up to a factor of 2
            largest_state = fmaf(decay, largest_state, MOST_GROWTH * 32768.0f * (read_inverse + write.inverse));
    }

    if (Starts)
        store_state(state, p.segment_d_states, state_place(of_segment - p.value_heads, true, VD, first_column, at),
                    held.inverse * unit);
    else if (segment.first)
        store_state(state, p.dh0, state_place(of_sequence, p.state_transposed, VD, first_column, at), held.inverse * unit);
}

// What the chain needs of do in a chunk.
template <bool Starts> __device__ __forceinline__ void prepare(const Block& block, int turn, const Place& at) {
    const ChunkParams& p = block.params.chunk;
    Shared& s = block.s;
    const u32 thread = threadIdx.x % 128, warp = thread / 32;
    const int stage = turn % AHEAD_TURNS, valid = block.length_of(turn);
    const u32 tiles = shared_address(s.ahead[stage]);
    const float* weight = s.ahead_coefficients[stage];
    barrier_wait(s.ahead_filled + stage, turn / AHEAD_TURNS & 1);
    OwnTokens values;
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        u32 pairs[4];
        load_matrices_transposed(pairs, tiles + D_OUTPUT_AT + turned_place(warp, at.lane) + 8 * n * SPAN_BYTES);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values[n + i / 2][2 * (i % 2)] = first_of(pairs[i]);
            values[n + i / 2][2 * (i % 2) + 1] = second_of(pairs[i]);
        }
    }
    if (valid < CHUNK) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (8 * n + 2 * at.quad + e % 2 >= valid) values[n][e] = 0.0f;
    }
    const float largest = largest_in_chains(values);
    if (!Starts) keep_scale(p.d_o_scales, block.part_of(turn, warp), scale_for(largest).inverse, at);
    const Scale weighted = scale_for(largest * weight[MOST * CHUNK + QUERY]);
#pragma unroll
    for (int n = 0; n < 8; ++n) weight_columns(values[n], *(const float2*)(weight + QUERY * CHUNK + 8 * n + 2 * at.quad), 1.0f);
    Left left[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) left[c] = make_left(values[2 * c], values[2 * c + 1], weighted.factor);
    OwnTokens product;
    hold(product);
    warpgroup_fence();
    start_square_product<0>(product, left, tiles);
    warpgroup_commit();
    hold(values);
#pragma unroll
    for (int n = 0; n < 8; ++n) weight_columns(values[n], *(const float2*)(weight + DECAY * CHUNK + 8 * n + 2 * at.quad), 1.0f);
    const Scale read = scale_for(largest_in_chains(values)); // a decay may have wiped out the largest
    if (turn > 0) barrier_wait(&s.prepared_free, turn - 1 & 1);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const Left reads = make_left(values[2 * c], values[2 * c + 1], read.factor);
        s.prepared.reads[c][thread] = make_uint4(reads.r[0], reads.r[1], reads.r[2], reads.r[3]);
    }
    if (at.lane == 0) s.prepared.read_inverse[warp] = read.inverse;
    warpgroup_wait<0>();
    hold(product);
    warp_arrive(s.ahead_free + stage, at.lane);
    const float back = weighted.inverse * p.scale_unit;
#pragma unroll
    for (int n = 0; n < 8; ++n)
        s.prepared.product[n][thread] =
            make_float4(product[n][0] * back, product[n][1] * back, product[n][2] * back, product[n][3] * back);
    warp_arrive(&s.prepared_ready, at.lane);
    if (thread == 0 && turn + AHEAD_TURNS < block.turns()) {
        barrier_wait(s.ahead_free + stage, turn / AHEAD_TURNS & 1);
        block.fill_ahead(turn + AHEAD_TURNS);
    }
    __syncwarp();
}

// Y, and dv for GDN, of a chunk to memory.
__device__ __forceinline__ void store_adjoints(const Block& block, int turn, const Place& at) {
    const ChunkParams& p = block.params.chunk;
    Shared& s = block.s;
    const u32 warp = threadIdx.x / 32 % 4, to_turned = shared_address(&s.turned) + turned_place(warp, at.lane);
    const LeftPlace place(warp, at.lane);
    barrier_wait(&s.adjoints_ready, turn & 1);
    u32 pairs[4][4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        load_matrices(pairs[c], shared_address(&s.adjoints) + place(c));
        store_matrices_transposed(to_turned + 16 * c * SPAN_BYTES, pairs[c]);
    }
#if !CHANNELS
    const float unit = s.adjoint_unit[warp];
#endif
    warp_arrive(&s.adjoints_free, at.lane);
    store_turned(p.adjoints + block.square_of(turn) * CHUNK * VD + block.first_column, VD, s.turned, warp, at.lane, CHUNK);
    __syncwarp();
#if !CHANNELS
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float2 beta = *(const float2*)(s.coefficients[turn % CHAIN_TURNS] + BETA * CHUNK + 16 * c + 8 * m + 2 * at.quad);
            beta.x *= unit;
            beta.y *= unit;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32& pair = pairs[c][2 * m + half];
                pair = pair_of_inputs(from_operand((operand)pair) * beta.x, from_operand((operand)(pair >> 16)) * beta.y);
            }
        }
        store_matrices_transposed(to_turned + 16 * c * SPAN_BYTES, pairs[c]);
    }
    __syncwarp();
    INPUT* const to = p.dv + ((long long)block.token_of(turn) * p.value_heads + block.head) * VD + block.first_column;
    store_turned(to, (long long)p.value_heads * VD, s.turned, warp, at.lane, block.length_of(turn));
    __syncwarp();
#endif
}

template <bool Starts> __device__ __forceinline__ void run_ahead(const Block& block) {
    const Place at = place_of_warp();
    const int turns = block.turns();
    if (threadIdx.x % 128 == 0)
        for (int turn = 0; turn < AHEAD_TURNS; ++turn) block.fill_ahead(turn);
    __syncwarp();
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) prepare<Starts>(block, turn, at);
}

template <bool Starts> __device__ __forceinline__ void run_outputs(const Block& block) {
    const ChunkParams& p = block.params.chunk;
    Shared& s = block.s;
    const Place at = place_of_warp();
    const u32 thread = threadIdx.x % 128, warp = thread / 32;
    const int turns = block.turns();
    if (thread == 0)
        for (int turn = 0; turn < CHAIN_TURNS; ++turn) block.fill_chain(turn);
    __syncwarp();
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        if (!Starts) {
            barrier_wait(&s.state_ready, turn & 1);
            store_rows(p.d_states + (block.square_of(turn) * VD + block.first_column) * KD, s.state, warp, at.lane);
            warp_arrive(&s.state_free, at.lane);
            store_adjoints(block, turn, at);
        }
        const int stage = turn % CHAIN_TURNS;
        if (!Starts) warp_arrive(s.chain_free + stage, at.lane);
        if (thread == 0 && turn + CHAIN_TURNS < turns) {
            barrier_wait(s.chain_free + stage, turn / CHAIN_TURNS & 1);
            block.fill_chain(turn + CHAIN_TURNS);
        }
        __syncwarp();
    }
}

template <bool Starts> __device__ __forceinline__ void sweep(const ChunkBackwardParams& params) {
    extern __shared__ __align__(1024) u8 shared[];
    const ChunkParams& p = params.chunk;
    if (Starts) let_next_kernel_start();
    wait_for_kernel_before();
    const Segment segment = segment_of_block(p);
    if (Starts && segment.first) return;
    Shared& s = *(Shared*)shared;
    const int head = blockIdx.y;
    const Block block = {params, s, segment, head, head / (p.value_heads / p.qk_heads), (int)blockIdx.x * COLUMNS};
    if (threadIdx.x == 0) {
        for (int i = 0; i < CHAIN_TURNS; ++i) {
            barrier_init(s.chain_filled + i);
            barrier_init(s.chain_free + i, Starts ? 4 : 8);
        }
        for (int i = 0; i < AHEAD_TURNS; ++i) {
            barrier_init(s.ahead_filled + i);
            barrier_init(s.ahead_free + i, 4);
        }
        barrier_init(&s.prepared_ready, 4);
        barrier_init(&s.prepared_free, 4);
        barrier_init(&s.state_ready, 4);
        barrier_init(&s.adjoints_ready, 4);
        barrier_init(&s.state_free, 4);
        barrier_init(&s.adjoints_free, 4);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        take_registers<CHAIN_REGISTERS>();
        run_chain<Starts>(block);
    } else if (threadIdx.x < 256) {
        give_registers<OTHER_REGISTERS>();
        run_ahead<Starts>(block);
    } else {
        give_registers<OTHER_REGISTERS>();
        run_outputs<Starts>(block);
    }
}
#define SWEEP(name, starts)                                                                                             \
    extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) name(const __grid_constant__ ChunkBackwardParams params) { \
        sweep<starts>(params);                                                                                          \
    }
#else
#define SWEEP(name, starts) \
    extern "C" __global__ void name(const __grid_constant__ ChunkBackwardParams params) {}
#endif

// Grid: V / 64, HV, segments.
SWEEP(chunk_backward, false)
#if CUT
SWEEP(chunk_segment_starts, true)
#endif
