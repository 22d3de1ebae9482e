// What one warp of the recurrence has: its place among columns, heads and sequences, its part of a state, its lanes'
// numbers of one token. The macros are explained in recurrent.cu.
#pragma once
#include "common.cuh"

typedef long long i64;

constexpr int LANES = 32;
// Numbers of a warp's part of a state, each lane's ROWS * COLUMNS numbers interleaved with those of the others.
constexpr int PART = ROWS * COLUMNS * LANES;
// Gate values in a lane: one, or one for each of its rows (g, erase) or columns (write).
constexpr int GATE_ROWS = CHANNEL_GATES ? ROWS : 1;
constexpr int GATE_COLUMNS = CHANNEL_GATES ? COLUMNS : 1;

// What both passes read, and which part of it one launch works on: `heads` value heads from `first_head` of each of
// the sequences from `first_sequence` on. Blocks are numbered (sequence, head, block of columns), the last fastest.
struct Problem {
    const STATE* q;              // (tokens, HK, K), tokens = B T
    const STATE* k;              // (tokens, HK, K)
    const STATE* v;              // (tokens, HV, V)
    const STATE* g;              // (tokens, HV), GDN-2: (tokens, HV, K)
    const STATE* erase;          // beta (tokens, HV), GDN-2: b (tokens, HV, K)
    const STATE* write;          // beta (tokens, HV), GDN-2: w (tokens, HV, V)
    const i64* cu_seqlens;       // (N + 1): where each sequence begins among the tokens
    double scale;
    int qk_heads, value_heads, key_dim, value_dim;
    int first_sequence, first_head, heads, column_blocks;
};

// Which columns of which head of which sequence a warp works on.
struct Place {
    int lane, warp, warps;
    int block;                   // of columns
    int sequence, batch_sequence;
    int head, batch_head, qk_head;
    int column, group, groups;   // first column; its index among, and number of, groups of COLUMNS columns
    i64 token, batch_token;      // first token of the sequence, among all and among this launch's
    i64 tokens;

    __device__ __forceinline__ explicit Place(const Problem& p) {
        lane = threadIdx.x % LANES;
        warp = threadIdx.x / LANES;
        warps = blockDim.x / LANES;
        block = blockIdx.x % p.column_blocks;
        batch_head = blockIdx.x / p.column_blocks % p.heads;
        batch_sequence = blockIdx.x / p.column_blocks / p.heads;
        sequence = p.first_sequence + batch_sequence;
        head = p.first_head + batch_head;
        qk_head = head / (p.value_heads / p.qk_heads);
        group = block * warps + warp;
        groups = (p.value_dim + COLUMNS - 1) / COLUMNS;
        column = group * COLUMNS;
        token = p.cu_seqlens[sequence];
        batch_token = token - p.cu_seqlens[p.first_sequence];
        tokens = p.cu_seqlens[sequence + 1] - token;
    }

    __device__ __forceinline__ bool active() const { return group < groups; }

    // Of this warp's part in scratch that every sequence, head and column group has.
    __device__ __forceinline__ i64 scratch(int heads) const {
        return ((i64)batch_sequence * heads + batch_head) * groups + group;
    }

    // Of the state kept before token t: the sequences before this one take no more slots than are left free for them.
    __device__ __forceinline__ i64 kept(int heads, i64 t) const {
        i64 slot = batch_token / SEGMENT + batch_sequence + t / SEGMENT;
        return ((slot * heads + batch_head) * groups + group) * PART;
    }
};

// A warp's part of a state: rows lane + 32 r, columns column + c. Zero beyond K and V.
struct State {
    STATE at[ROWS][COLUMNS];

