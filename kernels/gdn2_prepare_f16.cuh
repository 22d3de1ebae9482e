// gdn2_prepare for chunks of 64 tokens, 128 channels and operands in f16: a warp has 8 tokens, a lane 4 channels of each.
//
// A row lies across a warp, so its largest element is one reduction, and decays of tokens never leave their thread. Warps share
// the decays of 8 tokens, and the rows of the levels. There are two levels more than gdn2.cuh says: a block of 16 is split into
// the 8 tokens of two warps, and those into fours. What is left are pairs within 4 tokens, in binary32.
//
//   1. decays of each 8 tokens
//   2. two times four tokens: the largest of each row, pairs within the four, rows of Q', B', K' and of the levels, and at the
//      end the products of the warp's two fours
//   3. products of the other levels
//
// then the inverse (chunk_inverse.cuh). Blocks that run at once have the heads of a few chunks, which lie side by side in memory.
// Rows of the workspace are written with their padding: half a sector would be read before it is written.
#pragma once
#include "gdn2_prepare_rows.cuh"

// Two halves of an array become sums over two half warps each: the upper half of the warp has the second.
template <int N> __device__ __forceinline__ void halve(float (&sums)[N / 2], const float (&x)[N], bool upper, int offset) {
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
        const float kept = upper ? x[n + N / 2] : x[n], sent = upper ? x[n] : x[n + N / 2];
        sums[n] = kept + __shfl_xor_sync(0xffffffffu, sent, offset);
    }
}
// Sums of 16 values over the warp; lane l has number l / 2.
__device__ __forceinline__ float sums_of_sixteen(const float (&x)[16], int lane) {
    float eight[8], four[4], two[2], one[1];
    halve<16>(eight, x, lane & 16, 16);
    halve<8>(four, eight, lane & 8, 8);
    halve<4>(two, four, lane & 4, 4);
    halve<2>(one, two, lane & 2, 2);
    return one[0] + __shfl_xor_sync(0xffffffffu, one[0], 1);
}

// Where the pairs of a block of 16 tokens go: the scores, and L in binary32.
struct Squares {
    operand* scores;
    float* lower;
};
__device__ __forceinline__ Squares squares_of_block(const ChunkParams& p, const Place& at, float* diagonal, int block) {
    return {p.scores + at.square * SQUARE_TILE + 16 * block * (SQUARE_PITCH + 1), diagonal + block * 16 * BLOCK_PITCH};
}

// Pairs within four tokens: of 4 x 4 sums those above the diagonal are of L, transposed. A key is decayed from row to row.
__device__ __forceinline__ void pairs_of_four(const Squares& to, const Shared& s, const Inputs& x, const Rows& steps,
                                              const Place& at, int four) {
    float sums[16];
    Rows keys;
#pragma unroll
    for (int i = 0; i < FOUR; ++i) {
        Quad query, erase;
        widen_quad(query, x.q[i]);
        widen_quad(keys[i], x.k[i]);
        widen_quad(erase, x.b[i]);
        multiply_quad(erase, keys[i]);
#pragma unroll
        for (int j = 0; j < i; ++j) {
            multiply_quad(keys[j], steps[i]);
            sums[4 * i + j] = dot(query, keys[j]);
            sums[4 * j + i] = dot(erase, keys[j]);
        }
        sums[4 * i + i] = dot(query, keys[i]);
    }
    const float sum = sums_of_sixteen(sums, at.lane);
    if (at.lane % 2 != 0) return;
    const int row = at.lane / 8, column = at.lane / 2 % 4, first = 2 * FOUR * (at.warp & 1) + FOUR * four;
    const bool of_scores = column <= row;
    const float score = of_scores ? sum * s.factors[OF_QUERY][2 * FOUR * at.warp + FOUR * four + row] : 0.0f;
    to.scores[(first + row) * SQUARE_PITCH + first + column] = to_operand(score);
    if (!of_scores) to.lower[(first + column) * BLOCK_PITCH + first + row] = sum;
}

