// Last step of the backward of the chunk form of GDN, for one chunk, one q/k head and its whole group of value heads:
//
//   dP = tril(do U^T)      dL = -stril(Y U^T)
//   dq = s (e^G (do S^T) + (dP E) k)
//   dk = beta (-e^G (Y S^T) + (dL E) k) + (dP E)^T s q + (dL E)^T (beta k) + e^{G_C - G} (U dS^T)
//   dbeta_i = v_i . Y_i - k_i . (e^{G_i} Y_i S^T) + sum_j dL_ij L_ij / beta_i
//   dg_t = sum_{i >= t > j} M_ij + sum_{i >= t} a_i + sum_{i < t} b_i + e^{G_C} <dS, S>
//
// with M = P dP + L dL element by element, a_i what token i reads from S (s q_i and -beta k_i, times the first terms of dq
// and dk) and b_i = k_i . (last term of dk). Nothing in dg_t is subtracted from a number that was rounded elsewhere: the
// sum of M over the rectangle i >= t > j is a sum of row sums minus column sums of the same binary32 numbers. (Sums of
// q . dq - k . dk are the same algebra, but the terms that must cancel are then rounded on different paths.)
//
// The workspace of chunk_prepare.cu, chunk_states and chunk_backward.cu, v, do  ->  dq, dk (T, HK, K), dg, dbeta (T, HV)
//
// Warps: TILES groups of 16 rows times COLUMN_WARPS parts of the K columns. What is indexed by V streams through shared
// memory in blocks of V_BLOCK columns: first do, v, U, Y for the two squares, then the left and right operands of
// do S^T, Y S^T and U dS^T. dq and dk stay in registers over the value heads of the group.
#include "chunk.cuh"

constexpr int COLUMN_WARPS = CHUNK == 32 && KD % 64 == 0 ? 4 : 2;
constexpr int WARPS = TILES * COLUMN_WARPS;
constexpr int THREADS = 32 * WARPS;
constexpr int K_PART = KD / COLUMN_WARPS;                                  // columns of K of a warp
constexpr int SQUARE_PARTS = COLUMN_WARPS < TILES ? COLUMN_WARPS : TILES;  // parts of the columns of the squares;
constexpr int J_PART = CHUNK / SQUARE_PARTS;                               // warps beyond them have none
constexpr int BLOCKS = VD / V_BLOCK;       // blocks of V
constexpr int ITEMS = 4 * BLOCKS;          // what a value head streams
constexpr int V_TILES = VD / 16;
constexpr int UNROLLED = 4; // steps over V whose operands are on their way at once

constexpr int OPERAND_PITCH = V_BLOCK + PAD;                               // operands
constexpr int INPUT_PITCH = V_BLOCK + 16 / (int)sizeof(INPUT);             // elements of INPUT
constexpr int OPERAND_TILE = CHUNK * OPERAND_PITCH * OPERAND_BYTES;        // bytes
constexpr int INPUT_TILE = CHUNK * INPUT_PITCH * (int)sizeof(INPUT);
constexpr int LEFT_TILE = OPERAND_TILE > INPUT_TILE ? OPERAND_TILE : INPUT_TILE;
constexpr int SQUARES_STAGE = 2 * INPUT_TILE + 2 * OPERAND_TILE;
constexpr int PRODUCT_STAGE = LEFT_TILE + V_BLOCK * ROW_PITCH * OPERAND_BYTES;
constexpr int STAGE_BYTES = SQUARES_STAGE > PRODUCT_STAGE ? SQUARES_STAGE : PRODUCT_STAGE;
static_assert(VD % V_BLOCK == 0 && V_BLOCK % 16 == 0, "blocks of V are whole tiles");

// Tensors of the workspace that carry scales.
enum Tensor { D_OUTPUT, WRITES, ADJOINTS, STATES, D_STATES, TENSORS };
// Products over V, with their operands. do is not kept as operands, so its scale is only that of the largest element.
enum Product { D_SCORES, D_LOWER, OUTPUT_STATE, ADJOINT_STATE, WRITE_D_STATE, PRODUCTS };
constexpr __device__ Tensor LEFT_OF[PRODUCTS] = {D_OUTPUT, ADJOINTS, D_OUTPUT, ADJOINTS, WRITES};
constexpr __device__ Tensor RIGHT_OF[PRODUCTS] = {WRITES, WRITES, STATES, STATES, D_STATES};

