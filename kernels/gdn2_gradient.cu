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
// Warps: TILES groups of 16 rows times COLUMN_WARPS parts of the K columns, then a thread each channel and block of 16.
#include "gdn2.cuh"

constexpr int COLUMN_WARPS = KD % 64 == 0 ? KD / 32 : 2;
#include "chunk_stream.cuh"

constexpr int DECAY_PITCH = KD + 8;        // floats
constexpr int DECAY_ARRAY = CHUNK * DECAY_PITCH;
constexpr int PAIR_PITCH = CHUNK - 16 + PAD; // operands, of a square without its first 16 rows and last 16 columns
constexpr int PAIR_SQUARE = (CHUNK - 16) * PAIR_PITCH;
constexpr int ROWS_LOADED = THREADS > 256 ? 4 : 2; // of a block at once, while the last gradients are made
constexpr int BLOCK_PAIRS = 16 * 16; // floats of a block on the diagonal, transposed
constexpr int LEVEL_TILE = CHUNK / 2 * ROW_PITCH;
constexpr int LEVELS_BYTES = LEVELS * 3 * LEVEL_TILE * OPERAND_BYTES;
constexpr int FLOW_BYTES_1 = STAGES * STAGE_BYTES > LEVELS_BYTES ? STAGES * STAGE_BYTES : LEVELS_BYTES;
constexpr int FLOW_BYTES = FLOW_BYTES_1 > DECAY_ARRAY * 4 ? FLOW_BYTES_1 : DECAY_ARRAY * 4;

// dP and dL below the diagonal blocks as operands, with the weights of the rows that they meet.
enum Pairs { SCORE_KEYS, LOWER_KEYS, SCORE_QUERIES, LOWER_ERASE, PAIRS };

struct Shared : StreamScales {
    BlockDecays decays;
    float whole[KD];          // e^{G_C}
    float state_dots[KD];     // sum_v dS S
    float rows[KEY + 1][CHUNK]; // coefficients; QUERY times scale_unit
    float largest[PAIRS][WARPS];
    Scale scale[PAIRS];
    float read_sums[TILES][KD];  // over a block: s q D + b k A, of the state alone
    float write_sums[TILES][KD]; // k N, of the next state alone
    float level_sums[2][KD];     // of the first level: k N of the first block, s q D + b k A of the last one
};

typedef float OwnRows[K_PART / 8][4]; // 16 rows of the warp's columns of K

// What the kernel holds besides.
struct Arrays {
    float* rise; // e^{sum of g} from the start of a block to its token, (C, K+)
    float* fall; // from after the token to the end of its block
    u8* flow;    // the ring of the stream, then the rows of the levels
    operand* pairs;
    float* blocks[2]; // dP, dL of the blocks on the diagonal
};
__device__ __forceinline__ Arrays arrays_in(u8* shared) {
    Arrays x;
    x.rise = (float*)shared;
    x.fall = x.rise + DECAY_ARRAY;
    x.flow = (u8*)(x.fall + DECAY_ARRAY);
    x.pairs = (operand*)(x.flow + FLOW_BYTES);
    x.blocks[0] = (float*)(x.pairs + PAIRS * PAIR_SQUARE);
    x.blocks[1] = x.blocks[0] + TILES * BLOCK_PAIRS;
    return x;
}

// sum_v dS S by channels, from global memory; parts lie in `parts` between two barriers.
__device__ __forceinline__ void state_dots(const ChunkParams& p, Shared& s, long long square, float* parts) {
    constexpr int VECTOR = 16 / OPERAND_BYTES, VECTORS = KD / VECTOR, ROWS = THREADS / VECTORS;
    const int vector = threadIdx.x % VECTORS, first = threadIdx.x / VECTORS, channel = VECTOR * vector;
    if (first < ROWS) {
        float sums[VECTOR] = {};
#pragma unroll 2
        for (int v = first; v < VD; v += ROWS) {
            const long long at = (square * VD + v) * KD + channel;
            const uint4 a = *(const uint4*)(p.states + at), b = *(const uint4*)(p.d_states + at);
            const int part = 2 * (v / 16) + channel / (KD / 2);
            const float scale = s.scales[STATES][part] * s.scales[D_STATES][part];
#pragma unroll
            for (int e = 0; e < VECTOR; e += 2) {
                const float2 x = load_pair((const operand*)&a + e), y = load_pair((const operand*)&b + e);
                sums[e] = fmaf(x.x * y.x, scale, sums[e]);
                sums[e + 1] = fmaf(x.y * y.y, scale, sums[e + 1]);
            }
        }
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) parts[first * KD + channel + e] = sums[e];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < KD; c += THREADS) {
        float sum = 0.0f;
        for (int row = 0; row < ROWS; ++row) sum += parts[row * KD + c];
        s.state_dots[c] = sum * p.scale_unit;
    }
    __syncthreads();
}