// Pairs of a warp's two fours, whose rows lie where `rows` says. Half of the left operand is zero.
struct FourRows {
    operand *keys, *queries, *erase;
};
__device__ __forceinline__ void pairs_of_fours(const Squares& to, const Shared& s, const FourRows& rows, const Place& at) {
    const int row = at.lane / 4, quad = at.lane % 4, channel = at.lane / 8 * 8;
    const u32 left = shared_address((at.lane & 4 ? rows.erase : rows.queries) + (at.lane & 3) * ROW_PITCH + channel);
    const u32 right = shared_address(rows.keys + (at.lane & 3) * ROW_PITCH + channel);
    float sums[2][4];
    clear(sums);
#pragma unroll
    for (int c = 0; c < KD; c += 32) {
        u32 a[4], b[4];
        load_matrices(a, left + c * OPERAND_BYTES);
        load_matrices(b, right + c * OPERAND_BYTES);
        const u32 first[4] = {a[0], 0, a[1], 0}, second[4] = {a[2], 0, a[3], 0};
        mma_16816(sums[0], first, b[0], b[1]);
        mma_16816(sums[1], second, b[2], b[3]);
    }
    if (quad >= 2) return;
    const int first = 2 * FOUR * (at.warp & 1), i = row % 4, j = 2 * quad;
    const float* key_factors = s.factors[OF_KEY] + 2 * FOUR * at.warp + j;
    const float x = (sums[0][0] + sums[1][0]) * inverse_of(key_factors[0]);
    const float y = (sums[0][1] + sums[1][1]) * inverse_of(key_factors[1]);
    if (row < FOUR) {
        store_pair(to.scores + (first + FOUR + i) * SQUARE_PITCH + first + j, x, y);
        store_pair(to.scores + (first + i) * SQUARE_PITCH + first + FOUR + j, 0.0f, 0.0f);
    } else {
        const float factor = inverse_of(s.factors[OF_ERASE][2 * FOUR * at.warp + FOUR + i]);
        *(float2*)(to.lower + (first + FOUR + i) * BLOCK_PITCH + first + j) = make_float2(x * factor, y * factor);
    }
}

// Pairs of the two halves of a block of 16 tokens.
__device__ __forceinline__ void pairs_of_eights(const Squares& to, const Shared& s, const operand* keys, const Place& at,
                                                int block) {
    const int row = at.lane / 4, j = 2 * (at.lane % 4);
    const operand* reads = keys + 8 * ROW_PITCH; // 8 rows of q, and 8 of b k
    const u32 right = shared_address(keys + (at.lane & 7) * ROW_PITCH + at.lane / 8 * 8);
    float sums[2][4];
    clear(sums);
#pragma unroll
    for (int c = 0; c < KD; c += 32) {
        u32 b[4];
        load_matrices(b, right + c * OPERAND_BYTES);
        mma_16816(sums[0], load_left(reads + c, ROW_PITCH).r, b[0], b[1]);
        mma_16816(sums[1], load_left(reads + c + 16, ROW_PITCH).r, b[2], b[3]);
    }
    const float* key_factors = s.factors[OF_KEY] + 16 * block + j;
    const float x = inverse_of(key_factors[0]), y = inverse_of(key_factors[1]);
    const float factor = inverse_of(s.factors[OF_ERASE][16 * block + 8 + row]);
    store_pair(to.scores + (8 + row) * SQUARE_PITCH + j, (sums[0][0] + sums[1][0]) * x, (sums[0][1] + sums[1][1]) * y);
    store_pair(to.scores + row * SQUARE_PITCH + 8 + j, 0.0f, 0.0f);
    *(float2*)(to.lower + (8 + row) * BLOCK_PITCH + j) =
        make_float2((sums[0][2] + sums[1][2]) * x * factor, (sums[0][3] + sums[1][3]) * y * factor);
}