    // From (K, V) of one head, zeros where there is none.
    __device__ __forceinline__ void load(const STATE* states, const Problem& p, const Place& place) {
        i64 first = ((i64)place.sequence * p.value_heads + place.head) * p.key_dim;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                int row = place.lane + LANES * r, column = place.column + c;
                bool inside = states != nullptr && row < p.key_dim && column < p.value_dim;
                at[r][c] = inside ? states[(first + row) * p.value_dim + column] : STATE(0);
            }
    }

    __device__ __forceinline__ void store(STATE* states, const Problem& p, const Place& place) const {
        i64 first = ((i64)place.sequence * p.value_heads + place.head) * p.key_dim;
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                int row = place.lane + LANES * r, column = place.column + c;
                if (row < p.key_dim && column < p.value_dim) states[(first + row) * p.value_dim + column] = at[r][c];
            }
    }

    __device__ __forceinline__ void load_part(const STATE* part, int lane) {
#pragma unroll
        for (int i = 0; i < ROWS * COLUMNS; i++) at[i / COLUMNS][i % COLUMNS] = part[i * LANES + lane];
    }

    __device__ __forceinline__ void store_part(STATE* part, int lane) const {
#pragma unroll
        for (int i = 0; i < ROWS * COLUMNS; i++) part[i * LANES + lane] = at[i / COLUMNS][i % COLUMNS];
    }

    // x_c = sum over this lane's rows of S_rc y_r.
    __device__ __forceinline__ void transposed_times(const STATE (&y)[ROWS], STATE (&x)[COLUMNS]) const {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            x[c] = 0;
#pragma unroll
            for (int r = 0; r < ROWS; r++) x[c] += at[r][c] * y[r];
        }
    }

    // x_r = sum over this warp's columns of S_rc y_c.
    __device__ __forceinline__ void times(const STATE (&y)[COLUMNS], STATE (&x)[ROWS]) const {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            x[r] = 0;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) x[r] += at[r][c] * y[c];
        }
    }

    // S += y x^T
    __device__ __forceinline__ void add(const STATE (&y)[ROWS], const STATE (&x)[COLUMNS]) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) at[r][c] += y[r] * x[c];
    }

    __device__ __forceinline__ void decay(const STATE (&by)[GATE_ROWS]) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) at[r][c] *= by[CHANNEL_GATES ? r : 0];
    }
};

// The sums over a warp of one value per column: the lane gets that of column lane / (32 / COLUMNS). Each step
// halves the columns that a lane still has a part of, so that it takes fewer exchanges than one sum after the other.
__device__ __forceinline__ STATE sum_to_lanes(const STATE (&x)[COLUMNS], int lane) {
    STATE kept[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) kept[c] = x[c];
    int offset = LANES / 2;
#pragma unroll
    for (int half = COLUMNS / 2; half > 0; half /= 2) {
        bool upper = lane & offset;
#pragma unroll
        for (int c = 0; c < half; c++) {
            STATE mine = upper ? kept[c + half] : kept[c];
            STATE other = upper ? kept[c] : kept[c + half];
            kept[c] = mine + __shfl_xor_sync(0xffffffffu, other, offset);
        }
        offset /= 2;
    }
#pragma unroll
    for (int rest = LANES / COLUMNS / 2; rest > 0; rest /= 2) kept[0] += __shfl_xor_sync(0xffffffffu, kept[0], rest);
    return kept[0];
}

// The same sums, all of them in every lane.
__device__ __forceinline__ void sum_to_all(STATE (&x)[COLUMNS], int lane) {
    STATE sum = sum_to_lanes(x, lane);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) x[c] = __shfl_sync(0xffffffffu, sum, c * (LANES / COLUMNS));
}

// Asks for a row to be in the second-level cache soon.
__device__ __forceinline__ void fetch(const STATE* row, int numbers, int lane) {
    int at = lane * (128 / (int)sizeof(STATE));
    if (at < numbers) asm volatile("prefetch.global.L2 [%0];" ::"l"(row + at));
}

