// Forward of the chunk form of GDN in one sweep, for Hopper: what chunk_prepare.cu and chunk_forward.cu do together, without
// keeping anything between them.
//
//   q, k (T, HK, K), v (T, HV, V), g, beta (T, HV), initial_state  ->  o (T, HV, V), final_state
//
// A block takes one segment of a sequence, one value head and 64 CONSUMERS columns of V. Its warpgroups have two roles:
//
//   consumers  64 columns of V each. S^T (64 x K) stays in binary32 accumulators, and is cast to the left operand of
//              R^T = beta v^T - (beta e^G k S)^T,  U^T = R^T T^T,  o^T = s (e^G S^T q + U^T P^T),  S^T <- e^{G_C} S^T + U^T k
//   preparer   one chunk ahead: brings q, k and v by the copy engine, turns rows of q and k into operands (K', Q', chunk.cuh)
//              where they lie, and makes T = (I + L)^-1, the scores P and the coefficients.
//
// The output of a chunk is finished while the first product of the next one runs. Scales of f16 operands are those of
// chunk_forward.cu with one warp to a group: one for a warp's 16 columns of V and a whole chunk.
//
// Compiled in besides what chunk.cuh says: CONSUMERS, 1 or 2.
#define SPLIT 1
#define GROUPS (4 * CONSUMERS)
#define STAGES 1
#include "hopper.cuh"

#include "chunk_decay.cuh"
#include "chunk_inverse.cuh"
#include "chunk_sweep.cuh"

struct ChunkFusedParams {
    // (64, HK, T, K / 64) in copies of all columns of 64 tokens, (64, HV, T, V / 64) in copies of a block's columns
    TensorMap q, k, v;
    ChunkParams chunk;
};

#if HOPPER
static_assert(CHUNK == 64 && KD % SPAN == 0 && KD <= 128 && sizeof(INPUT) == 2, "tiles of 64 tokens, of 16-bit numbers");
static_assert(VD % COLUMNS == 0, "the columns of a block divide V");

constexpr int CONSUMER_THREADS = 128 * CONSUMERS;
constexpr int TURNS = 3; // chunks whose q, k and v are in shared memory at once
constexpr int READY = 3; // chunks that are prepared at once
constexpr int SPANS = KD / SPAN;
constexpr u32 TILE_BYTES = CHUNK * SPAN_BYTES;

// Tiles of one chunk, filled by the copy engine: first of the keys, then of the queries, then of the values.
constexpr u32 QUERIES_AT = SPANS * TILE_BYTES, VALUES_AT = 2 * SPANS * TILE_BYTES, TURN_TILES = 2 * SPANS + CONSUMERS;

struct __align__(1024) Tile {
    u8 bytes[TILE_BYTES];
};
struct Shared {
    Tile turns[TURNS][TURN_TILES];
    Tile inverse[READY], scores[READY]; // element (i, j) at place_in_tile(i, j)
    operand lower[SQUARE_TILE];
    float coefficients[READY][MOST * CHUNK];
    float diagonal[TILES][16][16];           // L_ij of a block at [j][i]: columns are read
    float column_decay[TILES][CHUNK];        // e^{G_m - G_j}, m the first token of the block; 0 from m on
    float key[2][CHUNK], query[2][CHUNK];    // rk, rq / s; a warp may begin with a chunk before all have left the one before
    Gates gates[2];
    Barrier filled[TURNS]; // by the copy engine
    Barrier ready[READY];  // by the preparer
    Barrier used[READY];   // by the consumers
};
template <class T> constexpr bool IS_BF16 = false;
template <> constexpr bool IS_BF16<bf16> = true;
constexpr bool INPUT_IS_BF16 = IS_BF16<INPUT>;
constexpr int PREPARED_BARRIER = 1; // named barrier of the preparer

// The largest magnitude of each half of two words of 16-bit floating-point numbers, which are ordered like integers.
__device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {
    u32 y;
    asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b & 0x7fff7fffu));
    return y;
}