// dv = w Y and dw = v Y of one block of V.
__device__ __forceinline__ void values_of_block(const ChunkParams& p, const Shared& s, int chunk, int head, const u8* stage,
                                                int v) {
    struct __align__(4 * sizeof(INPUT)) FourInputs {
        INPUT x[4];
    };
    struct __align__(4 * sizeof(GATE)) FourGates {
        GATE x[4];
    };
    const operand* adjoints = (const operand*)(stage + INPUT_TILE + OPERAND_TILE);
    const int length = p.chunk_length[chunk];
#pragma unroll 2
    for (int i = threadIdx.x; i < CHUNK * V_BLOCK / 4; i += THREADS) {
        const int row = i / (V_BLOCK / 4), column = 4 * (i % (V_BLOCK / 4));
        if (row >= length) continue;
        const long long at = ((long long)(p.chunk_token[chunk] + row) * p.value_heads + head) * VD + v + column;
        const FourInputs value = *(const FourInputs*)(p.v + at);
        const FourGates gate = *(const FourGates*)(p.channels.w + at);
        const operand* from = adjoints + row * OPERAND_PITCH + column;
        const float scale = s.scales[ADJOINTS][2 * ((v + column) / 16) + row / (CHUNK / 2)];
        const float2 low = load_pair(from), high = load_pair(from + 2);
        const float y[4] = {low.x * scale, low.y * scale, high.x * scale, high.y * scale};
        FourInputs dv;
        FourGates dw;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            dv.x[e] = from_float<INPUT>(to_float(gate.x[e]) * y[e]);
            dw.x[e] = from_float<GATE>(to_float(value.x[e]) * y[e]);
        }
        *(FourInputs*)(p.dv + at) = dv;
        *(FourGates*)(p.channels.dw + at) = dw;
    }
}

// The squares to shared memory: blocks on the diagonal in binary32, those below as operands with their weights.
__device__ __forceinline__ void store_squares(Shared& s, const Arrays& x, const Place& at, float (&dp)[J_PART / 8][4],
                                              float (&dl)[J_PART / 8][4]) {
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

// to[column], where it is to be `added` to that, = the sum of x * dx over the 16 rows of the warp, where x are rows of s q, of b k
// or of k.
enum Of { OF_QUERY, OF_ERASE, OF_KEY };
template <Of What, bool Added>
__device__ __forceinline__ void sum_rows(float* to, const ChunkParams& p, const Place& at, const OwnRows& dx) {
    const int chunk = blockIdx.x, head = blockIdx.y, qk_head = head / (p.value_heads / p.qk_heads);
    const int column = at.first_column + 2 * at.quad, length = p.chunk_length[chunk];
    const long long token = p.chunk_token[chunk] + at.first_row + at.row;
    const INPUT* from = (What == OF_QUERY ? p.q : p.k) + (token * p.qk_heads + qk_head) * KD + column;
    const GATE* gates = p.channels.b + (token * p.value_heads + head) * KD + column;
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n) {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (at.first_row + at.row + 8 * half >= length) continue;
            float2 x = load_two(from + 8 * half * p.qk_heads * KD + 8 * n);
            if (What == OF_QUERY) x = make_float2(p.scale * x.x, p.scale * x.y);
            if (What == OF_ERASE) {
                const float2 b = load_two(gates + 8 * half * p.value_heads * KD + 8 * n);
                x = make_float2(b.x * x.x, b.y * x.y);
            }
            sum.x = fmaf(x.x, dx[n][2 * half], sum.x);
            sum.y = fmaf(x.y, dx[n][2 * half + 1], sum.y);
        }
#pragma unroll
        for (int offset = 4; offset < 32; offset <<= 1) {
            sum.x += __shfl_xor_sync(0xffffffffu, sum.x, offset);
            sum.y += __shfl_xor_sync(0xffffffffu, sum.y, offset);
        }
        if (at.row == 0) {
            float2* place = (float2*)(to + column + 8 * n);
            if (Added) sum = make_float2(place->x + sum.x, place->y + sum.y);
            *place = sum;
        }
    }
}