// Sums and weights that the warps share.
struct Shared {
    float coefficients[MOST][CHUNK];
    float query_dots[COLUMN_WARPS][CHUNK];   // parts of s q_i . e^{G_i} (do_i S^T)
    float key_dots[COLUMN_WARPS][CHUNK];     // parts of k_i . e^{G_i} (Y_i S^T)
    float write_dots[COLUMN_WARPS][CHUNK];   // parts of b_i
    float value_dots[SQUARE_PARTS][CHUNK];   // parts of v_i . Y_i
    float overlap_dots[SQUARE_PARTS][CHUNK]; // parts of sum_j dL_ij L_ij / beta_i
    float row_sums[SQUARE_PARTS][CHUNK];     // of M
    float column_sums[TILES][CHUNK];         // of M
    float state_dots[WARPS];                 // parts of <dS, S>
    float largest[4][WARPS]; // of dP E and dL E, with the weights of the first and of the second products
    Scale scale[4];          // what brings them into range
    // The scales of the workspace by tiles of V and halves (of K for the states, of the chunk for the others), the
    // largest of each tensor, and what brings the left operand of a product to the largest scales of both its operands.
    float scales[TENSORS][2 * V_TILES];
    float most[TENSORS];
    float factors[PRODUCTS][2][2][V_TILES]; // half of the left operand's rows, half of the right operand
};

struct Place {
    int warp, lane, row, quad;
    int first_row;    // of the warp's 16 rows
    int first_column; // of the warp's columns of K
    int first_j;      // of its columns of the squares
    bool squares;     // whether it has any

    // Which halves of the chunk, of K and of the chunk those are in.
    __device__ __forceinline__ int row_half() const { return first_row / (CHUNK / 2); }
    __device__ __forceinline__ int column_half() const { return first_column / (KD / 2); }
    __device__ __forceinline__ int j_half() const { return first_j / (CHUNK / 2); }
};

// The scales of one value head and the factors that follow from them, by all threads.
__device__ __forceinline__ void load_scales(const ChunkParams& p, Shared& s, long long square) {
    const float* from[TENSORS] = {p.d_o_scales, p.write_scales, p.adjoint_scales, p.state_scales, p.d_state_scales};
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
#pragma unroll
    for (int tensor = 0; tensor < TENSORS; ++tensor) {
        if (tensor % WARPS != warp) continue;
        const float scale = lane < 2 * V_TILES ? from[tensor][square * 2 * V_TILES + lane] : 0.0f;
        if (lane < 2 * V_TILES) s.scales[tensor][lane] = scale;
        const float most = warp_max(scale);
        if (lane == 0) s.most[tensor] = most;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < PRODUCTS * 4 * V_TILES; i += THREADS) {
        const int product = i / (4 * V_TILES), tile = i % V_TILES, row_half = i / (2 * V_TILES) % 2, half = i / V_TILES % 2;
        const Tensor left = LEFT_OF[product], right = RIGHT_OF[product];
        const float of_left = left == D_OUTPUT ? 1.0f : s.scales[left][2 * tile + row_half];
        s.factors[product][row_half][half][tile] =
            of_left * inverse_of(s.most[left]) * (s.scales[right][2 * tile + half] * inverse_of(s.most[right]));
    }
}

// A 16 x 16 tile of an input, times `factor`, as a left operand.
__device__ __forceinline__ Left left_of_input(const INPUT* from, float factor, const Place& at) {
    float tiles[2][4];
    if constexpr (sizeof(INPUT) == 2) {
        u32 pairs[4];
        load_matrices(pairs, shared_address(from + (at.lane & 15) * INPUT_PITCH + (at.lane >> 4) * 8));
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            INPUT x;
            *(u16*)&x = (u16)(pairs[e / 2] >> (16 * (e % 2)));
            tiles[e / 4][e % 4] = to_float(x);
        }
    } else {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 pair = load_two(from + (at.row + 8 * half) * INPUT_PITCH + 8 * n + 2 * at.quad);
                tiles[n][2 * half] = pair.x;
                tiles[n][2 * half + 1] = pair.y;
            }
    }
    return make_left(tiles[0], tiles[1], factor);
}

