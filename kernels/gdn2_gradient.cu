// Last step of the backward of the chunk form of GDN-2, for one chunk and value head. With E_ij = e^{G_i - G_j} by channels:
//
//   dP = tril(do U^T)      dL = -stril(Y U^T)      dv = w Y      dw = v Y
//   D  = e^G (do S^T) + sum_j dP_ij k_j E_ij                  dq = s D
//   A  = -e^G (Y S^T) + sum_j dL_ij k_j E_ij                  db = k A, the gradient of b k being A
//   N_j = e^{G_C - G_j} (U dS^T)_j + sum_i (dP_ij s q_i + dL_ij b_i k_i) E_ij     dk = b A + N
//
// and dg_t, in each channel, is what crosses t: what tokens i >= t read of S, what tokens i < t leave in the next state,
// e^{G_C} sum_v dS S, and M_ij = (s q_i dP_ij + b_i k_i dL_ij) k_j E_ij of all pairs i >= t > j. At each level of gdn2.cuh all
// pairs of a left and a right token cross every token between them. So with s q D + b k A of that level for the left tokens
// and k N for the right ones, dg_t is a sum over the left tokens from t on, where t is left, or over the right tokens before
// t, where t is right. Nothing is subtracted but within a block of 16, where M is summed in binary32.
//
//   q, k, v, g, b, w, do, the workspace of gdn2_prepare.cu, chunk_states and chunk_backward  ->  dq, dk, dv, dg, db, dw
//
// A block takes K_BLOCK channels, so that two of them share a multiprocessor. Warps: TILES groups of 16 rows times COLUMN_WARPS
// parts of these channels, then a thread each channel and block of 16.
#include "gdn2.cuh"

constexpr int COLUMN_WARPS = 2;
#include "gdn2_stream.cuh"

constexpr int DECAY_PITCH = K_BLOCK + 8; // floats
constexpr int DECAY_ARRAY = CHUNK * DECAY_PITCH;
constexpr int PAIR_PITCH = CHUNK - 16 + PAD; // operands, of a square without its first 16 rows and last 16 columns
constexpr int PAIR_SQUARE = (CHUNK - 16) * PAIR_PITCH;
constexpr int BLOCK_PAIRS = 16 * 16; // floats of a block on the diagonal, transposed
constexpr int LEVEL_TILE = CHUNK / 2 * STATE_PITCH;
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int LEVELS_BYTES = LEVELS * 3 * LEVEL_TILE * OPERAND_BYTES;
constexpr int PAIRS_BYTES = 4 * PAIR_SQUARE * OPERAND_BYTES;
// The ring of the stream; then the decays and the rows of the levels; then, also in the place of the pairs, the gradients so far
// and the rows of q, k and b.
constexpr int LAST_BYTES = 3 * DECAY_ARRAY * 4 + CHUNK * K_BLOCK * (2 * (int)sizeof(INPUT) + (int)sizeof(GATE));
constexpr int FLOW_BYTES =
    larger(STAGES * STAGE_BYTES, larger(2 * DECAY_ARRAY * 4 + LEVELS_BYTES, LAST_BYTES - PAIRS_BYTES));

// dP and dL below the diagonal blocks as operands, with the weights of the rows that they meet.
enum Pairs { SCORE_KEYS, LOWER_KEYS, SCORE_QUERIES, LOWER_ERASE, PAIRS };

struct Shared : StreamScales {
    BlockDecays decays;
    float whole[K_BLOCK];       // e^{G_C}
    float state_dots[K_BLOCK];  // sum_v dS S
    float dots[WARPS][K_BLOCK]; // the part of each warp
    float rows[KEY + 1][CHUNK]; // coefficients; QUERY times scale_unit
    float query_factor[CHUNK];  // the power of two of each row of q
    float largest[PAIRS][WARPS];
    Scale scale[PAIRS];
    float read_sums[TILES][K_BLOCK];  // over a block: s q D + b k A, of the state alone
    float write_sums[TILES][K_BLOCK]; // k N, of the next state alone
    float level_sums[2][K_BLOCK];     // of the first level: k N of the first block, s q D + b k A of the last one
};

typedef float OwnRows[K_PART / 8][4]; // 16 rows of the warp's columns of K

