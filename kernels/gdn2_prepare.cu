// First step of the chunk form of GDN-2: all that needs no state.
//
//   q, k (T, HK, K), g, b (T, HV, K)  ->  Q', B', K', T = (I + L)^-1, scores, coefficients (chunk.cuh)
//
// with L_ij = sum_d (b k)_id k_jd e^{G_id - G_jd} for i > j, and the scores, from i = j on, alike with q. One block a chunk and
// value head, which takes PASS tokens at a time:
//
//   1. a thread each channel and block of 16: decays of its tokens
//   2. 8 lanes each row: rows of Q', B', K' for the sweeps, and those of the levels (gdn2.cuh)
//   3. a warp each block and 4 columns of it: pairs within a block in binary32, the channels spread over the lanes
//      and the levels that are complete, by products of the mode's operands
//
// then the inverse (chunk_inverse.cuh).
#include "gdn2.cuh"

// The usual problem has a preparation of its own where a block has the shared memory of two passes: it is faster, and its
// products of pairs within 16 tokens are of f16 too.
#if MODE == MODE_F16 && KD == 128 && CHUNK == 64 && PASS == 32
#include "gdn2_prepare_f16.cuh"
#else
constexpr int WARPS = PASS / 4;
constexpr int THREADS = 32 * WARPS;
constexpr int PASS_BLOCKS = PASS / 16;
constexpr int GROUP_COLUMNS = 4; // columns that a warp takes in a block, half of them each half of its lanes;
constexpr int LANE_COLUMNS = GROUP_COLUMNS / 2;
constexpr int LANE_CHANNELS = KD / 16;                    // a lane has this many channels,
constexpr int NEIGHBOURS = LANE_CHANNELS % 4 == 0 ? 4 : 2; // of which so many lie side by side
static_assert(PASS == 16 || PASS == 32, "one or two blocks at a time");
static_assert(CHUNK % PASS == 0, "a chunk is a whole number of passes");

// Coefficients by tokens, in the order in which they are found.
struct Shared {
    BlockDecays decays;
    float whole[KD]; // e^{G_C}
    float rows[KEY + 1][CHUNK];
    float diagonal[TILES][16 * BLOCK_PITCH]; // of L
};

constexpr int ARRAY = PASS * KD; // floats
// Operands of the tiles of a level, of one group of 2 h blocks.
__device__ __forceinline__ constexpr int level_operands(int level) { return 3 * 16 * blocks_of_level(level) * ROW_PITCH; }

__device__ __forceinline__ LevelRows level_rows(operand* levels, int level) {
    operand* at = levels + (level > 0 ? level_operands(0) : 0);
    const int tile = 16 * blocks_of_level(level) * ROW_PITCH;
    return {at, at + tile, at + 2 * tile};
}

// Step 1: the arrays are by tokens of the pass and channels.
__device__ __forceinline__ void decays_of_pass(const ChunkParams& p, int chunk, int head, int pass, float* rise, float* fall,
                                               float* steps) {
    const int task = threadIdx.x;
    if (task >= PASS_BLOCKS * KD) return;
    const int block = task / KD, channel = task % KD, at = 16 * block * KD + channel;
    float g[16];
    load_log_decays(g, p, chunk, head, pass * PASS_BLOCKS + block, channel);
    token_decays(g, rise + at, fall + at, KD);
#pragma unroll
    for (int i = 0; i < 16; ++i) steps[at + i * KD] = exponential(g[i]);
}

// A row of the arrays, 4 channels of every 32.
__device__ __forceinline__ void store_array(float* to, const RowPart& x, float factor) {
    const int column = 4 * (threadIdx.x % ROW_LANES);
#pragma unroll
    for (int c = 0; c < PIECES; ++c)
        *(float4*)(to + column + 4 * ROW_LANES * c) =
            make_float4(x[c][0] * factor, x[c][1] * factor, x[c][2] * factor, x[c][3] * factor);
}

// The row of this thread in k, b and q.
struct RowOfPass {
    Fetched<INPUT> key, query;
    Fetched<GATE> gate;
};
__device__ __forceinline__ void fetch_pass(RowOfPass& row, const ChunkParams& p, int chunk, int head, int pass) {
    const int i = pass * PASS + threadIdx.x / ROW_LANES;
    const bool inside = i < p.chunk_length[chunk];
    const long long token = p.chunk_token[chunk] + i;
    const long long qk_row = (token * p.qk_heads + head / (p.value_heads / p.qk_heads)) * KD;
    fetch_row(row.key, p.k + qk_row, inside);
    fetch_row(row.gate, p.channels.b + (token * p.value_heads + head) * KD, inside);
    fetch_row(row.query, p.q + qk_row, inside);
}