// Asks for a warp's part of a state to be in the first-level cache soon.
__device__ __forceinline__ void fetch_part(const STATE* part, int lane) {
    constexpr int LINE = 128 / (int)sizeof(STATE);
#pragma unroll
    for (int at = 0; at < PART; at += LANES * LINE)
        if (at + lane * LINE < PART) asm volatile("prefetch.global.L1 [%0];" ::"l"(part + at + lane * LINE));
}

// One token's inputs as a lane holds them: its rows of q, k, g and b, its warp's columns of v, w and do.
struct Token {
    STATE q[ROWS], k[ROWS], decay[GATE_ROWS], erase[GATE_ROWS], write[GATE_COLUMNS], v[COLUMNS], d_o[COLUMNS];

    // Loads; `decay` holds g until `prepare`, so that nothing waits for it.
    __device__ __forceinline__ void load(const Problem& p, const Place& place, const STATE* gradient, i64 t) {
        i64 token = place.token + t, value_row = token * p.value_heads + place.head;
        const STATE* q_row = p.q + (token * p.qk_heads + place.qk_head) * p.key_dim;
        const STATE* k_row = p.k + (token * p.qk_heads + place.qk_head) * p.key_dim;
        rows(q, q_row, p.key_dim, place.lane);
        rows(k, k_row, p.key_dim, place.lane);
        columns(v, p.v + value_row * p.value_dim, p.value_dim, place.column);
        if (gradient) columns(d_o, gradient + value_row * p.value_dim, p.value_dim, place.column);
        if constexpr (CHANNEL_GATES) {
            rows(decay, p.g + value_row * p.key_dim, p.key_dim, place.lane);
            rows(erase, p.erase + value_row * p.key_dim, p.key_dim, place.lane);
            columns(write, p.write + value_row * p.value_dim, p.value_dim, place.column);
        } else {
            decay[0] = p.g[value_row];
            erase[0] = write[0] = p.erase[value_row];
        }
    }

    __device__ __forceinline__ void prepare() {
#pragma unroll
        for (int r = 0; r < GATE_ROWS; r++) decay[r] = exp(decay[r]);
    }

    // e
    __device__ __forceinline__ void erased(STATE (&e)[ROWS]) const {
#pragma unroll
        for (int r = 0; r < ROWS; r++) e[r] = CHANNEL_GATES ? erase[CHANNEL_GATES ? r : 0] * k[r] : k[r];
    }

    // S_{t-1} -> S'; r, for which the warp adds up S'^T e
    __device__ __forceinline__ void erase_from(State& state, STATE (&residual)[COLUMNS], int lane) const {
        STATE e[ROWS];
        erased(e);
        state.decay(decay);
        state.transposed_times(e, residual);
        sum_to_all(residual, lane);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            residual[c] = (CHANNEL_GATES ? write[CHANNEL_GATES ? c : 0] * v[c] : v[c]) - residual[c];
    }

    // u of r, and x of du: beta times it, or itself
    __device__ __forceinline__ void strengthen(const STATE (&x)[COLUMNS], STATE (&y)[COLUMNS]) const {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) y[c] = CHANNEL_GATES ? x[c] : write[0] * x[c];
    }

    template <int N> static __device__ __forceinline__ void rows(STATE (&x)[N], const STATE* from, int key_dim, int lane) {
#pragma unroll
        for (int r = 0; r < N; r++) x[r] = lane + LANES * r < key_dim ? from[lane + LANES * r] : STATE(0);
    }

    template <int N>
    static __device__ __forceinline__ void columns(STATE (&x)[N], const STATE* from, int value_dim, int first) {
#pragma unroll
        for (int c = 0; c < N; c++) x[c] = first + c < value_dim ? from[first + c] : STATE(0);
    }
};

// Writes one value per column, known to every lane.
__device__ __forceinline__ void store_columns(STATE* row, const STATE (&x)[COLUMNS], const Problem& p, const Place& place) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
        if (place.lane == c && place.column + c < p.value_dim) row[place.column + c] = x[c];
}
