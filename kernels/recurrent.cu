// The gated delta rule, token by token: the ground truth on a GPU. Forward and backward of GDN and GDN-2.
//
// Per value head, with S (K, V) and s the scale; GDN has e = k and one g and one beta per token and head:
//
//   S' = Diag(e^g) S_{t-1}
//   GDN     e = k      r = v - S'^T e      u = beta r          GDN-2   e = b*k    r = w*v - S'^T e    u = r
//   S_t = S' + k u^T                       o_t = s S_t^T q
//
// The adjoint, with D the gradient of S_t after all later tokens:
//
//   D += s q do^T     dq = s S_t do       du = D^T k
//   GDN     x = beta du                   GDN-2   x = du
//   D' = D - e x^T    de = -S' x          dg = sum_v S'*D'     gradient of S_{t-1} = Diag(e^g) D'
//   GDN     dk = D u + de        dbeta = du . r     dv = x
//   GDN-2   dk = D u + b*de      db = k*de          dv = w*x   dw = v*x
//
// Work is split so that the columns of S, which never mix, are independent: a warp owns COLUMNS of them, the lane of a
// warp the rows lane, lane + 32, ...; only S'^T e, S_t^T q and D^T k are sums over a warp. What is summed over columns
// (dq, dk and the gradients of the gates) is summed in a fixed order: in a lane, over the warps of a block, over the
// blocks of a head, over the value heads of a group. So two runs agree to the bit, and a sequence gives the same bits
// whatever it is packed with.
//
// The backward needs S' of every token. The forward keeps a state every SEGMENT tokens; a segment's states are computed
// again from there and lie in global memory (they mostly stay in the second-level cache) until the adjoint has used them.
//
// Compile-time constants:
//   STATE          double or float: the type of every array and of all arithmetic
//   CHANNEL_GATES  0 GDN, 1 GDN-2
//   ROWS           ceil(K / 32): rows of S in a lane
//   COLUMNS        columns of S in a warp: 1, 2 or 4
//   SEGMENT        tokens between two kept states
//   WARPS          most warps in a block; the launch has as many as V needs
#include "common.cuh"

typedef long long i64;

constexpr int LANES = 32;
// Numbers of a warp's part of a state, each lane's ROWS * COLUMNS numbers interleaved with those of the others.
constexpr int PART = ROWS * COLUMNS * LANES;
// Gate values in a lane: one, or one for each of its rows (g, erase) or columns (write).
constexpr int GATE_ROWS = CHANNEL_GATES ? ROWS : 1;
constexpr int GATE_COLUMNS = CHANNEL_GATES ? COLUMNS : 1;
// Vectors of K numbers per token that are summed over warps: dq, dk, and for GDN-2 db and dg.
constexpr int VECTORS = CHANNEL_GATES ? 4 : 2;
// Tokens between fetching an input into the second-level cache and loading it.
constexpr int FETCH_AHEAD = 8;

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

struct Forward {
    Problem problem;
    const STATE* initial_state;  // (N, HV, K, V), or null for zeros
    STATE* o;                    // (tokens, HV, V)
    STATE* final_state;          // (N, HV, K, V)
    STATE* kept;                 // null, or states for the backward: (slots, heads, column groups, PART)
};

struct Backward {
    Problem problem;
    const STATE* d_o;            // (tokens, HV, V)
    const STATE* d_final_state;  // (N, HV, K, V), or null for zeros
    const STATE* kept;           // (slots, heads, column groups, PART)
    STATE* states;               // scratch: (sequences, heads, column groups, SEGMENT, PART)
    STATE* vectors;              // scratch: (sequences, heads, column groups, VECTORS, SEGMENT, ROWS * 32)
    STATE* dq;                   // sums over a block of columns: (column blocks, tokens, heads, K)
    STATE* dk;                   // likewise
    STATE* dg;                   // (column blocks, tokens, heads), GDN-2: (column blocks, tokens, heads, K)
    STATE* d_erase;              // dbeta or db, likewise
    STATE* dv;                   // (tokens, HV, V)
    STATE* dw;                   // GDN-2: (tokens, HV, V)
    STATE* dh0;                  // (N, HV, K, V)
    i64 batch_tokens;            // tokens of this launch's sequences together
};

