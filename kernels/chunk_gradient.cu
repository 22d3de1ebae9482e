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
#include "chunk_stream.cuh"

// Sums and weights that the warps share.
struct Shared : StreamScales {
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
};

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

    const Place at = place_of_warp();
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

    Stream stream = {p, ring, chunk, qk_head * group, group * ITEMS, 0};
    stream.begin();

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
            const u8* stage = stream.arrive();
            if (at.squares)
                squares_of_block(stage, s, at, block * V_BLOCK, dp, dl, value_dots);
            stream.leave();
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
        product_with_state<OUTPUT_STATE>(product, s, at, stream);
        add_with_state<OUTPUT_STATE>(dq, product, s, at, queries, p.scale_unit);
        product_with_state<ADJOINT_STATE>(product, s, at, stream);
        add_with_state<ADJOINT_STATE>(dk, product, s, at, keys, p.scale_unit);
        product_with_state<WRITE_D_STATE>(product, s, at, stream);
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