__device__ __forceinline__ LevelRows level_rows(const Arrays& x, int level) {
    operand* at = (operand*)x.flow + level * 3 * LEVEL_TILE;
    return {at, at + LEVEL_TILE, at + 2 * LEVEL_TILE};
}
// The place of a block among the left or the right ones of a level.
__device__ __forceinline__ int place_of_block(int block, int h) { return block / (2 * h) * h + block % h; }

// A row of one tensor for all levels in which its block is left, or right.
template <bool Left>
__device__ __forceinline__ void level_rows_of(const Shared& s, const Arrays& x, const RowPart& row, RowPart& decay, int i,
                                              operand* LevelRows::*tensor) {
    const int block = i / 16;
    const float factor = row_factor(largest_of_row(row));
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) {
        const int h = blocks_of_level(level);
        if (is_left(block, h) != Left) continue;
        load_row(decay, (Left ? x.rise : x.fall) + i * DECAY_PITCH, true);
        reach_split(decay, s.decays, block, h);
        store_row(level_rows(x, level).*tensor + (16 * place_of_block(block, h) + i % 16) * ROW_PITCH, row, factor, decay);
    }
}
// All of them.
__device__ __forceinline__ void make_level_rows(const ChunkParams& p, const Shared& s, const Arrays& x, int chunk, int head,
                                                int qk_head) {
#pragma unroll 1
    for (int i = threadIdx.x / ROW_LANES; i < CHUNK; i += THREADS / ROW_LANES) {
        const bool inside = i < p.chunk_length[chunk];
        const long long token = p.chunk_token[chunk] + i, qk_row = (token * p.qk_heads + qk_head) * KD;
        RowPart row, decay;
        // One tensor after the other: the gradients are in registers meanwhile.
        load_row(row, p.k + qk_row, inside);
        level_rows_of<false>(s, x, row, decay, i, &LevelRows::keys);
        keep_loads_behind();
        load_row(decay, p.channels.b + (token * p.value_heads + head) * KD, inside);
        multiply_row(row, decay);
        level_rows_of<true>(s, x, row, decay, i, &LevelRows::erase);
        keep_loads_behind();
        load_row(row, p.q + qk_row, inside);
        level_rows_of<true>(s, x, row, decay, i, &LevelRows::queries);
    }
}

// What one level adds to a gradient: pairs of blocks times rows, decayed. With `Transposed` the gradient is N of a right block,
// else D or A of a left one. The sum over its rows goes to `sums`, where there is such a place.
template <Pairs Which, bool Added, Of What>
__device__ __forceinline__ void add_pairs(OwnRows& gradient, float* sums, const ChunkParams& p, const Shared& s, const Arrays& x,
                                          const Place& at, const operand* tiles, int h) {
    constexpr bool Transposed = Which == SCORE_QUERIES || Which == LOWER_ERASE;
    const int block = at.first_row / 16, first = block / (2 * h) * 2 * h + (Transposed ? h : 0);
    const operand* pairs = x.pairs + Which * PAIR_SQUARE - 16 * PAIR_PITCH;
    OwnRows sum;
    clear(sum);
#pragma unroll 1
    for (int other = first; other < first + h; ++other) {
        const Left left = Transposed ? load_left_transposed(pairs + 16 * other * PAIR_PITCH + at.first_row, PAIR_PITCH)
                                     : load_left(pairs + at.first_row * PAIR_PITCH + 16 * other, PAIR_PITCH);
        product_nn(sum, left, tiles + 16 * place_of_block(other, h) * ROW_PITCH + at.first_column, ROW_PITCH);
    }
    const float* far = nullptr;
    if (sums) far = s.decays.own[Transposed ? block + 1 : block - 1];
    decay_rows(sum, Transposed ? x.fall : x.rise, far, s.scale[Which].inverse, at);
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) gradient[n][e] += sum[n][e];
    if (sums) sum_rows<What, Added>(sums, p, at, sum);
}
__device__ __forceinline__ void add_level(const ChunkParams& p, Shared& s, const Arrays& x, const Place& at, int level,
                                          OwnRows& d_query, OwnRows& d_erase, OwnRows& d_key) {
    const int block = at.first_row / 16, h = blocks_of_level(level);
    const LevelRows tiles = level_rows(x, level);
    if (is_left(block, h)) {
        float* sums = block % h != 0 ? s.level_sums[1] : nullptr; // where a block lies between
        add_pairs<SCORE_KEYS, false, OF_QUERY>(d_query, sums, p, s, x, at, tiles.keys, h);
        add_pairs<LOWER_KEYS, true, OF_ERASE>(d_erase, sums, p, s, x, at, tiles.keys, h);
    } else {
        float* sums = block % h != h - 1 ? s.level_sums[0] : nullptr;
        add_pairs<SCORE_QUERIES, false, OF_KEY>(d_key, sums, p, s, x, at, tiles.queries, h);
        add_pairs<LOWER_ERASE, true, OF_KEY>(d_key, sums, p, s, x, at, tiles.erase, h);
    }
}