// The two inputs of a word.
__device__ __forceinline__ float first_of(u32 pair) {
    if constexpr (INPUT_IS_BF16) return __uint_as_float(pair << 16);
    return to_float(f16{(u16)pair});
}
__device__ __forceinline__ float second_of(u32 pair) {
    if constexpr (INPUT_IS_BF16) return __uint_as_float(pair & 0xffff0000u);
    return to_float(f16{(u16)(pair >> 16)});
}
__device__ __forceinline__ u32 pair_of_inputs(float first, float second) {
    if constexpr (!INPUT_IS_BF16) return pack_16(first, second);
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// What both roles know of a block.
struct Block {
    const ChunkFusedParams& params;
    Shared& s;
    Segment segment;
    int head, qk_head, first_column;
    bool identity; // columns of the identity and v = 0
    bool queries;  // whether there is an output

    __device__ __forceinline__ int turns() const { return segment.end - segment.begin; }
    __device__ __forceinline__ int token_of(int turn) const { return segment.token + turn * CHUNK; }
    __device__ __forceinline__ int length_of(int turn) const { return min(CHUNK, segment.tokens - turn * CHUNK); }

    // By one thread: starts the copies of a chunk, if there is one.
    __device__ __forceinline__ void fill(int turn) const {
        if (turn >= turns()) return;
        const u32 to = shared_address(s.turns[turn % TURNS]);
        Barrier* barrier = s.filled + turn % TURNS;
        const int kinds = queries ? 2 : 1;
        barrier_expect(barrier, (kinds * SPANS + (identity ? 0 : CONSUMERS)) * TILE_BYTES);
        copy_tile(to, params.k, {0, qk_head, token_of(turn), 0}, barrier);
        if (queries) copy_tile(to + QUERIES_AT, params.q, {0, qk_head, token_of(turn), 0}, barrier);
        if (!identity) copy_tile(to + VALUES_AT, params.v, {0, head, token_of(turn), first_column / SPAN}, barrier);
    }
};

// Turns a row of q or k into operands where it lies: half a row to a thread. Rows at and beyond `length` become zero.
__device__ __forceinline__ void convert_row(u32 thread, u8* tiles, float* coefficients, int length, float epsilon) {
    constexpr int OWN = KD / 16; // pieces of 8 numbers
    const u32 row = thread / 2, half = thread % 2;
    uint4 pieces[OWN];
    u8* at[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const u32 piece = half * OWN + (i ^ (half * (OWN / 2))); // the two threads of a row meet different banks
        at[i] = tiles + piece / 8 * TILE_BYTES + place_in_tile(row, piece % 8 * 8);
        pieces[i] = *(const uint4*)at[i];
    }
    if (length < CHUNK && (int)row >= length) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) pieces[i] = uint4{};
    }
    u32 most[4] = {}; // four chains, not one: each step waits for the one before
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        most[0] = larger_pair(most[0], pieces[i].x);
        most[1] = larger_pair(most[1], pieces[i].y);
        most[2] = larger_pair(most[2], pieces[i].z);
        most[3] = larger_pair(most[3], pieces[i].w);
    }
    const u32 largest_pair = larger_pair(larger_pair(most[0], most[1]), larger_pair(most[2], most[3]));
    float largest = fmaxf(first_of(largest_pair), second_of(largest_pair));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    const float factor = row_factor(largest);
    float coefficient = inverse_of(factor);
    if (epsilon >= 0.0f) {
        // 1 / sqrt(|x|^2 + epsilon), in the units of the scaled row.
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const u32 words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float x = first_of(words[w]) * factor, y = second_of(words[w]) * factor;
                squares = fmaf(y, y, fmaf(x, x, squares));
            }
        }
        squares += __shfl_xor_sync(0xffffffffu, squares, 1);
        coefficient = (int)row < length ? rsqrtf(squares + epsilon * factor * factor) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        u32 words[4] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = pack_16(first_of(words[w]) * factor, second_of(words[w]) * factor);
        *(uint4*)at[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (half == 0) coefficients[row] = coefficient;
}