// Starts the copies of one item of the stream of a value head.
__device__ __forceinline__ void load_item(const ChunkParams& p, u8* stage, int chunk, int head, int item) {
    const long long square = (long long)chunk * p.value_heads + head;
    const int phase = item / BLOCKS, v = item % BLOCKS * V_BLOCK;
    const long long value_at = ((long long)p.chunk_token[chunk] * p.value_heads + head) * VD + v;
    const int value_pitch = p.value_heads * VD * (int)sizeof(INPUT);
    const int length = p.chunk_length[chunk];
    auto load_input = [&](u8* to, const INPUT* from) {
        copy_rows<THREADS>(to, INPUT_PITCH * sizeof(INPUT), from + value_at, value_pitch, CHUNK,
                           V_BLOCK * (int)sizeof(INPUT), length);
    };
    auto load_operand = [&](u8* to, const operand* from) {
        copy_rows<THREADS>(to, OPERAND_PITCH * OPERAND_BYTES, from + square * CHUNK * VD + v, VD * OPERAND_BYTES, CHUNK,
                           V_BLOCK * OPERAND_BYTES, CHUNK);
    };
    if (phase == 0) {
        load_input(stage, p.d_o);
        load_input(stage + INPUT_TILE, p.v);
        load_operand(stage + 2 * INPUT_TILE, p.writes);
        load_operand(stage + 2 * INPUT_TILE + OPERAND_TILE, p.adjoints);
    } else {
        if (phase == 1)
            load_input(stage, p.d_o);
        else
            load_operand(stage, phase == 2 ? p.adjoints : p.writes);
        copy_rows<THREADS>(stage + LEFT_TILE, ROW_PITCH * OPERAND_BYTES,
                           (phase == 3 ? p.d_states : p.states) + (square * VD + v) * KD, KD * OPERAND_BYTES, V_BLOCK,
                           KD * OPERAND_BYTES, V_BLOCK);
    }
    copy_async_commit();
}

// dP and -dL of the warp's rows and columns, without masks, from one block of V; v . Y along the way.
__device__ __forceinline__ void squares_of_block(const u8* stage, const Shared& s, const Place& at, int v,
                                                 float (&dp)[J_PART / 8][4], float (&dl)[J_PART / 8][4],
                                                 float (&dots)[2]) {
    const INPUT* d_o = (const INPUT*)stage;
    const INPUT* value = (const INPUT*)(stage + INPUT_TILE);
    const operand* writes = (const operand*)(stage + 2 * INPUT_TILE);
    const operand* adjoints = writes + CHUNK * OPERAND_PITCH;
#pragma unroll 1
    for (int c = 0; c < V_BLOCK / 16; ++c) {
        const int tile = v / 16 + c;
        const Left from_output = left_of_input(d_o + at.first_row * INPUT_PITCH + 16 * c,
                                               s.factors[D_SCORES][at.row_half()][at.j_half()][tile], at);
        Left from_adjoint = load_left(adjoints + at.first_row * OPERAND_PITCH + 16 * c, OPERAND_PITCH);
        scale_left(from_adjoint, s.factors[D_LOWER][at.row_half()][at.j_half()][tile]);
        const operand* right = writes + at.first_j * OPERAND_PITCH + 16 * c;
        product_nt(dp, from_output, right, OPERAND_PITCH);
        product_nt(dl, from_adjoint, right, OPERAND_PITCH);
        if (tile % SQUARE_PARTS == at.first_j / J_PART) { // the parts share the dots
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int r = at.first_row + at.row + 8 * half;
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const int column = 16 * c + 8 * n + 2 * at.quad;
                    const float2 y = load_pair(adjoints + r * OPERAND_PITCH + column);
                    const float2 x = load_two(value + r * INPUT_PITCH + column);
                    sum += x.x * y.x + x.y * y.y;
                }
                dots[half] += sum * s.scales[ADJOINTS][2 * tile + at.row_half()];
            }
        }
    }
}

// Adds `weight` times a product to a gradient; `weight` is for the rows `row` and `row + 8` of the warp.
__device__ __forceinline__ void add_rows(float (&total)[K_PART / 8][4], const float (&product)[K_PART / 8][4],
                                         const float (&weight)[2]) {
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) total[n][e] += product[n][e] * weight[e / 2];
}