// A tile of 16 x 16 of the scores or of L.
struct Tile {
    bool of_scores;
    int row, column;
};
__device__ __forceinline__ void pairs_of_tile(operand* to, const Shared& s, const operand* left, const operand* right,
                                              const Tile& tile, const Place& at) {
    const int row = at.lane / 4, quad = at.lane % 4;
    float sums[2][4];
    clear(sums);
#pragma unroll
    for (int c = 0; c < KD; c += 16) product_nt(sums, load_left(left + c, ROW_PITCH), right + c, ROW_PITCH);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = tile.row + row + 8 * half;
        const float factor = tile.of_scores ? 1.0f : inverse_of(s.factors[OF_ERASE][i]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int j = tile.column + 8 * n + 2 * quad;
            store_pair(to + i * SQUARE_PITCH + j, sums[n][2 * half] * inverse_of(s.factors[OF_KEY][j]) * factor,
                       sums[n][2 * half + 1] * inverse_of(s.factors[OF_KEY][j + 1]) * factor);
        }
    }
}

// The warp's place in a level, and that of its next four rows there.
struct LevelPlace {
    bool left;
    operand* rows; // of k, or of q
    int erase;     // from those of q to those of b k
};
__device__ __forceinline__ LevelPlace place_in_level(operand* levels, Level level, const Place& at, int four) {
    const int warps = warps_of(level), tokens = 2 * FOUR * warps;
    const bool left = at.warp & warps;
    const int row = (left ? tokens : 0) + 2 * FOUR * (at.warp & (warps - 1)) + FOUR * four;
    return {left, rows_of_split(levels, level, at.warp / (2 * warps)) + row * ROW_PITCH, tokens * ROW_PITCH};
}

// Step 2, for the first or the second four tokens; `first` is the decay over the first, `next` are those of the second.
__device__ __forceinline__ void rows_of_four(const ChunkParams& p, Shared& s, const Place& at, const Inputs& x, const Rows& steps,
                                             const Quad& first, const Rows& next, const Reaches& reach, operand* levels,
                                             float* diagonal, int four) {
    const Squares squares = squares_of_block(p, at, diagonal, at.warp / 2);
    const long long tile = at.square * ROW_TILE + (2 * FOUR * at.warp + FOUR * four) * ROW_PITCH;
    const LevelPlace block = place_in_level(levels, OF_BLOCK, at, four);

    Rows queries, erase, keys;
    Quad key_factors, query_factors, erase_factors, factors;
#pragma unroll
    for (int i = 0; i < FOUR; ++i) {
        widen_quad(queries[i], x.q[i]);
        widen_quad(keys[i], x.k[i]);
        widen_quad(erase[i], x.b[i]);
        multiply_quad(erase[i], keys[i]);
    }
    factors_of<false>(key_factors, keys);
    factors_of<false>(erase_factors, erase);
    factors_of<false>(query_factors, queries);
    keep_factors(s, OF_KEY, key_factors, at, four);
    keep_factors(s, OF_QUERY, query_factors, at, four);
    keep_factors(s, OF_ERASE, erase_factors, at, four);
    __syncwarp();
    pairs_of_four(squares, s, x, steps, at, four);

    // q and b k, which the decays from the start of the chunk and from the splits on their left hold for.
    Quad rise;
    set_quad(rise, 1.0f);
#pragma unroll
    for (int i = 0; i < FOUR; ++i) {
        multiply_quad(rise, steps[i]);
        Quad key;
        widen_quad(key, x.k[i]);
        widen_quad(erase[i], x.b[i]);
        widen_quad(queries[i], x.q[i]);
#pragma unroll
        for (int c = 0; c < FOUR; ++c) {
            erase[i][c] = erase[i][c] * key[c] * erase_factors[i] * rise[c];
            queries[i][c] = queries[i][c] * query_factors[i] * rise[c];
        }
    }
    // Of the rows of the fours, those of b k, and on the left those of q, borrow the place of rows of the block.
    operand* more = levels + LEVELS_SHARED * LEVEL_ROWS + at.warp / 2 * PAIR_ROWS + (block.left ? 2 * FOUR * ROW_PITCH : 0);
    if (four == 1) {
        operand* of_queries = block.left ? block.rows : more + FOUR * ROW_PITCH;
        const FourRows fours = {more, of_queries, block.rows + (block.left ? block.erase : 0)};
        store_rows(fours.queries, queries, at);
        store_rows(fours.erase, erase, at);
        __syncwarp();
        pairs_of_fours(squares, s, fours, at);
        __syncwarp();
        multiply_rows(queries, first);
        multiply_rows(erase, first);
    }
    if (block.left) {
        store_rows(block.rows, queries, at);
        store_rows(block.rows + block.erase, erase, at);
    }
#pragma unroll
    for (int n = OF_HALF; n >= OF_CHUNK; --n) {
        const LevelPlace level = place_in_level(levels, (Level)n, at, four);
        if (!level.left) continue;
        Quad by;
        load_reach(by, s, at, (Level)n);
        store_rows(level.rows, queries, by, at);
        store_rows(level.rows + level.erase, erase, by, at);
    }
    multiply_rows(queries, reach.before);
    multiply_rows(erase, reach.before);
    store_scaled(p.queries + tile, factors, queries, at);
    keep_factors(s, OF_READ_QUERY, factors, at, four);
    store_scaled(p.keys + tile, factors, erase, at);
    keep_factors(s, OF_READ, factors, at, four);

    // k, which its decay to the end of the chunk and to the splits on its right hold for.
    Quad fall;
    set_quad(fall, 1.0f);
#pragma unroll
    for (int i = FOUR - 1; i >= 0; --i) {
        widen_quad(keys[i], x.k[i]);
#pragma unroll
        for (int c = 0; c < FOUR; ++c) keys[i][c] = keys[i][c] * key_factors[i] * fall[c];
        multiply_quad(fall, steps[i]);
    }
    if (four == 0) {
        store_rows(more, keys, at);
        Quad second;
        product_of(second, next);
        multiply_rows(keys, second);
    }
    if (!block.left) store_rows(block.rows, keys, at);
#pragma unroll
    for (int n = OF_HALF; n >= OF_CHUNK; --n) {
        const LevelPlace level = place_in_level(levels, (Level)n, at, four);
        if (level.left) continue;
        Quad by;
        load_reach(by, s, at, (Level)n);
        store_rows(level.rows, keys, by, at);
    }
    multiply_rows(keys, reach.after);
    store_scaled(p.channels.write_keys + tile, factors, keys, at);
    keep_factors(s, OF_WRITE, factors, at, four);
}