// Starts acc = A B^T over the columns of K of two tiles of rows.
__device__ __forceinline__ void start_rows_product(float (&acc)[8][4], u32 left, u32 right) {
    const u64 a = tile_descriptor(left), b = tile_descriptor(right);
#pragma unroll
    for (int k = 0; k < KD; k += 16) {
        const u64 next = (k / SPAN * TILE_BYTES + 2 * (k % SPAN)) >> 4; // descriptors count in 16 bytes
        if (k == 0) warpgroup_product_nt<0>(acc, a + next, b + next);
        else warpgroup_product_nt<1>(acc, a + next, b + next);
    }
}

// The blocks of T below the diagonal in block column `column`, by one warp; the diagonal blocks are there. As invert_column.
__device__ __forceinline__ void invert_column_of_tile(const operand* lower, u32 inverse, u32 column, u32 lane) {
    // Rows of right operands; the transposed of these are left operands.
    const u32 matrix_row = (lane & 7) + (lane >> 4) * 8, matrix_column = ((lane >> 3) & 1) * 8;
    const u32 own = inverse + 16 * column * SPAN_BYTES;
    const u32 from = shared_address(lower) + (16 * column * (SQUARE_PITCH + 1) + matrix_row * SQUARE_PITCH + matrix_column) * OPERAND_BYTES;
    Left above[TILES]; // T_mj^T for m = j, j + 1, ...
    load_matrices_transposed(above[0].r, own + place_in_tile(matrix_row, 16 * column + matrix_column));
#pragma unroll
    for (int d = 1; d < TILES; ++d) {
        if ((int)column + d >= TILES) break;
        float sum[2][4], block[2][4];
        clear(sum);
        clear(block);
#pragma unroll
        for (int m = 0; m < d; ++m) {
            u32 right[4];
            load_matrices(right, from + 16 * (d * SQUARE_PITCH + m) * OPERAND_BYTES);
            mma_16816(sum[0], above[m].r, right[0], right[1]);
            mma_16816(sum[1], above[m].r, right[2], right[3]);
        }
        const Left left = make_left(sum[0], sum[1], -1.0f);
        u32 diagonal[4];
        load_matrices(diagonal, own + 16 * d * SPAN_BYTES + place_in_tile(matrix_row, 16 * (column + d) + matrix_column));
        mma_16816(block[0], left.r, diagonal[0], diagonal[1]);
        mma_16816(block[1], left.r, diagonal[2], diagonal[3]);
        above[d] = make_left(block[0], block[1], 1.0f);
        // The rows of `above` are columns of T.
        store_matrices_transposed(own + 16 * d * SPAN_BYTES + place_in_tile(matrix_row, 16 * column + matrix_column), above[d].r);
    }
}

// Volatile: loaded all at once, a block would not fit into the registers.
__device__ __forceinline__ void load_four(float* x, const float* from) {
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(shared_address(from)));
}

// A column of (I + block)^-1 for a strictly lower triangular block, element (i, j) at [j][i].
__device__ __forceinline__ void invert_block(const float (&block)[16][16], u32 column, float (&x)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < 15; ++j) {
        float below[16];
#pragma unroll
        for (int i = (j + 1) / 4 * 4; i < 16; i += 4) {
            load_four(below + i, &block[j][i]);
        }
#pragma unroll
        for (int i = j + 1; i < 16; ++i) x[i] = fmaf(-below[i], x[j], x[i]);
    }
}

template <int Bytes> __device__ __forceinline__ void clear_tile(Tile* tile) {
    for (int i = 16 * (threadIdx.x - CONSUMER_THREADS); i < Bytes; i += 16 * 128) *(uint4*)((u8*)tile + i) = uint4{};
}

// The preparer.
__device__ __forceinline__ void prepare(const Block& block) {
    const ChunkParams& p = block.params.chunk;
    Shared& s = block.s;
    u32 thread = threadIdx.x - CONSUMER_THREADS;
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0), turns = block.turns();
    constexpr int GATES_WARP = TILES - 1; // it has no block below the diagonal
    // Above the diagonal blocks nothing is ever written.
    clear_tile<READY * (int)TILE_BYTES>(s.inverse);
    clear_tile<READY * (int)TILE_BYTES>(s.scores);
    if (warp == GATES_WARP && turns > 0) {
        const OwnGates own = load_gates(p, block.token_of(0), block.length_of(0), block.head);
        prepare_gates(p, s.gates[0], own, block.length_of(0), block.head);
    }

