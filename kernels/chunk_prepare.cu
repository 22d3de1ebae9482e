// First step of the chunk form of GDN: all that needs only the keys, the queries and the gates of one chunk.
//
//   q, k (T, HK, K), g, beta (T, HV)  ->  K', Q', T = (I + L)^-1, scores, coefficients (chunk.cuh)
//
// with L_ij = beta_i (k_i . k_j) e^{G_i - G_j} for i > j. One block a chunk, a q/k head and some of its value heads:
//
//   1. 8 lanes each row of q and k: K', Q'; a warp each value head: G and tables of decays
//   2. two warps each 16 rows, which take turns with the blocks of 16 columns: K K^T and Q K^T
//   3. the same, one value head after the other: blocks of the scores and of L; who has the block on the diagonal inverts it
//   4. a warp each block column: the blocks of T below the diagonal
//
// All that is large goes to memory by bulk copies, with what is between its rows: memory reads a sector first that is not written
// whole.
//
// G is summed in binary64 and kept in two binary32 words: e^{G_i - G_j} then loses nothing however large G is. Where i and j are
// in different blocks it is e^{G_i - G_m} e^{G_m - G_j} with m the first token of i's block, both at most 1 and from tables (but for
// the f32 mode, which keeps the digits of one exponential).
#include "chunk_decay.cuh"
#include "chunk_rows.cuh"

constexpr int WARPS = 2 * TILES;
constexpr int THREADS = 32 * WARPS;
constexpr int MOST_HEADS = 4; // of heads_per_block
constexpr int BLOCKS_AT_ONCE = BULK_COPY ? 4 : 3; // of a multiprocessor, what the registers are for
static_assert(MOST_HEADS <= WARPS, "a warp has one value head at the most");
static_assert(OWN_ROWS * WARPS == CHUNK, "the warps have all rows of a chunk");

// e^{G_i - G_m} for each i, and e^{G_m - G_j} for the j before each block but the first, m the first token of the block.
struct Factors {
    float row[CHUNK];
    float column[TILES - 1][CHUNK - 16];
};

struct __align__(16) Shared {
    operand overlaps[SQUARE_TILE];
    float key[CHUNK];   // rk
    float query[CHUNK]; // rq / s
    Gates gates[MOST_HEADS];
    Factors factors[MOST_HEADS];
    int first_square; // of the block's value heads, among all squares; in a register it would be spilled
};

// A block of K K^T and of Q K^T. A warp holds its first in registers and puts the second, if any, into shared memory.
constexpr int BLOCKS = TILES / 2, STASHED = TILES - 1; // of a warp, at the most; second ones of all warps
struct Product {
    float kk[2][4], qk[2][4]; // K'_i K'_j rk_j, Q'_i K'_j rk_j
};

// Of L what is below the blocks on the diagonal, from row 16 on.
constexpr int LOWER_PITCH = CHUNK - 16 + PAD;
constexpr int LOWER = (CHUNK - 16) * LOWER_PITCH;
// In the place of K' and Q' once the products with those are done.
struct Squares {
    operand inverse[SQUARE_TILE];
    operand scores[SQUARE_TILE];
    operand lower[LOWER];
    float diagonal[TILES][16 * 16]; // of L, in binary32
    float4 stash[BLOCKS > 1 ? STASHED : 1][4][32];
};
static_assert(sizeof(Squares) <= 4 * SQUARE_TILE * OPERAND_BYTES, "the squares fit into the shared memory that the block is given");

struct Place {
    int warp, lane, row, quad;
    int tile_row, turn; // which rows; which of the two warps of these

    // Column of block b of the warp, from the diagonal to the left; below 0 where there is none.
    __device__ __forceinline__ int column(int b) const { return tile_row - turn - 2 * b; }
};
__device__ __forceinline__ Place place_of(int warp, int lane) {
    return {warp, lane, lane / 4, lane % 4, warp % TILES, warp / TILES};
}