// What the kernel holds besides.
struct Arrays {
    u8* flow;
    float* rise; // e^{sum of g} from the start of a block to its token, (C, K+)
    float* fall; // from after the token to the end of its block
    operand* levels;
    float* partial;
    INPUT *queries, *keys;
    GATE* gates;
    operand* pairs;
    float* blocks[2]; // dP, dL of the blocks on the diagonal
};
__device__ __forceinline__ Arrays arrays_in(u8* shared) {
    Arrays x;
    x.flow = shared;
    x.rise = x.partial = (float*)shared;
    x.fall = x.rise + DECAY_ARRAY;
    x.levels = (operand*)(x.fall + DECAY_ARRAY);
    x.queries = (INPUT*)(x.partial + 3 * DECAY_ARRAY);
    x.keys = x.queries + CHUNK * K_BLOCK;
    x.gates = (GATE*)(x.keys + CHUNK * K_BLOCK);
    x.pairs = (operand*)(x.flow + FLOW_BYTES);
    x.blocks[0] = (float*)(x.pairs + PAIRS * PAIR_SQUARE);
    x.blocks[1] = x.blocks[0] + TILES * BLOCK_PAIRS;
    return x;
}

// dv = w Y and dw = v Y; the blocks of a chunk and head share the rows.
__device__ __forceinline__ void values(const ChunkParams& p, const Shared& s, int chunk, int head, long long square) {
    struct __align__(4 * sizeof(INPUT)) FourInputs {
        INPUT x[4];
    };
    struct __align__(4 * sizeof(GATE)) FourGates {
        GATE x[4];
    };
    struct __align__(4 * OPERAND_BYTES) FourOperands {
        operand x[4];
    };
    const int length = p.chunk_length[chunk], first = blockIdx.x % K_BLOCKS * THREADS + threadIdx.x;
    const long long token = p.chunk_token[chunk];
#pragma unroll 2
    for (int i = first; i < CHUNK * VD / 4; i += K_BLOCKS * THREADS) {
        const int row = i / (VD / 4), column = 4 * (i % (VD / 4));
        if (row >= length) continue;
        const long long at = ((token + row) * p.value_heads + head) * VD + column;
        const FourInputs value = *(const FourInputs*)(p.v + at);
        const FourGates gate = *(const FourGates*)(p.channels.w + at);
        const FourOperands adjoint = *(const FourOperands*)(p.adjoints + (square * CHUNK + row) * VD + column);
        const float scale = s.scales[ADJOINTS][2 * (column / 16) + row / (CHUNK / 2)];
        FourInputs dv;
        FourGates dw;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float y = from_operand(adjoint.x[e]) * scale;
            dv.x[e] = from_float<INPUT>(to_float(gate.x[e]) * y);
            dw.x[e] = from_float<GATE>(to_float(value.x[e]) * y);
        }
        *(FourInputs*)(p.dv + at) = dv;
        *(FourGates*)(p.channels.dw + at) = dw;
    }
}

// Adds what a block of V, the one from v on, adds to sum_v dS S: each warp takes every WARPS-th row, each lane two channels.
__device__ __forceinline__ void add_state_dots(float2& dots, const Shared& s, const Stage& stage, const Place& at, int v) {
    const int channel = 2 * at.lane;
    if (channel >= K_BLOCK) return;
    static_assert(V_BLOCK % WARPS == 0, "the warps share the rows");
#pragma unroll
    for (int row = at.warp; row < V_BLOCK; row += WARPS) {
        const int part = 2 * ((v + row) / 16) + (at.first_k + channel) / (KD / 2);
        const float scale = s.scales[STATES][part] * s.scales[D_STATES][part];
        const float2 x = load_pair(stage.states + row * STATE_PITCH + channel);
        const float2 y = load_pair(stage.d_states + row * STATE_PITCH + channel);
        dots.x = fmaf(x.x * y.x, scale, dots.x);
        dots.y = fmaf(x.y * y.y, scale, dots.y);
    }
}

// Adds a block of V to dP and -dL, without masks.
__device__ __forceinline__ void add_squares(float (&dp)[J_PART / 8][4], float (&dl)[J_PART / 8][4], const StreamScales& s,
                                            const Stage& stage, const Place& at, int v) {
#pragma unroll 1
    for (int c = 0; c < V_BLOCK / 16; ++c) {
        const int tile = v / 16 + c;
        const Left output = left_of_input(stage.d_output + at.first_row * INPUT_PITCH + 16 * c,
                                          s.factors[D_SCORES][at.row_half()][at.j_half()][tile], at);
        Left adjoint = load_left(stage.adjoints + at.first_row * OPERAND_PITCH + 16 * c, OPERAND_PITCH);
        scale_left(adjoint, s.factors[D_LOWER][at.row_half()][at.j_half()][tile]);
        products_nt(dp, output, dl, adjoint, stage.writes + at.first_j * OPERAND_PITCH + 16 * c, OPERAND_PITCH);
    }
}