// The part of this thread in the dot of each row of a product with that row of `with`.
__device__ __forceinline__ void row_dots(const float (&product)[K_PART / 8][4], const operand* with, const Place& at,
                                         float (&dots)[2]) {
#pragma unroll
    for (int n = 0; n < K_PART / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 x = load_pair(with + (at.first_row + at.row + 8 * half) * ROW_PITCH + at.first_column + 8 * n +
                                       2 * at.quad);
            dots[half] += product[n][2 * half] * x.x + product[n][2 * half + 1] * x.y;
        }
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Rows of a triangular square, or of its transpose, times a tile of rows of K.
template <bool Transposed>
__device__ __forceinline__ void product_with_square(float (&product)[K_PART / 8][4], const operand* square,
                                                    const operand* tile, const Place& at) {
    const int diagonal = at.first_row / 16;
    clear(product);
#pragma unroll 1
    for (int c = Transposed ? diagonal : 0; c < (Transposed ? TILES : diagonal + 1); ++c) {
        const Left left = Transposed ? load_left_transposed(square + 16 * c * SQUARE_PITCH + at.first_row, SQUARE_PITCH)
                                     : load_left(square + at.first_row * SQUARE_PITCH + 16 * c, SQUARE_PITCH);
        product_nn(product, left, tile + 16 * c * ROW_PITCH + at.first_column, ROW_PITCH);
    }
}

// A product of what streams through shared memory with a state.
template <Product Which, class Arrive, class Leave>
__device__ __forceinline__ void product_with_state(float (&product)[K_PART / 8][4], const Shared& s, const Place& at,
                                                   const Arrive& arrive, const Leave& leave) {
    clear(product);
#pragma unroll 1
    for (int block = 0; block < BLOCKS; ++block) {
        const u8* stage = arrive();
        const operand* right = (const operand*)(stage + LEFT_TILE) + at.first_column;
        const float* factors = s.factors[Which][at.row_half()][at.column_half()] + block * (V_BLOCK / 16);
        const INPUT* inputs = (const INPUT*)stage + at.first_row * INPUT_PITCH;
        const operand* operands = (const operand*)stage + at.first_row * OPERAND_PITCH;
#pragma unroll UNROLLED
        for (int c = 0; c < V_BLOCK / 16; ++c) {
            Left left;
            if (Which == OUTPUT_STATE) {
                left = left_of_input(inputs + 16 * c, factors[c], at);
            } else {
                left = load_left(operands + 16 * c, OPERAND_PITCH);
                scale_left(left, factors[c]);
            }
            product_nn(product, left, right + 16 * c * ROW_PITCH, ROW_PITCH);
        }
        leave();
    }
}

// Adds such a product to a gradient, and keeps the dot of each row with that row of `with`.
template <Product Which>
__device__ __forceinline__ void add_with_state(float (&total)[K_PART / 8][4], const float (&product)[K_PART / 8][4],
                                               Shared& s, const Place& at, const operand* with, float unit_of_d_state) {
    float dots[2] = {0.0f, 0.0f}, weight[2];
    row_dots(product, with, at, dots);
    const float unit_of_right = RIGHT_OF[Which] == D_STATES ? unit_of_d_state : 1.0f;
    const float scale = s.most[LEFT_OF[Which]] * s.most[RIGHT_OF[Which]] * unit_of_right;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = at.first_row + at.row + 8 * half;
        const float key = s.coefficients[KEY][i], decay = s.coefficients[DECAY][i], write = s.coefficients[WRITE][i];
        const float dot = quad_sum(dots[half]) * scale;
        float* kept = Which == OUTPUT_STATE ? s.query_dots[at.warp / TILES]
                      : Which == ADJOINT_STATE ? s.key_dots[at.warp / TILES]
                                               : s.write_dots[at.warp / TILES];
        const float unit = Which == OUTPUT_STATE ? s.coefficients[QUERY][i] * decay
                           : Which == ADJOINT_STATE ? key * decay
                                                    : write;
        if (at.quad == 0) kept[i] = dot * unit;
        const float after = key != 0.0f ? write / key : 0.0f; // e^{G_C - G_i}
        weight[half] = Which == OUTPUT_STATE ? decay
                       : Which == ADJOINT_STATE ? -s.coefficients[BETA][i] * decay
                                                : after;
        weight[half] *= scale;
    }
    add_rows(total, product, weight);
}

