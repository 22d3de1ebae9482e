// First step of the chunk form of GDN: all that needs only the keys, the queries and the gates of one chunk.
//
//   q, k (T, HK, K), g, beta (T, HV)  ->  K', Q', T = (I + L)^-1, scores, coefficients (chunk.cuh)
//
// with L_ij = beta_i (k_i . k_j) e^{G_i - G_j} for i > j. One block a chunk, a q/k head and some of its value heads; two
// warps for 16 rows, which take turns with the blocks of 16 columns. K K^T, Q K^T and the off-diagonal blocks of T are products of the mode's operands.
//
// G is summed in binary64 and kept in two binary32 words: e^{G_i - G_j} then loses nothing however large G is.
#include "chunk_decay.cuh"
#include "chunk_inverse.cuh"

constexpr int WARPS = 2 * TILES;
constexpr int THREADS = 32 * WARPS;
constexpr int MOST_HEADS = 4; // of heads_per_block

// Rows of which all pieces are asked for before the first is looked at: a load takes longer than all work on a row.
constexpr int OWN_ROWS = CHUNK / WARPS;
constexpr int ROUNDS = PIECES * (int)sizeof(Piece) <= 64 ? OWN_ROWS / ROWS_AT_ONCE : 1;

// A warp's rows of q or k of a chunk.
struct Rows {
    const INPUT* from; // row 0 of the chunk
    long long pitch;   // elements from a row to the next
    int first, length; // the warp's first row; the chunk's tokens
    operand* shared;   // row 0, like those that follow
    operand* global;   // null where another block writes it
    float* coefficients; // rk or rq / s: what turns a row back
    float* norms;        // 1 / |row|; null where another block writes it
    float epsilon;
};
__device__ __forceinline__ void prepare_rows(const Rows& rows) {
    const int lane = threadIdx.x & 31, column = 4 * (lane % ROW_LANES);
#pragma unroll
    for (int first = 0; first < OWN_ROWS; first += ROWS_AT_ONCE * ROUNDS) {
        Piece pieces[ROUNDS][PIECES];
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const int i = rows.first + first + ROWS_AT_ONCE * round + lane / ROW_LANES;
            const INPUT* from = rows.from + i * rows.pitch + column;
#pragma unroll
            for (int c = 0; c < PIECES; ++c) {
                pieces[round][c] = Piece{};
                if (i < rows.length) pieces[round][c] = *(const Piece*)(from + 4 * ROW_LANES * c);
            }
        }
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            const int i = rows.first + first + ROWS_AT_ONCE * round + lane / ROW_LANES;
            float x[PIECES][4];
            float largest = 0.0f, squares = 0.0f;
#pragma unroll
            for (int c = 0; c < PIECES; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    x[c][e] = to_float(pieces[round][c].x[e]);
                    largest = fmaxf(largest, fabsf(x[c][e]));
                }
            const float factor = row_factor(MODE == MODE_F16 ? row_max(largest) : 1.0f);
#pragma unroll
            for (int c = 0; c < PIECES; ++c) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    x[c][e] *= factor;
                    squares += x[c][e] * x[c][e];
                }
                const int at = i * ROW_PITCH + column + 4 * ROW_LANES * c;
                store_four(rows.shared + at, x[c]);
                if (rows.global) store_four(rows.global + at, x[c]);
            }
            float norm = 1.0f, coefficient = 1.0f / factor;
            if (rows.epsilon >= 0.0f) {
                // 1 / sqrt(|x|^2 + epsilon), in the units of the scaled row.
                const float scaled = rsqrtf(row_sum(squares) + rows.epsilon * factor * factor);
                coefficient = i < rows.length ? scaled : 0.0f;
                norm = coefficient * factor;
            }
            if (lane % ROW_LANES == 0) {
                rows.coefficients[i] = coefficient;
                if (rows.norms) rows.norms[i] = norm;
            }
        }
    }
}

struct Shared {
    float key[CHUNK];   // rk
    float query[CHUNK]; // rq / s
    Gates gates[MOST_HEADS];
    float diagonal[TILES][16 * BLOCK_PITCH]; // of L
};