// The same for do S^T, Y S^T and U dS^T.
__device__ __forceinline__ void add_states(OwnRows& output, OwnRows& adjoint, OwnRows& write, const StreamScales& s,
                                           const Stage& stage, const Place& at, int v) {
#pragma unroll 1
    for (int c = 0; c < V_BLOCK / 16; ++c) {
        auto factor = [&](Product which) { return s.factors[which][at.row_half()][at.column_half()][v / 16 + c]; };
        const int states = 16 * c * STATE_PITCH + at.first_column, left = at.first_row * OPERAND_PITCH + 16 * c;
        const Left of_output =
            left_of_input(stage.d_output + at.first_row * INPUT_PITCH + 16 * c, factor(OUTPUT_STATE), at);
        Left of_adjoint = load_left(stage.adjoints + left, OPERAND_PITCH);
        scale_left(of_adjoint, factor(ADJOINT_STATE));
        products_nn(output, of_output, adjoint, of_adjoint, stage.states + states, STATE_PITCH);
        Left of_write = load_left(stage.writes + left, OPERAND_PITCH);
        scale_left(of_write, factor(WRITE_D_STATE));
        product_nn(write, of_write, stage.d_states + states, STATE_PITCH);
    }
}

// The squares to shared memory: blocks on the diagonal in binary32, those below as operands with their weights. Sums the
// state dots of the warps along the way.
__device__ __forceinline__ void store_squares(Shared& s, const Arrays& x, const Place& at, float (&dp)[J_PART / 8][4],
                                              float (&dl)[J_PART / 8][4], float scale_unit) {
    const int tile_row = at.first_row / 16, first_tile = at.first_j / 16;
    float largest[PAIRS] = {};
#pragma unroll
    for (int n = 0; n < J_PART / 8; ++n) {
        const int tile = first_tile + n / 2;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = at.first_row + at.row + 8 * (e / 2), j = at.first_j + 8 * n + 2 * at.quad + e % 2;
            dp[n][e] = i >= j ? dp[n][e] * s.most[D_OUTPUT] * s.most[WRITES] : 0.0f;
            dl[n][e] = i > j ? -dl[n][e] * (s.most[ADJOINTS] * s.most[WRITES]) : 0.0f;
            if (!at.squares || tile > tile_row) continue;
            if (tile == tile_row) {
                const int place = (tile_row * 16 + j % 16) * 16 + i % 16;
                x.blocks[0][place] = dp[n][e];
                x.blocks[1][place] = dl[n][e];
            } else if (MODE == MODE_F16) {
                const float of_score = fabsf(dp[n][e]), of_lower = fabsf(dl[n][e]);
                largest[SCORE_KEYS] = fmaxf(largest[SCORE_KEYS], of_score * s.rows[KEY][j]);
                largest[LOWER_KEYS] = fmaxf(largest[LOWER_KEYS], of_lower * s.rows[KEY][j]);
                largest[SCORE_QUERIES] = fmaxf(largest[SCORE_QUERIES], of_score * fabsf(s.rows[QUERY][i]));
                largest[LOWER_ERASE] = fmaxf(largest[LOWER_ERASE], of_lower * s.rows[BETA][i]);
            }
        }
    }
    if (MODE == MODE_F16) {
#pragma unroll
        for (int which = 0; which < PAIRS; ++which) {
            const float of_warp = warp_max(largest[which]);
            if (at.lane == 0) s.largest[which][at.warp] = of_warp;
        }
    }
    __syncthreads();
    if (threadIdx.x < PAIRS) {
        float of_block = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w)
            of_block = fmaxf(of_block, MODE == MODE_F16 ? s.largest[threadIdx.x][w] : 0.0f);
        s.scale[threadIdx.x] = scale_for(of_block);
    }
    for (int channel = threadIdx.x; channel < K_BLOCK; channel += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += s.dots[w][channel];
        s.state_dots[channel] = sum * scale_unit;
    }
    __syncthreads();
    if (!at.squares) return;