#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        // To the compiler another number in every turn: addresses that follow from it would take registers all the time.
        thread = __shfl_xor_sync(0xffffffffu, thread, 0);
        const u32 lane = thread & 31, row = lane / 4, quad = lane % 4;
        const int length = block.length_of(turn), slot = turn % READY;
        const u32 first = 16 * warp;
        OwnGates next_gates = {};
        if (warp == GATES_WARP && turn + 1 < turns)
            next_gates = load_gates(p, block.token_of(turn + 1), block.length_of(turn + 1), block.head);
        if (turn >= READY) barrier_wait(s.used + slot, (turn / READY - 1) & 1);
        barrier_wait(s.filled + turn % TURNS, turn / TURNS & 1);

        u8* const tiles = s.turns[turn % TURNS][0].bytes;
        float *const key = s.key[turn % 2], *const query = s.query[turn % 2];
#pragma unroll 1 // both at once do not fit into the registers
        for (int kind = 0; kind < (block.queries ? 2 : 1); ++kind)
            convert_row(thread, tiles + kind * QUERIES_AT, kind == 0 ? key : query, length, p.norm_epsilon);
        fence_shared_stores();
        warpgroup_barrier<PREPARED_BARRIER>();

        float product[8][4]; // K' K'^T, then Q' K'^T
        const u32 keys = shared_address(tiles), inverse = shared_address(s.inverse + slot);
        warpgroup_fence();
        start_rows_product(product, keys, keys);
        warpgroup_commit();
        // e^{G_i - G_j} where i and j are in different blocks is e^{G_i - G_m} e^{G_m - G_j}, m the first token of i's.
        const Gates& gates = s.gates[turn % 2];
        float row_decay[2], row_factor[2], own_decay[2][4], before[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) { // zero from the warp's own block on
            const u32 j = lane + 32 * half;
            const float decay = decay_between(gates, first, min(j, first)) * key[j];
            before[half] = j < first ? decay : 0.0f;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 i = first + row + 8 * half;
            row_decay[half] = decay_between(gates, i, first);
            row_factor[half] = gates.beta[i] * key[i];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 j = first + 8 * (e / 2) + 2 * quad + e % 2;
                const float decay = decay_between(gates, i, min(i, j)) * key[j];
                own_decay[half][e] = i >= j ? decay : 0.0f;
            }
        }
        const u32 own_token = thread % CHUNK;
        float values[MOST];
        coefficients_of(p, gates, key[own_token], block.queries ? query[own_token] : 0.0f, own_token, values);
        // All loads come before the first store: the compiler cannot know that they are different places.
        s.column_decay[warp][lane] = before[0];
        s.column_decay[warp][lane + 32] = before[1];
        float* const to = s.coefficients[slot] + own_token;
        if (thread < CHUNK) {
            to[BETA * CHUNK] = values[BETA];
            to[READ * CHUNK] = values[READ];
            to[DECAY * CHUNK] = values[DECAY];
        } else {
            to[QUERY * CHUNK] = values[QUERY];
            to[WRITE * CHUNK] = values[WRITE];
        }
        __syncwarp();
        // Multiplies by the decays: rows of the warp, columns up to the diagonal.
        auto decay_all = [&] {
            float2 column[8];
#pragma unroll
            for (int n = 0; n < 8; ++n) column[n] = *(const float2*)(s.column_decay[warp] + 8 * n + 2 * quad);
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                if (n / 2 > warp) break;
                const bool own = n / 2 == warp;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    product[n][2 * half] *= own ? own_decay[half][n % 2 * 2] : row_decay[half] * column[n].x;
                    product[n][2 * half + 1] *= own ? own_decay[half][n % 2 * 2 + 1] : row_decay[half] * column[n].y;
                }
            }
        };
        warpgroup_wait<0>();
        hold(product);
        decay_all();