// Step 3: a warp has a tile of the first level, and one of the second or a block of the third.
__device__ __forceinline__ void pairs_of_levels(const ChunkParams& p, Shared& s, const Place& at, operand* levels,
                                                float* diagonal) {
    const bool of_scores = at.warp % 2 == 0;
    operand* to = of_scores ? p.scores + at.square * SQUARE_TILE : s.lower;
    const Tile tile = {of_scores, CHUNK / 2 + 16 * (at.warp / 4), 16 * (at.warp / 2 % 2)};
    const operand* keys = rows_of_split(levels, OF_CHUNK, 0);
    pairs_of_tile(to, s, keys + ((of_scores ? 0 : CHUNK / 2) + tile.row) * ROW_PITCH, keys + tile.column * ROW_PITCH, tile, at);
    if (at.warp < WARPS / 2) {
        const int split = at.warp / 2;
        keys = rows_of_split(levels, OF_HALF, split);
        pairs_of_tile(to, s, keys + (of_scores ? 16 : 32) * ROW_PITCH, keys, {of_scores, 32 * split + 16, 32 * split}, at);
    } else {
        const int block = at.warp - WARPS / 2;
        pairs_of_eights(squares_of_block(p, at, diagonal, block), s, rows_of_split(levels, OF_BLOCK, block), at, block);
    }
}