#pragma unroll
    for (int n = 0; n < J_PART / 8; ++n) {
        if (first_tile + n / 2 >= tile_row) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = at.first_row + at.row + 8 * half, j = at.first_j + 8 * n + 2 * at.quad;
            operand* to = x.pairs + (i - 16) * PAIR_PITCH + j;
            const float2 keys = *(const float2*)(s.rows[KEY] + j);
            const float* score = dp[n] + 2 * half;
            const float* lower = dl[n] + 2 * half;
            auto store = [&](Pairs which, const float* from, float first, float second) {
                const float factor = s.scale[which].factor;
                store_pair(to + which * PAIR_SQUARE, from[0] * first * factor, from[1] * second * factor);
            };
            store(SCORE_KEYS, score, keys.x, keys.y);
            store(LOWER_KEYS, lower, keys.x, keys.y);
            store(SCORE_QUERIES, score, s.rows[QUERY][i], s.rows[QUERY][i]);
            store(LOWER_ERASE, lower, s.rows[BETA][i], s.rows[BETA][i]);
        }
    }
}

// Multiplies rows by decays of tokens, by those of blocks, and by a factor.
__device__ __forceinline__ void decay_rows(OwnRows& rows, const float* tokens, const float* blocks, float factor,
                                           const Place& at) {
    const float* from = tokens + (at.first_row + at.row) * DECAY_PITCH + at.first_column + 2 * at.quad;
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n) {
        float2 block = make_float2(factor, factor);
        if (blocks) {
            const float2 own = *(const float2*)(blocks + at.first_column + 2 * at.quad + 8 * n);
            block = make_float2(own.x * factor, own.y * factor);
        }
        const float2 first = *(const float2*)(from + 8 * n), second = *(const float2*)(from + 8 * DECAY_PITCH + 8 * n);
        rows[n][0] *= first.x * block.x;
        rows[n][1] *= first.y * block.y;
        rows[n][2] *= second.x * block.x;
        rows[n][3] *= second.y * block.y;
    }
}

// Where a thread finds its two rows, of its columns, in q and k and in b.
struct RowPlaces {
    u32 qk[2], gates[2]; // 32 bits hold every place in a tensor
    bool inside[2];
};
__device__ __forceinline__ RowPlaces places_of_rows(const ChunkParams& p, const Place& at, int chunk, int head, int qk_head) {
    RowPlaces rows;
    const u32 token = p.chunk_token[chunk], column = at.first_k + at.first_column + 2 * at.quad;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = at.first_row + at.row + 8 * half;
        rows.inside[half] = i < p.chunk_length[chunk];
        rows.qk[half] = ((token + i) * p.qk_heads + qk_head) * KD + column;
        rows.gates[half] = ((token + i) * p.value_heads + head) * KD + column;
    }
    return rows;
}

// Adds x * dx of the thread's rows by columns, where x are rows of s q, of b k or of k.
typedef float ColumnSums[K_PART / 4];
enum Of { OF_QUERY, OF_ERASE, OF_KEY };
template <Of What>
__device__ __forceinline__ void add_rows(ColumnSums& sums, const ChunkParams& p, const RowPlaces& rows, const OwnRows& dx) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (!rows.inside[half]) continue;
        const INPUT* from = (What == OF_QUERY ? p.q : p.k) + rows.qk[half];
        const GATE* gates = p.channels.b + rows.gates[half];
#pragma unroll
        for (int n = 0; n < K_PART / 8; ++n) {
            float2 x = load_two(from + 8 * n);
            if (What == OF_QUERY) x = make_float2(p.scale * x.x, p.scale * x.y);
            if (What == OF_ERASE) {
                const float2 b = load_two(gates + 8 * n);
                x = make_float2(b.x * x.x, b.y * x.y);
            }
            sums[2 * n] = fmaf(x.x, dx[n][2 * half], sums[2 * n]);
            sums[2 * n + 1] = fmaf(x.y, dx[n][2 * half + 1], sums[2 * n + 1]);
        }
    }
}
// Sums them over the 16 rows of the warp: each exchange halves what a lane still holds.
__device__ __forceinline__ void store_sums(float* to, ColumnSums& sums, const Place& at) {
    constexpr int COLUMNS = K_PART / 4; // of a quad: 8 or 4
    static_assert(COLUMNS == 8 || COLUMNS == 4, "a warp has 16 or 32 columns");
#pragma unroll
    for (int offset = 16, step = 0; offset >= 4; offset >>= 1, ++step) {
        const int held = COLUMNS >> (step + 1);
        const bool upper = at.lane & offset;
        if (held == 0) sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], offset);