// Step 2, for the row of this thread. Where the decays were stand afterwards q times its power of two, and b k.
__device__ __forceinline__ void rows_of_pass(const ChunkParams& p, Shared& s, const RowOfPass& fetched, int chunk, int head,
                                             int pass, float* rises, float* falls, operand* levels) {
    const int row = threadIdx.x / ROW_LANES, i = pass * PASS + row, block = i / 16;
    const bool writes = threadIdx.x % ROW_LANES == 0;
    const long long tile = ((long long)chunk * p.value_heads + head) * ROW_TILE + i * ROW_PITCH;
    RowPart x, erase, decay, part;

    // k, which its decay to the end of the chunk and to the splits on its right hold for.
    widen_row(x, fetched.key);
    widen_row(erase, fetched.gate);
    multiply_row(erase, x);
    const float key_factor = row_factor(largest_of_row(x));
    keep_loads_behind();
    load_row(decay, s.decays.after[block], true);
    load_row(part, falls + row * KD, true);
    multiply_row(decay, part);
    const float write_factor = store_scaled_row(p.channels.write_keys + tile, x, key_factor, decay);
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
        const int h = blocks_of_level(level);
        if (is_left(block, h)) continue;
        keep_loads_behind();
        load_row(decay, falls + row * KD, true);
        reach_split(decay, s.decays, block, h);
        store_row(level_rows(levels, level).keys + (16 * (block % h) + i % 16) * ROW_PITCH, x, key_factor, decay);
    }
    // The lanes of a row are those of one warp, and have read all of it.
    __syncwarp();
    store_array(falls + row * KD, erase, 1.0f);

    // b k and q, which the decays from the start of the chunk and from the splits on their left hold for.
    const float erase_factor = row_factor(largest_of_row(erase));
    keep_loads_behind();
    load_row(decay, s.decays.before[block], true);
    load_row(part, rises + row * KD, true);
    multiply_row(decay, part);
    const float read_factor = store_scaled_row(p.keys + tile, erase, erase_factor, decay);
    keep_loads_behind();
    widen_row(x, fetched.query);
    const float query_factor = row_factor(largest_of_row(x));
    const float read_query_factor = store_scaled_row(p.queries + tile, x, query_factor, decay);
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
        const int h = blocks_of_level(level), at = (16 * (block % h) + i % 16) * ROW_PITCH;
        if (!is_left(block, h)) continue;
        keep_loads_behind();
        load_row(decay, rises + row * KD, true);
        reach_split(decay, s.decays, block, h);
        store_row(level_rows(levels, level).erase + at, erase, erase_factor, decay);
        store_row(level_rows(levels, level).queries + at, x, query_factor, decay);
    }
    __syncwarp();
    store_array(rises + row * KD, x, query_factor);
    if (writes) {
        s.rows[BETA][i] = 1.0f / erase_factor;
        s.rows[READ][i] = 1.0f / erase_factor / read_factor;
        s.rows[DECAY][i] = 1.0f / read_query_factor;
        s.rows[QUERY][i] = 1.0f / query_factor * (p.scale / p.scale_unit);
        s.rows[WRITE][i] = 1.0f / key_factor / write_factor;
        s.rows[KEY][i] = 1.0f / key_factor;
    }
}

// A lane's channels of a row.
struct Part {
    float x[LANE_CHANNELS];
};
template <class T> __device__ __forceinline__ Part load_part(const T* row) {
    struct __align__(NEIGHBOURS * sizeof(T)) Vector {
        T x[NEIGHBOURS];
    };
    Part part;
#pragma unroll
    for (int c = 0; c < LANE_CHANNELS; c += NEIGHBOURS) {
        const Vector vector = *(const Vector*)(row + NEIGHBOURS * (threadIdx.x & 15) + 16 * c);
#pragma unroll
        for (int e = 0; e < NEIGHBOURS; ++e) part.x[c + e] = to_float(vector.x[e]);
    }
    return part;
}

// Sums of 8 values over half a warp; lane l has that number l / 2 % 8.
__device__ __forceinline__ float sums_of_eight(const float (&x)[8]) {
    const int lane = threadIdx.x & 31;
    float four[4], two[2];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const float kept = lane & 8 ? x[n + 4] : x[n], sent = lane & 8 ? x[n] : x[n + 4];
        four[n] = kept + __shfl_xor_sync(0xffffffffu, sent, 8);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float kept = lane & 4 ? four[n + 2] : four[n], sent = lane & 4 ? four[n] : four[n + 2];
        two[n] = kept + __shfl_xor_sync(0xffffffffu, sent, 4);
    }
    const float kept = lane & 2 ? two[1] : two[0], sent = lane & 2 ? two[0] : two[1];
    const float one = kept + __shfl_xor_sync(0xffffffffu, sent, 2);
    return one + __shfl_xor_sync(0xffffffffu, one, 1);
}