// out (tokens, out_heads, width) = sum over column blocks and over the `group` heads that share an output head.
struct Reduce {
    const STATE* partial;        // (column blocks, batch tokens, heads, width)
    STATE* out;
    i64 first_token, batch_tokens;
    int first_head, heads, column_blocks, width, out_heads, group;
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

extern "C" __global__ void __launch_bounds__(WARPS* LANES, 1) recurrent_forward(const __grid_constant__ Forward f) {
    const Problem& p = f.problem;
    const Place place(p);
    if (!place.active()) return;
    const STATE scale = (STATE)p.scale;
    State state;
    state.load(f.initial_state, p, place);
    Token next;
    if (place.tokens > 0) {
        next.load(p, place, nullptr, 0);
        next.prepare();
    }
    for (i64 t = 0; t < place.tokens; t++) {
        if (f.kept && t % SEGMENT == 0) state.store_part(f.kept + place.kept(p.heads, t), place.lane);
        const Token now = next;
        if (t + FETCH_AHEAD < place.tokens) {
            i64 token = place.token + t + FETCH_AHEAD;
            fetch(p.q + (token * p.qk_heads + place.qk_head) * p.key_dim, p.key_dim, place.lane);
            fetch(p.k + (token * p.qk_heads + place.qk_head) * p.key_dim, p.key_dim, place.lane);
            fetch(p.v + (token * p.value_heads + place.head) * p.value_dim, p.value_dim, place.lane);
        }
        if (t + 1 < place.tokens) next.load(p, place, nullptr, t + 1);

        STATE residual[COLUMNS], u[COLUMNS], o[COLUMNS], query[ROWS];
        now.erase_from(state, residual, place.lane);
        now.strengthen(residual, u);
        state.add(now.k, u);
#pragma unroll
        for (int r = 0; r < ROWS; r++) query[r] = scale * now.q[r];
        state.transposed_times(query, o);
        STATE sum = sum_to_lanes(o, place.lane);
        int column = place.column + place.lane / (LANES / COLUMNS);
        if (place.lane % (LANES / COLUMNS) == 0 && column < p.value_dim)
            f.o[((place.token + t) * p.value_heads + place.head) * p.value_dim + column] = sum;
        next.prepare();
    }
    state.store(f.final_state, p, place);
}

// A segment's sums over the columns of a block, from those of its warps.
struct BlockSums {
    STATE dg[WARPS][SEGMENT], d_beta[WARPS][SEGMENT];  // GDN
};

// Adds up over the block's warps what each wrote of a segment, (VECTORS, SEGMENT, ROWS * 32), and writes the sums.
__device__ __forceinline__ void add_up_vectors(const Backward& b, const Place& place, i64 first, int count) {
    const Problem& p = b.problem;
    STATE* const out[4] = {b.dq, b.dk, b.d_erase, b.dg};
    int warps = min(place.warps, place.groups - place.block * place.warps);
    const STATE* parts = b.vectors + (place.scratch(p.heads) - place.warp) * (VECTORS * SEGMENT * ROWS * LANES);
#pragma unroll
    for (int vector = 0; vector < VECTORS; vector++) {
        for (int i = threadIdx.x; i < count * p.key_dim; i += blockDim.x) {
            int t = i / p.key_dim, row = i % p.key_dim;
            STATE sum = 0;
            for (int warp = 0; warp < warps; warp++)
                sum += parts[((i64)(warp * VECTORS + vector) * SEGMENT + t) * (ROWS * LANES) + row];
            i64 token = place.block * b.batch_tokens + place.batch_token + first + t;
            out[vector][(token * p.heads + place.batch_head) * p.key_dim + row] = sum;
        }
    }
}

// The same for the two scalars of GDN.
__device__ __forceinline__ void add_up_scalars(
    const Backward& b, const Place& place, const BlockSums& sums, i64 first, int count) {
    int warps = min(place.warps, place.groups - place.block * place.warps);
    for (int t = threadIdx.x; t < count; t += blockDim.x) {
        STATE dg = 0, d_beta = 0;
        for (int warp = 0; warp < warps; warp++) {
            dg += sums.dg[warp][t];
            d_beta += sums.d_beta[warp][t];
        }
        i64 token = place.block * b.batch_tokens + place.batch_token + first + t;
        b.dg[token * b.problem.heads + place.batch_head] = dg;
        b.d_erase[token * b.problem.heads + place.batch_head] = d_beta;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS* LANES, 1) recurrent_backward(const __grid_constant__ Backward b) {
    __shared__ STATE residuals[WARPS][SEGMENT][COLUMNS];
    __shared__ BlockSums sums;
    const Problem& p = b.problem;
    const Place place(p);
    const STATE scale = (STATE)p.scale;
    const int lane = place.lane;
    STATE* const states = b.states + place.scratch(p.heads) * SEGMENT * PART;
    STATE* const vectors = b.vectors + place.scratch(p.heads) * (VECTORS * SEGMENT * ROWS * LANES);
    auto keep = [&](int vector, int t, const STATE(&x)[ROWS]) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) vectors[(vector * SEGMENT + t) * (ROWS * LANES) + r * LANES + lane] = x[r];
    };