// Grid: chunks, HK.
extern "C" __global__ void __launch_bounds__(THREADS, 1) chunk_gradient(const __grid_constant__ ChunkParams p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Shared s;
    operand* keys = (operand*)shared;
    operand* queries = keys + CHUNK * ROW_PITCH;
    operand* d_scores = queries + CHUNK * ROW_PITCH; // of the scores, weighted
    operand* d_lower = d_scores + CHUNK * SQUARE_PITCH; // of L, weighted
    u8* ring = (u8*)(d_lower + CHUNK * SQUARE_PITCH);

    Place at;
    at.warp = threadIdx.x / 32;
    at.lane = threadIdx.x & 31;
    at.row = at.lane / 4;
    at.quad = at.lane % 4;
    at.first_row = 16 * (at.warp % TILES);
    at.first_column = K_PART * (at.warp / TILES);
    at.squares = at.warp / TILES < SQUARE_PARTS;
    at.first_j = at.squares ? J_PART * (at.warp / TILES) : 0;
    const int tile_row = at.warp % TILES;
    const int rows[2] = {at.first_row + at.row, at.first_row + at.row + 8};

    wait_for_kernel_before();
    const int chunk = blockIdx.x, qk_head = blockIdx.y, group = p.value_heads / p.qk_heads;
    const long long tile = (long long)chunk * p.qk_heads + qk_head;
    copy_block<THREADS>(keys, p.keys + tile * ROW_TILE, ROW_TILE * OPERAND_BYTES);
    copy_block<THREADS>(queries, p.queries + tile * ROW_TILE, ROW_TILE * OPERAND_BYTES);

    float dq[K_PART / 8][4], dk[K_PART / 8][4];
    clear(dq);
    clear(dk);

    // The stream of items, over all value heads of the group.
    const int items = group * ITEMS;
    int current = 0;
    auto start = [&](int item) {
        if (item < items)
            load_item(p, ring + item % STAGES * STAGE_BYTES, chunk, qk_head * group + item / ITEMS, item % ITEMS);
        else
            copy_async_commit();
    };
    // Waits for the current item; with several stages, starts the one that takes the place of the item before it.
    auto arrive = [&]() -> const u8* {
        copy_async_wait < STAGES == 1 ? 0 : STAGES - 2 > ();
        __syncthreads();
        if (STAGES > 1) start(current + STAGES - 1);
        return ring + current % STAGES * STAGE_BYTES;
    };
    auto leave = [&]() {
        ++current;
        if (STAGES == 1) {
            __syncthreads();
            start(current);
        }
    };
    for (int i = 0; i < (STAGES == 1 ? 1 : STAGES - 1); ++i) start(i);

    for (int h = 0; h < group; ++h) {
        const int head = qk_head * group + h;
        const long long square = (long long)chunk * p.value_heads + head;
        __syncthreads();
        for (int i = threadIdx.x; i < MOST * CHUNK; i += THREADS)
            s.coefficients[i / CHUNK][i % CHUNK] =
                p.coefficients[square * COEFFICIENTS * CHUNK + i] * (i / CHUNK == QUERY ? p.scale_unit : 1.0f);
        load_scales(p, s, square);
        __syncthreads();

        float dp[J_PART / 8][4], dl[J_PART / 8][4], value_dots[2] = {0.0f, 0.0f};
        clear(dp);
        clear(dl);
#pragma unroll 1
        for (int block = 0; block < BLOCKS; ++block) {
            const u8* stage = arrive();
            if (at.squares)
                squares_of_block(stage, s, at, block * V_BLOCK, dp, dl, value_dots);
            leave();
        }

        // dP E, dL E, and M, which needs them without E.
        float row_sums[2] = {0.0f, 0.0f}, overlap_dots[2] = {0.0f, 0.0f}, column_sums[J_PART / 8][2];
#pragma unroll
        for (int n = 0; n < J_PART / 8; ++n) {
            column_sums[n][0] = column_sums[n][1] = 0.0f;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = rows[half], first_j = at.first_j + 8 * n + 2 * at.quad;
                const float2 score = load_pair(p.scores + (square * CHUNK + i) * SQUARE_PITCH + first_j);
                const float2 overlap = load_pair(p.overlaps + (square * CHUNK + i) * SQUARE_PITCH + first_j);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int j = first_j + e;
                    const float between = (s.coefficients[LOG_DECAY][i] - s.coefficients[LOG_DECAY][j]) +
                                          (s.coefficients[LOG_DECAY_2][i] - s.coefficients[LOG_DECAY_2][j]);
                    const float decay = i >= j ? exponential(between) : 0.0f;
                    float& d_score = dp[n][2 * half + e];
                    float& d_lower = dl[n][2 * half + e];
                    d_score *= s.most[D_OUTPUT] * s.most[WRITES];
                    d_lower *= -(s.most[ADJOINTS] * s.most[WRITES]);
                    if (i > j) {
                        const float with_overlap = d_lower * (e == 0 ? overlap.x : overlap.y);
                        const float with_score = d_score * (e == 0 ? score.x : score.y) * s.coefficients[QUERY][i];
                        const float both = with_score + with_overlap * s.coefficients[BETA][rows[half]];
                        overlap_dots[half] += with_overlap;
                        row_sums[half] += both;
                        column_sums[n][e] += both;
                    }
                    d_score *= decay;
                    d_lower *= i > j ? decay : 0.0f;
                }
            }
        }
        if (at.squares) {
            // Rows end in a quad, columns in the lanes of equal place in their quads.
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float row = quad_sum(row_sums[half]), overlap = quad_sum(overlap_dots[half]);
                const float value = quad_sum(value_dots[half]);
                if (at.quad == 0) {
                    s.row_sums[at.first_j / J_PART][rows[half]] = row;
                    s.overlap_dots[at.first_j / J_PART][rows[half]] = overlap;
                    s.value_dots[at.first_j / J_PART][rows[half]] = value;
                }
            }