// The modes of 16 bits take the columns of a block in such an order that a lane has four neighbours of a row.
constexpr bool NEIGHBOURS = OPERAND_BYTES == 2;
__device__ __forceinline__ int column_of(int e, int quad) { return NEIGHBOURS ? 4 * quad + e : e / 2 * 8 + 2 * quad + e % 2; }
__device__ __forceinline__ void load_columns(float (&x)[4], const float* from, int quad) {
    if constexpr (NEIGHBOURS) {
        const float4 all = *(const float4*)(from + 4 * quad);
        x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
    } else {
        const float2 first = *(const float2*)(from + 2 * quad), second = *(const float2*)(from + 8 + 2 * quad);
        x[0] = first.x, x[1] = first.y, x[2] = second.x, x[3] = second.y;
    }
}
// In one word: the compiler may part two of them.
__device__ __forceinline__ void store_columns(operand* to, int quad, const float (&x)[4]) {
    if constexpr (NEIGHBOURS) {
        *(u64*)(to + 4 * quad) = (u64)pack_16(x[2], x[3]) << 32 | pack_16(x[0], x[1]);
    } else {
        store_pair(to + 2 * quad, x[0], x[1]);
        store_pair(to + 8 + 2 * quad, x[2], x[3]);
    }
}

__device__ __forceinline__ void make_factors(Factors& factors, const Gates& gates, int lane) {
    for (int i = lane; i < CHUNK; i += 32) factors.row[i] = decay_between(gates, i, i / 16 * 16);
#pragma unroll
    for (int block = 1; block < TILES; ++block)
        for (int j = lane; j < 16 * block; j += 32) factors.column[block - 1][j] = decay_between(gates, 16 * block, j);
}

// The coefficients of one value head, by one warp.
__device__ __forceinline__ void write_coefficients(const ChunkParams& p, const Shared& s, const Gates& gates, float* to, int lane) {
    constexpr int OWN = CHUNK / 32;
    float values[OWN][MOST], most[WRITE + 1] = {};
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        coefficients_of(p, gates, s.key[OWN * lane + i], s.query[OWN * lane + i], OWN * lane + i, values[i]);
#pragma unroll
        for (int row = 0; row <= WRITE; ++row) most[row] = fmaxf(most[row], fabsf(values[i][row]));
    }
#pragma unroll
    for (int row = 0; row < MOST; ++row) {
        float* const own = to + row * CHUNK + OWN * lane;
        if constexpr (OWN == 2) *(float2*)own = make_float2(values[0][row], values[1][row]);
        else *own = values[0][row];
    }
    float largest = 0.0f;
#pragma unroll
    for (int row = 0; row <= WRITE; ++row) {
        const float of_row = warp_max(most[row]);
        largest = lane == row ? of_row : largest;
    }
    if (lane < 8) to[MOST * CHUNK + lane] = largest; // a whole sector
}

__device__ __forceinline__ void multiply_rows(Product (&products)[BLOCKS], const operand* keys, const operand* queries,
                                              const float* key, const Place& at) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        clear(products[b].kk);
        clear(products[b].qk);
    }
    if (at.column(0) < 0) return;
#pragma unroll 2
    for (int c = 0; c < KD; c += 16) {
        const Left left_key = load_left(keys + 16 * at.tile_row * ROW_PITCH + c, ROW_PITCH);
        const Left left_query = load_left(queries + 16 * at.tile_row * ROW_PITCH + c, ROW_PITCH);
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const int column = at.column(b);
            if (column < 0) continue;
            const operand* right = keys + 16 * column * ROW_PITCH + c;
#if MODE == MODE_F16 || MODE == MODE_BF16
            const int in_eight = at.lane % 8, row = 4 * (in_eight / 2) + 2 * (at.lane / 16) + in_eight % 2;
            u32 r[4];
            load_matrices(r, shared_address(right + row * ROW_PITCH + at.lane / 8 % 2 * 8));
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                mma_16816(products[b].kk[n], left_key.r, r[2 * n], r[2 * n + 1]);
                mma_16816(products[b].qk[n], left_query.r, r[2 * n], r[2 * n + 1]);
            }
#else
            product_nt(products[b].kk, left_key, right, ROW_PITCH);
            product_nt(products[b].qk, left_query, right, ROW_PITCH);