    State adjoint;
    adjoint.load(b.d_final_state, p, place);
    for (i64 first = (place.tokens - 1) / SEGMENT * SEGMENT; first >= 0 && place.tokens > 0; first -= SEGMENT) {
        const int count = (int)min((i64)SEGMENT, place.tokens - first);
        if (place.active()) {
            State state;
            state.load_part(b.kept + place.kept(p.heads, first), lane);
            Token next;
            next.load(p, place, b.d_o, first);
            next.prepare();
            for (int t = 0; t < count; t++) {
                const Token now = next;
                if (t + 1 < count) next.load(p, place, b.d_o, first + t + 1);
                STATE residual[COLUMNS], u[COLUMNS], dq[ROWS];
                now.erase_from(state, residual, lane);
                state.store_part(states + (i64)t * PART, lane);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
                    if (lane == c) residuals[place.warp][t][c] = residual[c];
                now.strengthen(residual, u);
                state.add(now.k, u);
                state.times(now.d_o, dq);
#pragma unroll
                for (int r = 0; r < ROWS; r++) dq[r] *= scale;
                keep(0, t, dq);
                next.prepare();
            }
            __syncwarp();

            for (int t = count - 1; t >= 0; t--) {
                Token now;
                now.load(p, place, b.d_o, first + t);
                state.load_part(states + (i64)t * PART, lane);
                if (t > 0) fetch_part(states + (i64)(t - 1) * PART, lane);
                now.prepare();
                STATE query[ROWS], e[ROWS], residual[COLUMNS], u[COLUMNS], du[COLUMNS], x[COLUMNS];
#pragma unroll
                for (int r = 0; r < ROWS; r++) query[r] = scale * now.q[r];
                adjoint.add(query, now.d_o);
                adjoint.transposed_times(now.k, du);
                sum_to_all(du, lane);
                now.strengthen(du, x);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) residual[c] = residuals[place.warp][t][c];
                now.strengthen(residual, u);
                now.erased(e);

                STATE dk[ROWS], de[ROWS], dg[ROWS], minus_x[COLUMNS];
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) minus_x[c] = -x[c];
                adjoint.times(u, dk);
                state.times(minus_x, de);
                adjoint.add(e, minus_x);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    dg[r] = 0;
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) dg[r] += state.at[r][c] * adjoint.at[r][c];
                    dk[r] += CHANNEL_GATES ? now.erase[CHANNEL_GATES ? r : 0] * de[r] : de[r];
                    de[r] *= now.k[r];
                }
                adjoint.decay(now.decay);

                i64 value_row = ((place.token + first + t) * p.value_heads + place.head) * p.value_dim;
                keep(1, t, dk);
                if constexpr (CHANNEL_GATES) {
                    keep(2, t, de);
                    keep(3, t, dg);
                    STATE dv[COLUMNS], dw[COLUMNS];
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
                        dv[c] = now.write[CHANNEL_GATES ? c : 0] * x[c];
                        dw[c] = now.v[c] * x[c];
                    }
                    store_columns(b.dv + value_row, dv, p, place);
                    store_columns(b.dw + value_row, dw, p, place);
                } else {
                    STATE d_beta = 0, dg_sum = 0;
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) d_beta += du[c] * residual[c];
#pragma unroll
                    for (int r = 0; r < ROWS; r++) dg_sum += dg[r];
                    dg_sum = warp_sum(dg_sum);
                    if (lane == 0) sums.dg[place.warp][t] = dg_sum;
                    if (lane == 0) sums.d_beta[place.warp][t] = d_beta;
                    store_columns(b.dv + value_row, x, p, place);
                }
            }
        }
        __syncthreads();
        add_up_vectors(b, place, first, count);
        if constexpr (!CHANNEL_GATES) add_up_scalars(b, place, sums, first, count);
        __syncthreads();
    }
    if (place.active()) adjoint.store(b.dh0, p, place);
}

// Goes on from what an earlier launch left in `out` where that had the first heads of a group, so that the order of
// the sum does not depend on how heads were split into launches.
extern "C" __global__ void __launch_bounds__(256) recurrent_reduce(const __grid_constant__ Reduce f) {
    int first_out = f.first_head / f.group;
    int outs = (f.first_head + f.heads - 1) / f.group - first_out + 1;
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= f.batch_tokens * outs * f.width) return;
    int i = (int)(at % f.width), out_head = first_out + (int)(at / f.width % outs);
    i64 token = at / f.width / outs;
    STATE* out = f.out + ((f.first_token + token) * f.out_heads + out_head) * f.width + i;
    int first = max(out_head * f.group, f.first_head), end = min((out_head + 1) * f.group, f.first_head + f.heads);
    STATE sum = first == out_head * f.group ? STATE(0) : *out;
    for (int head = first; head < end; head++)
        for (int block = 0; block < f.column_blocks; block++)
            sum += f.partial[((block * f.batch_tokens + token) * f.heads + head - f.first_head) * f.width + i];
    *out = sum;
}