#pragma unroll
            for (int n = 0; n < J_PART / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float column = column_sums[n][e];
                    column += __shfl_xor_sync(0xffffffffu, column, 4);
                    column += __shfl_xor_sync(0xffffffffu, column, 8);
                    column += __shfl_xor_sync(0xffffffffu, column, 16);
                    if (at.row == 0) s.column_sums[tile_row][at.first_j + 8 * n + 2 * at.quad + e] = column;
                }
        }
        // The largest of each with the weights that it gets below.
        if (MODE == MODE_F16) {
            float largest[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int n = 0; n < J_PART / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float of_score = fabsf(dp[n][e]), of_lower = fabsf(dl[n][e]);
                    const float key = s.coefficients[KEY][at.first_j + 8 * n + 2 * at.quad + e % 2];
                    largest[0] = fmaxf(largest[0], of_score * key);
                    largest[1] = fmaxf(largest[1], of_lower * key);
                    largest[2] = fmaxf(largest[2], of_score * fabsf(s.coefficients[QUERY][rows[e / 2]]));
                    largest[3] = fmaxf(largest[3], of_lower * fabsf(s.coefficients[BETA][rows[e / 2]]) * s.coefficients[KEY][rows[e / 2]]);
                }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float of_warp = warp_max(at.squares ? largest[i] : 0.0f);
                if (at.lane == 0) s.largest[i][at.warp] = of_warp;
            }
        }
        __syncthreads();
        if (threadIdx.x < 4) {
            float of_block = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) of_block = fmaxf(of_block, MODE == MODE_F16 ? s.largest[threadIdx.x][w] : 0.0f);
            s.scale[threadIdx.x] = scale_for(of_block);
        }
        __syncthreads();

        float product[K_PART / 8][4];