#endif
        }
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        if (at.column(b) < 0) continue;
        float weight[4];
        load_columns(weight, key + 16 * at.column(b), at.quad);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                products[b].kk[n][e] *= weight[2 * n + e % 2];
                products[b].qk[n][e] *= weight[2 * n + e % 2];
            }
    }
}

__device__ __forceinline__ float4* stash_of(Squares& squares, const Place& at) {
    return squares.stash[at.tile_row - 2 + at.turn][0] + at.lane;
}
__device__ __forceinline__ void stash(Squares& squares, const Product& product, const Place& at) {
    float4* to = stash_of(squares, at);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        to[32 * n] = make_float4(product.kk[n][0], product.kk[n][1], product.kk[n][2], product.kk[n][3]);
        to[32 * (n + 2)] = make_float4(product.qk[n][0], product.qk[n][1], product.qk[n][2], product.qk[n][3]);
    }
}
__device__ __forceinline__ Product stashed(Squares& squares, const Place& at) {
    const float4* from = stash_of(squares, at);
    Product product;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float4 kk = from[32 * n], qk = from[32 * (n + 2)];
        product.kk[n][0] = kk.x, product.kk[n][1] = kk.y, product.kk[n][2] = kk.z, product.kk[n][3] = kk.w;
        product.qk[n][0] = qk.x, product.qk[n][1] = qk.y, product.qk[n][2] = qk.z, product.qk[n][3] = qk.w;
    }
    return product;
}

// Step 3: block B of this warp, for one value head of the block.
template <int B>
__device__ __forceinline__ void write_block(Shared& s, Squares& squares, const Product& product, const Place& at, int head,
                                            bool overlaps) {
    const Gates& gates = s.gates[head];
    const int column = at.column(B);
    const bool own = B == 0 && at.turn == 0; // on the diagonal
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int in_block = at.row + 8 * half, i = 16 * at.tile_row + in_block;
        float decay[4];
        if (own || MODE == MODE_F32) {
            float high[4], low[4];
            load_columns(high, gates.log_decay[0] + 16 * column, at.quad);
            load_columns(low, gates.log_decay[1] + 16 * column, at.quad);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float x = exponential((gates.log_decay[0][i] - high[e]) + (gates.log_decay[1][i] - low[e]));
                decay[e] = !own || in_block >= column_of(e, at.quad) ? x : 0.0f;
            }
        } else {
            load_columns(decay, s.factors[head].column[at.tile_row - 1] + 16 * column, at.quad);
#pragma unroll
            for (int e = 0; e < 4; ++e) decay[e] *= s.factors[head].row[i];
        }
        if (overlaps) {
            float overlap[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const bool below = !own || in_block > column_of(e, at.quad);
                overlap[e] = below ? product.kk[e / 2][2 * half + e % 2] * (decay[e] * s.key[i]) : 0.0f;
            }
            store_columns(s.overlaps + i * SQUARE_PITCH + 16 * column, at.quad, overlap);
        }
        float score[4], lower[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            score[e] = product.qk[e / 2][2 * half + e % 2] * decay[e];
            lower[e] = product.kk[e / 2][2 * half + e % 2] * decay[e] * (gates.beta[i] * s.key[i]);
        }
        store_columns(squares.scores + i * SQUARE_PITCH + 16 * column, at.quad, score);
        if (!own) {
            store_columns(squares.lower + (i - 16) * LOWER_PITCH + 16 * column, at.quad, lower);
        } else {
            float* to = squares.diagonal[at.tile_row] + 16 * in_block;
            if constexpr (NEIGHBOURS) {
                *(float4*)(to + 4 * at.quad) = make_float4(lower[0], lower[1], lower[2], lower[3]);
            } else {
                *(float2*)(to + 2 * at.quad) = make_float2(lower[0], lower[1]);
                *(float2*)(to + 8 + 2 * at.quad) = make_float2(lower[2], lower[3]);
            }
        }
    }
}