// The columns of this warp in a block, and the keys of this lane's.
struct ColumnsOfPass {
    int local; // block of the pass
    int first;
    Part keys[LANE_COLUMNS];
};
__device__ __forceinline__ ColumnsOfPass columns_of_pass(const ChunkParams& p, int chunk, int head, int pass) {
    const int warp = threadIdx.x / 32, half = threadIdx.x / 16 % 2;
    ColumnsOfPass columns;
    columns.local = warp / 4;
    // Warps of one scheduler have many rows and few rows.
    columns.first = GROUP_COLUMNS * (columns.local % 2 ? 3 - warp % 4 : warp % 4);
    const int block = pass * PASS_BLOCKS + columns.local, last = p.chunk_length[chunk] - 16 * block - 1;
    const long long token = p.chunk_token[chunk] + 16 * block;
#pragma unroll
    for (int n = 0; n < LANE_COLUMNS; ++n) {
        // Keys beyond the last token meet rows of zeros.
        const int j = min(columns.first + LANE_COLUMNS * half + n, last);
        columns.keys[n] = load_part(p.k + ((token + j) * p.qk_heads + head / (p.value_heads / p.qk_heads)) * KD);
    }
    return columns;
}

// Step 3: rows of a block against 4 of its columns, two rows at a time. A column's keys are decayed from row to row.
__device__ __forceinline__ void pairs_of_block(const ChunkParams& p, Shared& s, ColumnsOfPass& columns, int chunk, int head,
                                               int pass, const float* queries, const float* erases, const float* steps) {
    const int lane = threadIdx.x & 31, first = columns.first, own = first + LANE_COLUMNS * (lane / 16);
    const int block = pass * PASS_BLOCKS + columns.local, at = 16 * columns.local * KD;
    // The sum that the lane will have.
    const int number = lane / 2 % 8, row_of_sum = number / 4, column_of_sum = own + number % 2;
    const bool of_scores = number / 2 % 2 == 0;
    operand* scores = p.scores + ((long long)chunk * p.value_heads + head) * SQUARE_TILE + 16 * block * SQUARE_PITCH + 16 * block;
    auto rows = [&](int i, bool diagonal) {
        float sums[8];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = at + (i + r) * KD;
            const Part query = load_part(queries + row), erase = load_part(erases + row), step = load_part(steps + row);
#pragma unroll
            for (int n = 0; n < LANE_COLUMNS; ++n) {
                float score = 0.0f, lower = 0.0f;
                const bool below = !diagonal || i + r > own + n;
#pragma unroll
                for (int c = 0; c < LANE_CHANNELS; ++c) {
                    columns.keys[n].x[c] *= below ? step.x[c] : 1.0f;
                    score = fmaf(query.x[c], columns.keys[n].x[c], score);
                    lower = fmaf(erase.x[c], columns.keys[n].x[c], lower);
                }
                sums[4 * r + n] = below || i + r == own + n ? score : 0.0f;
                sums[4 * r + 2 + n] = lower; // nothing is read of L from the diagonal on
            }
        }
        const float sum = sums_of_eight(sums);
        if (lane % 2 != 0) return;
        if (of_scores)
            scores[(i + row_of_sum) * SQUARE_PITCH + column_of_sum] = to_operand(sum);
        else
            s.diagonal[block][(i + row_of_sum) * BLOCK_PITCH + column_of_sum] = sum;
    };
#pragma unroll
    for (int i = 0; i < GROUP_COLUMNS; i += 2) rows(first + i, true);
#pragma unroll 1
    for (int i = first + GROUP_COLUMNS; i < 16; i += 2) rows(i, false);
    // Rows above these columns: zeros for the scores.
#pragma unroll 1
    for (int e = lane; e < GROUP_COLUMNS * first; e += 32)
        scores[e / GROUP_COLUMNS * SQUARE_PITCH + first + e % GROUP_COLUMNS] = to_operand(0.0f);
}