#pragma unroll
        for (int block_column = 0; block_column < TILES; ++block_column) {
            const bool own = block_column == warp;
            if (block_column > warp) break;
#pragma unroll
            for (int n = 2 * block_column; n < 2 * block_column + 2; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 pair = make_float2(product[n][2 * half] * row_factor[half], product[n][2 * half + 1] * row_factor[half]);
                    const u32 i = row + 8 * half, j = 8 * (n % 2) + 2 * quad;
                    if (own) { // from i = j on nobody reads
                        s.diagonal[warp][j][i] = pair.x;
                        s.diagonal[warp][j + 1][i] = pair.y;
                    } else
                        store_pair(s.lower + (first + i) * SQUARE_PITCH + 16 * block_column + j, pair.x, pair.y);
                }
        }
        if (block.queries) {
            hold(product);
            warpgroup_fence();
            start_rows_product(product, keys + QUERIES_AT, keys);
            warpgroup_commit();
        }
        // The chunk before the last has been used when this one is half done: its place is free for the next copies.
        if (thread == 0 && turn > 0) {
            if (turn >= 2) barrier_wait(s.used + (turn - 2) % READY, (turn - 2) / READY & 1);
            block.fill(turn + 1);
        }
        __syncwarp();
        {
            float x[16];
            invert_block(s.diagonal[warp], lane % 16, x);
            if (lane < 16) {
                u8* const rows = s.inverse[slot].bytes + first * SPAN_BYTES;
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    *(operand*)(rows + place_in_tile(i, first + lane)) = (operand)pack_16(x[i], x[i]);
            }
        }
        if (block.queries) {
            warpgroup_wait<0>();
            hold(product);
            decay_all();
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                if (n / 2 > warp) break;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    *(u32*)(s.scores[slot].bytes + place_in_tile(first + row + 8 * half, 8 * n + 2 * quad)) =
                        pack_16(product[n][2 * half], product[n][2 * half + 1]);
            }
        }
        warpgroup_barrier<PREPARED_BARRIER>();
        if (warp < GATES_WARP) invert_column_of_tile(s.lower, inverse, warp, lane);
        fence_shared_stores();
        __syncwarp();
        if (lane == 0) barrier_arrive(s.ready + slot);
        if (warp == GATES_WARP && turn + 1 < turns)
            prepare_gates(p, s.gates[(turn + 1) % 2], next_gates, block.length_of(turn + 1), block.head);
    }
}

// acc = (left operands) B^T with B (tokens, 16 N) in tiles of rows.
template <int N> __device__ __forceinline__ void start_left_product(OwnTokens& acc, const Left (&left)[N], u32 right) {
    const u64 b = tile_descriptor(right);
#pragma unroll
    for (int c = 0; c < N; ++c) {
        const u64 next = (c / 4 * TILE_BYTES + c % 4 * 32) >> 4;
        if (c == 0) warpgroup_product_nt<0>(acc, left[c], b);
        else warpgroup_product_nt<1>(acc, left[c], b + next);
    }
}
__device__ __forceinline__ void start_more_product(OwnTokens& acc, const Left (&left)[4], u32 right) {
    const u64 b = tile_descriptor(right);
#pragma unroll
    for (int c = 0; c < 4; ++c) warpgroup_product_nt<1>(acc, left[c], b + (c * 32 >> 4));
}
// state += (left operands) K' for the tokens of the chunk.
__device__ __forceinline__ void start_state_product(OwnState& state, const Left (&left)[4], u32 keys) {
    const u64 b = tile_descriptor_transposed(keys, TILE_BYTES);
#pragma unroll
    for (int c = 0; c < 4; ++c)
        warpgroup_product_nn(state, left[c], b + (16 * c * SPAN_BYTES >> 4));
}

// largest_of in four chains.
__device__ __forceinline__ float largest_of_tokens(const OwnTokens& tiles) {
    float most[4] = {};
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) most[e] = fmaxf(most[e], fabsf(tiles[n][e]));
    return warp_max(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])));
}