// The rest, for one channel and block of 16: pairs within the block, all gradients of its rows, dg.
__device__ __forceinline__ void finish_block(const ChunkParams& p, const Shared& s, const Arrays& x, const float* partial,
                                             int chunk, int head, int qk_head, int block, int channel) {
    const int length = p.chunk_length[chunk] - 16 * block;
    // 32 bits hold every place in a tensor, and spare registers.
    const u32 token = p.chunk_token[chunk] + 16 * block;
    const u32 qk_at = (token * p.qk_heads + qk_head) * KD + channel, at = (token * p.value_heads + head) * KD + channel;
    const u32 qk_pitch = p.qk_heads * KD, pitch = p.value_heads * KD;
    float decay[16], query[16], erase[16], d_query[16], d_erase[16];
    load_log_decays(decay, p, chunk, head, block, channel);
    keep_loads_behind();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        decay[i] = exponential(decay[i]);
        query[i] = i < length ? p.scale * to_float(p.q[qk_at + i * qk_pitch]) : 0.0f;
    }
    keep_loads_behind();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        erase[i] = i < length ? to_float(p.k[qk_at + i * qk_pitch]) * to_float(p.channels.b[at + i * pitch]) : 0.0f;
        d_query[i] = d_erase[i] = 0.0f;
    }
    keep_loads_behind();
    // What earlier blocks leave in the next state, and reads by later blocks of the right half.
    float before = 0.0f, after = s.whole[channel] * s.state_dots[channel];
#pragma unroll
    for (int other = 0; other < TILES; ++other) {
        if (other < block) before += s.write_sums[other][channel];
        if (other > block) after += s.read_sums[other][channel];
    }
    if (LEVELS > 1 && block == 1) before += s.level_sums[0][channel];
    if (LEVELS > 1 && block == TILES - 2) after += s.level_sums[1][channel];

    const float* from = partial + 16 * block * DECAY_PITCH + channel;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        if (j % ROWS_LOADED == 0) keep_loads_behind();
        const bool inside = j < length;
        const float key = inside ? to_float(p.k[qk_at + j * qk_pitch]) : 0.0f;
        const float* scores = x.blocks[0] + (block * 16 + j) * 16;
        const float* lower = x.blocks[1] + (block * 16 + j) * 16;
        float d_key = 0.0f, product = 1.0f;