#pragma unroll
        for (int m = 0; m < held; ++m) {
            const float kept = upper ? sums[m + held] : sums[m], sent = upper ? sums[m] : sums[m + held];
            sums[m] = kept + __shfl_xor_sync(0xffffffffu, sent, offset);
        }
    }
    const int number = at.row / (8 / COLUMNS);
    if (at.row % (8 / COLUMNS) == 0) to[at.first_column + 8 * (number / 2) + 2 * at.quad + number % 2] = sums[0];
}
__device__ __forceinline__ void clear_sums(ColumnSums& sums) {
#pragma unroll
    for (int n = 0; n < K_PART / 4; ++n) sums[n] = 0.0f;
}

__device__ __forceinline__ LevelRows level_rows(const Arrays& x, int level) {
    operand* at = x.levels + level * 3 * LEVEL_TILE;
    return {at, at + LEVEL_TILE, at + 2 * LEVEL_TILE};
}
// The place of a block among the left or the right ones of a level.
__device__ __forceinline__ int place_of_block(int block, int h) { return block / (2 * h) * h + block % h; }

// A row of one tensor, times its power of two, for all levels in which its block is left, or right.
template <bool Left>
__device__ __forceinline__ void level_rows_of(const Shared& s, const Arrays& x, const RowPart& row, float factor, int i,
                                              operand* LevelRows::*tensor) {
    const int block = i / 16;
    RowPart decay;
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
        const int h = blocks_of_level(level);
        if (is_left(block, h) != Left) continue;
        load_row(decay, (Left ? x.rise : x.fall) + i * DECAY_PITCH, true);
        reach_split(decay, s.decays, block, h);
        store_row(level_rows(x, level).*tensor + (16 * place_of_block(block, h) + i % 16) * STATE_PITCH, row, factor, decay);
    }
}
// All of them.
__device__ __forceinline__ void make_level_rows(const ChunkParams& p, const Shared& s, const Arrays& x, int first_k, int chunk,
                                                int head, int qk_head) {
#pragma unroll 1
    for (int i = threadIdx.x / ROW_LANES; i < CHUNK; i += THREADS / ROW_LANES) {
        const bool inside = i < p.chunk_length[chunk];
        const long long token = p.chunk_token[chunk] + i, qk_row = (token * p.qk_heads + qk_head) * KD + first_k;
        RowPart key, query, erase;
        load_row(key, p.k + qk_row, inside);
        load_row(erase, p.channels.b + (token * p.value_heads + head) * KD + first_k, inside);
        load_row(query, p.q + qk_row, inside);
        multiply_row(erase, key);
        level_rows_of<false>(s, x, key, inverse_of(s.rows[KEY][i]), i, &LevelRows::keys);
        level_rows_of<true>(s, x, erase, inverse_of(s.rows[BETA][i]), i, &LevelRows::erase);
        level_rows_of<true>(s, x, query, s.query_factor[i], i, &LevelRows::queries);
    }
}