// The thread's number in its warpgroup, asked for where it is needed: what follows from it would take registers all the time.
__device__ __forceinline__ u32 thread_of_warpgroup() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % 128;
}
// Where a lane's row of 8 numbers is, of four matrices: 16 tokens times the 16 columns of its warp.
__device__ __forceinline__ u32 matrix_of_lane() {
    const u32 thread = thread_of_warpgroup(), lane = thread % 32;
    return place_in_tile((lane & 7) + (lane >> 4) * 8, thread / 32 * 16 + ((lane >> 3) & 1) * 8);
}

// As weight_tokens, with loads that are not brought forward.
__device__ __forceinline__ void weight_tokens_late(OwnTokens& tiles, const float* weight, float factor, const Place& at) {
    const u32 from = shared_address(weight + 2 * at.quad);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        float2 w;
        asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];" : "=f"(w.x), "=f"(w.y) : "r"(from + 32 * n));
        w.x *= factor;
        w.y *= factor;
        tiles[n][0] *= w.x;
        tiles[n][1] *= w.y;
        tiles[n][2] *= w.x;
        tiles[n][3] *= w.y;
    }
}

template <bool Output> __device__ __forceinline__ void consume(const Block& block) {
    constexpr bool Rest = !Output; // errors of a segment's end stay in all that follows
    const ChunkParams& p = block.params.chunk;
    Shared& s = block.s;
    const Segment& segment = block.segment;
    const Place at = place_of_warp();
    const int consumer = threadIdx.x / 128, turns = block.turns();
    const int first_column = block.first_column + 16 * at.group;
    const u32 in_values = VALUES_AT + consumer * TILE_BYTES;
    OwnState state;
    const long long of_segment = (long long)segment.number * p.value_heads + block.head;
    const long long of_sequence = (long long)segment.sequence * p.value_heads + block.head;
    const bool turned = p.state_transposed;
    if (!Output && block.identity)
        load_identity(state, first_column, at);
    else if (segment.first)
        load_state(state, p.initial_state, state_place(of_sequence, turned, VD, first_column, at));
    else
        load_state(state, Output ? p.segment_states : nullptr, state_place(of_segment, true, VD, first_column, at));
    float largest_state = largest_of(state);
    Scale held = {1.0f, 1.0f};

    OwnTokens output, right;
    float output_factor = 0.0f; // of the output that is on its way, besides QUERY
    float output_unit;          // of the product of the state with the queries
    Left rounded[4], rest[4];   // R^T and what rounding left of it
    Scale right_scale;

    // Brings the output of a chunk to memory, and gives its place free.
    auto finish = [&](int turn) {
        if (Output) {
            weight_tokens(output, s.coefficients[turn % READY] + QUERY * CHUNK, output_factor * p.scale_unit, at);
            u8* const tile = (u8*)s.turns[turn % TURNS] + in_values;
            const u32 to = shared_address(tile) + matrix_of_lane();
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                u32 pairs[4];
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const float* x = output[n + m / 2] + m % 2 * 2;
                    pairs[m] = pair_of_inputs(x[0], x[1]);
                }
                store_matrices_transposed(to + 8 * n * SPAN_BYTES, pairs);
            }
            fence_shared_stores(); // the copy engine writes here next
            __syncwarp();
            const u32 thread = thread_of_warpgroup(), part = thread % 2, own_token = thread % 32 / 2;
            INPUT* const o = p.o + ((long long)block.token_of(turn) * p.value_heads + block.head) * VD + block.first_column + consumer * SPAN +
                             thread / 32 * 16 + 8 * part;
#pragma unroll
            for (int i = 0; i < CHUNK / 16; ++i) {
                const int token = 16 * i + own_token;
                const uint4 vector = *(const uint4*)(tile + place_in_tile(token, thread / 32 * 16 + 8 * part));
                if (token < block.length_of(turn)) *(uint4*)(o + (long long)token * p.value_heads * VD) = vector;
            }
        }
        __syncwarp();
        if (at.lane == 0) barrier_arrive(s.used + turn % READY);
    };

    // What a chunk reads from the state: R^T, and the part of the output. `before`: the output of the chunk before is on its way.
    auto read = [&](int turn, bool before) {
        const u32 tiles = shared_address(s.turns[turn % TURNS]);
        const float* weight = s.coefficients[turn % READY];
        rescale(state, held, scale_for(largest_state));
        Left left[KD / 16];
#pragma unroll
        for (int c = 0; c < KD / 16; ++c) left[c] = make_left(state[2 * c], state[2 * c + 1], 1.0f);
        barrier_wait(s.ready + turn % READY, turn / READY & 1);
        hold(right);
        warpgroup_fence();
        start_left_product(right, left, tiles);
        warpgroup_commit();
        if (before) {
            warpgroup_wait<1>();
            if (Output) hold(output);
            finish(turn - 1);
        }
        output_unit = held.inverse;
        if (Output) {
            hold(output);
            warpgroup_fence();
            start_left_product(output, left, tiles + QUERIES_AT);
            warpgroup_commit();
        }
        warpgroup_wait<Output ? 1 : 0>();
        hold(right);
        // R^T = beta v^T - (beta e^G k S)^T
        if (!block.identity) barrier_wait(s.filled + turn % TURNS, turn / TURNS & 1);
        const int valid = block.identity ? 0 : block.length_of(turn); // what follows belongs to another sequence
        const u32 from = tiles + in_values + matrix_of_lane();
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            u32 values[4];
            load_matrices_transposed(values, from + 8 * n * SPAN_BYTES);
            if (valid < CHUNK) {
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const int left = valid - 8 * (n + m / 2) - 2 * at.quad;
                    values[m] &= left <= 0 ? 0 : left == 1 ? 0xffffu : 0xffffffffu;
                }
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const float2 beta = *(const float2*)(weight + BETA * CHUNK + 8 * (n + m) + 2 * at.quad);
                float2 read = *(const float2*)(weight + READ * CHUNK + 8 * (n + m) + 2 * at.quad);
                read.x *= held.inverse;
                read.y *= held.inverse;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const u32 pair = values[2 * m + e / 2];
                    const float value = e % 2 ? second_of(pair) : first_of(pair);
                    right[n + m][e] = fmaf(-(e % 2 ? read.y : read.x), right[n + m][e], (e % 2 ? beta.y : beta.x) * value);
                }
            }
        }
        right_scale = scale_for(largest_of_tokens(right));
        warpgroup_wait<0>(); // its left operands take the registers that come next
        if (Output) hold(output);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            rounded[c] = make_left(right[2 * c], right[2 * c + 1], right_scale.factor);
            rest[c] = make_left_rest(right[2 * c], right[2 * c + 1], right_scale.factor, rounded[c]);
        }
    };

    if (turns > 0) read(0, false);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        const u32 tiles = shared_address(s.turns[turn % TURNS]), inverse = shared_address(s.inverse + turn % READY);
        const float* weight = s.coefficients[turn % READY];
        // U^T = R^T T^T
        OwnTokens& writes = right;
        hold(writes);
        warpgroup_fence();
        start_left_product(writes, rounded, inverse);
        start_more_product(writes, rest, inverse);
        warpgroup_commit();
        warpgroup_wait<0>();
        hold(writes);
        const float largest_write = largest_of(writes) * right_scale.inverse;
        const Scale plain = scale_for(largest_write);
        Left own[4];
        if (Output) {
#pragma unroll
            for (int c = 0; c < 4; ++c) own[c] = make_left(writes[2 * c], writes[2 * c + 1], ratio(plain, right_scale));
        }
        // The largest of what is left: a decay may have wiped out the largest U.
        weight_tokens_late(writes, weight + WRITE * CHUNK, right_scale.inverse, at);
        const Scale added = scale_for(largest_of(writes));
        const float decay = weight[DECAY * CHUNK + CHUNK - 1], largest_before = largest_state;
        largest_state = fmaf(decay, largest_state, MOST_GROWTH * 32768.0f * added.inverse);
        const Scale next = scale_for(largest_state);

        // S^T <- e^{G_C} S^T + (e^{G_C - G} U)^T K'
        Left weighted[4], weighted_rest[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            weighted[c] = make_left(writes[2 * c], writes[2 * c + 1], added.factor);
            if (Rest) {
                weighted_rest[c] = make_left_rest(writes[2 * c], writes[2 * c + 1], added.factor, weighted[c]);
                scale_left(weighted_rest[c], next.factor * added.inverse);
            }
            scale_left(weighted[c], next.factor * added.inverse);
        }
        multiply(state, decay * ratio(next, held));
        held = next;
        hold(state);
        warpgroup_fence();
        start_state_product(state, weighted, tiles);
        if (Rest) start_state_product(state, weighted_rest, tiles);
        warpgroup_commit();
        if (Output) {
            // o^T = s (e^G (S^T q) + U^T P^T), all in the units of the smaller scale
            const Scale common = smaller(plain, scale_for(largest_before));
#pragma unroll
            for (int c = 0; c < 4; ++c) scale_left(own[c], common.factor * plain.inverse);
            weight_tokens(output, weight + DECAY * CHUNK, common.factor * output_unit, at);
            hold(output);
            warpgroup_fence();
            start_more_product(output, own, shared_address(s.scores + turn % READY));
            warpgroup_commit();
            output_factor = common.inverse;
        }
        warpgroup_wait<0>();
        if (Output) hold(output);
        hold(state);
        if (turn % LOOK_UP_EVERY == LOOK_UP_EVERY - 1) largest_state = largest_of(state) * held.inverse;
        if (turn + 1 < turns) {
            read(turn + 1, true);
        } else {
            warpgroup_wait<0>();
            if (Output) hold(output);
            finish(turn);
        }
    }

    if (Output && segment.last)
        store_state(state, p.final_state, state_place(of_sequence, turned, VD, first_column, at), held.inverse);
    if (!Output) {
        if (block.identity) {
            store_state(state, p.transitions, state_place(2 * of_segment, true, KD, first_column, at), held.inverse);
            store_state(state, p.transitions, state_place(2 * of_segment + 1, false, KD, first_column, at), held.inverse);
        } else
            store_state(state, p.segment_states, state_place(of_segment + p.value_heads, true, VD, first_column, at),
                        held.inverse);
    }
}