// The products of a level that the pass completes, if any; a unit is a tile of 16 x 16 of the scores or of L.
__device__ __forceinline__ void pairs_of_level(const ChunkParams& p, const Shared& s, int chunk, int head, int pass, int level,
                                               operand* levels, operand* lower) {
    const int h = blocks_of_level(level), end = (pass + 1) * PASS_BLOCKS;
    if (end % (2 * h) != 0) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, row = lane / 4, quad = lane % 4;
    const LevelRows rows = level_rows(levels, level);
    operand* scores = p.scores + ((long long)chunk * p.value_heads + head) * SQUARE_TILE;
    // The first units go to warps whose columns have few rows.
#pragma unroll 1
    for (int unit = (warp + WARPS / 2 + 1) % WARPS; unit < 2 * h * h; unit += WARPS) {
        const bool of_scores = unit % 2 == 0;
        const int column = unit / 2 % h, below = unit / 2 / h;
        const operand* left = (of_scores ? rows.queries : rows.erase) + 16 * below * ROW_PITCH;
        const operand* right = rows.keys + 16 * column * ROW_PITCH;
        float sums[2][4];
        clear(sums);
#pragma unroll 2
        for (int c = 0; c < KD; c += 16) product_nt(sums, load_left(left + c, ROW_PITCH), right + c, ROW_PITCH);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = 16 * (end - h + below) + row + 8 * half, j = 16 * (end - 2 * h + column) + 8 * n + 2 * quad;
                const float factor = of_scores ? 1.0f : s.rows[BETA][i];
                store_pair((of_scores ? scores : lower) + i * SQUARE_PITCH + j,
                           sums[n][2 * half] * s.rows[KEY][j] * factor, sums[n][2 * half + 1] * s.rows[KEY][j + 1] * factor);
            }
    }
}

__device__ __forceinline__ void prepare(const ChunkParams& p, Shared& s, u8* memory) {
    float* rises = (float*)memory; // then rows of q
    float* falls = rises + ARRAY;  // then rows of b k
    float* steps = falls + ARRAY;
    operand* levels = (operand*)(steps + ARRAY);
    operand* lower = levels + level_operands(0) + (LEVELS > 1 ? level_operands(1) : 0);
    operand* inverse = (operand*)memory; // when the arrays are done with

    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const int chunk = blockIdx.x, head = blockIdx.y;
    const long long square = (long long)chunk * p.value_heads + head;
    sum_log_decays<THREADS>(s.decays, p, chunk, head, 0);
    __syncthreads();
    make_block_decays<THREADS>(s.decays, s.whole);
#pragma unroll 1
    for (int pass = 0; pass < CHUNK / PASS; ++pass) {
        RowOfPass row;
        fetch_pass(row, p, chunk, head, pass);
        decays_of_pass(p, chunk, head, pass, rises, falls, steps);
        __syncthreads();
        rows_of_pass(p, s, row, chunk, head, pass, rises, falls, levels);
        ColumnsOfPass columns = columns_of_pass(p, chunk, head, pass);
        __syncthreads();
        pairs_of_block(p, s, columns, chunk, head, pass, rises, falls, steps);
#pragma unroll
        for (int level = 0; level < LEVELS; ++level) pairs_of_level(p, s, chunk, head, pass, level, levels, lower);
        __syncthreads();
    }

    if (warp < TILES) {
        float x[16];
        invert_diagonal(s.diagonal[warp], x);
        if (lane < 16) {
#pragma unroll
            for (int i = 0; i < 16; ++i)
                inverse[(16 * warp + i) * SQUARE_PITCH + 16 * warp + lane] = to_operand(x[i]);
        }
    }
    clear_above_diagonal<THREADS>(inverse);
    clear_above_diagonal<THREADS>(p.scores + square * SQUARE_TILE);
    float* coefficients = p.coefficients + square * COEFFICIENT_NUMBERS;
    for (int i = threadIdx.x; i < (KEY + 1) * CHUNK; i += THREADS) coefficients[i] = s.rows[i / CHUNK][i % CHUNK];
    for (int i = threadIdx.x; i < KD; i += THREADS) coefficients[COEFFICIENTS * CHUNK + i] = s.whole[i];
    for (int row = warp; row < WRITE + 2; row += WARPS) { // a warp finds the largest of a row
        const bool decays = row == WRITE + 1;
        const float* from = decays ? s.whole : s.rows[row];
        float most = 0.0f;
        for (int i = lane; i < (decays ? KD : CHUNK); i += 32) most = fmaxf(most, fabsf(from[i]));
        most = warp_max(most);
        if (lane == 0) coefficients[MOST * CHUNK + (decays ? KEY : row)] = most;
    }
    __syncthreads();
    if (warp < TILES) invert_column(lower, inverse, warp);
    __syncthreads();
    write_square<THREADS>(p.inverse + square * SQUARE_TILE, inverse, 0);
}
#endif

// Grid: chunks, HV.
constexpr int BLOCKS_AT_ONCE = PASS == 32 ? SHARING : 1;
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE)
    gdn2_prepare(const __grid_constant__ ChunkParams p) {
    let_next_kernel_start();
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Shared s;
    prepare(p, s, shared);
}