// What one level adds to the gradients: pairs of blocks times rows, decayed; to D and A of a left block.
__device__ __forceinline__ void add_left(const ChunkParams& p, Shared& s, const Arrays& x, const Place& at, int h,
                                         const operand* keys, const RowPlaces& rows, OwnRows& d_query, OwnRows& d_erase) {
    const int block = at.first_row / 16, first = block / (2 * h) * 2 * h;
    const operand* pairs = x.pairs + (at.first_row - 16) * PAIR_PITCH;
    OwnRows of_query, of_erase;
    clear(of_query);
    clear(of_erase);
#pragma unroll 1
    for (int other = first; other < first + h; ++other) {
        const Left score = load_left(pairs + SCORE_KEYS * PAIR_SQUARE + 16 * other, PAIR_PITCH);
        const Left lower = load_left(pairs + LOWER_KEYS * PAIR_SQUARE + 16 * other, PAIR_PITCH);
        products_nn(of_query, score, of_erase, lower,
                    keys + 16 * place_of_block(other, h) * STATE_PITCH + at.first_column, STATE_PITCH);
    }
    const bool between = block % h != 0; // is there a block between this one and the others?
    const float* far = between ? s.decays.own[block - 1] : nullptr;
    decay_rows(of_query, x.rise, far, s.scale[SCORE_KEYS].inverse, at);
    decay_rows(of_erase, x.rise, far, s.scale[LOWER_KEYS].inverse, at);
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            d_query[n][e] += of_query[n][e];
            d_erase[n][e] += of_erase[n][e];
        }
    if (!between) return;
    ColumnSums sums;
    clear_sums(sums);
    add_rows<OF_QUERY>(sums, p, rows, of_query);
    add_rows<OF_ERASE>(sums, p, rows, of_erase);
    store_sums(s.level_sums[1], sums, at);
}
// To N of a right block.
__device__ __forceinline__ void add_right(const ChunkParams& p, Shared& s, const Arrays& x, const Place& at, int h,
                                          const LevelRows& tiles, const RowPlaces& rows, OwnRows& d_key) {
    const int block = at.first_row / 16, first = block / (2 * h) * 2 * h + h;
    const operand* pairs = x.pairs - 16 * PAIR_PITCH + at.first_row;
    OwnRows of_scores, of_lower;
    clear(of_scores);
    clear(of_lower);
#pragma unroll 1
    for (int other = first; other < first + h; ++other) {
        const int tile = 16 * place_of_block(other, h) * STATE_PITCH + at.first_column;
        product_nn(of_scores, load_left_transposed(pairs + SCORE_QUERIES * PAIR_SQUARE + 16 * other * PAIR_PITCH, PAIR_PITCH),
                   tiles.queries + tile, STATE_PITCH);
        product_nn(of_lower, load_left_transposed(pairs + LOWER_ERASE * PAIR_SQUARE + 16 * other * PAIR_PITCH, PAIR_PITCH),
                   tiles.erase + tile, STATE_PITCH);
    }
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            of_scores[n][e] = fmaf(of_scores[n][e], s.scale[SCORE_QUERIES].inverse, of_lower[n][e] * s.scale[LOWER_ERASE].inverse);
    const bool between = block % h != h - 1;
    decay_rows(of_scores, x.fall, between ? s.decays.own[block + 1] : nullptr, 1.0f, at);
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) d_key[n][e] += of_scores[n][e];
    if (!between) return;
    ColumnSums sums;
    clear_sums(sums);
    add_rows<OF_KEY>(sums, p, rows, of_scores);
    store_sums(s.level_sums[0], sums, at);
}
__device__ __forceinline__ void add_level(const ChunkParams& p, Shared& s, const Arrays& x, const Place& at, int level,
                                          const RowPlaces& rows, OwnRows& d_query, OwnRows& d_erase, OwnRows& d_key) {
    const int h = blocks_of_level(level);
    const LevelRows tiles = level_rows(x, level);
    if (is_left(at.first_row / 16, h))
        add_left(p, s, x, at, h, tiles.keys, rows, d_query, d_erase);
    else
        add_right(p, s, x, at, h, tiles, rows, d_key);
}

// Starts the copies of the rows of q, k and b.
__device__ __forceinline__ void copy_last_rows(const ChunkParams& p, const Arrays& x, int first_k, int chunk, int head,
                                               int qk_head) {
    const int length = p.chunk_length[chunk];
    const long long token = p.chunk_token[chunk];
    const long long qk_at = (token * p.qk_heads + qk_head) * KD + first_k, at = (token * p.value_heads + head) * KD + first_k;
    constexpr int INPUTS = K_BLOCK * (int)sizeof(INPUT), GATES = K_BLOCK * (int)sizeof(GATE); // bytes of a row
    const int qk_pitch = p.qk_heads * KD * (int)sizeof(INPUT), pitch = p.value_heads * KD * (int)sizeof(GATE);
    copy_tile<CHUNK, INPUTS>(shared_address(x.queries), INPUTS, p.q + qk_at, qk_pitch, length);
    copy_tile<CHUNK, INPUTS>(shared_address(x.keys), INPUTS, p.k + qk_at, qk_pitch, length);
    copy_tile<CHUNK, GATES>(shared_address(x.gates), GATES, p.channels.b + at, pitch, length);
    copy_async_commit();
}