// What turns rows back, and the largest of each kind: a warp each.
__device__ __forceinline__ void store_coefficients(float* to, const Shared& s, const ChunkParams& p, const Place& at) {
    const int kind = at.warp;
    if (kind > KEY) return;
    const Factor of_row = kind == DECAY ? OF_READ_QUERY : kind == QUERY ? OF_QUERY : kind < DECAY ? OF_ERASE : OF_KEY;
    float most = 0.0f;
#pragma unroll
    for (int i = at.lane; i < CHUNK; i += 32) {
        float y = inverse_of(s.factors[of_row][i]);
        if (kind == READ) y *= inverse_of(s.factors[OF_READ][i]);
        if (kind == WRITE) y *= inverse_of(s.factors[OF_WRITE][i]);
        if (kind == QUERY) y *= p.scale / p.scale_unit;
        to[kind * CHUNK + i] = y;
        most = fmaxf(most, fabsf(y));
    }
    if (kind == KEY) { // whose place has the largest decay instead
        most = 0.0f;
#pragma unroll
        for (int i = at.lane; i < KD; i += 32) {
            to[COEFFICIENTS * CHUNK + i] = s.whole[i];
            most = fmaxf(most, s.whole[i]);
        }
    }
    most = warp_max(most);
    if (at.lane == 0) to[MOST * CHUNK + kind] = most;
}

// invert_diagonal, four elements a load.
__device__ __forceinline__ void invert_block(const float* block, float (&x)[16]) {
    const int lane = threadIdx.x & 15;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float sum = i == lane ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; j += FOUR) {
            Quad row;
            load_quad(row, block + i * BLOCK_PITCH + j);
#pragma unroll
            for (int e = 0; e < FOUR; ++e)
                if (j + e < i) sum = fmaf(-row[e], x[j + e], sum);
        }
        x[i] = sum;
    }
}

// `memory` has the rows of the levels, then L of the blocks on the diagonal.
__device__ __forceinline__ void prepare(const ChunkParams& p, Shared& s, u8* memory) {
    operand* levels = (operand*)memory;
    float* diagonal = (float*)(levels + LEVELS_SHARED * LEVEL_ROWS + WARPS / 2 * PAIR_ROWS);
    operand* inverse = levels; // when the levels are done with
    const Place at = place_of_warp(p);
    operand* scores = p.scores + at.square * SQUARE_TILE;

    Rows steps[2];
    Inputs x;
    fetch_inputs(x, p, at, 0);
    decays_of_tokens(steps, s, p, at);
    __syncthreads();
    if (threadIdx.x < KD) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += s.decays.sums[i][threadIdx.x];
        s.whole[threadIdx.x] = exponential_f32(sum);
    }
    Reaches reach;
    find_reaches(reach, s, at);
    Quad first;
    product_of(first, steps[0]);
#pragma unroll 1
    for (int four = 0; four < 2; ++four) {
        rows_of_four(p, s, at, x, steps[0], first, steps[1], reach, levels, diagonal, four);
        if (four == 1) break;
        fetch_inputs(x, p, at, 1);
#pragma unroll
        for (int i = 0; i < FOUR; ++i)
#pragma unroll
            for (int c = 0; c < FOUR; ++c) steps[0][i][c] = steps[1][i][c];
    }
    __syncthreads();
    pairs_of_levels(p, s, at, levels, diagonal);
    __syncthreads();
    if (at.warp < TILES) {
        float y[16];
        invert_block(diagonal + at.warp * 16 * BLOCK_PITCH, y);
        if (at.lane < 16) {
#pragma unroll
            for (int i = 0; i < 16; ++i) inverse[(16 * at.warp + i) * SQUARE_PITCH + 16 * at.warp + at.lane] = to_operand(y[i]);
        }
    }
    store_coefficients(p.coefficients + at.square * COEFFICIENT_NUMBERS, s, p, at);
    clear_above_diagonal<THREADS>(inverse);
    clear_above_diagonal<THREADS>(scores);
    if (threadIdx.x < CHUNK) *(uint4*)(scores + threadIdx.x * SQUARE_PITCH + CHUNK) = uint4{0, 0, 0, 0};
    __syncthreads();
    if (at.warp < TILES) invert_column(s.lower, inverse, at.warp);
    __syncthreads();
    write_square<THREADS>(p.inverse + at.square * SQUARE_TILE, inverse, 0);
}