template <bool Output> __device__ __forceinline__ void run(const ChunkFusedParams& params) {
    extern __shared__ __align__(1024) u8 shared[];
    const ChunkParams& p = params.chunk;
    if (!Output) let_next_kernel_start();
    wait_for_kernel_before();
    const Segment segment = segment_of_block(p);
    const bool identity = !Output && blockIdx.x >= VD / COLUMNS;
    if (!Output && (segment.last || (identity && segment.first))) return;
    Shared& s = *(Shared*)shared;
    const int first_column = ((int)blockIdx.x - (identity ? VD / COLUMNS : 0)) * COLUMNS, head = blockIdx.y;
    const Block block = {params, s, segment, head, head / (p.value_heads / p.qk_heads), first_column, identity, Output};

    if (threadIdx.x == CONSUMER_THREADS) {
        for (int i = 0; i < TURNS; ++i) barrier_init(s.filled + i);
        for (int i = 0; i < READY; ++i) {
            barrier_init(s.ready + i, 4);
            barrier_init(s.used + i, 4 * CONSUMERS);
        }
        block.fill(0);
        block.fill(1);
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMER_THREADS) {
        if (CONSUMERS == 2) give_registers<104>();
        prepare(block);
    } else {
        if (CONSUMERS == 2) take_registers<200>();
        consume<Output>(block);
    }
}
#endif

// Grid: V / COLUMNS, HV, segments.
extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    chunk_fused_forward(const __grid_constant__ ChunkFusedParams params) {
#if HOPPER
    run<true>(params);
#endif
}

#if CUT
// Grid: (V + K) / COLUMNS, HV, segments.
extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    chunk_fused_segment_ends(const __grid_constant__ ChunkFusedParams params) {
#if HOPPER
    static_assert(KD % COLUMNS == 0, "the columns of a block divide K where sequences are cut");
    run<false>(params);
#endif
}
#endif