// The rest, for one channel and block of 16: pairs within the block, all gradients of its rows, dg; from the decays of its tokens.
__device__ __forceinline__ void finish_block(const ChunkParams& p, const Shared& s, const Arrays& x, const float (&decay)[16],
                                             int first_k, int chunk, int head, int qk_head, int block, int channel) {
    const int length = p.chunk_length[chunk] - 16 * block;
    if (length <= 0) return;
    const u32 token = p.chunk_token[chunk] + 16 * block; // 32 bits hold every place in a tensor, and spare registers
    const u32 qk_at = (token * p.qk_heads + qk_head) * KD + first_k + channel;
    const u32 at = (token * p.value_heads + head) * KD + first_k + channel;
    const u32 qk_pitch = p.qk_heads * KD, pitch = p.value_heads * KD;
    const int first = 16 * block * K_BLOCK + channel; // in the tiles; rows beyond the last token are zero
    float query[16], erase[16], d_query[16], d_erase[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        query[i] = p.scale * to_float(x.queries[first + i * K_BLOCK]);
        erase[i] = to_float(x.keys[first + i * K_BLOCK]) * to_float(x.gates[first + i * K_BLOCK]);
        d_query[i] = d_erase[i] = 0.0f;
    }
    // What earlier blocks leave in the next state, and reads by later blocks of the right half.
    float before = 0.0f, after = s.whole[channel] * s.state_dots[channel];
#pragma unroll
    for (int other = 0; other < TILES; ++other) {
        if (other < block) before += s.write_sums[other][channel];
        if (other > block) after += s.read_sums[other][channel];
    }
    if (LEVELS > 1 && block == 1) before += s.level_sums[0][channel];
    if (LEVELS > 1 && block == TILES - 2) after += s.level_sums[1][channel];

    const float* from = x.partial + 16 * block * DECAY_PITCH + channel;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        if (j % 2 == 0) keep_loads_behind();
        const float key = to_float(x.keys[first + j * K_BLOCK]), b = to_float(x.gates[first + j * K_BLOCK]);
        const float* scores = x.blocks[0] + (block * 16 + j) * 16;
        const float* lower = x.blocks[1] + (block * 16 + j) * 16;
        // Down the column the key is decayed from row to row, up the column what the rows below have summed.
        float decayed = key, d_key = 0.0f;
#pragma unroll
        for (int i = j + 1; i < 16; ++i) {
            decayed *= decay[i];
            d_query[i] = fmaf(scores[i], decayed, d_query[i]);
            d_erase[i] = fmaf(lower[i], decayed, d_erase[i]);
        }
#pragma unroll
        for (int i = 15; i > j; --i) d_key = decay[i] * fmaf(lower[i], erase[i], fmaf(scores[i], query[i], d_key));
        // Row j is complete.
        const float other_query = from[j * DECAY_PITCH], other_erase = from[DECAY_ARRAY + j * DECAY_PITCH];
        const float other_key = from[2 * DECAY_ARRAY + j * DECAY_PITCH];
        const float of_query = other_query + d_query[j], of_erase = other_erase + d_erase[j];
        if (j < length) {
            const float own = scores[j];
            const float dq = p.scale * fmaf(own, key, of_query);
            const float dk = fmaf(b, of_erase, other_key) + fmaf(own, query[j], d_key);
            if (p.channels.d_queries) {
                p.channels.d_queries[at + j * pitch] = dq;
                p.channels.d_keys[at + j * pitch] = dk;
            } else {
                p.dq[qk_at + j * qk_pitch] = from_float<INPUT>(dq);
                p.dk[qk_at + j * qk_pitch] = from_float<INPUT>(dk);
            }
            p.channels.db[at + j * pitch] = from_float<GATE>(key * of_erase);
        }
        // For dg: what is summed from token j on, and what is summed before it.
        d_query[j] = fmaf(query[j], of_query, fmaf(erase[j], of_erase, -key * d_key));
        d_erase[j] = before;
        before = fmaf(key, other_key, before);
    }
#pragma unroll
    for (int j = 15; j >= 0; --j) {
        after += d_query[j];
        if (j < length) p.dg[at + j * pitch] = after + d_erase[j];
    }
}