#pragma unroll
        for (int transposed = 0; transposed < 2; ++transposed) {
            // First rk_j on the columns, for the products with K'; then the weights of Q'_i and K'_i on the rows.
            if (at.squares)
#pragma unroll
                for (int n = 0; n < J_PART / 8; ++n)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int i = rows[half], j = at.first_j + 8 * n + 2 * at.quad;
                        float of_score[2], of_lower[2];
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const float key = s.coefficients[KEY][j + e];
                            of_score[e] = transposed ? s.coefficients[QUERY][i] : key;
                            of_lower[e] = transposed ? s.coefficients[BETA][rows[half]] * s.coefficients[KEY][i] : key;
                            of_score[e] *= dp[n][2 * half + e] * s.scale[2 * transposed].factor;
                            of_lower[e] *= dl[n][2 * half + e] * s.scale[2 * transposed + 1].factor;
                        }
                        store_pair(d_scores + i * SQUARE_PITCH + j, of_score[0], of_score[1]);
                        store_pair(d_lower + i * SQUARE_PITCH + j, of_lower[0], of_lower[1]);
                    }
            __syncthreads();
            if (!transposed) {
                product_with_square<false>(product, d_scores, keys, at);
                const float of_scores[2] = {s.scale[0].inverse, s.scale[0].inverse};
                add_rows(dq, product, of_scores);
                product_with_square<false>(product, d_lower, keys, at);
                const float weight[2] = {s.coefficients[BETA][rows[0]] * s.scale[1].inverse,
                                         s.coefficients[BETA][rows[1]] * s.scale[1].inverse};
                add_rows(dk, product, weight);
            } else {
                product_with_square<true>(product, d_scores, queries, at);
                const float of_scores[2] = {s.scale[2].inverse, s.scale[2].inverse};
                add_rows(dk, product, of_scores);
                product_with_square<true>(product, d_lower, keys, at);
                const float of_lower[2] = {s.scale[3].inverse, s.scale[3].inverse};
                add_rows(dk, product, of_lower);
            }
            __syncthreads();
        }

        // do S^T, Y S^T and U dS^T
        product_with_state<OUTPUT_STATE>(product, s, at, arrive, leave);
        add_with_state<OUTPUT_STATE>(dq, product, s, at, queries, p.scale_unit);
        product_with_state<ADJOINT_STATE>(product, s, at, arrive, leave);
        add_with_state<ADJOINT_STATE>(dk, product, s, at, keys, p.scale_unit);
        product_with_state<WRITE_D_STATE>(product, s, at, arrive, leave);
        add_with_state<WRITE_D_STATE>(dk, product, s, at, keys, p.scale_unit);

        // <dS, S>
        float with_state = 0.0f;
        constexpr int VECTOR = 16 / OPERAND_BYTES;
#pragma unroll 2
        for (int i = VECTOR * threadIdx.x; i < VD * KD; i += VECTOR * THREADS) {
            const uint4 a = *(const uint4*)(p.states + square * VD * KD + i);
            const uint4 b = *(const uint4*)(p.d_states + square * VD * KD + i);
            float sum = 0.0f;
#pragma unroll
            for (int e = 0; e < VECTOR; e += 2) {
                const float2 x = load_pair((const operand*)&a + e), y = load_pair((const operand*)&b + e);
                sum += x.x * y.x + x.y * y.y;
            }
            const int part = 2 * (i / KD / 16) + i % KD / (KD / 2);
            with_state += sum * s.scales[STATES][part] * s.scales[D_STATES][part];
        }
        with_state = warp_sum(with_state);
        if (at.lane == 0) s.state_dots[at.warp] = with_state;
        __syncthreads();
        if (at.warp == 0) {
            const int token = p.chunk_token[chunk], length = p.chunk_length[chunk];
            // dg_t: what lies behind t of the first sums, what lies before it of the b_i.
            double behind = 0.0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) behind += s.state_dots[w];
            behind *= s.coefficients[DECAY][CHUNK - 1] * p.scale_unit;
            double before[CHUNK / 32], all = 0.0;
#pragma unroll
            for (int part = 0; part < CHUNK / 32; ++part) {
                double own = 0.0;
#pragma unroll
                for (int w = 0; w < COLUMN_WARPS; ++w) own += s.write_dots[w][32 * part + at.lane];
                double sum = own;
#pragma unroll
                for (int offset = 1; offset < 32; offset <<= 1) {
                    const double other = __shfl_up_sync(0xffffffffu, sum, offset);
                    if (at.lane >= offset) sum += other;
                }
                // Without the own one: the sum up to the lane before.
                const double upto = __shfl_up_sync(0xffffffffu, sum, 1);
                before[part] = all + (at.lane > 0 ? upto : 0.0);
                all += __shfl_sync(0xffffffffu, sum, 31);
            }