// Grid: chunks, then HK times the groups of heads_per_block value heads.
extern "C" __global__ void __launch_bounds__(THREADS, 3) chunk_prepare(const __grid_constant__ ChunkParams p) {
    let_next_kernel_start();
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Shared s;
    operand* keys = (operand*)shared;
    operand* queries = keys + ROW_TILE;
    // The squares take the place of K' and Q' once the products with those are in registers.
    operand* lower = (operand*)shared;
    operand* inverse = lower + SQUARE_TILE;
    operand* scores = inverse + SQUARE_TILE;
    operand* overlaps = scores + SQUARE_TILE;

    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, row = lane / 4, quad = lane % 4;
    const int tile_row = warp % TILES, turn = warp / TILES; // which rows, and the first of its blocks of columns
    const int chunk = blockIdx.x, token = p.chunk_token[chunk], length = p.chunk_length[chunk];
    const int group = p.value_heads / p.qk_heads, parts = group / p.heads_per_block;
    const int qk_head = blockIdx.y / parts, part = blockIdx.y % parts;
    const int first_head = qk_head * group + part * p.heads_per_block;
    const long long tile = (long long)chunk * p.qk_heads + qk_head;

    const long long first_row = ((long long)token * p.qk_heads + qk_head) * KD, pitch = (long long)p.qk_heads * KD;
    float* norms = part == 0 ? p.norms + tile * 2 * CHUNK : nullptr;
    prepare_rows({p.q + first_row, pitch, OWN_ROWS * warp, length, queries, part == 0 ? p.queries + tile * ROW_TILE : nullptr,
                  s.query, norms, p.norm_epsilon});
    prepare_rows({p.k + first_row, pitch, OWN_ROWS * warp, length, keys, part == 0 ? p.keys + tile * ROW_TILE : nullptr, s.key,
                  norms ? norms + CHUNK : nullptr, p.norm_epsilon});
    for (int h = warp; h < p.heads_per_block; h += WARPS)
        prepare_gates(p, s.gates[h], load_gates(p, token, length, first_head + h), length, first_head + h);
    __syncthreads();

    constexpr int BLOCKS = TILES / 2; // of a warp: turn, turn + 2, ..
    float kk[BLOCKS][2][4], qk[BLOCKS][2][4];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        clear(kk[b]);
        clear(qk[b]);
    }
#pragma unroll 1
    for (int c = 0; c < KD; c += 16) {
        const Left key = load_left(keys + 16 * tile_row * ROW_PITCH + c, ROW_PITCH);
        const Left query = load_left(queries + 16 * tile_row * ROW_PITCH + c, ROW_PITCH);
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const int column = turn + 2 * b;
            if (column > tile_row) break; // nobody reads the blocks above the diagonal
            product_nt(kk[b], key, keys + 16 * column * ROW_PITCH + c, ROW_PITCH);
            product_nt(qk[b], query, keys + 16 * column * ROW_PITCH + c, ROW_PITCH);
        }
    }

#pragma unroll 1
    for (int h = 0; h < p.heads_per_block; ++h) {
        const Gates& gates = s.gates[h];
        const int square = chunk * p.value_heads + first_head + h;
        __syncthreads();
        if (h == 0) {
            clear_above_diagonal<THREADS>(inverse);
            clear_above_diagonal<THREADS>(scores);
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const int column = turn + 2 * b;
            if (column > tile_row) break;
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int i = 16 * tile_row + row + 8 * half, j = 16 * column + 8 * n + 2 * quad;
                    float overlap[2], score[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float decayed = i >= j + e ? decay_between(gates, i, j + e) * s.key[j + e] : 0.0f;
                        overlap[e] = i > j + e ? kk[b][n][2 * half + e] * (decayed * s.key[i]) : 0.0f;
                        score[e] = qk[b][n][2 * half + e] * decayed;
                    }
                    const int at = i * SQUARE_PITCH + j;
                    store_pair(scores + at, score[0], score[1]);
                    store_pair(overlaps + at, overlap[0], overlap[1]);
                    overlap[0] *= gates.beta[i];
                    overlap[1] *= gates.beta[i];
                    store_pair(lower + at, overlap[0], overlap[1]);
                    if (column == tile_row)
                        *(float2*)(s.diagonal[tile_row] + (i % 16) * BLOCK_PITCH + j % 16) = make_float2(overlap[0], overlap[1]);
                }
        }
        __syncwarp();
        if (turn == tile_row % 2) { // it has the block on the diagonal
            float x[16];
            invert_diagonal(s.diagonal[tile_row], x);
            if (lane < 16) {
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    inverse[(16 * tile_row + i) * SQUARE_PITCH + 16 * tile_row + lane] = to_operand(x[i]);
            }
        }
        if (warp == TILES) { // it has no block
            float* to = p.coefficients + (long long)square * (COEFFICIENTS * CHUNK);
            float most[WRITE + 1] = {};
#pragma unroll 1
            for (int i = lane; i < CHUNK; i += 32) {
                float values[MOST];
                coefficients_of(p, gates, s.key[i], s.query[i], i, values);
#pragma unroll
                for (int row = 0; row < MOST; ++row) to[row * CHUNK + i] = values[row];
#pragma unroll
                for (int row = 0; row <= WRITE; ++row) most[row] = fmaxf(most[row], fabsf(values[row]));
            }
#pragma unroll
            for (int row = 0; row <= WRITE; ++row) {
                const float largest = warp_max(most[row]);
                if (lane == 0) to[MOST * CHUNK + row] = largest;
            }
        }
        __syncthreads();
        if (warp < TILES) {
            invert_column(lower, inverse, warp);
        } else {
            write_square<THREADS / 2>(p.scores + (long long)square * SQUARE_TILE, scores, THREADS / 2);
            if (p.overlaps) write_square<THREADS / 2>(p.overlaps + (long long)square * SQUARE_TILE, overlaps, THREADS / 2);
        }
        __syncthreads();
        write_square<THREADS>(p.inverse + (long long)square * SQUARE_TILE, inverse, 0);
    }
}