// Grid: chunks times blocks of K, HV.
extern "C" __global__ void __launch_bounds__(THREADS, K_BLOCK == 64 ? SHARING : 1) gdn2_gradient(const __grid_constant__ ChunkParams p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Shared s;
    const Arrays x = arrays_in(shared);
    const Place at = place_of_warp();
    const int chunk = chunk_of_block(), head = blockIdx.y, qk_head = head / (p.value_heads / p.qk_heads);
    const int block = at.first_row / 16;
    const long long square = (long long)chunk * p.value_heads + head;

    wait_for_kernel_before();
    Stream stream = {p, ((long long)p.chunk_token[chunk] * p.value_heads + head) * VD, square * CHUNK * VD,
                     square * VD * KD + at.first_k, x.flow, p.chunk_length[chunk], 0};
    stream.begin();
    sum_log_decays<THREADS>(s.decays, p, chunk, head, at.first_k);
    for (int i = threadIdx.x; i < (KEY + 1) * CHUNK; i += THREADS) {
        const float weight = p.coefficients[square * COEFFICIENT_NUMBERS + i];
        s.rows[i / CHUNK][i % CHUNK] = weight * (i / CHUNK == QUERY ? p.scale_unit : 1.0f);
        // QUERY is s / scale_unit over the factor.
        if (i / CHUNK == QUERY) s.query_factor[i % CHUNK] = p.scale == 0.0f ? 0.0f : p.scale / p.scale_unit / weight;
    }
    load_scales(p, s, square);
    make_block_decays<THREADS>(s.decays, s.whole);
    values(p, s, chunk, head, square);

    OwnRows d_query, d_erase, d_key;
    clear(d_query);
    clear(d_erase);
    clear(d_key);
    {
        float dp[J_PART / 8][4], dl[J_PART / 8][4];
        clear(dp);
        clear(dl);
        float2 dots = make_float2(0.0f, 0.0f);
#pragma unroll 1
        for (int v = 0; v < VD; v += V_BLOCK) {
            const Stage stage = stream.arrive();
            if (at.squares) add_squares(dp, dl, s, stage, at, v);
            add_states(d_query, d_erase, d_key, s, stage, at, v);
            add_state_dots(dots, s, stage, at, v);
            stream.leave();
        }
        if (2 * at.lane < K_BLOCK) *(float2*)(s.dots[at.warp] + 2 * at.lane) = dots;
        store_squares(s, x, at, dp, dl, p.scale_unit);
    }
    // All are done with the ring.
#pragma unroll 1
    for (int task = threadIdx.x; task < TILES * K_BLOCK; task += THREADS) {
        float g[16];
        load_log_decays(g, p, chunk, head, task / K_BLOCK, at.first_k + task % K_BLOCK);
        const int first = task / K_BLOCK * 16 * DECAY_PITCH + task % K_BLOCK;
        token_decays(g, x.rise + first, x.fall + first, DECAY_PITCH);
    }
    __syncthreads();
    make_level_rows(p, s, x, at.first_k, chunk, head, qk_head);
    decay_rows(d_query, x.rise, s.decays.before[block], s.most[D_OUTPUT] * s.most[STATES], at);
    decay_rows(d_erase, x.rise, s.decays.before[block], -(s.most[ADJOINTS] * s.most[STATES]), at);
    decay_rows(d_key, x.fall, s.decays.after[block], s.most[WRITES] * s.most[D_STATES] * p.scale_unit, at);
    const RowPlaces rows = places_of_rows(p, at, chunk, head, qk_head);
    {
        ColumnSums sums;
        clear_sums(sums);
        add_rows<OF_QUERY>(sums, p, rows, d_query);
        add_rows<OF_ERASE>(sums, p, rows, d_erase);
        store_sums(s.read_sums[block], sums, at);
        clear_sums(sums);
        add_rows<OF_KEY>(sums, p, rows, d_key);
        store_sums(s.write_sums[block], sums, at);
    }
    __syncthreads();
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) add_level(p, s, x, at, level, rows, d_query, d_erase, d_key);
    __syncthreads(); // the decays, the rows and the pairs are done with
    copy_last_rows(p, x, at.first_k, chunk, head, qk_head);
    float* to = x.partial + (at.first_row + at.row) * DECAY_PITCH + at.first_column + 2 * at.quad;
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* row = to + 8 * half * DECAY_PITCH + 8 * n;
            *(float2*)row = make_float2(d_query[n][2 * half], d_query[n][2 * half + 1]);
            *(float2*)(row + DECAY_ARRAY) = make_float2(d_erase[n][2 * half], d_erase[n][2 * half + 1]);
            *(float2*)(row + 2 * DECAY_ARRAY) = make_float2(d_key[n][2 * half], d_key[n][2 * half + 1]);
        }
    static_assert(TILES * K_BLOCK <= THREADS, "a thread each channel and block");
    const int own_block = threadIdx.x / K_BLOCK, channel = threadIdx.x % K_BLOCK;
    const bool works = own_block < TILES;
    float decay[16];
    load_log_decays(decay, p, chunk, head, works ? own_block : 0, at.first_k + channel);
#pragma unroll
    for (int i = 0; i < 16; ++i) decay[i] = exponential(decay[i]);
    copy_async_wait<0>();
    __syncthreads();
    if (works) finish_block(p, s, x, decay, at.first_k, chunk, head, qk_head, own_block, channel);
}