// Column `column` of (I + block)^-1 for a strictly lower triangular block.
__device__ __forceinline__ void invert_rows(const float* block, int column, float (&x)[16]) {
    // Zero, which the compiler does not know. So loads of a row wait for an element of x: all at once, they would not fit into the
    // registers.
    const u32 zero = gridDim.z - 1;
    const float* row = block;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        if (i >= 4 && i % 2 == 0) row += __float_as_uint(x[i - 1]) & zero;
        x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int first = 0; first < i; first += 4) {
            const float4 part = *(const float4*)(row + i * 16 + first);
            const float parts[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
            for (int e = 0; e < 4 && first + e < i; ++e) x[i] = fmaf(-parts[e], x[first + e], x[i]);
        }
    }
}

// Bulk stores to global memory, of what the block has in shared memory.
__device__ __forceinline__ void store_bulk(void* to, const void* from, u32 bytes) {
#if BULK_COPY
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Until all of this thread's have been read.
__device__ __forceinline__ void wait_for_bulk_reads() {
#if BULK_COPY
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
// Makes this thread's stores to shared memory visible to the copy engine.
__device__ __forceinline__ void show_stores_to_copies() {
#if BULK_COPY
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Zeros in 16 rows of a square right of their block on the diagonal, by a warp: products of warpgroups take a square as a whole.
__device__ __forceinline__ void clear_right(operand* rows, const Place& at) {
    constexpr int OF_ROW = SQUARE_PITCH * OPERAND_BYTES / 16, OF_BLOCK = OPERAND_BYTES; // pieces of 16 bytes
    u8* const row = (u8*)(rows + at.lane / 2 * SQUARE_PITCH);
#pragma unroll 1
    for (int piece = (at.tile_row + 1) * OF_BLOCK + at.lane % 2; piece < OF_ROW; piece += 2)
        *(uint4*)(row + 16 * piece) = uint4{};
}

// A tile from shared to global memory, by all threads of the block; on cards without bulk stores.
__device__ __forceinline__ void write_tile(operand* to, const operand* from, int operands) {
#pragma unroll 2
    for (int i = 16 / OPERAND_BYTES * threadIdx.x; i < operands; i += 16 / OPERAND_BYTES * THREADS)
        *(uint4*)(to + i) = *(const uint4*)(from + i);
}

// Grid: chunks, then HK times the groups of heads_per_block value heads.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE) chunk_prepare(const __grid_constant__ ChunkParams p) {
    let_next_kernel_start();
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Shared s;
    operand* const keys = (operand*)shared;
    Squares& squares = *(Squares*)shared;

    // To the compiler, the same in a warp.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    int lane = threadIdx.x % 32;
    Place at = place_of(warp, lane);
    // Blocks of all heads of a chunk run side by side, which write and read what lies side by side in memory.
    const u32 number = blockIdx.y * gridDim.x + blockIdx.x;
    const int chunk = number / gridDim.y, heads_of_chunk = number % gridDim.y;
    const int token = p.chunk_token[chunk], length = p.chunk_length[chunk];
    const int group = p.value_heads / p.qk_heads, parts = group / p.heads_per_block;
    const int qk_head = heads_of_chunk / parts, part = heads_of_chunk % parts;
    const int first_head = qk_head * group + part * p.heads_per_block;
    const long long tile = (long long)chunk * p.qk_heads + qk_head;
    const bool writes_rows = part == 0;
    if (threadIdx.x == 0) s.first_square = chunk * p.value_heads + first_head;

    // The warps with the fewest blocks come first.
    const int own_head = (at.warp + WARPS / 2) % WARPS;
    const bool has_head = own_head < p.heads_per_block;
    OwnGates own_gates = {};
    if (has_head) own_gates = load_gates(p, token, length, first_head + own_head);
    const long long first_row = ((long long)token * p.qk_heads + qk_head) * KD;
    prepare_rows({{p.q + first_row, p.k + first_row},
                  writes_rows ? p.norms + tile * 2 * CHUNK : nullptr,
                  keys,
                  {s.query, s.key},
                  (long long)p.qk_heads * KD,
                  length,
                  p.norm_epsilon},
                 at.warp, at.lane);
#if BULK_COPY
    show_stores_to_copies();
    __syncwarp();
    if (writes_rows && at.lane < 2) {
        const int own = OWN_ROWS * warp * ROW_PITCH;
        store_bulk((at.lane == 0 ? p.keys : p.queries) + tile * ROW_TILE + own, keys + at.lane * ROW_TILE + own,
                   OWN_ROWS * ROW_PITCH * OPERAND_BYTES);
    }
#endif
    if (has_head) {
        prepare_gates(p, s.gates[own_head], own_gates, length, first_head + own_head);
        __syncwarp();
        make_factors(s.factors[own_head], s.gates[own_head], at.lane);
    }
    __syncthreads();

    if (has_head)
        write_coefficients(p, s, s.gates[own_head],
                           p.coefficients + (long long)(s.first_square + own_head) * (COEFFICIENTS * CHUNK), at.lane);
#if !BULK_COPY
    if (writes_rows) {
        write_tile(p.keys + tile * ROW_TILE, keys, ROW_TILE);
        write_tile(p.queries + tile * ROW_TILE, keys + ROW_TILE, ROW_TILE);
    }
#endif
    Product products[BLOCKS];
    multiply_rows(products, keys, keys + ROW_TILE, s.key, at);
    wait_for_bulk_reads();
    __syncthreads();
    const bool diagonal = at.turn == 0; // it has the block on the diagonal
    if (diagonal) {
        clear_right(squares.inverse + 16 * at.tile_row * SQUARE_PITCH, at);
        clear_right(squares.scores + 16 * at.tile_row * SQUARE_PITCH, at);
    }
    if (BLOCKS > 1 && at.column(1) >= 0) stash(squares, products[BLOCKS - 1], at);

#pragma unroll 1
    for (int head = 0; head < p.heads_per_block; ++head) {
        // To the compiler another number every time: addresses that follow from it would take registers all the time.
        asm volatile("" : "+r"(lane));
        at = place_of(warp, lane);
        const long long square = s.first_square + head;
        if (at.column(0) >= 0) write_block<0>(s, squares, products[0], at, head, p.overlaps);
        if (BLOCKS > 1 && at.column(1) >= 0) write_block<1>(s, squares, stashed(squares, at), at, head, p.overlaps);
        operand* const own_rows = squares.inverse + 16 * at.tile_row * SQUARE_PITCH;
        if (diagonal) {
            float x[16];
            __syncwarp();
            invert_rows(squares.diagonal[at.tile_row], at.lane % 16, x);
            wait_for_bulk_reads(); // of these rows of the head before
            __syncwarp();
            if (at.lane < 16) {
#pragma unroll
                for (int i = 0; i < 16; ++i) own_rows[i * SQUARE_PITCH + 16 * at.tile_row + at.lane] = to_operand(x[i]);
            }
        }
        show_stores_to_copies();
        __syncthreads();
        if (at.turn == 0 && at.tile_row < TILES - 1)
            invert_column<LOWER_PITCH, 16>(squares.lower, squares.inverse, at.tile_row, at.lane);
        if (warp == WARPS - 1 && at.lane == 0) {
            store_bulk(p.scores + square * SQUARE_TILE, squares.scores, SQUARE_TILE * OPERAND_BYTES);
            if (p.overlaps) store_bulk(p.overlaps + square * SQUARE_TILE, s.overlaps, SQUARE_TILE * OPERAND_BYTES);
            wait_for_bulk_reads();
        }
        show_stores_to_copies();
        __syncthreads();
#if BULK_COPY
        if (diagonal && at.lane == 0)
            store_bulk(p.inverse + square * SQUARE_TILE + 16 * at.tile_row * SQUARE_PITCH, own_rows,
                       16 * SQUARE_PITCH * OPERAND_BYTES);
#else
        write_tile(p.scores + square * SQUARE_TILE, squares.scores, SQUARE_TILE);
        if (p.overlaps) write_tile(p.overlaps + square * SQUARE_TILE, s.overlaps, SQUARE_TILE);
        write_tile(p.inverse + square * SQUARE_TILE, squares.inverse, SQUARE_TILE);
        __syncthreads();
#endif
    }
    wait_for_bulk_reads();
}