#pragma unroll
        for (int i = j + 1; i < 16; ++i) {
            product *= decay[i];
            const float score = scores[i] * product, of_lower = lower[i] * product;
            d_query[i] = fmaf(score, key, d_query[i]);
            d_erase[i] = fmaf(of_lower, key, d_erase[i]);
            d_key = fmaf(score, query[i], d_key);
            d_key = fmaf(of_lower, erase[i], d_key);
        }
        // Row j is complete.
        const float other_query = from[j * DECAY_PITCH], other_erase = from[DECAY_ARRAY + j * DECAY_PITCH];
        const float other_key = from[2 * DECAY_ARRAY + j * DECAY_PITCH];
        const float of_query = other_query + d_query[j], of_erase = other_erase + d_erase[j];
        if (inside) {
            const float own = scores[j], b = to_float(p.channels.b[at + j * pitch]);
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

// Grid: chunks, HV.
extern "C" __global__ void __launch_bounds__(THREADS, 1) gdn2_gradient(const __grid_constant__ ChunkParams p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Shared s;
    const Arrays x = arrays_in(shared);
    const Place at = place_of_warp();
    const int chunk = blockIdx.x, head = blockIdx.y, qk_head = head / (p.value_heads / p.qk_heads);
    const int block = at.first_row / 16;
    const long long square = (long long)chunk * p.value_heads + head;

    wait_for_kernel_before();
    Stream stream = {p, x.flow, chunk, head, ITEMS, 0};
    stream.begin();
    sum_log_decays<THREADS>(s.decays, p, chunk, head);
    for (int i = threadIdx.x; i < (KEY + 1) * CHUNK; i += THREADS)
        s.rows[i / CHUNK][i % CHUNK] = p.coefficients[square * COEFFICIENT_NUMBERS + i] * (i / CHUNK == QUERY ? p.scale_unit : 1.0f);
    load_scales(p, s, square);
    make_block_decays<THREADS>(s.decays, s.whole);
    state_dots(p, s, square, x.rise);
#pragma unroll 1
    for (int task = threadIdx.x; task < TILES * KD; task += THREADS) {
        float g[16];
        load_log_decays(g, p, chunk, head, task / KD, task % KD);
        const int first = task / KD * 16 * DECAY_PITCH + task % KD;
        token_decays(g, x.rise + first, x.fall + first, DECAY_PITCH);
    }

    {
        float dp[J_PART / 8][4], dl[J_PART / 8][4], none[2];
        clear(dp);
        clear(dl);
#pragma unroll 1
        for (int v = 0; v < VD; v += V_BLOCK) {
            const u8* stage = stream.arrive();
            if (at.squares) squares_of_block(stage, s, at, v, dp, dl, none);
            values_of_block(p, s, chunk, head, stage, v);
            stream.leave();
        }
        store_squares(s, x, at, dp, dl);
    }

    OwnRows d_query, d_erase, d_key;
    product_with_state<OUTPUT_STATE>(d_query, s, at, stream);
    decay_rows(d_query, x.rise, s.decays.before[block], s.most[D_OUTPUT] * s.most[STATES], at);
    product_with_state<ADJOINT_STATE>(d_erase, s, at, stream);
    decay_rows(d_erase, x.rise, s.decays.before[block], -(s.most[ADJOINTS] * s.most[STATES]), at);
    product_with_state<WRITE_D_STATE>(d_key, s, at, stream);
    decay_rows(d_key, x.fall, s.decays.after[block], s.most[WRITES] * s.most[D_STATES] * p.scale_unit, at);
    sum_rows<OF_QUERY, false>(s.read_sums[block], p, at, d_query);
    sum_rows<OF_ERASE, true>(s.read_sums[block], p, at, d_erase);
    sum_rows<OF_KEY, false>(s.write_sums[block], p, at, d_key);

    __syncthreads(); // the ring is free
    make_level_rows(p, s, x, chunk, head, qk_head);
    __syncthreads();
#pragma unroll
    for (int level = 0; level < LEVELS; ++level) add_level(p, s, x, at, level, d_query, d_erase, d_key);
    __syncthreads(); // and so are the decays and the rows
    float* partial = (float*)shared;
    float* to = partial + (at.first_row + at.row) * DECAY_PITCH + at.first_column + 2 * at.quad;
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* row = to + 8 * half * DECAY_PITCH + 8 * n;
            *(float2*)row = make_float2(d_query[n][2 * half], d_query[n][2 * half + 1]);
            *(float2*)(row + DECAY_ARRAY) = make_float2(d_erase[n][2 * half], d_erase[n][2 * half + 1]);
            *(float2*)(row + 2 * DECAY_ARRAY) = make_float2(d_key[n][2 * half], d_key[n][2 * half + 1]);
        }
    __syncthreads();
#pragma unroll 1
    for (int task = threadIdx.x; task < TILES * KD; task += THREADS)
        finish_block(p, s, x, partial, chunk, head, qk_head, task / KD, task % KD);
}