#pragma unroll
            for (int part = CHUNK / 32 - 1; part >= 0; --part) {
                const int i = 32 * part + at.lane;
                const float b = s.coefficients[BETA][i];
                double row = 0.0, column = 0.0, query = 0.0, key = 0.0;
                float overlap = 0.0f, value = 0.0f;
#pragma unroll
                for (int w = 0; w < COLUMN_WARPS; ++w) {
                    query += s.query_dots[w][i];
                    key += s.key_dots[w][i];
                }
#pragma unroll
                for (int w = 0; w < SQUARE_PARTS; ++w) {
                    row += s.row_sums[w][i];
                    overlap += s.overlap_dots[w][i];
                    value += s.value_dots[w][i];
                }
#pragma unroll
                for (int w = 0; w < TILES; ++w) column += s.column_sums[w][i];
                double sum = (row - column) + (query - (double)b * key);
#pragma unroll
                for (int offset = 1; offset < 32; offset <<= 1) {
                    const double other = __shfl_down_sync(0xffffffffu, sum, offset);
                    if (at.lane + offset < 32) sum += other;
                }
                sum += behind;
                behind = __shfl_sync(0xffffffffu, sum, 0);
                if (i < length) {
                    const long long to = (long long)(token + i) * p.value_heads + head;
                    p.dg[to] = (float)(sum + before[part]);
                    p.dbeta[to] = value - (float)key + overlap;
                }
            }
        }
    }

    const int token = p.chunk_token[chunk], length = p.chunk_length[chunk];
    // From the gradient of s q to that of q; through the normalisation, x / |x|: (d - x^ (x^ . d)) / |x|.
    float query_weight[2], key_weight[2], query_back[2] = {0.0f, 0.0f}, key_back[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        query_weight[half] = p.scale;
        key_weight[half] = 1.0f;
    }
    if (p.norm_epsilon >= 0.0f) {
        float dots[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
        for (int n = 0; n < K_PART / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int offset = rows[half] * ROW_PITCH + at.first_column + 8 * n + 2 * at.quad;
                const float2 q = load_pair(queries + offset), k = load_pair(keys + offset);
                dots[0][half] += q.x * dq[n][2 * half] + q.y * dq[n][2 * half + 1];
                dots[1][half] += k.x * dk[n][2 * half] + k.y * dk[n][2 * half + 1];
            }
        __syncthreads();
        float(*sums)[COLUMN_WARPS][CHUNK] = (float(*)[COLUMN_WARPS][CHUNK])d_scores;
#pragma unroll
        for (int which = 0; which < 2; ++which)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sum = dots[which][half];
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                if (at.quad == 0) sums[which][at.warp / TILES][rows[half]] = sum;
            }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float dot[2] = {0.0f, 0.0f};
#pragma unroll
            for (int part = 0; part < COLUMN_WARPS; ++part) {
                dot[0] += sums[0][part][rows[half]];
                dot[1] += sums[1][part][rows[half]];
            }
            const float query_norm = p.norms[tile * 2 * CHUNK + rows[half]];
            const float key_norm = p.norms[(tile * 2 + 1) * CHUNK + rows[half]];
            const float query_unit = p.scale != 0.0f ? s.coefficients[QUERY][rows[half]] / p.scale : 0.0f;
            const float key_unit = s.coefficients[KEY][rows[half]];
            query_weight[half] = p.scale * query_norm;
            key_weight[half] = key_norm;
            query_back[half] = query_weight[half] * query_unit * query_unit * dot[0];
            key_back[half] = key_norm * key_unit * key_unit * dot[1];
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (rows[half] >= length) continue;
        const long long to = ((long long)(token + rows[half]) * p.qk_heads + qk_head) * KD + at.first_column;
#pragma unroll
        for (int n = 0; n < K_PART / 8; ++n) {
            const int column = 8 * n + 2 * at.quad, offset = rows[half] * ROW_PITCH + at.first_column + column;
            const float2 q = load_pair(queries + offset), k = load_pair(keys + offset);
            store_two(p.dq + to + column, dq[n][2 * half] * query_weight[half] - q.x * query_back[half],
                      dq[n][2 * half + 1] * query_weight[half] - q.y * query_back[half]);
            store_two(p.dk + to + column, dk[n][2 * half] * key_weight[half] - k.x * key_back[half],
                      dk[n][2 * half + 1] * key_weight[half] - k.y * key_back[half]);
        }
    }
}
